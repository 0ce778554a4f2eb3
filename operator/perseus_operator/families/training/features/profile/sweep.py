"""Online profiling: which clock to measure next, when the readings suffice, and the profile that follows from them.

A ``Sweep`` holds one ``Reading`` for each clock measured so far, from the highest clock down, and then of the clocks
around the best, where an iteration is one instruction. Where steps vary with their data, it goes over all of its clocks
again, up and down, so that what drifts meanwhile falls on all clocks alike. Its time is the training time of its
iterations; it reads no clock.

Per stage s at clock f, over the iterations measured: T is the usual time of an iteration and E its energy, t_k and ê_k
time and energy of instruction kind k, n_k their number; the stage computes C = Σ n_k·t_k and waits W = T − C. Times are
medians, and energies the mean power times the usual time.
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

from perseus_core.units import energy_mj, j_from_mj, mean_power_w, s_from_us
from perseus_operator.families.training.features.profile.reading import Certainty, Mean, Reading, StageReading, levelled

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
_MOST: Final = 1e18
"""Larger than any number of a sweep."""


@dataclass(frozen=True)
class Recipe:
    """How to measure.

    Attributes:
        iterations: to be measured at each clock in a round, after the first, which is left out.
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
        readings: of the first clocks, each of all of its rounds.
        spent_us: training time of all iterations under the sweep.
        replaces: digest of the profile that no longer fits; empty: there was none.
        chosen_mhz: the clocks that it began with, where those around the best have been added; empty: they have not.
        repeated: clocks measured again, in all rounds after the first.
        ended: why the first round ended, where there were more; else empty.
    """

    clocks_mhz: tuple[int, ...]
    schedule: str
    recipe: Recipe
    readings: tuple[Reading, ...] = ()
    spent_us: int = 0
    replaces: str = ""
    chosen_mhz: tuple[int, ...] = ()
    repeated: int = 0
    ended: str = ""

    @property
    def digest(self) -> str:
        """Digest of its plan set: a restarted operator pushes the same plan set as the one before."""
        parts = (self.schedule, *self.clocks_mhz)
        return DIGEST_PREFIX + hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()

    @property
    def point(self) -> int:
        """The point to run: the clock being measured; the highest clock when the sweep is finished."""
        return 0 if self.finished else self._next

    @property
    def _next(self) -> int:
        count = len(self.readings)
        if not self._round_ended:
            return count
        step = self.repeated % count
        return step if self.repeated // count % 2 else count - 1 - step

    @property
    def measured(self) -> int:
        """How many readings were made, in all rounds."""
        return len(self.readings) + self.repeated

    @property
    def round(self) -> int:
        """Which round is under way, from 1."""
        return 1 if not self._round_ended else 2 + self.repeated // len(self.readings)

    @property
    def certainty(self) -> Certainty:
        """How well its readings are known; there must be one."""
        return Certainty.of(self.readings, self.recipe.iterations)

    @property
    def finished(self) -> str:
        """Why no further clock is measured; empty: there is one."""
        why, count = self._round_ended, len(self.readings)
        both_ways = not self.repeated or self.repeated % (2 * count) == count
        if why and (count < FEWEST or (both_ways and self.certainty.enough)):
            return why
        if self.spent_us >= self.recipe.most_us:
            return f"the limit of {s_from_us(self.recipe.most_us):g} s of training is reached"
        return ""

    @property
    def _round_ended(self) -> str:
        """Why no clock is measured for the first time any more; empty: there is one."""
        readings, clocks = self.readings, self.clocks_mhz
        if self.ended:
            return self.ended
        if len(readings) == len(clocks):
            return "all clocks are measured"
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
        point = self._next
        if reading.clock_mhz != self.clocks_mhz[point]:
            raise ValueError(f"{reading.clock_mhz} MHz is not the next clock of the sweep")
        readings = self.readings
        if point == len(readings):
            return replace(self, readings=(*readings, reading))
        again = (*readings[:point], readings[point].merged(reading), *readings[point + 1 :])
        return replace(self, readings=again, repeated=self.repeated + 1, ended=self._round_ended)

    def refined(self, finer_mhz: tuple[int, ...]) -> Sweep:
        """The sweep with more clocks to be measured, instead of those that it has left out."""
        measured = tuple(reading.clock_mhz for reading in self.readings)
        return replace(self, clocks_mhz=measured + finer_mhz, chosen_mhz=self.clocks_mhz, repeated=0, ended="")

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
    rows: dict[Key, list[Row]] = {}
    levels = levelled(sweep.readings) if sweep.certainty.varies else sweep.readings
    readings = sorted(levels, key=lambda reading: -reading.clock_mhz)
    reached = all(part.reached_mhz for reading in readings for part in reading.stages)
    for reading in readings:
        for stage, part in enumerate(reading.stages):
            waiting_mj = energy_mj(power_w, max(0.0, part.time_us - part.computing_us))
            share = (part.energy_mj - waiting_mj) / part.computing_mj
            for (kind, chunk), mean in part.means.items():
                row = Row(
                    reading.clock_mhz, mean.time_us, share * mean.energy_mj, part.reached_mhz if reached else None
                )
                rows.setdefault((stage, kind, chunk), []).append(row)
    return csv_of_rows(rows)


@dataclass(frozen=True)
class Row:
    """One instruction at one clock; ``reached_mhz`` None: not known."""

    clock_mhz: int
    time_us: float
    energy_mj: float
    reached_mhz: int | None = None


def csv_of_rows(rows: Mapping[Key, Sequence[Row]]) -> str:
    """The profile CSV of instructions: a column ``chunk`` where there are several, ``reached`` where it is known."""
    chunked = any(chunk for _, _, chunk in rows)
    reached = all(row.reached_mhz is not None for of_instruction in rows.values() for row in of_instruction)
    lines = [
        "stage,instruction,frequency,time,energy" + (",chunk" if chunked else "") + (",reached" if reached else "")
    ]
    for (stage, kind, chunk), own_rows in sorted(rows.items()):
        lines += [
            f"{stage},{kind},{row.clock_mhz},{s_from_us(row.time_us):.6f},{j_from_mj(row.energy_mj):.6f}"
            + (f",{chunk}" if chunked else "")
            + (f",{row.reached_mhz}" if reached else "")
            for row in own_rows
        ]
    return "\n".join(lines) + "\n"


def to_json(sweep: Sweep) -> str:
    """A sweep as JSON, so that a restarted operator can go on with it."""
    readings = [
        {
            "clock_mhz": reading.clock_mhz,
            "iteration_time_us": reading.iteration_time_us,
            "scatter": [round(residual, 5) for residual in reading.scatter],
            "iterations": reading.iterations,
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
                tuple(reading.get("scatter", ())),
                reading.get("iterations", 1),
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
        return sweep if measured == sweep.clocks_mhz[: len(measured)] and _is_possible(sweep) else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _is_possible(sweep: Sweep) -> bool:
    """Whether a stored sweep has numbers that one can have."""
    stages = [stage for reading in sweep.readings for stage in reading.stages]
    means = [mean for stage in stages for mean in stage.means.values()]
    recipe = sweep.recipe
    above_zero: list[float] = [*sweep.clocks_mhz, *sweep.chosen_mhz, recipe.iterations, recipe.most_us]
    not_below: list[float] = [sweep.spent_us, sweep.repeated, recipe.most_slowdown]
    for reading in sweep.readings:
        above_zero += [reading.clock_mhz, reading.iteration_time_us, reading.iterations]
        not_below += reading.scatter
    for stage in stages:
        above_zero += [stage.time_us] if stage.reached_mhz is None else [stage.time_us, stage.reached_mhz]
        not_below += [stage.energy_mj, stage.quiet_us, stage.quiet_mj]
    for mean in means:
        above_zero += [mean.count, mean.time_us]
        not_below.append(mean.energy_mj)
    numbers = all(type(one) in (int, float) and 0 <= one < _MOST for one in (*above_zero, *not_below))
    return numbers and all(above_zero)
