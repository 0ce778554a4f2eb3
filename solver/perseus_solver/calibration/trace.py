"""Measured iterations: how long every instruction took, and how long the iteration as a whole.

`read_trace` reads two CSV files; telemetry becomes a `Trace` directly. Both are checked here once, by name, and numbers
are not checked again later. Nothing is averaged or left out: outliers are left to the fit.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidTrace
from perseus_solver.kinds import Floats, Ints
from perseus_solver.schedules import Schedule, build_schedule

INSTRUCTION_COLUMNS = ("plan", "iteration", "stage", "instruction", "microbatch", "duration_s")
ITERATION_COLUMNS = ("plan", "iteration", "stage", "iteration_time_s")
MAX_ROWS = 4_000_000
"""Thirty times the largest published trace. Bounds time and memory before anything is parsed."""
MAX_BYTES = 256 << 20
_MAX_COUNT = 1_000_000_000
_LONGEST_S = 1e6
_KINDS = {kind.label: int(kind) for kind in InstructionKind}

Source = str | bytes | Path
"""The CSV itself as text or (gzipped) bytes, or the path of a file."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Iterations of one pipeline.

    Attributes:
        schedule: what every iteration ran.
        plan: int[iterations], number of the plan in force. Iterations of a plan are held out together, because they
            have a common error.
        duration_s: float[iterations, instructions], seconds of the computations, numbered as in the schedule.
        iteration_time_s: float[iterations], seconds, of the slowest rank.

    Raises:
        InvalidTrace: a shape does not fit, or a time is not positive or too long.
    """

    schedule: Schedule
    plan: Ints
    duration_s: Floats
    iteration_time_s: Floats

    def __post_init__(self) -> None:
        count = self.iteration_time_s.shape[0]
        if self.duration_s.shape != (count, self.schedule.instructions):
            raise InvalidTrace(
                f"duration_s must be of shape [{count} iterations, {self.schedule.instructions} instructions], "
                f"not {list(self.duration_s.shape)}"
            )
        if self.plan.shape != (count,):
            raise InvalidTrace(
                f"plan must have one number for each of {count} iterations, not shape {list(self.plan.shape)}"
            )
        for name, values in (("duration_s", self.duration_s), ("iteration_time_s", self.iteration_time_s)):
            if not ((values > 0) & (values < _LONGEST_S)).all():
                raise InvalidTrace(f"{name} must be more than 0 and less than {_LONGEST_S:g} s")

    def select(self, chosen: npt.NDArray[np.bool_]) -> Trace:
        """Return the iterations that ``chosen``, bool[iterations], marks."""
        return Trace(self.schedule, self.plan[chosen], self.duration_s[chosen], self.iteration_time_s[chosen])


def read_trace(
    instructions: Source,
    iterations: Source,
    schedule: str,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Trace:
    """Read and join the two files of a measured run.

    Args:
        instructions: rows of `INSTRUCTION_COLUMNS`, and ``chunk`` if stages hold several.
        iterations: rows of `ITERATION_COLUMNS`, one for every rank; the slowest rank's time is the iteration's.
        schedule: name of the schedule that was run.
        stages, microbatches: the numbers expected; None: those of the files.
        chunks: model chunks on each stage; None: as many as the schedule needs.

    Returns:
        The iterations, sorted by plan and iteration.

    Raises:
        InvalidTrace: the message names the file, the line, the column and the rule.
        InvalidSchedule: no such schedule, or it cannot run these counts.
    """
    instruction_rows = _rows(instructions, "instructions", INSTRUCTION_COLUMNS, optional="chunk")
    iteration_rows = _rows(iterations, "iterations", ITERATION_COLUMNS)
    found_stages, found_microbatches = (
        int(instruction_rows.column["stage"].max()) + 1,
        int(instruction_rows.column["microbatch"].max()) + 1,
    )
    for name, wanted, count in (("stages", stages, found_stages), ("microbatches", microbatches, found_microbatches)):
        if wanted is not None and wanted != count:
            raise InvalidTrace(f"instructions: {name} are 0 … {count - 1}, but the schedule has {wanted}")
    constant = instruction_rows.column["instruction"] == InstructionKind.CONSTANT
    executed = build_schedule(
        schedule,
        stages=found_stages,
        microbatches=found_microbatches,
        chunks=chunks,
        constants=np.unique(instruction_rows.column["stage"][constant]).tolist(),
    )

    runs, run_of = np.unique(
        np.stack([iteration_rows.column["plan"], iteration_rows.column["iteration"]]), axis=1, return_inverse=True
    )
    time_s = _iteration_times(iteration_rows, runs, run_of, executed.stages)
    duration_s = _durations(instruction_rows, runs, executed)
    return Trace(executed, runs[0].astype(np.int32), duration_s, time_s)


@dataclass(frozen=True, slots=True)
class _Rows:
    """One parsed file: its columns of counts, and its values in seconds."""

    file: str
    column: dict[str, npt.NDArray[np.int64]]
    value: Floats

    def error(self, row: int, rule: str) -> InvalidTrace:
        """Return the error that a row breaks a rule."""
        # The header is line 1 and empty lines are refused, so row k is on line k + 2.
        return InvalidTrace(f"{self.file}, line {row + 2}: {rule}")


def _iteration_times(rows: _Rows, runs: npt.NDArray[np.int64], run_of: npt.NDArray[np.intp], stages: int) -> Floats:
    stage = rows.column["stage"]
    if int(stage.max()) >= stages:
        raise rows.error(
            int(np.argmax(stage >= stages)), f"stage is {int(stage.max())}, but instructions has {stages} stages"
        )
    time_s = np.full((runs.shape[1], stages), np.nan)
    _fill(time_s, run_of.reshape(-1), stage, rows)
    missing = np.argwhere(np.isnan(time_s))
    if missing.size:
        run, absent = missing[0]
        raise InvalidTrace(f"iterations: plan {runs[0, run]}, iteration {runs[1, run]} has no row for stage {absent}")
    slowest: Floats = time_s.max(axis=1)
    return slowest


def _durations(rows: _Rows, runs: npt.NDArray[np.int64], schedule: Schedule) -> Floats:
    """Return float[iterations, instructions], with every instruction measured exactly once."""
    run_code, codes = (
        _code(rows.column["plan"], rows.column["iteration"]),
        _code(runs[0], runs[1]),
    )
    by_code = np.argsort(codes)
    at = np.minimum(np.searchsorted(codes[by_code], run_code), codes.size - 1)
    unknown = codes[by_code][at] != run_code
    if unknown.any():
        row = int(np.argmax(unknown))
        raise rows.error(
            row,
            f"plan {rows.column['plan'][row]}, iteration {rows.column['iteration'][row]} has no row in iterations",
        )
    place = {
        key: i
        for i, key in enumerate(
            zip(
                schedule.stage.tolist(),
                schedule.kind.tolist(),
                schedule.microbatch.tolist(),
                schedule.chunk.tolist(),
                strict=True,
            )
        )
    }
    keys = zip(*(rows.column[c].tolist() for c in ("stage", "instruction", "microbatch", "chunk")), strict=True)
    instruction = np.array([place.get(key, -1) for key in keys])
    if (instruction < 0).any():
        row = int(np.argmax(instruction < 0))
        label = InstructionKind(int(rows.column["instruction"][row])).label
        raise rows.error(
            row,
            f"schedule {schedule.name} has no {label} of microbatch {rows.column['microbatch'][row]}, "
            f"chunk {rows.column['chunk'][row]} on stage {rows.column['stage'][row]}",
        )
    duration_s = np.full((codes.size, schedule.instructions), np.nan)
    _fill(duration_s, by_code[at], instruction, rows)
    missing = np.argwhere(np.isnan(duration_s))
    if missing.size:
        run, absent = missing[0]
        raise InvalidTrace(
            f"instructions: plan {runs[0, run]}, iteration {runs[1, run]} lacks {schedule.describe(int(absent))}, "
            f"which schedule {schedule.name} runs"
        )
    return duration_s


def _code(plan: npt.NDArray[np.int64], iteration: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return plan * (_MAX_COUNT + 1) + iteration


def _fill(table: Floats, run: npt.NDArray[np.intp], column: npt.NDArray[np.int64], rows: _Rows) -> None:
    flat = run * table.shape[1] + column
    _, first, count = np.unique(flat, return_index=True, return_counts=True)
    if (count > 1).any():
        twice = np.flatnonzero(flat == flat[first[int(np.argmax(count > 1))]])[1]
        raise rows.error(int(twice), "the same stage or instruction of the same iteration is measured twice")
    table[run, column] = rows.value


def _rows(source: Source, file: str, columns: Sequence[str], optional: str | None = None) -> _Rows:
    """Parse one file. The last of ``columns`` is its value in seconds, the others are counts from 0."""
    reader = csv.reader(io.StringIO(_text(source, file)))
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in columns if name not in header]
    if missing:
        raise InvalidTrace(
            f"{file}: column {missing[0]} is missing; the first line must name {','.join(columns)}, "
            f"but reads {','.join(header)[:80]!r}"
        )
    where = {name: header.index(name) for name in columns}
    if optional is not None and optional in header:
        where[optional] = header.index(optional)
    *counts, value = (*(name for name in where if name != columns[-1]), columns[-1])
    parsed: list[list[int]] = [[] for _ in counts]
    values: list[float] = []
    name = ""
    try:
        for row in reader:
            if len(row) != len(header):
                raise InvalidTrace(
                    f"{file}, line {len(values) + 2}: has {len(row)} columns, the first line {len(header)}"
                )
            for name, column in zip(counts, parsed, strict=True):
                column.append(_count(name, row[where[name]]))
            name = value
            values.append(_seconds(row[where[value]]))
            if len(values) > MAX_ROWS:
                raise InvalidTrace(f"{file} is too large: at most {MAX_ROWS:,} rows")
    except InvalidTrace:
        raise
    except (ValueError, csv.Error) as error:
        raise InvalidTrace(f"{file}, line {len(values) + 2}, column {name}: {error}") from None
    if not values:
        raise InvalidTrace(f"{file} has no rows")
    arrays = {name: np.array(column, dtype=np.int64) for name, column in zip(counts, parsed, strict=True)}
    if optional is not None:
        arrays.setdefault(optional, np.zeros(len(values), dtype=np.int64))
    return _Rows(file, arrays, np.array(values))


def _count(name: str, text: str) -> int:
    if name == "instruction":
        kind = _KINDS.get(text.strip())
        if kind is None:
            raise ValueError(f"must be one of {', '.join(_KINDS)}, not {text[:40]!r}")
        return kind
    number = int(text) if text.strip().isdecimal() and len(text) <= len(str(_MAX_COUNT)) + 1 else -1
    if not 0 <= number <= _MAX_COUNT:
        raise ValueError(f"must be a whole number from 0, not {text[:40]!r}")
    return number


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < _LONGEST_S:
        raise ValueError(f"must be a number of seconds, more than 0 and less than {_LONGEST_S:g}, not {text[:40]!r}")
    return number


def _text(source: Source, file: str) -> str:
    if isinstance(source, str):
        return source
    try:
        if isinstance(source, Path):
            with source.open("rb") as raw:
                data = raw.read(MAX_BYTES + 1)
        else:
            data = source
        if data[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise InvalidTrace(f"{file} is too large: at most {MAX_BYTES >> 20} MiB unpacked")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidTrace(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidTrace(f"{file} cannot be read: {error}") from None
