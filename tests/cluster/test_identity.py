"""Who may drive a GPU, on real nodes: whoever is not its owner is refused, counted and reported, and writes no clock.

One job trains under its plan, and has a sidecar. Attackers run beside it, on its node, and claim one of its GPUs as if
they were its rank. All the while the plan stays in force on its GPUs, and nobody writes to those that are spare.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import signal_role
from stage import PATIENCE_S, SYSTEM, TRAINER_IMAGE, TRAINING, Job, Stage, Watch, find, group_of

from local_cluster.machine import Machine
from perseus_proto import keys

pytestmark = pytest.mark.timeout(900)

ATTACKER = (Path(__file__).parent / "attacker.py").read_text(encoding="utf-8")
MOUNT = {"name": "perseus", "mountPath": "/run/perseus"}


@pytest.fixture(scope="module")
def victim(stage: Stage) -> Job:
    return stage.jobs[0]


class Attackers:
    """Pods on the victim's node, with the job's label, so that the operator leases the agent for them, too."""

    def __init__(self, stage: Stage, victim: Job) -> None:
        self._stage, self._victim = stage, victim
        self._made: list[tuple[str, str]] = []
        self.gpu = victim.gpus[0].uuid
        """What they claim."""
        self.shared = victim.node.root / "run/attack"
        """A folder of the node that they share."""

    def start(self, name: str, word: str, *, gpus: int = 0, namespace: str = TRAINING, **more: Any) -> None:
        container = {
            "name": "attacker",
            "image": TRAINER_IMAGE,
            "command": ["python", "-c", ATTACKER, word, self.gpu],
            "resources": {"limits": {"nvidia.com/gpu": str(gpus)}} if gpus else {},
            "volumeMounts": [MOUNT, {"name": "shared", "mountPath": "/shared"}],
            "securityContext": {"runAsUser": 0},
        }
        body = {
            "metadata": {"name": name, "labels": {keys.LABEL_JOB: self._victim.name}},
            "spec": {
                "nodeSelector": {"kubernetes.io/hostname": self._victim.node.name},
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                "containers": [container],
                "volumes": [
                    {"name": "perseus", "hostPath": {"path": "/run/perseus"}},
                    {"name": "shared", "hostPath": {"path": "/run/attack", "type": "DirectoryOrCreate"}},
                ],
                **more,
            },
        }
        self._made.append((namespace, name))
        self._stage.core.create_namespaced_pod(namespace, body)

    def said(self, name: str, namespace: str = TRAINING) -> dict[str, str]:
        """What the attacker was told."""

        def line() -> str:
            return (self._stage.core.read_namespaced_pod_log(name, namespace) or "").strip()

        said: dict[str, str] = json.loads(self._stage.eventually(f"{name} has tried", line, PATIENCE_S))
        print(f"{name}: {said}")
        return said

    def pod(self, name: str) -> Any:
        return self._stage.core.read_namespaced_pod(name, TRAINING)

    def end(self) -> None:
        for namespace, name in self._made:
            self._stage.core.delete_namespaced_pod(name, namespace, grace_period_seconds=1)
        here = {name for _, name in self._made}

        def left() -> set[str]:
            return here & {pod.metadata.name for pod in self._stage.core.list_pod_for_all_namespaces().items}

        self._stage.eventually("the attackers are gone", lambda: not left(), PATIENCE_S)
        for file in self.shared.glob("*"):
            file.unlink()


class Agent:
    """The agent of the victim's node, as an administrator sees it."""

    def __init__(self, stage: Stage, victim: Job) -> None:
        self._stage = stage
        self._name = stage.pod("agent", victim.node).metadata.name

    def refused(self) -> int:
        """What its metric counts."""
        path = f"/api/v1/namespaces/{SYSTEM}/pods/{self._name}:{keys.DEFAULT_AGENT_METRICS_PORT}/proxy/metrics"
        page = self._stage.cluster.kubectl("get", "--raw", path)
        [count] = re.findall(r"^perseus_agent_refused_peers_total\S* (\S+)$", page, re.MULTILINE)
        return int(float(count))

    def reported(self) -> list[str]:
        """The lines of its log about those whom it refused."""
        log: str = self._stage.core.read_namespaced_pod_log(self._name, SYSTEM)
        return [line for line in log.splitlines() if "refused" in line]


@pytest.fixture
def attackers(stage: Stage, victim: Job) -> Iterator[Attackers]:
    found = Attackers(stage, victim)
    yield found
    found.end()


Refused = Callable[[str], None]


@pytest.fixture
def refused(stage: Stage, victim: Job, attackers: Attackers) -> Iterator[Refused]:
    """``refused(words)``: it was counted, and reported with these words. Nothing else may happen in the meantime."""
    agent = Agent(stage, victim)
    counted, told = agent.refused(), len(agent.reported())
    written = [gpu.written() for gpu in victim.spare]
    watch = Watch(stage.jobs, stage.allowed_mhz())
    before = [len(gpu.defaults) for gpu in victim.gpus]
    watch.start()

    def check(words: str) -> None:
        stage.eventually("it is counted", lambda: agent.refused() > counted)
        stage.eventually(f"it is reported: {words}", lambda: any(words in line for line in agent.reported()[told:]))

    yield check
    stage.trains_on([victim])
    watch.stop()
    assert watch.wrong == []
    assert [len(gpu.defaults) for gpu in victim.gpus] == before, "the rightful processes kept their GPUs"
    assert [gpu.written() for gpu in victim.spare] == written, "nobody wrote to the other GPUs"
    stage.eventually("the plan stays in force", victim.in_force, PATIENCE_S)


def test_a_pod_without_gpus(attackers: Attackers, refused: Refused) -> None:
    attackers.start("without", "claim")
    assert attackers.said("without")["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    refused("is not a GPU of this container")


def test_a_pod_with_other_gpus(attackers: Attackers, refused: Refused) -> None:
    attackers.start("other", "claim", gpus=1)
    assert attackers.said("other")["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    refused("is not a GPU of this container")


def test_a_second_container_of_the_pod(stage: Stage, victim: Job, attackers: Attackers, refused: Refused) -> None:
    """The GPU is its pod's, and not its own."""
    said = json.loads(victim.run("sidecar", "python", "-c", ATTACKER, "claim", attackers.gpu))
    assert said["answer"] == "GPU_NOT_OWNED", said
    refused("is not a GPU of this container")


def test_a_pod_that_sees_every_process(attackers: Attackers, refused: Refused) -> None:
    attackers.start("host", "claim", hostPID=True)
    assert attackers.said("host")["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    refused("is not a GPU of this container")


def test_a_connection_that_was_passed_on(attackers: Attackers, refused: Refused) -> None:
    """Whoever speaks must be who connected: else a pod could lend its name."""
    attackers.start("giver", "give", gpus=1)
    attackers.start("taker", "take")
    said = attackers.said("taker")
    assert said["answer"] == "MALFORMED"
    assert "must be the process that connected" in said["message"]
    refused("must be the process that connected")


def test_the_number_of_a_dead_process(stage: Stage, victim: Job, attackers: Attackers, refused: Refused) -> None:
    """An attacker's process connects and dies, and the victim's pod gets its number before the agent looks."""
    attackers.start("dead", "dead", gpus=1)
    stage.eventually("the attacker runs", (attackers.shared / "ready").exists, PATIENCE_S)
    cast, role = stage.cast(), f"agent of {victim.node.name}"
    [trainer] = find(cast[f"trainer of {victim.node.name}"], "perseus_sim.training.pod_job")
    assert signal_role(cast, role, signal.SIGSTOP)
    try:
        (attackers.shared / "connect").touch()
        stage.eventually("it has connected", (attackers.shared / "connected").exists)
        [pid] = [pid for pid in find(attackers.pod("dead"), "python") if is_child(pid)]
        _, number, _ = numbers(pid, "NSpid")  # ours, its node's, its pod's
        os.kill(pid, signal.SIGKILL)
        stage.eventually("it is gone", (attackers.shared / "died").exists)
        reuse(victim.node, number, trainer)
        (attackers.shared / "go").touch()
    finally:
        signal_role(cast, role, signal.SIGCONT)
    said = attackers.said("dead")
    # By its end, which kernels before 6.5 do not tell of; there, because another process speaks.
    assert said["answer"] in ("NOT_A_POD", "MALFORMED"), said
    assert str(number) in said["message"]
    refused(said["message"])


def test_a_pod_of_another_namespace_that_names_the_job(
    stage: Stage, victim: Job, attackers: Attackers, refused: Refused, namespace: str
) -> None:
    """Nobody who may speak for that namespace has opted it in: it is heard, and gets nothing."""
    attackers.start("foreign", "claim", gpus=1, namespace=namespace)
    assert attackers.said("foreign", namespace)["answer"] == "WAITS"


def is_child(pid: int) -> bool:
    """Whether a process was forked by another that runs the same program."""
    [parent] = numbers(pid, "PPid")
    return Path(f"/proc/{parent}/cmdline").read_bytes() == Path(f"/proc/{pid}/cmdline").read_bytes()


def numbers(pid: int, field: str) -> list[int]:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return [int(word) for word in re.findall(rf"^{field}:\s*(.*)$", status, re.MULTILINE)[0].split()]


REUSE = """
import os, sys, time
number, groups = int(sys.argv[1]), sys.argv[2:]
for attempt in range(1000):
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(number - 1))
    joined, joins = os.pipe()
    if os.fork() == 0:
        if os.getpid() == number:
            for group in groups:
                open(f"{group}/cgroup.procs", "w").write("0")
            os.write(joins, b".")
            for descriptor in (joins, 1, 2):  # whoever waits for our output need not wait for us
                os.close(descriptor)
            time.sleep(60)
        os._exit(0)
    os.close(joins)
    if os.read(joined, 1):
        sys.exit()
sys.exit(f"{number} was always taken")
"""


def reuse(node: Machine, number: int, beside: int) -> None:
    """Start a process that has this number on the node, in the container of another."""
    groups = []
    for line in group_of(beside).splitlines():
        _, controllers, path = line.split(":", 2)
        folder = Path("/sys/fs/cgroup", controllers.removeprefix("name="), path.lstrip("/"))
        groups += [str(folder)] if (folder / "cgroup.procs").exists() else []
    assert groups
    node.run(sys.executable, "-c", REUSE, str(number), *groups)
