"""The seam between families and those who serve jobs: one class more is one family more, with all that a job has.

The operator runs as a process, with the family of ``watt_clock`` beside its own: on the embedded API server, with a
real agent and its keeper on simulated GPUs. Nothing outside of ``watt_clock`` knows that family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.integration import watt_clock
from tests.integration.watt_clock import WATTS
from tests.integration.widgets import absent
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.kubelet import AdmittedPod
from perseus_sim.gpus.model import MODELS

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
GROUP = keys.API_GROUP, keys.API_VERSION
JOB = ("default", keys.PLURAL, "any")
CLASS, BUDGET = (keys.CLASS_PLURAL, "capped"), (keys.BUDGET_PLURAL, "hall")
FLAGS = ("--lease-ttl-s", "6", "--agent-timeout-s", "2", "--status-interval-s", "0.2", "--log-format", "text")
GPUS, CAP_W, BUDGET_W = 2, 600, 450
FREE_MHZ = max(mhz for mhz, watts in WATTS.items() if GPUS * watts <= CAP_W)
SHARED_MHZ = max(mhz for mhz, watts in WATTS.items() if GPUS * watts <= BUDGET_W)


class System:
    """An operator with the family, and a node whose GPUs one pod has."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.custom: Any = client.CustomObjectsApi(cluster.api)
        self._cluster = cluster
        cluster.apply(CRDS)
        for plural in (keys.BUDGET_PLURAL, keys.CLASS_PLURAL):
            eventually(partial(self.is_served, plural))
        cluster.start_operator(*FLAGS, program=(str(watt_clock.__file__),))
        self.node = cluster.add_node("node-0", GPUS, MODELS["a100"], clocks_mhz=tuple(WATTS))

    def is_served(self, plural: str) -> bool:
        return not absent(lambda: self.custom.list_cluster_custom_object(*GROUP, plural))

    def apply(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        head = {"apiVersion": "/".join(GROUP), "kind": kind, "metadata": {"name": name}}
        self._cluster.apply({**head, "spec": spec})

    def run_pod(self) -> None:
        """A pod of the class, in which no process is connected to the agent."""
        labels = {keys.LABEL_JOB: JOB[-1], keys.LABEL_CLASS: CLASS[-1]}
        uid = self._cluster.run_pod("default", "train-0", self.node.name, labels, [])
        gpus = tuple(gpu.spec.uuid for gpu in self.node.gpus)
        self.node.kubelet.admit(AdmittedPod(uid, "default", "train-0", gpus))

    @property
    def job(self) -> dict[str, Any]:
        """The status of the PerseusJob."""
        read = self.custom.get_namespaced_custom_object(*GROUP, *JOB)
        return dict(read.get("status", {}))

    def applied(self) -> tuple[str, str, str]:
        [said] = [each for each in self.job["conditions"] if each["type"] == "PlanApplied"]
        return said["status"], said["reason"], said["message"]

    def until_locked(self, mhz: int) -> None:
        """What every GPU is locked at; 0: its default clocks."""
        eventually(lambda: {gpu.locked_mhz for gpu in self.node.gpus} == {mhz}, f"the GPUs are not locked at {mhz} MHz")

    def until_in_force(self, mhz: int) -> None:
        """The GPUs are locked, and the status says so."""
        self.until_locked(mhz)
        in_force = "True", "ClockInForce", f"The GPUs run at {mhz} MHz."
        eventually(lambda: self.applied() == in_force, "the status is another", not_yet=(client.ApiException, KeyError))
        counted = {"megahertz": mhz, "gpus": GPUS, "locked": GPUS}
        eventually(lambda: self.job["clock"] == counted, "the status counts other GPUs")

    def released(self) -> list[str]:
        events = self._cluster.core.list_namespaced_event("default").items
        return [event.message for event in events if event.reason == "ClocksReleased"]


@pytest.fixture
def system() -> Iterator[System]:
    with SimulatedCluster() as cluster:
        yield System(cluster)


def test_a_further_family_has_class_lease_status_share_and_release(system: System) -> None:
    system.apply(
        keys.CLASS_KIND, CLASS[-1], {"objective": {"type": "PowerCap", "powerCapWatts": CAP_W}, "mode": "Enforce"}
    )
    system.run_pod()
    system.until_in_force(FREE_MHZ)
    ready = {each["type"]: each["status"] for each in system.job["conditions"]}
    assert ready["AgentsReady"] == ready["Active"] == ready["Ready"] == "True"

    system.apply(keys.BUDGET_KIND, BUDGET[-1], {"watts": BUDGET_W})
    system.until_in_force(SHARED_MHZ)
    assert system.job["powerBudget"] == {"name": BUDGET[-1], "watts": BUDGET_W}

    def shares() -> list[dict[str, Any]]:
        found = system.custom.get_cluster_custom_object(*GROUP, *BUDGET)
        return list(found.get("status", {}).get("shares", []))

    [share] = eventually(shares, "the budget has no share")
    assert (share["name"], share["watts"]) == (JOB[-1], BUDGET_W)
    assert share["wantedWatts"] == GPUS * WATTS[FREE_MHZ]
    system.custom.delete_cluster_custom_object(*GROUP, *BUDGET)
    system.until_in_force(FREE_MHZ)

    system.custom.delete_cluster_custom_object(*GROUP, *CLASS)  # which would make the job again: its pod still runs
    system.custom.delete_namespaced_custom_object(*GROUP, *JOB)
    system.until_locked(0)
    eventually(lambda: system.released() == [f"Back at default clocks: {GPUS} GPUs on 1 node."], "no event says so")
