"""The machine that everything runs on: time, threads, locks, descriptors and the disk's sync are the scheduler's.

``install`` puts them in the place of the standard library's, once, before anything of the project is imported: so the
production code needs no seam for it, and none is forgotten. Whatever is built from these (conditions, queues,
futures, executors) is the standard library's own. Descriptors, memory and files are real; only waiting for them is not.
"""

from __future__ import annotations

import errno
import os
import queue
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.simulation.scheduler import NS, Scheduler, Waiter

REAL_PROCESS_TIME: Final = time.process_time
_REAL_SELECT: Final = select.select
_REAL_EPOLL: Final = select.epoll
_REAL_WRITE: Final = os.eventfd_write

_now: list[Scheduler] = []
pollers: list[tuple[SimulatedEpoll, Waiter]] = []
sync: list[Callable[[], OSError | None]] = []
"""What a sync of the disk does, by the world: it may take long, or fail."""


def scheduler() -> Scheduler:
    """Of the seed that runs."""
    return _now[0]


def use(of_seed: Scheduler) -> None:
    """From now on this is the machine's."""
    _now[:] = [of_seed]
    pollers.clear()


class SimulatedLock:
    """A lock; its owner may be another thread than the one that releases it."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        own = _now[0] if _now else None
        if own is not None and blocking:
            own.preempt()
        if not self._held:
            self._held = True
            return True
        if not blocking or timeout == 0:
            return False
        assert own is not None
        waiter = own.waiter()
        self._waiters.append(waiter)
        return own.wait(waiter, None if timeout < 0 else timeout)

    def release(self) -> None:
        if not self._held:
            raise RuntimeError("release unlocked lock")
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.thread.process.alive and _now[0].wake(waiter):
                return  # it is the next one's
        self._held = False

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]


class SimulatedRLock(SimulatedLock):
    """A lock that its owner may take again."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        own = _current()
        if self._owner is own:
            self._count += 1
            return True
        taken = super().acquire(blocking, timeout)
        if taken:
            self._owner, self._count = own, 1
        return taken

    def release(self) -> None:
        if self._owner is not _current():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            super().release()

    def _is_owned(self) -> bool:
        return self._owner is _current()

    def _release_save(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        super().release()
        return count

    def _acquire_restore(self, count: int) -> None:
        super().acquire()
        self._owner, self._count = _current(), count


def _current() -> object:
    thread = _now[0].thread if _now else None
    return thread or "main"


class SimulatedEvent:
    """A ``threading.Event``, without a lock for each that waits."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Waiter] = []

    def is_set(self) -> bool:
        return self._set

    def clear(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _now[0].wake(waiter)

    def wait(self, timeout: float | None = None) -> bool:
        own = _now[0]
        own.preempt()
        if not self._set:
            waiter = own.waiter()
            self._waiters.append(waiter)
            if not own.wait(waiter, timeout) and waiter in self._waiters:
                self._waiters.remove(waiter)
        return self._set


class SimulatedThread:
    """As much of a ``threading.Thread`` as the project uses."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self.native_id: int | None = None
        self.ident: int | None = None
        self._thread: Any = None
        self._over = threading.Event()

    def start(self) -> None:
        own = scheduler()
        process = own.current
        assert process is not None, "threads are started by a process"
        self._thread = own.spawn(process, self.name, self._run)
        self.native_id = self.ident = id(self._thread)

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def _run(self) -> None:
        try:
            self.run()
        finally:
            self._over.set()

    def join(self, timeout: float | None = None) -> None:
        self._over.wait(timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._over.is_set()

    @property
    def busy_s(self) -> float:
        """Processor time of all its steps."""
        return self._thread.busy_s if self._thread is not None else 0.0

    @property
    def computed_s(self) -> float:
        """Of steps that did not come to an end."""
        return self._thread.computed_s if self._thread is not None else 0.0


class SimulatedEpoll:
    """The kernel's, but for the time that it waits."""

    def __init__(self) -> None:
        self._real = _REAL_EPOLL()
        self.fileno, self.register = self._real.fileno, self._real.register
        self.modify, self.unregister = self._real.modify, self._real.unregister

    def poll(self, timeout: float | None = None, maxevents: int = -1) -> list[tuple[int, int]]:
        ready = self._real.poll(0, maxevents)
        if ready or timeout == 0:
            if not ready:
                scheduler().pause(0.00002)  # a loop that polls takes time
            return ready
        woken = self.wait(None if timeout is None or timeout < 0 else timeout)
        return self._real.poll(0, maxevents) if woken else []

    def wait(self, timeout: float | None) -> bool:
        own = scheduler()
        waiter = own.waiter()
        entry = (self, waiter)
        pollers.append(entry)
        try:
            return own.wait(waiter, timeout)
        finally:
            if entry in pollers:
                pollers.remove(entry)

    @property
    def ready(self) -> bool:
        return bool(_REAL_SELECT([self._real.fileno()], [], [], 0)[0])

    def close(self) -> None:
        self._real.close()


def _select(
    readers: Sequence[Any], writers: Sequence[Any], others: Sequence[Any], timeout: float | None = None
) -> tuple[list[Any], list[Any], list[Any]]:
    if len(readers) != 1 or not isinstance(readers[0], SimulatedEpoll):
        return _REAL_SELECT(readers, writers, others, 0)
    poller = readers[0]
    return ([poller] if poller.ready or poller.wait(timeout) else []), [], []


def _eventfd_write(descriptor: int, value: int) -> None:
    _REAL_WRITE(descriptor, value)
    own = scheduler()
    for entry in list(pollers):
        if entry[0].ready and own.wake(entry[1]):
            pollers.remove(entry)


def _fsync(descriptor: int) -> None:
    if not sync or scheduler().thread is None:
        return
    error = sync[0]()
    if error is not None:
        raise error


def full_disk() -> OSError:
    """What a sync raises then."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def install() -> None:
    """Take the place of the standard library's; once, before anything of the project is imported."""
    import asyncio  # noqa: F401  # these make their locks when they are imported: real ones
    import concurrent.futures.thread  # noqa: F401
    import logging.handlers  # noqa: F401

    machine: Any = {
        time: {
            "monotonic": lambda: _now[0].now_ns / NS,
            "monotonic_ns": lambda: _now[0].now_ns,
            "perf_counter": lambda: scheduler().now_ns / NS,
            "time": lambda: (scheduler().now_ns + scheduler().wall_offset_ns) / NS,
            "time_ns": lambda: scheduler().now_ns + scheduler().wall_offset_ns,
            "thread_time": lambda: own.busy_s if (own := _now[0].thread) else 0.0,
            "sleep": lambda seconds: scheduler().pause(seconds),
        },
        threading: {
            "_allocate_lock": SimulatedLock,
            "Lock": SimulatedLock,
            "RLock": SimulatedRLock,
            "_CRLock": SimulatedRLock,
            "Thread": SimulatedThread,
            "Event": SimulatedEvent,
            "_time": lambda: scheduler().now_ns / NS,
        },
        queue: {"time": lambda: scheduler().now_ns / NS},
        select: {"select": _select, "epoll": SimulatedEpoll},
        os: {"eventfd_write": _eventfd_write, "fsync": _fsync},
    }
    for module, names in machine.items():
        for name, value in names.items():
            setattr(module, name, value)
