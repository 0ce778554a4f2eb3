"""The hello of a serving engine, on the socket and in the frames of ``perseus_proto.hello``.

An engine says who it is; its GPUs are the kubelet's answer. An agent that does not know engines refuses this kind of
frame, and the engine tries again, with longer and longer pauses.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perseus_proto import hello as wire
from perseus_proto.frames import ChannelError
from perseus_proto.hello import Hello, Message

MAX_ENGINE_NAME: Final = 64
MAX_ENGINE_VERSION: Final = 128
MAX_MODEL: Final = 512
MAX_PARALLELISM: Final = 128
MAX_FLAGS: Final = 256
MAX_FLAG_NAME: Final = 128
MAX_FLAG_VALUE: Final = 512
MAX_ENGINE_BODY_BYTES: Final = 32_768
"""Of the whole hello: fewer than all bounds together would allow."""
_LENGTH: Final = struct.Struct("<H")
_MOST_BYTES: Final = {Message.HELLO: wire.MAX_BODY_BYTES, Message.ENGINE_HELLO: MAX_ENGINE_BODY_BYTES}


@dataclass(frozen=True)
class EngineHello:
    """What an engine says about itself.

    Attributes:
        name: of the engine: "vllm".
        version: of the engine, in full.
        model: name and revision of the weights.
        parallelism: how layers and sequences are split, in words: "tp 4, pp 1".
        flags: name and value of each that changes a step, in order of their names.

    Raises:
        ChannelError: it breaks a rule.
    """

    name: str
    version: str
    model: str
    parallelism: str
    flags: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field, text, least, most in (
            ("name", self.name, 1, MAX_ENGINE_NAME),
            ("version", self.version, 1, MAX_ENGINE_VERSION),
            ("model", self.model, 1, MAX_MODEL),
            ("parallelism", self.parallelism, 0, MAX_PARALLELISM),
            *(("flags.name", name, 1, MAX_FLAG_NAME) for name, _ in self.flags),
            *(("flags.value", value, 0, MAX_FLAG_VALUE) for _, value in self.flags),
        ):
            if not (least <= len(text) <= most and text.isprintable()):
                raise ChannelError(f"{field}: must be {least} to {most} printable characters")
        names = [name for name, _ in self.flags]
        if len(names) > MAX_FLAGS or names != sorted(set(names)):
            raise ChannelError(f"flags: must be at most {MAX_FLAGS}, in order of their names, each once")

    def __str__(self) -> str:
        return f"{self.name} {self.version} with {self.model}"


def encode_engine_hello(hello: EngineHello) -> bytes:
    """Encode a hello as a whole frame: head and body.

    Raises:
        ChannelError: it is too long as a whole.
    """
    texts = [hello.name, hello.version, hello.model, hello.parallelism]
    texts += [text for flag in hello.flags for text in flag]
    body = b"".join(_LENGTH.pack(len(text.encode())) + text.encode() for text in texts)
    if len(body) > MAX_ENGINE_BODY_BYTES:
        raise ChannelError(f"hello: must be at most {MAX_ENGINE_BODY_BYTES} bytes, is {len(body)}")
    return wire.frame(Message.ENGINE_HELLO, body)


def decode_engine_hello(body: bytes) -> EngineHello:
    """Decode the body of an ENGINE_HELLO frame.

    Raises:
        ChannelError: it breaks a rule.
    """
    if len(body) > MAX_ENGINE_BODY_BYTES:
        raise ChannelError(f"hello: must be at most {MAX_ENGINE_BODY_BYTES} bytes, is {len(body)}")
    texts, at = list[str](), 0
    while at < len(body):
        end = at + _LENGTH.size
        if end > len(body) or len(texts) == 4 + 2 * MAX_FLAGS:
            raise ChannelError("hello: has bytes after its last text")
        at, end = end, end + _LENGTH.unpack_from(body, at)[0]
        if end > len(body):
            raise ChannelError("hello: ends within a text")
        try:
            texts.append(body[at:end].decode())
        except UnicodeDecodeError:
            raise ChannelError("hello: a text is not UTF-8") from None
        at = end
    if len(texts) < 4 or len(texts) % 2:
        raise ChannelError("hello: must have name, version, model and parallelism, then flags in pairs")
    name, version, model, parallelism, *flags = texts
    return EngineHello(name, version, model, parallelism, tuple(zip(flags[::2], flags[1::2], strict=True)))


def receive_any_hello(
    connection: socket.socket, timeout_s: float, sender_pid: int | None, reserve: Callable[[int], None]
) -> Hello | EngineHello:
    """Read the hello of a rank or of an engine. Arguments and errors are those of ``receive_body``."""
    message, body = wire.receive_body(connection, timeout_s, _MOST_BYTES, sender_pid, reserve)
    return decode_engine_hello(body) if message is Message.ENGINE_HELLO else wire.decode_hello(body)
