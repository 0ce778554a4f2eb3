"""A CUDA stream of a simulated GPU: what the host has launched and the GPU has not run yet, in order.

The host's thread puts actions in; the GPU's thread runs them, each in the GPU's own time. Events and stream memory
writes are those that the client's ``EventTimer`` and ``GpuMarks`` use, so that the client's real code runs on both.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from perseus_client.gpu_marks import DriverError, Write
from perseus_core.units import us_from_ns
from perseus_sim.training.rank import JobLost

_IDLE: Final = None
"""The stream without work: what is recorded on it happens at once."""


class Stream:
    """The stream of one rank."""

    def __init__(self, now_us: Callable[[], float], wait_until: Callable[[float], None]) -> None:
        """``now_us``: the GPU's time; ``wait_until``: how its thread moves it where nothing was launched yet."""
        self.now_us = now_us
        self._wait_until = wait_until
        self._actions: queue.SimpleQueue[tuple[int, Callable[[], None]]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._put = self._run = 0
        self._closed = False

    def put(self, action: Callable[[], None]) -> None:
        """Launch: the action runs when the GPU gets there."""
        self._put += 1
        self._actions.put((us_from_ns(time.monotonic_ns()), action))

    def run_next(self) -> None:
        """Wait for the next action and run it, on the GPU's thread."""
        launched_us, action = self._actions.get()
        self._wait_until(launched_us)
        action()
        with self._changed:
            self._run += 1
            self._changed.notify_all()

    def synchronise(self) -> None:
        """Wait on the host until all that was put has run.

        Raises:
            JobLost: the GPU has stopped.
        """
        target = self._put
        self.wait_for(lambda: self._run >= target)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait on the host for something that an action changes.

        Raises:
            JobLost: the GPU has stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or condition())
            if self._closed:
                raise JobLost

    def close(self) -> None:
        """The GPU runs nothing more: a host that waits for it ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Event:
    """A CUDA event."""

    def __init__(self) -> None:
        self._at_us: float | None = None

    def record(self, stream: object = _IDLE, /) -> None:
        """Let it happen when the stream gets there."""
        self._at_us = None
        if isinstance(stream, Stream):
            stream.put(lambda: self._happen(stream.now_us()))
        else:
            self._happen(us_from_ns(time.monotonic_ns()))

    def query(self) -> bool:
        """Whether it has happened."""
        return self._at_us is not None

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another.

        Raises:
            RuntimeError: one of them has not happened.
        """
        if self._at_us is None or end_event._at_us is None:
            raise RuntimeError("an event is not complete")
        milliseconds: float = (end_event._at_us - self._at_us) / 1000
        return milliseconds

    def _happen(self, at_us: float) -> None:
        self._at_us = at_us


@dataclass(frozen=True)
class StreamDriver:
    """``perseus_client.gpu_marks.Driver``: writes on a stream."""

    stream: Stream

    def register(self, address: int, length: int) -> int:  # noqa: ARG002
        return address

    def probe(self, pointer: int, value: int) -> None:
        _store(pointer, value)

    def probe_graph(self, pointer: int, value: int) -> None:  # noqa: ARG002
        raise DriverError("a simulated stream is never captured")

    def writer(self, pointer: int, in_graph: bool = False) -> Write:  # noqa: ARG002
        def write(value: int) -> int:
            self.stream.put(lambda: _store(pointer, value))
            return 0

        return write


def _store(pointer: int, value: int) -> None:
    ctypes.c_uint32.from_address(pointer).value = value
