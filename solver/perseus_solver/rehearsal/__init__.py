"""Rehearsal: what becomes of plans on GPUs whose clocks change late, and the plans that keep their promise there.

A plan of the solver takes what it says if every clock is in effect when its instruction begins. A `Hardware` says how
far a real job is from that. `rehearse` executes plans under it, many at a time.
"""

from perseus_core.grain import Grain
from perseus_core.hardware import Hardware
from perseus_core.marks import MarkSource
from perseus_solver.rehearsal.deployment import DEFAULT_CONFIDENCE, deployable_frontier, ideal_point
from perseus_solver.rehearsal.hardware import InvalidHardware, hardware_from_json
from perseus_solver.rehearsal.losses import Loss, LossCause, explain_losses
from perseus_solver.rehearsal.outcome import Rehearsal, Rule, rehearse, rehearse_fastest

__all__ = [
    "DEFAULT_CONFIDENCE",
    "Grain",
    "Hardware",
    "InvalidHardware",
    "Loss",
    "LossCause",
    "MarkSource",
    "Rehearsal",
    "Rule",
    "deployable_frontier",
    "explain_losses",
    "hardware_from_json",
    "ideal_point",
    "rehearse",
    "rehearse_fastest",
]
