"""The load of the next hours: that of the same hour of the week, moved by how the last hours differ from theirs.

People's weeks are alike, so the template is the mean of the same epoch of the weeks before, newer ones more. What is
different today is a factor, the drift: the mean ratio of the last epochs to their templates. It holds for the next
hours and fades. Before there is a week, the same hour of the day before stands in, and before there is a day, the last
hours. Epochs are compared in two ways: smoothed by those beside them, for what moves by chance, and each by itself, for
jobs that come by the clock. The one that erred less in the last week speaks.

How far forecasts may be wrong is not assumed. Each one is kept until its epoch has passed, by how far ahead it was
made. The headroom is the least with which, of the requests of the last week, as many as was asked for came in epochs
whose heaviest minute would have been carried, bursts included. Replicas are whole, so they carry more than was forecast
by chance; who says what 1, 2, … of them carry does not pay for it twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats

DAY_S: Final = 86_400.0
WEEK_S: Final = 7 * DAY_S
MOST_AHEAD: Final = 96
_WEEKS: Final = 4
"""Of history: services grow, and older weeks say less."""
_NEWER: Final = 0.5
"""A week counts so much of the next one."""
_RECENT: Final = 4
"""Epochs whose ratio to the template is the drift: fewer follow noise, more come late."""
_SMOOTHING: Final = (1, 4, 6, 4, 1)
_FADING: Final = 0.85
"""Of the drift's logarithm that is left an epoch further ahead."""
_KEPT: Final = 672
"""Outcomes of each distance: a week of quarters of an hour. Two weeks cost 2 % more on a week of conversations."""
_FEW: Final = 32
"""Outcomes of one distance below which those of all distances are taken together."""
_SAME: Final = 1e-9
"""Relative difference below which loads are the same."""
_UNSEEN: Final = 1.5
"""Headroom before any forecast could be judged."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The load of an epoch that has not begun.

    Attributes:
        expected: requests a second, mean.
        upper: to be carried, so that requests come in an epoch whose heaviest minute is carried with the probability
            that was asked for.
        basis: what it rests on: ``week``, ``day`` or ``hours``.
    """

    expected: float
    upper: float
    basis: str


@dataclass(frozen=True, slots=True)
class ForecastError:
    """How forecasts for the next epoch did.

    Attributes:
        forecasts: that were judged.
        absolute_percent: of the error over the load, mean weighted by load.
        bias_percent: of the forecasts' sum over the loads' sum; positive: too much.
        covered_percent: of the requests, those of epochs whose heaviest minute stayed within ``upper``.
    """

    forecasts: int
    absolute_percent: float
    bias_percent: float
    covered_percent: float


class Forecaster:
    """The forecast of one pool.

    Args:
        epoch_s: how long an epoch lasts; a day must be a whole number of them.
        quantile: share of the requests that are to come in epochs whose heaviest minute is carried.

    Raises:
        InvalidProblem: a value is out of range.
    """

    def __init__(self, epoch_s: float, quantile: float = 0.97) -> None:
        if not 60.0 <= epoch_s <= DAY_S or DAY_S % epoch_s:
            raise InvalidProblem(f"epoch_s must be from 60 to 86,400 and divide a day, not {epoch_s!r}")
        if not 0.5 <= quantile < 1.0:
            raise InvalidProblem(f"quantile must be at least 0.5 and less than 1, not {quantile!r}")
        history = _History(round(DAY_S / epoch_s), round(WEEK_S / epoch_s))
        self._history, self._quantile = history, quantile
        self._views = _View(history, _SMOOTHING), _View(history, (1,))
        self._epoch = 0
        self._next: dict[int, Forecast] = {}
        self._judged = 0
        self._covered = self._wrong = self._forecast = self._load = 0.0

    def seen(self, mean: float, heaviest: float) -> None:
        """Take what an epoch brought.

        Args:
            mean: requests a second.
            heaviest: of its heaviest minute.

        Raises:
            InvalidProblem: a value is out of range.
        """
        if not 0.0 <= mean <= heaviest < math.inf:
            raise InvalidProblem(f"loads must be finite and 0 <= mean <= heaviest, not {mean!r} and {heaviest!r}")
        for view in self._views:
            view.seen(self._epoch, mean, heaviest)
        if forecast := self._next.pop(self._epoch, None):
            self._judged += 1
            self._covered += mean * (heaviest <= forecast.upper)
            self._wrong += abs(forecast.expected - mean)
            self._forecast += forecast.expected
            self._load += mean
        self._history.add(mean, heaviest)
        self._epoch += 1

    def forecast(self, epochs: int, carried: Sequence[float] = (), borne: Sequence[float] = ()) -> tuple[Forecast, ...]:
        """Return the forecasts of the next epochs; they are judged when those have passed.

        Args:
            epochs: how many, at most `MOST_AHEAD`.
            carried: requests a second that 1, 2, … replicas carry, ascending; empty: any load is carried as it comes.
            borne: what they bear for minutes before many requests are late, as many, at least ``carried``; empty: that.

        Raises:
            InvalidProblem: ``epochs`` is out of range.
        """
        if not 1 <= epochs <= MOST_AHEAD:
            raise InvalidProblem(f"epochs must be from 1 to {MOST_AHEAD}, not {epochs!r}")
        levels = np.array([(0.0, *carried), (0.0, *(borne or carried))])
        best = min(self._views, key=lambda view: view.wrong)
        forecasts = []
        for view in self._views:
            for ahead, (expected, heaviest, basis) in enumerate(view.forecast(self._epoch, epochs), start=1):
                if view is best:
                    # What is expected is carried, and not only borne.
                    upper = heaviest * max(1.0, view.headroom(ahead, self._quantile, levels))
                    forecasts.append(Forecast(expected, max(expected, upper), basis))
        self._next[self._epoch] = forecasts[0]
        return tuple(forecasts)

    def error(self) -> ForecastError:
        """Return how forecasts for the next epoch did; of none, NaN."""
        if not self._judged or self._load <= 0.0:
            return ForecastError(self._judged, math.nan, math.nan, math.nan)
        return ForecastError(
            forecasts=self._judged,
            absolute_percent=100.0 * self._wrong / self._load,
            bias_percent=100.0 * (self._forecast / self._load - 1.0),
            covered_percent=100.0 * self._covered / self._load,
        )


class _History:
    """Loads of the last weeks: mean and heaviest minute of each epoch."""

    def __init__(self, day: int, week: int) -> None:
        self.day, self.week = day, week
        self.means: list[float] = []
        self.peaks: list[float] = []
        self._most = _WEEKS * week + _RECENT

    def add(self, mean: float, heaviest: float) -> None:
        for loads, load in ((self.means, mean), (self.peaks, heaviest)):
            loads.append(load)
            if len(loads) == 2 * self._most:
                del loads[: self._most]


class _View:
    """One way to compare an epoch with the same ones before, and how that did."""

    def __init__(self, history: _History, smoothing: Sequence[int]) -> None:
        self._history, self._smoothing = history, smoothing
        self._made: dict[int, list[tuple[int, float, float]]] = {}
        self._outcomes: dict[int, _Outcomes] = {}

    @property
    def wrong(self) -> float:
        """Requests a second by which forecasts for the next epoch were wrong, mean; of none, 0."""
        return self._outcomes[1].wrong() if 1 in self._outcomes else 0.0

    def seen(self, epoch: int, mean: float, heaviest: float) -> None:
        for ahead, expected, peak in self._made.pop(epoch, []):
            if peak > 0.0:
                self._outcomes.setdefault(ahead, _Outcomes()).add(expected, peak, mean, heaviest)

    def forecast(self, epoch: int, epochs: int) -> list[tuple[float, float, str]]:
        """Return what the next epochs bring, what their heaviest minutes, and what both rest on."""
        drift, forecasts = self._drift(), []
        for ahead in range(1, epochs + 1):
            template, peak, basis = self._template(len(self._history.means) - 1 + ahead)
            factor = math.exp(drift * _FADING ** (ahead - 1)) if basis != "hours" else 1.0
            forecasts.append((factor * template, factor * peak, basis))
            self._made.setdefault(epoch - 1 + ahead, []).append((ahead, factor * template, factor * peak))
        return forecasts

    def headroom(self, ahead: int, quantile: float, carried: Floats) -> float:
        """Return the factor over the heaviest minute that is expected."""
        outcomes = self._outcomes[ahead].kept if ahead in self._outcomes else np.empty((0, 4))
        if len(outcomes) < _FEW:
            outcomes = np.concatenate([outcomes, *(one.kept for one in self._outcomes.values())])
        return _headroom(outcomes, quantile, carried) if len(outcomes) >= _FEW else _UNSEEN

    def _template(self, place: int) -> tuple[float, float, str]:
        """Return mean and heaviest minute at the same time before, and which time that is.

        Args:
            place: as of a load that was kept.
        """
        history = self._history
        count = len(history.means)
        weeks = [place - week * history.week for week in range(1, _WEEKS + 1)]
        kept = [(self._around(at), _NEWER**age) for age, at in enumerate(weeks) if 0 <= at < count]
        if kept:
            total = sum(weight for _, weight in kept)
            mean, peak = (sum(loads[part] * weight for loads, weight in kept) / total for part in (0, 1))
            return mean, peak, "week"
        # From a day ahead on, the day before has not passed either.
        at = place - history.day * max(1, -(-(place + 1 - count) // history.day))
        if at >= 0 and count:
            return *self._around(at), "day"
        recent = history.means[-_RECENT:]
        mean = sum(recent) / len(recent) if recent else 0.0
        return mean, mean, "hours"

    def _around(self, place: int) -> tuple[float, float]:
        """Return the load of an epoch; smoothed, its heaviest minute is taken as any, since bursts do not come back."""
        history = self._history
        if len(self._smoothing) == 1:
            return history.means[place], history.peaks[place]
        total = weights = 0.0
        for offset, weight in enumerate(self._smoothing, start=-(len(self._smoothing) // 2)):
            if 0 <= place + offset < len(history.means):
                total += weight * history.means[place + offset]
                weights += weight
        return total / weights, total / weights

    def _drift(self) -> float:
        """Return the logarithm of how much more the last epochs brought than the same ones before."""
        means = self._history.means
        count, load, template = len(means), 0.0, 0.0
        for place in range(max(0, count - _RECENT), count):
            before, _, basis = self._template(place)
            if basis != "hours":
                load, template = load + means[place], template + before
        return math.log(min(10.0, max(0.1, load / template))) if load > 0.0 and template > 0.0 else 0.0


class _Outcomes:
    """The newest forecasts of one distance: mean and heaviest minute, as they were expected and as they came."""

    def __init__(self) -> None:
        self._values, self._count = np.empty((_KEPT, 4)), 0

    @property
    def kept(self) -> Floats:
        """float[forecasts, 4], in no order."""
        return self._values[: min(self._count, _KEPT)]

    def add(self, *values: float) -> None:
        self._values[self._count % _KEPT] = values
        self._count += 1

    def wrong(self) -> float:
        return float(np.abs(self.kept[:, 0] - self.kept[:, 2]).mean())


def _headroom(outcomes: Floats, quantile: float, carried: Floats) -> float:
    """Return the least factor with which the quantile of the requests came while the heaviest minute was carried.

    Args:
        outcomes: as `_Outcomes.kept`.
        quantile: share of the requests.
        carried: float[2, replicas + 1], requests a second that 0, 1, 2, … replicas carry, and bear for minutes; beyond
            the last, whatever is asked for.
    """
    _, expected, weights, heaviest = outcomes.T
    # Any load above what one replica less carries brings as many as the heaviest minute needs.
    needed = np.searchsorted(carried[1], heaviest * (1.0 - _SAME))
    fewer = carried[0][np.maximum(0, needed - 1)] * (1.0 + 4.0 * _SAME)
    factors = np.where(needed < carried.shape[1], np.minimum(fewer, heaviest), heaviest) / expected
    order = np.argsort(factors)
    # One more of the same kind may be among those that were missed.
    reached = np.cumsum(weights[order]) / (float(weights.sum()) + float(weights.mean()))
    return float(factors[order[min(int(np.searchsorted(reached, quantile)), len(order) - 1)]])
