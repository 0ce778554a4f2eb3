"""Execute one iteration of many plans at once, while clocks change late: work goes on at the old clock until then.

Arrays have the axes [rows, plans, samples]; the rows are the instructions of a topological level. The levels are those
of `perseus_solver.model.simulator`. All else differs from it, because an instruction's progress is followed piece by
piece, from one clock in effect to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal.calls import Calls, Luck, StageCalls, Start
from perseus_solver.rehearsal.clocks import ClockTables


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """What is known of the instructions of a level when they begin; [rows, plans, samples].

    Attributes:
        rows: int[rows], the instructions.
        stages: int[rows], their stages.
        begin_s: when they begin, from the begin of the iteration.
        takes_s: what they take if the clock stays as it is.
        before_s, ended_s: begin and end of the instruction before each of them on its stage.
    """

    rows: Index
    stages: Index
    begin_s: Floats
    takes_s: Floats
    before_s: Floats
    ended_s: Floats


class Control(Protocol):
    """What the agents of all plans ask for in one iteration.

    Attributes:
        slots: int[n], how many requests an instruction has at most.
    """

    @property
    def slots(self) -> Index: ...  # noqa: D102

    def due(self, slot: int, begun: Begun) -> tuple[Floats, Index, np.ndarray]:
        """Return when each request of a slot is made, for which clock, and where there is one."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """Random numbers of one iteration, the same for all plans, so that plans are compared under equal luck.

    Attributes:
        work: float[n, samples], time of each instruction as a share of its profile's.
        luck: [slots, n, samples], how slow changes are.
    """

    work: Floats
    luck: Luck


@dataclass(slots=True, eq=False)
class Course:
    """What the iterations so far have left, for the next one.

    Attributes:
        calls: clocks in effect and on their way.
        elapsed_s: float[plans, samples], duration of the last iteration.
        before_s: float[2, stages, plans, samples], begin and end of the last instruction of each stage.
    """

    calls: Calls
    elapsed_s: Floats
    before_s: Floats

    @classmethod
    def begin(cls, start: Start, samples: int, *, one_by_one: bool) -> Course:
        """Return the state before the first iteration.

        Args:
            start: the clocks in effect, and on their way.
            samples: number of samples.
            one_by_one: the GPUs of a stage change one after another.
        """
        stages, plans = start.clock.shape
        calls = Calls(start, samples, one_by_one=one_by_one)
        return cls(calls, np.zeros((plans, samples)), np.zeros((2, stages, plans, samples)))


@dataclass(frozen=True, slots=True, eq=False)
class Iteration:
    """One iteration of all plans.

    Attributes:
        time_s, energy_j: float[plans, samples], of the iteration; energy of all stages, waiting included.
        computing_s: float[plans, samples], time spent computing, over all stages.
        below_s, above_s: float[plans, samples], the parts of it below and above the planned clock.
        calls: float[plans, samples], calls to the driver.
        begin_s, end_s: float[n, plans, samples], of each instruction, by the simulator's ``order``.
    """

    time_s: Floats
    energy_j: Floats
    computing_s: Floats
    below_s: Floats
    above_s: Floats
    calls: Floats
    begin_s: Floats
    end_s: Floats


class Executor:
    """Executes iterations of one problem. It holds nothing of a plan."""

    def __init__(self, problem: Problem) -> None:
        """Level the graph and prepare the tables.

        Raises:
            InvalidSchedule: the precedence has a cycle.
        """
        self.problem = problem
        self.simulator = Simulator(problem)
        self.tables = ClockTables.of(problem)
        self._stage = problem.schedule.stage.astype(np.intp)
        self._table = problem.option_of.astype(np.intp)

    def begin_s(self, end_s: Floats) -> Floats:
        """Return when instructions begin that end at these times, float[n, plans], as the latest of what they wait for.

        It is what an execution adds durations to, to the last bit, which the end less the duration is not.
        """
        simulator = self.simulator
        ends = np.vstack([end_s[simulator.order], np.zeros((1, end_s.shape[1]))])
        begins = np.empty_like(end_s)
        for low, high, looks, waits in simulator.levels:
            begins[low:high] = _ready(ends, looks, waits)
        return begins[simulator.rank]

    def iterate(self, planned: Index, control: Control, course: Course, draws: Draws) -> Iteration:
        """Execute one iteration of a run.

        Args:
            planned: int[n, plans], planned clocks as positions in ``tables.mhz``; negative where an instruction sets
                none.
            control: what the agents ask for.
            course: what the iteration before has left; replaced by what this one leaves.
            draws: random numbers.
        """
        problem, simulator, tables = self.problem, self.simulator, self.tables
        n, (plans, samples), calls = problem.instructions, course.elapsed_s.shape, course.calls
        before_s = course.before_s
        before_s -= course.elapsed_s
        room = np.add.reduceat(control.slots, problem.stage_offset[:-1]).max(initial=0)
        calls.renew(int(room), course.elapsed_s)
        begins, ends = np.empty((n, plans, samples)), np.zeros((n + 1, plans, samples))
        work = _Work(tables, problem.blocking_power_w, plans, samples)
        for low, high, looks, waits in simulator.levels:
            rows = simulator.order[low:high]
            stages = self._stage[rows]
            begin = _ready(ends, looks, waits)
            level = calls.of(stages)
            work.begin(self._table[rows], planned[rows], begin, draws.work[rows])
            work.wait(level)
            used = int(control.slots[rows].max())
            if used:
                begun = Begun(rows, stages, begin, work.takes_s(level), before_s[0][stages], before_s[1][stages])
                for slot in range(used):
                    level.ask(*control.due(slot, begun), draws.luck.of(slot, rows))
                work.wait(level)
            end = work.finish(level)
            level.keep()
            before_s[0][stages], before_s[1][stages] = begin, end
            begins[low:high], ends[low:high] = begin, end
        time_s = ends.max(axis=0) + problem.overhead_s
        course.elapsed_s = time_s
        waiting_s = problem.stages * time_s - work.computing_s
        return Iteration(
            time_s=time_s,
            energy_j=work.energy_j + problem.blocking_power_w * waiting_s,
            computing_s=work.computing_s,
            below_s=work.below_s,
            above_s=work.above_s,
            calls=calls.made,
            begin_s=begins,
            end_s=ends[:n],
        )


def _ready(ends: Floats, looks: tuple[Index, ...], waits: tuple[Floats, ...] | None) -> Floats:
    """Return when all predecessors of a level's instructions have ended; see `Simulator.levels`."""
    ready: Floats = ends.take(looks[0], axis=0)
    if waits is None:
        for look in looks[1:]:
            np.maximum(ready, ends[look], out=ready)
        return ready
    shape = (-1,) + (1,) * (ends.ndim - 1)
    ready += waits[0].reshape(shape)
    for look, wait in zip(looks[1:], waits[1:], strict=True):
        np.maximum(ready, ends[look] + wait.reshape(shape), out=ready)
    return ready


class _Work:
    """Follows the work of the instructions of a level, and sums up time and energy over all levels.

    Attributes:
        energy_j, computing_s, below_s, above_s: float[plans, samples], see `Iteration`.
    """

    def __init__(self, tables: ClockTables, blocking_w: float, plans: int, samples: int) -> None:
        self._clocks = len(tables.mhz)
        self._time_s, self._power_w = tables.time_s.ravel(), tables.mixed_power_w(blocking_w).ravel()
        self.energy_j, self.computing_s, self.below_s, self.above_s = (np.zeros((plans, samples)) for _ in range(4))

    def begin(self, table: Index, planned: Index, begin_s: Floats, work: Floats) -> None:
        """Begin the instructions of a level; ``planned`` is int[rows, plans], ``work`` float[rows, samples]."""
        shape = begin_s.shape
        self._shape, self._samples = shape, shape[1] * shape[2]
        self._first = np.repeat(table * self._clocks, self._samples)
        self._planned = np.repeat(planned.ravel(), shape[2])
        self._at_s = begin_s.ravel()
        self._left = np.broadcast_to(work[:, None, :], shape).ravel()

    def wait(self, calls: StageCalls) -> None:
        """Bring into effect what comes before the begin."""
        while (at := np.flatnonzero(calls.next_s <= self._at_s)).size:
            calls.take_effect(at)

    def takes_s(self, calls: StageCalls) -> Floats:
        """Return what the instructions take if the clocks stay as they are."""
        takes: Floats = (self._left * self._time_s[self._first + calls.clock]).reshape(self._shape)
        return takes

    def finish(self, calls: StageCalls) -> Floats:
        """Do the work, from one clock in effect to the next, and return when it ends."""
        at, clock, power, next_s = np.arange(self._at_s.size), calls.clock, calls.power, calls.next_s
        first, from_s, left = self._first, self._at_s, self._left
        ends = np.empty_like(from_s)
        while True:
            place = first + clock
            time_s = self._time_s[place]
            end_s = from_s + left * time_s
            until_s = np.minimum(end_s, next_s)
            self._add(at, until_s - from_s, self._power_w[place * self._clocks + power], clock)
            ends[at] = end_s
            changes = np.flatnonzero(next_s < end_s)
            if not changes.size:
                return ends.reshape(self._shape)
            at, first = at[changes], first[changes]
            left = left[changes] - (until_s[changes] - from_s[changes]) / time_s[changes]
            from_s = until_s[changes]
            calls.take_effect(at)
            clock, power, next_s = calls.clock[at], calls.power[at], calls.next_s[at]

    def _add(self, at: Index, seconds: Floats, power_w: Floats, clock: Index) -> None:
        planned = self._planned[at]
        below, above = clock < planned, (clock > planned) & (planned >= 0)
        self.energy_j += self._by_sample(at, seconds * power_w)
        self.computing_s += self._by_sample(at, seconds)
        if below.any():
            self.below_s += self._by_sample(at, seconds * below)
        if above.any():
            self.above_s += self._by_sample(at, seconds * above)

    def _by_sample(self, at: Index, values: Floats) -> Floats:
        """Sum over the instructions of the level; all of them, in order, are summed faster."""
        if len(at) == len(self._planned):
            whole: Floats = values.reshape(self._shape).sum(axis=0)
            return whole
        part = np.bincount(at % self._samples, weights=values, minlength=self._samples).astype(np.float64)
        return part.reshape(self._shape[1:])
