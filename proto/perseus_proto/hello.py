"""The protocol of the node agent's Unix socket: one hello, one answer, then nothing until one side closes it.

A frame is a 12-byte head (magic, protocol version, kind, length of the body) and a body of fixed structs,
little-endian. The agent parses what any process of the node may send: every length and value is bounded here, and
every violation is a ``ChannelError`` that names the field and the rule. The welcome carries two descriptors (see
``perseus_proto.channel``). Standard library only, since training images have nothing else. Which process may become a
rank is decided by the agent, not here.

After the welcome the socket carries nothing: its end of file tells each side that the other has gone.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

from perseus_core.instruction import Instruction, InstructionKind
from perseus_core.rank import RankId
from perseus_proto.frames import ChannelError, VersionMismatch, receive

PROTOCOL_VERSION: Final = 2
"""Also of what the descriptors of a welcome hold: ``channel_layout.LAYOUT_VERSION`` changes with it."""
MAX_INSTRUCTIONS: Final = 65_536
MAX_DP: Final = 65_535
MAX_STAGE: Final = 4_095
MAX_TP: Final = 4_095
MAX_MICROBATCH: Final = 16_777_215
MAX_CHUNK: Final = 4_095
MAX_MESSAGE_BYTES: Final = 1_024
MAX_GPU_HINT_BYTES: Final = 96

_MAGIC: Final = b"PRSU"
_HEAD: Final = struct.Struct("<4sHHI")
_HELLO: Final = struct.Struct("<IIIBBBxI")  # dp, stage, tp, timing, bytes of the GPU hint, flags, instructions
_OWN_TIME: Final = 1
"""The only flag; others, of a newer client, mean nothing here."""
_INSTRUCTION: Final = struct.Struct("<BBHI")  # kind, flags, chunk, microbatch
_JOINED: Final = 1
"""The only flag of an instruction; others, of a newer client, mean nothing here."""
_WELCOME: Final = struct.Struct("<I")  # number of instructions that the memory has room for
_REFUSAL: Final = struct.Struct("<HH")  # reason, bytes of the message
HEAD_BYTES: Final = _HEAD.size
MAX_BODY_BYTES: Final = _HELLO.size + MAX_GPU_HINT_BYTES + MAX_INSTRUCTIONS * _INSTRUCTION.size


class Timing(IntEnum):
    """Where a rank's timestamps come from."""

    HOST = 1
    """CLOCK_MONOTONIC at the call."""
    GPU = 2
    """GPU events, placed on CLOCK_MONOTONIC at the begin of the step; reported one iteration late."""
    FOREIGN = 3
    """A clock given by the caller, such as a simulator's."""
    SYNCHRONISED = 4
    """CLOCK_MONOTONIC at the call, before which the caller waits for the GPU."""


class Message(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    WELCOME = 2
    REFUSAL = 3
    ENGINE_HELLO = 4
    """See ``perseus_proto.engine_hello``."""


class Reason(IntEnum):
    """Why the agent refuses a hello. An unknown number, of a newer agent, is read as OTHER."""

    OTHER = 0
    VERSION = 1
    MALFORMED = 2
    NOT_A_POD = 3
    """The process cannot be traced to a pod."""
    NO_GPU = 4
    """The pod holds no GPU."""
    GPU_NOT_OWNED = 5
    """The hint names a GPU that is not the pod's."""
    GPU_AMBIGUOUS = 6
    """The pod holds several GPUs and the hello does not say which."""
    GPU_SHARED = 7
    """MIG, MPS or time-slicing."""
    GPU_TAKEN = 8
    """Another process drives it."""
    UNKNOWN_NOW = 9
    """The kubelet or /proc does not answer now: try again later."""
    BUSY = 10
    """The agent serves too many processes already."""
    DRAINING = 11


@dataclass(frozen=True)
class Hello:
    """What a process says about itself: its rank, and the schedule of its stage."""

    dp: int
    """Data-parallel rank: which pipeline."""
    stage: int
    tp: int
    """Tensor-parallel rank: which of the processes that share the stage."""
    timing: Timing
    gpu_hint: str
    """UUID of the GPU that the process computes on, or empty. It only chooses among the pod's own GPUs."""
    schedule: tuple[Instruction, ...]
    own_time: bool = False
    """Its last instruction ends before it waits for the same iteration of other pipelines. Otherwise a step that holds
    this wait lasts as long on all of them."""
    joined: tuple[int, ...] = ()
    """Ascending places in the schedule of instructions that run in one action with the next: its parts receive before
    the first of them, and send after the last."""

    def __post_init__(self) -> None:
        for field, value, maximum in (
            ("dp", self.dp, MAX_DP),
            ("stage", self.stage, MAX_STAGE),
            ("tp", self.tp, MAX_TP),
        ):
            _bounded(field, value, maximum)
        if len(self.gpu_hint.encode()) > MAX_GPU_HINT_BYTES or not (
            self.gpu_hint.isascii() and self.gpu_hint.isprintable()
        ):
            raise ChannelError(f"gpu_hint: must be at most {MAX_GPU_HINT_BYTES} printable ASCII characters")
        if not 1 <= len(self.schedule) <= MAX_INSTRUCTIONS:
            raise ChannelError(f"schedule: must have 1 to {MAX_INSTRUCTIONS} instructions, has {len(self.schedule)}")
        for instruction in self.schedule:
            _bounded("schedule.microbatch", instruction.microbatch, MAX_MICROBATCH)
            _bounded("schedule.chunk", instruction.chunk, MAX_CHUNK)
        if len(set(self.schedule)) != len(self.schedule):
            raise ChannelError("schedule: an instruction (kind, microbatch, chunk) occurs twice")
        for place in self.joined[-1:]:
            _bounded("joined", place, len(self.schedule) - 2)
        if any(not 0 <= place < later for place, later in pairwise(self.joined)):
            raise ChannelError("joined: must be ascending places in the schedule")

    @property
    def rank(self) -> RankId:
        """The address of the rank within its job."""
        return RankId(self.dp, self.stage, self.tp)


@dataclass(frozen=True)
class Welcome:
    """The agent accepts the process. The holder of this object owns the descriptors and must close them."""

    instructions: int
    memory_fd: int
    event_fd: int


@dataclass(frozen=True)
class Refusal:
    """The agent refuses the process and closes the connection."""

    reason: Reason
    message: str


def kind_named(kind: str | int) -> InstructionKind:
    """Look up a kind by its lower-case name or its number: ``"forward"`` and 1 are FORWARD.

    Raises:
        ChannelError: no kind has that name or number.
    """
    try:
        return InstructionKind[kind.upper()] if isinstance(kind, str) else InstructionKind(kind)
    except (KeyError, ValueError):
        names = ", ".join(member.name.lower() for member in InstructionKind)
        raise ChannelError(f"kind: {kind!r} is not one of {names}") from None


def make_schedule(instructions: Sequence[tuple[str | int, int, int]]) -> tuple[Instruction, ...]:
    """Convert a schedule as users write it to the form that travels. Bounds are checked by ``Hello``.

    Args:
        instructions: (kind, microbatch, chunk) of each, in the order of execution, such as ``("forward", 0, 0)``.

    Raises:
        ChannelError: an entry is not (kind, microbatch, chunk).
    """
    schedule = []
    for position, entry in enumerate(instructions):
        try:
            kind, microbatch, chunk = entry
        except (TypeError, ValueError):
            raise ChannelError(f"schedule[{position}]: must be (kind, microbatch, chunk), is {entry!r}") from None
        schedule.append(Instruction(kind_named(kind), microbatch, chunk))
    return tuple(schedule)


def encode_hello(hello: Hello) -> bytes:
    """Encode a hello as a whole frame: head and body."""
    hint = hello.gpu_hint.encode()
    flags = _OWN_TIME if hello.own_time else 0
    head = _HELLO.pack(hello.dp, hello.stage, hello.tp, hello.timing, len(hint), flags, len(hello.schedule))
    joined = set(hello.joined)
    body = b"".join(
        _INSTRUCTION.pack(kind, _JOINED if place in joined else 0, chunk, microbatch)
        for place, (kind, microbatch, chunk) in enumerate(hello.schedule)
    )
    return frame(Message.HELLO, head + hint + body)


def encode_refusal(reason: Reason, message: str) -> bytes:
    """Encode a refusal as a whole frame; the message is cut to ``MAX_MESSAGE_BYTES``."""
    text = message.encode()[:MAX_MESSAGE_BYTES]
    return frame(Message.REFUSAL, _REFUSAL.pack(reason, len(text)) + text)


def parse_head(head: bytes) -> tuple[Message, int]:
    """Parse the head of a frame.

    Args:
        head: exactly ``HEAD_BYTES`` bytes.

    Returns:
        The kind of the frame, and the length in bytes of the body that follows.

    Raises:
        VersionMismatch: the sender speaks another version. A refusal is accepted from any version.
        ChannelError: this is not the head of a frame, or the body would be too long.
    """
    if len(head) != HEAD_BYTES:
        raise ChannelError(f"head: must be {HEAD_BYTES} bytes, is {len(head)}")
    magic, version, number, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise ChannelError("head: does not begin with the magic of this protocol")
    if version != PROTOCOL_VERSION and number != Message.REFUSAL:
        raise VersionMismatch(f"version: this side speaks {PROTOCOL_VERSION}, the other {version}")
    if length > MAX_BODY_BYTES:
        raise ChannelError(f"length: must be at most {MAX_BODY_BYTES}, is {length}")
    try:
        return Message(number), length
    except ValueError:
        raise ChannelError(f"kind: {number} is no message of this protocol") from None


def decode_hello(body: bytes) -> Hello:
    """Decode the body of a HELLO frame.

    Raises:
        ChannelError: it breaks a rule.
    """
    if len(body) < _HELLO.size:
        raise ChannelError(f"hello: must be at least {_HELLO.size} bytes, is {len(body)}")
    dp, stage, tp, timing, hint_bytes, flags, count = _HELLO.unpack_from(body)
    if not 1 <= count <= MAX_INSTRUCTIONS:
        raise ChannelError(f"schedule: must have 1 to {MAX_INSTRUCTIONS} instructions, has {count}")
    expected = _HELLO.size + hint_bytes + count * _INSTRUCTION.size
    if len(body) != expected:
        raise ChannelError(f"hello: {count} instructions need {expected} bytes, the body has {len(body)}")
    start = _HELLO.size + hint_bytes
    try:
        hint = body[_HELLO.size : start].decode("ascii")
        origin = Timing(timing)
    except UnicodeDecodeError:
        raise ChannelError("gpu_hint: is not ASCII") from None
    except ValueError:
        raise ChannelError(f"timing: {timing} is not one of {[member.value for member in Timing]}") from None
    rows = list(_INSTRUCTION.iter_unpack(body[start:]))
    schedule = tuple(Instruction(kind_named(kind), microbatch, chunk) for kind, _, chunk, microbatch in rows)
    joined = tuple(place for place, row in enumerate(rows) if row[1] & _JOINED)
    return Hello(dp, stage, tp, origin, hint, schedule, bool(flags & _OWN_TIME), joined)


def decode_refusal(body: bytes) -> Refusal:
    """Decode the body of a REFUSAL frame.

    Raises:
        ChannelError: it breaks a rule.
    """
    if len(body) < _REFUSAL.size:
        raise ChannelError(f"refusal: must be at least {_REFUSAL.size} bytes, is {len(body)}")
    number, length = _REFUSAL.unpack_from(body)
    if length > MAX_MESSAGE_BYTES or len(body) != _REFUSAL.size + length:
        raise ChannelError("refusal.message: its length is not that of the body")
    reason = Reason(number) if number in Reason._value2member_map_ else Reason.OTHER
    return Refusal(reason, body[_REFUSAL.size :].decode(errors="replace"))


def receive_hello(
    connection: socket.socket,
    timeout_s: float,
    sender_pid: int | None = None,
    reserve: Callable[[int], None] = lambda _: None,
) -> Hello:
    """Read one hello of a rank. Arguments and errors are those of ``receive_body``."""
    return decode_hello(receive_body(connection, timeout_s, {Message.HELLO: MAX_BODY_BYTES}, sender_pid, reserve)[1])


def receive_body(
    connection: socket.socket,
    timeout_s: float,
    most_bytes: Mapping[Message, int],
    sender_pid: int | None = None,
    reserve: Callable[[int], None] = lambda _: None,
) -> tuple[Message, bytes]:
    """Read one frame that is a hello; the agent's side.

    Args:
        connection: an accepted connection.
        timeout_s: longest time for the whole hello, seconds.
        most_bytes: the kinds of hellos that are expected, and how long the body of each may be.
        sender_pid: the only process that may have written it; the kernel names the writer on sockets with SO_PASSCRED,
            which connections inherit from their listener. None: any process.
        reserve: called with the number of bytes of the body before any of it is read; what it raises is passed on.

    Raises:
        ForeignSender: another process wrote it.
        ChannelError: the message is not a valid hello.
        OSError: the peer closed the connection, or was too slow (``TimeoutError``).
    """
    deadline_s = time.monotonic() + timeout_s
    message, length = parse_head(receive(connection, HEAD_BYTES, deadline_s, sender_pid=sender_pid))
    if message not in most_bytes:
        raise ChannelError(f"kind: expected a hello, not a {message.name.lower()}")
    if length > most_bytes[message]:
        raise ChannelError(f"length: must be at most {most_bytes[message]}, is {length}")
    reserve(length)
    return message, receive(connection, length, deadline_s, sender_pid=sender_pid)


def send_welcome(connection: socket.socket, instructions: int, memory_fd: int, event_fd: int) -> None:
    """Send the shared memory and the eventfd; the agent's side.

    Args:
        connection: the connection of an accepted hello.
        instructions: for how many instructions the memory is laid out; 0: for an engine.
        memory_fd: descriptor of the memory; the peer gets a duplicate.
        event_fd: descriptor of the eventfd by which the peer wakes the agent.

    Raises:
        OSError: the peer closed the connection, or does not read.
    """
    welcome = frame(Message.WELCOME, _WELCOME.pack(instructions))
    if socket.send_fds(connection, [welcome], [memory_fd, event_fd]) != len(welcome):
        raise TimeoutError("the peer does not read")


def receive_answer(connection: socket.socket, timeout_s: float) -> Welcome | Refusal:
    """Wait for the agent's answer to a hello; the client's side.

    Args:
        connection: the connection on which the hello was sent.
        timeout_s: longest time for the whole answer, seconds.

    Returns:
        A welcome, whose descriptors the caller must close, or a refusal.

    Raises:
        ChannelError: the message is not a valid answer.
        OSError: the agent closed the connection, or was too slow.
    """
    deadline_s = time.monotonic() + timeout_s
    descriptors: list[int] = []
    try:
        message, length = parse_head(receive(connection, HEAD_BYTES, deadline_s, descriptors))
        body = receive(connection, length, deadline_s, descriptors)
        if message is Message.REFUSAL:
            return decode_refusal(body)
        if message is not Message.WELCOME or len(body) != _WELCOME.size:
            raise ChannelError("welcome: not the message that was expected")
        if len(descriptors) != 2:
            raise ChannelError(f"welcome: must carry 2 descriptors, carries {len(descriptors)}")
        welcome = Welcome(_WELCOME.unpack(body)[0], *descriptors)
        descriptors.clear()
        return welcome
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def frame(message: Message, body: bytes) -> bytes:
    """A whole frame: head and body."""
    return _HEAD.pack(_MAGIC, PROTOCOL_VERSION, message, len(body)) + body


def _bounded(field: str, value: int, maximum: int) -> None:
    if type(value) is not int or not 0 <= value <= maximum:
        raise ChannelError(f"{field}: must be an integer between 0 and {maximum}, is {value!r}")
