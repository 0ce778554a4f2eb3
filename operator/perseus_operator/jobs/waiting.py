"""Why a job of any family waits: no pod of it runs, an agent is missing or refuses, processes are still to connect."""

from __future__ import annotations

from perseus_core import keys
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import Mode
from perseus_operator.jobs.job import Job
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.workloads import preset_of
from perseus_operator.objects.formatting import counted

ABSENT = frozenset({Reason.NO_PODS, Reason.PODS_TAKEN})
"""Reasons of a job without pods."""
_SHOWN = 3


def absence(job: Job) -> Explanation:
    """Why no pod of the job runs."""
    spec = job.spec
    if spec is not None and spec.suspend:
        return Explanation(Reason.SUSPENDED, "spec.suspend is true: the GPUs of the job are at their default clocks.")
    if job.end.finished_at_s is not None:
        return Explanation(Reason.FINISHED, "All pods of the job have succeeded.")
    if job.taken_pods is not None:
        owner, number = job.taken_pods
        several = number > 1
        message = (
            f"{counted(number, 'pod')} of its workload {'carry' if several else 'carries'} the label"
            f" {keys.LABEL_JOB}: {owner}, and so {'belong' if several else 'belongs'} to {owner}."
        )
        return Explanation(Reason.PODS_TAKEN, message)
    reference = spec.pods.reference if spec and spec.pods else None
    if reference is None:
        message = "No pod of the job is running"
    else:
        message = f"No worker of {reference.kind} {reference.name} with the label of the job is running"
    if excluded := "; ".join(f"{number} {why}" for why, number in job.excluded_pods.items()):
        message += f": of the pods that opted in, {excluded}"
    if (pod := job.failed_pod) is not None:
        message += f", and kubectl logs -n {pod.namespace} {pod.name} may say why ({pod.failure})"
    elif reference is not None and (suspended_by := preset_of(reference.kind).suspended_by):
        message += f"; {reference.kind} {reference.name} may be suspended ({suspended_by})"
    message += "."
    return Explanation(Reason.NO_PODS, message)


def silent_pods(nodes: JobNodes) -> str:
    """The pods from which no process has connected, as the end of a sentence; empty: each has one."""
    connected = {rank.pod_uid for rank in nodes.ranks}
    names = sorted(pod.name for node in nodes.values() for pod in node.pods if pod.uid not in connected)
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; none from pod {', '.join(names[:_SHOWN])}{more}"


def no_clocks(mode: Mode) -> Explanation:
    """Why a job in a mode that sets no clocks runs no plan."""
    if mode is Mode.OBSERVE:
        return Explanation(Reason.OBSERVE_ONLY, "spec.mode is Observe: no clock is written.")
    return Explanation(Reason.RECOMMEND_ONLY, "spec.mode is Recommend: no clocks are set.")


def first_node_fault(nodes: JobNodes) -> Explanation | None:
    """Why some node that runs pods of the job cannot be commanded; None: all can."""
    for node in nodes.values():
        if node.pods and node.address is None:
            return Explanation(Reason.NO_AGENT, f"Node {node.name} runs pods of the job but no Perseus agent.")
        if node.pods and node.fault is not None:
            return node.fault
    return None
