"""What jobs of the same inputs share: a frontier is solved or read back once, and a plan set encoded once, for all.

One ``Library`` for all runners, in ``Services``. Frontiers are found by the digest of everything they were solved from,
and live for as long as some job uses them; of plan sets the latest are kept. What makes them is the caller's: nothing
here solves, waits for a slot, or knows the cluster.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, MutableMapping
from typing import Any, Final, TypeVar, cast
from weakref import WeakValueDictionary

from perseus_operator.solving.frontier import Solved, encode_plans
from perseus_proto.v1alpha1 import agent_pb2

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_PLAN_SETS: Final = 128
"""Kept at hand: of the same stages of the same frontier, all nodes of all jobs want the same bytes."""


class Library:
    """Shared by all jobs; used on one event loop."""

    def __init__(self) -> None:
        self._solved: WeakValueDictionary[str, Solved] = WeakValueDictionary()
        self._plan_sets: OrderedDict[tuple[str, frozenset[int]], agent_pb2.PlanSet] = OrderedDict()
        self._making: dict[object, asyncio.Future[Any]] = {}

    async def solved(self, digest: str, make: Callable[[], Awaitable[Solved | None]]) -> Solved | None:
        """The frontier of these inputs: another job's, or what ``make`` brings.

        Jobs that ask meanwhile wait, and get the same, a refusal too: the inputs are the same. Only if ``make`` brings
        nothing, or its job goes, does the next one call its own.
        """
        return await self._shared(digest, self._solved, digest, make)

    async def plan_set(self, solved: Solved, stages: frozenset[int]) -> agent_pb2.PlanSet:
        """See ``encode_plans``."""
        key = solved.view.digest, stages
        found = await self._shared(key, self._plan_sets, key, lambda: asyncio.to_thread(encode_plans, solved, stages))
        assert found is not None
        while len(self._plan_sets) > _PLAN_SETS:
            self._plan_sets.popitem(last=False)
        return found

    async def _shared(
        self, name: object, kept: MutableMapping[K, T], key: K, make: Callable[[], Awaitable[T | None]]
    ) -> T | None:
        while (found := kept.get(key)) is None and (other := self._making.get(name)) is not None:
            await asyncio.wait([other])
            if not other.cancelled() and other.result() is not None:
                return cast(T, other.result())
        if found is not None:
            return found
        made = self._making[name] = asyncio.get_running_loop().create_future()
        try:
            found = await make()
            if found is not None:
                kept[key] = found
            made.set_result(found)
        except Exception as error:
            made.set_exception(error)
            made.exception()  # nobody has to wait for it
            raise
        finally:
            made.cancel()
            del self._making[name]
        return found
