"""A value that the operator writes to an object, as it is stored: from the latest write or the latest watch event.

The operator writes only what has changed, so it must notice what other writers do: an operator that slept and believes
that it is in command, or a user. A watch is late: it also delivers what was stored before our own latest write.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Versioned(Generic[T]):
    """One part of an object that the operator owns."""

    def __init__(self, empty: T) -> None:
        self.value = empty
        self._version = ""
        self._writing = empty

    def write_started(self, wanted: T) -> None:
        """A write of this value has been sent; ``write_succeeded`` or the watch shows whether it arrived."""
        self._writing = wanted

    def write_succeeded(self, version: str) -> None:
        """The value that was sent is stored in this version of the object."""
        if is_newer(version, self._version):
            self.value, self._version = self._writing, version

    def observed(self, value: T, version: str) -> bool:
        """The watch delivered this value.

        Returns:
            Whether another writer has written it.
        """
        if not is_newer(version, self._version):
            return False
        foreign = value not in (self.value, self._writing)
        self.value, self._version = value, version
        return foreign


def is_newer(version: str, than: str) -> bool:
    """Whether a resource version is newer than another.

    They compare as whole numbers: Kubernetes promises it since 1.35, and etcd made them so before. If one is not a
    number, any other version counts as newer.
    """
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return version != than
