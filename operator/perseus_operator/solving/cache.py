"""What jobs with the same inputs share: a frontier is solved once, and a plan set encoded once, for all.

Frontiers that this operator solved are found by the digest of everything that they were solved from, and live for as
long as a job uses them. One that was stored in a ConfigMap is shared only within its namespace, and only by jobs that
stored the same bytes. Of plan sets the latest are kept, each under the content of its frontier.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, MutableMapping
from typing import Any, Final, TypeVar, cast
from weakref import WeakValueDictionary

from perseus_operator.solving.frontier import SolvedFrontier, encode_plans
from perseus_proto.v1alpha1 import agent_pb2

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_MAX_PLAN_SETS: Final = 128
"""All nodes of all jobs need the same bytes for the same stages of the same frontier."""


class SolveCache:
    """Shared by all jobs; used on one event loop."""

    def __init__(self) -> None:
        self._solved: WeakValueDictionary[str, SolvedFrontier] = WeakValueDictionary()
        self._restored: WeakValueDictionary[str, SolvedFrontier] = WeakValueDictionary()
        self._plan_sets: OrderedDict[tuple[str, frozenset[int]], agent_pb2.PlanSet] = OrderedDict()
        self._making: dict[object, asyncio.Future[Any]] = {}

    def known(self, digest: str) -> SolvedFrontier | None:
        """The frontier of these inputs that another job uses; None: none does."""
        return self._solved.get(digest)

    async def solved(self, digest: str, make: Callable[[], Awaitable[SolvedFrontier | None]]) -> SolvedFrontier | None:
        """The frontier of these inputs: another job's, or what ``make`` returns.

        Jobs that ask meanwhile wait and get the same outcome, also a failure: the inputs are the same. Only if ``make``
        returns None, or is cancelled with its job, does the next one call its own.
        """
        return await self._shared(digest, self._solved, digest, make)

    async def restored(
        self, namespace: str, digest: str, data: bytes, make: Callable[[], Awaitable[SolvedFrontier | None]]
    ) -> SolvedFrontier | None:
        """The frontier of these stored bytes, as ``make`` verifies it; of another job of this namespace if it stored
        the same.
        """
        key = f"{namespace}/{digest}/{hashlib.sha256(data).hexdigest()}"
        return await self._shared(key, self._restored, key, make)

    async def plan_set(self, solved: SolvedFrontier, stages: frozenset[int]) -> agent_pb2.PlanSet:
        """The plan set of these stages; see ``encode_plans``."""
        key = solved.content, stages
        plans = await self._shared(key, self._plan_sets, key, lambda: asyncio.to_thread(encode_plans, solved, stages))
        assert plans is not None
        while len(self._plan_sets) > _MAX_PLAN_SETS:
            self._plan_sets.popitem(last=False)
        return plans

    async def _shared(
        self, name: object, kept: MutableMapping[K, T], key: K, make: Callable[[], Awaitable[T | None]]
    ) -> T | None:
        while (value := kept.get(key)) is None and (other := self._making.get(name)) is not None:
            await asyncio.wait([other])
            if not other.cancelled() and other.result() is not None:
                return cast(T, other.result())
        if value is not None:
            return value
        making = self._making[name] = asyncio.get_running_loop().create_future()
        try:
            value = await make()
            if value is not None:
                kept[key] = value
            making.set_result(value)
        except Exception as error:
            making.set_exception(error)
            making.exception()  # nobody has to wait for it
            raise
        finally:
            making.cancel()
            del self._making[name]
        return value
