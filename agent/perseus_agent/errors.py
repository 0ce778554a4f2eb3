"""What can go wrong in the agent, one line a class. ``servers.grpc_service.STATUS`` maps them to gRPC codes.

AgentError
├── RequestError              the caller of a command is wrong; nothing was changed
│   ├── InvalidRequest        a field breaks a rule: the message names both
│   ├── NotAuthorised         no name of the caller's certificate may command this agent
│   ├── StaleEpoch            a newer operator commands this job
│   ├── NoLease               the job holds no lease here, or it has run out
│   ├── UnknownPlan           the plan set or the point is not stored here
│   ├── PodTaken              a pod already belongs to another job's lease
│   └── TooMuch               a bound on jobs, pods, plan sets or watchers is reached
├── Draining                  the agent is stopping and takes no commands; try its successor
├── PeerRefused               a process on the local socket may not be a rank; the message says why
│   └── PeerUnknown           its pod or GPUs cannot be read now (kubelet or /proc): it may try again
├── DeviceError               a GPU or its driver answered with an error
│   ├── DriverUnavailable     no driver or library: stay unready, retry with back-off
│   ├── DriverMismatch        the driver was replaced: exit, so that the pod restarts with the new one
│   ├── NoPermission          capability missing: measure only
│   ├── NotSupported          this GPU cannot do this: never try again
│   ├── InvalidClock          the GPU does not support this clock: the old one stays
│   ├── DeviceBusy            passing condition: bounded retry
│   ├── DeviceFailed          a code with no known meaning: counted; after several the GPU is lost
│   └── DeviceLost            off the bus, needs a reset, or silent for too long: unused until the agent restarts
├── KubeletUnavailable        PodResources does not answer: the last good answer is used
├── JournalError              the journal cannot be read or written: no clock is written without it
└── SettingsError             start-up refused: message names the flag and the rule
"""

from __future__ import annotations

from perseus_proto.hello import Reason


class AgentError(Exception):
    """Anything the agent raises on purpose; the message is one line for people."""


class RequestError(AgentError):
    """A command was refused and changed nothing."""


class InvalidRequest(RequestError):
    """A field breaks a rule."""


class NotAuthorised(RequestError):
    """The caller may not command this agent."""


class StaleEpoch(RequestError):
    """The epoch is older than ``seen``, the highest already seen for the job."""

    def __init__(self, message: str, seen: int = 0) -> None:
        super().__init__(message)
        self.seen = seen


class NoLease(RequestError):
    """The job holds no lease on this node."""


class UnknownPlan(RequestError):
    """The plan set, or the point in it, is not stored here."""


class PodTaken(RequestError):
    """A pod belongs to another job's lease."""


class TooMuch(RequestError):
    """A bound is reached."""


class Draining(AgentError):
    """The agent is stopping."""


class PeerRefused(AgentError):
    """A local process may not be a rank; ``reason`` is sent to it on the socket."""

    def __init__(self, message: str, reason: Reason = Reason.NOT_A_POD) -> None:
        super().__init__(message)
        self.reason = reason


class PeerUnknown(PeerRefused):
    """The pod or the GPUs of the local process cannot be read now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Reason.UNKNOWN_NOW)


class DeviceError(AgentError):
    """A GPU or its driver answered with an error."""


class DriverUnavailable(DeviceError):
    """No driver, or no library."""


class DriverMismatch(DeviceError):
    """The driver was replaced while the process ran."""


class NoPermission(DeviceError):
    """The process lacks the capability."""


class NotSupported(DeviceError):
    """The GPU cannot do this."""


class InvalidClock(DeviceError):
    """The GPU does not know this clock."""


class DeviceBusy(DeviceError):
    """A passing condition."""


class DeviceFailed(DeviceError):
    """A code with no known meaning."""


class DeviceLost(DeviceError):
    """The GPU does not answer any more."""


class KubeletUnavailable(AgentError):
    """The kubelet's PodResources does not answer."""


class JournalError(AgentError):
    """The journal cannot be read or written."""


class SettingsError(AgentError):
    """A setting breaks a rule."""
