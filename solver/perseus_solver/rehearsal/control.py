"""When an agent asks for which clock: the rule of design note 0019, computed for whole plans at once.

At any moment the agent asks for the highest planned clock among the instructions that may run when a change asked for
now is in effect: those that overlap [now + L − s, now + L + s]. So an instruction wants its clock from L + s before it
begins until L − s before it ends, in the agent's timetable, and every change of the highest wanted clock is a request.

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
class Timetable:
    """The requests of one iteration, in slots: each instruction has a few, by time.

    A request of an instruction is due ``after_s`` its begin; or, if it is of the wait before it, ``after_s`` the begin
    of the instruction before it on its stage, and at the latest at its own begin.

    Attributes:
        after_s: float[slots, n, plans], seconds; infinite where there is no request.
        clock: intp[slots, n, plans], the clock that is asked for.
        in_wait: bool[slots, n, plans], of the wait before the instruction.
        start: the clocks with which a run begins that has followed this timetable before.
        slots: int[n], how many slots of an instruction are used in any plan.
        corrected: marks correct the timetable; otherwise ``after_s`` counts from the begin of the iteration.
    """

    after_s: Floats
    clock: Index
    in_wait: np.ndarray
    start: Start
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


def timetable(
    begin_s: Floats,
    end_s: Floats,
    period_s: Floats,
    clock: Index,
    stage_offset: list[int],
    *,
    ahead_s: float,
    margin_s: Floats,
    corrected: bool,
) -> Timetable:
    """Return what the agent asks for when it expects each instruction at these times.

    Args:
        begin_s, end_s: float[n, plans], when the agent expects each instruction, from the begin of the iteration.
        period_s: float[plans], time from one iteration to the next.
        clock: int[n, plans], planned clocks; `NO_CLOCK` where an instruction sets none.
        stage_offset: the instructions of each stage.
        ahead_s: how much before its effect a change is asked for, L.
        margin_s: float[n, plans], how much before that the agent raises, and after that it lowers, s.
        corrected: marks correct the timetable.
    """
    n, plans = begin_s.shape
    stages = len(stage_offset) - 1
    asked: list[_Asked] = []
    for low, high in itertools.pairwise(stage_offset):
        for plan in range(plans):
            own = slice(low, high)
            asked.append(
                _asked(
                    begin_s[own, plan],
                    end_s[own, plan],
                    float(period_s[plan]),
                    clock[own, plan],
                    ahead_s=ahead_s,
                    margin_s=margin_s[own, plan],
                )
            )
    found = []
    for number, (at_s, wanted) in enumerate((part.at_s, part.clock) for part in asked):
        stage, plan = divmod(number, plans)
        low, high = stage_offset[stage : stage + 2]
        mark = begin_s[low:high, plan].searchsorted(at_s, side="right") - 1
        in_wait = at_s >= end_s[low:high, plan][mark]
        # What is asked for in the wait after the last instruction comes before the first of the next iteration.
        following = (mark + in_wait) == high - low
        origin_s = begin_s[low:high, plan][mark] if corrected else np.where(following, period_s[plan], 0.0)
        owner = low + np.where(following, 0, mark + in_wait)
        found.append((owner, np.full(len(owner), plan), at_s - origin_s, wanted, in_wait))
    return _packed(found, (n, plans), _start(asked, (stages, plans), ahead_s), corrected)


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Requests of one stage under one plan: of one iteration, and of those before it whose effects may be to come."""

    at_s: Floats
    clock: Index
    before_s: Floats
    before: Index
    first: int


def _asked(
    begin_s: Floats, end_s: Floats, period_s: float, clock: Index, *, ahead_s: float, margin_s: Floats
) -> _Asked:
    """Return when the highest wanted clock changes, from the first begin to that of the next iteration."""
    sets = np.flatnonzero(clock != NO_CLOCK)
    clocks = clock[sets]
    if len(sets) == 0 or (clocks == clocks[0]).all():
        none = np.zeros(0), np.zeros(0, dtype=np.intp)
        return _Asked(*none, *none, int(clocks[0]) if len(sets) else 0)
    # Margins differ little from one instruction to the next, but intervals must begin, and end, in order.
    starts = np.minimum.accumulate((begin_s[sets] - ahead_s - margin_s[sets])[::-1])[::-1]
    stops = np.maximum.accumulate(end_s[sets] - ahead_s + margin_s[sets])
    reach_s = float(max(begin_s[0] - starts[0], stops[-1] - begin_s[0]))
    around = math.ceil(reach_s / period_s) + 1
    shift = (np.arange(-around, around + 1) * period_s)[:, None]
    starts, stops = (shift + starts).ravel(), (shift + stops).ravel()
    highest = _RangeMaximum(np.tile(clocks, 2 * around + 1))
    at_s = np.unique(np.concatenate([starts, stops]))
    at_s = at_s[(at_s >= begin_s[0] - ahead_s - period_s) & (at_s < begin_s[0] + period_s)]
    low, high = stops.searchsorted(at_s, side="right"), starts.searchsorted(at_s, side="right")
    some = high > low  # where no instruction may run, the clock stays as it is
    at_s, wanted = at_s[some], highest(low[some], high[some])
    changed = np.append(True, wanted[1:] != wanted[:-1])
    at_s, wanted = at_s[changed], wanted[changed]
    split = int(at_s.searchsorted(begin_s[0]))
    return _Asked(at_s[split:], wanted[split:], at_s[:split], wanted[:split], int(wanted[0]))


def _start(asked: list[_Asked], shape: tuple[int, int], ahead_s: float) -> Start:
    """Return the clocks in effect, and on their way, when an iteration begins."""
    longest = max(len(part.before) for part in asked)
    effect_s = np.full((longest, len(asked)), np.inf)
    target = np.zeros((longest, len(asked)), dtype=np.intp)
    for column, part in enumerate(asked):
        effect_s[: len(part.before), column] = part.before_s + ahead_s
        target[: len(part.before), column] = part.before
    first = np.array([part.first for part in asked]).reshape(shape)
    return Start(first, effect_s.reshape(longest, *shape), target.reshape(longest, *shape))


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
    found: list[tuple[Index, Index, Floats, Index, np.ndarray]], shape: tuple[int, int], start: Start, corrected: bool
) -> Timetable:
    """Put the requests of all stages and plans into slots."""
    owner, plan, after_s, clock, in_wait = (np.concatenate([part[k] for part in found]) for k in range(5))
    n, plans = shape
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
        start=start,
        slots=slots,
        corrected=corrected,
    )
    at = slot, owner, plan
    out.after_s[at], out.clock[at], out.in_wait[at] = after_s, clock, in_wait
    return out
