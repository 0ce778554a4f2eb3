"""Commands that pages of the documentation show: those of `perseus` run as written, and all others could be run.

What a command reads and no page makes is made up here: profiles, a description of hardware, the load of a day, and the
statement of a month.
"""

from __future__ import annotations

import json
import re
import shlex
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.doubles.statements import source_of
from tests.made_up_fleet import BEGIN_S, END_S, MadeUpPrometheus, fleet
from tests.pages import commands_of

from perseus_operator.plugin import cli as kubectl_perseus
from perseus_operator.report.statement import Period, Statement
from perseus_operator.report.stored import document
from perseus_operator.report.usage import read_usage
from perseus_sim.profiles import profile_csv
from perseus_solver.cli import main
from perseus_solver.cli.main import main as perseus

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - {ROOT / "CHANGELOG.md"})
HARDWARE = '{"model": "made up", "switch_latency_s": {"p50": 0.03, "p99": 0.1}, "call_s": 0.005, "marks": "gpu"}'
SHORTENED = "--profile p.csv --schedule 1F1B --stages 4 --microbatches 8 --blocking-power 83.64"
"""What the dots of ``perseus plan …`` stand for."""
EXAMPLES = ROOT / "docs" / "command-line.md"
DAY = "hour,class,requests_per_s,prompt_tokens,output_tokens\n0,chat,2,1000,200\n1,chat,4,1000,200\n"
MEASURED = {"--instructions", "--calibration"}
"""A command with one of them needs a run that was measured: it is not run here."""


def commands(program: str) -> list[tuple[Path, list[str]]]:
    """Return page and words of every command of a program, whether or not it stands in a virtual environment."""
    start = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?{program}(?: |$)")
    found = [(page, text) for page in PAGES for text in commands_of(page) if start.match(text)]
    return [(page, shlex.split(text.replace("…", SHORTENED).replace("$PWD", "."))) for page, text in found]


def pages(program: str) -> list[Path]:
    """Return the pages with commands of a program; other tests compare what three of them show, and the page of all
    commands has examples that run for long.
    """
    elsewhere = {"README.md", "worth.md", "serving-rehearse.md", EXAMPLES.name}
    return sorted({page for page, _ in commands(program) if page.name not in elsewhere})


def arguments_of(words: list[str]) -> list[str]:
    """Return what a program gets: nothing from where the shell sends its output on."""
    return words[1 : next((place for place, word in enumerate(words) if word in {">", "|"}), None)]


def statement() -> str:
    """Return what `kubectl perseus report --format json` writes of a made-up month."""
    usage = read_usage(MadeUpPrometheus(fleet(3, 1)), Period(begin_s=BEGIN_S, end_s=END_S), None, {})
    made_up = Statement(
        period=Period(begin_s=BEGIN_S, end_s=END_S),
        taken_s=END_S,
        scope="all namespaces",
        origin="http://prometheus:9090",
        queries=usage.queries,
        program="perseus-k8s",
        members=usage.members,
        measured_hours=usage.measured_hours,
    )
    return json.dumps(document(made_up, "job"))


def make_inputs(words: list[str]) -> None:
    given = dict(pairwise(words))
    profile, hardware = Path(given.get("--profile", "p.csv")), Path(given.get("--hardware", "h.json"))
    if not profile.exists():
        profile.write_text(profile_csv(int(given.get("--stages", "4"))))
    hardware.write_text(HARDWARE)
    if "--load" in given:
        Path(given["--load"]).write_text(DAY)
    if "*" in given.get("--from", ""):
        for day in range(3):
            path = Path(given["--from"].replace("*", f"{day + 1:02}"))
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(document(source_of(day).statement, "job")))
    elif "--from" in given:
        Path(given["--from"]).write_text(statement())


@pytest.mark.parametrize("page", pages("perseus"), ids=lambda page: page.name)
def test_the_commands_of_a_page_run_in_their_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _, words in [found for found in commands("perseus") if found[0] == page]:
        target = words[words.index(">") + 1] if ">" in words else ""
        make_inputs(words)
        if not MEASURED & set(words):
            arguments = [name for word in arguments_of(words) for name in sorted(glob(word)) or [word]]
            assert perseus(arguments) == 0, f"{shlex.join(arguments)}: {capsys.readouterr().err}"
            if target:
                Path(target).parent.mkdir(exist_ok=True)
                Path(target).write_text(capsys.readouterr().out)


def test_the_examples_of_every_help_are_understood() -> None:
    parser, understood = main.command_parser(), set()
    for page, words in commands("perseus"):
        if page == EXAMPLES and "--help" not in words:
            understood.add(parser.parse_args(arguments_of(words)).command)
    headings = re.findall(r"^### perseus (\w+)$", EXAMPLES.read_text(encoding="utf-8"), re.MULTILINE)
    assert understood == set(headings)


def test_commands_of_kubectl_perseus_are_understood() -> None:
    found = commands("kubectl perseus")
    assert found
    for _, words in found:
        assert kubectl_perseus.command_parser().parse_args(arguments_of(words)[1:]).command, words


def test_targets_and_variables_of_make_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = commands("make")
    assert found
    for page, words in found:
        targets = [word for word in words[words.index("make") + 1 :] if "=" not in word]
        assert targets, page
        for target in targets:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"{page}: make {target}"
        for variable in [word.partition("=")[0] for word in words[words.index("make") :] if "=" in word]:
            assert f"$({variable})" in makefile, f"{page}: {variable}"


def test_values_of_the_chart_that_are_set_exist() -> None:
    values = yaml.safe_load((ROOT / "charts" / "perseus" / "values.yaml").read_text())
    set_ones = [(page, word) for page, words in commands("helm") for word in words if re.match(r"[\w.]+=", word)]
    assert len(set_ones) > 8
    assert [page for page, words in commands("helm") if words[-1].startswith("--set")] == [], "a command goes on"
    for page, word in set_ones:
        value: Any = values
        for part in word.partition("=")[0].split("."):
            assert part in value, f"{page}: {word}"
            value = value[part]


def test_scripts_that_are_called_know_their_options() -> None:
    scripts = [
        (page, words[position:])
        for python in (r"python3\.11", "python")
        for page, words in commands(python)
        for position, word in enumerate(words)
        if word.endswith(".py")
    ]
    assert len(scripts) > 3
    for page, (script, *rest) in scripts:
        text = (ROOT / script).read_text()
        for option in [word.partition("=")[0] for word in rest if word.startswith("--")]:
            assert f'"{option}"' in text, f"{page}: {script} {option}"


def test_manifests_that_are_applied_exist() -> None:
    applied = [
        (page, file)
        for page, words in commands("kubectl")
        for flag, file in pairwise(words)
        if flag == "-f" and "/" in file
    ]
    assert applied
    assert [(page, file) for page, file in applied if not (ROOT / file).exists()] == []
