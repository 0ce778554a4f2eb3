"""The load of the next hours: that of the same hour of the week, moved by how the last hours differ from theirs.

People's weeks are alike, so the template is the mean of the same epoch of the weeks before, newer ones more. What is
different today is a factor, the drift: the mean ratio of the last epochs to their templates. It holds for the next
hours and fades. Before there is a week, the same hour of the day before stands in, and before there is a day, the last
hours.

How far forecasts may be wrong is not assumed. Each one is kept until its epoch has passed, and the ratio of the epoch's
heaviest minute to it is kept, by how far ahead it was made. Quantiles of these ratios are the headroom: what the
forecast has missed until now, bursts within an epoch included.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from typing import Final

from perseus_solver.errors import InvalidProblem

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
_RATIOS: Final = 672
"""Kept of each distance: a week of quarters of an hour."""
_FEW: Final = 32
"""Ratios of one distance below which those of all distances are taken together."""
_UNSEEN: Final = 1.5
"""Headroom before any forecast could be judged."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The load of an epoch that has not begun.

    Attributes:
        expected: requests a second, mean.
        upper: that the heaviest minute of the epoch does not exceed, with the probability that was asked for.
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
        covered_percent: of the epochs whose heaviest minute stayed within ``upper``.
    """

    forecasts: int
    absolute_percent: float
    bias_percent: float
    covered_percent: float


class Forecaster:
    """The forecast of one pool.

    Args:
        epoch_s: how long an epoch lasts; a day must be a whole number of them.
        quantile: probability with which an epoch's heaviest minute is to stay within ``upper``.

    Raises:
        InvalidProblem: a value is out of range.
    """

    def __init__(self, epoch_s: float, quantile: float = 0.97) -> None:
        if not 60.0 <= epoch_s <= DAY_S or DAY_S % epoch_s:
            raise InvalidProblem(f"epoch_s must be from 60 to 86,400 and divide a day, not {epoch_s!r}")
        if not 0.5 <= quantile < 1.0:
            raise InvalidProblem(f"quantile must be at least 0.5 and less than 1, not {quantile!r}")
        self._day, self._week = round(DAY_S / epoch_s), round(WEEK_S / epoch_s)
        self._quantile = quantile
        self._loads: list[float] = []
        self._most = _WEEKS * self._week + _RECENT
        self._epoch = 0
        self._made: dict[int, list[tuple[int, Forecast]]] = {}
        self._ratios: dict[int, _Ratios] = {}
        self._judged = self._covered = 0
        self._wrong = self._forecast = self._load = 0.0

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
        for ahead, forecast in self._made.pop(self._epoch, []):
            if forecast.expected > 0.0:
                self._ratios.setdefault(ahead, _Ratios()).add(heaviest / forecast.expected)
            if ahead == 1:
                self._judged += 1
                self._covered += heaviest <= forecast.upper
                self._wrong += abs(forecast.expected - mean)
                self._forecast += forecast.expected
                self._load += mean
        self._loads.append(mean)
        if len(self._loads) == 2 * self._most:
            del self._loads[: self._most]
        self._epoch += 1

    def forecast(self, epochs: int) -> tuple[Forecast, ...]:
        """Return the forecasts of the next epochs, at most `MOST_AHEAD`; they are judged when those have passed."""
        if not 1 <= epochs <= MOST_AHEAD:
            raise InvalidProblem(f"epochs must be from 1 to {MOST_AHEAD}, not {epochs!r}")
        drift, forecasts = self._drift(), []
        for ahead in range(1, epochs + 1):
            template, basis = self._template(len(self._loads) - 1 + ahead)
            expected = template * math.exp(drift * _FADING ** (ahead - 1)) if basis != "hours" else template
            one = Forecast(expected, max(expected, expected * self._headroom(ahead)), basis)
            self._made.setdefault(self._epoch - 1 + ahead, []).append((ahead, one))
            forecasts.append(one)
        return tuple(forecasts)

    def error(self) -> ForecastError:
        """Return how forecasts for the next epoch did; of none, NaN."""
        if not self._judged or self._load <= 0.0:
            return ForecastError(self._judged, math.nan, math.nan, math.nan)
        return ForecastError(
            forecasts=self._judged,
            absolute_percent=100.0 * self._wrong / self._load,
            bias_percent=100.0 * (self._forecast / self._load - 1.0),
            covered_percent=100.0 * self._covered / self._judged,
        )

    def _template(self, place: int) -> tuple[float, str]:
        """Return the load of the same time before, and which time that is; ``place`` as of a load that was kept."""
        count = len(self._loads)
        weeks = [place - week * self._week for week in range(1, _WEEKS + 1)]
        kept = [(self._around(at), _NEWER**age) for age, at in enumerate(weeks) if 0 <= at < count]
        if kept:
            return sum(load * weight for load, weight in kept) / sum(weight for _, weight in kept), "week"
        # From a day ahead on, the day before has not passed either.
        at = place - self._day * max(1, -(-(place + 1 - count) // self._day))
        if at >= 0 and count:
            return self._around(at), "day"
        recent = self._loads[-_RECENT:]
        return (sum(recent) / len(recent) if recent else 0.0), "hours"

    def _around(self, place: int) -> float:
        """Return the load of an epoch, smoothed by those beside it: bursts do not come back at the same time."""
        total = weights = 0.0
        for offset, weight in enumerate(_SMOOTHING, start=-(len(_SMOOTHING) // 2)):
            if 0 <= place + offset < len(self._loads):
                total += weight * self._loads[place + offset]
                weights += weight
        return total / weights

    def _drift(self) -> float:
        """Return the logarithm of how much more the last epochs brought than the same ones before."""
        count = len(self._loads)
        both = []
        for place in range(max(0, count - _RECENT), count):
            template, basis = self._template(place)
            if basis != "hours":
                both.append((self._loads[place], template))
        load, template = (sum(part) for part in zip(*both, strict=True)) if both else (0.0, 0.0)
        return math.log(min(10.0, max(0.1, load / template))) if load > 0.0 and template > 0.0 else 0.0

    def _headroom(self, ahead: int) -> float:
        kept = self._ratios.get(ahead)
        ordered = kept.ordered if kept else []
        if len(ordered) < _FEW:
            ordered = sorted(ratio for ratios in self._ratios.values() for ratio in ratios.ordered)
        if len(ordered) < _FEW:
            return _UNSEEN
        # One more of the same kind is within the rank above with the probability that is asked for.
        rank = math.ceil(self._quantile * (len(ordered) + 1)) - 1
        return ordered[min(rank, len(ordered) - 1)]


class _Ratios:
    """The newest ratios of one distance, in order of their size."""

    def __init__(self) -> None:
        self._newest: deque[float] = deque()
        self.ordered: list[float] = []

    def add(self, ratio: float) -> None:
        if len(self._newest) == _RATIOS:
            del self.ordered[bisect_left(self.ordered, self._newest.popleft())]
        self._newest.append(ratio)
        insort(self.ordered, ratio)
