"""A simulated engine in real time, or faster, that shows its metrics as a real one does: to try what reads them.

Iterations of `perseus_sim.serving.engine` become the events of an `EngineMetrics`; a `MetricsServer` serves its page.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from perseus_sim.serving.engine import Engine, Load, Served
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.requests import Request

_TICK_S: Final = 0.005
"""About the shortest iteration: a page is never older than one."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One that is over.

    Attributes:
        seconds: that it took.
        decoding: sequences that got one more token.
        prompt_tokens: that were computed.
        started: requests that got their first token.
        finished: requests that ended.
        preempted: requests that gave their memory back.
        load: as its scheduler has just arranged the next.
    """

    seconds: float
    decoding: int
    prompt_tokens: int
    started: Sequence[Served]
    finished: Sequence[Served]
    preempted: int
    load: Load


class LiveEngine:
    """Serves a trace while time passes.

    As a context it runs on a thread of its own; `advance` brings it to now without one.

    Args:
        machine: what iterations take.
        requests: in the order of arrival, from the engine's begin; served once.
        metrics: what its page shows.
        faster: so many times faster than real time; what the page calls seconds are those of the engine.
        clock: seconds of a clock that never goes back.
        ended: called with each iteration when it is over.
    """

    def __init__(
        self,
        machine: Machine,
        requests: Sequence[Request],
        metrics: EngineMetrics,
        *,
        faster: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[EngineStep], None] = lambda _: None,
    ) -> None:
        self._ended = ended
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

    def set_clocks(self, slowest_mhz: int, fastest_mhz: int) -> None:
        """Let its GPUs run at these clocks from now on: the slowest of them, and the fastest."""
        with self._lock:
            self._advance()
            self._engine.set_clocks(slowest_mhz, fastest_mhz)

    def burst(self, requests: Sequence[Request]) -> None:
        """Let requests come now, as far apart as their arrivals are."""
        with self._lock:
            self._advance()
            now_s = self._engine.now_s
            moved = [replace(one, arrival_s=now_s + one.arrival_s) for one in requests]
            self._requests = deque(sorted((*self._requests, *moved), key=lambda one: one.arrival_s))

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
        started, finished = engine.started[self._started :], engine.finished[self._finished :]
        self._started, self._finished = len(engine.started), len(engine.finished)
        for served in started:
            metrics.first_token(
                served.first_token_s - served.request.arrival_s,
                prompt_tokens=served.request.prompt_tokens,
                cached_tokens=served.request.cached_tokens,
            )
        if step.decoding:
            metrics.inter_token(duration_s, step.decoding)
        metrics.step(step.prompt_tokens, step.decoding + step.prompts, duration_s)
        for served in finished:
            metrics.finished(
                prompt_tokens=served.request.prompt_tokens,
                output_tokens=served.request.output_tokens,
                time_per_output_token_s=served.per_token_s,
                e2e_s=served.end_s - served.request.arrival_s,
                cached_tokens=served.request.cached_tokens,
            )
        preempted, self._preempted = engine.preempted - self._preempted, engine.preempted
        if preempted:
            metrics.preempted(preempted)
        self._show_load()
        self._ended(
            EngineStep(duration_s, step.decoding, step.prompt_tokens, started, finished, preempted, engine.load)
        )

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
