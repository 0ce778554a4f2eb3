"""Who is slow: detection on made-up traces whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_operator.api.job import Straggler
from perseus_operator.api.schema import parse
from perseus_operator.families.training.features.stragglers.detector import StragglerDetector
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.solving.view import PlannedTimes

SPEC = parse(Straggler, {}, "straggler")
PROMISED_US = 1_000_000


def watch(
    detector: StragglerDetector,
    iteration: int,
    ratios: list[float],
    *,
    mixed: bool = False,
    slowed_pipelines: frozenset[int] = frozenset(),
    planned_times: PlannedTimes | None = None,
) -> dict[int, float]:
    """One iteration, every pipeline measured at a ratio of its promise."""
    spans_us = {pipeline: max(1, round(PROMISED_US * ratio)) for pipeline, ratio in enumerate(ratios)}
    points = dict.fromkeys(spans_us, 0)
    record = JobIteration(iteration, spans_us, max(spans_us.values()), None, points, mixed)
    planned_us = dict.fromkeys(spans_us, PROMISED_US)
    detector.observe(record, planned_us, SPEC, slowed_pipelines=slowed_pipelines, planned_times=planned_times)
    return detector.slowdowns


def trace(seed: int, pipelines: int, iterations: int, noise: float) -> list[list[float]]:
    generator = random.Random(seed)
    return [[1.03 * generator.gauss(1, noise) for _ in range(pipelines)] for _ in range(iterations)]


@pytest.mark.parametrize("pipelines", [1, 2, 3, 8])
def test_no_false_alarm_within_noise(pipelines: int) -> None:
    for seed in range(20):
        detector = StragglerDetector()
        alarms = [i for i, ratios in enumerate(trace(seed, pipelines, 200, 0.01)) if watch(detector, i, ratios)]
        assert not alarms, f"seed {seed}"


@pytest.mark.parametrize("pipelines", [2, 3, 8])
@pytest.mark.parametrize("degree", [1.08, 1.2, 1.5])
def test_found_within_the_confirming_iterations_and_recovery_too(pipelines: int, degree: float) -> None:
    for seed in range(10):
        detector, ratios = StragglerDetector(), trace(seed, pipelines, 60, 0.004)
        for i, row in enumerate(ratios):
            slow = 20 <= i < 40
            found = watch(detector, i, [row[0], row[1] * (degree if slow else 1.0), *row[2:]])
            if i < 20 or i >= 40 + SPEC.confirm_iterations - 1:
                assert found == {}, (seed, i)
            if 20 + SPEC.confirm_iterations - 1 <= i < 40:
                assert set(found) == {1}, (seed, i)
                assert found[1] == pytest.approx(degree, rel=0.02)


def test_one_slow_iteration_alone_is_no_straggler() -> None:
    detector = StragglerDetector()
    for i in range(30):
        assert watch(detector, i, [1.0, 1.5 if i % 5 == 0 else 1.0]) == {}


def test_one_slow_iteration_is_enough_where_the_gpu_itself_says_so() -> None:
    detector, hot = StragglerDetector(), frozenset({1})
    for i in range(5):
        assert watch(detector, i, [1.0, 1.0], slowed_pipelines=hot) == {}, "hot but not slow is no straggler"
    assert watch(detector, 5, [1.2, 1.0], slowed_pipelines=hot) == {}, "another pipeline than the hot one"
    assert watch(detector, 6, [1.0, 1.2], slowed_pipelines=hot) == {1: pytest.approx(1.2)}
    assert set(watch(detector, 7, [1.0, 1.0], slowed_pipelines=hot)) == {1}, "recovery is confirmed as always"
    assert watch(detector, 8, [1.0, 1.0]) == {}


class SlowStage:
    """Stage 2 of pipeline 1 is slower by 20 %, which costs the iteration 12 %."""

    def __init__(self, pace: float) -> None:
        self.pace = pace

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        return {p: (1.0, 1.0, self.pace if p == 1 else 1.0) for p in iteration.spans_us}

    def slowdown(self, degrees: Mapping[int, float]) -> float:
        return 1 + 0.6 * (degrees[2] - 1)


def test_a_slow_stage_is_named_and_says_what_the_iteration_will_take() -> None:
    detector = StragglerDetector()
    for i in range(4):
        found = watch(detector, i, [1.0, 1.06], planned_times=SlowStage(1.2))  # the span as if it had begun midway
    assert found == {1: pytest.approx(1.12)}
    assert detector.stages == {1: {2: pytest.approx(1.2)}}
    for i in range(4, 6):
        found = watch(detector, i, [1.0, 1.0], planned_times=SlowStage(1.0))
    assert (found, detector.stages) == ({}, {})


def test_hysteresis_between_the_thresholds() -> None:
    detector = StragglerDetector()
    for i in range(5):
        watch(detector, i, [1.0, 1.0])
    for i in range(5, 12):
        assert watch(detector, i, [1.0, 1.04]) == {}, "below 5 % nobody becomes one"
    for i in range(12, 15):
        watch(detector, i, [1.0, 1.2])
    for i in range(15, 25):
        assert set(watch(detector, i, [1.0, 1.03])) == {1}, "above 2 % nobody stops being one"
    watch(detector, 25, [1.0, 1.01])
    assert watch(detector, 26, [1.0, 1.01]) == {}


def test_all_slow_together_is_no_straggler() -> None:
    detector = StragglerDetector()
    for i in range(20):
        assert watch(detector, i, [1.0 if i < 5 else 1.3] * 3) == {}


def test_a_growing_slowdown_is_followed() -> None:
    detector = StragglerDetector()
    for i in range(5):
        watch(detector, i, [1.0, 1.0])
    for i in range(5, 15):
        watch(detector, i, [1.0, 1.1])
    for i in range(15, 25):
        found = watch(detector, i, [1.0, 1.3])
    assert found[1] == pytest.approx(1.3)


def test_transitions_are_evidence_of_nothing() -> None:
    detector = StragglerDetector()
    for i in range(10):
        assert watch(detector, i, [1.0, 9.0], mixed=True) == {}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3), max_size=40))
def test_whatever_is_measured_slowdowns_are_finite_and_above_one(measured: list[list[float]]) -> None:
    detector = StragglerDetector()
    for i, ratios in enumerate(measured):
        assert all(1.0 < slowdown < float("inf") for slowdown in watch(detector, i, ratios).values())
