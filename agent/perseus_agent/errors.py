"""What can go wrong in the agent, one line a class. ``service.STATUS`` maps them to gRPC codes.

AgentError
├── RequestError              the caller of a command is wrong; nothing was changed
│   ├── InvalidRequest        a field breaks a rule: the message names both
│   ├── NotAuthorised         the caller's certificate names nobody who may command this agent
│   ├── StaleEpoch            a newer operator has spoken for this job
│   ├── NoLease               the job holds no lease here, or it has run out
│   ├── UnknownPlan           the plan set or the point is not stored here
│   ├── PodTaken              a pod already belongs to another job's lease
│   └── TooMuch               a bound on jobs, pods, plan sets or watchers is reached
├── Draining                  the agent is going down and takes no commands; try its successor
├── PeerRefused               a process on the local socket may not be a rank: message says why, it is hung up on
│   └── PeerUnknown           its pod or GPUs cannot be told now (kubelet or /proc out of reach): it may try again
├── DeviceError               a GPU or its driver answered with an error
│   ├── DriverUnavailable     no driver or library: stay unready, retry with back-off
│   ├── DriverMismatch        driver replaced under us: leave, so that the pod restarts with the new one
│   ├── NoPermission          capability missing: measure only
│   ├── NotSupported          this GPU cannot do this: never ask again
│   ├── InvalidClock          the clock is not one the GPU knows: keep the old one
│   ├── DeviceBusy            passing condition: bounded retry
│   ├── DeviceFailed          a code with no known meaning: counted, fenced after several
│   └── DeviceLost            off the bus, needs a reset, or silent for too long: fenced until the agent starts anew
├── KubeletUnavailable        PodResources cannot be asked: the last good answer stands
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
    """The epoch is older than one already seen for the job."""


class NoLease(RequestError):
    """The job holds no lease on this node."""


class UnknownPlan(RequestError):
    """The plan set, or the point in it, is not stored here."""


class PodTaken(RequestError):
    """A pod belongs to another job's lease."""


class TooMuch(RequestError):
    """A bound is reached."""


class Draining(AgentError):
    """The agent is going down."""


class PeerRefused(AgentError):
    """A local process may not be a rank; ``reason`` is what it is told on the socket."""

    def __init__(self, message: str, reason: Reason = Reason.NOT_A_POD) -> None:
        super().__init__(message)
        self.reason = reason


class PeerUnknown(PeerRefused):
    """Who the local process is cannot be told now."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Reason.UNKNOWN_NOW)


class DeviceError(AgentError):
    """A GPU or its driver answered with an error."""


class DriverUnavailable(DeviceError):
    """No driver, or no library."""


class DriverMismatch(DeviceError):
    """The driver was replaced under the process."""


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
    """The kubelet's PodResources cannot be asked."""


class JournalError(AgentError):
    """The journal cannot be read or written."""


class SettingsError(AgentError):
    """A setting breaks a rule."""
