"""DeepSpeed's PipelineEngine on its CPU accelerator, over gloo, with real agents."""

from __future__ import annotations

from typing import Any

import pytest

VARIANTS = ["plain", "recompute"]


@pytest.fixture(scope="module")
def followed(harness: Any) -> dict[str, Any]:
    return harness.follow("deepspeed_worker.py", VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_instructions_are_marked_in_the_order_of_its_train_schedule(followed: dict[str, Any], name: str) -> None:
    followed[name].assert_marked_as_scheduled()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_plan_is_applied_instruction_by_instruction(followed: dict[str, Any], name: str) -> None:
    followed[name].assert_planned_clocks()


@pytest.mark.parametrize("name", VARIANTS)
def test_training_is_the_same_to_the_bit_and_nothing_is_left_behind(followed: dict[str, Any], name: str) -> None:
    for said in followed[name].said:
        assert said["attached"]
        assert said["idempotent"]
        assert said["bit_identical"]
        assert said["left_behind"] == []


def test_ranks_come_from_the_engines_grid(followed: dict[str, Any]) -> None:
    assert [rank[:3] for rank in followed["plain"].ranks] == [(0, 0, 0), (0, 1, 0)]
