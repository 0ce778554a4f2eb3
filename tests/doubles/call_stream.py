"""A streaming call of an operator, as ``grpc.aio`` shows it, over whatever carries its messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import grpc


class Call(Protocol):
    """What carries the messages of one call."""

    async def message(self) -> bytes:
        """Wait for the next; ``StopAsyncIteration`` after the last."""
        ...

    @property
    def ended(self) -> bool:
        """Whether none comes any more."""
        ...

    def more(self, payload: bytes, /) -> None:
        """Send one."""
        ...

    def cancel(self) -> None:
        """Want no more of them."""
        ...


class CallStream:
    """A call that streams, as ``grpc.aio`` shows it."""

    def __init__(self, call: Call, serialise: Callable[[Any], bytes], parse: Callable[[bytes], Any]) -> None:
        self._call, self._serialise, self._parse = call, serialise, parse

    def __aiter__(self) -> CallStream:
        return self

    async def __anext__(self) -> Any:
        return self._parse(await self._call.message())

    async def write(self, message: Any) -> None:
        self._call.more(self._serialise(message))

    async def read(self) -> Any:
        try:
            return self._parse(await self._call.message())
        except StopAsyncIteration:
            return grpc.aio.EOF

    def done(self) -> bool:
        return self._call.ended

    def cancel(self) -> None:
        self._call.cancel()
