"""The conditions that every PerseusJob has, whatever its family: is its manifest valid, do agents hold leases for it,
does it run, and is all as it should be.

``Ready`` summarises the others: it repeats the first one that is not as it should be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Final

from perseus_core import keys
from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.api.job import Mode, WorkSpec
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.waiting import ABSENT, absence, first_node_fault
from perseus_operator.objects.formatting import counted

_FOREIGN_WRITE = "FOREIGN_WRITE"
"""As agents call it that a clock that had been reached was changed by another program."""


def all_conditions(
    job: Job, of_family: Sequence[Condition], fault: Explanation | None, summary: str
) -> list[Condition]:
    """Return every condition of a job, ``Ready`` last.

    Args:
        job: whose they are; without a spec that was ever valid it has ``Accepted`` and ``Ready`` alone.
        of_family: those of its family, in the order in which they depend on each other.
        fault: of what users wrote beside the spec; None: there is none.
        summary: what ``Ready`` says if all is as it should be.
    """
    conditions = [accepted(job, fault)]
    if job.spec is not None:
        conditions += [*of_family, foreign_control(job), *_life(job, job.spec)]
    finished = next((each for each in conditions if each.type is ConditionType.FINISHED and each.status), None)
    if finished is not None:  # as tools expect of what has come to its end
        return [*conditions, Condition(ConditionType.READY, True, finished.reason, finished.message)]
    return [*conditions, ready(conditions, _needed(job.spec), summary)]


def accepted(job: Job, fault: Explanation | None) -> Condition:
    """Say whether the manifest is valid; ``fault`` as of ``all_conditions``."""
    if job.spec_fault is not None:
        previous = " The previously accepted spec stays in force." if job.spec is not None else ""
        fault = Explanation(job.spec_fault.reason, job.spec_fault.message + previous)
    if fault is None:
        return Condition(ConditionType.ACCEPTED, True, Reason.ACCEPTED, "The manifest is valid.")
    return Condition(ConditionType.ACCEPTED, False, fault.reason, fault.message)


def agents_ready(job: Job) -> Condition:
    """Say whether the agents of all nodes hold a lease, and can set clocks."""
    kind = ConditionType.AGENTS_READY
    if job.fenced is not None:
        return Condition(kind, False, job.fenced.reason, job.fenced.message)
    nodes = job.nodes.occupied
    if not nodes:
        absent = absence(job)
        return Condition(kind, False, absent.reason, absent.message)
    fault = first_node_fault(job.nodes)
    if fault is not None:
        return Condition(kind, False, fault.reason, fault.message)
    pending = sorted(node.name for node in nodes if node.leased_pods is None)
    if pending:
        message = f"{len(pending)} of {len(nodes)} nodes have not granted a lease yet; the first is {pending[0]}."
        return Condition(kind, None, Reason.AGENT_UNAVAILABLE, message)
    locked = [f"{gpu} on {node.name}: {why}" for node in nodes for gpu, why in sorted(node.uncontrollable.items())]
    if locked:
        message = f"The clocks of {len(locked)} GPUs cannot be set; the first is {locked[0]}"
        return Condition(kind, False, Reason.GPU_NOT_CONTROLLABLE, message)
    return Condition(kind, True, Reason.LEASED, f"Leases are held on {counted(len(nodes), 'node')}.")


def foreign_control(job: Job) -> Condition:
    """Whether another program sets what the GPUs run at. Nothing is done about it: of two that fight nobody knows."""
    kind = ConditionType.FOREIGN_CONTROL
    set_clocks = [f"{gpu} on {node.name}" for node in job.nodes.occupied for gpu, what in sorted(node.gpu_events)
                  if what == _FOREIGN_WRITE]  # fmt: skip
    limited = [pod for node in job.nodes.occupied for pod in node.pods if pod.power_limit]
    if set_clocks:
        message = f"Another program has set the clocks of {counted(len(set_clocks), 'GPU')}; the first is"
        return Condition(kind, True, Reason.FOREIGN_CLOCK, f"{message} {set_clocks[0]}. They are left as they are.")
    if profiles := job.nodes.power_profiles:
        node = min(node.name for node in job.nodes.occupied if node.power_profiles)
        message = (
            f"The driver enforces {counted(len(profiles), 'power profile')} ({', '.join(profiles)}) on GPUs of the"
            f" job; the first node is {node}. The firmware may hold clocks below those of the plan; what was measured"
            " under other profiles is measured again."
        )
        return Condition(kind, True, Reason.POWER_PROFILE_ENFORCED, message)
    if limited:
        first = min(limited, key=lambda pod: pod.name)
        message = (
            f"{counted(len(limited), 'pod')} have the annotation {keys.ANNOTATION_POWER_LIMIT}; the first is"
            f" {first.name}: NVIDIA Dynamo's power agent limits its GPUs to {first.power_limit} W each. That is left"
            " alone; clocks are set below it."
        )
        return Condition(kind, True, Reason.FOREIGN_POWER_LIMIT, message)
    return Condition(kind, False, Reason.NO_FOREIGN_CONTROL, "No other program is known to set clocks or power limits.")


def _life(job: Job, spec: WorkSpec) -> Iterator[Condition]:
    """Whether the job runs, is suspended, or has finished."""
    nodes = job.nodes.occupied
    absent = absence(job)
    if nodes:
        pods = counted(sum(len(node.pods) for node in nodes), "pod")
        yield Condition(ConditionType.ACTIVE, True, Reason.RUNNING, f"{pods} on {counted(len(nodes), 'node')}.")
    else:
        yield Condition(ConditionType.ACTIVE, False, absent.reason, absent.message)
    if spec.suspend:
        yield Condition(ConditionType.SUSPENDED, True, Reason.SUSPENDED, "spec.suspend is true.")
    else:
        yield Condition(ConditionType.SUSPENDED, False, Reason.NOT_SUSPENDED, "spec.suspend is false.")
    if job.end.finished_at_s is not None:
        ttl_s = spec.ttl_seconds_after_finished
        then = f" The PerseusJob will be deleted {ttl_s} s after that." if ttl_s is not None else ""
        message = f"All pods of the job have succeeded.{then}"
        yield Condition(ConditionType.FINISHED, True, Reason.FINISHED, message)
    else:
        message = "Pods of the job run, or are to come."
        yield Condition(ConditionType.FINISHED, False, Reason.NOT_FINISHED, message)


def _needed(spec: WorkSpec | None) -> Set[ConditionType]:
    """Which conditions of a PerseusJob must hold for it to be ready."""
    needed = {
        ConditionType.ACCEPTED,
        ConditionType.PROFILE_READY,
        ConditionType.FRONTIER_READY,
        ConditionType.AGENTS_READY,
        ConditionType.PLAN_APPLIED,
    }
    if spec is not None and not spec.mode.sets_clocks:
        needed -= {ConditionType.AGENTS_READY, ConditionType.PLAN_APPLIED}
    if spec is not None and spec.mode is Mode.OBSERVE:  # a prediction needs no profile
        needed -= {ConditionType.PROFILE_READY}
    return needed


_TRAINING_BRINGS: Final = frozenset({Reason.PROFILING, Reason.WAITING_FOR_PROFILE})
"""Reasons of a profile that is measured while the job trains, and of what is made from it."""


def ready(conditions: Sequence[Condition], needed: Set[ConditionType], summary: str) -> Condition:
    """Return ``Ready``: the first needed condition that does not hold, in the order in which they depend on each other.

    Args:
        conditions: all others.
        needed: the types of those that must hold.
        summary: what it says if they do.
    """
    absent = any(each.type is ConditionType.AGENTS_READY and each.reason in ABSENT for each in conditions)
    for condition in conditions:
        # What is measured while the job trains is not what a job without pods waits for.
        passed = condition.status is True or (absent and condition.reason in _TRAINING_BRINGS)
        if condition.type in needed and not passed:
            return Condition(ConditionType.READY, False, condition.reason, condition.message)
    return Condition(ConditionType.READY, True, Reason.READY, summary)
