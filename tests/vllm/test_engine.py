"""The plugin and the reader of pages against vLLM itself; a real agent process, and GPUs that record.

The tests run in this order: each counts on from what the engine did before, and the last one kills it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.doubles.recording_node import wait_for
from tests.vllm.conftest import Vllm
from tests.vllm.server import BATCHED_TOKENS, Ask
from tests.vllm.watched import FLOOR, Watched


@pytest.fixture(scope="module")
def watched(vllm: Vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with Watched.open(vllm, tmp_path_factory.mktemp("vllm"), tmp_path_factory.mktemp("node")) as made:
        made.wait_ready()
        yield made


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
