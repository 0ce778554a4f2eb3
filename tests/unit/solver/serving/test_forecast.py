"""Forecasts of load: what they rest on, how they judge themselves, and the headroom that follows."""

from __future__ import annotations

import math
import random
from bisect import bisect_left

import pytest

from perseus_solver.errors import InvalidProblem
from perseus_solver.serving.planner import Forecaster

HOUR_S = 3600.0
WEEK = 168


def daily(hour: int) -> float:
    """A load that is the same each day, and half of it at weekends."""
    level = 10.0 + 8.0 * math.sin(2 * math.pi * (hour % 24 - 9) / 24)
    return level * (0.5 if hour // 24 % 7 >= 5 else 1.0)


LEVELS = tuple(8.0 * (1 + count) for count in range(64))
BORNE = tuple(1.2 * load for load in LEVELS)


def fed(hours: int, quantile: float = 0.9, noise: float = 0.0, seed: int = 1) -> Forecaster:
    """A forecaster that has seen so many hours, and made a forecast before each."""
    forecaster, draw = Forecaster(HOUR_S, quantile), random.Random(seed)
    for hour in range(hours):
        forecaster.forecast(3)
        mean = daily(hour) * math.exp(draw.gauss(0.0, noise))
        forecaster.seen(mean, 1.2 * mean)
    return forecaster


def test_before_a_day_the_last_hours_stand_in_then_the_day_before_then_the_week() -> None:
    assert Forecaster(HOUR_S).forecast(1)[0].expected == 0.0
    assert fed(6).forecast(2)[1].basis == "hours"
    assert fed(6).forecast(1)[0].expected == pytest.approx(sum(map(daily, range(2, 6))) / 4)
    assert fed(30).forecast(1)[0].basis == "day"
    assert fed(WEEK + 1).forecast(1)[0].basis == "week"


def test_a_week_like_the_last_is_forecast_as_it_comes() -> None:
    made = fed(3 * WEEK).forecast(48)
    total = sum(one.expected for one in made)
    assert total == pytest.approx(sum(daily(3 * WEEK + ahead) for ahead in range(48)), rel=0.02)
    for ahead, one in enumerate(made):
        assert one.expected == pytest.approx(daily(3 * WEEK + ahead), rel=0.5)  # smoothed over the hours beside it
        assert one.basis == "week"


def test_a_day_with_twice_the_load_moves_the_next_hours_and_fades() -> None:
    forecaster = fed(2 * WEEK)
    for hour in range(2 * WEEK, 2 * WEEK + 8):
        forecaster.seen(2.0 * daily(hour), 2.0 * daily(hour))
    made = forecaster.forecast(24)
    ratios = [one.expected / daily(2 * WEEK + 8 + ahead) for ahead, one in enumerate(made)]
    assert ratios[0] == pytest.approx(2.0, rel=0.1)
    assert ratios[23] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("quantile", [0.8, 0.95])
def test_as_many_requests_stay_within_the_headroom_as_was_asked_for(quantile: float) -> None:
    error = fed(8 * WEEK, quantile, noise=0.2).error()
    assert error.covered_percent == pytest.approx(100 * quantile, abs=4)
    assert 10.0 < error.absolute_percent < 30.0
    assert abs(error.bias_percent) < 5.0


def test_headroom_grows_with_the_error_and_with_the_quantile() -> None:
    def headroom(noise: float, quantile: float) -> float:
        one = fed(4 * WEEK, quantile, noise).forecast(1)[0]
        return one.upper / one.expected

    assert headroom(0.05, 0.9) < headroom(0.3, 0.9) < headroom(0.3, 0.98)


def test_what_comes_by_the_clock_is_expected_to_the_minute() -> None:
    forecaster = Forecaster(HOUR_S)
    for hour in range(3 * WEEK):
        forecaster.forecast(2)
        forecaster.seen(*((20.0, 60.0) if hour % 4 == 0 else (5.0, 6.0)))
    for hour, one in enumerate(forecaster.forecast(8)):
        assert (one.expected, one.upper) == pytest.approx((20.0, 60.0) if hour % 4 == 0 else (5.0, 6.0), rel=0.01)


def ordered(carried: tuple[float, ...], borne: tuple[float, ...] = ()) -> tuple[int, float]:
    """Replicas ordered in a week of chance for the next hour, and the share of requests beyond what those bear."""
    forecaster, draw = Forecaster(HOUR_S, 0.9), random.Random(3)
    replicas, missed, total = 0, 0.0, 0.0
    for hour in range(5 * WEEK):
        one = forecaster.forecast(1, carried, borne)[0]
        mean = daily(hour) * math.exp(draw.gauss(0.0, 0.15))
        forecaster.seen(mean, 1.1 * mean)
        if hour >= 2 * WEEK:
            count = 1 + bisect_left(LEVELS, one.upper * (1.0 - 1e-9))
            replicas += count
            missed += mean * (1.1 * mean > (borne or LEVELS)[count - 1])
            total += mean
    return replicas, missed / total


def test_what_whole_replicas_carry_beyond_the_forecast_is_not_ordered_twice() -> None:
    (any_load, few), (whole, some), (tough, more) = ordered(()), ordered(LEVELS), ordered(LEVELS, BORNE)
    assert any_load > whole > tough
    assert few < some < 0.14
    assert more < 0.14, "of what is borne, a tenth was allowed"


def test_before_anything_was_judged_there_is_headroom_all_the_same() -> None:
    one = fed(3).forecast(1)[0]
    assert one.upper == pytest.approx(1.5 * one.expected)


def test_errors_of_nothing_are_none() -> None:
    assert math.isnan(Forecaster(HOUR_S).error().absolute_percent)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Forecaster(7_000.0), "epoch_s must be from 60 to 86,400 and divide a day, not 7000.0"),
        (lambda: Forecaster(HOUR_S, 1.0), "quantile must be at least 0.5 and less than 1, not 1.0"),
        (lambda: Forecaster(HOUR_S).forecast(97), "epochs must be from 1 to 96, not 97"),
        (lambda: Forecaster(HOUR_S).seen(2.0, 1.0), "0 <= mean <= heaviest, not 2.0 and 1.0"),
        (lambda: Forecaster(HOUR_S).seen(math.nan, 1.0), "0 <= mean <= heaviest, not nan and 1.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: object, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        wrong()  # type: ignore[operator]
