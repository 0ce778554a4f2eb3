"""What hostile tenants, workers and nodes cost the operator: how long its event loop is held, and what it keeps.

Real are the operator's own readers: of telemetry, of workers' answers, of PerseusJobs and of pods that wait for an
EnergyClass. What they read is the worst that each may send. The loop's longest silence is measured beside them, by a
task that only asks for its next turn.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np

from perseus_operator.api.energy_class import parse_class
from perseus_operator.clients.agents import AgentPool
from perseus_operator.controller.energy_classes import EnergyClasses
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.errors import AgentError, SolveFailed
from perseus_operator.objects import Pod
from perseus_operator.planning.aim import Now
from perseus_operator.planning.iterations import History, Report
from perseus_operator.planning.node import Node, Rank
from perseus_operator.solving.answers import most_calibration_bytes
from perseus_operator.solving.calibration import CalibrateRequest, parse_calibration_result
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.slots import FairSlots
from perseus_proto import keys
from perseus_proto.planset import MAX_INSTRUCTIONS
from perseus_proto.v1alpha1 import agent_pb2

Result = dict[str, Any]

MESSAGE_BYTES = 64 << 20
PODS = 1_000
JOBS = 600
ANNOTATION_BYTES = 250_000
REPORTS_A_SECOND = 4
"""Of the longest schedule: one process reaches a MiB a second through an agent."""
HOUR_S = 3_600
WARM_REPORTS = 400


async def _longest_block_ms(work: Callable[[], Awaitable[None]]) -> float:
    """The longest that a task which only asks for its next turn waits for it while some work is done.

    Of a wait counts what this process computed meanwhile, in any of its threads: one that parses holds the interpreter,
    too. The rest is the machine's other programs.
    """
    longest_s, done = 0.0, False

    async def watch() -> None:
        nonlocal longest_s
        before = perf_counter(), process_time()
        while not done:
            await asyncio.sleep(0)
            now = perf_counter(), process_time()
            longest_s, before = max(longest_s, min(now[0] - before[0], now[1] - before[1])), now

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        await work()
    finally:
        done = True
        await watching
    return 1000 * longest_s


def _agent_sends(*batches: bytes) -> AgentPool:
    class Call:
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for batch in batches:
                yield batch

        def cancel(self) -> None: ...

    class Entry:
        class channel:
            @staticmethod
            def unary_stream(*_: Any) -> Any:
                return lambda request: Call()

    @asynccontextmanager
    async def channel(_: str) -> AsyncIterator[Any]:
        yield Entry()

    pool = AgentPool(None, timeout_s=1.0)
    pool._channel = cast(Any, channel)  # type: ignore[method-assign]
    return pool


async def _telemetry(batch: bytes) -> None:
    """One message, into the history of a job."""
    history, node = History(1, 2), Node("n", "a:1", frozenset())
    node.rank_joined(Rank("p", "GPU-0", 0, 0, 0, 1, 0))
    try:
        async for event in _agent_sends(batch).watch("a:1", "job", namespace="evil"):
            if isinstance(event, Report) and node.iteration_reported(event):
                history.add(event)
    except AgentError:
        return


async def _calibration() -> None:
    """What a compromised worker answers at most: JSON of nothing but brackets, or of a million numbers."""
    inputs = SolveRequest("", "1f1b", 1_000, 64, None, 1, 100)
    one = np.ones((1, 1))
    asked = CalibrateRequest(inputs, np.zeros(1, dtype=np.int32), one, one[0], one)
    size = most_calibration_bytes(inputs)
    for answer in (
        b'{"calibration": "' + b"[" * (size - 40) + b'", "change": null}',
        b"[" + b"1," * (size // 2 - 2) + b"1]",
    ):

        class Service:
            slots = FairSlots(1)

            async def run(self, task: Task, request: bytes, most_bytes: int, answer: bytes = answer) -> Verdict:
                return Verdict(Outcome.ANSWERED, answer)

        pool = SolverPool(workers=1, timeout_s=60, memory_mib=4096, service=Service())
        try:
            parse_calibration_result(await pool.calibrate(asked))
        except SolveFailed:
            continue


async def _pods() -> None:
    """A thousand refused pods of one namespace, for half a minute."""

    class Kube:
        async def warn(self, namespace: str, about: Any, **_: str) -> None: ...

        async def write_class_status(self, *_: Any) -> str:
            return "1"

    classes = EnergyClasses(cast(Any, Kube()), grace_s=0.0)
    assert parse_class({"objective": {"type": "MinEnergy"}})
    pods = {}
    for number in range(PODS):
        labels = {keys.LABEL_JOB: f"t-{number}", keys.LABEL_CLASS: "no-such-class"}
        pods["evil", f"t-{number}"] = {"u": Pod(f"u-{number}", "evil", "t", "node", f"t-{number}", labels)}
    for second in range(30):
        await classes.tick(Now(float(second), 1e9), pods, {})


async def _jobs() -> None:
    """Jobs full of annotations, as the watch delivers them."""
    jobs = KnownJobs(500)
    for number in range(JOBS):
        metadata = {"namespace": "evil", "name": f"j-{number}", "uid": f"u-{number}"}
        metadata["annotations"] = {"mine": "x" * ANNOTATION_BYTES}  # type: ignore[assignment]
        jobs.observe({"metadata": metadata, "spec": {}})
        await asyncio.sleep(0)


def loop_block_ms() -> Result:
    """The longest that the operator's event loop is held by any of these."""
    words = array("I", [2**32 - 1]) * MAX_INSTRUCTIONS
    long = agent_pb2.IterationReport(
        iteration_time_us=9,
        compute_span_us=9,
        durations_us=words,
        instruction_energy_mj=words,
        leads_us=[7] * len(words),
    )
    reports = agent_pb2.TelemetryBatch(events=[agent_pb2.TelemetryEvent(iteration=long)] * 48).SerializeToString()
    tiny = b"\x12\x00" * (MESSAGE_BYTES // 64)
    huge = agent_pb2.TelemetryBatch(
        events=[agent_pb2.TelemetryEvent(gpu=agent_pb2.GpuEvent(message="x" * (MESSAGE_BYTES - 100)))]
    ).SerializeToString()
    attacks: dict[str, Callable[[], Awaitable[None]]] = {
        "long reports": lambda: _telemetry(reports),
        "empty events": lambda: _telemetry(tiny),
        "a huge event": lambda: _telemetry(huge),
        "a calibration": _calibration,
        "refused pods": _pods,
        "full jobs": _jobs,
    }
    blocks = {}
    for name, attack in attacks.items():
        gc.collect()
        gc.disable()  # as the operator does
        try:
            blocks[name] = asyncio.run(_longest_block_ms(attack))
        finally:
            gc.enable()
    worst = max(blocks, key=lambda name: blocks[name])
    return _figure(blocks[worst], f"ms, {worst}")


def bytes_per_rank_hour() -> Result:
    """What the operator keeps of one rank after an hour of the worst reports more than after 100 s of them."""
    history = History(2, 1)

    def talk(begin: int, count: int) -> None:
        for number in range(begin, begin + count):
            durations = array("I", [number % 7 + 1]) * MAX_INSTRUCTIONS
            history.add(Report(0, 0, 0, 2**53 - number, 10, 10, 1, 0, durations, durations, 1))

    tracemalloc.start()
    try:
        talk(0, WARM_REPORTS)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        talk(WARM_REPORTS, REPORTS_A_SECOND * HOUR_S)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return _figure(float(max(0, after - before)), "bytes")


def _figure(value: float, unit: str) -> Result:
    return {"value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


FIGURES = {
    "hostile_loop_block_ms_max": loop_block_ms,
    "hostile_operator_bytes_per_rank_hour": bytes_per_rank_hour,
}
