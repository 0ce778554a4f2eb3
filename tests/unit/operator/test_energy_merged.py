"""A month of the statements of its days: what it is, how it is reproduced, and which days make none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.statements import DAY_S, source_of, statement_of
from tests.made_up_fleet import BEGIN_S, END_S

from perseus_operator.errors import UnusableArgument
from perseus_operator.report import stored
from perseus_operator.report.figures import rows
from perseus_operator.report.merged import Source, merge
from perseus_operator.report.statement import Factor, Share, Statement
from perseus_solver.cli.main import main as perseus

DAYS = [source_of(day) for day in range(31)]


@pytest.fixture
def days() -> list[Source]:
    return list(DAYS)


def test_a_month_of_days_is_the_month_that_is_read_at_once(days: list[Source]) -> None:
    month = merge(days)
    assert replace(month, parts=()) == statement_of(BEGIN_S, END_S)
    assert [(part.begin_s, part.digest) for part in month.parts] == [
        (BEGIN_S + number * DAY_S, source.digest) for number, source in enumerate(days)
    ]


@settings(max_examples=3, deadline=None)
@given(st.permutations(range(31)), st.integers(1, 30))
def test_neither_the_order_of_files_nor_how_a_month_is_cut_changes_its_figures(order: list[int], cut: int) -> None:
    end_s = BEGIN_S + cut * DAY_S
    pieces = [
        Source(name=name, digest=f"sha256:{name}", statement=statement_of(first_s, last_s))
        for name, first_s, last_s in (("a", BEGIN_S, end_s), ("b", end_s, END_S))
    ]
    shuffled = merge([DAYS[number] for number in order])
    assert shuffled == merge(DAYS)
    assert rows(merge(pieces), "model") == rows(shuffled, "model")


def test_a_month_is_reproduced_from_its_own_file_and_from_its_days(
    days: list[Source], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for source in days:
        files.append(tmp_path / source.name)
        files[-1].write_text(stored.write(source.statement, "model") + "\n")
    assert perseus(["report", "--from", *map(str, files), "--format", "json"]) == 0
    month = capsys.readouterr().out
    (file := tmp_path / "october.json").write_text(month)
    assert perseus(["report", "--from", str(file), "--format", "json"]) == 0
    assert capsys.readouterr().out == month
    data = json.loads(month)["data"]
    assert [part["digest"] for part in data["parts"]] == [json.loads(one.read_text())["digest"] for one in files]
    assert perseus(["report", "--from", str(file)]) == 0
    assert "31 reports whose periods adjoin" in capsys.readouterr().out
    data["parts"][3]["endSeconds"] += 1
    file.write_text(json.dumps(json.loads(month) | {"data": data}))
    assert perseus(["report", "--from", str(file)]) == 2
    assert "data.parts: must adjoin, from the begin of the period to its end" in capsys.readouterr().err


def _with(source: Source, **changes: Any) -> Source:
    return replace(source, statement=replace(source.statement, **changes))


def _factors(statement: Statement, **changes: Factor | None) -> dict[str, Factor]:
    return {name: factor for name, factor in {**statement.factors, **changes}.items() if factor is not None}


WRONG: dict[str, tuple[Callable[[Source, Source], list[Source]], str]] = {
    "a gap": (
        lambda first, _: [first, source_of(2)],
        "2026-10-01.json ends at 2026-10-02T00:00:00Z and 2026-10-03.json begins at 2026-10-03T00:00:00Z: periods must"
        " adjoin, and a time is missing",
    ),
    "twice": (lambda first, _: [first, first], "and these overlap"),
    "scope": (
        lambda first, second: [first, _with(second, scope="namespace team-a")],
        "the scope of 2026-10-01.json is all namespaces, and that of 2026-10-02.json is namespace team-a",
    ),
    "currency": (lambda first, second: [first, _with(second, currency="USD")], "the currency of"),
    "organization": (lambda first, second: [first, _with(second, organization="")], "is none: it must be the same"),
    "boundary": (
        lambda first, second: [first, _with(second, factors=_factors(second.statement, pue=None))],
        "2026-10-02.json has no factor pue, and others have: the boundary must be the same",
    ),
    "queries": (lambda first, second: [first, _with(second, queries={})], "were read by different queries"),
    "tokens": (
        lambda first, second: [first, _with(second, tokens_per_step={"team-a/train-0": 1.0})],
        "2026-10-02.json declares 1 tokens for a step of team-a/train-0",
    ),
    "half an hour": (
        lambda first, _: [
            _with(first, period=replace(first.statement.period, end_s=BEGIN_S + 1800)),
            _with(first, period=replace(first.statement.period, begin_s=BEGIN_S + 1800)),
        ],
        "periods must meet at a full hour",
    ),
    "two years": (
        lambda first, _: [
            _with(first, period=replace(first.statement.period, begin_s=0)),
            source_of(1),
        ],
        "may last at most 366 days",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_period_is_refused_with_the_files_and_the_rule(days: list[Source], name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(UnusableArgument) as error:
        merge(make(days[0], days[1]))
    assert message in str(error.value)


def test_a_factor_that_is_given_anew_need_not_be_in_every_file(days: list[Source]) -> None:
    second = _with(days[1], factors=_factors(days[1].statement, pue=None))
    assert "pue" not in merge([days[0], second], frozenset({"pue"})).factors


def test_a_factor_that_changes_between_days_counts_for_its_hours(days: list[Source]) -> None:
    dearer = Factor(source="site meters, 2026", value=1.5)
    second = _with(days[1], factors=_factors(days[1].statement, pue=dearer))
    pue = merge([days[0], second]).factors["pue"]
    assert pue.hours == (1.2,) * 24 + (1.5,) * 24
    assert pue.source == "site meters, 2025, site meters, 2026"


def test_what_is_measured_last_is_of_the_last_day_that_has_it(days: list[Source]) -> None:
    member = days[0].statement.members[0]
    shares = [Share(mean=0.1, low=0.05, high=0.15), Share(mean=0.2, low=0.18, high=0.22), None]
    parts = [
        _with(source, members=(replace(member, saved=share, model=model),))
        for source, share, model in zip(days, shares, ("gpt", "gpt3", ""), strict=False)
    ]
    [merged] = merge(parts).members
    assert (merged.saved, merged.model) == (shares[1], "gpt3"), "no narrower by being measured on two days"
