"""Simulated GPUs on a real node: makes them, and offers them by a device plugin or as dynamic resources.

A DaemonSet of its own where the chart simulates GPUs (``python -m perseus_sim.gpus.offer``), in the place of the NVIDIA
driver and device plugin or DRA driver. The kubelet allocates, PodResources names the devices, and the agent drives them
through the library in the GPUs' folder, by NVML: the production path. A pod that gets some finds that folder, by which
its simulated trainer moves them, at PERSEUS_SIM_GPUS. Only what its own small image holds may be imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import filecmp
import shutil
import signal
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from perseus_sim.gpus.device_plugin import offer_gpus
from perseus_sim.gpus.dynamic_resources import CDI, Folders, offer_claims
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_sim.gpus.nvml_shim import SONAME, ShimError
from perseus_sim.gpus.shim_gpu import NoGpus, ShimGpus, open_shim

_NAMESPACE: Final = uuid.UUID("6f0f3a9e-3c5b-4b36-9f3a-5d3f5d2c9c11")
_DRIVER_REPLACED: Final = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH


def make_gpus(folder: Path, node_name: str, count: int, model: GpuModel, library: Path) -> ShimGpus:
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
    gpus = ShimGpus.of(model, names)
    try:
        unchanged = ShimGpus.read(folder) == gpus
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="perseus_sim.gpus.offer", description="Simulated GPUs on a real node.")
    parser.add_argument("--node-name", required=True, help="name of the node: part of the GPUs' UUIDs")
    parser.add_argument("--gpus", type=Path, required=True, help="their folder, the same on the node")
    parser.add_argument("--library", type=Path, required=True, help=f"the {SONAME} to put into it")
    parser.add_argument("--heartbeat", type=Path, help="a file touched while the kubelet can be served, for probes")
    parser.add_argument("--count", type=int, required=True, help="how many")
    parser.add_argument("--model", choices=sorted(MODELS), required=True, help="what they are")
    ways = parser.add_mutually_exclusive_group(required=True)
    ways.add_argument("--device-plugins", type=Path, help="the kubelet's folder of these: pods ask for nvidia.com/gpu")
    ways.add_argument("--registry", type=Path, help="the kubelet's folder of drivers' sockets: pods claim GPUs")
    parser.add_argument("--driver", type=Path, help="with --registry: the driver's own folder of the kubelet's")
    parser.add_argument("--cdi", type=Path, default=CDI, help=f"with --registry: folder of CDI; default: {CDI}")
    settings = parser.parse_args(arguments)
    if settings.registry and not settings.driver:
        parser.error("--driver: required with --registry")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    model = MODELS[settings.model]
    gpus = make_gpus(settings.gpus, settings.node_name, settings.count, model, settings.library)
    with contextlib.suppress(KeyboardInterrupt):
        if settings.registry:
            folders = Folders(settings.registry, settings.driver, settings.cdi)
            offer_claims(folders, settings.node_name, gpus, settings.gpus, stop, heartbeat=settings.heartbeat)
        else:
            offer_gpus(settings.device_plugins, gpus.uuids, settings.gpus, stop, settings.heartbeat)


if __name__ == "__main__":
    main()
