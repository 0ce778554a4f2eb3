"""Whether a pool must run at default clocks since an autoscaler would otherwise want other replicas than without us.

Replicas with lowered clocks are busy for longer and hold more requests at once. An autoscaler that reads this adds
replicas, or keeps some that it would stop; their clocks fall further, and the saving is gone. So clocks are lowered
only where it wants the same number either way, and a tenth beyond: with as few replicas as it keeps, say, or with two
that one cannot replace. Its own formula says how many that is, from its own status, and from how much its pressure
rises with lowered clocks. This slowdown is learned whenever clocks change, from the pressure before and after, each
relative to the load of a replica; nothing is tried for it.

Clocks rise at once and fall after a hold, which is doubled each time that they must rise again soon. So the two loops
cannot swing against each other: ours is slower than the autoscaler's in one direction, and without effect on it in the
other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from perseus_operator.families.serving.features.autoscaler.reading import Autoscaler
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


class Restraint:
    """That of one pool."""

    def __init__(self) -> None:
        self.why = ""
        """What would act, in words; empty: clocks may be lowered."""
        self.slowdown = START_SLOWDOWN
        """By what factor the pressure is higher at lowered clocks."""
        self._metric = ("", "")
        """The autoscaler and its metric that decide, of which the slowdown is."""
        self._lowered: bool | None = None
        """Whether clocks were lowered at the last look; None: there was none."""
        self._hold_s = LEAST_HOLD_S
        self._free_since_s: float | None = None
        """Since when lowered clocks would have changed nothing; None: they would."""
        self._changed_s = self._lowered_s = -math.inf
        """When clocks have changed, and when they were lowered last."""
        self._each: float | None = None
        """The pressure relative to the load of a replica, mean since the clocks have settled."""
        self._before: float | None = None
        """The same before the clocks have changed."""

    @property
    def near(self) -> bool:
        """Whether all replicas must run at default clocks."""
        return bool(self.why)

    def looked(self, autoscalers: Sequence[Autoscaler], per_s: float | None, now_s: float, *, lowered: bool) -> None:
        """These are the autoscalers of the pool now.

        Args:
            autoscalers: that have measured something.
            per_s: requests that come a second to all replicas; None: not known.
            now_s: the time (monotonic).
            lowered: whether clocks follow the load now.
        """
        self._clocks_are(lowered, now_s)
        nearest = max(autoscalers, key=lambda one: one.nearest.pressure, default=None)
        if nearest is not None:
            self._measure(nearest, per_s, now_s)
        why = next(filter(None, (self._acts(one, now_s) for one in autoscalers)), "")
        if why:
            self._must_rise(why, now_s)
        elif self.near:
            self._free_since_s = now_s if self._free_since_s is None else self._free_since_s
            if now_s - self._free_since_s >= self._hold_s:
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
        self._before, self._each = self._each, None
        if lowered:
            self._lowered_s = now_s

    def _acts(self, one: Autoscaler, now_s: float) -> str:
        """Why an autoscaler would want other replicas at lowered clocks than at default ones; empty: it would not."""
        metric = one.nearest
        said = f"HorizontalPodAutoscaler {one.name} has {metric.name or 'a metric'} at {metric.current:.4g} of"
        said += f" {metric.target:.4g}"
        if one.wants_more:
            return f"{said}, and wants {one.desired} replicas of {one.replicas}"
        if self.slowdown <= INSENSITIVE:
            return ""
        pressure = metric.pressure
        # While it is not known whether the values are of these clocks or of those before, they are taken as both.
        settled = now_s - self._changed_s >= SETTLES_S
        least = pressure / self.slowdown if self._lowered and settled else pressure
        most = pressure if self._lowered else pressure * self.slowdown
        fewer, more = one.wanted(least * (1.0 - MARGIN)), one.wanted(most * (1.0 + MARGIN))
        if fewer == more:
            return ""
        return f"{said}: it may want {counted(more, 'replica')} at lowered clocks, and {fewer} at default ones"

    def _measure(self, one: Autoscaler, per_s: float | None, now_s: float) -> None:
        """Take in the pressure at these clocks, and once they have settled compare it with that at those before."""
        metric = one.nearest
        if (one.name, metric.name) != self._metric:
            self._metric, self._each, self._before = (one.name, metric.name), None, None
            self.slowdown = START_SLOWDOWN
        if not per_s or metric.pressure < _LEAST_PRESSURE or now_s - self._changed_s < SETTLES_S:
            return
        each = metric.pressure * one.replicas / per_s
        self._each = each if self._each is None else self._each + _WEIGHT * (each - self._each)
        if self._before is not None and now_s - self._changed_s >= 2.0 * SETTLES_S:
            seen = self._each / self._before if self._lowered else self._before / self._each
            self.slowdown += _MEASURED * (min(MOST_SLOWDOWN, max(1.0, seen)) - self.slowdown)
            self._before = None
