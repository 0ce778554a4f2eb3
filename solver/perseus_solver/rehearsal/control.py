"""When an agent asks for which clock: the rule of design note 0019, computed for whole plans at once.

A change of the planned clock has a moment from which it is right: a higher clock when its first instruction begins, a
lower one when the instruction before has ended. Between two iterations the higher of both clocks is right. An agent
asks for a higher clock L + s before that moment and for a lower one L - s before, where L is the median and s the
scatter of the time that a change to this clock takes. Changes that would be asked for in the wrong order are left out
so that nothing is late, and so is a lower clock that would be wanted for less than its calls take, or one between two
others for less than one call of all GPUs of a lock.

Between two marks the timetable advances with the time, as far as the next mark. So a request is placed by the last mark
before it and by the time from there. Only marks of begins count here: what the end of an instruction says about the
next begin is known when that comes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perseus_solver.kinds import Floats, Index
from perseus_solver.rehearsal.calls import Start
from perseus_solver.rehearsal.execution import Begun

NO_CLOCK = -1
"""Of an instruction that sets no clock."""
_BESIDE = 3
"""Changes so far apart do not decide about each other."""


class Leads(NamedTuple):
    """How long before it is right a clock is asked for, and which changes are left out; seconds.

    Attributes:
        raise_s, lower_s: float[clocks], of a clock that is higher, or lower, than the one before.
        worth_s: a lower clock that is wanted for less is not asked for.
        turn_s: in which all GPUs of a lock make their calls. Nor is a clock between two others that is wanted for less.
    """

    raise_s: Floats
    lower_s: Floats
    worth_s: float
    turn_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What an agent expects of iterations, and how it asks.

    Attributes:
        begin_s, end_s: float[n, plans], when instructions run, from the begin of the iteration.
        period_s: float[plans], time from one iteration to the next.
        clock: int[n, plans], planned clocks; `NO_CLOCK` where an instruction sets none.
        stage_offset: the instructions of each stage.
        leads: how early.
        margin_s: float[n, plans], how much before its begin and after its end an instruction may run, s.
    """

    begin_s: Floats
    end_s: Floats
    period_s: Floats
    clock: Index
    stage_offset: list[int]
    leads: Leads
    margin_s: Floats

    def changes(self, stage: int, plan: int, since_s: float, until_s: float) -> tuple[Floats, Index]:
        """Return when a stage asks for other clocks, and for which, in a span of one iteration at least.

        Times count from the stage's first begin. If there is none in the span, the clock counts as asked for at its
        begin.
        """
        origin_s, period_s = float(self.begin_s[self.stage_offset[stage], plan]), float(self.period_s[plan])
        low_s, high_s = origin_s + since_s, origin_s + until_s
        at, right_s = self._planned(stage, plan)
        clocks = self.clock[at, plan]
        if len(at) < 2:
            return np.full(len(at), low_s), clocks
        # One iteration more on both sides: what is left out depends on what is beside it.
        first = math.floor((low_s + float(self.leads.lower_s.min()) - float(right_s[-1])) / period_s) - 1
        last = math.ceil((high_s + float(self.leads.raise_s.max()) - float(right_s[0])) / period_s) + 1
        asked_s, wanted, _ = self._requests(right_s, clocks, np.arange(first, last + 1) * period_s)
        low, high = asked_s.searchsorted((low_s, high_s))
        if low == high:
            return np.full(1, low_s), wanted[low - 1 : low]
        return asked_s[low:high], wanted[low:high]

    def asked(self) -> Index:
        """Return int[n, plans], the clock that is asked for for each instruction: the planned one, or what takes its
        place where a change is left out; `NO_CLOCK` where an instruction sets none.

        A plan of these clocks is asked for as it is: what is left out of it in turn is so here, too.
        """
        expected = self
        while ((clock := expected._asked()) != expected.clock).any():
            expected = replace(expected, clock=clock)
        return clock

    def _asked(self) -> Index:
        found = self.clock.copy()
        for stage, (low, high) in enumerate(itertools.pairwise(self.stage_offset)):
            for plan in range(len(self.period_s)):
                at, right_s = self._planned(stage, plan)
                if len(at) < 2:
                    continue
                period_s = float(self.period_s[plan])
                _, wanted, left = self._requests(right_s, self.clock[at, plan], np.arange(-1, 2) * period_s)
                # Of the second of three iterations: each change, and before the first the last one of the first.
                changes = np.arange(len(at) - 1, 2 * len(at))
                clocks = wanted[left.searchsorted(changes, side="right") - 1]
                of_change = at.searchsorted(np.arange(low, high), side="right")
                own = found[low:high, plan]
                own[:] = np.where(own == NO_CLOCK, own, clocks[of_change])
        return found

    def _planned(self, stage: int, plan: int) -> tuple[Index, Floats]:
        """Return the instructions of a stage whose clock differs from the one before, and when each is right; of a
        stage with one clock its first instruction.
        """
        own = slice(*self.stage_offset[stage : stage + 2]), plan
        sets = np.flatnonzero(self.clock[own] != NO_CLOCK)
        clocks, margin_s = self.clock[own][sets], self.margin_s[own][sets]
        begin_s, end_s = self.begin_s[own][sets], self.end_s[own][sets]
        before = np.roll(clocks, 1)
        right_s = np.where(clocks > before, begin_s - margin_s, np.roll(end_s + margin_s, 1))
        if len(sets):  # after the last instruction gradients are reduced and applied, at the higher clock
            over_s = end_s[-1] - margin_s[-1] - self.period_s[plan]
            right_s[0] = over_s if clocks[0] > before[0] else begin_s[0] + margin_s[0]
        at = np.flatnonzero(clocks != before)
        if not len(at):
            at = np.arange(len(sets))[:1]
        return self.stage_offset[stage] + sets[at], right_s[at]

    def _requests(self, right_s: Floats, clocks: Index, shifts_s: np.ndarray) -> Requests:
        """Return what is asked for in several iterations."""
        moments_s: Floats = np.ravel(shifts_s[:, None] + right_s)
        return requests(moments_s, np.tile(clocks, len(shifts_s)), self.leads)

    def start(self) -> Start:
        """Return the clocks in effect and on their way when an iteration begins that follows others like it."""
        stages, plans = len(self.stage_offset) - 1, len(self.period_s)
        before = [
            self.changes(stage, plan, -float(self.leads.raise_s.max()) - float(self.period_s[plan]), 0.0)
            for stage in range(stages)
            for plan in range(plans)
        ]
        longest = max(len(at_s) for at_s, _ in before)
        effect_s = np.full((longest, len(before)), np.inf)
        target = np.zeros((longest, len(before)), dtype=np.intp)
        for column, (at_s, wanted) in enumerate(before):
            takes_s = (self.leads.raise_s + self.leads.lower_s)[wanted] / 2
            effect_s[: len(at_s), column] = np.maximum.accumulate(at_s + takes_s)
            target[: len(at_s), column] = wanted
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


class Requests(NamedTuple):
    """What is left of changes.

    Attributes:
        asked_s: float[left], when each is asked for.
        wanted: int[left], for which clock.
        change: int[left], which of all changes it is.
    """

    asked_s: Floats
    wanted: Index
    change: Index


def requests(right_s: Floats, wanted: Index, leads: Leads) -> Requests:
    """Return when changes are asked for, without those that are not worth it or would be asked for in the wrong order.

    A clock that is left out is replaced by the lower one of those beside it that are higher: nothing is late, and that
    costs the least energy. Of those near each other the shortest is left out first, for what is left of a deeper dip
    may last long enough.

    Args:
        right_s: float[changes], the moments from which clocks are right, increasing.
        wanted: int[changes], which; each differs from the one before.
        leads: how much before that a clock is asked for, and how long it must be wanted.
    """
    (raise_s, lower_s, worth_s, turn_s), change = leads, np.arange(len(wanted))
    while True:
        rises = np.append(True, wanted[1:] > wanted[:-1])
        asked_s = right_s - np.where(rises, raise_s[wanted], lower_s[wanted])
        before, clock, after = wanted[:-2], wanted[1:-1], wanted[2:]
        dip, peak = clock < np.minimum(before, after), clock > np.maximum(before, after)
        # A clock is lowered only after all GPUs have had their turn to raise it: they are sent the newest target only.
        late = 2 + np.flatnonzero(peak & (asked_s[2:] < asked_s[1:-1] + worth_s))
        asked_s[late] = asked_s[late - 1] + worth_s
        lacks_s = asked_s[1:-1] - asked_s[2:]
        # Changes come into effect in order: a higher clock must not wait for a lower one.
        in_order_s = asked_s[1:-1] + raise_s[clock] - right_s[2:]
        lacks_s = np.where(peak, -np.inf, np.where(dip, np.maximum(lacks_s + worth_s, in_order_s), lacks_s + turn_s))
        padded_s = np.pad(lacks_s, _BESIDE, constant_values=-np.inf)
        beside_s = np.stack([padded_s[k : k + len(lacks_s)] for k in range(2 * _BESIDE + 1)])
        worst = np.flatnonzero((lacks_s > 0) & (lacks_s == beside_s.max(axis=0)))
        if not len(worst):
            return Requests(np.maximum.accumulate(asked_s), wanted, change)
        lower, higher = np.minimum(before, after), np.maximum(before, after)
        wanted = wanted.copy()
        wanted[worst + 1] = np.where(dip, lower, higher)[worst]
        changed = np.append(True, wanted[1:] != wanted[:-1])
        right_s, wanted, change = right_s[changed], wanted[changed], change[changed]


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
