"""GPUs as dynamic resources (DRA) on real kubelets: who holds one is what PodResources says of claims.

A JobSet that waits in a queue of Kueue trains in a namespace that enforces *restricted*, on GPUs that it has by a
template of claims. The chapters depend on one another: the job that the first one starts trains on.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controllers import CLAIMED, install_for_workloads, job_set, queued
from installation import PATIENCE_S
from journey import AGENTS, Journey
from training import CONFINED, RESTRICTED, TRAINING, Training
from training_job import TRAINER_IMAGE

from perseus_core import keys
from perseus_sim.gpus.dynamic_resources import DRIVER, SLICES

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

JOB = Training("by-claims", stages=2, pipelines=2, microbatches=4)
WAITING = Training("waits", stages=2, pipelines=1, microbatches=4)
"""A GPU more than the queue has for it."""
EXTENDED = Training("by-resource", stages=2, pipelines=1, microbatches=4)
TEMPLATE = "one-gpu"
ATTACKER = (Path(__file__).parent / "attacker.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def journey(job_sets_and_queues: None, cleared_journey: Journey) -> Iterator[Journey]:
    journey = cleared_journey
    install_for_workloads(journey, JOB, EXTENDED, flags=("--set", "simulatedGpus.offeredAs=DynamicResources"))
    journey.kubectl("label", "namespace", TRAINING, RESTRICTED)
    journey.every_node_offers_the_socket()
    with queued(journey, {"cpu": "16", CLAIMED: str(JOB.ranks + WAITING.ranks - 1)}):
        yield journey


def claiming(pod: dict[str, Any]) -> dict[str, Any]:
    """Have a pod's container get its GPU by a claim of its own."""
    [container] = pod["containers"]
    del container["resources"]["limits"]
    container["resources"]["claims"] = [{"name": "gpu"}]
    pod["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": TEMPLATE}]
    return pod


def attack(journey: Journey, name: str, victim: Any, gpu: str, **more: Any) -> dict[str, str]:
    """Claim a GPU at the agent from a pod beside its holder, with labels that make the lease name it, too."""
    # With all of them the Job's controller would take the pod for one of its own, and delete it.
    labels = {name: value for name, value in victim.metadata.labels.items() if "perseus" in name or "jobset" in name}
    container = {
        "name": "attacker",
        "image": TRAINER_IMAGE,
        "command": ["python", "-c", ATTACKER, "claim", gpu],
        "resources": {"limits": {keys.RESOURCE_AGENT: "1"}, **more.pop("resources", {})},
        "securityContext": CONFINED,
    }
    body = {
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": victim.spec.node_name},
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "containers": [container],
            **more,
        },
    }
    journey.core.create_namespaced_pod(TRAINING, body)

    def line() -> str:
        return str(journey.core.read_namespaced_pod_log(name, TRAINING) or "").strip()

    answer: dict[str, str] = json.loads(journey.eventually(f"{name} has tried", line, PATIENCE_S))
    journey.say(f"{name}: {answer}")
    journey.kubectl("-n", TRAINING, "delete", "pod", name, "--grace-period=1")
    return answer


def gpu_of(journey: Journey, pod: Any) -> str:
    """The UUID of a pod's GPU, as its container sees it."""
    printed = journey.kubectl("-n", TRAINING, "exec", pod.metadata.name, "--", "env")
    [uuid] = [line.partition("=")[2] for line in printed.splitlines() if line.startswith("PERSEUS_SIM_GPU_")]
    return uuid


def wait_until_published(journey: Journey) -> None:
    """Every node publishes its GPUs."""

    def published() -> bool:
        slices = json.loads(journey.kubectl("get", "--raw", SLICES))["items"]
        nodes = {each["spec"]["nodeName"]: len(each["spec"]["devices"]) for each in slices}
        assert nodes == {node.name: 8 for node in journey.cluster.nodes}
        return all(each["spec"]["driver"] == DRIVER for each in slices)

    journey.eventually("the GPUs are published", published, PATIENCE_S)


def test_every_node_publishes_its_gpus_and_offers_no_other_way(journey: Journey) -> None:
    wait_until_published(journey)
    allocatable = [node.status.allocatable for node in journey.core.list_node().items]
    assert {each.get("nvidia.com/gpu", "0") for each in allocatable} == {"0"}


def test_a_queued_job_set_trains_at_the_plans_clocks(journey: Journey) -> None:
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
    journey.apply(
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": TEMPLATE, "namespace": TRAINING},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        }
    )
    body = job_set(JOB)
    claiming(body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])
    journey.apply(body)
    journey.follow(JOB, "PlanApplied")
    journey.clocks_are_the_plans(JOB)
    for pod in journey.training_pods(JOB):
        assert not [volume for volume in pod.spec.volumes if volume.host_path]
        [container] = pod.spec.containers
        assert "nvidia.com/gpu" not in (container.resources.limits or {})
    assert len({gpu_of(journey, pod) for pod in journey.training_pods(JOB)}) == JOB.ranks


def test_kueue_counts_claims(journey: Journey) -> None:
    def workload(job: Training) -> dict[str, Any]:
        listed = json.loads(journey.kubectl("-n", TRAINING, "get", "workloads", "-o", "json"))["items"]
        [found] = [each for each in listed if each["metadata"]["ownerReferences"][0]["name"] == job.name]
        return dict(found)

    [admitted] = workload(JOB)["status"]["admission"]["podSetAssignments"]
    assert admitted["resourceUsage"][CLAIMED] == str(JOB.ranks)
    body = job_set(WAITING)
    claiming(body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])
    journey.apply(body)

    def refused() -> str:
        conditions = workload(WAITING).get("status", {}).get("conditions", ())
        return next((str(each["message"]) for each in conditions if each["type"] == "QuotaReserved"), "")

    message = journey.eventually("it waits", refused, PATIENCE_S)
    assert f"insufficient unused quota for {CLAIMED}" in message
    assert not journey.training_pods(WAITING)
    journey.kubectl("-n", TRAINING, "delete", "jobset", WAITING.name)


def test_a_pod_without_a_claim_is_refused(journey: Journey) -> None:
    victim = journey.training_pods(JOB)[0]
    answer = attack(journey, "without", victim, gpu_of(journey, victim))
    assert answer["answer"] in ("GPU_NOT_OWNED", "DISMISSED")


def test_a_pod_with_another_claim_is_refused(journey: Journey) -> None:
    victim = journey.training_pods(JOB)[0]
    claim = [{"name": "gpu", "resourceClaimTemplateName": TEMPLATE}]
    own = {"claims": [{"name": "gpu"}]}
    answer = attack(journey, "other", victim, gpu_of(journey, victim), resourceClaims=claim, resources=own)
    assert answer["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    journey.train_on(JOB, journey.training_pods(JOB))


def test_a_claim_that_two_pods_share_is_driven_for_neither(journey: Journey) -> None:
    """Whoever may make pods in the namespace may name a claim of it; clocks then belong to nobody."""
    pods = journey.training_pods(JOB)
    [status] = pods[0].status.resource_claim_statuses
    claim = [{"name": "gpu", "resourceClaimName": status.resource_claim_name}]
    own = {"claims": [{"name": "gpu"}]}
    answer = attack(journey, "sharing", pods[0], gpu_of(journey, pods[0]), resourceClaims=claim, resources=own)
    assert answer["answer"] in ("GPU_NOT_OWNED", "DISMISSED")
    journey.train_on(JOB, pods)


def test_drivers_kubelets_and_agents_restart(journey: Journey) -> None:
    pods = journey.training_pods(JOB)
    for name in ("perseus-gpu-sim", "perseus-agent"):
        journey.kubectl("-n", AGENTS, "rollout", "restart", f"daemonset/{name}")
        journey.rolled_out(f"daemonset/{name}")
    for node in journey.cluster.nodes:
        journey.cluster.signal(node.name, "kubelet", signal.SIGKILL)
        journey.cluster.start(node.name, "kubelet")
    journey.eventually("its log can be read again", lambda: journey.iteration(JOB) >= 0, PATIENCE_S)
    journey.train_on(JOB, pods)
    wait_until_published(journey)


def test_pods_that_ask_for_the_extended_resource_get_theirs_by_the_class(journey: Journey) -> None:
    """Nothing in them says that their GPUs are dynamic resources."""
    journey.every_node_offers_the_socket()
    journey.apply(*EXTENDED.unmodified_job())
    journey.follow(EXTENDED, "PlanApplied")
    for pod in journey.training_pods(EXTENDED):
        assert pod.spec.containers[0].resources.limits["nvidia.com/gpu"] == "1"
        assert pod.status.extended_resource_claim_status
    journey.kubectl("-n", TRAINING, "delete", "job", EXTENDED.name)


def test_what_is_deleted_gives_its_gpus_back(journey: Journey) -> None:
    journey.kubectl("-n", TRAINING, "delete", "jobset", JOB.name)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)
    journey.eventually(
        "no claim is left",
        lambda: not journey.read("-n", TRAINING, "get", "resourceclaims")["items"],
        PATIENCE_S,
    )
