"""Combines the reports of single ranks into iterations of a pipeline and of the job.

Reports may arrive late, twice, or never: an iteration counts once all of its ranks have reported, and one that never
completes is dropped. Nothing here judges whether an iteration was slow.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final, TypeVar

from perseus_core.evidence import Evidence, combine
from perseus_core.iteration import IterationReport
from perseus_operator.api.status import Figures
from perseus_operator.api.stored import parse_stored

T = TypeVar("T")

_OPEN_ITERATIONS: Final = 32
"""Iterations that may lack reports at a time: nodes report independently, and iterations may last milliseconds."""
_OPEN_NUMBERS: Final = 1 << 18
"""Durations that one rank may have in those: of very long schedules fewer iterations are open, of which none lasts
milliseconds."""
WINDOW: Final = 15
"""The latest iterations whose medians are reported."""
KEPT: Final = 64
"""Those that are judged: where iterations vary, only many of them show whether they keep a bound."""
_UNPLANNED = 1000
"""The longest baseline that a PerseusJob may ask for."""


@dataclass(frozen=True)
class FirstPipeline:
    """Span and energy of the first pipeline divided by the median of the others'; of the only one, its own figures."""

    time: float
    energy: float | None
    """None: the energy of some pipeline is not known."""


@dataclass(frozen=True)
class JobIteration:
    """One iteration of all pipelines, or of one, by data-parallel rank; a point of None means default clocks."""

    iteration: int
    spans_us: Mapping[int, int]
    """Time to the end of the last instruction of the slowest rank, without waiting for other pipelines; empty once it
    has been judged."""
    time_us: int
    energy_mj: int | None
    points: Mapping[int, int | None]
    mixed: bool
    """Ranks of one pipeline ran different plans, or clocks were held above the plan until agents could follow it: the
    iteration was a transition and proves nothing."""
    stages_us: Mapping[int, tuple[Sequence[int], ...]] = field(default_factory=dict)
    """Durations of instructions by stage, of the pipelines in which every rank reported them."""
    evidence: Evidence | None = None
    """How the clocks of all ranks followed their plans; None: no agent says."""
    own_time: bool = True
    """Spans and durations are without waits for other pipelines, on every rank."""
    first: FirstPipeline | None = None
    """How the first pipeline compares with the others."""

    @property
    def slowest(self) -> int:
        """The pipeline (dp) for which the others waited."""
        return max(self.spans_us, key=self.spans_us.__getitem__)

    @property
    def unplanned(self) -> bool:
        """Whether no rank followed a plan."""
        return not self.mixed and all(point is None for point in self.points.values())


@dataclass
class _OpenIteration:
    """One that lacks reports: those of incomplete pipelines (dp) by stage and tensor-parallel rank, and what the
    complete ones did.
    """

    reports: dict[int, dict[tuple[int, int], IterationReport]] = field(default_factory=dict)
    complete: dict[int, JobIteration] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Medians over iterations of the same plans. Energy None: some GPU has no counter."""

    time_us: int
    energy_mj: int | None
    iterations: int


def measured_of(figures: Figures) -> Measured:
    """Figures as an operator has stored them."""
    return Measured(figures.iteration_time_microseconds, figures.energy_millijoules, figures.iterations or 1)


def measured_from_status(written: object) -> Measured | None:
    """The same; None: there are none, or none that are understood."""
    figures = parse_stored(Figures, written)
    return None if figures is None else measured_of(figures)


@dataclass
class History:
    """The latest iterations of one attempt of a job. Only ``add`` and ``ran_at_default`` change it."""

    pipelines: int
    ranks_per_pipeline: int
    recent: deque[JobIteration] = field(default_factory=lambda: deque(maxlen=KEPT))
    unplanned: list[JobIteration] = field(default_factory=list)
    """Iterations at default clocks, without the first of the attempt, which contains compilation and allocation."""
    _open: dict[int, _OpenIteration] = field(default_factory=dict)
    """By iteration, in the order in which they were first reported: ranks may write any number, so the oldest are
    forgotten by how many came after them, and not by their numbers."""
    _last: dict[int, int] = field(default_factory=dict)

    def add(self, report: IterationReport) -> JobIteration | None:
        """Add a report; the job's iteration if the report completes it."""
        if not 0 <= report.dp < self.pipelines or report.compute_span_us <= 0:
            return None
        if report.iteration <= self._last.get(report.dp, -1):
            return None
        if report.instruction_energies_mj:  # no iteration contains them
            report = replace(report, instruction_energies_mj=())
        iteration = self._open.setdefault(report.iteration, _OpenIteration())
        ranks = iteration.reports.setdefault(report.dp, {})
        for tp in report.together or (report.tp,):
            ranks[report.stage, tp] = report
        forget_oldest(self._open, report)
        if len(ranks) < self.ranks_per_pipeline:
            return None
        del iteration.reports[report.dp]
        self._last[report.dp] = report.iteration
        iteration.complete[report.dp] = _combine({id(each): each for each in ranks.values()}.values())
        if len(iteration.complete) < self.pipelines:
            return None
        self._open.pop(report.iteration, None)
        return self._finish(report.iteration, iteration.complete)

    def ran_at_default(self, iteration: JobIteration) -> None:
        """No plan was followed in an iteration, and no lease holds another clock."""
        if iteration.iteration > 0 and len(self.unplanned) < _UNPLANNED:
            self.unplanned.append(replace(iteration, stages_us={}, spans_us={}))

    @property
    def latest(self) -> int:
        """The latest complete iteration of any pipeline; −1 before the first."""
        return max(self._last.values(), default=-1)

    def measured(self, points: Mapping[int, int | None], *, since: int = 0) -> Measured | None:
        """Medians of the recent iterations that ran exactly these plans.

        Args:
            points: of each pipeline, by dp.
            since: first iteration that counts.

        Returns:
            The medians; None if no iteration counts.
        """
        ran = [i for i in self.recent if not i.mixed and i.points == points and i.iteration >= since]
        return summarise(ran[-WINDOW:])

    def _finish(self, iteration: int, parts: Mapping[int, JobIteration]) -> JobIteration:
        points = _merged(part.points for part in parts.values())
        if self.recent and self.recent[-1].points == points:  # a thousand iterations of as many pipelines share them
            points = self.recent[-1].points
        job = JobIteration(
            iteration=iteration,
            spans_us=_merged(part.spans_us for part in parts.values()),
            time_us=max(part.time_us for part in parts.values()),
            energy_mj=_total(part.energy_mj for part in parts.values()),
            points=points,
            mixed=any(part.mixed for part in parts.values()),
            stages_us=_merged(part.stages_us for part in parts.values()),
            evidence=combine(part.evidence for part in parts.values()),
            own_time=all(part.own_time for part in parts.values()),
            first=_first(parts),
        )
        # Durations of single instructions and of single pipelines would need too much memory.
        self.recent.append(replace(job, stages_us={}, spans_us={}))
        return job


def forget_oldest(open_iterations: dict[int, T], latest: IterationReport) -> None:
    """Forget the iterations that were first reported before others, where more are open than are kept.

    Args:
        open_iterations: by number, in the order in which they were first reported.
        latest: of one of them; the longer its schedule is, the fewer are kept. The youngest always is.
    """
    most = max(1, min(_OPEN_ITERATIONS, _OPEN_NUMBERS // max(1, len(latest.durations_us))))
    while len(open_iterations) > most:
        del open_iterations[next(iter(open_iterations))]


def summarise(iterations: list[JobIteration]) -> Measured | None:
    """Medians of time and energy; the energy of most iterations must be known, since one may miss a reading."""
    if not iterations:
        return None
    energies = [i.energy_mj for i in iterations if i.energy_mj is not None]
    return Measured(
        time_us=round(median(i.time_us for i in iterations)),
        energy_mj=round(median(energies)) if 2 * len(energies) > len(iterations) else None,
        iterations=len(iterations),
    )


def _combine(reports: Iterable[IterationReport]) -> JobIteration:
    """The iteration of one pipeline from the reports of all of its ranks."""
    ranks = list(reports)
    dp, stages_us = ranks[0].dp, _stages(ranks)
    return JobIteration(
        iteration=ranks[0].iteration,
        spans_us={dp: max(rank.compute_span_us for rank in ranks)},
        time_us=max(rank.iteration_time_us for rank in ranks),
        energy_mj=_total(rank.energy_mj for rank in ranks),
        points={dp: ranks[0].point},
        # Each rank by itself: of all together one may be held, and others, that only raise early, above the plan.
        mixed=len({rank.point for rank in ranks}) > 1
        or any(rank.evidence is not None and rank.evidence.is_transition for rank in ranks),
        stages_us={dp: stages_us} if stages_us else {},
        evidence=combine(rank.evidence for rank in ranks),
        own_time=all(rank.own_time for rank in ranks),
    )


def _merged(parts: Iterable[Mapping[int, T]]) -> Mapping[int, T]:
    return {dp: value for part in parts for dp, value in part.items()}


def _total(energies_mj: Iterable[int | None]) -> int | None:
    """The sum; None if one of them is not known."""
    energies = list(energies_mj)
    return None if None in energies else sum(energy for energy in energies if energy is not None)


def _first(parts: Mapping[int, JobIteration]) -> FirstPipeline:
    number = min(parts)
    first = parts[number]
    others = {dp: part for dp, part in parts.items() if dp != number}
    if not others:
        return FirstPipeline(first.time_us, first.energy_mj)
    energies_mj = [part.energy_mj for part in others.values() if part.energy_mj]
    energy = first.energy_mj / median(energies_mj) if first.energy_mj and len(energies_mj) == len(others) else None
    return FirstPipeline(first.spans_us[number] / median(part.spans_us[dp] for dp, part in others.items()), energy)


def _stages(reports: Iterable[IterationReport]) -> tuple[Sequence[int], ...]:
    """Durations by stage, the longest of its tensor-parallel ranks; empty unless all ranks reported all of them."""
    stages: dict[int, Sequence[int]] = {}
    for report in reports:
        durations_us, before = report.durations_us, stages.get(report.stage)
        if not durations_us or min(durations_us) <= 0 or (before is not None and len(before) != len(durations_us)):
            return ()
        stages[report.stage] = durations_us if before is None else array("I", map(max, before, durations_us))
    return tuple(stages[stage] for stage in sorted(stages))
