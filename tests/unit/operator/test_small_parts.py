"""The operator's small doors: settings, metrics and probes, the solver's worker, the PerseusFrontier."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from tests.doubles.stored_objects import stored_object

from perseus_operator.api.status import Figures, Savings, StatusFigures
from perseus_operator.api.stored import MAX_FRONTIER_BYTES
from perseus_operator.controller.settings import InvalidSetting, Settings, parse_settings
from perseus_operator.errors import InvalidProfile, SolveFailed, SolveTimeout
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.values import JobRef
from perseus_operator.servers.metrics_server import MetricsServer
from perseus_operator.solving.calibration import check_calibration
from perseus_operator.solving.frontier import (
    SolvedFrontier,
    _fill,
    encode_plans,
    frontier_to_spec,
    open_frontier,
    stored_frontier,
)
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.request import SolveRequest, parse_profile, schedule_of
from perseus_operator.solving.worker import solve_in_process
from perseus_proto.planset import decode_plan_set
from perseus_sim.profiles import profile_csv
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.usefixtures("short_search")

REQUEST = SolveRequest(
    profile_csv(2), "1f1b", stages=2, microbatches=3, chunks=None, blocking_power_mw=83_640, points=10
)


def solved(data: bytes, digest: str = "d") -> SolvedFrontier:
    return open_frontier(data, REQUEST, digest=digest, solve_ms=7, restored=False)


# ---------------------------------------------------------------------------------------------------------- settings


def test_a_flag_wins_over_the_environment_which_wins_over_the_default() -> None:
    environment = {"PERSEUS_OPERATOR_INSECURE": "true", "PERSEUS_OPERATOR_LEASE_TTL_S": "60"}
    settings = parse_settings(["--lease-ttl-s", "90", "--namespaces", "a, b"], environment)
    assert (settings.insecure, settings.lease_ttl_s, settings.solve_workers) == (True, 90.0, 2)
    assert settings.namespace_list == ("a", "b")
    assert settings.limits.lease_ttl_s == 90.0


_WEBHOOK = ("--webhook-cert", "x", "--webhook-key", "x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--tls-cert, --tls-key, --tls-ca: all three are needed"),
        (["--insecure", "--tls-ca", "x"], "--insecure: excludes"),
        (["--insecure", "--lease-ttl-s", "soon"], "--lease-ttl-s: must be a number, not 'soon'"),
        (["--insecure", "--lease-ttl-s", "3"], "--agent-timeout-s: must be at most a third of --lease-ttl-s"),
        (["--insecure", "--solve-workers", "0"], "--solve-workers: must be at least 1"),
        (["--insecure", "--agent-namespace", ""], "--agent-namespace: must not be empty"),
        (["--insecure", "--log-level", "LOUD"], "--log-level: must be"),
        (["--insecure", "--webhook-address", "[::]:1"], "--webhook-cert, --webhook-key: both are needed"),
        (["--insecure", *_WEBHOOK, "--webhook-address", "here"], "--webhook-address: must be host:port, "),
        (["--insecure", "--metrics-address", "::1:80"], "an IPv6 host in brackets, not '::1:80'"),
        (["--insecure", "--agent-socket", "/agent.sock"], "--agent-socket: must be an absolute path below"),
    ],
)
def test_a_wrong_setting_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        parse_settings(arguments, {})
    assert message in str(refused.value)
    with pytest.raises(InvalidSetting, match="PERSEUS_OPERATOR_INSECURE: must be true or false"):
        parse_settings([], {"PERSEUS_OPERATOR_INSECURE": "perhaps"})


def test_every_setting_explains_itself() -> None:
    for name, field in Settings.__dataclass_fields__.items():
        assert field.metadata["doc"].rstrip().endswith("."), name


# ----------------------------------------------------------------------------------------------------------- metrics


def show(metrics: Metrics, figures: StatusFigures) -> None:
    metrics.set_job(
        JobRef("ns", "a", "u"), figures, measured=None, planned_slowdown=1.0, stragglers=0, active=True, ready=True
    )


def test_what_is_not_known_is_not_shown_and_a_job_takes_its_series_along() -> None:
    metrics = Metrics()
    energy = Figures(iteration_time_microseconds=2_000_000, energy_millijoules=None)
    show(metrics, StatusFigures(baseline=energy))
    text = metrics.exposition().decode()
    assert 'perseus_job_baseline_iteration_seconds{job_name="a",job_namespace="ns"} 2.0' in text
    assert "perseus_job_baseline_iteration_joules{" not in text
    show(metrics, StatusFigures())
    assert "perseus_job_baseline_iteration_seconds{" not in metrics.exposition().decode()
    metrics.set_frontier(JobRef("ns", "a", "u"), [(1_000_000, 5_000), (1_500_000, 4_000)])
    metrics.forget_job(JobRef("ns", "a", "u"))
    assert 'job_name="a"' not in metrics.exposition().decode()


def test_saved_energy_is_the_difference_of_two_counters_that_miss_no_iteration_with_a_baseline() -> None:
    metrics, job = Metrics(), JobRef("ns", "a", "u")
    baseline = Measured(time_us=1_000_000, energy_mj=10_000, iterations=5)

    def counted() -> dict[str, float]:
        found = re.findall(r'perseus_job_(\w+_total){job_name="a".*} (\S+)', metrics.exposition().decode())
        return {name: float(value) for name, value in found}

    for energy_mj, before in ((9_000, None), (None, baseline), (9_000, replace(baseline, energy_mj=None))):
        metrics.count_iteration(job, energy_mj, before)
        assert counted() == {}, "nothing is counted on one side alone"
    for energy_mj in (9_000, 12_000, 8_000):
        metrics.count_iteration(job, energy_mj, baseline)
    assert counted() == {"energy_joules_total": 29, "baseline_energy_joules_total": 30, "iterations_total": 3}
    metrics.forget_job(job)
    assert counted() == {}


def test_what_is_saved_is_exposed_with_its_interval_where_it_has_one() -> None:
    metrics = Metrics()

    def saved(savings: Savings | None) -> dict[str, float]:
        show(metrics, StatusFigures(savings=savings))
        found = re.findall(r"perseus_job_(saved_\w+){.*} (\S+)", metrics.exposition().decode())
        return {name: float(value) for name, value in found}

    assert saved(None) == {}, "absent is not zero"
    assert saved(Savings(energy="-1.50%", slowdown="0.00%")) == {"saved_ratio": -0.015}
    interval = Savings(energy="13.20%", slowdown="0.00%", energy_low="12.10%", energy_high="14.30%")
    expected = {"saved_ratio": 0.132, "saved_low_ratio": 0.121, "saved_high_ratio": 0.143}
    assert saved(interval) == pytest.approx(expected)


def test_a_job_has_one_series_of_what_it_is_also_after_an_edit() -> None:
    metrics, job = Metrics(), JobRef("ns", "a", "u")

    def infos() -> list[tuple[str, str]]:
        return re.findall(r'perseus_job_info{energy_class="(.*)",job_name="a".*model="(.*)"} 1.0', exposed())

    def exposed() -> str:
        return metrics.exposition().decode()

    metrics.set_info(job, "frugal", "")
    assert infos() == [("frugal", "")]
    metrics.set_info(job, "frugal", "llama-70b")
    assert infos() == [("frugal", "llama-70b")]
    metrics.forget_job(job)
    assert infos() == []


def test_the_probes_tell_progress() -> None:
    wrong: list[str | None] = [None]
    server = MetricsServer("127.0.0.1:0", Metrics(), healthy=lambda: wrong[0], ready=lambda: True)
    try:

        def get(path: str) -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://{server.address}{path}") as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert get("/healthz") == (200, "ok")
        assert get("/readyz") == (200, "ok")
        assert get("/nothing")[0] == 404
        assert "perseus_operator_reconcile_seconds" in get("/metrics")[1]
        wrong[0] = "the event loop has been silent for 31 s"
        assert get("/healthz") == (503, "the event loop has been silent for 31 s")
    finally:
        server.close()


# ----------------------------------------------------------------------------------------------------------- solving


async def test_the_worker_answers_refuses_and_is_stopped() -> None:
    pool = SolverPool(workers=1, timeout_s=60, memory_mib=8192)
    data, seconds = await pool.solve(REQUEST)
    assert seconds > 0
    assert len(solved(data).view.times_us) == 10
    with pytest.raises(InvalidProfile, match="energy"):
        await pool.solve(replace(REQUEST, profile_csv="stage,instruction,frequency,time\n"))
    with pytest.raises(SolveFailed, match="schedule '2f2b' is unknown"):
        await pool.solve(replace(REQUEST, schedule="2f2b"))
    hurried = SolverPool(workers=1, timeout_s=0.05, memory_mib=8192)
    with pytest.raises(SolveTimeout, match=r"stopped after 0\.05 s"):
        await hurried.solve(REQUEST)
    starved = SolverPool(workers=1, timeout_s=60, memory_mib=16)
    with pytest.raises(SolveFailed, match=r"needs more than the 16 MiB|ended with exit code"):
        await starved.solve(REQUEST)
    assert pool.solves == 3


def test_a_profile_is_checked_with_the_message_of_the_solver() -> None:
    parse_profile(profile_csv(2).encode(), 2)
    with pytest.raises(InvalidProfile, match="stage"):
        parse_profile(profile_csv(2).encode(), 3)


# ---------------------------------------------------------------------------------------------------------- frontiers


@pytest.fixture(scope="module")
def data() -> bytes:
    return solve_in_process(REQUEST)


def test_a_kept_frontier_comes_back_only_for_the_same_inputs(data: bytes) -> None:
    spec = frontier_to_spec(solved(data))
    assert spec is not None
    ours = stored_object("job", spec)
    assert stored_frontier(replace(ours, ours=False), "d") is None  # somebody else wrote it
    claimed = stored_frontier(ours, "d")
    assert claimed is not None
    back = open_frontier(claimed[0], REQUEST, digest="d", solve_ms=claimed[1], restored=True)
    assert back.view == replace(solved(data).view, restored=True)
    assert stored_frontier(ours, "other") is None
    for wrong in ({"data": None}, {"data": "a"}, {"data": "é" * 8}, {"data": "A" * 10**6}, {"solveMilliseconds": "9"}):
        assert stored_frontier(replace(ours, spec={**spec, **wrong}), "d") is None


def test_what_does_not_fit_into_an_object_is_not_kept(data: bytes) -> None:
    huge = replace(solved(data), data=b"x" * (MAX_FRONTIER_BYTES + 1))
    assert frontier_to_spec(huge) is None
    assert frontier_to_spec(replace(huge, data=huge.data[1:])) is not None


def test_an_agent_gets_exactly_the_clocks_of_its_stages(data: bytes) -> None:
    frontier = solved(data)
    order = build_schedule("1f1b", stages=2, microbatches=3)
    both = decode_plan_set(encode_plans(frontier, {0, 1}))
    one = decode_plan_set(encode_plans(frontier, {1}))
    assert one.plan_id != both.plan_id
    assert set(one.schedules) == {1}
    for stage in (0, 1):
        own = order.span(stage)
        assert both.schedules[stage].kinds == tuple(order.kind[own].tolist())
        for point in range(10):
            want = frontier.frontier.frequencies_mhz[point, own].tolist()
            assert list(both.stage_clocks_mhz(stage, point)) == want
    assert one.stage_clocks_mhz(1, 4) == both.stage_clocks_mhz(1, 4)
    assert [p.iteration_time_us for p in both.points] == list(frontier.view.times_us)


def test_constant_instructions_keep_the_clock_before_them() -> None:
    clocks = np.array([[0, 900, 0, 0, 1200], [1410, 0, 0, 0, 0]], dtype=np.uint16)
    assert _fill(clocks).tolist() == [[1200, 900, 900, 900, 1200], [1410] * 5]


@pytest.mark.parametrize("schedule", sorted({"Interleaved1F1B", "EarlyRecompute1F1B", "GPipe"}))
def test_other_schedules_reach_the_agents_too(schedule: str) -> None:
    chunks = 2 if schedule == "Interleaved1F1B" else None
    request = replace(REQUEST, schedule=schedule, chunks=chunks, microbatches=4, points=4)
    opened = open_frontier(solve_in_process(request), request, digest="d", solve_ms=1, restored=False)
    plans = decode_plan_set(encode_plans(opened, {0, 1}))
    assert sum(map(len, plans.schedules.values())) == opened.frontier.frequencies_mhz.shape[1]


def test_a_profile_that_is_parsed_is_passed_on_and_its_text_read_by_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, profile = solve_in_process(REQUEST), parse_profile(REQUEST.profile_csv.encode(), REQUEST.stages)
    monkeypatch.setattr("perseus_solver.model.profile.read_profile", lambda *_, **__: pytest.fail("read again"))
    opened = open_frontier(data, REQUEST, digest="d", solve_ms=1, restored=False, profile=profile)
    assert opened.schedule.instructions == schedule_of(REQUEST, profile).instructions
    with pytest.raises(SolveFailed, match="version"):
        check_calibration("{}", REQUEST, profile)
