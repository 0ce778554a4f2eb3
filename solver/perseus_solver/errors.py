"""Every reason for which the solver refuses its input, as a tree of exceptions. Each message is one line.

SolverError (ValueError)
├── InvalidProfile     the measurements cannot be used; names the line, the column and the rule
├── InvalidSchedule    unknown name, counts that the schedule cannot run, or a schedule that deadlocks
├── InvalidTrace       a trace of iterations or of requests cannot be used; names file, line, column and rule
├── InvalidCalibration the calibration is damaged, does not explain its run, or is of another pipeline
├── InvalidProblem     profile and schedule do not fit each other, or a parameter is out of range
├── InvalidFrontier    (model.result) bytes that are not a frontier, or of another version
├── InvalidHardware    (rehearsal.hardware) the description of the hardware cannot be used; names the field and the rule
├── InvalidCertificate (certify) a flow that is none, or a claim that does not follow from it
├── PeerFailed         (comparison.lowtime_peer) lowtime is not installed or cannot solve the problem
├── InvalidPlan        (cli.documents) the file is no plan, or is one of another schedule
├── Unwritable         (cli.files) an output file cannot be written
└── Infeasible         no plan is this fast; carries the fastest time, T_min

Where OR-Tools does not reach an optimum, `FlowFailed` or `ProgrammeFailed` (RuntimeError) is raised: a bug, never bad
input.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_QUOTED_CHARACTERS: Final = 40
_withheld: ContextVar[bool] = ContextVar("withheld", default=False)


@contextmanager
def content_withheld() -> Iterator[None]:
    """Within this block messages name line, column and rule, and quote nothing of the input: for messages that others
    read than those who may read the input.
    """
    before = _withheld.set(True)
    try:
        yield
    finally:
        _withheld.reset(before)


def quoted(text: str) -> str:
    """A piece of the input for a message, shortened; "the value" where content is withheld."""
    stripped = text.strip()
    if _withheld.get():
        return "the value"
    return repr(stripped if len(stripped) <= _QUOTED_CHARACTERS else stripped[: _QUOTED_CHARACTERS - 3] + "...")


class SolverError(ValueError):
    """The input cannot be used. The message names the field and the rule."""


class InvalidProfile(SolverError):
    """The profile cannot be used."""


class InvalidSchedule(SolverError):
    """The schedule cannot be built or cannot be executed."""


class InvalidTrace(SolverError):
    """The trace, of measured iterations or of requests to a service, cannot be used."""


class InvalidCalibration(SolverError):
    """The calibration cannot be used for this problem."""


class InvalidProblem(SolverError):
    """Profile, schedule and parameters do not fit each other."""


class Infeasible(SolverError):
    """No plan meets the deadline.

    Attributes:
        deadline_s: the deadline, seconds.
        t_min_s: the iteration time of the fastest plan, seconds.
    """

    def __init__(self, deadline_s: float, t_min_s: float) -> None:
        super().__init__(
            f"deadline {deadline_s:.6g} s is shorter than the fastest possible iteration, T_min = {t_min_s:.6g} s"
        )
        self.deadline_s = deadline_s
        self.t_min_s = t_min_s
