"""Custom schedules: read from a ConfigMap, or assembled from what the training processes report that they execute.

Either way the result is the CSV of ``torch.distributed.pipelining``, checked by the solver's reader; a named schedule
has none. Which stage a process is and how many instructions it runs is its own claim: the agents hold every process to
what it has reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from perseus_core.rank import RankId
from perseus_operator.api.conditions import Reason
from perseus_operator.api.pipeline import Pipeline, ScheduleName
from perseus_operator.clients.kube.interface import Kube
from perseus_operator.errors import InvalidSchedule
from perseus_operator.families.training.work.config_map_ref import resolve
from perseus_operator.nodes.node import DeclaredSchedule, is_whole_step
from perseus_proto.v1alpha1 import agent_pb2
from perseus_solver import errors as solver_errors
from perseus_solver.schedules import build_schedule, read_schedule

_LETTERS: dict[int, str] = {
    agent_pb2.INSTRUCTION_KIND_FORWARD: "F",
    agent_pb2.INSTRUCTION_KIND_BACKWARD: "B",
    agent_pb2.INSTRUCTION_KIND_INPUT_GRADIENT: "I",
    agent_pb2.INSTRUCTION_KIND_WEIGHT_GRADIENT: "W",
    agent_pb2.INSTRUCTION_KIND_STEP: "S",
}


async def read_schedule_csv(kube: Kube, namespace: str, pipeline: Pipeline) -> str:
    """Read the schedule that ``spec.pipeline.scheduleRef`` names; its content is not checked.

    Raises:
        InvalidSchedule: it does not exist.
        KubeError: it is not known whether it exists.
    """
    reference = pipeline.schedule_ref
    assert reference is not None
    field = "spec.pipeline.scheduleRef"
    _, schedule_csv = await resolve(kube, namespace, reference, field=field, refusal=InvalidSchedule)
    return schedule_csv.decode(errors="replace")


def check_schedule(schedule_csv: str, pipeline: Pipeline) -> None:
    """Check that the solver can read a schedule, and that it has the shape of this pipeline.

    Raises:
        InvalidSchedule: one line with the rule, and the row and cell where there is one.
    """
    try:
        with solver_errors.content_withheld():  # conditions may be read by those who may not read the ConfigMap
            schedule = read_schedule(schedule_csv)
    except solver_errors.InvalidSchedule as error:
        raise InvalidSchedule(Reason.SCHEDULE_INVALID, f"spec.pipeline: {error}.") from error
    for name, actual, wanted in (
        ("stages", schedule.stages, pipeline.stages),
        ("microbatches", schedule.microbatches, pipeline.microbatches),
    ):
        if wanted is not None and actual != wanted:
            message = f"spec.pipeline.{name}: is {wanted}, but the schedule has {actual} {name}."
            raise InvalidSchedule(Reason.SCHEDULE_INVALID, message)


def collect_schedule(shape: Pipeline, reported: Mapping[RankId, DeclaredSchedule]) -> str | None:
    """Assemble the schedule that all processes report together.

    Args:
        shape: of the job; says which ranks there must be.
        reported: what each rank says that it executes.

    Returns:
        The schedule's CSV; None: some ranks have not reported yet.

    Raises:
        InvalidSchedule: processes of one stage do not agree, or the stages do not fit together.
    """
    if shape.schedule is not ScheduleName.FROM_RANKS or len(reported) < shape.places:  # before any is enumerated
        return None
    rank_ids = [
        RankId(dp, stage, tp)
        for stage in range(shape.stages)
        for dp in range(shape.data_parallel)
        for tp in range(shape.tensor_parallel)
    ]
    if any(not reported.get(rank_id) for rank_id in rank_ids):
        return None
    stages: list[DeclaredSchedule] = []
    for _, same_stage in groupby(rank_ids, key=lambda rank_id: rank_id.stage):
        first, *others = same_stage
        for other in others:
            if reported[other] != reported[first]:
                message = f"The processes of a stage must run the same schedule: {other} differs from {first}."
                raise InvalidSchedule(Reason.SCHEDULE_INVALID, message)
        stages.append(reported[first])
    return assemble_schedule(stages)


def compare_schedules(shape: Pipeline, reported: Mapping[RankId, DeclaredSchedule], schedule_csv: str) -> None:
    """Check that all processes execute the schedule of a spec.

    Constant-time instructions are left out: which there are is said by the profile.

    Args:
        shape: of the spec, with a place for each rank.
        reported: what each rank says that it executes.
        schedule_csv: that the spec names; empty: it is a schedule by name.

    Raises:
        InvalidSchedule: a process does not.
    """
    if schedule_csv:
        schedule = read_schedule(schedule_csv)
    else:
        schedule = build_schedule(
            shape.solver_name, stages=shape.stages, microbatches=shape.solved_microbatches, chunks=shape.chunks
        )
    expected = [list(zip(*schedule.columns(stage), strict=True)) for stage in range(schedule.stages)]
    fit: set[tuple[int, int]] = set()
    for rank, instructions in reported.items():
        if (rank.stage, id(instructions)) in fit:  # replicas share one object
            continue
        marked = [(kind, microbatch, chunk) for kind, microbatch, chunk, _ in instructions if kind in _LETTERS]
        wanted = expected[rank.stage]
        if marked == wanted:
            fit.add((rank.stage, id(instructions)))
            continue
        if len(marked) != len(wanted):
            how = f"{len(marked)} instructions in an iteration, not {len(wanted)}"
        else:
            place = next(place for place, pair in enumerate(zip(marked, wanted, strict=True)) if pair[0] != pair[1])
            how = f"other instructions from number {place} on"
        message = f"The process of {rank} marks {how}, as spec.pipeline has them ({schedule.title})."
        raise InvalidSchedule(Reason.RANKS_MISMATCH, message)


def assemble_schedule(stages: Sequence[DeclaredSchedule]) -> str:
    """The CSV of what each stage runs.

    A process knows its chunks by number, not by their position in the model. Chunks are placed round the stages, or
    down and back up in a V: whichever does not deadlock. If neither does, round: among torch's schedules only
    LoopedBFS is ambiguous.

    Raises:
        InvalidSchedule: no placement makes a schedule of it.
    """
    count = len(stages)
    placements: tuple[Callable[[int, int], int], ...] = (
        lambda stage, chunk: chunk * count + stage,
        lambda stage, chunk: chunk * count + (count - 1 - stage if chunk % 2 else stage),
    )
    refusals = []
    for position in placements:
        schedule_csv = "".join(_row(schedule, stage, position) for stage, schedule in enumerate(stages))
        try:
            read_schedule(schedule_csv)
        except solver_errors.InvalidSchedule as error:
            refusals.append(str(error))
        else:
            return schedule_csv
    message = f"What the training processes report that they run is not a valid schedule: {refusals[0]}."
    raise InvalidSchedule(Reason.SCHEDULE_INVALID, message)


def _row(instructions: DeclaredSchedule, stage: int, position: Callable[[int, int], int]) -> str:
    cells, action = [], []
    if is_whole_step(instructions):
        message = f"The training processes mark whole steps: spec.pipeline.schedule must be {ScheduleName.STEPS}."
        raise InvalidSchedule(Reason.SCHEDULE_INVALID, message)
    for kind, microbatch, chunk, joined in instructions:
        letter = _LETTERS.get(kind)
        if letter is None:
            message = f"Stage {stage} runs constant-time instructions, which a custom schedule cannot contain."
            raise InvalidSchedule(Reason.SCHEDULE_INVALID, message)
        action.append(f"{position(stage, chunk)}{letter}{microbatch}")
        if not joined:
            cells.append(f"({';'.join(action)})OVERLAP_F_B" if len(action) > 1 else action[0])
            action = []
    return ",".join(cells) + "\n"
