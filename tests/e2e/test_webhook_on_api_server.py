"""Pods that a real API server creates while the operator's webhook answers, hangs, is dead, or is not responsible.

The operator runs outside the cluster, so the configuration has an address where the chart's has a Service. Everything
else is as the chart renders it (tests/chart/test_webhook_rendering.py). No fault here may prevent a pod's creation.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from tests.e2e.conftest import SYSTEM
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_sim.cluster.api_servers import Server
from perseus_sim.cluster.pki import Authority
from perseus_sim.processes import Child, Processes

pytestmark = pytest.mark.e2e

NAME = "perseus-webhook"
PORT = 9443
ADDRESS = f"127.{192 + os.getpid() % 60}.{os.getpid() // 60 % 256}.78"
TIMEOUT_S = 10
"""Longer than the chart's, because a machine that runs tests may need longer to answer."""


def configuration(authority: Authority, path: str = "/inject") -> dict[str, Any]:
    bundle = base64.b64encode(authority.certificate).decode()
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": NAME},
        "webhooks": [
            {
                "name": "inject.perseus.energy",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Ignore",
                "timeoutSeconds": TIMEOUT_S,
                "reinvocationPolicy": "IfNeeded",
                "clientConfig": {"url": f"https://{ADDRESS}:{PORT}{path}", "caBundle": bundle},
                "rules": [
                    {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]},
                ],
                "objectSelector": {"matchExpressions": [{"key": keys.LABEL_JOB, "operator": "Exists"}]},
                "namespaceSelector": {
                    "matchExpressions": [
                        {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", SYSTEM]},
                        {
                            "key": "pod-security.kubernetes.io/enforce",
                            "operator": "NotIn",
                            "values": ["baseline", "restricted"],
                        },
                    ]
                },
            }
        ],
    }


class World:
    """An operator that serves the webhook, and a namespace."""

    def __init__(self, api: Any, namespace: str, operator: Child, folder: Path) -> None:
        self.api, self.namespace, self.operator, self.folder = api, namespace, operator, folder
        self.core = client.CoreV1Api(api)
        self.number = 0

    def create(self, labels: dict[str, str] | None = None, *, namespace: str = "", **options: Any) -> tuple[Any, float]:
        """Create a pod that no kubelet runs; return it as the API server made it, and the seconds that this took."""
        self.number += 1
        given = {keys.LABEL_JOB: "gpt3"} if labels is None else labels
        metadata = {"generateName": f"p{self.number}-", "labels": given}
        main = {"name": "main", "image": "x", "env": [{"name": "A", "value": "1"}]}
        began_s = time.monotonic()
        made = self.core.create_namespaced_pod(
            namespace or self.namespace,
            {"metadata": metadata, "spec": {"containers": [main], "automountServiceAccountToken": False}},
            **options,
        )
        return made, time.monotonic() - began_s

    def create_injected(self, **options: Any) -> Any:
        """Create labelled pods until one has the socket, and return it."""

        def attempt() -> Any:
            made, _ = self.create(**options)
            return made if injected(made) else None

        return eventually(attempt, "not injected", 0.1)


def injected(pod: Any) -> bool:
    """Return whether the pod has the socket's variable, volume and mount; fail if it has only a part of them."""
    (main,) = pod.spec.containers
    variables = {variable.name: variable.value for variable in main.env}
    assert variables.pop("A") == "1"
    if not variables:
        assert not pod.spec.volumes
        assert not main.volume_mounts
        return False
    assert variables == {keys.ENV_SOCKET: keys.DEFAULT_SOCKET_PATH}
    (volume,) = pod.spec.volumes
    (mount,) = main.volume_mounts
    assert (mount.name, mount.mount_path, mount.read_only) == (volume.name, "/run/perseus", True)
    assert (volume.host_path.path, volume.host_path.type) == ("/run/perseus", "DirectoryOrCreate")
    return True


@pytest.fixture(scope="module")
def operator(
    server: Server, api: Any, crd: Any, operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Child, Path]]:
    """An operator under its own account with the chart's rights. Serving the webhook needs no right."""
    if server.plane is None:
        pytest.skip(f"the {server.name} cannot reach an operator on this machine")
    folder = tmp_path_factory.mktemp("webhook")
    authority = Authority("webhook")
    pair = authority.issue("webhook", hosts=(ADDRESS,))
    (folder / "tls.crt").write_bytes(pair.certificate)
    (folder / "tls.key").write_bytes(pair.key)
    command = [
        *(sys.executable, "-m", "perseus_operator", "--insecure", "--log-format", "text", "--agent-namespace", SYSTEM),
        *("--metrics-address", "", "--web-address", "", "--webhook-address", f"{ADDRESS}:{PORT}"),
        *("--webhook-cert", str(folder / "tls.crt"), "--webhook-key", str(folder / "tls.key")),
    ]
    admission = client.AdmissionregistrationV1Api(api)
    with Processes(folder) as processes:
        child = processes.start("operator", command, environment={"KUBECONFIG": str(operator_kubeconfig)})
        child.wait_until(lambda: "admission webhook served" in child.log.read_text(), PATIENCE_S)
        admission.create_mutating_webhook_configuration(configuration(authority))
        try:
            yield child, folder
        finally:
            child.signal(signal.SIGCONT)
            admission.delete_mutating_webhook_configuration(NAME)


@pytest.fixture
def world(api: Any, namespace: str, operator: tuple[Child, Path]) -> World:
    child, folder = operator
    world = World(api, namespace, child, folder)
    # An API server uses a new configuration after a moment.
    world.create_injected(dry_run="All")
    return world


def test_the_label_is_enough(world: World) -> None:
    made = world.create_injected()
    assert injected(world.core.read_namespaced_pod(made.metadata.name, world.namespace))
    bare, _ = world.create({"app": "something-else"})
    assert not injected(bare)


def test_a_dry_run_shows_it_and_leaves_nothing(world: World) -> None:
    world.create_injected(dry_run="All")
    assert not world.core.list_namespaced_pod(world.namespace).items


def test_a_pod_that_has_the_socket_is_not_changed_again(world: World) -> None:
    first = world.create_injected()
    spec = world.api.sanitize_for_serialization(first.spec)
    metadata = {"name": "again", "labels": {keys.LABEL_JOB: "gpt3"}}
    again = world.core.create_namespaced_pod(world.namespace, {"metadata": metadata, "spec": spec})
    assert injected(again)


def test_it_does_not_get_pods_of_excluded_namespaces(world: World) -> None:
    made, _ = world.create(namespace=SYSTEM, dry_run="All")
    assert not injected(made)


def test_a_namespace_that_refuses_the_mount_is_excluded(world: World, api: Any) -> None:
    core, name = world.core, f"{world.namespace}-baseline"
    core.create_namespace({"metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "baseline"}}})
    try:
        eventually(lambda: core.list_namespaced_service_account(name).items, "no account", 0.1)
        assert not injected(world.create(namespace=name)[0])
        metadata = {"name": "by-hand", "labels": {keys.LABEL_JOB: "gpt3"}}
        with_mount = world.api.sanitize_for_serialization(world.create_injected(dry_run="All").spec)
        with pytest.raises(client.ApiException, match="hostPath volumes"):
            core.create_namespaced_pod(name, {"metadata": metadata, "spec": with_mount}, dry_run="All")
    finally:
        core.delete_namespace(name)


def test_a_hung_operator_delays_a_pod_no_longer_than_the_timeout(world: World) -> None:
    world.operator.signal(signal.SIGSTOP)
    try:
        made, took_s = world.create()
        assert not injected(made)
        assert took_s < TIMEOUT_S + 30, "the API server gives up, on a busy machine a little later"
    finally:
        world.operator.signal(signal.SIGCONT)
    world.create_injected(dry_run="All")


def test_with_another_authority_pods_are_created_unchanged(world: World) -> None:
    admission = client.AdmissionregistrationV1Api(world.api)
    original = admission.read_mutating_webhook_configuration(NAME)
    stranger = configuration(Authority("stranger"))
    stranger["metadata"]["resourceVersion"] = original.metadata.resource_version
    admission.replace_mutating_webhook_configuration(NAME, stranger)
    eventually(lambda: not injected(world.create(dry_run="All")[0]), "still trusted", 0.1)
    assert not injected(world.create()[0])
    original.metadata.resource_version = admission.read_mutating_webhook_configuration(NAME).metadata.resource_version
    admission.replace_mutating_webhook_configuration(NAME, original)
    world.create_injected(dry_run="All")


def test_without_an_operator_pods_are_created_unchanged(world: World) -> None:
    """This test comes last, because no operator runs after it."""
    world.operator.popen.kill()
    world.operator.popen.wait()
    made, took_s = world.create()
    assert not injected(made)
    assert took_s < TIMEOUT_S + 30
    jobs = client.BatchV1Api(world.api)
    template = {
        "metadata": {"labels": {keys.LABEL_JOB: "gpt3"}},
        "spec": {"restartPolicy": "Never", "containers": [{"name": "main", "image": "x"}]},
    }
    jobs.create_namespaced_job(world.namespace, {"metadata": {"name": "train"}, "spec": {"template": template}})
    of_job = "batch.kubernetes.io/job-name=train"
    eventually(
        lambda: world.core.list_namespaced_pod(world.namespace, label_selector=of_job).items,
        "not made by its controller",
        0.1,
    )
