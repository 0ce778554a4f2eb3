"""Turn timetables into plans of measured options: never later than the deadline, and as cheap as possible.

Two facts guide this. First, timetables that satisfy the precedence form a lattice: the earlier (or the later) of two
timetables, one of them shifted, is again a timetable. So between two optimal timetables there is one that follows the
slow one until some moment and the fast one from there on, instead of being slightly slow everywhere, which measured
options cannot express. Second, the flow through an instruction says what time is worth there, so a slower option that
saves less than that leaves its time to others.
"""

from __future__ import annotations

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.search.sweeps import Curve, Mixtures, Plans, Sweeps

SHARES, QUICK_SHARES = np.array([1.0, 0.7, 0.4, 0.2, 0.0]), np.array([0.6, 0.0])
"""Slack is offered at these shares of its worth, one sweep each: first to those instructions that save most with it."""
TIE_SHARE = 0.99
"""When following a timetable, an instruction whose flow is between two corners takes the slower one; with slightly less
flow, it would leave its time to others. Slightly less than the full worth decides for the slower option.
"""


def round_plans(
    sweeps: Sweeps,
    curve: Curve,
    deadline_ticks: Floats,
    spans: list[tuple[int, int]],
    through: Floats,
    *,
    ways: tuple[bool, ...] = (False, True),
) -> Plans:
    """Return the best plans found for each deadline: rounded mixtures of two timetables of the curve.

    With both ways, mixtures of each are also swept in the direction of the other. A single way takes a sixth of the
    work, and offers slack in fewer steps.

    Args:
        sweeps: of the problem.
        curve: timetables to mix.
        deadline_ticks: float[deadlines].
        through: float[deadlines, kinds], what time is worth at each kind of row, units of flow.
        spans: for each mixture, how many samples further than the nearest the two timetables are, before and after the
            deadline; distant ones have fewer durations between two options.
        ways: False mixes early and sweeps from the start, True mixes late and sweeps from the end.
    """
    last = len(curve.makespan_ticks) - 1
    left, right = curve.around(deadline_ticks)
    tried = [(before, after, late, back) for back in ways for before, after in spans for late in ways]
    mixtures = Mixtures(
        fast=np.array([np.maximum(left - before, 0) for before, *_ in tried]),
        slow=np.array([np.minimum(right + after, last) for _, after, *_ in tried]),
        late=np.array([late for *_, late, _ in tried], dtype=np.uint8),
        backward=np.array([back for *_, back in tried], dtype=np.uint8),
    )
    return sweeps.mixed(curve, mixtures, deadline_ticks, through, tie=TIE_SHARE, shares=_shares(ways))


def work(spans: list[tuple[int, int]], ways: tuple[bool, ...]) -> int:
    """Return how many times `round_plans` sweeps over the graph for each deadline."""
    return len(spans) * len(ways) ** 2 * (len(_shares(ways)) + 2)


def _shares(ways: tuple[bool, ...]) -> Floats:
    return SHARES if len(ways) > 1 else QUICK_SHARES
