"""The part of a status about power: the share of a PowerBudget, what a job or pool draws, and power smoothing."""

# ruff: noqa: RUF009  # the calls make dataclass fields

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_operator.api.objective import PERCENT, PERCENT_RULE, share
from perseus_operator.api.schema import integer, listing, nested, text

MAX_SPEEDS: Final = 32
"""Plans of a job that count where another replica shares its budget: more would hardly change the shares."""


@dataclass(frozen=True, kw_only=True)
class SpeedStatus:
    """What speed a job reaches with how many watts."""

    watts: int = integer("Mean power of all GPUs of the job.", minimum=0, maximum=10**9)
    speed: str = share("T_min over the iteration time.", ppm="speed_parts_per_million")


@dataclass(frozen=True, kw_only=True)
class MeterStatus:
    """What was measured of a job's energy since an operator serves it."""

    joules: int = integer("Energy of its GPUs, by their counters.", minimum=0, maximum=10**18)
    gpu_seconds: int = integer("GPU time that this is the energy of.", minimum=0, maximum=10**15)
    gpus: int = integer("GPUs that agents found for it now.", minimum=0, maximum=10**6)


@dataclass(frozen=True, kw_only=True)
class DrawStatus:
    """What a job draws, for the replica of the operator that shares the budget."""

    held_watts: int | None = integer(
        "What the GPUs that it holds can draw by their power limits; absent: not known yet.",
        minimum=0,
        maximum=10**9,
        required=False,
    )
    unsteered_watts: int | None = integer(
        "Drawn whatever it is granted, as its clocks are not set; absent: they are, or it is not known.",
        minimum=0,
        maximum=10**9,
        required=False,
    )
    gpus: int | None = integer("GPUs that count.", minimum=0, maximum=10**6, required=False)
    speeds: tuple[SpeedStatus, ...] | None = listing(
        "Plans from the least power to that of its own objective; absent: its frontier is not known yet.",
        SpeedStatus,
        key="watts",
        max_items=MAX_SPEEDS,
    )
    meter: MeterStatus | None = nested(
        "What was measured of its energy; absent: no PowerBudget that selects it has spec.energy.",
        MeterStatus,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class PowerSmoothingStatus:
    """GPUs whose driver smooths their power (NVML): they draw a floor whatever the clock."""

    gpus: int = integer("So many.", minimum=1, maximum=10**6)
    floor_watts: int = integer("What they are kept at together while a load ramps down.", minimum=0, maximum=10**9)
    secondary_floor_watts: int | None = integer(
        "What they are kept at together while idle, by delayed smoothing; absent: there is none.",
        minimum=1,
        maximum=10**9,
        required=False,
    )


@dataclass(frozen=True, kw_only=True)
class ShareStatus:
    """What the strictest PowerBudget that selects the job grants it."""

    name: str = text("The PowerBudget.", rule="a name", max_length=253)
    watts: int | None = integer(
        "Mean power of all GPUs of the job; absent: not granted yet.", minimum=0, maximum=10**9, required=False
    )
    slowdown: str | None = text(
        "By how much the plan in force takes longer than the one that the objective asks for, because the share grants"
        " no more; absent: the share does not limit the job. Of a ServingPool: how much more load it could carry.",
        rule=PERCENT_RULE,
        max_length=9,
        pattern=PERCENT,
        required=False,
    )
    draw: DrawStatus | None = nested(
        "What the job draws; present if another replica of the operator shares the budget.", DrawStatus, required=False
    )
