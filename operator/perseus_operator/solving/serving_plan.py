"""Whether pools by length would save energy over one: what a worker is asked, and what it answers.

The answer is shown to people and sets nothing, so it is checked for its shape alone, wherever the worker ran.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from perseus_core.clock_latency import MAX_CLOCK_MHZ
from perseus_operator.api.serving.status import MOST_ADVISED, MOST_CLASSES, MOST_GPUS
from perseus_operator.errors import SolveFailed

if TYPE_CHECKING:
    from perseus_solver.serving.planner.split import Cell, EngineVariant

MOST_ANSWER_BYTES: Final = 1 << 14
"""Nine pools of some 200 bytes each, several times."""
ONE_POOL: Final = "all"
"""Name of the one pool of all requests."""
_NAME: Final = re.compile(r"[a-z]{1,7}(-[a-z]{1,7}){0,3}")
_FLOORS: Final = 3
"""Clocks below the highest that are planned with: more change the energy of a day by some thousandths."""


@dataclass(frozen=True)
class MeasuredVariant:
    """What was measured of an engine that may serve.

    Attributes:
        gpus: of a replica.
        windows: as CSV.
    """

    gpus: int
    windows: str


@dataclass(frozen=True)
class ServingPlanRequest:
    """What is asked.

    Attributes:
        counts: places of ``perseus_core.lengths``, and how many requests were counted at each.
        prompt_tokens: computed of a prompt, mean: without those of a cached prefix.
        output_tokens: of an answer, mean.
        variants: the pool's own first.
        highest_mhz: of the GPUs.
        kv_capacity: of a replica's memory for keys and values, in the windows' unit.
        most_running: requests that an engine decodes at once.
        step_tokens: of prompts that a step computes.
        start_s: how long a replica takes to start.
        first_token_s, per_token_s, attainment: that were promised.
        expected: requests a second in each hour.
        upper: that must be carried in each.
    """

    counts: Sequence[Sequence[int]]
    prompt_tokens: float
    output_tokens: float
    variants: Sequence[MeasuredVariant]
    highest_mhz: int
    kv_capacity: int
    most_running: int
    step_tokens: int
    start_s: float
    first_token_s: float
    per_token_s: float
    attainment: float
    expected: Sequence[float]
    upper: Sequence[float]

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ServingPlanRequest:
        """What ``to_bytes`` made."""
        fields = json.loads(data)
        return cls(**fields | {"variants": [MeasuredVariant(**one) for one in fields["variants"]]})


@dataclass(frozen=True)
class PoolRow:
    """A pool of the plan.

    Attributes:
        name: of its requests.
        share: of all requests.
        gpus: of a replica, at the heaviest hour.
        replicas: at the heaviest hour.
        fewest: at the lightest.
        clock_mhz: the least, at the heaviest hour.
        joules: of all hours.
    """

    name: str
    share: float
    gpus: int
    replicas: int
    fewest: int
    clock_mhz: int
    joules: float


@dataclass(frozen=True)
class ServingPlan:
    """The answer.

    Attributes:
        pools: of the best split; one, if none pays.
        joules: of all.
        one_pool_joules: of one pool.
        other_joules: of the best split into several; 0: none keeps the limits.
        other_pools: how many it has.
        gap: the share by which the plan may need more than the best.
        together: whether prompts and answers were counted of the same requests.
    """

    pools: tuple[PoolRow, ...]
    joules: float
    one_pool_joules: float
    other_joules: float
    other_pools: int
    gap: float
    together: bool

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ServingPlan:
        """What ``to_bytes`` made.

        Raises:
            SolveFailed: it is something else, or a status could not hold it.
        """
        try:
            fields = json.loads(data)
            pools = tuple(PoolRow(**one) for one in fields["pools"])
            plan = cls(**fields | {"pools": pools})
            kept = (
                1 <= len(pools) == len({one.name for one in pools}) <= MOST_CLASSES
                and all(map(_possible, pools))
                and type(plan.together) is bool
                and type(plan.other_pools) is int
                and 0 <= plan.other_pools <= MOST_CLASSES
                and all(_is_number(one, 1e15) for one in (plan.one_pool_joules, plan.other_joules, plan.gap))
                and plan.one_pool_joules >= 1.0
                and _is_number(plan.joules, plan.one_pool_joules)
            )
        except (ValueError, KeyError, TypeError, RecursionError):
            kept = False
        if not kept:
            raise SolveFailed("the answer is no plan of a pool")
        return plan


def _possible(pool: PoolRow) -> bool:
    counts = (
        (pool.gpus, MOST_GPUS),
        (pool.replicas, MOST_ADVISED),
        (pool.fewest, MOST_ADVISED),
        (pool.clock_mhz, MAX_CLOCK_MHZ),
    )
    return (
        isinstance(pool.name, str)
        and _NAME.fullmatch(pool.name) is not None
        and _is_number(pool.share, 1.0)
        and _is_number(pool.joules, 1e15)
        and all(type(count) is int and 0 <= count <= most for count, most in counts)
    )


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0.0 <= value <= most * (1.0 + 1e-9)


def plan_in_process(request: ServingPlanRequest) -> bytes:
    """Fit what was measured, and plan; in the worker process, some seconds of a core.

    Raises:
        SolverError: what was measured does not say enough, or no replica keeps the limits.
    """
    from perseus_solver.errors import SolverError
    from perseus_solver.serving.planner import LatencyLimits
    from perseus_solver.serving.planner.split import SplitRequest, best_split, cells_of, tokens_of

    cells, together = cells_of({one[0]: one[1] for one in request.counts})
    prompts, outputs = (
        math.fsum(cell.share * tokens_of(length) for cell, length in pairs)
        for pairs in ([(cell, cell.prompt) for cell in cells], [(cell, cell.output) for cell in cells])
    )
    limits = LatencyLimits(request.first_token_s, 0.0, request.per_token_s, request.attainment)
    split = best_split(
        SplitRequest(
            cells,
            request.prompt_tokens / prompts,
            request.output_tokens / outputs,
            _variants(request, cells),
            limits,
            tuple(request.expected),
            tuple(request.upper),
        )
    )
    if not split.one_pool_joules:
        raise SolverError("no requests are forecast")
    pools = []
    for one in split.pools:
        (choices,) = one.plan.choices.values()
        heaviest = max(choices, key=lambda choice: choice.gpus * choice.replicas)
        pools.append(
            PoolRow(
                one.name or ONE_POOL,
                one.share,
                heaviest.gpus,
                heaviest.replicas,
                min(choice.replicas for choice in choices),
                heaviest.clock_mhz,
                math.fsum(choice.joules for choice in choices),
            )
        )
    other_j = split.best_other_joules if math.isfinite(split.best_other_joules) else 0.0
    plan = ServingPlan(
        tuple(pools), split.joules, split.one_pool_joules, other_j, split.best_other_pools, split.gap, together
    )
    return plan.to_bytes()


def _variants(request: ServingPlanRequest, cells: Sequence[Cell]) -> tuple[EngineVariant, ...]:
    """The engines that may serve; of those that are not the pool's own, the ones that are explained.

    Raises:
        SolverError: the pool's own engine is not explained, or its energy was not measured.
    """
    from perseus_solver.errors import SolverError

    variants: dict[int, EngineVariant] = {}
    for number, one in enumerate(request.variants):
        try:
            variant = _variant(request, one, cells)
        except SolverError:
            if number == 0:
                raise
            continue
        variants.setdefault(variant.replica.gpus, variant)
    return tuple(variants.values())


def _variant(request: ServingPlanRequest, one: MeasuredVariant, cells: Sequence[Cell]) -> EngineVariant:
    from perseus_solver.errors import SolverError
    from perseus_solver.serving import Verdict, fit, windows_from_csv
    from perseus_solver.serving.planner import FittedSteps, ReplicaModel
    from perseus_solver.serving.planner.split import EngineVariant, decoding_tokens

    windows = windows_from_csv(one.windows)
    seen_mhz = sorted({window.clock_mhz for window in windows} | {request.highest_mhz})
    result = fit(windows, request.highest_mhz, least_clocks=min(3, len(seen_mhz)))
    if result.verdict is not Verdict.EXPLAINED or result.models is None:
        raise SolverError("no model explains the engine yet")
    if result.watts is None:
        raise SolverError("the energy of the engine was not measured")
    floors = seen_mhz[:-1] if len(seen_mhz) >= 3 else []
    clocks_mhz = sorted({*floors[:: max(1, len(floors) // _FLOORS)], request.highest_mhz})
    running = math.fsum(window.running * window.seconds for window in windows)
    kv_tokens = math.fsum(window.kv_tokens * window.seconds for window in windows)
    replica = ReplicaModel(
        one.gpus,
        FittedSteps(result.models.best, result.watts),
        request.highest_mhz,
        request.kv_capacity,
        request.most_running,
        request.step_tokens,
    )
    kv_per_token = kv_tokens / running / decoding_tokens(cells) if running else 0.0
    return EngineVariant(replica, tuple(clocks_mhz), kv_per_token, request.start_s)
