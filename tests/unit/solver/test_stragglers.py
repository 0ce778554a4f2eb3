"""The straggler detector: which pipeline, which stage, what slowdown; when it reports one and when it does not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule
from perseus_solver.stragglers import (
    Detector,
    PaceNoise,
    Straggler,
    Thresholds,
    least_slowdowns,
    stage_pace,
    straggling_time_s,
)

THRESHOLDS = Thresholds(enter=(1.05, 1.05, 1.05), leave=(1.02, 1.02, 1.02), confirm=2)
HEALTHY = (1.0, 1.0, 1.0)


def feed(detector: Detector, *iterations: dict[int, tuple[float, ...]]) -> tuple[Straggler, ...]:
    for iteration in iterations:
        detector.observe(iteration)
    return detector.stragglers


def test_a_slow_stage_is_found_within_two_iterations_with_its_slowdown() -> None:
    detector = Detector(THRESHOLDS)
    assert feed(detector, *[{0: HEALTHY, 1: HEALTHY}] * 5) == ()
    slow = {0: HEALTHY, 1: (1.0, 1.2, 1.0)}
    assert feed(detector, slow) == ()
    assert feed(detector, slow) == (Straggler(1, 1, 1.2),)


def test_one_bad_iteration_is_no_straggler() -> None:
    detector = Detector(THRESHOLDS)
    slow = {0: (2.0, 2.0, 2.0), 1: HEALTHY}
    for _ in range(5):
        assert feed(detector, slow, {0: HEALTHY, 1: HEALTHY}) == ()


def test_one_iteration_is_enough_where_hardware_reports_it_but_not_for_recovery() -> None:
    detector = Detector(THRESHOLDS)
    slow, well = {0: HEALTHY, 1: (1.3, 1.0, 1.0)}, {0: HEALTHY, 1: HEALTHY}
    detector.observe(slow, evident={0})
    assert detector.stragglers == ()
    detector.observe(well, evident={1})
    assert detector.stragglers == ()
    detector.observe(slow, evident={1})
    assert detector.stragglers == (Straggler(1, 0, 1.3),)
    detector.observe(well, evident={1})
    assert detector.stragglers == (Straggler(1, 0, 1.3),)


def test_recovery_needs_agreement_too_and_does_not_dilute_the_slowdown() -> None:
    detector = Detector(THRESHOLDS)
    slow, well = {0: HEALTHY, 1: (1.3, 1.0, 1.0)}, {0: HEALTHY, 1: HEALTHY}
    feed(detector, slow, slow)
    assert feed(detector, well) == (Straggler(1, 0, 1.3),)
    assert feed(detector, slow, well) == (Straggler(1, 0, 1.3),)
    assert feed(detector, well) == ()
    assert feed(detector, slow) == ()
    assert feed(detector, slow) == (Straggler(1, 0, 1.3),)


@pytest.mark.parametrize("seed", range(6))
def test_a_stage_recovers_although_noise_hid_the_moment_when_it_did(seed: int) -> None:
    """Load that varied much, and then no longer: recovered iterations do not differ from the slow ones by enough, and
    become part of the slowdown, until it is none.
    """
    noisy = random.Random(seed)
    detector = Detector(Thresholds((1.05,), (1.02,), 2), PaceNoise())

    def iteration(slowdown: float, sigma: float) -> bool:
        paces = {0: (slowdown * noisy.lognormvariate(0, sigma),), 1: (noisy.lognormvariate(0, sigma),)}
        detector.observe(paces, evident=(0,) if slowdown > 1 else ())
        return bool(detector.stragglers)

    for _ in range(60):
        iteration(1.0, 0.05)
    assert [iteration(1.2, 0.05) for _ in range(12)][-1]
    assert not [iteration(1.0, 0.001) for _ in range(40)][-1]


def test_between_the_thresholds_nothing_changes() -> None:
    detector = Detector(THRESHOLDS)
    between = {0: HEALTHY, 1: (1.03, 1.0, 1.0)}
    assert feed(detector, *[between] * 4) == ()
    slow = {0: HEALTHY, 1: (1.3, 1.0, 1.0)}
    feed(detector, slow, slow)
    found = feed(detector, *[between] * 9)
    assert [(one.dp, one.stage) for one in found] == [(1, 0)]
    assert found[0].slowdown == pytest.approx(1.03)


def test_the_slowdown_follows_changes() -> None:
    detector = Detector(THRESHOLDS)
    feed(detector, *[{0: HEALTHY, 1: (1.0, 1.0, 1.2)}] * 6)
    assert feed(detector, *[{0: HEALTHY, 1: (1.0, 1.0, 1.4)}] * 5) == (Straggler(1, 2, 1.4),)


def test_what_happens_to_all_pipelines_alike_is_no_straggler() -> None:
    # A profile that is off, a clock change, a warmer room.
    detector = Detector(THRESHOLDS)
    for pace in ((1.3, 0.8, 1.0), (1.5, 1.0, 2.0)):
        assert feed(detector, *[{0: pace, 1: pace, 2: pace}] * 4) == ()


def test_half_of_two_pipelines_may_be_slow_and_the_faster_is_the_reference() -> None:
    detector = Detector(THRESHOLDS)
    assert feed(detector, *[{0: (1.2, 1.0, 1.0), 1: HEALTHY}] * 3) == (Straggler(0, 0, 1.2),)


def test_several_stages_of_several_pipelines_the_slowest_first() -> None:
    detector = Detector(THRESHOLDS)
    iteration = {0: HEALTHY, 1: (1.1, 1.0, 1.0), 2: HEALTHY, 3: (1.0, 1.0, 1.4), 4: HEALTHY}
    assert feed(detector, *[iteration] * 3) == (Straggler(3, 2, 1.4), Straggler(1, 0, 1.1))


def test_a_single_pipeline_has_no_stragglers() -> None:
    detector = Detector(THRESHOLDS)
    assert feed(detector, *[{0: HEALTHY}] * 3, *[{0: (9.0, 1.0, 1.0)}] * 9) == ()


def test_a_pipeline_that_does_not_report_keeps_its_state() -> None:
    detector = Detector(THRESHOLDS)
    slow = {0: HEALTHY, 1: (1.3, 1.0, 1.0)}
    feed(detector, slow, slow)
    assert feed(detector, *[{0: HEALTHY}] * 5) == (Straggler(1, 0, 1.3),)
    assert feed(detector, *[{1: HEALTHY}] * 2) == ()


def test_a_pipeline_that_starts_again_starts_healthy() -> None:
    detector = Detector(THRESHOLDS)
    slow = {0: HEALTHY, 1: (1.3, 1.0, 1.0)}
    feed(detector, slow, slow)
    detector.forget(1)
    assert detector.stragglers == ()
    assert feed(detector, slow) == ()
    detector.forget(7)


@pytest.mark.parametrize(
    "pace", [(1.0, 1.0), (1.0, 1.0, 0.0), (1.0, 1.0, -1.0), (1.0, float("nan"), 1.0), (float("inf"), 1.0, 1.0)]
)
def test_a_bad_pace_is_refused_and_changes_nothing(pace: tuple[float, ...]) -> None:
    detector = Detector(THRESHOLDS)
    slow = {0: HEALTHY, 1: (1.3, 1.0, 1.0)}
    feed(detector, slow)
    with pytest.raises(ValueError, match="3 positive, finite numbers"):
        detector.observe({0: HEALTHY, 1: pace})
    assert feed(detector, slow) == (Straggler(1, 0, 1.3),)


def test_thresholds_and_least_slowdowns_follow_from_noise() -> None:
    noise = (0.0, 0.001, 0.01)
    thresholds = Thresholds.from_noise(noise)
    assert thresholds.enter == pytest.approx((1.01, 1.01, 1 + 4 * 2**0.5 * 0.01))
    slowdowns = least_slowdowns(noise)
    assert all(slowdown >= enter for slowdown, enter in zip(slowdowns, thresholds.enter, strict=True))
    assert slowdowns[0] == thresholds.enter[0]
    assert slowdowns[2] > thresholds.enter[2]
    assert Thresholds.from_noise(noise, min_excess=0.05, confirm=3).enter[0] == pytest.approx(1.05)


@pytest.mark.parametrize(
    ("enter", "leave", "confirm"),
    [
        ((), (), 2),
        ((1.1,), (1.1, 1.1), 2),
        ((1.1,), (1.2,), 2),
        ((1.1,), (1.0,), 2),
        ((np.inf,), (1.1,), 2),
        ((1.1,), (1.05,), 0),
    ],
)
def test_invalid_thresholds_are_refused(enter: tuple[float, ...], leave: tuple[float, ...], confirm: int) -> None:
    with pytest.raises(ValueError, match=r"thresholds|enter and leave|confirm"):
        Thresholds(enter=enter, leave=leave, confirm=confirm)


def test_pace_is_a_median_so_spikes_do_not_count() -> None:
    planned = np.full((2, 8), 0.1)
    measured = planned.copy()
    measured[0, [0, 5]] *= 3  # one of four, on each stage
    measured[1, 4:] *= 1.2
    pace = stage_pace(measured, planned, np.array([0, 4, 8], dtype=np.int32))
    assert pace == pytest.approx(np.array([[1.0, 1.0], [1.0, 1.2]]))
    assert stage_pace(measured[1], planned[1], np.array([0, 4, 8], dtype=np.int32)) == pytest.approx(pace[1])


def test_the_stragglers_iteration_time_is_simulated() -> None:
    profile = "stage,instruction,frequency,time,energy\n" + "".join(
        f"{stage},{what},1000,{time_s},1\n"
        for stage in range(3)
        for what, time_s in (("forward", 0.1 if stage == 1 else 0.05), ("backward", 0.2 if stage == 1 else 0.1))
    )
    schedule = build_schedule("1f1b", stages=3, microbatches=12)
    simulator = Simulator(build_problem(read_profile(profile), schedule, blocking_power_w=1, overhead_s=0.5))
    choice = np.zeros(schedule.instructions, dtype=int)
    own_s = float(simulator.run(choice).iteration_time_s)
    assert straggling_time_s(simulator, choice, {}) == pytest.approx(own_s)
    bottleneck, hidden = (straggling_time_s(simulator, choice, {stage: 1.5}) for stage in (1, 0))
    assert own_s < hidden < own_s * 1.1 < bottleneck < own_s * 1.5  # the overhead does not stretch
    assert straggling_time_s(simulator, choice, {0: 1.5, 1: 1.5, 2: 1.5}) == pytest.approx((own_s - 0.5) * 1.5 + 0.5)
