"""A progress bar on standard error: none if that is not a terminal or the work is short."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_QUIET_S = 0.5  # work shorter than this needs no bar
_EVERY_S = 0.1
_WIDTH = 30


class ProgressBar:
    """A bar that is called with (done, total), as a context: the line is cleared at the end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty()
        self._begin = time.monotonic()
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar, but not more often than people can see."""
        now = time.monotonic()
        if not self._terminal or now - self._begin < _QUIET_S or now - self._drawn < _EVERY_S:
            return
        self._drawn = now
        filled = _WIDTH * done // max(total, 1)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        sys.stderr.write(f"\r{self._what} {bar} {100 * done // max(total, 1):3d} %")
        sys.stderr.flush()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
