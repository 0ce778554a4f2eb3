"""Engines that schedule pipelines themselves, over gloo on CPU, with real agents: Megatron-Core, DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # one job after the other follows its plan before the first test

ENGINES = {"megatron": ["plain", "recompute", "interleaved", "overlapped"], "deepspeed": ["plain", "recompute"]}
CASES = [(engine, variant) for engine, variants in ENGINES.items() for variant in variants]
UNTOUCHED = {"megatron": ("restored", True), "deepspeed": ("left_behind", [])}
"""What a worker says of its engine's objects once the client has let go of them."""
MISSED = {"megatron": "attached too late", "deepspeed": "3 iterations without a single instruction"}
SHARED = {
    "tensor": [(0, s, t) for s in range(2) for t in range(2)],
    "context": [(0, s, c) for s in range(2) for c in range(2)],
    "expert": [(d, s, 0) for d in range(2) for s in range(2)],
}
"""Megatron with two stages that two processes share each: halves of its tensors, halves of the sequence, or experts of
two pipelines."""
RANKED = [("megatron", "interleaved"), ("deepspeed", "plain")]


@pytest.fixture(scope="module")
def followed(harness: Any) -> dict[str, dict[str, Any]]:
    return {engine: harness.follow(f"{engine}_worker.py", variants) for engine, variants in ENGINES.items()}


@pytest.mark.parametrize(("engine", "variant"), CASES)
def test_instructions_are_marked_in_the_engines_own_order(followed: Any, engine: str, variant: str) -> None:
    followed[engine][variant].assert_marked_as_scheduled()


@pytest.mark.parametrize(("engine", "variant"), CASES)
def test_the_plan_is_applied_instruction_by_instruction(followed: Any, engine: str, variant: str) -> None:
    followed[engine][variant].assert_planned_clocks()


@pytest.mark.parametrize(("engine", "variant"), CASES)
def test_training_is_the_same_to_the_bit_and_nothing_is_left_behind(followed: Any, engine: str, variant: str) -> None:
    word, value = UNTOUCHED[engine]
    for said in followed[engine][variant].said:
        assert said["attached"]
        assert said["idempotent"]
        assert said["bit_identical"]
        assert said[word] == value


@pytest.mark.parametrize(("engine", "variant"), CASES)
def test_hooks_that_are_not_reached_are_one_warning(followed: Any, engine: str, variant: str) -> None:
    for said in followed[engine][variant].said:
        (line,) = [line for line in said["said"] if "at default clocks" in line]
        assert MISSED[engine] in line


@pytest.mark.parametrize(("engine", "variant"), RANKED)
def test_ranks_come_from_the_engines_own_groups(followed: Any, engine: str, variant: str) -> None:
    assert [rank for rank, _ in followed[engine][variant].ranks] == [(0, 0, 0), (0, 1, 0)]


@pytest.fixture(scope="module")
def shared(harness: Any) -> dict[str, Any]:
    found: dict[str, Any] = harness.follow("megatron_worker.py", list(SHARED), ranks_per_stage=2)
    return found


@pytest.mark.parametrize("variant", SHARED)
def test_processes_that_share_a_stage_follow_its_plan_each(shared: Any, variant: str) -> None:
    followed = shared[variant]
    assert [rank for rank, _ in followed.ranks] == SHARED[variant]
    assert len(followed.plan_mhz) == 4
    followed.assert_marked_as_scheduled()
    followed.assert_planned_clocks()
    assert all(said["bit_identical"] for said in followed.said)
