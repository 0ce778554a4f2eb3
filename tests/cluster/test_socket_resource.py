"""Training in a namespace that enforces *restricted*: pods get the agent's socket as a resource, without a hostPath.

The chapters depend on one another: the job that the first one starts trains on through restarts of agents and kubelets.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from installation import PATIENCE_S
from journey import AGENTS, Journey
from kubernetes import client
from training import A100, CONFINED, PHYSICS, RESTRICTED, TRAINING, Training
from training_job import TRAINER_IMAGE

from perseus_core import keys
from perseus_sim.profiles import profile_csv

pytestmark = pytest.mark.timeout(900)

JOB = Training("confined", stages=2, pipelines=2, microbatches=4)
PROFILE = profile_csv(JOB.stages, imbalance=1.25, forward_s=0.02)
LABEL = "system_u:object_r:container_file_t:s0"
"""For nodes that enforce SELinux; without it the kernel keeps a label as it is."""
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true,webhook.enabled=true,agent.settings.gpuMetrics=true"),
    *("--set", f"agent.settings.socketSelinuxLabel={LABEL}"),
)


@pytest.fixture(scope="module")
def journey(cleared_journey: Journey) -> Journey:
    journey = cleared_journey
    journey.install(*INSTALL)
    journey.kubectl("label", "namespace", TRAINING, RESTRICTED)
    journey.every_node_offers_the_socket()
    return journey


def probe(name: str, **limits: str) -> dict[str, Any]:
    """A labelled pod without a GPU that sleeps."""
    container = {
        "name": "probe",
        "image": TRAINER_IMAGE,
        "command": ["sleep", "inf"],
        "resources": {"limits": limits},
        "securityContext": CONFINED,
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1, "restartPolicy": "Never"}
    return {"metadata": {"name": name, "labels": {keys.LABEL_JOB: JOB.name}}, "spec": spec}


def phase(journey: Journey, name: str) -> str:
    return str(journey.core.read_namespaced_pod(name, TRAINING).status.phase)


def test_it_trains_at_the_plans_clocks_without_a_host_path(journey: Journey) -> None:
    journey.core.create_namespaced_config_map(
        TRAINING, {"metadata": {"name": PHYSICS}, "data": {f"{JOB.name}.csv": PROFILE, "profile.csv": PROFILE}}
    )
    profile = {"configMapRef": {"name": PHYSICS}, "blockingPowerMilliwatts": round(1000 * A100.blocking_power_w)}
    straggler = {"mode": "Ignore"}
    spec = {"profile": profile, "objective": {"type": "MinEnergy"}, "straggler": straggler, "baselineIterations": 0}
    journey.apply(JOB.perseus_job(**spec, points=20))
    journey.apply(*JOB.indexed_job())
    journey.follow(JOB, "PlanApplied")
    for pod in journey.training_pods(JOB):
        [container] = pod.spec.containers
        assert not [volume for volume in pod.spec.volumes if volume.host_path]
        assert container.resources.limits[keys.RESOURCE_AGENT] == "1"
        assert keys.ENV_SOCKET not in {variable.name for variable in container.env}, "the kubelet sets it"
        write = "import os; open('/run/perseus/x', 'w')"
        answer = journey.kubectl(
            *("-n", TRAINING, "exec", pod.metadata.name, "--", "sh", "-c", f'python -c "{write}" 2>&1 || true')
        )
        assert "Read-only file system" in answer
    journey.clocks_are_the_plans(JOB)


def test_socket_and_directory_have_the_label_that_was_asked_for(journey: Journey) -> None:
    directories = [node.root / "run/perseus" for node in journey.cluster.nodes]
    for path in (*directories, *(each / "agent.sock" for each in directories)):
        assert os.getxattr(path, "security.selinux").rstrip(b"\0").decode() == LABEL


def test_the_namespace_refuses_a_host_path(journey: Journey) -> None:
    by_mount = probe("by-mount")
    by_mount["spec"]["volumes"] = [{"name": "perseus", "hostPath": {"path": "/run/perseus"}}]
    with pytest.raises(client.ApiException, match="hostPath"):
        journey.core.create_namespaced_pod(TRAINING, by_mount)


def test_agents_restart(journey: Journey) -> None:
    pods = journey.training_pods(JOB)
    journey.kubectl("-n", AGENTS, "rollout", "restart", "daemonset/perseus-agent")
    journey.rolled_out("daemonset/perseus-agent")
    journey.every_node_offers_the_socket()
    journey.train_on(JOB, pods)


def test_kubelets_restart_twice(journey: Journey) -> None:
    pods = journey.training_pods(JOB)
    for node in journey.cluster.nodes:
        for _ in range(2):
            journey.cluster.signal(node.name, "kubelet", signal.SIGKILL)
            journey.cluster.start(node.name, "kubelet")
    names = [f"after-{node.name}" for node in journey.cluster.nodes]
    bodies: dict[str, dict[str, Any]] = {}
    for name, node in zip(names, journey.cluster.nodes, strict=True):
        body = probe(name, **{keys.RESOURCE_AGENT: "1"})
        body["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node.name}
        bodies[name] = body
        journey.core.create_namespaced_pod(TRAINING, body)

    def runs(name: str) -> bool:
        """A kubelet that knows no plugin yet refuses a pod for good, whose controller would make another."""
        status = journey.core.read_namespaced_pod(name, TRAINING).status
        if status.phase == "Failed":
            journey.say(f"{name}: {status.reason}: {status.message}")
            assert status.reason == "UnexpectedAdmissionError", status
            journey.kubectl("-n", TRAINING, "delete", "pod", name)
            journey.core.create_namespaced_pod(TRAINING, bodies[name])
        assert status.phase == "Running", status
        return True

    for name in names:
        journey.eventually(f"{name} runs", lambda name=name: runs(name), PATIENCE_S)
        assert "agent.sock" in journey.kubectl("-n", TRAINING, "exec", name, "--", "ls", "/run/perseus")
        journey.kubectl("-n", TRAINING, "delete", "pod", name)
    journey.train_on(JOB, pods)


def test_a_container_gets_one_only(journey: Journey) -> None:
    greedy = probe("greedy", **{keys.RESOURCE_AGENT: "9000"})
    journey.core.create_namespaced_pod(TRAINING, greedy)
    journey.eventually("it is refused", lambda: phase(journey, "greedy") == "Failed", PATIENCE_S)
    status = journey.core.read_namespaced_pod("greedy", TRAINING).status
    assert status.reason == "UnexpectedAdmissionError"
    assert "a container may request 1, not 9000" in status.message
    journey.kubectl("-n", TRAINING, "delete", "pod", "greedy")


def test_a_pod_that_only_sleeps_runs_at_the_clock_of_its_job(journey: Journey) -> None:
    mhz = A100.clocks_mhz[len(A100.clocks_mhz) // 2]
    free = journey.gpus().keys() - journey.ranks_by_gpu().keys()
    objective = {"type": "FixedClock", "clockMegahertz": mhz}
    head = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.KIND}
    journey.apply({**head, "metadata": {"name": "fixed", "namespace": TRAINING}, "spec": {"objective": objective}})
    for name in ("sleeper", "short"):
        body = probe(name, **{"nvidia.com/gpu": "1"})
        body["metadata"]["labels"] = {keys.LABEL_JOB: "fixed"}
        if name == "short":
            body["spec"]["containers"][0]["command"] = ["sleep", "20"]
        journey.core.create_namespaced_pod(TRAINING, body)

    def locked() -> list[int]:
        gpus = journey.gpus()
        return [gpus[uuid]["locked_mhz"] for uuid in free if gpus[uuid]["locked_mhz"]]

    journey.eventually("both pods' GPUs are locked", lambda: locked() == [mhz, mhz], PATIENCE_S)
    journey.kubectl("-n", TRAINING, "wait", f"{keys.PLURAL}/fixed", "--for=condition=Ready", "--timeout=60s")
    journey.eventually("the short one ends", lambda: phase(journey, "short") == "Succeeded", PATIENCE_S)
    journey.eventually("its GPU is given back", lambda: locked() == [mhz], PATIENCE_S)
    journey.kubectl("-n", TRAINING, "delete", keys.PLURAL, "fixed")
    journey.eventually("no GPU is locked", lambda: not locked(), PATIENCE_S)
    journey.kubectl("-n", TRAINING, "delete", "pod", "sleeper", "short")


def test_a_node_loses_power(journey: Journey) -> None:
    """All of it ends at once; it boots with its disk and its GPUs' defaults, and what it ran starts again."""
    before = {pod.metadata.uid for pod in journey.training_pods(JOB)}
    node = journey.cluster.nodes[-1]
    assert node.pid is not None
    os.kill(node.pid, signal.SIGKILL)
    journey.eventually("the node is off", lambda: node.pid is None, PATIENCE_S)
    journey.cluster.up(len(journey.cluster.nodes), ipv6=journey.cluster.ipv6, say=journey.say)
    journey.rolled_out("daemonset/perseus-agent")
    journey.every_node_offers_the_socket()
    # The ranks on the other node wait for those that are gone; whoever restarts jobs, as a JobSet, makes the Job anew.
    # Its own controller makes single pods again, ever later after each that a node that has just booted refuses.
    journey.kubectl("-n", TRAINING, "delete", "job", JOB.name, "--cascade=foreground")
    journey.apply(*JOB.indexed_job())

    def started_again() -> bool:
        pods = journey.training_pods(JOB)
        assert len(pods) == JOB.ranks
        assert not {pod.metadata.uid for pod in pods} & before
        assert {pod.status.phase for pod in pods} == {"Running"}
        return True

    journey.eventually("all ranks run again", started_again, PATIENCE_S)
    journey.trains(JOB, 5)
    journey.eventually("the plan is in force", lambda: journey.in_force(JOB), PATIENCE_S)
    journey.clocks_are_the_plans(JOB)


def test_without_an_agent_a_pod_does_not_wait(journey: Journey) -> None:
    nowhere = '{"spec":{"template":{"spec":{"nodeSelector":{"perseus.energy/nowhere":"true"}}}}}'
    journey.kubectl("-n", AGENTS, "patch", "daemonset", "perseus-agent", "--type=merge", "-p", nowhere)
    journey.eventually("no node offers the socket", lambda: not any(journey.offers_of_socket()), PATIENCE_S)
    iteration = journey.iteration(JOB)

    def unchanged() -> bool:
        """The operator may learn of it a moment after the API server."""
        journey.kubectl("-n", TRAINING, "delete", "pod", "early", "--ignore-not-found")
        journey.core.create_namespaced_pod(TRAINING, probe("early", **{"nvidia.com/gpu": "1"}))
        [container] = journey.core.read_namespaced_pod("early", TRAINING).spec.containers
        return keys.RESOURCE_AGENT not in container.resources.limits

    journey.eventually("the request is not added", unchanged, PATIENCE_S)
    journey.eventually("the pod runs", lambda: phase(journey, "early") == "Running", PATIENCE_S)
    journey.trains(JOB, 3)
    assert journey.iteration(JOB) > iteration, "training goes on without agents"
    assert not journey.locked()
