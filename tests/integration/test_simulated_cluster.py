"""The simulated cluster is true: with real agents, a plan takes the time and energy that the solver promised for it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tests.waiting import PATIENCE_S, eventually

from perseus_proto.planset import PlanPoint, StageSchedule, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2, agent_pb2_grpc
from perseus_sim.cluster.simulated_cluster import RunningJob, SimulatedCluster, SimulatedNode
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import profile_csv
from perseus_sim.training.coordinator import PipelineIteration
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

A100 = MODELS["a100"]
STAGES = 3
JOB = "job-uid"


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(
        read_profile(profile_csv(stages=STAGES, imbalance=1.2)),
        build_schedule("1f1b", stages=STAGES, microbatches=4),
        blocking_power_w=A100.blocking_power_w,
    )


@pytest.fixture(scope="module")
def frontier(problem: Problem) -> Frontier:
    return solve_frontier(problem, points=4)


@pytest.fixture
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster() as running:
        yield running
        children = [node.agent for node in running.nodes.values()]
    assert all(child is not None and not child.running for child in children)


def plan_set(problem: Problem, frontier: Frontier) -> agent_pb2.PlanSet:
    schedule = problem.schedule
    return encode_plan_set(
        [StageSchedule(stage, *schedule.columns(stage)) for stage in range(STAGES)],
        [
            PlanPoint(round(time_s * 1e6), round(energy_j * 1e3))
            for time_s, energy_j in zip(frontier.time_s, frontier.energy_j, strict=True)
        ],
        [frontier.frequencies_mhz[:, schedule.span(stage)].tolist() for stage in range(STAGES)],
    )


class Operator:
    """Just enough of one: holds the lease and selects."""

    def __init__(self, cluster: SimulatedCluster, node: SimulatedNode, job: RunningJob) -> None:
        ca, key, certificate = (
            (cluster.tls / name).read_bytes() for name in ("ca.crt", "perseus-operator.key", "perseus-operator.crt")
        )
        channel = grpc.secure_channel(
            node.grpc_address,
            grpc.ssl_channel_credentials(ca, key, certificate),
            [("grpc.ssl_target_name_override", "perseus-agent")],
        )
        self._agent = agent_pb2_grpc.AgentStub(channel)
        pods = [agent_pb2.Pod(uid=p.uid, namespace=p.namespace, name=p.name) for _, p in job.pods.values()]
        self._agent.AcquireLease(
            agent_pb2.AcquireLeaseRequest(job_uid=JOB, job_name="default/j", epoch=1, ttl_ms=60_000, pods=pods)
        )

    def push(self, plans: agent_pb2.PlanSet) -> None:
        self._agent.PushPlanSet(agent_pb2.PushPlanSetRequest(job_uid=JOB, epoch=1, plan_set=plans))

    def select(self, plans: agent_pb2.PlanSet, point: int) -> int:
        selection = agent_pb2.Selection(data_parallel_rank=0, point=point)
        answer = self._agent.SelectPlan(
            agent_pb2.SelectPlanRequest(job_uid=JOB, epoch=1, plan_id=plans.plan_id, selections=[selection])
        )
        return int(answer.furthest_iteration)

    def release(self) -> None:
        self._agent.ReleaseLease(agent_pb2.ReleaseLeaseRequest(job_uid=JOB, epoch=1))


def after(job: RunningJob, iteration: int, count: int) -> list[PipelineIteration]:
    """Samples of so many iterations behind one."""
    found: list[PipelineIteration] = []
    while len(found) < count:
        sample = job.training.samples.get(timeout=PATIENCE_S)
        if sample.iteration > iteration:
            found.append(sample)
    return found


def test_a_plan_takes_what_the_solver_predicted(
    cluster: SimulatedCluster, problem: Problem, frontier: Frontier
) -> None:
    node = cluster.add_node("node-0", STAGES, A100)
    job = cluster.start_job("j", problem, pipelines=1, speed=10.0, noise=0.0, wait_for_agent_s=60.0)
    operator = Operator(cluster, node, job)
    plans = plan_set(problem, frontier)
    operator.push(plans)
    for point in range(len(frontier.time_s)):
        begun = operator.select(plans, point) + 1  # the boundary after the one that may just be passed
        promised = pytest.approx((frontier.time_s[point], frontier.energy_j[point]), rel=0.005)
        # Where this machine stalls, clocks come late for a while, as they do on a real node: a median, and patience.
        for _ in range(25):
            samples = after(job, begun, 4)
            begun = samples[-1].iteration
            time_s = float(np.median([sample.time_us for sample in samples])) / 1e6
            energy_j = float(np.median([sample.energy_mj for sample in samples])) / 1e3
            if (time_s, energy_j) == promised:
                break
        assert (time_s, energy_j) == promised
    assert any(gpu.locked_mhz for gpu in job.gpus[0])
    operator.release()
    eventually(lambda: not any(gpu.locked_mhz for gpu in job.gpus[0]))
    cluster.stop_job(job)
    assert job.training.failure is None


def test_a_killed_agent_delays_no_training_and_its_successor_restores_the_clocks(
    cluster: SimulatedCluster, problem: Problem, frontier: Frontier
) -> None:
    node = cluster.add_node("node-0", STAGES, A100)
    job = cluster.start_job("j", problem, pipelines=1, speed=10.0, noise=0.0, wait_for_agent_s=60.0)
    operator = Operator(cluster, node, job)
    plans = plan_set(problem, frontier)
    operator.push(plans)
    operator.select(plans, len(frontier.time_s) - 1)
    eventually(lambda: all(gpu.locked_mhz for gpu in job.gpus[0]))
    cluster.kill_agent(node)
    begun = job.training.iteration
    assert after(job, begun, 3)
    cluster.start_agent(node)
    eventually(lambda: not any(gpu.locked_mhz for gpu in job.gpus[0]))
    cluster.stop_job(job)
    assert job.training.failure is None


def test_an_agent_that_ends_is_started_again_at_its_address(cluster: SimulatedCluster) -> None:
    node = cluster.add_node("node-0", 1, A100, agent_arguments=["--gpu-metrics"])
    first, address = node.agent, node.grpc_address
    assert first is not None
    first.signal(signal.SIGKILL)  # as by its keeper, on a machine that stalls
    eventually(lambda: node.agent is not first)
    assert node.agent is not None
    assert (node.agent.running, node.grpc_address) == (True, address)
    assert "--gpu-metrics" in node.agent_arguments


def test_manifests_are_applied_to_the_api_server(cluster: SimulatedCluster, tmp_path: Path) -> None:
    cluster.apply("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {x: '1'}\n---\n")
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": "2"}})
    manifest = tmp_path / "m.yaml"
    manifest.write_text("apiVersion: v1\nkind: Namespace\nmetadata: {name: b}\n")
    cluster.apply(manifest)
    assert cluster.core.read_namespaced_config_map("a", "default").data == {"x": "2"}
    assert cluster.core.read_namespace("b").status.phase == "Active"
