"""How much memory a worker process may take, so that all of them together fit into the operator's container."""

from __future__ import annotations

from pathlib import Path
from typing import Final

OPERATOR_SHARE: Final = 0.25
"""Of the container's memory, for the operator's own process."""
LEAST_MIB: Final = 512
"""Address space with which Python and the solver's libraries start at all."""
_CGROUP: Final = Path("/sys/fs/cgroup/memory.max")


def container_limit_mib(path: Path = _CGROUP) -> int | None:
    """The memory limit of this container, MiB; None: it has none, or none of cgroup v2."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) >> 20 if text.isdecimal() else None


def worker_memory_mib(wanted_mib: int, *, processes: int, limit_mib: int | None) -> int:
    """Address space of one worker process.

    Args:
        wanted_mib: of the setting.
        processes: that may run at the same time.
        limit_mib: of the container; None: no limit.

    Returns:
        What the setting wants, or less, so that they all fit.

    >>> worker_memory_mib(8192, processes=3, limit_mib=4096)
    1024
    """
    if limit_mib is None:
        return wanted_mib
    return min(wanted_mib, max(LEAST_MIB, int(limit_mib * (1 - OPERATOR_SHARE)) // processes))
