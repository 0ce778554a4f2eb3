"""The memory that agent and keeper share: which GPUs must be given back, and until when each counts as alive.

    word 0    the agent is alive until, nanoseconds of CLOCK_MONOTONIC; 0: it does not serve yet     agent
    word 1    a keeper watches until                                            keeper; agent, when the keeper has ended
    then      SLOTS entries: one byte that says "owed", 127 bytes of UUID, padded with zeros         agent

An entry's UUID is there before its byte is set, so whatever moment the agent dies at, a GPU that it may have locked is
named. The agent makes the memory and shows it to each keeper that it finds: it outlives either, needs no disk, and
costs a store.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Final, Self

SLOTS: Final = 256
UNWATCHED_S: Final = 60.0
"""How long an agent may go on without a keeper: a kubelet starts one again at once, and after 10 s, 20 s and 40 s if it
ends again and again."""
_SLOT_BYTES: Final = 128
_WORD: Final = struct.Struct("<Q")
_ALIVE, _WATCHED, _ENTRIES = 0, _WORD.size, 2 * _WORD.size
_BYTES: Final = _ENTRIES + SLOTS * _SLOT_BYTES


class Ledger:
    """A view of the memory, of the agent or of the keeper."""

    def __init__(self, descriptor: int, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Map the memory behind a descriptor, which stays the caller's.

        Args:
            descriptor: of the memory.
            monotonic_ns: the clock that agent and keeper share, nanoseconds.

        Raises:
            ValueError: it is too short.
            OSError: it cannot be mapped.
        """
        self.descriptor = descriptor
        self._monotonic_ns = monotonic_ns
        self._map = mmap.mmap(descriptor, _BYTES)
        self._lock = threading.Lock()

    @classmethod
    def create(cls, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> Self:
        """A new, empty one. No keeper watches yet."""
        descriptor = os.memfd_create("perseus-owed-gpus", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _BYTES)
        ledger = cls(descriptor, monotonic_ns)
        ledger.watched_for(0.0)
        return ledger

    # ------------------------------------------------------------------------------------------- GPUs

    def owe(self, gpu_uuid: str) -> None:
        """Note a GPU, before its first lock.

        Raises:
            ValueError: no keeper watches, or there is no room for it: it must not be locked.
        """
        if not self.watched:
            raise ValueError(f"{gpu_uuid}: no clock keeper watches the agent")
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
        return tuple(name.decode(errors="replace") for slot, name in names if self._map[_offset(slot)])

    # ------------------------------------------------------------------------------------------- agent and keeper

    def alive_for(self, seconds: float) -> None:
        """The agent is alive, and has until then to say so again."""
        self._set(_ALIVE, seconds)

    @property
    def serving(self) -> bool:
        """Whether the agent has begun to serve."""
        return self._get(_ALIVE) > 0

    @property
    def overdue(self) -> bool:
        """Whether the agent owes a GPU and should have said by now that it is alive."""
        return self.serving and self._monotonic_ns() > self._get(_ALIVE) and bool(self.owed())

    def watched_for(self, seconds: float) -> None:
        """A keeper watches, and has until then to say so again; 0: it has ended."""
        self._set(_WATCHED, seconds)

    @property
    def watched(self) -> bool:
        """Whether a keeper watches."""
        return self._monotonic_ns() < self._get(_WATCHED)

    @property
    def watch_expired(self) -> bool:
        """Whether none has for so long that the agent must give every GPU back."""
        return self._monotonic_ns() > self._get(_WATCHED) + int(UNWATCHED_S * 1e9)

    def _get(self, offset: int) -> int:
        word: int = _WORD.unpack_from(self._map, offset)[0]
        return word

    def _set(self, offset: int, seconds: float) -> None:
        self._map[offset : offset + _WORD.size] = _WORD.pack(self._monotonic_ns() + int(seconds * 1e9))

    def _names(self) -> list[bytes]:
        slots = (self._map[_offset(slot) + 1 : _offset(slot) + _SLOT_BYTES] for slot in range(SLOTS))
        return [name.rstrip(b"\0") for name in slots]


def _offset(slot: int) -> int:
    return _ENTRIES + slot * _SLOT_BYTES
