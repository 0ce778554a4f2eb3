"""A release on a real API server: a real Helm installs, tests, upgrades, rolls back and uninstalls it.

``tests.doubles.process_node`` runs the pods as processes from their manifests in the API: arguments, environment,
Secrets, probes and service account. So the tests fail if a certificate is wrong or a right is missing.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes import client, dynamic
from kubernetes.dynamic.exceptions import NotFoundError
from tests.chart.conftest import CRD, CRDS, delete_definitions, secrets, until
from tests.doubles.process_node import ProcessNode
from tests.rights import OCCASIONAL, lacking
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_operator.servers.webhook import WEBHOOK_ID
from perseus_proto.v1alpha1 import agent_pb2, agent_pb2_grpc
from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Server

ROOT = Path(__file__).resolve().parents[2]
CHART, NAMESPACE = ROOT / "charts" / "perseus", "perseus-system"
# Kinds of objects that controllers or the cluster itself make at any time.
CHURN = {"Event", "Lease", "EndpointSlice", "Endpoints", "ControllerRevision", "APIService", "Node", "ComponentStatus"}
Helm = Callable[..., str]


def everything(api: Any, folder: Path) -> set[tuple[str, str, str]]:
    """Return kind, namespace and name of every object of the cluster."""
    connect: Any = dynamic.DynamicClient
    found = set()
    kinds = connect(api, cache_file=str(folder / f"{time.monotonic_ns()}.json"))
    for resource in kinds.resources.search():
        if resource.kind in CHURN or resource.kind.endswith("List") or "list" not in resource.verbs:
            continue
        with contextlib.suppress(NotFoundError):  # discovery lists a deleted definition for a moment longer
            for item in resource.get().to_dict()["items"] or ():
                found.add((resource.kind, item["metadata"].get("namespace") or "", item["metadata"]["name"]))
    return found


def lease_ttl(api: Any) -> str | None:
    deployment = client.AppsV1Api(api).read_namespaced_deployment("perseus-operator", NAMESPACE)
    variables = {v.name: v.value for v in deployment.spec.template.spec.containers[0].env or ()}
    return variables.get("PERSEUS_OPERATOR_LEASE_TTL_S")


def ready(api: Any, node: ProcessNode) -> None:
    apps = client.AppsV1Api(api)

    def all_ready() -> bool:
        operator = apps.read_namespaced_deployment("perseus-operator", NAMESPACE)
        agents = apps.read_namespaced_daemon_set("perseus-agent", NAMESPACE)
        current = operator.status.observed_generation == operator.metadata.generation
        current &= agents.status.observed_generation == agents.metadata.generation
        current &= (operator.status.updated_replicas, agents.status.updated_number_scheduled) == (1, 1)
        return bool(current and operator.status.ready_replicas == 1 and agents.status.number_ready == 1)

    try:
        until("operator and agent are ready", all_ready, 90)
    except pytest.fail.Exception as error:
        raise AssertionError(f"{error}\n{node.failures}\n{node.log_of('perseus')[-6000:]}") from None


def test_from_install_to_uninstall(
    on_server: Helm, api: Any, server: Server, node: ProcessNode, namespace: str, tmp_path: Path
) -> None:
    before = everything(api, tmp_path)

    # Install an older chart, whose CRD lacks a column, so that an upgrade has something to upgrade.
    old = tmp_path / "old"
    subprocess.run(["cp", "-r", str(CHART), str(old)], check=True)
    template = old / "templates" / "crd.yaml"
    text = template.read_text(encoding="utf-8")
    template.write_text(re.sub(r"    - name: Slowdown\n(      .*\n)+", "", text), encoding="utf-8")
    notes = on_server("install", "perseus", str(old), "--set", "simulatedGpus.enabled=true,simulatedGpus.count=2")
    for command in (
        "rollout status deployment/perseus-operator",
        "rollout status daemonset/perseus-agent",
        "helm test",
    ):
        assert command in notes
    assert "GPUs are SIMULATED: 2 of model a100" in notes
    definitions = client.ApiextensionsV1Api(api)

    def columns() -> set[str]:
        found = definitions.read_custom_resource_definition(CRD)
        return {column.name for column in found.spec.versions[0].additional_printer_columns}

    assert "Slowdown" not in columns()
    ready(api, node)
    certificates = secrets(api)
    assert set(certificates) == {"perseus-operator-tls", "perseus-agent-tls"}

    # The release's own test passes and prints what it did.
    output = on_server("test", "perseus", "--timeout", "120s")
    assert re.search(r"Phase:\s+Succeeded", output), output + node.log_of("perseus-test")
    log = node.log_of("perseus-test")
    assert "operator: planned a job" in log
    assert "agents: 1 of 1 ready" in log
    for attempt in ("no certificate", "another authority", "the operator's"):
        assert may_command(node, certificates, attempt) is (attempt == "the operator's")

    # An upgrade changes settings and the CRD, and keeps the certificates.
    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values", "--set", "operator.settings.leaseTtlS=77")
    assert lease_ttl(api) == "77"
    assert "Slowdown" in columns()
    assert secrets(api) == certificates
    ready(api, node)
    job = make_job(api)

    on_server("rollback", "perseus", "1")
    assert lease_ttl(api) is None
    assert secrets(api) == certificates
    ready(api, node)

    jobs = client.CustomObjectsApi(api)
    jobs.delete_namespaced_custom_object(*job)
    until("the job is gone", lambda: not jobs.list_namespaced_custom_object(*job[:-1])["items"])
    use_what_is_cluster_wide(api)
    rights_are_exact(api, server)

    on_server("uninstall", "perseus")
    expected = {
        *(("CustomResourceDefinition", "", name) for name in CRDS),
    }
    until("nothing else is left", lambda: everything(api, tmp_path) - before <= expected)
    assert before <= everything(api, tmp_path)

    # An existing CRD does not prevent a new installation, which makes new certificates.
    on_server("install", "perseus", str(CHART), "--set", "simulatedGpus.enabled=true")
    renewed = secrets(api)
    assert renewed != certificates

    # One Secret of the pair is missing: both are made again.
    client.CoreV1Api(api).delete_namespaced_secret("perseus-agent-tls", NAMESPACE)
    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values")
    pair = secrets(api)
    assert pair["perseus-operator-tls"]["ca.crt"] == pair["perseus-agent-tls"]["ca.crt"]
    assert pair["perseus-operator-tls"] != renewed["perseus-operator-tls"]

    # A third of their validity has passed: an upgrade renews them.
    age(api, "perseus-operator-tls", days=122)
    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values")
    assert secrets(api)["perseus-operator-tls"]["ca.crt"] != pair["perseus-operator-tls"]["ca.crt"]
    on_server("uninstall", "perseus")
    delete_definitions(api)


def test_one_team_is_served_without_rights_in_other_namespaces(
    on_server: Helm, api: Any, server: Server, node: ProcessNode, namespace: str
) -> None:
    assert server.plane is not None
    core, team = client.CoreV1Api(api), "team-a"
    core.create_namespace({"metadata": {"name": team}})
    flags = ["--set", f"operator.namespaces={{{team}}},agent.enabled=false"]
    # With named namespaces kopf does not wait for the CRD. It relies on Helm's order, in which the CRD comes first.
    on_server("install", "perseus", str(CHART), *flags)
    apps = client.AppsV1Api(api)
    deployment = lambda: apps.read_namespaced_deployment("perseus-operator", NAMESPACE)  # noqa: E731
    until("the operator is ready", lambda: deployment().status.ready_replicas == 1)
    assert re.search(r"Phase:\s+Succeeded", on_server("test", "perseus", "--timeout", "120s"))
    assert "planned a job" in node.log_of("perseus-test")
    requests = rbac.requests(server.plane.audit_log, rbac.user_name(NAMESPACE, "perseus-operator"))
    assert lacking(requests) == set()

    review: Any = {
        "spec": {
            "user": rbac.user_name(NAMESPACE, "perseus-operator"),
            "resourceAttributes": {"verb": "get", "resource": "configmaps", "namespace": "default"},
        }
    }
    reviews = client.AuthorizationV1Api(api)
    assert not reviews.create_subject_access_review(review).status.allowed
    review["spec"]["resourceAttributes"]["namespace"] = team
    assert reviews.create_subject_access_review(review).status.allowed

    on_server("uninstall", "perseus")
    core.delete_namespace(team)
    delete_definitions(api)


def test_the_webhook_is_installed_renewed_and_removed(
    on_server: Helm, api: Any, server: Server, node: ProcessNode, namespace: str, tmp_path: Path
) -> None:
    """The test calls the operator's pod itself, because no proxy forwards Services to processes here.

    It uses the name of the Service, and the authority from the webhook configuration.
    """
    before = everything(api, tmp_path)
    flags = ["--set", "agent.enabled=false,webhook.enabled=true,agent.socketDirectory=/srv/perseus"]
    on_server("install", "perseus", str(CHART), *flags)
    core, admission = client.CoreV1Api(api), client.AdmissionregistrationV1Api(api)
    apps = client.AppsV1Api(api)
    until("ready", lambda: apps.read_namespaced_deployment("perseus-operator", NAMESPACE).status.ready_replicas == 1)

    def answer() -> Any:
        configured = admission.read_mutating_webhook_configuration("perseus-system-perseus-webhook").webhooks
        webhook = next(each for each in configured if each.client_config.service.path == f"/{WEBHOOK_ID}")
        service = core.read_namespaced_service(webhook.client_config.service.name, NAMESPACE)
        host = f"{service.metadata.name}.{service.metadata.namespace}.svc"
        tls = ssl.create_default_context(cadata=b64decode(webhook.client_config.ca_bundle).decode())
        request = {
            "uid": "u", "operation": "CREATE", "userInfo": {}, "dryRun": False,
            "resource": {"group": "", "version": "v1", "resource": "pods"},
            "object": {"metadata": {"labels": {keys.LABEL_JOB: "gpt3"}}, "spec": {"containers": [{"name": "c"}]}},
        }  # fmt: skip
        try:
            with (
                socket.create_connection((node.address_of("perseus-operator"), 9443), timeout=PATIENCE_S) as plain,
                tls.wrap_socket(plain, server_hostname=host) as secure,
            ):
                connection = http.client.HTTPConnection(host)
                connection.sock = secure
                body = json.dumps({"kind": "AdmissionReview", "request": request})
                connection.request("POST", webhook.client_config.service.path, body)
                return json.loads(connection.getresponse().read())["response"]
        except ConnectionError:
            return None

    until("answered", answer)
    patch = b64decode(answer()["patch"]).decode()
    assert '"/srv/perseus/agent.sock"' in patch, "the socket of this release's agents"

    original = secrets(api)["perseus-webhook-tls"]
    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values", "--set", "webhook.timeoutSeconds=1")
    assert secrets(api)["perseus-webhook-tls"] == original
    assert answer() is not None, "the configuration still has the authority of that certificate"

    # A pod can be created without the webhook: here the Service's address does not answer.
    team = "team-w"
    core.create_namespace({"metadata": {"name": team}})
    until("the service account is there", lambda: core.list_namespaced_service_account(team).items)
    labelled = {"metadata": {"name": "p", "labels": {keys.LABEL_JOB: "gpt3"}}}
    spec = {"containers": [{"name": "c", "image": "x"}], "automountServiceAccountToken": False}
    made = core.create_namespaced_pod(team, {**labelled, "spec": spec}, dry_run="All")
    assert not made.spec.volumes
    core.delete_namespace(team)

    core.delete_namespaced_secret("perseus-webhook-tls", NAMESPACE)
    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values")
    assert secrets(api)["perseus-webhook-tls"]["ca.crt"] != original["ca.crt"]
    renewed = admission.read_mutating_webhook_configuration("perseus-system-perseus-webhook").webhooks
    ca = secrets(api)["perseus-webhook-tls"]["ca.crt"]
    assert {webhook.client_config.ca_bundle for webhook in renewed} == {ca}

    on_server("uninstall", "perseus")
    gone = {*(("CustomResourceDefinition", "", name) for name in CRDS), ("Namespace", "", team)}
    gone |= {("EnergyClass", "", "default")}  # it goes with its definition
    until("nothing else is left", lambda: everything(api, tmp_path) - before <= gone)
    delete_definitions(api)


def make_job(api: Any) -> tuple[str, str, str, str, str]:
    kind = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)
    spec = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
        "profile": {"configMapRef": {"name": "absent"}, "blockingPowerMilliwatts": 83640},
        "mode": "Recommend",
    }
    api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
    metadata = {"name": "job", "finalizers": [keys.FINALIZER]}  # as an early version left it
    body = {"apiVersion": api_version, "kind": keys.KIND, "metadata": metadata, "spec": spec}
    jobs = client.CustomObjectsApi(api)
    jobs.create_namespaced_custom_object(*kind, body)

    def observed() -> bool:
        found = jobs.get_namespaced_custom_object(*kind, "job")
        return "finalizers" not in found["metadata"] and "status" in found

    until("the operator has observed the job", observed)
    return (*kind, "job")


def age(api: Any, name: str, *, days: int) -> None:
    """Let certificates of Helm be so much older, in the name of Helm, which would else complain of another writer."""
    core = client.CoreV1Api(api)
    secret = core.read_namespaced_secret(name, NAMESPACE)
    [helm] = [entry.manager for entry in secret.metadata.managed_fields if entry.operation == "Apply"]
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "labels": secret.metadata.labels,
            "annotations": {
                **secret.metadata.annotations,
                "perseus.energy/issued": str(int(time.time()) - days * 86_400),
            },
        },
        "type": secret.type,
        "data": secret.data,
    }
    core.patch_namespaced_secret(
        name, NAMESPACE, body, field_manager=helm, force=True, _content_type="application/apply-patch+yaml"
    )


def may_command(node: ProcessNode, certificates: dict[str, dict[str, str]], caller: str) -> bool:
    """Return whether the agent answers a caller with these credentials."""
    from perseus_sim.cluster.pki import Authority

    pem = {key: b64decode(data) for key, data in certificates["perseus-operator-tls"].items()}
    if caller == "no certificate":
        credentials = grpc.ssl_channel_credentials(pem["ca.crt"])
    elif caller == "another authority":
        pair = Authority("other").issue("perseus-operator", hosts=("perseus-operator",), client=True)
        credentials = grpc.ssl_channel_credentials(pem["ca.crt"], pair.key, pair.certificate)
    else:
        credentials = grpc.ssl_channel_credentials(pem["ca.crt"], pem["tls.key"], pem["tls.crt"])
    address = f"{node.address_of('perseus-agent')}:{keys.DEFAULT_GRPC_PORT}"
    options = [("grpc.ssl_target_name_override", "perseus-agent")]
    with grpc.secure_channel(address, credentials, options) as channel:
        try:
            described = agent_pb2_grpc.AgentStub(channel).DescribeNode(
                agent_pb2.DescribeNodeRequest(), timeout=PATIENCE_S
            )
        except grpc.RpcError as error:
            if not isinstance(error, grpc.Call) or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    assert len(described.gpus) == 2, "as many simulated GPUs as requested"
    return True


def use_what_is_cluster_wide(api: Any) -> None:
    """Create a PowerBudget and an EnergyClass, wait for their status, and delete them."""
    objects, group = client.CustomObjectsApi(api), ("perseus.energy", "v1alpha1")
    for plural, kind, spec in (
        ("powerbudgets", "PowerBudget", {"watts": 1000}),
        ("energyclasses", "EnergyClass", {"objective": {"type": "MinEnergy"}}),
    ):
        body = {"apiVersion": "/".join(group), "kind": kind, "metadata": {"name": "hall"}, "spec": spec}
        objects.create_cluster_custom_object(*group, plural, body)
        until(
            f"the {kind} has a status",
            lambda plural=plural: "status" in objects.get_cluster_custom_object(*group, plural, "hall"),
        )
        objects.delete_cluster_custom_object(*group, plural, "hall")


def rights_are_exact(api: Any, server: Server) -> None:
    """Check that the operator used every rule of its role, and that no request was refused."""
    assert server.plane is not None
    requests = list(rbac.requests(server.plane.audit_log, rbac.user_name(NAMESPACE, "perseus-operator")))
    assert lacking(requests) == set()
    roles, name = client.RbacAuthorizationV1Api(api), "perseus-system-perseus-operator"
    allowed = rbac.granted(
        {"kind": "Role", **api.sanitize_for_serialization(role)}
        for role in (roles.read_cluster_role(name), roles.read_namespaced_role(f"{name}-epoch", NAMESPACE))
    )
    used = {request.permission for request in requests}
    assert sorted(map(str, allowed - used - OCCASIONAL)) == [], "granted and never used"
    assert sorted(map(str, used - allowed)) == [], "allowed by another role than the chart's"
