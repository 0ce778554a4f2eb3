"""How long the requests of a pool were: counted by pairs of lengths, those of a day ago half.

What one pod says is added to what the others of its pool say, and to nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perseus_core.lengths import UNKNOWN, lengths_at
from perseus_operator.nodes.engines import EngineWindow
from perseus_solver.serving.planner import SeenClass, cells_of, classes_of

FEWEST: Final = 100
"""Requests before anything is said of them."""
_HALVED_S: Final = 86_400.0
_FADES_S: Final = 3_600.0
"""Between two times that counts are lowered."""
_NOTHING: Final = 0.01


class Lengths:
    """The lengths of one pool's requests."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._faded_s: float | None = None

    def window_seen(self, window: EngineWindow, wall_s: float) -> None:
        """A replica did this until now."""
        if self._faded_s is None or wall_s < self._faded_s:
            self._faded_s = wall_s
        elif wall_s >= self._faded_s + _FADES_S:
            kept = 0.5 ** ((wall_s - self._faded_s) / _HALVED_S)
            self._counts = {place: kept * n for place, n in self._counts.items() if kept * n > _NOTHING}
            self._faded_s = wall_s
        for place, count in window.lengths.items():
            self._counts[place] = self._counts.get(place, 0.0) + count

    @property
    def counts(self) -> Mapping[int, int]:
        """Requests at each place of ``perseus_core.lengths``."""
        return {place: round(count) for place, count in self._counts.items() if count >= 0.5}

    @property
    def requests(self) -> int:
        """That are known by their prompt."""
        return round(sum(count for place, count in self._counts.items() if lengths_at(place)[0] != UNKNOWN))

    @property
    def known(self) -> bool:
        """Whether enough prompts and answers were counted to say something."""
        answers = sum(count for place, count in self._counts.items() if lengths_at(place)[1] != UNKNOWN)
        return min(self.requests, answers) >= FEWEST

    def classes(self) -> tuple[tuple[SeenClass, ...], bool]:
        """Return the classes of requests, and whether they were counted together; only where they are known."""
        cells, together = cells_of(self.counts)
        return classes_of(cells), together
