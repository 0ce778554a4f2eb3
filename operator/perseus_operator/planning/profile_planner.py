"""Whether a job's profile is to be measured now, and the next step of it. Pure.

Asked by ``planner`` at every thought. A job is profiled if its spec says ``online``, it may drive clocks, and the
ConfigMap of the profile does not exist, or holds one of ours that no longer fits. Nodes are driven by the planner as
for any plan: the sweep's clocks are the points of a plan set like that of a frontier.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.planning.profiling.sweep import FEWEST, Recipe, Sweep, choose_clocks
from perseus_operator.planning.state import Fault, JobState


@dataclass(frozen=True)
class BeginSweep:
    """Measure this, or go on with it."""

    sweep: Sweep


@dataclass(frozen=True)
class SaveSweep:
    """Keep what has been measured so far."""


@dataclass(frozen=True)
class KeepProfile:
    """The sweep is finished: make a profile of it."""


ProfilingAction = BeginSweep | SaveSweep | KeepProfile


@dataclass(frozen=True)
class Need:
    """A profile is needed.

    Attributes:
        said: what is going on.
        sweep: whose clock to run at; None: no clock is to be set for it now.
        drive: whether clocks may be touched at all.
        actions: to be started now.
        wake_at_s: monotonic.
    """

    said: Fault
    sweep: Sweep | None = None
    drive: bool = False
    actions: tuple[ProfilingAction, ...] = ()
    wake_at_s: float = math.inf


def need(state: JobState, spec: JobSpec, unready: Fault | None, *, now_s: float) -> Need | None:
    """What profiling needs next; None: nothing, there is a profile or nobody wants one to be measured.

    Args:
        state: of the job.
        spec: of the job.
        unready: why the training processes cannot be driven yet.
        now_s: monotonic.
    """
    own, online = state.profiling, spec.profile.online
    missing = state.profile_fault is not None and state.profile_fault.reason is Reason.CONFIG_MAP_NOT_FOUND
    stale = state.profile_digest is not None and own.stale == state.profile_digest
    if online is None or not (missing or stale):
        return None
    where = f"ConfigMap {spec.profile.config_map_ref.name}"
    fault = own.fault
    if spec.mode is Mode.RECOMMEND:
        why = f"{where} does not exist, and measuring a profile sets clocks: it needs spec.mode Enforce"
        fault = Fault(Reason.PROFILING_NEEDS_ENFORCE, f"{why}, or a profile stored there.")
    elif unready is not None and fault is None:
        return Need(Fault(Reason.PROFILING, f"To be measured into {where}. {unready.message}"), drive=True)
    fresh = fault or _fresh(state, spec)
    if isinstance(fresh, Sweep):
        return _step(state, fresh, now_s)
    # A profile that fits badly is better than none.
    return None if stale else Need(fresh, drive=fresh.reason is Reason.PROFILING)


def _step(state: JobState, fresh: Sweep, now_s: float) -> Need:
    own = state.profiling
    sweep = replace(own.sweep, recipe=fresh.recipe) if own.sweep and own.sweep.fits(fresh) else fresh
    if sweep == own.sweep:
        return _go_on(state, sweep, now_s)
    said = Fault(Reason.PROFILING, f"{len(sweep.clocks_mhz)} clocks are to be measured.")
    return Need(said, drive=True, actions=() if own.busy else (BeginSweep(sweep),))


def _fresh(state: JobState, spec: JobSpec) -> Sweep | Fault:
    """A sweep of the job as it is now, nothing measured yet; or why there can be none."""
    online = spec.profile.online
    assert online is not None
    clocks: dict[str, tuple[int, ...]] = {}
    for node in state.nodes.values():
        for gpu, why in sorted(node.uncontrollable.items()):
            return Fault(Reason.PROFILING_FAILED, f"The clocks of {gpu} on {node.name} cannot be set: {why}")
        for rank in node.ranks.values():
            if rank.gpu_uuid not in node.clocks_mhz:
                return Fault(Reason.PROFILING, f"The agent of {node.name} is being asked for the clocks of its GPUs.")
            clocks[rank.gpu_uuid] = node.clocks_mhz[rank.gpu_uuid]
    chosen = choose_clocks(clocks.values(), online.max_clocks)
    if len(chosen) < FEWEST:
        return Fault(Reason.PROFILING_FAILED, f"The GPUs of the job have {len(chosen)} clocks in common.")
    recipe = Recipe(online.iterations_per_clock, online.max_slowdown_ratio, 1_000_000 * online.max_duration_seconds)
    schedule = _schedule_digest(spec, state.order or "")
    return Sweep(chosen, schedule, recipe, replaces=state.profiling.stale)


def _schedule_digest(spec: JobSpec, order: str) -> str:
    """What every stage executes, as far as it matters to what has been measured of it."""
    shape = spec.pipeline
    if order:
        return f"{hashlib.sha256(order.encode()).hexdigest()}/{shape.tensor_parallel}"
    return f"{shape.solver_name}/{shape.stages}/{shape.microbatches}/{shape.chunks}/{shape.tensor_parallel}"


def _go_on(state: JobState, sweep: Sweep, now_s: float) -> Need:
    own = state.profiling
    may_write = not own.busy and own.retry_at_s <= now_s
    wake_at_s = math.inf if own.retry_at_s <= now_s else own.retry_at_s
    done = len(sweep.readings)
    if sweep.failed:
        remedy = "raise spec.profile.online.maxDurationSeconds or maxSlowdown"
        message = f"{done} clocks were measured, which is no choice: {sweep.finished}; {remedy}."
        return Need(Fault(Reason.PROFILING_FAILED, message))
    if sweep.finished:
        said = Fault(Reason.PROFILING, f"{done} clocks are measured: {sweep.finished}. The profile is being kept.")
        keep = (KeepProfile(),) if may_write and not own.kept else ()
        return Need(said, sweep, True, keep, wake_at_s)
    save = (SaveSweep(),) if may_write and done > own.saved else ()
    clock = f"{sweep.clocks_mhz[done]} MHz, clock {done + 1} of at most {len(sweep.clocks_mhz)}"
    counted = f"{own.counted} of {sweep.recipe.iterations} iterations"
    trouble = f" The latest one cannot be used: {own.trouble}." if own.trouble else ""
    said = Fault(Reason.PROFILING, f"{own.why}Measuring {clock}: {counted}.{trouble}")
    return Need(said, sweep, True, save, wake_at_s)
