"""One rank of a simulated training job in lockstep: executes its stage's schedule through the real client.

Time is virtual, a receive completes at the later of both sides, and the client marks at the moment at which the GPU
gets there, in this virtual time. Where the client has woken the agent, virtual time stands still until the GPU has seen
the agent's write: measured times then hold the GPU's switch latency and not the scheduling of this machine. Hosts that
launch ahead of their GPUs are ``run_ahead``'s. Standard library only, as sixteen of these start at once.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, Final

import perseus_client
from perseus_sim.gpus.clock_in_effect import Gpu
from perseus_sim.training.engine import Engine, Table

MESSAGE: Final = struct.Struct("<IIQ")  # iteration, instruction on the sender's stage, virtual time of its end


class JobLost(Exception):
    """The parent or a neighbour has hung up: this rank ends."""


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


class SimulatedRank:
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
        self._command: dict[str, Any] = {}
        self._begun: dict[str, int] = {}
        self._executed: list[tuple[int, int, int]] = []
        """Of this iteration: begin and end of each instruction in job time, µs, and what it took, µJ."""

    def run(self) -> None:
        """Run iterations until the coordinator sends stop.

        Raises:
            JobLost: another rank or the coordinator has closed its connection.
        """
        spec, engine = self._spec, self._engine
        self._next_command()
        session = perseus_client.connect(
            dp=spec["dp"],
            stage=spec["stage"],
            schedule=self._schedule(),
            socket_path=spec["socket"] or None,
            clock_us=lambda: int(engine.now_us),
            gpu_uuid=spec["gpu_uuid"],
            own_time=True,
        )
        self._report_ready(session)
        command = self._next_command()
        while not command.get("stop"):
            self._begin(command)
            session.step_begin()
            for index, step in enumerate(spec["steps"]):
                self._receive(index)
                session.instruction_begin(step["kind"], step["microbatch"], step["chunk"])
                self._compute(index)
                rings = session.rings
                session.instruction_end()
                self._pass_on(index)
                if session.rings != rings:
                    engine.await_agent()
            session.step_end()
            self._report_end()
            command = self._next_command()
        self._finish(command)
        session.close()

    # --------------------------------------------------------------- what the GPU does, in its own time

    def _begin(self, command: dict[str, Any]) -> None:
        """Begin an iteration when the coordinator says."""
        engine = self._engine
        engine.pace_from(command["begin_us"] + self._offset_us, command["wall_ns"] + self._offset_us * 1000)
        engine.wait_until(command["begin_us"] + self._offset_us)
        self._command = command
        self._begun = {"begin_us": self._job_us(), "begin_energy_uj": engine.energy_uj}
        self._executed = []

    def _receive(self, index: int) -> None:
        """Wait for what an instruction needs of other stages."""
        engine, step = self._engine, self._spec["steps"][index]
        engine.block()
        extra_us = self._spec["delay_us"] + self._offset_us
        iteration = self._command["iteration"]
        arrivals = [self._mail[peer].end_of(iteration, sent) + us + extra_us for peer, sent, us in step["waits"]]
        engine.wait_until(max([engine.now_us + step["gap_us"], *arrivals]))

    def _compute(self, index: int) -> None:
        begin_us, before_uj = self._job_us(), self._engine.energy_uj
        self._engine.work(self._tables[self._spec["steps"][index]["table"]], self._command["slowdown"])
        self._executed.append((begin_us, self._job_us(), self._engine.energy_uj - before_uj))

    def _pass_on(self, index: int) -> None:
        """Send an instruction's result to the stages that wait for it."""
        message = MESSAGE.pack(self._command["iteration"], index, self._job_us())
        for peer in self._spec["steps"][index]["sends"]:
            self._peers[peer].sendall(message)

    def _report_end(self) -> None:
        report = {"iteration": self._command["iteration"], **self._begun, "end_us": self._job_us()}
        self._send({**report, "executed": self._executed})

    def _finish(self, command: dict[str, Any]) -> None:
        self._engine.wait_until(command["begin_us"] + self._offset_us)
        self._send({"final_energy_uj": self._engine.energy_uj, "final_us": self._job_us()})

    # ------------------------------------------------------------------------------- the coordinator

    def _schedule(self) -> list[tuple[str | int, int, int]]:
        return [(step["kind"], step["microbatch"], step["chunk"]) for step in self._spec["steps"]]

    def _report_ready(self, session: perseus_client.Session) -> None:
        if self._spec["socket"] and self._spec["wait_for_agent_s"]:
            session.wait_connected(self._spec["wait_for_agent_s"])
        self._send({"ready": True})

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
