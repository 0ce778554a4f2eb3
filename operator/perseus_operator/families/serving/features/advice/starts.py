"""How long a replica takes to start: from the creation of its pod to the first word of its engine, measured.

What a cluster needs to find a node, pull an image and read weights is all in it. Pods that were there before this
operator are not counted, and neither is a pod twice. The median of the latest counts: one that waited for a node says
little of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from datetime import datetime
from statistics import median
from typing import Final

from perseus_operator.objects.values import Pod

UNMEASURED_S: Final = 300.0
"""Before one was seen: weights of 140 GB at half a gigabyte a second."""
SHORTEST_S: Final = 30.0
LONGEST_S: Final = 900.0
"""Whatever was measured: a clock that is wrong, or a pod that waited for hours, must not decide the advice."""
_LATEST: Final = 9


class Starts:
    """The starts of the replicas of one engine."""

    def __init__(self) -> None:
        self.measured_s: float | None = None
        """The median; None: none was seen."""
        self._latest = deque[float](maxlen=_LATEST)
        self._counted = set[str]()
        """UIDs of pods."""
        self._since_s: float | None = None
        """Pods that were created before are not counted; None: nothing was looked at yet."""

    def restored(self, start_s: float) -> None:
        """An earlier operator has measured this: it holds until starts are seen again."""
        self.measured_s = min(LONGEST_S, max(SHORTEST_S, start_s))

    def looked(self, pods: Collection[Pod], speaking: Collection[str], wall_s: float) -> None:
        """These pods there are now.

        Args:
            pods: all of the pool.
            speaking: UIDs of those whose engine says what it does.
            wall_s: the time.
        """
        self._since_s = wall_s if self._since_s is None else self._since_s
        self._counted &= {pod.uid for pod in pods}
        for pod in pods:
            if not pod.created or pod.uid in self._counted or pod.uid not in speaking:
                continue
            self._counted.add(pod.uid)
            created_s = datetime.fromisoformat(pod.created).timestamp()
            if created_s >= self._since_s:
                self._latest.append(min(LONGEST_S, max(SHORTEST_S, wall_s - created_s)))
                self.measured_s = median(self._latest)

    @property
    def start_s(self) -> float:
        """Until a replica serves that is started now."""
        return UNMEASURED_S if self.measured_s is None else self.measured_s
