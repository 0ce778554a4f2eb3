"""``kubectl perseus report`` and ``perseus report``: what they read, and what they refuse."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.made_up_fleet import BEGIN_S, END_S, MadeUpPrometheus, fleet

from perseus_operator.plugin import cli
from perseus_operator.report import command
from perseus_solver.cli.main import main as perseus

PRICED = ["--price", "0.12:contract", "--currency", "EUR", "--organization", "Example GmbH"]


class Reader:
    """Namespaces of a cluster."""

    namespace = "team-a"

    def __init__(self, *_: Any) -> None:
        pass

    def namespaces(self, label: str) -> Mapping[str, Mapping[str, str]]:
        return {"team-a": {label: "vision", "other": "x"}, "team-b": {label: "speech"}}

    def namespace_labels(self, name: str) -> Mapping[str, str]:
        return {"team": "vision"}


@pytest.fixture(autouse=True)
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Prometheus", lambda *_: MadeUpPrometheus(fleet(6, 2)))
    monkeypatch.setattr(cli, "KubeReader", Reader)


def report(*arguments: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    assert cli.run(["report", "--month", "2026-10", *arguments], out, err) == 0, err.getvalue()
    return out.getvalue()


def refused(*arguments: str, code: int = 2) -> str:
    out, err = io.StringIO(), io.StringIO()
    assert cli.run(["report", *arguments], out, err) == code, out.getvalue()
    [line] = err.getvalue().splitlines()
    return line


def test_a_month_is_that_of_the_calendar() -> None:
    found = json.loads(report("-A", "--format", "json"))
    assert found["data"]["period"] == {"beginSeconds": BEGIN_S, "endSeconds": END_S}
    assert found["data"]["scope"] == "all namespaces"
    assert json.loads(report("-o", "json"))["data"]["scope"] == "namespace team-a"


def test_labels_are_those_of_namespaces() -> None:
    rows = json.loads(report("-A", "--by", "label:team", "--format", "json"))["figures"]["rows"]
    assert {row["row"] for row in rows if row["kind"] == "job"} >= {"vision", "speech", "total"}
    [row] = [
        one for one in json.loads(report("--by", "label:team", "-o", "json"))["figures"]["rows"] if one["kind"] == "job"
    ]
    assert row["row"] == "vision"


def test_both_commands_reproduce_a_report_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "october.json"
    file.write_text(report("-A", *PRICED, "--format", "json"))
    for form in command.FORMATS:
        out = io.StringIO()
        assert cli.run(["report", "--from", str(file), "--format", form], out, io.StringIO()) == 0
        assert perseus(["report", "--from", str(file), "--format", form]) == 0
        assert capsys.readouterr().out == out.getvalue()
        if form == "json":
            assert out.getvalue() == file.read_text()


def test_factors_that_come_later_make_another_statement(tmp_path: Path) -> None:
    file = tmp_path / "october.json"
    file.write_text(report("-A", "--format", "json"))
    out = io.StringIO()
    assert cli.run(["report", "--from", str(file), *PRICED, "--format", "json"], out, io.StringIO()) == 0
    before, after = json.loads(file.read_text()), json.loads(out.getvalue())
    assert after["digest"] != before["digest"]
    assert after["data"]["members"] == before["data"]["members"]
    assert all("cost" in row["estimated"] for row in after["figures"]["rows"])


def test_what_does_not_fit_together_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "october.json"
    file.write_text(report("--format", "json"))
    assert "--price: needs --currency" in refused("--price", "0.1:contract")
    assert "--from: its period is that of the file" in refused("--from", str(file), "--since", "2d")
    assert "--month: not together with --since" in refused("--month", "2026-10", "--since", "2d")
    assert "has not begun" in refused("--month", "2199-01")
    assert "a zone is of the grid" in refused("--carbon-market", "electricitymaps:DE")
    assert "has no label team" in refused("--from", str(file), "--by", "label:team")
    assert "nothing of a job team-a/none was measured" in refused("--tokens-per-step", "team-a/none=5")
    assert "--format focus: needs --price" in refused("--format", "focus")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--since", "0d"], "must be a time such as 12h"),
        (["--since", "367d"], "up to 366d"),
        (["--month", "2026-13"], "must be a month such as 2026-10"),
        (["--by", "colour"], "must be job, namespace, class, model or label:KEY"),
        (["--currency", "euro"], "must be three capital letters"),
        (["--tokens-per-step", "gpt3=5"], "must be such as team-a/gpt3=2097152"),
        (["--format", "pdf"], "invalid choice"),
    ],
)
def test_arguments_are_checked_before_anything_is_asked(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.run(["report", *arguments], io.StringIO(), io.StringIO())
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_labels_need_a_cluster_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert perseus(["report", "--by", "label:team"]) == 2
    assert "labels of namespaces are read by kubectl perseus report" in capsys.readouterr().err


def test_a_month_that_is_not_over_ends_now(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime(2026, 10, 3, 12, 34, 56, tzinfo=UTC)

    monkeypatch.setattr(command, "datetime", Clock)
    period = json.loads(report("-A", "-o", "json"))["data"]["period"]
    assert period["endSeconds"] == int(Clock.now().timestamp())
