"""The conditions of a ServingPool, in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from perseus_core.serving import ServingLimits
from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.api.job import Mode
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.families.serving.decide import ServingDecision, no_limits
from perseus_operator.families.serving.features.exploration.trials import Trials
from perseus_operator.families.serving.features.inheritance.inheritance import Stage
from perseus_operator.families.serving.features.objective.requests import LEAST_REQUESTS, Block
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.jobs.conditions import accepted, agents_ready, foreign_control, ready
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.waiting import no_clocks
from perseus_operator.objects.formatting import counted, megahertz, percent, slowed_by, stamp
from perseus_solver.serving import FitResult, Verdict, Why, windows_needed

_NAMED = 3
_NO_LOWER: Final[Mapping[Why, str]] = {
    Why.LOWEST: "There is no lower clock that may be set than {here}.",
    Why.WAITS: "A limit was missed at {lower}, which is {again}.",
    Why.NEAR_LIMIT: "At {here} the limit is too near for {lower}, which is {again}.",
}
"""Why a canary goes no lower."""


def conditions_of(pool: ServingPool, decision: ServingDecision, lately: Block) -> list[Condition]:
    """Return every condition of a pool, ``Ready`` last.

    Args:
        pool: whose they are.
        decision: the latest.
        lately: what its replicas did.
    """
    spec, conditions = pool.spec, [accepted(pool.job, _name_fault(pool.job))]
    if spec is not None:
        conditions += [
            _signals_ready(pool),
            _profile_ready(pool, spec, decision),
            _clocks_applied(pool, spec, decision),
            _objective_kept(pool, lately),
            foreign_control(pool.job),
        ]
    needed = {ConditionType.ACCEPTED, ConditionType.SIGNALS_READY}
    if spec is not None and spec.sets_clocks:
        needed |= {ConditionType.PROFILE_READY, ConditionType.CLOCKS_APPLIED}
    if any(each.type is ConditionType.OBJECTIVE_KEPT and each.status is False for each in conditions):
        needed |= {ConditionType.OBJECTIVE_KEPT}
    summary = "Clocks follow the load." if spec is not None and spec.sets_clocks else "The pool is observed."
    return [*conditions, ready(conditions, needed, summary)]


def _name_fault(job: Job) -> Explanation | None:
    if not job.name_taken:
        return None
    message = f"The PerseusJob {job.ref.name} has this name, and the pods that opted in with it: rename either."
    return Explanation(Reason.NAME_TAKEN, message)


def _signals_ready(pool: ServingPool) -> Condition:
    kind, agents, signals = ConditionType.SIGNALS_READY, agents_ready(pool.job), pool.signals
    if agents.status is not True:
        return Condition(kind, agents.status, agents.reason, agents.message)
    if signals.unknown:
        pod, why = next(iter(signals.unknown.items()))
        message = f"The engines of {counted(len(signals.unknown), 'pod')} are not known; the first is {pod}: {why}."
        return Condition(kind, False, Reason.ENGINE_UNKNOWN, message)
    if signals.silent:
        message = f"No engine of {_named([*signals.silent])} says what it does: default clocks."
        if said := next(((pod, why) for pod, why in signals.silent.items() if why), None):
            message += f" {said[0]}: {said[1]}"
        return Condition(kind, False, Reason.NO_SIGNAL, message)
    if signals.different:
        message = f"{_named(signals.different)} run another engine, model, flags or GPU: default clocks."
        return Condition(kind, False, Reason.ENGINES_DIFFER, message)
    return Condition(kind, True, Reason.SIGNALS_SEEN, f"{counted(len(signals.replicas), 'replica')} report.")


def _profile_ready(pool: ServingPool, spec: PoolSpec, decision: ServingDecision) -> Condition:
    kind, model, result = ConditionType.PROFILE_READY, pool.model, pool.model.result
    if spec.mode is Mode.RECOMMEND and model.table is None:
        message = "A profile needs several clocks, and spec.mode is Recommend: no clocks are set."
        return Condition(kind, False, Reason.PROFILING_NEEDS_ENFORCE, message)
    if not spec.sets_clocks or pool.limits is None:
        waiting = no_limits(pool) if spec.mode.sets_clocks else no_clocks(spec.mode)
        return Condition(kind, None, waiting.reason, waiting.message)
    if not pool.signals.replicas:
        return Condition(kind, False, Reason.WAITING_FOR_SIGNALS, "No engine of the pool says what it does.")
    if result is None or pool.inheritance.confirming or (decision.trying and result.verdict is Verdict.TOO_FEW):
        progress = _progress(pool)
        return Condition(kind, False, progress.reason, progress.message)
    if model.table is not None:
        message = f"{result.windows:,} windows, which the model explains within {percent(result.residual)}."
        return Condition(kind, True, Reason.PROFILE_FITTED, message)
    fault = _no_table(pool, result)
    return Condition(kind, False, fault.reason, fault.message)


def _no_table(pool: ServingPool, result: FitResult) -> Explanation:
    """Why a fit makes no table."""
    if result.verdict is Verdict.NOT_EXPLAINED:
        message = f"No model explains what {result.windows:,} windows show: default clocks."
        if (worst := result.worst) is not None:
            load = "prompts" if result.prompts else f"{worst.running:.0f} requests"
            at = f"{megahertz(worst.clock_mhz)} with {load}"
            message += f" At {at} steps are off by {percent(worst.off)}."
        return Explanation(Reason.MODEL_DOES_NOT_EXPLAIN, message)
    if result.verdict is Verdict.TOO_FEW:
        message = f"Too little was seen: {', '.join(result.missing)}. {_no_lower(pool.trials)}"
        return Explanation(Reason.PROFILING_FAILED, message.rstrip())
    lacking = "no energy of the GPUs was measured" if result.watts is None else "no lower clock was measured"
    return Explanation(Reason.PROFILING_FAILED, f"There is no table of clocks: {lacking}. Default clocks.")


def _no_lower(trials: Trials) -> str:
    """Why the canary goes no lower, and until when; empty: it does, or there is nothing to try."""
    one = trials.exploration
    if one is None or one.why not in _NO_LOWER or (one.why is not Why.LOWEST and not trials.paused_until_s > 0.0):
        return ""
    again = f"not tried again before {stamp(trials.paused_until_s)}" if one.why is not Why.LOWEST else ""
    here, lower = (megahertz(one.ladder_mhz[max(0, place)]) for place in (one.place, one.place - 1))
    return _NO_LOWER[one.why].format(here=here, lower=lower, again=again)


def _progress(pool: ServingPool) -> Explanation:
    """How far it is while there is no profile yet."""
    if pool.inheritance.confirming:
        return Explanation(Reason.CONFIRMING_PROFILE, _confirmation(pool))
    return Explanation(Reason.PROFILING, f"{_trial(pool)} {pool.inheritance.refusal}".rstrip())


def _trial(pool: ServingPool) -> str:
    """Where the canary is."""
    replica = pool.signals.of_pod(pool.trials.canary)
    if replica is None or pool.trials.exploration is None:
        return "The clocks of the GPUs are not known yet."
    clock = pool.trials.clock_mhz or replica.highest_mhz
    needed = windows_needed(pool.model.scatter)
    return f"{replica.pod} is measured at {megahertz(clock)}: {pool.trials.seen} of {needed} windows."


def _confirmation(pool: ServingPool) -> str:
    """How far the engine is compared with a profile."""
    inheritance, result = pool.inheritance, pool.model.result
    profile = f"PerseusProfile {inheritance.source} is of the same engine"
    if result is None:
        return f"{profile}; a model is fitted to it."
    replica = pool.signals.of_pod(pool.trials.canary)
    where = "at default clocks" if inheritance.stage is Stage.DEFAULT or replica is None else f"of {replica.pod}, by it"
    count = f"{len(inheritance.windows)} of {inheritance.needed(result)} windows"
    return f"{profile}; {count} {where}, are compared with it before all replicas follow it."


def _clocks_applied(pool: ServingPool, spec: PoolSpec, decision: ServingDecision) -> Condition:
    kind, intent = ConditionType.CLOCKS_APPLIED, decision.intent
    if intent is not None and intent.waiting is not None:
        return Condition(kind, False, intent.waiting.reason, intent.waiting.message)
    profiled = pool.model.table is not None and not pool.inheritance.confirming
    if profiled and not decision.applied:
        return Condition(kind, False, Reason.APPLYING, "Not all agents hold the latest orders yet.")
    if pool.restraint.near or not profiled:
        return _at_default(pool, profiled=profiled)
    if spec.mode is Mode.CANARY:
        message = "The clock of one replica follows its load; the others run at default clocks."
        return Condition(kind, True, Reason.CANARY, message)
    replicas = pool.signals.replicas
    message = f"The clocks of {counted(len(replicas), 'replica')} follow their load"
    if pool.model.lowest_mhz is None:
        message += ": no lower clock keeps the limits at any load that was seen, so all are the default ones"
    if replicas and replicas[0].workers:
        message = f"{counted(len(replicas), 'replica')} over nodes hold the clock that their greatest load lately needs"
    share, granted, slowdown = pool.job.share, decision.granted, decision.slowdown
    if share is None or granted is None or slowdown is None:
        return Condition(kind, True, Reason.TABLE_IN_FORCE, f"{message}.")
    message += f" up to {megahertz(granted.ceiling_mhz)}, {slowed_by(share.budget, percent(slowdown))}:"
    message += f" {share.said}; they draw at most {granted.watts:,.0f} W."
    if not share.feasible:
        message += " The budget is less than its jobs draw at their most frugal plans."
    return Condition(kind, True, Reason.LIMITED_BY_BUDGET, message)


def _at_default(pool: ServingPool, *, profiled: bool) -> Condition:
    """Why replicas are at default clocks as intended."""
    kind, why = ConditionType.CLOCKS_APPLIED, pool.restraint.why
    if not why:
        return Condition(kind, False, Reason.WAITING_FOR_PROFILE, "Replicas run at default clocks but for the canary.")
    message = f"{why}. All replicas run at default clocks until that has not been so for a while."
    return Condition(kind, profiled, Reason.AUTOSCALER_NEAR, message)


def _objective_kept(pool: ServingPool, lately: Block) -> Condition:
    kind, limits = ConditionType.OBJECTIVE_KEPT, pool.limits
    if limits is None:
        waiting = no_limits(pool)
        return Condition(kind, None, waiting.reason, waiting.message)
    if pool.overload.replicas:
        return Condition(kind, False, Reason.OVERLOADED, _overloaded(pool, limits))
    if lately.requests < LEAST_REQUESTS:
        message = f"{lately.requests} of {LEAST_REQUESTS} requests were seen."
        return Condition(kind, None, Reason.NOT_MEASURED, message)
    shares = zip(("first token", "time per token"), lately.attainment(limits), strict=True)
    missed = [f"{percent(share)} kept the limit of the {name}" for name, share in shares
              if share is not None and share < limits.attainment]  # fmt: skip
    asked = percent(limits.attainment)
    if not missed:
        message = f"At least {asked} of {lately.requests:,} requests kept each limit."
        return Condition(kind, True, Reason.OBJECTIVE_KEPT, message)
    default = lately.default_us / max(1, lately.time_us)
    message = (
        f"Of {lately.requests:,} requests {' and '.join(missed)}; {asked} shall. {percent(default)} of the time was at"
        " default clocks."
    )
    return Condition(kind, False, Reason.OBJECTIVE_MISSED, message)


def _overloaded(pool: ServingPool, limits: ServingLimits) -> str:
    """What cannot be kept at which replicas, what shows it, and what would help."""
    overloaded, replicas = pool.overload.replicas, pool.signals.replicas
    names = {replica.pod_uid: replica.pod for replica in replicas}
    uid = min(overloaded, key=lambda each: (-overloaded[each].wait_s, names.get(each, each)))
    worst = overloaded[uid]
    share = f"{len(overloaded)} of {counted(len(replicas), 'replica')} cannot keep a limit at the highest clock"
    if worst.first_token:
        cause = f"{worst.waiting} requests wait, the last for {worst.wait_s:.3g} s of {limits.first_token_s:.3g} s"
    else:
        step_ms, limit_ms = 1e3 * worst.step_s, 1e3 * (limits.per_token_s or 0.0)
        cause = f"a step takes {step_ms:.3g} ms, of {limit_ms:.3g} ms for a token"
    return f"{share}: at {names.get(uid, uid)} {cause}. {_help(pool, len(overloaded))} Nothing is dropped for it."


def _help(pool: ServingPool, overloaded: int) -> str:
    there, advised = len(pool.signals.replicas), pool.adviser.advice.replicas
    if pool.ceiling_mhz:
        return "A PowerBudget holds clocks down: give it more watts, or the pool more priority."
    if advised is not None and advised > there:
        return f"The load needs {advised} replicas."
    if overloaded < there:
        return "The others have room: it is the router that sends requests there."
    return "Add replicas: what the load needs is known a minute after it has risen."


def _named(pods: Sequence[str]) -> str:
    return f"pod {', '.join(_first(pods))}" + (f" and {len(pods) - _NAMED} more" if len(pods) > _NAMED else "")


def _first(pods: Iterable[str]) -> list[str]:
    return list(pods)[:_NAMED]
