"""What the agent and the process that reads metrics pages for it say to each other, on a Unix socket of packets.

The agent asks for a page with a packet that carries the descriptors of an engine's memory and bell
(``perseus_proto.engine_channel``), and ends it with one that carries none. The reader answers with what it has found:
the engine, or why there is nothing to read. A packet is one JSON object, of which every value is bounded.
"""

from __future__ import annotations

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any, Final

from perseus_proto.frames import ChannelError

MAX_PACKET_BYTES: Final = 4_096
MAX_TEXT: Final = 512
MAX_PATH: Final = 256
_MOST_KEY: Final = 2**53


@dataclass(frozen=True)
class ReadPage:
    """The agent wants a page read, again and again.

    Attributes:
        key: by which both call it.
        host: an IP address; empty: read this page no more.
        port: of the engine.
        path: of the page.
    """

    key: int
    host: str = ""
    port: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        _check_key(self.key)
        if not self.host:
            return
        if len(self.host) > MAX_TEXT or not self.host.isascii() or not self.host.isprintable():
            raise ChannelError(f"host: must be an address of at most {MAX_TEXT} characters")
        if not 1 <= self.port <= 65_535:
            raise ChannelError("port: must be 1 to 65535")
        path = self.path
        if (
            not (path.startswith("/") and len(path) <= MAX_PATH and path.isascii() and path.isprintable())
            or " " in path
        ):
            raise ChannelError(f"path: must begin with / and have at most {MAX_PATH} printable characters, no space")


@dataclass(frozen=True)
class PageFound:
    """What the reader has found at a page since it has said so last.

    Attributes:
        key: of the page.
        engine: whose page it is; empty: nothing can be read there now.
        model: that the page names; empty: none.
        fault: why nothing can be read; empty: something is.
        role: ``prefill`` or ``decode``, if the engine does that alone; empty: it does not say so.
    """

    key: int
    engine: str = ""
    model: str = ""
    fault: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        _check_key(self.key)
        for name in ("engine", "model", "fault"):
            text = getattr(self, name)
            if not isinstance(text, str) or len(text) > MAX_TEXT or not text.isprintable():
                raise ChannelError(f"{name}: must be at most {MAX_TEXT} printable characters")
        if self.role not in ("", "prefill", "decode"):
            raise ChannelError("role: must be prefill, decode or empty")
        if bool(self.engine) == bool(self.fault):
            raise ChannelError("engine: must be given where fault is not")


def open_link() -> socket.socket:
    """A socket of the kind on which the two meet."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(connection: socket.socket, message: ReadPage | PageFound, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message.

    Raises:
        OSError: the other side is gone, or does not read.
    """
    packet = json.dumps(asdict(message)).encode()
    if descriptors:
        socket.send_fds(connection, [packet], list(descriptors))
    else:
        connection.send(packet)


def decode(packet: bytes, kind: type[ReadPage] | type[PageFound]) -> Any:
    """Decode a packet.

    Raises:
        ChannelError: it breaks a rule.
    """
    if len(packet) > MAX_PACKET_BYTES:
        raise ChannelError(f"packet: must be at most {MAX_PACKET_BYTES} bytes")
    try:
        fields = json.loads(packet)
        return kind(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise ChannelError(f"packet: is no {kind.__name__}: {type(error).__name__}") from None


def is_address(host: str) -> bool:
    """Whether this is an IP address: a name would have to be looked up, and anybody may answer for it."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return True
    return False


def _check_key(key: object) -> None:
    if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key <= _MOST_KEY:
        raise ChannelError("key: must be a whole number from 0")
