"""The webhook as the chart renders it: its service, the pods that it gets, and that it never blocks a pod."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from perseus_core import keys
from perseus_operator.api.energy_class import ClassSpec, pool_of_class
from perseus_operator.api.job import Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec, Server
from perseus_operator.api.workload import ServerKind
from perseus_operator.controller.settings import parse_settings
from perseus_operator.servers.webhook import CLASS_ID, REQUEST_ID, WEBHOOK_ID

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
CONFIGURATION = ("MutatingWebhookConfiguration", "perseus-system-perseus-webhook")
HOST = "perseus-webhook.perseus-system.svc"


def webhook(objects: dict[tuple[str, str], dict[str, Any]]) -> Any:
    return at(objects, WEBHOOK_ID)


def at(objects: dict[tuple[str, str], dict[str, Any]], path: str) -> Any:
    """The webhook that is served at a path."""
    [found] = [
        each for each in objects[CONFIGURATION]["webhooks"] if each["clientConfig"]["service"]["path"] == f"/{path}"
    ]
    return found


def selects(selector: Any, labels: dict[str, str]) -> bool:
    """Return whether the API server would select an object with these labels."""
    holds = {
        "In": lambda e: labels.get(e["key"]) in e["values"],
        "NotIn": lambda e: labels.get(e["key"]) not in e["values"],
        "Exists": lambda e: e["key"] in labels,
        "DoesNotExist": lambda e: e["key"] not in labels,
    }
    return all(holds[expression["operator"]](expression) for expression in selector["matchExpressions"])


def in_namespace(name: str, **labels: str) -> dict[str, str]:
    return {"kubernetes.io/metadata.name": name, **labels}


def test_it_is_disabled_by_default(render: Render) -> None:
    objects = render()
    assert not [key for key in objects if "webhook" in key[1] or key[0] == CONFIGURATION[0]]
    assert "webhook" not in str(objects["Deployment", "perseus-operator"])
    assert "webhook" not in str(objects["NetworkPolicy", "perseus-operator"])


def test_it_never_blocks_and_gets_only_new_pods(render: Render) -> None:
    configured = webhook(render({"webhook": {"enabled": True}}))
    assert configured["failurePolicy"] == "Ignore"
    assert configured["timeoutSeconds"] == 10
    assert configured["sideEffects"] == "None"
    assert configured["reinvocationPolicy"] == "IfNeeded"
    (rule,) = configured["rules"]
    assert (rule["apiGroups"], rule["resources"], rule["operations"]) == ([""], ["pods"], ["CREATE"])
    assert webhook(render({"webhook": {"enabled": True, "timeoutSeconds": 5}}))["timeoutSeconds"] == 5


def test_it_gets_only_labelled_pods_and_not_of_every_namespace(render: Render) -> None:
    configured = webhook(render({"webhook": {"enabled": True, "excludedNamespaces": ["kube-system", "infra"]}}))
    assert selects(configured["objectSelector"], {keys.LABEL_JOB: "gpt3"})
    assert not selects(configured["objectSelector"], {"app": "gpt3"})
    assert selects(configured["namespaceSelector"], in_namespace("training"))
    for name in ("kube-system", "infra", "perseus-system"):
        assert not selects(configured["namespaceSelector"], in_namespace(name))
    assert not selects(configured["namespaceSelector"], in_namespace("a", **{"perseus.energy/webhook": "ignore"}))
    for level, selected in (("privileged", True), ("baseline", False), ("restricted", False)):
        labels = in_namespace("a", **{"pod-security.kubernetes.io/enforce": level})
        assert selects(configured["namespaceSelector"], labels) is selected


@pytest.mark.parametrize("socket", ["auto", "hostPath", "resource"])
def test_every_namespace_gets_the_socket_in_the_way_that_it_admits(render: Render, socket: str) -> None:
    objects = render({"webhook": {"enabled": True, "socket": socket}})
    configured = {path: each for path in (WEBHOOK_ID, REQUEST_ID) for each in [at_most(objects, path)] if each}
    for level in ("privileged", "baseline", "restricted"):
        labels = in_namespace("a", **{"pod-security.kubernetes.io/enforce": level})
        ways = {path for path, each in configured.items() if selects(each["namespaceSelector"], labels)}
        mount = {WEBHOOK_ID} if level == "privileged" else set()
        assert ways == {"auto": mount or {REQUEST_ID}, "hostPath": mount, "resource": {REQUEST_ID}}[socket]
    for each in configured.values():
        assert each["failurePolicy"] == "Ignore"
        assert not selects(each["namespaceSelector"], in_namespace("kube-system"))
        assert not selects(each["namespaceSelector"], in_namespace("a", **{"perseus.energy/webhook": "ignore"}))
    (main,) = objects["Deployment", "perseus-operator"]["spec"]["template"]["spec"]["containers"]
    reads_nodes = ("ClusterRole", CONFIGURATION[1]) in objects
    assert parse_settings(main["args"], {}).webhook_resource is reads_nodes is (socket != "hostPath")


def at_most(objects: dict[tuple[str, str], dict[str, Any]], path: str) -> Any:
    """The webhook that is served at a path, if there is one."""
    paths = [each["clientConfig"]["service"]["path"] for each in objects[CONFIGURATION]["webhooks"]]
    return at(objects, path) if f"/{path}" in paths else None


@pytest.mark.parametrize("values", [{"operator": {"namespaces": ["a"]}}, {"agent": {"socketResource": False}}])
def test_where_the_operator_may_not_read_nodes_there_is_no_request(render: Render, values: dict[str, Any]) -> None:
    objects = render({"webhook": {"enabled": True}} | values)
    assert at_most(objects, REQUEST_ID) is None
    assert ("ClusterRole", CONFIGURATION[1]) not in objects
    with pytest.raises(Exception, match=r"webhook\.socket"):
        render({"webhook": {"enabled": True, "socket": "resource"}} | values)


def test_pods_of_a_class_are_labelled_before_they_are_given_the_socket(render: Render) -> None:
    objects = render({"webhook": {"enabled": True}})
    webhooks = objects[CONFIGURATION]["webhooks"]
    paths = [each["clientConfig"]["service"]["path"].removeprefix("/") for each in webhooks]
    assert paths == [CLASS_ID, CLASS_ID, WEBHOOK_ID, REQUEST_ID], "each sees what those before it have added"
    asked = [each for each in webhooks if each["clientConfig"]["service"]["path"] == f"/{CLASS_ID}"]

    def is_asked(pod: dict[str, str], **namespace: str) -> bool:
        labels = in_namespace("team-a", **namespace)
        return any(selects(e["objectSelector"], pod) and selects(e["namespaceSelector"], labels) for e in asked)

    assert not is_asked({"app": "train"})
    assert is_asked({"app": "train"}, **{keys.LABEL_CLASS: "frugal"})
    assert is_asked({keys.LABEL_CLASS: "frugal"})
    assert not is_asked({keys.LABEL_JOB: "gpt3", keys.LABEL_CLASS: "frugal"}, **{keys.LABEL_CLASS: "frugal"})
    assert not is_asked({keys.LABEL_CLASS: "frugal"}, **{"perseus.energy/webhook": "ignore"})
    for each in asked:
        assert each["failurePolicy"] == "Ignore"
        assert not selects(each["namespaceSelector"], in_namespace("kube-system", **{keys.LABEL_CLASS: "frugal"}))
    limited = render({"webhook": {"enabled": True}, "operator": {"namespaces": ["a"]}})
    assert at_most(limited, CLASS_ID) is None, "classes are cluster-wide"


def test_with_named_namespaces_it_gets_only_their_pods(render: Render) -> None:
    configured = webhook(render({"webhook": {"enabled": True}, "operator": {"namespaces": ["team-a"]}}))
    assert selects(configured["namespaceSelector"], in_namespace("team-a"))
    assert not selects(configured["namespaceSelector"], in_namespace("team-b"))


def test_the_operator_serves_what_the_api_server_calls(render: Render) -> None:
    values = {"webhook": {"enabled": True, "port": 12345}, "agent": {"socketDirectory": "/srv/perseus"}}
    objects = render(values)
    service = webhook(objects)["clientConfig"]["service"]
    assert (service["namespace"], service["path"]) == ("perseus-system", f"/{WEBHOOK_ID}")
    spec = objects["Service", service["name"]]["spec"]
    (port,) = spec["ports"]
    assert port["port"] == service["port"]
    template = objects["Deployment", "perseus-operator"]["spec"]["template"]
    assert spec["selector"].items() <= template["metadata"]["labels"].items()
    (main,) = template["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in main["ports"]}
    assert ports[port["targetPort"]] == 12345
    settings = parse_settings(main["args"], {})
    assert settings.webhook_address == "0.0.0.0:12345"
    assert settings.agent_socket == "/srv/perseus/agent.sock"
    assert f"--socket={settings.agent_socket}" in str(objects["DaemonSet", "perseus-agent"]), "the agents' socket"
    mounts = {mount["mountPath"]: mount for mount in main["volumeMounts"]}
    for path in (settings.webhook_cert, settings.webhook_key):
        mount = mounts[path.rpartition("/")[0]]
        assert "subPath" not in mount, "a subPath does not get renewed certificates"
    ingress = objects["NetworkPolicy", "perseus-operator"]["spec"]["ingress"]
    assert {"ports": [{"port": "webhook", "protocol": "TCP"}]} in ingress


LIMITS = {"mode": "Canary", "objective": {"maxSlowdown": None, "timePerOutputToken": {"limit": "50ms"}}}
OBSERVED = {"mode": "Observe", "objective": None}


@pytest.mark.parametrize(
    ("serving", "mode", "sets_clocks"),
    [({}, Mode.ENFORCE, True), (LIMITS, Mode.CANARY, True), (OBSERVED, Mode.OBSERVE, False), (None, None, False)],
    ids=["as it is", "with limits", "observed", "left out"],
)
def test_the_class_of_the_chart_serves_unless_its_values_say_otherwise(
    render: Render, serving: Any, mode: Mode | None, sets_clocks: bool
) -> None:
    values = {"webhook": {"enabled": True}, "energyClass": {"spec": {"serving": serving}}}
    spec = parse_spec(ClassSpec, render(values)["EnergyClass", "default"]["spec"])
    assert spec.mode is Mode.CANARY, "of training, whatever holds for servers"
    if mode is None:
        assert spec.serving is None
        return
    assert spec.serving is not None
    server = Server(api_version="apps/v1", kind=ServerKind.DEPLOYMENT, name="llama")
    pool = parse_spec(PoolSpec, pool_of_class(spec.serving, server, spec.priority))
    assert (pool.mode, pool.sets_clocks) == (mode, sets_clocks)


def test_a_generated_certificate_is_for_the_service(render: Render) -> None:
    objects = render({"webhook": {"enabled": True}})
    data = objects["Secret", "perseus-webhook-tls"]["data"]
    assert set(data) == {"ca.crt", "tls.crt", "tls.key"}, "the authority's key is not stored"
    assert webhook(objects)["clientConfig"]["caBundle"] == data["ca.crt"]
    authority, certificate = (x509.load_pem_x509_certificate(b64decode(data[key])) for key in ("ca.crt", "tls.crt"))
    certificate.verify_directly_issued_by(authority)
    assert certificate.subject != authority.subject, "or verification would take it for its own issuer"
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert HOST in names.get_values_for_type(x509.DNSName)
    assert (
        ExtendedKeyUsageOID.SERVER_AUTH in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    )
    mutual = objects["Secret", "perseus-operator-tls"]["data"]["ca.crt"]
    assert mutual != data["ca.crt"], "agents trust another authority than the webhook's"


def test_cert_manager_issues_and_injects(render: Render) -> None:
    objects = render({"webhook": {"enabled": True}, "tls": {"mode": "certManager"}})
    certificate = objects["Certificate", "perseus-webhook-tls"]["spec"]
    assert HOST in certificate["dnsNames"]
    assert certificate["issuerRef"]["name"] == "perseus-ca"
    assert certificate["usages"] == ["server auth"]
    annotations = objects[CONFIGURATION]["metadata"]["annotations"]
    assert annotations["cert-manager.io/inject-ca-from"] == "perseus-system/perseus-webhook-tls"
    assert "caBundle" not in webhook(objects)["clientConfig"]
    assert ("Secret", "perseus-webhook-tls") not in objects
    issuer = {"name": "corporate", "kind": "ClusterIssuer"}
    accepted = {"issuerRef": issuer, "allowClusterIssuer": True}
    values = {"webhook": {"enabled": True}, "tls": {"mode": "certManager", "certManager": accepted}}
    assert render(values)["Certificate", "perseus-webhook-tls"]["spec"]["issuerRef"] == issuer


def test_the_users_secrets_need_their_authority(render: Render) -> None:
    secret = {"operator": "a", "agent": "b", "webhook": "c"}
    values = {"webhook": {"enabled": True, "caBundle": "PEM"}, "tls": {"mode": "secret", "secret": secret}}
    objects = render(values)
    assert webhook(objects)["clientConfig"]["caBundle"] == b64encode(b"PEM").decode()
    volumes = objects["Deployment", "perseus-operator"]["spec"]["template"]["spec"]["volumes"]
    assert "c" in {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    for missing, message in (("caBundle", "webhook.caBundle"), ("secret", "tls.secret.webhook")):
        broken = {
            "webhook": {"enabled": True, "caBundle": "" if missing == "caBundle" else "PEM"},
            "tls": {"mode": "secret", "secret": secret | ({"webhook": ""} if missing == "secret" else {})},
        }
        with pytest.raises(RuntimeError, match=message):
            render(broken)


def test_null_removes_the_list_of_namespaces(render: Render) -> None:
    configured = webhook(render({"webhook": {"enabled": True, "excludedNamespaces": None}}))
    assert selects(configured["namespaceSelector"], in_namespace("kube-system"))
    assert not selects(configured["namespaceSelector"], in_namespace("perseus-system"))
