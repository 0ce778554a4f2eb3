"""The solver service as the chart renders it: disabled by default, and open to the operator alone."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from perseus_operator.controller.settings import parse_settings
from perseus_operator.servers.solver.settings import SolverSettings
from perseus_runtime.settings import parse_settings as parse

Objects = dict[tuple[str, str], dict[str, Any]]
Render = Callable[..., Objects]
ON: dict[str, Any] = {"solver": {"enabled": True}}
WORKERS, OPERATOR = ("Deployment", "perseus-solver"), ("Deployment", "perseus-operator")
SECRET = ("Secret", "perseus-solver-tls")
JOB = Path(__file__).resolve().parents[2] / "deploy" / "samples" / "solver-job.yaml"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "solver-service.md"


def pod(objects: Objects, key: tuple[str, str]) -> dict[str, Any]:
    template: dict[str, Any] = objects[key]["spec"]["template"]
    return template


def secret_of(template: dict[str, Any], path: str) -> tuple[str, list[str] | None]:
    """The Secret that is mounted at a path, and which of its keys; None: all."""
    [main] = template["spec"]["containers"]
    [name] = [mount["name"] for mount in main["volumeMounts"] if mount["mountPath"] == path]
    [source] = [volume["secret"] for volume in template["spec"]["volumes"] if volume["name"] == name]
    return source["secretName"], [item["key"] for item in source["items"]] if "items" in source else None


def test_it_is_disabled_by_default(render: Render) -> None:
    objects = render()
    assert not [key for key in objects if "solver" in key[1]]
    assert "solver" not in str(objects[OPERATOR])
    assert "solver" not in str(objects["NetworkPolicy", "perseus-operator"])


@pytest.mark.parametrize("mode", ["generated", "certManager", "secret"])
def test_the_operator_finds_the_workers_and_they_answer_it_alone(render: Render, mode: str) -> None:
    secrets = {"operator": "a", "agent": "b", "solver": "c"}
    values = {"solver": {"enabled": True, "port": 12345}, "tls": {"mode": mode, "secret": secrets}}
    objects = render(values)
    operator, workers = pod(objects, OPERATOR), pod(objects, WORKERS)
    [main], [worker] = operator["spec"]["containers"], workers["spec"]["containers"]
    asked, served = parse_settings(main["args"], {}), parse(SolverSettings, worker["args"], {})
    service = objects["Service", "perseus-solver"]
    assert asked.solver_address == "perseus-solver.perseus-system.svc:12345"
    assert service["spec"]["clusterIP"] == "None", "each address is a worker's"
    assert service["spec"]["selector"].items() <= workers["metadata"]["labels"].items()
    assert served.address == "0.0.0.0:12345"
    assert {port["containerPort"] for port in worker["ports"]} == {12345, 9478}
    assert served.allowed_sans == {asked.peer_name}

    own = "c" if mode == "secret" else "perseus-solver-tls"
    theirs = "a" if mode == "secret" else "perseus-operator-tls"
    assert secret_of(operator, "/etc/perseus/solver") == (own, ["ca.crt"]), "not the workers' key"
    assert secret_of(workers, "/etc/perseus/tls") == (own, None)
    assert secret_of(workers, "/etc/perseus/operator") == (theirs, ["ca.crt"]), "not the operator's key"
    assert (asked.solver_ca, served.tls_ca) == ("/etc/perseus/solver/ca.crt", "/etc/perseus/operator/ca.crt")


def test_a_generated_certificate_has_the_name_that_the_operator_asks_for(render: Render) -> None:
    objects = render(ON)
    data = objects[SECRET]["data"]
    own, authority = (x509.load_pem_x509_certificate(b64decode(data[key])) for key in ("tls.crt", "ca.crt"))
    own.verify_directly_issued_by(authority)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert "perseus-solver.perseus-system.svc" in names
    agents = x509.load_pem_x509_certificate(b64decode(objects["Secret", "perseus-agent-tls"]["data"]["ca.crt"]))
    with pytest.raises((ValueError, InvalidSignature)):
        own.verify_directly_issued_by(agents)


def test_workers_have_no_rights_and_open_no_connections(render: Render) -> None:
    objects = render(ON)
    spec = pod(objects, WORKERS)["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert "serviceAccountName" not in spec
    policy = objects["NetworkPolicy", "perseus-solver"]["spec"]
    assert policy["egress"] == []
    [work] = [rule for rule in policy["ingress"] if rule["ports"][0]["port"] == "grpc"]
    [caller] = work["from"]
    assert caller["podSelector"]["matchLabels"].items() <= pod(objects, OPERATOR)["metadata"]["labels"].items()
    opened = objects["NetworkPolicy", "perseus-operator"]["spec"]["egress"]
    [to] = [rule["to"] for rule in opened if rule["ports"] == [{"port": 9477, "protocol": "TCP"}]]
    assert to[0]["podSelector"]["matchLabels"].items() <= pod(objects, WORKERS)["metadata"]["labels"].items()


def test_an_autoscaler_decides_how_many_there_are(render: Render) -> None:
    assert render({"solver": {"enabled": True, "replicas": 5}})[WORKERS]["spec"]["replicas"] == 5
    scaled = {"enabled": True, "minReplicas": 3, "maxReplicas": 40, "unfinishedPerWorker": 2}
    objects = render({"solver": {"enabled": True, "replicas": 5, "autoscaling": scaled}})
    assert "replicas" not in objects[WORKERS]["spec"], "an upgrade would undo what the autoscaler did"
    spec = objects["HorizontalPodAutoscaler", "perseus-solver"]["spec"]
    assert spec["scaleTargetRef"]["name"] == "perseus-solver"
    assert (spec["minReplicas"], spec["maxReplicas"]) == (3, 40)
    [metric] = spec["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "2"}


def test_keda_asks_prometheus_itself(render: Render) -> None:
    """By the query that the documentation gives to an adapter."""
    scaled = {"enabled": True, "kedaPrometheus": "http://prometheus:9090", "maxReplicas": 7, "unfinishedPerWorker": 3}
    objects = render({"solver": {"enabled": True, "autoscaling": scaled}})
    assert "replicas" not in objects[WORKERS]["spec"]
    assert not [name for kind, name in objects if kind == "HorizontalPodAutoscaler"], "KEDA makes it"
    spec = objects["ScaledObject", "perseus-solver"]["spec"]
    assert spec["scaleTargetRef"] == {"name": "perseus-solver"}, "a Deployment by default"
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 7)
    [trigger] = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
    assert trigger["metadata"]["threshold"] == "3"
    [documented] = re.findall(r"```yaml\n(externalRules:.*?)```", PAGE.read_text(), re.DOTALL)
    [rule] = yaml.safe_load(documented)["externalRules"]
    own = 'namespace="perseus-system"'
    assert trigger["metadata"]["query"] == rule["metricsQuery"].replace("<<.LabelMatchers>>", own)


def test_pods_of_the_sample_job_are_workers_too(render: Render) -> None:
    """They have the labels that the Service selects, the certificate that the operator expects, and end when idle."""
    job = yaml.safe_load(JOB.read_text(encoding="utf-8"))
    workers, template = pod(objects := render(ON), WORKERS), job["spec"]["template"]
    assert objects["Service", "perseus-solver"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    for path in ("/etc/perseus/tls", "/etc/perseus/operator"):
        assert secret_of(template, path) == secret_of(workers, path)
    [ours], [theirs] = template["spec"]["containers"], workers["spec"]["containers"]
    settings, regular = parse(SolverSettings, ours["args"], {}), parse(SolverSettings, theirs["args"], {})
    assert settings.exit_when_idle_s > 0
    assert (settings.address, settings.tls_cert, settings.tls_ca) == (regular.address, regular.tls_cert, regular.tls_ca)
    assert ours["securityContext"] == theirs["securityContext"]
    assert template["spec"]["securityContext"] == workers["spec"]["securityContext"]
    assert template["spec"]["automountServiceAccountToken"] is False
    assert job["metadata"]["namespace"] == objects[WORKERS]["metadata"]["namespace"]
