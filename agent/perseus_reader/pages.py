"""What a metrics page says, in the few numbers that clocks follow; of which engine it is, its names show.

A page is a stranger's: its bytes, lines and numbers are bounded, and the first thing that cannot be ends it with one
message. Counters and histograms of several engines of one pod (data parallel) are added up; of the memory for keys and
values the fullest counts. ``docs/serving-signals.md`` says what each engine does not show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

from perseus_core.lengths import length_of
from perseus_core.serving import MOST_SEQUENCES, TIME_EDGES_US, place_of

MOST_BYTES: Final = 1 << 20
"""The largest recorded page has 97,059; one of an engine with many adapters several times as many."""
MOST_SAMPLES: Final = 20_000
"""Of the families that are read."""
_MOST_COUNT: Final = 2.0**53
"""A counter as a float is exact up to here."""


class BadPage(Exception):
    """A page cannot be used; the message says what of it, in one line."""


@dataclass(frozen=True, slots=True)
class EnginePage:
    """Where one engine shows what; families without their suffixes, and with a label where only one series counts.

    Attributes:
        engine: its name, and the form of its page where that has changed.
        marker: a family that no other engine has.
        waiting: requests in the queue.
        running: requests that are being served, those whose prompt is computed among them.
        kv_share: used share of the memory for keys and values.
        preempted: requests that gave it back.
        prompt_tokens: computed; without those of a cached prefix.
        cached_tokens: to take from the former, where it counts whole prompts; empty: it does not.
        generated_tokens: sent.
        first_tokens: histogram of the time to the first token.
        tokens: histogram of the mean time between the tokens of a request.
        gaps: histogram of each time between two tokens; empty: ``tokens`` must do.
        prompts: histogram of the prompts' tokens; empty: there is none.
        outputs: histogram of the answers' tokens; empty: there is none.
        role: label that says ``prefill`` or ``decode`` of an engine that does that alone; empty: there is none.
    """

    engine: str
    marker: str
    waiting: str
    running: str
    kv_share: str
    preempted: str
    prompt_tokens: str
    cached_tokens: str
    generated_tokens: str
    first_tokens: str
    tokens: str
    gaps: str
    prompts: str = ""
    outputs: str = ""
    role: str = ""


ENGINES: Final = (
    EnginePage(
        engine="vllm",
        marker="vllm:kv_cache_usage_perc",
        waiting="vllm:num_requests_waiting",
        running="vllm:num_requests_running",
        kv_share="vllm:kv_cache_usage_perc",
        preempted="vllm:num_preemptions_total",
        prompt_tokens='vllm:prompt_tokens_by_source_total{source="local_compute"',
        cached_tokens="",
        generated_tokens="vllm:generation_tokens_total",
        first_tokens="vllm:time_to_first_token_seconds",
        tokens="vllm:request_time_per_output_token_seconds",
        gaps="vllm:inter_token_latency_seconds",
        prompts="vllm:request_prompt_tokens",
        outputs="vllm:request_generation_tokens",
    ),
    EnginePage(
        engine="vllm before 0.9",
        marker="vllm:gpu_cache_usage_perc",
        waiting="vllm:num_requests_waiting",
        running="vllm:num_requests_running",
        kv_share="vllm:gpu_cache_usage_perc",
        preempted="vllm:num_preemptions_total",
        prompt_tokens="vllm:prompt_tokens_total",
        cached_tokens="vllm:gpu_prefix_cache_hits_total",
        generated_tokens="vllm:generation_tokens_total",
        first_tokens="vllm:time_to_first_token_seconds",
        tokens="vllm:time_per_output_token_seconds",
        gaps="vllm:time_per_output_token_seconds",
        prompts="vllm:request_prompt_tokens",
        outputs="vllm:request_generation_tokens",
    ),
    EnginePage(
        engine="sglang",
        marker="sglang:token_usage",
        waiting="sglang:num_queue_reqs",
        running="sglang:num_running_reqs",
        kv_share="sglang:token_usage",
        preempted="sglang:num_retracted_requests_total",
        prompt_tokens='sglang:realtime_tokens_total{mode="prefill_compute"',
        cached_tokens="",
        generated_tokens='sglang:realtime_tokens_total{mode="decode"',
        first_tokens="sglang:time_to_first_token_seconds",
        tokens="sglang:request_time_per_output_token_seconds",
        gaps="sglang:inter_token_latency_seconds",
        prompts="sglang:prompt_tokens_histogram",
        outputs="sglang:generation_tokens_histogram",
        role="engine_type",
    ),
    EnginePage(
        engine="tensorrt-llm",
        marker="trtllm_kv_cache_utilization",
        waiting="trtllm_num_requests_waiting",
        running="trtllm_num_requests_running",
        kv_share="trtllm_kv_cache_utilization",
        preempted="",
        prompt_tokens="trtllm_prompt_tokens_total",
        cached_tokens="trtllm_prompt_cached_tokens_per_request",
        generated_tokens="trtllm_generation_tokens_total",
        first_tokens="trtllm_time_to_first_token_seconds",
        tokens="trtllm_time_per_output_token_seconds",
        gaps="",
    ),
)
"""Engines whose pages are read. TGI is not among them: it shows no time to the first token."""
_LONGEST_MODEL: Final = 200
_ROLES: Final = ("prefill", "decode")
_KNOWN: Final = ", ".join(sorted({names.engine.partition(" ")[0] for names in ENGINES}))


@dataclass(slots=True)
class Histogram:
    """What was observed since the engine began, in the family's unit: seconds or tokens."""

    count: float = 0.0
    total: float = 0.0
    upper: dict[float, float] = field(default_factory=dict)
    """Observations up to each edge."""

    def places(self) -> dict[int, int]:
        """Return how many times fell between the edges of ``TIME_EDGES_US``; each counts at its bucket's upper edge."""
        return self._counted(lambda edge: place_of(edge) if edge < math.inf else len(TIME_EDGES_US))

    def lengths(self) -> dict[int, int]:
        """Return how many had which length, as of ``length_of``; each counts at its bucket's upper edge."""
        return self._counted(length_of)

    def _counted(self, place_of_edge: Callable[[float], int]) -> dict[int, int]:
        counts: dict[int, int] = {}
        below = 0.0
        for edge, upto in sorted(self.upper.items()):
            place = place_of_edge(edge)
            if upto > below:
                counts[place] = counts.get(place, 0) + int(upto - below)
            below = max(below, upto)
        return counts


@dataclass(frozen=True, slots=True)
class PageReading:
    """One page. All but the load counts from the engine's begin."""

    engine: str
    model: str
    """That its labels name; empty: none."""
    waiting: int
    running: int
    kv_share: float
    preempted: int
    prompt_tokens: int
    generated_tokens: int
    first_tokens: Histogram
    tokens: Histogram
    gaps: Histogram
    prompts: Histogram
    outputs: Histogram
    role: str = ""
    """``prefill`` or ``decode``, if it does that alone."""


def read_page(page: bytes) -> PageReading:
    """Read a page in the text format of Prometheus.

    Raises:
        BadPage: it is too large, of no known engine, lacks what is needed, or has a number that cannot be.
    """
    if len(page) > MOST_BYTES:
        raise BadPage(f"the page has more than {MOST_BYTES:,} bytes")
    names = next((names for names in ENGINES if b"\n" + names.marker.encode() + b"{" in page), None)
    names = names or next((names for names in ENGINES if b"\n" + names.marker.encode() + b" " in page), None)
    if names is None:
        raise BadPage(f"the page is of no engine that is known ({_KNOWN})")
    families = _families(page, names)
    for wanted in (names.waiting, names.running, names.kv_share):
        if wanted not in families:
            raise BadPage(f"{names.engine}: the page does not show {wanted}")
    role = _role(families[names.running], names.role)
    # An engine that does one part alone may never show the other's time.
    for wanted, absent in ((names.first_tokens, "decode"), (names.tokens, "prefill")):
        if wanted not in families and role != absent:
            raise BadPage(f"{names.engine}: the page does not show {wanted}")
    prompt_tokens, cached_tokens = _number(families, names.prompt_tokens), _number(families, names.cached_tokens)
    return PageReading(
        engine=names.engine,
        model=_model(families[names.running]),
        waiting=_load(families, names.waiting),
        running=_load(families, names.running),
        kv_share=_share(families, names.kv_share),
        preempted=int(_number(families, names.preempted)),
        prompt_tokens=max(0, int(prompt_tokens - cached_tokens)),
        generated_tokens=int(_number(families, names.generated_tokens)),
        first_tokens=_histogram(families, names.first_tokens),
        tokens=_histogram(families, names.tokens),
        gaps=_histogram(families, names.gaps or names.tokens),
        prompts=_histogram(families, names.prompts),
        outputs=_histogram(families, names.outputs),
        role=role,
    )


_Samples = list[tuple[str, str, float]]
"""Of a family: suffix, labels and value."""


def _families(page: bytes, names: EnginePage) -> dict[str, _Samples]:
    """The samples of the families that are read."""
    wanted = {name for place, name in asdict(names).items() if place not in ("engine", "marker", "role") and name}
    by_family: dict[str, list[tuple[str, str]]] = {}
    for one in wanted:
        family, _, label = one.partition("{")
        by_family.setdefault(family, []).append((one, label))
    families: dict[str, _Samples] = {}
    samples = 0
    for sample, labels, text in _lines(page, names.marker):
        for suffix in ("", "_bucket", "_sum", "_count"):
            family = sample.removesuffix(suffix) if suffix else sample
            if suffix and family == sample:
                continue
            for one, label in by_family.get(family, ()):
                if label in labels:
                    samples += 1
                    families.setdefault(one, []).append((suffix, labels, _value(text, sample)))
        if samples > MOST_SAMPLES:
            raise BadPage(f"{names.engine}: the page has more than {MOST_SAMPLES:,} samples of what is read")
    return families


def _lines(page: bytes, marker: str) -> Iterator[tuple[str, str, str]]:
    """Name, labels and value of each sample whose name begins as the engine's do."""
    prefix = marker[:4].encode()
    for line in page.split(b"\n"):
        if not line.startswith(prefix):
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            raise BadPage("the page is not UTF-8 text") from None
        name, brace, rest = text.partition("{")
        if not brace:
            name, _, value = text.partition(" ")
            yield name, "", value
            continue
        labels, _, value = rest.rpartition("}")
        yield name, labels, value


def _model(samples: _Samples) -> str:
    for _, labels, _ in samples:
        model = labels.partition('model_name="')[2].partition('"')[0]
        if model and model.isprintable():
            return model[:_LONGEST_MODEL]
    return ""


def _role(samples: _Samples, label: str) -> str:
    said = {labels.partition(f'{label}="')[2].partition('"')[0] for _, labels, _ in samples} if label else set()
    return next((role for role in _ROLES if said == {role}), "")


def _value(text: str, name: str) -> float:
    number = text.split(maxsplit=1)[0] if text.strip() else ""
    try:
        value = float(number)
    except ValueError:
        raise BadPage(f"{name} has no number") from None
    if not 0.0 <= value <= _MOST_COUNT:
        raise BadPage(f"{name} must be a number from 0 to 2^53")
    return value


def _number(families: Mapping[str, _Samples], name: str) -> float:
    """A counter, or the sum of a histogram; 0 where there is none."""
    samples = families.get(name, ())
    plain = [value for suffix, _, value in samples if not suffix]
    return math.fsum(plain or [value for suffix, _, value in samples if suffix == "_sum"])


def _load(families: Mapping[str, _Samples], name: str) -> int:
    value = _number(families, name)
    if value > MOST_SEQUENCES:
        raise BadPage(f"{name} must be at most {MOST_SEQUENCES:,}")
    return round(value)


def _share(families: Mapping[str, _Samples], name: str) -> float:
    value = max(value for _, _, value in families[name])
    if value > 1.0:
        raise BadPage(f"{name} must be a share, from 0 to 1")
    return value


def _histogram(families: Mapping[str, _Samples], name: str) -> Histogram:
    histogram = Histogram()
    for suffix, labels, value in families.get(name, ()):
        if suffix == "_count":
            histogram.count += value
        elif suffix == "_sum":
            histogram.total += value
        elif suffix == "_bucket":
            edge = labels.partition('le="')[2].partition('"')[0]
            try:
                upper = float(edge)
            except ValueError:
                raise BadPage(f"{name} has a bucket without an edge") from None
            if not upper >= 0.0:
                raise BadPage(f"{name} has a bucket below 0")
            histogram.upper[upper] = histogram.upper.get(upper, 0.0) + value
    return histogram
