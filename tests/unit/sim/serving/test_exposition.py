"""The metrics page of a simulated engine: it parses, it is the engine's own page, and it says what was fed."""

from __future__ import annotations

import gzip
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from perseus_sim.serving import exposition
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.metrics_server import LEAST_DELAY_S, MOST_DELAY_S, Manner, MetricsServer
from perseus_sim.serving.recorded_pages import SOURCES, Distribution, EngineKind, Number, recorded_page
from perseus_sim.serving.requests import Request

ENGINES = pytest.mark.parametrize("engine", list(EngineKind))
MODEL = "some/model"
ITL_VLLM = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
ITL_SGLANG = [0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4]
ITL_SGLANG += [0.6, 0.8, 1, 2, 4, 6, 8]
TTFT_VLLM = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160]
TTFT_VLLM += [640, 2560]
TTFT_SGLANG = [0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400]
SIGNALS = {
    EngineKind.VLLM: (
        "vllm:num_requests_waiting vllm:num_requests_running vllm:kv_cache_usage_perc",
        {"vllm:time_to_first_token_seconds": TTFT_VLLM, "vllm:inter_token_latency_seconds": ITL_VLLM},
    ),
    EngineKind.VLLM_OLD: (
        "vllm:num_requests_waiting vllm:num_requests_running vllm:gpu_cache_usage_perc",
        {"vllm:time_to_first_token_seconds": TTFT_VLLM, "vllm:time_per_output_token_seconds": None},
    ),
    EngineKind.SGLANG: (
        "sglang:num_queue_reqs sglang:num_running_reqs sglang:token_usage",
        {"sglang:time_to_first_token_seconds": TTFT_SGLANG, "sglang:inter_token_latency_seconds": ITL_SGLANG},
    ),
    EngineKind.TGI: ("tgi_queue_size tgi_batch_current_size", {"tgi_request_mean_time_per_token_duration": None}),
    EngineKind.TENSORRT_LLM: (
        "trtllm_num_requests_waiting trtllm_num_requests_running trtllm_kv_cache_utilization",
        {"trtllm_time_to_first_token_seconds": TTFT_VLLM, "trtllm_time_per_output_token_seconds": ITL_VLLM},
    ),
}
"""As the engines' sources define them: gauges, and histograms with their edges (None: not stated here)."""


def series(page: bytes) -> list[str]:
    """The page without its values."""
    return [line if line.startswith("#") else line.rpartition(" ")[0] for line in page.decode().splitlines()]


def values(page: bytes) -> dict[str, float]:
    lines = [line for line in page.decode().splitlines() if line and not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def one(page: bytes, name: str, label: str = "") -> float:
    """The only series of a name, of those with a label."""
    found = [v for key, v in values(page).items() if key.partition("{")[0] == name and label in key]
    assert len(found) == 1, (name, label, found)
    return found[0]


def busy(metrics: EngineMetrics) -> None:
    metrics.arrived()
    metrics.set_load(3, 17, 0.25)
    metrics.first_token(0.21, prompt_tokens=900, cached_tokens=100)
    metrics.step(800, 18, 0.05)
    metrics.inter_token(0.0231, 17)
    metrics.preempted(2)
    metrics.step(0, 17, 0.0231)
    metrics.finished(
        prompt_tokens=900, output_tokens=101, time_per_output_token_s=0.02, e2e_s=2.5, queue_s=0.1, cached_tokens=100
    )


@ENGINES
def test_a_page_is_the_engines_own_but_for_its_values(engine: EngineKind) -> None:
    recorded = files(exposition.__package__).joinpath("pages", f"{engine}.prom").read_bytes()
    metrics = EngineMetrics(MODEL)
    idle = values(metrics.render(engine))
    busy(metrics)
    page = metrics.render(engine)
    assert series(page) == series(recorded.replace(b'"MODEL"', f'"{MODEL}"'.encode()))[2:]
    assert not page.startswith(b"# vllm-project")
    kept = values(recorded.replace(b'"MODEL"', f'"{MODEL}"'.encode()).partition(b"\n")[2].partition(b"\n")[2])
    # An idle engine has its recorded values; only a free cache is not nothing.
    assert {k for k in idle if idle[k] != kept[k]} <= {k for k in idle if "kv_cache_free_blocks" in k}


@ENGINES
def test_a_page_says_first_from_which_repository_and_files_it_is(engine: EngineKind) -> None:
    first, how = files(exposition.__package__).joinpath("pages", f"{engine}.prom").read_text("utf-8").splitlines()[:2]
    assert first.startswith("# ")
    assert "/" in first.split()[1]
    assert how.startswith(("# Recorded from", "# Rendered from"))


@ENGINES
def test_a_strangers_parser_understands_it(engine: EngineKind) -> None:
    metrics = EngineMetrics('a "quoted" \\ name\n')
    busy(metrics)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render(engine).decode())}
    gauges, histograms = SIGNALS[engine]
    assert {families[name].type for name in gauges.split()} == {"gauge"}
    for name, expected in histograms.items():
        assert families[name].type == "histogram"
        edges = [float(s.labels["le"]) for s in families[name].samples if s.name.endswith("_bucket")]
        assert edges == sorted(edges)
        assert expected is None or edges == [*expected, float("inf")]
    names = {s.labels.get("model_name") for f in families.values() for s in f.samples} - {None}
    assert names == (set() if engine is EngineKind.TGI else {'a "quoted" \\ name\n'})


@ENGINES
def test_every_source_has_its_place_and_shows_what_was_fed(engine: EngineKind) -> None:
    metrics = EngineMetrics(MODEL)
    busy(metrics)
    page = metrics.render(engine)
    for wanted, source in SOURCES[engine].items():
        name, _, label = wanted.partition("{")
        if isinstance(source, Distribution):
            assert one(page, name + "_count", label) > 0, wanted
        else:
            assert one(page, name, label) > 0, wanted
    shown_sources = {s.source for s in recorded_page(engine).samples}
    fed = {source[0] if isinstance(source, tuple) else source for source in SOURCES[engine].values()}
    assert shown_sources == fed


def test_every_number_and_distribution_is_shown_by_an_engine() -> None:
    sources = [source for of_engine in SOURCES.values() for source in of_engine.values()]
    assert {s[0] if isinstance(s, tuple) else s for s in sources} == {*Number, *Distribution}


@given(
    times=st.lists(st.tuples(st.floats(1e-4, 100.0), st.integers(1, 50)), max_size=30),
    engine=st.sampled_from([EngineKind.VLLM, EngineKind.VLLM_OLD, EngineKind.SGLANG]),
)
def test_sums_counts_and_buckets_agree_with_what_was_fed(times: list[tuple[float, int]], engine: EngineKind) -> None:
    metrics = EngineMetrics(MODEL)
    for time_s, count in times:
        metrics.inter_token(time_s, count)
    page = metrics.render(engine)
    name = next(key for key, source in SOURCES[engine].items() if source is Distribution.INTER_TOKEN)
    assert one(page, name + "_count") == sum(count for _, count in times)
    assert one(page, name + "_sum") == pytest.approx(sum(time_s * count for time_s, count in times))
    buckets = {key: v for key, v in values(page).items() if key.startswith(name + "_bucket")}
    for key, shown in buckets.items():
        edge = float(key.partition('le="')[2].partition('"')[0])
        assert shown == sum(count for time_s, count in times if time_s <= edge)


CALLS: list[Callable[[EngineMetrics, Any], None]] = [
    lambda m, d: m.arrived(),
    lambda m, d: m.set_load(d(st.integers(0, 500)), d(st.integers(0, 500)), d(st.floats(0.0, 1.0))),
    lambda m, d: m.first_token(d(st.floats(0.0, 90.0)), prompt_tokens=d(st.integers(1, 9_000))),
    lambda m, d: m.inter_token(d(st.floats(0.0, 9.0)), d(st.integers(1, 64))),
    lambda m, d: m.step(d(st.integers(0, 4_096)), d(st.integers(0, 300)), d(st.floats(1e-3, 2.0))),
    lambda m, d: m.preempted(d(st.integers(0, 3))),
    lambda m, d: m.finished(
        prompt_tokens=d(st.integers(1, 9_000)),
        output_tokens=d(st.integers(1, 2_000)),
        time_per_output_token_s=d(st.floats(0.0, 1.0)),
        e2e_s=d(st.floats(0.0, 900.0)),
        queue_s=0.0,
    ),
]


@given(data=st.data(), calls=st.lists(st.sampled_from(range(len(CALLS))), min_size=1, max_size=12))
def test_counters_and_buckets_never_fall(data: st.DataObject, calls: list[int]) -> None:
    metrics = EngineMetrics(MODEL)
    engine = data.draw(st.sampled_from(EngineKind))
    types = [line.split()[2:] for line in metrics.render(engine).decode().splitlines() if line.startswith("# TYPE")]
    rising = tuple(name for name, kind in types if kind in ("counter", "histogram"))
    before = values(metrics.render(engine))
    for call in calls:
        CALLS[call](metrics, data.draw)
        after = values(metrics.render(engine))
        fallen = {k for k in after if after[k] < before[k] and k.partition("{")[0].startswith(rising)}
        assert not fallen
        before = after


def test_vllm_counts_a_prompt_at_its_first_token_and_sglang_at_its_end() -> None:
    metrics = EngineMetrics(MODEL)
    metrics.step(2_048, 0, 0.2)
    assert one(metrics.render(EngineKind.VLLM), "vllm:prompt_tokens_total") == 0
    metrics.first_token(0.4, prompt_tokens=3_000)
    metrics.step(952, 1, 0.1)
    assert one(metrics.render(EngineKind.VLLM), "vllm:prompt_tokens_total") == 3_000
    assert one(metrics.render(EngineKind.VLLM), "vllm:iteration_tokens_total_sum") == 3_001
    computed = 'mode="prefill_compute"'
    assert one(metrics.render(EngineKind.SGLANG), "sglang:prompt_tokens_total") == 0
    assert one(metrics.render(EngineKind.SGLANG), "sglang:realtime_tokens_total", computed) == 3_000
    metrics.finished(prompt_tokens=3_000, output_tokens=1, time_per_output_token_s=0.0, e2e_s=0.4)
    assert one(metrics.render(EngineKind.SGLANG), "sglang:prompt_tokens_total") == 3_000


def test_the_gauges_of_sglang_are_as_old_as_its_last_prefill_or_forty_steps() -> None:
    metrics = EngineMetrics(MODEL)
    metrics.set_load(0, 4, 0.1)
    metrics.step(100, 1, 0.05)
    metrics.set_load(9, 5, 0.9)
    for _ in range(39):
        metrics.step(0, 5, 0.02)
    page = metrics.render(EngineKind.SGLANG)
    assert (one(page, "sglang:num_queue_reqs"), one(page, "sglang:token_usage")) == (0, 0.1)
    assert one(metrics.render(EngineKind.VLLM), "vllm:num_requests_waiting") == 9
    metrics.step(0, 5, 0.02)
    page = metrics.render(EngineKind.SGLANG)
    assert (one(page, "sglang:num_queue_reqs"), one(page, "sglang:token_usage")) == (9, 0.9)


def test_an_old_vllm_has_the_old_names_only() -> None:
    old, new = (EngineMetrics(MODEL).render(kind) for kind in (EngineKind.VLLM_OLD, EngineKind.VLLM))
    assert b"vllm:gpu_cache_usage_perc" in old
    assert b"vllm:kv_cache_usage_perc" not in old
    assert b"gpu_cache_usage_perc" not in new


def fetch(server: MetricsServer, path: str, **headers: str) -> tuple[int, str, bytes]:
    request = urllib.request.Request(f"http://{server.address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            body = answer.read()
            packed = answer.headers.get("Content-Encoding") == "gzip"
            return answer.status, answer.headers["Content-Type"], gzip.decompress(body) if packed else body
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read()


def test_the_server_answers_as_its_manner_says() -> None:
    metrics = EngineMetrics(MODEL)
    busy(metrics)
    waited: list[float] = []
    server = MetricsServer("127.0.0.1:0", metrics, Manner(loading=True), wait=waited.append)
    try:
        assert fetch(server, "/metrics")[0] == 503
        assert len(waited) == 1
        server.manner = Manner(EngineKind.SGLANG, enabled=False, slow=False)
        assert fetch(server, "/metrics")[0] == 404
        assert len(waited) == 1
        server.manner = Manner(EngineKind.VLLM, slow=False)
        for headers in ({}, {"Accept-Encoding": "gzip"}):
            status, content, body = fetch(server, "/metrics", **headers)
            assert (status, content.split(";")[0], body) == (200, "text/plain", metrics.render(EngineKind.VLLM))
        server.manner = Manner(EngineKind.TENSORRT_LLM, slow=False)
        assert json.loads(fetch(server, "/metrics")[2]) == []
        assert fetch(server, "/prometheus/metrics")[2] == metrics.render(EngineKind.TENSORRT_LLM)
        assert fetch(server, "/")[0] == 404
    finally:
        server.close()


def test_a_slow_engine_is_as_late_as_a_real_one_and_late_again_with_the_same_seed() -> None:
    def delays(seed: int) -> list[float]:
        waited: list[float] = []
        server = MetricsServer("127.0.0.1:0", EngineMetrics(MODEL), Manner(loading=True), seed=seed, wait=waited.append)
        for _ in range(2_000):
            server.answer("/metrics")
        server.close()
        return waited

    drawn = sorted(delays(1))
    assert LEAST_DELAY_S <= drawn[0] <= drawn[-1] <= MOST_DELAY_S
    assert 0.020 <= drawn[len(drawn) // 2] <= 0.042
    assert 0.090 <= drawn[int(len(drawn) * 0.99)] <= 0.180
    assert delays(1) == delays(1) != delays(2)


def test_a_router_sends_requests_and_what_is_no_list_of_lengths_is_refused() -> None:
    taken: list[Request] = []
    server = MetricsServer("127.0.0.1:0", EngineMetrics(), Manner(slow=False), submit=taken.extend)
    deaf = MetricsServer("127.0.0.1:0", EngineMetrics(), Manner(slow=False))
    try:
        assert post(server, "/requests", b"[[300, 20], [7, 1]]") == 204
        assert taken == [Request(0.0, 300, 20), Request(0.0, 7, 1)]
        for body in (b"", b"{", b"[3]", b'[["many", 1]]', b"[[1, 2, 3, 4, 5]]", b"[[1]]"):
            assert post(server, "/requests", body) == 400, body
        assert post(server, "/metrics", b"[]") == 404
        assert post(deaf, "/requests", b"[[300, 20]]") == 404
        assert len(taken) == 2
    finally:
        server.close()
        deaf.close()


def post(server: MetricsServer, path: str, body: bytes) -> int:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", body, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
