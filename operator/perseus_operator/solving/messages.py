"""A piece of work and its verdict as messages of the solver service, in both directions."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from perseus_core.units import ms_from_s, s_from_ms
from perseus_operator.solving.process import LONGEST_MESSAGE, Outcome, Task, Verdict
from perseus_proto.v1alpha1 import solver_pb2

MAX_BYTES: Final = 64 << 20
"""Of a message. A profile and a schedule come from ConfigMaps, of a megabyte at most; the largest are frontiers."""
BEGUN_METADATA: Final = "perseus-begun"
"""In the initial metadata of a worker that has begun."""
_TASKS: Final = {
    Task.SOLVE: solver_pb2.TASK_SOLVE,
    Task.CALIBRATE: solver_pb2.TASK_CALIBRATE,
    Task.PLAN_SERVING: solver_pb2.TASK_PLAN_SERVING,
}
_OUTCOMES: Final = {
    Outcome.ANSWERED: solver_pb2.OUTCOME_ANSWERED,
    Outcome.INVALID_PROFILE: solver_pb2.OUTCOME_INVALID_PROFILE,
    Outcome.REFUSED: solver_pb2.OUTCOME_REFUSED,
    Outcome.OUT_OF_TIME: solver_pb2.OUTCOME_OUT_OF_TIME,
    Outcome.OUT_OF_MEMORY: solver_pb2.OUTCOME_OUT_OF_MEMORY,
    Outcome.DIED: solver_pb2.OUTCOME_DIED,
}


def request_of(task: Task, request: bytes, version: str) -> solver_pb2.WorkRequest:
    """The message that asks for a piece of work.

    Args:
        task: one that the service takes.
        request: as the worker process reads it.
        version: of this distribution.
    """
    return solver_pb2.WorkRequest(version=version, task=_TASKS[task], request=request)


def task_of(value: int) -> Task | None:
    """The task of a message; None: a worker knows none of that number."""
    return next((task for task, number in _TASKS.items() if number == value), None)


def response_of(verdict: Verdict) -> solver_pb2.WorkResponse:
    """The message that answers."""
    return solver_pb2.WorkResponse(
        outcome=_OUTCOMES[verdict.outcome],
        answer=verdict.answer,
        message=verdict.message,
        solve_ms=ms_from_s(verdict.seconds),
    )


class InvalidAnswer(ValueError):
    """The bytes are no answer of a worker."""


def verdict_of(answer: bytes) -> Verdict:
    """The verdict in an answer. An outcome that this version does not know is a worker's that died.

    Args:
        answer: a ``WorkResponse`` as it was received.

    Raises:
        InvalidAnswer: the bytes are none.
    """
    try:
        response = solver_pb2.WorkResponse.FromString(answer)
    except DecodeError as error:
        raise InvalidAnswer(f"not an answer: {error}") from error
    outcome = next((each for each, number in _OUTCOMES.items() if number == response.outcome), Outcome.DIED)
    return Verdict(outcome, response.answer, response.message[:LONGEST_MESSAGE], s_from_ms(response.solve_ms))
