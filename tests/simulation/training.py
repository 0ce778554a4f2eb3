"""Training jobs: one process for each rank, which computes on its GPU and marks what it does.

Ranks of a pipeline wait for each other as 1F1B does, and all pipelines at the end of an iteration. How fast an
instruction goes on follows from the profile and the clock in effect. Marks are written to the shared
memory that the agent reads, by the writer of the real channel; the connection is made again when the agent has gone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.gpus import Gpu
from tests.simulation.node import SimulatedNode
from tests.simulation.scheduler import NS, Process, Scheduler, Waiter

from perseus_agent.node.processes import TrainingSession
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_core.instruction import Instruction, InstructionKind
from perseus_core.marks import MarkSource
from perseus_proto.channel import SLOTS, ChannelReader, ChannelWriter
from perseus_proto.hello import Hello, Timing

RECONNECT_S: Final = 1.0
TIMINGS: Final = {
    MarkSource.HOST: Timing.HOST,
    MarkSource.SYNCHRONISED: Timing.SYNCHRONISED,
    MarkSource.EVENTS: Timing.GPU,
    MarkSource.GPU: Timing.GPU,
}
"""What a hello says of marks."""


@dataclass(frozen=True)
class Work:
    """What every pipeline of a job executes."""

    schedules: Sequence[Sequence[Instruction]]
    """By stage."""
    costs: Mapping[tuple[int, int, int], tuple[float, float]]
    """Seconds and joules of an instruction by stage, kind and clock, at all clocks from the lowest useful one on."""


@dataclass
class Rank:
    """A training process."""

    job: TrainingJob
    dp: int
    stage: int
    node: SimulatedNode
    gpu: Gpu
    pod_uid: str
    process: Process
    session: TrainingSession | None = None
    writer: ChannelWriter | None = None
    agent: Process | None = None
    pid: int = 0
    started_ns: int = 0
    late: tuple[int, list[int]] | None = None
    """The GPU's times of an iteration whose record is open: events show them an iteration later."""


@dataclass
class TrainingJob:
    """A job, as its user has started it."""

    namespace: str
    name: str
    work: Work
    scheduler: Scheduler
    marks: MarkSource = MarkSource.HOST
    """Whose time its ranks' marks are in."""
    ranks: list[Rank] = field(default_factory=list)
    iteration: int = 0
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)
    """When each iteration ended (ns), and the joules that the counters of its GPUs showed then."""
    _done: set[tuple[int, int, InstructionKind, int, int]] = field(default_factory=set)
    _waiting: list[Waiter] = field(default_factory=list)
    _arrived: int = 0

    def start(self, places: Sequence[tuple[SimulatedNode, Gpu, str]], pipelines: int) -> None:
        """Start a process on each of these GPUs, in their pods: pipeline by pipeline."""
        stages = len(self.work.schedules)
        self._done.clear()
        self._arrived = 0
        for number, (node, gpu, pod_uid) in enumerate(places[: stages * pipelines]):
            dp, stage = divmod(number, stages)
            process = Process(f"{self.name}/{dp}.{stage}")
            rank = Rank(self, dp, stage, node, gpu, pod_uid, process, pid=100 + number)
            rank.started_ns = self.scheduler.now_ns
            self.ranks.append(rank)
            self.scheduler.spawn(process, "train", lambda rank=rank: self._train(rank))
            self.scheduler.spawn(process, "connect", lambda rank=rank: self._connect(rank))

    def end(self) -> None:
        """SIGKILL for all of them, as when a pod is deleted or a rank has failed."""
        for rank in self.ranks:
            self.scheduler.kill(rank.process)
            rank.gpu.execute(0.0)
            if rank.session is not None and rank.agent is not None:
                session, agent, node = rank.session, rank.agent, rank.node
                self.scheduler.after(0.001, lambda s=session, a=agent, n=node: n.leave(s, a))
            rank.session = rank.writer = None
        self.ranks.clear()

    # ------------------------------------------------------------------------------------------------ one rank

    def _train(self, rank: Rank) -> None:
        schedule = self.work.schedules[rank.stage]
        while True:
            iteration, writer = self.iteration, rank.writer
            times_us = self._begin_step(rank, writer, iteration)
            for index, instruction in enumerate(schedule):
                self._receive(rank, instruction)
                self._mark(writer, times_us, iteration, 2 * index + 1)
                self._compute(rank, instruction)
                self._mark(writer, times_us, iteration, 2 * index + 2)
                self._done.add((rank.dp, rank.stage, instruction.kind, instruction.microbatch, iteration))
                self._notify()
            self._end_step(rank, writer, iteration, times_us)
            self._reduce(iteration)

    def _compute(self, rank: Rank, instruction: Instruction) -> None:
        """Execute an instruction, at each clock for as long as that is in effect."""
        gpu, left, noise = rank.gpu, 1.0, self.scheduler.random.uniform(0.998, 1.002)
        changed = True
        while changed:
            takes_s, energy_j = self._costs(rank, instruction)
            gpu.execute(energy_j / takes_s)
            began_ns, gpu.executing = self.scheduler.now_ns, self.scheduler.waiter()
            changed = self.scheduler.wait(gpu.executing, left * noise * takes_s)
            left = max(0.0, left - (self.scheduler.now_ns - began_ns) / (noise * takes_s * NS))
        gpu.executing = None
        gpu.execute(0.0)

    @property
    def _by_events(self) -> bool:
        return self.marks in (MarkSource.EVENTS, MarkSource.GPU)

    def _begin_step(self, rank: Rank, writer: ChannelWriter | None, iteration: int) -> list[int]:
        """Open a record, and close the one before where its times came late. Returns the begin of the step."""
        now_us = self.scheduler.now_ns // 1000
        if writer is not None:
            writer.step_begin(iteration, now_us)
            if rank.late is not None:
                before, times_us = rank.late
                writer.fill(before, times_us[0], times_us[-1], times_us[1:-1])
            if self.marks is MarkSource.GPU:
                writer.gpu_mark(iteration, 0)
        rank.late = None
        return [now_us]

    def _mark(self, writer: ChannelWriter | None, times_us: list[int], iteration: int, boundary: int) -> None:
        now_us = self.scheduler.now_ns // 1000
        times_us.append(now_us)
        if writer is None:
            return
        index, ends = divmod(boundary - 1, 2)
        if ends:
            writer.end(index, now_us)
        else:
            writer.begin(index, now_us)
        if self.marks is MarkSource.GPU:
            writer.gpu_mark(iteration, boundary)

    def _end_step(self, rank: Rank, writer: ChannelWriter | None, iteration: int, times_us: list[int]) -> None:
        now_us = self.scheduler.now_ns // 1000
        if writer is None:
            return
        if not self._by_events:
            writer.step_end(iteration, now_us)
            return
        writer.step_end_untimed()
        if self.marks is MarkSource.GPU:
            writer.gpu_mark(iteration, len(times_us))
        rank.late = iteration, [*times_us, now_us]

    def _costs(self, rank: Rank, instruction: Instruction) -> tuple[float, float]:
        """Seconds and joules of an instruction at the GPU's clock."""
        clock = rank.gpu.clock_mhz
        while (costs := self.work.costs.get((rank.stage, int(instruction.kind), clock))) is None:
            clock += 15
        return costs

    def _receive(self, rank: Rank, instruction: Instruction) -> None:
        """Wait for the neighbour whose result this needs."""
        forward = instruction.kind is InstructionKind.FORWARD
        neighbour = rank.stage + (-1 if forward else 1)
        if 0 <= neighbour < len(self.work.schedules):
            needed = rank.dp, neighbour, instruction.kind, instruction.microbatch, self.iteration
            while needed not in self._done:
                self._wait()

    def _reduce(self, iteration: int) -> None:
        """Wait for all pipelines."""
        self._arrived += 1
        if self._arrived == len(self.ranks):
            self._arrived = 0
            self._done.clear()
            for own in self.ranks:
                own.gpu.settle()
            self.ends[iteration] = self.scheduler.now_ns, sum(own.gpu.energy_j for own in self.ranks)
            self.iteration += 1
            self._notify()
        while self.iteration == iteration:
            self._wait()

    def _wait(self) -> None:
        waiter = self.scheduler.waiter()
        self._waiting.append(waiter)
        self.scheduler.wait(waiter)

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            self.scheduler.wake(waiter)

    def _connect(self, rank: Rank) -> None:
        """Keep a connection to the node's agent, as the client does."""
        scheduler = self.scheduler
        while True:
            if rank.session is not None and (rank.agent is None or not rank.agent.alive or rank.session.dismissed):
                rank.session = rank.writer = rank.agent = None
                scheduler.pause(scheduler.random.uniform(0.1, RECONNECT_S))
            if rank.session is None:
                schedule = tuple(self.work.schedules[rank.stage])
                reader = ChannelReader.create(len(schedule))
                memory, bell = os.dup(reader.memory_fd), os.dup(reader.event_fd)
                hello = Hello(rank.dp, rank.stage, 0, TIMINGS[self.marks], rank.gpu.uuid, schedule)
                peer = Peer(rank.pid, 1000, rank.started_ns, PodProcess(rank.pod_uid, None), None)
                session = TrainingSession(peer, hello, reader, lambda: None)
                rank.agent = rank.node.admit(session)
                if rank.agent is not None:
                    writer = ChannelWriter(memory, bell, len(schedule))
                    writer.source = self.marks
                    rank.session, rank.writer, rank.late = session, writer, None
                else:
                    os.close(memory)
                    os.close(bell)
                    reader.close()
            scheduler.pause(RECONNECT_S)


def forge(rank: Rank, value: float, lasts_s: float) -> None:
    """Write what cannot be true into a rank's memory for a while, and ring: as a tenant's process may."""
    scheduler, draw = rank.job.scheduler, rank.job.scheduler.random
    end_ns = scheduler.now_ns + int(lasts_s * 1e9)
    way, iteration = int(value * 5), 1_000 + int(value * 1e6)
    while scheduler.now_ns < end_ns:
        writer = rank.writer
        if writer is not None:
            if way == 0:  # records of iterations that begin at the same time
                _equal_records(writer, iteration, scheduler.now_ns // 1000)
                iteration += 8
            elif way == 1:  # iterations that fall
                _equal_records(writer, iteration, scheduler.now_ns // 1000 - 1000 * int(draw.random() * 1000))
                iteration = max(1, iteration - 9)
            elif way == 2:  # any bits in the words that are the rank's
                for _ in range(20):
                    writer.words[draw.randrange(4, len(writer.words))] = draw.getrandbits(64)
            elif way == 3:  # iterations that may be true, of numbers that no other rank has
                _records(writer, iteration, scheduler.now_ns // 1000 - 2_000_000, 200_000)
                iteration += 1_000
            else:  # times far ahead, or before their begin
                _equal_records(writer, iteration, draw.getrandbits(62))
                iteration += draw.randrange(1, 1 << 20)
            writer.ring()
        scheduler.pause(draw.uniform(0.01, 0.3))


def ring(rank: Rank, value: float, lasts_s: float) -> None:
    """Ring without a pause, and have what the agent reads then take it milliseconds."""
    scheduler = rank.job.scheduler
    end_ns = scheduler.now_ns + int(lasts_s * 1e9)
    while scheduler.now_ns < end_ns:
        session, writer = rank.session, rank.writer
        if session is not None and writer is not None:
            session.channel.__dict__["look_s"] = 0.002 + 0.008 * value  # see ``worker``
            writer.ring()
        scheduler.pause(scheduler.random.uniform(0.004, 0.02))
    if rank.session is not None:
        rank.session.channel.__dict__.pop("look_s", None)


def _equal_records(writer: ChannelWriter, first: int, at_us: int) -> None:
    """Records of the GPU's times, all of which are one."""
    _records(writer, first, at_us, 0)


def _records(writer: ChannelWriter, first: int, at_us: int, period_us: int) -> None:
    """Records of the GPU's times, in which everything takes as long."""
    writer.change_source(MarkSource.EVENTS)
    boundaries = 2 * (writer._last + 1)
    for number in range(SLOTS):
        begin_us = at_us + number * period_us
        times_us = [begin_us + period_us * place // (boundaries + 1) for place in range(boundaries)]
        writer.step_begin(first + number, begin_us)
        writer.step_end_untimed()
        writer.fill(first + number, begin_us, times_us[-1], times_us)
