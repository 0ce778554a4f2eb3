"""Two pipelines of real training: the agent finds each rank at its place and on its GPU."""

from __future__ import annotations

from typing import Any

EXAMPLE = "../../examples/torch_pipelining/train.py"


def test_ranks_of_two_pipelines_are_found_from_the_process_groups(harness: Any) -> None:
    options = ("--data-parallel=2", "--microbatches=2", "--steps=100000")
    places = harness.places(EXAMPLE, *options, stages=2, pipelines=2)
    assert places["found"] == places["expected"]
    assert [place[:3] for place in places["found"]] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
