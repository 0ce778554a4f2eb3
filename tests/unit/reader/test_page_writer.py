"""What is written of a page is what happened between it and the one before."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from perseus_core.lengths import UNKNOWN, length_of, length_place
from perseus_core.serving import MOST_SHARES, place_of
from perseus_proto.engine_channel import EngineReader, EngineReading, EngineWriter, counted_between
from perseus_reader.pages import read_page
from perseus_reader.reader import PageWriter
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.recorded_pages import EngineKind


class Memory:
    """Both ends of an engine's memory."""

    def __init__(self) -> None:
        self.reader = EngineReader.create()
        self.writer = EngineWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd))

    def read(self) -> EngineReading:
        found = self.reader.read()
        assert found is not None
        return found


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.reader.close()


def served(
    metrics: EngineMetrics, requests: int, *, prompts: bool = True, tokens: int = 10, gap_s: float = 0.02
) -> None:
    """So many requests run, and each gets so many tokens, one with every step."""
    metrics.set_load(waiting=0, running=requests, kv_share=0.25)
    if prompts:
        for _ in range(requests):
            metrics.first_token(0.2, prompt_tokens=50)
        metrics.step(50 * requests, requests, gap_s)
    for _ in range(tokens):
        metrics.inter_token(gap_s, requests)
        metrics.step(0, requests, gap_s)


def page(metrics: EngineMetrics, writer: PageWriter) -> None:
    writer.write(read_page(metrics.render(EngineKind.VLLM)))


def test_the_first_page_says_the_load_alone(memory: Memory) -> None:
    metrics, writer = EngineMetrics(), PageWriter(memory.writer)
    served(metrics, 4)
    page(metrics, writer)
    counts = memory.read().counts
    assert (counts.running, counts.kv_share_ppm) == (4, 250_000)
    assert counts.steps == counts.prompt_tokens == counts.generated_tokens == 0


def test_steps_without_prompts_have_the_time_of_the_gaps_between_tokens(memory: Memory) -> None:
    metrics, writer = EngineMetrics(), PageWriter(memory.writer)
    served(metrics, 4)
    page(metrics, writer)
    served(metrics, 4, prompts=False, tokens=25, gap_s=0.02)
    page(metrics, writer)
    counts = memory.read().counts
    assert counts.steps == 25
    assert counts.steps_us / counts.steps == pytest.approx(20_000)
    assert counts.running_sum / counts.steps == 4
    assert counts.generated_tokens == 100


def test_an_interval_with_prompts_counts_tokens_and_times_and_no_step(memory: Memory) -> None:
    metrics, writer = EngineMetrics(), PageWriter(memory.writer)
    page(metrics, writer)
    before = memory.read()
    served(metrics, 4)
    page(metrics, writer)
    after = memory.read()
    assert after.counts.prompt_tokens == 200
    assert after.counts.steps == after.counts.prompt_steps == 0
    [(place, count)] = counted_between(before.first_tokens, after.first_tokens)
    assert count == 4
    assert place >= place_of(0.2)


def test_lengths_of_requests_are_counted_by_themselves_as_a_page_says_not_which_belong_together(memory: Memory) -> None:
    metrics, writer = EngineMetrics(), PageWriter(memory.writer)
    page(metrics, writer)
    before = memory.read()
    for _ in range(3):
        metrics.finished(prompt_tokens=700, output_tokens=90, time_per_output_token_s=0.02, e2e_s=2.0)
    page(metrics, writer)
    assert counted_between(before.lengths, memory.read().lengths) == [
        (length_place(length_of(700), UNKNOWN), 3),
        (length_place(UNKNOWN, length_of(90)), 3),
    ]


def test_an_engine_that_starts_again_counts_from_there(memory: Memory) -> None:
    metrics, writer = EngineMetrics(), PageWriter(memory.writer)
    page(metrics, writer)
    served(metrics, 4)
    page(metrics, writer)
    before = memory.read()
    fresh = EngineMetrics()
    page(fresh, writer)
    served(fresh, 2)
    page(fresh, writer)
    after = memory.read()
    assert after.counts.prompt_tokens - before.counts.prompt_tokens == 100
    assert sum(count for _, count in counted_between(before.first_tokens, after.first_tokens)) == 2


def test_a_page_that_claims_a_flood_of_requests_writes_a_bounded_number(memory: Memory) -> None:
    metrics, writer = EngineMetrics(), PageWriter(memory.writer)
    page(metrics, writer)
    before = memory.read()
    for _ in range(3 * MOST_SHARES):
        metrics.first_token(0.2, prompt_tokens=1)
    page(metrics, writer)
    assert sum(count for _, count in counted_between(before.first_tokens, memory.read().first_tokens)) == MOST_SHARES
