"""The CSV of a schedule, as `torch.distributed.pipelining` exports it.

It has a row for each rank and a cell for each slot, such as ``2F0`` or ``0B3``: a virtual stage, an action and a
microbatch. Both of torch's forms are read: compute only, and with communication. Communication takes no time here:
transfers are delays between stages, and parameter gathering and gradient reduction belong to the overhead of the
iteration.

Torch has no letter for a job without a pipeline. Ours is S: the phases of its iterations, such as ``0S0,1S0`` for a
rollout and a training.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidSchedule, quoted
from perseus_solver.kinds import Ints
from perseus_solver.schedules.base import ABSENT, Schedule, assemble, name_cycle
from perseus_solver.topology import STUCK, levels

_KINDS = {
    "F": InstructionKind.FORWARD,
    "B": InstructionKind.BACKWARD,
    "I": InstructionKind.INPUT_GRADIENT,
    "W": InstructionKind.WEIGHT_GRADIENT,
    "S": InstructionKind.STEP,
}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_ACTION = re.compile(r"(?P<place>\d{1,4})(?P<action>[A-Z_]+?)(?P<microbatch>\d{1,7})?", re.ASCII)
_COMMUNICATION = {"SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD"}
_OVERLAP = re.compile(r"\((?P<inner>[^()]*)\)OVERLAP_F_B", re.ASCII)
MAX_BYTES = 64 << 20
_MAX_INSTRUCTIONS = 4_000_000


def read_schedule(source: str | bytes | Path, *, name: str = "custom") -> Schedule:
    """Read a custom schedule from its CSV.

    The virtual stages of a rank become its chunks, in ascending order. An overlapped forward and backward become two
    instructions of one action, in the order given. Torch before 2.6 had no letter I: in a file without it, B beside W
    is the input gradient.

    Args:
        source: the CSV itself as text or bytes (at most `MAX_BYTES`), or the path of a file.
        name: name of the schedule, for messages and calibrations.

    Returns:
        The schedule, which is known to be complete and free of deadlocks.

    Raises:
        InvalidSchedule: the text is not such a CSV (the message names the row and the cell), the schedule is
            incomplete, or it deadlocks (the message names the instructions that wait for each other).
    """
    ranks = [_read_row(number, cells) for number, cells in enumerate(_cells(source), start=1)]
    while ranks and not ranks[-1]:
        ranks.pop()
    if not ranks or not all(ranks):
        empty = next((k for k, rank in enumerate(ranks) if not rank), None)
        raise InvalidSchedule(
            "schedule CSV is empty" if empty is None else f"schedule CSV row {empty + 1}: the rank runs nothing"
        )
    schedule = _assemble(name, _with_input_gradients([np.array(rank, dtype=np.int32) for rank in ranks]))
    before, after = schedule.edges()
    stuck = levels(schedule.instructions, before, after) == STUCK
    if stuck.any():
        raise InvalidSchedule(f"the schedule deadlocks: {name_cycle(schedule, before, after, stuck)}")
    return schedule


def write_schedule(schedule: Schedule) -> str:
    """Return the CSV of a schedule: compute only, without idle slots.

    Args:
        schedule: the schedule to write.

    Raises:
        InvalidSchedule: torch has no action for one of its instructions.
    """
    lines = []
    for stage in range(schedule.stages):
        cells, action = [], []
        for i in range(int(schedule.stage_offset[stage]), int(schedule.stage_offset[stage + 1])):
            kind, place = InstructionKind(int(schedule.kind[i])), int(schedule.position[stage, schedule.chunk[i]])
            if kind not in _LETTERS or place == ABSENT or schedule.bidirectional:
                raise InvalidSchedule(f"torch's CSV has no cell for {schedule.describe(i)} of {schedule.name}")
            action.append(f"{place}{_LETTERS[kind]}{int(schedule.microbatch[i])}")
            if not schedule.joined[i]:
                cells.append(f"({';'.join(action)})OVERLAP_F_B" if len(action) > 1 else action[0])
                action = []
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def _cells(source: str | bytes | Path) -> list[list[str]]:
    if isinstance(source, Path):
        try:
            with source.open("rb") as file:
                data: str | bytes = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise InvalidSchedule(f"schedule CSV {source} cannot be read: {error.strerror or error}") from error
    else:
        data = source
    if len(data) > MAX_BYTES:
        raise InvalidSchedule(f"schedule CSV is too large: at most {MAX_BYTES >> 20} MiB")
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidSchedule(f"schedule CSV is not UTF-8 text (byte {error.start})") from error
    try:
        return list(csv.reader(io.StringIO(data.removeprefix("\ufeff"), newline=""), strict=True))
    except csv.Error as error:
        raise InvalidSchedule(f"schedule CSV cannot be parsed: {error}") from error


def _read_row(number: int, cells: list[str]) -> list[tuple[int, int, int, bool]]:
    """Return (kind, microbatch, virtual stage, whether joined with the next) of the computations of one rank."""
    computations = []
    for column, cell in enumerate(cells, start=1):
        text = cell.strip()
        overlap = _OVERLAP.fullmatch(text)
        parts = []
        for part in overlap["inner"].split(";") if overlap else [text]:
            action = _ACTION.fullmatch(part.strip())
            if not part.strip() or (action and action["action"] in _COMMUNICATION):
                continue
            kind = _KINDS.get(action["action"]) if action else None
            if action is None or kind is None or action["microbatch"] is None:
                raise InvalidSchedule(
                    f"schedule CSV row {number}, cell {column}: {quoted(text)} is not an action such as 0F0 or 2I1"
                )
            parts.append((int(kind), int(action["microbatch"]), int(action["place"])))
        computations += [(*part, k < len(parts)) for k, part in enumerate(parts, start=1)]
    return computations


def _with_input_gradients(ranks: list[Ints]) -> list[Ints]:
    """Return the ranks' instructions with the kinds of today (torch's pull request 138886 changed its letters)."""
    kinds = np.concatenate([rank[:, 0] for rank in ranks])
    if (kinds == InstructionKind.INPUT_GRADIENT).any() or not (kinds == InstructionKind.WEIGHT_GRADIENT).any():
        return ranks
    renamed = []
    for rank in ranks:
        kind, place = rank[:, 0], rank[:, 2].astype(np.int64) << 32 | rank[:, 1]
        beside = np.isin(place, place[kind == InstructionKind.WEIGHT_GRADIENT])
        split = beside & (kind == InstructionKind.BACKWARD)
        renamed.append(np.column_stack([np.where(split, InstructionKind.INPUT_GRADIENT, kind), rank[:, 1:]]))
    return renamed


def _assemble(name: str, ranks: list[Ints]) -> Schedule:
    if sum(map(len, ranks)) > _MAX_INSTRUCTIONS:
        raise InvalidSchedule(f"schedule CSV is too large: at most {_MAX_INSTRUCTIONS:,} instructions")
    places = [np.unique(rank[:, 2]) for rank in ranks]
    owners, counts = np.unique(np.concatenate(places), return_counts=True)
    if (counts > 1).any():
        raise InvalidSchedule(f"schedule CSV: virtual stage {owners[np.argmax(counts > 1)]} is on more than one rank")
    if owners.size != owners[-1] + 1:
        missing = int(np.setdiff1d(np.arange(owners[-1]), owners)[0])
        raise InvalidSchedule(f"schedule CSV: virtual stage {missing} is on no rank, but {owners[-1]} is")
    position = np.full((len(ranks), max(p.size for p in places)), ABSENT, dtype=np.int32)
    per_stage = []
    for rank, (rows, places_of_rank) in enumerate(zip(ranks, places, strict=True)):
        position[rank, : places_of_rank.size] = places_of_rank
        per_stage.append(np.column_stack([rows[:, :2], np.searchsorted(places_of_rank, rows[:, 2])]))
    microbatches = int(max(rank[:, 1].max() for rank in ranks)) + 1
    if microbatches * owners.size > _MAX_INSTRUCTIONS:
        raise InvalidSchedule(
            f"schedule CSV names microbatch {microbatches - 1}, but has too few instructions for so many microbatches"
        )
    joined = [rank[:, 3] > 0 for rank in ranks]
    return assemble(name, per_stage, microbatches=microbatches, position=position, joined=joined)
