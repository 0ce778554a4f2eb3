"""How many replicas to advise, and for how long: up at once, down when a start would have paid.

The number that a load needs changes with every minute; replicas take minutes to start. Until one that is not needed has
drawn as much as starting it again takes, stopping it may cost more than it saves (the rule of who rents skis), so what
is advised is the most that was needed within that time, and within `MINIMUM_S` at least. What is needed follows from
the load alone: not from how many replicas there are, nor from how busy they are. So nothing comes back when others
scale, by our advice or against it, and there is nothing to swing.

A model is believed up to `TRUST` times the load that a replica has been seen with. Fewer replicas are therefore come
to by steps, each of which shows whether the last was right; with replicas that are more than enough, it asks for no
more of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from perseus_operator.families.serving.features.advice.capacity import Capacity, without_watts
from perseus_operator.families.serving.features.advice.forecast import LoadForecast
from perseus_operator.families.serving.features.advice.starts import UNMEASURED_S, Starts
from perseus_operator.objects.formatting import counted, per_minute, stamp
from perseus_operator.objects.values import Now
from perseus_solver.serving.planner import MOST_REPLICAS, OperatingPoint

MINIMUM_S: Final = 300.0
"""Of a replica that was advised: as long as an HPA waits before it scales down, unless it is set otherwise."""
HEADROOM: Final = 1.25
"""Over the load of the last minute, whatever is forecast: what doubles in a quarter of an hour grows by a quarter in
the five minutes that a start takes, and accordingly in those that were measured."""
_LEAST_HEADROOM: Final = 1.1
"""However short a start is: a minute of few requests says less than the next brings."""
TRUST: Final = 2.0
"""With less, of two replicas neither could ever be stopped."""
_SLOT_S: Final = 10.0
_LONGEST_S: Final = 3_600.0
"""That a replica is kept. Where nothing is saved without it, it is kept for longer."""
_RESTORED_S: Final = 600.0
"""That the advice of an earlier operator holds while nothing is known yet."""
_COMPUTE_S: Final = 60.0
_FIT_S: Final = 600.0
"""How often what a replica carries is computed, and how often an engine is fitted for that: half a second of a core."""


@dataclass(frozen=True)
class Advice:
    """What is advised.

    Attributes:
        replicas: how many; None: nothing is.
        why: in words.
        since_s: when this number was first advised.
        per_s: requests that come a second.
        expected_per_s: the most that is expected until a start would be done.
    """

    replicas: int | None = None
    why: str = ""
    since_s: float = 0.0
    per_s: float | None = None
    expected_per_s: float | None = None


@dataclass(frozen=True)
class Situation:
    """What else there is to know.

    Attributes:
        replicas: that say what they do.
        unsure: why fewer replicas must not be advised now; empty: they may be.
    """

    replicas: int
    unsure: str = ""


class Adviser:
    """The advice of one pool. It is None until the load has been counted for a minute."""

    def __init__(self, forecast: LoadForecast | None = None) -> None:
        """``forecast``: of the pool's load, where there is one already; another engine does not change it."""
        self.advice = Advice()
        self.capacity = Capacity()
        self._needed: deque[tuple[int, int]] = deque()
        """The most that was needed in a slot of ten seconds, with its number."""
        self._seen_per_s = 0.0
        """The most that replicas had each, on average, over a minute."""
        self.forecast = forecast or LoadForecast()
        self.starts = Starts()
        self._holds_until_s = -math.inf
        self._computing = False
        self._compute_at_s = self._fit_at_s = -math.inf

    # ------------------------------------------------------------------------------------------- what a replica carries

    def compute_due(self, now_s: float) -> bool:
        """Whether to compute what a replica carries."""
        return not self._computing and now_s >= self._compute_at_s

    def fit_due(self, now_s: float) -> bool:
        """Whether its engine may be fitted for that."""
        return now_s >= self._fit_at_s

    def compute_started(self, now_s: float, *, fits: bool) -> None:
        """It is being computed, and its engine fitted first or not."""
        self._computing, self._compute_at_s = True, now_s + _COMPUTE_S
        if fits:
            self._fit_at_s = now_s + _FIT_S

    def computed(self, capacity: Capacity) -> None:
        """What a replica carries was computed."""
        self.capacity, self._computing = capacity, False

    def limits_changed(self) -> None:
        """What a replica carries within other limits must be computed."""
        self.capacity, self._compute_at_s = replace(self.capacity, point=None), -math.inf

    # ---------------------------------------------------------------------------------------------------------- advice

    def restored(self, replicas: int, since_s: float, wall_s: float) -> None:
        """An earlier operator has advised this: it holds as if it had been needed until now."""
        self.advice = Advice(replicas, "An earlier operator has advised it.", since_s)
        self._holds_until_s = wall_s + _RESTORED_S
        self._need(replicas, wall_s)

    def refused(self, why: str, wall_s: float) -> None:
        """Nothing can be advised; what was needed before still counts, once something can."""
        if wall_s >= self._holds_until_s:
            self.advice = Advice(why=why)

    def looked(self, per_s: float, situation: Situation, now: Now) -> None:
        """It is this time now, and so many requests come a second."""
        point = self.capacity.point
        if point is None:
            refusal = self.capacity.refusal or "it is being computed"
            self.refused(f"What a replica carries is not known: {refusal}.", now.wall_s)
            return
        self._seen_per_s = max(self._seen_per_s, per_s / max(1, situation.replicas))
        start_s = self.starts.start_s
        headroom = max(_LEAST_HEADROOM, HEADROOM ** (start_s / UNMEASURED_S))
        expected_per_s = self.forecast.most(per_s, now.wall_s, start_s, headroom)
        needed = max(1, point.fewest(expected_per_s))
        if needed > MOST_REPLICAS:
            why = f"{per_minute(expected_per_s)} requests a minute need more than {MOST_REPLICAS:,} replicas."
            self.refused(why, now.wall_s)
            return
        tried = math.ceil(per_s / (TRUST * self._seen_per_s) - 1e-9) if self._seen_per_s else 1
        if not self._needed:
            # What there is may be needed: a load that comes back each minute has not been seen yet.
            self._need(max(needed, situation.replicas), now.wall_s)
        self._need(max(needed, tried), now.wall_s)
        before = self.advice.replicas or 0
        kept, kept_s = self._kept(before, per_s, point, now.wall_s)
        advised = max(kept, before if situation.unsure else 1)
        why = _why(point, per_s, expected_per_s, needed)
        if advised > max(needed, tried):
            why += " " + self._why_kept(advised, kept, kept_s, situation, now.wall_s)
        elif tried > needed:
            why += f" No replica has had more than {per_minute(self._seen_per_s)} yet, so fewer are tried step by step."
        since_s = self.advice.since_s if advised == before else now.wall_s
        self.advice = Advice(advised, why, since_s, per_s, expected_per_s)

    def _need(self, replicas: int, wall_s: float) -> None:
        number = math.floor(wall_s / _SLOT_S)
        if self._needed and self._needed[-1][0] >= number:
            number, before = self._needed.pop()
            replicas = max(replicas, before)
        while self._needed and self._needed[-1][1] <= replicas:  # a later and greater need outlasts it
            self._needed.pop()
        self._needed.append((number, replicas))
        while self._needed[0][0] < number - _LONGEST_S / _SLOT_S:
            self._needed.popleft()

    def _kept(self, advised: int, per_s: float, point: OperatingPoint, wall_s: float) -> tuple[int, float]:
        """The most that was needed for as long as a replica less must not have been, and how long that is."""
        kept_s = self._pays_after_s(advised, per_s, point) if advised > 1 else MINIMUM_S
        if math.isinf(kept_s):
            return max(advised, self._needed[-1][1]), kept_s
        earliest = math.floor((wall_s - kept_s) / _SLOT_S)
        return max(replicas for number, replicas in self._needed if number >= earliest), kept_s

    def _pays_after_s(self, advised: int, per_s: float, point: OperatingPoint) -> float:
        """After how long without a replica less was drawn than a start takes; infinite: nothing would be saved."""
        if without_watts(self.capacity):
            return 2.0 * MINIMUM_S
        saved_w = _drawn_w(point, advised, per_s) - _drawn_w(point, advised - 1, per_s)
        if saved_w <= 0.0:
            return math.inf
        return min(_LONGEST_S, max(MINIMUM_S, self.starts.start_s * point.watts[0] / saved_w))

    def _why_kept(self, advised: int, kept: int, kept_s: float, situation: Situation, wall_s: float) -> str:
        if situation.unsure and advised > kept:
            return f"No fewer than before are advised: {situation.unsure}."
        if math.isinf(kept_s):
            return f"With one less than {advised} nothing would be saved."
        last = max(number for number, replicas in self._needed if replicas >= advised)
        until = stamp(max(wall_s, (last + 1) * _SLOT_S + kept_s))
        return (
            f"{advised} stay until {until} at least: starting one again takes more than stopping it saves until then."
        )


def _drawn_w(point: OperatingPoint, replicas: int, per_s: float) -> float:
    """What so many replicas draw at a load, if they carry it."""
    load, loads, watts = min(per_s / replicas, point.loads[-1]), point.loads, point.watts
    place = max(1, next(at for at, most in enumerate(loads) if most >= load))
    share = (load - loads[place - 1]) / (loads[place] - loads[place - 1])
    return replicas * (watts[place - 1] + share * (watts[place] - watts[place - 1]))


def _why(point: OperatingPoint, per_s: float, expected_per_s: float, needed: int) -> str:
    each = point.carried_by(needed) / needed
    return (
        f"{per_minute(per_s)} requests a minute come, and at most {per_minute(expected_per_s)} are expected within"
        f" minutes; each of {counted(needed, 'replica')} carries {per_minute(each)} at its highest clock."
    )
