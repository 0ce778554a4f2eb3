"""Schedules that have no name: the order of instructions, out of a ConfigMap or as the training processes tell it.

Called by ``inputs``. What comes out is the CSV of ``torch.distributed.pipelining``, whoever wrote it, checked by the
solver's reader; a schedule by name has none. Which stage a process is, and how many instructions it runs, is its own
word: the agents hold every process to what it has said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

from perseus_operator.api.conditions import Reason
from perseus_operator.api.pipeline import Pipeline, ScheduleName
from perseus_operator.clients.kube import Kube
from perseus_operator.controller.config_map_ref import resolve
from perseus_operator.errors import InvalidOrder
from perseus_operator.planning.state import JobState
from perseus_proto.v1alpha1 import agent_pb2
from perseus_solver.errors import InvalidSchedule
from perseus_solver.schedules import read_order

Told = tuple[tuple[int, int, int], ...]
"""What one process says that it executes: (kind, microbatch, chunk) in order."""

_LETTERS: dict[int, str] = {
    agent_pb2.INSTRUCTION_KIND_FORWARD: "F",
    agent_pb2.INSTRUCTION_KIND_BACKWARD: "B",
    agent_pb2.INSTRUCTION_KIND_INPUT_GRADIENT: "I",
    agent_pb2.INSTRUCTION_KIND_WEIGHT_GRADIENT: "W",
}


async def find(kube: Kube, namespace: str, pipeline: Pipeline) -> str:
    """The order that ``spec.pipeline.scheduleRef`` names; whether it is one is not looked at.

    Raises:
        InvalidOrder: it is not there.
        KubeError: it is not known whether it is there.
    """
    reference = pipeline.schedule_ref
    assert reference is not None
    field = "spec.pipeline.scheduleRef"
    _, order = await resolve(kube, namespace, reference, field=field, refusal=InvalidOrder)
    return order.decode(errors="replace")


def check(order: str, pipeline: Pipeline) -> None:
    """Whether the solver can read an order, and it is one of this pipeline.

    Raises:
        InvalidOrder: one line with the rule, and the row and cell where there is one.
    """
    try:
        schedule = read_order(order)
    except InvalidSchedule as error:
        raise InvalidOrder(Reason.SCHEDULE_INVALID, f"spec.pipeline: {error}.") from error
    for name, own, wanted in (
        ("stages", schedule.stages, pipeline.stages),
        ("microbatches", schedule.microbatches, pipeline.microbatches),
    ):
        if wanted is not None and own != wanted:
            message = f"spec.pipeline.{name}: is {wanted}, but the order has {own} {name}."
            raise InvalidOrder(Reason.SCHEDULE_INVALID, message)


def wanted_from_ranks(state: JobState) -> bool:
    """Whether the training processes must still be asked what they execute."""
    return state.spec is not None and state.spec.pipeline.schedule is ScheduleName.FROM_RANKS and state.order is None


def collect(state: JobState, told: Mapping[tuple[int, int, int], Told]) -> str | None:
    """The order that all processes tell together; None: some have not told yet.

    Args:
        state: of the job; says which processes there must be.
        told: by pipeline, stage and tensor rank.

    Raises:
        InvalidOrder: processes of one stage do not agree, or the stages do not fit together.
    """
    assert state.spec is not None
    shape = state.spec.pipeline
    places = [
        (p, s, t) for s in range(shape.stages) for p in range(shape.data_parallel) for t in range(shape.tensor_parallel)
    ]
    if any(not told.get(place) for place in places):
        return None
    stages: list[Told] = []
    for stage, same in groupby(places, key=lambda place: place[1]):
        first, *others = same
        for other in others:
            if told[other] != told[first]:
                message = f"Stage {stage}: {_name(other)} runs another order than {_name(first)}."
                raise InvalidOrder(Reason.SCHEDULE_INVALID, message)
        stages.append(told[first])
    return assembled(stages)


def assembled(stages: Sequence[Told]) -> str:
    """The CSV of what each stage runs.

    A process knows its chunks by number, not by their place in the model. Chunks go round the stages, or down and back
    up in a V: whichever does not deadlock. If neither does, round: of torch's schedules that is so for LoopedBFS alone.

    Raises:
        InvalidOrder: no placement makes a schedule of it.
    """
    count = len(stages)
    placements: tuple[Callable[[int, int], int], ...] = (
        lambda stage, chunk: chunk * count + stage,
        lambda stage, chunk: chunk * count + (count - 1 - stage if chunk % 2 else stage),
    )
    refusals = []
    for place in placements:
        order = "".join(_row(own, stage, place) for stage, own in enumerate(stages))
        try:
            read_order(order)
        except InvalidSchedule as error:
            refusals.append(str(error))
        else:
            return order
    message = f"What the training processes say they run is no schedule: {refusals[0]}."
    raise InvalidOrder(Reason.SCHEDULE_INVALID, message)


def _row(own: Iterable[tuple[int, int, int]], stage: int, place: Callable[[int, int], int]) -> str:
    cells = []
    for kind, microbatch, chunk in own:
        letter = _LETTERS.get(kind)
        if letter is None:
            message = f"Stage {stage} runs constant-time instructions, for which an order has no cell."
            raise InvalidOrder(Reason.SCHEDULE_INVALID, message)
        cells.append(f"{place(stage, chunk)}{letter}{microbatch}")
    return ",".join(cells) + "\n"


def _name(place: tuple[int, int, int]) -> str:
    return f"pipeline {place[0]}" + (f", tensor rank {place[2]}" if place[2] else "")
