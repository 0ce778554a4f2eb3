"""What has ended is started again, as a kubelet does: on a machine that stalls a keeper rightly ends its agent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from perseus_sim.processes import StartFailed

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.2


class Restarts:
    """A thread that looks, again and again, whether something must be started. What it starts ends with it."""

    def __init__(self, look: Callable[[], None]) -> None:
        """``look`` starts what has ended."""
        self._look = look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="restarts", daemon=True)
        self.paused = threading.Lock()
        """While it is held, nothing is started."""

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Start nothing from now on."""
        self._stopping.set()
        with self.paused:
            pass  # a start that has begun comes to its end

    def join(self) -> None:
        """Wait for the end of the thread."""
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self.paused:
                try:
                    self._look()
                except StartFailed as error:
                    log.warning("%s", error)
            self._stopping.wait(PAUSE_S)
