"""Whether measured iterations keep the objective's bound, and what the job is held at after they did not.

A prediction may be wrong. Then the plan is withdrawn, whatever it would save, and the cause is named. The job runs one
step after the other until the bound is kept: a plan with one clock for each segment of a stage, one with a clock for
each stage, the fastest plan, default clocks. Steps that would change nothing are left out. The plan is tried again
after a pause that doubles each time. At default clocks it shows whether the job itself has become slower, which is not
the plan's fault: the bound then counts from there. Where a PowerBudget decides, the bound is what the plans within the
job's share are predicted to take, and no step draws more than the share: being slow brings a job no watts.

Iterations whose times vary with their data say little alone. How much they vary is measured, and a plan is withdrawn
only for more than that explains: a few iterations that all exceed the bound by far, or the median of up to 64 that does
by less.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from itertools import pairwise
from statistics import median, median_high, median_low
from typing import Final

from perseus_core.grain import Grain
from perseus_operator.api.objective import Objective
from perseus_operator.api.status import GuardStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.families.training.features.bound.cause import ExcessCause, Finding
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.objects.formatting import stamp
from perseus_operator.solving.view import FrontierView
from perseus_solver.significance import LONGEST, sigma_of, windows

TOLERANCE: Final = 0.01
"""An iteration counts if it exceeds the bound by this share: iterations differ by some tenths of a per cent anyway."""
CONFIRM: Final = 5
"""Consecutive iterations that must exceed it: more than detecting a straggler needs, or a checkpoint lasts."""
FIRST_PAUSE_S: Final = 60.0
LONGEST_PAUSE_S: Final = 3600.0
_MOST_DOUBLINGS: Final = 16
_FEW: Final = 8
"""Changes from one iteration to the next, of which the median says how much a baseline scatters."""


class Hold(IntEnum):
    """What the job is held at, from the mildest to the safest."""

    NOTHING = 0
    SEGMENTS = 1
    STAGES = 2
    FASTEST_PLAN = 3
    DEFAULT_CLOCKS = 4

    @property
    def finest(self) -> Grain:
        """The finest plans that may run."""
        return {Hold.SEGMENTS: Grain.SEGMENT, Hold.STAGES: Grain.STAGE}.get(self, Grain.INSTRUCTION)


@dataclass(frozen=True)
class Guard:
    """What is known about keeping a bound; at first nothing.

    Attributes:
        subject: digest of frontier and objective; another subject starts with a new guard.
        hold: what the job is held at, until ``until_s`` (monotonic) or, for a later operator, ``until_wall_s``.
        since: iterations before this one do not count.
        trips: how often in a row the plan was withdrawn.
        reference_us: an iteration at default clocks, as measured during the last hold, in ``reference_iterations``; a
            later operator counts only those that it takes at least.
        measured_us, bound_us: what was measured when the plan was withdrawn, and what was allowed.
        finding: why it was too slow; None: the plan was not withdrawn yet.
        beside_straggler: the furthest iteration begun while there was a straggler: without its allowance those until
            then do not count, in which pipelines waited, or were slow on purpose.
    """

    subject: str = ""
    hold: Hold = Hold.NOTHING
    since: int = 0
    until_s: float = 0.0
    until_wall_s: float = 0.0
    trips: int = 0
    reference_us: int | None = None
    reference_iterations: int = CONFIRM
    measured_us: int = 0
    bound_us: int = 0
    finding: Finding | None = None
    beside_straggler: int = -1

    @property
    def pause_s(self) -> float:
        """How long the plan stays withdrawn after the last trip."""
        doublings = min(max(0, self.trips - 1), _MOST_DOUBLINGS)
        return float(min(FIRST_PAUSE_S * 2**doublings, LONGEST_PAUSE_S))


@dataclass(frozen=True)
class Bound:
    """What an iteration may take, and how well that is known.

    Attributes:
        time_us: for 95 % of the iterations, with an allowance for stragglers.
        typical: what the plan is expected to take in the median, as a share of what 95 % of its iterations keep.
        iterations: how many were measured for the time that it counts from; infinite: it counts from none.
    """

    time_us: float
    typical: float = 1.0
    iterations: float = math.inf


def scatter_of(iterations: Iterable[JobIteration]) -> float:
    """How much the logarithm of an iteration's time scatters: a standard deviation that is seldom too small.

    Args:
        iterations: the latest, oldest first. Only those that follow each other under the same plans are compared, so
            neither a plan nor a change of the job itself is scatter.

    Returns:
        The deviation; infinite: none follow each other.
    """
    return sigma_of(_changes(iterations)) / math.sqrt(2)


def _changes(iterations: Iterable[JobIteration]) -> list[float]:
    return [
        abs(math.log(after.time_us / before.time_us))
        for before, after in pairwise(iterations)
        if after.iteration == before.iteration + 1 and after.points == before.points
        if not before.mixed and not after.mixed
    ]


def least_excess(scatter: float, bound: Bound, *, confirm: int) -> float | None:
    """By what share iterations must exceed a bound to be distinguished from load; None: not known yet."""
    looked = windows(scatter, math.log1p(TOLERANCE), confirm=confirm, reference=bound.iterations)
    return max(TOLERANCE, math.expm1(looked[-1].margin)) if looked else None


def baseline_wanted(iterations: int, measured: Iterable[JobIteration]) -> int:
    """How many iterations at default clocks make a baseline: where they vary, more than were asked for.

    Args:
        iterations: as asked for; 0: none.
        measured: at default clocks so far.
    """
    changes = _changes(measured)
    if not iterations or not changes:
        return iterations
    # Of the first few, two may be alike by chance, and one may be odd.
    scatter = (median_high(changes) if len(changes) < _FEW else sigma_of(changes)) / math.sqrt(2)
    return max(iterations, math.ceil(min(LONGEST, math.pi / 2 * (scatter / TOLERANCE) ** 2)))


def subject_of(frontier_digest: str, objective: Objective) -> str:
    """The subject of a guard: a digest of frontier and objective."""
    return hashlib.sha256(f"{frontier_digest}\n{objective!r}".encode()).hexdigest()


def next_coarser(frontier: FrontierView, allowed: Callable[[Grain], int | None], hold: Hold) -> Hold | None:
    """The mildest hold at coarser plans that changes the plan of a pipeline and is allowed.

    Args:
        frontier: of one pipeline.
        allowed: the point that objective or share allow where plans are not finer than this; None: none.
        hold: what the job is held at now.

    Returns:
        The hold; None: no coarser plan is allowed.
    """
    point = allowed(hold.finest)
    running = Grain.INSTRUCTION if point is None else frontier.grain(point)
    for coarser in (Hold.SEGMENTS, Hold.STAGES):
        point = allowed(coarser.finest)
        if point is None:
            continue
        grain = frontier.grain(point)
        if coarser > hold and running < coarser.finest <= grain:
            return coarser if grain < Grain.STAGE else Hold.STAGES
    return None


def judge(
    guard: Guard,
    iterations: Iterable[JobIteration],
    *,
    bound: Bound | None,
    scatter: float = 0.0,
    coarser: Hold | None = None,
    limited: bool = False,
    why: Callable[[Sequence[JobIteration]], Finding] | None = None,
    confirm: int,
    furthest: int,
    now_s: float,
    wall_s: float,
) -> Guard:
    """The guard after these iterations; counting an iteration twice changes nothing.

    Args:
        guard: as it was.
        iterations: the latest, oldest first.
        bound: what an iteration may take now; None: there is no bound.
        scatter: how much iterations scatter, see `scatter_of`.
        coarser: the hold to try first if the plan has to go, see `next_coarser`; None: there is none.
        limited: a PowerBudget decides: what draws more is no step.
        why: finds the cause in the iterations that were too slow; None: it is not looked for.
        confirm: consecutive iterations that must exceed it.
        furthest: the furthest iteration that any rank has begun.
        now_s: monotonic.
        wall_s: the same moment by the wall clock.
    """
    iterations = list(iterations)
    seen = [i for i in iterations if not i.mixed and i.iteration >= guard.since]
    if guard.hold is not Hold.NOTHING and now_s >= guard.until_s:
        at_default = [i.time_us for i in seen if all(point is None for point in i.points.values())]
        if len(at_default) >= CONFIRM:
            guard = replace(guard, reference_us=round(median(at_default)), reference_iterations=len(at_default))
        return replace(guard, hold=Hold.NOTHING, since=furthest + 1)
    if guard.hold is Hold.NOTHING and guard.trips and now_s >= guard.until_s + guard.pause_s:
        return replace(guard, trips=0)  # the plan has kept the bound for as long as it was withdrawn

    last = exceeding(seen, bound, scatter=scatter, confirm=confirm) if bound is not None else []
    planned = [point for i in last for point in i.points.values() if point is not None]
    if bound is None or guard.hold is Hold.DEFAULT_CLOCKS or not planned:
        return guard
    slower = guard.hold < Hold.FASTEST_PLAN and any(planned)
    safer = Hold.FASTEST_PLAN if slower else Hold.DEFAULT_CLOCKS
    if limited and coarser is None:
        safer = guard.hold or Hold.FASTEST_PLAN
    following = coarser or safer
    if following is guard.hold:
        return guard
    tripped = replace(
        guard,
        hold=following,
        since=furthest + 1,
        trips=guard.trips + (guard.hold is Hold.NOTHING),
        measured_us=round(median(i.time_us for i in last)),
        bound_us=round(bound.time_us),
        finding=why(last) if why is not None else None,
    )
    return replace(tripped, until_s=now_s + tripped.pause_s, until_wall_s=wall_s + tripped.pause_s)


def exceeding(iterations: Sequence[JobIteration], bound: Bound, *, scatter: float, confirm: int) -> list[JobIteration]:
    """The latest iterations that together exceed a bound by more than their scatter explains; empty: none do.

    Args:
        iterations: that may have, oldest first.
        bound: what they may take.
        scatter: see `scatter_of`.
        confirm: iterations each of which must exceed it; of longer windows the median must.
    """
    for window in windows(scatter, math.log1p(TOLERANCE), confirm=confirm, reference=bound.iterations):
        last = list(iterations[-window.size :])
        beyond = bound.time_us * max(1 + TOLERANCE, math.exp(window.margin))
        if len(last) < window.size:
            break
        if all(i.time_us > beyond for i in last):
            return last
        if window.size > confirm and median_low(i.time_us for i in last) > bound.typical * beyond:
            return last
    return []


def guard_to_status(guard: Guard) -> GuardStatus | None:
    """What a later operator must know of a guard; None: nothing."""
    if guard.hold is Hold.NOTHING and not guard.trips and guard.reference_us is None:
        return None
    return GuardStatus(
        hold=_HOLD_NAMES[guard.hold],
        about=guard.subject,
        trips=guard.trips,
        until=stamp(guard.until_wall_s),
        since_iteration=guard.since,
        measured_time_microseconds=guard.measured_us,
        allowed_time_microseconds=guard.bound_us,
        reference_time_microseconds=guard.reference_us,
        cause=guard.finding.cause if guard.finding else None,
        evidence=guard.finding.evidence if guard.finding else None,
    )


def guard_from_status(status: object, *, now_s: float, wall_s: float) -> Guard | None:
    """The guard that an earlier operator stored; None: it stored none, or none that is understood.

    A pause goes on, but never for longer than it was made for, whatever the two machines' clocks show.
    """
    stored = parse_stored(GuardStatus, status)
    if stored is None:
        return None
    hold = next((hold for hold, name in _HOLD_NAMES.items() if name == stored.hold), Hold.NOTHING)
    until_wall_s = datetime.fromisoformat(stored.until).timestamp()
    guard = Guard(
        subject=stored.about,
        hold=hold,
        since=stored.since_iteration,
        until_wall_s=until_wall_s,
        trips=stored.trips,
        reference_us=stored.reference_time_microseconds,
        measured_us=stored.measured_time_microseconds,
        bound_us=stored.allowed_time_microseconds,
        finding=Finding(ExcessCause(stored.cause), stored.evidence)
        if stored.cause in tuple(ExcessCause) and stored.evidence
        else None,
    )
    # A hold may be over while its time of observation is not: it then ended less than one pause ago.
    left_s = min(until_wall_s - wall_s, guard.pause_s)
    return replace(guard, until_s=now_s + max(left_s, -guard.pause_s))


_HOLD_NAMES: Final = {
    Hold.NOTHING: "Nothing",
    Hold.SEGMENTS: "Segments",
    Hold.STAGES: "Stages",
    Hold.FASTEST_PLAN: "FastestPlan",
    Hold.DEFAULT_CLOCKS: "DefaultClocks",
}
