"""Whether pools by length would save energy over one pool, and which: from lengths that were counted together.

Requests are short, medium or long by prompt and by answer. A split cuts either, or both, so its pools are rectangles of
the nine classes. Pools share nothing here but the load, so each of the 36 rectangles is planned once, with the variants
that may serve it, and the best of the sixteen splits is the least sum of its pools' energies. One pool is a split, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_core.lengths import LENGTH_EDGES, LENGTHS, UNKNOWN, lengths_at
from perseus_solver.errors import InvalidProblem, SolverError
from perseus_solver.kinds import Floats
from perseus_solver.serving.planner.plan import plan
from perseus_solver.serving.planner.problem import PlanRequest, PoolLoad, ReplicaPlan, Variant
from perseus_solver.serving.planner.replica import ReplicaModel
from perseus_solver.serving.planner.requests import LatencyLimits, RequestClass

PROMPT_ENDS: Final = (200, 1_000)
OUTPUT_ENDS: Final = (100, 500)
"""Tokens up to which a prompt, or an answer, is short, and medium: the edges of the counts nearest to DynamoLLM's."""
LEVELS: Final = "sml"
_TYPICAL: Final = 8
"""Lengths that stand for all of a class, as of `RequestClass.seen`."""
_HOUR_S: Final = 3_600.0

Interval = tuple[int, int]
"""Levels from the first on, before the second."""
Rectangle = tuple[Interval, Interval]
"""Levels of prompts and of answers that a pool serves."""
_ALL: Final[Rectangle] = ((0, 3), (0, 3))
_CUTS: Final = tuple(
    tuple(itertools.pairwise((0, *cuts, 3))) for number in range(3) for cuts in itertools.combinations((1, 2), number)
)
"""Ways to cut three levels: not at all, once, twice."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one pair of lengths.

    Attributes:
        prompt: the number of the prompt's length, as of ``perseus_core.lengths``.
        output: the number of the answer's.
        share: of all requests.
    """

    prompt: int
    output: int
    share: float


@dataclass(frozen=True, slots=True)
class SeenClass:
    """Requests of one of the nine classes.

    Attributes:
        name: of prompts and answers: ``prompt-s-answer-m``.
        share: of all requests.
        prompt_tokens: of a prompt, mean of the middles of their lengths.
        output_tokens: of an answer.
    """

    name: str
    share: float
    prompt_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """An engine that may serve a pool.

    Attributes:
        replica: its model.
        clocks_mhz: that it may run at, ascending; prompts also at the highest.
        kv_per_token: of its memory's unit, for a token of a request.
        start_s: how long it takes to start.
    """

    replica: ReplicaModel
    clocks_mhz: tuple[int, ...]
    kv_per_token: float
    start_s: float


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """What is asked.

    Attributes:
        cells: how often which lengths are; shares of all requests.
        prompt_scale: tokens computed of a prompt over its length: less than 1 with a cache of prefixes.
        output_scale: tokens of an answer over what its length stands for.
        variants: at least one, each with another number of GPUs.
        limits: of all requests.
        expected: requests a second in each hour.
        upper: that must be carried in each.
    """

    cells: tuple[Cell, ...]
    prompt_scale: float
    output_scale: float
    variants: tuple[EngineVariant, ...]
    limits: LatencyLimits
    expected: tuple[float, ...]
    upper: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """A pool of the best split.

    Attributes:
        rectangle: which requests it serves.
        share: of all requests.
        plan: of the hours.
    """

    rectangle: Rectangle
    share: float
    plan: ReplicaPlan

    @property
    def name(self) -> str:
        """Of the pool: ``prompt-sm-answer-l``; empty for the one of all requests."""
        return name_of(self.rectangle)


@dataclass(frozen=True, slots=True)
class Split:
    """The best split.

    Attributes:
        pools: of it; one, if no split pays.
        joules: of all its pools.
        one_pool_joules: of the plan of one pool.
        bound_joules: no plan of any of the splits needs less.
        best_other_joules: of the best split into several pools; infinite: no other keeps the limits.
        best_other_pools: how many it has.
    """

    pools: tuple[PlannedPool, ...]
    joules: float
    one_pool_joules: float
    bound_joules: float
    best_other_joules: float = math.inf
    best_other_pools: int = 0

    @property
    def gap(self) -> float:
        """The share by which the plan may need more than the best."""
        return max(0.0, self.joules / self.bound_joules - 1.0) if self.bound_joules > 0.0 else 0.0


def cells_of(counts: Mapping[int, int]) -> tuple[tuple[Cell, ...], bool]:
    """Return how often which lengths are, and whether that was counted together.

    Args:
        counts: by the places of ``perseus_core.lengths``. Where all have one length unknown, prompts and answers are
            taken as independent of each other.

    Raises:
        InvalidProblem: nothing was counted of one kind.

    >>> from perseus_core.lengths import length_place
    >>> cells_of({length_place(9, 6): 3, length_place(6, 9): 1})
    ((Cell(prompt=6, output=9, share=0.25), Cell(prompt=9, output=6, share=0.75)), True)
    """
    joint = np.zeros((LENGTHS + 1, LENGTHS + 1))
    for place, count in counts.items():
        joint[lengths_at(place)] += count
    requests, together = joint[:UNKNOWN, :UNKNOWN], True
    if not requests.any():
        prompts, outputs = joint[:UNKNOWN, UNKNOWN], joint[UNKNOWN, :UNKNOWN]
        requests, together = np.outer(prompts, outputs), False
    if not requests.any():
        raise InvalidProblem("counts must have at least one request")
    shares = requests / requests.sum()
    return tuple(
        Cell(int(prompt), int(output), float(shares[prompt, output])) for prompt, output in np.argwhere(shares > 0.0)
    ), together


def name_of(rectangle: Rectangle) -> str:
    """Return what the requests of a rectangle are called; empty: all.

    >>> name_of(((0, 2), (2, 3))), name_of(((0, 3), (0, 3)))
    ('prompt-sm-answer-l', '')
    """
    kinds = zip(("prompt", "answer"), rectangle, strict=True)
    return "-".join(f"{kind}-{LEVELS[slice(*interval)]}" for kind, interval in kinds if interval != (0, 3))


def classes_of(cells: Sequence[Cell]) -> tuple[SeenClass, ...]:
    """Return the classes that have requests, short prompts and answers first."""
    classes: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        classes.setdefault((level_of(cell.prompt, PROMPT_ENDS), level_of(cell.output, OUTPUT_ENDS)), []).append(cell)
    seen = []
    for (prompt, output), those in sorted(classes.items()):
        share = math.fsum(cell.share for cell in those)
        prompts, outputs = (
            math.fsum(cell.share * tokens_of(length) for cell, length in pairs) / share
            for pairs in ([(cell, cell.prompt) for cell in those], [(cell, cell.output) for cell in those])
        )
        seen.append(SeenClass(name_of(((prompt, prompt + 1), (output, output + 1))), share, prompts, outputs))
    return tuple(seen)


def decoding_tokens(cells: Sequence[Cell]) -> float:
    """Return how many tokens a request that decodes has in memory, mean."""
    rows = [(cell.share, tokens_of(cell.prompt), tokens_of(cell.output)) for cell in cells]
    weight, length, output = np.array(rows).T
    return _decoding(weight, length, output)


def _decoding(weight: Floats, length: Floats, output: Floats) -> float:
    """Of those that decode at a moment, long answers are more than of those that arrive."""
    return float(weight @ (output * (length + output / 2)) / (weight @ output))


def tokens_of(length: int) -> float:
    """Return how many tokens stand for a length: the middle between its edges, as a ratio.

    >>> round(tokens_of(9)), tokens_of(0)
    (707, 1.0)
    """
    if length == 0:
        return float(LENGTH_EDGES[0])
    low, high = LENGTH_EDGES[length - 1], LENGTH_EDGES[min(length, LENGTHS - 2)]
    return math.sqrt(low * high)


def level_of(length: int, ends: Sequence[int]) -> int:
    """Return whether a length is short (0), medium (1) or long (2)."""
    edge = LENGTH_EDGES[length] if length < len(LENGTH_EDGES) else math.inf
    return sum(edge > end for end in ends)


def best_split(request: SplitRequest) -> Split:
    """Return the split of least energy, one pool included.

    Raises:
        SolverError: one pool cannot keep the limits, or a value is out of range.
    """
    planned: dict[Rectangle, PlannedPool | None] = {}

    def pool_of(rectangle: Rectangle) -> PlannedPool | None:
        if rectangle not in planned:
            planned[rectangle] = _planned(request, rectangle)
        return planned[rectangle]

    one = pool_of(_ALL)
    if one is None or not one.share:
        raise SolverError("no replica keeps the limits for all requests in one pool")
    best: tuple[PlannedPool, ...] = (one,)
    bound = one.plan.bound
    other: tuple[PlannedPool, ...] = ()
    for prompts, outputs in itertools.product(_CUTS, _CUTS):
        wanted = [pool_of(rectangle) for rectangle in itertools.product(prompts, outputs)]
        if None in wanted:
            continue
        pools = tuple(pool for pool in wanted if pool is not None and pool.share > 0.0)
        bound = min(bound, math.fsum(pool.plan.bound for pool in pools))
        if len(pools) > 1 and (not other or _joules(pools) < _joules(other)):
            other = pools
    if other and _joules(other) < _joules(best):
        best = other
    return Split(best, _joules(best), _joules((one,)), min(bound, _total(best)) * 3.6e6, _joules(other), len(other))


def _total(pools: Sequence[PlannedPool]) -> float:
    return math.fsum(pool.plan.cost for pool in pools)


def _joules(pools: Sequence[PlannedPool]) -> float:
    """Return what pools draw; infinite for none."""
    return _total(pools) * 3.6e6 if pools else math.inf


def _planned(request: SplitRequest, rectangle: Rectangle) -> PlannedPool | None:
    """Return the plan of the requests of a rectangle; None: no replica keeps their limits."""
    (first, last), (low, high) = rectangle
    cells = [
        cell
        for cell in request.cells
        if first <= level_of(cell.prompt, PROMPT_ENDS) < last and low <= level_of(cell.output, OUTPUT_ENDS) < high
    ]
    share = math.fsum(cell.share for cell in cells)
    if not cells:
        return PlannedPool(rectangle, 0.0, ReplicaPlan({}, 0.0, 0.0, 0))
    variants = tuple(variant for one in request.variants if (variant := _variant(request, one, cells)) is not None)
    if not variants:
        return None
    expected, upper = (tuple(share * load for load in loads) for loads in (request.expected, request.upper))
    return PlannedPool(
        rectangle, share, plan(PlanRequest((PoolLoad("pool", variants, expected, upper),), _HOUR_S, spare=0))
    )


def _variant(request: SplitRequest, one: EngineVariant, cells: Sequence[Cell]) -> Variant | None:
    requests, replica = request_class(cells, request, one.kv_per_token), one.replica
    points = replica.points(requests, request.limits, one.clocks_mhz, (replica.highest_mhz,))
    if not points:
        return None
    return Variant(replica.gpus, points, one.start_s, one.start_s * replica.steps.resting_w(replica.highest_mhz))


def request_class(cells: Sequence[Cell], request: SplitRequest, kv_per_token: float) -> RequestClass:
    """Return what requests of some lengths are like.

    Args:
        cells: at least one.
        request: whose scales they have.
        kv_per_token: of the memory's unit, for a token of a request.
    """
    weight = np.array([cell.share for cell in cells])
    weight /= weight.sum()
    length = np.array([tokens_of(cell.prompt) for cell in cells])
    prompt = np.maximum(1.0, request.prompt_scale * length)
    output = np.maximum(1.0, request.output_scale * np.array([tokens_of(cell.output) for cell in cells]))
    mean, answers = float(weight @ prompt), float(weight @ output)
    kv_tokens = kv_per_token * _decoding(weight, length, output)
    scv = float(weight @ (prompt - mean) ** 2) / mean**2
    typical = (_quantiles(prompt, weight), _quantiles(output, weight))
    return RequestClass(mean, answers, kv_tokens, scv, 1.0, *typical)


def _quantiles(tokens: Floats, weight: Floats) -> tuple[float, ...]:
    order = np.argsort(tokens)
    upto = np.cumsum(weight[order])
    middles = (np.arange(_TYPICAL) + 0.5) / _TYPICAL
    at = np.minimum(np.searchsorted(upto, middles), len(order) - 1)
    return tuple(map(float, tokens[order][at]))
