"""Test files that know nothing of the client pass with the client attached to every schedule they step.

PyTorch's wheel ships no tests: PERSEUS_TORCH_TESTS names the folder ``test/distributed/pipelining`` of its sources, of
the installed version or one near it, from its repository or from Debian's source package ``pytorch``. They also need
the package expecttest where the frameworks are installed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def run_attached(python: Path, suite: Path, result: Path, *arguments: str) -> dict[str, int]:
    ended = subprocess.run(
        [str(python), str(HERE / "attach_everywhere.py"), str(result), str(suite), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
    counts: dict[str, int] = json.loads(result.read_text())
    return counts


def test_every_schedule_on_one_rank(python: Path, tmp_path: Path) -> None:
    counts = run_attached(python, HERE / "pipelining_suite.py", tmp_path / "result.json")
    assert counts["attached"] == 11
    # Seven schedules, the file and the custom function three times each, the broken one before and after; GPipe twice.
    assert counts["complete"] == 3 * (7 + 2 + 2) + 2
    assert counts["incomplete"] == 1  # the step that failed


def digests_of_two_ranks(python: Path, folder: Path, *prefix: str) -> list[dict[str, str]]:
    """Run ``pipelining_ranks_suite.py``; a %d in the arguments before it is the rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    folder.mkdir()
    ranks = []
    for rank in range(2):
        command = [str(python), *(part.replace("%d", str(rank)) for part in prefix)]
        command += [str(HERE / "pipelining_ranks_suite.py"), str(folder / f"{rank}.json")]
        with (folder / f"{rank}.log").open("w") as log:
            environment = os.environ | world | {"RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(600) == 0, (folder / f"{rank}.log").read_text()[-6000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(1260)
def test_what_frameworks_build_by_hand_trains_the_same_to_the_bit_on_two_ranks(python: Path, tmp_path: Path) -> None:
    """Four traced models, four orders made by hand; an order that torch does not declare is refused and trains on."""
    plain = digests_of_two_ranks(python, tmp_path / "plain")
    attached = digests_of_two_ranks(
        python, tmp_path / "attached", str(HERE / "attach_everywhere.py"), f"{tmp_path}/counts.%d"
    )
    assert attached == plain
    for rank in range(2):
        assert len(plain[rank]) == 9
        counts = json.loads((tmp_path / f"counts.{rank}").read_text())
        assert counts == {"attached": 8, "complete": 8 * 3, "incomplete": 0}
        assert "torch does not declare the order of Undeclared" in (tmp_path / "attached" / f"{rank}.log").read_text()


@pytest.mark.parametrize(
    ("name", "attached"),
    [
        ("test_schedule.py", 0),  # orders alone
        ("test_microbatch.py", 0),
        ("test_stage.py", 4),
        # Its other class steps four stages in a V on two ranks, which over gloo fails without the client, too.
        ("test_schedule_multiproc.py ScheduleTest", 96),
    ],
)
@pytest.mark.timeout(660)
def test_pytorchs_own_tests(python: Path, tmp_path: Path, name: str, attached: int) -> None:
    folder = os.environ.get("PERSEUS_TORCH_TESTS")
    if not folder:
        pytest.skip("PERSEUS_TORCH_TESTS names no folder of PyTorch's test/distributed/pipelining")
    file, *arguments = name.split()
    counts = run_attached(python, Path(folder).absolute() / file, tmp_path / "result.json", *arguments)
    assert counts["attached"] >= attached
    assert counts["complete"] >= counts["attached"]
    assert counts["incomplete"] == 0
