"""Aggregates the telemetry of a sweep into readings: which iterations count, and their means.

An iteration counts if every rank of the job ran it at the clock being measured and reported all of its times and
energies, and if the iteration before it was complete at that clock too. So the first one at a clock never counts, nor
the first after a gap, a restart or a lost lease. Each rank reports its iterations in order, so iterations also become
complete in order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median

from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId
from perseus_operator.families.training.features.profile.reading import Mean, Reading, StageReading
from perseus_operator.nodes.iterations import forget_oldest
from perseus_solver.schedules import Schedule


@dataclass(frozen=True)
class JobShape:
    """Ranks of the job."""

    pipelines: int
    stages: int
    tensor_parallel: int

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pipelines * self.stages * self.tensor_parallel

    def has(self, rank: RankId) -> bool:
        """Whether the job has this rank: processes may claim any."""
        return rank.dp < self.pipelines and rank.stage < self.stages and rank.tp < self.tensor_parallel


@dataclass(frozen=True)
class _RankIteration:
    """One rank in one iteration, with the energy of each instruction recovered from the agent's running means."""

    report: IterationReport
    energies_mj: Sequence[float]


class ProfileAggregator:
    """Aggregates one sweep, one clock after another."""

    def __init__(self, schedule: Schedule, shape: JobShape, iterations: int) -> None:
        self.rejection = ""
        """Why the latest iteration could not be used; empty: it could."""
        self.spent_us = 0.0
        """Training time under the sweep, usable or not: each rank contributes its share."""
        self._shape = shape
        self._iterations = iterations
        self._kinds = [
            [(kind, chunk) for kind, _, chunk in schedule.of_stage(stage)] for stage in range(schedule.stages)
        ]
        self._point: int | None = -1
        self._number = -1
        self._open: dict[int, dict[RankId, _RankIteration]] = {}
        self._running: dict[RankId, tuple[int, Sequence[int]]] = {}
        self._last: int | None = None
        self._counted: list[dict[RankId, _RankIteration]] = []

    @property
    def counted(self) -> int:
        """Iterations of the clock being measured that count."""
        return len(self._counted)

    def begin(self, point: int | None, number: int = 0) -> None:
        """Start another reading; nothing changes if it is the present one.

        Args:
            point: of the clock; None: whatever clock there is without a plan.
            number: of the reading: a clock may be measured twice in a row.
        """
        if (point, number) != (self._point, self._number):
            self._point, self._number = point, number
            self.interrupt()
            self._counted = []

    def interrupt(self) -> None:
        """Break the sequence of iterations: the next one has no predecessor."""
        self._open.clear()
        self._running.clear()
        self._last = None

    def observe(self, report: IterationReport, clock_mhz: int) -> Reading | None:
        """Take in one rank's report of an iteration; the clock's reading if it was the last one needed."""
        self.spent_us += report.iteration_time_us * len(report.rank_ids) / self._shape.ranks
        if report.point != self._point:
            self._last = None
            return None
        if report.together:  # of before single ranks were asked for
            return None
        measured = self._rank_iteration(report)
        if measured is None:
            return None
        if report.iteration < (self._last or 0):  # the processes count from their start again
            self.interrupt()
        ranks = self._open.setdefault(report.iteration, {})
        ranks[report.rank_id] = measured
        forget_oldest(self._open, report)
        if len(ranks) < self._shape.ranks:
            return None
        self._open.pop(report.iteration, None)
        self.rejection = ""
        follows, self._last = self._last == report.iteration - 1, report.iteration
        if follows:
            self._counted.append(ranks)
        if len(self._counted) < self._iterations:
            return None
        return self._reading(clock_mhz)

    def _rank_iteration(self, report: IterationReport) -> _RankIteration | None:
        """None: unusable, and ``rejection`` says why; or the energy of this iteration alone is not known yet."""
        if refusal := self._refusal(report):
            self.rejection = refusal
            return None
        means, n = report.instruction_energies_mj, report.energy_iterations
        before_n, before = self._running.get(report.rank_id, (0, ()))
        self._running[report.rank_id] = n, means
        if n == 1:
            return _RankIteration(report, means)
        if n != before_n + 1 or len(before) != len(means):
            return None
        return _RankIteration(report, [n * now - before_n * was for now, was in zip(means, before, strict=True)])

    def _refusal(self, report: IterationReport) -> str:
        """Why the report of an iteration cannot be used; empty: it can."""
        where = f"dp {report.dp}, stage {report.stage}"
        if not self._shape.has(report.rank_id):
            return f"{where}, tp {report.tp} is no rank of the job"
        expected = len(self._kinds[report.stage]) if report.stage < len(self._kinds) else 0
        if len(report.durations_us) != expected or min(report.durations_us, default=0) <= 0:
            return f"{where} does not follow its schedule"
        if report.energy_mj is None:
            return f"the GPU of {where} has no energy counter"
        if len(report.instruction_energies_mj) != expected:  # as a custom function of torch runs them on two threads
            return f"instructions of {where} run at the same time: what each takes is not known"
        return ""

    def _reading(self, clock_mhz: int) -> Reading:
        return Reading(
            clock_mhz=clock_mhz,
            iteration_time_us=median(
                max(measured.report.iteration_time_us for measured in ranks.values()) for ranks in self._counted
            ),
            stages=tuple(self._stage(stage) for stage in range(self._shape.stages)),
            scatter=tuple(abs(later - earlier) / math.sqrt(2) for earlier, later in pairwise(self._loads())),
            iterations=len(self._counted),
        )

    def _loads(self) -> list[float]:
        """Logarithm of what each iteration computed, in time: that of the median pipeline, as in the reading."""
        shape = self._shape
        return [
            math.log(
                median(
                    sum(sum(ranks[RankId(dp, stage, 0)].report.durations_us) for stage in range(shape.stages))
                    for dp in range(shape.pipelines)
                )
            )
            for ranks in self._counted
        ]

    def _stage(self, stage: int) -> StageReading:
        """Pipelines are replicas: their median counts, so that a slow one has no effect. Tensor-parallel ranks share
        the work: the slowest decides the time, and the plan's energy is that of a mean GPU.
        """
        pipelines = [self._stage_of_pipeline(stage, dp) for dp in range(self._shape.pipelines)]
        return StageReading(
            time_us=median(one.time_us for one in pipelines),
            energy_mj=median(one.energy_mj for one in pipelines),
            means={
                key: Mean(
                    first.count,
                    median(one.means[key].time_us for one in pipelines),
                    median(one.means[key].energy_mj for one in pipelines),
                )
                for key, first in pipelines[0].means.items()
            },
            quiet_us=sum(one.quiet_us for one in pipelines),
            quiet_mj=sum(one.quiet_mj for one in pipelines),
            reached_mhz=_median_known(one.reached_mhz for one in pipelines),
        )

    def _stage_of_pipeline(self, stage: int, dp: int) -> StageReading:
        rank_ids = [RankId(dp, stage, tp) for tp in range(self._shape.tensor_parallel)]
        iterations = [[ranks[rank_id] for rank_id in rank_ids] for ranks in self._counted]
        indices: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, key in enumerate(self._kinds[stage]):
            indices[key].append(index)
        means = {}
        for key, chosen in indices.items():
            # Of an iteration the mean, which adds up; of iterations the median, against one that was disturbed.
            time_us = median(
                fmean(max(one.report.durations_us[index] for one in ranks) for index in chosen) for ranks in iterations
            )
            energy_mj = fmean(one.energies_mj[index] for ranks in iterations for one in ranks for index in chosen)
            means[key] = Mean(len(chosen), time_us, max(energy_mj, 1e-3))
        mean_us = fmean(one.report.iteration_time_us for ranks in iterations for one in ranks)
        usual_us = median(fmean(one.report.iteration_time_us for one in ranks) for ranks in iterations)
        # Power hardly depends on load, so the usual iteration takes the mean power: its own energy would be that of
        # its load.
        usual = usual_us / mean_us
        means = {key: replace(mean, energy_mj=usual * mean.energy_mj) for key, mean in means.items()}
        return StageReading(
            time_us=usual_us,
            energy_mj=usual * fmean(one.report.energy_mj or 0 for ranks in iterations for one in ranks),
            means=means,
            quiet_us=sum(one.report.quiet_us for ranks in iterations for one in ranks),
            quiet_mj=sum(one.report.quiet_mj for ranks in iterations for one in ranks),
            reached_mhz=_median_known(
                min((one.report.evidence.clock_mhz or 0) if one.report.evidence else 0 for one in ranks)
                for ranks in iterations
            ),
        )


def _median_known(clocks_mhz: Iterable[int | None]) -> int | None:
    """Return the median clock; None: some clock is not known."""
    clocks = list(clocks_mhz)
    return round(median(clock for clock in clocks if clock)) if clocks and all(clocks) else None
