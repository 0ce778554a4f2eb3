"""The metrics page of a simulated engine, as a stranger's scraper sees it.

The engine feeds `EngineMetrics` in constant time for each call; `EngineMetrics.render` draws the page of any engine and
version that was recorded (`recorded_pages` says what each shows, and how late). One histogram serves all engines: its
edges are those of all of them, so a bucket of any page is an exact sum.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from itertools import accumulate
from typing import Final

from prometheus_client.utils import floatToGoString

from perseus_sim.serving.recorded_pages import MODEL, Distribution, EngineKind, Number, edges, recorded_page

_SGLANG_LOG_STEPS: Final = 40
"""SGLang's default of ``--decode-log-interval``: so many decode steps pass between two refreshes of its gauges."""


class EngineMetrics:
    """What one engine has counted and observed. One thread may feed it while others render it."""

    def __init__(self, model: str = "meta-llama/Llama-3.1-70B-Instruct") -> None:
        """``model``: the name that labels show."""
        escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._model = f'"{escaped}"'.encode()
        self._lock = threading.Lock()
        self._numbers = dict.fromkeys(Number, 0.0)
        self._numbers[Number.KV_FREE_SHARE] = 1.0
        self._histograms = {distribution: _Histogram(edges(distribution)) for distribution in Distribution}
        self._computed_in_step = 0
        self._steps_since_log = 0

    def arrived(self) -> None:
        """A request came."""
        with self._lock:
            self._numbers[Number.ARRIVED] += 1

    def first_token(self, time_s: float, *, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """The first token of a request was sent.

        Args:
            time_s: since the request came.
            prompt_tokens: of its whole prompt.
            cached_tokens: of these, found in the prefix cache.
        """
        computed = prompt_tokens - cached_tokens
        with self._lock:
            self._histograms[Distribution.TIME_TO_FIRST_TOKEN].observe(time_s)
            self._numbers[Number.PROMPT_TOKENS] += prompt_tokens
            self._numbers[Number.CACHED_TOKENS] += cached_tokens
            self._numbers[Number.COMPUTED_TOKENS] += computed
            self._computed_in_step += computed

    def inter_token(self, time_s: float, count: int = 1) -> None:
        """So many later tokens were sent, each this long after the one before it."""
        with self._lock:
            self._histograms[Distribution.INTER_TOKEN].observe(time_s, count)

    def step(self, prompt_tokens: int, generation_tokens: int, duration_s: float) -> None:
        """An engine's step is over; called after the calls for the tokens that it sent.

        Args:
            prompt_tokens: computed in this step, chunks of long prompts included.
            generation_tokens: sent, first tokens included.
            duration_s: of the step.
        """
        prefill = prompt_tokens > 0
        with self._lock:
            self._numbers[Number.STEP_PROMPT_TOKENS] += prompt_tokens
            self._numbers[Number.GENERATED_TOKENS] += generation_tokens
            self._numbers[Number.PREFILL_STEPS if prefill else Number.DECODE_STEPS] += 1
            self._numbers[Number.LAST_STEP_S] = duration_s
            timed = Distribution.PREFILL_STEP if prefill else Distribution.DECODE_STEP
            self._histograms[timed].observe(duration_s)
            self._histograms[Distribution.STEP_TOKENS].observe(self._computed_in_step + generation_tokens)
            self._histograms[Distribution.STEP_PROMPT_TOKENS].observe(prompt_tokens)
            self._computed_in_step = 0
            self._steps_since_log += 1
            if prefill or self._steps_since_log >= _SGLANG_LOG_STEPS:
                self._steps_since_log = 0
                self._log_load()

    def finished(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        time_per_output_token_s: float,
        e2e_s: float,
        queue_s: float = 0.0,
        cached_tokens: int = 0,
    ) -> None:
        """A request has its last token.

        Args:
            prompt_tokens: of its prompt.
            output_tokens: that it got.
            time_per_output_token_s: mean over the tokens after the first; 0 if there is one only.
            e2e_s: since it came.
            queue_s: that it waited before its first step.
            cached_tokens: of its prompt, found in the prefix cache.
        """
        decode_s = time_per_output_token_s * (output_tokens - 1)
        observed = {
            Distribution.TIME_PER_OUTPUT_TOKEN: time_per_output_token_s,
            Distribution.END_TO_END: e2e_s,
            Distribution.QUEUE: queue_s,
            Distribution.PREFILL: max(0.0, e2e_s - queue_s - decode_s),
            Distribution.DECODE: decode_s,
            Distribution.INFERENCE: e2e_s - queue_s,
            Distribution.PROMPT_TOKENS: prompt_tokens,
            Distribution.COMPUTED_TOKENS: prompt_tokens - cached_tokens,
            Distribution.CACHED_TOKENS: cached_tokens,
            Distribution.OUTPUT_TOKENS: output_tokens,
        }
        with self._lock:
            self._numbers[Number.FINISHED] += 1
            self._numbers[Number.FINISHED_PROMPT_TOKENS] += prompt_tokens
            self._numbers[Number.FINISHED_CACHED_TOKENS] += cached_tokens
            self._numbers[Number.FINISHED_OUTPUT_TOKENS] += output_tokens
            for distribution, value in observed.items():
                self._histograms[distribution].observe(value)

    def preempted(self, count: int = 1) -> None:
        """So many running requests lost their place in the KV cache."""
        with self._lock:
            self._numbers[Number.PREEMPTED] += count

    def set_load(self, waiting: int, running: int, kv_share: float) -> None:
        """How many requests wait and run now, and the share of the KV cache in use, 0 to 1."""
        with self._lock:
            self._numbers[Number.WAITING] = waiting
            self._numbers[Number.RUNNING] = running
            self._numbers[Number.KV_SHARE] = kv_share
            self._numbers[Number.KV_FREE_SHARE] = 1.0 - kv_share

    def render(self, engine: EngineKind) -> bytes:
        """The page of an engine as it is now, in the text format of Prometheus."""
        with self._lock:
            numbers = dict(self._numbers)
            histograms = {key: histogram.cumulative() for key, histogram in self._histograms.items()}
        page = recorded_page(engine)
        written = _integer_where_whole if engine is EngineKind.TGI else floatToGoString
        out: list[bytes] = []
        for sample in page.samples:
            if isinstance(sample.source, Number):
                value = numbers[sample.source] * sample.times
            else:
                value = histograms[sample.source][sample.part]
            out += (sample.before, written(value).encode())
        return b"".join([*out, page.end]).replace(MODEL, self._model)

    def _log_load(self) -> None:
        for logged, now in (
            (Number.LOGGED_WAITING, Number.WAITING),
            (Number.LOGGED_RUNNING, Number.RUNNING),
            (Number.LOGGED_KV_SHARE, Number.KV_SHARE),
        ):
            self._numbers[logged] = self._numbers[now]


class _Histogram:
    """Counts between edges, and the sum of what was observed."""

    def __init__(self, upper: tuple[float, ...]) -> None:
        self._upper = upper
        self._counts = [0] * (len(upper) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._upper, value)] += count
        self._sum += value * count

    def cumulative(self) -> dict[str | float, float]:
        """How many are at most each edge, how many there are, and their sum."""
        counts = list(accumulate(self._counts))
        buckets: dict[str | float, float] = dict(zip([*self._upper, float("inf")], counts, strict=True))
        return buckets | {"count": counts[-1], "sum": self._sum}


def _integer_where_whole(value: float) -> str:
    """A number as Rust writes it."""
    return str(int(value)) if value == int(value) else repr(value)
