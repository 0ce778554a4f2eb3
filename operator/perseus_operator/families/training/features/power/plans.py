"""What plans of a frontier draw: a training job's claim on a PowerBudget, and the plan that its share allows."""

from __future__ import annotations

import math

from perseus_core.grain import Grain
from perseus_core.units import mean_power_w
from perseus_operator.api.job import JobSpec
from perseus_operator.budgets.allocation import ROUNDING_W, Claim, Share
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.frontier.objective import Infeasible, Target
from perseus_operator.solving.view import FrontierView


def replicas_of(spec: JobSpec) -> int:
    """How often a job spends the energy of a frontier, which is that of one pipeline with one GPU for each stage."""
    return spec.pipeline.data_parallel * spec.pipeline.tensor_parallel


def spent_by(facts: Facts) -> float:
    """The same, as the GPUs' counters show it."""
    return replicas_of(facts.spec) * facts.excess


def power_w(frontier: FrontierView, point: int, replicas: float) -> float:
    """Mean power of the whole job over an iteration at a point, in watts."""
    return mean_power_w(replicas * spent_mj(frontier, point), frontier.expected_us[point])


def spent_mj(frontier: FrontierView, point: int) -> int:
    """Energy of one pipeline, in millijoules: at least one, since no measured power is a multiple of nothing."""
    return max(1, frontier.energies_mj[point])


def claim(
    job: str,
    frontier: FrontierView,
    *,
    replicas: float,
    gpus: int,
    priority: int,
    wanted: int,
    held_w: float = math.inf,
) -> Claim:
    """The claim of a job. Its profile is its user's: it claims no more than its GPUs can draw.

    Args:
        job: namespace/name.
        frontier: of one pipeline.
        replicas: how often the frontier's energy is spent, as `spent_by` says.
        gpus: of the job.
        priority: of the job.
        wanted: the point that its own objective asks for; it never runs a faster one.
        held_w: what the GPUs that it really holds can draw by their power limits.
    """
    curve: list[tuple[float, float]] = []
    for point in range(len(frontier.times_us) - 1, wanted - 1, -1):
        # In whole watts, as shares are written: a job that is granted what a plan draws can run that plan.
        watts = float(math.ceil(min(power_w(frontier, point, replicas), held_w) - ROUNDING_W))
        speed = frontier.t_min_us / frontier.times_us[point]
        # Slower for more power is never chosen.
        while curve and watts <= curve[-1][0]:
            curve.pop()
        curve.append((watts, speed))
    return Claim(job, priority, gpus, tuple(curve), frontier.digest)


def within_share(
    target: Target | Infeasible | None,
    share: Share | None,
    frontier: FrontierView | None,
    replicas: float,
    finest: Grain = Grain.INSTRUCTION,
) -> tuple[Target | Infeasible | None, bool]:
    """The target that a job may have within its share, and whether the share limits it.

    Args:
        target: what the job's own objective asks for.
        share: of a PowerBudget; None: no budget selects the job.
        frontier: of one pipeline; None: not known yet.
        replicas: how often the frontier's energy is spent.
        finest: of a job that the share limits: points that set clocks more finely are left out, if another one fits.
    """
    if share is None or share.watts is None or frontier is None or not isinstance(target, Target):
        return target, False
    last = len(frontier.times_us) - 1
    point = fastest_within(share, frontier, replicas)
    point = last if point is None else point
    if point <= frontier.lookup(target.time_us):
        return target, False
    coarser = fastest_within(share, frontier, replicas, finest)
    return Target(frontier.times_us[point if coarser is None else coarser], target.note), True


def fastest_within(
    share: Share, frontier: FrontierView, replicas: float, finest: Grain = Grain.INSTRUCTION
) -> int | None:
    """The fastest point that fits a share whose watts are known and is not finer than ``finest``; None: none fits."""
    assert share.watts is not None
    bound_w = share.watts + ROUNDING_W
    points = (point for point in range(len(frontier.times_us)) if frontier.grain(point) >= finest)
    return next((p for p in points if min(power_w(frontier, p, replicas), share.held_w) <= bound_w), None)
