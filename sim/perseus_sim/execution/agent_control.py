"""The agent's own control, on shared memory of its own layout, in virtual time.

A rank's end of the memory is written as a training process does: marks of the host, the GPU's mark as it passes a
boundary, and the GPU's times when its events answer, an iteration later. The agent's end reads it. Each GPU has its
worker, which is blocked while its own call runs, and all share the queue of calls. What decides is
``perseus_agent.clocks``; here is only the thread that it would run in.
"""

from __future__ import annotations

import math
import os
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from perseus_agent.clocks.call_queue import CallQueue, gain_mhz
from perseus_agent.clocks.timetable import Lead, Timetable
from perseus_proto.channel import ChannelReader, ChannelWriter, MarkSource
from perseus_proto.latency import SwitchLatency
from perseus_proto.units import s_from_us, us_from_s
from perseus_sim.execution.executor import Control

MARKS: Final = {"gpu": MarkSource.GPU, "events": MarkSource.EVENTS}


@dataclass(frozen=True)
class Stage:
    """A plan of one stage, as the agent knows it."""

    clocks_mhz: tuple[int, ...]
    plan_id: str = "plan"
    point: int = 0


@dataclass
class Times:
    """The GPU's times of an iteration, until its events are read."""

    iteration: int
    begin_us: int
    times_us: list[int] = field(default_factory=list)
    end_us: int | None = None


@dataclass
class Gpu:
    """What the thread of a GPU does."""

    applied: int | None = None
    queued: bool = False
    calling: bool = False


class Worker:
    """One rank, its memory, and its GPUs, which are taken to decide alike."""

    def __init__(self, stage: Stage, source: MarkSource, gpus: int) -> None:
        count = len(stage.clocks_mhz)
        self.count = count
        self.reader = ChannelReader.create(count)
        self.writer = ChannelWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd), count)
        self.writer.source = source
        self.timetable = Timetable(count, lambda _: stage)
        self.highest_mhz = max(stage.clocks_mhz)
        self.unread: deque[Times] = deque()
        self.wanted: int | None = None
        self.gpus = [Gpu() for _ in range(gpus)]
        self.looks = 0
        """Number of the next look that is due: an earlier one replaces it."""

    def close(self) -> None:
        self.reader.close()


class AgentControl(Control):
    """The agent's timetable."""

    def __init__(self, latency: SwitchLatency, source: MarkSource = MarkSource.GPU) -> None:
        """``latency``: what the agent knows of the GPUs; ``source``: what the ranks' marks are."""
        self._latency = latency
        self._source = source
        self.turns = 0

    def start(self) -> None:
        pipeline = self.executor.pipeline
        stages = [Stage(tuple(pipeline.plan[first:end])) for first, end in pairwise(pipeline.offsets)]
        gpus = self.executor.machine.gpus
        self.workers = [Worker(stage, self._source, gpus) for stage in stages]
        self._queues = [CallQueue() for _ in stages]
        known, wait_s = self._latency, (gpus - 1) * self._latency.call_s / 2
        self._lead = Lead(us_from_s(known.p50_s + wait_s), us_from_s(known.deviation_s + wait_s))
        self._offsets, self._rank_of = pipeline.offsets, pipeline.rank_of

    # ------------------------------------------------------------------------------------------------- marks

    def gpu_step_begun(self, iteration: int, now_s: float) -> None:
        for worker in self.workers:
            worker.unread.append(Times(iteration, round(now_s * 1e6)))
            worker.writer.gpu_mark(iteration, 0)

    def gpu_begins(self, number: int, now_s: float) -> None:
        rank = self._rank_of[number]
        worker = self.workers[rank]
        times = worker.unread[-1]
        times.times_us.append(round(now_s * 1e6))
        worker.writer.gpu_mark(times.iteration, 2 * (number - self._offsets[rank]) + 1)

    def gpu_ended(self, number: int, now_s: float) -> None:
        rank = self._rank_of[number]
        worker = self.workers[rank]
        times = worker.unread[-1]
        times.times_us.append(round(now_s * 1e6))
        worker.writer.gpu_mark(times.iteration, 2 * (number - self._offsets[rank]) + 2)

    def gpu_step_ended(self, iteration: int, now_s: float) -> None:
        for worker in self.workers:
            worker.unread[-1].end_us = round(now_s * 1e6)
            worker.writer.gpu_mark(iteration, 2 * worker.count + 1)

    def host_step_begun(self, rank: int, iteration: int, now_s: float) -> None:
        worker = self.workers[rank]
        while worker.unread and worker.unread[0].end_us is not None:
            times = worker.unread.popleft()
            worker.writer.fill(times.iteration, times.begin_us, times.end_us or 0, times.times_us)
        worker.writer.step_begin(iteration, round(now_s * 1e6))
        self._look(rank)

    def host_begun(self, number: int, now_s: float) -> None:
        rank = self._rank_of[number]
        self.workers[rank].writer.begin(number - self._offsets[rank], round(now_s * 1e6))

    def host_ended(self, number: int, now_s: float) -> None:
        rank = self._rank_of[number]
        self.workers[rank].writer.end(number - self._offsets[rank], round(now_s * 1e6))

    def host_step_ended(self, rank: int, iteration: int, now_s: float) -> None:  # noqa: ARG002
        self.workers[rank].writer.step_end_untimed()

    # ------------------------------------------------------------------------------------------------ threads

    def _timer(self, rank: int, number: int) -> None:
        if number == self.workers[rank].looks:
            self._look(rank)

    def _look(self, rank: int) -> None:
        worker = self.workers[rank]
        self.turns += 1
        now_us = math.ceil(self.executor.now_s * 1e6)
        timetable = worker.timetable
        while (record := worker.reader.drain_iteration()) is not None:
            timetable.add(record)
        position = worker.reader.gpu_position()
        if position is not None:
            timetable.sight(*position, now_us)
        else:
            host = worker.reader.position()
            timetable.bound(host.iteration, 2 * host.index + 1, now_us)
        if timetable.ready:
            worker.wanted, look_us = timetable.target(now_us, self._lead, worker.wanted)
            worker.looks += 1
            self.executor.at(max(s_from_us(look_us), self.executor.now_s), self._timer, rank, worker.looks)
        else:
            worker.wanted = worker.highest_mhz
        for gpu in range(len(worker.gpus)):
            self._send(rank, gpu, now_us)

    def _send(self, rank: int, number: int, now_us: int) -> None:
        worker, queue = self.workers[rank], self._queues[rank]
        gpu, name = worker.gpus[number], str(number)
        if gpu.calling:
            return  # its thread is inside the driver
        if worker.wanted == gpu.applied:
            if gpu.queued:
                gpu.queued = False
                self._leave(rank, name, now_us)
            return
        gpu.queued = True
        if queue.ask(name, gain_mhz(gpu.applied, worker.wanted), now_us):
            gpu.queued, gpu.calling = False, True
            gpu.applied = worker.wanted
            mhz = worker.wanted or self.executor.pipeline.default_mhz
            self.executor.call(rank, number, mhz, self._returned, rank, number)

    def _leave(self, rank: int, name: str, now_us: int) -> None:
        queue = self._queues[rank]
        before = queue.holder
        queue.leave(name, now_us)
        following = queue.holder
        if following is not None and following not in (before, name):
            self.executor.at(self.executor.now_s, self._turn, rank, int(following))

    def _turn(self, rank: int, number: int) -> None:
        self._send(rank, number, math.ceil(self.executor.now_s * 1e6))

    def _returned(self, rank: int, number: int) -> None:
        now_us = math.ceil(self.executor.now_s * 1e6)
        self.workers[rank].gpus[number].calling = False
        self._leave(rank, str(number), now_us)
        self._send(rank, number, now_us)
