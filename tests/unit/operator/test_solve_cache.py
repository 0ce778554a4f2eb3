"""Jobs of the same inputs share one frontier, whatever becomes of the job that made it."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from perseus_operator.errors import SolveTimeout
from perseus_operator.solving import cache as module
from perseus_operator.solving.cache import SolveCache
from perseus_operator.solving.frontier import SolvedFrontier


class Frontier(SimpleNamespace):
    """Stands for ``SolvedFrontier``, which only its digest tells from others here."""


def frontier(digest: str) -> SolvedFrontier:
    return cast(SolvedFrontier, Frontier(view=SimpleNamespace(digest=digest), content=digest))


class Solver:
    """Takes a turn of the event loop, and counts."""

    def __init__(self, result: Any) -> None:
        self.result, self.calls, self.go = result, 0, asyncio.Event()

    async def __call__(self) -> Any:
        self.calls += 1
        await self.go.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


async def test_of_many_jobs_with_the_same_inputs_one_solves() -> None:
    library, solver = SolveCache(), Solver(frontier("d"))
    jobs = [asyncio.create_task(library.solved("d", solver)) for _ in range(50)]
    await asyncio.sleep(0)
    solver.go.set()
    assert {id(found) for found in await asyncio.gather(*jobs)} == {id(solver.result)}
    assert solver.calls == 1


async def test_other_inputs_are_not_waited_for() -> None:
    library, slow, quick = SolveCache(), Solver(frontier("slow")), Solver(frontier("quick"))
    waiting = asyncio.create_task(library.solved("slow", slow))
    await asyncio.sleep(0)
    quick.go.set()
    assert await library.solved("quick", quick) is quick.result
    assert not waiting.done()
    slow.go.set()
    await waiting


async def test_if_the_first_brings_nothing_the_next_tries_itself() -> None:
    library, first, second = SolveCache(), Solver(None), Solver(frontier("d"))
    jobs = [asyncio.create_task(library.solved("d", solver)) for solver in (first, second)]
    await asyncio.sleep(0)
    first.go.set()
    second.go.set()
    assert await asyncio.gather(*jobs) == [None, second.result]


async def test_what_cannot_be_solved_fails_once_for_all_waiting_jobs() -> None:
    library, solver = SolveCache(), Solver(SolveTimeout("stopped after 600 s"))
    jobs = [asyncio.create_task(library.solved("d", solver)) for _ in range(20)]
    await asyncio.sleep(0)
    solver.go.set()
    assert await asyncio.gather(*jobs, return_exceptions=True) == [solver.result] * 20
    assert solver.calls == 1
    with pytest.raises(SolveTimeout):  # but it is not held against who asks later
        await library.solved("d", solver)
    assert solver.calls == 2


async def test_a_job_that_is_deleted_while_it_solves_leaves_the_others_their_turn() -> None:
    library, first, second = SolveCache(), Solver(frontier("d")), Solver(frontier("d"))
    jobs = [asyncio.create_task(library.solved("d", solver)) for solver in (first, second)]
    await asyncio.sleep(0)
    jobs[0].cancel()
    second.go.set()
    assert await jobs[1] is second.result


async def test_a_waiting_job_may_leave_without_disturbing_the_solve() -> None:
    library, solver = SolveCache(), Solver(frontier("d"))
    jobs = [asyncio.create_task(library.solved("d", solver)) for _ in range(3)]
    await asyncio.sleep(0)
    jobs[1].cancel()
    solver.go.set()
    assert await jobs[0] is solver.result
    assert await jobs[2] is solver.result
    assert solver.calls == 1


async def test_a_frontier_goes_with_the_last_job_that_uses_it() -> None:
    library, solver = SolveCache(), Solver(frontier("d"))
    solver.go.set()
    held = await library.solved("d", solver)
    assert await library.solved("d", solver) is held
    assert solver.calls == 1
    del held
    solver.result = frontier("d")
    gc.collect()
    assert await library.solved("d", solver) is solver.result
    assert solver.calls == 2


async def test_a_plan_set_is_encoded_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[frozenset[int]] = []

    def encode(solved: SolvedFrontier, stages: frozenset[int]) -> Any:
        encoded.append(stages)
        return solved.view.digest, stages

    monkeypatch.setattr(module, "encode_plans", encode)
    library, solved, wanted = SolveCache(), frontier("d"), [frozenset({0, 1}), frozenset({2})]
    pushed = await asyncio.gather(*(library.plan_set(solved, wanted[n % 2]) for n in range(40)))
    assert [stages for _, stages in pushed] == wanted * 20
    assert sorted(encoded, key=len) == [frozenset({2}), frozenset({0, 1})]
    assert await library.plan_set(frontier("other"), wanted[0]) == ("other", wanted[0])
    for number in range(200):
        await library.plan_set(frontier(f"more-{number}"), wanted[1])
    before = len(encoded)
    await library.plan_set(solved, wanted[0])
    assert len(encoded) == before + 1, "the oldest are forgotten: memory is bounded"


async def test_a_restored_frontier_never_leaves_its_namespace_nor_its_bytes() -> None:
    cache, own = SolveCache(), frontier("inputs")

    async def restored(namespace: str, data: bytes, found: SolvedFrontier) -> SolvedFrontier | None:
        async def make() -> SolvedFrontier:
            return found

        return await cache.restored(namespace, "inputs", data, make)

    planted = await restored("evil", b"planted", frontier("inputs"))
    assert await restored("evil", b"planted", own) is planted
    assert await restored("honest", b"planted", own) is own
    assert await restored("evil", b"other", own) is own

    async def solve() -> SolvedFrontier:
        return own

    assert await cache.solved("inputs", solve) is own
