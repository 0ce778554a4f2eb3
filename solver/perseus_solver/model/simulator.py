"""Simulate plans exactly: start and end of every instruction by longest path, iteration time, energy and slack.

All figures of plans come from here, never from a model of the solver. A `Simulator` levels the graph once; a run is
then a few numpy calls for each level, for one plan or for many at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import InvalidProblem, InvalidSchedule
from perseus_solver.kinds import Floats, Ints
from perseus_solver.model.problem import Problem
from perseus_solver.schedules.base import name_cycle
from perseus_solver.topology import levels

Choice = npt.NDArray[np.integer]
"""A plan as positions in the options of each instruction: int[n], or int[plans, n] for many."""

_AT_ONCE = 1 << 19
"""Instructions over all plans that `Simulator.totals` simulates at once: 25 MiB of arrays. Larger ones take longer."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """The outcome of one plan, or of many.

    Attributes:
        start_s, end_s: float[n] or float[plans, n], seconds from the start of the iteration.
        iteration_time_s: float or float[plans], seconds, overhead included.
        energy_j: float or float[plans], joules of the iteration, waiting included.
    """

    start_s: Floats
    end_s: Floats
    iteration_time_s: Floats
    energy_j: Floats


class Simulator:
    """Runs plans of one problem. Building takes O(n + m), and so does a run, in a few numpy calls for each level.

    Runs do not change it, so threads may share it.

    Attributes:
        problem: the problem whose plans it runs.
        order: int[n], the instructions by topological level.
        rank: int[n], the place of each instruction in ``order``.
        levels: for each level its first place and the one behind its last, the places of the first predecessor of each
            of its instructions, of the second, and so on, where n stands for none; and the delays after these, float[
            instructions, 1] each, or None where there is no delay.
    """

    def __init__(self, problem: Problem) -> None:
        """Level the graph.

        Args:
            problem: the problem whose plans will be run.

        Raises:
            InvalidSchedule: the precedence has a cycle; the message names its instructions.
        """
        self.problem = problem
        n = problem.instructions
        first = np.cumsum([0, *(table.time_s.size for table in problem.options)])
        self._first = first[problem.option_of]
        self._time_s = np.concatenate([table.time_s for table in problem.options])
        self._energy_j = np.concatenate([table.energy_j for table in problem.options])

        level = levels(n, problem.edge_from, problem.edge_to)
        if (level < 0).any():
            cycle = name_cycle(problem.schedule, problem.edge_from, problem.edge_to, level < 0)
            raise InvalidSchedule(f"the schedule deadlocks: {cycle}")
        self.order = np.argsort(level, kind="stable")  # rank in level order → instruction
        self.rank = np.empty(n, dtype=np.intp)
        self.rank[self.order] = np.arange(n)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(level))])
        ends = (problem.edge_from, problem.edge_to)
        self.levels = self._sweep(*ends, bounds)
        self._backward = self._sweep(*ends[::-1], bounds)[::-1]

    def _sweep(self, before: Ints, after: Ints, bounds: npt.NDArray[np.integer]) -> list[_Level]:
        """Return, for each level, the first neighbour of each instruction, the second, and so on; n stands for none."""
        n = self.problem.instructions
        rank = self.rank
        order = np.argsort(rank[after], kind="stable")
        source, target = rank[before[order]], rank[after[order]]
        delay = self.problem.edge_delay_s[order]
        in_degree = np.bincount(target, minlength=n)
        nth = np.arange(target.size) - (np.cumsum(in_degree) - in_degree)[target]
        width = int(in_degree.max(initial=1))
        neighbour = np.full((width, n), n, dtype=np.intp)
        neighbour[nth, target] = source
        wait = np.zeros((width, n, 1))
        wait[nth, target, 0] = delay
        delayed = bool(delay.any())
        steps = []
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            depth = max(int(in_degree[low:high].max()), 1)
            looks = tuple(np.ascontiguousarray(neighbour[k, low:high]) for k in range(depth))
            waits = tuple(wait[k, low:high] for k in range(depth)) if delayed else None
            steps.append((low, high, looks, waits))
        return steps

    def choice_of(self, frequencies_mhz: npt.NDArray[np.integer]) -> Choice:
        """Return the positions in the options that belong to the clocks of a plan.

        Args:
            frequencies_mhz: int[n] or int[plans, n], MHz; 0 for constant-time instructions.

        Returns:
            The plan as `Choice`, of the same shape.

        Raises:
            InvalidProblem: an instruction was not measured at its clock.
        """
        choice = np.empty(frequencies_mhz.shape, dtype=np.intp)
        for k, table in enumerate(self.problem.options):
            columns = self.problem.option_of == k
            wanted = frequencies_mhz[..., columns].astype(np.int64)
            at = np.searchsorted(-table.frequency_mhz, -wanted)
            measured = table.frequency_mhz[np.minimum(at, table.frequency_mhz.size - 1)] == wanted
            if not measured.all():
                clock = int(wanted[~measured][0])
                raise InvalidProblem(f"{table.kind.label} of stage {table.stage} was not measured at {clock} MHz")
            choice[..., columns] = at
        return choice

    def duration_s(self, choice: Choice) -> Floats:
        """Return the time of each instruction under a plan.

        Args:
            choice: int[n] or int[plans, n], positions in the options.

        Returns:
            Seconds, of the shape of ``choice``.
        """
        return self._time_s[self._first + choice]

    def instruction_energy_j(self, choice: Choice) -> Floats:
        """Return the energy of each instruction under a plan.

        Args:
            choice: int[n] or int[plans, n], positions in the options.

        Returns:
            Joules, of the shape of ``choice``.
        """
        return self._energy_j[self._first + choice]

    def end_s(self, duration_s: Floats) -> Floats:
        """Return the earliest end of each instruction for given durations.

        Args:
            duration_s: float[n] or float[plans, n], seconds.

        Returns:
            Seconds from the start of the iteration, without overhead, of the shape of ``duration_s``.
        """
        n = self.problem.instructions
        one = duration_s.ndim == 1
        columns = duration_s[self.order, None] if one else duration_s.T[self.order]
        ends = _longest(columns, self.levels, n)[self.rank]
        return ends[:, 0] if one else ends.T

    def slack_s(self, duration_s: Floats, deadline_s: float | None = None) -> Floats:
        """Return by how many seconds each instruction may start later without the iteration ending after a deadline.

        Args:
            duration_s: float[n] or float[plans, n], seconds.
            deadline_s: seconds, overhead included; None: the earliest end of the iteration.

        Returns:
            Zero on critical paths (up to rounding), negative where the deadline is missed.
        """
        n = self.problem.instructions
        end = self.end_s(duration_s)
        one = duration_s.ndim == 1
        columns = duration_s[self.order, None] if one else duration_s.T[self.order]
        tail = _longest(columns, self._backward, n)[self.rank]  # from the start of each to the end of all
        tails = tail[:, 0] if one else tail.T
        if deadline_s is None:
            last = end.max(axis=-1, keepdims=True)
        else:
            last = np.asarray(deadline_s - self.problem.overhead_s)
        slack: Floats = last - tails - (end - duration_s)
        return slack

    def run(self, choice: Choice) -> Simulation:
        """Simulate one plan or many.

        Args:
            choice: int[n] or int[plans, n], positions in the options.
        """
        duration = self.duration_s(choice)
        end = self.end_s(duration)
        time = end.max(axis=-1) + self.problem.overhead_s
        return Simulation(
            start_s=end - duration, end_s=end, iteration_time_s=time, energy_j=self._energy(choice, duration, time)
        )

    def totals(self, choices: Choice) -> tuple[Floats, Floats]:
        """Simulate many plans, a few at a time to limit memory.

        Args:
            choices: int[plans, n], positions in the options.

        Returns:
            float[plans] iteration times in seconds, and float[plans] iteration energies in joules.
        """
        step = max(1, _AT_ONCE // self.problem.instructions)
        parts = [self.run(choices[k : k + step]) for k in range(0, len(choices), step)]
        time_s = np.concatenate([part.iteration_time_s for part in parts])
        return time_s, np.concatenate([part.energy_j for part in parts])

    def _energy(self, choice: Choice, duration_s: Floats, iteration_time_s: Floats) -> Floats:
        """Return Σ e plus blocking power times the waiting time of every stage."""
        waiting_s = self.problem.stages * iteration_time_s - duration_s.sum(axis=-1)
        computing_j: Floats = self.instruction_energy_j(choice).sum(axis=-1)
        blocking_j: Floats = self.problem.blocking_power_w * waiting_s
        return computing_j + blocking_j


_Level = tuple[int, int, tuple[npt.NDArray[np.intp], ...], tuple[Floats, ...] | None]


def _longest(duration_s: Floats, levels: list[_Level], n: int) -> Floats:
    """Return the longest path up to and including each instruction; rows in level order, a column for each plan.

    Row n, always 0, stands for "no neighbour".
    """
    ends = np.zeros((n + 1, duration_s.shape[1]))
    for low, high, looks, waits in levels:
        ready = ends.take(looks[0], axis=0)
        if waits is None:
            for look in looks[1:]:
                np.maximum(ready, ends.take(look, axis=0), out=ready)
        else:
            ready += waits[0]
            for look, wait in zip(looks[1:], waits[1:], strict=True):
                np.maximum(ready, ends.take(look, axis=0) + wait, out=ready)
        np.add(ready, duration_s[low:high], out=ends[low:high])
    return ends[:n]
