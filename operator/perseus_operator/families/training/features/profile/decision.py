"""Whether a job's profile is to be measured now, and the next step of the measurement.

A profile is measured if the spec says ``online``, the mode allows to set clocks, and the PerseusProfile does not exist
or holds a measured profile that no longer fits. The sweep's clocks are the points of a plan set, so nodes are driven as
for any other plan.

Where an iteration is one instruction, a plan is one clock, and no other instruction makes up for a step between two
measured ones. So the clocks around the one that the objective asks for are measured as well, unless steps vary so much
that these could not be distinguished.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from statistics import median

from perseus_core.units import us_from_s
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode, Online
from perseus_operator.api.pipeline import ScheduleName
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.frontier.input_progress import InputProgress
from perseus_operator.families.training.features.frontier.objective import Target, target_of
from perseus_operator.families.training.features.power.plans import replicas_of
from perseus_operator.families.training.features.profile.cost import SweepCost, sweep_cost
from perseus_operator.families.training.features.profile.progress import ProfilingProgress
from perseus_operator.families.training.features.profile.reading import Reading
from perseus_operator.families.training.features.profile.sweep import (
    FEWEST,
    Recipe,
    Sweep,
    choose_clocks,
    common_clocks,
    finer_clocks,
)
from perseus_operator.nodes.iterations import Measured
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.solving.view import FrontierView


@dataclass(frozen=True)
class BeginSweep:
    """Measure this sweep, or go on with it."""

    sweep: Sweep


@dataclass(frozen=True)
class SaveSweep:
    """Store what has been measured so far."""


@dataclass(frozen=True)
class StoreProfile:
    """The sweep is finished: store the profile that it gives."""


ProfilingAction = BeginSweep | SaveSweep | StoreProfile


@dataclass(frozen=True)
class ProfilingStep:
    """What the measurement of a profile needs now.

    Attributes:
        explanation: what is going on, for the condition.
        sweep: at whose clock the job runs; None: no clock is to be set for it now.
        drive: whether clocks may be set at all.
        actions: to be started now.
        wake_at_s: when to look again at the latest (monotonic).
    """

    explanation: Explanation
    sweep: Sweep | None = None
    drive: bool = False
    actions: tuple[ProfilingAction, ...] = ()
    wake_at_s: float = math.inf


@dataclass(frozen=True)
class ProfileParts:
    """What is known of a job's profile: how far its measurement is, what was read, and what plans rest on.

    Attributes:
        progress: of the measurement.
        inputs: as they were read.
        basis: what plans and predictions rest on.
        without_plan: what an iteration takes at default clocks, as measured last; None: not measured.
    """

    progress: ProfilingProgress
    inputs: InputProgress
    basis: PlanBasis
    without_plan: Measured | None


def next_profiling_step(
    parts: ProfileParts, facts: Facts, not_ready: Explanation | None, *, now_s: float
) -> ProfilingStep | None:
    """The next step of measuring the profile; None: there is a profile, or none is to be measured.

    Args:
        parts: of the job.
        facts: of the job.
        not_ready: why the training processes cannot be driven yet.
        now_s: monotonic.
    """
    progress, spec, inputs = parts.progress, facts.spec, parts.inputs
    online = spec.profile.online
    stale = inputs.profile_digest is not None and progress.stale_profile == inputs.profile_digest
    if online is None or not (_is_missing(inputs) or stale) or spec.mode is Mode.OBSERVE:
        return None
    where, cost = spec.profile.where, next_sweep_cost(parts, facts)
    costs = f" {cost}" if cost else ""
    fault = progress.fault
    if not spec.mode.sets_clocks:
        why = f"{where} does not exist, and measuring a profile sets clocks: it needs spec.mode Enforce"
        fault = Explanation(Reason.PROFILING_NEEDS_ENFORCE, f"{why}, or a profile stored there.{costs}")
    elif not_ready is not None and fault is None:
        return ProfilingStep(
            Explanation(Reason.PROFILING, f"To be measured into {where}.{costs} {not_ready.message}"), drive=True
        )
    fresh = fault or _fresh(parts, facts)
    if isinstance(fresh, Sweep):
        return _step(parts, facts, fresh, now_s)
    # A profile that fits badly is better than none.
    return None if stale else ProfilingStep(fresh, drive=fresh.reason is Reason.PROFILING)


def next_sweep_cost(parts: ProfileParts, facts: Facts) -> SweepCost | None:
    """What measuring the profile will cost at most, or would if the mode set clocks.

    Args:
        parts: of the job.
        facts: of the job.

    Returns:
        None: there is a profile, or none is to be measured, or it is being measured, or the clocks of the GPUs are not
        known yet.
    """
    spec, progress, history = facts.spec, parts.progress, facts.history
    online = spec.profile.online
    estimated = parts.basis is not PlanBasis.PROFILE
    if online is None or progress.sweep is not None or not (_is_missing(parts.inputs) or estimated):
        return None
    common = _common_clocks(facts.nodes)
    if isinstance(common, Explanation) or len(common) < FEWEST:
        return None
    before = parts.without_plan
    times_us = [i.time_us for i in history.unplanned] if history else []
    iteration_us = before.time_us if before else median(times_us) if times_us else None
    finer = spec.pipeline.schedule is ScheduleName.STEPS
    return sweep_cost(choose_clocks(common, online.max_clocks), _recipe(online), finer=finer, iteration_us=iteration_us)


def _is_missing(inputs: InputProgress) -> bool:
    absent = (Reason.PROFILE_NOT_FOUND, Reason.OBSERVING)
    return inputs.profile_fault is not None and inputs.profile_fault.reason in absent


def _recipe(online: Online) -> Recipe:
    return Recipe(online.iterations_per_clock, online.max_slowdown_ratio, us_from_s(online.max_duration_seconds))


def _step(parts: ProfileParts, facts: Facts, fresh: Sweep, now_s: float) -> ProfilingStep:
    progress = parts.progress
    sweep = replace(progress.sweep, recipe=fresh.recipe) if progress.sweep and progress.sweep.fits(fresh) else fresh
    finer_mhz = _finer_clocks(facts, sweep)
    if finer_mhz:
        sweep = sweep.refined(finer_mhz)
    if sweep == progress.sweep:
        return _go_on(progress, sweep, now_s)
    to_come, cost = len(sweep.clocks_mhz) - len(sweep.readings), next_sweep_cost(parts, facts)
    where = " around the best one" if finer_mhz else ""
    costs = f" {cost}" if cost else ""
    explanation = Explanation(Reason.PROFILING, f"{to_come} clocks{where} will be measured.{costs}")
    return ProfilingStep(explanation, drive=True, actions=() if progress.writing else (BeginSweep(sweep),))


def _fresh(parts: ProfileParts, facts: Facts) -> Sweep | Explanation:
    """A sweep of the job as it is now, with no readings yet; or why there can be none."""
    spec = facts.spec
    online = spec.profile.online
    assert online is not None
    common = _common_clocks(facts.nodes)
    if isinstance(common, Explanation):
        return common
    chosen = choose_clocks(common, online.max_clocks)
    if len(chosen) < FEWEST:
        return Explanation(Reason.PROFILING_FAILED, f"The GPUs of the job have {len(chosen)} clocks in common.")
    schedule = _schedule_digest(spec, parts.inputs.schedule_csv or "")
    return Sweep(chosen, schedule, _recipe(online), replaces=parts.progress.stale_profile)


def _common_clocks(nodes: JobNodes) -> tuple[int, ...] | Explanation:
    """The clocks that all GPUs of the job support, or why they are not known."""
    clocks: dict[str, tuple[int, ...]] = {}
    for node in nodes.values():
        for gpu, why in sorted(node.uncontrollable.items()):
            return Explanation(Reason.PROFILING_FAILED, f"The clocks of {gpu} on {node.name} cannot be set: {why}")
        for rank in node.ranks.values():
            if rank.gpu_uuid not in node.clocks_mhz:
                return Explanation(
                    Reason.PROFILING, f"The agent of {node.name} has not reported the clocks of its GPUs yet."
                )
            clocks[rank.gpu_uuid] = node.clocks_mhz[rank.gpu_uuid]
    return common_clocks(clocks.values())


def _finer_clocks(facts: Facts, sweep: Sweep) -> tuple[int, ...]:
    """Clocks to be measured around the best one; empty: the sweep goes on, has had them, or needs none."""
    if facts.spec.pipeline.schedule is not ScheduleName.STEPS or sweep.chosen_mhz or sweep.failed or not sweep.finished:
        return ()
    if sweep.certainty.varies:
        return ()
    common, best = _common_clocks(facts.nodes), _best_reading(facts, sweep)
    if best is None or isinstance(common, Explanation):
        return ()
    return finer_clocks(common, [reading.clock_mhz for reading in sweep.readings], best.clock_mhz)


def _best_reading(facts: Facts, sweep: Sweep) -> Reading | None:
    """The reading at whose clock a job of one instruction would run; None: it changes with the date."""
    spec = facts.spec
    if spec.objective.deadline is not None and spec.objective.deadline.finish_by is not None:
        return None
    plans: list[Reading] = []
    for reading in sorted(sweep.readings, key=lambda reading: reading.iteration_time_us):
        if not plans or reading.energy_mj < plans[-1].energy_mj:
            plans.append(reading)
    view = FrontierView(
        digest=sweep.digest,
        times_us=tuple(round(plan.iteration_time_us) for plan in plans),
        energies_mj=tuple(round(plan.energy_mj) for plan in plans),
        stages=1,
        blocking_power_mw=0,
        mean_gap_ppm=0,
        maximum_gap_ppm=0,
        solve_ms=0,
        restored=False,
    )
    target = target_of(
        spec.objective,
        view,
        gpus_per_stage=replicas_of(spec),
        iterations_done=facts.nodes.furthest_iteration,
        remaining_s=None,
    )
    return plans[view.lookup(target.time_us + 0.5) if isinstance(target, Target) else -1]


def _schedule_digest(spec: JobSpec, schedule_csv: str) -> str:
    """Identifies what every stage executes: readings are comparable only under the same schedule."""
    shape = spec.pipeline
    if schedule_csv:
        return f"{hashlib.sha256(schedule_csv.encode()).hexdigest()}/{shape.tensor_parallel}"
    return f"{shape.solver_name}/{shape.stages}/{shape.microbatches}/{shape.chunks}/{shape.tensor_parallel}"


def _go_on(progress: ProfilingProgress, sweep: Sweep, now_s: float) -> ProfilingStep:
    may_write = not progress.writing and progress.retry_at_s <= now_s
    wake_at_s = math.inf if progress.retry_at_s <= now_s else progress.retry_at_s
    done = len(sweep.readings)
    if sweep.failed:
        remedy = "raise spec.profile.online.maxDurationSeconds or maxSlowdown"
        message = f"{done} clocks were measured, too few to choose from: {sweep.finished}; {remedy}."
        return ProfilingStep(Explanation(Reason.PROFILING_FAILED, message))
    if sweep.finished:
        explanation = Explanation(
            Reason.PROFILING, f"{done} clocks are measured: {sweep.finished}. The profile is being stored."
        )
        store = (StoreProfile(),) if may_write and not progress.profile_stored else ()
        return ProfilingStep(explanation, sweep, True, store, wake_at_s)
    save = (SaveSweep(),) if may_write and sweep.measured > progress.readings_stored else ()
    clock = f"{sweep.clocks_mhz[sweep.point]} MHz, clock {sweep.point + 1} of "
    if sweep.round == 1:
        clock += f"at most {len(sweep.clocks_mhz)}"
    else:
        varies = f"because steps vary by {sweep.certainty.scatter:.0%} with their data"
        clock += f"{done}, in round {sweep.round} {varies}"
    counted = f"{progress.iterations_counted} of {sweep.recipe.iterations} iterations"
    rejection = f" The latest iteration was rejected: {progress.rejection}." if progress.rejection else ""
    explanation = Explanation(Reason.PROFILING, f"{progress.stale_reason}Measuring {clock}: {counted}.{rejection}")
    return ProfilingStep(explanation, sweep, True, save, wake_at_s)
