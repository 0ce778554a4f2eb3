"""The real KEDA and the real HorizontalPodAutoscaler, on the real API server, ask the operator's door and scale by it.

No kubelet runs, so pods stay Pending: an autoscaler counts them all the same. The load is virtual, the advice and the
door are the operator's own. Of a LeaderWorkerSet there is the CRD; what its controller writes into the status is
written here. Skipped where KEDA is not built (``make binaries``).
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import os
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import new_client_from_config
from kubernetes.utils import create_from_dict
from tests.waiting import eventually

from perseus_core import keys
from perseus_operator.clients.credentials import Credentials
from perseus_operator.controller.advised import advised_replicas
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.scaler_service import ScalerService
from perseus_proto.externalscaler.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from perseus_sim.cluster.control_plane import NoControlPlane, control_plane, find_assets
from perseus_sim.cluster.pki import Authority
from perseus_sim.processes import Processes, free_port

TEAM, KEDA, CALLER = "team", "keda", "perseus-keda"
BUILD = Path(__file__).resolve().parents[2] / "deploy" / "control-plane"
SCALED = ("keda.sh", "v1alpha1", TEAM, "scaledobjects")
SETS = ("leaderworkerset.x-k8s.io", "v1", TEAM, "leaderworkersets")
PATIENCE_S = 180.0
AT_ONCE = {"stabilizationWindowSeconds": 0, "tolerance": "0"}
"""Without them a test would wait five minutes for a scale-down, and a step of one among ten would not come."""

pytestmark = pytest.mark.processes


def module(product: str, name: str) -> Path:
    """The folder of a product's sources, which hold its CRDs."""
    for command in (["go", "mod", "download", name], ["go", "list", "-m", "-f", "{{.Dir}}", name]):
        environment = {**os.environ, "GOWORK": "off"}
        ran = subprocess.run(command, cwd=BUILD / product, capture_output=True, text=True, check=False, env=environment)
        if ran.returncode:
            pytest.skip(f"the sources of {name} are not there: {ran.stderr.strip()}")
    return Path(ran.stdout.strip())


class Site:
    """The API server with KEDA, and the door that it asks."""

    def __init__(self, api: Any, jobs: KnownJobs, door: str, processes: Processes) -> None:
        self.api, self.jobs, self.door, self.processes = api, jobs, door, processes
        self.apps, self.custom = client.AppsV1Api(api), client.CustomObjectsApi(api)
        self.hpas = client.AutoscalingV2Api(api)

    def advise(self, name: str, replicas: int | None) -> None:
        """The operator has advised this; None: nothing."""
        known = {} if replicas is None else {"replicas": replicas, "since": "2030-01-31T18:00:00Z"}
        metadata = {"namespace": TEAM, "name": name, "uid": name}
        body = {"kind": keys.POOL_KIND, "metadata": metadata, "status": {"advice": {"why": "In words.", **known}}}
        self.jobs.observe(body, keys.POOL_KIND)

    def deployment(self, name: str, replicas: int) -> None:
        labels = {"app": name}
        pods = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
        spec = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": pods}
        self.apps.create_namespaced_deployment(TEAM, {"metadata": {"name": name}, "spec": spec})

    def scaled(self, name: str, pool: str = "", kind: str = "Deployment", **further: Any) -> None:
        """A ScaledObject as docs and samples have it."""
        metadata = {"scalerAddress": self.door, "enableTLS": "true", "pool": pool or name}
        trigger = {"type": "external", "metadata": metadata}
        trigger["authenticationRef"] = {"name": "perseus", "kind": "ClusterTriggerAuthentication"}
        version = "apps/v1" if kind == "Deployment" else "leaderworkerset.x-k8s.io/v1"
        spec = {
            "scaleTargetRef": {"apiVersion": version, "kind": kind, "name": name},
            "pollingInterval": 1,
            "minReplicaCount": 1,
            "maxReplicaCount": 40,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}}},
            "triggers": [trigger],
            **further,
        }
        body = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name}, "spec": spec}
        self.custom.create_namespaced_custom_object(*SCALED, body)

    def replicas(self, name: str) -> int:
        return int(self.apps.read_namespaced_deployment(name, TEAM).spec.replicas)

    def ready(self, name: str) -> tuple[str, str]:
        found = self.custom.get_namespaced_custom_object(*SCALED, name).get("status", {}).get("conditions", [])
        return next(((one["status"], one.get("message", "")) for one in found if one["type"] == "Ready"), ("", ""))

    def until(self, name: str, replicas: int) -> None:
        def there() -> bool:
            assert self.replicas(name) == replicas, f"{self.replicas(name)} of {replicas}; {self.ready(name)}"
            return True

        eventually(there, f"{name} is not scaled to {replicas}", 0.5, PATIENCE_S, (AssertionError,))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("keda")
    try:
        assets = find_assets()
    except NoControlPlane as missing:
        pytest.skip(f"KEDA needs a real API server: {missing}")
    absent = [name for name in ("keda", "keda-adapter", "kube-controller-manager") if not (assets / name).exists()]
    if absent:
        pytest.skip(f"KEDA is not built: no {', '.join(absent)} in {assets}: run `make binaries`")
    jobs, authority = KnownJobs(100), Authority("perseus-scaler")
    with (
        control_plane(assets, folder / "plane") as plane,
        Processes(folder / "logs") as processes,
        new_client_from_config(str(plane.kubeconfig)) as api,
        Door(jobs, authority, folder) as door,
    ):
        install(api, authority, plane.kubeconfig, assets, folder, processes)
        yield Site(api, jobs, door, processes)


class Door:
    """The door on a thread of its own, with an event loop."""

    def __init__(self, jobs: KnownJobs, authority: Authority, folder: Path) -> None:
        pair = authority.issue("scaler", hosts=("localhost",))
        for name, data in (("crt", pair.certificate), ("key", pair.key)):
            (folder / f"scaler.{name}").write_bytes(data)
        (folder / "ca.crt").write_bytes(authority.certificate)
        self._files = Credentials(str(folder / "scaler.crt"), str(folder / "scaler.key"), str(folder / "ca.crt"), "")
        self._service = ScalerService(partial(advised_replicas, jobs), frozenset({CALLER}))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> str:
        self._thread.start()
        add = partial(add_ExternalScalerServicer_to_server, self._service)
        started = RpcServer.start("127.0.0.1:0", self._files, add)
        self._server = asyncio.run_coroutine_threadsafe(started, self._loop).result(30)
        return f"localhost:{self._server.address.rpartition(':')[2]}"

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(0.0), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


def install(api: Any, authority: Authority, kubeconfig: Path, assets: Path, folder: Path, processes: Processes) -> None:
    """What KEDA's chart installs: CRDs, rights of autoscalers, the APIService, the two programs, and our credential."""
    crds = [*(module("keda", "github.com/kedacore/keda/v2") / "config" / "crd" / "bases").glob("*.yaml")]
    definitions = client.ApiextensionsV1Api(api)
    for path in crds:
        definitions.create_custom_resource_definition(yaml.safe_load(path.read_text(encoding="utf-8")))
    core = client.CoreV1Api(api)
    for namespace in (TEAM, KEDA):
        core.create_namespace({"metadata": {"name": namespace}})
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


def test_a_deployment_follows_the_advice_exactly_and_keeps_its_replicas_where_there_is_none(site: Site) -> None:
    site.advise("chat", 2)
    site.deployment("chat", 4)
    site.scaled("chat")
    for replicas in (2, 11, 12, 11, 1):  # of more than ten, one more or less is within the usual tolerance
        site.advise("chat", replicas)
        site.until("chat", replicas)
    site.advise("chat", 6)
    site.until("chat", 6)
    site.advise("chat", None)
    eventually(lambda: site.ready("chat")[0] == "False", "KEDA does not notice", 0.5, PATIENCE_S)
    assert site.replicas("chat") == 6
    site.advise("chat", 3)
    site.until("chat", 3)


def test_a_leader_worker_set_follows_it_too(site: Site) -> None:
    source = module("lws", "sigs.k8s.io/lws") / "config" / "crd" / "bases"
    [path] = source.glob("*_leaderworkersets.yaml")
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    body["spec"].pop("conversion", None)
    client.ApiextensionsV1Api(site.api).create_custom_resource_definition(body)
    containers = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
    spec = {"replicas": 3, "leaderWorkerTemplate": {"size": 2, "workerTemplate": containers}}
    made = {"apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet", "metadata": {"name": "large"}}
    eventually(
        lambda: bool(site.custom.create_namespaced_custom_object(*SETS, {**made, "spec": spec})),
        "the CRD is not served", 0.5, 60, (client.exceptions.ApiException,),
    )  # fmt: skip
    site.advise("large", 5)
    site.scaled("large", kind="LeaderWorkerSet")

    def follows(replicas: int) -> bool:
        wanted = site.custom.get_namespaced_custom_object(*SETS, "large")["spec"]["replicas"]
        status = {"status": {"replicas": wanted, "hpaPodSelector": "app=large"}}
        site.custom.patch_namespaced_custom_object_status(*SETS, "large", status)
        assert wanted == replicas, f"{wanted} of {replicas}; {site.ready('large')}"
        return True

    for replicas in (5, 2, 7):
        site.advise("large", replicas)
        eventually(partial(follows, replicas), "it is not scaled", 0.5, PATIENCE_S, (AssertionError,))


def test_a_pool_of_another_namespace_cannot_be_asked_for(site: Site) -> None:
    site.jobs.observe(
        {
            "kind": keys.POOL_KIND,
            "metadata": {"namespace": "other", "name": "theirs", "uid": "theirs"},
            "status": {"advice": {"why": "In words.", "replicas": 9, "since": "2030-01-31T18:00:00Z"}},
        },
        keys.POOL_KIND,
    )
    site.deployment("thief", 2)
    site.scaled("thief", pool="theirs")
    eventually(lambda: site.ready("thief")[0] == "False", "it is ready", 0.5, PATIENCE_S)
    assert site.replicas("thief") == 2


def test_beside_another_trigger_the_greater_number_holds(site: Site) -> None:
    """KEDA's own cron trigger wants four all day."""
    site.advise("both", 2)
    site.deployment("both", 1)
    always = {"timezone": "Etc/UTC", "start": "0 0 * * *", "end": "59 23 * * *", "desiredReplicas": "4"}
    site.scaled("both")
    site.until("both", 2)
    body = site.custom.get_namespaced_custom_object(*SCALED, "both")
    body["spec"]["triggers"].append({"type": "cron", "metadata": always})
    site.custom.replace_namespaced_custom_object(*SCALED, "both", body)
    site.until("both", 4)
    site.advise("both", 9)
    site.until("both", 9)
    site.advise("both", 2)
    site.until("both", 4)


def test_an_edit_by_hand_is_undone_and_nothing_swings(site: Site) -> None:
    site.advise("edited", 5)
    site.deployment("edited", 5)
    site.scaled("edited")
    site.until("edited", 5)
    for replicas in (12, 1):
        site.apps.patch_namespaced_deployment_scale("edited", TEAM, {"spec": {"replicas": replicas}})
        site.until("edited", 5)
    seen: list[int] = []
    eventually(lambda: seen.append(site.replicas("edited")) or len(seen) > 60, "never", 0.5, PATIENCE_S)
    assert [value for value, _ in itertools.groupby(seen)] == [5]
