"""A PowerBudget on each API server: which specs are refused, its status, and its effect on a job on simulated GPUs."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.e2e.conftest import absent
from tests.waiting import eventually

from perseus_proto import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS, profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
BUDGETS = (keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL)
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)
API_VERSION = f"{keys.API_GROUP}/{keys.API_VERSION}"
A100 = MODELS["a100"]
STAGES, MICROBATCHES = 2, 4
BLOCKING_MW = round(1000 * A100.blocking_power_w)
PROFILE = profile_csv(stages=STAGES, imbalance=1.2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "spec.watts"),
        ({"watts": 0}, "spec.watts"),
        ({"watts": "12kW"}, "spec.watts"),
        ({"watts": 5, "selector": {"namespaces": []}}, "spec.selector.namespaces"),
        ({"watts": 5, "selector": {"namespaces": ["Team"]}}, "spec.selector.namespaces"),
        ({"watts": 5, "selector": {"matchLabels": {}}}, "spec.selector.matchLabels"),
    ],
)
def test_a_wrong_budget_is_refused_by_name(budget_crd: Any, api: Any, spec: dict[str, Any], message: str) -> None:
    body = {"apiVersion": API_VERSION, "kind": keys.BUDGET_KIND, "metadata": {"name": "wrong"}, "spec": spec}
    with pytest.raises(ApiException) as refused:
        client.CustomObjectsApi(api).create_cluster_custom_object(*BUDGETS, body)
    assert refused.value.status == 422
    assert message in refused.value.body


def test_a_budget_without_jobs_reports_it(world: Any) -> None:
    name = f"hall-{uuid.uuid4().hex[:6]}"
    world.budget(name, 5000)

    def condition() -> Any:
        conditions = world.read_budget(name).get("status", {}).get("conditions", [])
        return {c["type"]: c for c in conditions}.get("Kept")

    world.until("reported", lambda: condition() is not None)
    assert (condition()["status"], condition()["reason"]) == ("True", "NoJobs")
    world.delete_budget(name)


def test_a_job_slows_down_to_its_share_until_the_budget_is_deleted(cluster: SimulatedCluster) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)

    eventually(lambda: not absent(lambda: custom.list_cluster_custom_object(*BUDGETS)), "PowerBudget is not served")
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*JOBS)), "PerseusJob is not served")
    cluster.start_operator("--lease-ttl-s", "60", "--log-format", "text", "--status-interval-s", "0.2")
    cluster.add_node("node-0", STAGES, A100)
    schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    problem = build_problem(read_profile(PROFILE, stages=STAGES), schedule, blocking_power_w=A100.blocking_power_w)
    cluster.start_job("gpt3", problem, pipelines=1, speed=10.0, noise=0.0, wait_for_agent_s=20.0)
    data = {"profile.csv": PROFILE}
    cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "profile"}, "data": data})
    spec = {
        "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES},
        "profile": {
            "configMapRef": {"name": "profile"},
            "blockingPowerMilliwatts": round(1000 * A100.blocking_power_w),
        },
        "points": 20,
        "baselineIterations": 0,
    }
    cluster.apply({"apiVersion": API_VERSION, "kind": keys.KIND, "metadata": {"name": "gpt3"}, "spec": spec})

    def status() -> dict[str, Any]:
        found: dict[str, Any] = custom.get_namespaced_custom_object(*JOBS, "gpt3").get("status", {})
        return found

    def has_reason(reason: str) -> bool:
        return ("PlanApplied", "True", reason) in {
            (c["type"], c["status"], c["reason"]) for c in status().get("conditions", [])
        }

    eventually(lambda: has_reason("PlanInForce"), "no plan is in force", every_s=0.1)
    eventually(lambda: "measured" in status(), "nothing is measured", every_s=0.1)
    predicted, unlimited = status()["predicted"], status()["plan"]["point"]
    full_w = 1000 * predicted["energyMillijoules"] / predicted["iterationTimeMicroseconds"]
    watts = round(0.8 * full_w)
    budget = {"apiVersion": API_VERSION, "kind": keys.BUDGET_KIND, "metadata": {"name": "hall"}}
    cluster.apply({**budget, "spec": {"watts": watts}})
    eventually(lambda: has_reason("LimitedByBudget"), "the budget does not limit the job", every_s=0.1)

    def measured_below_budget() -> bool:
        found = status()
        measured = found.get("measured")
        if found["plan"]["point"] <= unlimited or not measured or "energyMillijoules" not in measured:
            return False
        return bool(1000 * measured["energyMillijoules"] / measured["iterationTimeMicroseconds"] <= 1.02 * watts)

    eventually(measured_below_budget, "the measured power is above the budget", every_s=0.1)
    (share,) = custom.get_cluster_custom_object(*BUDGETS, "hall")["status"]["shares"]
    assert (share["namespace"], share["name"]) == ("default", "gpt3")
    assert share["watts"] <= watts < share["wantedWatts"]

    custom.delete_cluster_custom_object(*BUDGETS, "hall")
    eventually(
        lambda: has_reason("PlanInForce") and status()["plan"]["point"] <= unlimited,
        "the fastest plan is not in force",
        every_s=0.1,
    )
    custom.delete_namespaced_custom_object(*JOBS, "gpt3")
    eventually(lambda: not custom.list_namespaced_custom_object(*JOBS)["items"], "the job is not deleted", every_s=0.1)
