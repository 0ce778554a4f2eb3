"""Two pipelines of real training: the agent finds each rank by its rank id and on its GPU."""

from __future__ import annotations

from typing import Any

EXAMPLE = "../../examples/torch_pipelining/train.py"


def test_ranks_of_two_pipelines_are_found_from_the_process_groups(harness: Any) -> None:
    options = ("--data-parallel=2", "--microbatches=2", "--steps=100000")
    ranks = harness.ranks(EXAMPLE, *options, stages=2, pipelines=2)
    assert ranks["found"] == ranks["expected"]
    assert [rank for rank, _ in ranks["found"]] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
