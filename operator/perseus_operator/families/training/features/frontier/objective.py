"""Which point of the frontier an objective asks for, and which point each pipeline runs while there are stragglers.

The frontier here is a view of integers: times and energies, without frequencies or arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from perseus_core.grain import Grain
from perseus_core.units import mean_power_w, s_from_us, us_from_s
from perseus_operator.api.objective import Deadline, Objective, ObjectiveType
from perseus_operator.objects.formatting import seconds
from perseus_operator.solving.view import FrontierView

_GRID = 1.01
"""The target of a deadline by date changes with every iteration. Targets are rounded to a geometric grid of 1 %, so
that plans do not change as often."""


@dataclass(frozen=True)
class Target:
    """The iteration time to aim at; ``note`` says which part of the objective cannot be met."""

    time_us: float
    note: str = ""


@dataclass(frozen=True)
class Infeasible:
    """No point of the frontier meets the objective."""

    message: str


def target_of(
    objective: Objective,
    frontier: FrontierView,
    *,
    gpus_per_stage: int,
    iterations_done: int,
    remaining_s: float | None,
) -> Target | Infeasible:
    """The iteration time that the objective asks for.

    Args:
        objective: what the user wants.
        frontier: of one pipeline.
        gpus_per_stage: data-parallel times tensor-parallel size: how often the frontier's energy is spent.
        iterations_done: by the job since its start, for a deadline by date.
        remaining_s: until that date; None if the objective has none.

    Returns:
        The target, or why no point of the frontier meets the objective.
    """
    if objective.type is ObjectiveType.MIN_ENERGY:
        return Target(frontier.least_energy_us)
    if objective.power_cap_watts is not None:
        return _power_cap(objective.power_cap_watts, frontier, gpus_per_stage)
    allowed: Target | Infeasible = Target(frontier.no_slower_us)
    if objective.max_slowdown_ratio is not None:
        # Like with like: rehearsed times are kept in spite of scatter, and the fastest iteration scatters as well.
        allowance = 0.0 if frontier.hardware else frontier.allowance
        bound_us = frontier.t_min_us * (1 + objective.max_slowdown_ratio)
        allowed = Target(max(frontier.no_slower_us, bound_us / (1 + allowance)))
    if objective.deadline is not None:
        allowed = _deadline(objective.deadline, frontier, iterations_done, remaining_s)
    if isinstance(allowed, Target) and allowed.time_us > frontier.least_energy_us:
        return Target(frontier.least_energy_us, allowed.note)
    return allowed


def bound_us(objective: Objective, fastest_us: int | None, scatter: float = 1.0) -> float | None:
    """What a measured iteration may take at most, in microseconds.

    Args:
        objective: what the user wants.
        fastest_us: an iteration without any slowdown, as measured, in the median; None: not known.
        scatter: what such iterations keep over that, a ratio.

    Returns:
        The bound; None: there is none, or it is not known yet. A deadline by date needs none: its target follows what
        is measured.
    """
    if objective.deadline is not None and objective.deadline.iteration_time_microseconds is not None:
        return objective.deadline.iteration_time_microseconds
    if fastest_us is None or objective.type not in {ObjectiveType.MAX_THROUGHPUT, ObjectiveType.MAX_SLOWDOWN}:
        return None
    return fastest_us * scatter * (1 + (objective.max_slowdown_ratio or 0.0))


def _power_cap(cap_w: int, frontier: FrontierView, gpus_per_stage: int) -> Target | Infeasible:
    powers_w = [
        mean_power_w(gpus_per_stage * e, t) for e, t in zip(frontier.energies_mj, frontier.expected_us, strict=True)
    ]
    for time_us, power_w in zip(frontier.times_us, powers_w, strict=True):
        if power_w <= cap_w:
            return Target(time_us)
    return Infeasible(
        f"spec.objective.powerCapWatts: {cap_w} is less than the {math.ceil(min(powers_w))} W that the job draws with"
        " the plan of least power"
    )


def _deadline(
    deadline: Deadline, frontier: FrontierView, iterations_done: int, remaining_s: float | None
) -> Target | Infeasible:
    t_min_us = frontier.t_min_us
    if deadline.iteration_time_microseconds is not None:
        if deadline.iteration_time_microseconds < t_min_us:
            return Infeasible(
                f"spec.objective.deadline.iterationTimeMicroseconds: {deadline.iteration_time_microseconds} is shorter"
                f" than the fastest possible iteration, T_min = {seconds(t_min_us)} ({t_min_us} microseconds)"
            )
        return Target(max(t_min_us, deadline.iteration_time_microseconds / (1 + frontier.allowance)))
    assert deadline.iterations is not None
    assert remaining_s is not None
    left = max(1, deadline.iterations - iterations_done)
    allowed_us = us_from_s(remaining_s) / left / (1 + frontier.allowance)
    if allowed_us < t_min_us:
        # The deadline cannot be met, but the job runs: as fast as possible is the best that is left.
        return Target(
            t_min_us,
            f"spec.objective.deadline.finishBy: {left} iterations take at least {s_from_us(left * t_min_us):.0f} s,"
            f" T_min = {seconds(t_min_us)} each, but {max(0.0, remaining_s):.0f} s are left; running at T_min",
        )
    return Target(t_min_us * _GRID ** math.floor(math.log(allowed_us / t_min_us, _GRID)))


@dataclass(frozen=True)
class PipelineSpread:
    """How pipelines differ that are no stragglers.

    Attributes:
        factors: how many times as long as predicted they take, by data-parallel rank.
        margin: how many times as long as usual one may take in an iteration: what a pipeline leaves of its wait.
        relative: what an objective allows counts from the slowest pipeline; otherwise no pipeline may exceed it.
    """

    factors: Mapping[int, float] = field(default_factory=dict)
    margin: float = 1.0
    relative: bool = True


def select_points(
    frontier: FrontierView,
    target_us: float,
    pipelines: int,
    slowdowns: Mapping[int, float],
    finest: Grain = Grain.INSTRUCTION,
    *,
    spread: PipelineSpread | None = None,
    least_us: float = 0.0,
) -> dict[int, int]:
    """A point for every pipeline.

    The iteration cannot end before the slowest pipeline at its fastest plan: T' = max s·T_min (SOSP'24, section 3.2).
    Every pipeline may take as long as that, or as long as the objective allows; a straggler with slowdown s takes the
    plan that is s times faster. ``lookup`` stops at T*. Hence min(T*, T') for healthy pipelines, and T_min for the
    straggler that sets T'.

    Healthy pipelines differ by factors f. The slowest of them decides what an iteration takes, and what an objective
    allows counts from there: it runs the objective's plan, and each other one that is max f / f times slower, less a
    margin.

    Args:
        frontier: of one pipeline.
        target_us: the iteration time that the objective asks for.
        pipelines: how many the job has.
        slowdowns: of the stragglers, by data-parallel rank.
        finest: points that set clocks more finely are left out.
        spread: of the other pipelines; None: all take as long as predicted.
        least_us: no pipeline takes a faster plan than of this time, a straggler neither: a PowerBudget has no watts for
            one. All are slower then, by the straggler's slowdown.

    Returns:
        The point of each pipeline, by data-parallel rank.
    """
    spread = spread or PipelineSpread()
    factors = {p: spread.factors.get(p, 1.0) for p in range(pipelines) if p not in slowdowns}
    fastest_us = max(frontier.t_min_us, min(target_us, frontier.no_slower_us), least_us)
    slowest = max(factors.values(), default=1.0) if spread.relative else 1.0
    allowed_us = max([target_us * slowest, *(slowdown * fastest_us for slowdown in slowdowns.values())])
    times_us = {p: max(least_us, allowed_us / (slowdown * spread.margin)) for p, slowdown in slowdowns.items()}
    for p, factor in factors.items():
        own_us = target_us if spread.relative else target_us / factor
        times_us[p] = max(own_us, least_us, allowed_us / (factor * spread.margin))
    # A microsecond of tolerance: s·T_min / s must not fall below T_min, nor T'/1 below its own point, by rounding.
    return {p: frontier.lookup(times_us[p] + 0.5, finest) for p in range(pipelines)}


def predict(
    frontier: FrontierView, chosen: Mapping[int, int], slowdowns: Mapping[int, float], tensor_parallel: int
) -> tuple[int, int]:
    """Predict one iteration of the whole job: pipelines that end early wait for the last one at blocking power.

    Args:
        frontier: of one pipeline.
        chosen: the point of each pipeline, by data-parallel rank.
        slowdowns: of stragglers, and factors of other pipelines, by data-parallel rank.
        tensor_parallel: GPUs that share a stage.

    Returns:
        Time in microseconds and energy in millijoules.
    """
    times_us = {p: slowdowns.get(p, 1.0) * frontier.expected_us[point] for p, point in chosen.items()}
    last_us = max(times_us.values())
    energy_mj = sum(
        frontier.energies_mj[point] + frontier.stages * frontier.blocking_power_mw * s_from_us(last_us - times_us[p])
        for p, point in chosen.items()
    )
    return round(last_us), round(tensor_parallel * energy_mj)
