"""A wire to light agents that live in another process: one socket in place of a gRPC channel for each agent.

The operator's client of agents stays as it is, down to its stubs: messages are serialised and parsed by the same code.
Only ``Channels._open`` is replaced, so that a machine that cannot bear thousands of TLS connections can feed the
operator what thousands of agents say. What the agents compute is another process's time. Left out are gRPC, TLS, and
deadlines: an agent behind this wire answers.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

import grpc
import grpc.aio
from tests.doubles.call_stream import CallStream

from perseus_operator.clients.agents.channels import Channels
from perseus_operator.clients.agents.client import AgentPool

HEADER: Final = struct.Struct("<IBBII")
"""Length of the payload, kind of frame, method, node, call."""
METHODS: Final = (
    "DescribeNode",
    "AcquireLease",
    "RenewLease",
    "ReleaseLease",
    "PushPlanSet",
    "SelectPlan",
    "WatchTelemetry",
    "SelectPlans",
)


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 0
    """To the agents: begins a call."""
    MORE = 1
    """To the agents: a message of a stream that they answer."""
    CANCEL = 2
    MESSAGE = 3
    """To the operator: an answer, or one message of a stream."""
    END = 4
    FAULT = 5
    """To the operator: JSON of code, details and trailing metadata."""
    CONTROL = 6
    """Between benchmark and fleet, both ways: JSON."""


def address_of(node: int) -> str:
    """What the operator takes for the agent's host:port."""
    return f"node-{node}:1"


def frame(kind: Kind, method: int, node: int, call: int, payload: bytes) -> bytes:
    """Encode a frame."""
    return HEADER.pack(len(payload), kind, method, node, call) + payload


class Frames(asyncio.Protocol):
    """Splits what arrives into frames: (kind, method, node, call, payload)."""

    def __init__(self, received: Callable[[int, int, int, int, bytes], None]) -> None:
        self._received = received
        self._rest = b""
        self._transport: Any = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def send(self, data: bytes) -> None:
        """Send encoded frames."""
        self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._rest = self._rest + data if self._rest else data
        whole, start = self._rest, 0
        while len(whole) - start >= HEADER.size:
            length, kind, method, node, call = HEADER.unpack_from(whole, start)
            end = start + HEADER.size + length
            if end > len(whole):
                break
            self._received(kind, method, node, call, whole[start + HEADER.size : end])
            start = end
        self._rest = whole[start:]


class Wire:
    """The operator's end."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        """By method: messages that the operator sent."""
        self.messages: Counter[str] = Counter()
        """By method: messages that it received."""
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._cpu: deque[tuple[float, float]] = deque(maxlen=100_000)
        """Now and then: monotonic seconds, and seconds of CPU of this process by then."""
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._answers: deque[asyncio.Future[Any]] = deque()
        self._frames = Frames(self._received)

    async def connect(self, end: socket.socket) -> None:
        """Begin to use a socket."""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        await asyncio.get_running_loop().create_connection(lambda: self._frames, sock=end)

    async def control(self, **question: Any) -> Any:
        """Ask the fleet's process for something that no operator asks for."""
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._frames.send(frame(Kind.CONTROL, 0, 0, 0, json.dumps(question).encode()))
        return await answer

    def cpu_s(self, begun_s: float, ended_s: float) -> float:
        """Return the seconds of CPU that this process used between two times (monotonic), from message to message."""
        during = [cpu_s for at_s, cpu_s in self._cpu if begun_s <= at_s <= ended_s + 0.01]
        return during[-1] - during[0] if during else 0.0

    def begin(self, method: int, node: int, payload: bytes | None) -> _Call:
        """Begin a call; without a payload its messages are yet to come."""
        call = _Call(self, next(self._numbers), method, node)
        self._calls[call.number] = call
        if payload is not None:
            self.send(Kind.REQUEST, call, payload)
        return call

    def send(self, kind: Kind, call: _Call, payload: bytes = b"") -> None:
        """Send a message of a call."""
        if kind is not Kind.CANCEL:
            name = METHODS[call.method]
            self.requests[name] += 1
            self.sent_bytes[name] += len(payload)
        self._frames.send(frame(kind, call.method, call.node, call.number, payload))

    def end(self, call: _Call) -> None:
        """Forget a call."""
        self._calls.pop(call.number, None)

    def _received(self, kind: int, method: int, node: int, number: int, payload: bytes) -> None:
        if kind == Kind.CONTROL:
            self._answers.popleft().set_result(json.loads(payload))
            return
        name = METHODS[method]
        now_s = time.monotonic()
        if not self._cpu or now_s > self._cpu[-1][0] + 0.001:
            self._cpu.append((now_s, time.process_time()))
        self.messages[name] += 1
        self.received_bytes[name] += len(payload)
        call = self._calls.get(number)
        if call is not None:
            call.received(kind, payload)


class _Call:
    """One call: its messages wait until they are read."""

    def __init__(self, wire: Wire, number: int, method: int, node: int) -> None:
        self.number, self.method, self.node = number, method, node
        self._wire = wire
        self._arrived: deque[bytes] = deque()
        self._ended: grpc.aio.AioRpcError | StopAsyncIteration | None = None
        self._reader: asyncio.Future[None] | None = None

    def received(self, kind: int, payload: bytes) -> None:
        if kind == Kind.MESSAGE:
            self._arrived.append(payload)
        elif kind == Kind.END:
            self._ended = StopAsyncIteration()
        else:
            code, details, metadata = json.loads(payload)
            trailing = grpc.aio.Metadata(*(tuple(pair) for pair in metadata))
            self._ended = grpc.aio.AioRpcError(grpc.StatusCode[code], grpc.aio.Metadata(), trailing, details)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def message(self) -> bytes:
        """Return the next message. Raises AioRpcError, or StopAsyncIteration at the end."""
        while not self._arrived:
            if self._ended is not None:
                raise self._ended
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._arrived.popleft()

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def more(self, payload: bytes) -> None:
        self._wire.send(Kind.MORE, self, payload)

    def cancel(self) -> None:
        self._wire.send(Kind.CANCEL, self)
        self._wire.end(self)


class _Channel:
    """In place of ``grpc.aio.Channel``, as far as stubs and ``AgentPool`` use it."""

    def __init__(self, wire: Wire, node: int) -> None:
        self._wire, self._node = wire, node

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        method, wire, node = _method(path), self._wire, self._node

        async def call(request: Any, timeout: float | None = None) -> Any:
            begun = wire.begin(method, node, request_serializer(request))
            try:
                return response_deserializer(await begun.message())
            finally:
                wire.end(begun)

        return call

    def unary_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        method = _method(path)

        def call(request: Any) -> CallStream:
            begun = self._wire.begin(method, self._node, request_serializer(request))
            return CallStream(begun, request_serializer, response_deserializer)

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Any]:
        method = _method(path)
        return lambda: CallStream(self._wire.begin(method, self._node, None), request_serializer, response_deserializer)

    async def close(self) -> None:
        """Nothing is open."""


class WiredPool(AgentPool):
    """The operator's client of agents, on the wire."""

    def __init__(self, wire: Wire, *, timeout_s: float = 3.0) -> None:
        super().__init__(None, timeout_s=timeout_s)
        self._channels = _WiredChannels(wire, timeout_s=timeout_s)


class _WiredChannels(Channels):
    def __init__(self, wire: Wire, *, timeout_s: float) -> None:
        super().__init__(None, timeout_s=timeout_s)
        self._wire = wire

    def _open(self, address: str) -> Any:
        return _Channel(self._wire, int(address.removeprefix("node-").removesuffix(":1")))


def _method(path: str) -> int:
    return METHODS.index(path.rpartition("/")[2])


def names(nodes: int) -> Iterator[str]:
    """Names of the nodes, in the order of their numbers."""
    return (f"node-{node}" for node in range(nodes))
