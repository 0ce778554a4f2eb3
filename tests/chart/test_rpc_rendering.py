"""The operator's RPC as the chart renders it: disabled by default, its network policy and its certificates."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from perseus_operator.controller.settings import parse_settings

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
ON: dict[str, Any] = {"rpc": {"enabled": True}}
CALLER = ("Secret", "perseus-infrastructure-tls")


def certificate(secret: dict[str, Any], key: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(b64decode(secret["data"][key]))


def names(found: x509.Certificate) -> list[str]:
    return found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)


def test_it_is_disabled_by_default(render: Render) -> None:
    objects = render()
    assert not [key for key in objects if "rpc" in key[1] or "infrastructure" in key[1]]
    assert "rpc" not in str(objects["Deployment", "perseus-operator"])
    assert "rpc" not in str(objects["NetworkPolicy", "perseus-operator"])


@pytest.mark.parametrize("mode", ["generated", "certManager", "secret"])
def test_the_operator_serves_the_port_of_the_service(render: Render, mode: str) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "facility"}}}]
    values = {
        "rpc": {"enabled": True, "port": 12345, "allowedNames": ["cooling", "power"], "from": peers},
        "tls": {"mode": mode, "secret": {"operator": "a", "agent": "b"}},
    }
    objects = render(values)
    template = objects["Deployment", "perseus-operator"]["spec"]["template"]
    (main,) = template["spec"]["containers"]
    settings = parse_settings(main["args"], {})
    assert settings.rpc_address == "0.0.0.0:12345"
    assert settings.rpc_allowed_sans == {"cooling", "power"}
    spec = objects["Service", "perseus-rpc"]["spec"]
    assert spec["selector"].items() <= template["metadata"]["labels"].items()
    (port,) = spec["ports"]
    ports = {each["name"]: each["containerPort"] for each in main["ports"]}
    assert (port["port"], ports[port["targetPort"]]) == (12345, 12345)
    ingress = objects["NetworkPolicy", "perseus-operator"]["spec"]["ingress"]
    assert {"ports": [{"port": "rpc", "protocol": "TCP"}], "from": peers} in ingress
    mounts = [mount["mountPath"] for mount in main["volumeMounts"]]
    assert bool(settings.rpc_ca) is (mode == "generated"), "otherwise one authority signs all certificates"
    assert ("/etc/perseus/infrastructure" in mounts) is (mode == "generated")


def test_without_peers_every_client_may_connect(render: Render) -> None:
    ingress = render(ON)["NetworkPolicy", "perseus-operator"]["spec"]["ingress"]
    assert {"ports": [{"port": "rpc", "protocol": "TCP"}]} in ingress


def test_the_operator_trusts_a_generated_caller_and_agents_do_not(render: Render) -> None:
    objects = render(ON)
    secret, operator = objects[CALLER], objects["Secret", "perseus-operator-tls"]
    assert set(secret["data"]) == {"ca.crt", "caller-ca.crt", "tls.crt", "tls.key"}, "no authority's key is stored"
    caller = certificate(secret, "tls.crt")
    caller.verify_directly_issued_by(certificate(secret, "caller-ca.crt"))
    assert names(caller) == ["perseus-infrastructure"]
    assert secret["data"]["ca.crt"] == operator["data"]["ca.crt"], "it verifies the operator"
    with pytest.raises((ValueError, InvalidSignature)):
        caller.verify_directly_issued_by(certificate(objects["Secret", "perseus-agent-tls"], "ca.crt"))
    volumes = objects["Deployment", "perseus-operator"]["spec"]["template"]["spec"]["volumes"]
    (mounted,) = [volume["secret"] for volume in volumes if volume["name"] == "infrastructure"]
    assert mounted["secretName"] == CALLER[1]
    assert [item["key"] for item in mounted["items"]] == ["caller-ca.crt"], "the operator does not get the caller's key"
    assert names(certificate(render({"rpc": {"enabled": True, "allowedNames": ["power"]}})[CALLER], "tls.crt")) == [
        "power"
    ]


def test_cert_manager_issues_the_callers_certificate(render: Render) -> None:
    objects = render({**ON, "tls": {"mode": "certManager"}})
    spec = objects["Certificate", CALLER[1]]["spec"]
    assert spec["dnsNames"] == ["perseus-infrastructure"]
    assert spec["issuerRef"] == objects["Certificate", "perseus-operator-tls"]["spec"]["issuerRef"]
    assert CALLER not in objects
    assert ("Certificate", CALLER[1]) not in render({"tls": {"mode": "certManager"}})


def test_with_the_users_secrets_no_certificate_is_made(render: Render) -> None:
    values = {**ON, "tls": {"mode": "secret", "secret": {"operator": "a", "agent": "b"}}}
    assert not [key for key in render(values) if key[0] in ("Secret", "Certificate")]
