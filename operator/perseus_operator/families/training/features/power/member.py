"""What a watt is worth to a training job: its frontier is its claim on a PowerBudget."""

from __future__ import annotations

import math

from perseus_core.units import mean_power_w
from perseus_operator.budgets.member import Member, held_limits_w
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.frontier.objective import Infeasible, Target
from perseus_operator.families.training.features.power.plans import claim, power_w, replicas_of, spent_by


def training_member(job: str, facts: Facts, target: Target | Infeasible | None, *, settled: bool) -> Member:
    """The job as a member of a budget.

    Args:
        job: namespace/name.
        facts: of the job.
        target: the iteration time that the objective asks for now; None: there is no frontier yet.
        settled: whether every rank that runs must have been seen; before, GPUs that are not known bound nothing.
    """
    spec, frontier, ranks = facts.spec, facts.frontier, len(facts.nodes.ranks)
    limits_w = held_limits_w(facts.nodes)
    gpus = replicas_of(spec) * spec.pipeline.stages
    complete = settled or (spec.shape_known and len(limits_w) >= gpus)
    held_w = math.fsum(limits_w.values()) if complete else math.inf
    steered = spec.mode.sets_clocks and not spec.suspend
    if steered and (frontier is None or target is None or (not settled and ranks < gpus)):
        return Member(job, spec.priority, held_w=held_w)
    # Without a target the plan in force stays, and it may be none. No plan runs before all ranks are there.
    if not steered or not isinstance(target, Target) or frontier is None or ranks < gpus:
        return Member(job, spec.priority, drawn_w=_default_w(facts, held_w), held_w=held_w)
    curve = claim(
        job,
        frontier,
        replicas=spent_by(facts),
        gpus=min(gpus, len(limits_w)),
        priority=spec.priority,
        wanted=frontier.lookup(target.time_us),
        held_w=held_w,
    )
    return Member(job, spec.priority, curve, held_w=held_w)


def _default_w(facts: Facts, held_w: float) -> float | None:
    """Mean power at default clocks: as measured; else that of the fastest plan, which is lower; else None."""
    measured = facts.baseline
    if measured is not None and measured.energy_mj is not None and measured.time_us > 0:
        return min(mean_power_w(measured.energy_mj, measured.time_us), held_w)
    if facts.frontier is None:
        return None
    return min(power_w(facts.frontier, 0, replicas_of(facts.spec)), held_w)
