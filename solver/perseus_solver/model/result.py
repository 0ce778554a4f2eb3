"""The whole frontier of plans, and the bytes in which it is stored."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from perseus_core.grain import Grain
from perseus_solver.errors import Infeasible, SolverError
from perseus_solver.kinds import Floats, Ints, latest_s
from perseus_solver.model.point import (
    DEFAULT_GAP,
    OPTIMAL_GAP,
    Expectation,
    Frequencies,
    Point,
    Status,
    status_of,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "DEFAULT_GAP",
    "MAX_CELLS",
    "OPTIMAL_GAP",
    "Expectation",
    "Frequencies",
    "Frontier",
    "InvalidFrontier",
    "Point",
    "Rehearsed",
    "Status",
    "status_of",
]


class InvalidFrontier(SolverError):
    """The bytes are not a frontier, or of a version that this program does not read."""


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
_REHEARSED = ("p50_s", "ideal_time_s", "ideal_energy_j", "below_share", "above_share")


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

    def select(self, points: Sequence[int]) -> Rehearsed:
        """Return what is expected of some of the points."""
        figures = {name: getattr(self, name)[points] for name in _REHEARSED}
        return Rehearsed(confidence=self.confidence, grains=tuple(self.grains[k] for k in points), **figures)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Frontier:
    """Plans from T_min to T*, sorted by time, none dominated by another.

    The first plan is the fastest. Up to `least_energy` each plan is the best for a deadline. What follows is the
    *straggler part*, only for pipelines that wait for a straggler, where waiting takes energy anyway; its last plan
    takes the least effective energy. ``len``, indexing and iteration give the plans as `Point`; a slice is a frontier.

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

    @overload
    def __getitem__(self, index: int) -> Point: ...

    @overload
    def __getitem__(self, index: slice) -> Frontier: ...

    def __getitem__(self, index: int | slice) -> Point | Frontier:
        if isinstance(index, slice):
            if index.step is not None and index.step < 1:  # plans stay sorted by time
                raise ValueError(f"the step of a slice of a frontier must be positive, not {index.step}")
            return self.select(range(len(self))[index])
        return Point(
            iteration_time_s=float(self.time_s[index]),
            energy_j=float(self.energy_j[index]),
            energy_lower_bound_j=float(self.energy_lower_bound_j[index]),
            status=self.statuses[index],
            frequencies_mhz=self.frequencies_mhz[index],
            clock_changes=int(self.clock_changes[index]),
            expectation=self.rehearsed[index] if self.rehearsed else None,
        )

    def select(self, points: Sequence[int]) -> Frontier:
        """Return some of the plans.

        Args:
            points: their indices, ascending.
        """
        points = list(points)
        return replace(
            self,
            time_s=self.time_s[points],
            energy_j=self.energy_j[points],
            energy_lower_bound_j=self.energy_lower_bound_j[points],
            statuses=tuple(self.statuses[k] for k in points),
            frequencies_mhz=self.frequencies_mhz[points],
            clock_changes=self.clock_changes[points],
            rehearsed=self.rehearsed.select(points) if self.rehearsed else None,
        )

    def __repr__(self) -> str:
        if not len(self):
            return "Frontier(no plans)"
        least = self.least_energy
        return (
            f"Frontier({len(self)} plans of {self.stages} stages: {self.t_min_s:.6g} s, {self.energy_j[0]:.6g} J to "
            f"{self.time_s[least]:.6g} s, {self.energy_j[least]:.6g} J; straggler part {len(self) - least - 1} plans "
            f"to {self.t_star_s:.6g} s; gap up to {100 * self.gap.max():.3g} %)"
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

    @property
    def straggler_part(self) -> Frontier:
        """The plans after least energy, only for pipelines that wait for a straggler; may be empty."""
        return self[self.least_energy + 1 :]

    def at(self, deadline_s: float) -> Point:
        """Return the plan of least iteration energy that ends by a deadline.

        Args:
            deadline_s: longest iteration time allowed, seconds.

        Raises:
            Infeasible: no plan is this fast.
        """
        if not len(self) or latest_s(deadline_s) < self.t_min_s:
            raise Infeasible(deadline_s, self.t_min_s if len(self) else float("inf"))
        return self[int(np.argmin(self.energy_j[: self.lookup(deadline_s) + 1]))]

    def lookup(self, time_s: float) -> int:
        """Return the index of the slowest point not slower than a time, or of the nearest end.

        For a pipeline that waits for a straggler with iteration time T′, that is the point at min(T*, T′).

        Args:
            time_s: seconds.
        """
        return max(int(self.time_s.searchsorted(latest_s(time_s), side="right")) - 1, 0)

    def to_dataframe(self) -> pd.DataFrame:
        """Return the figures of the plans as a table, one row each, and whether it is in the straggler part.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas as pd

        columns: dict[str, Any] = {
            "iteration_time_s": self.time_s,
            "energy_j": self.energy_j,
            "energy_lower_bound_j": self.energy_lower_bound_j,
            "gap": self.gap,
            "status": [str(status) for status in self.statuses],
            "clock_changes": self.clock_changes,
            "straggler_part": np.arange(len(self)) > (self.least_energy if len(self) else 0),
        }
        if self.rehearsed:
            columns["grain"] = [grain.word for grain in self.rehearsed.grains]
            columns |= {name: getattr(self.rehearsed, name) for name in _REHEARSED}
        return pd.DataFrame(columns)

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
            header["grains"] = [int(grain) for grain in self.rehearsed.grains]
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
    grains = tuple(Grain(grain) for grain in header["grains"])
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
