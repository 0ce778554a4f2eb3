"""Any directed graph of work as arrays of a planning problem: nodes with options of any knob, and edges between them.

The solver sets clocks, and stores them in 16 bits. Here every knob, whatever it is, gets a number instead, the same
wherever it occurs. Consecutive instructions of a stage always follow each other in a problem; so where nodes are not
assigned to stages, they are laid out as few chains of edges, which stand for stages.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import LARGEST, SMALLEST, Floats, Ints, Options
from perseus_solver.schedules.base import Schedule, assemble

Node = Hashable
Knob = Hashable
Edge = tuple[Node, Node] | tuple[Node, Node, float]
MAX_KNOBS = 65_535
"""Knobs are stored in 16 bits, like clocks, and 0 is the clock of constant-time instructions."""


class Option(NamedTuple):
    """One way to run a node: a knob of any kind, and what the node then takes in seconds and joules."""

    knob: Knob
    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Names:
    """What nodes and knobs of a problem are called.

    Attributes:
        nodes: the node of each instruction.
        knobs: knob number k + 1, as plans store it.
    """

    nodes: tuple[Node, ...]
    knobs: tuple[Knob, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """A graph as the arrays of `perseus_solver.model.problem.Problem`, which describes them."""

    schedule: Schedule
    options: tuple[Options, ...]
    option_of: Ints
    edge_from: Ints
    edge_to: Ints
    edge_delay_s: Floats
    names: Names


def arrays_of(
    nodes: Mapping[Node, Sequence[tuple[Knob, float, float]]],
    edges: Iterable[Edge],
    stage_of: Mapping[Node, int] | None,
) -> Arrays:
    """Number nodes and knobs, and check everything by name.

    Args:
        nodes: the options of each node.
        edges: precedence, with an optional delay in seconds.
        stage_of: the stage that runs each node, in the order of ``nodes``; None: nodes are bound by edges alone.

    Raises:
        InvalidProblem: the message names the node or edge and the rule.
    """
    if not nodes:
        raise InvalidProblem("nodes must not be empty")
    delays = _delays(nodes, edges)
    if stage_of is not None:
        runs = _by_stage(nodes, stage_of)
        for run in runs:
            for pair in pairwise(run):
                delays.setdefault(pair, 0.0)
    order = _ordered(nodes, delays)
    if stage_of is None:
        runs = _chains(order, delays)
    names = [node for run in runs for node in run]
    number = {node: i for i, node in enumerate(names)}
    knobs: dict[Knob, int] = {}
    tables: dict[tuple[Option, ...], int] = {}
    option_of = [tables.setdefault(_checked(node, nodes[node], knobs), len(tables)) for node in names]
    if len(knobs) > MAX_KNOBS:
        raise InvalidProblem(f"nodes have {len(knobs):,} different knobs; at most {MAX_KNOBS:,} are supported")
    if not any(min(option.energy_j for option in options) for options in tables):
        raise InvalidProblem("nodes must take energy: every node has an option of 0 J, so any plan of those is best")
    pairs = sorted(delays, key=lambda pair: (number[pair[0]], number[pair[1]]))
    return Arrays(
        schedule=_schedule([len(run) for run in runs]),
        options=tuple(_table(options, knobs) for options in tables),
        option_of=np.array(option_of, dtype=np.int32),
        edge_from=np.array([number[before] for before, _ in pairs], dtype=np.int32),
        edge_to=np.array([number[after] for _, after in pairs], dtype=np.int32),
        edge_delay_s=np.array([delays[pair] for pair in pairs], dtype=np.float64),
        names=Names(tuple(names), tuple(knobs)),
    )


def _delays(nodes: Mapping[Node, object], edges: Iterable[Edge]) -> dict[tuple[Node, Node], float]:
    """Return the delay of each edge; of edges that are given twice, the longer one."""
    delays: dict[tuple[Node, Node], float] = {}
    for edge in edges:
        if len(edge) not in (2, 3):
            raise InvalidProblem(f"edge {edge!r} must be (before, after) or (before, after, delay in seconds)")
        before, after = edge[:2]
        delay_s = float(edge[2]) if len(edge) == 3 else 0.0
        for node in (before, after):
            if node not in nodes:
                raise InvalidProblem(f"edge {before!r} to {after!r}: there is no node {node!r}")
        if not (math.isfinite(delay_s) and delay_s >= 0):
            raise InvalidProblem(f"edge {before!r} to {after!r}: delay must be finite, zero or more, not {delay_s}")
        delays[before, after] = max(delay_s, delays.get((before, after), 0.0))
    return delays


def _by_stage(nodes: Mapping[Node, object], stage_of: Mapping[Node, int]) -> list[list[Node]]:
    missing = [node for node in nodes if node not in stage_of]
    if missing:
        raise InvalidProblem(f"stage_of has no stage for node {missing[0]!r}")
    stages = [stage_of[node] for node in nodes]
    if not all(isinstance(stage, int | np.integer) and stage >= 0 for stage in stages):
        raise InvalidProblem("stage_of must be whole numbers from 0")
    runs: list[list[Node]] = [[] for _ in range(max(stages) + 1)]
    for node, stage in zip(nodes, stages, strict=True):
        runs[stage].append(node)
    if not all(runs):
        raise InvalidProblem(f"stage_of must use every stage from 0 to {len(runs) - 1}; {runs.index([])} has no node")
    return runs


def _ordered(nodes: Iterable[Node], delays: Mapping[tuple[Node, Node], float]) -> list[Node]:
    """Return the nodes in an order that follows the edges."""
    after: dict[Node, list[Node]] = {node: [] for node in nodes}
    waits = dict.fromkeys(after, 0)
    for first, second in delays:
        after[first].append(second)
        waits[second] += 1
    ready = deque(node for node, count in waits.items() if not count)
    order = []
    while ready:
        order.append(ready.popleft())
        for node in after[order[-1]]:
            waits[node] -= 1
            if not waits[node]:
                ready.append(node)
    if len(order) < len(waits):
        stuck = [repr(node) for node, count in waits.items() if count]
        more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        raise InvalidProblem(
            f"nodes wait for each other in a cycle, or for one: {', '.join(stuck[:4])}{more}; edges must form no cycle "
            "(nodes of one stage run in the order given)"
        )
    return order


def _chains(order: list[Node], delays: Mapping[tuple[Node, Node], float]) -> list[list[Node]]:
    """Lay the nodes out as chains of edges, each node behind the latest node before it that ends a chain."""
    before: dict[Node, list[Node]] = {node: [] for node in order}
    for first, second in delays:
        before[second].append(first)
    place = {node: k for k, node in enumerate(order)}
    chain_ending: dict[Node, list[Node]] = {}
    chains: list[list[Node]] = []
    for node in order:
        ends = [first for first in before[node] if first in chain_ending]
        if ends:
            chain = chain_ending.pop(max(ends, key=place.__getitem__))
            chain.append(node)
        else:
            chain = [node]
            chains.append(chain)
        chain_ending[node] = chain
    return chains


def _checked(node: Node, options: Sequence[tuple[Knob, float, float]], knobs: dict[Knob, int]) -> tuple[Option, ...]:
    """Return the options of a node after a check, and number their knobs."""
    if not options:
        raise InvalidProblem(f"node {node!r} has no options")
    checked = tuple(Option(*option) for option in options)
    for option in checked:
        if not SMALLEST <= option.time_s <= LARGEST:
            raise InvalidProblem(
                f"node {node!r}, knob {option.knob!r}: time_s must be between {SMALLEST:g} and {LARGEST:g}, "
                f"not {option.time_s}"
            )
        if not 0 <= option.energy_j <= LARGEST:
            raise InvalidProblem(
                f"node {node!r}, knob {option.knob!r}: energy_j must be between 0 and {LARGEST:g}, "
                f"not {option.energy_j}"
            )
        knobs.setdefault(option.knob, len(knobs) + 1)
    if len({option.knob for option in checked}) < len(checked):
        raise InvalidProblem(f"node {node!r} has two options of one knob; a knob may be a tuple of several settings")
    return checked


def _table(options: tuple[Option, ...], knobs: Mapping[Knob, int]) -> Options:
    rows = sorted(options, key=lambda option: -knobs[option.knob])  # as clocks are, by descending number
    return Options(
        stage=0,
        kind=InstructionKind.FORWARD,
        chunk=0,
        frequency_mhz=np.array([knobs[option.knob] for option in rows], dtype=np.int32),
        time_s=np.array([option.time_s for option in rows], dtype=np.float64),
        energy_j=np.array([option.energy_j for option in rows], dtype=np.float64),
    )


def _schedule(lengths: list[int]) -> Schedule:
    """Return a schedule of these numbers of instructions, which stand for nodes: only their order is meant."""
    rows = [
        np.column_stack([np.full(n, InstructionKind.FORWARD), np.arange(n), np.zeros(n, dtype=np.int64)])
        for n in lengths
    ]
    position = np.arange(len(lengths))[:, None]
    return assemble("graph", rows, microbatches=max(lengths), position=position)
