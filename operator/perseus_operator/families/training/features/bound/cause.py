"""Why iterations exceeded their bound, by what agents reported of the same iterations.

Agents reckon how long clocks were below the planned ones because changes came late, and that explains slow iterations:
marks lead the GPU, or changes take long. Otherwise a power limit may have held clocks below what was asked for. Without
either, the clocks are not the cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from perseus_core.evidence import summarise
from perseus_core.marks import MarkSource
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.objects.formatting import megahertz, milliseconds, small_percent

BELOW: Final = 0.005
"""Share of the computing time below the planned clock from which on it explains an iteration that is 1 % too slow: at
half the clock, this share costs as much as half of the excess."""


class ExcessCause(StrEnum):
    """What kept a plan from its time."""

    POWER_LIMIT = "PowerLimit"
    EARLY_MARKS = "EarlyMarks"
    SLOW_CLOCK_CHANGES = "SlowClockChanges"
    GPU_TIMES_UNKNOWN = "GpuTimesUnknown"
    UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Finding:
    """A cause, and the evidence in a clause."""

    cause: ExcessCause
    evidence: str


def why_slow(iterations: Iterable[JobIteration], hardware: JobHardware | None) -> Finding:
    """Find why iterations took too long.

    Args:
        iterations: that exceeded the bound.
        hardware: of the job, as far as it is known.
    """
    evidence = summarise(iteration.evidence for iteration in iterations)
    below = evidence.below_share
    late = below is not None and below >= BELOW
    share = f", and {small_percent(below)} of the computing time ran below the planned clock" if below else ""
    lead_us, latency_us = evidence.lead_us or 0, hardware.latency.p50_us if hardware is not None else 0
    if late and evidence.marks is not MarkSource.GPU and lead_us > latency_us:
        return Finding(ExcessCause.EARLY_MARKS, f"marks lead the GPU by {milliseconds(lead_us)}{share}")
    if late and hardware is not None:
        verb = "take" if hardware.measured else "are assumed to take"
        return Finding(ExcessCause.SLOW_CLOCK_CHANGES, f"clock changes {verb} {milliseconds(latency_us)}{share}")
    if evidence.limited_mhz is not None:
        return Finding(ExcessCause.POWER_LIMIT, f"the power limit holds clocks at {megahertz(evidence.limited_mhz)}")
    if evidence.marks in {MarkSource.HOST, None}:
        return Finding(ExcessCause.GPU_TIMES_UNKNOWN, "GPU times are not known")
    return Finding(ExcessCause.UNKNOWN, "clocks followed the plan, so something else slows the iterations")
