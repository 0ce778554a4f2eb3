"""Reads a batch of telemetry event by event, so that the event loop never parses more than one at a time.

A node that is taken over may send 64 MiB in one message: millions of events, or one of that size. Parsed as a whole it
would hold the loop, and take a multiple of its memory. The batch's own fields are few, so its frame is read here; what
is larger than any event can be is left out unread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError

from perseus_proto.planset import MAX_INSTRUCTIONS
from perseus_proto.v1alpha1 import agent_pb2

LARGEST_EVENT: Final = 64 * 1024 + 3 * 5 * MAX_INSTRUCTIONS
"""Bytes: durations, energies and leads of the longest schedule, of five bytes at most each."""
_DROPPED, _EVENTS = (1 << 3) | 0, (2 << 3) | 2
_STEP: Final = 256
"""Bytes that count as read for each event, whatever it has: its frame takes time, too."""
_MOST_OTHER_FIELDS: Final = 64
"""Of a batch beside its events, those of later releases included: they are passed over in one go."""


class TornBatch(ValueError):
    """The bytes are no batch of telemetry."""


def events_of(data: bytes) -> Iterator[tuple[agent_pb2.TelemetryEvent | None, int]]:
    """Iterate over the events of a batch.

    Args:
        data: a ``TelemetryBatch`` as it was received.

    Returns:
        Each event, None for one that is larger than any can be, and how many bytes were read for it.

    Raises:
        TornBatch: the bytes are no batch, found as far as they were read, or have more fields than any can.
    """
    others = 0
    for field, begin, end in _fields(data):
        if field != _EVENTS:
            others += 1
            if others > _MOST_OTHER_FIELDS:
                raise TornBatch(f"it has more than {_MOST_OTHER_FIELDS} fields beside its events")
            continue
        if end - begin > LARGEST_EVENT:
            yield None, _STEP
            continue
        try:
            event = agent_pb2.TelemetryEvent.FromString(data[begin:end])
        except DecodeError as error:
            raise TornBatch(f"an event is damaged: {error}") from error
        yield event, _STEP + end - begin


def dropped_of(data: bytes) -> int:
    """How many events a batch says were lost. Agents write it first; 0 where it does not come first."""
    if not data or data[0] != _DROPPED:
        return 0
    return _varint(data, 1)[0]


def _fields(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Tag of each field and where its content begins and ends."""
    at, size = 0, len(data)
    while at < size:
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            begin, (_, at) = at, _varint(data, at)
        elif kind == 2:
            length, begin = _varint(data, at)
            at = begin + length
        elif kind in (1, 5):
            begin, at = at, at + (8 if kind == 1 else 4)
        else:
            raise TornBatch(f"a field has the unknown type {kind}")
        if at > size:
            raise TornBatch("it ends within a field")
        yield tag, begin, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise TornBatch("it ends within a number")
