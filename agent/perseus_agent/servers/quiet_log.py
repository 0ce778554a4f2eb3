"""Log messages that others can cause as often as they like: a few in each period, then only their number."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping


class Quiet:
    """A logger with a bound on its messages."""

    def __init__(
        self, logger: logging.Logger, messages: int, period_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """At most so many messages in each period of so many seconds."""
        self._logger = logger
        self._messages = messages
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._written = self._left_out = 0

    def info(self, message: str, *values: object, extra: Mapping[str, object] | None = None) -> None:
        """See ``logging.Logger.info``."""
        self._log(logging.INFO, message, values, extra)

    def warning(self, message: str, *values: object, extra: Mapping[str, object] | None = None) -> None:
        """See ``logging.Logger.warning``."""
        self._log(logging.WARNING, message, values, extra)

    def _log(self, level: int, message: str, values: tuple[object, ...], extra: Mapping[str, object] | None) -> None:
        left_out = 0
        with self._lock:
            now_s = self._clock()
            if now_s - self._began_s >= self._period_s:
                left_out, self._left_out = self._left_out, 0
                self._began_s, self._written = now_s, 0
            self._written += 1
            if self._written > self._messages:
                self._left_out += 1
                return
        if left_out:
            self._logger.warning("%d messages about processes on the socket were left out", left_out)
        self._logger.log(level, message, *values, extra=extra)
