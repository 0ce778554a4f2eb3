"""The simulated GPUs of a node behind NVML: a folder with the library, its state and a list, shared by all.

``perseus_sim.gpus.offer`` makes it on a node; the agent loads the library from it like a driver's, trainers
advance the GPUs through ``ShimGpu``, users and tests read and change values: ``python -m perseus_sim.gpus.shim_gpu
[UUID key=value ...]`` prints every GPU as JSON, after it has set values of one (``cap_mhz=900 reasons=64`` is heat).
Standard library only: trainers import this.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from perseus_core.units import mw_from_w, us_from_ns, us_from_s
from perseus_sim.gpus.model import GpuModel
from perseus_sim.gpus.nvml_shim import SONAME, Shim
from perseus_sim.gpus.shared_gpu import GpuSpec, Physics, Request

ENV_FOLDER: Final = "PERSEUS_SIM_GPUS"
ENV_GPUS: Final = "NVIDIA_VISIBLE_DEVICES"
"""The UUIDs of a container's GPUs, with commas between them."""
ENV_GPU: Final = "PERSEUS_SIM_GPU_"
"""The UUID of one of them, with its number: several claims cannot write one variable."""
IN_CONTAINER: Final = "/var/run/perseus-simulated-gpus"
"""Where a container finds the folder."""
STATE: Final = "nvml-state"
LIST: Final = "gpus.json"
HOLD_US: Final = 3_000_000
"""A trainer that has written nothing for so long has died: longer than any instruction or wait for a neighbour."""
_SHOWN: Final = (
    "clock_mhz", "locked_mhz", "max_mhz", "cap_mhz", "reasons", "energy_mj", "lock_calls", "reset_calls",
    "last_write_ns", "settle_us",
)  # fmt: skip


class NoGpus(Exception):
    """The folder holds no simulated GPUs, or not this one."""


@dataclass(frozen=True)
class ShimGpus:
    """What never changes about the GPUs of a node."""

    uuids: tuple[str, ...]
    model: str
    clocks_mhz: tuple[int, ...]
    blocking_power_mw: int
    idle_power_mw: int
    max_power_mw: int
    driver: Mapping[str, int] = field(default_factory=dict)
    """Values of the shim: how long changes take, and what the power limit leaves."""

    @classmethod
    def of(cls, model: GpuModel, uuids: Sequence[str]) -> ShimGpus:
        """GPUs of a model."""
        driver = model.driver
        return cls(
            uuids=tuple(uuids),
            model=model.name,
            clocks_mhz=model.clocks_mhz,
            blocking_power_mw=mw_from_w(model.blocking_power_w),
            idle_power_mw=mw_from_w(model.static_w),
            max_power_mw=mw_from_w(model.power_limit_w),
            driver={
                "transition_us": us_from_s(driver.latency.p50_s),
                "transition_p99_us": us_from_s(driver.latency.p99_s),
                "call_us": us_from_s(driver.latency.call_s),
                "call_p99_us": us_from_s(driver.call_p99_s),
                "target_permille": round(1e3 * driver.target_share),
                "outlier_ppm": round(1e6 * driver.outlier_probability),
                "outlier_permille": round(1e3 * driver.outlier_factor),
                "shared_lock": int(driver.latency.shared_lock),
                "reader_period_us": us_from_s(driver.reader_period_s),
                "reader_call_us": us_from_s(driver.reader_call_s),
                "energy_period_us": us_from_s(driver.energy_period_s),
                "plateau_mhz": model.plateau_mhz,
            },
        )

    @classmethod
    def read(cls, folder: Path) -> ShimGpus:
        """Those of a folder.

        Raises:
            NoGpus: it has none.
        """
        try:
            content = json.loads((folder / LIST).read_text())
            return cls(**{**content, "uuids": tuple(content["uuids"]), "clocks_mhz": tuple(content["clocks_mhz"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise NoGpus(f"{folder} holds no simulated GPUs: {error}") from error

    def write(self, folder: Path) -> None:
        partial = folder / f"{LIST}.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(folder / LIST)

    def create(self, folder: Path) -> None:
        """A state in which all of them idle at default clocks; it appears when it is whole."""
        partial = folder / f"{STATE}.new"
        shim = Shim(folder / SONAME, partial, create_gpus=len(self.uuids))
        step = self.clocks_mhz[1] - self.clocks_mhz[0]
        for index, uuid in enumerate(self.uuids):
            shim.set_text(index, uuid=uuid, name=self.model)
            shim.set(index, min_mhz=self.clocks_mhz[0], max_mhz=self.clocks_mhz[-1], step_mhz=step)
            shim.set(index, idle_mw=self.idle_power_mw, max_mw=self.max_power_mw, **self.driver)
        shim.close()
        partial.chmod(0o666)  # trainers run as any user
        partial.replace(folder / STATE)


def open_shim(folder: Path) -> Shim:
    """The state of a folder's GPUs."""
    return Shim(folder / SONAME, folder / STATE)


def granted(environment: Mapping[str, str]) -> tuple[Path, tuple[str, ...]]:
    """The folder of a container's simulated GPUs, and their UUIDs, ascending, as the kubelet granted them.

    Raises:
        NoGpus: there are none, or they are not simulated.
    """
    folder = environment.get(ENV_FOLDER)
    named = environment.get(ENV_GPUS, "").split(",")
    named += [value for name, value in environment.items() if name.startswith(ENV_GPU)]
    uuids = tuple(sorted(filter(None, named)))
    if not folder or not uuids:
        raise NoGpus(f"{ENV_FOLDER}: not set; the pod must ask for simulated GPUs")
    return Path(folder), uuids


class ShimGpu:
    """One of them, as the engine of a simulated trainer moves it: time is the machine's monotonic clock."""

    def __init__(self, folder: Path, uuid: str) -> None:
        """Open it.

        Raises:
            NoGpus: it is not there.
        """
        gpus = ShimGpus.read(folder)
        if uuid not in gpus.uuids:
            raise NoGpus(f"{folder} has no GPU {uuid}")
        self._index = gpus.uuids.index(uuid)
        self._shim = open_shim(folder)
        self.spec = GpuSpec(uuid, gpus.model, gpus.clocks_mhz, gpus.blocking_power_mw)

    def physics(self) -> Physics:
        return Physics(us_from_ns(time.monotonic_ns()), 0, self.spec.blocking_power_mw)

    def advance(self, physics: Physics) -> None:
        """What it drew up to a moment; its counter is the shim's, not the trainer's."""
        self._shim.spend(self._index, physics.now_us, physics.power_mw, HOLD_US)

    def requested(self) -> Request:
        calls = self._shim.get(self._index, "lock_calls") + self._shim.get(self._index, "reset_calls")
        return Request(calls, self.locked_mhz)

    def requested_ns(self) -> int:
        return self._shim.get(self._index, "last_write_ns")

    def settle_us(self) -> int:
        return self._shim.get(self._index, "settle_us")

    def capped(self) -> tuple[int, int]:
        return self._shim.get(self._index, "cap_mhz"), self._shim.get(self._index, "reasons")

    @property
    def locked_mhz(self) -> int:
        return self._shim.get(self._index, "locked_mhz")

    @property
    def energy_mj(self) -> int:
        """The counter that NVML shows."""
        return self._shim.get(self._index, "energy_mj")

    def rest(self) -> None:
        """The trainer ends: the GPU idles at once."""
        self._shim.spend(self._index, 0, 0, 0)


def describe(folder: Path) -> dict[str, dict[str, int]]:
    """Values of every GPU, by UUID."""
    shim = open_shim(folder)
    values = {
        uuid: {key: shim.get(index, key) for key in _SHOWN} for index, uuid in enumerate(ShimGpus.read(folder).uuids)
    }
    shim.close()
    return values


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="perseus_sim.gpus.shim_gpu", description="Look at simulated GPUs, and poke them."
    )
    parser.add_argument("--gpus", type=Path, default=os.environ.get(ENV_FOLDER), help=f"their folder ({ENV_FOLDER})")
    parser.add_argument("uuid", nargs="?", help="one of them; all: every one")
    parser.add_argument("value", nargs="*", type=_assignment, help="what to set, such as cap_mhz=900")
    given = parser.parse_args(arguments)
    if given.uuid:
        shim = open_shim(given.gpus)
        for index, uuid in enumerate(ShimGpus.read(given.gpus).uuids):
            if given.uuid in (uuid, "all"):
                shim.set(index, **dict(given.value))
    print(json.dumps(describe(given.gpus)))


def _assignment(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    return key, int(value)


if __name__ == "__main__":
    main()
