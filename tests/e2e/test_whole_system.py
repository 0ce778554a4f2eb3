"""The whole system on each API server: operator, agents and trainers are processes, GPUs and kubelets are doubles."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.e2e.world import absent
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Feature
from perseus_sim.cluster.simulated_cluster import SYSTEM_NAMESPACE, RunningJob, SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
A100 = MODELS["a100"]
STAGES, PIPELINES, MICROBATCHES = 2, 2, 4
PROFILE = profile_csv(stages=STAGES, imbalance=1.2)
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)


class System:
    """Two nodes, one training job of two pipelines, one operator."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        cluster.apply(CRDS)
        self.custom = client.CustomObjectsApi(cluster.api)
        self.await_true("the CRD is served", lambda: not absent(self.gone))
        cluster.start_operator("--lease-ttl-s", "60", "--log-format", "text", "--status-interval-s", "0.2")
        for number in range(PIPELINES):
            cluster.add_node(f"node-{number}", STAGES, A100)
        self.training: RunningJob = cluster.start_job(
            "gpt3", problem(), pipelines=PIPELINES, speed=10.0, noise=0.0, wait_for_agent_s=20.0
        )

    def apply(self, **changes: Any) -> None:
        config_map = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "profile"},
            "data": {"profile.csv": PROFILE},
        }
        self.cluster.apply(config_map)
        pipeline = {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": PIPELINES}
        profile = {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": round(1000 * A100.blocking_power_w)}
        # The simulated job runs hundreds of iterations while it is planned: a comparison, which gives clocks back for
        # some iterations, would then begin at any moment.
        comparison = {"everyIterations": 0}
        spec = {"pipeline": pipeline, "profile": profile, "points": 20, "comparison": comparison, **changes}
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        self.cluster.apply({"apiVersion": api_version, "kind": keys.KIND, "metadata": {"name": "gpt3"}, "spec": spec})

    def patch(self, patch: dict[str, Any]) -> None:
        kind = "application/merge-patch+json"
        self.custom.patch_namespaced_custom_object(*JOBS, "gpt3", patch, _content_type=kind)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.custom.get_namespaced_custom_object(*JOBS, "gpt3").get("status", {})
        return found

    def has_condition(self, kind: str, status: str, reason: str) -> bool:
        found = {c["type"]: (c["status"], c["reason"]) for c in self.status().get("conditions", [])}
        return found.get(kind) == (status, reason)

    def gone(self) -> bool:
        return not self.custom.list_namespaced_custom_object(*JOBS)["items"]

    def locked(self) -> list[bool]:
        """Return for every GPU whether a clock is set on it."""
        return [bool(gpu.locked_mhz) for gpus in self.training.gpus.values() for gpu in gpus]

    def trains_on(self) -> None:
        begun = self.training.training.iteration
        self.await_true("training goes on", lambda: self.training.training.iteration > begun + 2)
        assert self.training.training.failure is None

    def await_true(self, what: str, check: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not check():
            if time.monotonic() > deadline:
                log = self.cluster.operator.tail(30) if self.cluster.operator else ""
                pytest.fail(f"{what}: not after {timeout_s:g} s\n{log}")
            time.sleep(0.05)


def problem() -> Problem:
    profile = read_profile(PROFILE, stages=STAGES)
    schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    return build_problem(profile, schedule, blocking_power_w=A100.blocking_power_w)


@pytest.fixture
def system(cluster: SimulatedCluster) -> System:
    return System(cluster)


@pytest.mark.on_both
def test_a_job_from_its_manifest_to_default_clocks(system: System) -> None:
    system.apply(objective={"type": "MinEnergy"})
    system.await_true("a plan is in force", lambda: system.has_condition("PlanApplied", "True", "PlanInForce"))
    system.await_true("every GPU is held at a clock", lambda: all(system.locked()))
    system.await_true("savings are measured", lambda: "savings" in system.status())
    status = system.status()
    assert float(status["savings"]["energy"].rstrip("%")) > 5
    assert system.has_condition("AgentsReady", "True", "Leased")

    system.custom.delete_namespaced_custom_object(*JOBS, "gpt3")
    system.await_true("the job is gone", system.gone)
    system.await_true("clocks are at default", lambda: not any(system.locked()))
    system.trains_on()
    server = system.cluster.server
    if server.plane is not None and Feature.RBAC in server.features:
        requests = rbac.requests(server.plane.audit_log, rbac.user_name(SYSTEM_NAMESPACE, "perseus-operator"))
        assert [request for request in requests if request.code in (401, 403)] == []


@pytest.mark.parametrize("cluster", ["real"], indirect=True)
def test_an_outage_of_the_api_server_changes_no_clock(system: System) -> None:
    plane = system.cluster.server.plane
    assert plane is not None
    system.apply(objective={"type": "MinEnergy"}, baselineIterations=0)
    system.await_true("a plan is in force", lambda: system.has_condition("PlanApplied", "True", "PlanInForce"))
    system.await_true("every GPU is held at a clock", lambda: all(system.locked()))
    plane.kill("etcd")
    plane.kill("kube-apiserver")
    system.trains_on()
    assert all(system.locked())
    plane.start("etcd")
    plane.start("kube-apiserver")
    system.trains_on()
    assert all(system.locked())
    system.patch({"spec": {"mode": "Recommend"}})
    system.await_true("clocks are at default", lambda: not any(system.locked()))


def test_a_job_is_suspended_resumed_and_made_smaller(system: System) -> None:
    """The frontier stays the same, GPUs that left the job are at default clocks, and training goes on."""
    in_force = lambda: system.has_condition("PlanApplied", "True", "PlanInForce")  # noqa: E731
    system.apply(objective={"type": "MinEnergy"}, baselineIterations=0)
    system.await_true("a plan is in force", lambda: in_force() and all(system.locked()))
    solved = system.status()["frontier"]

    system.patch({"spec": {"suspend": True}})
    system.await_true("clocks are at default", lambda: not any(system.locked()))
    system.await_true("the status reports it", lambda: system.has_condition("Ready", "False", "Suspended"))
    system.trains_on()
    assert not any(system.locked())
    system.patch({"spec": {"suspend": False}})
    system.await_true("the plan is in force again", lambda: in_force() and all(system.locked()))

    # The second pipeline's pod is deleted before the spec changes.
    system.cluster.core.delete_namespaced_pod("gpt3-1", "default", grace_period_seconds=0)
    system.await_true("its clocks are at default", lambda: system.locked() == [True] * STAGES + [False] * STAGES)
    system.await_true(
        "the missing ranks are reported", lambda: system.has_condition("PlanApplied", "False", "WaitingForRanks")
    )
    system.patch({"spec": {"pipeline": {"dataParallel": 1}}})
    system.await_true("a plan is in force for one", in_force)
    assert system.locked() == [True] * STAGES + [False] * STAGES
    assert system.status()["frontier"] == solved
    system.trains_on()
