"""`perseus serve`: what it prints and writes, and one line for each input that cannot be used."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from perseus_sim.commands import serve
from perseus_sim.serving.rehearsal import RIVALS, poisson
from perseus_solver.cli import main

REPOSITORY = Path(__file__).resolve().parents[4]
Perseus = Callable[..., tuple[int, str, str]]
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A minute of short requests."""
    draw = random.Random(1)
    rows = sorted((draw.uniform(0, 60), draw.randint(50, 900), draw.randint(5, 60)) for _ in range(120))
    file = tmp_path / "trace.csv"
    file.write_text(
        "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{at:.3f},{prompt},{out}\n" for at, prompt, out in rows)
    )
    return file


@pytest.fixture
def perseus(capsys: pytest.CaptureFixture[str]) -> Perseus:
    """Run a command; exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main.main(["serve", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


REPLICAS = ("--gpu", "h100", "--model", "llama-3.1-8b", "--gpus-per-replica", "1", "--replicas", "2")
LOAD = ("--requests-per-second", "2", "--prompt-tokens", "400", "--output-tokens", "30")


def test_a_rehearsal_compares_every_policy(perseus: Perseus, trace: Path, tmp_path: Path) -> None:
    written = tmp_path / "found.json"
    code, out, err = perseus("rehearse", "--trace", str(trace), *REPLICAS, "--output", str(written))
    assert (code, err) == (0, "")
    document = json.loads(written.read_text())
    outcomes = {one["policy"]: one for one in document["outcomes"]}
    assert list(outcomes) == ["highest clock", "best fixed clock", "law", *RIVALS]
    assert outcomes["highest clock"]["energy_percent"] == 0
    assert outcomes["law"]["energy_percent"] < -10
    law, fixed = outcomes["law"], outcomes["best fixed clock"]
    assert fixed["attainment"]["percent"] >= law["attainment"]["percent"]
    rows = [line for line in out.splitlines() if line.startswith(tuple(outcomes))]
    assert len(rows) == len(outcomes)
    assert all(f"{one['attainment']['percent']:.2f} %" in out for one in outcomes.values())
    assert "120 requests in 1.0 minutes to 2 replicas of llama-3.1-8b on 1 x h100" in out
    assert "assumed, not measured" in out
    assert "middle watts" in out
    assert "do not use" not in out


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(perseus: Perseus, tmp_path: Path) -> None:
    folder = Path(os.environ.get("PERSEUS_DATA", REPOSITORY.parent / "shared" / "data")) / "serving"
    if not folder.is_dir():
        pytest.skip(f"no traces at {folder}: set PERSEUS_DATA to the folder that holds serving/")
    page = (REPOSITORY / "docs" / "serving-rehearse.md").read_text(encoding="utf-8")
    (tmp_path / "azure.csv").symlink_to(folder / "AzureLLMInferenceTrace_conv.csv")
    examples = re.findall(
        r"^\$ perseus serve ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)^rests on: …$", page, re.MULTILINE | re.DOTALL
    )
    assert len(examples) == 2
    for command, shown in examples:
        words = command.replace("\\\n", " ").replace("azure.csv", str(tmp_path / "azure.csv")).split()
        code, out, _ = perseus(*words)
        assert code == 0
        printed = out.partition("rests on:")[0]
        assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
        for now, then in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
            # Fits end in the last digits as a machine's arithmetic has them.
            assert float(now.replace(",", "")) == pytest.approx(float(then.replace(",", "")), rel=0.02, abs=0.3)


def test_the_same_seed_gives_the_same_figures(perseus: Perseus, trace: Path) -> None:
    words = ("rehearse", "--trace", str(trace), *REPLICAS, "--minutes", "0.3", "--load", "0.5", "--seed", "7")
    assert perseus(*words) == perseus(*words)


def test_an_objective_that_the_highest_clock_misses_is_said(perseus: Perseus, trace: Path) -> None:
    words = ("rehearse", "--trace", str(trace), *REPLICAS, "--minutes", "0.2")
    code, out, _ = perseus(*words, "--first-token", "1ms", "--undisturbed", "0")
    assert code == 0
    assert "do not use the law here: at the highest clock 0.00 % keep the objective, not 99 %" in out


def test_where_little_is_saved_it_is_said(perseus: Perseus, trace: Path) -> None:
    """A step that may take no longer than at the highest clock leaves nothing to lower."""
    words = ("rehearse", "--trace", str(trace), *REPLICAS, "--minutes", "0.2", "--per-token", "3ms")
    code, out, _ = perseus(*words, "--attainment", "50%")
    assert code == 0
    assert "the law saves little here" in out


@pytest.mark.slow
def test_an_estimate_is_an_interval_over_what_is_not_known(
    perseus: Perseus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_ESTIMATED_S", 20.0)
    written = tmp_path / "found.json"
    code, out, err = perseus("estimate", *REPLICAS, *LOAD, "--output", str(written))
    assert (code, err) == (0, "")
    points = json.loads(written.read_text())["points"]
    assert len(points) == 9
    assert len({(one["assumptions"]["knee_mhz"], one["assumptions"]["watts"]) for one in points}) == 9
    saved = [-one["law"]["energy_percent"] for one in points]
    assert f"law: saves {min(saved):.1f} to {max(saved):.1f} % of it" in out
    assert "rehearse a trace of your own" in out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--first-token", "250"), "argument --first-token: '250' is not a time such as 250ms or 1s"),
        (("--first-token", "0ms"), "argument --first-token: must be greater than zero, not 0"),
        (("--per-token", "2d"), "argument --per-token: '2d' is not a time such as 250ms or 1s"),
        (("--per-token", "1e9s"), "argument --per-token: must be at most 3600s, not 1e9s"),
        (("--attainment", "100"), "argument --attainment: must be from 50 to 99.99, not 100"),
        (("--attainment", "nan"), "argument --attainment: nan is not finite"),
        (("--replicas", "0"), "argument --replicas: must be a whole number from 1 to 256, not 0"),
        (("--seed", "-1"), "argument --seed: must be a whole number from 0 to 999,999,999, not -1"),
        (("--load", "1000"), "--load must be at most 100, not 1000"),
        (("--model", "llama-3.1-70b"), "--gpus-per-replica 1 is too few: llama-3.1-70b has 129 GiB of weights"),
        (("--gpu", "h10"), "did you mean h100?"),
        (("--gpus-per-replica", "3"), "argument --gpus-per-replica: invalid choice"),
    ],
)
def test_an_argument_that_cannot_be_used_is_one_line(
    perseus: Perseus, trace: Path, changed: tuple[str, str], message: str
) -> None:
    code, out, err = perseus("rehearse", "--trace", str(trace), *REPLICAS, *changed)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            "1.0,0,3",
            "trace trace.csv, line 3, column prompt_tokens: must be a whole number from 1 to 10,000,000, not '0'",
        ),
        ("late,5,3", "trace trace.csv, line 3, column arrival_s: must be a time, a number from 0, not 'late'"),
        ("1.0,9000000,3", "a request has 9,000,003 tokens, and the memory of a replica holds"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(perseus: Perseus, tmp_path: Path, row: str, message: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"arrival_s,prompt_tokens,output_tokens\n0.5,5,3\n{row}\n")
    code, out, err = perseus("rehearse", "--trace", str(file), *REPLICAS)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--requests-per-second", "1e9"), "--requests-per-second: 300,000,000,000 requests are more than 1,000,000"),
        (("--requests-per-second", "0"), "argument --requests-per-second: must be greater than zero"),
        (("--prompt-tokens", "0.5"), "--prompt-tokens must be from 1 to 100,000"),
        (("--output-tokens", "1e6"), "--output-tokens must be from 1 to 100,000"),
    ],
)
def test_an_estimate_that_cannot_be_made_is_one_line(perseus: Perseus, changed: tuple[str, str], message: str) -> None:
    code, out, err = perseus("estimate", *REPLICAS, *LOAD, *changed)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_more_requests_than_fit_are_refused_before_they_are_copied(
    perseus: Perseus, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MOST_REQUESTS", 100)
    code, _, err = perseus("rehearse", "--trace", str(trace), *REPLICAS, "--load", "50")
    assert code == 2
    assert "--minutes or --load: 6,000 requests are more than 100" in err


def test_drawn_requests_come_at_their_rate_with_their_lengths() -> None:
    drawn = poisson(50.0, 400.0, 30.0, 200.0, seed=3)
    assert len(drawn) == pytest.approx(10_000, rel=0.05)
    assert sum(one.prompt_tokens for one in drawn) / len(drawn) == pytest.approx(400, rel=0.05)
    assert sum(one.output_tokens for one in drawn) / len(drawn) == pytest.approx(30, rel=0.05)
    assert min(one.prompt_tokens for one in drawn) >= 1
    assert {one.output_tokens for one in poisson(1.0, 1.0, 1.0, 10.0, seed=0)} == {1}
