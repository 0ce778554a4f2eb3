"""PowerBudget, typed: a power limit for all jobs that it selects.

It is cluster-wide, because power is limited for a site and not for a team.
"""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from zoneinfo import ZoneInfo

from perseus_operator.api.namespaces import NamespaceSelector
from perseus_operator.api.objective import PERCENT, PERCENT_RULE
from perseus_operator.api.schema import DNS_NAME, choice, integer, labels, listing, names, nested, text

MAX_JOBS = 1000
"""Shares that a status shows; all count."""


_AT: Final = r"^((Mon|Tue|Wed|Thu|Fri|Sat|Sun) )?([01][0-9]|2[0-3]):[0-5][0-9]$"


@dataclass(frozen=True, kw_only=True)
class BudgetSelector:
    """Which PerseusJobs; a job must fit all parts. Absent parts fit every job."""

    match_labels: Mapping[str, str] | None = labels(
        "Labels that the PerseusJob carries. The author of the job chooses them, so a tenant leaves the budget by a"
        " label: it is for jobs of those who keep to it. namespaces and namespaceSelector hold all others to it.",
        required=False,
    )
    namespaces: tuple[str, ...] | None = names(
        "Namespaces that it is in.", rule="a namespace", pattern=DNS_NAME, max_items=256
    )
    namespace_selector: NamespaceSelector | None = nested(
        "Labels of the namespace that it is in.", NamespaceSelector, required=False
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
class TimetableEntry:
    """Watts from a time of the day or of the week on, until the next entry."""

    at: str = text(
        "Time in UTC, each day (06:30) or on one day of the week (Sat 06:30); of two at the same moment the one with a"
        " day counts.",
        rule="a time in UTC such as 06:30 or Sat 06:30",
        max_length=9,
        pattern=_AT,
    )
    watts: int = integer("As spec.watts.", minimum=1, maximum=1_000_000_000)


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """What holds while no operator runs."""

    hold_seconds: int = integer(
        "How long GPUs stay at a clock at which they cannot draw more than their job's share, once the leases of an"
        " operator that is gone have run out; then they return to their default clocks.",
        minimum=0,
        maximum=7 * 24 * 3600,
        default=3600,
    )


class EnergyPeriod(StrEnum):
    """For how long a budget's energy is meant."""

    DAY = "Day"
    MONTH = "Month"


def _is_time_zone(name: str) -> bool:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):  # no such zone, a path that leads out, a folder
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class EnergySpec:
    """How much energy the jobs may use in a day or a month."""

    kilowatt_hours: int = integer(
        "Energy of all GPUs of all selected jobs together in each period.", minimum=1, maximum=1_000_000_000
    )
    per: EnergyPeriod = choice("The period: Day or Month, from midnight to midnight.", EnergyPeriod)
    time_zone: str = text(
        "Where that midnight is: a name of the time zone database, such as Europe/Berlin. With summer time a day has 23"
        " or 25 hours.",
        rule="a name of the time zone database such as Europe/Berlin or UTC",
        max_length=64,
        pattern=r"^[A-Za-z0-9+_-]+(/[A-Za-z0-9+_-]+)*$",
        default="UTC",
        accepts=_is_time_zone,
    )


@dataclass(frozen=True, kw_only=True)
class BudgetSpec:
    """The power limit and the jobs that share it."""

    watts: int = integer(
        "Mean power over an iteration of all GPUs of all selected jobs together; spec.timetable replaces it.",
        minimum=1,
        maximum=1_000_000_000,
    )
    timetable: tuple[TimetableEntry, ...] | None = listing(
        "Other watts at other times, as prices, carbon or the site's cooling ask for; absent: always spec.watts.",
        TimetableEntry,
        key="at",
        max_items=336,
    )
    max_step_watts_per_second: int | None = integer(
        "How fast the watts that are shared may rise or fall; absent: at once. A budget that is made, or whose status"
        " is lost, begins at its watts.",
        minimum=1,
        maximum=1_000_000_000,
        required=False,
    )
    energy: EnergySpec | None = nested(
        "Energy in a day or a month, kept by pacing: no more watts are shared than leave enough for the rest of the"
        " period, and never more than spec.watts or the timetable. Absent: no limit.",
        EnergySpec,
        required=False,
    )
    selector: BudgetSelector = nested(
        "Which PerseusJobs and ServingPools share it; absent: all.", BudgetSelector, default={}
    )
    priorities: tuple[PriorityGrant, ...] | None = listing(
        "Priority granted to namespaces; elsewhere a priority above 0 counts as 0.",
        PriorityGrant,
        key="namespace",
        max_items=256,
    )

    fallback: Fallback = nested("What holds while no operator runs.", Fallback, default={})

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
        "Slowdown of the plan that fits the share, against T_min. Of a ServingPool: how much more load it could carry.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class EnergyUse:
    """What was used in a period."""

    begin: str = text("Begin of the period.", rule="a time", max_length=32, string_format="date-time")
    measured_watt_hours: int = integer("By the GPUs' own counters.", minimum=0, maximum=10**15)
    assumed_watt_hours: int = integer(
        "Where nobody measured, at the watts that the jobs were granted: iterations that have not ended, GPUs without a"
        " counter, and the time in which no operator ran.",
        minimum=0,
        maximum=10**15,
    )


@dataclass(frozen=True, kw_only=True)
class EnergyFigures:
    """What the jobs have used of spec.energy; at most a minute old."""

    as_of: str = text("When it was so.", rule="a time", max_length=32, string_format="date-time")
    end: str = text("End of the period.", rule="a time", max_length=32, string_format="date-time")
    budget_watt_hours: int = integer("spec.energy.", minimum=0, maximum=10**15)
    used: EnergyUse = nested("In the period that goes on.", EnergyUse)
    forecast_watt_hours: int = integer(
        "What would be used by its end if the jobs went on as their objectives ask, up to spec.watts or the timetable.",
        minimum=0,
        maximum=10**15,
    )
    pace_watts: int | None = integer(
        "What may be drawn from now on, wherever spec.watts or the timetable allow as much, so that the energy lasts;"
        " absent: they allow too little to use it up.",
        minimum=0,
        maximum=10**9,
        required=False,
    )
    unmeasured_jobs: int = integer(
        "Jobs of which nothing has been measured for ten minutes.", minimum=0, maximum=1_000_000
    )
    previous: EnergyUse | None = nested("In the period before.", EnergyUse, required=False)


@dataclass(frozen=True, kw_only=True)
class BudgetFigures:
    """Everything in status but conditions and observedGeneration."""

    jobs: int = integer("Jobs that share it now.", minimum=0, maximum=1_000_000)
    watts: int | None = integer(
        "What is shared now: the watts of the timetable, or on their way there.",
        minimum=1,
        maximum=10**9,
        required=False,
    )
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
    energy: EnergyFigures | None = nested("Use of spec.energy; absent: it is not set.", EnergyFigures, required=False)
    shares: tuple[JobShare, ...] | None = listing(
        "What each job is granted; at most 1000 of them.", JobShare, key="namespace,name", max_items=MAX_JOBS
    )


class BudgetCondition(StrEnum):
    """Type of a condition of a PowerBudget."""

    ACCEPTED = "Accepted"
    KEPT = "Kept"
    """The jobs' plans draw no more than the budget, as their profiles predict it."""
    ENERGY_KEPT = "EnergyKept"
    """The jobs use no more than spec.energy in its period."""


class BudgetReason(StrEnum):
    """Why. Stable: alerts and scripts match on these."""

    ACCEPTED = "Accepted"
    SPEC_INVALID = "SpecInvalid"
    SHARED = "Shared"
    NO_JOBS = "NoJobs"
    TOO_SMALL = "BudgetTooSmall"
    POWER_UNKNOWN = "PowerUnknown"
    ENERGY_ENOUGH = "EnergyEnough"
    ENERGY_SCARCE = "EnergyScarce"
    ENERGY_PACED = "EnergyPaced"
    ENERGY_TOO_SMALL = "EnergyTooSmall"
    ENERGY_USED_UP = "EnergyUsedUp"
