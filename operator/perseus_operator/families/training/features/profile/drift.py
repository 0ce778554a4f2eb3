"""Whether instructions still take as long as the profile says: hysteresis over typical iterations of a plan.

Typical means: no straggler, and no GPU that reports that something slows it. A profile that no longer fits is measured
again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

DRIFT: Final = 0.10
"""Share by which instructions of a stage must take longer or shorter than profiled, in every pipeline."""
DRIFT_OVER: Final = 0.05
"""Below this share they fit again; in between, nothing changes."""
DRIFT_ITERATIONS: Final = 50
"""Consecutive iterations that must agree: a hot hour must not count, another driver or another model must."""
DRIFT_REST: Final = 500
"""Iterations after a remeasurement before drift can count again; doubled with each remeasurement."""


@dataclass(frozen=True)
class Drift:
    """For how many iterations instructions have taken another time than the profile says.

    Attributes:
        iterations: consecutive ones; those in between ``DRIFT_OVER`` and ``DRIFT`` count for neither side.
        stage, pace: the stage furthest off in the latest of them, and its measured divided by its profiled time.
        rest: iterations that must pass before drift can count.
    """

    iterations: int = 0
    stage: int = 0
    pace: float = 1.0
    rest: int = 0

    @property
    def persistent(self) -> bool:
        """Whether the profile does not fit any more."""
        return self.iterations >= DRIFT_ITERATIONS

    def observe(self, paces: Mapping[int, Sequence[float]]) -> Drift:
        """Take in one more typical iteration.

        Args:
            paces: measured divided by profiled time of each stage, by pipeline (dp).
        """
        if not paces:
            return self
        if self.rest:
            return replace(self, rest=self.rest - 1)
        common = [_common(paces_of_stage) for paces_of_stage in zip(*paces.values(), strict=True)]
        stage = max(range(len(common)), key=lambda s: abs(math.log(common[s])))
        off = abs(common[stage] - 1)
        if off > DRIFT:
            return replace(self, iterations=self.iterations + 1, stage=stage, pace=common[stage])
        return replace(self, iterations=0) if off < DRIFT_OVER else self


def _common(paces: Sequence[float]) -> float:
    """By how much all pipelines are off; 1 if they do not agree on the direction."""
    low, high = min(paces), max(paces)
    return low if low > 1 else high if high < 1 else 1.0
