"""The plugin and the reader of pages against vLLM itself; a real agent process, and GPUs that record.

The tests run in this order: each counts on from what the engine did before, and the last one kills it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.doubles.recording_node import JOB, RecordingNode, wait_for
from tests.vllm.conftest import Vllm
from tests.vllm.server import BATCHED_TOKENS, Ask, VllmServer

from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_reader.pages import PageReading, read_page

FLOOR = 900
TABLE = messages.ClockTable(
    running=[64], kv_share_ppm=[1_000_000], clocks_mhz=[FLOOR], ladder_mhz=[FLOOR], boost_mhz=[0]
)
LAST = Ask(5, 4)
"""Its steps end a window that is long enough."""


@dataclass
class Watched:
    """A served model on a node: what it was asked for, and what the agent said of it."""

    server: VllmServer
    node: RecordingNode
    engines: list[messages.Engine] = field(default_factory=list)
    windows: list[messages.EngineWindow] = field(default_factory=list)
    asked: list[Ask] = field(default_factory=list)

    def ask(self, *asks: Ask) -> None:
        self.server.ask(*asks)
        self.asked += asks

    def settle(self) -> None:
        """Until windows hold all that was asked for. One ends with a step, a second after the one before."""
        for _ in range(10):
            time.sleep(1.2)
            self.ask(LAST)
            time.sleep(1.0)
            if self.total("requests") == len(self.asked) and self.total("generated_tokens") == self.generated:
                return
        pytest.fail(f"windows with {self.total('requests')} of {len(self.asked)} requests: {self.windows}")

    @property
    def prompt(self) -> int:
        return sum(ask.prompt for ask in self.asked)

    @property
    def generated(self) -> int:
        return sum(ask.generated for ask in self.asked)

    def total(self, name: str) -> int:
        return sum(getattr(window, name) for window in self.windows)

    def times(self, name: str) -> int:
        return sum(sum(getattr(window, name).counts) for window in self.windows)

    def page(self) -> PageReading:
        return read_page(self.server.get("/metrics"))

    def clocks(self, since: int) -> list[int | None]:
        """What the GPU was set to, from the call with this number on; None: the default clocks."""
        return [call.mhz for call in self.node.calls()[since:]]


@pytest.fixture(scope="module")
def watched(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with RecordingNode.open(tmp_path_factory.mktemp("node"), gpus=1) as node:
        node.start_agent()
        pod = node.add_pod(0, [0])
        folder = tmp_path_factory.mktemp("vllm")
        opened = VllmServer.open(vllm.python, folder, PERSEUS_SOCKET=node.socket, PYTHONPATH=vllm.path)
        with opened as server, node.stub() as stub:
            node.kubelet.place([server.process.pid], pod.uid)
            request = messages.AcquireLeaseRequest(
                job_uid=JOB, job_name=f"ns/{JOB}", epoch=time.time_ns(), ttl_ms=600_000, pods=[pod]
            )
            orders = [messages.EngineOrder(pod_uid=pod.uid, follow_table=True)]
            limits = messages.ServingLimits(first_token_us=1_000_000, per_token_us=50_000, attainment_ppm=990_000)
            lease = stub.AcquireLease(request)
            stub.OrderEngines(
                messages.OrderEnginesRequest(job_uid=JOB, epoch=lease.epoch, table=TABLE, limits=limits, orders=orders)
            )
            made = Watched(server, node)
            stream = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB))
            reader = threading.Thread(target=_read, args=(stream, made))
            reader.start()
            server.wait_ready()
            wait_for(lambda: made.engines, "the engine connects")
            yield made
            stream.cancel()
            reader.join()


def _read(stream: Any, made: Watched) -> None:
    try:
        for batch in stream:
            assert not batch.dropped
            for event in batch.events:
                if event.HasField("engine_joined"):
                    made.engines.append(event.engine_joined)
                elif event.HasField("window"):
                    made.windows.append(event.window)
    except Exception:
        if stream.code() is None or stream.code().name != "CANCELLED":
            raise


def test_vllm_finds_the_plugin_without_a_flag_and_the_agent_sees_which_engine_it_is(watched: Watched) -> None:
    (engine,) = watched.engines
    assert engine.pid == watched.server.process.pid
    print(f"vLLM {engine.version}")
    assert (engine.name, engine.version) == ("vllm", json.loads(watched.server.get("/version"))["version"])
    assert engine.model == watched.server.model
    assert engine.parallelism == "tp 1, pp 1, dp 1"
    flags = {flag.name: flag.value for flag in engine.flags}
    assert flags["model.enforce_eager"] == "True"
    assert flags["cache.enable_prefix_caching"] == "False"
    assert flags["scheduler.max_num_batched_tokens"] == str(BATCHED_TOKENS)
    assert {"model.dtype", "model.max_model_len", "cache.block_size", "scheduler.async_scheduling"} < set(flags)


def test_steps_are_those_that_decode_and_those_that_compute_prompts(watched: Watched) -> None:
    # One after the other: the first step after a pause has no time, so it is not counted.
    parts = 6
    for ask in (Ask(20, 30), Ask(30, 20), Ask(parts * BATCHED_TOKENS, 5)):
        watched.ask(ask)
    watched.settle()
    assert watched.total("steps") == sum(ask.generated - 1 for ask in watched.asked)
    assert watched.total("prompt_steps") == parts - 1
    assert watched.total("steps_us") + watched.total("prompt_steps_us") < watched.total("time_us")


def test_every_token_and_request_is_in_a_window_as_on_vllms_own_page(watched: Watched) -> None:
    watched.ask(*[Ask(5 + k, 10 + 3 * k) for k in range(24)])
    watched.ask(Ask(1, 1), Ask(700, 1), Ask(33, 90))
    watched.settle()
    page = watched.page()
    assert watched.total("prompt_tokens") == page.prompt_tokens == watched.prompt
    assert watched.total("generated_tokens") == page.generated_tokens == watched.generated
    assert watched.total("requests") == watched.times("first_tokens") == page.first_tokens.count == len(watched.asked)
    several = sum(ask.generated > 1 for ask in watched.asked)
    assert watched.times("tokens") == several
    assert page.gaps.count == watched.generated - len(watched.asked)
    assert (page.waiting, page.running, page.preempted, page.kv_share) == (0, 0, 0, 0.0)
    assert (page.engine, page.model) == ("vllm", watched.server.model)


def test_the_clock_of_the_table_is_locked_while_it_decodes_and_not_while_it_computes_a_prompt(watched: Watched) -> None:
    with ThreadPoolExecutor() as threads:
        served = threads.submit(watched.ask, Ask(10, 1500))
        wait_for(lambda: watched.page().running == 1, "it decodes")
        wait_for(lambda: set(watched.node.locked().values()) == {FLOOR}, "the clock of the table is locked")
        assert not served.done()
        served.result()
    before = len(watched.clocks(0))
    watched.ask(Ask(30 * BATCHED_TOKENS, 2))  # alone: no step but the last has an output
    wait_for(lambda: watched.clocks(before)[:1] == [None], "default clocks for a prompt that is computed", 30)
    wait_for(lambda: watched.clocks(before)[-1] == FLOOR, "the clock of the table after it")


def test_the_default_clocks_are_back_when_it_is_killed(watched: Watched) -> None:
    assert set(watched.node.locked().values()) == {FLOOR}
    killed_ns = time.monotonic_ns()
    watched.server.process.kill()
    wait_for(watched.node.all_default, "default clocks", 1.0)
    after = watched.node.calls()[-1]
    print(f"default clocks {(after.time_ns - killed_ns) / 1e6:.1f} ms after SIGKILL")
