"""PowerBudget, typed: a power limit for all jobs that it selects.

It is cluster-wide, because power is limited for a site and not for a team.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perseus_operator.api.objective import PERCENT, PERCENT_RULE
from perseus_operator.api.schema import DNS_NAME, integer, labels, listing, names, nested, parse, text
from perseus_operator.errors import InvalidSpec

MAX_JOBS = 1000
"""Shares that a status shows; all count."""


@dataclass(frozen=True, kw_only=True)
class BudgetSelector:
    """Which PerseusJobs; a job must fit both. Absent parts fit every job."""

    match_labels: Mapping[str, str] | None = labels("Labels that the PerseusJob carries.", required=False)
    namespaces: tuple[str, ...] | None = names(
        "Namespaces that it is in.", rule="a namespace", pattern=DNS_NAME, max_items=256
    )


@dataclass(frozen=True, kw_only=True)
class PriorityGrant:
    """How much priority the jobs of one namespace may have."""

    namespace: str = text("The namespace.", rule="a namespace", max_length=253, pattern=DNS_NAME)
    highest: int = integer(
        "The highest spec.priority of a PerseusJob that counts there; a higher one counts as this.",
        minimum=0,
        maximum=1_000_000,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetSpec:
    """The power limit and the jobs that share it."""

    watts: int = integer(
        "Mean power over an iteration of all GPUs of all selected jobs together.", minimum=1, maximum=1_000_000_000
    )
    selector: BudgetSelector = nested("Which PerseusJobs share it; absent: all.", BudgetSelector, default={})
    priorities: tuple[PriorityGrant, ...] | None = listing(
        "Priority granted to namespaces; elsewhere a priority above 0 counts as 0.",
        PriorityGrant,
        key="namespace",
        max_items=256,
    )

    def priority(self, namespace: str, asked: int) -> int:
        """The priority that counts of a job that asks for one: users write their jobs, administrators the budget."""
        granted = (grant.highest for grant in self.priorities or () if grant.namespace == namespace)
        return min(asked, max(granted, default=0))


@dataclass(frozen=True, kw_only=True)
class JobShare:
    """What one job is granted."""

    name: str = text("The PerseusJob.", rule="a name", max_length=253)
    namespace: str = text("Its namespace.", rule="a namespace", max_length=253)
    priority: int = integer("Its spec.priority, as far as it is granted.", minimum=-1_000_000, maximum=1_000_000)
    watts: int = integer("Power granted to the job.", minimum=0, maximum=10**9)
    wanted_watts: int | None = integer(
        "Power that its own objective would draw; absent: its frontier is not known yet.",
        minimum=0,
        maximum=10**9,
        required=False,
    )
    slowdown: str | None = text(
        "Slowdown of the plan that fits the share, against T_min.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetFigures:
    """Everything in status but conditions and observedGeneration."""

    jobs: int = integer("Jobs that share it now.", minimum=0, maximum=1_000_000)
    granted_watts: int = integer("Sum of all shares.", minimum=0, maximum=10**9)
    wanted_watts: int = integer(
        "Power that the jobs would draw if their own objectives decided.", minimum=0, maximum=10**9
    )
    least_watts: int = integer("Power that the jobs draw at their most frugal plans.", minimum=0, maximum=10**9)
    unsteered_watts: int = integer(
        "Drawn by selected jobs whose clocks are not set, in mode Recommend, say; taken from the budget first.",
        minimum=0,
        maximum=10**9,
    )
    milli_gpus_per_kilowatt: int = integer(
        "Marginal value: throughput that one more kilowatt would bring, in thousandths of a GPU at full speed.",
        minimum=0,
        maximum=10**12,
    )
    shares: tuple[JobShare, ...] | None = listing(
        "What each job is granted; at most 1000 of them.", JobShare, key="namespace,name", max_items=MAX_JOBS
    )


class BudgetCondition(StrEnum):
    """Type of a condition of a PowerBudget."""

    ACCEPTED = "Accepted"
    KEPT = "Kept"
    """The jobs' plans draw no more than the budget, as their profiles predict it."""


class BudgetReason(StrEnum):
    """Why. Stable: alerts and scripts match on these."""

    ACCEPTED = "Accepted"
    SPEC_INVALID = "SpecInvalid"
    SHARED = "Shared"
    NO_JOBS = "NoJobs"
    TOO_SMALL = "BudgetTooSmall"
    POWER_UNKNOWN = "PowerUnknown"


def parse_budget(raw: Any) -> BudgetSpec:
    """Parse the spec of a PowerBudget.

    Args:
        raw: ``spec`` as the API server sends it; None: absent.

    Returns:
        The spec with all defaults.

    Raises:
        InvalidSpec: one line, ``spec.field: rule``.
    """
    if raw is None:
        raise InvalidSpec("spec: is required")
    return parse(BudgetSpec, raw, "spec")
