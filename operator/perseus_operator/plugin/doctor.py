"""Why a job does not save: its conditions in the order in which they depend on each other, and what to do.

It needs no frontier and no operator: whatever the API server has stored is examined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from perseus_core import keys
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.objective import ObjectiveType
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.status.unmeasured import why_unmeasured
from perseus_operator.jobs.waiting import ABSENT
from perseus_operator.objects.formatting import slowed_by
from perseus_operator.objects.values import Json


class Finding(StrEnum):
    """What a step came to."""

    GOOD = "good"
    NOTE = "note"
    """Good, but there is something to know about it."""
    WAITING = "waiting"
    FAULT = "fault"
    UNKNOWN = "unknown"
    """A step before it has not ended."""


@dataclass(frozen=True)
class Step:
    """One condition: the question that it answers, and the status that is as it should be."""

    condition: ConditionType
    question: str
    good: str = "True"


STEPS: Final = (
    Step(ConditionType.ACCEPTED, "Is the manifest valid?"),
    Step(ConditionType.PROFILE_READY, "Is there a profile of its instructions?"),
    Step(ConditionType.FRONTIER_READY, "Are there plans?"),
    Step(ConditionType.AGENTS_READY, "Do agents command its GPUs?"),
    Step(ConditionType.PLAN_APPLIED, "Is a plan in force?"),
    Step(ConditionType.BOUND_KEPT, "Do iterations keep the bound?"),
    Step(ConditionType.MODEL_EXPLAINS, "Do iterations take as long as predicted?"),
    Step(ConditionType.STRAGGLER_DETECTED, "Are its pipelines equally fast?", good="False"),
)

ADVICE: Final[Mapping[Reason, str]] = {
    Reason.SPEC_INVALID: "correct the field that the message names",
    Reason.ANNOTATION_INVALID: "kubectl perseus straggler clear JOB, or correct the annotation",
    Reason.NAME_TAKEN: "rename the ServingPool, or the PerseusJob of its name",
    Reason.NO_SIGNAL: "install the plugin of the engine, and mount the agent's socket",
    Reason.ENGINE_UNKNOWN: "follow the message",
    Reason.ENGINES_DIFFER: "wait for the rollout to end, or make a pool for each engine",
    Reason.WAITING_FOR_SIGNALS: "see the signals' step",
    Reason.NO_LIMITS: "set spec.objective; status.proposedLimits has limits to begin with",
    Reason.AUTOSCALER_NEAR: "let the autoscaler read the pool's advice in place of its metric",
    Reason.OVERLOADED: "follow the message; no clock helps",
    Reason.OBJECTIVE_MISSED: "follow the message; clocks are raised by themselves",
    Reason.FOREIGN_POWER_LIMIT: "remove the annotation from the pod template where clocks alone shall decide",
    Reason.POWER_PROFILE_ENFORCED: "nothing, or ask who sets it (DPS, nvidia-smi power-profiles) to clear it",
    Reason.FOREIGN_CLOCK: "find the program that sets clocks on this node: dcgm, nvidia-smi, another power manager",
    Reason.NOT_MEASURED: "wait for some requests",
    Reason.CONFIG_MAP_NOT_FOUND: "create the object that spec.profile names, in the job's namespace",
    Reason.PROFILE_NOT_FOUND: "create the PerseusProfile that spec.profile names, or let online measure it",
    Reason.KEY_NOT_FOUND: "name a key that the ConfigMap has",
    Reason.PROFILE_INVALID: "correct the line that the message names; perseus frontier --profile reads the same file",
    Reason.PROFILE_UNREADABLE: "wait some seconds; then look at the operator's log",
    Reason.PROFILING: "wait: the profile is being measured while the job trains",
    Reason.CONFIRMING_PROFILE: "wait: a stored profile is compared with what the engines do",
    Reason.PROFILING_FAILED: "follow the message; it is tried again when the spec changes",
    Reason.PROFILING_NEEDS_ENFORCE: "set spec.mode: Enforce, or give a profile",
    Reason.SCHEDULE_INVALID: "correct the schedule that the message names",
    Reason.SCHEDULE_UNREADABLE: "wait for the ranks, or name a schedule in spec.pipeline",
    Reason.WAITING_FOR_PROFILE: "see the profile's step",
    Reason.SOLVING: "wait: seconds, or minutes for a thousand instructions a stage",
    Reason.SOLVE_FAILED: "follow the message",
    Reason.SOLVE_TIMEOUT: "ask for fewer points (spec.points), or give the solver more time",
    Reason.NO_PODS: "label the pod template perseus.energy/job: JOB; if pods failed, read their log",
    Reason.PODS_TAKEN: "edit or delete one of the two PerseusJobs",
    Reason.FINISHED: "nothing: the job has ended",
    Reason.SUSPENDED: "set spec.suspend: false",
    Reason.NO_AGENT: "let the agents' DaemonSet run on that node (affinity, tolerations, GPU label)",
    Reason.AGENT_UNAVAILABLE: "look at the agent's pod and log on that node",
    Reason.AGENT_REFUSED: "follow the message; often another PerseusJob claims the same pod",
    Reason.GPU_NOT_CONTROLLABLE: "free the GPU of MIG, sharing and other programs that set clocks",
    Reason.FENCED: "find the other operator; one of both must go",
    Reason.LIMITED_BY_BUDGET: "nothing, or raise the PowerBudget's spec.watts or spec.energy, or the job's priority",
    Reason.DEADLINE_OUT_OF_REACH: "move the deadline: no plan is faster",
    Reason.APPLYING: "wait: less than an iteration",
    Reason.RECOMMEND_ONLY: "set spec.mode: Enforce",
    Reason.OBSERVE_ONLY: "set spec.mode: Canary, once the prediction is worth it",
    Reason.OBSERVING: "wait for some iterations",
    Reason.ESTIMATED: "set spec.mode: Canary to measure a profile, or name one in spec.profile.profileRef",
    Reason.WAITING_FOR_FRONTIER: "see the plans' step",
    Reason.WAITING_FOR_AGENTS: "see the agents' step",
    Reason.WAITING_FOR_RANKS: "call perseus_client in the training code, and mount the agent's socket",
    Reason.RANKS_MISMATCH: "make spec.pipeline agree with the launch command, or mark instructions; see the message",
    Reason.MEASURING_BASELINE: "wait for some iterations, or set spec.baselineIterations: 0",
    Reason.PROFILE_MISMATCH: "name a profile of these GPUs in spec.profile.profileRef, or leave it out to measure one",
    Reason.CANARY: "wait for some iterations",
    Reason.CANARY_FAILED: "edit the objective to try another plan, or set spec.mode: Enforce",
    Reason.OBJECTIVE_INFEASIBLE: "relax spec.objective; kubectl perseus frontier JOB shows what there is",
    Reason.BOUND_EXCEEDED: "follow the cause in the message; coarser plans are tried by themselves",
    Reason.CALIBRATING: "wait for more iterations",
    Reason.MODEL_DOES_NOT_EXPLAIN: "measure the profile again; something in an iteration is not in it",
    Reason.CALIBRATION_INVALID: "delete the calibration that the message names",
    Reason.CALIBRATION_FAILED: "follow the message",
    Reason.STRAGGLER_DETECTED: "follow the evidence: the other pipelines run slower meanwhile and save more",
    Reason.WAITS_NOT_MARKED: "pass the model to perseus_client.steps; then slow ranks are found, and fast ones save",
    Reason.STRAGGLER_DECLARED: "kubectl perseus straggler clear JOB, when it is over",
}
"""What to do about a reason that keeps a job from saving."""

_WITHOUT_PLAN: Final = frozenset({ConditionType.ACCEPTED, ConditionType.AGENTS_READY, ConditionType.PLAN_APPLIED})
"""What there is to say of a job with a fixed clock."""
_ESSENTIAL: Final = frozenset({
    *(ConditionType.ACCEPTED, ConditionType.PROFILE_READY, ConditionType.FRONTIER_READY),
    *(ConditionType.AGENTS_READY, ConditionType.PLAN_APPLIED),
})  # fmt: skip


def examine(job: Json) -> Json:
    """Examine one PerseusJob as the API server returns it.

    Args:
        job: with metadata, spec and status.

    Returns:
        ``verdict``, one sentence; ``steps`` in order, each with ``question``, ``finding``, ``reason``, ``says`` and,
        unless good, ``do``.
    """
    metadata, status = job["metadata"], job.get("status") or {}
    name = str(metadata["name"])
    planned = (job["spec"].get("objective") or {}).get("type") != ObjectiveType.FIXED_CLOCK
    steps = list(_steps(job, planned=planned))
    return {
        "job": f"{metadata['namespace']}/{name}",
        "verdict": _verdict(job, steps),
        "steps": steps,
        **({"saves": status["savings"]} if "savings" in status else {}),
    }


def _steps(job: Json, *, planned: bool) -> Iterator[Json]:
    status = job.get("status") or {}
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    # A profile is measured on pods, and without a shape all that comes before the agents waits for them: why there are
    # none is said where they belong.
    reasons = {kind: condition["reason"] for kind, condition in conditions.items()}
    absent = reasons.get(ConditionType.AGENTS_READY) in ABSENT and (
        reasons.get(ConditionType.PROFILE_READY) == Reason.PROFILING
        or ("pipeline" not in job["spec"] and "shape" not in status)
    )
    blocked = False
    for step in STEPS:
        if not planned and step.condition not in _WITHOUT_PLAN:
            continue
        condition = conditions.get(step.condition)
        finding = _finding(condition, step, blocked=blocked)
        if absent and finding is Finding.WAITING:
            yield {"condition": step.condition.value, "question": step.question, "finding": Finding.UNKNOWN.value}
            continue
        line: Json = {"condition": step.condition.value, "question": step.question, "finding": finding.value}
        if condition is not None and finding is not Finding.UNKNOWN:
            line |= {"reason": condition["reason"], "says": condition["message"]}
            if finding is not Finding.GOOD and condition["reason"] in ADVICE:
                line["do"] = _advice(Reason(condition["reason"]), job["metadata"])
        yield line
        blocked = blocked or (finding not in _AS_IT_SHOULD_BE and step.condition in _ESSENTIAL)


def _advice(reason: Reason, metadata: Mapping[str, Any]) -> str:
    if reason is Reason.NO_PODS and keys.LABEL_CLASS in (metadata.get("labels") or {}):
        return "if a pod failed, read its log; the PerseusJob of a class follows its workload"
    return ADVICE[reason].replace("JOB", str(metadata["name"]))


_WAITS: Final = frozenset(
    {
        Reason.PROFILING,
        Reason.SOLVING,
        Reason.APPLYING,
        Reason.MEASURING_BASELINE,
        Reason.CANARY,
        Reason.WAITING_FOR_PROFILE,
        Reason.OBSERVING,
    }
)
"""Reasons that time alone ends."""
_NOTED: Final = frozenset({Reason.LIMITED_BY_BUDGET, Reason.DEADLINE_OUT_OF_REACH, Reason.RANKS_MISMATCH})
"""Reasons of a plan in force that is not what the objective asks for."""
_AS_IT_SHOULD_BE: Final = frozenset({Finding.GOOD, Finding.NOTE})


def _finding(condition: Mapping[str, Any] | None, step: Step, *, blocked: bool) -> Finding:
    # What depends on a step that has not ended repeats its reason: the first one is the one to mend. Pods and agents
    # depend on none.
    blocked = blocked and not (
        step.condition is ConditionType.AGENTS_READY and (condition or {}).get("status") == "False"
    )
    if condition is None or (blocked and condition["status"] != step.good):
        return Finding.UNKNOWN
    if condition["status"] == step.good:
        return Finding.NOTE if condition["reason"] in _NOTED else Finding.GOOD
    waits = condition["status"] == "Unknown" or condition["reason"] in _WAITS
    return Finding.WAITING if waits else Finding.FAULT


def _verdict(job: Json, steps: list[Json]) -> str:
    metadata, status = job["metadata"], job.get("status") or {}
    if not status.get("conditions"):
        return "No operator has reported on it yet: check that one runs and serves this namespace."
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        return "The operator has not seen the latest edit yet; what follows is older."
    finished: Mapping[str, Any] = next((c for c in status["conditions"] if c["type"] == ConditionType.FINISHED), {})
    savings = status.get("savings")
    if finished.get("status") == "True":
        saved = f" It saved {savings['energy']} of the energy of an iteration." if savings else ""
        return f"It has finished.{saved}"
    open_steps = [s for s in steps if s["condition"] in _ESSENTIAL and s["finding"] not in _AS_IT_SHOULD_BE]
    refused = ""
    if [step["condition"] for step in open_steps] == [ConditionType.ACCEPTED] and "plan" in status:
        # What is refused does not count; what was accepted before is in force.
        refused = f" An edit is refused: {open_steps.pop()['reason']}."
    ranked = sorted(
        open_steps, key=lambda step: [Finding.FAULT, Finding.WAITING, Finding.UNKNOWN].index(step["finding"])
    )
    first = next(iter(ranked), None)
    if first is not None:
        what = "It waits" if first["finding"] == Finding.WAITING else "It does not save"
        return f"{what}: {first.get('reason', 'not reported yet')}."
    if savings is None and len(steps) < len(STEPS):
        return "All its GPUs run at the clock that was asked for; without a plan savings are not measured."
    return _savings(job) + _slowed(status) + refused


def _savings(job: Json) -> str:
    """What the plan in force saves, or why that is not known."""
    savings = job["status"].get("savings")
    if savings is None:
        return f"A plan is in force; what it saves is not measured yet.{_why_unmeasured(job)}"
    sure = f" ({savings['energyLow']} to {savings['energyHigh']} with 95% confidence)" if "energyLow" in savings else ""
    return f"It saves {savings['energy']} of the energy{sure} and is slower by {savings['slowdown']}, as measured."


def _why_unmeasured(job: Json) -> str:
    """A sentence, or nothing."""
    try:
        return " " + why_unmeasured(parse_spec(JobSpec, job["spec"]), job["status"])
    except InvalidSpec:  # an older CRD let it through
        return ""


def _slowed(status: Mapping[str, Any]) -> str:
    """A sentence about the PowerBudget that slows the job; empty: none does."""
    share = status.get("powerBudget") or {}
    return f" It is {slowed_by(share['name'], share['slowdown'])}." if "slowdown" in share else ""
