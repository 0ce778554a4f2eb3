"""Whether a pool must run at default clocks since an autoscaler would otherwise want other replicas than without us.

Replicas with lowered clocks are busy for longer and hold more requests at once. An autoscaler that reads this adds
replicas, or keeps some that it would stop; their clocks fall further, and the saving is gone. So clocks are lowered
only where it wants the same number either way, and a tenth beyond: with as few replicas as it keeps, say, or with two
that one cannot replace. Its own formula says how many that is, from its own status, and from how much its pressure
rises with lowered clocks. This slowdown is learned by metric whenever clocks change, from the pressure before and
after, each relative to the load of a replica; nothing is tried for it. An operator that starts learns it anew.

Clocks rise at once and fall after a hold, which is doubled each time that they must rise again soon. So the two loops
cannot swing against each other: ours is slower than the autoscaler's in one direction, and without effect on it in the
other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import Final

from perseus_operator.families.serving.features.autoscaler.reading import Autoscaler, Metric
from perseus_operator.objects.formatting import counted

MARGIN: Final = 0.1
"""By what share the pressure may change within the minute that clocks and the autoscaler's metrics need to follow."""
LEAST_HOLD_S: Final = 300.0
"""An autoscaler looks back as long before it scales down, unless it is set otherwise."""
MOST_HOLD_S: Final = 3_600.0
"""So a load of the next hour of the day is judged anew."""
START_SLOWDOWN: Final = 1.5
"""Until there is a measured one: more than a table lowers, whose clocks keep limits that default clocks keep, too."""
MOST_SLOWDOWN: Final = 3.0
INSENSITIVE: Final = 1.05
"""Below this slowdown the metric does not follow clocks, as the rate of requests does not."""
SETTLES_S: Final = 60.0
"""After a change of clocks, until the autoscaler's averages over a minute show it."""
_WEIGHT: Final = 0.3
"""Of the latest look in a mean: about a minute of looks."""
_MEASURED: Final = 0.5
"""Of what a change has shown: one burst meanwhile does not decide."""
_LEAST_PRESSURE: Final = 0.02
"""Below that a ratio of two pressures says nothing."""
MOST_LEARNED: Final = 16
"""Metrics of a pool that are remembered: those nearest to their targets, and of others the latest."""


@dataclass
class _Learned:
    """What is known of one metric."""

    slowdown: float = START_SLOWDOWN
    """By what factor it is higher at lowered clocks."""
    each: float | None = None
    """The pressure relative to the load of a replica, mean since the clocks have settled."""
    before: float | None = None
    """The same before the clocks have changed."""

    def seen(self, each: float, since_s: float, *, lowered: bool) -> None:
        """Take in what it is relative to the load, so long after a change of clocks."""
        self.each = each if self.each is None else self.each + _WEIGHT * (each - self.each)
        if self.before is not None and since_s >= 2.0 * SETTLES_S:
            ratio = self.each / self.before if lowered else self.before / self.each
            self.slowdown += _MEASURED * (min(MOST_SLOWDOWN, max(1.0, ratio)) - self.slowdown)
            self.before = None


class Restraint:
    """That of one pool."""

    def __init__(self) -> None:
        self.why = ""
        """What would act, in words; empty: clocks may be lowered."""
        self._learned: dict[tuple[str, str], _Learned] = {}
        """By autoscaler and metric."""
        self._near: set[str] = set()
        """The autoscalers for which clocks are held."""
        self._lowered: bool | None = None
        """Whether clocks were lowered at the last look; None: there was none."""
        self._hold_s = LEAST_HOLD_S
        self._free_since_s: float | None = None
        """Since when lowered clocks would have changed nothing; None: they would."""
        self._changed_s = self._lowered_s = -math.inf
        """When clocks have changed, and when they were lowered last."""

    @property
    def near(self) -> bool:
        """Whether all replicas must run at default clocks."""
        return bool(self.why)

    def slowdown(self, autoscaler: str, metric: str) -> float:
        """By what factor a metric of an autoscaler is higher at lowered clocks, as far as is known."""
        learned = self._learned.get((autoscaler, metric))
        return START_SLOWDOWN if learned is None else learned.slowdown

    def looked(
        self,
        autoscalers: Sequence[Autoscaler],
        per_s: float | None,
        now_s: float,
        *,
        lowered: bool,
        exist: Collection[str] | None = None,
    ) -> None:
        """These are the autoscalers of the pool now.

        Args:
            autoscalers: that have measured something.
            per_s: requests that come a second to all replicas; None: not known.
            now_s: the time (monotonic).
            lowered: whether clocks follow the load now.
            exist: names of all that there are, whatever they measure; None: not known.
        """
        self._clocks_are(lowered, now_s)
        self._measure(autoscalers, per_s, now_s)
        whys = {one.name: why for one in autoscalers if (why := self._acts(one, now_s))}
        if exist is not None:
            self._forget(exist)
        self._near |= whys.keys()
        if whys:
            self._must_rise(next(iter(whys.values())), now_s)
        elif self.near:
            self._free_since_s = now_s if self._free_since_s is None else self._free_since_s
            if now_s - self._free_since_s >= self._hold_s:
                self.why, self._near = "", set()

    def _forget(self, exist: Collection[str]) -> None:
        """Of autoscalers that are gone nothing holds clocks any more."""
        self._learned = {key: learned for key, learned in self._learned.items() if key[0] in exist}
        self._near.intersection_update(exist)
        if not self._near:
            self.why = ""

    def _must_rise(self, why: str, now_s: float) -> None:
        if not self.near and self._lowered:
            again = now_s - self._lowered_s < MOST_HOLD_S
            self._hold_s = min(MOST_HOLD_S, 2.0 * self._hold_s) if again else LEAST_HOLD_S
        self.why, self._free_since_s = why, None

    def _clocks_are(self, lowered: bool, now_s: float) -> None:
        if self._lowered in (None, lowered):
            self._lowered = lowered
            return
        self._lowered, self._changed_s = lowered, now_s
        for learned in self._learned.values():
            learned.before, learned.each = learned.each, None
        if lowered:
            self._lowered_s = now_s

    def _acts(self, one: Autoscaler, now_s: float) -> str:
        """Why an autoscaler would want other replicas at lowered clocks than at default ones; empty: it would not."""
        if one.wants_more:
            return f"{_said(one, one.nearest)}, and wants {one.desired} replicas of {one.replicas}"
        # While it is not known whether the values are of these clocks or of those before, they are taken as both.
        settled = now_s - self._changed_s >= SETTLES_S
        least, most = 0.0, (0.0, one.nearest)
        for metric in one.metrics:
            pressure, slowdown = metric.pressure, self.slowdown(one.name, metric.name)
            follows = slowdown > INSENSITIVE
            lower = pressure / slowdown if follows and self._lowered and settled else pressure
            upper = pressure * slowdown if follows and not self._lowered else pressure
            margin = MARGIN if follows else 0.0
            least = max(least, lower * (1.0 - margin))
            most = max(most, (upper * (1.0 + margin), metric), key=lambda two: two[0])
        fewer, more = one.wanted(least), one.wanted(most[0])
        if fewer == more:
            return ""
        said = _said(one, most[1])
        return f"{said}: it may want {counted(more, 'replica')} at lowered clocks, and {fewer} at default ones"

    def _measure(self, autoscalers: Sequence[Autoscaler], per_s: float | None, now_s: float) -> None:
        """Take in the pressure at these clocks, and once they have settled compare it with that at those before."""
        measured = {(one.name, metric.name): (one, metric) for one in autoscalers for metric in one.metrics}
        nearest = nlargest(MOST_LEARNED, measured, key=lambda key: measured[key][1].pressure)
        kept = {key: self._learned.get(key) or _Learned() for key in nearest} | self._learned
        self._learned = {key: kept[key] for key in list(kept)[:MOST_LEARNED]}
        since_s = now_s - self._changed_s
        for key in nearest:
            one, metric = measured[key]
            if per_s and metric.pressure >= _LEAST_PRESSURE and since_s >= SETTLES_S:
                each = metric.pressure * one.replicas / per_s
                self._learned[key].seen(each, since_s, lowered=bool(self._lowered))


def _said(one: Autoscaler, metric: Metric) -> str:
    name = metric.name or "a metric"
    return f"HorizontalPodAutoscaler {one.name} has {name} at {metric.current:.4g} of {metric.target:.4g}"
