"""One order of everything: virtual time, threads as steps, processes that can be killed or stopped between any two.

What happens is a heap of steps, each of which belongs to a process. A step runs until it waits (a lock, an event, a
driver's call, a disk, a sleep); then the seed says which step of all processes is next. A thread is a greenlet, so a
process that is killed is simply never resumed: nothing of it runs any more, as after SIGKILL. A process that is stopped
is resumed when it continues.

Nothing here knows what is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import greenlet

NS: Final = 1_000_000_000
HOPS_NS: Final = 50_000
"""Until a thread that was woken runs: tens of microseconds on a machine that is not busy."""
MOST_STEPS: Final = 3_000_000
"""Of one seed: one that takes more does not come to an end."""


class Process:
    """What lives and dies together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.calls = 0
        """Calls inside the kernel that do not return before they are done, whatever becomes of the process."""
        self.held_back: list[Callable[[], None]] = []
        """Steps that came while it was stopped."""
        self.ended: list[Waiter] = []
        """Threads that wait for its end."""

    @property
    def gone(self) -> bool:
        """Whether it has ended: also the kernel's part of it."""
        return not self.alive and not self.calls


class Waiter:
    """A thread that waits; it is woken once, or its time is over."""

    __slots__ = ("over", "parked", "result", "thread", "woken")

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.parked = self.woken = self.over = False
        self.result: Any = None


class Thread:
    """A thread of a process."""

    def __init__(self, process: Process, name: str, run: Callable[[], None]) -> None:
        self.process = process
        self.name = name
        self.computed_s = 0.0
        """Of a step that did not come to an end."""
        self.busy_s = 0.0
        """Processor time of its steps, where the world says that they take any."""
        self.greenlet = greenlet.greenlet(run)
        self.resume: Callable[[], None] = lambda: None
        """The step in which it goes on."""


class Scheduler:
    """See the module."""

    def __init__(self, seed: int) -> None:
        self.now_ns = 1_000 * NS
        """The machine's clock, which all nodes share; it does not begin at 0, as no machine's does."""
        self.wall_offset_ns = 1_700_000_000 * NS
        """What the wall clock is ahead of it; a clock that is set changes this alone."""
        self.random = random.Random(seed)
        self._draw = self.random.random
        self.steps = 0
        self.trace: deque[str] = deque(maxlen=200_000)
        self.digest = 0
        """Of the trace: two runs of a seed have the same."""
        self.tracing = False
        self.failures: list[str] = []
        self.preempted = 0.02
        """How often a thread loses its processor where it takes a lock."""
        self._heap: list[tuple[int, float, int, Process | None, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._main = greenlet.getcurrent()
        self.current: Process | None = None
        self.thread: Thread | None = None
        """The one that runs; None: an event loop, or the world itself."""
        self._threads: set[Thread] = set()
        """All that have not ended: those of killed processes must not be collected, which would run their clean-up."""
        self.loops = 0

    # ---------------------------------------------------------------------------------------------- time and steps

    @property
    def now_s(self) -> float:
        """The machine's clock, seconds."""
        return self.now_ns / NS

    def at(self, at_ns: int, step: Callable[[], None], process: Process | None = None) -> None:
        """Do a step at a time; of those of one time the seed says which is first."""
        if at_ns < self.now_ns:
            at_ns = self.now_ns
        heapq.heappush(self._heap, (at_ns, self._draw(), next(self._numbers), process, step))

    def after(self, seconds: float, step: Callable[[], None], process: Process | None = None) -> None:
        """Do a step in so many seconds."""
        self.at(self.now_ns + int(seconds * NS) + 1, step, process)  # never before its time

    def run(self, until_ns: int) -> None:
        """Do what is due until a time."""
        heap, take = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_ns and not self.failures:
            self.now_ns, _, _, process, step = take(heap)
            if process is not None:
                if not process.alive:
                    continue
                if process.stopped:
                    process.held_back.append(step)
                    continue
            self.steps += 1
            if self.steps > MOST_STEPS:
                self.fail(f"more than {MOST_STEPS} steps")
                return
            self.current = process
            step()
            self.current = None
        if not self.failures:
            self.now_ns = until_ns

    def fail(self, why: str) -> None:
        """A promise is broken; the first counts."""
        self.note(f"BROKEN {why}")
        self.failures.append(f"at {self.now_s - 1000:.3f} s: {why}")

    def note(self, text: str) -> None:
        """Write a line of the trace."""
        line = f"{self.now_s - 1000:10.6f} {self.current.name if self.current else '-':14} {text}"
        self.digest = hash((self.digest, line))
        if self.tracing:
            self.trace.append(line)

    # ---------------------------------------------------------------------------------------------- threads

    def spawn(self, process: Process, name: str, work: Callable[[], None]) -> Thread:
        """Start a thread."""

        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001
                self.fail(f"thread {name} of {process.name} ended with {type(error).__name__}: {error}")
            self._threads.remove(thread)

        thread = Thread(process, name, run)
        thread.greenlet.parent = self._main
        thread.resume = partial(self._resume, thread)
        self._threads.add(thread)
        self.at(self._soon_ns(), thread.resume, process)
        return thread

    def waiter(self) -> Waiter:
        """For the thread that runs, before it waits."""
        thread = self.thread
        if thread is None:
            raise RuntimeError("only a thread can wait")
        return Waiter(thread)

    def wait(self, waiter: Waiter, seconds: float | None = None) -> bool:
        """Wait until woken; False: nobody has for so long."""
        if not waiter.woken:
            if seconds is not None:
                self.after(max(0.0, seconds), partial(self._expire, waiter), waiter.thread.process)
            waiter.parked = True
            self._main.switch()
        waiter.over = True
        return waiter.woken

    def wake(self, waiter: Waiter, result: Any = None) -> bool:
        """Let a thread go on, which runs a little later; False: it does not wait any more."""
        if waiter.over or waiter.woken:
            return False
        waiter.woken, waiter.result = True, result
        if waiter.parked:
            self.at(self._soon_ns(), waiter.thread.resume, waiter.thread.process)
        return True

    def pause(self, seconds: float) -> None:
        """Let the thread that runs sleep."""
        thread = self.thread
        if thread is None:
            raise RuntimeError("only a thread can sleep")
        self.after(max(0.0, seconds), thread.resume, thread.process)
        self._main.switch()

    def preempt(self) -> None:
        """The thread that runs may lose its processor here."""
        if self._draw() < self.preempted and self.thread is not None:
            long = self.random.random() < 0.02
            self.pause(self.random.random() * (0.02 if long else 0.0005))

    def ended_within(self, process: Process, seconds: float | None = None) -> bool:
        """Let the thread that runs wait for the end of a process; False: it has not ended for so long."""
        if not process.gone:
            waiter = self.waiter()
            process.ended.append(waiter)
            self.wait(waiter, seconds)
            if waiter in process.ended:
                process.ended.remove(waiter)
        return process.gone

    def give_up(self, thread: Thread, computed_s: float) -> None:
        """A thread computes without an end: it goes no further, and the machine says that it still computes."""
        thread.computed_s += computed_s
        self.loops += 1
        self._main.switch()

    def _soon_ns(self) -> int:
        """When a thread runs that need not wait any more."""
        return self.now_ns + int(self._draw() * HOPS_NS) + 1

    def _expire(self, waiter: Waiter) -> None:
        if not waiter.over and not waiter.woken:
            waiter.over = True
            self._resume(waiter.thread)

    def _resume(self, thread: Thread) -> None:
        if not thread.greenlet.dead:
            self.thread = thread
            thread.greenlet.switch()
            self.thread = None

    # ---------------------------------------------------------------------------------------------- processes

    def kill(self, process: Process) -> None:
        """As SIGKILL: it runs no further. It has ended when the kernel has done what it was asked for."""
        if not process.alive:
            return
        self.note(f"killed: {process.name}")
        process.alive, process.stopped = False, False
        process.held_back.clear()
        self.leave(process, 0)

    def leave(self, process: Process, calls: int) -> None:
        """So many calls inside the kernel are done."""
        process.calls -= calls
        if process.gone:
            for waiter in process.ended:
                self.wake(waiter)
            process.ended.clear()

    def stop(self, process: Process) -> None:
        """As SIGSTOP."""
        process.stopped = process.alive

    def resume(self, process: Process) -> None:
        """As SIGCONT."""
        process.stopped = False
        held, process.held_back = process.held_back, []
        for step in held:
            self.at(self.now_ns, step, process)
