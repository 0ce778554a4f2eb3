"""One verified plan with its bound, and what may be expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from perseus_core.grain import Grain

Frequencies = npt.NDArray[np.uint16]

OPTIMAL_GAP = 1e-9
"""A certified gap below this is rounding of float64 sums: the plan is optimal."""
DEFAULT_GAP = 3e-3
"""The gap that the search aims for. A plan with a larger one reached the limit of the search."""


class Status(StrEnum):
    """How good a plan is proven to be.

    Attributes:
        OPTIMAL: no plan that ends as early takes less energy.
        WITHIN_GAP: the certified gap is within the one aimed for.
        LIMIT_REACHED: the search ended with a larger gap; the plan is feasible.
        INFEASIBLE: no plan is this fast.
    """

    OPTIMAL = "optimal"
    WITHIN_GAP = "within_gap"
    LIMIT_REACHED = "limit_reached"
    INFEASIBLE = "infeasible"


def status_of(gap: float, allowed: float = DEFAULT_GAP) -> Status:
    """Return the status of a feasible plan.

    Args:
        gap: its certified gap, a share.
        allowed: the gap aimed for, a share.
    """
    if gap <= OPTIMAL_GAP:
        return Status.OPTIMAL
    return Status.WITHIN_GAP if gap <= allowed else Status.LIMIT_REACHED


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one plan is expected to do on real GPUs.

    Attributes:
        grain: how finely it sets clocks.
        confidence: share of the iterations that take no longer than the point's ``iteration_time_s``.
        p50_s: median iteration time, seconds.
        ideal_time_s, ideal_energy_j: what the plan would take if every clock were in effect at once.
        below_share, above_share: shares of the computing time below and above the planned clock.
    """

    grain: Grain
    confidence: float
    p50_s: float
    ideal_time_s: float
    ideal_energy_j: float
    below_share: float
    above_share: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Point:
    """One plan, with its figures and its proven bound.

    Times and energies are exact where clocks change at once. A plan that was rehearsed has times that are kept with a
    confidence and expected energies instead, and an `Expectation`.

    Attributes:
        iteration_time_s: seconds, simulated from the profile.
        energy_j: joules of an iteration: Σ e + blocking power × waiting time of all stages.
        energy_lower_bound_j: no plan that ends by ``iteration_time_s`` takes less; proven by a dual flow. In the
            straggler part of a frontier, waiting until then counts.
        status: how good the plan is proven to be.
        frequencies_mhz: uint16[n], stage by stage in execution order; 0 for constant-time instructions.
        clock_changes: clock changes in one iteration of a steady run, over all stages. The change from the last
            instruction to the first of the next iteration counts.
        expectation: what is expected of the plan on real GPUs; None: it was not rehearsed.
    """

    iteration_time_s: float
    energy_j: float
    energy_lower_bound_j: float
    status: Status
    frequencies_mhz: Frequencies
    clock_changes: int
    expectation: Expectation | None = None

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: energy divided by bound, minus one."""
        return self.energy_j / self.energy_lower_bound_j - 1.0

    def __repr__(self) -> str:
        return (
            f"Point({self.iteration_time_s:.6g} s, {self.energy_j:.6g} J, gap {100 * self.gap:.3g} %, {self.status}, "
            f"{self.clock_changes} clock changes)"
        )
