"""Find the parts of a schedule that consist of equal blocks, from the structure of its graph alone.

The ancestors of an instruction form a prefix of every stage. Where these prefixes grow by the same amount again and
again as one stage proceeds, and what lies between two of them has the same options and the same edges, the graph
repeats: the steady state of 1F1B, both phases of GPipe, or any repetition in a custom schedule. Some stages begin to
repeat earlier and end later than all do together, so in the end each stage has its own range of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Index, Int64s
from perseus_solver.model.problem import Problem
from perseus_solver.relaxation.graph import Graph


@dataclass(frozen=True, slots=True, eq=False)
class Repetition:
    """Equal blocks one after the other.

    Block j holds, of each stage s, the instructions ``first[s] + j·step[s] … first[s] + (j + 1)·step[s] − 1`` (counted
    within the stage). Its nodes are numbered stage by stage.

    Attributes:
        first, step: int[stages].
        low, high: int[stages], the stage repeats from block ``low[s]`` to before block ``high[s]``.
        option_of: int[nodes], the table of each node.
        tail, head: int[classes], the nodes that each class of edges joins.
        back: int[classes], by how many blocks the tail precedes the head.
        delay_s: float[classes], seconds.
    """

    first: Int64s
    step: Int64s
    low: Int64s
    high: Int64s
    option_of: Index
    tail: Index
    head: Index
    back: Int64s
    delay_s: npt.NDArray[np.float64]

    @property
    def nodes(self) -> int:
        """Instructions in a block."""
        return int(self.step.sum())

    @property
    def begin(self) -> Int64s:
        """Where the repetition begins on each stage."""
        return self.first + self.low * self.step

    @property
    def end(self) -> Int64s:
        """Where the repetition ends on each stage."""
        return self.first + self.high * self.step

    @property
    def count(self) -> Int64s:
        """How often each node is repeated."""
        return np.repeat(self.high - self.low, self.step)

    def locate(self, problem: Problem) -> tuple[Int64s, Int64s]:
        """Return block and node of every instruction of the problem, as if the repetition had no end."""
        offset = problem.stage_offset.astype(np.int64)
        stage = np.repeat(np.arange(problem.stages), np.diff(offset))
        place = np.arange(problem.instructions) - offset[stage]
        block, within = np.divmod(place - self.first[stage], self.step[stage])
        return block, np.concatenate(([0], np.cumsum(self.step)[:-1]))[stage] + within

    def classify(self, problem: Problem, block: Int64s, node: Int64s) -> Int64s:
        """Return the class of every edge of the problem, −1 where it belongs to none."""
        tail, head = problem.edge_from, problem.edge_to
        back = block[head] - block[tail]
        span = int(self.back.max(initial=0)) + 1
        class_keys = (self.tail * self.nodes + self.head) * span + self.back
        order = np.argsort(class_keys)
        key = (node[tail] * self.nodes + node[head]) * span + back
        at = order[np.minimum(np.searchsorted(class_keys[order], key), len(order) - 1)]
        fits = (class_keys[at] == key) & (back >= 0) & (back < span) & (self.delay_s[at] == problem.edge_delay_s)
        return np.where(fits, at, -1)


def ancestors(problem: Problem, graph: Graph) -> npt.NDArray[np.int32]:
    """Return how many instructions of each stage precede the end of each instruction, itself included.

    Returns:
        int32[n, stages].
    """
    stages = problem.stages
    offset = problem.stage_offset.astype(np.int64)
    stage = np.repeat(np.arange(stages), np.diff(offset))[graph.order]
    place = graph.order - offset[stage] + 1
    prefix = np.zeros((graph.n + 1, stages), dtype=np.int32)
    for level in graph.levels:
        rows = np.arange(level.begin, level.end)
        for index, _, _ in level.before:
            prefix[rows] = np.maximum(prefix[rows], prefix[index])
        prefix[rows, stage[rows]] = place[rows]
    return prefix[graph.rank]


def find_repetitions(problem: Problem, graph: Graph, least_blocks: int) -> list[Repetition]:
    """Find repetitions that do not overlap, in order of execution; those that cover most instructions are preferred.

    Args:
        problem: the problem.
        graph: its levels.
        least_blocks: smallest number of blocks of a repetition.
    """
    prefix = ancestors(problem, graph)
    repetitions: list[Repetition] = []
    for stage in {0, problem.stages - 1}:
        prefix_of_stage = prefix[problem.stage_offset[stage] : problem.stage_offset[stage + 1]].astype(np.int64)
        repetitions += _repetitions_along(problem, prefix_of_stage, least_blocks)
    repetitions.sort(key=lambda repetition: -int(repetition.count.sum()))
    chosen: list[Repetition] = []
    for repetition in repetitions:
        if all((repetition.end <= r.begin).all() or (r.end <= repetition.begin).all() for r in chosen):
            chosen.append(repetition)
    chosen.sort(key=lambda repetition: int(repetition.begin.sum()))
    offset = problem.stage_offset.astype(np.int64)
    lengths = offset[1:] - offset[:-1]
    for i, repetition in enumerate(chosen):
        after = chosen[i + 1].begin if i + 1 < len(chosen) else lengths
        chosen[i] = _extended(problem, repetition, chosen[i - 1].end if i else np.zeros_like(lengths), after)
    return chosen


def _repetitions_along(problem: Problem, prefix: Int64s, least_blocks: int) -> list[Repetition]:
    """Return the repetitions seen from one stage, for the shortest period that has any.

    ``prefix`` is int[instructions of the stage, stages], the ancestors of each of its instructions.
    """
    length = len(prefix)
    for period in range(1, length // max(least_blocks, 2) + 1):
        growth = prefix[period:] - prefix[:-period]
        steady = (growth[period:] == growth[:-period]).all(axis=1)
        edges = np.flatnonzero(np.diff(np.concatenate(([0], steady.view(np.int8), [0]))))
        repetitions = []
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            blocks = (end - begin - 1) // period + 2
            if blocks >= least_blocks and (growth[begin] > 0).all():
                repetition = _verify(problem, prefix[begin], growth[begin], blocks)
                if repetition is not None and repetition.high[0] - repetition.low[0] >= least_blocks:
                    repetitions.append(repetition)
        if repetitions:
            return repetitions
    return []


def _verify(problem: Problem, first: Int64s, step: Int64s, blocks: int) -> Repetition | None:
    """Return the longest part of a supposed repetition, around its middle, of equal options and edges."""
    offset = problem.stage_offset.astype(np.int64)
    stage = np.repeat(np.arange(problem.stages), np.diff(offset))
    place = np.arange(problem.instructions) - offset[stage]
    node_first = np.concatenate(([0], np.cumsum(step)))
    relative = place - first[stage]
    block, within = np.divmod(relative, step[stage])
    node = node_first[stage] + within
    inside = (block >= 0) & (block < blocks)
    nodes = int(node_first[-1])

    middle = blocks // 2
    option = np.full((blocks, nodes), -1, dtype=np.int64)
    option[block[inside], node[inside]] = problem.option_of[inside]
    equal = (option == option[middle]).all(axis=1)

    tail, head = problem.edge_from.astype(np.int64), problem.edge_to.astype(np.int64)
    into = inside[head]
    tail, head, delay = tail[into], head[into], problem.edge_delay_s[into]
    back = block[head] - block[tail]
    key = np.lexsort((back, node[tail], node[head], block[head]))
    tail, head, back, delay = tail[key], head[key], back[key], delay[key]
    bounds = np.searchsorted(block[head], np.arange(blocks + 1))
    sample = slice(int(bounds[middle]), int(bounds[middle + 1]))
    classes = np.stack((node[tail], node[head], back, delay.view(np.int64)), axis=1)
    per_block = classes[sample]
    same_size = np.diff(bounds) == len(per_block)
    equal &= same_size
    for b in np.flatnonzero(same_size):
        equal[b] &= bool(np.array_equal(classes[bounds[b] : bounds[b + 1]], per_block))
    low = middle
    while low > 0 and equal[low - 1]:
        low -= 1
    high = middle + 1
    while high < blocks and equal[high]:
        high += 1
    twice = len(np.unique(per_block[:, :3], axis=0)) < len(per_block)
    if not (equal[middle] and len(per_block)) or twice or (per_block[:, 2] < 0).any():
        return None
    return Repetition(
        first=first,
        step=step,
        low=np.full(problem.stages, low),
        high=np.full(problem.stages, high),
        option_of=option[middle].astype(np.intp),
        tail=per_block[:, 0].astype(np.intp),
        head=per_block[:, 1].astype(np.intp),
        back=per_block[:, 2],
        delay_s=delay[sample],
    )


def _extended(problem: Problem, repetition: Repetition, begin: Int64s, end: Int64s) -> Repetition:
    """Return the repetition with all further blocks of each stage, between these positions, that are like the others.

    Like the others means the same options, and edges in and out of the same classes.
    """
    block, node = repetition.locate(problem)
    edge_class = repetition.classify(problem, block, node)
    like = problem.option_of == repetition.option_of[node]
    for ends, pattern in ((problem.edge_from, repetition.tail), (problem.edge_to, repetition.head)):
        wanted = np.bincount(pattern, minlength=repetition.nodes)[node]
        classified = np.bincount(ends[edge_class >= 0], minlength=problem.instructions)
        like &= (np.bincount(ends, minlength=problem.instructions) == classified) & (classified == wanted)
    low, high = repetition.low.copy(), repetition.high.copy()
    offset = problem.stage_offset.astype(np.int64)
    for s, step in enumerate(repetition.step.tolist()):
        # Whole blocks of the stage, in both directions.
        least, most = -int((repetition.first[s] - begin[s]) // step), int((end[s] - repetition.first[s]) // step)
        rows = slice(
            int(offset[s] + repetition.first[s]) + least * step, int(offset[s] + repetition.first[s]) + most * step
        )
        different = np.flatnonzero(~like[rows].reshape(-1, step).all(axis=1)) + least
        low[s] = max(different[different < low[s]].max(initial=least - 1) + 1, least)
        high[s] = different[different >= high[s]].min(initial=most)
    return replace(repetition, low=low, high=high)
