"""Solutions: one verified plan with its bound, or the whole frontier, and the bytes in which a frontier is stored."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import SolverError
from perseus_solver.kinds import Floats, Ints, latest_s

Frequencies = npt.NDArray[np.uint16]

OPTIMAL_GAP = 1e-9
"""A certified gap below this is rounding of float64 sums: the plan is optimal."""
DEFAULT_GAP = 3e-3
"""The gap that the search aims for. A plan with a larger one reached the limit of the search."""


class Status(StrEnum):
    """How good a plan is proven to be.

    Attributes:
        OPTIMAL: no plan that ends as early takes less energy.
        WITHIN_GAP: the certified gap is within the one aimed for.
        LIMIT_REACHED: the search ended with a larger gap; the plan is feasible.
        INFEASIBLE: no plan is this fast.
    """

    OPTIMAL = "optimal"
    WITHIN_GAP = "within_gap"
    LIMIT_REACHED = "limit_reached"
    INFEASIBLE = "infeasible"


def status_of(gap: float, allowed: float = DEFAULT_GAP) -> Status:
    """Return the status of a feasible plan.

    Args:
        gap: its certified gap, a share.
        allowed: the gap aimed for, a share.
    """
    if gap <= OPTIMAL_GAP:
        return Status.OPTIMAL
    return Status.WITHIN_GAP if gap <= allowed else Status.LIMIT_REACHED


class Grain(StrEnum):
    """How finely a plan sets clocks.

    Attributes:
        INSTRUCTION: every instruction has a clock of its own.
        SEGMENT: one clock for each part of a stage's iteration: lead, steady state and tail.
        STAGE: one clock for each stage.
        NONE: every instruction at its highest clock.
    """

    INSTRUCTION = "instruction"
    SEGMENT = "segment"
    STAGE = "stage"
    NONE = "none"


class InvalidFrontier(SolverError):
    """The bytes are not a frontier, or of a version that this program does not read."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What one plan is expected to do on real GPUs.

    Attributes:
        grain: how finely it sets clocks.
        confidence: share of the iterations that take no longer than the point's ``iteration_time_s``.
        p50_s: median iteration time, seconds.
        ideal_time_s, ideal_energy_j: what the plan would take if every clock were in effect at once.
        below_share, above_share: shares of the computing time below and above the planned clock.
    """

    grain: Grain
    confidence: float
    p50_s: float
    ideal_time_s: float
    ideal_energy_j: float
    below_share: float
    above_share: float


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """One plan, with its figures and its proven bound.

    Times and energies are exact where clocks change at once. A plan that was rehearsed has times that are kept with a
    confidence and expected energies instead, and an `Expectation`.

    Attributes:
        iteration_time_s: seconds, simulated from the profile.
        energy_j: joules of an iteration: Σ e + blocking power × waiting time of all stages.
        energy_lower_bound_j: no plan that ends by ``iteration_time_s`` takes less; proven by a dual flow.
        status: how good the plan is proven to be.
        frequencies_mhz: uint16[n], stage by stage in execution order; 0 for constant-time instructions.
        clock_changes: clock changes in one iteration of a steady run, over all stages. The change from the last
            instruction to the first of the next iteration counts.
        expectation: what is expected of the plan on real GPUs; None: it was not rehearsed.
    """

    iteration_time_s: float
    energy_j: float
    energy_lower_bound_j: float
    status: Status
    frequencies_mhz: Frequencies
    clock_changes: int
    expectation: Expectation | None = None

    @property
    def gap(self) -> float:
        """Certified distance from the optimum: energy divided by bound, minus one."""
        return self.energy_j / self.energy_lower_bound_j - 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Rehearsed:
    """What a frontier's plans are expected to do on real GPUs, see `perseus_solver.rehearsal`.

    The frontier's ``time_s`` is then the iteration time kept with ``confidence``, and its ``energy_j`` the expected
    energy.

    Attributes:
        confidence: share of the iterations that take no longer than ``time_s``.
        grains: one for each point.
        p50_s: float[points], median iteration time, seconds.
        ideal_time_s, ideal_energy_j: float[points], what the plan would take if every clock were in effect at once.
        below_share, above_share: float[points], shares of the computing time below and above the planned clock.
    """

    confidence: float
    grains: tuple[Grain, ...]
    p50_s: Floats
    ideal_time_s: Floats
    ideal_energy_j: Floats
    below_share: Floats
    above_share: Floats

    def __getitem__(self, index: int) -> Expectation:
        figures = {name: float(getattr(self, name)[index]) for name in _REHEARSED}
        return Expectation(grain=self.grains[index], confidence=self.confidence, **figures)


MAX_CELLS = 1 << 26
"""Clocks in one frontier: 64 stages of 3,072 instructions at 300 points fit."""
_MAX_HEAD = 8 << 20
"""Bytes of all that is not clocks."""
_MAX_LZMA = 64 << 20
"""Bytes that the decompressor itself may take."""
_MAGIC = b"PRSFRNT"
_VERSION = 2
_READ = (1, 2)
"""Version 1 had no rehearsal; it is read as a frontier without one."""
_STATUSES = tuple(Status)
_GRAINS = tuple(Grain)
_REHEARSED = ("p50_s", "ideal_time_s", "ideal_energy_j", "below_share", "above_share")


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Plans from T_min to T*, sorted by time, none dominated by another.

    The first plan is the fastest, the last takes the least effective energy. ``len``, indexing and iteration give the
    plans as `Point`.

    Attributes:
        time_s: float[points], increasing, seconds.
        energy_j, energy_lower_bound_j: float[points], joules of an iteration and the proven bound on it.
        statuses: one for each point.
        frequencies_mhz: uint16[points, n], instructions stage by stage, in execution order.
        stage_offset: int32[stages + 1]; stage s owns columns ``stage_offset[s] … stage_offset[s + 1] − 1``.
        clock_changes: int[points], see `Point`.
        blocking_power_w: power of one waiting GPU, watts, as in the problem solved.
        rehearsed: what the plans are expected to do on real GPUs; None: times and energies are those of clocks that
            change at once.
    """

    time_s: Floats
    energy_j: Floats
    energy_lower_bound_j: Floats
    statuses: tuple[Status, ...]
    frequencies_mhz: Frequencies
    stage_offset: Ints
    clock_changes: Ints
    blocking_power_w: float
    rehearsed: Rehearsed | None = None

    def __len__(self) -> int:
        return len(self.time_s)

    def __getitem__(self, index: int) -> Point:
        return Point(
            iteration_time_s=float(self.time_s[index]),
            energy_j=float(self.energy_j[index]),
            energy_lower_bound_j=float(self.energy_lower_bound_j[index]),
            status=self.statuses[index],
            frequencies_mhz=self.frequencies_mhz[index],
            clock_changes=int(self.clock_changes[index]),
            expectation=self.rehearsed[index] if self.rehearsed else None,
        )

    def __iter__(self) -> Iterator[Point]:
        return (self[i] for i in range(len(self)))

    @property
    def t_min_s(self) -> float:
        """Iteration time of the fastest plan, seconds."""
        return float(self.time_s[0])

    @property
    def t_star_s(self) -> float:
        """Iteration time beyond which slower plans save no energy, seconds."""
        return float(self.time_s[-1])

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_offset) - 1

    @property
    def gap(self) -> Floats:
        """Certified gap of every point, a share."""
        gap: Floats = self.energy_j / self.energy_lower_bound_j - 1.0
        return gap

    @property
    def effective_energy_j(self) -> Floats:
        """Σ (e − P_blk·t) of every point, joules, up to the constant of the fixed overhead.

        It never rises along the frontier.
        """
        effective: Floats = self.energy_j - self.blocking_power_w * self.stages * self.time_s
        return effective

    @property
    def least_energy(self) -> int:
        """Index of the point of least iteration energy.

        It is before T*: from there on, waiting takes more energy than slower clocks save.
        """
        return int(np.argmin(self.energy_j))

    def lookup(self, time_s: float) -> int:
        """Return the index of the slowest point not slower than a time, or of the nearest end.

        For a pipeline that waits for a straggler with iteration time T′, that is the point at min(T*, T′).

        Args:
            time_s: seconds.
        """
        return max(int(self.time_s.searchsorted(latest_s(time_s), side="right")) - 1, 0)

    def to_bytes(self) -> bytes:
        """Return the frontier as versioned, compressed bytes.

        Neighbouring plans differ little, so differences are stored.
        """
        clocks, coded = np.unique(self.frequencies_mhz, return_inverse=True)
        steps = np.diff(coded.reshape(self.frequencies_mhz.shape).astype("<u2"), axis=0, prepend=np.uint16(0))
        header: dict[str, Any] = {
            "points": len(self),
            "instructions": self.frequencies_mhz.shape[1],
            "stage_offset": self.stage_offset.tolist(),
            "clocks_mhz": clocks.tolist(),
            "statuses": [_STATUSES.index(s) for s in self.statuses],
            "clock_changes": self.clock_changes.tolist(),
            "blocking_power_w": self.blocking_power_w,
        }
        rows = [self.time_s, self.energy_j, self.energy_lower_bound_j]
        if self.rehearsed:
            header["confidence"] = self.rehearsed.confidence
            header["grains"] = [_GRAINS.index(grain) for grain in self.rehearsed.grains]
            rows += [getattr(self.rehearsed, name) for name in _REHEARSED]
        head = json.dumps(header, separators=(",", ":")).encode()
        numbers = np.stack(rows).astype("<f8").tobytes()
        body = len(head).to_bytes(4, "little") + head + numbers + steps.tobytes()
        return _MAGIC + bytes([_VERSION]) + lzma.compress(body, preset=1)

    @classmethod
    def from_bytes(cls, data: bytes, *, max_cells: int = MAX_CELLS) -> Frontier:
        """Read what `to_bytes` wrote. Memory is bounded whatever the bytes are.

        Args:
            data: the bytes.
            max_cells: largest number of clocks, plans times instructions.

        Raises:
            InvalidFrontier: not a frontier, another version, or damaged.
        """
        if not data.startswith(_MAGIC) or len(data) <= len(_MAGIC):
            raise InvalidFrontier("frontier: these bytes are not a frontier")
        version = data[len(_MAGIC)]
        if version not in _READ:
            raise InvalidFrontier(
                f"frontier: version {version} was written by another release; this one reads {_READ[0]} to {_READ[-1]}"
            )
        try:
            body = _unpacked(data[len(_MAGIC) + 1 :], 2 * min(max_cells, MAX_CELLS) + _MAX_HEAD)
            size = int.from_bytes(body[:4], "little")
            header = json.loads(body[4 : 4 + size])
            points, n = int(header["points"]), int(header["instructions"])
            rows = 3 + (len(_REHEARSED) if "confidence" in header else 0)
            numbers = np.frombuffer(body, "<f8", rows * points, 4 + size).reshape(rows, points).astype(np.float64)
            steps = np.frombuffer(body, "<u2", points * n, 4 + size + numbers.nbytes).reshape(points, n)
            clocks = np.array(header["clocks_mhz"], dtype=np.uint16)
            return cls(
                time_s=numbers[0],
                energy_j=numbers[1],
                energy_lower_bound_j=numbers[2],
                statuses=tuple(_STATUSES[s] for s in header["statuses"]),
                frequencies_mhz=clocks[np.cumsum(steps, axis=0, dtype=np.uint16)],
                stage_offset=np.array(header["stage_offset"], dtype=np.int32),
                clock_changes=np.array(header["clock_changes"], dtype=np.int32),
                blocking_power_w=float(header["blocking_power_w"]),
                rehearsed=_rehearsed(header, numbers[3:]) if rows > 3 else None,
            )
        except (lzma.LZMAError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidFrontier(f"frontier: damaged ({error})") from error


def _rehearsed(header: dict[str, Any], numbers: Floats) -> Rehearsed:
    grains = tuple(_GRAINS[grain] for grain in header["grains"])
    if len(grains) != numbers.shape[1]:
        raise ValueError("grains")
    return Rehearsed(
        confidence=float(header["confidence"]), grains=grains, **dict(zip(_REHEARSED, numbers, strict=True))
    )


def _unpacked(data: bytes, most: int) -> bytes:
    """Decompress at most so many bytes: one more is enough to see a bomb, and all that is ever unpacked of it."""
    unpacker = lzma.LZMADecompressor(memlimit=_MAX_LZMA)
    body = unpacker.decompress(data, most + 1)
    if len(body) > most or not unpacker.eof:
        raise InvalidFrontier(f"frontier: unpacks to more than {most} bytes, or is cut off")
    return body
