"""Dashboards and rules at 100,000 GPUs: a real Prometheus with every series of such a fleet; no panel draws more of it
than a person can read.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from tests.dashboards import BOARDS, filled, panels
from tests.observability import fleet
from tests.observability.conftest import Prometheus, await_true, scraping

from perseus_operator.jobs.metrics import MAX_FRONTIER_POINTS

EVERY_S = 20
"""Between scrapes: each brings 600,000 samples."""
LARGEST = fleet.job_of(0)
VALUES = {
    "$__rate_interval": "2m",
    "$__range": "5m",
    "$__interval": f"{EVERY_S}s",
    "$job_namespace": LARGEST.namespace,
    "$job_name": LARGEST.name,
    "$pool_namespace": LARGEST.namespace,
    "$pool_name": LARGEST.name,
    "$node": ".*",
}
"""The largest job, and all nodes."""
MOST = {"stat": 1, "timeseries": 10, "table": 20, "xychart": MAX_FRONTIER_POINTS + 3}
"""Series that a query of such a panel may find."""
QUERIES = [
    pytest.param(panel["type"], target["expr"], id=f"{path.stem}-{panel['title']}-{target['refId']}")
    for path in BOARDS
    if path.stem != "perseus-gpu"
    for panel in panels(json.loads(path.read_text()))
    for target in panel.get("targets", ())
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Values change from scrape to scrape, so that what is largest changes, too."""
    versions = range(2)
    pages = [fleet.operators_page(seed) for seed in versions], [fleet.agents_page(seed) for seed in versions]
    folder = tmp_path_factory.mktemp("large")
    with fleet.served(*pages) as targets, scraping(targets, folder, every_s=EVERY_S) as asked:
        # Of the last to be recorded: several values, and one of a full minute, at which a panel looks.
        rate = "cluster:perseus_baseline_energy_joules:rate5m"
        recorded = f"count_over_time({rate}[5m]) >= 3 and count_over_time({rate}[5m:1m]) >= 1"
        await_true("a few scrapes are recorded", lambda: asked.values(recorded), 300)
        yield asked


def test_the_fleet_is_as_large_as_it_should_be(large: Prometheus) -> None:
    # A scrape that fails on a machine that stalls leaves its figures empty for a while, here and below.
    await_true("all agents", lambda: large.values("sum(cluster:perseus_agents:count)") == [fleet.NODES])
    assert large.values("sum(cluster:perseus_jobs:count)") == [fleet.JOBS]
    assert large.values('count({__name__=~"namespace:perseus_power.+"})') == [fleet.NAMESPACES]


@pytest.mark.parametrize(("kind", "expression"), QUERIES)
def test_a_panel_shows_no_more_than_a_person_can_read(large: Prometheus, kind: str, expression: str) -> None:
    asked = {"query": filled(expression, VALUES), "timeout": "60s"}

    def series() -> list[object]:
        if kind != "timeseries":
            return list(large.get("/api/v1/query", **asked)["result"])
        span = {"start": str(time.time() - 60), "end": str(time.time()), "step": "10"}
        return list(large.get("/api/v1/query_range", **asked, **span)["result"])

    assert len(await_true("the panel has data", series)) <= MOST[kind]


def test_every_rule_is_evaluated(large: Prometheus) -> None:
    groups = large.get("/api/v1/rules")["groups"]
    unwell = {rule["name"]: rule.get("lastError") for g in groups for rule in g["rules"] if rule["health"] != "ok"}
    assert unwell == {}


def test_without_a_choice_for_all_of_the_time_range_more_is_drawn(large: Prometheus) -> None:
    """Why panels do not ask for ``topk`` alone."""
    span = {"start": str(time.time() - 60), "end": str(time.time()), "step": "10"}
    drawn = large.get("/api/v1/query_range", query="topk(10, perseus_node_gpu_power_watts)", **span)["result"]
    assert len(drawn) > 10
