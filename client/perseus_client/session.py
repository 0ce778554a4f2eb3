"""Sessions: what the training thread calls. A mark takes about a microsecond and never raises, blocks or locks.

``Session`` does nothing; training code gets it where no agent is expected. ``LiveSession`` writes marks
(``perseus_client.marks``) into the memory that the background thread (``perseus_client.connector``) obtains from the
agent. It changes to new memory only when a step begins, so that no iteration is split between two agents.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Final

from perseus_client.connector import Connector
from perseus_client.marks import Captured, Marks, TimedMarks
from perseus_proto.channel import ChannelWriter, Faults

log = logging.getLogger("perseus_client")
_NOTHING: Final = contextlib.nullcontext()
EMPTY_STEPS: Final = 3
"""A warning is logged after so many iterations in a row without an instruction: one may have been skipped on
purpose."""


class Session:
    """The connection of one rank to its agent. This class is the session without an agent: every call does nothing.

    Calls must not overlap: one thread makes them, or a lock orders them. No method raises. Marks outside of steps, and
    steps without an agent, are ignored.
    """

    __slots__ = ("__weakref__",)

    @property
    def connected(self) -> bool:
        """Whether an agent follows this rank now."""
        return False

    @property
    def rings(self) -> int:
        """How often this rank has woken the agent since that accepted it; 0 outside of steps and without an agent.

        A simulator stops its virtual time for each, until the agent has answered.
        """
        return 0

    def wait_connected(self, timeout_s: float) -> bool:  # noqa: ARG002 - the live session's
        """Wait until an agent follows this rank. For programs whose first iteration must be observed; training need
        not.

        Args:
            timeout_s: longest wait, seconds.

        Returns:
            Whether an agent follows this rank; False after the timeout.
        """
        return False

    def step_begin(self) -> None:
        """Mark the begin of an iteration.

        Iterations are counted from 0 by these calls, so every rank of the job must make the same number of them. A step
        that is still open is closed as abandoned: its timings are not used.
        """

    def step_end(self) -> None:
        """Mark the end of an iteration, after its last instruction.

        Marks from here to the next ``step_begin``, such as those of an evaluation, are ignored.
        """

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        """Mark the begin of an instruction; call it after the instruction's inputs have been received.

        Args:
            kind: forward, backward, input_gradient, weight_gradient or constant; or its number.
            microbatch: from 0.
            chunk: of the stage, from 0; 0 without interleaving.
        """

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        """Mark the end of an instruction.

        Args:
            kind: as in ``instruction_begin``; None: the instruction that began last, which is the fastest call.
            microbatch: from 0.
            chunk: of the stage, from 0.
        """

    def capture_begin(self) -> None:
        """An iteration is captured into a CUDA graph from here on, between two iterations: mark its instructions as in
        one that runs."""

    def capture_end(self) -> Captured | None:
        """It has been captured.

        Returns:
            What ``replay_begin`` takes. None: its instructions cannot be followed.
        """
        return None

    def replay_begin(self, captured: Captured) -> None:
        """Mark the begin of an iteration that is a replay, as ``step_begin``; its instructions are not marked again."""

    def sees(self, captured: Captured | None) -> bool:  # noqa: ARG002 - the live session's
        """Whether the instructions of replays can be followed."""
        return False

    def step(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that calls ``step_begin`` and ``step_end`` around a block."""
        return _NOTHING

    def instruction(
        self,
        kind: str | int,  # noqa: ARG002 - the live session's
        microbatch: int,  # noqa: ARG002
        chunk: int = 0,  # noqa: ARG002
    ) -> contextlib.AbstractContextManager[object]:
        """Return a context manager that calls ``instruction_begin`` and ``instruction_end`` around a block."""
        return _NOTHING

    def default_clocks(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager around something else than training that measures the GPU, between two iterations: a
        rank check, a benchmark. The GPU goes to its default clocks, so that a planned clock is not taken for a fault.

        A clock change takes its time (status.hardware of the PerseusJob says how long), and this does not wait for it:
        begin with work that does not count. A ``step_begin`` inside the block ends it.
        """
        return _NOTHING

    def close(self) -> None:
        """Disconnect from the agent, which returns the GPU to its default clocks. Further calls do nothing."""


class LiveSession(Session):
    """A session that an agent follows whenever one is there."""

    __slots__ = ("_at_default", "_connector", "_empty", "_faults", "_iteration", "_marks", "_writer")

    def __init__(self, connector: Connector[ChannelWriter], marks: Marks) -> None:
        """Start the background thread that looks for an agent."""
        self._marks = marks
        self._connector = connector
        self._iteration = -1
        self._writer: ChannelWriter | None = None  # None outside of steps, and without an agent
        self._faults = 0  # of ``Faults``, whose own operators are Python
        self._at_default: ChannelWriter | None = None
        """Through which default clocks are asked for; None: they are not."""
        self._empty = 0
        """Steps in a row in which no instruction began."""
        _live.add(self)
        connector.start()

    @property
    def connected(self) -> bool:
        return self._connector.writer is not None

    @property
    def rings(self) -> int:
        writer = self._writer
        return 0 if writer is None else writer.rings

    def wait_connected(self, timeout_s: float) -> bool:
        return self._connector.wait(timeout_s)

    def step_begin(self) -> None:
        self._begin_step(self._marks)

    def replay_begin(self, captured: Captured) -> None:
        self._begin_step(captured)

    def _begin_step(self, marks: Marks | Captured) -> None:
        try:
            if self._at_default is not None:
                self._end_default_clocks()
            if self._writer is not None:
                self._finish_step(Faults.ABANDONED)
            self._iteration += 1
            self._faults = 0
            writer = self._connector.writer
            if writer is not None:
                marks.open(writer, self._iteration)
            self._writer = writer
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        try:
            faults = self._marks.begin(kind, microbatch, chunk)
            if faults:
                self._deviate(faults)
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        try:
            faults = self._marks.end() if kind is None else self._marks.end(kind, microbatch, chunk)
            if faults:
                self._deviate(faults)
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def step_end(self) -> None:
        try:
            if self._writer is not None:
                self._finish_step(0)
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def capture_begin(self) -> None:
        try:
            writer = self._connector.writer
            if writer is not None and self._writer is None and isinstance(self._marks, TimedMarks):
                self._marks.capture_begin(writer)
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def capture_end(self) -> Captured | None:
        try:
            return self._marks.capture_end() if isinstance(self._marks, TimedMarks) else None
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()
            return None

    def sees(self, captured: Captured | None) -> bool:
        return captured is not None and captured.timed

    def step(self) -> contextlib.AbstractContextManager[object]:
        return _Step(self)

    def instruction(
        self, kind: str | int, microbatch: int, chunk: int = 0
    ) -> contextlib.AbstractContextManager[object]:
        return _Window(self, kind, microbatch, chunk)

    def default_clocks(self) -> contextlib.AbstractContextManager[object]:
        return _DefaultClocks(self)

    def close(self) -> None:
        self._writer = self._at_default = None
        self._marks.close()
        self._connector.stop()

    def _begin_default_clocks(self) -> None:
        try:
            writer = self._connector.writer
            if writer is not None and self._writer is None:  # inside an iteration the plan counts
                writer.ask_default_clocks(True)
                self._at_default = writer
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def _end_default_clocks(self) -> None:
        try:
            writer, self._at_default = self._at_default, None
            if writer is not None:
                writer.ask_default_clocks(False)
        except Exception:  # noqa: BLE001 - nothing may reach the training loop
            self._give_up()

    def _finish_step(self, faults: int) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        faults |= self._faults
        if self._marks.next or faults:
            self._empty = 0
        else:
            self._count_empty()
        self._marks.finish(faults)

    def _count_empty(self) -> None:
        """Log once that steps come without instructions: the hooks are not where the training code computes."""
        self._empty += 1
        if self._empty == EMPTY_STEPS:
            log.warning(
                "perseus_client: %d iterations without a single instruction: this rank trains at default clocks. The "
                "hooks are not reached: attach before training begins, to the object that trains, or report the "
                "framework's version",
                EMPTY_STEPS,
            )

    def _deviate(self, faults: int) -> None:
        if self._writer is None:
            return
        first = not self._faults
        self._faults |= faults
        if first:
            self._writer.deviate(self._faults)

    def _give_up(self) -> None:
        """After an unexpected failure: log it once, then never touch the training loop again."""
        log.exception("perseus_client: disabled for the rest of this process")
        self.close()

    def _after_fork(self) -> None:
        """In a forked child, such as a data loader's worker: release what belongs to the parent's session."""
        self._writer = self._at_default = None
        self._marks.close()
        self._connector.abandon()


_live: weakref.WeakSet[LiveSession] = weakref.WeakSet()


def _forget_all() -> None:
    for session in list(_live):
        session._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


class _Step:
    """One ``with session.step()``."""

    __slots__ = ("_session",)

    def __init__(self, session: LiveSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.step_begin()

    def __exit__(self, *_: object) -> None:
        self._session.step_end()


class _DefaultClocks:
    """One ``with session.default_clocks()``."""

    __slots__ = ("_session",)

    def __init__(self, session: LiveSession) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session._begin_default_clocks()

    def __exit__(self, *_: object) -> None:
        self._session._end_default_clocks()


class _Window:
    """One ``with session.instruction(…)``."""

    __slots__ = ("_chunk", "_kind", "_microbatch", "_session")

    def __init__(self, session: LiveSession, kind: str | int, microbatch: int, chunk: int) -> None:
        self._session = session
        self._kind = kind
        self._microbatch = microbatch
        self._chunk = chunk

    def __enter__(self) -> None:
        self._session.instruction_begin(self._kind, self._microbatch, self._chunk)

    def __exit__(self, *_: object) -> None:
        self._session.instruction_end(self._kind, self._microbatch, self._chunk)
