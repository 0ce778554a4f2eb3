"""Simulated GPUs as dynamic resources, in the place of NVIDIA's DRA driver, whose names it has.

The driver publishes a node's GPUs in a ResourceSlice. The scheduler allots them to a ResourceClaim, which the kubelet
has the driver prepare: the answer names a container device (CDI) for each GPU, and a file on the node says what that
device brings into the container. PodResources then names pool and device, from which the agent concludes the UUID.

The driver keeps nothing: a claim says in its status what it holds. The kubelet finds the driver by a socket in its
folder of plugins, again after each of its starts; it then also deletes the slices of its node, so they are compared
every few seconds.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from perseus_core import keys
from perseus_proto.dra import dra_pb2 as messages
from perseus_proto.dra import dra_pb2_grpc as stubs
from perseus_proto.registration import registration_pb2 as registration
from perseus_proto.registration import registration_pb2_grpc as registration_stubs
from perseus_sim.gpus.cluster_api import ApiError, ClusterApi
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.shim_gpu import ENV_FOLDER, ENV_GPU, IN_CONTAINER, STATE, ShimGpus

DRIVER: Final = keys.DRA_DRIVER
CDI: Final = Path("/var/run/cdi")
"""Where container runtimes read what container devices are."""
CDI_KIND: Final = "perseus.energy/simulated-gpu"
SLICES: Final = "/apis/resource.k8s.io/v1/resourceslices"
CHECK_S: Final = 3.0
_THREADS: Final = 4


def resource_slice(node_name: str, gpus: ShimGpus) -> dict[str, Any]:
    """What the scheduler shall know of a node's GPUs, of which each is a device ``gpu-<number>``."""
    devices = [
        {
            "name": f"gpu-{index}",
            "attributes": {
                "type": {"string": "gpu"},
                "uuid": {"string": uuid},
                "productName": {"string": gpus.model},
            },
        }
        for index, uuid in enumerate(gpus.uuids)
    ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node_name}-{DRIVER}"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node_name,
            "pool": {"name": node_name, "generation": 1, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def container_devices(gpus: ShimGpus, folder: Path) -> dict[str, Any]:
    """A CDI specification: what a container gets with each GPU, and with any of them."""
    return {
        "cdiVersion": "0.6.0",
        "kind": CDI_KIND,
        "devices": [
            {"name": f"gpu-{index}", "containerEdits": {"env": [f"{ENV_GPU}{index}={uuid}"]}}
            for index, uuid in enumerate(gpus.uuids)
        ],
        "containerEdits": {
            "env": [f"{ENV_FOLDER}={IN_CONTAINER}", f"{ENV_STATE}={IN_CONTAINER}/{STATE}"],
            "mounts": [{"hostPath": str(folder), "containerPath": IN_CONTAINER, "options": ["rbind", "rw"]}],
        },
    }


@dataclass
class GpuDriver(stubs.DRAPluginServicer, registration_stubs.RegistrationServicer):
    """What the kubelet calls, on two sockets: to register the driver, and to prepare claims."""

    api: ClusterApi
    node_name: str
    endpoint: Path
    """The socket at which claims are prepared."""
    say: Callable[[str, bool], None]
    """Called with a line, and whether the kubelet has registered the driver."""

    def GetInfo(self, request: Any, context: Any) -> registration.PluginInfo:  # noqa: N802, ARG002
        """Who it is."""
        return registration.PluginInfo(
            type="DRAPlugin", name=DRIVER, endpoint=str(self.endpoint), supported_versions=["v1.DRAPlugin"]
        )

    def NotifyRegistrationStatus(  # noqa: N802
        self,
        request: registration.RegistrationStatus,
        context: Any,  # noqa: ARG002
    ) -> registration.RegistrationStatusResponse:
        """Whether the kubelet has registered it."""
        done = request.plugin_registered
        self.say(f"registered as {DRIVER}" if done else f"the kubelet did not register {DRIVER}: {request.error}", done)
        return registration.RegistrationStatusResponse()

    def NodePrepareResources(  # noqa: N802
        self,
        request: messages.NodePrepareResourcesRequest,
        context: Any,  # noqa: ARG002
    ) -> messages.NodePrepareResourcesResponse:
        """The container devices of each claim; of a claim that cannot be prepared, why."""
        return messages.NodePrepareResourcesResponse(
            claims={claim.uid: self._prepare(claim) for claim in request.claims}
        )

    def NodeUnprepareResources(  # noqa: N802
        self,
        request: messages.NodeUnprepareResourcesRequest,
        context: Any,  # noqa: ARG002
    ) -> messages.NodeUnprepareResourcesResponse:
        """Nothing is kept, so nothing is undone."""
        done = messages.NodeUnprepareResourceResponse()
        return messages.NodeUnprepareResourcesResponse(
            claims=dict.fromkeys((claim.uid for claim in request.claims), done)
        )

    def _prepare(self, claim: messages.Claim) -> messages.NodePrepareResourceResponse:
        try:
            path = f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}"
            stored = self.api.request("GET", path)
            if stored["metadata"]["uid"] != claim.uid:
                return messages.NodePrepareResourceResponse(error=f"claim {claim.name} is another one now")
            results = stored["status"]["allocation"]["devices"]["results"]
            devices = [
                messages.Device(
                    request_names=[result["request"]],
                    pool_name=result["pool"],
                    device_name=result["device"],
                    cdi_device_ids=[f"{CDI_KIND}={result['device']}"],
                )
                for result in results
                if (result["driver"], result["pool"]) == (DRIVER, self.node_name)
            ]
        except ApiError as error:
            return messages.NodePrepareResourceResponse(error=str(error))
        except (KeyError, TypeError):
            return messages.NodePrepareResourceResponse(error=f"claim {claim.name} is not allocated")
        return messages.NodePrepareResourceResponse(devices=devices)


def publish(api: ClusterApi, wanted: dict[str, Any]) -> None:
    """Create the slice, or replace it with the next generation of its pool if it differs.

    Raises:
        ApiError: the API server does not answer or refuses.
    """
    path = f"{SLICES}/{wanted['metadata']['name']}"
    try:
        published = api.request("GET", path)
    except ApiError as error:
        if error.status != 404:
            raise
        api.request("POST", SLICES, wanted)
        return
    pool = published["spec"]["pool"]
    same = {**wanted["spec"], "pool": pool}
    if published["spec"] != same:
        spec = {**wanted["spec"], "pool": {**wanted["spec"]["pool"], "generation": pool["generation"] + 1}}
        api.request("PUT", path, {**wanted, "metadata": published["metadata"], "spec": spec})


@dataclass(frozen=True)
class Folders:
    """Folders of a node that a driver writes to."""

    registry: Path
    """In which the kubelet looks for the sockets of plugins and drivers."""
    driver: Path
    """The driver's own."""
    cdi: Path = CDI


def offer_claims(
    folders: Folders,
    node_name: str,
    gpus: ShimGpus,
    folder: Path,
    stop: threading.Event,
    *,
    heartbeat: Path | None = None,
    api: ClusterApi | None = None,
) -> None:
    """Offer a folder's GPUs as dynamic resources until ``stop`` is set.

    An API server that is absent or refuses is asked again. The heartbeat file is touched as long as the kubelet has
    registered the driver and the slice is the present one.

    Raises:
        ApiError: this is no pod, and no API server was given.
        OSError: a folder of the kubelet or of container devices cannot be written.
    """
    api = api or ClusterApi.of_pod()
    registered = threading.Event()
    reported = ""

    def say(line: str, good: bool) -> None:
        nonlocal reported
        if line != reported:
            reported = line
            print(line, file=sys.stdout if good else sys.stderr, flush=True)

    def kubelet_said(line: str, done: bool) -> None:
        registered.set() if done else registered.clear()
        say(line, done)

    driver_socket, registry_socket = folders.driver / "dra.sock", folders.registry / f"{DRIVER}.sock"
    driver = GpuDriver(api, node_name, driver_socket, kubelet_said)
    _write(folders.cdi / f"{CDI_KIND.replace('/', '-')}.json", container_devices(gpus, folder))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dra") as threads:
        servers = [grpc.server(threads) for _ in range(2)]
        stubs.add_DRAPluginServicer_to_server(driver, servers[0])
        registration_stubs.add_RegistrationServicer_to_server(driver, servers[1])
        try:
            # The driver's first: the kubelet may call as soon as it finds the other.
            for server, socket in zip(servers, (driver_socket, registry_socket), strict=True):
                socket.parent.mkdir(parents=True, exist_ok=True)
                socket.unlink(missing_ok=True)
                server.add_insecure_port(f"unix:{socket}")
                server.start()
            wanted = resource_slice(node_name, gpus)
            while True:
                try:
                    publish(api, wanted)
                except ApiError as error:
                    say(f"the GPUs are not published, trying again: {error}", False)
                else:
                    if registered.is_set():
                        say(f"offered as {DRIVER}", True)
                        if heartbeat:
                            heartbeat.touch()
                if stop.wait(CHECK_S):
                    return
        finally:
            for server in servers:
                server.stop(0).wait()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    partial.replace(path)
