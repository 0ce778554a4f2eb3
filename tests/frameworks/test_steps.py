"""Jobs without pipeline stages, with real agents: whole iterations are marked, and a plan's clock is applied."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from perseus_core.keys import ENV_SOCKET
from perseus_sim.cluster.live_job import free_port

HERE = Path(__file__).resolve().parent
LOOPS = ["ddp", "fsdp", "accelerate", "hugging_face", "lightning", "nemo", "torchtitan"]
SHARDED = {"fsdp", "torchtitan"}
OTHER_WORKERS = {"torchtitan_defaults": "torchtitan_worker.py", "jax": "jax_worker.py", "maxtext": "jax_worker.py"}
"""Of loops that take a file of their own."""
ALONE = {
    "nemo": "nemo.core",
    "torchtitan": "torchtitan.trainer",
    "torchtitan_defaults": "torchtitan.trainer",
    "jax": "jax",
    "maxtext": "maxtext.trainers.pre_train.train",
}
"""What is not in requirements-frameworks.lock, since its own requirements contradict those of others, or its Python."""


@pytest.mark.parametrize("loop", [*LOOPS, *OTHER_WORKERS])
def test_every_optimizer_step_is_a_step_at_the_planned_clock(harness: Any, python: Path, loop: str) -> None:
    require(python, loop)
    followed = harness.follow_steps(OTHER_WORKERS.get(loop, "steps_worker.py"), loop, ranks=2)
    assert followed["ranks"] == [(0, 0, 0), (1, 0, 0)]
    for said, executed in zip(followed["said"], followed["executed"], strict=True):
        assert len(executed) == said["optimizer_steps"]
        assert {tuple(mark[:3]) for one in executed for mark in one["instructions"]} == {("step", 0, 0)}
        assert all(len(one["instructions"]) == 1 for one in executed)
        clocks_mhz = [one["instructions"][0][3] for one in executed]
        assert clocks_mhz[0] == followed["default_mhz"]
        assert clocks_mhz[-1] == followed["planned_mhz"]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_stages_that_torchtitan_builds_follow_a_plan_by_instruction(harness: Any, python: Path, schedule: str) -> None:
    require(python, "torchtitan")
    followed = harness.follow("torchtitan_worker.py", [schedule])[schedule]
    followed.assert_marked_as_scheduled()
    followed.assert_planned_clocks()


def require(python: Path, loop: str) -> None:
    """Skip what the interpreter has not."""
    alone = ALONE.get(loop)
    if alone and subprocess.run([str(python), "-c", f"import {alone}"], check=False, capture_output=True).returncode:
        pytest.skip(f"{loop} is not installed for {python}: set PERSEUS_FRAMEWORKS_PYTHON to one that has it")


def marks_of(python: Path, folder: Path, loop: str) -> list[dict[str, Any]]:
    """What both ranks of ``own_time_worker.py`` wrote down."""
    port = str(free_port())
    children = [
        subprocess.Popen(
            [str(python), str(HERE / "own_time_worker.py"), str(folder), loop],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                ENV_SOCKET: "/nowhere",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [child.communicate(timeout=150)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(output[-3000:] for output in outputs)
    return [json.loads((folder / f"{loop}.{rank}.result").read_text()) for rank in range(2)]


@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop not in SHARDED])
def test_a_rank_has_ended_its_own_part_before_it_waits_for_another(python: Path, tmp_path: Path, loop: str) -> None:
    require(python, loop)
    for said in marks_of(python, tmp_path, loop):
        assert said["marks"].startswith("(<>)" * 3)
        assert [options["own_time"] for options in said["options"]] == [True]
        assert said["late"] == 0


@pytest.mark.parametrize("loop", sorted(SHARDED))
def test_sharded_parameters_are_waited_for_within_the_passes_so_no_own_part_is_claimed(
    python: Path, tmp_path: Path, loop: str
) -> None:
    require(python, loop)
    for said in marks_of(python, tmp_path, loop):
        assert said["marks"].startswith("(<>)" * 3)
        assert "own_time" not in said["options"][0]
