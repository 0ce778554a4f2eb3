"""The gradient synchronisation of a simulated training job: when all ranks have ended their iteration, the next begins.

It begins at the latest of their ends. Time and energy of each pipeline's iterations are computed here, from what the
ranks report of their GPUs and without the agent. The ranks may be processes of this machine or of many pods.
"""

from __future__ import annotations

import json
import queue
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from perseus_core.rank import RankId
from perseus_core.units import us_from_ns

LATEST_US: Final = 2_000_000
"""In real time, how far a job may be behind its machine before that time counts as lost to it."""


class Executed(NamedTuple):
    """One instruction as a GPU ran it, in the job's time."""

    begin_us: int
    end_us: int
    energy_uj: int


@dataclass(frozen=True)
class PipelineIteration:
    """One iteration of one pipeline, as its GPUs' counters saw it."""

    dp: int
    iteration: int
    begin_us: int
    span_us: int
    """To the end of its own last instruction."""
    time_us: int
    """To the begin of the next iteration, which waits for all pipelines."""
    energy_mj: int
    """Of all its GPUs, over ``time_us``."""
    executed: tuple[tuple[Executed, ...], ...] = ()
    """What each stage ran, in its order."""


class RankLost(Exception):
    """A rank has ended without having been stopped."""


class Coordinator:
    """Keeps the ranks of one job in step, over a connection to each. ``samples`` fills while it runs."""

    def __init__(
        self,
        parents: Mapping[RankId, socket.socket],
        samples: queue.SimpleQueue[PipelineIteration],
        *,
        begin_us: int,
        between_us: int,
        speed: float | None,
        real_time: bool = False,
        first: int = 0,
    ) -> None:
        """Create a coordinator; nothing is sent yet.

        Args:
            parents: a connection to each rank.
            samples: where measurements go.
            begin_us: of the first iteration, in virtual time.
            between_us: from the last rank's end to the next iteration.
            speed: virtual over wall seconds; None: as fast as the machine can.
            real_time: virtual time is this machine's monotonic clock.
            first: number of the first iteration.
        """  # fmt: skip
        self.iteration = first - 1
        """The iteration that runs; one less than the first before that."""
        self.stopping = threading.Event()
        self.slowdowns: dict[int, float] = {}
        """By data-parallel rank: the slowdown of a pipeline, from the next iteration on."""
        self._parents = parents
        self._samples = samples
        self._begin_us = begin_us
        self._between_us = between_us
        self._speed = speed
        self._real_time = real_time

    def train(self) -> None:
        """Run iterations until ``stopping`` is set.

        Raises:
            RankLost: a rank has ended.
        """
        begin_us = self._begin_us
        inbox = _Inbox(self._parents)
        self._send({"connect": True})
        inbox.collect()
        before: dict[RankId, dict[str, Any]] = {}
        iteration = self.iteration + 1
        wall_ns = time.monotonic_ns()
        while not self.stopping.is_set():
            if self._real_time:
                begin_us = max(begin_us, us_from_ns(time.monotonic_ns()) - LATEST_US)
                wall_ns = begin_us * 1000
            else:  # time lost by this machine is not made up for: each barrier sets a new pace
                wall_ns = max(wall_ns, time.monotonic_ns())
            self.iteration = iteration
            slowdowns = dict(self.slowdowns)  # the same for all ranks of an iteration
            for rank in self._parents:
                slowdown = slowdowns.get(rank.dp, 1.0)
                command = {"iteration": iteration, "begin_us": begin_us, "wall_ns": wall_ns, "slowdown": slowdown}
                self._send(command, rank)
            reports = inbox.collect()
            if before:
                self._measure(before, {p: (r["begin_us"], r["begin_energy_uj"]) for p, r in reports.items()})
            before = reports
            next_us = max(report["end_us"] for report in reports.values()) + self._between_us
            if self._speed:
                wall_ns += int((next_us - begin_us) * 1000 / self._speed)
            begin_us = next_us
            iteration += 1
        self._send({"stop": True, "begin_us": begin_us})
        last = inbox.collect()
        if before:
            self._measure(before, {p: (r["final_us"], r["final_energy_uj"]) for p, r in last.items()})

    def hang_up(self) -> None:
        """Close all connections, upon which every rank ends."""
        for connection in self._parents.values():
            connection.close()

    def _measure(self, reports: Mapping[RankId, dict[str, Any]], following: Mapping[RankId, tuple[int, int]]) -> None:
        for dp in sorted({rank.dp for rank in self._parents}):
            of_pipeline = {rank: report for rank, report in reports.items() if rank.dp == dp}
            begin_us = min(report["begin_us"] for report in of_pipeline.values())
            energy_uj = sum(following[rank][1] - report["begin_energy_uj"] for rank, report in of_pipeline.items())
            self._samples.put(
                PipelineIteration(
                    dp=dp,
                    iteration=next(iter(of_pipeline.values()))["iteration"],
                    begin_us=begin_us,
                    span_us=max(report["end_us"] for report in of_pipeline.values()) - begin_us,
                    time_us=max(following[rank][0] for rank in of_pipeline) - begin_us,
                    energy_mj=round(energy_uj / 1000),
                    executed=tuple(
                        tuple(Executed(*one) for one in of_pipeline[rank]["executed"]) for rank in sorted(of_pipeline)
                    ),
                )
            )

    def _send(self, command: dict[str, Any], rank: RankId | None = None) -> None:
        line = json.dumps(command).encode() + b"\n"
        for each in [rank] if rank else self._parents:
            try:
                self._parents[each].sendall(line)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise RankLost(f"rank {each} has gone") from error


class _Inbox:
    """Collects one line from every rank, in whichever order they arrive."""

    def __init__(self, connections: Mapping[RankId, socket.socket]) -> None:
        self._selector = selectors.DefaultSelector()
        self._buffers: defaultdict[RankId, bytes] = defaultdict(bytes)
        for rank, connection in connections.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def collect(self) -> dict[RankId, dict[str, Any]]:
        """The next line of each.

        Raises:
            RankLost: a rank has closed its connection.
        """
        reports: dict[RankId, dict[str, Any]] = {}
        while len(reports) < len(self._selector.get_map()):
            for key, _ in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                try:
                    data = key.fileobj.recv(65_536)
                except ConnectionResetError:  # it left data unread
                    data = b""
                if not data:
                    raise RankLost(f"rank {key.data} has gone")
                self._buffers[key.data] += data
                if b"\n" in self._buffers[key.data]:
                    line, _, self._buffers[key.data] = self._buffers[key.data].partition(b"\n")
                    reports[key.data] = json.loads(line)
        return reports
