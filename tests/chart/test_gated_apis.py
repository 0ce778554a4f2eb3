"""APIs of Kubernetes 1.37 on the API server that is built here, where they are behind gates: what the chart asks of
them, and what the operator reads of them. Kubelets, which make pod certificates, are not here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes.aio.client as aio_client
import kubernetes.aio.config as aio_config
import pytest
from kubernetes import client
from kubernetes.config import new_client_from_config
from tests.chart.manifests import AGENT, OPERATOR, Render, pod

from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.kube.pods import group_of
from perseus_operator.errors import KubeNotFound
from perseus_operator.objects.values import Owner, PodGroup
from perseus_sim.cluster.control_plane import ControlPlane, NoControlPlane, control_plane, find_assets

GATES = ("PodCertificateRequest", "ClusterTrustBundle", "ClusterTrustBundleProjection", "GenericWorkload")
SIGNER = "pki.example.com/perseus"


@pytest.fixture(scope="module")
def assets() -> Path:
    try:
        return find_assets()
    except NoControlPlane as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def groups(assets: Path) -> tuple[str, str, str, str]:
    """Where PodGroups are: beta since 1.37."""
    answer = subprocess.run([assets / "kube-apiserver", "--version"], capture_output=True, text=True, check=True)
    minor = int(answer.stdout.split(".")[1])
    return "scheduling.k8s.io", "v1beta1" if minor >= 37 else "v1alpha2", "default", "podgroups"


@pytest.fixture(scope="module")
def plane(
    assets: Path, groups: tuple[str, str, str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    flags = (
        f"--feature-gates={','.join(f'{gate}=true' for gate in GATES)}",
        f"--runtime-config=certificates.k8s.io/v1beta1=true,{groups[0]}/{groups[1]}=true",
    )
    with control_plane(assets, tmp_path_factory.mktemp("gated"), api_flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[Any]:
    connect: Any = new_client_from_config
    with connect(str(plane.kubeconfig)) as connection:
        core = client.CoreV1Api(connection)
        core.create_namespace({"metadata": {"name": "perseus-system"}})
        for account in ("perseus-operator", "perseus-agent"):
            core.create_namespaced_service_account("perseus-system", {"metadata": {"name": account}})
        yield connection


@pytest.mark.parametrize("workload", [OPERATOR, AGENT])
@pytest.mark.parametrize("authority", ["", "pki"], ids=["ClusterTrustBundle", "ConfigMap"])
def test_the_api_server_takes_and_keeps_the_volumes_of_pod_certificates(
    api: Any, render: Render, workload: tuple[str, str], authority: str
) -> None:
    own = {
        "signerName": SIGNER,
        "authorityConfigMap": authority,
        "userAnnotations": {"pki.example.com/profile": "mutual"},
    }
    wanted = pod(render({"tls": {"mode": "podCertificate", "podCertificate": own}}), workload)
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "asked"}}
    kept = client.CoreV1Api(api).create_namespaced_pod("perseus-system", {**head, "spec": wanted}, dry_run="All")
    [volume] = [one for one in api.sanitize_for_serialization(kept)["spec"]["volumes"] if one["name"] == "tls"]
    [asked] = [one for one in wanted["volumes"] if one["name"] == "tls"]
    assert volume == asked, "a field that the API server does not know would be gone"


def test_a_pod_names_its_group_and_the_operator_reads_whose_it_is(
    api: Any, plane: ControlPlane, groups: tuple[str, str, str, str]
) -> None:
    version = "/".join(groups[:2])
    custom = client.CustomObjectsApi(api)
    spec = {"schedulingPolicy": {"gang": {"minCount": 2}}}
    head = {"apiVersion": version, "kind": "PodGroup", "metadata": {"name": "ranks"}, "spec": spec}
    made = custom.create_namespaced_custom_object(*groups, head)
    worker = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rank-0"},
        "spec": {"schedulingGroup": {"podGroupName": "ranks"}, "containers": [{"name": "train", "image": "train"}]},
    }
    core = client.CoreV1Api(api)
    core.create_namespaced_service_account("default", {"metadata": {"name": "ranks"}})
    worker["spec"]["serviceAccountName"] = "ranks"  # type: ignore[index]
    core.create_namespaced_pod("default", worker)
    # As it is stored: the client's own types may be older than the field.
    stored = json.loads(core.read_namespaced_pod("rank-0", "default", _preload_content=False).data)
    group = group_of(stored)
    assert group == PodGroup("scheduling.k8s.io", "ranks")

    async def read(wanted: PodGroup) -> Owner:
        configuration = aio_client.Configuration()
        await aio_config.load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
        kube = KubeClient(aio_client.ApiClient(configuration))
        try:
            return await kube.pod_group("default", wanted)
        finally:
            await kube.close()

    assert asyncio.run(read(group)) == Owner(version, "PodGroup", "ranks", made["metadata"]["uid"])
    for other in (PodGroup("scheduling.k8s.io", "gone"), PodGroup("scheduling.x-k8s.io", "ranks")):
        with pytest.raises(KubeNotFound):
            asyncio.run(read(other))
