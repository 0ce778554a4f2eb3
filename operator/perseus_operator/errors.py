"""The operator's exceptions, and what follows from each.

OperatorError
├── InvalidSpec          a spec that breaks a rule: names the field and the rule; waits for an edit
├── InvalidInput         an input that a spec names or ranks report is invalid; carries the condition's reason
│   ├── InvalidProfile   … an object that holds no usable profile: waits for an edit
│   └── InvalidSchedule  … a custom schedule that is invalid: waits for an edit, or for other processes
├── SolveFailed          the solver refused or failed: waits for an edit
│   ├── SolveTimeout     … or exceeded its deadline
│   └── AnswerRefused    … or a solver service answered what is not so: asked again after a pause
├── CannotAnswer         kubectl perseus has nothing to show: one line for the user
├── UnusableArgument     kubectl perseus was given what cannot be used: one line for the user
├── NotAllowed           a caller whose certificate carries no allowed name
├── StaleEpoch           a caller has seen a newer operator, or this one has been replaced
├── UnknownJob           a caller names a job or GPU that this operator does not serve
├── NoAdvice             nothing is advised for a pool now: what scales it keeps what there is
├── AgentError           a node agent did not execute a call
│   ├── AgentUnavailable retry: dead, restarting, unreachable, too slow, or overloaded
│   ├── AgentFenced      stop: a newer operator commands this job; or the counter of epochs was lost
│   └── AgentRefused     the request itself is wrong for that node: not repeated until something changes
└── KubeError            the API server did not execute a request
    ├── KubeUnavailable  retry: no answer, throttled, 5xx
    ├── KubeNotFound     the object is not there
    ├── KubeConflict     another writer changed the object in between, or it is somebody else's
    └── KubeForbidden    RBAC does not allow it; logged, retried slowly
"""

from __future__ import annotations


class OperatorError(Exception):
    """Root of the operator's own exceptions."""


class InvalidSpec(OperatorError):
    """The PerseusJob cannot be used."""


class InvalidInput(OperatorError):
    """An input that a spec names or ranks report cannot be used; ``reason`` is the condition's reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidProfile(InvalidInput):
    """The profile cannot be used."""


class InvalidSchedule(InvalidInput):
    """The schedule cannot be used."""


class SolveFailed(OperatorError):
    """No frontier for this profile and schedule."""


class SolveTimeout(SolveFailed):
    """The solver was stopped at its deadline."""


class AnswerRefused(SolveFailed):
    """What a solver service answered is not used."""


class CannotAnswer(OperatorError):
    """What a user requested with kubectl perseus is not there, or access is denied."""


class UnusableArgument(OperatorError):
    """What a user typed cannot be used, or the file that it names."""


class NotAllowed(OperatorError):
    """The client's certificate does not allow it to call this operator."""


class StaleEpoch(OperatorError):
    """Another operator is in command."""


class UnknownJob(OperatorError):
    """No job that this operator serves."""


class NoAdvice(OperatorError):
    """How many replicas a pool needs is not known."""


class AgentError(OperatorError):
    """A node agent did not execute a call."""


class AgentUnavailable(AgentError):
    """Try again later; the lease on the node protects the GPUs meanwhile."""


class AgentFenced(AgentError):
    """The agent has seen a newer epoch for this job: ``seen``; None: it does not say which."""

    def __init__(self, message: str, seen: int | None = None) -> None:
        super().__init__(message)
        self.seen = seen


class AgentRefused(AgentError):
    """The agent will answer the same until the request or the node changes."""


class KubeError(OperatorError):
    """The API server did not execute a request."""


class KubeUnavailable(KubeError):
    """Try again later."""


class KubeNotFound(KubeError):
    """The object is not there."""


class KubeConflict(KubeError):
    """The object exists already or has changed since it was read."""


class KubeForbidden(KubeError):
    """The ServiceAccount may not do this."""
