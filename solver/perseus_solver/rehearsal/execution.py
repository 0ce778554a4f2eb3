"""Execute one iteration of many plans at once, while clocks change late: work goes on at the old clock until then.

An instruction's progress is followed piece by piece, from one clock in effect to the next (``compiled/execution.c``).

Calls of a GPU follow each other. A call that has to wait is made with the newest target, as agents do, so at most one
waits. Changes come into effect in the order of their calls, however long each takes.

The GPUs of a stage that share a driver's lock change one after another, and compute as fast as the slowest. A rise
counts from the last of them and a fall from the first, but what they draw changes with each. So such a change is two
steps: one of the speed, and one of the power, when one of them has changed. Each sample follows the power of one GPU,
all in their turn: their mean would lie in a wait in which most of them do not change.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_core.hardware import Hardware
from perseus_solver.compiled import at, library
from perseus_solver.kinds import Floats, Index, Ints
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal.clocks import ClockTables
from perseus_solver.rehearsal.requests import Requests, Start
from perseus_solver.rehearsal.scatter import Scatter

_CHANGE = np.dtype([("at_s", np.float64), ("clock", np.int32), ("part", np.int32)])
"""A change on its way: when it comes into effect, to which clock, and whether for speed, power or (0) both."""


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """How long changes take, by the clock that is changed to.

    Attributes:
        p50_s, sigma: float[clocks], median, seconds, and standard deviation of the logarithm.
        call_s, call_sigma: the same of the driver's calls.
    """

    p50_s: Floats
    sigma: Floats
    call_s: float
    call_sigma: float


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Random numbers of one iteration, the same for all plans, so that plans are compared under equal luck.

    Attributes:
        work: float[n, samples], time of each instruction as a share of its profile's.
        normal: float[slots, n, samples, gpus], how slow the changes of each request of an instruction are, on each of
            the GPUs of its stage that change one after another.
        latencies: what that means in seconds.
    """

    work: Floats
    normal: Floats
    latencies: Latencies


@dataclass(slots=True, eq=False)
class Course:
    """What the iterations so far have left, for the next one: calls, clocks in effect and on their way.

    Attributes:
        elapsed_s: float[plans, samples], duration of the last iteration.
        queue: [plans, stages, room, samples], changes on their way, those from ``head`` to ``tail``.
        asked: int32[plans, stages], clocks that were asked for last.
        clock, power: int32[plans, stages, samples], clocks in effect for speed and for power.
        head, tail: int32[plans, stages, samples].
        called_s, free_s, last_s: float[plans, stages, samples], when the last call began and ended, and when the last
            change on its way comes into effect.
        begin_s, end_s: float[plans, stages, samples], of the last instruction of each stage.
        steps: of a change: two where the GPUs of a stage change one after another.
    """

    elapsed_s: Floats
    queue: npt.NDArray[Any]
    asked: Ints
    clock: Ints
    power: Ints
    head: Ints
    tail: Ints
    called_s: Floats
    free_s: Floats
    last_s: Floats
    begin_s: Floats
    end_s: Floats
    steps: int

    @classmethod
    def begin(cls, start: Start, samples: int, *, one_by_one: bool) -> Course:
        """Return the state before the first iteration.

        Args:
            start: the clocks in effect, and on their way.
            samples: number of samples.
            one_by_one: the GPUs of a stage change one after another.
        """
        plans, stages = start.clock.shape
        coming = np.diff(start.first)
        queue = np.zeros((plans * stages, int(coming.max(initial=0)), samples), dtype=_CHANGE)
        cell = np.repeat(np.arange(plans * stages), coming)
        place = np.arange(len(cell)) - start.first[cell]
        queue["at_s"][cell, place], queue["clock"][cell, place] = start.effect_s[:, None], start.target[:, None]
        asked, last_s, some = start.clock.ravel().copy(), np.full(plans * stages, -np.inf), coming > 0
        newest = start.first[1:][some] - 1
        asked[some], last_s[some] = start.target[newest], start.effect_s[newest]
        shape = plans, stages, samples

        def each(values: npt.NDArray[Any]) -> Any:
            return np.repeat(values.reshape(-1), samples).reshape(shape)

        return cls(
            elapsed_s=np.zeros((plans, samples)),
            queue=queue.reshape(plans, stages, -1, samples),
            asked=asked,
            clock=each(start.clock),
            power=each(start.clock),
            head=np.zeros(shape, dtype=np.int32),
            tail=each(coming.astype(np.int32)),
            called_s=np.full(shape, -np.inf),
            free_s=np.full(shape, -np.inf),
            last_s=each(last_s),
            begin_s=np.zeros(shape),
            end_s=np.zeros(shape),
            steps=2 if one_by_one else 1,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """One iteration of all plans.

    Attributes:
        time_s, energy_j: float[plans, samples], of the iteration; energy of all stages, waiting included.
        computing_s: float[plans, samples], time spent computing, over all stages.
        below_s, above_s: float[plans, samples], the parts of it below and above the planned clock.
        calls: float[plans, samples], calls to the driver.
        begin_s, end_s: float[plans, n], of each instruction in the mean.
        scatter_s: float[plans, n], standard deviation of its begin; zero where nobody asks.
    """

    time_s: Floats
    energy_j: Floats
    computing_s: Floats
    below_s: Floats
    above_s: Floats
    calls: Floats
    begin_s: Floats
    end_s: Floats
    scatter_s: Floats


class Executor:
    """Executes iterations of one problem. It holds nothing of a plan."""

    def __init__(self, problem: Problem, scatter: Scatter | None = None) -> None:
        """Level the graph and prepare the tables.

        Args:
            problem: the problem.
            scatter: of its instructions, as measured; None: all scatter alike, as the hardware says.

        Raises:
            InvalidSchedule: the precedence has a cycle.
        """
        self.problem, self._scatter = problem, scatter
        self.simulator = Simulator(problem)
        self.tables = ClockTables.of(problem)
        into = np.argsort(problem.edge_to, kind="stable")
        self._arrays = (
            self.simulator.order.astype(np.int64),
            problem.schedule.stage.astype(np.int64),
            problem.option_of.astype(np.int64),
            problem.edge_to[into].searchsorted(np.arange(problem.instructions + 1)).astype(np.int64),
            problem.edge_from[into].astype(np.int64),
            np.ascontiguousarray(problem.edge_delay_s[into], np.float64),
            np.ascontiguousarray(self.tables.time_s),
            np.ascontiguousarray(self.tables.mixed_power_w(problem.blocking_power_w)),
        )
        sizes = problem.instructions, problem.stages, len(self.tables.mhz)
        self._machine = _Machine(*sizes, *(array.ctypes.data for array in self._arrays))

    def scatter(self, hardware: Hardware) -> Scatter:
        """Return how much instructions scatter, as measured or as the hardware says."""
        return self._scatter or Scatter.uniform(self.problem, hardware.noise)

    def times_s(self, duration_s: Floats) -> tuple[Floats, Floats]:
        """Return when instructions begin and end that take these times, float[plans, n] each, in seconds."""
        begin_s, end_s = np.empty(duration_s.shape), np.empty(duration_s.shape)
        library().execution_times(ctypes.byref(self._machine), len(duration_s), at(duration_s), at(begin_s), at(end_s))
        return begin_s, end_s

    def iterate(
        self, planned: Index, requests: Requests, course: Course, draws: Draws, *, scatter: bool = False
    ) -> Iteration:
        """Execute one iteration of a run.

        Args:
            planned: int[plans, n], planned clocks as positions in ``tables.mhz``; negative where an instruction sets
                none.
            requests: what the agents ask for.
            course: what the iteration before has left; replaced by what this one leaves.
            draws: random numbers.
            scatter: say how much begins scatter.

        Raises:
            MemoryError: there is too little memory for the work arrays.
        """
        problem, latencies = self.problem, draws.latencies
        (plans, samples), (slots, *_, gpus) = course.elapsed_s.shape, draws.normal.shape
        pending = int((course.tail - course.head).max(initial=0))
        room = pending + course.steps * requests.of_stage(problem.stage_offset)
        queue = np.empty((plans, problem.stages, room, samples), dtype=_CHANGE)
        energy_j, computing_s, below_s, above_s, calls = (np.zeros((plans, samples)) for _ in range(5))
        begin_s, end_s, scatter_s = (np.zeros((plans, problem.instructions)) for _ in range(3))
        asks = _Requests(
            at(requests.first, np.int64),
            at(requests.after_s),
            None if requests.share is None else at(requests.share),
            at(requests.clock, np.int32),
            at(requests.moment, np.int32),
        )
        luck = _Luck(
            gpus, slots, at(draws.work), at(draws.normal), at(latencies.p50_s), at(latencies.sigma),
            latencies.call_s, latencies.call_sigma,
        )  # fmt: skip
        state = _Course(
            course.queue.shape[2], room, course.queue.ctypes.data, queue.ctypes.data,
            *(at(getattr(course, name), np.int32) for name in ("asked", "clock", "power", "head", "tail")),
            *(at(getattr(course, name)) for name in ("called_s", "free_s", "last_s", "begin_s", "end_s", "elapsed_s")),
        )  # fmt: skip
        outcome = _Outcome(
            *map(at, (energy_j, computing_s, below_s, above_s, calls, begin_s, end_s)), at(scatter_s) if scatter else 0
        )
        failed = library().execution_iterate(
            ctypes.byref(self._machine), plans, samples, at(planned, np.int64), problem.overhead_s, course.steps,
            *map(ctypes.byref, (asks, luck, state, outcome)),
        )  # fmt: skip
        if failed:
            raise MemoryError
        course.queue = queue
        time_s = course.elapsed_s.copy()
        energy_j += problem.blocking_power_w * (problem.stages * time_s - computing_s)
        return Iteration(time_s, energy_j, computing_s, below_s, above_s, calls, begin_s, end_s, scatter_s)


class _Machine(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "stages", "clocks")),
        *((name, ctypes.c_void_p) for name in ("order", "stage", "table", "first", "near", "delay", "time", "power")),
    )


class _Requests(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("first", "after", "share", "clock", "moment"))


class _Luck(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("gpus", "slots")),
        *((name, ctypes.c_void_p) for name in ("work", "normal", "p50", "sigma")),
        *((name, ctypes.c_double) for name in ("call", "call_sigma")),
    )


class _Course(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("room_before", "room")),
        *((name, ctypes.c_void_p) for name in ("queue_before", "queue", "asked", "clock", "power", "head", "tail")),
        *((name, ctypes.c_void_p) for name in ("called", "free", "last", "begin", "end", "elapsed")),
    )


class _Outcome(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("energy", "computing", "below", "above", "calls", "begin", "end", "scatter")
    )
