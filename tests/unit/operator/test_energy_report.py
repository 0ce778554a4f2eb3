"""What jobs took and saved over a time that is past: sums and groups."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_operator.plugin.energy_report import energy_report
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
