"""Orders that the three frameworks export agree with each other and with the solver; ranks agree with the mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perseus_solver.schedules import build_schedule, read_schedule

pytestmark = pytest.mark.timeout(660)  # one process asks all of it before the first test

SOLVER = {"1F1B": "1F1B", "GPipe": "GPipe", "Interleaved1F1B": "Interleaved1F1B"}


@pytest.fixture(scope="module")
def inspected(run_alone: Callable[..., Any]) -> Any:
    return run_alone("inspect_worker.py")


def test_every_export_is_an_order_that_runs(inspected: Any) -> None:
    for key, text in inspected["orders"].items():
        stages, microbatches, chunks = (int(number) for number in key.split("-")[1:])
        schedule = read_schedule(text)  # refuses what deadlocks or is incomplete
        assert (schedule.stages, schedule.microbatches, schedule.chunks) == (stages, microbatches, chunks), key


def test_exports_are_what_the_solver_plans_under_the_same_name(inspected: Any) -> None:
    compared = 0
    for key, text in inspected["orders"].items():
        name, *numbers = key.split("-")
        if name not in SOLVER:
            continue
        stages, microbatches, chunks = map(int, numbers)
        built = build_schedule(
            SOLVER[name], stages=stages, microbatches=microbatches, chunks=chunks if chunks > 1 else None
        )
        exported = read_schedule(text)
        assert [exported.of_stage(s) for s in range(stages)] == [built.of_stage(s) for s in range(stages)], key
        compared += 1
    assert compared == 6


def test_the_frameworks_agree(inspected: Any) -> None:
    for framework, orders in inspected["others"].items():
        assert orders
        for key, text in orders.items():
            assert text == inspected["orders"][key], (framework, key)


def test_ranks_are_those_of_the_mesh(inspected: Any) -> None:
    assert len(inspected["ranks"]) == 8 + 16
    for rank in inspected["ranks"]:
        tp = rank["tp"] + 2 * rank.get("cp", 0)
        assert rank["found"] == [rank["dp"], rank["pp"], tp]


def test_without_an_agent_nothing_is_touched(inspected: Any) -> None:
    assert inspected["in_vain"] == {"active": [False, False, False], "untouched": True}


def test_what_cannot_be_followed_is_logged_in_one_line_each(inspected: Any) -> None:
    assert inspected["refused"] == [
        "perseus_client: torch.distributed.pipelining: this rank trains without energy plans: "
        "torch does not declare the order of Homemade",
        "perseus_client: deepspeed: this rank trains without energy plans: "
        "Linear is not a PipelineEngine: it runs no pipeline",
        "perseus_client: torch.distributed.pipelining: this rank trains without energy plans: "
        "torch 2.4.0 is too old: 2.10 or newer is needed",
    ]
