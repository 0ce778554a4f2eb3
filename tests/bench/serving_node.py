"""Serving on one node: what a step costs an engine, how soon a waiting prompt raises the clocks, how soon they are the
default ones when anything goes, and what eight replicas cost the agent.

Real are the agent, its keeper, the engines' sessions, sockets and kills. The GPUs are doubles that record each call of
the driver, so only our own time is measured. Eight engines make 50 steps a second each, on one GPU each; in every 47th
step of each, prompts begin to wait. ``make bench ONLY=engines`` runs it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from tests.bench.agent import cpu_s, percentile
from tests.doubles import recording_gpu
from tests.doubles.recording_node import JOB, RecordingNode, RunningEngine, gpu_uuid, wait_for

from perseus_client import vllm
from perseus_client.engine import EngineSession
from perseus_proto.engine_channel import EngineReader, EngineWriter
from perseus_proto.engine_hello import EngineHello
from perseus_proto.v1alpha1 import agent_pb2 as messages

Result = dict[str, Any]
REPLICAS: Final = 8
STEPS: Final = 20_000
SECONDS: Final = 30.0
TRIES: Final = 25
"""Of each way in which something goes."""
_FLOOR_MHZ: Final = 900
_TABLE: Final = messages.ClockTable(
    running=[64], kv_share_ppm=[1_000_000], clocks_mhz=[_FLOOR_MHZ], ladder_mhz=[_FLOOR_MHZ, 1200], boost_mhz=[0]
)
_LIMITS: Final = messages.ServingLimits(first_token_us=1_000_000, per_token_us=50_000, attainment_ppm=990_000)


def plugin() -> Result:
    """A step of vLLM's plugin, with 64 requests, into memory of an agent: its median."""
    session = EngineSession("/nowhere", EngineHello("vllm", "0", "model", ""))
    session.close()
    reader = EngineReader.create()
    writer = EngineWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd))
    session._connector = cast(Any, SimpleNamespace(writer=writer))  # an agent's, without its socket
    logger = vllm.PerseusStatLogger(None)
    logger._session = session
    cache = SimpleNamespace(hits=0)
    ended = SimpleNamespace(num_generation_tokens=99, mean_time_per_output_token=0.02)
    load = SimpleNamespace(num_running_reqs=64, num_waiting_reqs=0, kv_cache_usage=0.3, prefix_cache_stats=cache)
    output = SimpleNamespace(
        time_to_first_tokens_iter=[0.1],
        inter_token_latencies_iter=[0.02] * 63,
        finished_requests=[ended],
        num_prompt_tokens=500,
        num_generation_tokens=64,
        num_preempted_reqs=0,
    )
    times_ns = []
    for _ in range(STEPS):
        begun_ns = time.perf_counter_ns()
        logger.record(load, output, None, 0)
        times_ns.append(time.perf_counter_ns() - begun_ns)
    reader.close()
    return {"serving_plugin_us_per_step": {"value": sorted(times_ns)[STEPS // 2] / 1000, "unit": "us"}}


def boosts() -> Result:
    """From a step that shows waiting prompts to the driver's call, and the agent's share of a core meanwhile."""
    with _replicas("open_mapped", bursts=47) as (node, *_):
        time.sleep(2.0)
        before_s, begun_s = cpu_s(node.agent_pid), time.monotonic()
        time.sleep(SECONDS)
        cpu_percent = 100 * (cpu_s(node.agent_pid) - before_s) / (time.monotonic() - begun_s)
        waits_ms: list[float] = []
        for number in range(REPLICAS):
            calls = recording_gpu.read_mapped(node.folder / "gpu", gpu_uuid(number))
            resets = [call.time_ns for call in calls if call.mhz is None]
            marks = [int(line) for line in (node.folder / f"times-{number}").read_text().split()]
            for mark_ns in marks[1:-1]:
                asked_ns = next((reset for reset in resets if reset >= mark_ns), None)
                waits_ms.append(float("inf") if asked_ns is None else (asked_ns - mark_ns) / 1e6)
    waits_ms.sort()
    return {
        "serving_boost_ms_p50_plugin": {"value": percentile(waits_ms, 0.5), "unit": "ms"},
        "serving_boost_ms_p99_plugin": {"value": percentile(waits_ms, 0.99), "unit": "ms"},
        "serving_agent_cpu_percent_8replicas": {"value": cpu_percent, "unit": "% core"},
    }


def default_clocks() -> Result:
    """The longest time from when something goes until its GPU is at the default clocks, of 100 tries."""
    took_s: list[float] = []
    with _replicas() as (node, stub, engines):
        for turn in range(TRIES):
            number = turn % REPLICAS
            for go in (_hang, _stop, _kill, _lapse):
                lease = _lease(stub, node)
                wait_for(lambda: set(node.locked().values()) == {_FLOOR_MHZ}, "all follow")
                begun_s = go(engines[number], stub, lease)
                wait_for(lambda number=number: node.locked()[gpu_uuid(number)] is None, "default clocks")
                resets = [call for call in node.calls() if call.gpu == gpu_uuid(number) and call.mhz is None]
                took_s.append(resets[-1].time_ns / 1e9 - begun_s)
                engines[number].process.kill()
                engines[number].process.wait()
                engines[number] = node.start_engine(node.add_pod(number, [number]))
                engines[number].says(running=8)
    return {"serving_default_s_max": {"value": max(took_s), "unit": "s"}}


def _hang(engine: Any, *_: object) -> float:
    engine.says(silent=True)
    return time.monotonic()


def _stop(engine: Any, *_: object) -> float:
    engine.process.send_signal(signal.SIGSTOP)
    return time.monotonic()


def _kill(engine: Any, *_: object) -> float:
    engine.process.kill()
    return time.monotonic()


def _lapse(_: Any, stub: Any, lease: messages.Lease) -> float:
    stub.RenewLease(messages.RenewLeaseRequest(job_uid=JOB, epoch=lease.epoch, ttl_ms=500))
    return time.monotonic() + 0.5


_Pool = tuple[RecordingNode, Any, list[RunningEngine]]


def _lease(stub: Any, node: RecordingNode) -> messages.Lease:
    pods = [node.add_pod(number, [number]) for number in range(REPLICAS)]
    request = messages.AcquireLeaseRequest(
        job_uid=JOB, job_name="ns/pool", epoch=time.time_ns(), ttl_ms=600_000, pods=pods
    )
    lease: messages.Lease = stub.AcquireLease(request)
    orders = [messages.EngineOrder(pod_uid=pod.uid, follow_table=True) for pod in pods]
    stub.OrderEngines(
        messages.OrderEnginesRequest(job_uid=JOB, epoch=lease.epoch, table=_TABLE, limits=_LIMITS, orders=orders)
    )
    return lease


@contextmanager
def _replicas(
    opener: str = "open_devices", bursts: int = 0
) -> Iterator[tuple[RecordingNode, Any, list[RunningEngine]]]:
    """A node with eight engines that follow the table."""
    with tempfile.TemporaryDirectory() as name, RecordingNode.open(Path(name), gpus=REPLICAS) as node:
        node.start_agent(opener=opener)
        with node.stub() as stub:
            _lease(stub, node)
            engines = []
            for number in range(REPLICAS):
                times = str(node.folder / f"times-{number}")
                engine = node.start_engine(node.add_pod(number, [number]), bursts=bursts, times=times)
                engine.says(running=8)
                engines.append(engine)
            wait_for(lambda: len(_joined(stub)) == REPLICAS, "all are followed")
            yield node, stub, engines


def _joined(stub: Any) -> list[messages.Engine]:
    return [engine for engine in stub.DescribeNode(messages.DescribeNodeRequest()).engines if engine.gpu_uuids]


def figures() -> Result:
    """All of them, one after the other."""
    return {**plugin(), **boosts(), **default_clocks()}


FIGURES: dict[str, Callable[[], Result]] = {"engines": figures}
