"""Memory that an agent makes and shares with a process of a pod, and the bell beside it.

The agent makes both and sends their descriptors with its welcome. The memory is sealed: a process that could shrink it
would kill the agent with SIGBUS, and one that could grow it would take memory in the agent's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Final

from perseus_proto.frames import ChannelError

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MFD_NOEXEC_SEAL: Final = 0x8  # Linux 6.3; hardened nodes demand it


def create_memory(size: int) -> tuple[int, int]:
    """Make so many bytes of memory, all zero, and an eventfd. Returns both descriptors, which the caller owns.

    Raises:
        OSError: no memory or no descriptors are left.
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    with contextlib.ExitStack() as undo:
        try:
            memory_fd = os.memfd_create("perseus", flags | _MFD_NOEXEC_SEAL)
        except OSError:  # an older kernel
            memory_fd = os.memfd_create("perseus", flags)
        undo.callback(os.close, memory_fd)
        os.ftruncate(memory_fd, size)
        fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, _SEALS)
        event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        undo.pop_all()
    return memory_fd, event_fd


def map_memory(memory_fd: int, size: int) -> mmap.mmap:
    """Map memory that the agent has sent, and close its descriptor, also when it raises.

    Raises:
        ChannelError: it has another size, or the agent could shrink it while it is in use.
        OSError: it cannot be mapped.
    """
    try:
        if os.fstat(memory_fd).st_size != size:
            raise ChannelError(f"memory: its size must be {size} bytes")
        if fcntl.fcntl(memory_fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ChannelError("memory: must be sealed against shrinking")
        return mmap.mmap(memory_fd, size)
    finally:
        os.close(memory_fd)


class Bell:
    """The agent's end of an eventfd that a process rings."""

    def __init__(self, event_fd: int) -> None:
        self.event_fd = event_fd
        self._count = bytearray(8)

    def acknowledge(self) -> bool:
        """Reset it; False if nobody rang. Never blocks, even if the process clears O_NONBLOCK on the eventfd."""
        try:
            return os.preadv(self.event_fd, [self._count], -1, os.RWF_NOWAIT) == 8
        except BlockingIOError:
            return False
