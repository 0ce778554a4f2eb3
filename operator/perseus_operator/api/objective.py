"""The objective of a PerseusJob, typed: what to choose from the time-energy frontier, or one clock for all GPUs."""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from perseus_core.units import ratio_from_percent, ratio_from_ppm
from perseus_operator.api.schema import FormerField, Rule, camel, choice, integer, nested, text
from perseus_operator.objects.formatting import exact_percent

PERCENT = r"^[0-9]{1,3}(\.[0-9]{1,4})?%$"
PERCENT_RULE = "a percentage such as 3% or 2.5%"
SIGNED_PERCENT = r"^-?[0-9]{1,3}(\.[0-9]{1,4})?%$"
WEEK_US = 7 * 24 * 3600 * 1_000_000


def signed(description: str, required: bool = True, *, ppm: str = "") -> Any:
    """Declare a signed percentage; ``ppm``: the name of the field that earlier releases wrote, see `share`."""
    rule, earlier = "a signed percentage", _in_ppm(ppm) if ppm else None
    return text(description, rule=rule, max_length=10, pattern=SIGNED_PERCENT, required=required, earlier=earlier)


def share(description: str, *, ppm: str) -> Any:
    """Declare a percentage of a status.

    Args:
        description: for the CRD.
        ppm: the field in which earlier releases wrote parts per million.
    """
    return text(description, rule=PERCENT_RULE, max_length=9, pattern=PERCENT, earlier=_in_ppm(ppm))


def _in_ppm(name: str) -> FormerField:
    """How earlier releases wrote a share."""

    def convert(value: object) -> object:
        return exact_percent(ratio_from_ppm(value)) if isinstance(value, int) else value

    description = "The same in parts per million, as earlier releases wrote it."
    bounds = {"type": "integer", "format": "int64", "minimum": -(10**9), "maximum": 10**9}
    return FormerField(name, {"description": description, **bounds}, convert)


class ObjectiveType(StrEnum):
    """What to choose from the time-energy frontier."""

    MAX_THROUGHPUT = "MaxThroughput"
    MIN_ENERGY = "MinEnergy"
    MAX_SLOWDOWN = "MaxSlowdown"
    DEADLINE = "Deadline"
    POWER_CAP = "PowerCap"
    FIXED_CLOCK = "FixedClock"


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """Either a time for each iteration, or a date by which a number of iterations must be done."""

    iteration_time_microseconds: int | None = integer(
        "Every iteration may take this long.", minimum=1, maximum=WEEK_US, required=False
    )
    finish_by: str | None = text(
        "Date and time, RFC 3339, by which `iterations` iterations must be done.",
        rule="a date and time such as 2030-01-31T18:00:00Z",
        max_length=40,
        pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$",
        string_format="date-time",
        required=False,
    )
    iterations: int | None = integer(
        "Iterations of the whole run, counted from its start.", minimum=1, maximum=1_000_000_000, required=False
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.iterationTimeMicroseconds) != has(self.finishBy)",
            "exactly one of iterationTimeMicroseconds and finishBy must be set",
            lambda d: (d.iteration_time_microseconds is not None) != (d.finish_by is not None),
        ),
        Rule(
            "has(self.finishBy) == has(self.iterations)",
            "finishBy and iterations must be set together",
            lambda d: (d.finish_by is not None) == (d.iterations is not None),
        ),
    )


def _only_for(kind: ObjectiveType, name: str) -> Rule:
    """A parameter is set if and only if the objective has its type."""
    return Rule(
        f"(self.type == '{kind}') == has(self.{camel(name)})",
        f"{camel(name)} must be set if and only if type is {kind}",
        lambda objective: (objective.type == kind) == (getattr(objective, name) is not None),
    )


@dataclass(frozen=True, kw_only=True)
class Objective:
    """Which point of the frontier the job runs at."""

    type: ObjectiveType = choice(
        "MaxThroughput: no slowdown. MinEnergy: least energy per iteration. MaxSlowdown, Deadline: least energy"
        " within that bound. PowerCap: fastest within that bound. FixedClock: one clock for all GPUs, without a plan;"
        " training processes need not mark anything, and no slowdown is promised.",
        ObjectiveType,
        default=ObjectiveType.MAX_THROUGHPUT.value,
    )
    max_slowdown: str | None = text(
        "Allowed slowdown against the fastest iteration, for type MaxSlowdown. Iterations scatter: compared are the"
        " times that 95 % of them keep.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        required=False,
    )
    deadline: Deadline | None = nested("Time bound, for type Deadline.", Deadline, required=False)
    power_cap_watts: int | None = integer(
        "Allowed average power of all GPUs of the job together, for type PowerCap.",
        minimum=1,
        maximum=1_000_000_000,
        required=False,
    )
    clock_megahertz: int | None = integer(
        "Clock of all GPUs of the job, for type FixedClock; one that they support (nvidia-smi -q -d SUPPORTED_CLOCKS).",
        minimum=1,
        maximum=100_000,
        required=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        _only_for(ObjectiveType.MAX_SLOWDOWN, "max_slowdown"),
        _only_for(ObjectiveType.DEADLINE, "deadline"),
        _only_for(ObjectiveType.POWER_CAP, "power_cap_watts"),
        _only_for(ObjectiveType.FIXED_CLOCK, "clock_megahertz"),
    )

    @property
    def max_slowdown_ratio(self) -> float | None:
        """``"3%"`` as 0.03."""
        return None if self.max_slowdown is None else ratio_from_percent(self.max_slowdown)
