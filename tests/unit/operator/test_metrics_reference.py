"""Series have names that survive scraping, a bounded number, and a reference that names them all."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from tests.doubles.job_hardware import job_hardware
from tests.offenders import about_each
from tests.unit.operator.conftest import Desk, Job

from perseus_agent.servers.engine_metrics import ENGINE_SERIES, PAGES
from perseus_agent.servers.metrics import GPU_SERIES, SERIES, STATES
from perseus_agent.servers.series import QUANTILES, Series
from perseus_core.evidence import Evidence
from perseus_core.marks import ClockControl, MarkSource
from perseus_core.serving import ClockReason
from perseus_operator.api.status import StatusFigures
from perseus_operator.families.training.features.hardware.hardware import hardware_to_status
from perseus_operator.jobs.metrics import MAX_FRONTIER_POINTS, Metrics
from perseus_operator.objects.values import JobRef

OF_THE_TARGET = {"job", "instance", "namespace", "pod", "container", "endpoint", "service"}
"""Labels that Prometheus, or the operator of Prometheus, gives to what it scrapes."""


def test_a_frontier_is_shown_by_few_points_with_both_ends_and_replaced_as_a_whole() -> None:
    metrics, job = Metrics(), JobRef("ns", "a", "u")

    def points() -> dict[int, float]:
        found = re.findall(r'frontier_seconds{.*point="(\d+)"} (\S+)', metrics.exposition().decode())
        return {int(point): float(time_s) for point, time_s in found}

    metrics.set_frontier(job, [(1_000_000 + i, 9_000 - i) for i in range(1000)])
    assert len(points()) == MAX_FRONTIER_POINTS
    assert {0, 999} < points().keys()
    assert points()[999] == pytest.approx(1.000999)
    metrics.set_frontier(job, [(2_000_000, 9_000), (3_000_000, 8_000)])
    assert points() == {0: 2.0, 1: 3.0}


def test_how_clocks_follow_a_job_is_exposed_as_far_as_it_is_known() -> None:
    metrics, job = Metrics(), JobRef("ns", "a", "u")

    def series(**more: Any) -> dict[str, float]:
        metrics.set_job(job, measured=None, planned_slowdown=1.0, stragglers=0, active=True, ready=True, **more)
        lines = [line for line in metrics.exposition().decode().splitlines() if 'job_name="a"' in line]
        return {
            re.sub(r"job_name=\S+?(,|})", "", line.rsplit(" ", 1)[0]): float(line.rsplit(" ", 1)[1]) for line in lines
        }

    def named(found: dict[str, float], part: str) -> list[float]:
        return [value for name, value in found.items() if part in name]

    unknown = series(figures=StatusFigures())
    for part in ("switch_latency", "mark_lead", "below_plan", "above_plan", "clock_control"):
        assert named(unknown, part) == [], "absent is not zero"
    hardware = hardware_to_status(job_hardware("H100", 30_000, 100_000), None)
    evidence = Evidence(
        control=ClockControl.HELD, lead_us=40_000, below_us=10, above_us=20, computing_us=1000, marks=MarkSource.HOST
    )
    known = series(figures=StatusFigures(hardware=hardware), evidence=evidence)
    assert named(known, "switch_latency_median_seconds") == [0.03]
    assert named(known, "switch_latency_p99_seconds") == [0.1]
    assert named(known, "switch_latency_measured") == [0.0]
    assert named(known, "mark_lead_seconds") == [0.04]
    assert named(known, "below_plan_ratio") == [0.01]
    assert named(known, "above_plan_ratio") == [0.02]
    assert named(known, 'control="held"') == [1.0]
    assert sum(named(known, "clock_control")) == 1.0
    metrics.forget_job(job)
    assert 'job_name="a"' not in metrics.exposition().decode()


async def test_the_number_of_series_of_a_job_does_not_depend_on_its_nodes() -> None:
    async def series(nodes: int) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        desk = Desk()
        pipeline = {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": nodes}
        desk.job = Job(pipeline=pipeline)
        made = desk.job.run()
        for iteration in range(1, 6):
            desk.job.train(iteration, (1.0,) * nodes)
            made = desk.job.settle()
        assert len(desk.job.nodes) == nodes
        await desk.report(made)
        families = desk.metrics.registry.collect()
        return {(s.name, frozenset(s.labels.items())) for family in families for s in family.samples}

    few, many = await series(2), await series(24)
    assert few == many
    measured = {name for name, labels in few if ("job_name", "job") in labels}
    assert {"perseus_job_measured_iteration_joules", "perseus_job_frontier_seconds"} <= measured


def test_the_reference_names_every_family() -> None:
    metrics = Metrics()
    described = {name.removesuffix("_total") for name, *_ in metrics.reference}
    assert described == {family.name for family in metrics.registry.collect()}


OF_AGENTS = (*SERIES, *ENGINE_SERIES, *GPU_SERIES)
ALL = [*Metrics().reference, *((s.name, s.kind, s.labels, s.help) for s in OF_AGENTS)]


@about_each(ALL, lambda described: described[0])
def test_every_series_follows_the_conventions(described: tuple[str, str, tuple[str, ...], str]) -> None:
    name, kind, labels, text = described
    assert name.startswith("perseus_")
    assert name.endswith("_total") == (kind == "counter")
    assert not OF_THE_TARGET & set(labels), "the scraper would rename it to exported_..."
    assert text.endswith(".")
    assert not re.search(r"_(ms|us|mj|mw|mhz|percent)(_|$)", name), "base units"


def test_no_name_is_given_twice() -> None:
    """A name that nodes and GPUs shared would count everything twice in a sum."""
    names = [name for name, *_ in ALL]
    assert len(names) == len(set(names))


def test_what_the_agent_describes_is_what_it_exposes() -> None:
    for series in OF_AGENTS:
        family = series.family()
        family.add_metric(["x"] * len(series.labels), {} if series.kind == "info" else 1)
        assert family.samples[0].name == series.name


VALUES = {"state": len(STATES), "quantile": len(QUANTILES), "limited_by": len(ClockReason), "page": len(PAGES)}
NAMED_BY_DRIVERS = {"profile"}
"""Few of them hold at once; one is counted."""


def test_series_stay_within_their_budgets() -> None:
    def most(described: Iterable[Series]) -> int:
        return sum(VALUES.get(series.labels[-1], 1) for series in described)

    assert most(GPU_SERIES) <= 23 + 1
    assert most(ENGINE_SERIES) <= 17
    assert most(series for series in SERIES if "job_name" not in series.labels) <= 29
    assert most(series for series in SERIES if "job_name" in series.labels) <= 10


def test_no_label_has_more_values_in_a_larger_fleet() -> None:
    """Besides the object of which a series is: of a job, a budget, or the node that an agent runs on."""
    bounded = {"point", "control", "energy_class", "model", "version", "result", "call"}
    bounded |= {"engine", "time", "limited_by", "verdict"}
    of_operator = {label for _, _, labels, _ in Metrics().reference for label in labels}
    assert of_operator <= bounded | {"job_namespace", "job_name", "budget"}
    of_agents = {label for series in (*SERIES, *ENGINE_SERIES) for label in series.labels}
    assert of_agents <= VALUES.keys() | NAMED_BY_DRIVERS | {"node", "job_namespace", "job_name"}
    for _, _, labels, _ in Metrics().reference:
        if "energy_class" in labels:
            assert {"job_namespace", "job_name"} < set(labels), "of a job, which has one class"
