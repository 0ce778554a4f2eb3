"""Workers of the solver service as a Job under Kueue: the sample waits for quota, takes part of a queue of solves, and
completes once there is no more work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from controllers import queue, queued
from installation import PATIENCE_S, SYSTEM
from journey import AGENTS, Journey
from solves import Solves

pytestmark = pytest.mark.timeout(900)

SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "solver-job.yaml"
PODS, IDLE_S = 2, 20
NONE = {"cpu": "0", "memory": "0"}
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true"),
    *("--set", "solver.enabled=true,solver.replicas=1,solver.resources.requests.cpu=100m"),
)


def sample() -> Any:
    """The sample as it stands, of as many pods as two nodes have room for, which wait for work less long."""
    job = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
    job["spec"] |= {"parallelism": PODS, "completions": PODS}
    [solver] = job["spec"]["template"]["spec"]["containers"]
    [idle] = [word for word in solver["args"] if word.startswith("--exit-when-idle-s=")]
    solver["args"][solver["args"].index(idle)] = f"--exit-when-idle-s={IDLE_S}"
    return job


JOB = sample()
NAME, QUEUE = JOB["metadata"]["name"], JOB["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]


@pytest.fixture(scope="module")
def journey(job_sets_and_queues: None, cleared_journey: Journey) -> Iterator[Journey]:
    cleared_journey.install(*INSTALL)
    with queued(cleared_journey, NONE, SYSTEM, QUEUE):
        yield cleared_journey


def workload(journey: Journey) -> dict[str, str]:
    """The conditions of Kueue's object of the Job."""
    for found in journey.read("-n", SYSTEM, "get", "workloads.kueue.x-k8s.io")["items"]:
        if any(owner["name"] == NAME for owner in found["metadata"]["ownerReferences"]):
            return {each["type"]: each["status"] for each in found.get("status", {}).get("conditions", ())}
    return {}


def status(journey: Journey) -> dict[str, Any]:
    """Of the Job."""
    return dict(journey.read("-n", SYSTEM, "get", "job", NAME).get("status", {}))


def pods(journey: Journey) -> list[str]:
    listed = journey.core.list_namespaced_pod(SYSTEM, label_selector=f"batch.kubernetes.io/job-name={NAME}").items
    return [pod.metadata.name for pod in listed]


def test_a_batch_waits_for_quota_solves_and_ends(journey: Journey) -> None:
    solves, quota = Solves(journey, jobs=24, microbatches=192), requested()
    journey.apply(JOB)
    journey.eventually("it waits for quota", lambda: workload(journey).get("QuotaReserved") == "False", PATIENCE_S)
    solves.ask()
    assert journey.read("-n", SYSTEM, "get", "job", NAME)["spec"]["suspend"] is True
    assert pods(journey) == []

    journey.apply(*queue(quota, SYSTEM, QUEUE))
    journey.eventually("every pod runs", lambda: len(pods(journey)) == PODS, PATIENCE_S)
    journey.say(f"{QUEUE} has {quota}: {PODS} pods")
    journey.eventually("every frontier is solved", solves.ended, PATIENCE_S)
    shares = {name: int(solves.done.get(name, 0)) for name in pods(journey)}
    journey.say(f"{solves.jobs} frontiers were solved, of which by pods of the Job: {shares}")
    assert len(shares) == PODS
    assert all(shares.values())
    assert sum(solves.done.values()) == solves.jobs

    journey.eventually("it has completed", lambda: status(journey).get("completionTime"), PATIENCE_S)
    ended = status(journey)
    assert (ended["succeeded"], ended.get("failed", 0)) == (PODS, 0)
    journey.eventually("its quota is free", lambda: workload(journey).get("Finished") == "True", PATIENCE_S)
    assert journey.restarts() == {}


def requested() -> dict[str, str]:
    """What the pods of the Job request together."""
    [solver] = JOB["spec"]["template"]["spec"]["containers"]
    requests = solver["resources"]["requests"]
    return {"cpu": str(PODS * int(requests["cpu"])), "memory": f"{PODS * int(requests['memory'].removesuffix('Mi'))}Mi"}
