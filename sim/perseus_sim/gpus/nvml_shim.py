"""Build the stand-in for libnvidia-ml.so.1 (``deploy/gpu-sim/nvml_shim.c``) and change its state, from any process.

For tests that drive the unmodified nvidia-ml-py and for GPU nodes that have none. The layout of the state is known to
the C file alone: everything here goes through its ``perseus_shim_*`` functions. Never imported by the agent.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parents[3] / "deploy" / "gpu-sim" / "nvml_shim.c"
SONAME: Final = "libnvidia-ml.so.1"
ENV_STATE: Final = "PERSEUS_NVML_SHIM_STATE"


class ShimError(Exception):
    """The shim cannot be built, or its state refuses a value."""


def build(folder: Path, compiler: str | None = None) -> Path:
    """Compile the shim to ``folder/libnvidia-ml.so.1``; LD_LIBRARY_PATH of the processes that use it names the folder.

    Raises:
        ShimError: there is no C compiler, or it fails.
    """
    chosen = compiler or next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if chosen is None:
        raise ShimError("no C compiler (cc, gcc or clang) to build the NVML shim with")
    library = folder / SONAME
    command = [chosen, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", str(library)]
    result = subprocess.run([*command, str(SOURCE), "-lpthread", "-lm"], capture_output=True, text=True, check=False)
    if result.returncode:
        raise ShimError(f"{chosen} cannot build {SOURCE}: {result.stderr.strip()}")
    return library


class Shim:
    """The state of simulated GPUs behind NVML: set what happens to them, read what was done to them.

    Values of a GPU: ``busy_permille`` (load), ``energy_frozen``, ``has_energy``, ``has_samples`` (of power), ``lost``,
    ``mig``, ``mps`` (clients), ``processes`` (that compute), ``permitted``, ``reasons`` (bits), ``cap_mhz`` (holds the
    clock down, as heat does; 0: nothing), ``plateau_mhz`` (does so while a trainer draws ``max_mw``),
    ``requested_profiles`` and ``enforced_profiles`` (bits of workload power profiles), ``floor_w`` and
    ``secondary_floor_w`` (power smoothing; 0: off), ``locked_mhz`` (0: not locked; setting it is a foreign write),
    ``min_mhz``, ``max_mhz``, ``step_mhz``, ``idle_mw``, ``max_mw``; of its driver, see ``perseus_sim.gpus.switching``:
    ``transition_us`` and ``call_us`` (medians), ``transition_p99_us`` and ``call_p99_us`` (up to the median: they
    always take that), ``target_permille``, ``outlier_ppm``, ``outlier_permille``, ``shared_lock``,
    ``reader_period_us``, ``reader_call_us``, ``energy_period_us``; read only: ``lock_calls``, ``reset_calls``,
    ``last_write_ns`` (monotonic), ``settle_us`` (from then until its clock is in effect), ``clock_mhz``, ``energy_mj``.
    """

    def __init__(self, library: Path, state: Path, create_gpus: int | None = None) -> None:
        """Open a state file, or create it with so many GPUs.

        Raises:
            ShimError: the file cannot be created, or is none.
        """
        self.state = state
        self._library = ctypes.CDLL(str(library))
        for name in ("create", "set", "get", "spend", "set_text", "inject", "permute"):
            self._function(name).restype = ctypes.c_int
        if create_gpus is not None:
            self._check("create", self._function("create")(os.fsencode(state), ctypes.c_uint(create_gpus)))
        open_state = self._function("open")
        open_state.restype = ctypes.c_void_p
        self._handle = ctypes.c_void_p(open_state(os.fsencode(state)))
        if not self._handle:
            raise ShimError(f"{state} is not a state file of the NVML shim")

    def set(self, gpu: int, **values: int) -> None:
        """Set values of a GPU."""
        for key, value in values.items():
            arguments = (self._handle, ctypes.c_uint(gpu), key.encode(), ctypes.c_int64(value))
            self._check(f"GPU {gpu}: {key}", self._function("set")(*arguments))

    def get(self, gpu: int, key: str) -> int:
        """Read a value of a GPU, as of now."""
        value = ctypes.c_int64()
        arguments = (self._handle, ctypes.c_uint(gpu), key.encode(), ctypes.byref(value))
        self._check(f"GPU {gpu}: {key}", self._function("get")(*arguments))
        return value.value

    def spend(self, gpu: int, until_us: int, power_mw: int, hold_us: int) -> None:
        """Lead a GPU: it drew so much up to a moment (monotonic), and still does; more within ``hold_us``, 0: no more.

        From the first call on; a leader that falls silent for longer leaves an idle GPU.
        """
        arguments = (self._handle, ctypes.c_uint(gpu), *map(ctypes.c_int64, (until_us, power_mw, hold_us)))
        self._check(f"GPU {gpu}", self._function("spend")(*arguments))

    def set_text(self, gpu: int, **values: str) -> None:
        """Set the ``uuid`` or the ``name`` of a GPU."""
        for key, text in values.items():
            arguments = (self._handle, ctypes.c_uint(gpu), key.encode(), text.encode())
            self._check(f"GPU {gpu}: {key}", self._function("set_text")(*arguments))

    def inject(self, function: str, code: int = -1, *, gpu: int = -1, times: int = -1, latency_ms: int = 0) -> None:
        """Let calls of an NVML function on a GPU (−1: any) take longer, and return a code (−1: what they would)."""
        numbers = map(ctypes.c_int, (gpu, code, times, latency_ms))
        self._check(function, self._function("inject")(self._handle, function.encode(), *numbers))

    def clear(self) -> None:
        """Forget all injections."""
        self._function("clear")(self._handle)

    def permute(self, order: Sequence[int]) -> None:
        """Make index and handle i mean GPU ``order[i]`` from now on."""
        array = (ctypes.c_uint32 * len(order))(*order)
        self._check(f"order {order}", self._function("permute")(self._handle, array, ctypes.c_uint(len(order))))

    def reload(self) -> None:
        """Unload and load the driver: locks and energy are gone, open libraries are not initialised any more."""
        self._function("reload")(self._handle)

    def close(self) -> None:
        """Unmap the state."""
        if self._handle:
            self._function("close")(self._handle)
            self._handle = ctypes.c_void_p()

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        return getattr(self._library, f"perseus_shim_{name}")  # type: ignore[no-any-return]

    @staticmethod
    def _check(what: str, code: int) -> None:
        if code:
            raise ShimError(f"{what}: {os.strerror(code)}")
