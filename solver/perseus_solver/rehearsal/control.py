"""When an agent asks for which clock: the rule of design note 0019, computed for whole plans at once.

At any moment the agent asks for the highest planned clock among the instructions that may run when a change asked for
now is in effect: those that overlap [now + L − s, now + L + s]. So an instruction wants its clock from L + s before it
begins until L − s before it ends, in the agent's timetable, and every change of the highest wanted clock is a request.
A lower clock that would be wanted for less than two calls is not asked for.

Between two marks the timetable advances with the time, as far as the next mark. So a request is placed by the last mark
before it and by the time from there. Only marks of begins count here: what the end of an instruction says about the
next begin is known when that comes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.rehearsal.calls import Start
from perseus_solver.rehearsal.execution import Begun

NO_CLOCK = -1
"""Of an instruction that sets no clock."""


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What an agent expects of iterations, and how it asks.

    Attributes:
        begin_s, end_s: float[n, plans], when instructions run, from the begin of the iteration.
        period_s: float[plans], time from one iteration to the next.
        clock: int[n, plans], planned clocks; `NO_CLOCK` where an instruction sets none.
        stage_offset: the instructions of each stage.
        ahead_s: how much before its effect a change is asked for, L.
        margin_s: float[n, plans], how much before that the agent raises, and after that it lowers, s.
        worth_s: a lower clock that is wanted for less is not asked for.
    """

    begin_s: Floats
    end_s: Floats
    period_s: Floats
    clock: Index
    stage_offset: list[int]
    ahead_s: float
    margin_s: Floats
    worth_s: float

    def changes(self, stage: int, plan: int, since_s: float, until_s: float) -> tuple[Floats, Index]:
        """Return when the highest wanted clock of a stage changes, and to what, in a span that contains a change.

        Times count from the stage's first begin. The first clock of the span counts as a change.
        """
        own = slice(*self.stage_offset[stage : stage + 2]), plan
        begin_s, period_s = self.begin_s[own], float(self.period_s[plan])
        sets = np.flatnonzero(self.clock[own] != NO_CLOCK)
        clocks, margin_s = self.clock[own][sets], self.margin_s[own][sets]
        if len(sets) == 0 or (clocks == clocks[0]).all():
            return np.full(len(clocks[:1]), begin_s[0] + since_s), clocks[:1]
        # Margins differ little from one instruction to the next, but intervals must begin, and end, in order.
        starts = np.minimum.accumulate((begin_s[sets] - self.ahead_s - margin_s)[::-1])[::-1]
        stops = np.maximum.accumulate(self.end_s[own][sets] - self.ahead_s + margin_s)
        low_s, high_s = begin_s[0] + since_s, begin_s[0] + until_s
        first, last = math.floor((low_s - stops[-1]) / period_s) - 1, math.ceil((high_s - starts[0]) / period_s)
        shift = (np.arange(first, last + 1) * period_s)[:, None]
        highest = _RangeMaximum(np.tile(clocks, len(shift)))
        starts, stops = (shift + starts).ravel(), (shift + stops).ravel()
        at_s = np.unique(np.concatenate([starts, stops]))
        at_s = at_s[(at_s >= low_s) & (at_s < high_s)]
        low, high = stops.searchsorted(at_s, side="right"), starts.searchsorted(at_s, side="right")
        some = high > low  # where no instruction may run, the clock stays as it is
        return _without_dips(*_changes_of(at_s[some], highest(low[some], high[some])), self.worth_s)

    def start(self) -> Start:
        """Return the clocks in effect and on their way when an iteration begins that follows others like it."""
        stages, plans = len(self.stage_offset) - 1, len(self.period_s)
        before = [
            self.changes(stage, plan, -self.ahead_s - float(self.period_s[plan]), 0.0)
            for stage in range(stages)
            for plan in range(plans)
        ]
        longest = max(len(at_s) for at_s, _ in before)
        effect_s = np.full((longest, len(before)), np.inf)
        target = np.zeros((longest, len(before)), dtype=np.intp)
        for column, (at_s, wanted) in enumerate(before):
            effect_s[: len(at_s), column], target[: len(at_s), column] = at_s + self.ahead_s, wanted
        shape = stages, plans
        return Start(target[0].reshape(shape), effect_s.reshape(-1, *shape), target.reshape(-1, *shape))


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """The requests of one iteration, in slots: each instruction has a few, by time.

    A request of an instruction is due ``after_s`` its begin; or, if it is of the wait before it, ``after_s`` the begin
    of the instruction before it on its stage, and at the latest at its own begin.

    Attributes:
        after_s: float[slots, n, plans], seconds; infinite where there is no request.
        clock: int[slots, n, plans], the clock that is asked for.
        in_wait: bool[slots, n, plans], of the wait before the instruction.
        slots: int[n], how many slots of an instruction are used in any plan.
        corrected: marks correct the timetable; otherwise ``after_s`` counts from the begin of the iteration.
    """

    after_s: Floats
    clock: Index
    in_wait: np.ndarray
    slots: Index
    corrected: bool

    def due(self, slot: int, begun: Begun) -> tuple[Floats, Index, np.ndarray]:
        """Return when each request of a slot is made, for which clock, and where there is one."""
        after_s = self.after_s[slot, begun.rows][:, :, None]
        asked = self.clock[slot, begun.rows][:, :, None], np.isfinite(after_s)
        if not self.corrected:
            return np.broadcast_to(after_s, begun.begin_s.shape), *asked
        in_wait = self.in_wait[slot, begun.rows][:, :, None]
        due_s = np.where(in_wait, np.minimum(begun.before_s + after_s, begun.begin_s), begun.begin_s + after_s)
        return due_s, *asked


def timetable(expected: Expected, *, corrected: bool) -> Timetable:
    """Return what the agents ask for in an iteration.

    Args:
        expected: what they expect of it.
        corrected: marks correct the timetable.
    """
    n, plans = expected.begin_s.shape
    found = []
    for stage, (low, high) in enumerate(itertools.pairwise(expected.stage_offset)):
        for plan in range(plans):
            begin_s, end_s = expected.begin_s[low:high, plan], expected.end_s[low:high, plan]
            period_s = float(expected.period_s[plan])
            at_s, wanted = expected.changes(stage, plan, 0.0, period_s)
            if len(wanted) and wanted[0] == wanted[-1]:  # it is still the last clock of the iteration before
                at_s, wanted = at_s[1:], wanted[1:]
            mark = begin_s.searchsorted(at_s, side="right") - 1
            in_wait = at_s >= end_s[mark]
            # What is asked for in the wait after the last instruction comes before the first of the next iteration.
            following = (mark + in_wait) == high - low
            origin_s = begin_s[mark] if corrected else np.where(following, period_s, 0.0)
            owner = low + np.where(following, 0, mark + in_wait)
            found.append((owner, np.full(len(owner), plan), at_s - origin_s, wanted, in_wait))
    return _packed(found, n, plans, corrected=corrected)


def _changes_of(at_s: Floats, wanted: Index) -> tuple[Floats, Index]:
    """Leave out what changes nothing; the first clock counts as a change."""
    changed = np.append(True, wanted[1:] != wanted[:-1])[: len(wanted)]
    return at_s[changed], wanted[changed]


def _without_dips(at_s: Floats, wanted: Index, worth_s: float) -> tuple[Floats, Index]:
    """Keep the clock where a lower one would be wanted for a shorter time than it is worth; the shortest dip first, for
    what is left of a deeper one may last long enough.
    """
    while len(wanted) > 2:
        lasts_s, low = np.diff(at_s)[1:], wanted[1:-1]
        beside = np.minimum(wanted[:-2], wanted[2:])
        lasts_s = np.where(low < beside, lasts_s, np.inf)
        shortest = int(lasts_s.argmin())
        if lasts_s[shortest] >= worth_s:
            break
        wanted = wanted.copy()
        wanted[shortest + 1] = beside[shortest]
        at_s, wanted = _changes_of(at_s, wanted)
    return at_s, wanted


class _RangeMaximum:
    """The largest value of any range, from maxima of ranges whose lengths are powers of two."""

    def __init__(self, values: Index) -> None:
        self._levels = [values]
        while 2 ** len(self._levels) <= len(values):
            last, half = self._levels[-1], 2 ** (len(self._levels) - 1)
            self._levels.append(np.maximum(last[:-half], last[half:]))

    def __call__(self, low: Index, high: Index) -> Index:
        """Return the maxima of ``values[low:high]``; no range is empty."""
        out = np.empty(len(low), dtype=np.intp)
        level = np.frexp((high - low).astype(np.float64))[1] - 1
        for k in np.unique(level).tolist():
            at = np.flatnonzero(level == k)
            out[at] = np.maximum(self._levels[k][low[at]], self._levels[k][high[at] - 2**k])
        return out


def _packed(
    found: list[tuple[Index, Index, Floats, Index, np.ndarray]], n: int, plans: int, *, corrected: bool
) -> Timetable:
    """Put the requests of all stages and plans into slots."""
    owner, plan, after_s, clock, in_wait = (np.concatenate([part[k] for part in found]) for k in range(5))
    slots = np.zeros(n, dtype=np.intp)
    # Within an instruction first the requests of the wait before it, then its own, by time.
    order = np.lexsort((after_s, ~in_wait, plan, owner))
    owner, plan, after_s, clock, in_wait = (part[order] for part in (owner, plan, after_s, clock, in_wait))
    key = owner * plans + plan
    begins = np.flatnonzero(np.append(True, key[1:] != key[:-1])[: len(key)])
    slot = np.arange(len(key)) - np.repeat(begins, np.diff(np.append(begins, len(key))))
    np.maximum.at(slots, owner, slot + 1)
    depth = int(slots.max())
    out = Timetable(
        after_s=np.full((depth, n, plans), np.inf),
        clock=np.zeros((depth, n, plans), dtype=np.intp),
        in_wait=np.zeros((depth, n, plans), dtype=np.bool_),
        slots=slots,
        corrected=corrected,
    )
    at = slot, owner, plan
    out.after_s[at], out.clock[at], out.in_wait[at] = after_s, clock, in_wait
    return out
