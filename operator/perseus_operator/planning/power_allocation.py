"""Sharing watts between jobs by equal marginal value, and what a share means to one job. Pure.

``allocate`` is called by ``budgets`` for each PowerBudget; ``within`` by the planner for each job that has a share.

Throughput of a job is its number of GPUs times T_min over its iteration time: GPUs' worth of full speed. Along a
frontier energy e(t) is convex, so power e(t)/t is convex in speed 1/t (it is e's perspective): each watt buys less
speed than the one before. The most throughput for a budget is therefore found by giving watts to whoever gains most
from the next one, until they are gone; then nobody could gain more from a watt than its owner loses, and the gain of
the next watt is the budget's shadow price. Among jobs of different priority the higher is served first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from perseus_operator.api.job import JobSpec
from perseus_operator.planning.objective import FrontierView, Infeasible, Target

MIN_GAIN: Final = 0.02
"""By how much some job must be faster before watts move between jobs."""
_ROUNDING_W: Final = 1e-6
"""Shares are sums and differences of powers of up to 10⁹ W; a plan must not fall out of its own share by rounding."""


@dataclass(frozen=True)
class Claim:
    """What one job would do with watts.

    Attributes:
        job: namespace/name.
        priority: higher is served first.
        gpus: of the job.
        curve: (watts, speed), from the plan of least power to the one that the job's own objective asks for; speed is
            relative to T_min. Both rise strictly.
        about: changes when the job is another one for the allocation: its frontier.
    """

    job: str
    priority: int
    gpus: int
    curve: tuple[tuple[float, float], ...]
    about: str = ""

    @property
    def least_w(self) -> float:
        """At its most frugal plan."""
        return self.curve[0][0]

    @property
    def wanted_w(self) -> float:
        """At the plan that its own objective asks for."""
        return self.curve[-1][0]

    def throughput(self, share_w: float) -> float:
        """GPUs' worth of full speed with this share, by the straight lines between plans."""
        hull = self.hull()
        if share_w <= hull[0][0]:
            return hull[0][1]
        for (w0, s0), (w1, s1) in pairwise(hull):
            if share_w <= w1:
                return s0 + (s1 - s0) * (share_w - w0) / (w1 - w0)
        return hull[-1][1]

    def hull(self) -> list[tuple[float, float]]:
        """Watts and throughput of the plans that no mixture of others beats, least watts first."""
        hull: list[tuple[float, float]] = []
        for watts, speed in self.curve:
            place = (watts, self.gpus * speed)
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], place):
                hull.pop()
            hull.append(place)
        return hull


@dataclass(frozen=True)
class Allocation:
    """Who gets how many watts.

    Attributes:
        shares_w: by job.
        feasible: whether every job could at least run its most frugal plan.
        price: throughput that one more watt would bring; 0 if everybody has what it wants.
    """

    shares_w: Mapping[str, float] = field(default_factory=dict)
    feasible: bool = True
    price: float = 0.0

    @property
    def total_w(self) -> float:
        """Of all shares."""
        return math.fsum(self.shares_w.values())


@dataclass(frozen=True)
class Share:
    """What a PowerBudget grants one job."""

    budget: str
    watts: float | None
    """None: not known yet."""
    feasible: bool = True
    """Whether the budget is enough for the most frugal plans of all its jobs."""


def claim(job: str, frontier: FrontierView, *, copies: int, gpus: int, priority: int, wanted: int) -> Claim:
    """What a job would do with watts.

    Args:
        job: namespace/name.
        frontier: of one pipeline.
        copies: how often its energy is spent: data-parallel times tensor-parallel degree.
        gpus: of the job.
        priority: of the job.
        wanted: the point that its own objective asks for; it never runs a faster one.
    """
    curve: list[tuple[float, float]] = []
    for point in range(len(frontier.times_us) - 1, wanted - 1, -1):
        watts, speed = power_w(frontier, point, copies), frontier.t_min_us / frontier.times_us[point]
        # Slower for more power is never chosen.
        while curve and watts <= curve[-1][0]:
            curve.pop()
        curve.append((watts, speed))
    return Claim(job, priority, gpus, tuple(curve), frontier.digest)


def replicas_of(spec: JobSpec) -> int:
    """How often the energy of a frontier is spent: it is that of one pipeline."""
    return spec.pipeline.data_parallel * spec.pipeline.tensor_parallel


def power_w(frontier: FrontierView, point: int, copies: int) -> float:
    """Mean power of the whole job over an iteration at a point."""
    return 1000 * copies * frontier.energies_mj[point] / frontier.times_us[point]  # mJ / µs = kW


def allocate(budget_w: float, claims: Iterable[Claim]) -> Allocation:
    """The most throughput for the budget. O(points · log points) over all jobs.

    If not even the most frugal plans fit, every job gets what its own needs: together more than the budget.
    """
    known = sorted(claims, key=lambda claim: claim.job)
    shares = {claim.job: claim.least_w for claim in known}
    left_w = budget_w - math.fsum(shares.values())
    if left_w < -_ROUNDING_W:
        return Allocation(shares, feasible=False)
    price = 0.0
    for priority in sorted({claim.priority for claim in known}, reverse=True):
        steps = [
            (-_slope(low, high), claim.job, high[0] - low[0])
            for claim in known
            if claim.priority == priority
            for hull in [claim.hull()]
            for low, high in pairwise(hull)
        ]
        for slope, job, watts in sorted(steps):
            given_w = max(0.0, min(watts, left_w))
            shares[job] += given_w
            left_w -= given_w
            if given_w < watts:
                price = price or -slope
    return Allocation(shares, price=price)


def steady(before: Mapping[str, float], fresh: Allocation, claims: Sequence[Claim], budget_w: float) -> Allocation:
    """The shares to have, where ``before`` are those in force between the same jobs under the same budget: they stay
    unless they break it, starve somebody, or leave a job slower by ``MIN_GAIN`` than it could be. So a wish that moves
    a little, as a deadline's does with every iteration, moves no plan of another job.
    """
    kept = {claim.job: min(before.get(claim.job, 0.0), claim.wanted_w) for claim in claims}
    held = Allocation(kept, price=fresh.price)
    if not fresh.feasible or held.total_w > budget_w + _ROUNDING_W:
        return fresh
    for claim in claims:
        if kept[claim.job] < claim.least_w - _ROUNDING_W:
            return fresh
        if claim.throughput(fresh.shares_w[claim.job]) > claim.throughput(kept[claim.job]) * (1 + MIN_GAIN):
            return fresh
    return held


def within_share(
    asked: Target | Infeasible | None, share: Share | None, frontier: FrontierView | None, copies: int
) -> tuple[Target | Infeasible | None, bool]:
    """What a job may have of what its own objective asks for, and whether the share is what limits it."""
    if share is None or share.watts is None or frontier is None or not isinstance(asked, Target):
        return asked, False
    last, bound_w = len(frontier.times_us) - 1, share.watts + _ROUNDING_W
    fits = (p for p in range(last + 1) if power_w(frontier, p, copies) <= bound_w)
    point = next(fits, last)
    if point <= frontier.lookup(asked.time_us):
        return asked, False
    return Target(frontier.times_us[point], asked.note), True


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])
