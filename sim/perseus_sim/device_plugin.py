"""Simulated GPUs on a real node: makes them, and offers them to the kubelet as ``nvidia.com/gpu``.

A sidecar of the agent where the chart simulates GPUs (``python -m perseus_sim.device_plugin``), in the place of the
NVIDIA device plugin. The kubelet allocates, PodResources names the UUIDs, and the agent drives them through
``perseus_sim.gpu``: the production path. A pod that gets some finds their files, which its simulated trainer moves,
below PERSEUS_SIM_GPUS. Only what the agent's image holds may be imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_proto.deviceplugin import deviceplugin_pb2_grpc as stubs
from perseus_sim.gpu import ENV_GPUS
from perseus_sim.model import MODELS, GpuModel
from perseus_sim.shared_gpu import GpuSpec, SharedGpu

RESOURCE: Final = "nvidia.com/gpu"
ENDPOINT: Final = "perseus-simulated-gpus.sock"
IN_CONTAINER: Final = "/var/run/perseus-simulated-gpus"
_NAMESPACE: Final = uuid.UUID("6f0f3a9e-3c5b-4b36-9f3a-5d3f5d2c9c11")
_CHECK_S: Final = 1.0
_CALL_TIMEOUT_S: Final = 5.0


def make_gpus(folder: Path, node_name: str, count: int, model: GpuModel) -> list[str]:
    """The UUIDs of a node's GPUs, the same at every start; those that are there keep their state, others go."""
    uuids = [f"GPU-{uuid.uuid5(_NAMESPACE, f'{node_name}/{model.name}/{index}')}" for index in range(count)]
    for surplus in {path.stem for path in folder.glob("*.gpu")} - set(uuids):
        (folder / f"{surplus}.gpu").unlink()
        (folder / f"{surplus}.json").unlink(missing_ok=True)
    for gpu_uuid in uuids:
        try:
            SharedGpu(folder / f"{gpu_uuid}.gpu").close()
        except (OSError, ValueError):
            power_mw = round(model.blocking_power_w * 1000)
            SharedGpu.create(folder, GpuSpec(gpu_uuid, model.name, model.clocks_mhz, power_mw)).close()
        (folder / f"{gpu_uuid}.gpu").chmod(0o666)  # trainers run as any user
    return uuids


class DevicePlugin(stubs.DevicePluginServicer):
    """What the kubelet asks of us."""

    def __init__(self, uuids: Sequence[str], folder: Path, stop: threading.Event) -> None:
        self._uuids = tuple(uuids)
        self._folder = folder
        self._stop = stop

    def GetDevicePluginOptions(self, request: Any, context: Any) -> messages.DevicePluginOptions:  # noqa: N802, ARG002
        return messages.DevicePluginOptions()

    def ListAndWatch(self, request: Any, context: Any) -> Iterator[messages.ListAndWatchResponse]:  # noqa: N802, ARG002
        """All of them, healthy; the stream must stay open, or the kubelet takes the devices for gone."""
        yield messages.ListAndWatchResponse(
            devices=[messages.Device(ID=name, health="Healthy") for name in self._uuids]
        )
        while context.is_active() and not self._stop.wait(_CHECK_S):
            pass

    def Allocate(self, request: messages.AllocateRequest, context: Any) -> messages.AllocateResponse:  # noqa: N802, ARG002
        """What a container gets: the names of its GPUs, as from the NVIDIA plugin, and the folder of the files."""
        mount = messages.Mount(container_path=IN_CONTAINER, host_path=str(self._folder))
        return messages.AllocateResponse(
            container_responses=[
                messages.ContainerAllocateResponse(
                    envs={"NVIDIA_VISIBLE_DEVICES": ",".join(wanted.devices_ids), ENV_GPUS: IN_CONTAINER},
                    mounts=[mount],
                )
                for wanted in request.container_requests
            ]
        )


def offer(kubelet: Path, plugin: DevicePlugin, stop: threading.Event) -> None:
    """Serve and register, again after every restart of the kubelet (which empties its folder), until told to stop."""
    socket = kubelet / ENDPOINT
    while not stop.is_set():
        socket.unlink(missing_ok=True)
        with ThreadPoolExecutor(max_workers=4) as threads:
            server = grpc.server(threads)
            stubs.add_DevicePluginServicer_to_server(plugin, server)
            server.add_insecure_port(f"unix:{socket}")
            server.start()
            try:
                if _register(kubelet):
                    print(f"offered as {RESOURCE}", flush=True)
                    while socket.exists() and not stop.wait(_CHECK_S):
                        pass
                else:
                    stop.wait(_CHECK_S)
            finally:
                server.stop(0).wait()


def _register(kubelet: Path) -> bool:
    request = messages.RegisterRequest(version="v1beta1", endpoint=ENDPOINT, resource_name=RESOURCE)
    with grpc.insecure_channel(f"unix:{kubelet / 'kubelet.sock'}") as channel:
        try:
            stubs.RegistrationStub(channel).Register(request, timeout=_CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            reason = error.details() if isinstance(error, grpc.Call) else error
            print(f"the kubelet refused, trying again: {reason}", file=sys.stderr, flush=True)
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="perseus_sim.device_plugin", description="Simulated GPUs on a real node.")
    parser.add_argument("--node-name", required=True, help="name of the node: part of the GPUs' UUIDs")
    parser.add_argument("--gpus", type=Path, required=True, help="folder of their files, the same on the node")
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--model", choices=sorted(MODELS), required=True, help="what they are")
    parser.add_argument("--kubelet", type=Path, required=True, help="the kubelet's folder of device plugins")
    settings = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    uuids = make_gpus(settings.gpus, settings.node_name, settings.count, MODELS[settings.model])
    with contextlib.suppress(KeyboardInterrupt):
        offer(settings.kubelet, DevicePlugin(uuids, settings.gpus, stop), stop)


if __name__ == "__main__":
    main()
