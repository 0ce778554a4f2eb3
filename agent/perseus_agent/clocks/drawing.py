"""Lays out what an agent asks for over an iteration and those ahead: boundaries, clocks, and the places to ask at.

It takes as long as the schedules are, so it comes in steps (``clock_line.StepsOf``): a look does a few. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from perseus_agent.clocks.clock_line import ClockLine, StepsOf
from perseus_agent.clocks.iteration_pattern import Pattern
from perseus_agent.clocks.lead import Lead

AHEAD: Final = 2
"""Iterations that are looked ahead at. What is beyond them is taken for the highest clock of the last."""
DEFAULT_CLOCKS: Final = 1 << 30
"""Stands for the default clocks, which are above any that is locked."""
_PART: Final = 512
"""Instructions that are laid out in one step."""


class Planned(Protocol):
    """A plan of one stage."""

    @property
    def plan_id(self) -> str: ...
    @property
    def point(self) -> int: ...
    @property
    def clocks_mhz(self) -> tuple[int, ...]: ...


class ShownFor(NamedTuple):
    """What a drawing is made of: an iteration, what was known then, and how early is asked."""

    iteration: int
    additions: int
    lead: Lead | None


class Drawing(NamedTuple):
    """The boundaries of an iteration and of those ahead, where the GPU is when the clocks after them are asked for, and
    the line of these clocks."""

    shown_for: ShownFor
    plans: Sequence[Planned | None]
    patterns: Sequence[Pattern | None]
    line: ClockLine
    places_us: array[float]
    asked_us: array[float]


NOTHING_DRAWN: Final = Drawing(ShownFor(-1, -1, None), (), (None, None), ClockLine(), array("d"), array("d"))


def draw(plans: Sequence[Planned | None], patterns: Sequence[Pattern | None], shown_for: ShownFor) -> StepsOf[Drawing]:
    """Lay out iterations.

    Args:
        plans: of ``AHEAD`` iterations and of the one after them; None: default clocks.
        patterns: of these plans; None: not known.
        shown_for: what the drawing is for.
    """
    assert shown_for.lead is not None
    line, places_us, origin_us = ClockLine(), array("d"), 0
    parts_us: dict[tuple[Pattern, int], list[int]] = {}  # of patterns that come twice
    for plan, pattern, following, next_pattern in zip(plans, patterns, plans[1:], patterns[1:], strict=False):
        if plan is None or pattern is None:
            break
        next_mhz = highest_mhz(following) if following is None or next_pattern is None else following.clocks_mhz[0]
        for first in range(0, len(plan.clocks_mhz), _PART):
            offsets_us = parts_us.get((pattern, first)) or pattern.places_us(2 * first, 2 * (first + _PART))
            parts_us[pattern, first] = offsets_us
            line.draw_part(offsets_us, first, plan.clocks_mhz, origin_us, next_mhz)
            places_us.extend([origin_us + offset_us for offset_us in offsets_us])
            yield len(offsets_us)
        origin_us += pattern.period_us
    else:
        plan = plans[AHEAD]
    line.add(origin_us, highest_mhz(plan))
    places_us.append(origin_us)
    line, asked_us = yield from line.asked_steps(shown_for.lead, places_us)
    return Drawing(shown_for, plans, patterns, line, places_us, array("d", asked_us))


def same_plans(plans: Sequence[Planned | None], others: Sequence[Planned | None]) -> bool:
    """Whether iterations follow the same plans."""
    return list(map(_key, plans)) == list(map(_key, others))


def _key(plan: Planned | None) -> tuple[str, int] | None:
    return None if plan is None else (plan.plan_id, plan.point)


def highest_mhz(plan: Planned | None) -> int:
    """The highest clock of a plan."""
    return DEFAULT_CLOCKS if plan is None else max(plan.clocks_mhz)
