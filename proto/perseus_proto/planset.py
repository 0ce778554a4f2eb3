"""The codec of plan sets: the operator encodes one once; the agent decodes, validates and stores it.

Only ``encode_plan_set`` and ``decode_plan_set`` know how clocks are packed. Pure Python without numpy, which the
agent's image lacks. Decoding trusts nothing: sizes are bounded before memory is allocated, every index is checked, and
the identity of the plan set is recomputed. Whose plan it is, and whether the GPUs support its clocks, is checked by the
agent.

How long clock changes take under which plans were rehearsed is sent beside them. It is no part of their identity.

Packing: clocks become one-byte indices into a palette; a point is XORed with the point before it, which neighbours on
a frontier make nearly all zero; zlib does the rest.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

from perseus_core.clock_latency import MAX_CLOCK_MHZ, MAX_CLOCKS
from perseus_core.latency import MAX_LATENCY_US, SwitchLatency
from perseus_proto.v1alpha1 import agent_pb2

MAX_POINTS: Final = 4_096
MAX_STAGES: Final = 1_024
MAX_INSTRUCTIONS: Final = 65_536
MAX_ALL_INSTRUCTIONS: Final = 1 << 20
"""Of all stages together: of sixteen GPUs with the longest schedule each. Read, one takes about fifty bytes."""
MAX_CELLS: Final = 1 << 26
"""Bound on stages × points × instructions, one byte each when unpacked: 64 stages of 3,072 instructions at 300 points
fit."""

_ROW_BYTES, _INSTRUCTION_BYTES, _POINT_BYTES = 48, 64, 256
_KINDS: Final = frozenset(agent_pb2.InstructionKind.values()) - {agent_pb2.INSTRUCTION_KIND_UNSPECIFIED}
_DIGEST_TAG: Final = b"perseus.plan-set.1\n"
_SENT: Final = "sent with the plan"


class InvalidPlanSet(ValueError):
    """The plan set breaks a rule; the message names the field and the rule. Nothing of it may be used."""


@dataclass(frozen=True)
class StageSchedule:
    """One stage's instructions in the order in which it executes them; kinds are numbers of ``InstructionKind``."""

    stage: int
    kinds: tuple[int, ...]
    microbatches: tuple[int, ...]
    chunks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True)
class PlanPoint:
    """Planned time and energy of one iteration at a point of the frontier."""

    iteration_time_us: int
    energy_mj: int


@dataclass(frozen=True)
class PlanSet:
    """A decoded plan set: immutable, all of it valid."""

    plan_id: str
    schedules: dict[int, StageSchedule]
    points: tuple[PlanPoint, ...]
    clocks_mhz: tuple[int, ...]
    rows: dict[int, tuple[bytes, ...]] = field(repr=False)
    """By stage, for each point: one index into ``clocks_mhz`` per instruction."""
    changes: Mapping[int, SwitchLatency] = field(default_factory=dict, compare=False)
    """By clock, MHz: how long changes to it take under which the plans were rehearsed; no part of ``plan_id``."""

    @cached_property
    def memory_bytes(self) -> int:
        """About how much memory it takes, bytes: what is stored beside each clock, instruction and point, too."""
        clocks = sum(len(row) + _ROW_BYTES for rows in self.rows.values() for row in rows)
        instructions = sum(map(len, self.schedules.values()))
        return clocks + _INSTRUCTION_BYTES * instructions + _POINT_BYTES * len(self.points)

    def stage_clocks_mhz(self, stage: int, point: int) -> tuple[int, ...]:
        """The clock of every instruction of a stage at a point, in execution order."""
        return tuple(map(self.clocks_mhz.__getitem__, self.rows[stage][point]))


def encode_plan_set(
    schedules: Sequence[StageSchedule],
    points: Sequence[PlanPoint],
    clocks_mhz: Sequence[Sequence[Sequence[int]]],
) -> agent_pb2.PlanSet:
    """Pack the frontier's plans for the stages on one node.

    Args:
        schedules: the stages that run there, in ascending order of stage.
        points: the frontier's points, fastest first.
        clocks_mhz: ``[stage][point][instruction]``, parallel to the two above.

    Returns:
        The message, with ``plan_id`` set: the SHA-256 of the content.

    Raises:
        InvalidPlanSet: shapes do not fit, or a rule of ``decode_plan_set`` is broken.
    """
    if len(clocks_mhz) != len(schedules):
        raise InvalidPlanSet(f"clocks_mhz: {len(clocks_mhz)} stages, but schedules has {len(schedules)}")
    palette = sorted({int(clock) for stage in clocks_mhz for row in stage for clock in row})
    index = {clock: position for position, clock in enumerate(palette)}
    if len(palette) > MAX_CLOCKS:
        raise InvalidPlanSet(f"clocks_mhz: {len(palette)} different clocks; at most {MAX_CLOCKS}")
    rows: dict[int, tuple[bytes, ...]] = {}
    for schedule, stage in zip(schedules, clocks_mhz, strict=True):
        rows[schedule.stage] = tuple(bytes(index[int(clock)] for clock in row) for row in stage)
        if len(stage) != len(points) or any(len(row) != len(schedule) for row in stage):
            raise InvalidPlanSet(
                f"clocks_mhz of stage {schedule.stage}: want {len(points)} points of {len(schedule)} instructions"
            )
    message = agent_pb2.PlanSet(
        stages=[
            agent_pb2.StageSchedule(
                stage=schedule.stage,
                kinds=schedule.kinds,  # type: ignore[arg-type]  # plain numbers of the same enum
                microbatches=schedule.microbatches,
                chunks=schedule.chunks,
            )
            for schedule in schedules
        ],
        points=[agent_pb2.PlanPoint(iteration_time_us=p.iteration_time_us, energy_mj=p.energy_mj) for p in points],
        clocks_mhz=palette,
    )
    checked, _ = _validate_header(message)
    message.plan_id = _digest(checked, points, palette, rows)
    packer = zlib.compressobj(9)
    message.clock_indices = b"".join(
        [packer.compress(_xor(row, before)) for stage in rows.values() for row, before in _with_previous(stage)]
        + [packer.flush()]
    )
    return message


def decode_plan_set(message: agent_pb2.PlanSet) -> PlanSet:
    """Unpack and validate a plan set: all of it, or nothing.

    Raises:
        InvalidPlanSet: a rule is broken; the message names the field.
    """
    schedules, cells = _validate_header(message)
    unpacker = zlib.decompressobj()
    try:
        # One byte more than allowed is enough to see a bomb, and all that is ever unpacked of it.
        unpacked = unpacker.decompress(message.clock_indices, cells + 1)
    except zlib.error as error:
        raise InvalidPlanSet(f"plan_set.clock_indices: not zlib data: {error}") from None
    if len(unpacked) != cells or not unpacker.eof or unpacker.unused_data:
        raise InvalidPlanSet(
            f"plan_set.clock_indices: must unpack to exactly {cells} bytes, stages x points x instructions"
        )
    palette = tuple(message.clocks_mhz)
    valid = bytes(range(len(palette)))
    rows: dict[int, tuple[bytes, ...]] = {}
    offset = 0
    for schedule in schedules:
        width = len(schedule)
        stage_rows: list[bytes] = []
        before = b""
        for _ in message.points:
            before = _xor(unpacked[offset : offset + width], before)
            offset += width
            if before.translate(None, valid):  # what is left after deleting every valid index
                raise InvalidPlanSet(
                    f"plan_set.clock_indices: stage {schedule.stage}, point {len(stage_rows)} has an index beyond the "
                    f"{len(palette)} clocks of clocks_mhz"
                )
            stage_rows.append(before)
        rows[schedule.stage] = tuple(stage_rows)
    points = tuple(PlanPoint(point.iteration_time_us, point.energy_mj) for point in message.points)
    if _digest(schedules, points, palette, rows) != message.plan_id:
        raise InvalidPlanSet("plan_set.plan_id: is not the digest of the content")
    return PlanSet(message.plan_id, {schedule.stage: schedule for schedule in schedules}, points, palette, rows)


def encode_changes(changes: Mapping[int, SwitchLatency]) -> list[agent_pb2.ClockChange]:
    """How long changes take under which plans were rehearsed, by the clock that is changed to, MHz."""
    return [
        agent_pb2.ClockChange(clock_mhz=mhz, p50_us=one.p50_us, p99_us=one.p99_us)
        for mhz, one in sorted(changes.items())
    ]


def decode_changes(messages: Sequence[agent_pb2.ClockChange]) -> dict[int, SwitchLatency]:
    """Validate how long changes take under which plans were rehearsed: all of it, or nothing.

    Returns:
        By the clock that is changed to, MHz, ascending.

    Raises:
        InvalidPlanSet: a rule is broken; the message names the field.
    """
    if len(messages) > MAX_CLOCKS:
        raise InvalidPlanSet(f"changes: {len(messages)} clocks; must be at most {MAX_CLOCKS}")
    clocks = [one.clock_mhz for one in messages]
    if clocks and (clocks[0] == 0 or clocks[-1] > MAX_CLOCK_MHZ or any(b <= a for a, b in pairwise(clocks))):
        raise InvalidPlanSet(f"changes.clock_mhz: must ascend strictly within 1 to {MAX_CLOCK_MHZ}")
    for one in messages:
        if not 1 <= one.p50_us <= one.p99_us <= MAX_LATENCY_US:
            raise InvalidPlanSet(
                f"changes[{one.clock_mhz}]: p50_us must be at least 1, p99_us at least p50_us and at most "
                f"{MAX_LATENCY_US}, not {one.p50_us} and {one.p99_us}"
            )
    return {one.clock_mhz: SwitchLatency(one.p50_us, one.p99_us, 0, False, _SENT) for one in messages}


def _validate_header(message: agent_pb2.PlanSet) -> tuple[list[StageSchedule], int]:
    """Everything but the indices; returns the schedules and the number of cells that the indices must have."""
    if not 1 <= len(message.stages) <= MAX_STAGES:
        raise InvalidPlanSet(f"plan_set.stages: {len(message.stages)} stages; must be 1 to {MAX_STAGES}")
    if not 1 <= len(message.points) <= MAX_POINTS:
        raise InvalidPlanSet(f"plan_set.points: {len(message.points)} points; must be 1 to {MAX_POINTS}")
    times = [point.iteration_time_us for point in message.points]
    if times[0] == 0 or any(later < earlier for earlier, later in pairwise(times)):
        raise InvalidPlanSet("plan_set.points: iteration_time_us must be positive and must not decrease")
    clocks = message.clocks_mhz
    if not 1 <= len(clocks) <= MAX_CLOCKS:
        raise InvalidPlanSet(f"plan_set.clocks_mhz: {len(clocks)} clocks; must be 1 to {MAX_CLOCKS}")
    if clocks[0] == 0 or clocks[-1] > MAX_CLOCK_MHZ or any(b <= a for a, b in pairwise(clocks)):
        raise InvalidPlanSet(f"plan_set.clocks_mhz: must ascend strictly within 1 to {MAX_CLOCK_MHZ}")
    count = sum(len(stage.kinds) for stage in message.stages)
    if count > MAX_ALL_INSTRUCTIONS:
        raise InvalidPlanSet(f"plan_set.stages: {count} instructions in all; at most {MAX_ALL_INSTRUCTIONS}")
    schedules = [_validate_stage(stage) for stage in message.stages]
    if any(b.stage <= a.stage for a, b in pairwise(schedules)):
        raise InvalidPlanSet("plan_set.stages: stage numbers must ascend strictly")
    cells = len(message.points) * count
    if cells > MAX_CELLS:
        raise InvalidPlanSet(f"plan_set: {cells} clocks in all; at most {MAX_CELLS}")
    return schedules, cells


def _validate_stage(stage: agent_pb2.StageSchedule) -> StageSchedule:
    count = len(stage.kinds)
    if not 1 <= count <= MAX_INSTRUCTIONS:
        raise InvalidPlanSet(
            f"plan_set.stages[{stage.stage}].kinds: {count} instructions; must be 1 to {MAX_INSTRUCTIONS}"
        )
    if len(stage.microbatches) != count or len(stage.chunks) != count:
        raise InvalidPlanSet(f"plan_set.stages[{stage.stage}]: kinds, microbatches and chunks must be equally long")
    if not _KINDS.issuperset(stage.kinds):
        raise InvalidPlanSet(f"plan_set.stages[{stage.stage}].kinds: holds a number that is no InstructionKind")
    return StageSchedule(stage.stage, tuple(stage.kinds), tuple(stage.microbatches), tuple(stage.chunks))


def _digest(
    schedules: Sequence[StageSchedule],
    points: Sequence[PlanPoint],
    palette: Sequence[int],
    rows: dict[int, tuple[bytes, ...]],
) -> str:
    """SHA-256 of the content as it is meant, not as it is packed: zlib's output differs between its versions."""
    digest = hashlib.sha256(_DIGEST_TAG)
    digest.update(struct.pack(f"!III{len(palette)}I", len(schedules), len(points), len(palette), *palette))
    for point in points:
        digest.update(struct.pack("!QQ", point.iteration_time_us, point.energy_mj))
    for schedule in schedules:
        count = len(schedule)
        digest.update(struct.pack("!II", schedule.stage, count))
        for column in (schedule.kinds, schedule.microbatches, schedule.chunks):
            digest.update(struct.pack(f"!{count}I", *column))
        for row in rows[schedule.stage]:
            digest.update(row)
    return digest.hexdigest()


def _with_previous(rows: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(rows, (b"", *rows[:-1]), strict=True)


def _xor(row: bytes, other: bytes) -> bytes:
    """Byte-wise XOR by one big integer; an empty ``other`` is all zeros."""
    return (int.from_bytes(row, "little") ^ int.from_bytes(other, "little")).to_bytes(len(row), "little")
