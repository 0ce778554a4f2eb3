"""The operator's webhook, asked as an API server asks: over TLS, about any pod. The answer is always yes.

Which pods it is asked about, and what becomes of them while nobody answers: tests/e2e/test_webhook_on_api_server.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import ssl
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonpatch
import pytest
import yaml
from kubernetes import client
from tests.integration.widgets import absent
from tests.waiting import PATIENCE_S, eventually

from perseus_core import keys
from perseus_operator.controller.settings import Settings
from perseus_operator.servers import webhook as module
from perseus_operator.servers.pod_injection import inject
from perseus_operator.servers.webhook import CLASS_ID, REQUEST_ID, WEBHOOK_ID
from perseus_sim.cluster.pki import Authority
from perseus_sim.processes import Child, Processes

CLASS_CRD = Path(__file__).resolve().parents[2] / "deploy" / "crds" / "energyclasses.yaml"
SOCKET = "/run/perseus/agent.sock"
PORT = 9443
ADDRESS = f"127.{192 + os.getpid() % 60}.{os.getpid() // 60 % 256}.77"
"""An address of our own, so that the port is nobody else's."""


class Webhook:
    """An operator that serves it, and its certificate on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operator: Child | None = None
        self.authority = Authority("first")

    def certify(self) -> None:
        """Give it a certificate of a new authority, as a mounted Secret would change."""
        self.authority = Authority("another")
        pair = self.authority.issue("webhook", hosts=(ADDRESS,))
        (self.folder / "tls.key").write_bytes(pair.key)
        (self.folder / "tls.crt").write_bytes(pair.certificate)

    def ask(self, pod: Any, *, uid: str = "u-1", raw: bytes | None = None, path: str = WEBHOOK_ID) -> tuple[int, Any]:
        """Status code and answer to the creation of a pod.

        Raises:
            OSError: it does not listen, or shows another certificate.
        """
        review = {
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "request": {
                "uid": uid,
                "kind": {"group": "", "version": "v1", "kind": "Pod"},
                "resource": {"group": "", "version": "v1", "resource": "pods"},
                "namespace": "training",
                "operation": "CREATE",
                "userInfo": {"username": "job-controller"},
                "object": pod,
                "oldObject": None,
                "dryRun": False,
                "options": {},
            },
        }
        tls = ssl.create_default_context(cadata=self.authority.certificate.decode())
        connection = http.client.HTTPSConnection(ADDRESS, PORT, timeout=PATIENCE_S, context=tls)
        try:
            body = json.dumps(review).encode() if raw is None else raw
            connection.request("POST", f"/{path}", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if answer.status == 200 else content
        finally:
            connection.close()

    def serves(self) -> bool:
        try:
            return self.ask(pod())[0] == 200
        except OSError:
            return False


def pod(**spec: Any) -> dict[str, Any]:
    metadata = {"generateName": "train-", "labels": {keys.LABEL_JOB: "gpt3"}}
    main = {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [main], **spec}}


@pytest.fixture(scope="module")
def webhook(kubeconfig: Path, api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Webhook]:
    folder = tmp_path_factory.mktemp("webhook")
    system = f"system-{uuid.uuid4().hex[:8]}"
    client.CoreV1Api(api).create_namespace({"metadata": {"name": system}})
    command = [
        *(sys.executable, "-m", "perseus_operator", "--insecure", "--log-format", "text", "--agent-namespace", system),
        *("--metrics-address", "", "--web-address", "", "--ready-file", str(folder / "ready")),
        *("--webhook-address", f"{ADDRESS}:{PORT}", "--webhook-resource"),
        *("--webhook-cert", str(folder / "tls.crt"), "--webhook-key", str(folder / "tls.key")),
    ]
    made = Webhook(folder)
    with Processes(folder) as processes:
        made.operator = processes.start("operator", command, environment={"KUBECONFIG": str(kubeconfig)})
        made.operator.wait_until((folder / "ready").exists, PATIENCE_S)
        log = made.operator.log
        # A Secret that comes late: nothing else waits for it.
        eventually(lambda: "admission webhook: " in log.read_text(), "the webhook is not said to wait")
        made.certify()
        eventually(made.serves, "not served")
        yield made
        assert made.operator.running, made.operator.tail()


def test_a_pod_gets_what_it_lacks_by_a_patch(webhook: Webhook) -> None:
    before = pod()
    status, review = webhook.ask(before, uid="u-7")
    assert status == 200
    answer = review["response"]
    assert (answer["uid"], answer["allowed"], answer["patchType"]) == ("u-7", True, "JSONPatch")
    patch = json.loads(base64.b64decode(answer["patch"]))
    assert jsonpatch.apply_patch(before, patch) == inject(before, SOCKET).pod
    assert "warnings" not in answer


def test_asked_again_it_has_nothing_to_add(webhook: Webhook) -> None:
    status, review = webhook.ask(inject(pod(), SOCKET).pod)
    assert (status, review["response"]["allowed"]) == (200, True)
    assert "patch" not in review["response"]


def test_the_request_is_added_while_every_gpu_node_offers_the_socket(webhook: Webhook, api: Any) -> None:
    def added() -> bool:
        _, review = webhook.ask(pod(), path=REQUEST_ID)
        assert review["response"]["allowed"]
        patch = review["response"].get("patch")
        if patch is None:
            [warning] = review["response"]["warnings"]
            assert "it trains at default clocks" in warning
            return False
        [container] = jsonpatch.apply_patch(pod(), json.loads(base64.b64decode(patch)))["spec"]["containers"]
        assert container["resources"]["limits"][keys.RESOURCE_AGENT] == "1"
        assert "volumeMounts" not in container
        return True

    def node(name: str, offers: str) -> None:
        allocatable = {"nvidia.com/gpu": "8", keys.RESOURCE_AGENT: offers}
        ready = [{"type": "Ready", "status": "True"}]
        core.patch_node_status(name, {"status": {"allocatable": allocatable, "conditions": ready}})

    core = client.CoreV1Api(api)
    assert not added()
    names = [f"gpu-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    try:
        for name in names:
            core.create_node({"metadata": {"name": name}})
            node(name, "10k")
        eventually(added, "the request is not added")
        node(names[1], "0")
        eventually(lambda: not added(), "the request is added, though a node does not offer it")
    finally:
        for name in names:
            core.delete_node(name)
    eventually(lambda: not added(), "the request is added without a node")


def test_a_pod_of_a_namespace_with_a_class_is_labelled(webhook: Webhook, api: Any) -> None:
    def labels(name: str = "training") -> dict[str, str]:
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": "u-1", "controller": True}
        of_job = {"labels": {"batch.kubernetes.io/job-name": "train"}, "ownerReferences": [owner]}
        made = {**pod(), "metadata": {"generateName": "train-", "namespace": name, **of_job}}
        status, review = webhook.ask(made, path=CLASS_ID)
        assert (status, review["response"]["allowed"]) == (200, True)
        patch = json.loads(base64.b64decode(review["response"].get("patch", "W10=")))
        labelled = jsonpatch.apply_patch(made, patch)
        assert labelled["spec"] == made["spec"], "the entries below add the socket"
        return dict(labelled["metadata"]["labels"])

    name = f"team-{uuid.uuid4().hex[:8]}"
    core = client.CoreV1Api(api)
    core.create_namespace({"metadata": {"name": name}})
    assert labels(name) == {"batch.kubernetes.io/job-name": "train"}
    core.patch_namespace(name, {"metadata": {"labels": {keys.LABEL_CLASS: "frugal"}}})
    assert labels(name).items() >= {keys.LABEL_CLASS: "frugal", keys.LABEL_JOB: "train"}.items()
    absent = f"team-{uuid.uuid4().hex[:8]}"
    assert labels(absent) == {"batch.kubernetes.io/job-name": "train"}, "the API server refuses it, not the webhook"


def test_a_server_is_labelled_if_the_class_of_its_namespace_has_serving(webhook: Webhook, api: Any) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "chat-6f", "uid": "u-1", "controller": True}
    of_server = {"labels": {"pod-template-hash": "6f"}, "ownerReferences": [owner]}
    name = f"team-{uuid.uuid4().hex[:8]}"
    client.CoreV1Api(api).create_namespace({"metadata": {"name": name, "labels": {keys.LABEL_CLASS: name}}})
    made = {**pod(), "metadata": {"generateName": "chat-6f-", "namespace": name, **of_server}}

    def labels() -> dict[str, str]:
        status, review = webhook.ask(made, path=CLASS_ID)
        assert (status, review["response"]["allowed"]) == (200, True)
        patch = json.loads(base64.b64decode(review["response"].get("patch", "W10=")))
        return dict(jsonpatch.apply_patch(made, patch)["metadata"]["labels"])

    assert labels() == {"pod-template-hash": "6f"}, "there is no such class"
    extensions = client.ApiextensionsV1Api(api)
    definition = extensions.create_custom_resource_definition(yaml.safe_load(CLASS_CRD.read_text(encoding="utf-8")))
    custom, classes = client.CustomObjectsApi(api), (keys.API_GROUP, keys.API_VERSION, keys.CLASS_PLURAL)
    eventually(lambda: not absent(lambda: custom.list_cluster_custom_object(*classes)), "the CRD is not served")
    about = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.CLASS_KIND, "metadata": {"name": name}}
    custom.create_cluster_custom_object(*classes, {**about, "spec": {"serving": {}}})
    wanted = {keys.LABEL_CLASS: name, keys.LABEL_JOB: "chat", keys.LABEL_SERVING: "true"}
    eventually(lambda: labels() == {"pod-template-hash": "6f"} | wanted, "the server is left out")
    custom.delete_cluster_custom_object(*classes, name)
    eventually(lambda: labels() == {"pod-template-hash": "6f"}, "a class that is gone still claims it")
    extensions.delete_custom_resource_definition(definition.metadata.name)


def test_what_it_left_out_is_a_warning(webhook: Webhook) -> None:
    _, review = webhook.ask(pod(volumes=[{"name": "perseus-agent", "emptyDir": {}}]))
    assert review["response"]["allowed"]
    assert "patch" not in review["response"]
    (warning,) = review["response"]["warnings"]
    assert "volume perseus-agent is not the node's directory /run/perseus" in warning


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": "none"},
        {"containers": [{"image": "nameless"}]},
        {"containers": None},
        {"volumes": [{"emptyDir": {}}]},
        {"containers": [{"name": "main", "volumeMounts": [{"name": "x"}]}]},
    ],
)
def test_a_pod_that_makes_no_sense_is_not_ours_to_refuse(webhook: Webhook, spec: dict[str, Any]) -> None:
    """The API server says what is wrong with it. A denial of ours would be final, whatever the failure policy."""
    status, review = webhook.ask(pod(**spec))
    assert status == 200
    assert review["response"]["allowed"]


@pytest.mark.parametrize("raw", [b"", b"{", b"{}", b'{"request": {}}', b"[]"])
def test_what_is_no_review_ends_that_request_alone(webhook: Webhook, raw: bytes) -> None:
    status, _ = webhook.ask(None, raw=raw)
    assert 400 <= status < 600, "an error to the API server, which then ignores us"
    assert webhook.serves()


def test_a_renewed_certificate_is_taken_up(webhook: Webhook) -> None:
    assert webhook.serves()
    webhook.certify()
    eventually(webhook.serves, "not served with the new certificate")


async def test_an_api_server_reaches_it_by_either_family_of_addresses(tmp_path: Path, ipv6: None) -> None:
    pair = Authority("any").issue("webhook", hosts=("localhost",))
    (tmp_path / "crt").write_bytes(pair.certificate)
    (tmp_path / "key").write_bytes(pair.key)
    cert, key = (str(tmp_path / name) for name in ("crt", "key"))
    own = Settings(insecure=True, webhook_address="0.0.0.0:0", webhook_cert=cert, webhook_key=key)
    async with contextlib.aclosing(module.server(own)(None)) as configurations:
        port = urlsplit((await anext(configurations))["url"]).port
        for host in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
