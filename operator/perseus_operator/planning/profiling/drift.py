"""Whether instructions still take what the profile says: hysteresis over iterations of a plan. Pure.

Fed by ``profiler`` with typical iterations alone: no straggler, no GPU that says it is slowed. A profile that no longer
fits is measured anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

DRIFT: Final = 0.10
"""Share by which instructions of a stage must take longer or shorter than profiled, in every pipeline."""
DRIFT_OVER: Final = 0.05
"""Below this they fit again; in between, what was said last holds."""
DRIFT_ITERATIONS: Final = 50
"""Consecutive iterations that must agree: weather does not count, another driver or another model does."""
DRIFT_REST: Final = 500
"""Iterations after a profile was measured anew before the next time, doubled with each."""


@dataclass(frozen=True)
class Drift:
    """How long instructions have not taken what the profile says.

    Attributes:
        iterations: consecutive ones; those in between ``DRIFT_OVER`` and ``DRIFT`` count for neither side.
        stage, pace: the furthest off in the latest of them, and how many times slower than profiled it is.
        rest: iterations that must pass before anything is said.
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
        """One more typical iteration: how many times slower than profiled each stage of each pipeline was."""
        if not paces:
            return self
        if self.rest:
            return replace(self, rest=self.rest - 1)
        common = [_common(own) for own in zip(*paces.values(), strict=True)]
        stage = max(range(len(common)), key=lambda s: abs(math.log(common[s])))
        off = abs(common[stage] - 1)
        if off > DRIFT:
            return replace(self, iterations=self.iterations + 1, stage=stage, pace=common[stage])
        return replace(self, iterations=0) if off < DRIFT_OVER else self


def _common(paces: Sequence[float]) -> float:
    """By how much all pipelines are off; 1 if they do not agree on the direction."""
    low, high = min(paces), max(paces)
    return low if low > 1 else high if high < 1 else 1.0
