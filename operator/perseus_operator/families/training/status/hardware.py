"""What the status says about a plan's grain, and what to expect of the plan on the job's GPUs."""

from __future__ import annotations

from typing import Final

from perseus_core.grain import Grain
from perseus_core.marks import MarkSource
from perseus_operator.families.training.features.bound.guard import Hold
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.objects.formatting import milliseconds, percent
from perseus_operator.solving.view import FrontierView

_WHY: Final = {
    Grain.INSTRUCTION: "a clock for each instruction saves the most",
    Grain.SEGMENT: "one clock for each part of a stage saves more than one for each instruction would",
    Grain.STAGE: "one clock for each stage saves more than changes would",
    Grain.NONE: "no plan with lower clocks keeps its time and saves energy",
}
_HELD: Final = {
    Hold.SEGMENTS: "Plans with a clock for each instruction exceeded the bound: one clock for each part of a stage.",
    Hold.STAGES: "Plans with finer clocks exceeded the bound: one clock for each stage.",
    Hold.FASTEST_PLAN: "Slower plans exceeded the bound: the fastest plan.",
}


def grain_reason(view: FrontierView, point: int, hardware: JobHardware | None, hold: Hold) -> str:
    """Say in a sentence why a plan sets clocks as finely as it does; empty: it was not rehearsed.

    Args:
        view: the frontier of the plan.
        point: of the plan.
        hardware: that it was rehearsed under.
        hold: what the guard holds the job at.
    """
    if not view.grains or hardware is None:
        return ""
    if hold in _HELD:
        return _HELD[hold]
    if hardware.marks is MarkSource.HOST:
        return "GPU times are not known, as hosts mark when they launch: clocks cannot follow single instructions."
    verb = "take" if hardware.measured else "are assumed to take"
    instructions = f" and instructions {milliseconds(view.instruction_us)}" if view.instruction_us else ""
    return f"Clock changes {verb} {milliseconds(hardware.latency.p50_us)}{instructions}: {_WHY[view.grain(point)]}."


def expected_savings(view: FrontierView, point: int) -> str | None:
    """Return a plan's expected energy against every GPU at its highest clock, as a percentage; None: not rehearsed."""
    if not view.grains or not view.highest_mj:
        return None
    return percent(1 - view.energies_mj[point] / view.highest_mj)
