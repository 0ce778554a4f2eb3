"""A real Prometheus scrapes a running system and answers, with data, every query of every panel, rule and page."""

from __future__ import annotations

import io
import json
import re
import time
from typing import Any

import pytest
import yaml
from tests.dashboards import BOARDS, filled, panels, queries
from tests.observability.conftest import JOB, NAMESPACE, PLACE, POOL, ROOT, RULES, VALUES, Prometheus, World, await_true

from perseus_agent.servers.engine_metrics import ENGINE_SERIES
from perseus_agent.servers.metrics import GPU_SERIES
from perseus_core import keys
from perseus_operator.plugin import cli

OF_ENGINES = "|".join(series.name for series in ENGINE_SERIES)
_COMPARISON = re.compile(r"\s(?:==|<=|>=|>|<)\s")


def never_answered(prometheus: Prometheus, queries: list[tuple[str, str]]) -> str:
    """Those that find no data however long one waits: where the machine stalls, a scrape fails now and then."""
    deadline_s = time.monotonic() + 60
    while queries and time.monotonic() < deadline_s:
        queries = [(where, query) for where, query in queries if not prometheus.values(query)]
    return "\n".join(f"{where}: {query}" for where, query in queries)


def test_every_panel_and_page_has_data(prometheus: Prometheus) -> None:
    asked = [*queries(VALUES).items()]
    assert len(asked) > 50
    assert not never_answered(prometheus, asked)


def test_every_drop_down_has_values(prometheus: Prometheus) -> None:
    for path in BOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((.*), (\w+)\)", filled(variable["query"], VALUES))
                assert asked, variable
                series = prometheus.get("/api/v1/series", **{"match[]": asked[1]})
                assert all(asked[2] in labels for labels in series), variable
                assert series, variable


def links_of(panel: dict[str, Any]) -> list[tuple[str, str]]:
    """Where a panel links to: the address, and the field to which the link belongs, or nothing for each series."""
    config = panel.get("fieldConfig", {})
    of_series = [(link["url"], "") for link in config.get("defaults", {}).get("links", ())]
    of_fields = [
        (link["url"], override["matcher"]["options"])
        for override in config.get("overrides", ())
        for each in override["properties"]
        if each["id"] == "links"
        for link in each["value"]
    ]
    return of_series + of_fields


def test_links_lead_from_the_fleet_to_its_jobs_and_nodes_and_back(prometheus: Prometheus) -> None:
    boards = {board["uid"]: board for path in BOARDS for board in [json.loads(path.read_text())]}
    ways = set()
    for uid, board in boards.items():
        for panel in panels(board):
            for address, field in links_of(panel):
                target = re.match(r"/d/([\w-]+)\?\$\{datasource:queryparam\}&", address)
                assert target, address
                ways.add((uid, target[1]))
                variables = {variable["name"] for variable in boards[target[1]]["templating"]["list"]}
                chosen = dict(re.findall(r"&var-(\w+)=\$\{([^}]+)\}", address))
                assert chosen
                assert set(chosen) <= variables
                where = f"{uid}, {panel['title']}: {address}"
                for source in chosen.values():
                    kind, _, name = source.rpartition(".")
                    if kind == "__field.labels":
                        for query in panel["targets"]:
                            labelled = filled(query["expr"], VALUES)
                            found = prometheus.get("/api/v1/query", query=labelled)["result"]
                            assert found, where
                            assert all(name in series["metric"] for series in found), where
                    elif kind == "__data.fields":
                        [split] = [each for each in panel["transformations"] if each["id"] == "extractFields"]
                        assert split["options"]["source"] == field
                        pattern = split["options"]["regExp"].strip("/").replace("(?<", "(?P<").replace(r"\/", "/")
                        matched = re.fullmatch(pattern, f"{NAMESPACE}/{JOB}")
                        assert matched, where
                        assert matched[name] == {"job_namespace": NAMESPACE, "job_name": JOB}[name]
                    else:
                        assert source == "__value.raw"
                        assert field in chosen, where
    assert ways >= {
        ("perseus-fleet", "perseus-job"),
        ("perseus-fleet", "perseus-node"),
        ("perseus-job", "perseus-node"),
        ("perseus-node", "perseus-job"),
    }


def test_series_of_each_gpu_are_needed_by_their_dashboard_alone() -> None:
    """Agents do not export them unless they are told to."""
    named = re.compile(rf"(?<![\w:])({'|'.join(series.name for series in GPU_SERIES)})(?![\w:])")
    assert {where.partition(",")[0] for where, query in queries(VALUES).items() if named.search(query)} == {
        "perseus-gpu"
    }
    assert not named.search(RULES.read_text())


def test_every_panel_asks_the_chosen_datasource() -> None:
    for path in BOARDS:
        for panel in panels(json.loads(path.read_text())):
            if panel["type"] not in {"row", "text"}:
                assert panel["description"], panel["title"]
                for target in panel["targets"]:
                    assert target["datasource"]["uid"] == "${datasource}"


def test_every_rule_is_evaluated_and_rests_on_data(prometheus: Prometheus) -> None:
    groups = prometheus.get("/api/v1/rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    written = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(rules) == len(written) == len([rule for rule in rules if rule["health"] == "ok"])
    measures = []
    for rule in written:
        # An alert is silent when all is well; what it compares must be there nevertheless.
        measured = _COMPARISON.split(rule["expr"])[0] if "alert" in rule else rule["expr"]
        if measured.startswith("absent("):
            measured = measured.removeprefix("absent(").removesuffix(")")
        measures.append((rule["expr"], measured))
    assert not never_answered(prometheus, measures)


def test_no_alert_of_trouble_fires_on_a_system_that_is_well(prometheus: Prometheus) -> None:
    alerts = prometheus.get("/api/v1/alerts")["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []


def test_scraping_renames_no_label(prometheus: Prometheus) -> None:
    assert [name for name in prometheus.get("/api/v1/labels") if name.startswith("exported_")] == []


def test_series_stay_within_the_budget_that_the_metrics_page_states(prometheus: Prometheus) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    budget = re.search(
        r"(\d+) for each PerseusJob, (\d+) for each node with GPUs, (\d+) for each job on a\s+node, (\d+) for each"
        r"\s+ServingPool, (\d+) more for each node that serves.*"
        r"exports\s+(\d+) more for each GPU",
        page,
        re.DOTALL,
    )
    assert budget
    counted = (
        f'count({{__name__=~"perseus_.+", job_name="{JOB}", node=""}})',
        f'max(count by (node) ({{__name__=~"perseus_.+", __name__!~"{OF_ENGINES}", node!="", job_name="", gpu=""}}))',
        f'max(count by (node) ({{__name__=~"perseus_.+", job_name="{JOB}", node!="", gpu=""}}))',
        f'count({{__name__=~"perseus_.+", job_name="{POOL}", node=""}})',
        f'max(count by (node) ({{__name__=~"{OF_ENGINES}"}}))',
        'max(count by (gpu) ({__name__=~"perseus_.+", gpu!=""}))',
    )
    for query, most in zip(counted, budget.groups(), strict=True):
        (series,) = prometheus.values(query)
        assert 0 < series <= int(most), query


def test_the_report_adds_up_what_the_counters_have_counted(prometheus: Prometheus, world: World) -> None:
    def report(*arguments: str) -> Any:
        out, err = io.StringIO(), io.StringIO()
        kubeconfig = str(world.cluster.server.kubeconfig)
        common = ("--kubeconfig", kubeconfig, "-n", NAMESPACE, "--prometheus", prometheus.url, "--since", "1m")
        assert cli.run(["report", *common, "-o", "json", *arguments], out, err) == 0, err.getvalue()
        return json.loads(out.getvalue())

    def counted() -> Any:
        found = [row for row in report()["figures"]["rows"] if row["kind"] == "job"]
        return found if found and found[0]["estimated"].get("saved") else None

    [row] = await_true("energy is counted", counted)
    assert row["row"] == f"{NAMESPACE}/{JOB}"
    assert 0 < row["estimated"]["savedKilowattHours"] < row["measured"]["energyKilowattHours"]
    assert row["measured"]["iterations"] > 0
    assert row["measured"]["gpuHours"] > 0

    def named(*arguments: str) -> list[str]:
        return [each["row"] for each in report(*arguments)["figures"]["rows"] if each["kind"] == "job"]

    assert named("--by", "namespace", "-A") == [NAMESPACE]
    assert named("--by", "class") == ["frugal"]
    assert named("-n", "elsewhere") == []


def test_figures_agree_with_the_status(prometheus: Prometheus, world: World) -> None:
    def agreed() -> bool:
        savings = world.status().get("savings")
        if savings is None:  # the plan has just changed
            return False
        saved = float(savings["energy"].rstrip("%")) / 100
        return prometheus.values("job:perseus_saved_ratio:baseline") == pytest.approx([saved], abs=0.02)

    await_true("savings agree", agreed)
    await_true(
        "all GPUs are shown", lambda: prometheus.values(f'sum(perseus_node_job_gpus{{job_name="{JOB}"}})') == [6.0]
    )
    power = "sum(rate(perseus_node_gpu_energy_joules_total[10s]))"
    await_true("GPUs draw power", lambda: sum(prometheus.values(power)) > 0)


def test_a_budget_says_what_its_status_says(prometheus: Prometheus, world: World) -> None:
    def agreed() -> bool:
        found = world.custom.get_cluster_custom_object(*PLACE[:2], keys.BUDGET_PLURAL, "ample").get("status", {})
        shown = prometheus.values("perseus_budget_granted_watts")
        return bool(found) and shown == [found["grantedWatts"]] and prometheus.values("perseus_budget_kept") == [1.0]

    await_true("figures agree", agreed)
    assert prometheus.values("perseus_budget_watts") == [1_000_000.0]


def test_a_deleted_job_takes_its_series_along(prometheus: Prometheus, world: World) -> None:
    world.apply_job("short", mode="Recommend")
    ready = 'perseus_job_ready{job_name="short"}'
    await_true("the job is shown", lambda: prometheus.values(ready))
    world.custom.delete_namespaced_custom_object("perseus.energy", "v1alpha1", NAMESPACE, "perseusjobs", "short")
    await_true("its series are gone", lambda: not prometheus.values(ready))
