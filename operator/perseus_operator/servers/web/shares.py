"""How much of the operator's time the page takes: one document at a time, and of each viewer a share.

Documents are drawn by Python in threads, which share one interpreter with the event loop: two that are drawn at once
delay it for as long as they take. So there is one at a time, and a viewer who has had one rests
for several times as long as it took, while others have theirs.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final

_REST: Final = 4.0
"""How many times as long as a document took its viewer waits for the next: a fifth of the time is theirs at most."""
_REST_OF_ALL: Final = 1.0
"""The same for all viewers together: the page never takes more than half of the time."""
_MOST_REMEMBERED: Final = 1024


class Shares:
    """The turns of all viewers. Used by several threads."""

    def __init__(self, patience_s: float, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """``patience_s``: how long a request waits for its turn."""
        self._patience_s = patience_s
        self._monotonic_s = monotonic_s
        self._changed = threading.Condition()
        self._busy = False
        self._free_s = 0.0
        """When the next document may be drawn, for any viewer."""
        self._rested_s: OrderedDict[Hashable, float] = OrderedDict()
        """When each of the latest viewers may have the next."""

    @contextmanager
    def turn(self, viewer: Hashable) -> Iterator[None]:
        """Draw a document for a viewer inside.

        Raises:
            TimeoutError: the viewer's turn does not come in time.
        """
        end_s = self._monotonic_s() + self._patience_s
        with self._changed:
            while (wait_s := self._wait_s(viewer)) > 0:
                left_s = end_s - self._monotonic_s()
                if left_s <= 0 or (not self._busy and wait_s > left_s):
                    raise TimeoutError(f"the page's share of this viewer is used up for {wait_s:.1f} s")
                self._changed.wait(min(wait_s, left_s))
            self._busy = True
        began_s = self._monotonic_s()
        try:
            yield
        finally:
            with self._changed:
                now_s = self._monotonic_s()
                self._busy, self._free_s = False, now_s + _REST_OF_ALL * (now_s - began_s)
                self._rested_s[viewer] = now_s + _REST * (now_s - began_s)
                self._rested_s.move_to_end(viewer)
                while len(self._rested_s) > _MOST_REMEMBERED:
                    self._rested_s.popitem(last=False)
                self._changed.notify_all()

    def _wait_s(self, viewer: Hashable) -> float:
        """Seconds until the viewer may have a document; while another is drawn, until it is looked again."""
        if self._busy:
            return self._patience_s
        return max(self._free_s, self._rested_s.get(viewer, 0.0)) - self._monotonic_s()
