"""`perseus serve plan`: what it prints and writes, and one line for each input that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perseus_solver.cli import main

Perseus = Callable[..., tuple[int, str, str]]
HEAD = "hour,class,requests_per_s,prompt_tokens,output_tokens"
REPLICAS = ("--gpu", "h100", "--model", "llama-3.1-8b", "--parallel", "1,2")


@pytest.fixture
def perseus(capsys: pytest.CaptureFixture[str]) -> Perseus:
    """Run a command; exit code, standard output, standard error."""

    def run(*words: str) -> tuple[int, str, str]:
        try:
            code = main.main(["serve", "plan", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def load(folder: Path, *rows: str, head: str = HEAD) -> str:
    """A file with these rows."""
    file = folder / "day.csv"
    file.write_text("\n".join((head, *rows)) + "\n")
    return str(file)


@pytest.mark.slow
def test_a_day_is_planned_by_hour_and_class_and_its_heaviest_hours_are_served(perseus: Perseus, tmp_path: Path) -> None:
    rows = [f"{hour},chat,{rate},400,60" for hour, rate in enumerate((2, 2, 18, 18, 2))]
    rows += [f"{hour},code,0.5,900,20" for hour in range(5)]
    written = tmp_path / "plan.json"
    code, out, err = perseus("--load", load(tmp_path, *rows), *REPLICAS[:-1], "1", "--output", str(written))
    assert (code, err) == (0, "")
    document = json.loads(written.read_text())
    chat = document["choices"]["chat"]
    replicas = [choice["replicas"] * choice["gpus"] for choice in chat]
    assert replicas[2] >= replicas[0] >= 2  # one may be lost
    assert document["gap"] <= 1e-6
    assert document["attainment_percent"]["chat"] > 97.0
    printed = [line.split() for line in out.splitlines() if line[:4].strip().isdigit()]
    assert [(row[0], row[1]) for row in printed] == [
        (str(hour), name) for hour in range(5) for name in ("chat", "code")
    ]
    assert [int(row[3]) for row in printed if row[1] == "chat"] == [choice["replicas"] for choice in chat]
    assert "the best plan costs at most 0.00 % less" in out
    assert "served request by request in its heaviest hour" in out


def test_a_price_by_hour_is_what_is_least(perseus: Perseus, tmp_path: Path) -> None:
    file = load(tmp_path, "0,chat,2,400,60,0.5", "1,chat,2,400,60,0.1", head=f"{HEAD},per_kwh")
    code, out, _ = perseus("--load", file, *REPLICAS)
    assert code == 0
    assert "by per_kwh" in out


def test_manifests_of_classes_are_pools_of_endpoints_and_one_route(perseus: Perseus, tmp_path: Path) -> None:
    file = load(tmp_path, "0,short,2,400,60", "0,long,1,900,60", "1,short,2,400,60", "1,long,2,900,60")
    code, out, err = perseus("--load", file, *REPLICAS, "--gateway", "inference")
    assert (code, err) == (0, "")
    *pools, route = json.loads(out)["items"]
    assert [pool["metadata"]["name"] for pool in pools] == ["short", "long"]
    for pool in pools:
        name = pool["metadata"]["name"]
        assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
        assert pool["spec"] == {
            "selector": {"matchLabels": {"perseus.energy/job": name}},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": f"{name}-epp", "port": {"number": 9002}},
        }
    assert route["spec"]["parentRefs"] == [{"name": "inference"}]
    *by_header, rest = route["spec"]["rules"]
    headers = [rule["matches"][0]["headers"][0]["value"] for rule in by_header]
    assert headers == [rule["backendRefs"][0]["name"] for rule in by_header] == ["short", "long"]
    assert "matches" not in rest
    assert rest["backendRefs"][0]["name"] == "short", "most requests are"


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        ("0,chat,fast,400,60", (), "load day.csv, row 2, column requests_per_s: must be a number from 0 to 1,000,000"),
        ("0,chat,50,400,60", ("--gpus", "1"), "the load of epoch 0 needs"),
        ("0,chat,1,400,60", ("--per-token", "1ms"), "class chat: no replica keeps the limits for 400 tokens of prompt"),
        ("0,chat,1,400,60", ("--parallel", "3"), "must be different ones of 1, 2, 4 and 8 with commas between, not 3"),
        ("0,chat,1,400,60", ("--start-s", "7200"), "epoch_s must be at least the longest start_s, 7200"),
        ("0,chat,1,400,60", ("--spare", "-1"), "must be a whole number from 0 to 16, not -1"),
        ("0,Chat room,1,400,60", ("--gateway", "g"), "'Chat room' must be a name of an object"),
        ("0,chat,1,400,60", ("--gateway", ""), "'' must be a name of an object"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    perseus: Perseus, tmp_path: Path, row: str, more: tuple[str, ...], message: str
) -> None:
    code, out, err = perseus("--load", load(tmp_path, row), *REPLICAS, *more)
    assert code == 2
    assert out == ""
    assert message in err.splitlines()[-1]


def test_a_file_that_is_not_there_is_one_line(perseus: Perseus, tmp_path: Path) -> None:
    code, _, err = perseus("--load", str(tmp_path / "none.csv"), *REPLICAS)
    assert code == 2
    assert "none.csv cannot be read: No such file or directory" in err
