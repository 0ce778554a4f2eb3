"""The memory that agent and keeper share: which GPUs must be given back, and until when the agent counts as alive.

    word 0    alive until, nanoseconds of CLOCK_MONOTONIC; 0: the agent does not serve yet     agent
    then      SLOTS entries: one byte that says "owed", 127 bytes of UUID, padded with zeros   agent

The agent writes, the keeper reads. An entry's UUID is there before its byte is set, so whatever moment the agent dies
at, a GPU that it may have locked is named. The memory outlives the agent, needs no disk, and costs a store.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from typing import Final

SLOTS: Final = 256
_SLOT_BYTES: Final = 128
_HEAD: Final = struct.Struct("<Q")
_BYTES: Final = _HEAD.size + SLOTS * _SLOT_BYTES


class Ledger:
    """A view of the memory, of the agent or of the keeper."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory behind a descriptor, which stays the caller's."""
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, _BYTES)
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> Ledger:
        """A new, empty one."""
        descriptor = os.memfd_create("perseus-owed-gpus", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        return cls(descriptor)

    def owe(self, gpu_uuid: str) -> None:
        """Note a GPU, before its first lock.

        Raises:
            ValueError: there is no room for it: it must not be locked.
        """
        name = gpu_uuid.encode()
        with self._lock:
            names = self._names()
            slot = names.index(name) if name in names else names.index(b"") if b"" in names else -1
            if slot < 0 or not name or len(name) >= _SLOT_BYTES:
                raise ValueError(f"{gpu_uuid}: no room in the keeper's memory")
            start = _offset(slot)
            self._map[start + 1 : start + 1 + len(name)] = name
            self._map[start] = 1

    def settle(self, gpu_uuid: str) -> None:
        """Remove a GPU, after its reset."""
        with self._lock:
            names = self._names()
            if (name := gpu_uuid.encode()) in names:
                self._map[_offset(names.index(name))] = 0

    def owed(self) -> tuple[str, ...]:
        """UUIDs of the GPUs that the agent may have locked."""
        names = enumerate(self._names())
        return tuple(name.decode() for slot, name in names if self._map[_offset(slot)])

    def alive_for(self, seconds: float) -> None:
        """The agent is alive, and has until then to say so again."""
        self._map[: _HEAD.size] = _HEAD.pack(time.monotonic_ns() + int(seconds * 1e9))

    @property
    def serving(self) -> bool:
        """Whether the agent has begun to serve."""
        return self._deadline_ns > 0

    @property
    def overdue(self) -> bool:
        """Whether the agent owes a GPU and should have said by now that it is alive."""
        return self.serving and time.monotonic_ns() > self._deadline_ns and bool(self.owed())

    @property
    def _deadline_ns(self) -> int:
        deadline: int = _HEAD.unpack_from(self._map)[0]
        return deadline

    def _names(self) -> list[bytes]:
        slots = (self._map[_offset(slot) + 1 : _offset(slot) + _SLOT_BYTES] for slot in range(SLOTS))
        return [name.rstrip(b"\0") for name in slots]


def _offset(slot: int) -> int:
    return _HEAD.size + slot * _SLOT_BYTES
