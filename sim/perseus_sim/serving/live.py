"""A simulated engine in real time, or faster, that shows its metrics as a real one does: to try what reads them.

Iterations of `perseus_sim.serving.engine` become the events of an `EngineMetrics`; a `MetricsServer` serves its page.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Self

from perseus_sim.serving.engine import Engine
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.requests import Request

_TICK_S: Final = 0.005
"""About the shortest iteration: a page is never older than one."""


class LiveEngine:
    """Serves a trace while time passes.

    As a context it runs on a thread of its own; `advance` brings it to now without one.

    Args:
        machine: what iterations take.
        requests: in the order of arrival, from the engine's begin; served once.
        metrics: what its page shows.
        faster: so many times faster than real time; what the page calls seconds are those of the engine.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        machine: Machine,
        requests: Sequence[Request],
        metrics: EngineMetrics,
        *,
        faster: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = Engine(machine, machine.clocks_mhz[-1])
        self._requests = deque(requests)
        self._metrics = metrics
        self._faster = faster
        self._clock = clock
        self._begin_s = clock()
        self._begun_s = 0.0
        self._started = self._finished = self._preempted = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-engine", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def idle(self) -> bool:
        """Whether all requests have been served."""
        with self._lock:
            return not self._requests and not self._engine.outstanding

    @property
    def joules(self) -> float:
        """What its GPUs have drawn until now."""
        with self._lock:
            self._advance()
            return self._engine.joules

    def set_clock(self, clock_mhz: int) -> None:
        """Let all of its GPUs run at one of its machine's clocks from now on."""
        with self._lock:
            self._advance()
            self._engine.set_clocks(clock_mhz, clock_mhz)

    def advance(self) -> None:
        """Serve until now."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        now_s = (self._clock() - self._begin_s) * self._faster
        engine = self._engine
        while True:
            arrival_s = self._requests[0].arrival_s if self._requests else math.inf
            if min(arrival_s, engine.ends_s) > now_s:
                break
            if engine.ends_s <= arrival_s:
                self._end_iteration()
            else:
                self._submit(arrival_s)
        engine.advance(now_s)

    def _submit(self, arrival_s: float) -> None:
        engine = self._engine
        engine.advance(arrival_s)
        if engine.step is None:
            self._begun_s = arrival_s
        engine.submit(self._requests.popleft())
        self._metrics.arrived()
        self._show_load()

    def _end_iteration(self) -> None:
        engine, metrics, step = self._engine, self._metrics, self._engine.step
        if step is None:
            return
        engine.advance(engine.ends_s)
        duration_s, self._begun_s = engine.now_s - self._begun_s, engine.now_s
        for served in engine.started[self._started :]:
            metrics.first_token(
                served.first_token_s - served.request.arrival_s,
                prompt_tokens=served.request.prompt_tokens,
                cached_tokens=served.request.cached_tokens,
            )
        self._started = len(engine.started)
        if step.decoding:
            metrics.inter_token(duration_s, step.decoding)
        metrics.step(step.prompt_tokens, step.decoding + step.prompts, duration_s)
        for served in engine.finished[self._finished :]:
            metrics.finished(
                prompt_tokens=served.request.prompt_tokens,
                output_tokens=served.request.output_tokens,
                time_per_output_token_s=served.per_token_s,
                e2e_s=served.end_s - served.request.arrival_s,
                cached_tokens=served.request.cached_tokens,
            )
        self._finished = len(engine.finished)
        if engine.preempted > self._preempted:
            metrics.preempted(engine.preempted - self._preempted)
            self._preempted = engine.preempted
        self._show_load()

    def _show_load(self) -> None:
        engine = self._engine
        load = engine.load
        self._metrics.set_load(
            waiting=load.waiting,
            running=load.prefilling + load.running,
            kv_share=min(1.0, load.kv_tokens / engine.machine.kv_capacity),
        )

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            self.advance()
