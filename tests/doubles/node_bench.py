"""An agent's node in this process, with GPUs that record, and ranks as the local server would bring them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.doubles.recording_gpu import RecordingGpu, RecordingSet
from tests.doubles.recording_node import gpu_uuid, plan_set_of
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks.governor import GovernorLimits
from perseus_agent.clocks.gpu_worker import WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.node.leases import LeaseRequest, PodName
from perseus_agent.node.node import Node
from perseus_agent.node.processes import TrainingSession
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_agent.pods.pod_resources import Allocation
from perseus_core.leases import RestingClock
from perseus_proto.channel import ChannelReader, ChannelWriter
from perseus_proto.hello import Hello, Timing, make_schedule
from perseus_proto.planset import decode_plan_set

PLANS = decode_plan_set(plan_set_of([[[1200, 900], [600, 600]]]))
LIMITS = WorkerLimits(GovernorLimits(0.0, 0.05), 0.01, 0.02)


class Rank:
    """A process of a pod, as the local server would bring it."""

    def __init__(self, pod: str = "pod-0", dp: int = 0, container: str | None = None) -> None:
        self.hung_up = False
        self.channel = ChannelReader.create(2)
        self.writer = ChannelWriter(os.dup(self.channel.memory_fd), os.dup(self.channel.event_fd), 2)
        peer = Peer(os.getpid(), 0, 0, PodProcess(pod, container), None)
        hello = Hello(dp, 0, 0, Timing.HOST, "", make_schedule(schedule_of(2)))
        self.session = TrainingSession(peer, hello, self.channel, self.hang_up)

    def hang_up(self) -> None:
        self.hung_up = True


class Bench:
    """The node, and what a test asks of it."""

    def __init__(self, folder: Path) -> None:
        self.gpus = [RecordingGpu(gpu_uuid(number)) for number in range(2)]
        self.journal, _ = Journal.open(folder / "journal", "boot")
        self.hub = TelemetryHub(64)
        self.now_s = 100.0
        """By the clock of the leases."""
        self.node = Node(RecordingSet(self.gpus), self.journal, self, self.hub, LIMITS, monotonic_s=lambda: self.now_s)
        self.node.start()

    def allocation(self, namespace: str, name: str, published: Mapping[str, str]) -> Allocation:
        """Pod n holds GPU n, its container "trainer" does."""
        gpu = gpu_uuid(int(name.rpartition("-")[2]))
        return Allocation((gpu,), {}, {"trainer": frozenset({gpu})})

    def lease(
        self,
        job: str = "job",
        pods: tuple[str, ...] = ("pod-0",),
        epoch: int = 1,
        *,
        ttl_s: float = 60,
        clock_mhz: int = 0,
        keep_s: float = 0.0,
        number: int = 0,
    ) -> None:
        names, clock = [PodName(pod, "ns", pod) for pod in pods], RestingClock(clock_mhz, keep_s)
        self.node.acquire(LeaseRequest(job, f"ns/{job}", epoch, ttl_s, names, clock, number=number))

    def plan(self, point: int = 0, from_iteration: int = 0) -> None:
        self.node.push("job", 1, PLANS, 0)
        self.node.select("job", 1, PLANS.plan_id, {0: point}, from_iteration, number=0)

    def locked(self, number: int = 0) -> int | None:
        return self.gpus[number].locked_mhz
