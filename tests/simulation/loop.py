"""An event loop of a process: asyncio's own, whose time and order are the scheduler's.

Its callbacks run in the order in which they were asked for, as everywhere; what is between two turns, and when the
answers come that they wait for, the seed decides. Threads that it starts are steps of the same process.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
from asyncio import base_events, events
from collections.abc import Callable
from typing import Any

from tests.simulation.scheduler import NS, Process, Scheduler


class _NoSelector:
    def select(self, timeout: float | None) -> list[Any]:
        return []


class SimulatedLoop(base_events.BaseEventLoop):
    """See the module."""

    def __init__(self, scheduler: Scheduler, process: Process) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._process = process
        self._selector = _NoSelector()
        self._clock_resolution = 1e-9
        self._due_ns: int | None = None
        self._turning = False
        self._thread_id = 1
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self._scheduler.now_ns / NS

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._plan()

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._scheduler.fail(f"{self._process.name}: {context.get('message')}: {error!r}")

    # ------------------------------------------------------------------------------------------------ turns

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        handle = super().call_soon(callback, *args, context=context)
        self._plan()
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        handle = super().call_at(when, callback, *args, context=context)
        self._plan()
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return self.call_soon(callback, *args, context=context)

    def _check_thread(self) -> None:
        """All threads are one."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        work = functools.partial(func, *args)

        def run() -> None:
            try:
                result, error = work(), None
            except BaseException as raised:  # noqa: BLE001
                result, error = None, raised
            self.call_soon_threadsafe(done, result, error)

        def done(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        self._scheduler.spawn(self._process, "executor", run)
        return future

    def _plan(self) -> None:
        """Have the next turn when something is due."""
        if self._turning:
            return
        scheduler = self._scheduler
        if self._ready:
            at_ns = scheduler.now_ns
        elif self._scheduled:
            at_ns = max(scheduler.now_ns, int(self._scheduled[0]._when * NS) + 1)
        else:
            return
        if self._due_ns is None or at_ns < self._due_ns:
            self._due_ns = at_ns
            scheduler.at(at_ns, lambda: self._turn(at_ns), self._process)

    def _turn(self, at_ns: int) -> None:
        if at_ns != self._due_ns:
            return  # there was an earlier one
        self._due_ns, self._turning = None, True
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._asyncgen_firstiter_hook, finalizer=self._asyncgen_finalizer_hook)
        events._set_running_loop(self)
        try:
            self._run_once()
        finally:
            events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
            self._turning = False
        self._plan()
