"""On real nodes an agent sets clocks only for the owner of a GPU: it refuses, counts and reports other processes.

One job trains under its plan, and has a sidecar. Attackers run on its node and claim one of its GPUs as if they were
its rank. Meanwhile the plan stays in force on its GPUs, and nothing writes to the spare GPUs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import signal_role
from installation import PATIENCE_S, SYSTEM, Installation, Watch, find, group_of
from training_job import TRAINER_IMAGE, TRAINING, Job

from local_cluster.machine import Machine
from perseus_core import keys

pytestmark = pytest.mark.timeout(900)

ATTACKER = (Path(__file__).parent / "attacker.py").read_text(encoding="utf-8")
THAW_S = 1.0
"""In this time an agent that was stopped says that it is alive, to the keeper that is still stopped."""
MOUNT = {"name": "perseus", "mountPath": "/run/perseus"}


@pytest.fixture(scope="module")
def victim(installation: Installation) -> Job:
    return installation.jobs[0]


class Attackers:
    """Pods on the victim's node, with the job's label, so that the operator's lease names them too."""

    def __init__(self, installation: Installation, victim: Job) -> None:
        self._installation, self._victim = installation, victim
        self._made: list[tuple[str, str]] = []
        self.gpu = victim.gpus[0].uuid
        """The GPU that they claim."""
        self.shared = victim.node.root / "run/attack"
        """A folder of the node that they share with the test."""

    def start(self, name: str, attack: str, *, gpus: int = 0, namespace: str = TRAINING, **more: Any) -> None:
        container = {
            "name": "attacker",
            "image": TRAINER_IMAGE,
            "command": ["python", "-c", ATTACKER, attack, self.gpu],
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
        self._installation.core.create_namespaced_pod(namespace, body)

    def result(self, name: str, namespace: str = TRAINING) -> dict[str, str]:
        """Wait until an attacker has tried, and return the agent's answer."""

        def line() -> str:
            return (self._installation.core.read_namespaced_pod_log(name, namespace) or "").strip()

        result: dict[str, str] = json.loads(self._installation.eventually(f"{name} has tried", line, PATIENCE_S))
        print(f"{name}: {result}")
        return result

    def pod(self, name: str) -> Any:
        return self._installation.core.read_namespaced_pod(name, TRAINING)

    def end(self) -> None:
        for namespace, name in self._made:
            self._installation.core.delete_namespaced_pod(name, namespace, grace_period_seconds=1)
        here = {name for _, name in self._made}

        def left() -> set[str]:
            return here & {pod.metadata.name for pod in self._installation.core.list_pod_for_all_namespaces().items}

        self._installation.eventually("the attackers are gone", lambda: not left(), PATIENCE_S)
        for file in self.shared.glob("*"):
            file.unlink()


class Agent:
    """The agent of the victim's node, as an administrator sees it."""

    def __init__(self, installation: Installation, victim: Job) -> None:
        self._installation = installation
        self._name = installation.pod("agent", victim.node).metadata.name

    def refused(self) -> int:
        """Return the value of its metric of refused processes."""
        path = f"/api/v1/namespaces/{SYSTEM}/pods/{self._name}:{keys.DEFAULT_AGENT_METRICS_PORT}/proxy/metrics"
        page = self._installation.cluster.kubectl("get", "--raw", path)
        [count] = re.findall(r"^perseus_agent_refused_peers_total\S* (\S+)$", page, re.MULTILINE)
        return int(float(count))

    def reported(self) -> list[str]:
        """Return the lines of its log about refused processes."""
        log: str = self._installation.core.read_namespaced_pod_log(self._name, SYSTEM)
        return [line for line in log.splitlines() if "refused" in line]


@pytest.fixture
def attackers(installation: Installation, victim: Job) -> Iterator[Attackers]:
    found = Attackers(installation, victim)
    yield found
    found.end()


Refused = Callable[[str], None]


@pytest.fixture
def refused(installation: Installation, victim: Job, attackers: Attackers) -> Iterator[Refused]:
    """``refused(message)`` waits until a refusal is counted, and reported with this message.

    At the end of the test the plan must be in force as before, and nothing may have written to other GPUs.
    """
    agent = Agent(installation, victim)
    counted, reported = agent.refused(), len(agent.reported())
    written = [gpu.written() for gpu in victim.spare]
    watch = Watch(installation.jobs, installation.plans)
    before = [len(gpu.defaults) for gpu in victim.gpus]
    watch.start()

    def check(message: str) -> None:
        installation.eventually("it is counted", lambda: agent.refused() > counted)
        installation.eventually(
            f"it is reported: {message}", lambda: any(message in line for line in agent.reported()[reported:])
        )

    yield check
    installation.trains_on([victim])
    watch.stop()
    assert watch.wrong == []
    assert [len(gpu.defaults) for gpu in victim.gpus] == before, "the legitimate processes kept their clocks"
    assert [gpu.written() for gpu in victim.spare] == written, "no program wrote to the other GPUs"
    installation.eventually("the plan stays in force", victim.in_force, PATIENCE_S)


def test_a_pod_without_gpus(attackers: Attackers, refused: Refused) -> None:
    attackers.start("without", "claim")
    assert attackers.result("without")["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    refused("is not a GPU of this container")


def test_a_pod_with_other_gpus(attackers: Attackers, refused: Refused) -> None:
    attackers.start("other", "claim", gpus=1)
    assert attackers.result("other")["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    refused("is not a GPU of this container")


def test_a_second_container_of_the_pod(
    installation: Installation, victim: Job, attackers: Attackers, refused: Refused
) -> None:
    """The GPU belongs to the other container of the pod."""
    result = json.loads(victim.run("sidecar", "python", "-c", ATTACKER, "claim", attackers.gpu))
    assert result["answer"] == "GPU_NOT_OWNED", result
    refused("is not a GPU of this container")


def test_a_pod_that_sees_every_process(attackers: Attackers, refused: Refused) -> None:
    attackers.start("host", "claim", hostPID=True)
    assert attackers.result("host")["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    refused("is not a GPU of this container")


def test_a_connection_that_was_passed_on(attackers: Attackers, refused: Refused) -> None:
    """The process that sends the hello must be the one that connected: otherwise a pod could lend its identity."""
    attackers.start("giver", "give", gpus=1)
    attackers.start("taker", "take")
    result = attackers.result("taker")
    assert result["answer"] == "MALFORMED"
    assert "must be the process that connected" in result["message"]
    refused("must be the process that connected")


def test_the_number_of_a_dead_process(
    installation: Installation, victim: Job, attackers: Attackers, refused: Refused
) -> None:
    """An attacker's process connects and dies, and the victim's pod gets its number before the agent looks."""
    attackers.start("dead", "dead", gpus=1)
    installation.eventually("the attacker runs", (attackers.shared / "ready").exists, PATIENCE_S)
    pods, node = installation.pods_by_role(), victim.node.name
    [trainer] = find(pods[f"trainer of {node}"], "perseus_sim.training.pod_job")
    # The keeper first: it would end an agent that is silent.
    for role in ("keeper", "agent"):
        assert signal_role(pods, f"{role} of {node}", signal.SIGSTOP)
    try:
        (attackers.shared / "connect").touch()
        installation.eventually("it has connected", (attackers.shared / "connected").exists)
        [pid] = [pid for pid in find(attackers.pod("dead"), "python") if is_child(pid)]
        _, number, _ = numbers(pid, "NSpid")  # in the namespace of this machine, of its node, of its pod
        os.kill(pid, signal.SIGKILL)
        installation.eventually("it is gone", (attackers.shared / "died").exists)
        reuse(victim.node, number, trainer)
        (attackers.shared / "go").touch()
    finally:
        signal_role(pods, f"agent of {node}", signal.SIGCONT)
        time.sleep(THAW_S)
        signal_role(pods, f"keeper of {node}", signal.SIGCONT)
    result = attackers.result("dead")
    # Refused because the process has ended; kernels before 6.5 do not report that, but then another process sends.
    assert result["answer"] in ("NOT_A_POD", "MALFORMED"), result
    assert str(number) in result["message"]
    refused(result["message"])


def test_a_pod_of_another_namespace_that_names_the_job(
    installation: Installation, victim: Job, attackers: Attackers, refused: Refused, namespace: str
) -> None:
    """No user of that namespace has opted the pod in: the agent accepts the connection, and sets no clock for it."""
    attackers.start("foreign", "claim", gpus=1, namespace=namespace)
    assert attackers.result("foreign", namespace)["answer"] == "WAITS"


def is_child(pid: int) -> bool:
    """Return whether a process was forked by another one with the same program."""
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
            for descriptor in (joins, 1, 2):  # so that the reader of the output does not wait for this process
                os.close(descriptor)
            time.sleep(60)
        os._exit(0)
    os.close(joins)
    if os.read(joined, 1):
        sys.exit()
sys.exit(f"{number} was always taken")
"""


def reuse(node: Machine, number: int, beside: int) -> None:
    """Start a process with this number on the node, in the container of another process."""
    groups = []
    for line in group_of(beside).splitlines():
        _, controllers, path = line.split(":", 2)
        folder = Path("/sys/fs/cgroup", controllers.removeprefix("name="), path.lstrip("/"))
        groups += [str(folder)] if (folder / "cgroup.procs").exists() else []
    assert groups
    node.run(sys.executable, "-c", REUSE, str(number), *groups)
