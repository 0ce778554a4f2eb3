"""What jobs took and saved over a time that is past: sums and groups."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_operator.plugin import cli
from perseus_operator.plugin.energy_report import energy_report, pool_report
from perseus_operator.plugin.pool_tables import pool_report_text
from perseus_operator.plugin.tables import energy_report_text

KWH_J = 3_600_000
JOBS = {("team-a", "gpt3"): (8, 10, "frugal"), ("team-a", "bloom"): (19, 20, ""), ("team-b", "gpt3"): (5, 5, "frugal")}
"""Namespace and name to kWh taken, kWh at default clocks, and class."""


def answer(query: str) -> Any:
    def series(index: int) -> list[Any]:
        return [
            {"metric": {"job_namespace": ns, "job_name": name}, "value": [0, str(figures[index] * KWH_J)]}
            for (ns, name), figures in JOBS.items()
            if "{" not in query or f'job_namespace="{ns}"' in query
        ]

    if "perseus_job_info" in query:
        return [
            {"metric": {"job_namespace": ns, "job_name": name, "energy_class": of}, "value": [0, "1"]}
            for (ns, name), (_, _, of) in JOBS.items()
        ]
    return series(1 if "baseline" in query else 0)


@pytest.mark.parametrize(
    ("by", "namespace", "rows"),
    [
        ("job", None, [("team-a/gpt3", 1, 8, 2), ("team-a/bloom", 1, 19, 1), ("team-b/gpt3", 1, 5, 0)]),
        ("job", "team-b", [("team-b/gpt3", 1, 5, 0)]),
        ("namespace", None, [("team-a", 2, 27, 3), ("team-b", 1, 5, 0)]),
        ("class", None, [("frugal", 2, 13, 2), ("", 1, 19, 1)]),
    ],
)
def test_rows_are_sums_of_jobs_most_saved_first(by: str, namespace: str | None, rows: list[Any]) -> None:
    found = energy_report(answer, "30d", by, namespace)
    shown = [(r[by], r["jobs"], r["energyKilowattHours"], r["savedKilowattHours"]) for r in found["rows"]]
    assert shown == rows
    total = found["total"]
    assert total["energyKilowattHours"] == sum(row[2] for row in rows)
    usual = sum(row[2] + row[3] for row in rows)
    assert total["saved"] == pytest.approx(sum(row[3] for row in rows) / usual)


def test_the_table_says_what_it_is_of() -> None:
    text = energy_report_text(energy_report(answer, "30d", "class", None), "any namespace")
    head, first, second, total = text.splitlines()
    assert head.split() == ["CLASS", "JOBS", "ENERGY", "SAVED", "SHARE"]
    assert first.split() == ["frugal", "2", "13.000", "kWh", "2.000", "kWh", "13.33%"]
    assert second.startswith("-  ")
    assert total.startswith("total")
    empty = energy_report_text(energy_report(lambda _: [], "4w", "job", "team-c"), "namespace team-c")
    assert empty == "The Prometheus has no energy of jobs of namespace team-c in the last 4w."


def test_a_series_that_is_no_number_spoils_no_sum() -> None:
    """Found beside robusta-dev/krr issue 170: Prometheus answers NaN and Inf as such."""

    def odd(query: str) -> Any:
        series = answer(query)
        if "perseus_job_info" not in query:
            series[0]["value"][1] = "NaN"
            series[1]["value"][1] = "+Inf"
        return series

    found = energy_report(odd, "30d", "job", None)
    assert [row["job"] for row in found["rows"]] == ["team-b/gpt3"]
    assert found["total"]["energyKilowattHours"] == 5


POOLS = {
    ("team-a", "llama"): {"energy_joules": 4 * KWH_J, "generated_tokens": 2_000_000, "requests": 8_000, "saved": 0.25},
    ("team-a", "qwen"): {"energy_joules": 2 * KWH_J, "generated_tokens": 500_000, "requests": 1_000},
    ("team-b", "llama"): {"energy_joules": 1 * KWH_J, "generated_tokens": 0, "requests": 0, "saved": -0.01},
}
"""What each took and did; saved, where it is measured, with an interval of 0.05 to either side."""


def pool_answer(query: str) -> Any:
    if "perseus_job_info" in query:
        labels = {"job_namespace": "team-a", "job_name": "llama", "energy_class": "frugal"}
        return [{"metric": labels, "value": [0, "1"]}]
    name = query.partition("perseus_pool_")[2]
    field, shift = next(
        (field, shift)
        for begin, field, shift in (
            ("energy_joules_total", "energy_joules", 0.0),
            ("generated_tokens_total", "generated_tokens", 0.0),
            ("requests_total", "requests", 0.0),
            ("saved_ratio", "saved", 0.0),
            ("saved_low_ratio", "saved", -0.05),
            ("saved_high_ratio", "saved", 0.05),
        )
        if name.startswith(begin)
    )
    return [
        {"metric": {"job_namespace": ns, "job_name": pool}, "value": [0, str(figures[field] + shift)]}
        for (ns, pool), figures in POOLS.items()
        if field in figures and ("{" not in query or f'job_namespace="{ns}"' in query)
    ]


@pytest.mark.parametrize(
    ("by", "namespace", "rows"),
    [
        ("job", None, [("team-a/llama", 1, 4), ("team-a/qwen", 1, 2), ("team-b/llama", 1, 1)]),
        ("job", "team-b", [("team-b/llama", 1, 1)]),
        ("namespace", None, [("team-a", 2, 6), ("team-b", 1, 1)]),
        ("class", None, [("frugal", 1, 4), ("", 2, 3)]),
    ],
)
def test_pools_are_charged_for_what_they_took_most_first(by: str, namespace: str | None, rows: list[Any]) -> None:
    found = pool_report(pool_answer, "30d", by, namespace)
    assert [(row[by], row["pools"], row["energyKilowattHours"]) for row in found["rows"]] == rows
    total = found["total"]
    assert total["energyKilowattHours"] == sum(row[2] for row in rows)
    assert total["pools"] == sum(row[1] for row in rows)
    for row in [*found["rows"], total]:
        energy_j = KWH_J * row["energyKilowattHours"]
        if row["generatedTokens"]:
            assert row["joulesPerThousandTokens"] * row["generatedTokens"] / 1000 == pytest.approx(energy_j)
            assert row["joulesPerRequest"] * row["requests"] == pytest.approx(energy_j)
        else:
            assert row["joulesPerThousandTokens"] is row["joulesPerRequest"] is None, "it is not for nothing"


def test_what_pools_save_has_its_interval_or_is_not_said() -> None:
    lines = pool_report_text(pool_report(pool_answer, "30d", "job", None)).splitlines()
    assert lines[1].endswith("25.00% (20.00% to 30.00%)")
    assert lines[1].split()[:7] == ["team-a/llama", "1", "4.000", "kWh", "2,000,000", "7200", "8,000"]
    assert "%" not in lines[2], "it was not measured"
    assert lines[3].endswith("-1.00% (-6.00% to 4.00%)")
    assert "%" not in pool_report_text(pool_report(pool_answer, "30d", "namespace", None)), "no sum of intervals"
    assert pool_report_text(pool_report(lambda _: [], "30d", "job", None)) == ""


def test_the_command_has_pools_below_jobs_and_alone_where_there_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(query: str) -> Any:
        return pool_answer(query) if "perseus_pool" in query else answer(query)

    def report(query: Any) -> list[str]:
        monkeypatch.setattr(cli, "KubeReader", lambda *_: SimpleNamespace(namespace="team-a"))
        monkeypatch.setattr(cli, "Prometheus", lambda *_: query)
        out = io.StringIO()
        assert cli.run(["report", "-A"], out, io.StringIO()) == 0
        return out.getvalue().split("\n\n")

    jobs, pools = report(both)
    assert jobs.startswith("JOB ")
    assert pools.startswith("POOL ")
    assert report(lambda query: pool_answer(query) if "perseus_pool" in query else []) == [pools]
    assert report(lambda query: [] if "perseus_pool" in query else answer(query)) == [jobs + "\n"]
    assert "no energy of jobs of any namespace" in report(lambda _: [])[0]
