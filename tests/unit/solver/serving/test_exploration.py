"""A canary's way: down one step at a time while it is safe, up at the first miss, and back later and later."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_solver.serving import Exploration, Sight, Why, windows_needed
from perseus_solver.serving.exploration import FIRST_WAIT_S, SHARE

LADDER_MHZ = (900, 1_050, 1_200, 1_500, 1_980)
LIMIT_S = 0.05
NEEDED = 20


def begun(**changes: object) -> Exploration:
    return Exploration(LADDER_MHZ, LIMIT_S, **changes)


def good(p99_s: float = 0.01, **changes: object) -> Sight:
    return Sight(NEEDED, p99_s, **changes)


def test_it_begins_at_the_highest_clock_and_waits_for_windows() -> None:
    exploration = begun()
    assert exploration.attempt == (1_980, Why.MEASURED)
    assert exploration.after(0.0, Sight(NEEDED - 1, 0.01), NEEDED).attempt == (1_980, Why.MEASURED)
    assert exploration.after(0.0, good(), NEEDED).attempt == (1_500, Why.TRIED)


def test_it_goes_down_to_the_last_clock_while_times_are_far_from_the_limit() -> None:
    exploration, clocks = begun(), []
    for _ in range(6):
        exploration = exploration.after(0.0, good(), NEEDED)
        clocks.append(exploration.attempt.clock_mhz)
    assert clocks == [1_500, 1_200, 1_050, 900, 900, 900]
    assert exploration.attempt.why is Why.LOWEST


def test_without_a_model_the_next_clock_is_taken_to_be_as_much_slower_as_it_is_lower() -> None:
    most_s = SHARE * LIMIT_S * 1_500 / 1_980
    assert begun().after(0.0, good(most_s * 1.001), NEEDED).attempt == (1_980, Why.NEAR_LIMIT)
    assert begun().after(0.0, good(most_s * 0.999), NEEDED).attempt == (1_500, Why.TRIED)
    modelled = good(most_s * 1.001, next_p99_s=most_s * 1.01)
    assert begun().after(0.0, modelled, NEEDED).attempt == (1_500, Why.TRIED)


def test_a_clock_that_has_come_near_the_limit_is_left_upwards() -> None:
    assert begun(place=1).after(0.0, good(SHARE * LIMIT_S), NEEDED).attempt == (1_200, Why.NEAR_LIMIT)
    assert begun(place=1).after(0.0, good(math.nan), NEEDED).attempt == (1_200, Why.NEAR_LIMIT)


def test_the_first_miss_leads_up_and_the_clock_waits_twice_as_long_each_time() -> None:
    exploration, now_s, waits = begun(place=1), 0.0, []
    for _ in range(3):
        exploration = exploration.after(now_s, Sight(1, 0.01, missed=True), NEEDED)
        assert exploration.attempt == (1_200, Why.MISSED)
        missed_s = now_s
        while (exploration := exploration.after(now_s, good(), NEEDED)).attempt.why is Why.WAITS:
            assert exploration.attempt.clock_mhz == 1_200
            now_s += 60.0
        assert exploration.attempt == (1_050, Why.TRIED)
        waits.append(now_s - missed_s)
    assert waits == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]


def test_a_miss_at_the_highest_clock_is_not_its_clocks() -> None:
    exploration = begun().after(0.0, good(missed=True), NEEDED)
    assert exploration.attempt == (1_980, Why.MEASURED)
    assert not any(exploration.misses)


@given(
    st.lists(
        st.builds(
            Sight,
            st.integers(0, 40),
            st.floats(0.0, 0.1) | st.just(math.nan),
            st.booleans(),
            st.none() | st.floats(0.0, 0.1),
        )
    )
)
def test_it_never_skips_a_clock_and_goes_down_only_where_it_may(sights: list[Sight]) -> None:
    exploration = begun()
    for turn, sight in enumerate(sights):
        before, exploration = exploration, exploration.after(60.0 * turn, sight, NEEDED)
        assert abs(exploration.place - before.place) <= 1
        if exploration.place < before.place:
            assert not sight.missed
            assert sight.windows >= NEEDED
            assert sight.p99_s < SHARE * LIMIT_S
            assert 60.0 * turn >= before.barred_until_s[exploration.place]
        elif sight.missed and before.place < len(LADDER_MHZ) - 1:
            assert exploration.place > before.place
            assert exploration.barred_until_s[before.place] >= 60.0 * turn + FIRST_WAIT_S


def test_more_scatter_needs_more_windows_within_bounds() -> None:
    assert windows_needed(0.0) == 10
    assert windows_needed(0.05) == 25
    assert windows_needed(math.nan) == windows_needed(1e9) == 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ladder_mhz": ()}, "ladder_mhz must be 1 to 64 clocks"),
        ({"ladder_mhz": (900, 900)}, "ladder_mhz must be 1 to 64 clocks, positive and ascending"),
        ({"limit_s": math.nan}, "limit_s must be more than 0 and finite"),
        ({"place": 5}, "place must be from -1, the last, to 4, not 5"),
        ({"misses": (0, 0)}, "misses must have a value of at least 0 for each clock of ladder_mhz"),
        ({"barred_until_s": (-1.0,) * 5}, "barred_until_s must have a value"),
    ],
)
def test_a_stored_exploration_is_checked(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exploration(**{"ladder_mhz": LADDER_MHZ, "limit_s": LIMIT_S, **changes})
