"""Which pods are the workers of a workload: for every kind, with the labels that its controllers put on pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perseus_core import keys
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.workload import WorkloadKind
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.jobs.waiting import absence, silent_pods
from perseus_operator.nodes.node import Rank
from perseus_operator.nodes.workloads import PRESETS, Selection, asks_for_gpu, containers_of, select
from perseus_operator.objects.values import JobRef, Owner, Pod

NAME = "train"


def spec_of(workload: dict[str, Any] | None = None, **changes: Any) -> Any:
    raw: dict[str, Any] = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        **changes,
    }
    return parse_spec(JobSpec, raw | ({"workload": workload} if workload else {}))


def refer(kind: str, name: str = NAME) -> Any:
    return spec_of({"reference": {"kind": kind, "name": name}})


def by(uid: str) -> Owner | None:
    return Owner("batch/v1", "Job", NAME, uid) if uid else None


def pod(
    name: str, labels: dict[str, str], *, owner: str = "", created: str = "2030-01-01T00:00:00Z", gpu: bool = True
) -> Pod:
    return Pod(f"uid-{name}", "ns", name, "node", "gpt3", labels, owner=by(owner), created=created, asks_for_gpu=gpu)


def names(selection: Selection) -> set[str]:
    return {pod.name for pod in selection.pods}


# What the controllers put on pods, by kind: for a workload of that name, one worker, and what is not a worker.
WORKERS: dict[str, list[dict[str, str]]] = {
    "Job": [
        {"batch.kubernetes.io/job-name": NAME, "batch.kubernetes.io/controller-uid": "u", "job-name": NAME,
         "batch.kubernetes.io/job-completion-index": "0"},
    ],
    "JobSet": [
        {"jobset.sigs.k8s.io/jobset-name": NAME, "jobset.sigs.k8s.io/replicatedjob-name": "workers",
         "jobset.sigs.k8s.io/job-index": "0", "jobset.sigs.k8s.io/restart-attempt": "0",
         "batch.kubernetes.io/job-name": f"{NAME}-workers-0"},
    ],
    "PyTorchJob": [
        {"training.kubeflow.org/job-name": NAME, "training.kubeflow.org/replica-type": "master",
         "training.kubeflow.org/replica-index": "0", "training.kubeflow.org/job-role": "master"},
        {"training.kubeflow.org/job-name": NAME, "training.kubeflow.org/replica-type": "worker",
         "training.kubeflow.org/replica-index": "0"},
    ],
    "TrainJob": [
        {"jobset.sigs.k8s.io/jobset-name": NAME, "jobset.sigs.k8s.io/replicatedjob-name": "node",
         "jobset.sigs.k8s.io/restart-attempt": "0"},
    ],
    "MPIJob": [
        {"training.kubeflow.org/job-name": NAME, "training.kubeflow.org/job-role": "worker",
         "training.kubeflow.org/operator-name": "mpi-operator", "training.kubeflow.org/replica-index": "0"},
    ],
    "VolcanoJob": [
        {"volcano.sh/job-name": NAME, "volcano.sh/task-spec": "worker", "volcano.sh/task-index": "0"},
    ],
    "RayJob": [
        {"ray.io/cluster": f"{NAME}-x7k2p", "ray.io/node-type": "worker", "ray.io/group": "gpus"},
    ],
    "RayCluster": [
        {"ray.io/cluster": NAME, "ray.io/node-type": "worker", "ray.io/group": "gpus"},
    ],
    "LeaderWorkerSet": [
        {"leaderworkerset.sigs.k8s.io/name": NAME, "leaderworkerset.sigs.k8s.io/group-index": "0",
         "leaderworkerset.sigs.k8s.io/worker-index": "0"},
        {"leaderworkerset.sigs.k8s.io/name": NAME, "leaderworkerset.sigs.k8s.io/group-index": "0",
         "leaderworkerset.sigs.k8s.io/worker-index": "1"},
    ],
}  # fmt: skip
NOT_WORKERS: dict[str, dict[str, str]] = {
    "TrainJob": {
        "jobset.sigs.k8s.io/jobset-name": NAME,
        "jobset.sigs.k8s.io/replicatedjob-name": "dataset-initializer",
        "jobset.sigs.k8s.io/restart-attempt": "0",
    },
    "MPIJob": {"training.kubeflow.org/job-name": NAME, "training.kubeflow.org/job-role": "launcher"},
    "RayJob": {"ray.io/cluster": f"{NAME}-x7k2p", "ray.io/node-type": "head", "ray.io/group": "headgroup"},
    "RayCluster": {"ray.io/cluster": NAME, "ray.io/node-type": "head", "ray.io/group": "headgroup"},
}
KINDS = [kind.value for kind in WorkloadKind]


def renamed(labels: dict[str, str], name: str) -> dict[str, str]:
    """The same pod of a workload of another name."""
    return {key: name + value[len(NAME) :] if value.startswith(NAME) else value for key, value in labels.items()}


def test_every_kind_has_a_preset_and_pods_here() -> None:
    assert set(PRESETS) == set(WorkloadKind)
    assert set(WORKERS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_workers_of_each_kind(kind: str) -> None:
    workers = [pod(f"w{n}", labels, owner="o") for n, labels in enumerate(WORKERS[kind])]
    others = [pod(f"other{n}", renamed(labels, f"{NAME}-2")) for n, labels in enumerate(WORKERS[kind])]
    chosen = select(refer(kind), [*workers, *others, pod("bare", {"app": NAME})])
    assert names(chosen) == {worker.name for worker in workers}
    assert chosen.excluded == {"belong to another workload": len(others) + 1}


@pytest.mark.parametrize("kind", sorted(NOT_WORKERS))
def test_a_launcher_or_head_is_a_worker_if_it_asks_for_a_gpu(kind: str) -> None:
    worker = pod("w", WORKERS[kind][0], owner="o")
    idle, training = (pod(f"head-{gpu}", NOT_WORKERS[kind], owner="o", gpu=gpu) for gpu in (False, True))
    chosen = select(refer(kind), [worker, idle, training])
    assert names(chosen) == {"w", "head-True"}
    assert chosen.excluded == {"are no workers": 1}


@pytest.mark.parametrize(
    ("cluster", "is_of_it"),
    [
        ("train-x7k2p", True),
        ("train-raycluster-x7k2p", True),
        ("train", False),
        ("train-x7k2p9", False),
        ("train-two-x7k2p", False),
        ("strain-x7k2p", False),
        ("train-large", False),
        ("train-eval1", False),
        ("train-2024a", False),
        ("train-raycluster-large", False),
    ],
)
def test_a_ray_job_is_recognised_by_the_name_of_its_cluster(cluster: str, is_of_it: bool) -> None:
    """Source: ray-project/kuberay issue 707 and pull request 3102: names of clusters, and their random ends."""
    made = pod("w", {"ray.io/cluster": cluster, "ray.io/node-type": "worker"}, owner="o")
    assert bool(select(refer("RayJob"), [made]).pods) is is_of_it


def test_a_name_is_no_pattern() -> None:
    dotted = select(refer("Job", "a.b"), [pod("w", {"batch.kubernetes.io/job-name": "axb"})])
    assert not dotted.pods


# -------------------------------------------------------------------------------------------------------- attempts


def test_the_highest_restart_counts_whichever_is_older() -> None:
    old, new = (WORKERS["JobSet"][0] | {"jobset.sigs.k8s.io/restart-attempt": n} for n in ("9", "10"))
    pods = [pod("new", new, created="2030-01-01T00:00:00Z"), pod("old", old, created="2030-01-02T00:00:00Z")]
    chosen = select(refer("JobSet"), pods)
    assert names(chosen) == {"new"}
    assert chosen.excluded == {"are of an earlier attempt": 1}
    assert chosen.attempt != select(refer("JobSet"), pods[1:]).attempt


@pytest.mark.parametrize("kind", [kind for kind in KINDS if PRESETS[WorkloadKind(kind)].owner_is_attempt])
def test_of_two_owners_the_one_whose_pods_are_younger(kind: str) -> None:
    labels = WORKERS[kind][0]
    pods = [
        pod("a0", labels, owner="z", created="2030-01-01T00:00:00Z"),
        pod("a1", labels, owner="z", created="2030-01-01T00:00:09Z"),
        pod("b0", labels, owner="y", created="2030-01-01T00:01:00Z"),
    ]
    chosen = select(refer(kind), pods)
    assert names(chosen) == {"b0"}
    assert chosen.attempt
    assert chosen.attempt != select(refer(kind), pods[:2]).attempt
    replaced = [*pods[:2], pod("a2", labels, owner="z", created="2030-01-03T00:00:00Z")]
    assert select(refer(kind), replaced).attempt == select(refer(kind), pods[:2]).attempt, "one pod was replaced"


def test_where_attempts_are_not_known_there_is_none() -> None:
    groups = [pod(f"w{n}", WORKERS["LeaderWorkerSet"][0], owner=f"o{n}") for n in range(2)]
    chosen = select(refer("LeaderWorkerSet"), groups)
    assert (len(chosen.pods), chosen.attempt) == (2, "")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.sampled_from("ab"), st.booleans()), max_size=12)
)
def test_no_pod_is_lost_or_made_up(drawn: list[tuple[str, int, str, bool]]) -> None:
    pods = []
    for number, (kind, restart, owner, gpu) in enumerate(drawn):
        labels = WORKERS[kind][-1] | ({"jobset.sigs.k8s.io/restart-attempt": str(restart)} if "Set" in kind else {})
        pods.append(pod(f"p{number}", labels, owner=owner, gpu=gpu))
    for kind in KINDS:
        chosen = select(refer(kind), pods)
        assert len(chosen.pods) + sum(chosen.excluded.values()) == len(pods)
        assert set(chosen.pods) <= set(pods)


# ------------------------------------------------------------------------------------------------ the other ways


def test_labels_or_nothing() -> None:
    pods = [pod("a", {"team": "x", "app": "t"}), pod("b", {"team": "y"})]
    chosen = select(spec_of({"selector": {"matchLabels": {"team": "x"}}}), pods)
    assert (names(chosen), chosen.excluded) == ({"a"}, {"belong to another workload": 1})
    assert names(select(spec_of(), pods)) == {"a", "b"}
    assert names(select(None, pods)) == {"a", "b"}
    assert select(spec_of(suspend=True), pods).pods == ()


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ({}, "spec.workload: exactly one of selector and reference must be set"),
        (
            {"selector": {"matchLabels": {"a": "b"}}, "reference": {"kind": "Job", "name": "x"}},
            "spec.workload: exactly one of selector and reference must be set",
        ),
        (
            {"reference": {"kind": "Deployment", "name": "x"}},
            "spec.workload.reference.kind: must be one of Job, JobSet",
        ),
        (
            {"reference": {"kind": "Job", "name": "UPPER"}},
            "spec.workload.reference.name: must be the name of a workload",
        ),
    ],
)
def test_a_wrong_reference_is_named(workload: dict[str, Any], message: str) -> None:
    raw = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        "workload": workload,
    }
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(JobSpec, raw)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("spec", "asks"),
    [
        ({"containers": [{"name": "a"}]}, False),
        ({"containers": [{"resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}]}, False),
        ({"containers": [{}, {"resources": {"limits": {"nvidia.com/gpu": 8}}}]}, True),
        ({"containers": [{"resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}]}, True),
        ({"containers": [{"resources": {"limits": {"amd.com/gpu": "1"}}}]}, True),
        ({"containers": [{}], "resourceClaims": [{"name": "gpu"}]}, True),
        ({}, False),
    ],
)
def test_which_pods_ask_for_a_gpu(spec: dict[str, Any], asks: bool) -> None:
    assert asks_for_gpu(spec) is asks


def test_containers_are_listed_of_pods_that_have_several() -> None:
    def status(*ids: str) -> list[dict[str, str]]:
        return [{"name": f"c{number}", **({"containerID": each} if each else {})} for number, each in enumerate(ids)]

    assert containers_of({}) == containers_of({"containerStatuses": status("containerd://aa")}) == frozenset()
    both = {"containerStatuses": status("containerd://aa", "cri-o://bb", "")}
    assert containers_of(both) == {("aa", "c0"), ("bb", "c1")}, "the third has not started"
    debugged = {
        "containerStatuses": status("aa"),
        "ephemeralContainerStatuses": [{"name": "d", "containerID": "x://dd"}],
    }
    assert containers_of(debugged) == {("aa", "c0"), ("dd", "d")}


def raw_pod(**metadata: Any) -> dict[str, Any]:
    about = {"uid": "u", "name": "p", "namespace": "ns", "labels": {keys.LABEL_JOB: "gpt3"}, **metadata}
    return {"metadata": about, "spec": {"nodeName": "n", "containers": [{"name": "a"}]}, "status": {"phase": "Running"}}


def test_a_pod_that_is_being_deleted_is_none_any_more() -> None:
    named = {"apiVersion": "batch/v1", "kind": "Job", "name": NAME}
    owners = [{**named, "uid": "x", "controller": False}, {**named, "uid": "y", "controller": True}]
    seen = pod_of(raw_pod(ownerReferences=owners, creationTimestamp="2030-01-01T00:00:00Z"))
    assert seen is not None
    assert (seen.owner_uid, seen.created, seen.asks_for_gpu) == ("y", "2030-01-01T00:00:00Z", False)
    assert pod_of(raw_pod(deletionTimestamp="2030-01-01T00:00:00Z")) is None


# -------------------------------------------------------------------------------------------------- what is said


def absence_of(state: Training) -> Explanation:
    return absence(state.job)


def state_of(spec: Any, pods: list[Pod]) -> Training:
    state = Training(PerseusJob(JobRef("ns", "gpt3", "uid"), generation=1))
    state.spec_accepted(spec)
    state.pods_observed(select(spec, pods), {"node": "1.2.3.4:5"}, wall_s=0.0)
    return state


def test_why_no_pod_runs_is_said() -> None:
    assert absence_of(state_of(spec_of(), [])).message == "No pod of the job is running."
    suspended = absence_of(state_of(spec_of(suspend=True), [pod("w", {})]))
    assert suspended.reason is Reason.SUSPENDED
    stranger = pod("w", {"app": "other"})
    said = absence_of(state_of(refer("PyTorchJob"), [stranger])).message
    assert said == (
        "No worker of PyTorchJob train with the label of the job is running: of the pods that opted in, 1 belong to"
        " another workload; PyTorchJob train may be suspended (spec.runPolicy.suspend)."
    )
    assert "suspend" not in absence_of(state_of(refer("VolcanoJob"), [])).message, "it has no such field"


def failed_pod(name: str, created: str, **status: Any) -> dict[str, Any]:
    raw = raw_pod(name=name, uid=name, creationTimestamp=created)
    return raw | {"status": {"phase": "Failed"} | status}


def test_a_pod_that_failed_is_named_with_how_it_ended() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    done = {"terminated": {"exitCode": 0, "reason": "Completed"}}
    containers = [{"name": "sidecar", "state": done}, {"name": "trainer", "state": ended}]
    older = pod_of(failed_pod("w0", "2030-01-01T00:00:00Z", containerStatuses=containers))
    newer = pod_of(failed_pod("w1", "2030-01-01T00:01:00Z", reason="Evicted"))
    assert older is not None
    assert newer is not None
    state = state_of(spec_of(), [newer, older])
    assert not state.nodes, "a failed pod runs on no node"
    assert absence_of(state).message == (
        "No pod of the job is running: of the pods that opted in, 2 failed, and kubectl logs -n ns w1 may say why"
        " (Evicted)."
    )
    assert "suspend" not in absence_of(state_of(refer("PyTorchJob"), [older])).message, "the log says why, not that"
    oom = absence_of(state_of(spec_of(), [older])).message
    assert oom.endswith("kubectl logs -n ns w0 may say why (container trainer exited with code 137, OOMKilled).")
    assert names(select(spec_of(), [older, pod("a", {})])) == {"a"}


def ended(name: str, created: str, phase: str = "Succeeded", **labels: str) -> Pod:
    raw = raw_pod(name=name, uid=name, creationTimestamp=created)
    raw["metadata"]["labels"] |= labels
    seen = pod_of(raw | {"status": {"phase": phase}})
    assert seen is not None
    return seen


def test_a_job_has_finished_when_its_pods_have_succeeded_and_none_failed_after_them() -> None:
    early, late = "2030-01-01T00:00:00Z", "2030-01-01T00:01:00Z"
    done = [ended("a", early), ended("b", early)]
    assert select(spec_of(), done).finished
    assert select(spec_of(), done).pods == ()
    assert not select(spec_of(), []).finished, "there may be pods to come"
    assert not select(spec_of(), [*done, pod("c", {})]).finished, "one still runs"
    assert not select(spec_of(suspend=True), done).finished
    again = [ended("a", early), ended("b", early, "Failed"), ended("b-2", late)]
    assert select(spec_of(), again).finished, "the one that failed was made again and succeeded"
    for created in (early, late):
        assert not select(spec_of(), [ended("a", early), ended("b", created, "Failed")]).finished
    worker, launcher = {"training.kubeflow.org/job-name": NAME}, {"training.kubeflow.org/job-role": "launcher"}
    mpi = [ended("l", late, **worker, **launcher), pod("w", worker)]
    assert not select(refer("MPIJob"), mpi).finished
    assert not select(refer("MPIJob"), mpi[:1]).finished, "a launcher is no worker"


def test_a_finished_job_stays_so_when_its_pods_are_deleted_and_begins_again_with_new_ones() -> None:
    state = state_of(spec_of(), [])
    state.pods_observed(Selection((), finished=True), {}, wall_s=1000.0)
    assert absence_of(state).reason is Reason.FINISHED
    state.pods_observed(Selection((), finished=True), {}, wall_s=2000.0)
    assert state.job.end.finished_at_s == 1000.0
    state.pods_observed(Selection(()), {}, wall_s=3000.0)
    assert state.job.end.finished_at_s == 1000.0
    state.pods_observed(Selection((pod("again", {}),)), {}, wall_s=3000.0)
    assert state.job.end.finished_at_s is None
    state.pods_observed(Selection(()), {}, wall_s=3000.0)
    assert absence_of(state).reason is Reason.NO_PODS


def test_pods_without_a_rank_are_named() -> None:
    pods = [pod(f"w{n}", WORKERS["Job"][0], owner="o") for n in range(5)]
    state = state_of(refer("Job"), pods)
    assert silent_pods(state.nodes) == "; none from pod w0, w1, w2 and 2 more"
    node = state.nodes["node"]
    for stage, each in enumerate(pods):
        state.rank_joined(node, Rank(each.uid, f"GPU-{stage}", 0, stage, 0, 1, 0))
    assert silent_pods(state.nodes) == ""


def test_another_attempt_begins_with_an_empty_history() -> None:
    first = [pod("a", WORKERS["Job"][0], owner="one")]
    state = state_of(refer("Job"), first)
    history, attempt = state.history, state.job.attempt
    state.pods_observed(Selection(tuple(first), attempt), {}, wall_s=0.0)
    assert state.history is history, "the same attempt seen again changes nothing"
    state.pods_observed(Selection(()), {}, wall_s=0.0)
    assert (state.history, state.job.attempt) == (history, attempt), (
        "pods gone, perhaps suspended: nothing is known anew"
    )
    second = select(refer("Job"), [pod("b", WORKERS["Job"][0], owner="two")])
    state.pods_observed(second, {}, wall_s=0.0)
    assert state.history is not history
    assert state.job.attempt == second.attempt
