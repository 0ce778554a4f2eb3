"""A simulated training job: starts one trainer per data-parallel pipeline and stage, and joins them at every iteration.

The coordinator thread stands for the gradient synchronisation: when every rank has ended its iteration, all begin the
next at the latest of their ends. It also measures, from the GPUs' own counters as the trainers report them and without
the agent, what each pipeline's iterations took. Used by ``perseus_sim.cluster``, the demo and tests.
"""

from __future__ import annotations

import json
import queue
import selectors
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_sim.processes import Child, Processes, StartFailed
from perseus_sim.shared_gpu import SharedGpu
from perseus_solver.problem import Problem

Place = tuple[int, int]
"""Pipeline and stage."""


@dataclass(frozen=True)
class RankSpec:
    """Where one rank runs."""

    pipeline: int
    stage: int
    gpu: Path
    socket: str = ""
    """The agent's socket; empty: no agent."""


@dataclass(frozen=True)
class JobSpec:
    """What the job executes, and how it is simulated."""

    problem: Problem
    """Schedule, times and energies, delays and overhead: what the solver plans for is what the trainers execute."""
    ranks: tuple[RankSpec, ...]
    speed: float | None = 10.0
    """Virtual over wall seconds; None: as fast as the machine can, without pauses."""
    noise: float = 0.005
    """Relative standard deviation of every duration."""
    seed: int = 1
    spikes: float = 0.0
    """Share of instructions that take up to ``trainer.SPIKE`` longer, as some do on real GPUs; not in the problem."""
    delay_us: int = 0
    """Of every message between stages, on top of the problem's delay."""
    synchronisation_us: int = 0
    """From the last rank's end to the next iteration, on top of the problem's overhead."""
    wait_for_agent_s: float = 0.0
    """How long ranks wait for the agent before their first iteration; training code would not, measurements may."""

    @property
    def pipelines(self) -> int:
        return 1 + max(rank.pipeline for rank in self.ranks)

    @property
    def between_iterations_us(self) -> int:
        """From the last rank's end to the next iteration."""
        return self.synchronisation_us + round(self.problem.overhead_s * 1e6)


@dataclass(frozen=True)
class PipelineIteration:
    """One iteration of one pipeline, as its GPUs' counters saw it."""

    pipeline: int
    iteration: int
    begin_us: int
    span_us: int
    """To the end of its own last instruction."""
    time_us: int
    """To the begin of the next iteration, which waits for all pipelines."""
    energy_mj: int
    """Of all its GPUs, over ``time_us``."""


class TrainingJob:
    """The processes of one job. ``samples`` fills while it runs."""

    def __init__(self, spec: JobSpec, folder: Path, processes: Processes, name: str = "trainer") -> None:
        self.samples: queue.SimpleQueue[PipelineIteration] = queue.SimpleQueue()
        self.children: dict[Place, Child] = {}
        self.failure: str | None = None
        """Why the job ended, if nobody told it to."""
        self._spec = spec
        self._slowdowns: dict[int, float] = {}
        self._stopping = threading.Event()
        self._paused = threading.Event()
        self._iteration = -1
        self._parents: dict[Place, socket.socket] = {}
        self._thread = threading.Thread(target=self._coordinate, name="coordinator", daemon=True)
        self._start(folder, processes, name)

    # --------------------------------------------------------------------------------- what is told

    @property
    def iteration(self) -> int:
        """The iteration that runs; −1 before the first."""
        return self._iteration

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def begin(self) -> None:
        """Let the ranks connect to their agents and train. Their processes exist since the job was made."""
        self._thread.start()

    def slow_down(self, pipeline: int, degree: float) -> None:
        """Make a pipeline take ``degree`` times as long from the next iteration on; 1: as before."""
        self._slowdowns[pipeline] = degree

    def stop(self, timeout_s: float = 20.0) -> None:
        """End after the current iteration; returns when every rank has.

        Raises:
            StartFailed: ranks did not end in time.
        """
        self._stopping.set()
        if self._thread.ident is None:  # never begun
            self._hang_up()
        else:
            self._thread.join(timeout_s)
        for place, child in self.children.items():
            deadline = time.monotonic() + timeout_s
            while child.running:
                if time.monotonic() > deadline:
                    raise StartFailed(f"rank {place} did not end:\n{child.tail()}")
                time.sleep(0.01)

    # ------------------------------------------------------------------------------------ processes

    def _start(self, folder: Path, processes: Processes, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tables, steps = _steps(self._spec.problem)
        sockets = _connect(self._spec.ranks, steps)
        for number, rank in enumerate(self._spec.ranks):
            place = (rank.pipeline, rank.stage)
            ours, theirs = socket.socketpair()
            self._parents[place] = ours
            peers = {peer: connection.fileno() for peer, connection in sockets[place].items()}
            document = {
                "pipeline": rank.pipeline,
                "stage": rank.stage,
                "gpu": str(rank.gpu),
                "gpu_uuid": rank.gpu.stem,
                "socket": rank.socket,
                "wait_for_agent_s": self._spec.wait_for_agent_s,
                "speed": self._spec.speed,
                "noise": self._spec.noise,
                "spikes": self._spec.spikes,
                "seed": self._spec.seed * 100_003 + number,
                "delay_us": self._spec.delay_us,
                "parent": theirs.fileno(),
                "peers": peers,
                "tables": tables,
                "steps": steps[rank.stage],
            }
            label = f"{name}-{rank.pipeline}-{rank.stage}"
            path = folder / f"{label}.json"
            path.write_text(json.dumps(document))
            self.children[place] = processes.start(
                label,
                [sys.executable, "-m", "perseus_sim.trainer", str(path)],
                pass_fds=[theirs.fileno(), *peers.values()],
            )
            theirs.close()
        for connections in sockets.values():
            for connection in connections.values():
                connection.close()

    # ---------------------------------------------------------------------------------- coordinator

    def _coordinate(self) -> None:
        try:
            self._train()
        except (_Gone, OSError) as error:
            if not self._stopping.is_set():
                self.failure = str(error)
        finally:
            self._hang_up()

    def _train(self) -> None:
        begin_us = max(SharedGpu(rank.gpu).physics().now_us for rank in self._spec.ranks)
        inbox = _Inbox(self._parents)
        self._tell({"connect": True})
        inbox.collect()
        before: dict[Place, dict[str, Any]] = {}
        iteration = 0
        wall_ns = time.monotonic_ns()
        while not self._stopping.is_set():
            # Time lost by this machine is not made up for: pace anew from every barrier.
            wall_ns = max(wall_ns, time.monotonic_ns())
            self._iteration = iteration
            slowdowns = dict(self._slowdowns)  # the same for all ranks of an iteration
            for place in self._parents:
                slowdown = slowdowns.get(place[0], 1.0)
                order = {"iteration": iteration, "begin_us": begin_us, "wall_ns": wall_ns, "slowdown": slowdown}
                self._tell(order, place)
            reports = inbox.collect()
            if before:
                self._measure(before, {p: (r["begin_us"], r["begin_energy_uj"]) for p, r in reports.items()})
            before = reports
            next_us = max(report["end_us"] for report in reports.values()) + self._spec.between_iterations_us
            if self._spec.speed:
                wall_ns += int((next_us - begin_us) * 1000 / self._spec.speed)
            begin_us = next_us
            iteration += 1
        self._tell({"stop": True, "begin_us": begin_us})
        last = inbox.collect()
        if before:
            self._measure(before, {p: (r["final_us"], r["final_energy_uj"]) for p, r in last.items()})

    def _measure(self, reports: Mapping[Place, dict[str, Any]], following: Mapping[Place, tuple[int, int]]) -> None:
        for pipeline in range(self._spec.pipelines):
            own = {place: report for place, report in reports.items() if place[0] == pipeline}
            begin_us = min(report["begin_us"] for report in own.values())
            energy_uj = sum(following[place][1] - report["begin_energy_uj"] for place, report in own.items())
            self.samples.put(
                PipelineIteration(
                    pipeline=pipeline,
                    iteration=next(iter(own.values()))["iteration"],
                    begin_us=begin_us,
                    span_us=max(report["end_us"] for report in own.values()) - begin_us,
                    time_us=max(following[place][0] for place in own) - begin_us,
                    energy_mj=round(energy_uj / 1000),
                )
            )

    def _tell(self, order: dict[str, Any], place: Place | None = None) -> None:
        line = json.dumps(order).encode() + b"\n"
        for connection in [self._parents[place]] if place else self._parents.values():
            connection.sendall(line)

    def _hang_up(self) -> None:
        for connection in self._parents.values():
            connection.close()


class _Gone(Exception):
    """A rank has ended before it was told to."""


class _Inbox:
    """One line from every rank, whichever comes first."""

    def __init__(self, connections: Mapping[Place, socket.socket]) -> None:
        self._selector = selectors.DefaultSelector()
        self._buffers: defaultdict[Place, bytes] = defaultdict(bytes)
        for place, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, place)

    def collect(self) -> dict[Place, dict[str, Any]]:
        """The next line of each.

        Raises:
            _Gone: one has hung up.
        """
        found: dict[Place, dict[str, Any]] = {}
        while len(found) < len(self._selector.get_map()):
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                try:
                    data = key.fileobj.recv(65_536)
                except ConnectionResetError:  # it left something of ours unread
                    data = b""
                if not data:
                    raise _Gone(f"rank {key.data} has gone")
                self._buffers[key.data] += data
                if b"\n" in self._buffers[key.data]:
                    line, _, self._buffers[key.data] = self._buffers[key.data].partition(b"\n")
                    found[key.data] = json.loads(line)
        return found


def _steps(problem: Problem) -> tuple[list[dict[str, Any]], dict[int, list[dict[str, Any]]]]:
    """Tables of time and power, and what each stage executes: what it waits for and to whom it sends."""
    tables = []
    for table in problem.options:
        order = table.frequency_mhz.argsort()
        times_us, energies_uj = table.time_s[order] * 1e6, table.energy_j[order] * 1e6
        tables.append(
            {
                "clocks_mhz": table.frequency_mhz[order].tolist(),
                "times_us": times_us.tolist(),
                "powers_mw": (energies_uj / times_us * 1000).tolist(),
            }
        )
    schedule = problem.schedule
    offsets = schedule.stage_offset.tolist()
    stage_of = schedule.stage.tolist()
    steps: dict[int, list[dict[str, Any]]] = {}
    for stage in range(schedule.stages):
        steps[stage] = [
            {
                "kind": kind,
                "microbatch": microbatch,
                "chunk": chunk,
                "table": problem.option_of[offsets[stage] + index].item(),
                "gap_us": 0.0,
                "waits": [],
                "sends": [],
            }
            for index, (kind, microbatch, chunk) in enumerate(schedule.of_stage(stage))
        ]
    delays_us = (problem.edge_delay_s * 1e6).tolist()
    for before, after, delay_us in zip(problem.edge_from.tolist(), problem.edge_to.tolist(), delays_us, strict=True):
        source, target = stage_of[before], stage_of[after]
        sender, receiver = before - offsets[source], after - offsets[target]
        if source == target:
            steps[target][receiver]["gap_us"] = delay_us
        else:
            steps[target][receiver]["waits"].append((source, sender, delay_us))
            if target not in steps[source][sender]["sends"]:
                steps[source][sender]["sends"].append(target)
    return tables, steps


def _connect(
    ranks: Sequence[RankSpec], steps: Mapping[int, list[dict[str, Any]]]
) -> defaultdict[Place, dict[int, socket.socket]]:
    """A connected pair of sockets for any two stages that talk, in every pipeline."""
    talking = {
        (min(stage, peer), max(stage, peer)) for stage, own in steps.items() for step in own for peer in step["sends"]
    }
    sockets: defaultdict[Place, dict[int, socket.socket]] = defaultdict(dict)
    for pipeline in {rank.pipeline for rank in ranks}:
        for one, other in talking:
            sockets[pipeline, one][other], sockets[pipeline, other][one] = socket.socketpair()
    return sockets
