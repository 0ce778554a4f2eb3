"""Predicts when the GPU begins and ends each instruction, and from that the clock to ask for now.

Iterations repeat. ``add`` takes what the last iterations did in GPU time, ``sight`` where the GPU is seen to be, and
``target`` answers with one rule (design note 0019): the line of planned clocks over an iteration is turned into that of
the clocks to ask for, each as early as its own changes take, and the highest clock of that line counts among the places
where the GPU may be now. What is not known makes that span longer. So a clock is raised early and lowered late, short
runs of a lower clock keep the higher one, and a GPU that is later than predicted keeps its clock until it goes on.

What a rank writes decides no loop's length: where the schedule does, the work is done in steps, a few in each look, and
until they are done the layout before holds.

All times are microseconds of one clock, which may be a virtual one. Nothing here reads a clock, a device or a channel.
A *boundary* is the begin or the end of an instruction: 2·k and 2·k + 1 for instruction k. Times within an iteration
count from the begin of its first instruction, its *base*; the timetable is a span in which the base of one iteration,
the last one that was seen or predicted, lies.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Sequence
from itertools import repeat
from operator import add, le, sub
from typing import Final, NamedTuple, Protocol

from perseus_agent.clocks.clock_line import LOOK_CLOCKS, StepsOf
from perseus_agent.clocks.drawing import (
    AHEAD,
    DEFAULT_CLOCKS,
    NOTHING_DRAWN,
    Drawing,
    Planned,
    ShownFor,
    draw,
    highest_mhz,
    same_plans,
)
from perseus_agent.clocks.iteration_pattern import Pattern
from perseus_agent.clocks.lead import Lead
from perseus_proto.channel import MAX_DURATION_US

LOOK_BOUNDARIES: Final = 8
"""After one for which it is too early, of which may be earlier: an end and a begin, and more of short instructions."""
PLANS_KEPT: Final = 4
"""Plans whose times are remembered: a job changes to and fro between few, such as around a straggler."""
SIGHT_SHARE: Final = 4
SIGHT_MIN_US: Final = 1_000
"""The GPU is sighted at boundaries, so far apart at least, while its place is less certain than this, or a quarter of
the latency's deviation: the shortest latency known is five times as long."""
LATE_SHARE: Final = 4
LATE_MIN_US: Final = 1_000
LATE_MAX_US: Final = 100_000
"""A GPU that is later than predicted is sighted again after a quarter of the time by which it is late."""
LOOK_MAX_US: Final = 1_000_000
"""Between looks at most, and at least one in each iteration."""
PERIOD_MIN_US: Final = 1_000
"""Iterations that begin closer together cannot be: no step of a pipeline is so short."""
DRAW_STEPS: Final = 4_096
DRAW_AGAIN_US: Final = 500
"""Clocks and places that one look lays out, and when it is looked again if there are more: 6 ms at most."""


_PART: Final = 8_192
"""Instructions of a record that are taken in at once."""


class Record(Protocol):
    """What the GPU did in an iteration, in its own time."""

    @property
    def iteration(self) -> int: ...
    @property
    def begins_us(self) -> Sequence[int]: ...
    @property
    def durations_us(self) -> Sequence[int]: ...


class Target(NamedTuple):
    """What to ask for now."""

    mhz: int | None
    """None: the default clocks."""
    look_us: int
    """When to sight the GPU and call ``target`` again."""


class Timetable:
    """The timetable of one rank's GPU."""

    def __init__(self, count: int, plan_of: Callable[[int], Planned | None]) -> None:
        """Know nothing yet.

        Args:
            count: instructions of the schedule, at least 1.
            plan_of: the plan of an iteration; None: default clocks.
        """
        self._boundaries = 2 * count
        self._plan_of = plan_of
        self._patterns: dict[tuple[str, int], Pattern] = {}
        self._last: tuple[int, int, Pattern | None] | None = None  # of the last record: iteration, base, pattern
        self._iteration = -1
        self._low_us, self._high_us = -math.inf, math.inf  # between which its base lies
        self._passed: int | None = None  # boundaries that the GPU was seen to have passed; None: it cannot be seen
        self._seen_us = 0
        self._late_since_us = 0
        self._additions = 0
        self._drawn = NOTHING_DRAWN
        self._drawing: tuple[Sequence[Planned | None], StepsOf[Drawing]] | None = None  # under way, and of which plans

    # ------------------------------------------------------------------------------------------- what was and is

    def add(self, record: Record) -> None:
        """As ``add_parts``, at once."""
        for _ in self.add_parts(record):
            pass

    def add_parts(self, record: Record) -> Generator[None, None, None]:
        """Add an iteration that is over, in parts of about a millisecond.

        Args:
            record: later than those before; one without times is left out, and so is one whose times cannot be true.
        """
        if not len(record.begins_us) == len(record.durations_us) == self._boundaries // 2:
            self._last = None
            return
        before, base_us = self._last, record.begins_us[0]
        offsets_us = yield from _offsets_us(record)
        if offsets_us is None:
            self._last = None
            return
        if before is not None:
            period_us, iterations = base_us - before[1], record.iteration - before[0]
            if iterations < 1 or period_us < PERIOD_MIN_US * iterations:
                self._last = None
                return
            if before[2] is not None and iterations == 1 and period_us <= MAX_DURATION_US:
                before[2].add_period(period_us)
        plan = self._plan_of(record.iteration)
        pattern = None if plan is None else self._remember((plan.plan_id, plan.point))
        self._last = record.iteration, base_us, pattern
        self._additions += 1
        if pattern is not None:
            pattern.add(offsets_us)
            self._place(record.iteration, base_us)

    @property
    def ready(self) -> bool:
        """Whether it is known where the GPU is in its iteration, and what follows."""
        return self._low_us > -math.inf and self._pattern(self._iteration) is not None

    def sight(self, iteration: int, boundaries: int, now_us: int) -> None:
        """Correct the prediction: the GPU has passed so many boundaries by now, and not one more.

        Args:
            iteration: that the GPU is in.
            boundaries: counted as by a GPU's mark: 0 once the step has begun, 2·k + 1 and 2·k + 2 once instruction k
                has begun and ended, one more once the step has ended.
            now_us: when it was seen.
        """
        passed = min(max(boundaries, 0), self._boundaries)
        if iteration == self._iteration:  # a graph that is replayed again marks the same boundaries again
            passed = max(passed, self._passed or 0)
        went_on = (iteration, passed) != (self._iteration, self._passed)
        before_us = -math.inf if self._passed is None else self._seen_us
        since = self._passed or 0 if iteration == self._iteration else 0
        self._go_to(iteration, self._passed or 0)
        pattern = self._pattern(iteration)
        if pattern is not None:
            not_before_us: float = now_us - pattern.place_us(passed) - pattern.spread_us(passed - 1, passed)
            not_after_us = math.inf
            if went_on and passed:
                error_us, place_us = pattern.spread_us(since - 1, passed - 1), pattern.place_us(passed - 1)
                self._low_us, self._high_us = self._low_us - error_us, self._high_us + error_us
                not_before_us = max(not_before_us, before_us - place_us)
                not_after_us = now_us - place_us
            self._narrow(not_before_us, not_after_us, now_us)
        self._passed, self._seen_us = passed, now_us

    def plans_changed(self) -> None:
        """Other plans may have been chosen for iterations to come."""
        self._additions += 1

    def bound(self, iteration: int, boundaries: int, now_us: int) -> None:
        """Correct the prediction by the position of the host, in the terms of ``sight``, where the GPU's is not seen:
        the GPU is not ahead of it."""
        self._passed = None
        for _ in range(AHEAD):
            pattern = self._pattern(self._iteration)
            if pattern is None or now_us - self._high_us <= pattern.period_us:
                break
            self._go_to(self._iteration + 1)
        pattern = self._pattern(self._iteration)
        if pattern is not None and now_us - self._high_us > pattern.period_us:  # longer ago than can be predicted from
            self._low_us, self._high_us = -math.inf, math.inf
        if pattern is not None and iteration <= self._iteration:
            passed = min(max(boundaries, 0), self._boundaries) if iteration == self._iteration else 0
            error_us = pattern.spread_us(0, passed)
            self._narrow(now_us - pattern.place_us(passed) - error_us, math.inf, now_us)

    # ------------------------------------------------------------------------------------------- what to ask for

    def target(self, now_us: int, lead: Lead, asked_mhz: int | None) -> Target:
        """The clock to have asked for now. Call it only if ``ready``.

        Args:
            now_us: now.
            lead: of this GPU.
            asked_mhz: the clock that was asked for last; None: the default clocks.
        """
        if not self._draw(lead):  # no layout of these plans yet
            mhz = max(highest_mhz(self._plan_of(self._iteration + ahead)) for ahead in range(AHEAD))
            return Target(None if mhz == DEFAULT_CLOCKS else mhz, now_us + DRAW_AGAIN_US)
        line, places_us = self._drawn.line, self._drawn.asked_us
        # Where the GPU is predicted to be at the earliest and at the latest.
        earliest_us, latest_us = now_us - self._high_us, now_us - self._low_us
        passed, coming, sure_us = self._surely_passed(earliest_us), *self._surely_to_come(latest_us)
        here_us = places_us[passed] if passed >= 0 else -math.inf
        there_us = max(latest_us, places_us[coming - 1] if coming else -math.inf)
        asked = DEFAULT_CLOCKS if asked_mhz is None else asked_mhz
        enough_mhz = line.highest_mhz(here_us, there_us)
        mhz = min(max(asked, enough_mhz), line.highest_mhz(here_us, there_us + lead.worth_us))
        raise_us = line.raise_us(there_us, mhz)
        width_us = there_us + lead.worth_us - earliest_us + self._error_us(here_us)
        lower_us = line.lower_us(here_us, mhz, width_us, raise_us)
        raise_wait_us = max(raise_us - self._error_us(raise_us), sure_us) - latest_us
        lower_wait_us = lower_us + self._error_us(lower_us) - earliest_us
        next_us = self._drawn.places_us[-1] if self._drawn.patterns[0] is None else self._drawn.patterns[0].period_us
        next_wait_us = self._high_us + next_us + 1 - now_us
        wait_us = min(raise_wait_us, lower_wait_us, LOOK_MAX_US, next_wait_us if next_wait_us > 0 else LOOK_MAX_US)
        sight_us = self._sight_us(now_us, now_us + lower_wait_us, lead)
        if self._drawing is not None:
            sight_us = min(sight_us, now_us + DRAW_AGAIN_US)
        look_us = max(min(now_us + wait_us, sight_us), now_us + 1)
        return Target(None if mhz == DEFAULT_CLOCKS else mhz, math.ceil(look_us))

    def _sight_us(self, now_us: int, lower_us: float, lead: Lead) -> float:
        """When the GPU should be sighted to know its place better: at the boundary to come while it is uncertain, and
        at the last one before the clock is lowered, which a GPU that is late must not be."""
        pattern = self._pattern(self._iteration)
        if pattern is None or self._passed is None:
            return math.inf
        if self._high_us == math.inf:
            late_us = (now_us - self._late_since_us) // LATE_SHARE
            return now_us + min(max(late_us, LATE_MIN_US), LATE_MAX_US)
        if self._high_us - self._low_us > max(lead.deviation_us // SIGHT_SHARE, SIGHT_MIN_US):
            # One look for each instruction: if it came too early, the next is at the next instruction.
            middle_us = (self._low_us + self._high_us) / 2
            sight_us = middle_us + pattern.place_us(self._passed)
            if sight_us < now_us:
                sight_us = middle_us + pattern.place_us(self._passed + 2)
            return max(sight_us, now_us + SIGHT_MIN_US)
        places_us = self._drawn.places_us
        before = bisect_left(places_us, lower_us - self._high_us) - 1 if lower_us < math.inf else -1
        for boundary in range(before, max(self._passed - 1, before - LOOK_CLOCKS), -1):
            due_us = places_us[boundary] + self._error_at_us(boundary) + self._high_us + 1
            if due_us < lower_us:
                return max(due_us, now_us + SIGHT_MIN_US)
        return math.inf if before - LOOK_CLOCKS < self._passed else now_us + SIGHT_MIN_US

    # ------------------------------------------------------------------------------------------- inside

    def _surely_passed(self, place_us: float) -> int:
        """The last boundary for which it is surely time to ask when the GPU is predicted to be at a place, however
        early or late it passes those until there; −1: none."""
        places_us, seen = self._drawn.asked_us, (self._passed or 0) - 1
        last = bisect_right(places_us, place_us) - 1
        for boundary in range(last, max(seen, last - LOOK_CLOCKS), -1):
            if places_us[boundary] + self._error_at_us(boundary) <= place_us:
                return boundary
        return seen

    def _surely_to_come(self, place_us: float) -> tuple[int, float]:
        """The first boundary for which, and for those after it, it is surely too early then, and the place until which
        that is so; the number of those known, if there is none. Where a wait differs between iterations, it may be time
        for the instruction after it before it surely is for the end of the one before."""
        places_us = self._drawn.asked_us
        first = max(bisect_right(places_us, place_us), self._passed or 0)
        coming, until_us = len(places_us), math.inf
        for boundary in range(first, min(len(places_us), first + LOOK_CLOCKS)):
            sure_us = places_us[boundary] - self._error_at_us(boundary)
            if sure_us <= place_us:
                coming, until_us = len(places_us), math.inf
            else:
                coming, until_us = min(coming, boundary), min(until_us, sure_us)
                if boundary - coming >= LOOK_BOUNDARIES:
                    break
        return coming, until_us

    def _error_us(self, place_us: float) -> float:
        """By how much the time from the last sight to a place differs between iterations."""
        return 0 if math.isinf(place_us) else self._error_at_us(bisect_right(self._drawn.asked_us, place_us) - 1)

    def _error_at_us(self, boundary: int) -> float:
        """The same to a boundary, counted over the iterations that are drawn."""
        pattern, following = self._drawn.patterns[:2]
        if pattern is None:
            return 0
        since = (self._passed or 0) - 1
        if boundary < self._boundaries:
            return pattern.spread_us(since, boundary)
        error_us = pattern.spread_us(since, self._boundaries)
        if following is not None:
            error_us += following.spread_us(0, min(boundary - self._boundaries, self._boundaries - 1))
        return error_us

    def _narrow(self, not_before_us: float, not_after_us: float, now_us: int) -> None:
        """Restrict the span of the base. What contradicts the prediction replaces it: so after a GPU that does not go
        on in time nothing is known but that it will, and the span has no upper end."""
        low_us, high_us = max(self._low_us, not_before_us), min(self._high_us, not_after_us)
        if low_us > high_us:
            low_us, high_us = not_before_us, not_after_us
        if high_us == math.inf > self._high_us:
            self._late_since_us = now_us
        self._low_us, self._high_us = low_us, high_us

    def _go_to(self, iteration: int, passed: int = 0) -> None:
        """Let the span be that of another iteration's base; it is counted from where the GPU was seen, so many
        boundaries from the base of the present one, and the time from there differs between iterations."""
        if not 0 <= iteration - self._iteration <= AHEAD:
            self._low_us, self._high_us = -math.inf, math.inf
        else:
            for passing in range(self._iteration, iteration):
                pattern = self._pattern(passing)
                error_us = math.inf if pattern is None else pattern.spread_us(passed - 1, self._boundaries)
                passed = 0
                period_us = 0 if pattern is None else pattern.period_us
                self._low_us += period_us - error_us
                self._high_us += period_us + error_us
        self._iteration = iteration

    def _place(self, iteration: int, base_us: int) -> None:
        """Predict the iteration that the GPU is in from the base of one before."""
        if self._pattern(iteration) is None:
            return
        seen = self._iteration, self._low_us, self._high_us, self._passed
        self._iteration, self._low_us, self._high_us = iteration, base_us, base_us
        self._go_to(max(seen[0], iteration + 1))
        if self._passed is None:
            return
        if seen[0] < self._iteration:
            self._passed = 0
            return
        pattern = self._pattern(self._iteration)
        if pattern is not None:
            error_us = pattern.spread_us(-1, (self._passed or 0) - 1)
            self._low_us, self._high_us = self._low_us - error_us, self._high_us + error_us
        self._narrow(seen[1], seen[2], self._seen_us)

    def _pattern(self, iteration: int) -> Pattern | None:
        """The times of an iteration's plan, if they are known."""
        if (iteration, self._additions) == self._drawn.shown_for[:2]:
            return self._drawn.patterns[0]
        return self._known(self._plan_of(iteration))

    def _known(self, plan: Planned | None) -> Pattern | None:
        pattern = None if plan is None else self._patterns.get((plan.plan_id, plan.point))
        return pattern if pattern is not None and pattern.trusted else None

    def _remember(self, key: tuple[str, int]) -> Pattern:
        pattern = self._patterns.pop(key, None) or Pattern()
        self._patterns[key] = pattern
        while len(self._patterns) > PLANS_KEPT:
            del self._patterns[next(iter(self._patterns))]
        return pattern

    def _draw(self, lead: Lead) -> bool:
        """Lay out the clocks to ask for in this iteration and in those ahead, if something has changed, as far as one
        look may take it. Returns whether there is a layout of the plans in force, if perhaps not of the last record."""
        if self._drawn.shown_for == (self._iteration, self._additions, lead):
            return True
        plans = [self._plan_of(self._iteration + ahead) for ahead in range(AHEAD + 1)]
        # One that is under way is finished although more is known by now: else there might never be one.
        if self._drawing is None or not same_plans(self._drawing[0], plans):
            shown_for = ShownFor(self._iteration, self._additions, lead)
            self._drawing = plans, draw(plans, [self._known(plan) for plan in plans], shown_for)
        room, steps = DRAW_STEPS, self._drawing[1]
        try:
            while room > 0:
                room -= next(steps)
        except StopIteration as done:
            self._drawing, self._drawn = None, done.value
        return same_plans(self._drawn.plans, plans)


def _offsets_us(record: Record) -> Generator[None, None, array[int] | None]:
    """When each boundary was passed, from the begin of the first instruction; None: it cannot have been so."""
    base_us, offsets_us = record.begins_us[0], array("q", bytes(16 * len(record.begins_us)))
    for first in range(0, len(record.begins_us), _PART):
        part = slice(first, first + _PART)
        begins_us = list(map(sub, record.begins_us[part], repeat(base_us)))
        ends_us = list(map(add, begins_us, record.durations_us[part]))
        if min(begins_us) < 0 or not all(map(le, begins_us, ends_us)) or max(ends_us) > MAX_DURATION_US:
            return None
        start, stop = 2 * first, 2 * (first + len(begins_us))
        offsets_us[start:stop:2], offsets_us[start + 1 : stop : 2] = array("q", begins_us), array("q", ends_us)
        yield
    return offsets_us
