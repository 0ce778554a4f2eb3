"""Jobs are planned by a worker of the solver service; while it is away, the plan in force stays and a new one waits."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.e2e.world import absent, train_two_stages
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.processes import Child

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)


class Worker:
    """``perseus-solver``, with the certificate of an agent: the simulated cluster has no other that is a server's."""

    def __init__(self, cluster: SimulatedCluster, address: str = "127.0.0.1:0") -> None:
        ready = cluster.folder / "solver.ready"
        ready.unlink(missing_ok=True)
        certificate, key = cluster.tls / "perseus-agent.crt", cluster.tls / "perseus-agent.key"
        self.child: Child = cluster.processes.start(
            "solver",
            [
                *(sys.executable, "-m", "perseus_operator.servers.solver", "--address", address),
                *("--tls-cert", str(certificate), "--tls-key", str(key)),
                *("--tls-ca", str(cluster.tls / "ca.crt"), "--metrics-address", "127.0.0.1:0"),
                *("--ready-file", str(ready)),
            ],
        )
        self.child.wait_until(ready.exists)
        addresses = json.loads(ready.read_text())
        self.address, self._metrics = addresses["address"], addresses["metrics"]

    def solved(self) -> float:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=PATIENCE_S) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        name = 'perseus_solver_work_total{outcome="answered",task="solve"}'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_job_is_planned_by_the_service_and_keeps_its_plan_while_that_is_away(cluster: SimulatedCluster) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*JOBS)), "PerseusJob is not served")
    worker = Worker(cluster)
    cluster.start_operator("--solver-address", worker.address, "--solver-name", "perseus-agent")
    job = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.KIND, "metadata": {"name": "gpt3"}}
    cluster.apply({**job, "spec": train_two_stages(cluster)})

    def condition(kind: str) -> dict[str, Any]:
        status = custom.get_namespaced_custom_object(*JOBS, "gpt3").get("status", {})
        return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})

    eventually(lambda: condition("PlanApplied").get("status") == "True", "the job has no plan", every_s=0.2)
    assert worker.solved() >= 1

    worker.child.stop()
    patched = custom.patch_namespaced_custom_object(
        *JOBS, "gpt3", {"spec": {"points": 30}}, _content_type="application/merge-patch+json"
    )
    generation = patched["metadata"]["generation"]

    def frontier() -> tuple[int, bool]:
        """Of which generation the condition is, and whether its frontier is the one that was asked for."""
        found = condition("FrontierReady")
        done = found["status"] == "True" and "computed again" not in found["message"]
        return found["observedGeneration"], done

    def locked() -> bool:
        return all(gpu.locked_mhz for node in cluster.nodes.values() for gpu in node.gpus)

    eventually(lambda: frontier() == (generation, False), "the edit was not seen", every_s=0.2)
    assert condition("PlanApplied")["status"] == "True"
    assert locked()

    again = Worker(cluster, worker.address)
    eventually(lambda: frontier() == (generation, True), "the work is lost", every_s=0.2)
    assert again.solved() >= 1
    eventually(lambda: condition("PlanApplied")["status"] == "True", "the new plan is not applied", every_s=0.2)
    assert locked()
    cluster.stop_operator()
