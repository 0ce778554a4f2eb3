"""Engines that schedule pipelines themselves, over gloo on CPU, with real agents: Megatron-Core, DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)  # one job after the other follows its plan before the first test


@dataclass(frozen=True)
class Engine:
    """What is run, and what its worker says at the end."""

    worker: str
    variants: tuple[str, ...]
    untouched: tuple[str, object]
    """What it says of its engine's objects once the client has let go of them."""
    missed: str
    """Of the warning that comes where the client's hooks are not reached."""


MEGATRON = Engine(
    worker="megatron_worker.py",
    variants=("plain", "recompute", "interleaved", "overlapped"),
    untouched=("restored", True),
    missed="attached too late",
)
DEEPSPEED = Engine(
    worker="deepspeed_worker.py",
    variants=("plain", "recompute"),
    untouched=("left_behind", []),
    missed="3 iterations without a single instruction",
)
ENGINES = {"megatron": MEGATRON, "other": MEGATRON, "deepspeed": DEEPSPEED}
"""By the fixture of its job; the other one is another version of Megatron-Core."""
SHARED = {
    "tensor": [(0, s, t) for s in range(2) for t in range(2)],
    "context": [(0, s, c) for s in range(2) for c in range(2)],
    "expert": [(d, s, 0) for d in range(2) for s in range(2)],
}
"""Megatron with two stages that two processes share each: halves of its tensors, halves of the sequence, or experts of
two pipelines."""


@pytest.fixture(scope="module")
def megatron(harness: Any) -> Any:
    return harness.follow(MEGATRON.worker, MEGATRON.variants)


@pytest.fixture(scope="module")
def other(harness: Any, other_megatron: Any) -> Any:
    return harness.follow(MEGATRON.worker, MEGATRON.variants, path=other_megatron.path)


@pytest.fixture(scope="module")
def deepspeed(harness: Any) -> Any:
    return harness.follow(DEEPSPEED.worker, DEEPSPEED.variants)


@pytest.fixture(scope="module")
def megatron_shared(harness: Any) -> Any:
    return harness.follow(MEGATRON.worker, list(SHARED), ranks_per_stage=2)


@pytest.fixture(scope="module")
def other_shared(harness: Any, other_megatron: Any) -> Any:
    return harness.follow(MEGATRON.worker, list(SHARED), ranks_per_stage=2, path=other_megatron.path)


@pytest.fixture(scope="module")
def megatron_alone(harness: Any) -> Any:
    return harness.follow(MEGATRON.worker, ["alone"], stages=1, ranks_per_stage=2)


@pytest.fixture(scope="module")
def other_alone(harness: Any, other_megatron: Any) -> Any:
    return harness.follow(MEGATRON.worker, ["alone"], stages=1, ranks_per_stage=2, path=other_megatron.path)


@pytest.fixture
def followed(request: pytest.FixtureRequest) -> Any:
    """By variant, what became of the job of the fixture that a test names."""
    return request.getfixturevalue(request.param)


every_case = pytest.mark.parametrize(
    ("followed", "engine", "variant"),
    [
        pytest.param(name, engine, variant, id=f"{name}-{variant}")
        for name, engine in ENGINES.items()
        for variant in engine.variants
    ],
    indirect=["followed"],
)


@every_case
def test_instructions_are_marked_in_the_engines_own_order(followed: Any, engine: Engine, variant: str) -> None:
    followed[variant].assert_marked_as_scheduled()


@every_case
def test_the_plan_is_applied_instruction_by_instruction(followed: Any, engine: Engine, variant: str) -> None:
    followed[variant].assert_planned_clocks()


@every_case
def test_training_is_the_same_to_the_bit_and_nothing_is_left_behind(
    followed: Any, engine: Engine, variant: str
) -> None:
    word, value = engine.untouched
    for said in followed[variant].said:
        assert said["attached"]
        assert said["idempotent"]
        assert said["bit_identical"]
        assert said[word] == value


@every_case
def test_hooks_that_are_not_reached_are_one_warning(followed: Any, engine: Engine, variant: str) -> None:
    for said in followed[variant].said:
        (line,) = [line for line in said["said"] if "at default clocks" in line]
        assert engine.missed in line


@pytest.mark.parametrize(
    ("followed", "variant"),
    [("megatron", "interleaved"), ("other", "interleaved"), ("deepspeed", "plain")],
    indirect=["followed"],
)
def test_ranks_come_from_the_engines_own_groups(followed: Any, variant: str) -> None:
    assert [rank for rank, _ in followed[variant].ranks] == [(0, 0, 0), (0, 1, 0)]


@pytest.mark.parametrize("followed", ["other"], indirect=True)
def test_the_other_version_is_the_one_that_trained(followed: Any, other_megatron: Any) -> None:
    # Inside a checkout it says the commit of that, too.
    versions = {said["version"].partition("+")[0] for one in followed.values() for said in one.said}
    assert versions == {other_megatron.version}


@pytest.mark.parametrize("variant", SHARED)
@pytest.mark.parametrize("followed", ["megatron_shared", "other_shared"], indirect=True)
def test_processes_that_share_a_stage_follow_its_plan_each(followed: Any, variant: str) -> None:
    assert_two_ranks_follow_each_stage(followed[variant], SHARED[variant])


@pytest.mark.parametrize("followed", ["megatron_alone", "other_alone"], indirect=True)
def test_ranks_without_a_pipeline_follow_the_plan_of_one_stage_each(followed: Any) -> None:
    assert_two_ranks_follow_each_stage(followed["alone"], [(0, 0, 0), (1, 0, 0)])


def assert_two_ranks_follow_each_stage(followed: Any, ranks: list[tuple[int, int, int]]) -> None:
    assert [rank for rank, _ in followed.ranks] == ranks
    assert len(followed.plan_mhz) == len(ranks)
    followed.assert_marked_as_scheduled()
    followed.assert_planned_clocks()
    assert all(said["bit_identical"] for said in followed.said)
