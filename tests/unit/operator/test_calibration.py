"""Calibration while a job runs: iterations made with known delays must be predicted with them afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
from tests.doubles.job_hardware import job_hardware
from tests.doubles.stored_objects import StoredObjects, stored_object

from perseus_operator.api.conditions import ConditionType, Explanation, Reason
from perseus_operator.api.objective import Objective
from perseus_operator.api.schema import parse
from perseus_operator.errors import KubeConflict, KubeUnavailable, SolveFailed
from perseus_operator.families.training.features.frontier.inputs import Calibrate, Solve, inputs_digest
from perseus_operator.families.training.features.frontier.objective import Target, target_of
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.status import figures
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work.calibrator import Calibrator
from perseus_operator.families.training.work.profile_source import StoredProfile
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.objects.values import ConfigMap, JobRef
from perseus_operator.solving import calibration, frontier
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.request import SolveRequest, profile_of
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv
from perseus_solver.significance import NO_SLOWDOWN

pytestmark = pytest.mark.usefixtures("short_search")

INPUTS = SolveRequest(profile_csv(2), "1f1b", stages=2, microbatches=4, chunks=None, blocking_power_mw=80_000, points=8)
OVERHEAD_S, DELAY_S = 0.02, 0.003
PROFILE = StoredProfile("profile", b"", "ns", ConfigMap("profile", {}, {}, uid="u-1"))


def solved(inputs: SolveRequest = INPUTS) -> frontier.SolvedFrontier:
    return frontier.open_frontier(solve_in_process(inputs), inputs, digest="d", solve_ms=1, restored=False)


@pytest.fixture(scope="module")
def plain() -> frontier.SolvedFrontier:
    return solved()


class Truth:
    """A job whose messages take time and whose optimizer does: what the model does not know."""

    def __init__(self, plain: frontier.SolvedFrontier) -> None:
        problem = calibration.simulator_of(INPUTS).problem
        stage = problem.schedule.stage
        across = stage[problem.edge_from] != stage[problem.edge_to]
        real = replace(problem, edge_delay_s=np.where(across, DELAY_S, 0.0), overhead_s=OVERHEAD_S)
        self._simulator = calibration.Simulator(real)
        self._plain = plain
        self._random = np.random.default_rng(5)

    def iteration(self, number: int, point: int, *, scatter: float = 0.003) -> JobIteration:
        """Two pipelines; the second is a little slower."""
        planned_s = self._plain.planned_times.durations_s(point)
        duration_s = planned_s * np.exp(self._random.normal(0, scatter, planned_s.size))
        span_s = float(self._simulator.end_s(duration_s).max())
        offsets = self._plain.schedule.stage_offset.tolist()
        us = [max(1, round(1e6 * d)) for d in duration_s.tolist()]
        stages = tuple(us[a:b] for a, b in pairwise(offsets))
        spans = {0: round(1e6 * span_s) - 50, 1: round(1e6 * span_s)}
        time_us = round(1e6 * (span_s + OVERHEAD_S))
        return JobIteration(number, spans, time_us, None, {0: point, 1: point}, mixed=False, stages_us={1: stages})


def record_of(plain: frontier.SolvedFrontier, iterations: int = 40) -> calibration.RecentIterations:
    truth, record = Truth(plain), calibration.RecentIterations(plain.schedule)
    for k in range(iterations):
        assert record.add(truth.iteration(k, point=(k // 10) % 2), plain.planned_times)
    return record


async def test_a_calibration_makes_predictions_come_true(plain: frontier.SolvedFrontier) -> None:
    pool = SolverPool(workers=1, timeout_s=120, memory_mib=8192)
    answer = await pool.calibrate(record_of(plain).request(INPUTS))
    learnt = calibration.parse_calibration_result(answer)
    assert learnt.quality.explains
    assert learnt.quality.heldout_error is not None
    assert learnt.quality.heldout_error < 0.003 < 0.03 < learnt.quality.uncalibrated_error
    assert learnt.change is not None
    assert learnt.change > calibration.MIN_CHANGE
    assert learnt.is_worth_using("")

    calibrated = solved(replace(INPUTS, calibration=learnt.text))
    real_s = np.median([Truth(plain).iteration(k, 0).time_us for k in range(9)]) / 1e6
    assert calibrated.view.t_min_us / 1e6 == pytest.approx(real_s, rel=0.01)
    assert plain.view.t_min_us / 1e6 < 0.97 * real_s
    assert calibrated.view.allowance == learnt.quality.allowance > 0

    again = calibration.calibrate_in_process(record_of(plain).request(replace(INPUTS, calibration=learnt.text)))
    repeated = calibration.parse_calibration_result(again)
    assert repeated.change == pytest.approx(0.0, abs=1e-9)
    assert not repeated.is_worth_using(learnt.quality.digest), "new plans for nothing"


def test_before_calibration_half_of_no_slowdown_is_left_for_messages(
    plain: frontier.SolvedFrontier,
) -> None:
    """Nobody knows yet what happens between computations; once it is known, all of it is used."""
    hardware = job_hardware("NVIDIA A100-SXM4-80GB", 5_400, 14_000).to_json()
    learnt = calibration.parse_calibration_result(calibration.calibrate_in_process(record_of(plain).request(INPUTS)))
    first = solved(replace(INPUTS, hardware=hardware)).view
    later = solved(replace(INPUTS, hardware=hardware, calibration=learnt.text)).view
    assert later.no_slowdown == 2 * first.no_slowdown == NO_SLOWDOWN
    for view in (first, later):
        chosen = view.lookup(view.no_slower_us)
        assert chosen > 0, "some of it is used"
        assert view.times_us[chosen] <= view.no_slower_us == round((1 + view.no_slowdown) * view.t_min_us)
    assert plain.view.no_slowdown == 0.0, "clocks that change at once are never late"


def test_iterations_that_do_not_fit_are_left_out(plain: frontier.SolvedFrontier) -> None:
    record, whole = calibration.RecentIterations(plain.schedule), Truth(plain).iteration(1, 0)
    stages = whole.stages_us[1]
    for broken in ({}, {0: stages}, {1: stages[:1]}, {1: (stages[0][:-1], stages[1])}, {1: ([0] * 8, [0] * 8)}):
        assert not record.add(replace(whole, stages_us=broken), plain.planned_times)
    assert len(record) == 0
    assert record.add(whole, plain.planned_times)


def test_stage_paces_and_what_a_slow_stage_costs(plain: frontier.SolvedFrontier) -> None:
    whole = Truth(plain).iteration(1, 0, scatter=0.0)
    slow = replace(whole, stages_us={1: (whole.stages_us[1][0], [round(1.3 * us) for us in whole.stages_us[1][1]])})
    assert plain.planned_times.paces(slow)[1] == pytest.approx([1.0, 1.3], rel=1e-3)
    assert 1.05 < plain.planned_times.slowdown({1: 1.3}) <= 1.3
    assert plain.planned_times.slowdown({}) == pytest.approx(1.0)
    assert plain.planned_times.paces(replace(whole, stages_us={1: ([1], [1])})) == {}


# ------------------------------------------------------------------------------------------- when, and what follows


def test_the_planner_calibrates_after_enough_iterations_and_again_later(job: Any) -> None:
    job.run()
    learning = job.state.calibration
    learning.recorded = learning.recorded_since_start = 39
    assert Calibrate() not in job.decide().actions
    learning.recorded = learning.recorded_since_start = 40
    assert Calibrate() in job.decide().actions
    learning.running = True
    assert Calibrate() not in job.decide().actions
    learning.running, learning.started, learning.recorded_since_start = False, True, 99
    assert Calibrate() not in job.decide().actions
    learning.recorded_since_start = 100
    assert Calibrate() in job.decide().actions


def test_a_calibration_that_failed_is_tried_again_sooner(job: Any) -> None:
    """Most fail for want of iterations, and those come."""
    job.run()
    learning = job.state.calibration
    learning.recorded, learning.started, learning.recorded_since_start = 80, True, 40
    assert Calibrate() not in job.decide().actions
    learning.failed(Explanation(Reason.CALIBRATION_FAILED, "too few iterations"))
    assert Calibrate() in job.decide().actions
    learning.recorded_since_start = 39
    assert Calibrate() not in job.decide().actions


def test_a_calibration_in_use_means_a_new_frontier(job: Any) -> None:
    job.run()
    job.state.calibration.digest_in_use = "abc"
    made = job.decide()
    assert Solve(inputs_digest(job.spec, "csv", "abc")) in made.actions
    assert made.applied, "the plan in force stays meanwhile"


@pytest.mark.parametrize(
    ("objective", "allowed_us"),
    [
        ({"type": "MaxSlowdown", "maxSlowdown": "10%"}, 1_100_000 / 1.02),
        ({"type": "MaxSlowdown", "maxSlowdown": "1%"}, 1_000_000),
        ({"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_300_000}}, 1_300_000 / 1.02),
        ({"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_000_500}}, 1_000_000),
    ],
)
def test_bounds_leave_room_for_noise(job: Any, objective: dict[str, Any], allowed_us: float) -> None:
    job.run()
    view = replace(job.state.frontier, allowance=0.02)
    found = target_of(parse(Objective, objective, "o"), view, gpus_per_stage=2, iterations_done=0, remaining_s=None)
    assert found == Target(pytest.approx(allowed_us))


def test_stragglers_starts_and_transitions_are_not_recorded(job: Any) -> None:
    job.run()
    job.train(0)
    job.train(1)
    first, second = job.state.history.recent
    for node in job.nodes:
        node.plans.from_iteration = 1
    assert not job.state.is_typical(first)
    assert job.state.is_typical(second)
    assert not job.state.is_typical(replace(second, mixed=True))
    job.train(2, (1.0, 1.3))
    job.train(3, (1.0, 1.3))
    assert not job.state.is_typical(job.state.history.recent[-1])


# ------------------------------------------------------------------------------------------------------- remembering


class Cluster(StoredObjects):
    """What is stored, and the worker's answers."""

    def __init__(self, answer: Mapping[str, Any] | Exception | None = None) -> None:
        super().__init__()
        self.answer = answer
        self.kube = self.solver = self

    async def calibrate(self, request: calibration.CalibrateRequest, namespace: str = "") -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return json.dumps(self.answer).encode() if self.answer else calibration.calibrate_in_process(request)


def learner_of(cluster: Any, plain: frontier.SolvedFrontier) -> tuple[Calibrator, Training]:
    state = Training(PerseusJob(JobRef("ns", "job", "uid")))
    learner = Calibrator(state, cluster)
    truth = Truth(plain)
    for k in range(1, 41):
        learner.record(truth.iteration(k, point=(k // 10) % 2), plain)
    return learner, state


async def test_the_next_job_of_the_same_profile_and_pipeline_begins_calibrated(plain: frontier.SolvedFrontier) -> None:
    cluster: Any = Cluster()
    learner, state = learner_of(cluster, plain)
    assert state.calibration.recorded == 40
    await learner.calibrate(INPUTS, PROFILE)
    assert state.calibration.digest_in_use
    assert (set(cluster.profiles), cluster.config_maps) == ({"profile"}, {}), "not in the user's object"
    shared, alike = Cluster(), Training(PerseusJob(JobRef("team-b", "job", "uid-3")))
    reader = Calibrator(alike, cast(Any, shared))
    reader._record = learner._record
    await reader.calibrate(INPUTS, PROFILE)
    assert alike.calibration.digest_in_use
    assert not shared.profiles, "a profile of another namespace is read, and never written"

    following = Training(PerseusJob(JobRef("ns", "next", "uid-2")))
    heir = Calibrator(following, cluster)
    await heir.restore(PROFILE, profile_of(INPUTS), INPUTS)
    assert (heir.calibration, following.calibration.digest_in_use) == (
        learner.calibration,
        state.calibration.digest_in_use,
    )

    stranger = Calibrator(Training(PerseusJob(JobRef("ns", "other", "uid-3"))), cluster)
    await stranger.restore(PROFILE, profile_of(INPUTS), replace(INPUTS, microbatches=5))
    assert stranger.calibration == "", "another pipeline has other delays"

    kept = cluster.profiles["profile"].status["calibrations"]
    (key,) = kept
    wrong = {"calibrations": {key: kept[key].replace('"stages": 2', '"stages": 0')}}
    cluster.profiles["profile"] = stored_object("profile", {}, wrong)
    damaged = Training(PerseusJob(JobRef("ns", "late", "uid-4")))
    await Calibrator(damaged, cluster).restore(PROFILE, profile_of(INPUTS), INPUTS)
    assert damaged.calibration.fault is not None
    assert damaged.calibration.fault.reason is Reason.CALIBRATION_INVALID
    assert "stages must be at least 1" in damaged.calibration.fault.message
    assert not damaged.calibration.digest_in_use

    cluster.failing = KubeUnavailable("dark")
    with pytest.raises(KubeUnavailable):  # unknown is not empty: the runner asks again
        await Calibrator(following, cluster).restore(PROFILE, profile_of(INPUTS), INPUTS)


async def test_what_cannot_be_kept_is_used_all_the_same(plain: frontier.SolvedFrontier) -> None:
    cluster: Any = Cluster()
    learner, state = learner_of(cluster, plain)
    cluster.failing = KubeConflict("not the operator's")
    await learner.calibrate(INPUTS, PROFILE)
    assert state.calibration.digest_in_use
    assert not state.calibration.running


async def test_a_worker_that_fails_is_said_and_changes_nothing(plain: frontier.SolvedFrontier) -> None:
    learner, state = learner_of(Cluster(SolveFailed("stopped")), plain)
    await learner.calibrate(INPUTS, PROFILE)
    assert state.calibration.fault is not None
    assert state.calibration.fault.reason is Reason.CALIBRATION_FAILED
    assert (learner.calibration, state.calibration.digest_in_use) == ("", "")


async def test_a_model_that_does_not_explain_the_run_is_said_and_not_used(
    plain: frontier.SolvedFrontier, job: Any
) -> None:
    truth, cluster = Truth(plain), Cluster()
    job.run()
    learner: Any = Calibrator(job.state, cluster)  # type: ignore[arg-type]
    shakes = np.random.default_rng(1).uniform(1.0, 1.4, 40)
    for k in range(40):  # a network that others use, too
        one = truth.iteration(k + 1, point=0)
        learner.record(replace(one, time_us=round(one.time_us * shakes[k])), plain)
    await learner.calibrate(INPUTS, PROFILE)
    said = {c.type: c for c in conditions_of(job.state, job.decide())}[ConditionType.MODEL_EXPLAINS]
    assert (said.status, said.reason) == (False, Reason.MODEL_DOES_NOT_EXPLAIN)
    assert "nine of ten iterations lie within" in said.message
    assert job.state.calibration.digest_in_use == ""
    shown = figures(job.state, job.decide()).calibration
    assert shown is not None
    assert shown.quality == "DoesNotExplain"
