"""Measurements: the CSV ``stage,instruction,frequency,time,energy[,chunk][,reached]`` (MHz, s, J), checked, as tables
of options.

Every profile is checked here once, and numbers are not checked again later. Each refusal is one line with the line of
the file, the column and the rule. Measurements are neither smoothed nor fitted; how repeated samples become one option
is in `perseus_solver.model.sampling`.

At its power limit a GPU runs slower than the clock that was set. All clocks above are then one, and what their
measurements differ by is noise. The column ``reached`` (MHz) says which clock was really reached; without it, each
clock counts as reached.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProfile, quoted
from perseus_solver.kinds import LARGEST, SMALLEST, Floats, Options
from perseus_solver.model.sampling import OUTLIER, Sampling, condense, farthest

COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_OPTIONAL = ("chunk", "reached")
MAX_ROWS = 250_000
"""64 stages × 4 kinds × 2 chunks × 100 clocks × 4 samples fit; reading takes about two seconds."""
MAX_BYTES = 64 << 20
_MAX_STAGE = 1_023
_MAX_CHUNK = 63
_MAX_MHZ = 65_535  # plans store clocks in 16 bits
_SAME_MHZ = 7.5
"""Clocks of NVIDIA GPUs are 15 MHz apart, so a mean of readings that is less than half of that higher is the same."""
_KINDS = {kind.label: kind for kind in InstructionKind}
_LOAD = "load"
"""Data loading as the SOSP'24 artifact writes it: a row for each clock, although it has none."""

Key = tuple[int, InstructionKind, int]
"""Stage, kind, chunk."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Profile:
    """The measured options of every stage.

    Attributes:
        stages: number of stages that may be used, 0 … stages − 1.
        tables: measured options by (stage, kind, chunk); chunk is 0 throughout where `has_chunks` is false.
        has_chunks: the CSV had a ``chunk`` column, so every chunk has its own measurements.
        notes: what was changed in the measurements or left out, one sentence each.
        warnings: measurements that contradict each other, one sentence each.
    """

    stages: int
    tables: dict[Key, Options]
    has_chunks: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def constant_stages(self) -> tuple[int, ...]:
        """Stages with a constant-time instruction, such as data loading."""
        return tuple(sorted(stage for stage, kind, _ in self.tables if kind is InstructionKind.CONSTANT))

    def __repr__(self) -> str:
        clocks = sum(len(options.frequency_mhz) for options in self.tables.values())
        return f"Profile({self.stages} stages, {len(self.tables)} kinds of instructions, {clocks} measured clocks)"


@dataclass(frozen=True, slots=True)
class _Row:
    """One validated row: the line of the file, and its values in MHz, seconds and joules."""

    line: int
    stage: int
    kind: InstructionKind
    chunk: int
    frequency_mhz: int
    time_s: float
    energy_j: float
    reached_mhz: float


def read_profile(source: str | bytes | Path, *, stages: int | None = None, sampling: Sampling | None = None) -> Profile:
    """Read and check a profile.

    Args:
        source: the CSV itself as text or bytes, or the path of a file.
        stages: how many stages are needed; None: as many as the CSV has. Further stages are left out, with a note.
        sampling: allow several samples of one (stage, instruction, frequency), and say how they become one option;
            None: a repeated row is an error.

    Returns:
        The profile; every number in it is finite and in range, and every stage has a forward and a backward.

    Raises:
        InvalidProfile: the message names the line, the column and the rule.
    """
    if stages is not None and stages < 1:
        raise InvalidProfile(f"stages must be at least 1, not {stages}")
    text = _decode(_load(source))
    if len(text) > MAX_BYTES or text.count("\n") > MAX_ROWS + 1:
        raise InvalidProfile(f"profile is too large: at most {MAX_ROWS:,} rows and {MAX_BYTES >> 20} MiB")
    samples, has_chunks, loads = _read_rows(text)
    measured = max(sample.stage for sample in samples) + 1
    if stages is not None and measured < stages:
        raise InvalidProfile(f"profile has {measured} stages (0 … {measured - 1}), but {stages} are needed")
    notes = [
        f"stage {stage}: {rows} rows of {_LOAD!r} are read as one constant instruction, their mean"
        for stage, rows in loads.items()
        if stages is None or stage < stages
    ]
    warnings: list[str] = []
    if stages is not None and measured > stages:
        notes.append(f"the profile has {measured} stages; the first {stages} are used")
    tables = _tables([s for s in samples if stages is None or s.stage < stages], sampling, notes, warnings)
    profile = Profile(stages or measured, tables, has_chunks, notes=tuple(notes), warnings=tuple(warnings))
    _check_complete(profile)
    return profile


def _load(source: str | bytes | Path) -> bytes:
    if isinstance(source, str):
        return source.encode("utf-8", errors="surrogatepass")
    if isinstance(source, bytes):
        return source
    try:
        with source.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidProfile(f"profile {source} cannot be read: {error.strerror or error}") from error


def _decode(data: bytes) -> str:
    if not data.strip(b"\xef\xbb\xbf \t\r\n"):
        raise InvalidProfile(f"profile is empty; the first line must name the columns {','.join(COLUMNS)}")
    if b"\0" in data:
        raise InvalidProfile("profile is not a text file: it has NUL bytes (binary, or UTF-16); save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidProfile(f"profile line {line}: not UTF-8 text (byte 0x{data[error.start]:02x})") from error


def _read_rows(text: str) -> tuple[list[_Row], bool, dict[int, int]]:
    """Return the rows, whether they have chunks, and how many `_LOAD` rows each stage had."""
    # strict refuses a quote that never ends; otherwise the rest of the file would become one cell.
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    numbered = _numbered(rows)
    _, header = next(numbered, (0, []))
    names = [name.strip().lower() for name in header]
    for column in COLUMNS:
        if column not in names:
            hint = "" if "\n" in text.strip() else " (this is one line of text; to read a file pass its path as a Path)"
            raise InvalidProfile(
                f"profile has no column {column!r}; needed are {','.join(COLUMNS)}; "
                f"the first line reads {_header(header)}{hint}"
            )
    for column in (*COLUMNS, *_OPTIONAL):
        if names.count(column) > 1:
            raise InvalidProfile(f"profile has the column {column!r} twice")
    has_chunks = "chunk" in names
    where = [names.index(column) for column in COLUMNS]
    chunk_at = names.index("chunk") if has_chunks else None
    reached_at = names.index("reached") if "reached" in names else None
    samples = []
    loads: dict[tuple[int, int], list[_Row]] = {}
    for line, row in numbered:
        if len(row) != len(names):
            raise InvalidProfile(f"profile line {line}: {len(row)} cells, but the header has {len(names)}")
        stage, instruction, frequency, time, energy = (row[k] for k in where)
        name = instruction.strip().lower()
        kind = InstructionKind.CONSTANT if name == _LOAD else _KINDS.get(name)
        if kind is None:
            raise InvalidProfile(
                f"profile line {line}, column 'instruction': {quoted(instruction)} is unknown; "
                f"known are {', '.join(_KINDS)}"
            )
        clock = 0 if name == _LOAD else _frequency(line, kind, frequency)
        sample = _Row(
            line=line,
            stage=_integer(line, "stage", stage, 0, _MAX_STAGE),
            kind=kind,
            chunk=0 if chunk_at is None else _integer(line, "chunk", row[chunk_at], 0, _MAX_CHUNK),
            frequency_mhz=clock,
            time_s=_quantity(line, "time", time, "s"),
            energy_j=_quantity(line, "energy", energy, "J"),
            reached_mhz=clock if reached_at is None else _reached(line, clock, row[reached_at]),
        )
        if name == _LOAD:
            loads.setdefault((sample.stage, sample.chunk), []).append(sample)
        else:
            samples.append(sample)
    if not samples and not loads:
        raise InvalidProfile("profile has a header but no rows")
    samples += [
        replace(rows[0], time_s=fmean(row.time_s for row in rows), energy_j=fmean(row.energy_j for row in rows))
        for rows in loads.values()
    ]
    return samples, has_chunks, {stage: len(rows) for (stage, _), rows in loads.items()}


def _header(cells: list[str]) -> str:
    """Return a header as it was read, with the likely cause if it is in another dialect of CSV."""
    line = ",".join(cells)
    shown = quoted(line)
    for separator, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars")):
        if len(cells) == 1 and separator in line:
            return f"{shown}: its cells are separated by {name}, not commas"
    return shown


def _numbered(rows: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, with their line in the file."""
    line = 0
    while True:
        line += 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            raise InvalidProfile(f"profile line {line}: cannot be parsed as CSV: {error}") from error
        if any(cell.strip() for cell in row):
            yield line, row


def _number(line: int, column: str, text: str) -> float:
    stripped = text.strip()
    try:
        if not stripped.isascii() or "_" in stripped:  # float() would take 1_000 and digits of other scripts
            raise ValueError
        return float(stripped)
    except ValueError:
        what = "is empty" if not stripped else f"{quoted(stripped)} is not a number"
        raise InvalidProfile(f"profile line {line}, column {column!r}: {what}") from None


def _quantity(line: int, column: str, text: str, unit: str) -> float:
    value = _number(line, column, text)
    if not math.isfinite(value) or value <= 0:
        raise InvalidProfile(
            f"profile line {line}, column {column!r}: {quoted(text)} must be finite and greater than zero"
        )
    if not SMALLEST <= value <= LARGEST:
        raise InvalidProfile(
            f"profile line {line}, column {column!r}: {quoted(text)} must be between "
            f"{SMALLEST:g} and {LARGEST:g} {unit}"
        )
    return value


def _integer(line: int, column: str, text: str, low: int, high: int) -> int:
    value = _number(line, column, text)
    if not (math.isfinite(value) and value == int(value) and low <= value <= high):
        raise InvalidProfile(
            f"profile line {line}, column {column!r}: {quoted(text)} must be a whole number between {low} and {high}"
        )
    return int(value)


def _frequency(line: int, kind: InstructionKind, text: str) -> int:
    if kind is InstructionKind.CONSTANT:
        if _number(line, "frequency", text) != 0:
            raise InvalidProfile(
                f"profile line {line}, column 'frequency': must be 0 for a constant instruction: it has no clock"
            )
        return 0
    return _integer(line, "frequency", text, 1, _MAX_MHZ)


def _reached(line: int, clock_mhz: int, text: str) -> float:
    """Return the clock that was reached; where it was not measured, and for constant instructions, the one set."""
    if not text.strip() or not clock_mhz:
        return clock_mhz
    value = _number(line, "reached", text)
    if not 0 < value <= _MAX_MHZ:
        raise InvalidProfile(
            f"profile line {line}, column 'reached': {quoted(text)} must be greater than zero and at most {_MAX_MHZ}"
        )
    return value


def _distinct(reached_mhz: Floats) -> npt.NDArray[np.bool_]:
    """Return which clocks, by descending frequency, reach more than every lower one: of a plateau only the lowest."""
    lower = np.maximum.accumulate(np.append(reached_mhz[1:], -np.inf)[::-1])[::-1]
    distinct: npt.NDArray[np.bool_] = reached_mhz >= lower + _SAME_MHZ
    return distinct


def _tables(
    samples: list[_Row], sampling: Sampling | None, notes: list[str], warnings: list[str]
) -> dict[Key, Options]:
    groups: dict[Key, dict[int, list[_Row]]] = {}
    for sample in samples:
        clocks = groups.setdefault((sample.stage, sample.kind, sample.chunk), {})
        same = clocks.setdefault(sample.frequency_mhz, [])
        if same and sampling is None:
            raise InvalidProfile(
                f"profile line {sample.line}: duplicate row: stage {sample.stage}, {sample.kind.label}, "
                f"{sample.frequency_mhz} MHz is already on line {same[0].line}; "
                "repeated rows need sampling (--samples)"
            )
        same.append(sample)
    tables = {}
    for (stage, kind, chunk), clocks in sorted(groups.items()):
        frequencies = sorted(clocks, reverse=True)
        where = f"stage {stage}, {kind.label}{f', chunk {chunk}' if chunk else ''}"
        if sampling is None:
            time = np.array([clocks[f][0].time_s for f in frequencies])
            energy = np.array([clocks[f][0].energy_j for f in frequencies])
        else:
            time_s = [np.array([s.time_s for s in clocks[f]]) for f in frequencies]
            energy_j = [np.array([s.energy_j for s in clocks[f]]) for f in frequencies]
            time, energy, note = condense(time_s, energy_j, sampling)
            notes.extend(f"{where}: {line}" for line in note)
            warnings.extend(f"{where}: {line}" for line in _outliers([clocks[f] for f in frequencies]))
        distinct = _distinct(np.array([float(np.median([s.reached_mhz for s in clocks[f]])) for f in frequencies]))
        if not distinct.all():
            notes.append(
                f"{where}: {int((~distinct).sum())} of {len(distinct)} clocks reach no more than a lower one "
                "and are left out"
            )
        tables[stage, kind, chunk] = Options(
            stage=stage,
            kind=kind,
            chunk=chunk,
            frequency_mhz=np.array(frequencies, dtype=np.int32)[distinct],
            time_s=time[distinct],
            energy_j=energy[distinct],
        )
    return tables


def _outliers(clocks: list[list[_Row]]) -> Iterator[str]:
    """Yield, for time and energy, the worst of the samples of a table that contradict the others of their clock."""
    for column, unit in (("time", "s"), ("energy", "J")):
        outliers = []
        for rows in clocks:
            values = np.array([getattr(row, f"{column}_{unit.lower()}") for row in rows])
            at, factor = farthest(values)
            if factor > OUTLIER:
                outliers.append((factor, rows[at], rows, values))
        if not outliers:
            continue
        factor, row, rows, values = max(outliers, key=lambda one: one[0])
        value = f"{getattr(row, f'{column}_{unit.lower()}'):g} {unit}"
        more = f"; {len(outliers) - 1} more clocks have such samples" if len(outliers) > 1 else ""
        clock = f"{row.frequency_mhz} MHz"
        if len(rows) == 2:
            lines = " and ".join(str(each.line) for each in rows)
            yield (
                f"the two samples of {column} at {clock} (lines {lines}) are {values.max() / values.min():.3g} times "
                f"apart; their mean is used, and one of them is probably wrong{more}"
            )
        else:
            yield (
                f"{column} {value} on line {row.line} is {factor:.3g} times apart from the median of {len(rows)} "
                f"samples at {clock}, which is used{more}"
            )


def _check_complete(profile: Profile) -> None:
    """Check that every stage has a forward and a whole backward, or steps and nothing else. What further chunks need
    depends on the schedule.
    """
    for stage in range(profile.stages):
        has = {kind for s, kind, chunk in profile.tables if s == stage and chunk == 0}
        if not has:
            chunk = " (chunk 0)" if profile.has_chunks else ""
            raise InvalidProfile(f"profile has no rows for stage {stage}{chunk} of 0 … {profile.stages - 1}")
        if InstructionKind.STEP in has:
            if others := has - {InstructionKind.STEP}:
                what = f"'{min(others).label}' rows beside 'step' rows"
                raise InvalidProfile(f"profile: stage {stage} has {what}: a step is the whole iteration")
            continue
        if InstructionKind.FORWARD not in has:
            raise InvalidProfile(f"profile: stage {stage} has no 'forward' rows")
        split = has & {InstructionKind.INPUT_GRADIENT, InstructionKind.WEIGHT_GRADIENT}
        if len(split) == 1:
            missing = ({InstructionKind.INPUT_GRADIENT, InstructionKind.WEIGHT_GRADIENT} - split).pop()
            raise InvalidProfile(f"profile: stage {stage} has '{split.pop().label}' rows but no '{missing.label}' rows")
        if not split and InstructionKind.BACKWARD not in has:
            raise InvalidProfile(f"profile: stage {stage} has no 'backward' rows")
