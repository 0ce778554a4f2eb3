"""A job whose spec leaves out shape and profile takes them from its training processes, all of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator.conftest import LIMITS

from perseus_core.instruction import InstructionKind
from perseus_core.iteration import IterationReport
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import Pipeline, ScheduleName
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.families.training import training as known
from perseus_operator.families.training.decide import decide
from perseus_operator.families.training.shape import shape_from_status, shape_of_ranks, shape_to_status
from perseus_operator.families.training.status.conditions import conditions_of
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


@pytest.mark.parametrize("own", [STEP, (*STEP, (1, 0, 0))], ids=["steps", "mixed"])
def test_stages_that_mark_whole_steps_are_no_shape(own: Any) -> None:
    job = Training()
    job.connect_all(own=own)
    found = shape_of_ranks(job.state.job)
    if own == STEP:
        assert isinstance(found, Explanation)
        assert "stages must be 1" in found.message
    else:
        assert isinstance(found, Pipeline), "the schedule's reader refuses it, and says why"


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


def test_a_stated_shape_is_not_asked_for() -> None:
    job = Training({"pipeline": {"schedule": "FromRanks", "stages": 2, "dataParallel": 2}})
    job.connect_all()
    assert not job.state.shape_wanted


def test_a_later_operator_goes_on_with_the_stored_shape() -> None:
    job = Training()
    job.connect_all()
    shape = shape_of_ranks(job.state.job)
    assert isinstance(shape, Pipeline)
    stored = dump(shape_to_status(shape))
    restored = shape_from_status(stored)
    assert restored == shape
    later = known.Training(PerseusJob(JobRef("ns", "job", "uid"), generation=1))
    later.restored(baseline=None, guard=None, shape=restored)
    later.spec_accepted(parse_spec(JobSpec, {}))
    assert later.spec is not None
    assert later.spec.pipeline == shape
    assert later.shape_wanted, "its processes may have changed meanwhile"


@pytest.mark.parametrize("stored", [None, [], {}, {"schedule": "Steps"}, {"schedule": "1F1B", "stages": 2}], ids=str)
def test_a_status_that_no_operator_wrote_is_no_shape(stored: object) -> None:
    assert shape_from_status(stored) is None
