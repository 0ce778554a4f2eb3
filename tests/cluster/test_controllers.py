"""Workloads that real controllers make: a JobSet waits for quota, is evicted, restarts, is preempted and is deleted.

The namespace has a class, so that no PerseusJob is written. The chapters depend on one another.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controllers import (
    JOB_SET_API,
    QUEUE,
    URGENT,
    has_user_namespaces,
    install_for_workloads,
    job_set,
    queued,
    restarting_in_place,
)
from installation import PATIENCE_S, PROGRAMS, find
from journey import Journey
from kubernetes import client
from training import TRAINING, Training

from perseus_core import keys

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

FIRST, SECOND = (Training(name, stages=4, pipelines=1, microbatches=4) for name in ("first", "second"))
ELASTIC = Training("elastic", stages=2, pipelines=1, microbatches=4)
PROFILE = "shared"


@pytest.fixture(scope="module")
def journey(job_sets_and_queues: None, cleared_journey: Journey) -> Iterator[Journey]:
    journey = cleared_journey
    install_for_workloads(journey, FIRST, SECOND, ELASTIC)
    with queued(journey, {"cpu": "8", "nvidia.com/gpu": str(FIRST.ranks)}):
        yield journey


def test_root_in_the_operators_pod_is_nobody_on_its_node(journey: Journey) -> None:
    if not has_user_namespaces(journey):
        pytest.skip(
            "the nodes' runc gives pods no user namespace: apt-get install libseccomp-dev, then make the cluster"
        )
    [operator] = journey.pods("operator")
    maps = [Path(f"/proc/{pid}/uid_map").read_text() for pid in find(operator, PROGRAMS["operator"])]
    assert maps
    for each in maps:
        inside, outside, _ = map(int, each.split())
        assert (inside, outside > 65535) == (0, True), "no user of the node has such a number"


def perseus_jobs(journey: Journey) -> dict[str, Any]:
    found = journey.read("-n", TRAINING, "get", keys.PLURAL)["items"]
    return {each["metadata"]["name"]: each for each in found}


def workload(journey: Journey, job: Training) -> Any:
    """Kueue's object of a JobSet."""
    for found in journey.read("-n", TRAINING, "get", "workloads.kueue.x-k8s.io")["items"]:
        if any(owner["name"] == job.name for owner in found["metadata"]["ownerReferences"]):
            return found
    raise AssertionError(f"Kueue has no workload of {job.name}")


def set_active(journey: Journey, job: Training, *, active: bool) -> None:
    name = workload(journey, job)["metadata"]["name"]
    patch = f'{{"spec":{{"active":{str(active).lower()}}}}}'
    journey.say(f"$ kubectl patch workload {name} -p '{patch}'      # {job.name}")
    journey.kubectl("-n", TRAINING, "patch", "workloads.kueue.x-k8s.io", name, "--type=merge", "-p", patch)


def test_an_admitted_job_set_is_planned_and_owns_its_job(journey: Journey) -> None:
    journey.apply(job_set(FIRST, PROFILE))
    journey.eventually("its PerseusJob is made", lambda: FIRST.name in perseus_jobs(journey), PATIENCE_S)
    journey.follow(FIRST, "PlanApplied")
    journey.clocks_are_the_plans(FIRST)
    [owner] = perseus_jobs(journey)[FIRST.name]["metadata"]["ownerReferences"]
    uid = journey.read("-n", TRAINING, "get", "jobset", FIRST.name)["metadata"]["uid"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("JobSet", FIRST.name, uid)
    reference = perseus_jobs(journey)[FIRST.name]["spec"]["workload"]["reference"]
    assert reference == {"kind": "JobSet", "name": FIRST.name}


def test_a_job_set_that_waits_for_quota_costs_nothing(journey: Journey) -> None:
    journey.apply(job_set(SECOND, PROFILE))
    journey.eventually("Kueue has queued it", lambda: workload(journey, SECOND), PATIENCE_S)
    assert journey.read("-n", TRAINING, "get", "jobset", SECOND.name)["spec"]["suspend"] is True
    assert SECOND.name not in perseus_jobs(journey)


def test_an_evicted_job_set_gives_its_clocks_back_and_the_next_one_needs_no_sweep(journey: Journey) -> None:
    set_active(journey, FIRST, active=False)
    journey.eventually("the second one is planned", lambda: journey.in_force(SECOND), PATIENCE_S)
    journey.clocks_are_the_plans(SECOND)
    assert journey.condition(FIRST, "AgentsReady")[1] == "NoPods"
    assert journey.condition(FIRST, "Active")[0] == "False"
    assert set(sweeps(journey)) == {FIRST.name}, "the second one uses the profile of the first"


def sweeps(journey: Journey) -> list[str]:
    """Names of the PerseusJobs that have begun to measure a profile, as often as they have."""
    events = journey.core.list_namespaced_event(TRAINING).items
    return [event.involved_object.name for event in events if event.reason == "Profiling"]


def test_a_job_set_that_is_admitted_again_goes_on_without_a_sweep(journey: Journey) -> None:
    before = sweeps(journey)
    journey.kubectl("-n", TRAINING, "delete", "jobset", SECOND.name)
    journey.eventually("its PerseusJob goes with it", lambda: SECOND.name not in perseus_jobs(journey), PATIENCE_S)
    set_active(journey, FIRST, active=True)
    journey.eventually("the plan is in force again", lambda: journey.in_force(FIRST), PATIENCE_S)
    assert sweeps(journey) == before


def test_a_restart_of_the_job_set_is_another_attempt(journey: Journey) -> None:
    before = {pod.metadata.uid for pod in journey.training_pods(FIRST)}
    for pid in find(journey.training_pods(FIRST)[0], PROGRAMS["trainer"]):
        os.kill(pid, signal.SIGKILL)
    api = client.CustomObjectsApi(journey.core.api_client)

    def restarts() -> int:
        found: Any = api.get_namespaced_custom_object(*JOB_SET_API.split("/"), TRAINING, "jobsets", FIRST.name)
        return int(found.get("status", {}).get("restarts", 0))

    journey.eventually("the JobSet has restarted", lambda: restarts() >= 1, PATIENCE_S)
    journey.eventually(
        "all pods are new", lambda: not before & {p.metadata.uid for p in journey.training_pods(FIRST)}, PATIENCE_S
    )
    journey.eventually("the plan is in force again", lambda: journey.in_force(FIRST), PATIENCE_S)
    journey.clocks_are_the_plans(FIRST)


def test_a_more_urgent_job_set_takes_the_gpus_and_gives_them_back(journey: Journey) -> None:
    journey.apply(job_set(SECOND, PROFILE, URGENT))
    journey.eventually("the urgent one is planned", lambda: journey.in_force(SECOND), PATIENCE_S)
    evicted = {each["type"]: each for each in workload(journey, FIRST)["status"]["conditions"]}["Evicted"]
    assert (evicted["status"], evicted["reason"]) == ("True", "Preempted")
    assert journey.condition(FIRST, "Active")[0] == "False"
    journey.clocks_are_the_plans(SECOND)
    journey.kubectl("-n", TRAINING, "delete", "jobset", SECOND.name)
    journey.eventually("the first one is in force again", lambda: journey.in_force(FIRST), PATIENCE_S)
    journey.clocks_are_the_plans(FIRST)


def test_what_is_deleted_leaves_nothing(journey: Journey) -> None:
    journey.kubectl("-n", TRAINING, "delete", "jobset", FIRST.name)
    journey.eventually("no PerseusJob is left", lambda: not perseus_jobs(journey), PATIENCE_S)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)
    stored = journey.read("-n", TRAINING, "get", keys.PROFILE_PLURAL)["items"]
    assert [each["metadata"]["name"] for each in stored] == [PROFILE], "it was named, so it stays"


def test_a_restart_in_place_keeps_the_pods(journey: Journey) -> None:
    journey.apply(*restarting_in_place(job_set(SECOND, PROFILE)))
    journey.eventually("its PerseusJob is made", lambda: SECOND.name in perseus_jobs(journey), PATIENCE_S)
    journey.follow(SECOND, "PlanApplied")
    journey.clocks_are_the_plans(SECOND)
    before, begun = containers(journey, SECOND), sweeps(journey)
    for pid in find(journey.training_pods(SECOND)[0], PROGRAMS["trainer"]):
        os.kill(pid, signal.SIGKILL)

    def restarted() -> bool:
        now = containers(journey, SECOND)
        assert now.keys() == before.keys(), "the pods are the same"
        return all(now[uid] and now[uid] != before[uid] for uid in now)

    journey.eventually("all containers are new", restarted, PATIENCE_S)
    journey.say("all containers are new")
    journey.eventually("the plan is in force again", lambda: journey.in_force(SECOND), PATIENCE_S)
    journey.clocks_are_the_plans(SECOND)
    assert containers(journey, SECOND).keys() == before.keys()
    assert sweeps(journey) == begun
    journey.kubectl("-n", TRAINING, "delete", "jobset", SECOND.name)
    journey.eventually("no PerseusJob is left", lambda: not perseus_jobs(journey), PATIENCE_S)


def containers(journey: Journey, job: Training) -> dict[str, str]:
    """The running container of each pod; empty where none runs."""
    found = {}
    for pod in journey.training_pods(job):
        [status] = pod.status.container_statuses
        found[pod.metadata.uid] = status.container_id if status.state.running else ""
    return found


def elastic_job() -> list[Any]:
    """An indexed Job that Kueue lets grow."""
    service, job = ELASTIC.unmodified_job()
    labels, annotations = {"kueue.x-k8s.io/queue-name": QUEUE}, {"kueue.x-k8s.io/elastic-job": "true"}
    job["metadata"] |= {"labels": labels, "annotations": annotations}
    return [service, elastic(job, job["spec"])]


def elastic_job_set() -> list[Any]:
    workload = job_set(ELASTIC)
    del workload["metadata"]["labels"]  # Kueue lets no JobSet grow
    return [elastic(workload, workload["spec"]["replicatedJobs"][0]["template"]["spec"])]


def elastic(workload: Any, job: Any) -> Any:
    """Let the job's program train as many pipelines as there are."""
    job["template"]["metadata"]["annotations"] = {keys.ANNOTATION_PROFILE: ELASTIC.name}
    job["template"]["spec"]["containers"][0]["args"].append("--elastic")
    return workload


@pytest.mark.parametrize(
    ("manifests", "kind", "path"),
    [(elastic_job, "job", "/spec"), (elastic_job_set, "jobset", "/spec/replicatedJobs/0/template/spec")],
    ids=["Job", "JobSet"],
)
def test_a_plan_follows_a_workload_that_grows_and_shrinks(
    journey: Journey, manifests: Callable[[], list[Any]], kind: str, path: str
) -> None:
    def resize(pipelines: int) -> None:
        fields = ("parallelism", "completions")
        size = pipelines * ELASTIC.stages
        patch = json.dumps([{"op": "replace", "path": f"{path}/{field}", "value": size} for field in fields])
        journey.say(f"$ kubectl patch {kind} {ELASTIC.name} --type=json -p '{patch}'")
        journey.kubectl("-n", TRAINING, "patch", kind, ELASTIC.name, "--type=json", "-p", patch)

    def planned(pipelines: int) -> None:
        def shaped() -> bool:
            return journey.in_force(ELASTIC) and journey.status(ELASTIC)["shape"]["dataParallel"] == pipelines

        journey.eventually(f"the plan of {pipelines} pipelines is in force", shaped, PATIENCE_S)
        journey.clocks_are_the_plans(replace(ELASTIC, pipelines=pipelines))

    journey.apply(*manifests())
    journey.eventually("its PerseusJob is made", lambda: ELASTIC.name in perseus_jobs(journey), PATIENCE_S)
    journey.follow(ELASTIC, "PlanApplied")
    planned(1)
    begun = sweeps(journey)
    resize(2)
    planned(2)
    if kind == "job":
        resize(3)
        journey.eventually("the third pipeline waits for quota", lambda: len(gated(journey)) == 2, PATIENCE_S)
        planned(2)
        assert f"{2 * ELASTIC.stages} pods" in journey.condition(ELASTIC, "Active")[2]
    resize(1)
    planned(1)
    assert sweeps(journey) == begun, "a profile and a frontier are of one pipeline, whatever their number"
    journey.kubectl("-n", TRAINING, "delete", f"{kind},service", ELASTIC.name, "--ignore-not-found")
    journey.eventually("no PerseusJob is left", lambda: not perseus_jobs(journey), PATIENCE_S)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)


def gated(journey: Journey) -> list[Any]:
    """Pods that Kueue does not let the scheduler see yet."""
    return [pod for pod in journey.core.list_namespaced_pod(TRAINING).items if pod.spec.scheduling_gates]
