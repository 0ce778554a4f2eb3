"""The status of a PerseusJob: its figures, and the whole document with conditions as it is stored.

Everything here is computed from a job's state and decision, without side effects. The conditions themselves are in
``conditions``, the events in ``events``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from perseus_operator.api.conditions import Condition, ConditionType, merge_conditions
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import dump
from perseus_operator.api.status import (
    CalibrationStatus,
    ClockStatus,
    Figures,
    FrontierStatus,
    HardwareStatus,
    PlanStatus,
    Savings,
    StatusFigures,
    StragglerStatus,
)
from perseus_operator.formatting import fine_percent, percent, stamp
from perseus_operator.objects import Json
from perseus_operator.planning.bound_guard import guard_to_status
from perseus_operator.planning.calibration_progress import CalibrationQuality
from perseus_operator.planning.canary import canary_to_status
from perseus_operator.planning.comparisons import comparisons_to_status, interval
from perseus_operator.planning.fixed_clock import gpus_at_clock
from perseus_operator.planning.hardware import hardware_to_status
from perseus_operator.planning.iterations import Measured
from perseus_operator.planning.objective import predict
from perseus_operator.planning.planner import Decision, common_point
from perseus_operator.planning.power_allocation import replicas_of
from perseus_operator.planning.shape import shape_to_status
from perseus_operator.planning.state import JobState
from perseus_operator.reporting import recommendation
from perseus_operator.reporting.hardware import expected_savings, grain_name, grain_reason
from perseus_operator.reporting.straggler_cause import cause_of, slowest_stage

_SHOWN_STRAGGLERS: Final = 32
"""As many as the CRD's schema allows in ``status.stragglers``."""


def figures(state: JobState, decision: Decision) -> StatusFigures:
    """Build the typed part of the status: everything but conditions and ``observedGeneration``.

    Args:
        state: what is known about the job.
        decision: what the planner returned for this state.

    Returns:
        Figures in microseconds and millijoules of one iteration of the whole job; what is not known is None.
    """
    view, spec = state.frontier, state.spec
    measured = current_measurement(state, decision)
    if state.end.finished_at_s is not None:
        measured = state.end.result
    if spec is not None and not spec.is_planned:
        return StatusFigures(clock=_clock(state, spec), power_budget=recommendation.share_status(state, decision))
    shape = shape_to_status(state.shape)
    if view is None or spec is None:
        return StatusFigures(
            shape=shape,
            measured=_figures(measured),
            savings=savings(state, measured),
            comparison=comparisons_to_status(state.comparisons),
            baseline=_figures(state.baseline),
            calibration=_calibration(state.calibration.quality),
            hardware=_hardware(state, decision),
            sweep=recommendation.sweep_status(decision.sweep_cost),
            power_budget=recommendation.share_status(state, decision),
        )
    predicted, plan = None, None
    if decision.applied:
        time_us, energy_mj = predict(
            view, decision.wanted, {**decision.factors, **decision.slowdowns}, spec.pipeline.tensor_parallel
        )
        predicted = Figures(iteration_time_microseconds=time_us, energy_millijoules=energy_mj)
        point = common_point(decision.wanted, decision.slowdowns)
        rehearsed = bool(view.grains)
        plan = PlanStatus(
            point=point,
            from_iteration=state.plan_since,
            planned_slowdown=percent(planned_slowdown(state, decision) - 1),
            clock_changes=view.clock_changes[point] if view.clock_changes else None,
            grain=grain_name(view.grain(point)) if rehearsed else None,
            reason=grain_reason(view, point, decision.hardware, decision.guard.hold) or None,
            expected_savings=expected_savings(view, point),
            expected_iteration_time_microseconds=view.expected_us[point] if rehearsed else None,
            kept_iteration_time_microseconds=view.times_us[point] if rehearsed else None,
        )
    slowest = sorted(decision.slowdowns.items(), key=lambda item: -item[1])[:_SHOWN_STRAGGLERS]
    return StatusFigures(
        shape=shape,
        frontier=FrontierStatus(
            digest=view.digest,
            points=len(view.times_us),
            minimum_time_microseconds=view.t_min_us,
            minimum_energy_time_microseconds=view.least_energy_us,
            slowest_time_microseconds=view.t_star_us,
            mean_gap_parts_per_million=view.mean_gap_ppm,
            maximum_gap_parts_per_million=view.maximum_gap_ppm,
            solve_milliseconds=view.solve_ms,
        ),
        plan=plan,
        predicted=predicted,
        measured=_figures(measured),
        calibration=_calibration(state.calibration.quality),
        baseline=_figures(state.baseline),
        hardware=_hardware(state, decision),
        advised=recommendation.advised(state, decision),
        sweep=recommendation.sweep_status(decision.sweep_cost),
        power_budget=recommendation.share_status(state, decision),
        guard=guard_to_status(decision.guard),
        canary=canary_to_status(state.canary, spec),
        savings=savings(state, measured),
        comparison=comparisons_to_status(state.comparisons),
        stragglers=tuple(
            StragglerStatus(
                data_parallel_rank=dp,
                slowdown=percent(slowdown - 1),
                stage=slowest_stage(state, dp),
                source="Declared" if dp in decision.declared else "Detected",
                cause=cause_of(state, dp).value,
                point=decision.wanted.get(dp, 0),
            )
            for dp, slowdown in sorted(slowest)
        ),
    )


def current_measurement(state: JobState, decision: Decision) -> Measured | None:
    """Return the median time and energy of iterations under the plan in force; None: not measured yet. While it is
    interrupted to compare, of those before.
    """
    if not decision.applied or state.history is None:
        return None
    return state.history.measured(decision.wanted, since=state.plan_since) or state.comparisons.before


def curve(state: JobState) -> list[tuple[int, int]]:
    """Return the job's frontier: time (µs) and energy (mJ) of one iteration of the whole job at each point."""
    if state.frontier is None or state.spec is None:
        return []
    view, replicas = state.frontier, replicas_of(state.spec)
    return [(time_us, replicas * energy_mj) for time_us, energy_mj in zip(view.times_us, view.energies_mj, strict=True)]


def in_force(state: JobState) -> bool:
    """Return whether some agent follows a plan of this operator, wanted now or earlier."""
    return any(node.plans.driven for node in state.nodes.values())


def planned_slowdown(state: JobState, decision: Decision) -> float:
    """Return by how much pipelines are slowed on purpose.

    Returns:
        The largest ratio of a plan's time to T_min; 1.0 without a plan. While a profile is being measured, the ratio of
        the highest clock to the present one, which the slowdown cannot exceed.
    """
    sweep = state.profiling.sweep
    if decision.profiling is not None and decision.wanted and sweep is not None:
        return max(sweep.clocks_mhz) / sweep.clocks_mhz[sweep.point]
    if not decision.applied or state.frontier is None:
        return 1.0
    return max(state.frontier.times_us[point] for point in decision.wanted.values()) / state.frontier.t_min_us


def savings(state: JobState, measured: Measured | None) -> Savings | None:
    """Return what the plan saves, as measured; None: time or energy is not measured.

    Args:
        state: of the job.
        measured: the latest iterations under the plan, for as long as nothing was compared since the baseline.
    """
    pairs, baseline = state.comparisons.pairs, state.baseline
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


def _clock(state: JobState, spec: JobSpec) -> ClockStatus:
    mhz = spec.objective.clock_megahertz or 0
    locked, gpus = gpus_at_clock(state, mhz)
    return ClockStatus(megahertz=mhz, gpus=gpus, locked=locked)


def _hardware(state: JobState, decision: Decision) -> HardwareStatus | None:
    if decision.hardware is None:
        return None
    return hardware_to_status(decision.hardware, state.evidence.lead_us)


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


def document(
    conditions: Iterable[Condition],
    figures: StatusFigures,
    stored: Mapping[str, Any],
    *,
    generation: int,
    wall_s: float,
) -> Json:
    """Build the whole status as it should be stored.

    Args:
        conditions: that hold now.
        figures: the typed part of the status.
        stored: the status as it is stored now; conditions of types that are not known here are kept.
        generation: of the spec that the status describes.
        wall_s: the time now, seconds since 1970; the transition time of conditions whose status changes.
    """
    old = stored.get("conditions", ())
    return {
        "observedGeneration": generation,
        "conditions": merge_conditions(old, conditions, generation=generation, now_rfc3339=stamp(wall_s)),
        **dump(figures),
    }


def essence(status: Mapping[str, Any]) -> Json:
    """Return the part of a status whose changes are written at once: neither what is counted or measured nor wordings.

    Returns:
        The status without what is measured, predicted and counted; ``conditions`` maps each type to its status and
        reason.
    """
    at_leisure = {"measured", "savings", "comparison", "predicted", "clock", "conditions", "powerBudget"}
    figures = {key: value for key, value in status.items() if key not in at_leisure}
    hardware = {key: value for key, value in status.get("hardware", {}).items() if key != "medianLeadMicroseconds"}
    share = {key: value for key, value in status.get("powerBudget", {}).items() if key != "slowdown"}
    share["draw"] = sorted(share.get("draw", {}))  # a draw that is known at last, not one that is a little different
    return {
        **figures,
        "hardware": hardware,
        "powerBudget": share,
        "conditions": {c["type"]: (c["status"], c["reason"]) for c in status.get("conditions", ())},
    }


def was_ready(stored: Mapping[str, Any]) -> bool:
    """Return whether the condition Ready of a stored status is True."""
    return bool(essence(stored)["conditions"].get(ConditionType.READY.value, ("", ""))[0] == "True")
