"""The real KEDA and the real HorizontalPodAutoscaler, on the real API server, ask the operator's door and scale by it.

No kubelet runs, so pods stay Pending: an autoscaler counts them all the same. The load is virtual, the advice and the
door are the operator's own. Of a LeaderWorkerSet there is the CRD; what its controller writes into the status is
written here. Skipped where KEDA is not built (``make binaries``).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from kubernetes.config import new_client_from_config
from tests.e2e.keda import CALLER, assets_with_keda, install, module, scaled_object
from tests.waiting import eventually

from perseus_core import keys
from perseus_operator.clients.credentials import Credentials
from perseus_operator.controller.advised import advised_replicas
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.scaler_service import ScalerService
from perseus_proto.externalscaler.externalscaler_pb2_grpc import add_ExternalScalerServicer_to_server
from perseus_sim.cluster.control_plane import control_plane
from perseus_sim.cluster.pki import Authority
from perseus_sim.processes import Processes

TEAM = "team"
SCALED = ("keda.sh", "v1alpha1", TEAM, "scaledobjects")
SETS = ("leaderworkerset.x-k8s.io", "v1", TEAM, "leaderworkersets")
PATIENCE_S = 180.0

pytestmark = pytest.mark.processes


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
        body = scaled_object(name, self.door, pool=pool, kind=kind, **further)
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
    assets = assets_with_keda()
    jobs, authority = KnownJobs(100), Authority("perseus-scaler")
    with (
        control_plane(assets, folder / "plane") as plane,
        Processes(folder / "logs") as processes,
        new_client_from_config(str(plane.kubeconfig)) as api,
        Door(jobs, authority, folder) as door,
    ):
        client.CoreV1Api(api).create_namespace({"metadata": {"name": TEAM}})
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
