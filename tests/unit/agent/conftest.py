"""A GPU, its worker, and a rank that runs in the test's thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.recording_gpu import RecordingGpu
from tests.doubles.recording_node import plan_set_of, wait_for
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks.call_queue import CallTurns
from perseus_agent.clocks.governor import GovernorLimits
from perseus_agent.clocks.gpu_notices import GpuNotice, GpuNoticeKind
from perseus_agent.clocks.gpu_worker import GpuWorker, WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import Event, RankProcess
from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader, ChannelWriter
from perseus_proto.hello import make_schedule
from perseus_proto.planset import decode_plan_set

CLOCKS = [1200, 900, 1200, 900]
PLANS = decode_plan_set(plan_set_of([[CLOCKS]]))
RANK = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)
LIMITS = WorkerLimits(GovernorLimits(0.0, 0.05), sample_interval_s=0.005, watch_interval_s=0.01, hang_timeout_s=0.2)


class Rig:
    """A GPU, its worker, and a rank that runs in the test's thread and, for its GPU, in the test's time."""

    def __init__(self, folder: Path, *, start: bool = True, turns: CallTurns | None = None) -> None:
        self.now_us = 1_000_000
        self.gpu = RecordingGpu("GPU-0", clock_us=lambda: self.now_us)
        self.journal, _ = Journal.open(folder / "journal", "boot")
        self.events: list[Event] = []
        self.worker = GpuWorker(self.gpu, self.journal, LIMITS, lambda _, event: self.events.append(event), turns)
        self.plans = JobPlans()
        self.plans.push(PLANS)
        self.plans.select(PLANS.plan_id, {0: 0}, 0, {})
        self.channel = ChannelReader.create(len(CLOCKS))
        self.rank = ChannelWriter(os.dup(self.channel.memory_fd), os.dup(self.channel.event_fd), len(CLOCKS))
        self.follower = RankFollower(RANK, make_schedule(schedule_of(len(CLOCKS))), self.channel, self.plans)
        if start:
            self.worker.start()
            self.worker.attach(self.follower).result(60)

    def iterate(self, iteration: int, instruction_us: int = 10_000, wait_us: int = 0) -> float:
        """Run an iteration; each instruction begins once its clock is there. Returns its energy, mJ."""
        before_mj = self._spent_mj()
        self.rank.step_begin(iteration, self.now_us)
        for index, clock in enumerate(CLOCKS):
            wait_for(lambda clock=clock: self.gpu.locked_mhz == clock, f"clock of instruction {index}")
            self.rank.begin(index, self.now_us)
            self._pass(instruction_us)
            self.rank.end(index, self.now_us)
        self.rank.step_end(iteration, self.now_us)
        wait_for(lambda: self.gpu.locked_mhz == CLOCKS[0], "clock of the iteration to come")
        self._pass(wait_us)
        return self._spent_mj() - before_mj

    def _pass(self, span_us: int) -> None:
        """Let the GPU's time go on, and the worker see where its counter is then."""
        self.now_us += span_us
        wait_for(lambda: not span_us or self.worker.meter._seen == self.gpu.energy()[-1], "a sample")

    def _spent_mj(self) -> float:
        self.gpu.energy()
        return self.gpu.energy_mj

    @property
    def written(self) -> list[int | None]:
        return [call.mhz for call in self.gpu.calls]

    def reports(self) -> list[IterationReport]:
        return [event for event in self.events if isinstance(event, IterationReport)]

    def told(self, kind: GpuNoticeKind) -> list[bool]:
        return [event.active for event in self.events if isinstance(event, GpuNotice) and event.kind is kind]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.gpu.fault = None
    rig.worker.stop("test over").result(60)
    rig.channel.close()
