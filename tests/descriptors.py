"""Descriptors of this process that only channels of ours have: counting all of them would count everybody's."""

from __future__ import annotations

import contextlib
import os


def channel_memory() -> list[str]:
    """Those of channels' memory."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:perseus"):
                found.append(descriptor)
    return sorted(found)
