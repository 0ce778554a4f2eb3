"""Rehearsal: what becomes of plans on GPUs whose clocks change late, and the plans that keep their promise there.

A plan of the solver takes what it says if every clock is in effect when its instruction begins. A `Hardware` says how
far a real job is from that. `rehearse` executes plans under it, many at a time.
"""

from perseus_solver.model.result import Grain
from perseus_solver.rehearsal.hardware import Hardware, InvalidHardware, Marks
from perseus_solver.rehearsal.outcome import Rehearsal, Rule, rehearse

__all__ = ["Grain", "Hardware", "InvalidHardware", "Marks", "Rehearsal", "Rule", "rehearse"]
