"""A live engine: its page says what its iterations did, at every moment."""

from __future__ import annotations

import urllib.request
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import eventually

from perseus_sim.serving.engine_process import CONSUMER, PRODUCER, parts_of
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.live import LiveEngine
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.metrics_server import Manner, MetricsServer
from perseus_sim.serving.recorded_pages import EngineKind
from perseus_sim.serving.requests import Request

MACHINE = Machine("h100", "llama-3.1-8b", 1)
REQUESTS = [Request(0.5 * index, 100 + 300 * index, 20 + index, 50) for index in range(8)]


class Time:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def page(metrics: EngineMetrics) -> dict[str, float]:
    return samples(metrics.render(EngineKind.VLLM).decode())


def samples(text: str) -> dict[str, float]:
    """Sums over the labels of the page's series."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_a_page_counts_what_was_served() -> None:
    clock, metrics = Time(), EngineMetrics()
    live = LiveEngine(MACHINE, REQUESTS, metrics, clock=clock)
    live.advance()
    clock.now_s += 60.0
    live.advance()
    assert live.idle
    shown = page(metrics)
    prompt, output = (sum(getattr(one, name) for one in REQUESTS) for name in ("prompt_tokens", "output_tokens"))
    assert shown["vllm:time_to_first_token_seconds_count"] == len(REQUESTS)
    assert shown["vllm:prompt_tokens_total"] == prompt
    assert shown["vllm:generation_tokens_total"] == output
    assert shown["vllm:inter_token_latency_seconds_count"] == output - len(REQUESTS)
    assert shown["vllm:e2e_request_latency_seconds_count"] == len(REQUESTS)
    assert shown["vllm:num_requests_running"] == shown["vllm:num_requests_waiting"] == 0
    first_s, token_s = (
        shown[f"vllm:{name}_sum"] for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
    )
    assert first_s + token_s == pytest.approx(shown["vllm:e2e_request_latency_seconds_sum"])


def test_how_often_it_is_brought_to_now_changes_nothing() -> None:
    pages = []
    for pause_s in (0.013, 7.0):
        clock, metrics = Time(), EngineMetrics()
        live = LiveEngine(MACHINE, REQUESTS, metrics, clock=clock)
        end_s = clock.now_s + 70.0
        while clock.now_s < end_s:
            clock.now_s += pause_s
            live.advance()
        pages.append(page(metrics))
    assert pages[0] == pytest.approx(pages[1])


def test_a_lower_clock_shows_in_the_time_between_tokens() -> None:
    means, joules = [], []
    for mhz in (1980, 705):
        clock, metrics = Time(), EngineMetrics()
        live = LiveEngine(MACHINE, REQUESTS, metrics, clock=clock)
        live.set_clocks(mhz, mhz)
        clock.now_s += 60.0
        joules.append(live.joules)
        shown = page(metrics)
        means.append(shown["vllm:inter_token_latency_seconds_sum"] / shown["vllm:inter_token_latency_seconds_count"])
    assert means[1] > 1.2 * means[0]
    assert joules[1] < joules[0]


def test_it_serves_its_page_while_time_passes() -> None:
    """A hundred times faster than real time."""
    metrics = EngineMetrics()
    server = MetricsServer("127.0.0.1:0", metrics, Manner(slow=False))
    try:
        with LiveEngine(MACHINE, REQUESTS, metrics, faster=100.0) as live:

            def served() -> bool:
                with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
                    shown = samples(answer.read().decode())
                return shown["vllm:e2e_request_latency_seconds_count"] == len(REQUESTS)

            eventually(served, "the page never showed all requests")
            assert live.idle
    finally:
        server.close()


def test_of_two_parts_of_a_request_one_has_its_first_token_and_the_other_the_rest() -> None:
    requests = [Request(1.0, 900, 20), Request(2.0, 30, 1), Request(3.0, 5, 2)]
    assert parts_of(requests, "") is requests
    prompts, tokens = parts_of(requests, PRODUCER), parts_of(requests, CONSUMER)
    assert prompts == [replace(one, output_tokens=1) for one in requests]
    assert [one.output_tokens for one in tokens] == [19, 1], "an answer of one token has no second part"
    assert [one.prompt_tokens - one.cached_tokens for one in tokens] == [1, 1], "no prompt is computed again"
