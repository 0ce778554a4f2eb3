"""vLLM's plugin: what its statistics mean, and that no shape of them reaches the engine."""

from __future__ import annotations

import logging
import threading
import tomllib
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest
from tests.offenders import ROOT

from perseus_client import vllm
from perseus_client.vllm import PerseusStatLogger, hello_of
from perseus_core.keys import ENV_SOCKET


class Recorded:
    """A session that keeps its steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.closed = False

    def step(self, kv_share: float, **named: Any) -> None:
        self.steps.append({"kv_share": kv_share, **named})

    def close(self) -> None:
        self.closed = True


def config(**parallel: Any) -> Any:
    split = {"tensor_parallel_size": 4, "pipeline_parallel_size": 1, "data_parallel_size": 1, **parallel}
    return SimpleNamespace(
        model_config=SimpleNamespace(model="llama\n70b", revision="main", dtype="bfloat16", max_model_len=8192),
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        speculative_config=None,
        parallel_config=SimpleNamespace(**split),
    )


def scheduler(running: int, waiting: int = 0, kv: float = 0.25, hits: int = 0) -> Any:
    cache = SimpleNamespace(hits=hits)
    return SimpleNamespace(
        num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=kv, prefix_cache_stats=cache
    )


def iteration(**named: Any) -> Any:
    nothing: dict[str, Any] = {
        "time_to_first_tokens_iter": [],
        "inter_token_latencies_iter": [],
        "finished_requests": [],
        "num_prompt_tokens": 0,
        "num_generation_tokens": 0,
        "num_preempted_reqs": 0,
    }
    return SimpleNamespace(**{**nothing, **named})


def ended(tokens: int, mean_s: float) -> Any:
    return SimpleNamespace(num_prompt_tokens=700, num_generation_tokens=tokens, mean_time_per_output_token=mean_s)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded()
    monkeypatch.setenv(ENV_SOCKET, "/nowhere")
    monkeypatch.setattr(vllm, "EngineSession", lambda path, hello: made)
    monkeypatch.setattr(vllm, "_version", lambda: "0.32.0")
    return made


def test_vllm_finds_the_plugin_by_its_entry_point() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    entries = written["project"]["entry-points"]["vllm.stat_logger_plugins"]
    assert [EntryPoint(name, value, "").load() for name, value in entries.items()] == [PerseusStatLogger]


def test_without_the_variable_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_SOCKET, raising=False)
    before = threading.active_count()
    logger = PerseusStatLogger(None)
    logger.record(None, None)
    logger.log()
    logger.log_engine_initialized()
    assert threading.active_count() == before


def test_who_the_engine_is_comes_from_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "_version", lambda: "0.32.0")
    hello = hello_of(config())
    assert (hello.name, hello.version, hello.model) == ("vllm", "0.32.0", "llama?70b@main")
    assert hello.parallelism == "tp 4, pp 1, dp 1"
    assert hello.flags == (
        ("model.dtype", "bfloat16"),
        ("model.max_model_len", "8192"),
        ("scheduler.max_num_seqs", "256"),
    )


def test_a_request_that_runs_without_output_is_prefilling(session: Recorded) -> None:
    logger = PerseusStatLogger(config())
    logger.record(scheduler(10, waiting=2), iteration(inter_token_latencies_iter=[0.02] * 7), None, 0)
    (step,) = session.steps
    assert (step["waiting"], step["prefilling"], step["running"], step["kv_share"]) == (2, 3, 7, 0.25)
    assert step["computes_prompt"]


def test_a_step_without_output_computes_the_prompts_of_all_that_run(session: Recorded) -> None:
    # As vLLM tells of a long prompt that has the engine to itself: each part but the last has no output at all.
    logger = PerseusStatLogger(config())
    logger.record(scheduler(1), None)
    logger.record(scheduler(1), None)
    logger.record(scheduler(1), iteration(time_to_first_tokens_iter=[0.4], num_prompt_tokens=700))
    assert [(step["prefilling"], step["running"]) for step in session.steps] == [(1, 0), (1, 0), (0, 1)]
    assert all(step["computes_prompt"] for step in session.steps)


def test_a_first_token_of_a_prompt_that_another_engine_computed_is_one_of_a_step_that_decodes(
    session: Recorded,
) -> None:
    """As NIXL brings all of it; vLLM's own connector for files leaves the last block to be computed."""
    logger = PerseusStatLogger(config())
    for computed in (0, 1):
        counted = SimpleNamespace(computed=computed)
        logger.record(scheduler(1), iteration(time_to_first_tokens_iter=[0.4], prompt_token_stats=counted))
    assert [step["computes_prompt"] for step in session.steps] == [False, True]


def test_a_request_that_ended_had_output_and_runs_no_more(session: Recorded) -> None:
    logger = PerseusStatLogger(config())
    done = [ended(100, 0.03), ended(1, 0.0)]
    output = iteration(inter_token_latencies_iter=[0.02] * 6, finished_requests=done, time_to_first_tokens_iter=[0.4])
    logger.record(scheduler(5), output, engine_idx=0)
    (step,) = session.steps
    assert (step["prefilling"], step["running"], step["requests"]) == (0, 5, 2)
    assert (step["first_tokens_s"], step["tokens_s"]) == ([0.4], [0.03])
    assert step["lengths"] == [(700, 100), (700, 1)]


def test_a_step_after_a_pause_has_no_time(session: Recorded) -> None:
    logger = PerseusStatLogger(config())
    for running in (1, 1, 0, 1):
        logger.record(scheduler(running), iteration(inter_token_latencies_iter=[0.02] * running))
    timed = [step["step_s"] is not None for step in session.steps]
    assert timed == [False, True, True, False]


def test_tokens_of_a_cached_prefix_are_not_computed_in_old_and_new_versions(session: Recorded) -> None:
    logger = PerseusStatLogger(config())
    logger.record(scheduler(1, hits=300), iteration())  # scheduled
    logger.record(scheduler(1), iteration(time_to_first_tokens_iter=[0.1], num_prompt_tokens=500))
    assert [step["prompt_tokens"] for step in session.steps] == [0, 200]
    counted = SimpleNamespace(computed=123)
    logger.record(scheduler(1, hits=9), iteration(num_prompt_tokens=500, prompt_token_stats=counted))
    assert session.steps[-1]["prompt_tokens"] == 123


def test_without_load_the_last_one_stays(session: Recorded) -> None:
    logger = PerseusStatLogger(config())
    logger.record(scheduler(4, waiting=1), iteration(inter_token_latencies_iter=[0.02] * 4))
    logger.record(None, iteration(inter_token_latencies_iter=[0.02], num_generation_tokens=3))
    assert (session.steps[-1]["running"], session.steps[-1]["waiting"]) == (4, 1)
    assert session.steps[-1]["generated_tokens"] == 3


@pytest.mark.parametrize("stats", [(object(), None), (None, object()), (scheduler(1), SimpleNamespace())])
def test_an_unknown_shape_is_logged_once_and_the_engine_goes_on(
    session: Recorded, caplog: pytest.LogCaptureFixture, stats: tuple[Any, Any]
) -> None:
    logger = PerseusStatLogger(config())
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            logger.record(*stats)
    assert session.closed
    assert not session.steps
    assert caplog.text.count("this version of vLLM is not known") == 1


@pytest.mark.parametrize(
    ("parallel", "why"),
    [
        ({"data_parallel_size_local": 2}, "2 engines share this container's GPUs"),
        ({"_api_process_count": 3}, "3 API servers share the engine"),
    ],
)
def test_engines_that_share_are_left_alone_by_name(
    session: Recorded, caplog: pytest.LogCaptureFixture, parallel: dict[str, Any], why: str
) -> None:
    logger = PerseusStatLogger(config(**parallel))
    logger.record(scheduler(1), iteration())
    assert not session.steps
    assert why in caplog.text


def test_a_configuration_of_another_shape_raises_nothing(session: Recorded, caplog: pytest.LogCaptureFixture) -> None:
    PerseusStatLogger(object()).record(scheduler(1), iteration())
    assert not session.steps
    assert "this engine runs at default clocks" in caplog.text


@pytest.mark.parametrize(("connector", "waiting"), [(None, 5), (SimpleNamespace(kv_connector="NixlConnector"), 2)])
def test_a_request_that_waits_for_the_keys_and_values_of_another_engine_is_no_prompt(
    session: Recorded, connector: Any, waiting: int
) -> None:
    settings = config()
    settings.kv_transfer_config = connector
    logger, stats = PerseusStatLogger(settings), scheduler(1, waiting=2)
    stats.num_skipped_waiting_reqs = 3
    logger.record(stats, None)
    assert session.steps[0]["waiting"] == waiting
