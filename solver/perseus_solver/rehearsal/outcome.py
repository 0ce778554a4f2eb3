"""Rehearse plans: execute each a few dozen times as the agents of a job would, and say what comes of it.

One pipeline is executed. A job has several, which meet the same in other luck, and each iteration of the job ends with
the slowest: it is over in time if all are, so what the job keeps with a probability is what one pipeline keeps with a
higher one. That is read from the samples, and beyond them from how they thin out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from perseus_core.hardware import Hardware
from perseus_core.marks import MarkSource
from perseus_solver.kinds import Floats, Index
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies
from perseus_solver.model.simulator import Choice
from perseus_solver.rehearsal.control import NO_CLOCK, Expected, Leads
from perseus_solver.rehearsal.execution import Course, Draws, Executor, Iteration, Latencies
from perseus_solver.rehearsal.host import highest_clocks, host_ends
from perseus_solver.rehearsal.requests import Requests, Start

SAMPLES = 64
"""Runs of each plan: enough for a 95th percentile between the third and the fourth largest of them."""
_TAIL = 0.1
"""Share of the samples, the longest ones, from which longer times are inferred. They thin out like an exponential
distribution, as the largest of most things do (Pickands 1975): beyond a threshold each further mean excess is left
with a share 1/e. On ten thousand samples of five plans for A100s and H100s the time that 128 pipelines keep is found
to a tenth of a per cent from 64, where the longest sample alone is short of it by as much.
"""
_SHARES = (np.arange(100) + 0.5) / 100
"""Probabilities whose times have the mean of all."""
_COUNTED = 2
"""Iterations that count: half of the samples each. One before them shows the agents what to expect."""
_COLUMNS = 1 << 14
"""Plans × samples at once, which limits memory."""


class Rule(StrEnum):
    """When agents ask for clocks.

    Attributes:
        TIMETABLE: before an instruction begins, by a timetable in GPU time (design note 0019).
        HOST_ENDS: when the host marks the end of the instruction before. It is what the timetable replaced.
    """

    TIMETABLE = "timetable"
    HOST_ENDS = "host-ends"


@dataclass(frozen=True, slots=True, eq=False)
class Rehearsal:
    """What became of plans; arrays are float[plans, samples], of one pipeline.

    Attributes:
        time_s: iteration times, overhead included.
        energy_j: energies of an iteration, waiting for other stages included.
        computing_s: GPU time spent computing, over all stages.
        below_s, above_s: the parts of it below and above the planned clock.
        calls: calls to the driver in an iteration.
        begin_s, end_s: float[plans, n], when each instruction began and ended in the mean of the last iteration.
        scatter_s: float[plans, n], how much its begin scattered, where marks do not correct that; else zero.
        pipelines: of the job, each with the plan.
        waiting_w: power of a pipeline that waits for the others, watts.
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
    pipelines: int
    waiting_w: float

    def of_plan(self, plan: int) -> Rehearsal:
        """Return what became of one of the plans."""
        one = slice(plan, plan + 1)
        parts: dict[str, Any] = {name: getattr(self, name)[one] for name in (*_BY_SAMPLE, *_BY_INSTRUCTION)}
        return replace(self, **parts)

    def time_kept_s(self, confidence: float) -> Floats:
        """Return the iteration time of the job that each plan keeps with a probability, float[plans] in seconds.

        Args:
            confidence: a share, such as 0.95.
        """
        kept: Floats = self._times_s(np.array([confidence]))[0]
        return kept

    @property
    def mean_time_s(self) -> Floats:
        """float[plans], the expected iteration time of the job, seconds."""
        mean: Floats = self.time_s.mean(axis=1) if self.pipelines == 1 else self._times_s(_SHARES).mean(axis=0)
        return mean

    @property
    def mean_energy_j(self) -> Floats:
        """float[plans], the expected energy of an iteration, joules, of one pipeline that waits for the others."""
        mean: Floats = self.energy_j.mean(axis=1) + self.waiting_w * (self.mean_time_s - self.time_s.mean(axis=1))
        return mean

    def _times_s(self, shares: Floats) -> Floats:
        """Return float[shares, plans], the times that the job keeps with these probabilities."""
        shares = shares ** (1 / self.pipelines)
        times_s: Floats = np.quantile(self.time_s, shares, axis=1)
        samples = self.time_s.shape[1]
        longest = math.ceil(_TAIL * samples)
        beyond = np.flatnonzero((1 - shares) * samples < longest)
        if longest < samples and beyond.size:
            ordered_s = np.sort(self.time_s, axis=1)
            threshold_s = ordered_s[:, -longest - 1]
            excess_s = ordered_s[:, -longest:].mean(axis=1) - threshold_s
            inferred_s = threshold_s + excess_s * np.log(longest / samples / (1 - shares[beyond, None]))
            times_s[beyond] = np.maximum(times_s[beyond], inferred_s)
        return times_s

    @property
    def below_share(self) -> Floats:
        """float[plans], share of the computing time below the planned clock."""
        share: Floats = self.below_s.sum(axis=1) / self.computing_s.sum(axis=1)
        return share

    @property
    def above_share(self) -> Floats:
        """float[plans], share of the computing time above the planned clock."""
        share: Floats = self.above_s.sum(axis=1) / self.computing_s.sum(axis=1)
        return share


def rehearse(
    problem: Problem | Executor,
    frequencies_mhz: np.ndarray,
    hardware: Hardware,
    *,
    rule: Rule = Rule.TIMETABLE,
    samples: int = SAMPLES,
    steady: bool = True,
    seed: int = 0,
) -> Rehearsal:
    """Execute plans in steady iterations under a description of the hardware.

    All plans meet the same random numbers, so that their difference is their own.

    Args:
        problem: the problem that the plans solve, or its executor, which saves preparing it again.
        frequencies_mhz: uint16[plans, n], clocks of instructions, stage by stage; 0 for constant-time ones.
        hardware: what the plans meet.
        rule: when agents ask for clocks.
        samples: runs of each plan.
        steady: let agents learn from an iteration before those that count; otherwise they expect what the plan says.
        seed: of the random numbers.

    Returns:
        Times, energies and what went wrong, for each plan and sample.

    Raises:
        InvalidProblem: a plan has a clock at which an instruction was not measured.
    """
    executor = problem if isinstance(problem, Executor) else Executor(problem)
    choices = executor.simulator.choice_of(frequencies_mhz)
    size = max(_COLUMNS // samples, 1)
    parts = []
    for begin in range(0, len(frequencies_mhz), size):
        part = slice(begin, begin + size)
        run = _Run(executor, frequencies_mhz[part], choices[part], hardware, rule)
        parts.append(run.result(samples, np.random.default_rng(seed), steady=steady))
    return joined(parts)


def rehearse_fastest(executor: Executor, hardware: Hardware) -> Rehearsal:
    """Execute the plan with all clocks at their maximum: what a slowdown is against, since it scatters as well."""
    problem = executor.problem
    return rehearse(executor, problem.frequencies_of(np.zeros((1, problem.instructions), dtype=np.intp)), hardware)


def plans_as_asked(
    executor: Executor, frequencies_mhz: Frequencies, hardware: Hardware, rehearsal: Rehearsal
) -> Frequencies:
    """Return plans in which each instruction has the clock that agents ask for.

    Where a change is left out, its instructions get the clock of others. A plan that says so itself depends less on
    what agents measure: no clock is in it that they might ask for although nobody rehearsed it.

    Args:
        executor: of the problem.
        frequencies_mhz: uint16[plans, n].
        hardware: what the plans meet.
        rehearsal: what becomes of them under it.
    """
    problem, mhz = executor.problem, executor.tables.mhz
    planned = _planned(executor, frequencies_mhz)
    seen = _Seen(rehearsal.begin_s, rehearsal.end_s, rehearsal.time_s.mean(axis=1), rehearsal.scatter_s)
    asked = _expected(executor, hardware, planned, seen).asked()
    plans = frequencies_mhz.copy()
    for table, options in enumerate(problem.options):
        alike, measured = problem.option_of == table, np.sort(options.frequency_mhz)
        place = measured.searchsorted(mhz[np.maximum(asked[:, alike], 0)])
        usable = (asked[:, alike] != NO_CLOCK) & (place < len(measured))
        plans[:, alike] = np.where(usable, measured[np.minimum(place, len(measured) - 1)], plans[:, alike])
    return plans


def joined(parts: list[Rehearsal]) -> Rehearsal:
    """Join the plans of several rehearsals of one job, of equally many samples."""
    names = *_BY_SAMPLE, *_BY_INSTRUCTION
    whole: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **whole)


def _planned(executor: Executor, frequencies_mhz: np.ndarray) -> Index:
    """Return int[plans, n], planned clocks as positions in the tables; `NO_CLOCK` where an instruction sets none."""
    sets = executor.tables.sets_clock[executor.problem.option_of]
    planned: Index = np.where(sets, executor.tables.positions(frequencies_mhz), NO_CLOCK)
    return planned


class _Seen(NamedTuple):
    """What agents have seen of iterations: when instructions begin and end, float[plans, n], the time from one to the
    next, float[plans], and the scatter of begins that marks do not correct, float[plans, n]; seconds.
    """

    begin_s: Floats
    end_s: Floats
    period_s: Floats
    scatter_s: Floats


def _expected(executor: Executor, hardware: Hardware, planned: Index, seen: _Seen) -> Expected:
    """Return what agents expect of an iteration after those they have seen."""
    offset = executor.problem.stage_offset.astype(np.intp)
    if hardware.marks is MarkSource.HOST:  # each stage keeps its highest clock
        planned = planned.copy()
        for low, high in itertools.pairwise(offset.tolist()):
            of_stage = planned[:, low:high]
            of_stage[:] = np.where(of_stage >= 0, of_stage.max(axis=1, keepdims=True), of_stage)
    # The next mark corrects all that scatters before it; without marks it adds up from the iteration's begin.
    error = 0.0 if hardware.marks is MarkSource.EVENTS else executor.scatter(hardware).typical
    return Expected(
        begin_s=seen.begin_s,
        end_s=seen.end_s,
        period_s=seen.period_s,
        clock=planned,
        stage_offset=offset,
        leads=Leads.of(hardware, executor.tables.mhz.tolist(), error=error),
        margin_s=seen.scatter_s,
    )


_BY_SAMPLE = ("time_s", "energy_j", "computing_s", "below_s", "above_s", "calls")
_BY_INSTRUCTION = ("begin_s", "end_s", "scatter_s")


class _Run:
    """A few plans in consecutive iterations."""

    def __init__(
        self,
        executor: Executor,
        frequencies_mhz: np.ndarray,
        choices: Choice,
        hardware: Hardware,
        rule: Rule,
    ) -> None:
        self._executor, self._hardware, self._rule = executor, hardware, rule
        self._planned = _planned(executor, frequencies_mhz)
        of_clocks = [hardware.latency_of(mhz) for mhz in executor.tables.mhz.tolist()]
        self._latencies = Latencies(
            p50_s=np.array([latency.p50_s for latency in of_clocks]),
            sigma=np.array([latency.sigma for latency in of_clocks]),
            call_s=hardware.latency.call_s,
            call_sigma=hardware.latency.sigma,
        )
        begin_s, end_s = executor.times_s(executor.simulator.duration_s(choices))
        seen = _Seen(begin_s, end_s, end_s.max(axis=1) + executor.problem.overhead_s, np.zeros(begin_s.shape))
        self._expected = _expected(executor, hardware, self._planned, seen)

    def result(self, samples: int, random: np.random.Generator, *, steady: bool) -> Rehearsal:
        """Execute all iterations, and return what became of those that count."""
        warm_up = 1 if steady else 0
        counted = list(self._iterations(math.ceil(samples / _COUNTED), random, warm_up + _COUNTED))[warm_up:]
        outcome = {
            name: np.concatenate([getattr(iteration, name) for iteration in counted], axis=1)[:, :samples]
            for name in _BY_SAMPLE
        }
        problem = self._executor.problem
        return Rehearsal(
            **outcome,
            begin_s=self._expected.begin_s,
            end_s=self._expected.end_s,
            scatter_s=self._expected.margin_s,
            pipelines=self._hardware.pipelines,
            waiting_w=problem.blocking_power_w * problem.stages,
        )

    def _iterations(self, samples: int, random: np.random.Generator, iterations: int) -> Iterator[Iteration]:
        """Yield consecutive iterations; each corrects what the agents expect of the next."""
        hardware = self._hardware
        course: Course | None = None
        for _ in range(iterations):
            requests = self._requests()
            if course is None:
                course = Course.begin(self._start(), samples, one_by_one=hardware.gpus_per_lock > 1)
            draws = self._draws(requests.of_instruction, samples, random)
            scatter = hardware.marks is MarkSource.EVENTS
            iteration = self._executor.iterate(self._planned, requests, course, draws, scatter=scatter)
            self._expected = replace(
                self._expected,
                begin_s=iteration.begin_s,
                end_s=iteration.end_s,
                period_s=iteration.time_s.mean(axis=1),
                margin_s=iteration.scatter_s,
            )
            yield iteration

    def _requests(self) -> Requests:
        if self._rule is Rule.HOST_ENDS:
            return host_ends(self._executor.problem, self._hardware, self._planned)
        return self._expected.timetable(corrected=self._hardware.marks is not MarkSource.EVENTS)

    def _start(self) -> Start:
        if self._rule is Rule.HOST_ENDS:
            return highest_clocks(self._planned, self._executor.problem.stage_offset.tolist())
        return self._expected.start()

    def _draws(self, slots: int, samples: int, random: np.random.Generator) -> Draws:
        """Return random numbers of one iteration; plans that need fewer slots than others see the same in theirs."""
        hardware, n, gpus = self._hardware, self._executor.problem.instructions, self._hardware.gpus_per_lock
        work, latency = random.spawn(2)
        share = self._executor.scatter(hardware).draw(samples, work)
        normal = np.empty((slots, n, samples, gpus))
        for slot in range(slots):
            normal[slot] = latency.standard_normal((n, samples, gpus))
        return Draws(share, normal, self._latencies)
