"""Finds the file descriptors of this project's channels; other libraries in the process also open and close files."""

from __future__ import annotations

import contextlib
import os


def channel_memory() -> list[str]:
    """Return the descriptors of channels' shared memory in this process."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:perseus"):
                found.append(descriptor)
    return sorted(found)
