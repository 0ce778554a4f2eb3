"""Why a pipeline is slow and what is said of it; slowness by intent is announced; thresholds change meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from perseus_operator.api.conditions import ConditionType
from perseus_operator.families.training.features.stragglers.cause import StragglerCause, cause_of
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.events import plan_event
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.nodes.iterations import JobIteration

SLOW = (1.0, 1.2)


class Paces:
    """What single stages show: those of pipeline 1 are slower by ``pace`` than promised."""

    def __init__(self, pace: float) -> None:
        self.pace = pace

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        return {p: (1.0, self.pace if p == 1 else 1.0) for p in iteration.spans_us}

    def slowdown(self, degrees: Mapping[int, float]) -> float:
        return max(degrees.values())


def cause(state: Training) -> StragglerCause:
    return cause_of(state.stragglers.detector, state.nodes, 1)


def slow_job(make_job: Any, planned_times: Paces | None = None, **changes: Any) -> Any:
    job = make_job(**changes)
    job.run()
    job.state.solve.planned_times = planned_times
    for iteration in range(4):
        job.train(iteration, SLOW)
    job.settle()
    return job


def said(job: Any) -> str:
    found = conditions_of(job.state, job.decide())
    return next(c.message for c in found if c.type is ConditionType.STRAGGLER_DETECTED)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["THERMAL_SLOWDOWN"], StragglerCause.THERMAL),
        (["POWER_BRAKE"], StragglerCause.POWER),
        (["POWER_CAP"], StragglerCause.POWER),
        (["HARDWARE_SLOWDOWN"], StragglerCause.CLOCK),
        (["DRIFT"], StragglerCause.CLOCK),
        (["FOREIGN_WRITE"], StragglerCause.CLOCK),
        (["DRIFT", "THERMAL_SLOWDOWN", "POWER_CAP"], StragglerCause.THERMAL),
        (["LOST"], StragglerCause.UNKNOWN),
        ([], StragglerCause.UNKNOWN),
    ],
)
def test_a_gpu_of_the_pipeline_says_why(make_job: Any, kinds: list[str], expected: StragglerCause) -> None:
    job = slow_job(make_job)
    for kind in kinds:
        job.nodes[1].gpu_events["GPU-1-1", kind] = "says the GPU"
    assert cause(job.state) is expected
    assert f"Cause: {expected.value.lower()}." in said(job)
    (shown,) = status.figures(job.state, job.decide()).stragglers
    assert shown.cause == expected.value


def test_a_gpu_of_another_pipeline_says_nothing_of_this_one(make_job: Any) -> None:
    job = slow_job(make_job)
    job.nodes[0].gpu_events["GPU-0-1", "THERMAL_SLOWDOWN"] = "hot"
    assert cause(job.state) is StragglerCause.UNKNOWN
    assert "timing alone" in said(job)


def test_a_power_limit_that_all_are_at_explains_nothing(make_job: Any) -> None:
    job = slow_job(make_job)
    job.nodes[1].gpu_events["GPU-1-1", "POWER_CAP"] = "capped"
    job.nodes[0].gpu_events["GPU-0-1", "POWER_CAP"] = "capped"
    assert cause(job.state) is StragglerCause.UNKNOWN
    job.nodes[0].gpu_events.clear()
    job.nodes[0].gpu_events["GPU-0-0", "POWER_CAP"] = "another stage"
    assert cause(job.state) is StragglerCause.POWER


def test_slow_though_no_stage_computes_slowly_is_communication(make_job: Any) -> None:
    assert cause(slow_job(make_job, Paces(1.0)).state) is StragglerCause.COMMUNICATION
    assert cause(slow_job(make_job, Paces(1.2)).state) is StragglerCause.UNKNOWN, "a stage is slow, and nobody says why"
    assert cause(slow_job(make_job, None).state) is StragglerCause.UNKNOWN, "whether a stage is slow is not known"


# ---------------------------------------------------------------------------------------------------- thresholds


def test_thresholds_can_be_changed_while_the_job_runs(make_job: Any) -> None:
    job = make_job()
    job.run()
    for iteration in range(6):
        job.train(iteration, (1.0, 1.04))
    assert job.state.stragglers.detector.slowdowns == {}, "below 5 %"
    lower = make_job(straggler={"slowdownThreshold": "3%", "recoveryThreshold": "1%"}).spec
    job.state.spec_accepted(lower)
    for iteration in range(6, 8):
        assert job.state.stragglers.detector.slowdowns == {}
        job.train(iteration, (1.0, 1.04))
    assert set(job.state.stragglers.detector.slowdowns) == {1}, "two iterations under the new threshold"
    job.state.spec_accepted(make_job(straggler={"slowdownThreshold": "20%", "recoveryThreshold": "10%"}).spec)
    for iteration in range(8, 10):
        job.train(iteration, (1.0, 1.04))
    assert job.state.stragglers.detector.slowdowns == {}, "1.04 is recovered now"


def test_the_number_of_iterations_that_must_agree_too(make_job: Any) -> None:
    job = make_job(straggler={"confirmIterations": 8})
    job.run()
    for iteration in range(5):
        job.train(iteration, SLOW)
    assert job.state.stragglers.detector.slowdowns == {}
    job.state.spec_accepted(make_job(straggler={"confirmIterations": 1}).spec)
    job.train(5, SLOW)
    assert set(job.state.stragglers.detector.slowdowns) == {1}


# --------------------------------------------------------------------------------------------------- announcement


def test_a_planned_slowdown_is_announced_by_event_and_metric(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    made = job.run()
    assert status.planned_slowdown(job.state, made) == pytest.approx(1.1)
    assert "up to 10.00% slower than T_min on purpose" in plan_event(job.state, made).message
    metrics = Metrics()
    figures = status.figures(job.state, made)
    metrics.set_job(job.state.ref, figures, measured=None, planned_slowdown=1.1, stragglers=0, active=True, ready=True)
    assert b'perseus_job_planned_slowdown_ratio{job_name="job",job_namespace="ns"} 1.1' in metrics.exposition()
    fast = make_job()
    made = fast.run()
    assert "on purpose" not in plan_event(fast.state, made).message, "nothing to announce"
