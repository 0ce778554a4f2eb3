"""A rank whose host launches ahead of its GPU, as under CUDA: two threads, one for each time.

The host's thread calls the client when it launches, waits where its framework waits for the GPU, and otherwise only
when the launch queue is full. The GPU's thread runs what was launched, in the machine's own time, and with it the
client's events and memory writes. So the client and the agent meet what they meet on a real GPU: marks that come early,
times that come late. Standard library only.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from perseus_client.entry import open_session
from perseus_client.gpu_events import EventTimer
from perseus_client.gpu_marks import GpuMarks
from perseus_client.marks import TimedMarks, make_marks
from perseus_client.session import Session
from perseus_core.marks import MarkSource
from perseus_core.units import s_from_us, us_from_ns
from perseus_proto.channel import ChannelWriter
from perseus_proto.hello import Hello, Timing, make_schedule
from perseus_sim.gpus.clock_in_effect import Gpu
from perseus_sim.gpus.shared_gpu import Physics
from perseus_sim.training.rank import JobLost, SimulatedRank
from perseus_sim.training.stream import Event, Stream, StreamDriver


@dataclass(frozen=True)
class HostSpec:
    """The host of one rank."""

    kernels: list[int]
    """Of each instruction."""
    waits: list[bool]
    """Before which instructions the host waits until the GPU could begin them."""
    step_waits: bool
    """Whether a step begins on the host when the one before has ended on the GPU."""
    launch_us: float
    """To launch a kernel."""
    queue: int
    """Kernels that may be launched and not have ended."""
    marks: str = "gpu"
    """What the client can do: "gpu", "events" or "host"."""


class _Stopped(Exception):
    """The coordinator has stopped the job."""


class RunAheadRank(SimulatedRank):
    """One process of a job, in the machine's time."""

    def __init__(self, spec: dict[str, Any], gpu: Gpu) -> None:
        physics = gpu.physics()
        # The GPU's clock becomes the machine's: it may have been 0, and the uptime must not be counted as energy.
        now_us = max(us_from_ns(time.monotonic_ns()), physics.now_us)
        gpu.advance(Physics(now_us, physics.energy_uj, gpu.spec.blocking_power_mw))
        super().__init__({**spec, "speed": 1.0}, gpu)
        self._host = HostSpec(**spec["host"])
        self._stream = Stream(lambda: self._engine.now_us, self._engine.wait_until)
        self._launched = 0
        self._ended = 0
        """Kernels of the instructions that have ended."""
        self._running = 0
        """Kernels of the instruction that runs."""

    def run(self) -> None:
        """As ``SimulatedRank.run``."""
        self._next_command()
        session = self._open_session() if self._spec["socket"] else Session()
        self._report_ready(session)
        host = threading.Thread(target=self._launch, args=(session,), name="host", daemon=True)
        host.start()
        try:
            while True:
                self._stream.run_next()
        except _Stopped:
            pass
        finally:
            self._stream.close()
        host.join()
        session.close()

    # ------------------------------------------------------------------------------------- the host

    def _launch(self, session: Session) -> None:
        """Launch iterations until the GPU stops."""
        host, stream, steps = self._host, self._stream, self._spec["steps"]
        try:
            while True:
                stream.put(self._gate)
                if host.step_waits:
                    stream.synchronise()
                session.step_begin()
                for index, step in enumerate(steps):
                    stream.put(partial(self._receive, index))
                    if host.waits[index]:
                        stream.synchronise()
                    session.instruction_begin(step["kind"], step["microbatch"], step["chunk"])
                    stream.put(partial(self._begin_kernels, index))
                    stream.put(partial(self._run_kernels, index))
                    self._launched += host.kernels[index]
                    time.sleep(s_from_us(host.kernels[index] * host.launch_us))
                    self._await_room()
                    session.instruction_end()
                    stream.put(partial(self._pass_on, index))
                session.step_end()
                stream.put(self._report_end)
        except JobLost:
            return

    def _await_room(self) -> None:
        """Wait until the launch queue holds no more kernels than fit."""
        target = self._launched - self._host.queue
        while self._ended < target:
            done, whole_us = self._engine.progress(us_from_ns(time.monotonic_ns()))
            missing = target - self._ended - done * self._running
            if missing <= 0:
                return
            running = self._running
            if running and target <= self._ended + running:  # within what runs
                time.sleep(s_from_us(missing / running * whole_us))
            else:
                self._stream.wait_for(lambda: self._ended + self._running >= target)

    # -------------------------------------------------------------------------------------- the GPU

    def _gate(self) -> None:
        """The gradients of all ranks are there: an iteration begins, or none does."""
        command = self._next_command()
        if command.get("stop"):
            self._finish(command)
            raise _Stopped
        self._begin(command)

    def _begin_kernels(self, index: int) -> None:
        self._running = self._host.kernels[index]

    def _run_kernels(self, index: int) -> None:
        self._compute(index)
        self._ended, self._running = self._ended + self._running, 0

    # ----------------------------------------------------------------------------------- the client

    def _open_session(self) -> Session:
        spec, source = self._spec, MarkSource[self._host.marks.upper()]
        schedule = make_schedule(self._schedule())
        marks = make_marks(schedule, None)
        if source is MarkSource.HOST:
            hello = Hello(spec["dp"], spec["stage"], 0, Timing.HOST, spec["gpu_uuid"], schedule, own_time=True)
            return open_session(spec["socket"], hello, marks, partial(_set_source, source))
        hello = Hello(spec["dp"], spec["stage"], 0, Timing.GPU, spec["gpu_uuid"], schedule, own_time=True)
        stream = self._stream
        timer = EventTimer(len(schedule), Event, lambda: False, lambda: stream, None)
        if source is MarkSource.EVENTS:
            return open_session(spec["socket"], hello, TimedMarks(marks, timer), partial(_set_source, source))
        gpu = GpuMarks(StreamDriver(stream))
        return open_session(spec["socket"], hello, TimedMarks(marks, timer, gpu), gpu.prepare)


def make_rank(spec: dict[str, Any], gpu: Gpu) -> SimulatedRank:
    """A rank in the machine's time if the specification has a host, else in lockstep."""
    return RunAheadRank(spec, gpu) if spec.get("host") else SimulatedRank(spec, gpu)


def _set_source(source: MarkSource, writer: ChannelWriter) -> None:
    writer.source = source
