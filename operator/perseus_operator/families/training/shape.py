"""The shape of a job whose spec leaves it out, from its training processes.

A process says its own place and what it executes, but not how many others there are. Those that are connected are all
of them once their places leave no gap and each has finished an iteration: no process of a synchronous training finishes
one without all the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.pipeline import Pipeline, ScheduleName
from perseus_operator.api.schema import dump, parse
from perseus_operator.api.status import ShapeStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.errors import InvalidSpec
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.waiting import absence, silent_pods
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import DeclaredSchedule, is_whole_step


def shape_of_ranks(job: Job) -> Pipeline | Explanation:
    """The shape that all training processes together report, or why it is not known yet."""
    nodes = job.nodes
    if not nodes.occupied:
        return absence(job)
    ranks = nodes.ranks
    ids = {rank.id for rank in ranks}
    if len(ids) < len(ranks):
        return Explanation(Reason.RANKS_MISMATCH, f"Two of {len(ranks)} training processes have the same rank.")
    shape = [1 + max(places) for places in zip(*ids, strict=True)]
    declared = [
        schedule for node in nodes.values() for rank, schedule in node.declared_schedules.items() if rank in ids
    ]
    if (lacking := _lacking(nodes, shape, declared)) is not None:
        message = f"{len(ranks)} training processes have connected{lacking}. The shape of the job is taken from them."
        return Explanation(Reason.WAITING_FOR_RANKS, message)
    return _pipeline(shape, declared)


def _lacking(nodes: JobNodes, shape: Sequence[int], declared: Sequence[DeclaredSchedule]) -> str | None:
    """What is to come before the training processes are known to be all, as the end of a sentence; None: nothing."""
    ranks, occupied = nodes.ranks, nodes.occupied
    have_rank = {rank.pod_uid for rank in ranks}
    silent = any(pod.asks_for_gpu and pod.uid not in have_rank for node in occupied for pod in node.pods)
    if not ranks or silent or any(node.leased_pods != node.pods for node in occupied):
        return silent_pods(nodes)
    if len(ranks) < math.prod(shape):
        return ", of {} (dp) × {} (stages) × {} (tp)".format(*shape)
    if any(rank.iteration < 1 for rank in ranks):
        return ", and not each has finished an iteration"
    if len(declared) < len(ranks) or not all(declared):
        return ", and have not all said what they execute"
    return None


def _pipeline(shape: Sequence[int], declared: Iterable[DeclaredSchedule]) -> Pipeline | Explanation:
    pipelines, stages, split = shape
    steps = all(map(is_whole_step, declared))
    raw = {
        "schedule": (ScheduleName.STEPS if steps else ScheduleName.FROM_RANKS).value,
        "stages": stages,
        "dataParallel": pipelines,
        "tensorParallel": split,
    }
    try:
        return parse(Pipeline, raw, "The training processes")
    except InvalidSpec as error:
        return Explanation(Reason.RANKS_MISMATCH, f"{error}.")


def shape_to_status(shape: Pipeline | None) -> ShapeStatus | None:
    """The shape as the status stores it; None: it is not known, or the spec has it."""
    if shape is None or shape.schedule is None:
        return None
    return ShapeStatus(
        schedule=shape.schedule.value,
        stages=shape.stages,
        data_parallel=shape.data_parallel,
        tensor_parallel=shape.tensor_parallel,
    )


def shape_from_status(stored: object) -> Pipeline | None:
    """The shape that an earlier operator stored; None: it stored none that can be true."""
    shape = parse_stored(ShapeStatus, stored)
    return None if shape is None else parse_stored(Pipeline, dump(shape))
