"""A real training process on a simulated GPU: ``python -m perseus_sim.training.live SPEC.json script.py …``, or
``perseus_sim.training.pod_live`` in a pod.

The script computes for real, on the CPU. Each instruction that the client marks then takes the time and the energy
that the simulated GPU needs for it at the clock in force: the rest of that time is slept away. Virtual time is the
machine's monotonic clock, read again at the begin of every instruction. The client is the production one; only
``perseus_client.connect`` is wrapped, before the script runs. What was executed goes to a log, one JSON line an
iteration, so that tests do not depend on the agent's reports. Standard library only, since it runs where the training
frameworks are installed and nothing else.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import perseus_client
from perseus_client.session import Session
from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.units import s_from_us, us_from_ns
from perseus_sim.gpus.clock_in_effect import Gpu
from perseus_sim.gpus.model import GpuModel
from perseus_sim.gpus.shared_gpu import Physics, SharedGpu
from perseus_sim.training.engine import Engine, Table

Tables = dict[str, dict[str, list[float]]]
"""Fields of ``engine.Table`` by kind of instruction; ``step 1``: of chunk 1 alone, as of a phase."""
_LOOK_S: Final = 0.001


@dataclass(frozen=True)
class LiveSpec:
    """One rank."""

    gpu: str
    log: str
    tables: Tables
    await_agent: bool = False
    """Let virtual time stand still until the agent has answered a ring, as the simulated trainer does: exact clocks on
    a busy machine, at the price of longer waits between instructions. Its marks are in this virtual time then, and the
    agent follows them one by one; else they are in the machine's, and the agent may follow a timetable."""

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)))
        return path


def tables_of(model: GpuModel, clocks_mhz: Sequence[int], forward_us: float, weight: float = 1.0) -> Tables:
    """Time and power of each kind of instruction of a stage on a GPU model, against the clock.

    A backward split in two is taken as two halves.
    """
    clocks = sorted(clocks_mhz)
    powers = [1000 * model.power_w(clock) for clock in clocks]
    ratios = {"forward": 1.0, "backward": BACKWARD_RATIO}
    ratios["step"] = 1.0 + BACKWARD_RATIO
    ratios |= dict.fromkeys(("input_gradient", "weight_gradient"), BACKWARD_RATIO / 2)
    return {
        kind: {
            "clocks_mhz": list(clocks),
            "times_us": [forward_us * weight * ratio * model.slowdown(clock) for clock in clocks],
            "powers_mw": powers,
        }
        for kind, ratio in ratios.items()
    }


def monotonic_us() -> int:
    return us_from_ns(time.monotonic_ns())


class WallEngine(Engine):
    """An engine whose virtual time is the wall clock, and which therefore cannot find out afterwards that a clock had
    changed while it slept: it looks every so often."""

    def _sleep_through(self, until_us: float) -> float:
        while (now_us := monotonic_us()) < until_us:
            if self._notice(max(self._now_us, now_us)):
                return min(until_us, self._clock.changes_us or until_us)
            time.sleep(min(_LOOK_S, s_from_us(until_us - now_us)))
        return until_us


class LiveGpu:
    """The GPU of this process, and what runs on it."""

    def __init__(
        self, gpu: Gpu, tables: Tables, ended: Callable[[Mapping[str, Any]], None], *, await_agent: bool = False
    ) -> None:
        """Take over a GPU that nothing runs on.

        Args:
            gpu: is at the machine's time from now on.
            tables: time and power of each kind of instruction.
            ended: called with each iteration when it has ended: ``begin_us`` and ``end_us`` of monotonic time,
                ``energy_uj`` and ``end_energy_uj`` of the GPU's counter, and ``instructions``, a list of kind,
                microbatch, chunk, and clock in MHz.
            await_agent: see ``LiveSpec``.
        """
        begin_us = monotonic_us()
        # The GPU's clock becomes the machine's: it may have been 0, and the uptime must not be counted as energy.
        before = gpu.physics()
        gpu.advance(Physics(max(begin_us, before.now_us), before.energy_uj, gpu.spec.blocking_power_mw))
        self.uuid = gpu.spec.uuid
        self.engine = WallEngine(gpu, speed=1.0, noise=0.0, seed=0)
        self.engine.pace_from(begin_us, 1000 * begin_us)
        self.await_agent = await_agent
        self._tables = {kind: Table(**table) for kind, table in tables.items()}  # type: ignore[arg-type]
        self._ended = ended
        self._iteration: dict[str, Any] | None = None

    def catch_up(self) -> None:
        """The GPU has waited until now."""
        self.engine.wait_until(monotonic_us())

    def work(self, kind: str, microbatch: int, chunk: int) -> None:
        """Run an instruction whose real work is done."""
        self.engine.work(self._tables.get(f"{kind} {chunk}") or self._tables[kind])
        if self._iteration is not None:
            self._iteration["instructions"].append([kind, microbatch, chunk, self.engine.clock_mhz])

    def step_begin(self) -> None:
        self._iteration = {"begin_us": int(self.engine.now_us), "energy_uj": self.engine.energy_uj, "instructions": []}

    def step_end(self) -> None:
        if self._iteration is not None:
            self._iteration |= {"end_us": int(self.engine.now_us), "end_energy_uj": self.engine.energy_uj}
            self._ended(self._iteration)
        self._iteration = None


class LiveSession(Session):
    """The client's session, with a GPU beneath."""

    def __init__(self, session: Session, gpu: LiveGpu) -> None:
        self._session = session
        self._gpu = gpu
        self._begun: tuple[str | int, int, int] = ("", 0, 0)

    @property
    def connected(self) -> bool:
        return self._session.connected

    @property
    def rings(self) -> int:
        return self._session.rings

    def wait_connected(self, timeout_s: float) -> bool:
        return self._session.wait_connected(timeout_s)

    def step_begin(self) -> None:
        self._gpu.catch_up()
        self._gpu.step_begin()
        self._session.step_begin()

    def step_end(self) -> None:
        self._gpu.catch_up()
        self._session.step_end()
        self._gpu.step_end()

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        self._gpu.catch_up()
        self._begun = kind, microbatch, chunk
        self._session.instruction_begin(kind, microbatch, chunk)

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        name, number, place = self._begun if kind is None else (kind, microbatch, chunk)
        self._gpu.work(str(name), number, place)
        rings = self._session.rings
        self._session.instruction_end(kind, microbatch, chunk)
        if self._gpu.await_agent and self._session.rings != rings:
            self._gpu.engine.await_agent()

    def close(self) -> None:
        self._session.close()


def run(gpu: LiveGpu, script: Sequence[str]) -> None:
    """Run a script, with its arguments, as ``python`` would; whatever it connects runs on the simulated GPU."""
    real = perseus_client.connect

    def connect(*args: Any, **options: Any) -> Session:
        options |= {"gpu_uuid": gpu.uuid}
        if gpu.await_agent:
            options |= {"clock_us": lambda: int(gpu.engine.now_us)}
        else:
            options |= {"timing": "synchronised"}  # an instruction is over when its call returns
        return LiveSession(real(*args, **options), gpu)

    perseus_client.connect = connect
    sys.argv = list(script)
    sys.path.insert(0, str(Path(script[0]).resolve().parent))
    runpy.run_path(script[0], run_name="__main__")


def main() -> None:
    """Entry point."""
    spec = LiveSpec(**json.loads(Path(sys.argv[1]).read_text()))

    def log(iteration: Mapping[str, Any]) -> None:
        with Path(spec.log).open("a") as file:
            file.write(json.dumps(iteration) + "\n")

    run(LiveGpu(SharedGpu(Path(spec.gpu)), spec.tables, log, await_agent=spec.await_agent), sys.argv[2:])


if __name__ == "__main__":
    main()
