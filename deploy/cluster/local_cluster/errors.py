"""The errors of the package. Every message is one sentence for the command line.

ClusterError
├── CannotRun      this machine lacks something; nothing was started
├── NotUp          there is no such cluster, machine or part
└── StartFailed    a part did not start or end; the message ends with its log. `down` removes what was started
"""


class ClusterError(Exception):
    """Base class of the errors of this package."""


class CannotRun(ClusterError):
    """This machine lacks something."""


class NotUp(ClusterError):
    """There is no such cluster, machine or part."""


class StartFailed(ClusterError):
    """A part did not start, or did not end, in time."""
