"""Laws of clocks beside an autoscaler of the user's own, in virtual time: replicas are those that there would be
without us. Kubernetes' formula reads running requests, which slowed replicas hold for longer.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.autoscaled_pool import DAY_S, day, share_apart, walk
from tests.doubles.autoscaler import PERIOD_S, swings

from perseus_operator.families.serving.features.autoscaler.reading import Autoscaler as Read
from perseus_operator.families.serving.features.autoscaler.reading import Metric
from perseus_operator.families.serving.features.autoscaler.restraint import (
    LEAST_HOLD_S,
    MOST_HOLD_S,
    MOST_LEARNED,
    START_SLOWDOWN,
    Restraint,
)


@pytest.mark.parametrize(("slowdown", "least"), [(1.15, 1), (1.3, 2), (1.5, 4)])
def test_over_a_day_replicas_are_those_without_us_but_for_one_and_a_twentieth_of_the_time(
    slowdown: float, least: int
) -> None:
    for seed in range(2):
        load = day(seed)
        without, with_us = walk(load, 1.0, least=least), walk(load, slowdown, least=least)
        most, share = share_apart(with_us, without)
        assert most <= 1
        assert share <= 0.05
        assert swings(with_us.replicas, LEAST_HOLD_S) <= swings(without.replicas, LEAST_HOLD_S)
        most, share = share_apart(walk(load, slowdown, least=least, restrained=False), without)
        assert most > 1, "as it is without the restraint"
        assert share > 0.4


@pytest.mark.parametrize("least", [2, 4])
def test_where_the_autoscaler_cannot_act_clocks_are_lowered(least: int) -> None:
    """At night it keeps its least number, whatever the clocks are."""
    with_us = walk(day(1), 1.2, least=least)
    assert sum(with_us.lowered) > 0.1 * len(with_us.lowered)
    learned = with_us.restraint.slowdown("llama-hpa", "running")
    assert learned == pytest.approx(1.2, abs=0.1), "and what lowering them does is learned"


@pytest.mark.parametrize("follows", [True, False])
def test_of_metrics_that_decide_in_turn_each_is_learned(follows: bool) -> None:
    days = [per_s for seed in range(2) for per_s in day(seed)]
    with_us = walk(days, 1.2, least=4, follows=follows, alternate=True)
    most, share = share_apart(with_us, walk(days, 1.0, least=4, alternate=True))
    assert most <= 1
    assert share <= 0.05
    for metric in ("running", "busy"):
        assert with_us.restraint.slowdown("llama-hpa", metric) == pytest.approx(1.2 if follows else 1.0, abs=0.1)
    last = with_us.lowered[-DAY_S // PERIOD_S :]
    assert sum(last) > (0.2 if follows else 0.5) * len(last)


def test_a_metric_that_follows_no_clock_holds_none_once_that_is_known() -> None:
    days = [per_s for seed in range(3) for per_s in day(seed)]
    with_us = walk(days, 1.4, follows=False)
    assert share_apart(with_us, walk(days, 1.0))[0] == 0
    last = with_us.lowered[-DAY_S // PERIOD_S :]
    assert sum(last) > 0.5 * len(last)


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(st.floats(2.0, 160.0), min_size=4, max_size=24),
    slowdown=st.floats(1.0, 1.6),
    least=st.integers(1, 6),
)
def test_clocks_fall_no_sooner_than_the_hold_whatever_the_load_does(
    steps: list[float], slowdown: float, least: int
) -> None:
    """It jumps each quarter of an hour."""
    load = [per_s for per_s in steps for _ in range(900 // PERIOD_S)]
    with_us = walk(load, slowdown, least=least)
    changes = [place for place, (a, b) in enumerate(pairwise(with_us.lowered)) if a != b]
    for raised, lowered in pairwise(changes):
        if not with_us.lowered[raised + 1]:
            assert (lowered - raised) * PERIOD_S >= LEAST_HOLD_S


def read(pressure: float, replicas: int = 4, desired: int | None = None, least: int = 1) -> Read:
    desired = replicas if desired is None else desired
    return Read("hpa", replicas, desired, least, 10, (Metric("running", pressure, 1.0),))


def test_the_hold_doubles_with_each_relapse_up_to_an_hour() -> None:
    restraint, now_s, held = Restraint(), 0.0, []
    for _ in range(6):
        restraint.looked([read(1.0)], None, now_s, lowered=not restraint.near)
        assert restraint.near
        began_s = now_s
        while restraint.why:
            now_s += PERIOD_S
            restraint.looked([read(0.2, least=4)], None, now_s, lowered=False)
        held.append(now_s - began_s - PERIOD_S)
        restraint.looked([read(0.2, least=4)], None, now_s, lowered=True)
        now_s += 2 * PERIOD_S
    assert held == [LEAST_HOLD_S, *(min(MOST_HOLD_S, LEAST_HOLD_S * 2.0**n) for n in range(1, 6))]


def test_one_that_is_gone_holds_nothing_any_more_unless_another_does() -> None:
    restraint = Restraint()
    near = [replace(read(1.0), name=name) for name in ("first", "second")]
    restraint.looked(near, None, 0.0, lowered=True, exist={"first", "second", "of another pool"})
    restraint.looked([], None, 15.0, lowered=False, exist={"first", "second"})
    assert restraint.near, "they are there and measure nothing"
    restraint.looked([], None, 30.0, lowered=False)
    assert restraint.near, "it is not known which there are"
    restraint.looked([], None, 45.0, lowered=False, exist={"second"})
    assert restraint.near
    restraint.looked([], None, 60.0, lowered=False, exist={"of another pool"})
    assert not restraint.near


def test_no_more_metrics_are_remembered_than_a_bound_and_those_that_decide_are() -> None:
    restraint = Restraint()
    for number in range(100):
        low = Metric("low", 0.1, 1.0)
        metrics = (*(Metric(f"{number}-{place}", 0.1 + place / 100, 1.0) for place in range(20)), low)
        restraint.looked([replace(read(0.1), metrics=metrics)], 1.0, 15.0 * number, lowered=False)
        assert len(restraint._learned) == MOST_LEARNED
        assert ("hpa", f"{number}-19") in restraint._learned


def test_one_that_has_asked_for_more_raises_clocks_at_once_unless_by_what_no_clock_changes() -> None:
    restraint = Restraint()
    restraint.looked([read(0.3, least=4, desired=5)], None, 0.0, lowered=True)
    assert "wants 5 replicas of 4" in restraint.why
    both = Read("hpa", 4, 5, 4, 10, (Metric("running", 0.3, 1.0),), steady=True)
    restraint = Restraint()
    restraint.looked([both], None, 0.0, lowered=True)
    assert not restraint.near


def test_why_names_autoscaler_metric_both_values_and_both_numbers() -> None:
    restraint = Restraint()
    restraint.looked([read(1.0)], None, 0.0, lowered=False)
    assert restraint.slowdown("hpa", "running") == START_SLOWDOWN
    assert restraint.why == (
        "HorizontalPodAutoscaler hpa has running at 1 of 1: it may want 7 replicas at lowered clocks, and 4 at default"
        " ones"
    )


def test_without_an_autoscaler_nothing_is_held() -> None:
    restraint = Restraint()
    restraint.looked([], 10.0, 0.0, lowered=True)
    assert not restraint.near
