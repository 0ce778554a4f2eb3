"""What a round of a sweep costs the training, before it begins: an upper bound, since no work slows down by more than
the clock falls, none by more than is allowed, and a sweep ends early where lower clocks save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from perseus_core.units import s_from_us
from perseus_operator.families.training.features.profile.sweep import MOST_FINER, Recipe
from perseus_operator.objects.formatting import percent


@dataclass(frozen=True)
class SweepCost:
    """At most this.

    Attributes:
        clocks: that are measured.
        iterations: of training, at these clocks.
        duration_s: training time that they take; None: it is not known how long an iteration takes.
        mean_slowdown, most_slowdown: by what share they are slower, on average and at the lowest clock.
    """

    clocks: int
    iterations: int
    duration_s: float | None
    mean_slowdown: float
    most_slowdown: float

    def __str__(self) -> str:
        time = "" if self.duration_s is None else f", {self.duration_s:.0f} s of training"
        return (
            f"It takes at most {self.iterations} iterations at {self.clocks} clocks{time}, slower by at most"
            f" {percent(self.mean_slowdown)} on average and {percent(self.most_slowdown)} at the lowest clock."
        )


def sweep_cost(clocks_mhz: Sequence[int], recipe: Recipe, *, finer: bool, iteration_us: float | None) -> SweepCost:
    """Return what a sweep costs at most.

    Args:
        clocks_mhz: to be measured, the highest first; at least one.
        recipe: how.
        finer: whether clocks around the best one follow (jobs without a pipeline).
        iteration_us: time of an iteration at default clocks, microseconds; None: not measured yet.
    """
    # Work that waits for memory slows down by less: then even the lowest clock may keep within what is allowed.
    slower = [min(clocks_mhz[0] / mhz, 1 + recipe.most_slowdown) for mhz in clocks_mhz]
    slower += [max(slower)] * (MOST_FINER if finer else 0)
    each = recipe.iterations + 1  # the first at a clock does not count
    time_us = None if iteration_us is None else min(iteration_us * each * sum(slower), recipe.most_us)
    return SweepCost(
        clocks=len(slower),
        iterations=each * len(slower),
        duration_s=None if time_us is None else s_from_us(time_us),
        mean_slowdown=fmean(slower) - 1,
        most_slowdown=max(slower) - 1,
    )
