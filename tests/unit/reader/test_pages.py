"""Pages of real engines, as recorded, are read; what cannot be a page is refused with one line."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perseus_core.serving import TIME_EDGES_US, place_of
from perseus_reader.pages import MOST_BYTES, BadPage, read_page
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.recorded_pages import EngineKind

READ = [EngineKind.VLLM, EngineKind.VLLM_OLD, EngineKind.SGLANG, EngineKind.TENSORRT_LLM]


def page(kind: EngineKind) -> bytes:
    """Of an engine that has served 50 requests of 100 tokens, 20 of them cached, and serves 7 more."""
    metrics = EngineMetrics()
    metrics.set_load(waiting=3, running=7, kv_share=0.4)
    for _ in range(50):
        metrics.arrived()
        metrics.first_token(0.12, prompt_tokens=100, cached_tokens=20)
        metrics.inter_token(0.012, count=5)
        metrics.step(80, 6, 0.012)
        metrics.finished(prompt_tokens=100, output_tokens=6, time_per_output_token_s=0.012, e2e_s=0.2, cached_tokens=20)
    metrics.preempted(2)
    return metrics.render(kind)


@pytest.mark.parametrize("kind", READ)
def test_a_page_says_load_tokens_and_times(kind: EngineKind) -> None:
    found = read_page(page(kind))
    assert (found.waiting, found.running, found.kv_share) == (3, 7, pytest.approx(0.4))
    assert found.prompt_tokens == 50 * 80, "those of a cached prefix are not computed"
    assert found.generated_tokens == 50 * 6
    assert found.preempted == (0 if kind is EngineKind.TENSORRT_LLM else 2)
    assert found.first_tokens.count == 50
    assert found.gaps.total / found.gaps.count == pytest.approx(0.012)


@pytest.mark.parametrize("kind", READ)
def test_a_time_is_counted_at_its_buckets_upper_edge(kind: EngineKind) -> None:
    """Never as kept when it was missed: no time is counted below the place that it has."""
    found = read_page(page(kind))
    for histogram, seconds in ((found.first_tokens, 0.12), (found.tokens, 0.012)):
        places = histogram.places()
        assert sum(places.values()) == histogram.count
        assert min(places) >= place_of(seconds)
        assert max(places) < len(TIME_EDGES_US), "every recorded page has an edge above these"


def test_an_engine_without_a_time_to_the_first_token_is_refused_by_name() -> None:
    with pytest.raises(BadPage, match=r"no engine that is known \(sglang, tensorrt-llm, vllm\)"):
        read_page(page(EngineKind.TGI))


def test_what_is_missing_is_named() -> None:
    lacking = b"\n".join(line for line in page(EngineKind.VLLM).split(b"\n") if b"num_requests_running" not in line)
    with pytest.raises(BadPage, match="does not show vllm:num_requests_running"):
        read_page(lacking)


def test_engines_of_one_pod_are_added_up_and_the_fullest_memory_counts() -> None:
    one = page(EngineKind.VLLM)
    other = one.replace(b'engine="0"', b'engine="1"')
    other = other.replace(b'vllm:kv_cache_usage_perc{engine="1",model_name="', b'vllm:kv_cache_usage_perc{e="')
    both, single = read_page(one + other), read_page(one)
    assert both.running == 2 * single.running
    assert both.first_tokens.count == 2 * single.first_tokens.count
    assert both.kv_share == single.kv_share


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"vllm:num_requests_running{", b"vllm:num_requests_running{", "at most 65,536"),
        (b"vllm:kv_cache_usage_perc{", b"vllm:kv_cache_usage_perc{", "from 0 to 1"),
        (b"vllm:generation_tokens_total{", b"vllm:generation_tokens_total{", r"from 0 to 2\^53"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_name(before: bytes, after: bytes, message: str) -> None:
    number = b"NaN" if b"generation" in before else b"1e6"
    lines = [
        after + line.partition(before)[2].rpartition(b" ")[0] + b" " + number if line.startswith(before) else line
        for line in page(EngineKind.VLLM).split(b"\n")
    ]
    with pytest.raises(BadPage, match=message):
        read_page(b"\n".join(lines))


def test_a_page_that_is_too_large_is_not_looked_at() -> None:
    with pytest.raises(BadPage, match="more than 1,048,576 bytes"):
        read_page(page(EngineKind.VLLM).ljust(MOST_BYTES + 1, b"\n"))


@given(st.binary(max_size=300), st.integers(0, 3_000))
@example(b'\nvllm:kv_cache_usage_perc{le="\xff"} 1\n', 0)
@example(b"\nvllm:num_requests_running \n", 0)
@example(b'\nvllm:time_to_first_token_seconds_bucket{le="x"} 1\n', 0)
def test_any_bytes_are_a_page_or_refused(bytes_: bytes, at: int) -> None:
    whole = page(EngineKind.VLLM)
    for attempt in (bytes_, whole[:at] + bytes_ + whole[at:]):
        with contextlib.suppress(BadPage):
            assert 0 <= read_page(attempt).kv_share <= 1


@pytest.mark.parametrize(("role", "absent"), [("prefill", b"request_time_per_output"), ("decode", b"time_to_first")])
def test_an_engine_that_does_one_part_says_so_and_need_not_show_the_other_time(role: str, absent: bytes) -> None:
    text = page(EngineKind.SGLANG)
    assert read_page(text).role == ""
    assert read_page(text.replace(b'engine_type="unified"', b'engine_type="%s"' % role.encode())).role == role
    lacking = b"\n".join(line for line in text.split(b"\n") if absent not in line)
    with pytest.raises(BadPage, match=absent.decode()):
        read_page(lacking)
    assert read_page(lacking.replace(b'engine_type="unified"', b'engine_type="%s"' % role.encode())).role == role
