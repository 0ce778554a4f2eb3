"""``connect``: checks its arguments, chooses where timestamps come from, and returns a session. It never raises and
never waits, because it runs in training code that works without an agent too."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from perseus_client.connector import Connector, Introduction
from perseus_client.gpu_events import open_timer
from perseus_client.gpu_marks import open_gpu_marks
from perseus_client.marks import Marks, TimedMarks, make_marks
from perseus_client.session import LiveSession, Session
from perseus_core.instruction import InstructionKind
from perseus_core.keys import ENV_SOCKET
from perseus_core.marks import MarkSource
from perseus_proto.channel import ChannelWriter
from perseus_proto.hello import Hello, Timing, Welcome, encode_hello, make_schedule

log = logging.getLogger("perseus_client")
_SOURCES: Final = {
    Timing.HOST: MarkSource.HOST,
    Timing.FOREIGN: MarkSource.SYNCHRONISED,  # in the caller's clock
    Timing.SYNCHRONISED: MarkSource.SYNCHRONISED,
}


def connect(
    dp: int,
    stage: int,
    tp: int = 0,
    schedule: Sequence[tuple[str | int, int, int]] = (),
    *,
    socket_path: str | None = None,
    clock_us: Callable[[], int] | None = None,
    timing: str = "auto",
    gpu_uuid: str | None = None,
    own_time: bool | None = None,
    joined: Sequence[int] = (),
) -> Session:
    """Connect this rank to the agent on its node and report what it executes.

    Returns at once: a background thread looks for the agent, and looks again whenever the agent goes away. Never
    raises.

    Args:
        dp: data-parallel rank (which pipeline), from 0.
        stage: pipeline-parallel rank, from 0.
        tp: tensor-parallel rank, from 0.
        schedule: (kind, microbatch, chunk) of every instruction of one iteration, in the order in which this rank
            executes them. Kinds: forward, backward, input_gradient, weight_gradient, constant, step. Call ``connect``
            again when the schedule changes.
        socket_path: path of the agent's Unix socket; None: the environment variable PERSEUS_SOCKET. Without either,
            the session does nothing.
        clock_us: a function that returns the time in microseconds, for simulators; None: the monotonic clock. A clock
            of one's own excludes timing "cuda".
        timing: whose time marks are in. "cuda": the GPU's, without synchronising: it writes them itself where its
            driver can, else as "events": its events tell them an iteration later; "synchronised": the clock at the
            call, where the caller waits for the GPU before each mark; "host": the clock at the call, which says nothing
            about the GPU, so it keeps one clock for each iteration; "auto": "cuda" if the process has already
            initialised CUDA in torch, else "host".
        gpu_uuid: UUID of the GPU that this process computes on; None: torch's current device, if torch has initialised
            CUDA. Required where the pod holds several GPUs.
        own_time: whether the last instruction ends before this rank waits for other data-parallel ranks; None: of a
            pipeline's instructions it does, and of whole steps it does not.
        joined: places in ``schedule`` of the instructions that run in one action with the next one, as an overlapped
            forward and backward do: it receives before all of its parts, and sends after all of them.

    Returns:
        A session. If an argument breaks a rule, the rule is logged as an error and the session does nothing.
    """
    path = socket_path or os.environ.get(ENV_SOCKET)
    if not path:
        return Session()
    try:
        origin = _choose_timing(timing, clock_us)
        instructions = make_schedule(schedule)
        if own_time is None:
            own_time = all(instruction.kind is not InstructionKind.STEP for instruction in instructions)
        hello = Hello(dp, stage, tp, origin, gpu_uuid or _current_gpu(), instructions, own_time, tuple(joined))
        marks = make_marks(hello.schedule, clock_us)
        if origin is not Timing.GPU:
            return open_session(path, hello, marks, partial(_set_source, _SOURCES[origin]))
        timer = open_timer(len(hello.schedule))
        gpu = open_gpu_marks() if timing != "events" else None
        prepare = gpu.prepare if gpu is not None else partial(_set_source, MarkSource.EVENTS)
        return open_session(path, hello, TimedMarks(marks, timer, gpu), prepare)
    except Exception as error:  # noqa: BLE001 - nothing may reach the training code
        log.error("perseus_client: this rank trains without energy plans: %s", error)
        return Session()


def open_session(path: str, hello: Hello, marks: Marks, prepare: Callable[[ChannelWriter], None]) -> LiveSession:
    """A session that connects to the agent at a path, for simulators with marks of their own.

    Args:
        path: of the agent's Unix socket.
        hello: what to tell it.
        marks: of the hello's schedule.
        prepare: sets the source of each new writer, on the connecting thread.
    """

    def open_writer(welcome: Welcome) -> ChannelWriter:
        writer = ChannelWriter(welcome.memory_fd, welcome.event_fd, len(hello.schedule))
        prepare(writer)
        return writer

    introduction = Introduction(encode_hello(hello), str(hello.rank), "rank", open_writer)
    return LiveSession(Connector(path, introduction), marks)


def _choose_timing(timing: str, clock_us: Callable[[], int] | None) -> Timing:
    if timing not in ("auto", "cuda", "events", "synchronised", "host"):
        raise ValueError(f"timing: must be auto, cuda, events, synchronised or host, is {timing!r}")
    if clock_us is not None:
        if timing in ("cuda", "events"):
            raise ValueError(f"timing: {timing} cannot be combined with another clock")
        return Timing.FOREIGN
    if timing in ("cuda", "events") or (timing == "auto" and _cuda_initialised()):
        return Timing.GPU
    return Timing.SYNCHRONISED if timing == "synchronised" else Timing.HOST


def _set_source(source: MarkSource, writer: ChannelWriter) -> None:
    writer.source = source


def _cuda_initialised() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _current_gpu() -> str:
    """UUID of torch's current device as NVML writes it; empty if it is not known. Never initialises CUDA."""
    if not _cuda_initialised():
        return ""
    cuda = sys.modules["torch"].cuda
    uuid = str(getattr(cuda.get_device_properties(cuda.current_device()), "uuid", ""))
    return f"GPU-{uuid}" if uuid else ""
