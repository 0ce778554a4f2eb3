"""The plan that the objective asks for, as figures and as a sentence, whether or not clocks may be set.

These are predictions. Measured savings are in ``status``.
"""

from __future__ import annotations

from perseus_core.gpus import TRUE_SHARES
from perseus_operator.api.advice import AdviceStatus, SweepStatus
from perseus_operator.families.training.decide import TrainingDecision, common_point
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.power.plans import power_w, replicas_of, spent_by
from perseus_operator.families.training.features.profile.cost import SweepCost
from perseus_operator.families.training.training import Training
from perseus_operator.objects.formatting import joules, percent, seconds, slowed_by
from perseus_operator.solving.view import FrontierView


def advised(training: Training, decision: TrainingDecision) -> AdviceStatus | None:
    """Return the point that the objective asks for; None: there is no frontier, or no point of it fits."""
    view, spec, point = training.frontier, training.spec, decision.advised_point
    if view is None or spec is None or point is None:
        return None
    energy_mj = replicas_of(spec) * view.energies_mj[point]
    before = training.baseline.energy_mj if training.baseline is not None else None
    saved = 1 - energy_mj / before if before else None
    low, high = _interval(training, view, point, saved)
    return AdviceStatus(
        point=point,
        iteration_time_microseconds=view.expected_us[point],
        energy_millijoules=energy_mj,
        energy_saved=percent(saved) if saved is not None else None,
        energy_saved_low=percent(low) if low is not None else None,
        energy_saved_high=percent(high) if high is not None else None,
        rests_on=training.observation.basis.value,
        source=training.observation.basis_source or None,
    )


def _interval(
    training: Training, view: FrontierView, point: int, saved: float | None
) -> tuple[float, float] | tuple[None, None]:
    """Between which shares the prediction lies.

    A profile predicts the plan against the measured baseline and against its own highest clock. Where it is of this
    job, both agree. A model was made to meet the baseline; how far its plans can be off is known from published
    profiles.
    """
    if saved is None:
        return None, None
    if training.observation.basis is PlanBasis.MODEL:
        low, high = (share * saved for share in TRUE_SHARES)
        return min(low, high), max(low, high)
    if not view.highest_mj:
        return None, None
    within = 1 - view.energies_mj[point] / view.highest_mj
    return min(saved, within), max(saved, within)


def recommendation(training: Training, decision: TrainingDecision) -> str:
    """Describe the plan that mode Enforce would run, and what it should save; empty: there is none."""
    advice = advised(training, decision)
    if advice is None or training.frontier is None:
        return ""
    figures = f"{seconds(advice.iteration_time_microseconds)} and {joules(advice.energy_millijoules)} an iteration"
    plan = f"Mode Enforce would run point {advice.point} of {len(training.frontier.times_us)}: {figures}"
    rests = f" The prediction rests on {advice.source}." if advice.source else ""
    if advice.energy_saved is None or training.baseline is None:
        return f"{plan}. What it would save is not known before a baseline is measured.{rests}"
    low, high = advice.energy_saved_low, advice.energy_saved_high
    between = f" ({low} to {high})" if low != high else ""
    slower = percent(advice.iteration_time_microseconds / training.baseline.time_us - 1)
    saves = f"saves {advice.energy_saved}{between} of the energy measured at default clocks, {slower} slower"
    return f"{plan}; {saves}.{rests}"


def sweep_status(cost: SweepCost | None) -> SweepStatus | None:
    """Return what measuring the profile costs; None: nothing, or it is not known."""
    if cost is None:
        return None
    return SweepStatus(
        clocks=cost.clocks,
        iterations=cost.iterations,
        duration_seconds=None if cost.duration_s is None else max(1, round(cost.duration_s)),
        mean_slowdown=percent(cost.mean_slowdown),
        most_slowdown=percent(cost.most_slowdown),
    )


def budget_slowdown(training: Training, decision: TrainingDecision) -> float | None:
    """Return by what share the plan in force is slower than the objective asks for; None: no PowerBudget slows it."""
    view, unlimited = training.frontier, decision.unlimited_point
    if view is None or unlimited is None or not (decision.applied and decision.wanted):
        return None
    point = common_point(decision.wanted, decision.slowdowns)
    return max(0.0, view.expected_us[point] / view.expected_us[unlimited] - 1)


def slowed(training: Training, decision: TrainingDecision) -> str:
    """Say which PowerBudget slows the job, and by how much; empty: none does."""
    share, slowdown = decision.limiting_share, budget_slowdown(training, decision)
    return slowed_by(share.budget, percent(slowdown)) if share is not None and slowdown is not None else ""


def limited(training: Training, decision: TrainingDecision, point: int) -> str:
    """Describe the share that limits the job and the predicted power of the point it runs."""
    share = decision.limiting_share
    assert share is not None
    assert share.watts is not None
    assert training.frontier is not None
    assert training.spec is not None
    drawn_w = power_w(training.frontier, point, spent_by(training.facts(training.spec)))
    message = f"The job is {slowed(training, decision)}: {share.said}; this plan draws {drawn_w:,.0f} W."
    if training.excess.ratio > 1.0:
        more = percent(training.excess.ratio - 1.0)
        message += f" That is {more} more than predicted, as its GPUs have shown."
    if share.feasible:
        return message
    return f"{message} The budget is less than its jobs draw at their most frugal plans."
