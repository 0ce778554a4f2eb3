"""When the plan of a job is interrupted to measure what it saves, and when it goes on; see ``comparisons``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.bound.guard import Hold
from perseus_operator.families.training.features.comparison.state import (
    BeginComparison,
    ComparisonAction,
    Comparisons,
    EndComparison,
    ResumePlan,
)
from perseus_operator.nodes.iterations import History, Measured

_PATIENCE: Final = 4
"""A comparison is abandoned that takes so many times the iterations it needs: agents do not obey, or reports are
missing."""


def next_comparison_action(
    progress: Comparisons, facts: Facts, wanted: Mapping[int, int], hold: Hold, *, applied: bool, disturbed: bool
) -> ComparisonAction | None:
    """What to do next about comparing; None: nothing.

    Args:
        progress: of comparing.
        facts: of the job.
        wanted: points of the plan, by dp.
        hold: of the bound guard.
        applied: whether agents hold what is wanted now, with the plan or without it.
        disturbed: whether something else decides about the clocks: a straggler, a budget, a sweep.
    """
    history, spec = facts.history, facts.spec
    settings = spec.comparison
    # A plan in force without one: the job has another shape than when it was measured, or its status was lost.
    lacks_baseline = facts.baseline is None and spec.baseline_iterations > 0
    may = bool(
        wanted
        and not disturbed
        and history is not None
        and hold is Hold.NOTHING
        and spec.mode.sets_clocks
        and (settings.every_iterations or lacks_baseline)
        and facts.share is None  # at default clocks the job would draw more than it
    )
    if not may or history is None:
        return EndComparison(None) if progress.running else None
    begin, furthest = facts.nodes.plan_since, facts.nodes.furthest_iteration
    if progress.running and furthest > max(begin, progress.from_iteration) + _PATIENCE * (settings.iterations + 1):
        return EndComparison(None)
    if not applied:
        return None
    if not progress.running:
        planned = _measured(history, wanted, since=begin, at_least=settings.iterations)
        due = lacks_baseline or furthest >= progress.last + settings.every_iterations
        comparable = planned is not None and (planned.energy_mj or lacks_baseline)
        return BeginComparison(planned) if due and planned is not None and comparable else None
    # The first iteration after a change may still contain some of it.
    if progress.without is None:
        nowhere = dict.fromkeys(wanted)
        without = _measured(history, nowhere, since=begin + 1, at_least=settings.iterations)
        return None if without is None or lacks_baseline else ResumePlan(without)
    after = _measured(history, wanted, since=begin + 1, at_least=settings.iterations)
    return None if after is None else EndComparison(after)


def _measured(history: History, points: Mapping[int, int | None], *, since: int, at_least: int) -> Measured | None:
    measured = history.measured(points, since=since)
    return measured if measured is not None and measured.iterations >= at_least else None
