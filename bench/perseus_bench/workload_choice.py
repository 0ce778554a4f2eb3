"""Which workload computes, by the option ``--workload``."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from perseus_agent.devices.base import Device
from perseus_agent.errors import SettingsError
from perseus_bench.cuda import CudaWorkload
from perseus_bench.workload import Workload, WorkloadFailed


def open_workload(choice: str, device: Device, python: str) -> tuple[Workload | None, str]:
    """Open the workload that ``--workload`` names.

    Args:
        choice: ``auto``, ``cuda``, ``none``, or ``module:factory[:argument]``, whose ``factory(device, argument)``
            returns a ``Workload``.
        device: the GPU.
        python: the interpreter that has PyTorch.

    Returns:
        The workload, and a sentence that says why there is none; empty where there is one.

    Raises:
        SettingsError: the choice names nothing that can be called.
        WorkloadFailed: ``cuda`` was demanded and cannot be had.
    """
    if choice == "none":
        return None, "--workload none: the reported clock was read, speed was not measured"
    if choice in ("auto", "cuda"):
        try:
            return CudaWorkload(device.identity.uuid, python), ""
        except WorkloadFailed as error:
            if choice == "cuda":
                raise
            return None, f"no workload: {error}"
    module_name, _, rest = choice.partition(":")
    factory_name, _, argument = rest.partition(":")
    try:
        factory: Callable[[Device, str], Workload] = getattr(importlib.import_module(module_name), factory_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(
            f"--workload: {choice!r} is neither auto, cuda, none nor 'module:factory[:argument]': {error}"
        ) from error
    return factory(device, argument), ""
