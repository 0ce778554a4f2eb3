"""A trace at another load keeps its rate, its order, its requests and the length of its bursts."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_sim.serving.requests import Request, piece, scaled, with_burst
from perseus_solver.errors import InvalidProblem


def trace(count: int = 2_000, seed: int = 1) -> tuple[Request, ...]:
    draw = random.Random(seed)
    times = sorted(draw.uniform(0.0, 600.0) for _ in range(count))
    return tuple(Request(t, draw.randint(1, 5_000), draw.randint(1, 800)) for t in times)


@given(load=st.floats(0.05, 6.0), seed=st.integers(0, 1_000))
def test_a_load_changes_the_rate_by_its_factor_and_keeps_the_order(load: float, seed: int) -> None:
    before = trace()
    after = scaled(before, load, seed)
    share = load % 1.0
    assert abs(len(after) - load * len(before)) <= 5.0 * sqrt(len(before) * share * (1.0 - share)) + 1e-6
    assert [r.arrival_s for r in after] == sorted(r.arrival_s for r in after)
    assert all(0.0 <= r.arrival_s <= before[-1].arrival_s for r in after)
    assert {(r.prompt_tokens, r.output_tokens) for r in after} <= {(r.prompt_tokens, r.output_tokens) for r in before}
    assert after == scaled(before, load, seed)


def test_load_one_is_the_trace_and_less_is_a_part_of_it() -> None:
    assert scaled(trace(), 1.0, 5) == trace()
    assert set(scaled(trace(), 0.4, 5)) < set(trace())


def test_more_load_has_the_trace_and_whole_copies_of_it() -> None:
    before, after = trace(), scaled(trace(), 3.0, 5)
    lengths = Counter((r.prompt_tokens, r.output_tokens) for r in before)
    assert Counter((r.prompt_tokens, r.output_tokens) for r in after) == {key: 3 * n for key, n in lengths.items()}
    assert set(before) <= set(after)


def test_a_burst_keeps_its_length_at_more_load() -> None:
    quiet = [Request(10.0 * i, 1, 1) for i in range(101)]
    burst = [Request(500.0 + 0.1 * i, 9, 9) for i in range(100)]
    before = tuple(sorted([*quiet, *burst], key=lambda r: r.arrival_s))
    after = [r.arrival_s for r in scaled(before, 2.0, 3) if r.prompt_tokens == 9 and not 500.0 <= r.arrival_s < 510.0]
    gaps = [later - earlier for earlier, later in pairwise(after)]
    assert len(after) > 50
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.1)


def test_a_piece_begins_at_its_begin() -> None:
    found = piece(trace(), 100.0, 200.0)
    assert [r.arrival_s + 100.0 for r in found] == pytest.approx(
        [r.arrival_s for r in trace() if 100 <= r.arrival_s < 200]
    )


@given(factor=st.floats(1.0, 5.0), seed=st.integers(0, 100))
def test_a_burst_multiplies_its_while_and_leaves_the_rest(factor: float, seed: int) -> None:
    before, after = trace(), with_burst(trace(), 300.0, 60.0, factor, seed)
    inside = sum(300.0 <= r.arrival_s < 360.0 for r in before)
    share = factor % 1.0
    assert [r for r in after if not 300 <= r.arrival_s < 360] == [r for r in before if not 300 <= r.arrival_s < 360]
    grown = sum(300.0 <= r.arrival_s < 360.0 for r in after)
    assert abs(grown - factor * inside) <= 5.0 * sqrt(inside * share * (1.0 - share)) + 1e-6
    assert [r.arrival_s for r in after] == sorted(r.arrival_s for r in after)


@pytest.mark.parametrize("load", [0.0, -1.0, 101.0, float("nan"), float("inf")])
def test_a_load_out_of_range_is_refused(load: float) -> None:
    with pytest.raises(InvalidProblem, match="load must be more than 0 and at most 100"):
        scaled(trace(10), load, 0)


def test_a_burst_must_not_be_a_gap_and_a_piece_not_be_empty() -> None:
    with pytest.raises(InvalidProblem, match="factor must be from 1 to 100"):
        with_burst(trace(), 0.0, 10.0, 0.5, 0)
    with pytest.raises(InvalidProblem, match="no request arrives between"):
        piece(trace(10), 700.0, 800.0)
    with pytest.raises(InvalidProblem, match="must end after it begins"):
        piece(trace(10), 5.0, 5.0)
