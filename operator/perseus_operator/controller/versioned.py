"""What is stored of an object, as far as is known: what we wrote last, or what the watch has brought since.

Whoever writes only what has changed must hear of what others write: an operator that slept and believes itself in
command, somebody by hand. But a watch is late: it also brings what was so before our own last write. Used by
``reporter`` and ``budgets``. No I/O.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Stored(Generic[T]):
    """One object's part that is ours to write."""

    def __init__(self, empty: T) -> None:
        self.value = empty
        self._version = ""
        self._writing = empty

    def write(self, wanted: T) -> None:
        """This is on its way; whether it arrives, ``wrote`` or the watch will tell."""
        self._writing = wanted

    def wrote(self, version: str) -> None:
        """What was on its way has been stored, as this version of the object."""
        if is_newer(version, self._version):
            self.value, self._version = self._writing, version

    def heard(self, value: T, version: str) -> bool:
        """What the watch has brought; whether it is news, which somebody else must have written."""
        if not is_newer(version, self._version):
            return False
        foreign = value not in (self.value, self._writing)
        self.value, self._version = value, version
        return foreign


def is_newer(version: str, than: str) -> bool:
    """Resource versions compare as whole numbers: Kubernetes promises it since 1.35, and etcd made them so before. Of
    others, what is told later is taken for the newer."""
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return version != than
