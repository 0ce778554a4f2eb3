"""The gap that is deployed: a job runs the last plan of a frontier before its deadline, not one made for the deadline.

The gap of a plan at its own time is smaller, because no plan ends exactly at most deadlines. Up to the time of least
energy, the energy of the iteration counts. Later plans are for pipelines that wait for a straggler, so there the
waiting counts, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats
from perseus_solver.model.result import Frontier


@dataclass(frozen=True, slots=True)
class DeployedGap:
    """The gap over all deadlines, as shares.

    Attributes:
        worst, mean: for a job, over all deadlines from T_min to least energy, each deadline weighing the same.
        straggler_worst: for a pipeline that waits for a straggler, over all times from least energy to T*.
    """

    worst: float
    mean: float
    straggler_worst: float

    @classmethod
    def of(cls, frontier: Frontier) -> DeployedGap:
        """Measure a frontier. The worst gap is exact; the mean takes the bound as straight between two plans.

        The bound is convex, so it is never above those straight lines, and the mean is never below the true one by more
        than the bound's bend between two plans.
        """
        time_s, energy_j, bound_j = frontier.time_s, frontier.energy_j, frontier.energy_lower_bound_j
        least = frontier.least_energy
        steps = step_gaps(time_s, energy_j, bound_j, frontier.blocking_power_w * frontier.stages)
        gaps = energy_j / bound_j - 1.0
        if not least:
            return cls(float(gaps[0]), float(gaps[0]), float(steps.max()))
        before, width_s = slice(0, least), np.diff(time_s[: least + 1])
        ratio = bound_j[1 : least + 1] / bound_j[before] - 1.0
        # The mean of 1/b over a straight b is log(b′/b) / (b′ − b).
        mean_ratio = np.divide(np.log1p(ratio), ratio, out=np.ones(least), where=ratio != 0)
        gap = energy_j[before] / bound_j[before] * mean_ratio - 1.0
        return cls(
            worst=float(max(steps[before].max(), gaps[least])),
            mean=float(np.dot(gap, width_s) / width_s.sum()),
            straggler_worst=float(steps[least:].max()),
        )


def step_gaps(time_s: Floats, energy_j: Floats, bound_j: Floats, waiting_w: float) -> Floats:
    """Return the gap of each plan just before the next one begins; of the last plan, at its own time.

    Args:
        time_s, energy_j, bound_j: float[plans], by increasing time.
        waiting_w: what all stages take while they wait, watts.

    Returns:
        float[plans], shares.
    """
    after = np.minimum(np.arange(len(time_s)) + 1, len(time_s) - 1)
    late_s = waiting_s(time_s, energy_j)
    gaps: Floats = (energy_j + waiting_w * (late_s[after] - late_s)) / bound_j[after] - 1.0
    return gaps


def waiting_s(time_s: Floats, energy_j: Floats) -> Floats:
    """Return how many seconds after least energy each plan ends; only in these does waiting count."""
    late_s: Floats = np.maximum(time_s - time_s[int(energy_j.argmin())], 0.0)
    return late_s
