"""Serving on one node: what a step costs an engine, how soon a waiting prompt raises the clocks, and what
eight replicas cost the agent.

Real are the agent, its keeper, its reader, the engines' sessions and sockets. The GPUs are doubles that record
each call of the driver, so only our own time is measured. Eight engines make 50 steps a second each, on one GPU each;
in every 47th step of each, prompts begin to wait. Without the plugin, prompts wait on a page that is as slow as a real
one. ``make bench ONLY=engines`` runs it.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from tests.bench.agent import cpu_s, percentile
from tests.doubles import recording_gpu
from tests.doubles.recording_node import JOB, RecordingNode, RunningEngine, gpu_uuid, pod_uid, wait_for

from perseus_client import vllm
from perseus_client.engine import EngineSession
from perseus_proto.engine_channel import EngineReader, EngineWriter
from perseus_proto.engine_hello import EngineHello
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.metrics_server import Manner, MetricsServer

Result = dict[str, Any]
REPLICAS: Final = 8
STEPS: Final = 20_000
SECONDS: Final = 30.0
FLOOR_MHZ: Final = 900
_TABLE: Final = messages.ClockTable(
    running=[64], kv_share_ppm=[1_000_000], clocks_mhz=[FLOOR_MHZ], ladder_mhz=[FLOOR_MHZ, 1200], boost_mhz=[0]
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
    ended = SimpleNamespace(num_prompt_tokens=500, num_generation_tokens=99, mean_time_per_output_token=0.02)
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
        files = [node.folder / f"times-{number}" for number in range(REPLICAS)]
        waits_ms = _waits_ms(node, [[int(line) for line in file.read_text().split()] for file in files])
    return {
        "serving_boost_ms_p50_plugin": {"value": percentile(waits_ms, 0.5), "unit": "ms"},
        "serving_boost_ms_p99_plugin": {"value": percentile(waits_ms, 0.99), "unit": "ms"},
        "serving_agent_cpu_percent_8replicas": {"value": cpu_percent, "unit": "% core"},
    }


def scraped_boosts() -> Result:
    """The same without the plugin: from a prompt that waits to the driver's call."""
    draw = random.Random(1)
    with tempfile.TemporaryDirectory() as name, RecordingNode.open(Path(name), gpus=REPLICAS) as node:
        node.start_agent(f"--reader-socket={node.start_reader()}", opener="open_mapped")
        with node.stub() as stub, contextlib.ExitStack() as stack:
            engines, pages = [EngineMetrics() for _ in range(REPLICAS)], []
            for number, metrics in enumerate(engines):
                metrics.set_load(waiting=0, running=8, kv_share=0.3)
                server = stack.enter_context(contextlib.closing(MetricsServer("127.0.0.1:0", metrics, Manner())))
                host, _, port = server.address.rpartition(":")
                pages.append(messages.EnginePage(pod_uid=pod_uid(number), host=host, port=int(port), path="/metrics"))
            lease_of(stub, node, pages)
            wait_for(lambda: len(joined(stub)) == REPLICAS, "all are followed")
            time.sleep(2.0)
            with ThreadPoolExecutor(REPLICAS) as threads:
                marks = list(threads.map(_bursts, engines, [draw.randrange(1 << 30) for _ in engines]))
        waits_ms = _waits_ms(node, marks)
    return {
        "serving_boost_ms_p50_scrape": {"value": percentile(waits_ms, 0.5), "unit": "ms"},
        "serving_boost_ms_p99_scrape": {"value": percentile(waits_ms, 0.99), "unit": "ms"},
    }


def _bursts(metrics: EngineMetrics, seed: int) -> list[int]:
    """Let prompts wait for 0.8 s now and then; returns when each began to."""
    draw, marks = random.Random(seed), []
    ends_s = time.monotonic() + 2 * SECONDS
    while time.monotonic() < ends_s:
        time.sleep(draw.uniform(1.0, 1.5))
        marks.append(time.monotonic_ns())
        metrics.set_load(waiting=1, running=8, kv_share=0.3)
        time.sleep(0.8)
        metrics.set_load(waiting=0, running=8, kv_share=0.3)
    return marks


def _waits_ms(node: RecordingNode, marks: Sequence[Sequence[int]]) -> list[float]:
    """From each moment at a GPU until its clocks are next asked to be the default ones, ascending."""
    waits_ms: list[float] = []
    for number, begun_ns in enumerate(marks):
        calls = recording_gpu.read_mapped(node.folder / "gpu", gpu_uuid(number))
        resets = [call.time_ns for call in calls if call.mhz is None]
        for mark_ns in begun_ns[1:-1]:
            asked_ns = next((reset for reset in resets if reset >= mark_ns), None)
            waits_ms.append(float("inf") if asked_ns is None else (asked_ns - mark_ns) / 1e6)
    return sorted(waits_ms)


_Pool = tuple[RecordingNode, Any, list[RunningEngine]]


def lease_of(stub: Any, node: RecordingNode, pages: Sequence[messages.EnginePage] = ()) -> messages.Lease:
    """An operator's: all engines follow the table, as they say themselves or as their pages do."""
    pods = [node.add_pod(number, [number]) for number in range(REPLICAS)]
    request = messages.AcquireLeaseRequest(
        job_uid=JOB, job_name="ns/pool", epoch=time.time_ns(), ttl_ms=600_000, pods=pods
    )
    lease: messages.Lease = stub.AcquireLease(request)
    orders = [messages.EngineOrder(pod_uid=pod.uid, follow_table=True) for pod in pods]
    stub.OrderEngines(
        messages.OrderEnginesRequest(
            job_uid=JOB, epoch=lease.epoch, table=_TABLE, limits=_LIMITS, orders=orders, pages=pages
        )
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
            lease_of(stub, node)
            engines = []
            for number in range(REPLICAS):
                times = str(node.folder / f"times-{number}")
                engine = node.start_engine(node.add_pod(number, [number]), bursts=bursts, times=times)
                engine.says(running=8)
                engines.append(engine)
            wait_for(lambda: len(joined(stub)) == REPLICAS, "all are followed")
            yield node, stub, engines


def joined(stub: Any) -> list[messages.Engine]:
    """The engines that drive GPUs."""
    return [engine for engine in stub.DescribeNode(messages.DescribeNodeRequest()).engines if engine.gpu_uuids]


def figures() -> Result:
    """All of them, one after the other."""
    return {**plugin(), **boosts(), **scraped_boosts()}


FIGURES: dict[str, Callable[[], Result]] = {"engines": figures}
