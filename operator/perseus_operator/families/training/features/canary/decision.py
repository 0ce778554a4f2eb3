"""Mode Canary: the plan on one pipeline first, then on all, or on none.

The pipelines of a job do the same work, so in each iteration the others are what the first is compared with, at default
clocks. Pipelines differ by their GPUs, so what counts is how the ratio between them changes against the baseline. A job
of one pipeline is compared with its baseline itself.

Something else may slow the pipeline at that moment, and only time tells: an attempt that is too slow ends at once, and
is repeated after a pause at default clocks. What it saves is no such accident, so that is judged once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import Mode
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.canary.state import Canary, JudgeCanary, Phase
from perseus_operator.families.training.features.comparison.state import interval
from perseus_operator.nodes.iterations import JobIteration, Measured
from perseus_operator.objects.formatting import percent

ITERATIONS: Final = 10
"""Iterations that are compared: enough to tell a saving of 3 % from a scatter of 3 %, by Student's t."""
TOLERANCE: Final = 0.01
"""Share by which iterations may be slower than planned: what the bound guard tolerates, too."""
ATTEMPTS: Final = 3
"""Too slow in as many, and it is the plan."""
PAUSE: Final = 20
"""Iterations at default clocks after the first attempt; each pause is twice as long as the one before."""


@dataclass(frozen=True)
class CanaryStep:
    """What to do while the plan is not for all pipelines.

    Attributes:
        points: of each pipeline, by dp; None: no plan.
        waiting: why the plan is not in force.
        drive: whether clocks may be set at all.
        action: to be done now; None: nothing.
    """

    points: Mapping[int, int | None]
    waiting: Explanation
    drive: bool = True
    action: JudgeCanary | None = None


def next_canary_step(
    canary: Canary, facts: Facts, wanted: Mapping[int, int], slowdowns: Mapping[int, float]
) -> CanaryStep | None:
    """The next step; None: the plan is for all pipelines.

    Args:
        canary: how far it is.
        facts: of the job.
        wanted: points of the plan, by dp; not empty.
        slowdowns: of the stragglers, by dp.
    """
    frontier, history, nodes = facts.frontier, facts.history, facts.nodes
    if facts.spec.mode is not Mode.CANARY or canary.phase is Phase.PASSED or frontier is None or history is None:
        return None
    if canary.phase is Phase.FAILED:
        message = f"{canary.why} All pipelines run at default clocks until objective or mode are edited."
        return CanaryStep({}, Explanation(Reason.CANARY_FAILED, message), drive=False)
    nowhere = dict.fromkeys(wanted)
    first, *others = sorted(wanted)
    if slowdowns:
        waiting = Explanation(Reason.CANARY, "The canary waits until no pipeline is a straggler.")
        # Only the plan tells it from the others.
        selected = [node.plans.selected.get(first) for node in nodes.values()]
        alone = set(slowdowns) == {first} and any(point is not None for point in selected)
        why = f"With the plan pipeline {first} became a straggler, {percent(max(slowdowns.values()) - 1)} slower."
        slow = JudgeCanary(_too_slow(canary, facts, None, max(slowdowns.values()) - 1, why)) if alone else None
        return CanaryStep(nowhere, waiting, action=slow)
    if nodes.furthest_iteration < canary.resume_at:
        attempt = f"attempt {canary.slow_attempts + 1} of {ATTEMPTS} begins at iteration {canary.resume_at}"
        return CanaryStep(nowhere, Explanation(Reason.CANARY, f"{canary.why} All run at default clocks; {attempt}."))
    points = {**nowhere, first: wanted[first]}
    # The first iteration after a change may still contain some of it.
    counted = [i for i in history.recent if i.iteration > nodes.plan_since and i.points == points and not i.mixed]
    where = f"pipeline {first} of {len(wanted)} alone" if others else "the only pipeline"
    message = f"The plan runs on {where}: {len(counted)} of {ITERATIONS} iterations are compared with default clocks."
    waiting = Explanation(Reason.CANARY, message)
    if len(counted) < ITERATIONS:
        return CanaryStep(points, waiting)
    planned = frontier.expected_us[wanted[first]] / frontier.expected_us[0] - 1
    ran = _Figures.of(counted, facts.baseline)
    usual = _Figures.of(history.unplanned, None) or _assumed(facts.baseline, alone=not others)
    return CanaryStep(points, waiting, action=JudgeCanary(_judge(canary, facts, ran, usual, planned)))


def _judge(canary: Canary, facts: Facts, ran: _Figures | None, usual: _Figures | None, planned: float) -> Canary:
    if ran is None or usual is None:
        return Canary(Phase.FAILED, why="The energy of some pipeline is not known, so nothing can be compared.")
    usual_energy = median(usual.energies)
    saved = interval([1 - energy / usual_energy for energy in ran.energies])
    slowdown = ran.slowdown if ran.slowdown is not None else median(ran.times) / median(usual.times) - 1
    if slowdown > planned + TOLERANCE:
        why = f"The canary was {percent(slowdown)} slower, {percent(planned)} were planned."
        return _too_slow(canary, facts, saved.mean, slowdown, why)
    if saved.low is None or saved.low <= 0:
        why = f"The canary saved {percent(saved.mean)}, which may be nothing but scatter."
        return Canary(Phase.FAILED, saved.mean, slowdown, why)
    return Canary(Phase.PASSED, saved.mean, slowdown)


def _too_slow(canary: Canary, facts: Facts, saved: float | None, slowdown: float, why: str) -> Canary:
    earlier = canary.slow_attempts
    if earlier + 1 >= ATTEMPTS:
        return Canary(Phase.FAILED, saved, slowdown, why, earlier + 1)
    resume_at = facts.nodes.furthest_iteration + PAUSE * 2**earlier
    return Canary(Phase.TESTING, saved, slowdown, why, earlier + 1, resume_at)


@dataclass(frozen=True)
class _Figures:
    """Of the first pipeline against the others, in each iteration; see ``FirstPipeline``."""

    times: Sequence[float]
    energies: Sequence[float]
    slowdown: float | None = None
    """Of whole iterations against the baseline, where spans contain waits for other pipelines; None: they do not."""

    @classmethod
    def of(cls, iterations: Sequence[JobIteration], baseline: Measured | None) -> _Figures | None:
        """Those of iterations; None: there are none, or too few whose energy is known."""
        first = [iteration.first for iteration in iterations if iteration.first is not None]
        energies = [each.energy for each in first if each.energy is not None]
        if not energies or 2 * len(energies) <= len(first):
            return None
        waits = baseline is not None and not all(iteration.own_time for iteration in iterations)
        whole = median(i.time_us for i in iterations) / baseline.time_us - 1 if waits and baseline else None
        return cls([each.time for each in first], energies, whole)


def _assumed(baseline: Measured | None, *, alone: bool) -> _Figures | None:
    """At default clocks, as an operator that has restarted must assume: pipelines do the same work."""
    if not alone:
        return _Figures([1.0], [1.0])
    if baseline is None or not baseline.energy_mj:
        return None
    return _Figures([baseline.time_us], [baseline.energy_mj])
