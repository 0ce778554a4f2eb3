"""Who may drive a GPU, on real nodes: whoever is not its owner is refused, counted and reported, and writes no clock.

One job trains under its plan. Attackers run beside it, on its node, and claim one of its GPUs as if they were its rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from stage import PATIENCE_S, STAGES, SYSTEM, TRAINER_IMAGE, TRAINING, VALUES, Gpu, Job, Stage

from perseus_proto import keys

pytestmark = pytest.mark.timeout(900)

ATTACKER = (Path(__file__).parent / "attacker.py").read_text(encoding="utf-8")
SPARE = 2
"""GPUs of a node that the job does not have."""


class OwnGpus(Job):
    """A job that has some GPUs of its node, and others are spare."""

    kubectl: Callable[..., str]
    spare: Sequence[Gpu] = ()

    def open_gpus(self) -> bool:
        if not super().open_gpus():
            return False
        said = self.kubectl("-n", TRAINING, "exec", self.name, "--", "printenv", "NVIDIA_VISIBLE_DEVICES")
        own = sorted(said.strip().split(","))
        self.spare = [gpu for gpu in self.gpus if gpu.uuid not in own]
        self.gpus = [gpu for gpu in self.gpus if gpu.uuid in own]
        for number, gpu in enumerate(self.gpus):
            gpu.stage = number % STAGES
        return True


@pytest.fixture(scope="module")
def stage(cluster: Any, api: Any, helm: Any, images: set[str], eventually: Any) -> Iterator[Stage]:
    stage = Stage(cluster, api, helm, eventually)
    job = OwnGpus(f"train-{cluster.nodes[0].name}", cluster.nodes[0], api)
    job.kubectl = cluster.kubectl
    stage.jobs = [job]
    count = VALUES["simulatedGpus"]
    try:
        VALUES["simulatedGpus"] = {**count, "count": count["count"] + SPARE}  # type: ignore[dict-item]
        stage.set()
        yield stage
    finally:
        VALUES["simulatedGpus"] = count
        stage.strike()


@pytest.fixture
def victim(stage: Stage) -> OwnGpus:
    [job] = stage.jobs
    assert isinstance(job, OwnGpus)
    return job


class Attackers:
    """Pods on the victim's node; their last line is what came of it."""

    def __init__(self, stage: Stage, victim: OwnGpus) -> None:
        self._stage, self._victim = stage, victim
        self._made: list[tuple[str, str]] = []
        self.gpu = victim.gpus[0].uuid
        """What they claim."""

    def start(
        self,
        name: str,
        word: str,
        *,
        gpus: int = 0,
        namespace: str = TRAINING,
        host_pid: bool = False,
        beside: bool = False,
    ) -> None:
        """A pod with the job's label, so that the operator leases the agent for it."""
        mounts = [{"name": "perseus", "mountPath": "/run/perseus"}, {"name": "shared", "mountPath": "/shared"}]
        container = {
            "name": "attacker",
            "image": TRAINER_IMAGE,
            "command": ["python", "-c", ATTACKER, word, self.gpu],
            "resources": {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {},
            "volumeMounts": mounts,
            "securityContext": {"runAsUser": 0},
        }
        holder = {**container, "name": "holder", "command": ["sleep", "600"]}
        holder["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
        body = {
            "metadata": {"name": name, "labels": {keys.LABEL_JOB: self._victim.name}},
            "spec": {
                "nodeName": None if gpus or beside else self._victim.node.name,
                "nodeSelector": {"kubernetes.io/hostname": self._victim.node.name},
                "restartPolicy": "Never",
                "hostPID": host_pid,
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "containers": [container, holder] if beside else [container],
                "volumes": [
                    {"name": "perseus", "hostPath": {"path": "/run/perseus"}},
                    {"name": "shared", "hostPath": {"path": "/run/attack", "type": "DirectoryOrCreate"}},
                ],
            },
        }
        self._made.append((namespace, name))
        self._stage.core.create_namespaced_pod(namespace, body)

    def said(self, name: str, namespace: str = TRAINING) -> dict[str, str]:
        """What the attacker was told."""

        def line() -> str:
            text: str = self._stage.core.read_namespaced_pod_log(name, namespace, container="attacker")
            return text.strip()

        return dict(json.loads(self._stage.eventually(f"{name} has tried", line, PATIENCE_S)))

    def refused(self) -> int:
        """As the agent counts."""
        agent = self._stage.pod("agent", self._victim.node).metadata.name
        page = self._stage.cluster.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{SYSTEM}/pods/{agent}:9471/proxy/metrics"
        )
        [count] = re.findall(r"^perseus_agent_refused_peers_total\S* (\S+)$", page, re.MULTILINE)
        return int(float(count))

    def reported(self) -> str:
        """The agent's log."""
        agent = self._stage.pod("agent", self._victim.node).metadata.name
        return str(self._stage.core.read_namespaced_pod_log(agent, SYSTEM))

    def end(self) -> None:
        for namespace, name in self._made:
            self._stage.core.delete_namespaced_pod(name, namespace, grace_period_seconds=1)


@pytest.fixture
def attackers(stage: Stage, victim: OwnGpus) -> Iterator[Attackers]:
    found = Attackers(stage, victim)
    yield found
    found.end()


@pytest.fixture
def unharmed(stage: Stage, victim: OwnGpus, attackers: Attackers) -> Iterator[Callable[[str], None]]:
    """Refused, counted, reported; the spare GPUs untouched and the job under its plan all the while."""
    allowed = stage.allowed_mhz()
    counted = attackers.refused()

    def check(words: str) -> None:
        stage.eventually("it is counted", lambda: attackers.refused() > counted)
        assert words in attackers.reported()

    yield check
    for gpu in victim.gpus:
        assert gpu.locked_mhz in allowed[gpu.stage] | {0}
    for gpu in victim.spare:
        assert not gpu.look()
        assert not gpu.defaults, "it was written, and given its default clocks again"
    stage.trains_on([victim])
    stage.eventually("the plan stays in force", victim.in_force, PATIENCE_S)


def test_a_pod_without_gpus(attackers: Attackers, unharmed: Callable[[str], None]) -> None:
    attackers.start("without", "claim")
    said = attackers.said("without")
    print(said)
    assert said["answer"] in ("NO_GPU", "GPU_NOT_OWNED", "DISMISSED")
    unharmed("a process was refused")


def test_a_pod_with_other_gpus(attackers: Attackers, unharmed: Callable[[str], None]) -> None:
    attackers.start("other", "claim", gpus=1)
    said = attackers.said("other")
    print(said)
    assert said["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    unharmed("is not a GPU of this pod")


def test_a_second_container_of_a_pod_with_another_gpu(attackers: Attackers, unharmed: Callable[[str], None]) -> None:
    attackers.start("beside", "claim", beside=True)
    said = attackers.said("beside")
    print(said)
    assert said["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    unharmed("is not a GPU of this pod")


def test_a_pod_that_sees_every_process(attackers: Attackers, unharmed: Callable[[str], None]) -> None:
    attackers.start("host", "claim", host_pid=True)
    said = attackers.said("host")
    print(said)
    assert said["answer"] in ("NO_GPU", "GPU_NOT_OWNED", "DISMISSED")
    unharmed("a process was refused")


def test_the_connection_of_a_process_that_has_died(attackers: Attackers, unharmed: Callable[[str], None]) -> None:
    """Its pid is free: whoever gets it next must not be taken for the one that connected."""
    attackers.start("dead", "dead", gpus=1)
    said = attackers.said("dead")
    print(said)
    assert said["answer"] not in ("WAITS",)
    unharmed("has gone")


def test_a_connection_that_was_passed_on(attackers: Attackers, unharmed: Callable[[str], None]) -> None:
    """Who holds it is not who opened it: it grants what the opener's pod may do, which is not the victim's GPU."""
    attackers.start("giver", "give", gpus=1)
    attackers.start("taker", "take")
    said = attackers.said("taker")
    print(said)
    assert said["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    unharmed("is not a GPU of this pod")


def test_a_pod_of_another_namespace_that_names_the_job(
    stage: Stage, victim: OwnGpus, attackers: Attackers, unharmed: Callable[[str], None], namespace: str
) -> None:
    """No lease ever names it: it waits, and its GPU is nobody's but its own."""
    attackers.start("foreign", "claim", gpus=1, namespace=namespace)
    said = attackers.said("foreign", namespace)
    print(said)
    assert said["answer"] != "GPU_TAKEN"
