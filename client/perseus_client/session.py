"""The training thread's side: about a microsecond a mark, no exception, no blocking call, no lock.

``Session`` does nothing and is what training gets where there is no agent; ``LiveSession`` writes marks
(``perseus_client.marks``) into the memory that the background thread (``perseus_client.connector``) obtains from the
agent, and takes new memory only at the begin of a step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from typing import Final

from perseus_client.connector import Connector
from perseus_client.marks import Marks
from perseus_proto.channel import ChannelWriter, Faults

log = logging.getLogger("perseus_client")
_NOTHING: Final = contextlib.nullcontext()
EMPTY_STEPS: Final = 3
"""Iterations in a row without an instruction after which something is said: one may have been skipped on purpose."""


class Session:
    """A session without an agent: every call does nothing, and costs that."""

    __slots__ = ("__weakref__",)

    @property
    def connected(self) -> bool:
        """Whether an agent listens now."""
        return False

    @property
    def rings(self) -> int:
        """How often this rank has woken the agent; counted anew with each agent. A simulator's time stands still for
        each."""
        return 0

    def wait_connected(self, timeout_s: float) -> bool:  # noqa: ARG002 - the live session's
        """Wait until an agent listens; for programs that want every iteration seen, before their first step."""
        return False

    def step_begin(self) -> None:
        """An iteration begins. Iterations are counted from 0 by these calls, in all ranks alike."""

    def step_end(self) -> None:
        """The iteration has ended: all its instructions were called. Marks outside of steps (evaluation) are
        ignored."""

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        """An instruction begins, after what it receives has come."""

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        """An instruction has ended; without arguments, and cheapest so, the one that began last."""

    def step(self) -> contextlib.AbstractContextManager[object]:
        """``step_begin`` and ``step_end`` around a block."""
        return _NOTHING

    def instruction(
        self,
        kind: str | int,  # noqa: ARG002 - the live session's
        microbatch: int,  # noqa: ARG002
        chunk: int = 0,  # noqa: ARG002
    ) -> contextlib.AbstractContextManager[object]:
        """``instruction_begin`` and ``instruction_end`` around a block."""
        return _NOTHING

    def close(self) -> None:
        """Leave the agent: it gives the GPU back to its default clocks. Further calls do nothing."""


class LiveSession(Session):
    """A session that an agent follows whenever there is one. Made by ``connect``."""

    __slots__ = ("_connector", "_empty", "_faults", "_iteration", "_marks", "_writer")

    def __init__(self, connector: Connector, marks: Marks) -> None:
        """Start to look for an agent."""
        self._marks = marks
        self._connector = connector
        self._iteration = -1
        self._writer: ChannelWriter | None = None  # None outside of steps, and without an agent
        self._faults = 0  # of ``Faults``, whose own operators are Python
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
        try:
            if self._writer is not None:
                self._finish_step(Faults.ABANDONED)
            self._iteration += 1
            self._faults = 0
            writer = self._connector.writer
            if writer is not None:
                self._marks.open(writer, self._iteration)
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

    def step(self) -> contextlib.AbstractContextManager[object]:
        return _Step(self)

    def instruction(
        self, kind: str | int, microbatch: int, chunk: int = 0
    ) -> contextlib.AbstractContextManager[object]:
        return _Window(self, kind, microbatch, chunk)

    def close(self) -> None:
        self._writer = None
        self._marks.close()
        self._connector.stop()

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
        """Say once that steps come without instructions: the hooks are not where the training code computes."""
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
        """After a failure that nobody foresaw: say so once, then never touch the training loop again."""
        log.exception("perseus_client: disabled for the rest of this process")
        self.close()

    def _after_fork(self) -> None:
        """In a child (a data loader's worker, say): this session is the parent's."""
        self._writer = None
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
