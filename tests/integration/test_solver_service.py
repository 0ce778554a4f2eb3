"""The solver service on real sockets with real certificates: whose work is done where, and what becomes of it when a
worker is busy, stops, dies, or is of another version."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tests.waiting import PATIENCE_S

from perseus_operator.clients import solvers
from perseus_operator.clients.credentials import Credentials
from perseus_operator.clients.solvers import DEATHS, SolverWorkers, addresses_of
from perseus_operator.errors import InvalidProfile, SolveFailed, SolveTimeout
from perseus_operator.servers.rpc_server import RpcServer
from perseus_operator.servers.solver.metrics import SolverMetrics
from perseus_operator.servers.solver.service import SolverService
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.worker import solve_in_process
from perseus_proto.v1alpha1 import solver_pb2, solver_pb2_grpc
from perseus_sim.cluster.pki import Authority, write_pairs
from perseus_sim.processes import Child, Processes
from perseus_sim.profiles import profile_csv
from perseus_solver.model.result import Frontier

OPERATOR, SOLVER, STRANGER = "perseus-operator", "perseus-solver.perseus.svc", "perseus-agent"
REQUEST = SolveRequest(
    profile_csv(2), "1f1b", stages=2, microbatches=3, chunks=None, blocking_power_mw=83_640, points=10
)


def credentials(folder: Path, name: str) -> Credentials:
    return Credentials(str(folder / f"{name}.crt"), str(folder / f"{name}.key"), str(folder / "ca.crt"), SOLVER)


@dataclass
class Worker:
    """A worker whose solver does what a test says."""

    begun: list[bytes] = field(default_factory=list)
    given_up: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    verdict: Verdict = field(default_factory=lambda: Verdict(Outcome.ANSWERED, b"a frontier", seconds=1.5))
    server: RpcServer | None = None
    service: SolverService | None = None

    async def run(self, task: Task, request: bytes) -> Verdict:
        self.begun.append(request)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        return self.verdict


class Site:
    """Workers, and an operator that finds them."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority("test")
        write_pairs(folder / "tls", self.authority, (OPERATOR, SOLVER, STRANGER))
        self.files = {name: credentials(folder / "tls", name) for name in (OPERATOR, SOLVER, STRANGER)}
        self.workers: dict[str, Worker] = {}
        self.problem: OSError | None = None
        self.client = self.another_client()

    def another_client(self) -> SolverWorkers:
        return SolverWorkers(f"{SOLVER}:9", self.files[OPERATOR], timeout_s=PATIENCE_S, resolve=self.resolve)

    async def resolve(self, name: str) -> frozenset[str]:
        assert name == f"{SOLVER}:9"
        if self.problem is not None:
            raise self.problem
        return frozenset(self.workers)

    async def add(self, version: str = "") -> Worker:
        worker = Worker()
        allowed = frozenset({OPERATOR})
        worker.service = SolverService(
            worker.run, SolverMetrics(), version=version or self.client._version, allowed_sans=allowed
        )
        add = partial(solver_pb2_grpc.add_SolverServicer_to_server, worker.service)
        worker.server = await RpcServer.start("127.0.0.1:0", self.files[SOLVER], add)
        self.workers[worker.server.address] = worker
        return worker

    async def lose(self, worker: Worker) -> None:
        """The worker dies: its connections break."""
        assert worker.server is not None
        del self.workers[worker.server.address]
        await worker.server.close(0)


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr(solvers, "_LOOK_S", 0.01)
    monkeypatch.setattr(solvers, "_PAUSE_S", (0.01, 0.02))
    site = Site(tmp_path)
    await site.client.start()
    yield site
    await site.client.close()
    for worker in site.workers.values():
        assert worker.server is not None
        await worker.server.close(0)


async def until(seen: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not seen():
            await asyncio.sleep(0.005)


def pool_of(workers: SolverWorkers) -> SolverPool:
    return SolverPool(workers=1, timeout_s=PATIENCE_S, memory_mib=1024, service=workers)


def begin(work: Awaitable[Any]) -> asyncio.Task[Any]:
    async def done() -> Any:
        return await work

    return asyncio.create_task(done())


# --------------------------------------------------------------------------------------------------------- whose turn


async def test_as_many_pieces_of_work_are_under_way_as_there_are_workers(site: Site) -> None:
    answer = solve_in_process(REQUEST)
    first = await site.add()
    first.verdict = Verdict(Outcome.ANSWERED, answer, seconds=1.5)
    await until(lambda: site.client.slots.slots == 1)
    pool = pool_of(site.client)
    requests = [replace(REQUEST, points=5 + n) for n in range(4)]
    asked = [begin(pool.solve(request, "team")) for request in requests]
    await until(lambda: first.begun)
    await asyncio.sleep(0.1)
    assert (len(first.begun), site.client.slots.held, site.client.slots.waiting) == (1, 1, 3)
    second = await site.add()
    second.verdict = first.verdict
    await until(lambda: second.begun)
    first.go.set()
    second.go.set()
    assert {(await one)[1] for one in asked} == {1.5}
    assert len(first.begun) + len(second.begun) == 4
    assert (site.client.slots.held, site.client.slots.waiting) == (0, 0)


async def test_a_worker_that_is_busy_for_another_replica_is_asked_again(site: Site) -> None:
    worker, other = await site.add(), site.another_client()
    await other.start()
    await until(lambda: site.client.slots.slots == other.slots.slots == 1)
    theirs = begin(other.run(Task.SOLVE, b"theirs"))
    await until(lambda: worker.begun)
    ours = begin(site.client.run(Task.SOLVE, b"ours"))
    await asyncio.sleep(0.1)
    assert worker.begun == [b"theirs"]
    worker.go.set()
    assert (await theirs, await ours) == (worker.verdict, worker.verdict)
    assert worker.begun == [b"theirs", b"ours"]
    await other.close()


async def test_the_same_work_of_two_replicas_is_done_once_by_whichever_worker(site: Site) -> None:
    workers, other = [await site.add() for _ in range(4)], site.another_client()
    await other.start()
    await until(lambda: site.client.slots.slots == other.slots.slots == 4)
    both = [begin(client.run(Task.CALIBRATE, b"the same")) for client in (site.client, other)]
    await until(lambda: any(worker.begun for worker in workers))
    for worker in workers:
        worker.go.set()
    assert [await one for one in both] == [workers[0].verdict] * 2
    again = await other.run(Task.CALIBRATE, b"the same")
    assert again == workers[0].verdict
    assert list(chain.from_iterable(worker.begun for worker in workers)) == [b"the same"]
    await other.run(Task.SOLVE, b"the same")
    assert list(chain.from_iterable(worker.begun for worker in workers)) == [b"the same"] * 2, (
        "another task is other work"
    )
    await other.close()


async def test_what_nobody_waits_for_any_more_is_given_up(site: Site) -> None:
    worker, other = await site.add(), site.another_client()
    await other.start()
    await until(lambda: site.client.slots.slots == other.slots.slots == 1)
    both = [begin(client.run(Task.SOLVE, b"deleted")) for client in (site.client, other)]
    assert worker.service is not None
    await until(lambda: worker.service._work and worker.service._work.callers == 2)  # type: ignore[union-attr]
    both[0].cancel()
    await asyncio.sleep(0.1)
    assert not worker.given_up, "the other replica still waits"
    both[1].cancel()
    await until(lambda: worker.given_up)
    worker.go.set()
    assert await site.client.run(Task.SOLVE, b"next") == worker.verdict
    assert await site.client.run(Task.SOLVE, b"deleted") == worker.verdict
    assert worker.begun == [b"deleted", b"next", b"deleted"]
    await other.close()


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("outcome", "error", "remembered"),
    [
        (Outcome.INVALID_PROFILE, InvalidProfile, False),
        (Outcome.REFUSED, SolveFailed, False),
        (Outcome.OUT_OF_TIME, SolveTimeout, True),
        (Outcome.OUT_OF_MEMORY, SolveFailed, True),
        (Outcome.DIED, SolveFailed, False),
    ],
)
async def test_a_refusal_is_that_of_a_local_worker(
    site: Site, outcome: Outcome, error: type[Exception], remembered: bool
) -> None:
    worker, pool = await site.add(), pool_of(site.client)
    worker.verdict = Verdict(outcome, message="line 3: time must be above 0")
    worker.go.set()
    for _ in range(2):
        with pytest.raises(error, match="line 3: time must be above 0"):
            await pool.solve(REQUEST)
    assert pool.solves == (1 if remembered else 2)
    assert len(worker.begun) == (2 if outcome is Outcome.DIED else 1), "only an accident may end otherwise next time"


async def test_a_frontier_that_a_worker_made_up_is_not_used(site: Site) -> None:
    """Its clocks, times and energies must be those of the job's own profile."""
    worker, pool = await site.add(), pool_of(site.client)
    worker.go.set()
    honest = Frontier.from_bytes(solve_in_process(REQUEST))
    for lie in (b"no frontier", replace(honest, energy_j=honest.energy_j * 0.5).to_bytes()):
        worker.verdict = Verdict(Outcome.ANSWERED, lie)
        with pytest.raises(SolveFailed, match="the answer of the solver service is not used: "):
            await pool.solve(replace(REQUEST, points=len(lie)))


@pytest.mark.parametrize("outcome", [Outcome.OUT_OF_TIME, Outcome.OUT_OF_MEMORY])
async def test_two_workers_must_say_that_work_took_too_much(site: Site, outcome: Outcome) -> None:
    """It is remembered: one worker that lies would refuse a job for good."""
    workers = [await site.add(), await site.add(), await site.add()]
    await until(lambda: site.client.slots.slots == 3)
    for worker in workers:
        worker.go.set()
    first = Verdict(outcome, message="the first says so")
    for number in range(6):  # whichever is asked first
        liar = workers[number % 3]
        liar.verdict = first
        assert (await site.client.run(Task.SOLVE, bytes([number]))).outcome is Outcome.ANSWERED
        liar.verdict = workers[(number + 1) % 3].verdict
    asked = [len(worker.begun) for worker in workers]
    for worker in workers:
        worker.verdict = first
    assert await site.client.run(Task.SOLVE, b"too much") == first
    assert sum(len(worker.begun) for worker in workers) == sum(asked) + 2


async def test_work_of_a_worker_that_dies_is_done_by_another(site: Site) -> None:
    workers = [await site.add(), await site.add()]
    await until(lambda: site.client.slots.slots == 2)
    asked = begin(site.client.run(Task.SOLVE, b"work"))
    await until(lambda: any(worker.begun for worker in workers))
    dying, other = sorted(workers, key=lambda worker: not worker.begun)
    other.go.set()
    await site.lose(dying)
    assert await asked == other.verdict


async def test_work_that_ends_every_worker_is_not_passed_on_for_ever(site: Site) -> None:
    for _ in range(DEATHS + 1):
        await site.add()
    await until(lambda: site.client.slots.slots == DEATHS + 1)
    asked = begin(site.client.run(Task.SOLVE, b"poison"))
    for _ in range(DEATHS):
        await until(lambda: any(worker.begun for worker in site.workers.values()))
        await site.lose(next(worker for worker in site.workers.values() if worker.begun))
    verdict = await asked
    assert verdict.outcome is Outcome.DIED
    assert f"{DEATHS} workers of the solver service were lost" in verdict.message
    assert [worker.begun for worker in site.workers.values()] == [[]]


async def test_workers_of_another_version_are_left_out(site: Site) -> None:
    other = await site.add(version="0.0.1")
    await until(lambda: site.client.slots.slots == 1)
    asked = begin(site.client.run(Task.SOLVE, b"work"))
    await asyncio.sleep(0.1)
    assert not asked.done()
    right = await site.add()
    right.go.set()
    assert await asked == right.verdict
    assert not other.begun


async def test_a_worker_that_stops_ends_its_work_and_begins_no_other(site: Site) -> None:
    worker = await site.add()
    assert worker.service is not None
    await until(lambda: site.client.slots.slots == 1)
    asked = begin(site.client.run(Task.SOLVE, b"last"))
    await until(lambda: worker.begun)
    worker.service.stopping = True
    other = site.another_client()
    await other.start()
    await until(lambda: other.slots.slots == 1)
    late = begin(other.run(Task.SOLVE, b"late"))
    await asyncio.sleep(0.1)
    worker.go.set()
    await worker.service.ended()
    assert await asked == worker.verdict
    await asyncio.sleep(0.1)
    assert worker.begun == [b"last"]
    assert not late.done()
    late.cancel()
    await other.close()


async def test_while_the_name_server_is_away_workers_stay(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    worker = await site.add()
    await until(lambda: site.client.slots.slots == 1)
    site.problem = OSError("no name server")
    await until(lambda: "no name server" in caplog.text)
    worker.go.set()
    assert await site.client.run(Task.SOLVE, b"work") == worker.verdict
    site.problem = None
    await until(lambda: "found again" in caplog.text)
    assert caplog.text.count("no name server") == 1


async def test_nobody_but_the_operator_gets_work_done(site: Site, tmp_path: Path) -> None:
    worker = await site.add()
    assert worker.server is not None
    write_pairs(tmp_path / "elsewhere", Authority("another"), (OPERATOR,))
    for files, expected in (
        (site.files[STRANGER], grpc.StatusCode.PERMISSION_DENIED),
        (credentials(tmp_path / "elsewhere", OPERATOR), grpc.StatusCode.UNAVAILABLE),
    ):
        key, chain = Path(files.key).read_bytes(), Path(files.cert).read_bytes()
        channel_credentials = grpc.ssl_channel_credentials(site.authority.certificate, key, chain)
        options = (("grpc.ssl_target_name_override", SOLVER),)
        async with grpc.aio.secure_channel(worker.server.address, channel_credentials, options=options) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await solver_pb2_grpc.SolverStub(channel).Work(solver_pb2.WorkRequest(), timeout=PATIENCE_S)
        assert refused.value.code() is expected
    assert not worker.begun


async def test_an_unknown_task_is_refused_before_anything_runs(site: Site) -> None:
    worker = await site.add()
    message = solver_pb2.WorkRequest(version=site.client._version, task=7)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="INVALID_ARGUMENT: task: 7"):
        await site.client._ask(next(iter(site.workers)), message.SerializeToString(), 1 << 20)
    assert not worker.begun


async def test_a_name_has_all_its_addresses() -> None:
    assert "127.0.0.1:9477" in await addresses_of("localhost:9477")
    with pytest.raises(OSError, match=r"\w"):
        await addresses_of("no-such-host.invalid:9477")


# ---------------------------------------------------------------------------------------------------------- processes


class Program:
    """``perseus-solver`` as a process."""

    def __init__(self, site: Site, folder: Path, processes: Processes, name: str, *arguments: str) -> None:
        files, ready = site.files[SOLVER], folder / f"{name}.ready"
        self.child: Child = processes.start(
            name,
            [
                *(sys.executable, "-m", "perseus_operator.servers.solver", "--address", "127.0.0.1:0"),
                *("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca),
                *("--metrics-address", "127.0.0.1:0", "--ready-file", str(ready), *arguments),
            ],
        )
        self.child.wait_until(ready.exists)
        self.address: str = json.loads(ready.read_text())["address"]


async def test_a_solve_outlasts_a_worker_that_is_killed_and_one_that_is_stopped(site: Site, tmp_path: Path) -> None:
    """The frontier is the same as one that is solved in this process."""
    large = replace(REQUEST, microbatches=24, points=60)
    with Processes(tmp_path / "logs") as processes:
        programs = [await asyncio.to_thread(Program, site, tmp_path, processes, f"solver-{n}") for n in range(2)]
        client = SolverWorkers("x:1", site.files[OPERATOR], timeout_s=PATIENCE_S, resolve=lambda _: found())
        living = {program.address for program in programs}

        async def found() -> frozenset[str]:
            return frozenset(living)

        await client.start()
        pool = pool_of(client)
        asked = begin(pool.solve(large))
        await until(lambda: client._asked)
        [busy] = client._asked
        killed, other = sorted(programs, key=lambda program: program.address != busy)
        await asyncio.sleep(0.5)
        killed.child.popen.kill()
        living.discard(killed.address)
        await until(lambda: client._asked == {other.address})
        await asyncio.sleep(0.5)
        other.child.popen.send_signal(signal.SIGTERM)
        data, seconds = await asked
        assert seconds > 0
        solved, alone = Frontier.from_bytes(data), Frontier.from_bytes(solve_in_process(large))
        assert (solved.energy_j <= alone.energy_j * (1 + 1e-9)).all()
        assert (solved.frequencies_mhz == alone.frequencies_mhz).all()
        assert await asyncio.to_thread(other.child.popen.wait, 30) == 0
        await client.close()


async def test_a_worker_of_a_batch_ends_once_it_is_idle(site: Site, tmp_path: Path) -> None:
    with Processes(tmp_path / "logs") as processes:
        program = await asyncio.to_thread(
            Program, site, tmp_path, processes, "solver", "--exit-when-idle-s", "1", "--log-format", "text"
        )
        assert await asyncio.to_thread(program.child.popen.wait, 30) == 0
