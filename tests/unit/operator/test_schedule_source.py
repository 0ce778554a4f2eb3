"""Schedules without a name: out of a ConfigMap, or as training processes tell them. One clear error, or the order."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from tests.made_up_profiles import PIPELINES

from perseus_core.instruction import InstructionKind
from perseus_core.rank import RankId
from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import InvalidSchedule, InvalidSpec, KubeNotFound
from perseus_operator.families.training.features.frontier.input_progress import InputProgress
from perseus_operator.families.training.features.frontier.inputs import Solve, inputs_digest
from perseus_operator.families.training.work.schedule_source import (
    assemble_schedule,
    check_schedule,
    collect_schedule,
    read_schedule_csv,
)
from perseus_operator.nodes.node import DeclaredSchedule, Rank
from perseus_operator.objects.values import ConfigMap
from perseus_operator.solving.request import SolveRequest, schedule_of
from perseus_solver.schedules import Schedule, build_schedule, read_schedule, write_schedule

KINDS = {kind.label: int(kind) for kind in InstructionKind}


def told(schedule: Schedule, stage: int) -> DeclaredSchedule:
    """What a process of a stage says in its hello."""
    joined = schedule.joined[schedule.span(stage)].tolist()
    own = zip(schedule.of_stage(stage), joined, strict=True)
    return tuple((KINDS[kind], microbatch, chunk, with_next) for (kind, microbatch, chunk), with_next in own)


def pipeline(**changes: Any) -> Any:
    raw = {"schedule": "FromRanks", "stages": 2, **changes}
    profile = {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 1}
    return parse_spec(JobSpec, {"pipeline": raw, "profile": profile}).pipeline


# DualPipe has no order in torch's notation; a recomputation is recorded as another forward.
@pytest.mark.parametrize("name", sorted(set(PIPELINES) - {"DualPipe", "EarlyRecompute1F1B"}))
@pytest.mark.parametrize("stages", [2, 4])
def test_what_processes_report_is_the_schedule_they_were_given(name: str, stages: int) -> None:
    chunks = 2 if name == "Interleaved1F1B" else None
    schedule = build_schedule(name, stages=stages, microbatches=2 * stages, chunks=chunks)
    order = assemble_schedule([told(schedule, stage) for stage in range(stages)])
    assert order == write_schedule(schedule)
    again = read_schedule(order)
    assert [again.of_stage(stage) for stage in range(stages)] == [schedule.of_stage(s) for s in range(stages)]
    assert again.position.tolist() == schedule.position.tolist()


def test_overlapped_pairs_that_processes_report_are_planned_as_such() -> None:
    """Source: ``OVERLAP_F_B`` of torch's DualPipeV, whose sends follow the whole action (pytorch/pytorch pull request
    159591).
    """
    order = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    schedule = read_schedule(order)
    assert assemble_schedule([told(schedule, stage) for stage in range(2)]) == order


def test_stages_that_do_not_fit_together_are_one_clear_error() -> None:
    three, four = (build_schedule("1f1b", stages=2, microbatches=m) for m in (3, 4))
    with pytest.raises(
        InvalidSchedule, match=r"processes report that they run is not a valid schedule: .*microbatch 3"
    ):
        assemble_schedule([told(three, 0), told(four, 1)])
    with pytest.raises(InvalidSchedule, match="Stage 1 runs constant-time instructions"):
        assemble_schedule([told(three, 0), ((5, 0, 0, False), *told(three, 1))])
    with pytest.raises(InvalidSchedule, match=r"mark whole steps: spec\.pipeline\.schedule must be Steps"):
        assemble_schedule([((6, 0, 0, False),)])


def test_phases_of_a_step_are_a_schedule_of_one_stage() -> None:
    phases = tuple((6, 0, chunk, False) for chunk in range(3))
    assert assemble_schedule([phases]) == "0S0,1S0,2S0\n"
    with pytest.raises(InvalidSchedule, match="steps are those of one stage"):
        assemble_schedule([phases, phases])


def test_steps_have_one_stage_and_no_microbatches() -> None:
    steps = {"schedule": "Steps", "stages": 1, "dataParallel": 8}
    assert pipeline(**steps).solved_microbatches == 1
    for wrong in ({"stages": 2}, {"microbatches": 1}, {"microbatches": 4}):
        with pytest.raises(InvalidSpec, match="stages must be 1 and microbatches must not be set for schedule Steps"):
            pipeline(**{**steps, **wrong})


def test_a_schedule_of_another_shape_is_refused_by_field() -> None:
    order = write_schedule(build_schedule("1f1b", stages=2, microbatches=3))
    check_schedule(order, pipeline())
    check_schedule(order, pipeline(microbatches=3))
    with pytest.raises(
        InvalidSchedule, match=r"^spec\.pipeline\.microbatches: is 4, but the schedule has 3 microbatches\.$"
    ):
        check_schedule(order, pipeline(microbatches=4))
    with pytest.raises(InvalidSchedule, match=r"^spec\.pipeline\.stages: is 3, but the schedule has 2 stages\.$"):
        check_schedule(order, pipeline(stages=3))
    for damaged, why in (("", "schedule CSV is empty"), ("0F0,0X0\n1F0\n", "row 1"), ("0F0\n1F0\n", "backward")):
        with pytest.raises(InvalidSchedule, match=f"^spec.pipeline: .*{why}") as refused:
            check_schedule(damaged, pipeline())
        assert refused.value.reason == Reason.SCHEDULE_INVALID


@pytest.mark.parametrize(
    ("raw", "order", "anew"),
    [
        ({"schedule": "DualPipe", "microbatches": 4}, "", True),
        ({"schedule": "1F1B", "microbatches": 4}, "", False),
        ({"schedule": "FromRanks"}, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n", True),
        ({"schedule": "FromRanks"}, "0F0,0B0\n1F0,1B0\n", False),
    ],
)
def test_a_frontier_of_an_earlier_operator_is_solved_anew_where_it_had_overlapped_parts(
    raw: dict[str, Any], order: str, anew: bool
) -> None:
    """Those of pytorch/pytorch pull request 159591 were planned too short."""
    profile = {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 1}
    spec = parse_spec(JobSpec, {"pipeline": {"stages": 2, **raw}, "profile": profile})
    pipeline = spec.pipeline
    parts = (
        "perseus.frontier.1",
        "csv",
        raw["schedule"],
        2,
        pipeline.microbatches,
        pipeline.chunks,
        1,
        spec.points,
        "",
    )
    earlier = hashlib.sha256("\n".join(map(str, (*parts, *filter(None, [order])))).encode()).hexdigest()
    assert (inputs_digest(spec, "csv", schedule_csv=order) != earlier) is anew


class Kube:
    """Holds one ConfigMap."""

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        if name != "order":
            raise KubeNotFound(name)
        return ConfigMap(name, {"schedule.csv": "text"}, {"other": b"bytes"})


async def test_where_a_schedule_is_found_and_the_error_if_it_is_not() -> None:
    kube: Any = Kube()

    def at(name: str, **key: str) -> Any:
        return pipeline(schedule=None, scheduleRef={"name": name, **key})

    assert await read_schedule_csv(kube, "ns", at("order")) == "text"
    assert await read_schedule_csv(kube, "ns", at("order", key="other")) == "bytes"
    with pytest.raises(InvalidSchedule, match=r"^spec\.pipeline\.scheduleRef\.name: ConfigMap none does not exist"):
        await read_schedule_csv(kube, "ns", at("none"))
    with pytest.raises(InvalidSchedule, match=r"scheduleRef\.key: ConfigMap order has no key x; its keys: other"):
        await read_schedule_csv(kube, "ns", at("order", key="x"))


def test_processes_must_agree_and_all_must_have_reported(make_job: Any) -> None:
    job = make_job(pipeline={"schedule": "FromRanks", "stages": 2, "dataParallel": 2})
    schedule = build_schedule("1f1b", stages=2, microbatches=4)
    said = {RankId(p, s, 0): told(schedule, s) for p in range(2) for s in range(2)}
    assert job.state.schedule_wanted
    assert collect_schedule(job.spec.pipeline, {}) is None
    assert collect_schedule(job.spec.pipeline, {place: said[place] for place in list(said)[:3]}) is None
    assert collect_schedule(job.spec.pipeline, {**said, RankId(1, 1, 0): ()}) is None
    assert collect_schedule(job.spec.pipeline, said) == write_schedule(schedule)
    other = told(build_schedule("GPipe", stages=2, microbatches=4), 1)
    with pytest.raises(InvalidSchedule, match="dp 1, stage 1, tp 0 differs from dp 0, stage 1, tp 0"):
        collect_schedule(job.spec.pipeline, {**said, RankId(1, 1, 0): other})


def test_nothing_is_solved_before_the_schedule_is_known_and_another_schedule_is_another_frontier(make_job: Any) -> None:
    job = make_job(pipeline={"schedule": "FromRanks", "stages": 2, "dataParallel": 2})
    job.start_pods()
    job.state.inputs.profile_digest, job.state.inputs.read_at_s = "csv", job.now_s
    assert not [action for action in job.decide().actions if isinstance(action, Solve)]
    assert "have reported the schedule" in job.decide().waiting.message
    job.connect_ranks()
    job.state.inputs.schedule_csv = "one"
    (one,) = [action for action in job.decide().actions if isinstance(action, Solve)]
    assert (
        one.digest
        == inputs_digest(job.spec, "csv", schedule_csv="one")
        != inputs_digest(job.spec, "csv", schedule_csv="two")
    )
    # Another process may run another order: it is asked anew.
    node = job.nodes[0]
    job.state.rank_joined(node, Rank("pod-0", "GPU-0-0", 0, 0, 0, 7, 0))
    assert job.state.schedule_wanted


def test_a_request_with_a_custom_schedule_is_solved_by_it() -> None:
    schedule = build_schedule("ZBH1", stages=2, microbatches=3)
    request = SolveRequest("", "custom", 2, 0, None, 1, 4, schedule_csv=write_schedule(schedule))
    again = schedule_of(request, None)
    assert [again.of_stage(stage) for stage in range(2)] == [schedule.of_stage(stage) for stage in range(2)]


@pytest.mark.parametrize(("schedule", "phases"), [("0S0,1S0,2S0\n", True), ("0F0,0B0\n", False), ("0F0,1S0\n", False)])
def test_a_schedule_of_steps_alone_is_one_of_phases(schedule: str, phases: bool) -> None:
    inputs = InputProgress()
    inputs.schedule_accepted(schedule)
    assert inputs.of_phases is phases
