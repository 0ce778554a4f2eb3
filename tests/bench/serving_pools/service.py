"""A service: classes of its requests by length, and the load of weeks of a published shape.

The Azure traces of one hour say how long requests are. How load moves over a week is published only as figures
(DynamoLLM, HPCA'25): from valley to peak 2.8 times in conversations, 34.6 times in coding; days alike, weekends less.
The weeks here have that shape, and what makes forecasts wrong: each day has a level of its own, the level wanders over
hours and over minutes, the mix of classes wanders, and bursts come without notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_sim.serving.requests import Request
from perseus_solver.kinds import Floats
from perseus_solver.serving.planner import RequestClass

DAY_MIN: Final = 1_440
WEEK_MIN: Final = 7 * DAY_MIN
PROMPT_EDGES: Final = (256, 1_024)
OUTPUT_EDGES: Final = (100, 350)
"""Tokens at which DynamoLLM's classes end, as read in notes on the paper: short, medium and long by both."""
LENGTHS: Final = "SML"


@dataclass(frozen=True)
class Shape:
    """How the load of a service moves over a week.

    Attributes:
        peak: requests a second at the peak of a week as it is expected.
        valley_to_peak: how much less the valley has.
        weekend: share of the daily rise that weekends have.
        daily: standard deviation of the logarithm of a day's level.
        hourly: of the level that wanders over two hours.
        minutely: of the level that wanders over three minutes.
        bursts_a_day: mean; each has 1.3 to 2 times the load for 3 to 12 minutes.
        growth: of the load, a week.
    """

    peak: float
    valley_to_peak: float
    weekend: float
    daily: float = 0.08
    hourly: float = 0.06
    minutely: float = 0.06
    bursts_a_day: float = 2.0
    growth: float = 0.02


SHAPES: Final = {
    "conv": Shape(peak=60.0, valley_to_peak=2.8, weekend=0.8),
    "code": Shape(peak=40.0, valley_to_peak=34.6, weekend=0.35),
}


def class_of(request: Request) -> str:
    """Return a request's class: the length of its prompt, then of its answer."""
    prompt = sum(request.prompt_tokens >= edge for edge in PROMPT_EDGES)
    output = sum(request.output_tokens >= edge for edge in OUTPUT_EDGES)
    return LENGTHS[prompt] + LENGTHS[output]


@dataclass(frozen=True)
class Service:
    """Requests of a service by class.

    Attributes:
        requests: of each class that has any.
        shape: how its load moves.
    """

    requests: dict[str, tuple[Request, ...]]
    shape: Shape

    @classmethod
    def of_trace(cls, trace: Sequence[Request], shape: Shape) -> Service:
        """Split a trace's requests."""
        split: dict[str, list[Request]] = {}
        for request in trace:
            split.setdefault(class_of(request), []).append(request)
        return cls({name: tuple(split[name]) for name in sorted(split)}, shape)

    @property
    def shares(self) -> dict[str, float]:
        """The share of requests of each class."""
        total = sum(len(requests) for requests in self.requests.values())
        return {name: len(requests) / total for name, requests in self.requests.items()}

    def request_class(self, classes: Sequence[str]) -> RequestClass:
        """Return what the requests of some classes together are like."""
        together = [request for name in classes for request in self.requests[name]]
        return RequestClass.seen([one.prompt_tokens for one in together], [one.output_tokens for one in together])

    def weeks(self, count: int, seed: int) -> dict[str, Floats]:
        """Return the load of weeks: of each class float[minutes], requests a second.

        Args:
            count: of weeks, the first beginning on a Monday.
            seed: of all that is drawn.
        """
        random, shape = np.random.default_rng(seed), self.shape
        minutes = np.arange(count * WEEK_MIN)
        level = np.exp(
            np.repeat(random.normal(0.0, shape.daily, 7 * count), DAY_MIN)
            + _wander(random, len(minutes), shape.hourly, 120.0)
            + _wander(random, len(minutes), shape.minutely, 3.0)
        )
        level *= (1.0 + shape.growth) ** (minutes / WEEK_MIN)
        for _ in range(random.poisson(7 * count * shape.bursts_a_day)):
            begin, length = random.integers(len(minutes)), random.integers(3, 13)
            level[begin : begin + length] *= random.uniform(1.3, 2.0)
        load = shape.peak * _week(shape)[minutes % WEEK_MIN] * level
        mix = {name: share * np.exp(_wander(random, len(minutes), 0.1, 360.0)) for name, share in self.shares.items()}
        total = np.sum(list(mix.values()), axis=0)
        return {name: load * part / total for name, part in mix.items()}

    def hours(self, weeks: int) -> dict[str, Floats]:
        """Return the trace's own hour, over and over, its heaviest minute as the shape's peak: as `weeks` does."""
        counts = {
            name: np.bincount([min(59, int(one.arrival_s // 60.0)) for one in requests], minlength=60)
            for name, requests in self.requests.items()
        }
        scale = self.shape.peak / np.sum(list(counts.values()), axis=0).max()
        return {name: np.tile(scale * count, weeks * WEEK_MIN // 60) for name, count in counts.items()}


def _week(shape: Shape) -> Floats:
    """Return float[minutes of a week]: the load over the peak, as it is expected."""
    hours = np.arange(WEEK_MIN) / 60.0
    day, hour = hours // 24, hours % 24
    # A working day: up from seven, two peaks around eleven and three, down until midnight, lowest at four.
    daily = np.exp(-(((hour - 11.0) / 2.6) ** 2)) + np.exp(-(((hour - 15.5) / 3.2) ** 2))
    daily += 0.45 * np.exp(-(((hour - 20.5) / 2.6) ** 2))
    daily /= daily.max()
    daily *= np.where(day >= 5, shape.weekend, 1.0)
    valley = 1.0 / shape.valley_to_peak
    rise = (daily - daily.min()) / (daily.max() - daily.min())
    week: Floats = valley + (1.0 - valley) * rise
    return week


def _wander(random: np.random.Generator, count: int, deviation: float, minutes: float) -> Floats:
    """Return float[count]: a level that is forgotten within so many minutes, around 0."""
    kept = math.exp(-1.0 / minutes)
    steps = random.normal(0.0, deviation * math.sqrt(1.0 - kept * kept), count)
    level, levels = random.normal(0.0, deviation), np.empty(count)
    for place, step in enumerate(steps):
        levels[place] = level = kept * level + step
    return levels
