"""Measurements that no GPU can have made: nearly always a wrong unit, which no other check notices.

Ratios of energy survive a wrong unit, but the power of a waiting GPU is given apart from them, so plans would be wrong
without any sign of it.
"""

from __future__ import annotations

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProblem
from perseus_solver.model.problem import Problem

LEAST_W, MOST_W = 25.0, 2_500.0
"""Of one computing GPU at its highest clock. The smallest GPUs of data centres take 30 to 70 W, the largest announced
1,800 W.
"""
IMPOSSIBLE = 10.0
"""Beyond these powers by this factor, nothing but a wrong unit explains the figures."""


def check_units(problem: Problem) -> tuple[str, ...]:
    """Compare the powers that the measurements imply with those of GPUs.

    Args:
        problem: the problem, of measured GPUs.

    Returns:
        What is doubtful, one sentence each, with the likely cause.

    Raises:
        InvalidProblem: no GPU has such powers; the message has the power and the likely cause.
    """
    computing = [options for options in problem.options if options.kind is not InstructionKind.CONSTANT]
    power_w = np.array([float(options.energy_j[0] / options.time_s[0]) for options in computing])
    if not power_w.size:
        return ()
    typical_w, waiting_w = float(np.median(power_w)), problem.blocking_power_w
    doubts = []
    if typical_w > MOST_W:
        cause = (
            "energy in mJ instead of J, or time in another unit than s"
            if typical_w > MOST_W * IMPOSSIBLE
            else "energy of several GPUs added up; profile and blocking power are of one GPU"
        )
        doubts.append(f"instructions take {_watts(typical_w)} a GPU at the highest clock; likely cause: {cause}")
    if typical_w < LEAST_W:
        cause = (
            "time in ms instead of s, or energy in kJ instead of J"
            if typical_w < LEAST_W / IMPOSSIBLE
            else "energy above idle instead of all energy, or the energy of another span than the time's"
        )
        doubts.append(f"instructions take {_watts(typical_w)} a GPU at the highest clock; likely cause: {cause}")
    above = waiting_w > power_w
    if above.any():
        cause = "the unit of the blocking power (W of one GPU), or energy or time in the profile"
        hottest_w = float(power_w.max())
        doubts.append(
            f"a GPU that waits takes {_watts(waiting_w)}, more than one that computes at the highest clock "
            f"({_watts(float(power_w[above].min()))} and more in {int(above.sum())} of {above.size} kinds of "
            f"instructions); likely cause: {cause}"
        )
        if waiting_w > hottest_w:
            raise InvalidProblem(doubts[-1])
    if doubts and not LEAST_W / IMPOSSIBLE <= typical_w <= MOST_W * IMPOSSIBLE:
        raise InvalidProblem(doubts[0])
    return tuple(doubts)


def _watts(power_w: float) -> str:
    return f"{power_w / 1000:.4g} kW" if power_w >= 1_000 else f"{power_w:.3g} W"
