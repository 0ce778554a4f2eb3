"""What a canary decides of few requests: nothing that chance alone would have said."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from perseus_core.serving import ServingLimits, place_of
from perseus_operator.families.serving.features.exploration.trials import Trials
from perseus_operator.families.serving.features.objective.requests import (
    beyond_chance,
    least_quantile_s,
    quantile_s,
)
from perseus_operator.nodes.engines import EngineWindow
from perseus_solver.serving import Why

LADDER_MHZ = (1665, 1770, 1875, 1980)
LIMITS = ServingLimits(first_token_s=0.050, per_token_s=0.010)
LATE_S = 0.0505
"""Beyond the limit, and within it at the highest clock."""


def tried(first_tokens_s: list[list[float]], mhz: int = 1875) -> Trials:
    """A canary at one clock, window by window."""
    trials = Trials()
    trials.canary_chosen("p")
    trials.began(LADDER_MHZ, 0.010, {}, 0.95)
    while trials.clock_mhz != mhz:
        trials.window_seen(seen(trials.clock_mhz, []), LIMITS, scatter=0.01, wall_s=0.0)
    for times_s in [[], *first_tokens_s]:  # the first window after a change does not count
        if trials.clock_mhz == mhz:
            trials.window_seen(seen(mhz, times_s), LIMITS, scatter=0.05, wall_s=0.0)
    return trials


def seen(mhz: int, first_tokens_s: list[float]) -> EngineWindow:
    places = [place_of(time_s) for time_s in first_tokens_s]
    first_tokens = {place: places.count(place) for place in places}
    return EngineWindow(
        pod_uid="p",
        pid=1,
        time_us=1_000_000,
        clock_mhz=mhz,
        steps=100,
        steps_us=700_000,
        first_tokens=first_tokens,
    )


def test_one_late_request_among_many_bars_no_clock() -> None:
    """A few of a thousand are late at any clock: what 99 % keep is a baseline, and a fifth more than it the limit."""
    trials = tried([[0.02] * 8] * 10 + [[0.02] * 7 + [LATE_S]] + [[0.02] * 8] * 20)
    assert trials.missed == ()
    assert trials.clock_mhz == 1770


def test_a_clock_at_which_every_tenth_request_is_late_is_left_within_seconds() -> None:
    trials = tried([[0.02] * 9 + [LATE_S]] * 10)
    assert [(one.mhz, one.misses) for one in trials.missed] == [(1875, 1)]
    assert trials.exploration is not None
    assert trials.exploration.why is Why.MISSED


@given(st.integers(1, 400), st.data(), st.sampled_from([0.005, 0.01, 0.05]), st.sampled_from([0.05, 0.001]))
def test_what_is_beyond_chance_is_by_the_exact_tail_as_well(
    count: int, data: st.DataObject, share: float, chance: float
) -> None:
    late = data.draw(st.integers(0, count))
    fewer = sum(math.comb(count, k) * share**k * (1.0 - share) ** (count - k) for k in range(late))
    if beyond_chance(late, count, share, chance):
        assert 1.0 - fewer < chance + 1e-9
        assert late == count or beyond_chance(late + 1, count, share, chance), "more of them are no less"
    else:
        assert late <= share * count or 1.0 - fewer > chance**3, "and it is not blind"


def test_nothing_is_beyond_chance_of_nothing() -> None:
    assert not beyond_chance(0, 0, 0.01, 0.05)
    assert math.isnan(least_quantile_s({}, 0.99, 0.05))


@given(st.dictionaries(st.integers(10, 60), st.integers(1, 50), min_size=1))
def test_the_least_that_a_quantile_may_be_is_one_of_the_times_and_no_more_than_it(times: dict[int, int]) -> None:
    least_s, exact_s = least_quantile_s(times, 0.99, 0.05), quantile_s(times, 0.99)
    assert exact_s is not None
    assert least_s <= exact_s
    many = {place: 1_000_000 * count for place, count in times.items()}
    exact_s = quantile_s(many, 0.99)
    late = sum(count for place, count in many.items() if place >= max(times))
    if late > 0.011 * sum(many.values()):
        assert least_quantile_s(many, 0.99, 0.05) == exact_s, "of millions it is known"
