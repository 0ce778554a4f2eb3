"""The page as the chart renders it for users of the cluster: its Service, its certificate, its one right."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509

from perseus_operator.controller.settings import parse_settings

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
ENABLED = {"web": {"enabled": True}}
HOST = "perseus-web.perseus-system.svc"


def operator_of(objects: dict[tuple[str, str], dict[str, Any]]) -> Any:
    [container] = objects["Deployment", "perseus-operator"]["spec"]["template"]["spec"]["containers"]
    return container


def test_by_default_only_the_pods_loopback_has_it(render: Render) -> None:
    objects = render()
    assert not [key for key in objects if key[1].endswith("-web") or key[1].endswith("-web-tls")]
    assert "auth-delegator" not in str(objects)
    assert parse_settings(operator_of(objects)["args"], {}).web_address.startswith("127.0.0.1:")


def test_the_operator_serves_what_the_service_names(render: Render) -> None:
    objects = render(ENABLED)
    container = operator_of(objects)
    settings = parse_settings(container["args"], {})
    [port] = [port for port in container["ports"] if port["name"] == "web"]
    assert settings.web_address == f"0.0.0.0:{port['containerPort']}"
    [service_port] = objects["Service", "perseus-web"]["spec"]["ports"]
    assert (service_port["port"], service_port["targetPort"]) == (443, "web")
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "web"]
    assert {settings.web_cert, settings.web_key} == {f"{mount['mountPath']}/tls.{part}" for part in ("crt", "key")}
    ingress = objects["NetworkPolicy", "perseus-operator"]["spec"]["ingress"]
    assert [rule for rule in ingress if rule["ports"] == [{"port": "web", "protocol": "TCP"}]]


def test_its_certificate_names_the_service(render: Render) -> None:
    data = render(ENABLED)["Secret", "perseus-web-tls"]["data"]
    certificate = x509.load_pem_x509_certificate(b64decode(data["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert HOST in names.get_values_for_type(x509.DNSName)
    made = render({**ENABLED, "tls": {"mode": "certManager"}})["Certificate", "perseus-web-tls"]["spec"]
    assert (HOST in made["dnsNames"], made["usages"]) == (True, ["server auth"])
    secrets = {"operator": "o", "agent": "a", "web": "mine"}
    objects = render({**ENABLED, "tls": {"mode": "secret", "secret": secrets}})
    volumes = objects["Deployment", "perseus-operator"]["spec"]["template"]["spec"]["volumes"]
    assert [volume["secret"]["secretName"] for volume in volumes if volume["name"] == "web"] == ["mine"]


def test_it_may_only_ask_who_users_are(render: Render) -> None:
    plain, enabled = render(), render(ENABLED)
    added = {key for key in enabled if key not in plain}
    assert added == {
        ("Service", "perseus-web"),
        ("Secret", "perseus-web-tls"),
        ("ClusterRoleBinding", "perseus-system-perseus-web"),
    }
    binding = enabled["ClusterRoleBinding", "perseus-system-perseus-web"]
    assert binding["roleRef"]["name"] == "system:auth-delegator"
    assert [subject["name"] for subject in binding["subjects"]] == ["perseus-operator"]
    assert "auth-delegator" not in str(render({**ENABLED, "rbac": {"create": False}}))


@pytest.mark.parametrize("peers", [[], [{"namespaceSelector": {"matchLabels": {"team": "ingress"}}}]])
def test_who_may_connect_is_for_the_site_to_say(render: Render, peers: list[Any]) -> None:
    objects = render({"web": {"enabled": True, "from": peers}})
    ingress = objects["NetworkPolicy", "perseus-operator"]["spec"]["ingress"]
    [rule] = [rule for rule in ingress if rule["ports"][0]["port"] == "web"]
    assert rule.get("from", []) == peers
