"""What the agent reports about jobs, and how it reaches slow readers: each reader has a queue that is bounded in events
and in the numbers that they carry; when it is full, the oldest event is dropped and counted.

Publishing never blocks and never fails. These are plain values; the gRPC service makes messages of them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perseus_agent.clocks.gpu_notices import GpuNotice
from perseus_agent.errors import TooMuch
from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId
from perseus_proto.engine_hello import EngineHello

MAX_WATCHERS: Final = 16
MAX_NUMBERS: Final = 1 << 18
"""Of the events stored for one reader, which take 9 MiB; the last event is stored in any case."""
BATCH_EVENTS: Final = 256
BATCH_NUMBERS: Final = 1 << 16
"""What a batch holds at most, if it is of more than one event: one is made into a message without a pause."""
GATHER_S: Final = 0.05
"""How long a batch waits for more events. The ranks of a node end an iteration nearly together, and a message for each
costs the operator more than what it says."""


@dataclass(frozen=True)
class RankProcess:
    """One training process and its rank in a job. Pod and GPU come from the kernel and the kubelet, not from the
    process."""

    job_uid: str
    pod_uid: str
    gpu_uuid: str
    rank_id: RankId
    pid: int


@dataclass(frozen=True)
class RankChange:
    """A rank joined or left."""

    rank: RankProcess
    joined: bool
    iteration: int


@dataclass(frozen=True)
class ServingEngine:
    """One serving engine. Pod and GPUs come from the kernel and the kubelet, all else from the engine."""

    job_uid: str
    pod_uid: str
    pid: int
    hello: EngineHello
    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True)
class EngineChange:
    """An engine joined or left."""

    engine: ServingEngine
    joined: bool


Counted = tuple[tuple[int, int], ...]
"""Places, ascending, and how many were counted at each: of times in ``perseus_core.serving.TIME_EDGES_US``, of lengths
as in ``perseus_core.lengths``."""


@dataclass(frozen=True)
class EngineSummary:
    """What one engine did in about a second; see the message of the same name."""

    engine: ServingEngine
    number: int
    time_us: int
    clock_mhz: int
    changed: bool
    default_us: int
    mhz_us: int
    running_milli: int
    kv_share_ppm: int
    steps: int
    steps_us: int
    prompt_steps: int
    prompt_steps_us: int
    prompt_tokens: int
    generated_tokens: int
    waiting: int
    preempted: int
    requests: int
    first_tokens: Counted
    tokens: Counted
    held_us: Mapping[str, int]
    energy_mj: int | None = None
    median_clock_mhz: int = 0
    lengths: Counted = ()

    @property
    def numbers(self) -> int:
        """How many it carries of single places."""
        return 2 * (len(self.first_tokens) + len(self.tokens) + len(self.lengths))


Event = RankChange | IterationReport | GpuNotice | EngineChange | EngineSummary


class Watcher:
    """One reader's ring. ``take`` from one thread, ``put`` from any."""

    def __init__(self, capacity: int) -> None:
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._numbers = 0
        self._condition = threading.Condition()
        self._closed = False
        self.dropped = 0
        """Events lost to this reader since it began."""

    def put(self, event: Event) -> bool:
        """Add an event; False if the oldest had to go for it."""
        with self._condition:
            dropped = self.dropped
            self._events.append(event)
            self._numbers += _numbers(event)
            while len(self._events) > self._capacity or (self._numbers > MAX_NUMBERS and len(self._events) > 1):
                self._pop()
                self.dropped += 1
            self._condition.notify()
            return self.dropped == dropped

    def _pop(self) -> Event:
        event = self._events.popleft()
        self._numbers -= _numbers(event)
        return event

    def take(self, timeout_s: float) -> tuple[int, list[Event]] | None:
        """Events lost so far and a batch of events (empty after the timeout); None once closed.

        Whatever comes within ``GATHER_S`` after the first event is of the same batch.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._events or self._closed, timeout_s)
            if self._events:
                self._condition.wait_for(lambda: len(self._events) >= BATCH_EVENTS or self._closed, GATHER_S)
            if self._closed:
                return None
            batch, numbers = list[Event](), 0
            while self._events and len(batch) < BATCH_EVENTS and (numbers <= BATCH_NUMBERS or not batch):
                batch.append(event := self._pop())
                numbers += _numbers(event)
            return self.dropped, batch

    def close(self) -> None:
        """No more: a waiting ``take`` returns None."""
        with self._condition:
            self._closed = True
            self._events.clear()
            self._numbers = 0
            self._condition.notify()


def _numbers(event: Event) -> int:
    return event.numbers if isinstance(event, IterationReport | EngineSummary) else 0


class TelemetryHub:
    """All readers of all jobs."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._watchers: dict[str, tuple[Watcher, ...]] = {}
        self._closed = False
        self.dropped = 0
        """Events lost to any reader."""

    def watch(self, job_uid: str) -> Watcher:
        """A new reader of one job.

        Raises:
            TooMuch: there are ``MAX_WATCHERS`` already.
        """
        watcher = Watcher(self._capacity)
        with self._lock:
            if sum(map(len, self._watchers.values())) >= MAX_WATCHERS:
                raise TooMuch(f"job_uid: at most {MAX_WATCHERS} telemetry streams at a time")
            self._watchers[job_uid] = (*self._watchers.get(job_uid, ()), watcher)
            if self._closed:
                watcher.close()
        return watcher

    def leave(self, job_uid: str, watcher: Watcher) -> None:
        """The reader has gone."""
        with self._lock:
            remaining = tuple(other for other in self._watchers.get(job_uid, ()) if other is not watcher)
            if remaining:
                self._watchers[job_uid] = remaining
            else:
                self._watchers.pop(job_uid, None)
        watcher.close()

    def publish(self, job_uid: str, event: Event) -> None:
        """Send an event to every reader of the job."""
        for watcher in self._watchers.get(job_uid, ()):
            if not watcher.put(event):
                with self._lock:
                    self.dropped += 1

    def close(self) -> None:
        """End all streams."""
        with self._lock:
            self._closed = True
            for watchers in self._watchers.values():
                for watcher in watchers:
                    watcher.close()
