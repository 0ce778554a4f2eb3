"""Rehearsal: what becomes of plans on GPUs whose clocks change late, and the plans that keep their promise there.

A plan of the solver takes what it says if every clock is in effect when its instruction begins. A `Hardware` says how
far a real job is from that, and a `Scatter` how much its instructions scatter. `rehearse` executes plans under them,
many at a time; `plan_robustly` knows scatter alone.
"""

from perseus_core.grain import Grain
from perseus_core.hardware import Hardware
from perseus_core.marks import MarkSource
from perseus_solver.rehearsal.deployment import DEFAULT_CONFIDENCE, deployable_frontier, ideal_point
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.hardware import InvalidHardware, hardware_from_json
from perseus_solver.rehearsal.losses import Loss, LossCause, explain_losses
from perseus_solver.rehearsal.outcome import Rehearsal, Rule, rehearse, rehearse_fastest
from perseus_solver.rehearsal.robust import RobustPlan, plan_robustly
from perseus_solver.rehearsal.scatter import Scatter

__all__ = [
    "DEFAULT_CONFIDENCE",
    "Executor",
    "Grain",
    "Hardware",
    "InvalidHardware",
    "Loss",
    "LossCause",
    "MarkSource",
    "Rehearsal",
    "RobustPlan",
    "Rule",
    "Scatter",
    "deployable_frontier",
    "explain_losses",
    "hardware_from_json",
    "ideal_point",
    "plan_robustly",
    "rehearse",
    "rehearse_fastest",
]
