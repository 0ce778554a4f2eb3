"""Channels to agents: one for each address, shared by calls and streams, and replaced when certificates are renewed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
import grpc.aio

from perseus_operator.clients.agents.selections import SelectionStream
from perseus_operator.clients.credentials import Credentials
from perseus_operator.errors import AgentUnavailable
from perseus_proto.v1alpha1 import agent_pb2_grpc
from perseus_runtime import direct
from perseus_runtime.tls import CallerCredentials

_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 20_000),  # a node that went dark is noticed by the telemetry stream
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    direct.GRPC,
)


class Channel:
    """A channel with its stub, and the number of calls and streams that use it."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_s: float) -> None:
        self.channel = channel
        self.stub: Any = agent_pb2_grpc.AgentStub(channel)
        self.selections = SelectionStream(self.stub.SelectPlans, timeout_s=timeout_s)
        self.uses = 0


class Channels:
    """Of one operator, to all of its agents."""

    def __init__(self, credentials: Credentials | None, *, timeout_s: float) -> None:
        """Connect to nobody yet.

        Args:
            credentials: files for mutual TLS; None: without TLS.
            timeout_s: deadline of a selection.
        """
        self._server_name = credentials.server_name if credentials else ""
        self._files = (
            CallerCredentials(key=credentials.key, cert=credentials.cert, ca=credentials.ca) if credentials else None
        )
        self._credentials: grpc.ChannelCredentials | None = None
        self._timeout_s = timeout_s
        self._present: dict[str, Channel] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}
        """Attempts to connect with renewed certificates; the present channels are used until they succeed."""
        self._retired: dict[str, set[Channel]] = {}
        """Opened with earlier certificates: their streams go on until the agent ends them, then they are closed."""

    @property
    def expired(self) -> str:
        """Which certificate of ours is no longer valid; empty: none that is known."""
        return (self._files.expired or "") if self._files is not None else ""

    @contextlib.asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[Channel]:
        """Return the channel for one call or stream."""
        if self._files is not None and (renewed := self._files.renewed()):
            self._credentials = renewed
            for other in self._present:
                if coming := self._coming.get(other):
                    coming.cancel()
                self._coming[other] = asyncio.create_task(self._switch(other))
        entry = self._present.get(address)
        if entry is None:
            entry = self._present[address] = Channel(self._open(address), timeout_s=self._timeout_s)
        entry.uses += 1
        try:
            yield entry
        finally:
            entry.uses -= 1
            await self._close_unused(address, entry)

    async def forget(self, addresses: Iterable[str]) -> None:
        """Close the channels to these addresses."""
        for address in addresses:
            if coming := self._coming.pop(address, None):
                coming.cancel()
            current = self._present.pop(address, None)
            for entry in (*self._retired.pop(address, ()), *filter(None, (current,))):
                await entry.channel.close()

    async def close(self) -> None:
        """Close all."""
        await self.forget({*self._present, *self._retired})

    async def _switch(self, address: str) -> None:
        """Replace a channel by one with the present certificates, once the agent accepts them: its own may be older."""
        channel = self._open(address)
        try:
            await channel.channel_ready()
        except BaseException:
            await channel.close()
            raise
        entry, self._present[address] = self._present[address], Channel(channel, timeout_s=self._timeout_s)
        self._retired.setdefault(address, set()).add(entry)
        await self._close_unused(address, entry)

    async def _close_unused(self, address: str, entry: Channel) -> None:
        retired = self._retired.get(address, set())
        if entry in retired and not entry.uses:
            retired.remove(entry)
            await entry.channel.close()

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._files is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        if self._credentials is None:
            raise AgentUnavailable("--tls-cert, --tls-key, --tls-ca: the files cannot be read; the log has the reason")
        options = (*_OPTIONS, ("grpc.ssl_target_name_override", self._server_name))
        return grpc.aio.secure_channel(address, self._credentials, options=options)
