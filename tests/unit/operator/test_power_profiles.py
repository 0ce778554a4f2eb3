"""Workload power profiles that a driver enforces: named, and a reason to measure again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.engine_pool import EnginePool

from perseus_core.power_policy import PowerPolicy
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.schema import dump
from perseus_operator.clients.agents.hardware import gpu_of
from perseus_operator.clients.agents.messages import event_of
from perseus_operator.families.serving.features.signals.replicas import signals_of
from perseus_operator.families.training.features.stragglers.cause import StragglerCause, cause_of
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.nodes.gpu import Gpu
from perseus_proto.power_policy import MAX_PROFILES, decode_policy, encode_policy
from perseus_proto.v1alpha1 import agent_pb2


def enforce(job: Any, *profiles: str) -> None:
    """The agents describe GPUs whose drivers enforce these."""
    policy = PowerPolicy(("LLM_TRAINING",), profiles)
    for node in job.nodes:
        node.gpus_described({}, {}, {rank.gpu_uuid: Gpu("H100", policy=policy) for rank in node.ranks.values()})


def train(job: Any, first: int, end: int) -> None:
    for iteration in range(first, end):
        job.train(iteration)


def foreign_control(job: Any) -> tuple[bool | None, Reason, str]:
    found = next(c for c in conditions_of(job.state, job.decide()) if c.type is ConditionType.FOREIGN_CONTROL)
    return found.status, found.reason, found.message


def test_a_profile_that_is_enforced_is_named_and_clocks_are_set_all_the_same(make_job: Any) -> None:
    job = make_job()
    job.run()
    assert foreign_control(job)[:2] == (False, Reason.NO_FOREIGN_CONTROL)
    enforce(job, "MAX_Q")
    said, reason, message = foreign_control(job)
    assert (said, reason) == (True, Reason.POWER_PROFILE_ENFORCED)
    assert "1 power profile (MAX_Q)" in message
    assert "node-0" in message
    assert conditions_of(job.state, job.decide())[-1].status is True
    enforce(job)
    assert foreign_control(job)[1] is Reason.NO_FOREIGN_CONTROL


def test_under_another_profile_the_baseline_is_measured_again(make_job: Any) -> None:
    job = make_job(baselineIterations=3)
    job.solve()
    job.start_pods()
    job.connect_ranks()
    enforce(job)
    train(job, 0, 6)
    assert job.state.baseline_measured() is not None
    stored = {"baseline": {"iterationTimeMicroseconds": 1, "iterations": 3}}
    assert status.figures(job.state, job.decide()).power_profiles is None
    train(job, 6, 8)
    assert job.state.baseline is not None, "the same profiles: nothing is measured again"
    enforce(job, "MAX_Q")
    assert job.state.baseline is not None, "until an iteration has run under it"
    train(job, 8, 9)
    assert job.state.baseline is None
    assert status.figures(job.state, job.decide()).power_profiles == ("MAX_Q",)
    train(job, 9, 14)
    assert job.state.baseline_measured() is not None
    again = make_job(baselineIterations=3)
    restore_from_status(again.state, {**stored, "powerProfiles": ["MAX_Q"]}, now_s=0.0, wall_s=0.0)
    assert again.state.power_profiles == ("MAX_Q",)
    restore_from_status(again.state, stored, now_s=0.0, wall_s=0.0)
    assert again.state.power_profiles == ()


def test_power_smoothing_is_in_the_status_as_long_as_a_gpu_is_smoothed(make_job: Any) -> None:
    job = make_job()
    job.run()
    assert status.figures(job.state, job.decide()).power_smoothing is None
    node, other = job.nodes[0], job.nodes[1]
    policies = PowerPolicy(), PowerPolicy(floor_w=300), PowerPolicy(floor_w=400, secondary_floor_w=150)
    node.gpus_described({}, {}, {f"GPU-{n}": Gpu("GB300", policy=policy) for n, policy in enumerate(policies)})
    other.gpus_described({}, {}, {"GPU-9": Gpu("GB300", policy=PowerPolicy(floor_w=100)), "GPU-8": Gpu("H100")})
    smoothed = status.figures(job.state, job.decide()).power_smoothing
    assert smoothed is not None
    assert dump(smoothed) == {"gpus": 3, "floorWatts": 800, "secondaryFloorWatts": 150}
    node.gpus_described({}, {}, {})
    smoothed = status.figures(job.state, job.decide()).power_smoothing
    assert smoothed is not None
    assert dump(smoothed) == {"gpus": 1, "floorWatts": 100}


def test_a_pool_says_what_the_driver_holds_its_gpus_to() -> None:
    pool = EnginePool()

    def said() -> Any:
        return pool.family.report(pool.decide()).figures

    assert (said().power_profiles, said().power_smoothing) == (None, None)
    for node in pool.nodes:
        policy = PowerPolicy((), ("MAX_Q",), 300, 0)
        node.gpus_described(node.clocks_mhz, {}, {u: replace(gpu, policy=policy) for u, gpu in node.gpus.items()})
    assert said().power_profiles == ("MAX_Q",)
    assert said().power_smoothing.floor_watts == 300 * said().power_smoothing.gpus > 0


def test_a_node_that_is_not_described_yet_is_no_change(make_job: Any) -> None:
    job = make_job(baselineIterations=3)
    job.solve()
    job.start_pods()
    job.connect_ranks()
    enforce(job, "MAX_Q")
    train(job, 0, 6)
    assert job.state.baseline_measured() is not None
    for node in job.nodes:
        node.gpus_described({}, {}, {})
    train(job, 6, 8)
    assert job.state.baseline is not None


def test_an_engine_under_another_profile_has_another_fingerprint() -> None:
    pool = EnginePool()
    before = signals_of(pool.job.nodes, "", {}).fingerprint
    for node in pool.nodes:
        gpus = {uuid: replace(gpu, policy=PowerPolicy((), ("MAX_Q",))) for uuid, gpu in node.gpus.items()}
        node.gpus_described(node.clocks_mhz, {}, gpus)
    after = signals_of(pool.job.nodes, "", {}).fingerprint
    assert after
    assert after != before


@pytest.mark.parametrize(
    ("kind", "cause"), [("BOARD_LIMIT", StragglerCause.POWER), ("RELIABILITY", StragglerCause.CLOCK)]
)
def test_a_limit_that_other_pipelines_are_not_at_is_a_cause(make_job: Any, kind: str, cause: StragglerCause) -> None:
    job = make_job()
    job.run()
    detector = job.state.stragglers.detector
    job.nodes[0].gpu_slowed("GPU-0-0", kind, "")
    assert cause_of(detector, job.state.nodes, 0) is cause
    job.nodes[1].gpu_slowed("GPU-1-0", kind, "")
    assert cause_of(detector, job.state.nodes, 0) is StragglerCause.UNKNOWN, "healthy GPUs report it, too"


def test_a_kind_of_event_that_is_not_known_is_left_out() -> None:
    known = agent_pb2.TelemetryEvent(gpu=agent_pb2.GpuEvent(kind="KIND_BOARD_LIMIT", gpu_uuid="GPU-0", active=True))
    assert event_of(known) is not None
    assert event_of(agent_pb2.TelemetryEvent(gpu=agent_pb2.GpuEvent(kind=99, gpu_uuid="GPU-0"))) is None  # type: ignore[arg-type]


names = st.from_regex(r"[A-Z][A-Z0-9_]{0,20}", fullmatch=True)
profiles = st.sets(names, max_size=5).map(sorted).map(tuple)


@given(profiles, profiles, st.integers(0, 2000), st.integers(0, 2000))
def test_what_an_agent_says_is_what_the_operator_reads(
    requested: Iterable[str], enforced: Iterable[str], floor_w: int, secondary_floor_w: int
) -> None:
    policy = PowerPolicy(tuple(requested), tuple(enforced), floor_w, secondary_floor_w)
    assert decode_policy(encode_policy(policy)) == policy
    assert gpu_of(agent_pb2.Gpu(model="A", power_policy=encode_policy(policy)), "").policy == policy


def test_what_cannot_be_true_is_left_out() -> None:
    many = [f"P{number}" for number in range(1000)]
    message = agent_pb2.PowerPolicy(requested_profiles=many, enforced_profiles=["max\nq", "", "A" * 99, "MAX_Q"])
    read = decode_policy(message)
    assert len(read.requested) == MAX_PROFILES
    assert read.enforced == ("MAX_Q",)
    assert gpu_of(agent_pb2.Gpu(model="A"), "").policy is None
