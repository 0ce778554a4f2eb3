"""The figures in the status of a training job: computed from what is known and what was decided, nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from perseus_core.units import ratio_from_ppm
from perseus_operator.api.status import (
    CalibrationStatus,
    Figures,
    FrontierStatus,
    HardwareStatus,
    PlanStatus,
    Savings,
    StatusFigures,
    StragglerStatus,
)
from perseus_operator.budgets.draw import share_to_status
from perseus_operator.families.training.decide import TrainingDecision, common_point
from perseus_operator.families.training.features.bound.guard import guard_to_status
from perseus_operator.families.training.features.canary.state import canary_to_status
from perseus_operator.families.training.features.comparison.state import comparisons_to_status, interval
from perseus_operator.families.training.features.frontier.objective import predict
from perseus_operator.families.training.features.hardware.hardware import hardware_to_status
from perseus_operator.families.training.features.power.plans import replicas_of
from perseus_operator.families.training.features.stragglers.cause import cause_of, slowest_stage
from perseus_operator.families.training.shape import shape_to_status
from perseus_operator.families.training.status import recommendation
from perseus_operator.families.training.status.hardware import expected_savings, grain_reason
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.report import smoothing_to_status
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.formatting import exact_percent, fine_percent, percent
from perseus_operator.solving.view import CalibrationQuality

_SHOWN_STRAGGLERS: Final = 32
"""As many as the CRD's schema allows in ``status.stragglers``."""


def figures(training: Training, decision: TrainingDecision) -> StatusFigures:
    """Build the typed part of the status: everything but conditions and ``observedGeneration``.

    Args:
        training: what is known about the job.
        decision: what the planner returned for this training.

    Returns:
        Figures in microseconds and millijoules of one iteration of the whole job; what is not known is None.
    """
    view, spec = training.frontier, training.spec
    measured = current_measurement(training, decision)
    if training.job.end.finished_at_s is not None:
        measured = training.result
    without_frontier = StatusFigures(
        shape=shape_to_status(training.shape),
        measured=_figures(measured),
        savings=savings(training, measured),
        comparison=comparisons_to_status(training.comparisons),
        baseline=_figures(training.baseline),
        calibration=_calibration(training.calibration.quality),
        hardware=_hardware(training, decision),
        power_profiles=training.power_profiles or None,
        power_smoothing=smoothing_to_status(training.nodes.power_smoothing),
        sweep=recommendation.sweep_status(decision.sweep_cost),
        power_budget=share_to_status(
            training.job.share, training.job.draw, recommendation.budget_slowdown(training, decision)
        ),
    )
    if view is None or spec is None:
        return without_frontier
    predicted, plan = None, None
    if decision.applied:
        time_us, energy_mj = predict(
            view, decision.wanted, {**decision.factors, **decision.slowdowns}, spec.pipeline.tensor_parallel
        )
        predicted = Figures(iteration_time_microseconds=time_us, energy_millijoules=energy_mj)
        point = common_point(decision.wanted, decision.slowdowns)
        if measured is None and training.result_of == (view.digest, point):
            measured = training.result  # the operator has just started; the plan runs on
        rehearsed = bool(view.grains)
        plan = PlanStatus(
            point=point,
            from_iteration=training.nodes.plan_since,
            planned_slowdown=percent(planned_slowdown(training, decision) - 1),
            clock_changes=view.clock_changes[point] if view.clock_changes else None,
            grain=view.grain(point).label if rehearsed else None,
            reason=grain_reason(view, point, decision.hardware, decision.guard.hold) or None,
            expected_savings=expected_savings(view, point),
            expected_iteration_time_microseconds=view.expected_us[point] if rehearsed else None,
            kept_iteration_time_microseconds=view.times_us[point] if rehearsed else None,
        )
    slowest = sorted(decision.slowdowns.items(), key=lambda item: -item[1])[:_SHOWN_STRAGGLERS]
    return replace(
        without_frontier,
        frontier=FrontierStatus(
            digest=view.digest,
            points=len(view.times_us),
            minimum_time_microseconds=view.t_min_us,
            minimum_energy_time_microseconds=view.least_energy_us,
            slowest_time_microseconds=view.t_star_us,
            mean_gap=exact_percent(ratio_from_ppm(view.mean_gap_ppm)),
            maximum_gap=exact_percent(ratio_from_ppm(view.maximum_gap_ppm)),
            solve_milliseconds=view.solve_ms,
        ),
        plan=plan,
        predicted=predicted,
        measured=_figures(measured),
        advised=recommendation.advised(training, decision),
        guard=guard_to_status(decision.guard),
        canary=canary_to_status(training.canary, spec),
        savings=savings(training, measured),
        stragglers=tuple(
            StragglerStatus(
                data_parallel_rank=dp,
                slowdown=percent(slowdown - 1),
                stage=slowest_stage(training.stragglers.detector, dp),
                source="Declared" if dp in decision.declared else "Detected",
                cause=cause_of(training.stragglers.detector, training.nodes, dp).value,
                point=decision.wanted.get(dp, 0),
            )
            for dp, slowdown in sorted(slowest)
        ),
    )


def current_measurement(training: Training, decision: TrainingDecision) -> Measured | None:
    """Return the median time and energy of iterations under the plan in force; None: not measured yet. While it is
    interrupted to compare, of those before.
    """
    if not decision.applied or training.history is None:
        return None
    return training.history.measured(decision.wanted, since=training.nodes.plan_since) or training.comparisons.before


def curve(training: Training) -> list[tuple[int, int]]:
    """Return the job's frontier: time (µs) and energy (mJ) of one iteration of the whole job at each point."""
    if training.frontier is None or training.spec is None:
        return []
    view, replicas = training.frontier, replicas_of(training.spec)
    return [(time_us, replicas * energy_mj) for time_us, energy_mj in zip(view.times_us, view.energies_mj, strict=True)]


def planned_slowdown(training: Training, decision: TrainingDecision) -> float:
    """Return by how much pipelines are slowed on purpose.

    Returns:
        The largest ratio of a plan's time to T_min; 1.0 without a plan. While a profile is being measured, the ratio of
        the highest clock to the present one, which the slowdown cannot exceed.
    """
    sweep = training.profiling.sweep
    if decision.profiling is not None and decision.wanted and sweep is not None:
        return max(sweep.clocks_mhz) / sweep.clocks_mhz[sweep.point]
    if not decision.applied or training.frontier is None:
        return 1.0
    return max(training.frontier.times_us[point] for point in decision.wanted.values()) / training.frontier.t_min_us


def savings(training: Training, measured: Measured | None) -> Savings | None:
    """Return what the plan saves, as measured; None: time or energy is not measured.

    Args:
        training: the job.
        measured: the latest iterations under the plan, for as long as nothing was compared since the baseline.
    """
    pairs, baseline = training.comparisons.pairs, training.baseline
    if pairs:
        saved, slowdown = interval([pair.saved for pair in pairs]), interval([pair.slowdown for pair in pairs])
        return Savings(
            energy=percent(saved.mean),
            slowdown=percent(slowdown.mean),
            against="Comparisons",
            energy_low=percent(saved.low) if saved.low is not None else None,
            energy_high=percent(saved.high) if saved.high is not None else None,
            slowdown_low=percent(slowdown.low) if slowdown.low is not None else None,
            slowdown_high=percent(slowdown.high) if slowdown.high is not None else None,
        )
    if baseline is None or measured is None or not baseline.energy_mj or measured.energy_mj is None:
        return None
    return Savings(
        energy=percent(1 - measured.energy_mj / baseline.energy_mj),
        slowdown=percent(measured.time_us / baseline.time_us - 1),
        against="Baseline",
    )


def _hardware(training: Training, decision: TrainingDecision) -> HardwareStatus | None:
    if decision.hardware is None:
        return None
    return hardware_to_status(decision.hardware, training.evidence.lead_us)


def _calibration(quality: CalibrationQuality | None) -> CalibrationStatus | None:
    if quality is None:
        return None
    return CalibrationStatus(
        quality="Explains" if quality.explains else "DoesNotExplain",
        held_out_error=None if quality.heldout_error is None else fine_percent(quality.heldout_error),
        uncalibrated_error=fine_percent(quality.uncalibrated_error),
        allowance=fine_percent(quality.allowance),
        iterations=quality.iterations,
    )


def _figures(measured: Measured | None) -> Figures | None:
    if measured is None:
        return None
    return Figures(
        iteration_time_microseconds=measured.time_us,
        energy_millijoules=measured.energy_mj,
        iterations=measured.iterations,
    )
