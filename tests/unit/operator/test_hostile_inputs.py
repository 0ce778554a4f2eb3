"""What a tenant may write costs the operator bounded memory and time, and never reaches another tenant."""

from __future__ import annotations

import asyncio
import lzma
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.conftest import spec_of

from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import MAX_CELLS, MAX_PLACES
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import InvalidProfile, InvalidSchedule, InvalidSpec, SolveFailed, SolveTimeout
from perseus_operator.families.training.work.profiler import _parse_sweep
from perseus_operator.families.training.work.schedule_source import check_schedule
from perseus_operator.solving.memory import worker_memory_mib
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.request import SolveRequest, parse_profile, problem_of
from perseus_operator.solving.slots import FairSlots
from perseus_operator.solving.verification import verified
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv
from perseus_solver.errors import SolverError
from perseus_solver.model.result import Frontier, InvalidFrontier

REQUEST = SolveRequest(
    profile_csv(2), "1f1b", stages=2, microbatches=3, chunks=None, blocking_power_mw=83_640, points=10
)
BOMB_BYTES = 400 << 20


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return Frontier.from_bytes(solve_in_process(REQUEST))


def peak_bytes(action: object) -> int:
    tracemalloc.start()
    try:
        action()  # type: ignore[operator]
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_frontier_that_unpacks_to_much_is_refused_after_what_its_inputs_allow() -> None:
    packer = lzma.LZMACompressor(preset=1)
    chunk = bytes(8 << 20)
    bomb = b"PRSFRNT\x01" + b"".join(packer.compress(chunk) for _ in range(BOMB_BYTES >> 23)) + packer.flush()

    def read() -> None:
        with pytest.raises(InvalidFrontier, match="unpacks to more"):
            Frontier.from_bytes(bomb, max_cells=1 << 20)

    assert peak_bytes(read) < 64 << 20


def test_a_sweep_that_unpacks_to_much_is_no_sweep() -> None:
    packer = zlib.compressobj(9)
    chunk = bytes(8 << 20)
    bomb = b"".join(packer.compress(chunk) for _ in range(BOMB_BYTES >> 23)) + packer.flush()
    assert peak_bytes(lambda: _parse_sweep(bomb)) < 100 << 20
    assert _parse_sweep(bomb) is None


@given(st.binary(max_size=2_000))
def test_bytes_that_are_no_frontier_are_refused_whatever_they_are(data: bytes) -> None:
    for body in (data, lzma.compress(data)):
        with pytest.raises(InvalidFrontier):
            Frontier.from_bytes(b"PRSFRNT\x01" + body)


def test_a_frontier_of_these_inputs_is_verified_unchanged(frontier: Frontier) -> None:
    found = verified(frontier, problem_of(REQUEST))
    assert np.array_equal(found.frequencies_mhz, frontier.frequencies_mhz)
    assert np.allclose(found.time_s, frontier.time_s)


def test_a_planted_frontier_is_refused_whatever_was_changed(frontier: Frontier) -> None:
    problem = problem_of(REQUEST)
    slowest = np.where(frontier.frequencies_mhz > 0, frontier.frequencies_mhz.min(), 0).astype(np.uint16)
    for planted in (
        replace(frontier, frequencies_mhz=slowest),  # its times are those of faster clocks
        replace(frontier, frequencies_mhz=np.full_like(frontier.frequencies_mhz, 211)),  # no such clock
        replace(frontier, frequencies_mhz=frontier.frequencies_mhz[:, :-1]),
        replace(frontier, time_s=frontier.time_s * 0.9),
        replace(frontier, energy_j=frontier.energy_j * 0.5),
        replace(frontier, energy_lower_bound_j=frontier.energy_lower_bound_j * np.nan),
        replace(frontier, stage_offset=frontier.stage_offset[::-1]),
        replace(frontier, blocking_power_w=frontier.blocking_power_w + 1),
        replace(frontier, clock_changes=frontier.clock_changes[:0]),
        frontier.select(range(len(frontier) // 2, len(frontier))),  # consistent, and half as fast as could be
        frontier.select(range(1, len(frontier))),
        replace(frontier.select([0, 0, *range(1, len(frontier))])),
    ):
        with pytest.raises(SolverError):
            verified(planted, problem)


async def test_a_stored_frontier_is_verified_in_a_worker_process(frontier: Frontier) -> None:
    pool = SolverPool(workers=1, timeout_s=60, memory_mib=8192)
    restored = Frontier.from_bytes(await pool.restore(REQUEST, frontier.to_bytes(), "tenant"))
    assert np.array_equal(restored.frequencies_mhz, frontier.frequencies_mhz)
    with pytest.raises(SolveFailed, match="another time"):
        await pool.restore(REQUEST, replace(frontier, time_s=frontier.time_s * 2).to_bytes(), "tenant")


async def test_inputs_that_took_too_long_are_not_tried_again() -> None:
    pool = SolverPool(workers=1, timeout_s=0.01, memory_mib=8192)
    for _ in range(5):
        with pytest.raises(SolveTimeout):
            await pool.solve(REQUEST)
    assert pool.solves == 1
    with pytest.raises(SolveTimeout):
        await pool.solve(replace(REQUEST, points=REQUEST.points + 1))
    assert pool.solves == 2


@given(st.integers(1, 4), st.lists(st.sampled_from(["evil", "honest", "other"]), max_size=40))
async def test_a_namespace_waits_for_no_more_than_one_turn_of_each_other(slots: int, asked: list[str]) -> None:
    turns, order, go = FairSlots(slots), list[str](), asyncio.Event()
    running = 0

    async def work(namespace: str) -> None:
        nonlocal running
        async with turns.turn(namespace):
            running += 1
            assert running <= slots
            order.append(namespace)
            await go.wait()
            await asyncio.sleep(0)
            running -= 1

    async with asyncio.TaskGroup() as group:
        for namespace in asked:
            group.create_task(work(namespace))
        await asyncio.sleep(0)
        go.set()
    assert sorted(order) == sorted(asked)
    waiting = asked[slots:]
    for namespace in set(waiting):
        first = order[slots:].index(namespace)
        assert first < len(set(waiting))


@given(st.integers(2, 4), st.lists(st.sampled_from(["honest", "other"]), min_size=1, max_size=6))
async def test_who_has_none_goes_on_beside_one_that_has_all(slots: int, asked: list[str]) -> None:
    turns, running, go = FairSlots(slots, spare=1), list[str](), asyncio.Event()

    async def work(namespace: str) -> None:
        async with turns.turn(namespace):
            running.append(namespace)
            await go.wait()

    async with asyncio.TaskGroup() as group:
        for namespace in ["evil"] * 10 + asked:
            group.create_task(work(namespace))
        for _ in range(3):
            await asyncio.sleep(0)
        assert running == ["evil"] * slots + asked[:1], "one more, and no more than one"
        go.set()
    assert sorted(running) == sorted(["evil"] * 10 + asked)


@given(st.integers(1, 4))
async def test_no_spare_slot_is_for_namespaces_that_have_one_each(slots: int) -> None:
    turns, running, go = FairSlots(slots, spare=1), list[str](), asyncio.Event()

    async def work(namespace: str) -> None:
        async with turns.turn(namespace):
            running.append(namespace)
            await go.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(slots + 3):
            group.create_task(work(f"namespace-{number}"))
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(running) == slots
        go.set()


async def test_turns_are_kept_when_those_who_wait_give_up() -> None:
    turns = FairSlots(1)
    async with turns.turn("a"):
        waiting = [asyncio.create_task(turns.turn("b").__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(60), turns.turn("c"):
        pass


@given(st.integers(1, 8), st.integers(2_048, 1 << 20), st.integers(512, 1 << 20))
def test_all_workers_together_fit_into_the_container(processes: int, limit_mib: int, wanted_mib: int) -> None:
    each = worker_memory_mib(wanted_mib, processes=processes, limit_mib=limit_mib)
    assert each <= wanted_mib
    assert processes * each <= limit_mib or each == 512


PROFILE = {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 1}


@given(st.integers(1, 1024), st.integers(1, 65536), st.integers(1, 1024), st.integers(1, 65536))
def test_what_a_job_has_is_counted_before_anything_is_listed(stages: int, dp: int, tp: int, microbatches: int) -> None:
    pipeline = {"stages": stages, "dataParallel": dp, "tensorParallel": tp, "microbatches": microbatches}
    fits = stages * dp * tp <= MAX_PLACES and stages * microbatches <= MAX_CELLS
    spec = {"pipeline": {**pipeline, "schedule": "FromRanks"}, "profile": PROFILE}
    if fits:
        parse_spec(JobSpec, spec)
    else:
        with pytest.raises(InvalidSpec, match="multiply to at most"):
            parse_spec(JobSpec, spec)


def test_an_error_in_a_profile_quotes_little_of_it() -> None:
    secret = "password " * 10_000
    for csv in (secret, f"stage,instruction,frequency,time,energy\n0,{secret},1,1,1\n"):
        with pytest.raises(InvalidProfile) as refused:
            parse_profile(csv.encode(), 1)
        assert len(str(refused.value)) <= 203


SECRET = "hunter2-of-another-team"


@pytest.mark.parametrize(
    "csv",
    [
        f"stage,instruction,frequency,time,energy\n0,{SECRET},1410,0.1,10\n",
        f"stage,instruction,frequency,time,energy\n0,forward,1410,{SECRET},10\n",
        f"stage,instruction,frequency,time,energy\n{SECRET},forward,1410,0.1,10\n",
        f"{SECRET}\n{SECRET}\n",
        f'"{SECRET}\n',
        "stage,instruction,frequency,time,energy\n0,forward,-31337,0.1,10\n",
    ],
)
def test_a_profile_s_error_quotes_nothing_of_the_config_map(csv: str) -> None:
    """Whoever may write a PerseusJob names any ConfigMap, and reads the condition."""
    with pytest.raises(InvalidProfile) as refused:
        parse_profile(csv.encode(), 1)
    assert SECRET not in str(refused.value)
    assert "31337" not in str(refused.value)
    assert "profile" in str(refused.value)


def test_a_schedule_s_error_quotes_nothing_of_the_config_map() -> None:
    pipeline = spec_of().pipeline
    with pytest.raises(InvalidSchedule) as refused:
        check_schedule(f"0F0,{SECRET}\n", pipeline)
    assert SECRET not in str(refused.value)
    assert "row 1, cell 2" in str(refused.value)


async def test_the_worker_s_error_quotes_nothing_either() -> None:
    request = SolveRequest(
        f"stage,instruction,frequency,time,energy\n0,{SECRET},1410,0.1,10\n",
        "1f1b",
        stages=1,
        microbatches=1,
        chunks=None,
        blocking_power_mw=0,
        points=3,
    )
    with pytest.raises(InvalidProfile) as refused:
        await SolverPool(workers=1, timeout_s=60, memory_mib=2048).solve(request, namespace="a")
    assert SECRET not in str(refused.value)
