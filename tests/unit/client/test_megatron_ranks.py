"""Which rank a process of Megatron is: of what data, on which stage, and which of those that share the stage."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_client.megatron import _rank_id
from perseus_core.rank import RankId

LONG = {"pp": "pipeline_model", "tp": "tensor_model", "cp": "context", "dp": "data"}
SHAPES = [
    {"tp": 1, "cp": 2, "dp": 1, "pp": 2},
    {"tp": 2, "cp": 2, "dp": 2, "pp": 2},
    {"tp": 4, "cp": 3, "dp": 2, "pp": 1},
]


def process(number: int, sizes: dict[str, int]) -> dict[str, int]:
    """Where Megatron's order of ranks, ``tp-cp-dp-pp``, puts a process."""
    places = {}
    for name, size in sizes.items():
        number, places[name] = divmod(number, size)
    return places


def as_groups(places: dict[str, int], sizes: dict[str, int]) -> tuple[Any, Any]:
    """Groups as they are given to an iteration; and no global ones."""
    made = {
        name: SimpleNamespace(rank=lambda name=name: places[name], size=lambda name=name: sizes[name]) for name in LONG
    }
    return None, SimpleNamespace(**made)


def as_state(places: dict[str, int], sizes: dict[str, int]) -> tuple[Any, Any]:
    """``megatron.core.parallel_state``; and no groups of their own."""
    state = SimpleNamespace()
    for name, long in LONG.items():
        setattr(state, f"get_{long}_parallel_rank", lambda name=name: places[name])
        setattr(state, f"get_{long}_parallel_world_size", lambda name=name: sizes[name])
    return state, None


@pytest.mark.parametrize("known", [as_groups, as_state])
@pytest.mark.parametrize("sizes", SHAPES)
def test_context_and_tensor_parallel_ranks_share_a_stage_and_no_two_are_one(sizes: dict[str, int], known: Any) -> None:
    count = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    found = []
    for number in range(count):
        places = process(number, sizes)
        rank, stages = _rank_id(*known(places, sizes))
        assert (rank.dp, rank.stage, stages) == (places["dp"], places["pp"], sizes["pp"])
        found.append(rank)
    shared = sizes["tp"] * sizes["cp"]
    assert sorted(found) == sorted(
        RankId(dp, stage, tp) for dp, stage, tp in product(range(sizes["dp"]), range(sizes["pp"]), range(shared))
    )
    for first in range(0, count, shared):
        assert [rank.tp for rank in found[first : first + shared]] == list(range(shared)), "as Megatron numbers them"
