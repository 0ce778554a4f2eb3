"""A PowerBudget on each API server: which specs are refused, its status, and its effect on a job on simulated GPUs."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.e2e.world import A100, absent, train_two_stages
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
BUDGETS = (keys.API_GROUP, keys.API_VERSION, keys.BUDGET_PLURAL)
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)
API_VERSION = f"{keys.API_GROUP}/{keys.API_VERSION}"
LEASE_TTL_S = 6
OPERATOR = (
    "--lease-ttl-s",
    str(LEASE_TTL_S),
    "--agent-timeout-s",
    "2",
    "--log-format",
    "text",
    "--status-interval-s",
    "0.2",
)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "spec.watts"),
        ({"watts": 0}, "spec.watts"),
        ({"watts": "12kW"}, "spec.watts"),
        ({"watts": 5, "selector": {"namespaces": []}}, "spec.selector.namespaces"),
        ({"watts": 5, "selector": {"namespaces": ["Team"]}}, "spec.selector.namespaces"),
        ({"watts": 5, "selector": {"matchLabels": {}}}, "spec.selector.matchLabels"),
        ({"watts": 5, "timetable": [{"at": "6:00", "watts": 5}]}, "spec.timetable[0].at"),
        ({"watts": 5, "maxStepWattsPerSecond": 0}, "spec.maxStepWattsPerSecond"),
        ({"watts": 5, "fallback": {"holdSeconds": 604801}}, "spec.fallback.holdSeconds"),
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


def operator_gone_and_back(cluster: SimulatedCluster, watts: int) -> None:
    """Kill the operator for longer than its leases, and start it again: the GPUs never draw more than the budget."""
    gpus = cluster.nodes["node-0"].gpus
    operator = cluster.operator
    assert operator is not None
    os.kill(operator.pid, signal.SIGKILL)
    operator.popen.wait()
    killed_us = max(gpu.history()[-1].time_us for gpu in gpus)

    def written() -> list[list[int]]:
        return [[change.mhz for change in gpu.history() if change.time_us > killed_us] for gpu in gpus]

    def at_rest() -> bool:
        clocks = {gpu.locked_mhz for gpu in gpus}
        return len(clocks) == 1 and all(changes and changes[-1] in clocks for changes in written())

    # Until then the plan goes on, and all of its clocks may be the same for a while.
    time.sleep(LEASE_TTL_S)
    eventually(at_rest, "the GPUs do not rest at one clock once the leases have run out", every_s=0.1)
    resting = gpus[0].locked_mhz
    time.sleep(LEASE_TTL_S)
    assert [gpu.locked_mhz for gpu in gpus] == [resting] * len(gpus), "long after the leases"
    assert len(gpus) * A100.power_w(resting) <= watts, "not even if all compute all the time"
    cluster.start_operator(*OPERATOR)
    eventually(lambda: any(len(set(changes)) > 1 for changes in written()), "no plan is followed again", every_s=0.1)
    assert not any(0 in changes for changes in written()), "never at default clocks"


def test_a_job_slows_down_to_its_share_until_the_budget_is_deleted(cluster: SimulatedCluster) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)

    eventually(lambda: not absent(lambda: custom.list_cluster_custom_object(*BUDGETS)), "PowerBudget is not served")
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*JOBS)), "PerseusJob is not served")
    cluster.start_operator(*OPERATOR)
    spec = train_two_stages(cluster, noise=0.0)
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
    predicted = status()["predicted"]
    full_w = 1000 * predicted["energyMillijoules"] / predicted["iterationTimeMicroseconds"]
    watts = round(0.8 * full_w)
    budget = {"apiVersion": API_VERSION, "kind": keys.BUDGET_KIND, "metadata": {"name": "hall"}}
    cluster.apply({**budget, "spec": {"watts": watts}})
    eventually(lambda: has_reason("LimitedByBudget"), "the budget does not limit the job", every_s=0.1)

    def as_fast_as_unlimited() -> bool:
        # Not by number of the point: the frontier is computed again with what is measured.
        return bool(status()["predicted"]["iterationTimeMicroseconds"] <= 1.01 * predicted["iterationTimeMicroseconds"])

    def measured_below_budget() -> bool:
        measured = status().get("measured")
        if as_fast_as_unlimited() or not measured or "energyMillijoules" not in measured:
            return False
        return bool(1000 * measured["energyMillijoules"] / measured["iterationTimeMicroseconds"] <= 1.02 * watts)

    eventually(measured_below_budget, "the measured power is above the budget", every_s=0.1)
    (share,) = custom.get_cluster_custom_object(*BUDGETS, "hall")["status"]["shares"]
    assert (share["namespace"], share["name"]) == ("default", "gpt3")
    assert share["watts"] <= watts < share["wantedWatts"]

    operator_gone_and_back(cluster, watts)
    eventually(measured_below_budget, "the measured power is above the budget", every_s=0.1)
    custom.delete_cluster_custom_object(*BUDGETS, "hall")
    eventually(
        lambda: has_reason("PlanInForce") and as_fast_as_unlimited(),
        "the fastest plan is not in force",
        every_s=0.1,
    )
    custom.delete_namespaced_custom_object(*JOBS, "gpt3")
    eventually(lambda: not custom.list_namespaced_custom_object(*JOBS)["items"], "the job is not deleted", every_s=0.1)
