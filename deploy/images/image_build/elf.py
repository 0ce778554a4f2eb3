"""What the head of an ELF file says: for which machine it is, and which libraries it needs.

This is how an image is checked whose code the machine that builds it cannot run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MACHINES = {"amd64": 62, "arm64": 183}
"""``e_machine`` by OCI's name of the architecture."""
_LOAD, _DYNAMIC = 1, 2
_END, _NEEDED, _STRINGS = 0, 1, 5


@dataclass(frozen=True)
class Elf:
    """One executable or library of 64 bits, little-endian."""

    machine: int
    """``e_machine``; other values than those of ``MACHINES`` occur."""
    needed: tuple[str, ...]
    """File names of libraries that the loader must find."""


def parse(content: bytes) -> Elf | None:
    """Return what an ELF file says of itself, or None if this is no ELF file.

    Args:
        content: of the whole file.

    Raises:
        ValueError: it is one, but of 32 bits, big-endian, or cut off.
    """
    if not content.startswith(b"\x7fELF"):
        return None
    if content[4:6] != b"\x02\x01":
        raise ValueError("an ELF file, but not of 64 bits and little-endian")
    try:
        (machine,) = struct.unpack_from("<H", content, 18)
        (table,) = struct.unpack_from("<Q", content, 32)
        size, count = struct.unpack_from("<HH", content, 54)
        segments = [struct.unpack_from("<IIQQQQ", content, table + size * at) for at in range(count)]
        return Elf(machine, tuple(_needed(content, segments)))
    except (struct.error, IndexError) as error:
        raise ValueError("an ELF file that is cut off") from error


def _needed(content: bytes, segments: list[tuple[int, ...]]) -> Iterator[str]:
    for kind, _, offset, _, _, length in segments:
        if kind == _DYNAMIC:
            entries = [struct.unpack_from("<qQ", content, offset + at) for at in range(0, length, 16)]
            tags = entries[: next((at for at, (tag, _) in enumerate(entries) if tag == _END), len(entries))]
            strings = next((value for tag, value in tags if tag == _STRINGS), None)
            for tag, value in tags:
                if tag == _NEEDED and strings is not None:
                    start = _offset(segments, strings) + value
                    yield content[start : content.index(b"\0", start)].decode()


def _offset(segments: list[tuple[int, ...]], address: int) -> int:
    """Return where in the file an address is that the loader will use."""
    for kind, _, offset, virtual, _, length in segments:
        if kind == _LOAD and virtual <= address < virtual + length:
            return offset + address - virtual
    raise IndexError(address)
