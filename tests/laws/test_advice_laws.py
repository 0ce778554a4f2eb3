"""Laws of the advice on replicas, in virtual time: it follows the load, and nothing that anybody scales comes back."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.autoscaler import PERIOD_S, Autoscaler, swings

from perseus_operator.families.serving.features.advice.advice import MINIMUM_S, TRUST, Adviser, Situation
from perseus_operator.families.serving.features.advice.capacity import Capacity, ReplicaModels
from perseus_operator.objects.values import Now
from perseus_solver.serving import StepModel, WattModel
from perseus_solver.serving.planner import OperatingPoint

STEPS = ReplicaModels(
    StepModel(1980, 2e-3, 1e-3, 12e-3, 50e-6, 28e-9, 60e-6, 0.0, knee_mhz=1090.0),
    WattModel(1980, 300.0, 190.0, 400.0, 1050.0, 0.2, 0.2, floor_mhz=1100.0),
)
CARRIED = 10.0
POINT = OperatingPoint(1980, (0.0, CARRIED / 2, CARRIED), (400.0, 900.0, 1_100.0))
START_S = 1_900_000_200.0
HOUR = 3_600

Load = Callable[[int], float]


def adviser(point: OperatingPoint = POINT) -> Adviser:
    made = Adviser()
    made.computed(Capacity(point, steps=STEPS))
    return made


def at(second: float) -> Now:
    return Now(float(second), START_S + second)


def day(second: int) -> float:
    """Requests a second: five times as many at the peak as in the valley, twice in four hours."""
    return 60.0 - 40.0 * math.cos(2 * math.pi * second / (2 * HOUR))


def follow(
    load: Load,
    seconds: int,
    *,
    autoscaler: Autoscaler,
    manual: Callable[[int], int | None] = lambda _: None,
    other: Callable[[int, int], float] | None = None,
    known: Callable[[int], bool] = lambda _: True,
) -> tuple[list[int], list[int | None]]:
    """Scale by the advice; returns replicas and advice, every quarter of a minute.

    Args:
        load: by the second.
        seconds: how long.
        autoscaler: that asks for the advice.
        manual: what a person sets the replicas to in a second; None: nothing.
        other: another metric of the same autoscaler, by second and replicas.
        known: whether the advice can be had in a second.
    """
    one, series, said = adviser(), [], []
    for second in range(0, seconds, PERIOD_S):
        if (edited := manual(second)) is not None:
            autoscaler.replicas = edited
        one.looked(load(second), Situation(autoscaler.replicas), at(second))
        advice = one.advice.replicas if known(second) else None
        more = () if other is None else (other(second, autoscaler.replicas),)
        autoscaler.look(second, None if advice is None else float(advice), *more)
        series.append(autoscaler.replicas)
        said.append(advice)
    return series, said


def test_replicas_follow_a_day_carry_it_and_do_not_swing() -> None:
    series, _ = follow(day, 4 * HOUR, autoscaler=Autoscaler(10))
    for place, replicas in enumerate(series):
        assert replicas * CARRIED >= day(place * PERIOD_S) or place < 20
    assert max(series) > 2 * min(series[20:]), "it follows the day"
    assert swings(series, MINIMUM_S) == 0


@given(before=st.integers(1, 64), advised=st.integers(1, 64))
def test_the_target_of_one_gives_the_advised_number_whatever_there_is(before: int, advised: int) -> None:
    autoscaler = Autoscaler(before, stabilization_s=0.0)
    autoscaler.look(0.0, float(advised))
    assert autoscaler.replicas == advised


def test_with_the_default_tolerance_an_autoscaler_may_stay_a_tenth_below() -> None:
    autoscaler = Autoscaler(20, tolerance=0.1)
    autoscaler.look(0.0, 21.0)
    assert autoscaler.replicas == 20, "so a sample sets the tolerance"
    autoscaler.look(15.0, 23.0)
    assert autoscaler.replicas == 23


@settings(max_examples=25)
@given(
    noise=st.lists(st.floats(0.6, 1.4), min_size=8, max_size=64),
    edits=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    mean=st.floats(15.0, 200.0),
)
def test_what_is_advised_does_not_depend_on_how_many_there_are(
    noise: list[float], edits: list[int], mean: float
) -> None:
    """Beside manual edits: once replicas were seen with their load, advice is the same with and without them."""

    def load(second: int) -> float:
        return mean * noise[second // 60 % len(noise)]

    def edit(second: int) -> int | None:
        return edits[second // 900 % len(edits)] if second >= HOUR and second % 900 == 0 else None

    few = math.ceil(2.0 * mean / CARRIED)
    _, alone = follow(load, 2 * HOUR, autoscaler=Autoscaler(few))
    _, edited = follow(load, 2 * HOUR, autoscaler=Autoscaler(few), manual=edit)
    assert alone == edited


def test_manual_edits_are_undone_once_and_do_not_start_a_swing() -> None:
    series, _ = follow(lambda _: 60.0, 2 * HOUR, autoscaler=Autoscaler(9), manual={HOUR: 20}.get)
    after = series[HOUR // PERIOD_S :]
    assert set(after) == {series[HOUR // PERIOD_S - 1]}, "what was wanted in the last minutes is less"


@pytest.mark.parametrize("target", [0.5, 0.9])
def test_beside_another_trigger_the_greater_of_both_holds_and_nothing_swings(target: float) -> None:
    """The other one reads how busy replicas are, which falls when there are more."""

    def busy(second: int, replicas: int) -> float:
        return replicas * min(1.0, day(second) / (replicas * CARRIED)) / target

    series, said = follow(day, 4 * HOUR, autoscaler=Autoscaler(10), other=busy)
    assert swings(series[60:], MINIMUM_S) == 0, "but for the first quarter of an hour, when too many were there"
    assert all(replicas >= (advice or 0) for replicas, advice in zip(series, said, strict=True))


def test_while_nothing_is_advised_replicas_stay() -> None:
    series, _ = follow(
        lambda second: 60.0 if second < HOUR else 5.0,
        2 * HOUR,
        autoscaler=Autoscaler(9),
        known=lambda second: second < HOUR,
    )
    assert set(series[HOUR // PERIOD_S :]) == {series[HOUR // PERIOD_S - 1]}


@given(loads=st.lists(st.floats(0.0, 300.0), min_size=40, max_size=120))
def test_a_replica_less_is_advised_only_after_it_was_not_needed_for_the_minimum(loads: list[float]) -> None:
    one, history = adviser(), []
    for place, load in enumerate(loads):
        second = 30.0 * place
        one.looked(load, Situation(3), at(second))
        assert one.advice.replicas is not None
        assert one.advice.replicas >= max(1, math.ceil(load / CARRIED - 1e-9))
        history.append((second, one.advice.replicas, math.ceil(load / CARRIED - 1e-9)))
    for before, after in pairwise(history):
        if after[1] < before[1]:
            since = [needed for second, _, needed in history if after[0] - MINIMUM_S + 10 <= second <= after[0]]
            assert max(since) <= after[1]


def test_what_saves_little_is_kept_for_longer_and_what_saves_nothing_for_good() -> None:
    def kept_s(watts: tuple[float, float, float]) -> float:
        one = adviser(OperatingPoint(1980, POINT.loads, watts))
        for second in range(0, 3 * HOUR, PERIOD_S):
            one.looked(12.0 if second < HOUR else 6.0, Situation(2), at(second))
            if second > HOUR and one.advice.replicas == 1:
                return float(second - HOUR)
        return math.inf

    usual, steep = kept_s((400.0, 900.0, 1_100.0)), kept_s((100.0, 200.0, 750.0))
    assert MINIMUM_S <= usual < steep
    assert kept_s((0.0, 500.0, 1_000.0)) == math.inf, "replicas that rest for nothing are not stopped"


@settings(max_examples=15)
@given(replicas=st.integers(2, 40), idle=st.floats(0.05, 0.9))
def test_fewer_are_advised_by_steps_of_what_a_replica_was_seen_to_carry(replicas: int, idle: float) -> None:
    load, one = idle * CARRIED * 0.5, adviser()
    now_s, there = 0.0, replicas
    for _ in range(10):
        for _ in range(20):
            one.looked(load, Situation(there), at(now_s))
            now_s += 4.0 * PERIOD_S
        assert one.advice.replicas is not None
        assert one.advice.replicas <= there, "trust never asks for more than there are"
        assert there <= math.ceil(TRUST * one.advice.replicas), "and not for less than half at once"
        there = one.advice.replicas
    assert there == 1, "in the end there are as many as the model says"


def test_nothing_falls_while_pods_are_silent() -> None:
    one = adviser()
    for second in range(0, 2 * HOUR, PERIOD_S):
        unsure = "1 pod does not say what it does" if HOUR <= second < HOUR + 2_700 else ""
        one.looked(90.0 if second < HOUR else 10.0, Situation(14, unsure), at(second))
        if second == HOUR + 2_700 - PERIOD_S:
            assert one.advice.replicas is not None
            assert one.advice.replicas >= 9
            assert unsure in one.advice.why
    assert one.advice.replicas is not None
    assert one.advice.replicas < 9


def test_a_load_that_no_number_carries_is_no_advice() -> None:
    one = adviser()
    one.looked(1e6, Situation(3), at(0))
    assert one.advice.replicas is None
    assert "more than 2,000 replicas" in one.advice.why


def test_an_engine_that_no_model_explains_is_no_ground_for_advice() -> None:
    one = adviser()
    one.looked(10.0, Situation(3), at(0))
    one.computed(Capacity(refusal="no model explains the engine"))
    one.looked(10.0, Situation(3), at(60))
    assert one.advice.replicas is None
    assert "no model explains the engine" in one.advice.why


def test_after_a_restart_the_stored_number_is_needed_until_it_was_not() -> None:
    one = Adviser()
    one.restored(9, START_S - 500.0, START_S)
    one.refused("Requests are counted for a minute first.", START_S + 60.0)
    assert one.advice.replicas == 9
    one.computed(Capacity(POINT, steps=STEPS))
    one.looked(10.0, Situation(9), at(70))
    assert one.advice.replicas == 9
    assert one.advice.since_s == START_S - 500.0
    for second in range(75, HOUR, PERIOD_S):
        one.looked(10.0, Situation(9), at(second))
    assert one.advice.replicas is not None
    assert one.advice.replicas < 9
    lost = Adviser()
    lost.restored(9, START_S, START_S)
    lost.refused("No engine of the pool says what it does.", START_S + 601.0)
    assert lost.advice.replicas is None, "not for ever"
