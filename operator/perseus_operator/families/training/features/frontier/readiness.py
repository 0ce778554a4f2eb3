"""What a job still lacks before plans can be enforced, each as an explanation that becomes a condition: schedule,
frontier, ranks, baseline, agents.
"""

from __future__ import annotations

import operator
from collections.abc import Set

from perseus_core.rank import RankId
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import Pipeline
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.frontier.input_progress import InputProgress
from perseus_operator.families.training.features.frontier.solve_progress import SolveProgress
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.families.training.shape import Misfit, outside
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.waiting import absence, first_node_fault, silent_pods
from perseus_operator.nodes.job_nodes import JobNodes


def schedule_pending(inputs: InputProgress, spec: JobSpec) -> Explanation | None:
    """Why it is not known what the pipelines run; None: it is known."""
    if inputs.schedule_known(spec):
        return None
    waiting = Explanation(
        Reason.WAITING_FOR_RANKS, "Not all training processes have reported the schedule that they run."
    )
    return inputs.schedule_fault or waiting


def frontier_pending(inputs: InputProgress, solve: SolveProgress, spec: JobSpec) -> Explanation:
    """Why there is no frontier yet."""
    schedule = schedule_pending(inputs, spec)
    if schedule is not None:
        return Explanation(Reason.WAITING_FOR_FRONTIER, schedule.message)
    if inputs.profile_fault is not None:
        return Explanation(Reason.WAITING_FOR_FRONTIER, inputs.profile_fault.message)
    if solve.fault is not None and solve.solving is None:
        return Explanation(Reason.WAITING_FOR_FRONTIER, solve.fault[1].message)
    return Explanation(Reason.WAITING_FOR_FRONTIER, "The frontier is being solved.")


def rehearsal_pending(solve: SolveProgress, hardware: JobHardware | None) -> Explanation | None:
    """Why the frontier may not be deployed yet: its plans are of clocks that change at once, but the GPUs are known by
    now; None: it may.
    """
    if solve.frontier is None or solve.frontier.hardware or hardware is None or solve.fault is not None:
        return None
    return Explanation(Reason.WAITING_FOR_FRONTIER, f"The plans are being rehearsed for {hardware.model}.")


def ranks_pending(job: Job, spec: JobSpec, misfit: Misfit | None = None) -> Explanation | None:
    """Why not every rank of the job's shape is taken by exactly one process; None: each is.

    Args:
        job: with its nodes.
        spec: of the job.
        misfit: of its ranks, which then have the places that they had; None: they fit the shape.
    """
    shape, nodes = spec.pipeline, job.nodes
    if not nodes.occupied:
        absent = absence(job)
        to_come = absent.reason in (Reason.NO_PODS, Reason.PODS_TAKEN)
        return Explanation(Reason.WAITING_FOR_AGENTS, absent.message) if to_come else absent
    connected = sum(len(node.ranks) for node in nodes.values())
    taken = set().union(*(node.ranks for node in nodes.values()))
    if (elsewhere := _elsewhere(taken, nodes, shape, misfit)) is not None:
        return elsewhere
    expected = shape.places
    if connected > expected or len(taken) < connected:
        return Explanation(
            Reason.RANKS_MISMATCH,
            f"{connected} training processes are connected for {expected} ranks: two processes have the same rank.",
        )
    if connected < expected:
        fault = first_node_fault(nodes)
        if fault is not None:
            return Explanation(Reason.WAITING_FOR_AGENTS, fault.message)
        message = f"{connected} of {expected} training processes have connected{silent_pods(nodes)}."
        return Explanation(Reason.WAITING_FOR_RANKS, message)
    return None


def _elsewhere(taken: Set[RankId], nodes: JobNodes, shape: Pipeline, misfit: Misfit | None) -> Explanation | None:
    """Why some rank has no place in what is planned; None: each has."""
    if misfit is not None:
        message = "Training processes have connected that have not been compared with spec.pipeline yet."
        return None if taken <= misfit.places.keys() else Explanation(Reason.WAITING_FOR_RANKS, message)
    # Looked for only where it is: there may be tens of thousands of ranks.
    limits = shape.data_parallel, shape.stages, shape.tensor_parallel
    if not taken or not any(map(operator.ge, map(max, zip(*taken, strict=True)), limits)):
        return None
    return Explanation(Reason.RANKS_MISMATCH, outside((rank.id for rank in nodes.ranks), shape))


def profile_mismatch(inputs: InputProgress, spec: JobSpec | None, nodes: JobNodes) -> Explanation | None:
    """Why the profile is not of this job's GPUs; None: it is, or that is not known."""
    if not inputs.profile_gpu or spec is None:
        return None
    others = sorted({gpu.model for gpu in nodes.gpus} - {inputs.profile_gpu})
    if not others:
        return None
    message = f"{spec.profile.where} was measured on {inputs.profile_gpu}, the job runs on {others[0]}"
    return Explanation(Reason.PROFILE_MISMATCH, f"{message}: name another one, or none to measure one.")


def baseline_pending(facts: Facts, wanted: int) -> Explanation | None:
    """Why the baseline is not complete; None: it is, or none is wanted, or a plan is in force already because this
    operator has restarted.

    Args:
        facts: of the job.
        wanted: iterations that make a baseline, which may be more than the spec asks for.
    """
    spec, history = facts.spec, facts.history
    if spec.baseline_iterations == 0 or facts.baseline is not None or history is None:
        return None
    points = [point for iteration in history.recent for point in iteration.points.values()]
    if facts.nodes.driven or any(point is not None for point in points):
        return None
    more = f" More than {spec.baseline_iterations}, because they vary." if wanted > spec.baseline_iterations else ""
    message = f"{len(history.unplanned)} of {wanted} iterations are measured at default clocks.{more}"
    return Explanation(Reason.MEASURING_BASELINE, message)
