"""The agent's own control in virtual time: followers, governors and the queue of calls, on memory of its own layout.

A rank's end of the memory is written as a training process does: marks of the host, the GPU's mark as it passes a
boundary, and the GPU's times when its events answer, an iteration later. What reads and decides is
``perseus_agent.clocks``. Here is only what its threads do: wake at rings and at announced times, and be blocked while a
call lasts. Each GPU of a rank has a process, a follower and a governor of its own, waits for its own turns and measures
its own latency; only the memory is written once, as they mark alike.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests.execution.executor import Control, Executor
from tests.execution.pipeline import Pipeline

from perseus_agent.clocks.call_queue import CallQueue, CallTurns
from perseus_agent.clocks.clock_readings import READ_ROOM_S
from perseus_agent.clocks.governor import Governor, GovernorLimits
from perseus_agent.clocks.journal import Journal, JournalState
from perseus_agent.clocks.plans import JobPlans, StagePlan
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.devices.base import Controllability, DeviceIdentity, EnergyReading, EventReason
from perseus_core.instruction import Instruction, InstructionKind
from perseus_core.latency import SwitchLatency
from perseus_core.marks import MarkSource
from perseus_core.rank import RankId
from perseus_core.units import s_from_us, us_from_s
from perseus_proto.channel import ChannelReader, ChannelWriter
from perseus_proto.planset import StageSchedule

READ_US: Final = 10
"""What it takes to read a clock: measured, docs/clocks-take-time.md."""
MEASURED: Final = 64
"""Changes that each governor measures: latencies do not drift here, and reading clocks takes half of a run's time."""


class MemoryJournal(Journal):
    """A journal that is lost with the process: no process ends here."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), "")

    def _write(self, state: JournalState) -> None:
        self._state = state


class FixedPlans(JobPlans):
    """One plan for each stage, from the first iteration on."""

    def __init__(self, plans: list[StagePlan]) -> None:
        super().__init__()
        self._plans = plans

    def follow(self, dp: int, stage: int, iteration: int) -> StagePlan | None:
        return self._plans[stage]


def plans_of(pipeline: Pipeline, changes: Mapping[int, SwitchLatency]) -> list[StagePlan]:
    """What the agent compiles from the plan that is executed, and from the latencies that were sent with it."""
    schedule, plans = pipeline.problem.schedule, []
    for stage, (first, end) in enumerate(pairwise(pipeline.offsets)):
        columns = (schedule.kind, schedule.microbatch, schedule.chunk)
        kinds, microbatches, chunks = (tuple(column[first:end].tolist()) for column in columns)
        clocks = tuple(pipeline.plan[first:end])
        wake = bytes(mhz != before for mhz, before in zip(clocks, (clocks[-1], *clocks[:-1]), strict=True))
        stage_schedule = StageSchedule(stage, kinds, microbatches, chunks)
        plans.append(StagePlan("plan", 0, stage_schedule, clocks, wake, changes))
    return plans


@dataclass
class Times:
    """The GPU's times of an iteration, until its events are read."""

    iteration: int
    begin_us: int
    times_us: list[int] = field(default_factory=list)
    end_us: int | None = None


class Memory:
    """The memory of one rank, as its process writes it."""

    def __init__(self, count: int, source: MarkSource) -> None:
        self.count = count
        self.reader = ChannelReader.create(count)
        self.writer = ChannelWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd), count)
        self.writer.source = source
        self.unread: deque[Times] = deque()
        self._readers = [self.reader]

    def reader_of(self, gpu: int) -> ChannelReader:
        """The agent's end for one of the rank's GPUs."""
        channel = self.reader
        while len(self._readers) <= gpu:
            self._readers.append(ChannelReader(os.dup(channel.memory_fd), os.dup(channel.event_fd), self.count))
        return self._readers[gpu]

    def close(self) -> None:
        """Release it."""
        for reader in self._readers:
            reader.close()

    def fill(self) -> None:
        """Read the events of what is over."""
        while self.unread and (end_us := self.unread[0].end_us) is not None:
            times = self.unread.popleft()
            self.writer.fill(times.iteration, times.begin_us, end_us, times.times_us)


class VirtualDevice:
    """A GPU of the executor behind the agent's device contract. A call ends later than it is made: ``until_s``."""

    def __init__(self, executor: Executor, rank: int, gpu: int, model: str, clocks_mhz: tuple[int, ...]) -> None:
        self._executor, self._rank, self._gpu = executor, rank, gpu
        self._identity = DeviceIdentity(f"{rank}/{gpu}", model, clocks_mhz)
        self.until_s = 0.0

    @property
    def identity(self) -> DeviceIdentity:
        return self._identity

    def controllability(self) -> tuple[Controllability, str]:
        return Controllability.YES, ""

    def now_us(self) -> int:
        return us_from_s(self.now_s())

    def now_s(self) -> float:
        """Now for the thread of this GPU, which is ahead of the others while it is in a call."""
        return max(self._executor.now_s, self.until_s)

    def lock_clocks(self, mhz: int) -> None:
        self.until_s = self._executor.call(self._rank, self._gpu, mhz)

    def reset_clocks(self) -> None:
        self.lock_clocks(self._executor.pipeline.default_mhz)

    def sm_clock_mhz(self) -> int:
        return round(self._executor.effective_mhz(self._rank, self._gpu))

    def energy(self) -> list[EnergyReading] | None:
        return None

    def power_mw(self) -> int | None:
        return None

    def event_reasons(self) -> EventReason:
        set_mhz = self._executor.ranks[self._rank].clocks[self._gpu]
        limited = self._executor.effective_mhz(self._rank, self._gpu) < set_mhz
        return EventReason.POWER_CAP if limited else EventReason.NONE

    def close(self) -> None:
        """Nothing is held."""


class VirtualTurns(CallTurns):
    """The turns of a lock's threads, in virtual time: a turn ends when its call does."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(lambda _: None)
        self._executor = executor
        self._order = CallQueue()
        self.gpus: dict[str, Gpu] = {}

    def ask(self, gpu: str, gain_mhz: int, *, urgent: bool = False) -> float | None:
        before = self._order.holder
        own = self._order.ask(gpu, gain_mhz, us_from_s(self._executor.now_s))
        self._wake_next(before, gpu)
        return None if own else s_from_us(self._order.ends_us)

    def leave(self, gpu: str) -> None:
        until_s = self.gpus[gpu].device.until_s
        if until_s > self._executor.now_s:
            self._executor.at(until_s, self._leave, gpu)
        else:
            self._leave(gpu)

    def _leave(self, gpu: str) -> None:
        before = self._order.holder
        self._order.leave(gpu, us_from_s(self._executor.now_s))
        self._wake_next(before, gpu)

    def _wake_next(self, before: str | None, gpu: str) -> None:
        following = self._order.holder
        if following is not None and following not in (before, gpu):
            self._executor.at(self._executor.now_s, self.gpus[following].turn)


class Timer:
    """An action at a moment; one that was set before counts no more."""

    def __init__(self, executor: Executor, action: Callable[[], None]) -> None:
        self._executor, self._action = executor, action
        self.due_s = 0.0
        """0: not set."""

    def set(self, due_s: float) -> None:
        if due_s != self.due_s:
            self.due_s = due_s
            if due_s > 0:
                self._executor.at(max(due_s, self._executor.now_s), self._fire, due_s)

    def _fire(self, due_s: float) -> None:
        if self.due_s == due_s:
            self.due_s = 0.0
            self._action()


class Gpu:
    """What the thread of a GPU does (``perseus_agent.clocks.gpu_worker``)."""

    def __init__(self, executor: Executor, device: VirtualDevice, follower: RankFollower, turns: VirtualTurns) -> None:
        self._executor, self.device, self._follower = executor, device, follower
        turns.gpus[device.identity.uuid] = self
        self.governor = Governor(
            device, MemoryJournal(), GovernorLimits(), lambda _: None, clock=device.now_s, turns=turns
        )
        self.governor.engage()
        self._look = Timer(executor, self.follow)
        self._pump = Timer(executor, self._again)
        self._read = Timer(executor, self._read_clock)
        self.looks = 0

    def follow(self) -> None:
        """The rank has rung, or a look is due. While a call lasts the thread is in it, and looks afterwards."""
        now_s, device = self._executor.now_s, self.device
        if device.until_s > now_s:
            self._look.set(device.until_s)
            return
        self.looks += 1
        governor, follower = self.governor, self._follower
        mhz = follower.look(governor.writes, math.ceil(now_s * 1e6), governor.latency.lead)
        governor.latency.follow(follower.plan)
        self._pump.set(governor.want(mhz) or 0.0)
        look_s = s_from_us(follower.next_look_us)
        self._look.set(max(look_s, device.until_s) if look_s else 0.0)
        read_us = governor.latency.read_us if governor.latency.measured < MEASURED else 0
        self._read.set(max(s_from_us(read_us), device.until_s) if read_us else 0.0)
        if follower.due:
            follower.collect(governor.writes)

    def turn(self) -> None:
        """The turn of its call has come."""
        if self.governor.queued:
            self.follow()

    def _again(self) -> None:
        self._pump.set(self.governor.pump() or 0.0)

    def _read_clock(self) -> None:
        latency, now_s = self.governor.latency, self.device.now_s()
        if 0 < self._look.due_s < now_s + READ_ROOM_S:
            latency.give_up()
            return
        held = self.device.event_reasons() is not EventReason.NONE
        latency.read(self.device.sm_clock_mhz(), us_from_s(now_s), us_from_s(now_s) + READ_US, held=held)
        self._read.set(s_from_us(latency.read_us))


class Rank:
    """One rank of the job: its memory and its GPUs."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.gpus: list[Gpu] = []

    def ring(self) -> None:
        """Its processes have rung."""
        for gpu in self.gpus:
            gpu.follow()

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()


class AgentControl(Control):
    """The agent of every node."""

    def __init__(
        self,
        model: str,
        clocks_mhz: tuple[int, ...],
        source: MarkSource = MarkSource.GPU,
        changes: Mapping[int, SwitchLatency] = MappingProxyType({}),
    ) -> None:
        """``model``: the GPUs' name, by which the agent knows what is published; ``source``: what the marks are;
        ``changes``: latencies by clock that are sent with the plan."""
        self._model, self._clocks_mhz, self._source, self._changes = model, clocks_mhz, source, changes

    def start(self) -> None:
        executor = self.executor
        pipeline, gpus = executor.pipeline, executor.machine.gpus
        self._offsets, self._rank_of = pipeline.offsets, pipeline.rank_of
        self.ranks: list[Rank] = []
        plans = plans_of(pipeline, self._changes)
        for number, plan in enumerate(plans):
            memory, turns = Memory(len(plan.clocks_mhz), self._source), VirtualTurns(executor)
            columns = (plan.schedule.kinds, plan.schedule.microbatches, plan.schedule.chunks)
            schedule = tuple(Instruction(InstructionKind(k), m, c) for k, m, c in zip(*columns, strict=True))
            rank = Rank(memory)
            for gpu in range(gpus):
                process = RankProcess("job", "pod", f"{number}/{gpu}", RankId(dp=0, stage=number, tp=gpu), 0)
                reader = memory.reader_of(gpu)
                follower = RankFollower(process, schedule, reader, FixedPlans(plans), machine_clock=True)
                device = VirtualDevice(executor, number, gpu, self._model, self._clocks_mhz)
                rank.gpus.append(Gpu(executor, device, follower, turns))
            self.ranks.append(rank)

    def close(self) -> None:
        """Release the memory of all ranks."""
        for rank in self.ranks:
            rank.close()

    # ------------------------------------------------------------------------------------------------- marks

    def gpu_step_begun(self, iteration: int, now_s: float) -> None:
        for rank in self.ranks:
            memory = rank.memory
            memory.unread.append(Times(iteration, us_from_s(now_s)))
            memory.writer.gpu_mark(iteration, 0)

    def gpu_begins(self, number: int, now_s: float) -> None:
        self._gpu_mark(number, 1, now_s)

    def gpu_ended(self, number: int, now_s: float) -> None:
        self._gpu_mark(number, 2, now_s)

    def _gpu_mark(self, number: int, which: int, now_s: float) -> None:
        rank = self._rank_of[number]
        memory = self.ranks[rank].memory
        times = memory.unread[-1]
        times.times_us.append(us_from_s(now_s))
        memory.writer.gpu_mark(times.iteration, 2 * (number - self._offsets[rank]) + which)

    def gpu_step_ended(self, iteration: int, now_s: float) -> None:
        for rank in self.ranks:
            memory = rank.memory
            memory.unread[-1].end_us = us_from_s(now_s)
            memory.writer.gpu_mark(iteration, 2 * memory.count + 1)

    def host_step_begun(self, rank: int, iteration: int, now_s: float) -> None:
        memory = self.ranks[rank].memory
        memory.fill()
        rings = memory.writer.rings
        memory.writer.step_begin(iteration, us_from_s(now_s))
        if memory.writer.rings != rings:
            self.ranks[rank].ring()

    def host_begun(self, number: int, now_s: float) -> None:
        rank = self._rank_of[number]
        self.ranks[rank].memory.writer.begin(number - self._offsets[rank], us_from_s(now_s))

    def host_ended(self, number: int, now_s: float) -> None:
        rank = self._rank_of[number]
        writer = self.ranks[rank].memory.writer
        rings = writer.rings
        writer.end(number - self._offsets[rank], us_from_s(now_s))
        if writer.rings != rings:
            self.ranks[rank].ring()

    def host_step_ended(self, rank: int, iteration: int, now_s: float) -> None:
        self.ranks[rank].memory.writer.step_end_untimed()
