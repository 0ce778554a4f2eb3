"""Telemetry of a sweep, put together into readings: which iterations count, and their means.

One ``Meter`` for each sweep, fed by ``profiler`` with the reports of all ranks. An iteration counts if every rank of
the job ran it at the clock being measured, told all of its times and energies, and if the iteration before it was
complete at that clock too: so the first one at a clock never counts, nor the first after a gap, a restart or a lost
lease. Ranks report in their own order, so iterations become complete in order, whatever the order among ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from perseus_operator.planning.iterations import Report
from perseus_operator.planning.profiling.sweep import Mean, Reading, StageReading
from perseus_solver.schedules import Schedule

_OPEN_ITERATIONS = 32

Place = tuple[int, int, int]
"""Pipeline, stage, tensor rank."""


@dataclass(frozen=True)
class Shape:
    """Ranks of the job."""

    pipelines: int
    stages: int
    tensors: int

    @property
    def ranks(self) -> int:
        """How many."""
        return self.pipelines * self.stages * self.tensors


@dataclass(frozen=True)
class _Telling:
    """One rank in one iteration, its instructions' energies made single from the agent's running means."""

    report: Report
    energies_mj: Sequence[float]


class Meter:
    """Measures one clock after the other."""

    def __init__(self, schedule: Schedule, shape: Shape, iterations: int) -> None:
        self.trouble = ""
        """Why the latest iteration could not be used; empty: it could."""
        self.spent_us = 0.0
        """Training time under the sweep, usable or not: each rank tells its share of it."""
        self._shape = shape
        self._iterations = iterations
        self._kinds = [
            [(kind, chunk) for kind, _, chunk in schedule.of_stage(stage)] for stage in range(schedule.stages)
        ]
        self._point = -1
        self._open: dict[int, dict[Place, _Telling]] = {}
        self._running: dict[Place, tuple[int, Sequence[int]]] = {}
        self._last: int | None = None
        self._counted: list[dict[Place, _Telling]] = []

    @property
    def counted(self) -> int:
        """Iterations of the clock being measured that count."""
        return len(self._counted)

    def begin(self, point: int) -> None:
        """Another clock is to be measured."""
        if point != self._point:
            self._point = point
            self.interrupt()
            self._counted = []

    def interrupt(self) -> None:
        """Something came in between: iterations before it and after it are no neighbours."""
        self._open.clear()
        self._running.clear()
        self._last = None

    def take(self, report: Report, clock_mhz: int) -> Reading | None:
        """One rank's report of an iteration run under the sweep's plans; a reading if it was the last one needed."""
        place = (report.pipeline, report.stage, report.tensor)
        self.spent_us += report.iteration_time_us / self._shape.ranks
        if report.point != self._point:
            self._last = None
            return None
        telling = self._telling(place, report)
        if telling is None:
            return None
        if report.iteration < (self._last or 0):  # processes count anew
            self.interrupt()
        ranks = self._open.setdefault(report.iteration, {})
        ranks[place] = telling
        for stale in [i for i in self._open if i < report.iteration - _OPEN_ITERATIONS]:
            del self._open[stale]
        if len(ranks) < self._shape.ranks:
            return None
        del self._open[report.iteration]
        self.trouble = ""
        follows, self._last = self._last == report.iteration - 1, report.iteration
        if follows:
            self._counted.append(ranks)
        if len(self._counted) < self._iterations:
            return None
        return self._reading(clock_mhz)

    def _telling(self, place: Place, report: Report) -> _Telling | None:
        """None: unusable, and ``trouble`` says why; or the energy of this iteration alone is not known yet."""
        where = f"pipeline {report.pipeline}, stage {report.stage}"
        expected = len(self._kinds[report.stage]) if report.stage < len(self._kinds) else 0
        if len(report.durations_us) != expected or min(report.durations_us, default=0) <= 0:
            self.trouble = f"{where} does not follow its schedule"
            return None
        means, n = report.instruction_energies_mj, report.energy_iterations
        if report.energy_mj is None or len(means) != expected:
            self.trouble = f"the GPU of {where} tells no energy"
            return None
        before_n, before = self._running.get(place, (0, ()))
        self._running[place] = n, means
        if n == 1:
            return _Telling(report, means)
        if n != before_n + 1 or len(before) != expected:
            return None
        return _Telling(report, [n * now - before_n * was for now, was in zip(means, before, strict=True)])

    def _reading(self, clock_mhz: int) -> Reading:
        return Reading(
            clock_mhz=clock_mhz,
            iteration_time_us=median(
                max(telling.report.iteration_time_us for telling in ranks.values()) for ranks in self._counted
            ),
            stages=tuple(self._stage(stage) for stage in range(self._shape.stages)),
        )

    def _stage(self, stage: int) -> StageReading:
        """Pipelines are replicas: the median of them, so that a slow one does not count. Tensor ranks share the work:
        the slowest decides the time, and the plan's energy is that of a mean GPU."""
        pipelines = [self._stage_of_pipeline(stage, pipeline) for pipeline in range(self._shape.pipelines)]
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
        )

    def _stage_of_pipeline(self, stage: int, pipeline: int) -> StageReading:
        places = [(pipeline, stage, tensor) for tensor in range(self._shape.tensors)]
        own = [[ranks[place] for place in places] for ranks in self._counted]
        indices: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, key in enumerate(self._kinds[stage]):
            indices[key].append(index)
        means = {}
        for key, chosen in indices.items():
            # Of an iteration the mean, which adds up; of iterations the median, against one that was disturbed.
            time_us = median(
                fmean(max(one.report.durations_us[index] for one in tellings) for index in chosen) for tellings in own
            )
            energy_mj = fmean(one.energies_mj[index] for tellings in own for one in tellings for index in chosen)
            means[key] = Mean(len(chosen), time_us, max(energy_mj, 1e-3))
        return StageReading(
            time_us=fmean(one.report.iteration_time_us for tellings in own for one in tellings),
            energy_mj=fmean(one.report.energy_mj or 0 for tellings in own for one in tellings),
            means=means,
            quiet_us=sum(one.report.quiet_us for tellings in own for one in tellings),
            quiet_mj=sum(one.report.quiet_mj for tellings in own for one in tellings),
        )
