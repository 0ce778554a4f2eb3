"""Shares watts between jobs by equal marginal value.

The throughput of a job is its number of GPUs times T_min over its iteration time: GPUs' worth of full speed. Along a
frontier energy e(t) is convex, so power e(t)/t is convex in speed 1/t (it is the perspective of e): each watt buys less
speed than the one before. So the most throughput for a budget is found by giving each watt to the job that gains most
from it, until no watt is left. Then no job could gain more from a watt than its owner would lose, and the gain of the
next watt is the budget's shadow price. Jobs of higher priority are served first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

MIN_GAIN: Final = 0.02
"""Watts move between jobs only if some job becomes faster by this share."""
ROUNDING_W: Final = 1e-6
"""Shares are sums and differences of powers of up to 10⁹ W; a plan must not fall out of its own share by rounding."""


@dataclass(frozen=True)
class Claim:
    """What speed one job would reach with how many watts.

    Attributes:
        job: namespace/name.
        priority: higher is served first.
        gpus: of the job.
        curve: (watts, speed), from the plan of least power to the one that the job's own objective asks for; speed is
            relative to T_min. Both rise strictly.
        subject: digest of the frontier: with another one, the job is another job for the allocation.
    """

    job: str
    priority: int
    gpus: int
    curve: tuple[tuple[float, float], ...]
    subject: str = ""

    @property
    def least_w(self) -> float:
        """Watts at the plan of least power."""
        return self.curve[0][0]

    @property
    def wanted_w(self) -> float:
        """Watts at the plan that the job's own objective asks for."""
        return self.curve[-1][0]

    def speed(self, share_w: float) -> float:
        """Speed of the fastest plan that this share allows; of the one of least power, if it allows none."""
        return max((speed for watts, speed in self.curve if watts <= share_w + ROUNDING_W), default=self.curve[0][1])

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
        """Watts and throughput of the plans on the upper convex hull, least watts first."""
        hull: list[tuple[float, float]] = []
        for watts, speed in self.curve:
            point = (watts, self.gpus * speed)
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
                hull.pop()
            hull.append(point)
        return hull


@dataclass(frozen=True)
class Allocation:
    """How many watts each job gets.

    Attributes:
        shares_w: by job.
        feasible: whether every job can at least run its plan of least power.
        price: throughput that one more watt would bring; 0 if every job has what it wants.
    """

    shares_w: Mapping[str, float] = field(default_factory=dict)
    feasible: bool = True
    price: float = 0.0

    @property
    def total_w(self) -> float:
        """Sum of all shares."""
        return math.fsum(self.shares_w.values())


@dataclass(frozen=True)
class Share:
    """What a PowerBudget grants one job."""

    budget: str
    watts: float | None
    """None: not known yet."""
    feasible: bool = True
    """Whether the budget is enough for the plans of least power of all its jobs."""
    held_w: float = math.inf
    """What the job's GPUs can draw by their power limits: no plan draws more, whatever its profile says."""
    hold_s: int = 0
    """How long the job is to stay within it once no operator runs."""
    budget_w: float | None = field(default=None, compare=False)
    """What the budget shares among all its jobs, as it is said; None: not known."""

    @property
    def said(self) -> str:
        """What is granted, and of how much: ``1,234 W of its 2,000 W are granted``."""
        watts = 0.0 if self.watts is None else self.watts
        if self.budget_w is None or round(watts) == round(self.budget_w):
            return f"{watts:,.0f} W are granted"
        if watts < self.budget_w:
            return f"{watts:,.0f} W of its {self.budget_w:,.0f} W are granted"
        return f"{watts:,.0f} W are granted, more than its {self.budget_w:,.0f} W"


def allocate(budget_w: float, claims: Iterable[Claim]) -> Allocation:
    """Allocate a budget for the most throughput. O(points · log points) over all jobs.

    If not even the plans of least power fit, every job gets what its own such plan needs: together more than the
    budget.
    """
    ordered = sorted(claims, key=lambda claim: claim.job)
    shares = {claim.job: claim.least_w for claim in ordered}
    left_w = budget_w - math.fsum(shares.values())
    if left_w < -ROUNDING_W:
        return Allocation(shares, feasible=False)
    price = 0.0
    for priority in sorted({claim.priority for claim in ordered}, reverse=True):
        steps = [
            (-_slope(low, high), claim.job, high[0] - low[0])
            for claim in ordered
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


def steady(
    before: Mapping[str, float], fresh: Allocation, claims: Sequence[Claim], budget_w: float, *, raised: bool = False
) -> Allocation:
    """Keep the shares in force if they are good enough.

    They stay unless they exceed the budget, give a job too little for any plan, or leave a job slower by ``MIN_GAIN``
    than it could be. So a target that changes a little, as a deadline's does with every iteration, changes no plan of
    another job. Watts that have come since belong to no job, so there the least gain counts: one plan of one job.

    Args:
        before: shares in force, between the same jobs, in watts.
        fresh: the best allocation now.
        claims: of the jobs.
        budget_w: the budget.
        raised: whether it is more than the shares in force were decided for.
    """
    kept = {claim.job: min(before.get(claim.job, 0.0), claim.wanted_w) for claim in claims}
    held = Allocation(kept, price=fresh.price)
    if not fresh.feasible or held.total_w > budget_w + ROUNDING_W:
        return fresh
    for claim in claims:
        if kept[claim.job] < claim.least_w - ROUNDING_W:
            return fresh
        share_w, kept_w = fresh.shares_w[claim.job], kept[claim.job]
        if claim.throughput(share_w) > claim.throughput(kept_w) * (1 + MIN_GAIN):
            return fresh
        if raised and claim.speed(share_w) > claim.speed(kept_w):
            return fresh
    return held


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[1] - low[1]) / (high[0] - low[0])
