"""One rank of a simulated training job: executes its stage's schedule through the real client, on a shared GPU file.

``python -m perseus_sim.training.trainer SPEC.json`` runs it. Time is virtual: an instruction takes as long as the
profile measured at the clock in force, a receive completes at the later of both sides, and sleeps keep virtual time
behind wall time × speed, so that the run can be watched and the agent acts while instructions run. Where the client has
woken the agent, virtual time stands still until the GPU has seen the agent's write: measured times then hold the GPU's
switch latency and not the scheduling of this machine. Standard library only, as sixteen of these start at once.
"""

from __future__ import annotations

import json
import math
import random
import socket
import struct
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import perseus_client
from perseus_sim.gpus.shared_gpu import GpuSpec, Physics, Request, SharedGpu

MESSAGE: Final = struct.Struct("<IIQ")  # iteration, instruction on the sender's stage, virtual time of its end
_AGENT_NEIGHBOUR_TIMEOUT_S: Final = 0.1
"""Longest that virtual time stands still for the agent: many times what it needs on a busy machine, and soon over."""
_AGENT_POLL_S: Final = 0.0003
_TIMEOUTS_TO_GIVE_UP: Final = 5
"""Unanswered rings in a row after which the rank no longer waits, until the GPU is written again."""

SPIKE: Final = 0.1
"""In the noisiest of the public traces (Wide-ResNet on A40) 1.5 % of the instructions take more than 2 % longer than
usual, and 0.03 % more than 10 %."""


class JobLost(Exception):
    """The parent or a neighbour has hung up: this rank ends."""


@dataclass(frozen=True)
class Table:
    """Time and power of one kind of instruction against the clock, ascending, in a clock's steps."""

    clocks_mhz: list[int]
    times_us: list[float]
    powers_mw: list[float]

    def at(self, clock_mhz: int) -> tuple[float, float]:
        """Time (µs) and power (mW); between measured clocks interpolated, beyond them in proportion to the period."""
        clocks = self.clocks_mhz
        if not clock_mhz or clocks == [0]:  # constant time
            return self.times_us[-1], self.powers_mw[-1]
        place = bisect_left(clocks, clock_mhz)
        if place == len(clocks):
            return self.times_us[-1], self.powers_mw[-1]
        if clocks[place] == clock_mhz:
            return self.times_us[place], self.powers_mw[place]
        if place == 0:
            return self.times_us[0] * clocks[0] / clock_mhz, self.powers_mw[0]
        share = (clock_mhz - clocks[place - 1]) / (clocks[place] - clocks[place - 1])
        return (
            self.times_us[place - 1] + share * (self.times_us[place] - self.times_us[place - 1]),
            self.powers_mw[place - 1] + share * (self.powers_mw[place] - self.powers_mw[place - 1]),
        )


class Gpu(Protocol):
    """What an engine moves: ``shared_gpu.SharedGpu``, or ``shim_gpu.ShimGpu`` on a real node."""

    spec: GpuSpec

    def physics(self) -> Physics: ...
    def advance(self, physics: Physics) -> None: ...
    def requested(self) -> Request: ...
    def requested_ns(self) -> int: ...
    def capped(self) -> tuple[int, int]: ...
    @property
    def locked_mhz(self) -> int: ...


class Engine:
    """Virtual time of one GPU: spends it on work and on waiting, and books the energy."""

    def __init__(self, gpu: Gpu, *, speed: float | None, noise: float, seed: int, spikes: float = 0.0) -> None:
        """``speed``: virtual over wall seconds, None for as fast as possible; ``noise``: relative, of durations;
        ``spikes``: share of instructions that take up to `SPIKE` longer.
        """
        self._gpu = gpu
        self._speed = speed
        self._noise = noise
        self._spikes = spikes
        self._random = random.Random(seed)
        physics = gpu.physics()
        self._now_us = float(physics.now_us)
        self._energy_uj = float(physics.energy_uj)
        self._anchor = (self._now_us, time.monotonic_ns())
        self._seen = gpu.requested()
        self._clock_mhz = gpu.locked_mhz
        self._pending: tuple[float, int] | None = None
        self._unanswered = 0

    @property
    def now_us(self) -> float:
        return self._now_us

    @property
    def energy_uj(self) -> int:
        return int(self._energy_uj)

    def pace_from(self, now_us: float, wall_ns: int) -> None:
        """From here on, virtual time ``now_us`` belongs to the wall time."""
        self._anchor = (now_us, wall_ns)

    def wait_until(self, time_us: float) -> None:
        """Block: the GPU spins in a receive at blocking power."""
        self._notice(self._now_us)
        if time_us > self._now_us:
            self._spend(time_us, self._gpu.spec.blocking_power_mw)
            self._sleep()

    def block(self) -> None:
        """A receive begins, of unknown length."""
        self._spend(self._now_us, self._gpu.spec.blocking_power_mw)

    def work(self, table: Table, slowdown: float = 1.0) -> None:
        """Run one instruction at the clocks in force, which may change while it runs."""
        factor = slowdown * math.exp(self._random.gauss(0.0, self._noise)) if self._noise else slowdown
        if self._spikes and self._random.random() < self._spikes:
            factor *= 1 + SPIKE * self._random.random()
        left = 1.0
        while left > 1e-9:
            self._notice(self._now_us)
            self._settle()
            time_us, power_mw = table.at(self._effective_mhz())
            time_us *= factor
            finish_us = self._now_us + left * time_us
            until_us = min(finish_us, self._pending[0]) if self._pending else finish_us
            self._spend(self._now_us, power_mw)  # a reader of the GPU sees what it draws now
            until_us = self._sleep_through(until_us)
            left -= (until_us - self._now_us) / time_us
            self._spend(until_us, power_mw)

    def await_agent(self) -> None:
        """The agent was woken because the next instruction wants another clock: let it write."""
        deadline_s = time.monotonic() + _AGENT_NEIGHBOUR_TIMEOUT_S
        while self._gpu.requested() == self._seen:
            if self._unanswered >= _TIMEOUTS_TO_GIVE_UP:
                return
            if time.monotonic() > deadline_s:
                self._unanswered += 1
                return
            time.sleep(_AGENT_POLL_S)
        self._notice(self._now_us)

    def _effective_mhz(self) -> int:
        wanted = self._clock_mhz or self._gpu.spec.default_clock_mhz
        limit = self._gpu.capped()[0]
        return min(wanted, limit) if limit else wanted

    def _notice(self, time_us: float) -> bool:
        """Take up a request that came at this moment: the clock changes after the GPU's latency."""
        request = self._gpu.requested()
        if request == self._seen:
            return False
        self._seen = request
        self._unanswered = 0
        self._pending = (time_us + self._gpu.spec.switch_latency_us, request.mhz)
        return True

    def _settle(self) -> None:
        if self._pending and self._pending[0] <= self._now_us:
            self._clock_mhz = self._pending[1]
            self._pending = None

    def _spend(self, until_us: float, power_mw: float) -> None:
        """Let time pass at a power: here alone do time and energy grow."""
        self._energy_uj += power_mw * (until_us - self._now_us) / 1000
        self._now_us = until_us
        self._gpu.advance(Physics(int(until_us), int(self._energy_uj), int(power_mw)))

    def _sleep_through(self, until_us: float) -> float:
        """Sleep while an instruction runs; earlier if a request came meanwhile, and then the virtual time of that."""
        if self._speed is None:
            return until_us
        started_ns = time.monotonic_ns()
        self._sleep(until_us)
        elapsed_us = max(0, self._gpu.requested_ns() - started_ns) / 1000 * self._speed
        if self._notice(min(self._now_us + elapsed_us, until_us)) and self._pending:
            return min(until_us, self._pending[0])
        return until_us

    def _sleep(self, until_us: float | None = None) -> None:
        if self._speed is None:
            return
        virtual_us, wall_ns = self._anchor
        target_ns = wall_ns + ((self._now_us if until_us is None else until_us) - virtual_us) * 1000 / self._speed
        ahead_s = (target_ns - time.monotonic_ns()) / 1e9
        if ahead_s > 0:
            time.sleep(ahead_s)


class Mailbox:
    """What a neighbour has sent: its instructions end in its own order, which need not be this rank's."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = b""
        self._arrived: dict[tuple[int, int], int] = {}

    def end_of(self, iteration: int, instruction: int) -> int:
        """When an instruction of the neighbour ended; waits for it.

        Raises:
            JobLost: it has hung up.
        """
        key = iteration, instruction
        while key not in self._arrived:
            data = self._connection.recv(65_536)
            if not data:
                raise JobLost
            self._buffer += data
            whole = len(self._buffer) // MESSAGE.size * MESSAGE.size
            for sent_iteration, sent_instruction, time_us in MESSAGE.iter_unpack(self._buffer[:whole]):
                self._arrived[sent_iteration, sent_instruction] = time_us
            self._buffer = self._buffer[whole:]
        return self._arrived.pop(key)


class Rank:
    """One process of the job."""

    def __init__(self, spec: dict[str, Any], gpu: Gpu) -> None:
        self._spec = spec
        self._offset_us: int = spec.get("offset_us", 0)
        """What this machine's clock shows beyond the job's."""
        self._engine = Engine(gpu, speed=spec["speed"], noise=spec["noise"], seed=spec["seed"], spikes=spec["spikes"])
        self._tables = [Table(**table) for table in spec["tables"]]
        sockets = {int(peer): socket.socket(fileno=number) for peer, number in spec["peers"].items()}
        self._peers = sockets
        self._mail = {peer: Mailbox(connection) for peer, connection in sockets.items()}
        self._parent = socket.socket(fileno=spec["parent"])
        self._commands = self._parent.makefile("r", encoding="utf-8")

    def run(self) -> None:
        """Run iterations until the coordinator sends stop.

        Raises:
            JobLost: another rank or the coordinator has closed its connection.
        """
        spec, engine = self._spec, self._engine
        command = self._next_command()
        schedule = [(step["kind"], step["microbatch"], step["chunk"]) for step in spec["steps"]]
        session = perseus_client.connect(
            dp=spec["dp"],
            stage=spec["stage"],
            schedule=schedule,
            socket_path=spec["socket"] or None,
            clock_us=lambda: int(engine.now_us),
            gpu_uuid=spec["gpu_uuid"],
        )
        if spec["socket"] and spec["wait_for_agent_s"]:
            session.wait_connected(spec["wait_for_agent_s"])
        self._send({"ready": True})
        command = self._next_command()
        while not command.get("stop"):
            engine.pace_from(command["begin_us"] + self._offset_us, command["wall_ns"] + self._offset_us * 1000)
            engine.wait_until(command["begin_us"] + self._offset_us)
            begin = {"begin_us": self._job_us(), "begin_energy_uj": engine.energy_uj}
            session.step_begin()
            for index, step in enumerate(spec["steps"]):
                self._execute(session, command["iteration"], index, step, command["slowdown"])
            session.step_end()
            self._send({"iteration": command["iteration"], **begin, "end_us": self._job_us()})
            command = self._next_command()
        engine.wait_until(command["begin_us"] + self._offset_us)
        self._send({"final_energy_uj": engine.energy_uj, "final_us": self._job_us()})
        session.close()

    def _execute(
        self, session: perseus_client.Session, iteration: int, index: int, step: dict[str, Any], slowdown: float
    ) -> None:
        engine = self._engine
        engine.block()
        extra_us = self._spec["delay_us"] + self._offset_us
        arrivals = [self._mail[peer].end_of(iteration, sent) + us + extra_us for peer, sent, us in step["waits"]]
        engine.wait_until(max([engine.now_us + step["gap_us"], *arrivals]))
        session.instruction_begin(step["kind"], step["microbatch"], step["chunk"])
        engine.work(self._tables[step["table"]], slowdown)
        rings = session.rings
        session.instruction_end()
        message = MESSAGE.pack(iteration, index, self._job_us())
        for peer in step["sends"]:
            self._peers[peer].sendall(message)
        if session.rings != rings:
            engine.await_agent()

    def _job_us(self) -> int:
        return int(self._engine.now_us) - self._offset_us

    def _send(self, message: dict[str, Any]) -> None:
        self._parent.sendall(json.dumps(message).encode() + b"\n")

    def _next_command(self) -> dict[str, Any]:
        line = self._commands.readline()
        if not line:
            raise JobLost
        command: dict[str, Any] = json.loads(line)
        return command


def main() -> int:
    """Run one rank. Exit code 0: stopped on request; 3: another rank or the coordinator has gone."""
    try:
        spec = json.loads(Path(sys.argv[1]).read_text())
        Rank(spec, SharedGpu(Path(spec["gpu"]))).run()
    except (JobLost, BrokenPipeError, ConnectionResetError):
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
