"""Online profiling: which clock to measure next, when the readings suffice, and the profile that follows from them.

A ``Sweep`` holds one ``Reading`` for each clock measured so far, from the highest clock down, and then of the clocks
around the best, where an iteration is one instruction. Its time is the training time of its iterations; it reads no
clock.

Per stage s at clock f, with means over the iterations measured: E is the energy and T the time of an iteration, t_k and
ê_k time and energy of instruction kind k, n_k their number; the stage computes C = Σ n_k·t_k and waits W = T − C.
  blocking power    P = Σ Q_E / Σ Q over all stages and clocks: time and energy of waits, as far as the counter moved
                    within them; if that is too little, Σ (E − Σ n_k·ê_k) / Σ W; but at most the least E / T anywhere
  energy of k       e_k = ê_k · (E − P·W) / Σ n_k·ê_k
The GPU's energy counter moves seldom and late, so ê_k mixes an instruction with its neighbours; E and Q_E do not. What
is mixed into waits makes them seem dearer than they are: without Q, P is an upper bound. The last line makes
Σ n_k·e_k + P·W = E hold exactly, and the bound on P keeps every e_k above zero.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Final

from perseus_proto.units import energy_mj, j_from_mj, mean_power_w, s_from_us

Key = tuple[int, str, int]
"""Stage, kind of instruction, chunk."""

RISES: Final = 5
"""Clocks in a row at which an iteration takes more energy than at the one before: lower ones save nothing (SOSP'24)."""
QUIET_US: Final = 2_000_000
"""Time of waits within which the counter moved, over all GPUs: twenty moves of the slowest counter, a few per cent of
error."""
FEWEST: Final = 2
"""Fewest clocks of a profile: with one there is nothing to choose."""
MOST_FINER: Final = 8
"""Clocks that are measured around the best one."""
DIGEST_PREFIX: Final = "sweep-"
_FORMAT: Final = 1


@dataclass(frozen=True)
class Mean:
    """One kind of instruction of one stage at one clock: number in an iteration, mean time and energy of one."""

    count: int
    time_us: float
    energy_mj: float


@dataclass(frozen=True)
class StageReading:
    """One stage at one clock: an iteration's time and energy, and what its instructions took."""

    time_us: float
    energy_mj: float
    means: Mapping[tuple[str, int], Mean]
    """By kind and chunk."""
    quiet_us: int = 0
    """Q of the module's docstring: of all iterations and GPUs together; and its energy."""
    quiet_mj: int = 0
    reached_mhz: int | None = None
    """SM clock that was really reached; above the power limit's plateau it is lower than the requested one. None: the
    agents do not read it."""

    @property
    def computing_us(self) -> float:
        """C of the module's docstring."""
        return sum(mean.count * mean.time_us for mean in self.means.values())

    @property
    def computing_mj(self) -> float:
        """Σ n_k·ê_k of the module's docstring."""
        return sum(mean.count * mean.energy_mj for mean in self.means.values())


@dataclass(frozen=True)
class Reading:
    """What was measured at one clock."""

    clock_mhz: int
    iteration_time_us: float
    stages: tuple[StageReading, ...]

    @property
    def energy_mj(self) -> float:
        """Energy of an iteration of one GPU of every stage."""
        return sum(stage.energy_mj for stage in self.stages)


@dataclass(frozen=True)
class Recipe:
    """How to measure.

    Attributes:
        iterations: to be measured at each clock, after the first, which is left out.
        most_slowdown: an iteration may take longer by this share than at the highest clock.
        most_us: training time that a sweep may take in all.
    """

    iterations: int
    most_slowdown: float
    most_us: int


@dataclass(frozen=True)
class Sweep:
    """A sweep so far.

    Attributes:
        clocks_mhz: to be measured, in this order; the points of its plan set.
        schedule: digest of what every stage executes.
        readings: of the first clocks.
        spent_us: training time of all iterations under the sweep.
        replaces: digest of the profile that no longer fits; empty: there was none.
        chosen_mhz: the clocks that it began with, where those around the best have been added; empty: they have not.
    """

    clocks_mhz: tuple[int, ...]
    schedule: str
    recipe: Recipe
    readings: tuple[Reading, ...] = ()
    spent_us: int = 0
    replaces: str = ""
    chosen_mhz: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of its plan set: a restarted operator pushes the same plan set as the one before."""
        parts = (self.schedule, *self.clocks_mhz)
        return DIGEST_PREFIX + hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    @property
    def point(self) -> int:
        """The point to run: the clock being measured; the highest clock when the sweep is finished."""
        return 0 if self.finished else len(self.readings)

    @property
    def finished(self) -> str:
        """Why no further clock is measured; empty: there is one."""
        readings, clocks = self.readings, self.clocks_mhz
        if len(readings) == len(clocks):
            return "all clocks are measured"
        if self.spent_us >= self.recipe.most_us:
            return f"the limit of {s_from_us(self.recipe.most_us):g} s of training is reached"
        if self.chosen_mhz:
            return ""
        energies = [reading.energy_mj for reading in readings[-RISES - 1 :]]
        if len(energies) > RISES and all(later > earlier for earlier, later in pairwise(energies)):
            return f"the energy of an iteration has risen {RISES} times in a row"
        if readings and self._slowest_next_us() > readings[0].iteration_time_us * (1 + self.recipe.most_slowdown):
            return f"a lower clock could slow iterations by more than {self.recipe.most_slowdown:.0%}"
        return ""

    @property
    def failed(self) -> bool:
        """Whether the sweep is finished with too few clocks."""
        return bool(self.finished) and len(self.readings) < FEWEST

    def _slowest_next_us(self) -> float:
        """Upper bound of an iteration at the next clock: no work slows down by more than the clock falls."""
        last = self.readings[-1]
        return last.iteration_time_us * last.clock_mhz / self.clocks_mhz[len(self.readings)]

    def add(self, reading: Reading) -> Sweep:
        """The sweep with one more reading."""
        if reading.clock_mhz != self.clocks_mhz[len(self.readings)]:
            raise ValueError(f"{reading.clock_mhz} MHz is not the next clock of the sweep")
        return replace(self, readings=(*self.readings, reading))

    def refined(self, finer_mhz: tuple[int, ...]) -> Sweep:
        """The sweep with more clocks to be measured, instead of those that it has left out."""
        measured = tuple(reading.clock_mhz for reading in self.readings)
        return replace(self, clocks_mhz=measured + finer_mhz, chosen_mhz=self.clocks_mhz)

    def fits(self, other: Sweep) -> bool:
        """Whether readings of this sweep are valid for the other, which has just been chosen."""
        began = self.chosen_mhz or self.clocks_mhz
        return (began, self.schedule, self.replaces) == (other.clocks_mhz, other.schedule, other.replaces)


def common_clocks(supported: Iterable[Iterable[int]]) -> tuple[int, ...]:
    """The clocks that all GPUs support, the highest first."""
    sets = [set(clocks) for clocks in supported]
    return tuple(sorted(set.intersection(*sets), reverse=True)) if sets else ()


def choose_clocks(common_mhz: Sequence[int], most: int) -> tuple[int, ...]:
    """Choose the clocks of a sweep: equal steps from the highest clock down.

    Args:
        common_mhz: the clocks that all GPUs support, the highest first.
        most: largest number of clocks.
    """
    return tuple(common_mhz[:: max(1, math.ceil(len(common_mhz) / most))])


def finer_clocks(common_mhz: Sequence[int], measured_mhz: Iterable[int], best_mhz: int) -> tuple[int, ...]:
    """Choose the clocks around the best one, up to the nearest that are measured, the highest first.

    Args:
        common_mhz: the clocks that all GPUs support, the highest first.
        measured_mhz: of the readings.
        best_mhz: one of them.
    """
    measured = sorted(measured_mhz)
    place = measured.index(best_mhz)
    low, high = measured[max(place - 1, 0)], measured[min(place + 1, len(measured) - 1)]
    return choose_clocks([clock for clock in common_mhz if low < clock < high and clock != best_mhz], MOST_FINER)


@dataclass(frozen=True)
class BlockingPower:
    """Mean power of a GPU while it waits. ``measured``: within waits; otherwise it is an upper bound."""

    watts: float
    measured: bool

    def __str__(self) -> str:
        if self.measured:
            return f"A GPU that waits draws {self.watts:.1f} W."
        return f"A GPU that waits draws at most {self.watts:.1f} W; waits were too short to measure it exactly."


def blocking_power(readings: Iterable[Reading]) -> BlockingPower:
    """P of the module's docstring."""
    stages = [stage for reading in readings for stage in reading.stages]
    bound_w = min(mean_power_w(stage.energy_mj, stage.time_us) for stage in stages)
    quiet_us = sum(stage.quiet_us for stage in stages)
    if quiet_us >= QUIET_US:
        quiet_w = mean_power_w(sum(stage.quiet_mj for stage in stages), quiet_us)
        return BlockingPower(min(quiet_w, bound_w), measured=True)
    waiting_us = sum(max(0.0, stage.time_us - stage.computing_us) for stage in stages)
    waiting_mj = sum(max(0.0, stage.energy_mj - stage.computing_mj) for stage in stages)
    waiting_w = mean_power_w(waiting_mj, waiting_us) if waiting_us > 0 else bound_w
    return BlockingPower(min(waiting_w, bound_w), measured=False)


def csv_of(sweep: Sweep) -> str:
    """The profile CSV of a finished sweep.

    It has a ``chunk`` column where stages hold several chunks, and a ``reached`` column where every clock that was
    really reached is known.
    """
    power_w = blocking_power(sweep.readings).watts
    rows: dict[Key, list[str]] = {}
    readings = sorted(sweep.readings, key=lambda reading: -reading.clock_mhz)
    for reading in readings:
        for stage, own in enumerate(reading.stages):
            waiting_mj = energy_mj(power_w, max(0.0, own.time_us - own.computing_us))
            share = (own.energy_mj - waiting_mj) / own.computing_mj
            for (kind, chunk), mean in own.means.items():
                row = f"{reading.clock_mhz},{s_from_us(mean.time_us):.6f},{j_from_mj(share * mean.energy_mj):.6f}"
                rows.setdefault((stage, kind, chunk), []).append(row)
    chunked = any(chunk for _, _, chunk in rows)
    reached = all(own.reached_mhz for reading in readings for own in reading.stages)
    lines = [
        "stage,instruction,frequency,time,energy" + (",chunk" if chunked else "") + (",reached" if reached else "")
    ]
    for (stage, kind, chunk), own_rows in sorted(rows.items()):
        clocks = [reading.stages[stage].reached_mhz for reading in readings]
        lines += [
            f"{stage},{kind},{row}" + (f",{chunk}" if chunked else "") + (f",{clock}" if reached else "")
            for row, clock in zip(own_rows, clocks, strict=True)
        ]
    return "\n".join(lines) + "\n"


def to_json(sweep: Sweep) -> str:
    """A sweep as JSON, so that a restarted operator can go on with it."""
    readings = [
        {
            "clock_mhz": reading.clock_mhz,
            "iteration_time_us": reading.iteration_time_us,
            "stages": [
                {
                    "time_us": stage.time_us,
                    "energy_mj": stage.energy_mj,
                    "quiet_us": stage.quiet_us,
                    "quiet_mj": stage.quiet_mj,
                    "reached_mhz": stage.reached_mhz,
                    "means": [[*key, mean.count, mean.time_us, mean.energy_mj] for key, mean in stage.means.items()],
                }
                for stage in reading.stages
            ],
        }
        for reading in sweep.readings
    ]
    document = {**asdict(replace(sweep, readings=())), "readings": readings, "format": _FORMAT}
    return json.dumps(document, separators=(",", ":"))


def from_json(text: str) -> Sweep | None:
    """Parse what ``to_json`` wrote; None: another release's format, or damaged, so it must be measured again."""
    try:
        raw: Any = json.loads(text)
        if raw.pop("format") != _FORMAT:
            return None
        readings = tuple(
            Reading(
                reading["clock_mhz"],
                reading["iteration_time_us"],
                tuple(
                    StageReading(
                        stage["time_us"],
                        stage["energy_mj"],
                        {(kind, chunk): Mean(*mean) for kind, chunk, *mean in stage["means"]},
                        stage.get("quiet_us", 0),
                        stage.get("quiet_mj", 0),
                        stage.get("reached_mhz"),
                    )
                    for stage in reading["stages"]
                ),
            )
            for reading in raw["readings"]
        )
        changes = {
            "clocks_mhz": tuple(raw["clocks_mhz"]),
            "chosen_mhz": tuple(raw.get("chosen_mhz", ())),
            "recipe": Recipe(**raw["recipe"]),
            "readings": readings,
        }
        sweep = Sweep(**{**raw, **changes})
        measured = tuple(reading.clock_mhz for reading in readings)
        return sweep if measured == sweep.clocks_mhz[: len(measured)] else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
