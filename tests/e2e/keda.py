"""The real KEDA beside an API server of this machine: what its chart installs, and its two programs."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.utils import create_from_dict
from tests.waiting import eventually

from perseus_sim.cluster.control_plane import NoControlPlane, find_assets
from perseus_sim.cluster.pki import Authority
from perseus_sim.processes import Processes, free_port

KEDA, CALLER = "keda", "perseus-keda"
BUILD = Path(__file__).resolve().parents[2] / "deploy" / "control-plane"
AT_ONCE = {"stabilizationWindowSeconds": 0, "tolerance": "0"}
"""Without them a test would wait five minutes for a scale-down, and a step of one among ten would not come."""


def assets_with_keda() -> Path:
    """The folder of the binaries; skips the test where KEDA is not among them."""
    try:
        assets = find_assets()
    except NoControlPlane as missing:
        pytest.skip(f"KEDA needs a real API server: {missing}")
    absent = [name for name in ("keda", "keda-adapter", "kube-controller-manager") if not (assets / name).exists()]
    if absent:
        pytest.skip(f"KEDA is not built: no {', '.join(absent)} in {assets}: run `make binaries`")
    return assets


def scaled_object(
    name: str, door: str, *, pool: str = "", kind: str = "Deployment", most: int = 40, **further: Any
) -> dict[str, Any]:
    """A ScaledObject as docs and samples have it.

    Args:
        name: of the workload, and of the object.
        door: host:port at which the operator answers.
        pool: that is asked for, if it has another name.
        kind: of the workload.
        most: replicas.
        further: fields of its spec.
    """
    trigger = {
        "type": "external",
        "metadata": {"scalerAddress": door, "enableTLS": "true", "pool": pool or name},
        "authenticationRef": {"name": "perseus", "kind": "ClusterTriggerAuthentication"},
    }
    version = "apps/v1" if kind == "Deployment" else "leaderworkerset.x-k8s.io/v1"
    spec = {
        "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": name},
        "pollingInterval": 1,
        "minReplicaCount": 1,
        "maxReplicaCount": most,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}}},
        "triggers": [trigger],
        **further,
    }
    return {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name}, "spec": spec}


def module(product: str, name: str) -> Path:
    """The folder of a product's sources, which hold its CRDs."""
    for command in (["go", "mod", "download", name], ["go", "list", "-m", "-f", "{{.Dir}}", name]):
        environment = {**os.environ, "GOWORK": "off"}
        ran = subprocess.run(command, cwd=BUILD / product, capture_output=True, text=True, check=False, env=environment)
        if ran.returncode:
            pytest.skip(f"the sources of {name} are not there: {ran.stderr.strip()}")
    return Path(ran.stdout.strip())


def install(api: Any, authority: Authority, kubeconfig: Path, assets: Path, folder: Path, processes: Processes) -> None:
    """What KEDA's chart installs: CRDs, rights of autoscalers, the APIService, the two programs, and our credential."""
    crds = [*(module("keda", "github.com/kedacore/keda/v2") / "config" / "crd" / "bases").glob("*.yaml")]
    definitions = client.ApiextensionsV1Api(api)
    for path in crds:
        definitions.create_custom_resource_definition(yaml.safe_load(path.read_text(encoding="utf-8")))
    core = client.CoreV1Api(api)
    core.create_namespace({"metadata": {"name": KEDA}})
    port, metrics = free_port(), free_port()
    caller = authority.issue(CALLER, hosts=(CALLER,), client=True)
    secret = {"ca.crt": authority.certificate, "tls.crt": caller.certificate, "tls.key": caller.key}
    parameters = (("caCert", "ca.crt"), ("tlsClientCert", "tls.crt"), ("tlsClientKey", "tls.key"))
    name = "keda-external-metrics"
    for document in (
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "perseus-keda-tls", "namespace": KEDA},
            "data": {key: base64.b64encode(value).decode() for key, value in secret.items()},
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": [{"apiGroups": ["external.metrics.k8s.io"], "resources": ["*"], "verbs": ["*"]}],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}],
        },
        # Of this name's address the API server asks the adapter, which is a process of this machine.
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "keda-metrics-apiserver", "namespace": KEDA},
            "spec": {"type": "ExternalName", "externalName": "localhost"},
        },
    ):
        create_from_dict(api, document)
    eventually(
        lambda: bool(client.CustomObjectsApi(api).list_cluster_custom_object(
            "keda.sh", "v1alpha1", "clustertriggerauthentications")["items"] is not None),
        "KEDA's CRDs are not served", 0.5, 60, (client.exceptions.ApiException,),
    )  # fmt: skip
    references = [{"parameter": parameter, "name": "perseus-keda-tls", "key": key} for parameter, key in parameters]
    client.CustomObjectsApi(api).create_cluster_custom_object(
        "keda.sh",
        "v1alpha1",
        "clustertriggerauthentications",
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ClusterTriggerAuthentication",
            "metadata": {"name": "perseus"},
            "spec": {"secretTargetRef": references},
        },
    )
    certificates = folder / "certs"
    certificates.mkdir()
    own = Authority("keda")
    pair = own.issue(
        "keda-operator", hosts=("localhost", "keda-operator", "keda-metrics-apiserver.keda.svc"), client=True
    )
    for file, data in (("ca.crt", own.certificate), ("tls.crt", pair.certificate), ("tls.key", pair.key)):
        (certificates / file).write_bytes(data)
    environment = {
        "KUBECONFIG": str(kubeconfig),
        "POD_NAMESPACE": KEDA,
        "WATCH_NAMESPACE": "",
        "KEDA_CLUSTER_OBJECT_NAMESPACE": KEDA,
    }
    operator = [
        str(assets / "keda"),
        f"--metrics-service-bind-address=127.0.0.1:{metrics}",
        "--metrics-bind-address=127.0.0.1:0",
        "--health-probe-bind-address=127.0.0.1:0",
        f"--cert-dir={certificates}",
        f"--ca-dir={certificates}",
        "--zap-log-level=info",
    ]
    processes.start("keda", operator, environment=environment)
    adapter = [
        str(assets / "keda-adapter"),
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--port={free_port()}",
        f"--metrics-service-address=localhost:{metrics}",
        f"--cert-dir={certificates}",
        f"--tls-cert-file={certificates / 'tls.crt'}",
        f"--tls-private-key-file={certificates / 'tls.key'}",
        *(f"--{name}-kubeconfig={kubeconfig}" for name in ("lister", "authentication", "authorization")),
    ]
    processes.start("keda-adapter", adapter, environment=environment)
    service = {"name": "keda-metrics-apiserver", "namespace": KEDA, "port": port}
    client.ApiregistrationV1Api(api).create_api_service(
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
            "spec": {
                "service": service,
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "caBundle": base64.b64encode(own.certificate).decode(),
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
    )
