"""Work that must not grow with the number of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from perseus_operator.families.training.training import Training
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import JobRef, Pod


class Counted(dict[str, Node]):
    """Counts the nodes that are looked at."""

    looks = 0

    def __getitem__(self, name: str) -> Node:
        self.looks += 1
        return super().__getitem__(name)

    def values(self) -> Any:
        def looked_at() -> Iterator[Node]:
            for node in super(Counted, self).values():
                self.looks += 1
                yield node

        return looked_at()


@pytest.mark.parametrize("nodes", [2, 50])
def test_a_rank_that_joins_concerns_no_other_node(nodes: int) -> None:
    state = Training(PerseusJob(JobRef("ns", "job", "uid")))
    pods = [Pod(f"u{n}", "ns", f"p{n}", f"n{n}", "job", {}) for n in range(nodes)]
    state.pods_observed(Selection(tuple(pods)), {}, wall_s=0.0)
    for node in state.nodes.values():
        node.plans.selection_accepted({0: 7}, plan_id="", from_iteration=3)
        assert node.plans.selected == {0: 7}
    last = state.nodes[f"n{nodes - 1}"]
    counted = state.nodes._nodes = Counted(state.nodes._nodes)
    state.rank_joined(last, Rank("u", "GPU-0", 0, 0, 0, 1, 0))
    assert counted.looks == 0
    assert not any(node.plans.selected for node in state.nodes.values()), "and yet all select again"
    last.plans.selection_accepted({0: 8}, plan_id="", from_iteration=4)
    state.rank_joined(last, Rank("u", "GPU-0", 0, 0, 0, 1, 0))
    assert last.plans.selected == {0: 8}, "the same process, seen again"
    state.nodes.forget(last)
    assert state.nodes._selections == {}
