"""Every schedule of torch.distributed.pipelining, with real agents: order, plan, and numbers to the bit."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # one job after the other follows its plan before the first test

SCHEDULES = [
    "GPipe",
    "1F1B",
    "LoopedBFS",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "DualPipeV+",
]
COMPUTATION = re.compile(r"\d+[FBIW]\d+")


@pytest.fixture(scope="module")
def followed(harness: Any) -> dict[str, Any]:
    return harness.follow("torch_worker.py", SCHEDULES)


@pytest.mark.parametrize("name", SCHEDULES)
def test_instructions_are_marked_in_the_exported_order(followed: dict[str, Any], name: str) -> None:
    followed[name].assert_marked_as_scheduled()


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in {"GPipe", "1F1B", "DualPipeV+"}])
def test_the_exported_order_is_what_torch_says_it_executes(followed: dict[str, Any], name: str) -> None:
    schedule = followed[name].schedule
    letters = {"forward": "F", "backward": "B", "input_gradient": "I", "weight_gradient": "W"}
    for stage, said in enumerate(followed[name].said):
        executed = [one for action in said["actions"] for one in COMPUTATION.findall(action)]
        exported = [
            f"{schedule.position[stage, chunk]}{letters[kind]}{microbatch}"
            for kind, microbatch, chunk in schedule.of_stage(stage)
        ]
        assert exported == executed


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_plan_is_applied_instruction_by_instruction(followed: dict[str, Any], name: str) -> None:
    followed[name].assert_planned_clocks()


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_is_the_same_to_the_bit_with_and_without_the_client(followed: dict[str, Any], name: str) -> None:
    assert [said["bit_identical"] for said in followed[name].said] == [True, True]


@pytest.mark.parametrize("name", SCHEDULES)
def test_attaching_twice_is_once_and_detaching_leaves_no_trace(followed: dict[str, Any], name: str) -> None:
    for said in followed[name].said:
        assert said["attached"]
        assert said["idempotent"]
        assert said["left_behind"] == []


def test_the_agent_knows_each_rank_by_its_id_and_gpu(followed: dict[str, Any]) -> None:
    ranks = followed["1F1B"].ranks
    assert [rank for rank, _ in ranks] == [(0, 0, 0), (0, 1, 0)]
    assert len({gpu for _, gpu in ranks}) == 2
