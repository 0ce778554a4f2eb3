"""Bytes on the agent's Unix socket: so many of them, in time, from the process that connected; and the errors of what
they say. What the frames are is in ``perseus_proto.hello``.
"""

from __future__ import annotations

import array
import socket
import struct
import time
from collections.abc import Iterable
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group


class ChannelError(Exception):
    """A message breaks a rule of this protocol; the text names the field and the rule."""


class VersionMismatch(ChannelError):
    """The other side speaks another version of this protocol."""


class ForeignSender(ChannelError):
    """A process wrote to a connection that another one had opened."""


def receive(
    connection: socket.socket,
    length: int,
    deadline_s: float,
    descriptors: list[int] | None = None,
    sender_pid: int | None = None,
) -> bytes:
    """Receive exactly so many bytes before the deadline, of one sender where it is named.

    Without ``descriptors`` the kernel drops any that come along.

    Raises:
        ForeignSender: another process wrote them.
        OSError: the other side closed the connection, or was too slow (``TimeoutError``).
    """
    received = bytearray()
    while len(received) < length:
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the other side is too slow")
        connection.settimeout(remaining_s)
        wanted = min(length - len(received), 65_536)
        if sender_pid is not None:
            # Bytes of two senders never come in one piece, and descriptors find no room.
            chunk, ancillary, _, _ = connection.recvmsg(wanted, socket.CMSG_SPACE(_CREDENTIALS.size))
            if chunk:
                _check_sender(ancillary, sender_pid)
        elif descriptors is None:
            chunk = connection.recv(wanted)
        else:
            # CLOEXEC at once: a training process may fork and exec in another thread at any moment.
            chunk, ancillary, _, _ = connection.recvmsg(wanted, socket.CMSG_SPACE(4 * 4), socket.MSG_CMSG_CLOEXEC)
            for _, _, data in ancillary:
                descriptors.extend(array.array("i", data[: len(data) - len(data) % 4]))
        if not chunk:
            raise ConnectionResetError("the other side hung up")
        received += chunk
    return bytes(received)


def _check_sender(ancillary: Iterable[tuple[int, int, bytes]], expected_pid: int) -> None:
    pids = [
        _CREDENTIALS.unpack(data)[0]
        for level, kind, data in ancillary
        if (level, kind, len(data)) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS, _CREDENTIALS.size)
    ]
    if pids != [expected_pid]:
        raise ForeignSender(f"sender: must be the process that connected, {expected_pid}, is {pids or 'unknown'}")
