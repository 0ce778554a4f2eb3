"""A simulated training job: starts one trainer per data-parallel pipeline and stage, and joins them at every iteration.

A thread runs the ``coordinator``, which stands for the gradient synchronisation.
"""

from __future__ import annotations

import json
import queue
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from perseus_core.rank import RankId
from perseus_core.units import us_from_ns, us_from_s
from perseus_sim.gpus.shared_gpu import SharedGpu
from perseus_sim.processes import Child, Processes, StartFailed
from perseus_sim.training.coordinator import Coordinator, PipelineIteration, RankLost
from perseus_sim.training.hosts import Hosts
from perseus_solver.model.problem import Problem


@dataclass(frozen=True)
class RankSpec:
    """Where one rank runs."""

    rank_id: RankId
    gpu: Path
    socket: str = ""
    """The agent's socket; empty: no agent."""


@dataclass(frozen=True)
class TrainingSpec:
    """What the job executes, and how it is simulated."""

    problem: Problem
    """Schedule, times and energies, delays and overhead: what the solver plans for is what the trainers execute."""
    ranks: tuple[RankSpec, ...]
    hosts: Hosts | None = None
    """Hosts that launch ahead of their GPUs, in the machine's time: ``speed`` is 1 then. None: lockstep, each mark when
    the GPU gets there."""
    marks: str = "gpu"
    """Beside ``hosts``, what the client can do: "gpu", "events" or "host"."""
    speed: float | None = 10.0
    """Virtual over wall seconds; None: as fast as the machine can, without pauses."""
    noise: float = 0.005
    """Relative standard deviation of every duration."""
    seed: int = 1
    spikes: float = 0.0
    """Share of instructions that take up to ``engine.SPIKE`` longer, as some do on real GPUs; not in the problem."""
    delay_us: int = 0
    """Of every message between stages, on top of the problem's delay."""
    synchronisation_us: int = 0
    """From the last rank's end to the next iteration, on top of the problem's overhead."""
    wait_for_agent_s: float = 0.0
    """How long ranks wait for the agent before their first iteration; training code would not, measurements may."""

    @property
    def pipelines(self) -> int:
        return 1 + max(rank.rank_id.dp for rank in self.ranks)

    @property
    def between_iterations_us(self) -> int:
        """From the last rank's end to the next iteration."""
        return self.synchronisation_us + us_from_s(self.problem.overhead_s)


class TrainingJob:
    """The processes of one job. ``samples`` fills while it runs."""

    def __init__(self, spec: TrainingSpec, folder: Path, processes: Processes, name: str = "trainer") -> None:
        self.samples: queue.SimpleQueue[PipelineIteration] = queue.SimpleQueue()
        self.children: dict[RankId, Child] = {}
        self.failure: str | None = None
        """Why the job ended, if it was not stopped."""
        self._spec = spec
        self._parents: dict[RankId, socket.socket] = {}
        self._thread = threading.Thread(target=self._coordinate, name="coordinator", daemon=True)
        self._start(folder, processes, name)
        begin_us = max(SharedGpu(rank.gpu).physics().now_us for rank in spec.ranks)
        self._coordinator = Coordinator(
            self._parents,
            self.samples,
            begin_us=begin_us if spec.hosts is None else max(begin_us, us_from_ns(time.monotonic_ns())),
            between_us=spec.between_iterations_us,
            speed=spec.speed if spec.hosts is None else 1.0,
            real_time=spec.hosts is not None,
        )

    # --------------------------------------------------------------------------------- control

    @property
    def iteration(self) -> int:
        """The iteration that runs; −1 before the first."""
        return self._coordinator.iteration

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def begin(self) -> None:
        """Let the ranks connect to their agents and train. Their processes exist since the job was made."""
        self._thread.start()

    def slow_down(self, dp: int, slowdown: float) -> None:
        """Make a pipeline take ``slowdown`` times as long from the next iteration on; 1: as before."""
        self._coordinator.slowdowns[dp] = slowdown

    def stop(self, timeout_s: float = 20.0) -> None:
        """End after the current iteration; returns when every rank has.

        Raises:
            StartFailed: ranks did not end in time.
        """
        self._coordinator.stopping.set()
        if self._thread.ident is None:  # never begun
            self._coordinator.hang_up()
        else:
            self._thread.join(timeout_s)
        for rank, child in self.children.items():
            deadline = time.monotonic() + timeout_s
            while child.running:
                if time.monotonic() > deadline:
                    raise StartFailed(f"rank {rank} did not end:\n{child.tail()}")
                time.sleep(0.01)

    # ------------------------------------------------------------------------------------ processes

    def _start(self, folder: Path, processes: Processes, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tables, steps = steps_of(self._spec.problem)
        hosts = hosts_of(self._spec.problem, self._spec.hosts, self._spec.marks)
        sockets = _connect(self._spec.ranks, steps)
        for number, rank in enumerate(self._spec.ranks):
            ours, theirs = socket.socketpair()
            self._parents[rank.rank_id] = ours
            peers = {peer: connection.fileno() for peer, connection in sockets[rank.rank_id].items()}
            document = {
                "dp": rank.rank_id.dp,
                "stage": rank.rank_id.stage,
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
                "steps": steps[rank.rank_id.stage],
                "host": hosts[rank.rank_id.stage],
            }
            label = f"{name}-{rank.rank_id.dp}-{rank.rank_id.stage}"
            path = folder / f"{label}.json"
            path.write_text(json.dumps(document))
            self.children[rank.rank_id] = processes.start(
                label,
                [sys.executable, "-m", "perseus_sim.training.trainer", str(path)],
                pass_fds=[theirs.fileno(), *peers.values()],
            )
            theirs.close()
        for connections in sockets.values():
            for connection in connections.values():
                connection.close()

    # ---------------------------------------------------------------------------------- coordinator

    def _coordinate(self) -> None:
        try:
            self._coordinator.train()
        except (RankLost, OSError) as error:
            if not self._coordinator.stopping.is_set():
                self.failure = str(error)
        finally:
            self._coordinator.hang_up()


def steps_of(problem: Problem) -> tuple[list[dict[str, Any]], dict[int, list[dict[str, Any]]]]:
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


def hosts_of(problem: Problem, hosts: Hosts | None, marks: str) -> list[dict[str, Any] | None]:
    """Fields of ``run_ahead.HostSpec`` for each stage; None: lockstep."""
    if hosts is None:
        return [None] * problem.stages
    kernels, waits = hosts.kernels(problem), hosts.waits(problem)
    offsets = problem.schedule.stage_offset.tolist()
    return [
        {
            "kernels": kernels[first:end],
            "waits": waits[first:end],
            "step_waits": hosts.step_waits,
            "launch_us": 1e6 * hosts.launch_s,
            "queue": hosts.queue,
            "marks": marks,
        }
        for first, end in pairwise(offsets)
    ]


def talking_stages(steps: Mapping[int, list[dict[str, Any]]]) -> set[tuple[int, int]]:
    """Any two stages that send each other messages, the lower first."""
    return {
        (min(stage, peer), max(stage, peer))
        for stage, instructions in steps.items()
        for step in instructions
        for peer in step["sends"]
    }


def _connect(
    ranks: Sequence[RankSpec], steps: Mapping[int, list[dict[str, Any]]]
) -> defaultdict[RankId, dict[int, socket.socket]]:
    """A connected pair of sockets for any two stages that talk, in every pipeline."""
    talking = talking_stages(steps)
    sockets: defaultdict[RankId, dict[int, socket.socket]] = defaultdict(dict)
    for dp in {rank.rank_id.dp for rank in ranks}:
        for one, other in talking:
            sockets[RankId(dp, one)][other], sockets[RankId(dp, other)][one] = socket.socketpair()
    return sockets
