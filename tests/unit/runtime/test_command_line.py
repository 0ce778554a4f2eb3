"""Errors of the project's command lines take one line and name what was probably meant."""

from __future__ import annotations

import pytest

from perseus_runtime.command_line import BAD_INPUT, CommandParser


def parser() -> CommandParser:
    made = CommandParser(prog="tool")
    plan = made.add_subparsers(dest="command", parser_class=CommandParser).add_parser("plan")
    plan.add_argument("--profile", required=True)
    plan.add_argument("--kind", choices=("slow", "fast"))
    return made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["pln"], "tool: argument command: invalid choice: 'pln' (choose from 'plan'); did you mean plan?"),
        (["zzz"], "tool: argument command: invalid choice: 'zzz' (choose from 'plan')"),
        (
            ["plan", "--profile", "x", "--profil", "y"],
            "tool plan: --profil is not an option of it; did you mean --profile?",
        ),
        (
            ["plan", "--profile", "x", "--profiles=y"],
            "tool plan: --profiles=y is not an option of it; did you mean --profile?",
        ),
        (["plan", "--profile", "x", "y"], "tool plan: y is not an option of it"),
        (["plan"], "tool plan: the following arguments are required: --profile"),
        (
            ["plan", "--profile", "x", "--kind", "fats"],
            "tool plan: argument --kind: invalid choice: 'fats' (choose from 'slow', 'fast'); did you mean fast?",
        ),
    ],
)
def test_an_error_is_one_line_that_helps(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parser().parse_args(given)
    assert left.value.code == BAD_INPUT
    assert capsys.readouterr().err == said + "\n"
