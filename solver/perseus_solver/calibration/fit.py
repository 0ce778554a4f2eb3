"""Find the delays and the overhead that explain measured iteration times best: robust, regularised, non-negative.

The equations are in the docstring of the package. Errors are absolute and relative to the iteration, so that an
iteration disturbed by a checkpoint counts no more than any other. The makespan T is a maximum of linear functions of
the delays, one for each path, hence convex; |T + o − y| is the larger of T + o − y, which is convex, and y − o − T,
which is concave. A step replaces the concave part by its tangent, the path that is critical now, and the convex part by
all paths seen so far, and solves the linear programme that results. This majorises the objective up to paths not yet
seen, which are added until none is missing (convex-concave procedure with cutting planes). Each accepted step lowers
the objective. The objective is not convex, so the search begins at several points.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perseus_solver.calibration.linear_program import SCALE, minimise
from perseus_solver.calibration.replay import Replay
from perseus_solver.kinds import Floats

REGULARISATION = 0.1
"""A delay may differ from the others of its kind only where that removes, on average over iterations, more than a tenth
of what one more crossing of it would add. Hence a delay that no critical path crosses equals the others.
"""
TIE = 1e-3
"""Share of the regularisation that also pulls the common delays to zero: where only a sum is determined, the overhead
gets it.
"""
_FIRST_STEPS, _FINALISTS, _STEPS = 4, 2, 40
"""Steps from every start, starts that continue, and steps from each of those."""
_GRID = 8
"""Values of a common delay that starts try, besides 0."""
_NEGLIGIBLE = 1e-7
"""An improvement of the mean relative error below this does not count: clocks resolve microseconds in iterations of
seconds.
"""


@dataclass(frozen=True, slots=True, eq=False)
class FittedDelays:
    """Delays in the order of `Replay`, float[delays], and the overhead of every iteration; seconds."""

    delay_s: Floats
    overhead_s: float

    def predict_s(self, replay: Replay, duration_s: Floats) -> Floats:
        """Return iteration times, float[iterations], for measured computations, float[iterations, instructions]."""
        return replay.time_s(duration_s, self.delay_s) + self.overhead_s


class Fit:
    """The fit of one set of iterations."""

    def __init__(self, replay: Replay, duration_s: Floats, time_s: Floats) -> None:
        """Prepare the fit.

        Args:
            replay: the graph of the schedule.
            duration_s: float[iterations, instructions], measured seconds of each instruction.
            time_s: float[iterations], measured seconds of each iteration.
        """
        self._replay = replay
        self._duration_s = duration_s
        self._time_s = time_s
        self._weight = REGULARISATION / float(np.median(time_s))
        links = len(replay.pairs)
        self._kinds = [k for k in (slice(0, links), slice(links, replay.parameters)) if k.stop > k.start]

    def best(self) -> FittedDelays:
        """Take a few steps from each start, continue with the best of them to the end, and return the best result."""
        begun = [_Descent(self, start) for start in self._starts()]
        for descent in begun:
            descent.walk(_FIRST_STEPS)
        begun.sort(key=lambda descent: descent.value)
        for descent in begun[:_FINALISTS]:
            descent.walk(_STEPS)
        return min(begun, key=lambda descent: descent.value).here

    def _starts(self) -> Iterator[FittedDelays]:
        """Yield, for each common delay between stages on a grid, the best common gap within stages on another grid."""
        duration_s, time_s, replay = self._duration_s, self._time_s, self._replay
        none = np.zeros(replay.parameters)
        bare_s, crossed = replay.crossings(duration_s, none)
        missing_s = max(float(np.median(time_s - bare_s)), 0.0)
        # A geometric grid, down from the delay that would explain all missing time alone.
        ladders = []
        for kind in self._kinds:
            most = missing_s / max(float(np.median(crossed[:, kind].sum(axis=1))), 1.0)
            ladders.append([0.0, *(most * 0.5**k for k in range(_GRID))])
        first, second = ladders if len(ladders) == 2 else ([0.0], ladders[0])
        for common in first:
            row = []
            for other in second:
                delay_s = none.copy()
                delay_s[self._kinds[0]] = common
                delay_s[self._kinds[-1]] = other
                makespan_s = replay.time_s(duration_s, delay_s)
                start = FittedDelays(delay_s, max(float(np.median(time_s - makespan_s)), 0.0))
                row.append((self.objective(start, makespan_s), start))
            yield min(row, key=lambda item: item[0])[1]

    def paths(self) -> _Paths:
        """Return an empty set of paths."""
        return _Paths(self._replay, self._duration_s)

    def objective(self, parameters: FittedDelays, makespan_s: Floats) -> float:
        """Return mean relative error plus penalty."""
        penalty_s = 0.0
        for kind in self._kinds:
            delays = parameters.delay_s[kind]
            common = float(np.median(delays))
            penalty_s += float(np.abs(delays - common).sum()) + TIE * delays.size * common
        error = np.abs(makespan_s + parameters.overhead_s - self._time_s) / self._time_s
        return float(error.mean()) + self._weight * penalty_s

    def step(self, seen: _Paths, active: _CuttingPlanes) -> FittedDelays:
        """Return the minimum of the majorant.

        The columns are delays, overhead, common delays, deviations and relative errors. Times and errors are scaled by
        `SCALE`, so that numbers are near 1.
        """
        count, kinds, n = self._replay.parameters, len(self._kinds), self._time_s.size
        weight = self._weight
        belongs = np.zeros((count, kinds))
        for j, kind in enumerate(self._kinds):
            belongs[kind, j] = 1

        def bounds(cuts: _CuttingPlanes, sign: float) -> tuple[Floats, Floats]:
            """Return rows and limits: ``sign`` times (cut + overhead − measured) is at most the error."""
            measured_s = self._time_s[cuts.owner][:, None]
            nothing, error = np.zeros((cuts.owner.size, kinds + count)), np.zeros((cuts.owner.size, n))
            error[np.arange(cuts.owner.size), cuts.owner] = -1
            row = np.hstack([sign * cuts.crossed / measured_s, sign / measured_s, nothing, error])
            return row, sign * SCALE * (1 - cuts.computing_s / measured_s[:, 0])

        over, over_limit = bounds(seen.cuts, 1.0)
        under, under_limit = bounds(active, -1.0)
        eye, none = np.eye(count), np.zeros((count, 1))
        above = np.hstack([eye, none, -belongs, -eye, np.zeros((count, n))])
        below = np.hstack([-eye, none, belongs, -eye, np.zeros((count, n))])
        limits = np.concatenate([over_limit, under_limit, np.zeros(2 * count)])
        columns = 2 * count + 1 + kinds + n
        tie = weight * TIE * belongs.sum(axis=0)
        solution = minimise(
            cost=np.concatenate([np.zeros(count + 1), tie, np.full(count, weight), np.full(n, 1 / n)]),
            rows=np.vstack([over, under, above, below]),
            row_low=np.full(limits.size, -np.inf),
            row_high=limits,
            low=np.zeros(columns),
            high=np.full(columns, np.inf),
        )
        return FittedDelays(solution[:count] / SCALE, float(solution[count]) / SCALE)


class _Descent:
    """The descent from one start."""

    def __init__(self, fit: Fit, start: FittedDelays) -> None:
        self._fit = fit
        self._seen = fit.paths()
        self.here = start
        self._active = self._seen.critical(start)
        self.value = fit.objective(start, self._active.time_s(start))
        self._arrived = False

    def walk(self, steps: int) -> None:
        """Take up to this many more steps, until none improves."""
        while steps and not self._arrived:
            steps -= 1
            there = self._fit.step(self._seen, self._active)
            critical = self._seen.critical(there)
            value = self._fit.objective(there, critical.time_s(there))
            if value < self.value - _NEGLIGIBLE:
                self.here, self.value, self._active = there, value, critical
            else:
                # With no path missing, the majorant is exact at its minimum, so this is a local minimum.
                self._arrived = not self._seen.grew


@dataclass(frozen=True, slots=True, eq=False)
class _CuttingPlanes:
    """Paths.

    Attributes:
        owner: int[paths], the iteration of each.
        computing_s: float[paths], seconds of its computations.
        crossed: float[paths, delays], how often it crosses each delay.
    """

    owner: npt.NDArray[np.intp]
    computing_s: Floats
    crossed: Floats

    def time_s(self, parameters: FittedDelays) -> Floats:
        """Return the length of each path in seconds, without overhead."""
        length: Floats = self.computing_s + self.crossed @ parameters.delay_s
        return length


class _Paths:
    """All paths that were ever critical. The longest of an iteration bounds its makespan from below."""

    def __init__(self, replay: Replay, duration_s: Floats) -> None:
        self._replay = replay
        self._duration_s = duration_s
        self.cuts = _CuttingPlanes(np.zeros(0, dtype=np.intp), np.zeros(0), np.zeros((0, replay.parameters)))
        self.grew = True

    def critical(self, at: FittedDelays) -> _CuttingPlanes:
        """Return the critical path of each iteration, and add those that are new; ``grew`` says whether any was."""
        makespan_s, crossed = self._replay.crossings(self._duration_s, at.delay_s)
        paths = _CuttingPlanes(np.arange(makespan_s.size), makespan_s - crossed @ at.delay_s, crossed)
        known_s = np.zeros(makespan_s.size)
        np.maximum.at(known_s, self.cuts.owner, self.cuts.time_s(at))
        new = makespan_s > known_s * (1 + _NEGLIGIBLE)
        self.grew = bool(new.any())
        self.cuts = _CuttingPlanes(
            np.concatenate([self.cuts.owner, paths.owner[new]]),
            np.concatenate([self.cuts.computing_s, paths.computing_s[new]]),
            np.concatenate([self.cuts.crossed, paths.crossed[new]]),
        )
        return paths
