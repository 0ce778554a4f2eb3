"""Simulated GPUs as ``nvidia.com/gpu``, in the place of NVIDIA's device plugin.

PodResources then names their UUIDs. Only what the image of simulated GPUs holds may be imported here.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perseus_proto.device_plugin import DevicePlugin, Offer
from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.shim_gpu import ENV_FOLDER, ENV_GPUS, IN_CONTAINER, STATE

RESOURCE: Final = "nvidia.com/gpu"
ENDPOINT: Final = "perseus-simulated-gpus.sock"


def gpu_plugin(uuids: Sequence[str], folder: Path) -> DevicePlugin:
    """A plugin that offers a folder's GPUs."""

    def grant(names: Sequence[str]) -> messages.ContainerAllocateResponse:
        """The names of a container's GPUs, as from the NVIDIA plugin, and the GPUs' folder."""
        return messages.ContainerAllocateResponse(
            envs={
                ENV_GPUS: ",".join(names),
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
