"""Turn several samples of one instruction at one clock into one option that is rarely too fast.

An instruction that takes longer than its option says delays the whole pipeline, while one that is faster saves almost
nothing. Therefore times get a guard band, and every correction raises them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import SIGMA_PER_MAD, Floats

_MEDIAN_OVER_MEAN = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for a normal distribution."""
OUTLIER = 1.2
"""A sample that differs from the median of its clock by this factor was disturbed, or is not a sample of that clock.
Durations on published runs scatter by 1 to 3 %.
"""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How repeated samples are read.

    Attributes:
        guard: the time of an option is the median of its samples plus this many standard errors. With 2, the true
            median is above the option about one time in forty; 0 takes the bare median.
        repair_monotone: raise times so that no lower clock is faster than a higher one. Off by default, because the
            solver can use whatever was really measured.
    """

    guard: float = 2.0
    repair_monotone: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.guard) and self.guard >= 0):
            raise ValueError(f"guard must be a finite number of standard errors, zero or more, not {self.guard}")


def farthest(samples: Floats) -> tuple[int, float]:
    """Return the sample that is farthest from the median of its clock.

    Args:
        samples: at least one, all positive.

    Returns:
        Its position, and the larger of the two divided by the smaller.
    """
    apart = np.abs(np.log(samples / np.median(samples)))
    at = int(apart.argmax())
    return at, math.exp(float(apart[at]))


def condense(
    time_s: Sequence[Floats], energy_j: Sequence[Floats], sampling: Sampling
) -> tuple[Floats, Floats, list[str]]:
    """Return time and energy of each clock from its samples.

    The relative spread is pooled over the clocks of the table: five samples of one clock say little about it, those of
    forty clocks together much. Energy is the plain median, because an error there costs joules, not the deadline.

    Args:
        time_s: for each clock, by descending frequency, its samples in seconds.
        energy_j: the same in joules.
        sampling: how to read them.

    Returns:
        float[clocks] seconds, float[clocks] joules, and notes on what was changed.
    """
    median = np.array([np.median(samples) for samples in time_s])
    energy = np.array([np.median(samples) for samples in energy_j])
    count = np.array([samples.size for samples in time_s])
    notes: list[str] = []
    time = median
    if sampling.guard > 0:
        # Differences of consecutive samples spread √2 times as much as the samples, whatever their number and drift.
        steps = np.abs(np.concatenate([np.diff(np.log(samples)) for samples in time_s]))
        steps = steps[steps < math.log(OUTLIER)]  # an outlier is no scatter
        if steps.size:
            spread = SIGMA_PER_MAD * float(np.median(steps)) / math.sqrt(2)
            band = sampling.guard * spread * _MEDIAN_OVER_MEAN / np.sqrt(count)
            time = median * (1 + band)
            notes.append(
                f"time raised by {100 * band.min():.2g} to {100 * band.max():.2g} % "
                f"against a spread of {100 * spread:.2g} %"
            )
        else:
            notes.append("no clock has two samples that agree, so the spread is unknown and no guard band was added")
    if sampling.repair_monotone:
        repaired = np.maximum.accumulate(time)
        raised = repaired > time
        if raised.any():
            most = float(np.max(repaired / time)) - 1
            notes.append(
                f"{int(raised.sum())} of {time.size} times raised by up to {100 * most:.2g} % "
                "so that no lower clock is faster"
            )
        time = repaired
    return time, energy, notes
