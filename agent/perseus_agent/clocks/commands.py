"""What other threads want done in the thread of a GPU, and the bell that wakes it.

Everything that touches a GPU happens in its own thread, so others leave commands here. A command's future is cancelled
if the thread has ended: always wait on it with a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class Commands:
    """The commands of one thread, in the order in which they came."""

    def __init__(self, thread: str) -> None:
        """``thread``: for the log."""
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when there may be a command."""
        self._thread = thread
        self._queue: deque[tuple[Callable[[], bool], Future[Any]]] = deque()
        self._lock = threading.Lock()
        self._closed = False

    # ------------------------------------------------------------------------------------------- from other threads

    def add(self, action: Callable[[], T], *, last: bool = False) -> Future[T]:
        """Leave a command; after ``last`` the thread ends."""
        future: Future[T] = Future()

        def command() -> bool:
            try:
                future.set_result(action())
            except Exception as error:
                log.exception("command failed", extra={"gpu": self._thread})
                future.set_exception(error)
            return last

        with self._lock:
            if self._closed:
                _refuse(future)
            else:
                self._queue.append((command, future))
                os.eventfd_write(self.bell, 1)
        return future

    def ring(self) -> None:
        """Wake the thread."""
        with self._lock:
            if not self._closed:
                os.eventfd_write(self.bell, 1)

    # ------------------------------------------------------------------------------------------- in the thread

    def run(self) -> bool:
        """Run the commands that are there. Returns whether the thread must end."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)
        stopping = False
        while self._queue and not stopping:
            stopping = self._queue.popleft()[0]()
        return stopping

    def close(self) -> None:
        """The thread ends: refuse commands that came after the last one."""
        with self._lock:
            self._closed = True
            os.close(self.bell)
        while self._queue:
            _refuse(self._queue.popleft()[1])


def _refuse(future: Future[Any]) -> None:
    """Cancel a future, also for threads that wait for it already."""
    future.cancel()
    future.set_running_or_notify_cancel()
