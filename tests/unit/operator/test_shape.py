"""A job whose spec leaves out shape and profile takes them from its training processes, all of them; one whose
processes do not fit its shape has one clock for whole iterations."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.conftest import LIMITS

from perseus_core.instruction import InstructionKind
from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId
from perseus_operator.api.conditions import ConditionType, Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import Pipeline, ScheduleName, whole_iterations
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.errors import InvalidSchedule
from perseus_operator.families.training import training as known
from perseus_operator.families.training.decide import decide
from perseus_operator.families.training.shape import (
    Misfit,
    ShapeProgress,
    completed,
    is_shared,
    shape_from_status,
    shape_of_ranks,
    shape_to_status,
)
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.work.schedule_source import compare_schedules
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.node import Rank
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import JobRef, Now, Pod

FORWARD_BACKWARD = ((1, 0, 0, False), (2, 0, 0, False))
STEP = ((int(InstructionKind.STEP), 0, 0, False),)


class Training:
    """A job of two pods of two GPUs each, one node for each, whose agents have granted their leases."""

    def __init__(self, spec: dict[str, Any] | None = None) -> None:
        self.state = known.Training(PerseusJob(JobRef("ns", "job", "uid"), generation=1))
        self.state.spec_accepted(parse_spec(JobSpec, spec or {}))
        pods = [Pod(f"pod-{p}", "ns", f"t-{p}", f"node-{p}", "job", {}, asks_for_gpu=True) for p in range(2)]
        self.state.pods_observed(Selection(tuple(pods)), {f"node-{p}": f"10.0.0.{p}:1" for p in range(2)}, wall_s=0.0)
        for node in self.nodes:
            node.lease_acquired(node.pods, plan_id="", following=False, started_s=0.0, ttl_s=30.0)

    @property
    def nodes(self) -> list[Any]:
        return [self.state.nodes[name] for name in sorted(self.state.nodes)]

    def connect(self, pod: int, dp: int, stage: int, *, pid: int = 1, iteration: int = 1) -> None:
        gpu = f"GPU-{pod}-{dp}-{stage}"
        self.state.rank_joined(self.nodes[pod], Rank(f"pod-{pod}", gpu, dp, stage, 0, pid, iteration))

    def declare(self, own: Any = FORWARD_BACKWARD) -> None:
        for node in self.nodes:
            node.schedules_declared(dict.fromkeys(node.ranks, own))

    def connect_all(self, *, pipelines: int = 2, own: Any = FORWARD_BACKWARD, **changes: Any) -> None:
        for dp in range(pipelines):
            for stage in range(4 // pipelines):
                self.connect(stage if pipelines == 2 else dp // 2, dp, stage, **changes)
        self.declare(own)

    def waiting(self) -> str:
        found = shape_of_ranks(self.state.job)
        assert isinstance(found, Explanation), found
        assert found.reason is Reason.WAITING_FOR_RANKS
        return found.message


def test_all_places_taken_and_an_iteration_done_are_the_shape() -> None:
    job = Training()
    job.connect_all()
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    assert (shape.schedule, shape.stages, shape.data_parallel, shape.tensor_parallel) == (
        ScheduleName.FROM_RANKS,
        2,
        2,
        1,
    )


def test_processes_that_mark_whole_steps_are_pipelines_of_one_stage() -> None:
    job = Training()
    job.connect_all(pipelines=4, own=STEP)
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    assert (shape.schedule, shape.stages, shape.data_parallel) == (ScheduleName.STEPS, 1, 4)


def test_processes_that_mark_phases_report_their_schedule() -> None:
    job = Training()
    job.connect_all(pipelines=4, own=(*STEP, (int(InstructionKind.STEP), 0, 1, False)))
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    assert (shape.schedule, shape.stages, shape.data_parallel) == (ScheduleName.FROM_RANKS, 1, 4)


def test_half_of_the_processes_are_not_taken_for_all() -> None:
    job = Training()
    assert "none from pod t-0, t-1" in job.waiting()
    job.connect(0, 0, 0)
    job.connect(0, 1, 0)
    job.declare()
    assert "none from pod t-1" in job.waiting(), "two pipelines of one stage would fit what is connected"
    job.connect(1, 1, 1)
    job.declare()
    assert "of 2 (dp) × 2 (stages) × 1 (tp)" in job.waiting()
    job.connect(1, 0, 1, iteration=0)
    job.declare()
    assert "not each has finished an iteration" in job.waiting()
    job.state.nodes["node-1"].iteration_reported(IterationReport(0, 1, 0, 0, 10, 10, None, None))
    assert isinstance(shape_of_ranks(job.state.job), Pipeline)


def test_a_lease_that_is_to_come_may_bring_further_processes() -> None:
    job = Training()
    job.connect_all()
    job.nodes[1].lease_lost()
    job.waiting()


def test_two_processes_at_one_place_are_named() -> None:
    job = Training()
    job.connect_all()
    job.connect(1, 0, 0, pid=2)
    found = shape_of_ranks(job.state.job)
    assert isinstance(found, Explanation)
    assert found.reason is Reason.RANKS_MISMATCH


def test_stages_that_mark_whole_steps_are_one_stage_of_all_ranks() -> None:
    job = Training()
    job.connect_all(own=STEP)
    misfit = shape_of_ranks(job.state.job)
    assert isinstance(misfit, Misfit)
    assert misfit.why == "The training processes of 2 stages mark whole iterations alone."
    assert dump(misfit.shape) == {"schedule": "Steps", "stages": 1, "dataParallel": 1, "tensorParallel": 4}
    assert set(misfit.places.values()) == {RankId(0, 0, place) for place in range(4)}
    assert (misfit.stages, misfit.pipelines) == (2, {0, 1}), "as the agents know the ranks"


def test_steps_beside_other_instructions_are_no_whole_steps() -> None:
    job = Training()
    job.connect_all(own=(*STEP, (1, 0, 0, False)))
    assert isinstance(shape_of_ranks(job.state.job), Pipeline), "the schedule's reader refuses it, and says why"


def test_where_some_processes_mark_whole_steps_all_are_planned_so() -> None:
    job = Training()
    job.connect_all()
    job.nodes[1].schedules_declared(dict.fromkeys(job.nodes[1].ranks, STEP))
    misfit = shape_of_ranks(job.state.job)
    assert isinstance(misfit, Misfit)
    assert misfit.why == "2 of 4 training processes mark whole iterations alone."


STATED = {"pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 2, "dataParallel": 2}}
ONE_F_ONE_B = ((1, 0, 0, False), (1, 1, 0, False), (2, 0, 0, False), (2, 1, 0, False))


def compared(job: Training) -> Pipeline | Misfit | Explanation:
    stated = job.state.shape.stated
    assert stated is not None
    return shape_of_ranks(job.state.job, stated)


def why_not(job: Training) -> Reason:
    found = compared(job)
    assert isinstance(found, Explanation)
    return found.reason


def test_processes_in_their_places_fit_the_stated_shape() -> None:
    job = Training(STATED)
    job.connect_all(own=ONE_F_ONE_B)
    assert compared(job) is job.state.shape.stated


def test_places_that_the_stated_shape_has_not_are_planned_as_whole_iterations() -> None:
    job = Training(STATED)
    job.connect_all(pipelines=4, own=STEP)
    misfit = compared(job)
    assert isinstance(misfit, Misfit)
    assert misfit.why == ("A training process is dp 2, stage 0, tp 0; spec.pipeline has 2 (dp) × 2 (stages) × 1 (tp).")
    assert (len(misfit.places), misfit.stages, len(misfit.pipelines)) == (4, 1, 4)


def test_as_many_processes_as_stated_are_all_wherever_they_are() -> None:
    """Some have fallen to whole iterations, where each is a pipeline of its own."""
    job = Training(STATED)
    for pod, (dp, stage) in enumerate([(0, 0), (0, 1)]):
        job.connect(pod, dp, stage)
    for pod, dp in enumerate([2, 3]):
        job.connect(pod, dp, 0)
    job.declare(ONE_F_ONE_B)
    assert isinstance(compared(job), Misfit)


def test_whole_steps_in_the_stated_places_are_planned_as_whole_iterations() -> None:
    job = Training(STATED)
    job.connect_all(own=ONE_F_ONE_B)
    job.nodes[0].schedules_declared(dict.fromkeys(job.nodes[0].ranks, STEP))
    misfit = compared(job)
    assert isinstance(misfit, Misfit)
    assert misfit.why == ("2 of 4 processes mark whole iterations alone, and not the instructions of spec.pipeline.")


def test_fewer_processes_than_stated_are_not_judged() -> None:
    job = Training(STATED)
    job.connect(0, 0, 0)
    job.connect(1, 0, 1)
    job.declare(STEP)
    assert why_not(job) is Reason.WAITING_FOR_RANKS


def test_pipelines_that_have_joined_keep_the_plans_of_the_others() -> None:
    """``dataParallel`` may be edited, and the plans of a pipeline stay what they are."""
    job = Training({"pipeline": {**STATED["pipeline"], "dataParallel": 1}})
    job.connect_all(own=ONE_F_ONE_B)
    assert why_not(job) is Reason.RANKS_MISMATCH


def test_a_stage_that_no_plan_set_can_have_stays_a_mismatch() -> None:
    job = Training(STATED)
    job.connect_all(own=STEP)
    odd = job.nodes[1].ranks.pop(RankId(1, 1))
    job.connect(1, 1, 5_000, pid=odd.pid)
    job.declare(STEP)
    assert why_not(job) is Reason.RANKS_MISMATCH


def test_two_processes_at_one_place_get_no_clock() -> None:
    job = Training(STATED)
    job.connect_all(own=STEP)
    job.connect(1, 0, 0, pid=2)
    assert isinstance(compared(job), Explanation)


@pytest.mark.parametrize(
    ("own", "how"),
    [
        (ONE_F_ONE_B[:2], "marks 2 instructions in an iteration, not 4"),
        ((*ONE_F_ONE_B[:2], ONE_F_ONE_B[3], ONE_F_ONE_B[2]), "marks other instructions from number 2 on"),
    ],
)
def test_another_schedule_than_the_stated_one_is_named(own: Any, how: str) -> None:
    job = Training(STATED)
    shape = job.state.shape.stated
    assert shape is not None
    others = {RankId(dp, 0): ONE_F_ONE_B for dp in range(2)}
    with pytest.raises(InvalidSchedule, match=how) as refused:
        compare_schedules(shape, {**others, RankId(1, 0): own}, "")
    assert "1F1B, 2 stages, 2 microbatches" in str(refused.value)
    compare_schedules(shape, {**others, RankId(1, 0): (*ONE_F_ONE_B, (5, 0, 0, False))}, "")  # constants do not count


def test_ranks_that_do_not_fit_have_a_profile_plans_and_reports_of_whole_iterations() -> None:
    job = Training({**STATED, "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000}})
    job.connect_all(own=STEP)
    job.state.profile_accepted("digest", None)
    misfit = compared(job)
    assert isinstance(misfit, Misfit)
    job.state.shape_reported(misfit.shape, misfit)
    spec, history = job.state.spec, job.state.history
    assert spec is not None
    assert history is not None
    assert (spec.pipeline.schedule, spec.pipeline.places) == (ScheduleName.STEPS, 4)
    assert (spec.profile.where, spec.profile.online is not None) == ("PerseusProfile job-steps", True)
    assert job.state.inputs.profile_digest is None, "what was read is of the pipeline"
    assert (history.pipelines, history.ranks_per_pipeline) == (1, 4)
    iteration = None
    for node in job.nodes:
        for rank in list(node.ranks):
            report = IterationReport(*rank, 1, 10_000 + rank.dp, 9_000, 50, None, durations_us=(1, 2, 3))
            iteration = job.state.iteration_reported(node, report)
    assert iteration is not None
    assert (iteration.time_us, iteration.energy_mj, dict(iteration.points)) == (10_001, 200, {0: None})
    assert not iteration.own_time
    # Another training comes, which fits.
    assert not job.state.shape_wanted
    job.connect_all(own=ONE_F_ONE_B, pid=2)
    assert job.state.shape_wanted
    shape = compared(job)
    assert isinstance(shape, Pipeline)
    job.state.shape_reported(shape)
    assert job.state.spec is not None
    assert (job.state.spec.pipeline, job.state.spec.profile.where) == (job.state.shape.stated, "ConfigMap p")
    assert shape_to_status(job.state.shape) is None


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({"profileRef": {"name": "a40"}, "online": {"maxClocks": 5}}, ("a40-steps", 5, True)),
        ({"profileRef": {"name": "a40"}, "blockingPowerMilliwatts": 1}, ("job-steps", 24, False)),
        ({"online": {"maxClocks": 5}}, ("job-steps", 5, False)),
        (None, ("job-steps", 24, False)),
        ({"profileRef": {"name": "x" * 250}, "online": {}}, ("x" * 247 + "-steps", 24, True)),
    ],
    ids=["measured for others", "read alone", "measured for itself", "left out", "long name"],
)
def test_a_profile_of_whole_iterations_is_beside_that_of_the_pipeline(profile: Any, expected: Any) -> None:
    spec = parse_spec(JobSpec, {**STATED, **({} if profile is None else {"profile": profile})})
    made = completed(spec, "job", ShapeProgress(whole_iterations(4), Misfit("why"))).profile
    assert made.profile_ref is not None
    assert made.online is not None
    assert (made.profile_ref.name, made.online.max_clocks, is_shared(spec.profile)) == expected
    assert made.blocking_power_milliwatts is None, "that of the other profile"


def test_until_the_shape_is_known_leases_are_held_and_the_conditions_say_why() -> None:
    job = Training()
    job.connect_all(iteration=0)
    made = decide(job.state, Now(1.0, 1e9), LIMITS)
    assert not made.actions, "the leases stand, and nothing is read or solved for a shape that is not known"
    assert not made.applied
    ready = conditions_of(job.state, made)[-1]
    assert (ready.status, ready.reason) == (False, Reason.WAITING_FOR_RANKS)
    assert "not each has finished an iteration" in ready.message


def test_the_shape_counts_like_one_that_the_spec_states() -> None:
    job = Training()
    job.connect_all()
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    assert job.state.history is None
    job.state.shape_reported(shape)
    spec = job.state.spec
    assert spec is not None
    assert spec.shape_known
    assert spec.pipeline == shape
    assert (spec.profile.where, spec.profile.online is not None) == ("PerseusProfile job", True)
    assert job.state.history is not None
    assert (job.state.history.pipelines, job.state.history.ranks_per_pipeline) == (2, 2)
    assert not job.state.shape_wanted
    job.state.spec_accepted(parse_spec(JobSpec, {"objective": {"type": "MinEnergy"}}))
    assert job.state.spec is not None
    assert job.state.spec.pipeline == shape, "an edit of something else leaves it"


def test_new_processes_bring_a_new_shape_and_the_same_ones_bring_none() -> None:
    job = Training()
    job.connect_all()
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    job.state.shape_reported(shape)
    history = job.state.history
    job.connect_all(pid=2)
    assert job.state.shape_wanted
    again = shape_of_ranks(job.state.job)
    assert again == shape
    job.state.shape_reported(shape)
    assert job.state.history is history
    for node in job.nodes:
        for rank in list(node.ranks.values()):
            job.state.rank_left(node, rank)
    job.connect_all(pipelines=4, own=STEP, pid=3)
    other = shape_of_ranks(job.state.job)
    assert isinstance(other, Pipeline)
    job.state.profile_accepted("digest", None)
    job.state.shape_reported(other)
    assert job.state.spec is not None
    assert job.state.spec.pipeline.data_parallel == 4
    assert job.state.inputs.profile_digest is None, "what was measured on two stages says nothing about one"


def test_a_stated_shape_is_compared_once_after_an_iteration() -> None:
    job = Training({"pipeline": {"schedule": "FromRanks", "stages": 2, "dataParallel": 2}})
    job.connect_all(iteration=0)
    assert not job.state.shape_wanted
    job.connect_all(pid=2)
    assert job.state.shape_wanted
    shape = compared(job)
    assert isinstance(shape, Pipeline)
    job.state.shape_reported(shape)
    assert not job.state.shape_wanted
    job.state.spec_accepted(parse_spec(JobSpec, {"pipeline": {"schedule": "FromRanks", "stages": 2}}))
    assert job.state.shape_wanted, "the spec says something else"


def test_a_later_operator_goes_on_with_the_stored_shape() -> None:
    job = Training()
    job.connect_all()
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    stored = dump(shape_to_status(ShapeProgress(shape)))
    restored = shape_from_status(stored)
    assert restored == ShapeProgress(shape)
    later = known.Training(PerseusJob(JobRef("ns", "job", "uid"), generation=1))
    later.restored(baseline=None, guard=None, shape=restored)
    later.spec_accepted(parse_spec(JobSpec, {}))
    assert later.spec is not None
    assert later.spec.pipeline == shape
    assert later.shape_wanted, "its processes may have changed meanwhile"


def test_a_later_operator_plans_on_for_ranks_that_do_not_fit_and_compares_them_again() -> None:
    job = Training(STATED)
    job.connect_all(own=STEP)
    misfit = compared(job)
    assert isinstance(misfit, Misfit)
    large = Misfit.of(misfit.why, [RankId(dp, 0) for dp in range(2_000)])
    job.state.shape_reported(large.shape, large)
    later = Training(STATED)
    later.state.restored(baseline=None, guard=None, shape=shape_from_status(dump(shape_to_status(job.state.shape))))
    later.state.spec_accepted(parse_spec(JobSpec, STATED))
    assert later.state.spec is not None
    assert (later.state.spec.pipeline.schedule, later.state.spec.pipeline.places) == (ScheduleName.STEPS, 2_000)
    later.connect_all(own=STEP)
    made = decide(later.state, Now(1.0, 1e9), LIMITS)
    assert (made.applied, dict(made.wanted)) == (False, {}), "where its ranks are is not known yet"
    assert later.state.shape_wanted
    assert misfit.why in {c.type: c for c in conditions_of(later.state, made)}[ConditionType.PLAN_APPLIED].message


@pytest.mark.parametrize("stored", [None, [], {}, {"schedule": "Steps"}, {"schedule": "1F1B", "stages": 2}], ids=str)
def test_a_status_that_no_operator_wrote_is_no_shape(stored: object) -> None:
    assert shape_from_status(stored).reported is None
