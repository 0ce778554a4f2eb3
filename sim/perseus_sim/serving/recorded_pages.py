"""Metrics pages of real engines, and where the live values of a simulated engine stand in them.

A page was recorded from the engine's own code, so its names, types, labels, buckets, HELP lines and order are true; its
first two lines say from which repository, files and version. Only the values that a simulated engine feeds replace the
recorded ones; everything else stays as in an idle engine. `SOURCES` names these series.

- vLLM counts a whole prompt, cached tokens too, when its first token comes, not while its chunks are computed.
- SGLang counts ``prompt_tokens_total`` and ``generation_tokens_total`` when a request has finished, and refreshes its
  gauges with a prefill or each 40th decode step only (``--decode-log-interval``).
- TGI has no metric of its KV cache and none of the time to first token; its page is the largest by its 1,024 buckets.
- TensorRT-LLM serves its page at ``/prometheus/metrics``; ``/metrics`` is a JSON list. It counts finished requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cache
from importlib.resources import files
from typing import Final, Literal

MODEL: Final = b'"MODEL"'
"""Stands for the model's name, a label's value, in a recorded page."""


class EngineKind(StrEnum):
    """An engine and its version; the value is the name of its recorded page."""

    VLLM = "vllm-0.32.0"
    VLLM_OLD = "vllm-0.8.5"
    """With the names of before 0.9, such as ``vllm:gpu_cache_usage_perc``."""
    SGLANG = "sglang-0.5.23"
    TGI = "tgi-3"
    TENSORRT_LLM = "tensorrt-llm-2026"


class Number(Enum):
    """What an engine counts (tokens, requests, steps), or how it stands now."""

    ARRIVED = auto()
    WAITING = auto()
    RUNNING = auto()
    KV_SHARE = auto()
    KV_FREE_SHARE = auto()
    LOGGED_WAITING = auto()
    """As SGLang last refreshed its gauges; likewise the next two."""
    LOGGED_RUNNING = auto()
    LOGGED_KV_SHARE = auto()
    PROMPT_TOKENS = auto()
    """Of prompts whose first token came, those found in the cache included."""
    CACHED_TOKENS = auto()
    COMPUTED_TOKENS = auto()
    STEP_PROMPT_TOKENS = auto()
    """Computed so far, chunk by chunk."""
    GENERATED_TOKENS = auto()
    FINISHED = auto()
    FINISHED_PROMPT_TOKENS = auto()
    FINISHED_CACHED_TOKENS = auto()
    FINISHED_OUTPUT_TOKENS = auto()
    PREEMPTED = auto()
    PREFILL_STEPS = auto()
    DECODE_STEPS = auto()
    LAST_STEP_S = auto()


class Distribution(Enum):
    """What an engine observes: seconds, or tokens."""

    TIME_TO_FIRST_TOKEN = auto()
    INTER_TOKEN = auto()
    TIME_PER_OUTPUT_TOKEN = auto()
    END_TO_END = auto()
    QUEUE = auto()
    PREFILL = auto()
    DECODE = auto()
    INFERENCE = auto()
    PREFILL_STEP = auto()
    DECODE_STEP = auto()
    PROMPT_TOKENS = auto()
    COMPUTED_TOKENS = auto()
    CACHED_TOKENS = auto()
    OUTPUT_TOKENS = auto()
    STEP_TOKENS = auto()
    STEP_PROMPT_TOKENS = auto()


_N, _D = Number, Distribution
_TRT_BLOCKS: Final = 13_155
_SGLANG_TOKENS: Final = 420_960
_VLLM_BOTH: Final[dict[str, Number | Distribution]] = {
    "vllm:num_requests_running": _N.RUNNING,
    "vllm:num_requests_waiting": _N.WAITING,
    "vllm:num_preemptions_total": _N.PREEMPTED,
    "vllm:prompt_tokens_total": _N.PROMPT_TOKENS,
    "vllm:generation_tokens_total": _N.GENERATED_TOKENS,
    'vllm:request_success_total{finished_reason="stop"': _N.FINISHED,
    "vllm:request_prompt_tokens": _D.PROMPT_TOKENS,
    "vllm:request_generation_tokens": _D.OUTPUT_TOKENS,
    "vllm:iteration_tokens_total": _D.STEP_TOKENS,
    "vllm:time_to_first_token_seconds": _D.TIME_TO_FIRST_TOKEN,
    "vllm:e2e_request_latency_seconds": _D.END_TO_END,
    "vllm:request_queue_time_seconds": _D.QUEUE,
    "vllm:request_inference_time_seconds": _D.INFERENCE,
    "vllm:request_prefill_time_seconds": _D.PREFILL,
    "vllm:request_decode_time_seconds": _D.DECODE,
}
SOURCES: Final[dict[EngineKind, dict[str, Number | Distribution | tuple[Number, float]]]] = {
    EngineKind.VLLM: {
        **_VLLM_BOTH,
        'vllm:num_requests_waiting_by_reason{reason="capacity"': _N.WAITING,
        "vllm:kv_cache_usage_perc": _N.KV_SHARE,
        "vllm:prefix_cache_queries_total": _N.PROMPT_TOKENS,
        "vllm:prefix_cache_hits_total": _N.CACHED_TOKENS,
        "vllm:prompt_tokens_cached_total": _N.CACHED_TOKENS,
        'vllm:prompt_tokens_cached_by_source_total{source="device"': _N.CACHED_TOKENS,
        'vllm:prompt_tokens_by_source_total{source="local_compute"': _N.COMPUTED_TOKENS,
        'vllm:prompt_tokens_by_source_total{source="local_cache_hit"': _N.CACHED_TOKENS,
        "vllm:inter_token_latency_seconds": _D.INTER_TOKEN,
        "vllm:request_time_per_output_token_seconds": _D.TIME_PER_OUTPUT_TOKEN,
        "vllm:request_prefill_kv_computed_tokens": _D.COMPUTED_TOKENS,
    },
    EngineKind.VLLM_OLD: {
        **_VLLM_BOTH,
        "vllm:gpu_cache_usage_perc": _N.KV_SHARE,
        "vllm:gpu_prefix_cache_queries_total": _N.PROMPT_TOKENS,
        "vllm:gpu_prefix_cache_hits_total": _N.CACHED_TOKENS,
        "vllm:time_per_output_token_seconds": _D.INTER_TOKEN,
    },
    EngineKind.SGLANG: {
        "sglang:num_running_reqs": _N.LOGGED_RUNNING,
        "sglang:num_queue_reqs": _N.LOGGED_WAITING,
        "sglang:token_usage": _N.LOGGED_KV_SHARE,
        "sglang:full_token_usage": _N.LOGGED_KV_SHARE,
        "sglang:num_used_tokens": (_N.LOGGED_KV_SHARE, _SGLANG_TOKENS),
        "sglang:kv_used_tokens": (_N.LOGGED_KV_SHARE, _SGLANG_TOKENS),
        "sglang:num_retracted_requests_total": _N.PREEMPTED,
        'sglang:realtime_tokens_total{mode="prefill_compute"': _N.STEP_PROMPT_TOKENS,
        'sglang:realtime_tokens_total{mode="prefill_cache"': _N.CACHED_TOKENS,
        'sglang:realtime_tokens_total{mode="decode"': _N.GENERATED_TOKENS,
        "sglang:prompt_tokens_total": _N.FINISHED_PROMPT_TOKENS,
        "sglang:generation_tokens_total": _N.FINISHED_OUTPUT_TOKENS,
        "sglang:cached_tokens_total": _N.FINISHED_CACHED_TOKENS,
        "sglang:num_requests_total": _N.FINISHED,
        "sglang:http_requests_total": _N.ARRIVED,
        "sglang:http_responses_total": _N.FINISHED,
        "sglang:queue_time_seconds": _D.QUEUE,
        "sglang:time_to_first_token_seconds": _D.TIME_TO_FIRST_TOKEN,
        "sglang:inter_token_latency_seconds": _D.INTER_TOKEN,
        "sglang:request_time_per_output_token_seconds": _D.TIME_PER_OUTPUT_TOKEN,
        "sglang:e2e_request_latency_seconds": _D.END_TO_END,
        "sglang:prompt_tokens_histogram": _D.PROMPT_TOKENS,
        "sglang:uncached_prompt_tokens_histogram": _D.COMPUTED_TOKENS,
        "sglang:generation_tokens_histogram": _D.OUTPUT_TOKENS,
    },
    EngineKind.TGI: {
        "tgi_request_count": _N.ARRIVED,
        "tgi_request_success": _N.FINISHED,
        "tgi_queue_size": _N.WAITING,
        "tgi_batch_current_size": _N.RUNNING,
        'tgi_batch_inference_count{method="prefill"': _N.PREFILL_STEPS,
        'tgi_batch_inference_count{method="decode"': _N.DECODE_STEPS,
        'tgi_batch_inference_success{method="prefill"': _N.PREFILL_STEPS,
        'tgi_batch_inference_success{method="decode"': _N.DECODE_STEPS,
        'tgi_batch_inference_duration{method="prefill"': _D.PREFILL_STEP,
        'tgi_batch_inference_duration{method="decode"': _D.DECODE_STEP,
        'tgi_batch_forward_duration{method="prefill"': _D.PREFILL_STEP,
        'tgi_batch_forward_duration{method="decode"': _D.DECODE_STEP,
        "tgi_request_duration": _D.END_TO_END,
        "tgi_request_queue_duration": _D.QUEUE,
        "tgi_request_inference_duration": _D.INFERENCE,
        "tgi_request_mean_time_per_token_duration": _D.TIME_PER_OUTPUT_TOKEN,
        "tgi_request_input_length": _D.PROMPT_TOKENS,
        "tgi_request_generated_tokens": _D.OUTPUT_TOKENS,
    },
    EngineKind.TENSORRT_LLM: {
        "trtllm_num_requests_running": _N.RUNNING,
        "trtllm_num_requests_waiting": _N.WAITING,
        "trtllm_kv_cache_utilization": _N.KV_SHARE,
        "trtllm_kv_cache_used_blocks": (_N.KV_SHARE, _TRT_BLOCKS),
        "trtllm_kv_cache_free_blocks": (_N.KV_FREE_SHARE, _TRT_BLOCKS),
        "trtllm_iteration_latency_seconds": _N.LAST_STEP_S,
        "trtllm_num_requests_completed_total": _N.FINISHED,
        'trtllm_request_success_total{finished_reason="stop"': _N.FINISHED,
        "trtllm_prompt_tokens_total": _N.FINISHED_PROMPT_TOKENS,
        "trtllm_generation_tokens_total": _N.FINISHED_OUTPUT_TOKENS,
        "trtllm_time_to_first_token_seconds": _D.TIME_TO_FIRST_TOKEN,
        "trtllm_time_per_output_token_seconds": _D.TIME_PER_OUTPUT_TOKEN,
        "trtllm_e2e_request_latency_seconds": _D.END_TO_END,
        "trtllm_request_queue_time_seconds": _D.QUEUE,
        "trtllm_request_prefill_time_seconds": _D.PREFILL,
        "trtllm_request_decode_time_seconds": _D.DECODE,
        "trtllm_request_inference_time_seconds": _D.INFERENCE,
        "trtllm_prompt_cached_tokens_per_request": _D.CACHED_TOKENS,
        "trtllm_prefill_batch_tokens": _D.STEP_PROMPT_TOKENS,
    },
}
"""Of each engine: a family, or one of its series by the label that sets it apart, and what it shows; a number may be
multiplied, as by the blocks of the cache."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A place in a page where a live value belongs.

    Attributes:
        before: all that stands before the value, since the last sample.
        source: what it shows.
        part: of a distribution: its sum, its count, or all that is at most this edge.
        times: what a number is multiplied by.
    """

    before: bytes
    source: Number | Distribution
    part: Literal["sum", "count"] | float = 0.0
    times: float = 1.0


@dataclass(frozen=True, slots=True)
class Page:
    """A recorded page: its samples in order, and the end after the last."""

    samples: tuple[Sample, ...]
    end: bytes


@cache
def recorded_page(kind: EngineKind) -> Page:
    """The page of an engine, with the places of its live values."""
    text = files(__package__).joinpath("pages", f"{kind}.prom").read_text(encoding="utf-8")
    samples: list[Sample] = []
    before: list[str] = []
    for line in text.splitlines()[2:]:  # the first two say where it comes from
        series, _, _ = line.rpartition(" ")
        match = None if line.startswith("#") or not line else _source(series, SOURCES[kind])
        if match is None:
            before.append(line + "\n")
            continue
        source, part, times = match
        samples.append(Sample("".join([*before, series, " "]).encode(), source, part, times))
        before = ["\n"]
    return Page(tuple(samples), "".join(before).encode())


@cache
def edges(distribution: Distribution) -> tuple[float, ...]:
    """The upper edges of the buckets that any engine has for a distribution, without infinity."""
    pages = (recorded_page(kind) for kind in EngineKind)
    parts = {s.part for page in pages for s in page.samples if s.source is distribution}
    return tuple(sorted(part for part in parts if isinstance(part, float) and part < float("inf")))


def _source(
    series: str, sources: dict[str, Number | Distribution | tuple[Number, float]]
) -> tuple[Number | Distribution, Literal["sum", "count"] | float, float] | None:
    """What a series shows, which part of it, and times what; None: nothing that is fed."""
    sample, _, labels = series.partition("{")
    for wanted, source in sources.items():
        family, _, label = wanted.partition("{")
        if not sample.startswith(family) or (label and label not in labels):
            continue
        suffix = sample[len(family) :]
        if isinstance(source, Number) and not suffix:
            return source, 0.0, 1.0
        if isinstance(source, tuple) and not suffix:
            return source[0], 0.0, source[1]
        if isinstance(source, Distribution):
            if suffix == "_bucket":
                return source, float(labels.partition('le="')[2].partition('"')[0]), 1.0
            if suffix == "_sum":
                return source, "sum", 1.0
            if suffix == "_count":
                return source, "count", 1.0
    return None
