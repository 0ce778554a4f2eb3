"""What a job still lacks before plans can be enforced, each as an explanation that becomes a condition: schedule,
frontier, ranks, baseline, agents.
"""

from __future__ import annotations

import math
import operator

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.planning.state import JobState
from perseus_operator.planning.workloads import absence, silent_pods


def schedule_pending(state: JobState) -> Explanation | None:
    """Why it is not known what the pipelines run; None: it is known."""
    if state.schedule_known:
        return None
    waiting = Explanation(
        Reason.WAITING_FOR_RANKS, "Not all training processes have reported the schedule that they run."
    )
    return state.inputs.schedule_fault or waiting


def frontier_pending(state: JobState) -> Explanation:
    """Why there is no frontier yet."""
    schedule = schedule_pending(state)
    if schedule is not None:
        return Explanation(Reason.WAITING_FOR_FRONTIER, schedule.message)
    if state.inputs.profile_fault is not None:
        return Explanation(Reason.WAITING_FOR_FRONTIER, state.inputs.profile_fault.message)
    if state.solve_fault is not None and state.solving is None:
        return Explanation(Reason.WAITING_FOR_FRONTIER, state.solve_fault[1].message)
    return Explanation(Reason.WAITING_FOR_FRONTIER, "The frontier is being solved.")


def rehearsal_pending(state: JobState) -> Explanation | None:
    """Why the frontier may not be deployed yet: its plans are of clocks that change at once, but the GPUs are known by
    now; None: it may.
    """
    hardware = state.hardware.in_use
    if state.frontier is None or state.frontier.hardware or hardware is None or state.solve_fault is not None:
        return None
    return Explanation(Reason.WAITING_FOR_FRONTIER, f"The plans are being rehearsed for {hardware.model}.")


def no_clocks(mode: Mode) -> Explanation:
    """Why a job in a mode that sets no clocks runs no plan."""
    if mode is Mode.OBSERVE:
        return Explanation(Reason.OBSERVE_ONLY, "spec.mode is Observe: no clock is written.")
    return Explanation(Reason.RECOMMEND_ONLY, "spec.mode is Recommend: no clocks are set.")


def ranks_pending(state: JobState, spec: JobSpec) -> Explanation | None:
    """Why not every rank of the job's shape is taken by exactly one process; None: each is."""
    shape = spec.pipeline
    if not any(node.pods for node in state.nodes.values()):
        absent = absence(state)
        to_come = absent.reason is Reason.NO_PODS
        return Explanation(Reason.WAITING_FOR_AGENTS, absent.message) if to_come else absent
    connected = sum(len(node.ranks) for node in state.nodes.values())
    taken = set().union(*(node.ranks for node in state.nodes.values()))
    limits = shape.data_parallel, shape.stages, shape.tensor_parallel
    # Looked for only where it is: there may be tens of thousands of ranks.
    if taken and any(map(operator.ge, map(max, zip(*taken, strict=True)), limits)):
        outside = next(rank.id for rank in state.ranks if any(map(operator.ge, rank.id, limits)))
        return Explanation(
            Reason.RANKS_MISMATCH,
            f"A training process is {outside}; spec.pipeline has {shape.data_parallel} (dp) × {shape.stages}"
            f" (stages) × {shape.tensor_parallel} (tp).",
        )
    expected = math.prod(limits)
    if connected > expected or len(taken) < connected:
        return Explanation(
            Reason.RANKS_MISMATCH,
            f"{connected} training processes are connected for {expected} ranks: two processes have the same rank.",
        )
    if connected < expected:
        fault = first_node_fault(state)
        if fault is not None:
            return Explanation(Reason.WAITING_FOR_AGENTS, fault.message)
        message = f"{connected} of {expected} training processes have connected{silent_pods(state)}."
        return Explanation(Reason.WAITING_FOR_RANKS, message)
    return None


def profile_mismatch(state: JobState) -> Explanation | None:
    """Why the profile is not of this job's GPUs; None: it is, or that is not known."""
    if not state.inputs.profile_gpu or state.spec is None:
        return None
    others = sorted({gpu.model for gpu in state.gpus} - {state.inputs.profile_gpu})
    if not others:
        return None
    message = f"{state.spec.profile.where} was measured on {state.inputs.profile_gpu}, the job runs on {others[0]}"
    return Explanation(Reason.PROFILE_MISMATCH, f"{message}: name another one, or none to measure one.")


def baseline_pending(state: JobState, spec: JobSpec) -> Explanation | None:
    """Why the baseline is not complete; None: it is, or none is wanted, or a plan is in force already because this
    operator has restarted.
    """
    if spec.baseline_iterations == 0 or state.baseline is not None or state.history is None:
        return None
    points = [point for iteration in state.history.recent for point in iteration.points.values()]
    if any(node.plans.driven for node in state.nodes.values()) or any(point is not None for point in points):
        return None
    wanted = state.baseline_wanted
    more = f" More than {spec.baseline_iterations}, because they vary." if wanted > spec.baseline_iterations else ""
    message = f"{len(state.history.unplanned)} of {wanted} iterations are measured at default clocks.{more}"
    return Explanation(Reason.MEASURING_BASELINE, message)


def first_node_fault(state: JobState) -> Explanation | None:
    """Why some node that runs pods of the job cannot be commanded; None: all can."""
    for node in state.nodes.values():
        if node.pods and node.address is None:
            return Explanation(Reason.NO_AGENT, f"Node {node.name} runs pods of the job but no Perseus agent.")
        if node.pods and node.fault is not None:
            return node.fault
    return None
