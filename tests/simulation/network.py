"""The network between operators and agents, in place of gRPC's channels; stubs, messages and services are real.

A message is late by what the seed says, so those of different calls overtake each other. It may be lost, then its call
ends with its deadline; it may be delivered twice. A link that is cut delivers nothing, and its streams break when the
keepalive notices, as do those of which nobody has heard.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from tests.doubles.call_stream import CallStream
from tests.simulation.node import SimulatedNode
from tests.simulation.scheduler import Process, Scheduler, Waiter

from perseus_operator.clients.agents.channels import Channels
from perseus_operator.clients.agents.client import AgentPool
from perseus_proto.v1alpha1 import agent_pb2 as pb

KEEPALIVE_S: Final = 10.0
HELD_S: Final = (1.5, 6.0)
"""An operator asks again after a second and a half."""
MOST_BYTES: Final = 16_384
"""Of a message: of jobs of four ranks, whatever these write, and of one engine on a node."""
OPERATOR: Final = "perseus-operator"
"""The name in an operator's certificate."""
REQUESTS: Final = {
    "DescribeNode": pb.DescribeNodeRequest,
    "AcquireLease": pb.AcquireLeaseRequest,
    "RenewLease": pb.RenewLeaseRequest,
    "ReleaseLease": pb.ReleaseLeaseRequest,
    "PushPlanSet": pb.PushPlanSetRequest,
    "SelectPlan": pb.SelectPlanRequest,
    "SelectPlans": pb.SelectPlanRequest,
    "OrderEngines": pb.OrderEnginesRequest,
    "WatchTelemetry": pb.WatchTelemetryRequest,
}


@dataclass
class Link:
    """Between one operator and one node."""

    cut: bool = False
    lost: float = 0.0
    """Of messages, a share."""
    doubled: float = 0.0
    slow: float = 1.0
    held: float = 0.0
    """Of messages, a share that is seconds late: what is asked again comes first."""


class Aborted(Exception):
    """What a service's context raises: code, details and trailing metadata."""


class _Context:
    """Of one call, as a service sees it."""

    def __init__(self, caller: str = OPERATOR) -> None:
        self.active = True
        self._caller = caller
        self._metadata: tuple[tuple[str, str], ...] = ()

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details, self._metadata)

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_subject_alternative_name": [self._caller.encode()]}

    def is_active(self) -> bool:
        return self.active


class Network:
    """All links, and what the services were asked."""

    def __init__(self, scheduler: Scheduler, nodes: dict[str, SimulatedNode]) -> None:
        self.scheduler = scheduler
        self.nodes = nodes
        self.links: dict[tuple[str, str], Link] = {}
        self.largest: dict[str, int] = {}
        """Bytes of the longest message, by method."""
        self.answered: Callable[[str, SimulatedNode, str, Any], None] = lambda *_: None
        """Called with operator, node, method and request when a command has been accepted."""

    def link(self, operator: str, node: str) -> Link:
        """Between these two."""
        return self.links.setdefault((operator, node), Link())

    def weigh(self, method: str, data: bytes) -> bytes:
        """Return a message as it is. Promise 10: none is longer than what it has to say."""
        if len(data) > self.largest.get(method, 0):
            self.largest[method] = len(data)
            if len(data) > MOST_BYTES:
                self.scheduler.fail(f"promise 10: a message of {method} has {len(data):,} bytes")
        return data

    def send(self, link: Link, deliver: Callable[[], None]) -> None:
        """Deliver a message, sooner or later, once or not."""
        draw = self.scheduler.random
        if link.cut or draw.random() < link.lost:
            return
        for _ in range(2 if draw.random() < link.doubled else 1):
            delay_s = draw.uniform(0.0002, 0.002) if draw.random() < 0.97 else draw.uniform(0.002, 0.2)
            held_s = draw.uniform(*HELD_S) if link.held and draw.random() < link.held else 0.0
            self.scheduler.after(delay_s * link.slow + held_s, deliver)

    def call_as_stranger(self, node: SimulatedNode, method: str, request: Any) -> None:
        """Have somebody with another name in his certificate call an agent: promise 8 says that nobody listens."""
        agent = node.agent
        if agent is None or agent.service is None or not agent.process.alive:
            return
        service, context = agent.service, _Context("tenant")

        def serve() -> None:
            try:
                answer = getattr(service, method)(iter([request]) if method == "SelectPlans" else request, context)
                if method in ("SelectPlans", "WatchTelemetry"):
                    next(answer, None)
                self.scheduler.fail(f"promise 8: {node.name} obeyed {method} of a stranger")
            except Aborted as aborted:
                if aborted.args[0] is not grpc.StatusCode.PERMISSION_DENIED:
                    self.scheduler.fail(f"promise 8: {node.name} answered {method} of a stranger: {aborted.args[1]}")

        self.scheduler.spawn(agent.process, method, serve)


class _Call:
    """One call of an operator."""

    def __init__(self, network: Network, operator: Process, node: str, method: str, request: bytes | None) -> None:
        self.network, self.operator, self.node, self.method = network, operator, network.nodes[node], method
        self.link = network.link(operator.name, node)
        self.context = _Context()
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[bytes] = deque()
        self._ended: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._more: deque[bytes] = deque()
        self._asking: Waiter | None = None
        self._heard_ns = network.scheduler.now_ns
        self._server: Process | None = None
        self._last: Any = None
        if request is not None:
            network.weigh(method, request)
            network.send(self.link, lambda: self._begin(request))
        else:
            network.send(self.link, lambda: self._begin(b""))
        if method in ("WatchTelemetry", "SelectPlans"):
            self._watch()

    # ------------------------------------------------------------------------------------- the operator's end

    async def message(self) -> bytes:
        """The next message. Raises AioRpcError, or StopAsyncIteration at the end."""
        while not self._arrived:
            if self._ended is not None:
                raise self._ended
            self._reader = self._loop.create_future()
            await self._reader
        return self._arrived.popleft()

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def more(self, payload: bytes) -> None:
        self.network.weigh(self.method, payload)

        def deliver() -> None:
            self._more.append(payload)
            if self._asking is not None:
                self.network.scheduler.wake(self._asking)
                self._asking = None

        if self.link.cut:
            return  # TCP sends it again when the link is back; by then the deadline is over
        self.network.scheduler.after(self.network.scheduler.random.uniform(0.0002, 0.003), deliver)

    def cancel(self) -> None:
        self._end(asyncio.CancelledError())
        self.context.active = False
        if self._asking is not None:
            self.network.scheduler.wake(self._asking)
            self._asking = None

    def fail(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        """End with an error."""
        self._end(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata), details))

    def _end(self, error: Exception | asyncio.CancelledError) -> None:
        if self._ended is None and self.operator.alive:
            self._ended = error  # type: ignore[assignment]
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done() and self.operator.alive:
            reader = self._reader
            self._loop.call_soon(lambda: None if reader.done() else reader.set_result(None))

    def _arrive(self, payload: bytes) -> None:
        self._heard_ns = self.network.scheduler.now_ns
        if self._ended is None and self.operator.alive:
            self._arrived.append(payload)
            self._wake()

    def _watch(self) -> None:
        """gRPC's keepalive, and TCP's resets: a stream to what is not there any more breaks."""
        if self._ended is not None or not self.operator.alive:
            self.context.active = False
            return
        scheduler = self.network.scheduler
        silent_s = (scheduler.now_ns - self._heard_ns) / 1e9
        if self._server is not None and not self._server.alive and not self.link.cut:
            self.fail(grpc.StatusCode.UNAVAILABLE, "connection reset")
        elif silent_s > KEEPALIVE_S and (self._server is None or self.link.cut or not self.node.up):
            self.fail(grpc.StatusCode.UNAVAILABLE, "keepalive timed out")
        else:
            scheduler.after(0.25, self._watch)

    # ------------------------------------------------------------------------------------- the agent's end

    def _begin(self, request: bytes) -> None:
        scheduler, agent = self.network.scheduler, self.node.agent
        if not self.node.up:
            return  # nobody answers
        if agent is None or agent.service is None or not agent.process.alive:
            refused = "connection refused"
            self.network.send(self.link, lambda: self.fail(grpc.StatusCode.UNAVAILABLE, refused))
            return
        self._server, service = agent.process, agent.service
        scheduler.spawn(agent.process, self.method, lambda: self._serve(service, request))

    def _serve(self, service: Any, request: bytes) -> None:
        """A thread of the agent's gRPC server."""
        network, method = self.network, getattr(service, self.method)
        try:
            if self.method == "SelectPlans":
                for answer in method(self._requests(), self.context):
                    network.answered(self.operator.name, self.node, self.method, self._last)
                    self._stream(answer.SerializeToString())
            elif self.method == "WatchTelemetry":
                for answer in method(REQUESTS[self.method].FromString(request), self.context):
                    self._stream(answer.SerializeToString())
                self._in_order(lambda: self._end(StopAsyncIteration()))
            else:
                asked = REQUESTS[self.method].FromString(request)
                data = network.weigh(self.method, method(asked, self.context).SerializeToString())
                network.answered(self.operator.name, self.node, self.method, asked)
                network.send(self.link, lambda: self._arrive(data))
        except Aborted as aborted:
            code, details, metadata = aborted.args
            network.send(self.link, lambda: self.fail(code, details, metadata))
        except Exception as error:  # noqa: BLE001
            network.scheduler.fail(f"{self.node.name}: {self.method} raised {type(error).__name__}: {error}")

    def _requests(self) -> Iterator[Any]:
        scheduler = self.network.scheduler
        while self.context.active:
            while self._more:
                self._last = REQUESTS[self.method].FromString(self._more.popleft())
                yield self._last
            self._asking = scheduler.waiter()
            scheduler.wait(self._asking, 1.0)

    def _stream(self, data: bytes) -> None:
        self.network.weigh(self.method, data)
        self._in_order(lambda: self._arrive(data))

    def _in_order(self, deliver: Callable[[], None]) -> None:
        """Of one stream: TCP keeps the order, and waits while the link is cut."""
        scheduler = self.network.scheduler
        while self.link.cut and self.context.active:
            scheduler.pause(0.1)
        scheduler.pause(scheduler.random.uniform(0.0001, 0.002) * self.link.slow)
        deliver()


class _Channel:
    """In place of ``grpc.aio.Channel``, as far as stubs and ``AgentPool`` use it."""

    def __init__(self, network: Network, operator: Process, node: str) -> None:
        self._begin = lambda path, request: _Call(network, operator, node, path.rpartition("/")[2], request)

    def unary_unary(self, path: str, serialise: Any = None, parse: Any = None, **named: Any) -> Callable[..., Any]:
        serialise, parse = _codecs(serialise, parse, named)

        async def call(request: Any, timeout: float | None = None) -> Any:
            begun = self._begin(path, serialise(request))
            try:
                async with asyncio.timeout(timeout):
                    return parse(await begun.message())
            except TimeoutError:
                begun.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded")
                return parse(await begun.message())

        return call

    def unary_stream(self, path: str, serialise: Any = None, parse: Any = None, **named: Any) -> Callable[..., Any]:
        serialise, parse = _codecs(serialise, parse, named)
        return lambda request: CallStream(self._begin(path, serialise(request)), serialise, parse)

    def stream_stream(self, path: str, serialise: Any = None, parse: Any = None, **named: Any) -> Callable[..., Any]:
        serialise, parse = _codecs(serialise, parse, named)
        return lambda: CallStream(self._begin(path, None), serialise, parse)

    async def close(self) -> None:
        """Nothing is open."""


def _codecs(serialise: Any, parse: Any, named: dict[str, Any]) -> tuple[Any, Any]:
    return named.get("request_serializer", serialise), named.get("response_deserializer", parse)


class _Channels(Channels):
    def __init__(self, network: Network, operator: Process, *, timeout_s: float) -> None:
        super().__init__(None, timeout_s=timeout_s)
        self._network, self._operator = network, operator

    def _open(self, address: str) -> Any:
        return _Channel(self._network, self._operator, address.partition(":")[0])


class SimulatedPool(AgentPool):
    """The operator's client of agents, on this network."""

    def __init__(self, network: Network, operator: Process, *, timeout_s: float) -> None:
        super().__init__(None, timeout_s=timeout_s)
        self._channels = _Channels(network, operator, timeout_s=timeout_s)
