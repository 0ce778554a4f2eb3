"""What can go wrong in the operator, one line a class, and what follows from it.

OperatorError
├── InvalidSpec          a manifest that the schema let through: names the field and the rule; waits for an edit
├── InvalidInput         what a spec names or processes tell is of no use; carries the condition's reason
│   ├── InvalidProfile   … a ConfigMap that holds no usable profile: waits for an edit
│   └── InvalidSchedule     … a schedule without a name that is none: waits for an edit, or for other processes
├── SolveFailed          the solver refused or broke: waits for an edit
│   └── SolveTimeout     … or took longer than allowed
├── CannotAnswer         kubectl perseus has nothing to show: one line for who asked
├── NotAllowed           a caller whose certificate carries no allowed name
├── StaleEpoch           a caller has seen a newer operator, or this one has been replaced
├── UnknownJob           a caller names a job or GPU that this operator does not serve
├── AgentError           a node agent did not do what it was asked
│   ├── AgentUnavailable retry: dead, restarting, unreachable, too slow, or overloaded
│   ├── AgentFenced      stop: a newer operator commands this job
│   └── AgentRefused     the request itself is wrong for that node: not repeated until something changes
└── KubeError            the API server did not do what it was asked
    ├── KubeUnavailable  retry: no answer, throttled, 5xx
    ├── KubeNotFound     the object is not there
    ├── KubeConflict     somebody else wrote in between
    └── KubeForbidden    RBAC does not allow it; said in the log, retried slowly
"""

from __future__ import annotations


class OperatorError(Exception):
    """Root of everything the operator raises on purpose."""


class InvalidSpec(OperatorError):
    """The PerseusJob cannot be used."""


class InvalidInput(OperatorError):
    """What a spec names, or the training processes tell, cannot be used; ``reason`` is the condition's reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidProfile(InvalidInput):
    """The profile cannot be used."""


class InvalidSchedule(InvalidInput):
    """The order of instructions cannot be used."""


class SolveFailed(OperatorError):
    """No frontier for this profile and schedule."""


class SolveTimeout(SolveFailed):
    """The solver was stopped at its deadline."""


class CannotAnswer(OperatorError):
    """What was asked from a terminal is not there, or may not be seen or done."""


class NotAllowed(OperatorError):
    """The caller may not tell this operator anything."""


class StaleEpoch(OperatorError):
    """Another operator is in command."""


class UnknownJob(OperatorError):
    """No job that this operator serves."""


class AgentError(OperatorError):
    """A node agent did not do what it was asked."""


class AgentUnavailable(AgentError):
    """Try again later; the lease on the node protects the GPUs meanwhile."""


class AgentFenced(AgentError):
    """The agent has seen a newer epoch for this job."""


class AgentRefused(AgentError):
    """The agent will answer the same until the request or the node changes."""


class KubeError(OperatorError):
    """The API server did not do what it was asked."""


class KubeUnavailable(KubeError):
    """Try again later."""


class KubeNotFound(KubeError):
    """The object is not there."""


class KubeConflict(KubeError):
    """The object exists already or has changed since it was read."""


class KubeForbidden(KubeError):
    """The ServiceAccount may not do this."""
