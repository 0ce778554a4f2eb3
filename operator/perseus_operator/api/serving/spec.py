"""The spec of a ServingPool, typed: which replicas, what their requests were promised, and what may be done."""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from perseus_core.serving import ServingLimits
from perseus_core.units import ratio_from_percent
from perseus_operator.api.job import Mode
from perseus_operator.api.schema import DNS_NAME, Rule, choice, flag, integer, labels, nested, text
from perseus_operator.api.workload import Reference, Selector, ServerKind, Workload

DURATION: Final = r"^[0-9]{1,4}(\.[0-9]{1,3})?(ms|s)$"
DURATION_RULE: Final = "a duration such as 50ms or 1.5s"
_SHORTEST_S, _LONGEST_S = 0.001, 3600.0
_GROUPS: Final[Mapping[ServerKind, str]] = {
    ServerKind.DEPLOYMENT: "apps/v1",
    ServerKind.STATEFUL_SET: "apps/v1",
    ServerKind.LEADER_WORKER_SET: "leaderworkerset.x-k8s.io/v1",
}


def seconds(duration: str) -> float:
    """Return a duration in seconds.

    >>> seconds("50ms"), seconds("1.5s")
    (0.05, 1.5)
    """
    number, unit = re.fullmatch(r"([0-9.]+)(ms|s)", duration).groups()  # type: ignore[union-attr]
    return float(number) / (1000.0 if unit == "ms" else 1.0)


def duration(value_s: float) -> str:
    """Return seconds as a duration, rounded up: in milliseconds below one second.

    >>> duration(0.0312), duration(1.5)
    ('31.2ms', '1.5s')
    """
    tenths = math.ceil(10_000 * value_s - 1e-6)
    return f"{tenths / 10:g}ms" if tenths < 10_000 else f"{math.ceil(100 * value_s - 1e-6) / 100:.6g}s"


@dataclass(frozen=True, kw_only=True)
class Server:
    """A workload in the namespace of the ServingPool."""

    api_version: str = text(
        "Its API group and version: apps/v1 or leaderworkerset.x-k8s.io/v1.",
        rule="an API group and version such as apps/v1",
        max_length=64,
        pattern=r"^[a-z0-9.-]+/v[0-9][a-z0-9]*$",
    )
    kind: ServerKind = choice("Its kind.", ServerKind)
    name: str = text("Its name.", rule="the name of a workload", max_length=253, pattern=DNS_NAME)
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.apiVersion == (self.kind == 'LeaderWorkerSet' ? 'leaderworkerset.x-k8s.io/v1' : 'apps/v1')",
            "apiVersion must be apps/v1 for a Deployment or a StatefulSet, leaderworkerset.x-k8s.io/v1 for a"
            " LeaderWorkerSet",
            lambda server: server.api_version == _GROUPS[server.kind],
        ),
    )


@dataclass(frozen=True, kw_only=True)
class PodSelector:
    """Which pods."""

    match_labels: Mapping[str, str] = labels("Labels that a pod of the pool carries.")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What requests were promised of one time."""

    limit: str = text(
        "The longest that it may take, from 1ms to 3600s.", rule=DURATION_RULE, max_length=11, pattern=DURATION
    )
    attainment: str = text(
        "Share of the requests that shall keep it.",
        rule="a percentage from 50% to 99.99%",
        max_length=6,
        pattern=r"^[5-9][0-9](\.[0-9]{1,2})?%$",
        default="99%",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "duration(self.limit) >= duration('1ms') && duration(self.limit) <= duration('3600s')",
            "limit must be from 1ms to 3600s",
            lambda limit: _SHORTEST_S <= seconds(limit.limit) <= _LONGEST_S,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ServingObjective:
    """What requests were promised."""

    time_to_first_token: Limit | None = nested(
        "From the arrival of a request to its first token; absent: no limit.", Limit, required=False
    )
    time_per_output_token: Limit | None = nested(
        "Mean time between the tokens of one request, after its first; absent: no limit.", Limit, required=False
    )
    max_slowdown: str | None = text(
        "In place of limits: by how much longer than at default clocks both times may be that 99 % of the requests"
        " keep, measured at the pool's own replicas.",
        rule="a percentage from 1% to 100%",
        max_length=6,
        pattern=r"^(100|[1-9][0-9]?(\.[0-9]{1,2})?)%$",
        required=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.timeToFirstToken) || !has(self.timePerOutputToken)"
            " || self.timeToFirstToken.attainment == self.timePerOutputToken.attainment",
            "timeToFirstToken and timePerOutputToken must have the same attainment: the clock of a replica is one, and"
            " is trimmed to one share",
            lambda o: (
                o.time_to_first_token is None
                or o.time_per_output_token is None
                or o.time_to_first_token.attainment == o.time_per_output_token.attainment
            ),
        ),
        Rule(
            "!has(self.maxSlowdown) || (!has(self.timeToFirstToken) && !has(self.timePerOutputToken))",
            "maxSlowdown must not be set together with timeToFirstToken or timePerOutputToken",
            lambda o: o.max_slowdown is None or (o.time_to_first_token is None and o.time_per_output_token is None),
        ),
    )

    @property
    def limits(self) -> ServingLimits | None:
        """As agents are sent it; None: there is no limit, or none before there is a baseline."""
        first, token = self.time_to_first_token, self.time_per_output_token
        either = token or first
        if either is None:
            return None
        return ServingLimits(
            None if first is None else seconds(first.limit),
            None if token is None else seconds(token.limit),
            ratio_from_percent(either.attainment),
        )


class Role(StrEnum):
    """What an engine does of each request."""

    AUTO = "Auto"
    """What the engine's own configuration says."""
    MIXED = "Mixed"
    PREFILL = "Prefill"
    """Its prompt alone: another engine generates the tokens."""
    DECODE = "Decode"
    """Its tokens alone: another engine has computed the prompt."""


class Scaling(StrEnum):
    """What is said of the number of replicas. Nothing is ever written."""

    ADVISE = "Advise"
    OFF = "Off"


@dataclass(frozen=True, kw_only=True)
class ClockRange:
    """Which clocks may be set."""

    minimum_megahertz: int = integer("No replica runs at a lower clock.", minimum=1, maximum=10_000, default=600)


@dataclass(frozen=True, kw_only=True)
class MetricsPage:
    """Where an engine shows its metrics that does not say by itself what it does."""

    port: int = integer("Of the pod.", minimum=1, maximum=65_535, default=8_000)
    path: str = text(
        "Of the page.",
        rule="a path such as /metrics",
        max_length=128,
        pattern=r"^/[-._~/a-zA-Z0-9]*$",
        default="/metrics",
    )


@dataclass(frozen=True, kw_only=True)
class PoolSpec:
    """What the user wants."""

    workload: Server | None = nested(
        "Which pods belong to the pool: those of this workload, among those that carry the label perseus.energy/job"
        " with the pool's name; absent: all of these, or those that podSelector says.",
        Server,
        required=False,
    )
    pod_selector: PodSelector | None = nested(
        "Which pods belong to the pool: those that carry these labels, too.", PodSelector, required=False
    )
    engine: MetricsPage = nested(
        "Where engines without the plugin show their metrics: a process beside the agent reads that page.",
        MetricsPage,
        default={},
    )
    objective: ServingObjective = nested(
        "What requests were promised; without any limit no clock is set, and limits are proposed in the status.",
        ServingObjective,
        default={},
    )
    role: Role = choice(
        "Mixed: its engines compute prompts and generate tokens. Prefill: prompts alone, so only timeToFirstToken can"
        " have a limit. Decode: tokens alone, so only timePerOutputToken can, and no clock is raised for a prompt."
        " Auto: as the engines' own configuration says, or else Mixed; a limit of the other time does not hold.",
        Role,
        default=Role.AUTO.value,
    )
    mode: Mode = choice(
        "Enforce: learn on one replica, then let the clocks of all follow their load. Canary: of one replica alone."
        " Recommend: report what would be done as far as it is known, set no clocks. Observe: set no clocks.",
        Mode,
        default=Mode.OBSERVE.value,
    )
    clocks: ClockRange = nested("Which clocks may be set.", ClockRange, default={})
    scaling: Scaling = choice(
        "Advise: say in the status, and to KEDA or Prometheus if they ask, how many replicas the load needs at their"
        " highest clock; replicas are never written. Off: say nothing.",
        Scaling,
        default=Scaling.ADVISE.value,
    )
    suspend: bool = flag("Do not manage the pool: its GPUs run at default clocks and nothing is measured.")
    priority: int = integer(
        "Among the members of a PowerBudget, as far as it grants priority to the namespace.",
        minimum=-1_000_000,
        maximum=1_000_000,
        default=0,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.workload) || !has(self.podSelector)",
            "workload and podSelector must not both be set",
            lambda spec: spec.workload is None or spec.pod_selector is None,
        ),
        Rule(
            "self.role != 'Prefill' || !has(self.objective.timePerOutputToken)",
            "objective.timePerOutputToken must not be set where role is Prefill: its engines generate no tokens",
            lambda spec: spec.role is not Role.PREFILL or spec.objective.time_per_output_token is None,
        ),
        Rule(
            "self.role != 'Decode' || !has(self.objective.timeToFirstToken)",
            "objective.timeToFirstToken must not be set where role is Decode: its engines compute no prompts",
            lambda spec: spec.role is not Role.DECODE or spec.objective.time_to_first_token is None,
        ),
    )

    @property
    def pods(self) -> Workload | None:
        """See ``WorkSpec``."""
        if self.workload is not None:
            return Workload(reference=Reference(kind=self.workload.kind, name=self.workload.name))
        chosen = self.pod_selector
        return None if chosen is None else Workload(selector=Selector(match_labels=chosen.match_labels))

    @property
    def ttl_seconds_after_finished(self) -> int | None:
        """A pool has no end."""
        return None

    @property
    def limits(self) -> ServingLimits | None:
        """What requests were promised; None: nothing."""
        return self.objective.limits

    @property
    def max_slowdown_ratio(self) -> float | None:
        """``"10%"`` as 0.1; None: limits are absolute."""
        slowdown = self.objective.max_slowdown
        return None if slowdown is None else ratio_from_percent(slowdown)

    @property
    def sets_clocks(self) -> bool:
        """Whether clocks may be set: not without a limit that they must keep."""
        return self.mode.sets_clocks and self.limited

    @property
    def limited(self) -> bool:
        """Whether requests were promised anything."""
        return self.limits is not None or self.objective.max_slowdown is not None
