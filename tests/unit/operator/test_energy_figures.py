"""What a report says follows from what was measured: sums, groups, hours, and what is estimated stands apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.made_up_fleet import BEGIN_S, END_S, HOUR_S, MadeUpPrometheus, Worker, fleet

from perseus_core.units import kwh_from_j
from perseus_operator.report import annex_xi, table
from perseus_operator.report.figures import TOTAL, Row, rows
from perseus_operator.report.statement import Factor, Period, Statement
from perseus_operator.report.usage import Query, read_usage

OCTOBER = Period(begin_s=BEGIN_S, end_s=END_S)


def state(query: Query, period: Period = OCTOBER, namespace: str | None = None, **more: Any) -> Statement:
    usage = read_usage(query, period, namespace, {"team-a": {"team": "vision"}, "team-b": {"team": "vision"}})
    return Statement(
        period=period,
        taken_s=END_S,
        scope="all",
        origin="http://prometheus",
        queries=usage.queries,
        program="perseus-k8s",
        members=usage.members,
        measured_hours=usage.measured_hours,
        **more,
    )


def took_kwh(workers: list[Worker], kind: str) -> float:
    return sum(
        kwh_from_j(one.hourly[f"perseus_{kind}_energy_joules_total"] * (one.last - one.first))
        for one in workers
        if one.kind == kind
    )


def of_kind(found: list[Row], kind: str) -> list[Row]:
    return [row for row in found if row.kind == kind and row.name != TOTAL]


@pytest.mark.parametrize("by", ["job", "namespace", "class", "model", "label:team"])
def test_every_grouping_adds_up_to_what_the_fleet_took(by: str) -> None:
    workers = fleet()
    statement = state(MadeUpPrometheus(workers))
    found = rows(statement, by)
    for kind in ("job", "pool"):
        groups = of_kind(found, kind)
        assert sum(row.measured["energyKilowattHours"] for row in groups) == pytest.approx(took_kwh(workers, kind))
        assert sum(row.members for row in groups) == sum(one.kind == kind for one in workers)
        energies = [row.measured["energyKilowattHours"] for row in groups]
        assert energies == sorted(energies, reverse=True), "most energy first"
    named = {row.name for row in of_kind(found, "job")}
    expected = {
        "job": {f"{one.namespace}/{one.name}" for one in workers if one.kind == "job"},
        "namespace": {f"team-{letter}" for letter in "abcde"},
        "class": {"frugal", ""},
        "model": {"gpt-0", "gpt-1", "gpt-2"},
        "label:team": {"vision", ""},
    }
    assert named == expected[by]


def test_units_and_hours_are_those_of_the_work() -> None:
    [job, pool] = fleet(1, 1)
    found = {row.kind: row for row in rows(state(MadeUpPrometheus([job, pool])), "job")}
    ran_h, joules = job.last - job.first, job.hourly["perseus_job_energy_joules_total"]
    assert found["job"].measured == pytest.approx(
        {
            "energyKilowattHours": kwh_from_j(joules * ran_h),
            "gpuHours": 64 * ran_h,
            "activeHours": ran_h,
            "activeHoursWithoutEnergy": 0,
            "iterations": 1800 * ran_h,
            "joulesPerIteration": joules / 1800,
        }
    )
    saved = job.levels["perseus_job_saved_ratio"]
    assert found["job"].estimated["saved"] == pytest.approx(saved)
    assert found["job"].estimated["savedKilowattHours"] == pytest.approx(
        kwh_from_j(joules * ran_h) * saved / (1 - saved)
    )
    assert found["job"].estimated["savedLow"] == pytest.approx(saved - 0.01)
    per_hour_kwh = kwh_from_j(pool.hourly["perseus_pool_energy_joules_total"])
    assert found["pool"].measured["kilowattHoursPerMillionGeneratedTokens"] == pytest.approx(per_hour_kwh / 30)
    assert found["pool"].measured["joulesPerRequest"] == pytest.approx(per_hour_kwh * 36)


def test_money_and_carbon_of_a_million_tokens_are_those_of_its_kwh() -> None:
    [pool] = fleet(0, 1)
    factors = {"price": Factor(source="contract", value=0.2), "locationBased": Factor(source="grid", value=350.0)}
    statement = replace(state(MadeUpPrometheus([pool])), factors=factors, currency="EUR")
    [row] = [row for row in rows(statement, "job") if row.name != TOTAL]
    kwh = row.measured["kilowattHoursPerMillionGeneratedTokens"]
    assert row.estimated["costPerMillionGeneratedTokens"] == pytest.approx(0.2 * kwh)
    assert row.estimated["locationBasedKilogramsPerMillionGeneratedTokens"] == pytest.approx(0.35 * kwh)
    assert "marketBasedKilogramsPerMillionGeneratedTokens" not in row.estimated, "nobody said that factor"


def test_intervals_of_several_jobs_are_not_added_up() -> None:
    total = next(row for row in rows(state(MadeUpPrometheus(fleet())), "job") if row.name == TOTAL)
    assert not {"savedLow", "savedHigh", "savedAsMeasuredLast"} & total.estimated.keys()


def test_factors_multiply_hour_by_hour_and_are_estimates() -> None:
    [job] = fleet(1, 0)
    query = MadeUpPrometheus([job])
    bare = state(query)
    [before] = rows(bare, "job")
    hourly = tuple(0.1 + 0.01 * (hour % 24) for hour in range(len(OCTOBER.slots)))
    factors = {
        "server": Factor(source="vendor", value=1.5),
        "pue": Factor(source="meters", value=1.2),
        "price": Factor(source="exchange", hours=hourly),
        "locationBased": Factor(source="grid", value=400.0),
        "marketBased": Factor(source="label", value=0.0),
    }
    [row] = rows(replace(bare, factors=factors, currency="EUR"), "job")
    assert row.measured == before.measured, "what was measured stays"
    an_hour_kwh = 1.8 * kwh_from_j(job.hourly["perseus_job_energy_joules_total"])
    hours = range(job.first, job.last)
    assert row.estimated["siteKilowattHours"] == pytest.approx(an_hour_kwh * len(hours))
    assert row.estimated["cost"] == pytest.approx(sum(an_hour_kwh * hourly[hour] for hour in hours))
    assert row.estimated["locationBasedKilograms"] == pytest.approx(0.4 * an_hour_kwh * len(hours))
    assert row.estimated["marketBasedKilograms"] == 0, "0 is said by its source; it is not missing"


def test_tokens_of_training_are_declared_and_so_estimated() -> None:
    [job] = fleet(1, 0)
    statement = state(MadeUpPrometheus([job]), tokens_per_step={f"{job.namespace}/{job.name}": 2e6})
    [row] = rows(statement, "job")
    assert row.estimated["trainedTokens"] == pytest.approx(2e6 * 1800 * (job.last - job.first))
    joules = job.hourly["perseus_job_energy_joules_total"]
    assert row.estimated["kilowattHoursPerMillionTrainedTokens"] == pytest.approx(kwh_from_j(joules / 1800 / 2))


def test_hours_without_energy_are_said_and_in_no_figure_of_a_unit() -> None:
    [pool] = fleet(0, 1)

    class Gap(MadeUpPrometheus):
        def __call__(self, text: str, *times: int) -> list[dict[str, Any]]:
            answer = super().__call__(text, *times)
            for series in answer if "energy_joules" in text else []:
                series["values"] = [one for one in series["values"] if one[0] > BEGIN_S + 100 * HOUR_S]
            return answer

    whole, gap = (rows(state(query), "job")[0].measured for query in (MadeUpPrometheus([pool]), Gap([pool])))
    assert gap["activeHoursWithoutEnergy"] == pytest.approx(100)
    assert gap["generatedTokens"] == whole["generatedTokens"]
    for figure in ("kilowattHoursPerMillionGeneratedTokens", "joulesPerRequest"):
        assert gap[figure] == pytest.approx(whole[figure])


@pytest.mark.parametrize(("begin", "end"), [(90, 4000), (0, 3599), (3600, 7200), (1800, 1860), (5000, 5 * HOUR_S + 1)])
def test_a_period_that_is_cut_from_hours_misses_nothing_and_counts_nothing_twice(begin: int, end: int) -> None:
    [pool] = fleet(0, 1)
    period = Period(begin_s=BEGIN_S + begin, end_s=BEGIN_S + end)
    [row] = rows(state(MadeUpPrometheus([pool]), period), "job")
    joules = pool.hourly["perseus_pool_energy_joules_total"] * (end - begin) / HOUR_S
    assert row.measured["energyKilowattHours"] == pytest.approx(kwh_from_j(joules))


@pytest.mark.parametrize(
    ("begin", "end", "gap"),
    [
        (1200, 3000, "energy was measured in 20 of 30 minutes"),
        (1200, 9000, "energy was measured in 120 of 130 minutes"),
        (0, 7200, "energy was measured in 90 of 120 minutes"),
        (1800, 9000, ""),
        (2000, 2090, ""),
        (
            -7200,
            5400,
            "energy was measured in 60 of 210 minutes, all between 2026-10-01T00:00:00Z and 2026-10-01T01:30:00Z",
        ),
    ],
)
def test_what_a_prometheus_has_not_kept_is_said_to_a_part_of_an_hour(begin: int, end: int, gap: str) -> None:
    """It holds what has happened since half past midnight."""
    [pool] = fleet(0, 1)
    pool.first = 0.5
    statement = state(MadeUpPrometheus([pool]), Period(begin_s=BEGIN_S + begin, end_s=BEGIN_S + end))
    assert statement.gap() == gap
    for write in (table.write, annex_xi.write):
        text = " ".join(write(statement, "job", "sha256:0").split()).lower()
        assert gap.lower() in text
        assert ("energy was measured in" in text) == bool(gap)


def test_a_job_of_which_nothing_was_measured_has_no_row() -> None:
    """Seen on a real Prometheus: a PerseusJob without pods is exported with zeros."""
    idle, job = fleet(2, 0)
    idle.hourly = {"perseus_job_active": 0.0, "perseus_job_iterations_total": 0.0}
    names = {row.name for row in rows(state(MadeUpPrometheus([idle, job])), "job")}
    assert names == {f"{job.namespace}/{job.name}"}


def test_a_month_of_a_fleet_is_asked_with_few_queries() -> None:
    query = MadeUpPrometheus(fleet())
    state(query)
    assert len(query.asked) <= 20


def test_a_namespace_is_asked_for_alone() -> None:
    workers = fleet()
    statement = state(MadeUpPrometheus(workers), namespace="team-b")
    assert {member.namespace for member in statement.members} == {"team-b"}
    assert all('job_namespace="team-b"' in text for text in statement.queries.values())


def test_a_series_that_is_no_number_spoils_no_sum() -> None:
    """Found beside robusta-dev/krr issue 170: Prometheus answers NaN and Inf as such."""
    workers = fleet(3, 0)

    class Odd(MadeUpPrometheus):
        def __call__(self, text: str, *times: int) -> list[dict[str, Any]]:
            answer = super().__call__(text, *times)
            if "increase(perseus_job_energy" in text or "perseus_job_saved" in text:
                answer[0]["values"] = [[moment, "NaN"] for moment, _ in answer[0]["values"]]
                answer[1]["values"] = [[moment, "+Inf"] for moment, _ in answer[1]["values"]]
            return answer

    found = {row.name: row for row in rows(state(Odd(workers)), "job")}
    with_energy = {name for name, row in found.items() if "energyKilowattHours" in row.measured}
    assert with_energy == {f"{workers[2].namespace}/{workers[2].name}", TOTAL}


def test_a_model_that_is_named_later_counts_for_the_whole_period() -> None:
    [pool] = fleet(0, 1)

    class Edited(MadeUpPrometheus):
        def __call__(self, text: str, *times: int) -> list[dict[str, Any]]:
            answer = super().__call__(text, *times)
            if "info" in text:
                before = {**answer[0], "metric": {**answer[0]["metric"], "model": ""}}
                return [before, *answer, before]
            return answer

    assert [row.name for row in rows(state(Edited([pool])), "model")] == ["llama-70b"]
