"""What can go wrong with a cluster, each said in one sentence.

ClusterError
├── CannotRun      this machine lacks something; nothing was begun
├── NotUp          what was asked for needs a cluster, or a machine of it, that is not there
└── StartFailed    a part did not come up; the message ends with its log. `down` removes what was begun
"""


class ClusterError(Exception):
    """Any of the below."""


class CannotRun(ClusterError):
    """This machine lacks something."""


class NotUp(ClusterError):
    """There is no such cluster or machine."""


class StartFailed(ClusterError):
    """A part did not come up."""
