"""Replicas behind a router, and what changes their clocks: a controller a replica, one queue of driver calls a node.

A controller looks once in its period at what its engine last said, and asks for a clock. All GPUs of a replica are
asked, one call after another, since the GPUs of a node share the driver's lock; urgent calls overtake others, and a
newer one replaces one that has not begun. The slowest GPU of a replica sets its pace.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from perseus_sim.gpus.switching import DriverLock, DriverModel, Switches
from perseus_sim.serving.engine import Engine, Served
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.requests import Request

GPUS_OF_A_NODE: Final = 8
DEFAULT_CLOCKS: Final = 0
"""As a clock in MHz: the driver's own choice, the highest."""


class Asked(NamedTuple):
    """The clock that a controller wants."""

    clock_mhz: int
    """`DEFAULT_CLOCKS`, or the clock to lock."""
    urgent: bool = False
    """Its calls overtake those that are not."""


class Controller(Protocol):
    """Decides the clock of one replica."""

    period_s: float

    def decide(self, now_s: float, engine: Engine) -> Asked:
        """Decide.

        Args:
            now_s: the time.
            engine: ``load`` is what it said last, ``started`` and ``finished`` what it served. What else a controller
                reads, a real one cannot know.
        """


class _Queue:
    """The calls of one node's driver."""

    def __init__(self, driver: DriverModel) -> None:
        self._lock = DriverLock(driver)
        self._waiting: dict[tuple[int, int], tuple[bool, int, int]] = {}
        self._order = 0
        self.calls = 0
        self.free = True

    def ask(self, replica: int, gpus: int, asked: Asked) -> None:
        for gpu in range(gpus):
            self._order += 1
            self._waiting[replica, gpu] = (not asked.urgent, self._order, asked.clock_mhz)

    def hurry(self, replica: int, gpus: int) -> None:
        """Let the calls of a replica that have not begun overtake."""
        for key in ((replica, gpu) for gpu in range(gpus)):
            if key in self._waiting:
                self._waiting[key] = (False, *self._waiting[key][1:])

    def next(self) -> tuple[int, int, int] | None:
        """Take the call that is next: replica, GPU, clock."""
        if not self._waiting:
            return None
        key = min(self._waiting, key=self._waiting.__getitem__)
        self.calls += 1
        return *key, self._waiting.pop(key)[2]

    def acquire(self, now_s: float, hold_s: float) -> float:
        return self._lock.acquire(now_s, hold_s)


@dataclass(frozen=True)
class Setting:
    """What a fleet runs on.

    Attributes:
        machine: of each replica.
        driver: how long changes of a clock take.
        replicas: how many there are.
        seed: of the draws of the driver.
    """

    machine: Machine
    driver: DriverModel
    replicas: int
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """What happened."""

    served: tuple[Served, ...]
    """In the order of arrival."""
    joules: float
    joules_by_minute: tuple[float, ...]
    """Up to the first request of each minute, and the rest."""
    seconds: float
    """Until energy no longer counts; likewise the share and the rate below."""
    busy_share: float
    calls_per_s: float
    """Of a node's driver."""
    preempted: int


def run(
    setting: Setting, requests: Sequence[Request], controller: Callable[[int], Controller], tail_s: float = 30.0
) -> Run:
    """Serve requests.

    Args:
        setting: what they run on.
        requests: in the order of arrival.
        controller: makes the controller of a replica.
        tail_s: how long energy counts after the last arrival. What runs then is served all the same.
    """
    return _Fleet(setting, controller).run(requests, tail_s)


class _Fleet:
    def __init__(self, setting: Setting, controller: Callable[[int], Controller]) -> None:
        machine, driver = setting.machine, setting.driver
        self._machine = machine
        self._highest_mhz = machine.clocks_mhz[-1]
        self._engines = [Engine(machine, self._highest_mhz) for _ in range(setting.replicas)]
        self._controllers = [controller(index) for index in range(setting.replicas)]
        self._asked = [DEFAULT_CLOCKS] * setting.replicas
        gpus = range(setting.replicas * machine.parallel)
        self._switches = [Switches(driver, setting.seed * 1_000 + 2 * gpu) for gpu in gpus]
        self._clocks = [self._highest_mhz for _ in gpus]
        self._effects = [0.0 for _ in gpus]
        self._of_a_node = max(1, GPUS_OF_A_NODE // machine.parallel)
        self._queues = [_Queue(driver) for _ in range(-(-setting.replicas // self._of_a_node))]
        self._events: list[tuple[float, int, Callable[[float, int, int], None], int, int]] = []
        self._order = 0
        self._turn = 0
        for index, one in enumerate(self._controllers):
            if one.period_s < math.inf:
                self._later(one.period_s * (index + 1) / setting.replicas, self._decide, index)
            else:
                self._decide(0.0, index, 0)

    def run(self, requests: Sequence[Request], tail_s: float) -> Run:
        events, engines = self._events, self._engines
        arrivals = iter(requests)
        request = next(arrivals, None)
        end_s = (requests[-1].arrival_s if requests else 0.0) + tail_s
        joules = [0.0]
        while True:
            arrival_s = request.arrival_s if request is not None else end_s
            if arrival_s >= 60.0 * len(joules):
                joules.append(sum(engine.joules for engine in engines))
            while events and events[0][0] <= arrival_s:
                time_s, _, act, index, value = heapq.heappop(events)
                act(time_s, index, value)
            for engine in engines:
                engine.advance(arrival_s)
            if request is None:
                joules.append(sum(engine.joules for engine in engines))
                break
            self._route().submit(request)
            request = next(arrivals, None)
        busy_s = sum(engine.busy_s for engine in engines)
        calls = sum(queue.calls for queue in self._queues)
        self._serve_the_rest()
        served = sorted((one for engine in engines for one in engine.finished), key=lambda one: one.request.arrival_s)
        return Run(
            served=tuple(served),
            joules=joules[-1],
            joules_by_minute=tuple(after - before for before, after in itertools.pairwise(joules)),
            seconds=end_s,
            busy_share=busy_s / end_s / len(engines),
            calls_per_s=calls / len(self._queues) / end_s,
            preempted=sum(engine.preempted for engine in engines),
        )

    def _serve_the_rest(self) -> None:
        """Let all requests end, with the clocks that the controllers want meanwhile."""
        events, engines = self._events, self._engines
        while any(engine.outstanding for engine in engines):
            if events:
                time_s, _, act, index, value = heapq.heappop(events)
                act(time_s, index, value)
            else:
                for engine in engines:
                    while engine.outstanding:
                        engine.advance(engine.ends_s)

    def _route(self) -> Engine:
        """The replica with the fewest tokens of prompts to compute, then the fewest requests; in turn among equals.

        Backlogs of tokens are among the signals of llm-d's router.
        """
        self._turn += 1
        engines = self._engines
        count = len(engines)
        return min(
            (engines[(self._turn + offset) % count] for offset in range(count)),
            key=lambda engine: (engine.backlog, engine.outstanding),
        )

    def _later(self, time_s: float, act: Callable[[float, int, int], None], index: int, value: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, act, index, value))

    def _decide(self, now_s: float, index: int, _: int) -> None:
        engine, controller = self._engines[index], self._controllers[index]
        engine.advance(now_s)
        asked = controller.decide(now_s, engine)
        if asked.clock_mhz != self._asked[index]:
            self._asked[index] = asked.clock_mhz
            node = index // self._of_a_node
            self._queues[node].ask(index, self._machine.parallel, asked)
            if self._queues[node].free:
                self._call(now_s, node, 0)
        elif asked.urgent:
            self._queues[index // self._of_a_node].hurry(index, self._machine.parallel)
        if controller.period_s < math.inf:
            self._later(now_s + controller.period_s, self._decide, index)

    def _call(self, now_s: float, node: int, _: int) -> None:
        """Begin the next call of a node's driver."""
        queue = self._queues[node]
        call = queue.next()
        queue.free = call is None
        if call is None:
            return
        replica, of_replica, clock_mhz = call
        gpu = replica * self._machine.parallel + of_replica
        switch = self._switches[gpu].draw(clock_mhz)
        begin_s = queue.acquire(now_s, switch.call_s)
        effect_s = self._effects[gpu] = max(self._effects[gpu], begin_s + switch.latency_s)
        self._later(effect_s, self._effect, gpu, clock_mhz)
        self._later(begin_s + switch.call_s, self._call, node)

    def _effect(self, now_s: float, gpu: int, clock_mhz: int) -> None:
        """A GPU runs at its new clock."""
        parallel = self._machine.parallel
        replica = gpu // parallel
        self._clocks[gpu] = clock_mhz or self._highest_mhz
        clocks = self._clocks[replica * parallel : (replica + 1) * parallel]
        engine = self._engines[replica]
        engine.advance(now_s)
        engine.set_clocks(min(clocks), max(clocks))
