"""Simulated GPUs on a real node: makes them, and offers them to the kubelet as ``nvidia.com/gpu``.

A DaemonSet of its own where the chart simulates GPUs (``python -m perseus_sim.gpus.device_plugin``), in the place of
the NVIDIA driver and device plugin. The kubelet allocates, PodResources names the UUIDs, and the agent drives them
through the library in the GPUs' folder, by NVML: the production path. A pod that gets some finds that folder, by which
its simulated trainer moves them, at PERSEUS_SIM_GPUS. Only what its own small image holds may be imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perseus_proto.device_plugin import DevicePlugin, Offer
from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_sim.gpus.nvml_shim import ENV_STATE, SONAME, ShimError
from perseus_sim.gpus.shim_gpu import ENV_FOLDER, STATE, NodeGpus, NoGpus, open_shim

RESOURCE: Final = "nvidia.com/gpu"
ENDPOINT: Final = "perseus-simulated-gpus.sock"
IN_CONTAINER: Final = "/var/run/perseus-simulated-gpus"
_NAMESPACE: Final = uuid.UUID("6f0f3a9e-3c5b-4b36-9f3a-5d3f5d2c9c11")
_DRIVER_REPLACED: Final = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH


def make_gpus(folder: Path, node_name: str, count: int, model: GpuModel, library: Path) -> NodeGpus:
    """A node's GPUs, the same at every start: GPUs that exist already retain their state.

    If other GPUs exist, processes that still hold those get the error that the driver was replaced, and start again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    installed = folder / SONAME
    if not installed.exists() or not filecmp.cmp(library, installed, shallow=False):
        partial = folder / f"{SONAME}.partial"
        shutil.copy(library, partial)
        partial.chmod(0o755)
        partial.replace(installed)  # a process that has loaded the old one continues with it
    names = [f"GPU-{uuid.uuid5(_NAMESPACE, f'{node_name}/{model.name}/{index}')}" for index in range(count)]
    gpus = NodeGpus.of(model, names)
    try:
        unchanged = NodeGpus.read(folder) == gpus
        open_shim(folder).close()
    except (NoGpus, ShimError):
        unchanged = False
    if not unchanged:
        with contextlib.suppress(ShimError):
            former = open_shim(folder)
            for call in ("nvmlDeviceGetClockInfo", "nvmlDeviceSetGpuLockedClocks"):
                former.inject(call, _DRIVER_REPLACED)
            former.close()
        gpus.create(folder)
        gpus.write(folder)
    return gpus


def gpu_plugin(uuids: Sequence[str], folder: Path) -> DevicePlugin:
    """A plugin that offers a folder's GPUs."""

    def grant(names: Sequence[str]) -> messages.ContainerAllocateResponse:
        """The names of a container's GPUs, as from the NVIDIA plugin, and the GPUs' folder."""
        return messages.ContainerAllocateResponse(
            envs={
                "NVIDIA_VISIBLE_DEVICES": ",".join(names),
                ENV_FOLDER: IN_CONTAINER,
                ENV_STATE: f"{IN_CONTAINER}/{STATE}",  # for processes that load the library by its name
            },
            mounts=[messages.Mount(container_path=IN_CONTAINER, host_path=str(folder))],
        )

    return DevicePlugin(uuids, grant)


def offer_gpus(
    kubelet: Path, uuids: Sequence[str], folder: Path, stop: threading.Event, heartbeat: Path | None = None
) -> None:
    """Offer a folder's GPUs to the kubelet until ``stop`` is set.

    The heartbeat file is touched as long as the kubelet has the present list.
    """
    Offer(
        kubelet,
        ENDPOINT,
        RESOURCE,
        lambda: gpu_plugin(uuids, folder),
        report=lambda line, offered: print(line, file=sys.stdout if offered else sys.stderr, flush=True),
        beat=heartbeat.touch if heartbeat else lambda: None,
    ).run(stop)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="perseus_sim.gpus.device_plugin", description="Simulated GPUs on a real node."
    )
    parser.add_argument("--node-name", required=True, help="name of the node: part of the GPUs' UUIDs")
    parser.add_argument("--gpus", type=Path, required=True, help="their folder, the same on the node")
    parser.add_argument("--library", type=Path, required=True, help=f"the {SONAME} to put into it")
    parser.add_argument("--heartbeat", type=Path, help="a file touched while the kubelet can be served, for probes")
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--model", choices=sorted(MODELS), required=True, help="what they are")
    parser.add_argument("--kubelet", type=Path, required=True, help="the kubelet's folder of device plugins")
    settings = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    model = MODELS[settings.model]
    gpus = make_gpus(settings.gpus, settings.node_name, settings.count, model, settings.library)
    with contextlib.suppress(KeyboardInterrupt):
        offer_gpus(settings.kubelet, gpus.uuids, settings.gpus, stop, settings.heartbeat)


if __name__ == "__main__":
    main()
