"""Which pods of a namespace with an EnergyClass are labelled, and with which name of a PerseusJob."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from perseus_core import keys
from perseus_operator.api.workload import WorkloadKind
from perseus_operator.clients.kube.pods import owner_of
from perseus_operator.nodes.workloads import workload_of
from perseus_operator.servers.class_labels import label_pod

JOB_SET = "jobset.sigs.k8s.io"
GPU = {"limits": {"nvidia.com/gpu": "8"}}
HASH = "pod-template-hash"


def serves(energy_class: str) -> bool:
    """Of the classes here one has ``spec.serving``."""
    return energy_class == "serving"


def pod(owner: tuple[str, str, str] | None, labels: dict[str, str], **metadata: Any) -> dict[str, Any]:
    owners = (
        [{"apiVersion": owner[0], "kind": owner[1], "name": owner[2], "uid": "u-1", "controller": True}]
        if owner
        else []
    )
    about = {"generateName": "x-", "labels": labels, "ownerReferences": owners, **metadata}
    return {"metadata": about, "spec": {"containers": [{"name": "main", "resources": GPU}]}}


OF_JOB = pod(("batch/v1", "Job", "train"), {"batch.kubernetes.io/job-name": "train"})

WORKLOADS = [
    (OF_JOB, WorkloadKind.JOB, "train", ("Job", "u-1")),
    (
        pod(
            ("batch/v1", "Job", "train-w-0"),
            {
                "batch.kubernetes.io/job-name": "train-w-0",
                f"{JOB_SET}/jobset-name": "train",
                f"{JOB_SET}/jobset-uid": "u-set",
            },
        ),
        WorkloadKind.JOB_SET,
        "train",
        ("JobSet", "u-set"),
    ),
    (
        pod(("batch/v1", "Job", "train-w-0"), {f"{JOB_SET}/jobset-name": "train"}),
        WorkloadKind.JOB_SET,
        "train",
        ("Job", "u-1"),
    ),
    (
        pod(("apps/v1", "StatefulSet", "train-0"), {"leaderworkerset.sigs.k8s.io/name": "train"}),
        WorkloadKind.LEADER_WORKER_SET,
        "train",
        ("StatefulSet", "u-1"),
    ),
    (
        pod(("kubeflow.org/v1", "PyTorchJob", "train"), {"training.kubeflow.org/job-name": "train"}),
        WorkloadKind.PYTORCH_JOB,
        "train",
        ("PyTorchJob", "u-1"),
    ),
    (
        pod(("kubeflow.org/v2beta1", "MPIJob", "train"), {"training.kubeflow.org/job-name": "train"}),
        WorkloadKind.MPI_JOB,
        "train",
        ("MPIJob", "u-1"),
    ),
    (
        pod(("batch.volcano.sh/v1alpha1", "Job", "train"), {"volcano.sh/job-name": "train"}),
        WorkloadKind.VOLCANO_JOB,
        "train",
        ("Job", "u-1"),
    ),
    (
        pod(("ray.io/v1", "RayCluster", "train-x7k2p"), {"ray.io/cluster": "train-x7k2p"}),
        WorkloadKind.RAY_CLUSTER,
        "train-x7k2p",
        ("RayCluster", "u-1"),
    ),
]


@pytest.mark.parametrize(("made", "kind", "name", "owner"), WORKLOADS, ids=lambda value: str(value)[:20])
def test_every_kind_of_workload_is_known_by_its_pods(
    made: dict[str, Any], kind: WorkloadKind, name: str, owner: tuple[str, str]
) -> None:
    found = workload_of(made["metadata"]["labels"], owner_of(made["metadata"]))
    assert found is not None
    assert (found.kind, found.name, (found.owner.kind, found.owner.uid)) == (kind, name, owner)
    labelled = label_pod(made, "frugal", serves).pod
    assert labelled["metadata"]["labels"] == made["metadata"]["labels"] | {
        keys.LABEL_JOB: name,
        keys.LABEL_CLASS: "frugal",
    }
    labelled["metadata"]["labels"] = made["metadata"]["labels"]
    assert labelled == made, "nothing else is changed"


@pytest.mark.parametrize("owner", [None, ("example.com/v1", "Trainer", "ranks-x7k2p")])
def test_pods_of_one_group_share_a_job_whatever_made_them(owner: Any) -> None:
    by_label = pod(owner, {"scheduling.x-k8s.io/pod-group": "ranks", keys.LABEL_CLASS: "own"}, name="rank-0")
    by_field = pod(owner, {keys.LABEL_CLASS: "own"}, name="rank-0")
    by_field["spec"]["schedulingGroup"] = {"podGroupName": "ranks"}
    for made in (by_label, by_field):
        assert label_pod(made, "", serves).pod["metadata"]["labels"][keys.LABEL_JOB] == "ranks"
        del made["metadata"]["labels"][keys.LABEL_CLASS]
        assert keys.LABEL_JOB not in label_pod(made, "frugal", serves).pod["metadata"]["labels"], "a group may serve"
    known = copy.deepcopy(OF_JOB)
    known["spec"]["schedulingGroup"] = {"podGroupName": "ranks"}
    assert label_pod(known, "frugal", serves).pod["metadata"]["labels"][keys.LABEL_JOB] != "ranks"


WITHOUT_GPU = copy.deepcopy(OF_JOB)
WITHOUT_GPU["spec"]["containers"][0]["resources"] = {"limits": {"cpu": "1"}}
SERVER = pod(("apps/v1", "ReplicaSet", "chat-6f"), {"app": "chat"})
REPLICA = pod(("apps/v1", "ReplicaSet", "chat-6f"), {"app": "chat", HASH: "6f"})
SET = pod(("apps/v1", "StatefulSet", "chat"), {"app": "chat"}, name="chat-0")
NOTEBOOK = pod(None, {"app": "notebook"}, name="notebook")


def labels_of(base: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    made = copy.deepcopy(base)
    made["metadata"]["labels"] |= labels
    return made


@pytest.mark.parametrize(
    "made",
    [
        WITHOUT_GPU,
        SERVER,
        REPLICA,
        SET,
        NOTEBOOK,
        pod(None, {"batch.kubernetes.io/job-name": "train"}),
        labels_of(OF_JOB, {keys.LABEL_CLASS: keys.NO_CLASS}),
        labels_of(OF_JOB, {keys.LABEL_JOB: "by-hand"}),
        labels_of(OF_JOB, {keys.LABEL_JOB: "by-hand", keys.LABEL_CLASS: "other"}),
        {"spec": {}},
        {},
    ],
    ids=[
        "no GPU",
        "server",
        "Deployment",
        "StatefulSet",
        "notebook",
        "label alone",
        "none",
        "by hand",
        "by hand with class",
        "bare",
        "empty",
    ],
)
def test_pods_that_the_class_of_a_namespace_does_not_concern_stay_as_they_are(made: dict[str, Any]) -> None:
    labelled = label_pod(made, "frugal", serves)
    assert labelled.warnings == ()
    assert {"metadata": {}, **made} == labelled.pod


def test_without_a_class_nothing_changes() -> None:
    assert label_pod(OF_JOB, "", serves).pod == OF_JOB


@pytest.mark.parametrize(("base", "name"), [(OF_JOB, "train"), (SERVER, "chat-6f"), (NOTEBOOK, "notebook")])
def test_the_class_of_a_pod_goes_before_that_of_its_namespace(base: dict[str, Any], name: str) -> None:
    labels = label_pod(labels_of(base, {keys.LABEL_CLASS: "own"}), "frugal", serves).pod["metadata"]["labels"]
    assert (labels[keys.LABEL_CLASS], labels[keys.LABEL_JOB]) == ("own", name)


def test_a_pod_that_has_no_name_yet_and_no_controller_is_told() -> None:
    made = pod(None, {keys.LABEL_CLASS: "own"})
    labelled = label_pod(made, "", serves)
    assert labelled.pod == made
    assert labelled.warnings == ("perseus.energy/class: a pod without a name and a controller has no EnergyClass",)


def test_a_long_name_is_shortened_to_one_that_a_label_may_have_and_stays_different() -> None:
    names = [f"{'n' * 70}{end}" for end in "ab"]
    pods = [pod(("apps/v1", "StatefulSet", name), {keys.LABEL_CLASS: "own"}) for name in names]
    made = [label_pod(each, "", serves).pod["metadata"]["labels"] for each in pods]
    shortened = {labels[keys.LABEL_JOB] for labels in made}
    assert len(shortened) == 2
    assert all(len(name) <= 63 and name.startswith("nnnn") for name in shortened)


@pytest.mark.parametrize("made", [REPLICA, SET], ids=["Deployment", "StatefulSet"])
def test_a_class_with_serving_claims_servers_too(made: dict[str, Any]) -> None:
    labelled = label_pod(made, "serving", serves).pod["metadata"]["labels"]
    wanted = {keys.LABEL_CLASS: "serving", keys.LABEL_JOB: "chat", keys.LABEL_SERVING: "true"}
    assert labelled == made["metadata"]["labels"] | wanted
    own = labels_of(made, {keys.LABEL_CLASS: "serving"})
    assert label_pod(own, "frugal", serves).pod["metadata"]["labels"] == labelled


@pytest.mark.parametrize(
    "made",
    [
        WITHOUT_GPU,
        SERVER,
        NOTEBOOK,
        labels_of(REPLICA, {HASH: "another"}),
        labels_of(REPLICA, {keys.LABEL_CLASS: keys.NO_CLASS}),
        labels_of(REPLICA, {keys.LABEL_JOB: "by-hand"}),
        pod(("argoproj.io/v1alpha1", "ReplicaSet", "chat-6f"), {HASH: "6f"}),
    ],
    ids=["no GPU", "ReplicaSet alone", "notebook", "another hash", "none", "by hand", "foreign kind"],
)
def test_what_is_no_server_stays_as_it_is_beside_a_class_with_serving(made: dict[str, Any]) -> None:
    assert label_pod(made, "serving", serves).pod == made


@pytest.mark.parametrize(("made", "kind", "name"), [row[:3] for row in WORKLOADS], ids=lambda value: str(value)[:20])
def test_a_class_with_serving_leaves_workloads_that_train_as_they_were(
    made: dict[str, Any], kind: WorkloadKind, name: str
) -> None:
    assert workload_of(made["metadata"]["labels"], owner_of(made["metadata"])) is not None, kind
    wanted = {keys.LABEL_JOB: name, keys.LABEL_CLASS: "serving"}
    assert label_pod(made, "serving", serves).pod["metadata"]["labels"] == made["metadata"]["labels"] | wanted


def test_without_serving_a_pods_own_label_claims_a_server_as_it_did() -> None:
    labels = label_pod(labels_of(REPLICA, {keys.LABEL_CLASS: "own"}), "", serves).pod["metadata"]["labels"]
    assert labels == REPLICA["metadata"]["labels"] | {keys.LABEL_CLASS: "own", keys.LABEL_JOB: "chat-6f"}
