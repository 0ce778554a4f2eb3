"""A job without a plan: one clock for all its GPUs, held by the leases on its nodes.

Training processes need not be connected, so nothing is known of iterations: no slowdown is promised, and no savings are
measured.
"""

from __future__ import annotations

from perseus_core.leases import RestingClock
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.waiting import absence, first_node_fault, no_clocks
from perseus_operator.nodes.actions import Intent


def clock_intent(job: Job, spec: JobSpec) -> Intent:
    """What the agents of a job with a fixed clock shall hold."""
    if not spec.mode.sets_clocks:
        return Intent(None, {}, drive=False, waiting=no_clocks(spec.mode))
    mhz = spec.objective.clock_megahertz or 0
    return Intent(None, {}, drive=True, waiting=_pending(job, mhz), resting=RestingClock(mhz))


def _pending(job: Job, mhz: int) -> Explanation | None:
    """Why not all GPUs run at the clock; None: they do."""
    nodes = sorted(job.nodes.occupied, key=lambda node: node.name)
    if not nodes:
        return absence(job)
    if fault := first_node_fault(job.nodes):
        return Explanation(Reason.WAITING_FOR_AGENTS, fault.message)
    for node in nodes:
        if node.leased_pods is not None and node.resting.mhz and node.clock is None:
            message = f"The agent of node {node.name} is too old to hold a clock without a plan: upgrade it."
            return Explanation(Reason.AGENT_REFUSED, message)
        for gpu in node.clock.gpus if node.clock else ():
            if gpu.fault:
                pod_name = next((pod.name for pod in node.pods if pod.uid == gpu.pod_uid), gpu.pod_uid)
                which = f"{gpu.uuid} of pod {pod_name}" if gpu.uuid else f"The GPUs of pod {pod_name}"
                return Explanation(Reason.GPU_NOT_CONTROLLABLE, f"{which} on node {node.name}: {gpu.fault}")
    locked, count = job.nodes.locked_at(mhz)
    if all(node.at_clock(mhz) for node in nodes):
        return None if count else Explanation(Reason.WAITING_FOR_AGENTS, "The pods of the job have no GPU.")
    return Explanation(Reason.APPLYING, f"{locked} of {count} known GPUs are locked at {mhz} MHz.")
