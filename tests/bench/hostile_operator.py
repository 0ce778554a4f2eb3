"""What hostile tenants, workers and nodes cost the operator: how long its event loop is held, and what it keeps.

Real are the operator's own readers: of telemetry, of workers' answers, of PerseusJobs and of pods that wait for an
EnergyClass. What they read is the worst that each may send. The loop's longest silence is measured beside them, by a
task that only asks for its next turn.
"""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np

from perseus_core import keys
from perseus_core.iteration import IterationReport
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.classes.energy_classes import INTERVAL_S, EnergyClasses
from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.errors import AgentError, SolveFailed
from perseus_operator.nodes.iterations import History
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.objects.values import JobRef, Now, Pod
from perseus_operator.solving.answers import most_calibration_bytes
from perseus_operator.solving.calibration import CalibrateRequest, parse_calibration_result
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.slots import FairSlots
from perseus_proto.planset import MAX_INSTRUCTIONS
from perseus_proto.v1alpha1 import agent_pb2
from perseus_sim.profiles import profile_csv

Result = dict[str, Any]

MESSAGE_BYTES = 64 << 20
PODS = 1_000
STAGES = 256
"""Of a job whose calibration a compromised worker makes up: the most that there may be."""
JOBS = 600
ANNOTATION_BYTES = 250_000
REPORTS_A_SECOND = 4
"""Of the longest schedule: one process reaches a MiB a second through an agent."""
HOUR_S = 3_600
WARM_REPORTS = 400
STORED_BYTES = 3 << 19
"""Of the largest object that etcd takes."""
VARIABLE_BYTES = 5
"""Of a container's variable with a name of one letter and no value, as it is stored. As JSON it has 13."""
SOLVES, SERVED = 30, 5
"""Solves that the hostile namespace asks for, each of 16 stages and 64 microbatches; and honest ones beside them."""


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
    pool._channels.use = cast(Any, channel)  # type: ignore[method-assign]
    return pool


async def _telemetry(batch: bytes) -> None:
    """One message, into the history of a job."""
    history, node = History(1, 2), Node("n", "a:1", frozenset())
    node.rank_joined(Rank("p", "GPU-0", 0, 0, 0, 1, 0))
    try:
        async for event in _agent_sends(batch).watch("a:1", "job", namespace="evil"):
            if isinstance(event, IterationReport) and node.iteration_reported(event):
                history.add(event)
    except AgentError:
        return


async def _calibration(inputs: SolveRequest) -> None:
    """What a compromised worker answers at most: JSON of nothing but brackets, or of a million numbers."""
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
    assert parse_spec(ClassSpec, {"objective": {"type": "MinEnergy"}})
    pods = {}
    for number in range(PODS):
        labels = {keys.LABEL_JOB: f"t-{number}", keys.LABEL_CLASS: "no-such-class"}
        pods["evil", f"t-{number}"] = {"u": Pod(f"u-{number}", "evil", "t", "node", f"t-{number}", labels)}
    for second in range(30):
        await classes.tick(Now(float(second), 1e9), pods, {}, {})


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
    inputs = SolveRequest(profile_csv(STAGES), "1f1b", STAGES, 64, None, 1, 100)
    attacks: dict[str, Callable[[], Awaitable[None]]] = {
        "long reports": lambda: _telemetry(reports),
        "empty events": lambda: _telemetry(tiny),
        "a huge event": lambda: _telemetry(huge),
        "a calibration": lambda: _calibration(inputs),
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
            history.add(IterationReport(0, 0, 0, 2**53 - number, 10, 10, 1, 0, durations, durations, 1))

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


def watch_line_ms() -> Result:
    """What the largest line of the pods' watch takes, from its bytes to what is kept of it; kopf reads it so."""
    variables = ",".join(['{"name":"A"}'] * (STORED_BYTES // VARIABLE_BYTES))
    metadata = f'{{"name":"t","namespace":"evil","uid":"u","labels":{{"{keys.LABEL_JOB}":"job"}}}}'
    pod = f'{{"metadata":{metadata},"spec":{{"nodeName":"n","containers":[{{"name":"c","env":[{variables}]}}]}}}}'
    line, worst_s = f'{{"type":"MODIFIED","object":{pod}}}'.encode(), 0.0
    gc.collect()
    gc.disable()  # as the operator does
    try:
        for _ in range(5):
            began_s = process_time()
            event = json.loads(line.decode())
            assert pod_of(event["object"])
            del event
            worst_s = max(worst_s, process_time() - began_s)
    finally:
        gc.enable()
    return _figure(1000 * worst_s, f"ms, {len(line) / (1 << 20):.1f} MiB")


async def _served_s(*, beside: bool) -> float:
    """The longest from a pod of an EnergyClass to the frontier of its PerseusJob, of namespaces one after the other."""
    made = dict[str, asyncio.Event]()

    class Kube:
        async def warn(self, namespace: str, about: Any, **_: str) -> None: ...

        async def write_class_status(self, *_: Any) -> str:
            return "1"

        async def create_job(self, job: JobRef, *_: Any) -> None:
            made[job.namespace].set()

    classes, pods = EnergyClasses(cast(Any, Kube()), grace_s=0.0), dict[tuple[str, str], dict[str, Pod]]()
    jobs = dict[tuple[str, str], dict[str, Any]]()
    classes.observe({"metadata": {"name": "c", "uid": "c"}, "spec": {"objective": {"type": "MinEnergy"}}})

    def add(namespace: str, name: str, energy_class: str) -> None:
        labels = {keys.LABEL_JOB: name, keys.LABEL_CLASS: energy_class}
        pods[namespace, name] = {"u": Pod(f"u-{name}", namespace, name, "node", name, labels)}

    async def tick() -> None:
        while True:
            await classes.tick(Now(perf_counter(), 1e9), pods, jobs, {})
            await asyncio.sleep(INTERVAL_S)

    pool, worst_s = SolverPool(workers=2, timeout_s=600, memory_mib=2048), 0.0
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(tick())]
    if beside:
        for number in range(PODS):
            add("evil", f"t-{number}", "no-such-class")
        for number in range(SOLVES):
            hard = SolveRequest(profile_csv(16), "1f1b", 16, 64, None, 80_000 + number, 100)
            tasks.append(asyncio.create_task(pool.solve(hard, "evil")))
    try:
        for number in range(SERVED):
            await asyncio.sleep(0.4)  # wherever the present solves are
            namespace = f"honest-{number}"
            made[namespace], began_s = asyncio.Event(), perf_counter()
            add(namespace, "job", "c")
            await made[namespace].wait()
            jobs[namespace, "job"] = {"metadata": {}}
            await pool.solve(SolveRequest(profile_csv(2), "1f1b", 2, 3, None, 70_000 + number, 100), namespace)
            worst_s = max(worst_s, perf_counter() - began_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return worst_s


def served_s() -> Result:
    """How long an honest namespace waits for its job and its frontier beside a hostile one, and alone."""
    beside_s, alone_s = (asyncio.run(_served_s(beside=beside)) for beside in (True, False))
    alone = {"peer": "alone", "peer_value": alone_s, "ratio": beside_s / alone_s}
    return {**_figure(beside_s, "s"), **alone}


def _figure(value: float, unit: str) -> Result:
    return {"value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


FIGURES = {
    "hostile_loop_block_ms_max": loop_block_ms,
    "hostile_watch_line_ms_max": watch_line_ms,
    "hostile_served_s": served_s,
    "hostile_operator_bytes_per_rank_hour": bytes_per_rank_hour,
}
