"""Iterations that are captured into a CUDA graph: each replay of it is one iteration.

A replay runs no Python. The marks of the iteration that is captured become nodes of the graph instead, and what is left
to do before and after a replay is done where the graph's ``replay`` is called. torch says which graph was captured when
the capture ends; only that object is wrapped.

Where the instructions of a replay cannot be known, replays are marked as whole iterations, so all GPUs have one clock.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from perseus_client.framework import STEP, Attachment, log
from perseus_client.launchers import whole_iterations
from perseus_client.marks import Captured
from perseus_client.session import Session

_UNSEEN: Final = "replays of its CUDA graph run no Python, and %s"
_NOT_MARKED: Final = "the graph has no marks of every instruction"
_NOT_READ: Final = "the host replays it again before the times of its instructions can be read"


def capture(attachment: Attachment, iteration: Callable[[], Any]) -> Any:
    """Run an iteration that torch captures now, and follow the replays of its graph.

    Args:
        attachment: whose session knows the iteration's schedule.
        iteration: runs the iteration; what it marks are the instructions of every replay.

    Returns:
        What ``iteration`` returns.
    """
    session = attachment.session
    session.capture_begin()
    try:
        result = iteration()
    except BaseException:
        session.capture_end()
        raise
    captured = session.capture_end()
    if attachment.active:
        _at_capture_end(attachment, lambda graph: _Replays(attachment, session, captured, graph))
    return result


def _at_capture_end(attachment: Attachment, follow: Callable[[Any], object]) -> None:
    """Call back with the graph whose capture by this thread ends next."""
    try:
        graphs = sys.modules["torch"].cuda.CUDAGraph
        original, thread = graphs.capture_end, threading.get_ident()
    except (AttributeError, KeyError):
        log.exception("perseus_client: the replays of a CUDA graph are not followed")
        return

    @functools.wraps(original)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(graph, *args, **kwargs)
        if threading.get_ident() == thread and vars(graphs).get("capture_end") is capture_end:
            graphs.capture_end = original
            try:
                follow(graph)
            except Exception:  # noqa: BLE001 - nothing may reach the training code
                log.exception("perseus_client: the replays of a CUDA graph are not followed")
        return result

    attachment.replace(graphs, "capture_end", capture_end)


class _Replays:
    """The replays of one graph. It does not keep the graph: its memory is freed when training drops it."""

    def __init__(self, attachment: Attachment, session: Session, captured: Captured | None, graph: Any) -> None:
        self._attachment = attachment
        self._session = session
        self._captured = captured
        self._graph = weakref.ref(graph)
        self._replay = type(graph).replay
        graph.replay = self.replay

    def replay(self) -> Any:
        """As the graph's own."""
        if not self._attachment.active:
            return self._replay(self._graph())
        session = self._begin()
        try:
            return self._replay(self._graph())
        finally:
            if self._attachment.whole:
                session.instruction_end()
            session.step_end()

    def _begin(self) -> Session:
        attachment, captured = self._attachment, self._captured
        if not attachment.whole and not attachment.session.sees(captured):
            attachment.mark_whole(_UNSEEN % (_NOT_MARKED if captured is None else _NOT_READ))
            attachment.connect_for(functools.partial(whole_iterations, attachment.rank))
        session = attachment.session
        if attachment.whole:
            session.step_begin()
            session.instruction_begin(*STEP)
        elif session is self._session and captured is not None:
            session.replay_begin(captured)
        else:  # captured with another number of microbatches
            session.step_begin()
        return session
