"""The door for KEDA as the chart renders it: disabled by default, its network policy, and who trusts whom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.test_rpc_rendering import certificate, names

from perseus_operator.controller.settings import parse_settings
from perseus_operator.servers.scaler_service import _pool_of
from perseus_proto.externalscaler import externalscaler_pb2 as messages

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
ON: dict[str, Any] = {"scaler": {"enabled": True}}
SAMPLE = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "scaledobject.yaml"


def test_it_is_disabled_by_default(render: Render) -> None:
    objects = render()
    assert not [key for key in objects if "scaler" in key[1] or "keda" in key[1]]
    for kind in ("Deployment", "NetworkPolicy"):
        assert "scaler" not in str(objects[kind, "perseus-operator"])


@pytest.mark.parametrize("mode", ["generated", "certManager", "secret"])
def test_the_operator_serves_the_port_of_the_service(render: Render, mode: str) -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]
    values = {
        "scaler": {"enabled": True, "port": 12345, "from": peers},
        "tls": {"mode": mode, "secret": {"operator": "a", "agent": "b", "scaler": "c"}},
    }
    objects = render(values)
    template = objects["Deployment", "perseus-operator"]["spec"]["template"]
    (main,) = template["spec"]["containers"]
    settings = parse_settings(main["args"], {})
    assert (settings.scaler_address, settings.scaler_allowed_sans) == ("0.0.0.0:12345", {"perseus-keda"})
    mounts = {mount["mountPath"] for mount in main["volumeMounts"]}
    for path in (settings.scaler_cert, settings.scaler_key, settings.scaler_ca):
        assert path.rpartition("/")[0] in mounts
    (port,) = objects["Service", "perseus-scaler"]["spec"]["ports"]
    ports = {each["name"]: each["containerPort"] for each in main["ports"]}
    assert (port["port"], ports[port["targetPort"]]) == (12345, 12345)
    ingress = objects["NetworkPolicy", "perseus-operator"]["spec"]["ingress"]
    assert {"ports": [{"port": "scaler", "protocol": "TCP"}], "from": peers} in ingress


def test_keda_and_the_operator_verify_each_other_by_generated_certificates(render: Render) -> None:
    objects = render(ON)
    serving, caller = objects["Secret", "perseus-scaler-tls"], objects["Secret", "perseus-keda-tls"]
    shown = certificate(serving, "tls.crt")
    assert any(name.startswith("perseus-scaler.") and name.endswith(".svc") for name in names(shown))
    assert certificate(caller, "tls.crt").subject.rfc4514_string() == "CN=perseus-keda"
    shown.verify_directly_issued_by(certificate(caller, "ca.crt"))


def test_only_public_parts_of_kedas_certificate_reach_the_operator(render: Render) -> None:
    template = render(ON)["Deployment", "perseus-operator"]["spec"]["template"]
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == "keda"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["caller-ca.crt"]


def test_the_authentication_names_a_secret_of_kedas_namespace(render: Render) -> None:
    objects = render(ON)
    references = objects["ClusterTriggerAuthentication", "perseus"]["spec"]["secretTargetRef"]
    assert {one["parameter"] for one in references} == {"caCert", "tlsClientCert", "tlsClientKey"}
    assert {one["name"] for one in references} == {"perseus-keda-tls"}
    without = render({"scaler": {"enabled": True, "kedaNamespace": ""}})
    assert ("ClusterTriggerAuthentication", "perseus") not in without


def test_the_sample_asks_the_service_of_the_chart_for_a_pool_of_its_namespace(render: Render) -> None:
    sample = yaml.safe_load(SAMPLE.read_text(encoding="utf-8"))
    (trigger,) = sample["spec"]["triggers"]
    (port,) = render(ON)["Service", "perseus-scaler"]["spec"]["ports"]
    assert trigger["metadata"]["scalerAddress"] == f"perseus-scaler.perseus-system.svc:{port['port']}"
    assert trigger["authenticationRef"] == {"name": "perseus", "kind": "ClusterTriggerAuthentication"}
    ref = messages.ScaledObjectRef(name="x", namespace=sample["metadata"]["namespace"])
    ref.scalerMetadata.update(trigger["metadata"])
    assert _pool_of(ref) == (sample["metadata"]["namespace"], "llama-70b")
    behavior = sample["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert {behavior[way]["tolerance"] for way in ("scaleUp", "scaleDown")} == {"0"}
