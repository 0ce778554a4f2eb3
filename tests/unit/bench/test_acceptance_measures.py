"""Statistics of the acceptance trials: laws over whatever was measured."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_bench.measures import (
    all_pairs,
    durations_of,
    plateaus_of,
    speed_change_us,
    spread,
    waits_for_others,
)
from perseus_bench.report import ClockPoint
from perseus_bench.workload import WorkItem


@given(st.lists(st.floats(0, 10), min_size=1))
def test_quantiles_are_values_that_were_seen(seconds: list[float]) -> None:
    seen = durations_of(seconds)
    assert seen.count == len(seconds)
    assert {seen.p50_s, seen.p99_s, seen.max_s} <= set(seconds)
    assert seen.p50_s <= seen.p99_s <= seen.max_s == max(seconds)
    assert 2 * sum(value <= seen.p50_s for value in seconds) >= len(seconds)


@pytest.mark.parametrize("others", [1, 3, 7])
@given(alone_s=st.floats(1e-4, 0.02), noise=st.floats(0.8, 1.2))
def test_one_lock_and_many_are_told_apart_whatever_a_call_takes(alone_s: float, noise: float, others: int) -> None:
    assert waits_for_others(alone_s, alone_s * (1 + others) * noise, others)
    assert not waits_for_others(alone_s, alone_s * noise, others)


def work(old_us: float, new_us: float, changed_us: float, until_us: float) -> list[WorkItem]:
    """Items without gaps whose speed changes at a moment, also in the middle of one."""
    items, now_us = [], 0.0
    while now_us < until_us:
        left, at_us = 1.0, now_us
        if at_us < changed_us:
            part = min(left, (changed_us - at_us) / old_us)
            left, at_us = left - part, at_us + part * old_us
        end_us = at_us + left * new_us
        items.append(WorkItem(now_us, end_us - now_us))
        now_us = end_us
    return items


@given(
    old_us=st.floats(200, 2000),
    ratio=st.floats(1.05, 3).map(lambda ratio: ratio) | st.floats(1 / 3, 0.95),
    latency_us=st.floats(0, 100_000),
    slow=st.sets(st.integers(0, 1000), max_size=5),
)
def test_the_moment_at_which_the_speed_changed_is_found(
    old_us: float, ratio: float, latency_us: float, slow: set[int]
) -> None:
    asked_us, new_us = 50_000.0, old_us * ratio
    items = work(old_us, new_us, asked_us + latency_us, asked_us + latency_us + 200_000)
    assert speed_change_us(items, round(asked_us)) == pytest.approx(asked_us + latency_us, abs=1)
    change = next(place for place, item in enumerate(items) if item.begin_us + item.duration_us > asked_us + latency_us)
    disturbed = [
        WorkItem(item.begin_us, item.duration_us * (2 if place in slow and abs(place - change) > 20 else 1))
        for place, item in enumerate(items)
    ]
    found = speed_change_us(disturbed, round(asked_us))
    assert found is not None
    assert abs(found - asked_us - latency_us) < 3 * max(old_us, new_us)


def test_a_change_that_cannot_be_seen_is_not_made_up() -> None:
    assert speed_change_us(work(500, 505, 60_000, 200_000), 50_000) is None  # both clocks take the same time
    assert speed_change_us(work(500, 700, 60_000, 200_000), 0) is None  # nothing is known of the time before
    assert speed_change_us([], 0) is None


@given(st.integers(2, 6))
def test_the_walk_changes_from_each_clock_to_each_other_one_equally_often(count: int) -> None:
    clocks = [1000 + 15 * place for place in range(count)]
    rounds = 3
    walk = list(islice(all_pairs(clocks), rounds * count * (count - 1) + 1))
    assert walk[0] == clocks[0]
    assert Counter(pairwise(walk)) == dict.fromkeys(permutations(clocks, 2), rounds)


@given(st.lists(st.integers(200, 2000), min_size=2, unique=True).map(sorted), st.integers(2, 30))
def test_a_spread_has_both_ends_and_no_clock_twice(clocks: list[int], count: int) -> None:
    chosen = spread(clocks, count)
    assert (chosen[0], chosen[-1]) == (clocks[-1], clocks[0])
    assert chosen == sorted(set(chosen), reverse=True)
    assert len(chosen) <= min(count, len(clocks))


@given(st.integers(800, 1900))
def test_clocks_that_come_out_as_one_are_one_plateau(limit_mhz: int) -> None:
    points = [ClockPoint(mhz, min(mhz, limit_mhz), None, None, 0.0, ()) for mhz in range(1980, 600, -15)]
    held = [point.requested_mhz for point in points if point.requested_mhz >= limit_mhz]
    plateaus = plateaus_of(points, 15)
    assert len(plateaus) == 1
    assert plateaus[0].highest_mhz == 1980
    assert plateaus[0].reached_mhz == limit_mhz
    assert abs(plateaus[0].lowest_mhz - held[-1]) <= 15  # the next one may read as the limit too
