"""A simulated training job in the pods of a cluster with simulated GPUs: ``python -m perseus_sim.training.pod_job`` in
each.

Like a launcher of distributed training: every pod starts one ``pod_rank`` for each GPU that the kubelet gave it. The
pod of node rank 0 also coordinates: it reads the profile, sends every rank its schedule, keeps iterations in step, and
prints their time and energy, measured on the GPUs and not by the agent. Ranks are numbered over the pods; stages run
fastest. If a rank dies, all start again; with ``--elastic`` those that are left, and again with those that come, as
with torchrun. SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from perseus_core import keys
from perseus_core.rank import RankId
from perseus_core.units import j_from_mj, s_from_us, us_from_ns, us_from_s
from perseus_sim.gpus.shim_gpu import NoGpus, granted
from perseus_sim.training.coordinator import Coordinator, PipelineIteration, RankLost
from perseus_sim.training.pod_rank import NEIGHBOUR_TIMEOUT_S, listen, receive_message, send_message
from perseus_sim.training.rank import JobLost

_AGAIN_S: Final = 1.0
_STOP_S: Final = 5.0
_LAST_CALL_S: Final = 2.0
"""How long an elastic job waits for more ranks; torchrun's default is 30 s."""
DEFAULT_PORT: Final = 29500


@dataclass(frozen=True)
class PodRanks:
    """What this pod runs."""

    master: tuple[str, int]
    first: int
    """Number of its first rank."""
    uuids: tuple[str, ...]
    folder: str

    @property
    def coordinates(self) -> bool:
        return self.first == 0


def ranks_of(environment: Mapping[str, str]) -> PodRanks:
    """One rank for each GPU that the kubelet gave to this container, from torchrun's variables or those of an indexed
    Job.

    Raises:
        NoGpus: there is none, or it is not simulated.
    """
    folder, uuids = granted(environment)
    number = int(environment.get("NODE_RANK") or environment.get("JOB_COMPLETION_INDEX") or 0)
    master = environment.get("MASTER_ADDR", "127.0.0.1"), int(environment.get("MASTER_PORT", DEFAULT_PORT))
    return PodRanks(master, number * len(uuids), uuids, str(folder))


@dataclass
class Plan:
    """What the ranks execute."""

    stages: int
    pipelines: int
    tables: list[dict[str, Any]]
    steps: Mapping[int, list[dict[str, Any]]]
    hosts: list[dict[str, Any] | None]
    """By stage: fields of ``run_ahead.HostSpec``; None: lockstep."""
    talking: set[tuple[int, int]]
    between_us: int
    noise: float
    agent: str = field(default_factory=lambda: os.environ.get(keys.ENV_SOCKET, ""))

    @classmethod
    def of(cls, settings: argparse.Namespace) -> Plan:
        """From the command line. Here alone NumPy is needed.

        Raises:
            ValueError, OSError: profile or schedule are refused.
        """
        from perseus_sim.training.hosts import Framework, Hosts
        from perseus_sim.training.job import hosts_of, steps_of, talking_stages
        from perseus_solver.model.problem import build_problem
        from perseus_solver.model.profile import read_profile
        from perseus_solver.schedules import build_schedule

        profile = read_profile(settings.profile, stages=settings.stages)
        schedule = build_schedule(settings.schedule, stages=settings.stages, microbatches=settings.microbatches)
        problem = build_problem(profile, schedule, blocking_power_w=settings.blocking_power)
        tables, steps = steps_of(problem)
        between_us = us_from_s(problem.overhead_s)
        talking = talking_stages(steps)
        framework = settings.framework
        hosts = hosts_of(problem, Hosts(Framework(framework)) if framework != "lockstep" else None, settings.marks)
        return cls(settings.stages, settings.pipelines, tables, steps, hosts, talking, between_us, settings.noise)

    def specification(self, rank: int, where: Mapping[int, tuple[str, int]], uuid: str) -> dict[str, Any]:
        """For ``pod_rank.join``: the lower of two stages that talk dials the other."""
        dp, stage = divmod(rank, self.stages)
        dialled = [high for low, high in sorted(self.talking) if low == stage]
        return {
            "dp": dp,
            "stage": stage,
            "gpu_uuid": uuid,
            "socket": self.agent,
            "wait_for_agent_s": 0.0,
            "speed": 1.0,
            "noise": self.noise,
            "spikes": 0.0,
            "seed": 100_003 + rank,
            "delay_us": 0,
            "tables": self.tables,
            "steps": self.steps[stage],
            "host": self.hosts[stage],
            "dial": [(other, where[dp * self.stages + other]) for other in dialled],
            "neighbours": sum(stage in pair for pair in self.talking),
            "now_us": us_from_ns(time.monotonic_ns()),
        }


class Rendezvous:
    """Where the ranks of all pods meet.

    Args:
        plan: what they execute.
        port: on which they come.
        elastic: they are as many pipelines as come, and not as many as the plan has.
    """

    def __init__(self, plan: Plan, port: int, *, elastic: bool = False) -> None:
        self._plan = plan
        self._elastic = elastic
        self._came: dict[int, tuple[socket.socket, tuple[str, int], str]] = {}
        self._listener = listen(port)

    def gather(self, stop: threading.Event) -> dict[RankId, socket.socket]:
        """Wait until all ranks have connected; a rank that connects again replaces its old connection.

        Raises:
            RankLost: stopped before.
        """
        while not self._all_came():
            if stop.is_set():
                raise RankLost("stopped before all ranks had come")
            self._welcome(_LAST_CALL_S)
        came = {rank: self._came.pop(rank) for rank in range(self._plan.stages * self._pipelines())}
        where = {rank: address for rank, (_, address, _) in came.items()}
        for rank, (connection, _, uuid) in came.items():
            send_message(connection, self._plan.specification(rank, where, uuid))
            connection.settimeout(None)
        return {RankId(*divmod(rank, self._plan.stages)): connection for rank, (connection, *_) in came.items()}

    def interrupt(self, parents: Mapping[RankId, socket.socket], over: threading.Event) -> None:
        """Break the training of these ranks off when another pipeline has come, so that all gather again."""
        following = range(len(parents), len(parents) + self._plan.stages)
        while not over.is_set():
            self._welcome(_LAST_CALL_S)
            if all(rank in self._came for rank in following):
                for connection in parents.values():
                    with contextlib.suppress(OSError):  # its rank has gone
                        connection.shutdown(socket.SHUT_RDWR)
                return

    def _pipelines(self) -> int:
        """How many are complete, from the first one on."""
        if not self._elastic:
            return self._plan.pipelines
        ranks = next(rank for rank in itertools.count() if rank not in self._came)
        return ranks // self._plan.stages

    def _all_came(self) -> bool:
        """Whether training may begin; an elastic one waits until no more ranks come."""
        if not self._elastic:
            return len(self._came) == self._plan.stages * self._plan.pipelines
        return self._pipelines() > 0 and not self._welcome(_LAST_CALL_S)

    def _welcome(self, timeout_s: float) -> bool:
        """Wait for the next rank; whether one came."""
        self._listener.settimeout(timeout_s)
        try:
            connection, (host, *_) = self._listener.accept()
        except TimeoutError:
            return False
        connection.settimeout(NEIGHBOUR_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            hello = receive_message(connection)
        except (JobLost, OSError, ValueError):
            connection.close()
            return True
        if before := self._came.pop(hello["rank"], None):
            before[0].close()
        self._came[hello["rank"]] = connection, (host, hello["port"]), hello["gpu"]
        return True


def coordinate(plan: Plan, port: int, report_s: float, stop: threading.Event, *, elastic: bool = False) -> None:
    """Train until ``stop`` is set; start again whenever a rank is lost, or with ``elastic`` a pipeline comes."""
    rendezvous = Rendezvous(plan, port, elastic=elastic)
    samples: queue.SimpleQueue[PipelineIteration] = queue.SimpleQueue()
    threading.Thread(target=_report, args=(stop, samples, report_s), daemon=True).start()
    first = 0
    while not stop.is_set():
        try:
            parents = rendezvous.gather(stop)
        except (RankLost, OSError) as error:
            print(f"perseus_sim.training.pod_job: {error}", file=sys.stderr, flush=True)
            continue
        now_us = us_from_ns(time.monotonic_ns())
        coordinator = Coordinator(
            parents, samples, begin_us=now_us, between_us=plan.between_us, speed=1.0, real_time=True, first=first
        )
        coordinator.stopping = stop
        over = threading.Event()
        watcher = threading.Thread(target=rendezvous.interrupt, args=(parents, over))
        if elastic:
            watcher.start()
        try:
            coordinator.train()
        except (RankLost, OSError) as error:
            if not stop.is_set():
                print(f"{error}: the job begins again", file=sys.stderr, flush=True)
        finally:
            over.set()
            if elastic:
                watcher.join()
            coordinator.hang_up()
            first = coordinator.iteration + 1


def _report(stop: threading.Event, samples: queue.SimpleQueue[PipelineIteration], every_s: float) -> None:
    while not stop.wait(every_s):
        if line := report(samples):
            print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def report(samples: queue.SimpleQueue[PipelineIteration]) -> str:
    """What the last iterations took on average; empty: none has ended."""
    taken: list[PipelineIteration] = []
    while not samples.empty():
        taken.append(samples.get())
    if not taken:
        return ""
    last = max(sample.iteration for sample in taken)
    time_s = s_from_us(sum(sample.time_us for sample in taken)) / len(taken)
    energy_j = j_from_mj(sum(sample.energy_mj for sample in taken)) / len(taken)
    return f"iteration {last}: {time_s:.3f} s, {energy_j:.0f} J for each pipeline"


def launch(ranks: PodRanks, stop: threading.Event) -> None:
    """Keep this pod's ranks running: all of them, or none."""
    while not stop.is_set():
        host, port = ranks.master if not ranks.coordinates else ("127.0.0.1", ranks.master[1])
        children = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "perseus_sim.training.pod_rank",
                    host,
                    str(port),
                    str(number),
                    ranks.folder,
                    uuid,
                ]
            )
            for number, uuid in enumerate(ranks.uuids, ranks.first)
        ]
        while not stop.is_set() and all(child.poll() is None for child in children):
            stop.wait(0.1)
        finished = not any(child.poll() for child in children) and not stop.is_set()
        deadline_s = time.monotonic() + _STOP_S
        for child in children:
            try:
                child.wait(max(0.0, deadline_s - time.monotonic()) if stop.is_set() or finished else 0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        if finished:  # the coordinator has stopped them
            return
        stop.wait(_AGAIN_S)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perseus_sim.training.pod_job", description=__doc__)
    parser.add_argument("--profile", type=Path, required=True, help="CSV: what instructions take")
    parser.add_argument("--schedule", default="1F1B", help="as in the PerseusJob (default: 1F1B)")
    parser.add_argument("--stages", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--pipelines", type=int, default=1, help="data-parallel size (default: 1)")
    parser.add_argument(
        "--elastic", action="store_true", help="train as many pipelines as have come, and begin again when more come"
    )
    parser.add_argument("--blocking-power", type=float, required=True, help="watts of a GPU that waits")
    parser.add_argument(
        "--framework",
        default="pytorch",
        choices=("pytorch", "megatron", "deepspeed", "lockstep"),
        help="where hosts wait for their GPUs; lockstep: at every instruction (default: pytorch)",
    )
    parser.add_argument(
        "--marks", default="gpu", choices=("gpu", "events", "host"), help="what the client can do (default: gpu)"
    )
    parser.add_argument("--noise", type=float, default=0.0, help="of durations, relative (default: 0)")
    parser.add_argument("--report", type=float, default=5.0, help="seconds between reports (default: 5)")
    settings = parser.parse_args(arguments)
    stop = threading.Event()
    try:
        ranks = ranks_of(os.environ)
        plan = Plan.of(settings) if ranks.coordinates else None
    except (NoGpus, ValueError, OSError) as error:
        print(f"perseus_sim.training.pod_job: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    launcher = threading.Thread(target=launch, args=(ranks, stop))
    launcher.start()
    if plan:
        coordinate(plan, ranks.master[1], settings.report, stop, elastic=settings.elastic)
    launcher.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
