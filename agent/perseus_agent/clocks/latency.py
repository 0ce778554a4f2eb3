"""How long one GPU takes to change its clock: measured by reading the clock after writes, assumed until enough are.

Every write tells how long it waited for its turn and how long the driver's call took. Of some writes (all of them while
a plan has one clock, as in a profiling sweep) the SM clock is read until it is the one that was asked for. ``read_us``
says when to read; a reading that is not taken in time ends that measurement and nothing else. So does the next write:
then it is known only that the change takes longer than was seen, and that counts as what it is. Without it, a plan that
changes its clocks often would show only the quick changes. The meter belongs to the thread of its GPU; ``switch``,
``lead`` and ``described`` return plain values that other threads may use. Times are microseconds of one clock;
nothing here reads a clock or a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from perseus_agent.clocks.call_queue import ESTIMATE_EVERY, Wait, Waits
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import StagePlan
from perseus_core.clock_latency import ClockLatency, Transition
from perseus_core.latency import SwitchLatency, by_clock, corrected

KEPT: Final = 256
"""Changes remembered: enough for a 99th percentile that two outliers do not make."""
ENOUGH: Final = 32
"""Changes after which the measured latency is used in place of the published one."""
TRANSITIONS_KEPT: Final = 64
KEPT_OF_TRANSITION: Final = 32
READ_SHARE: Final = 0.005
"""Of time, at most, that is spent on reading clocks for this, beyond sweeps."""
WAKE_US: Final = 100
"""What one more reading costs in any case: the thread is woken for it."""
READ_MIN_US: Final = 100
READ_STEPS: Final = 16
"""The clock is read again after a sixteenth of the time since the call began: so precise is a measurement."""
GIVE_UP: Final = 2.0
"""Times the 99th percentile: a clock that is not reached by then is held back by something else, such as power."""
EFFECTS_KEPT: Final = 4_096
_DEFAULT_CLOCKS: Final = 1 << 30
"""Stands for the default clocks, which are above any that is locked."""
_REMAINING: Final = (0.5 - 1e-9, 0.01 - 1e-9)
"""Shares of the changes that take longer than the median, and than the 99th percentile."""


class Effect(NamedTuple):
    """From when on a clock was in effect, by measurement or by the median latency."""

    time_us: int
    mhz: int | None


class _Seen(NamedTuple):
    """A change that took so long, or longer."""

    us: int
    longer: bool = False


class Quantiles(NamedTuple):
    """Median and 99th percentile, µs, and how many values they are of."""

    p50_us: int
    p99_us: int
    values: int


@dataclass
class _Open:
    """A change whose effect is being waited for."""

    began_us: int
    before_mhz: int | None
    mhz: int
    tolerance_mhz: int
    effect: int  # number of its entry, ever
    settled: bool  # the clock before was seen in effect, or long enough ago
    seen_us: int = 0  # so long it was seen not to be in effect


class LatencyMeter:
    """The changes of one GPU's clock."""

    def __init__(self, published: SwitchLatency, since_us: int, waits: Waits | None = None) -> None:
        """Nothing is measured yet: ``published`` holds. ``waits``: of the node; None: this GPU waits for no others."""
        self._published = published
        self._since_us = since_us
        self._waits = waits or Waits()
        self._spent_us = 0
        self._calls_us: deque[int] = deque(maxlen=KEPT)
        self._changes: deque[_Seen] = deque(maxlen=KEPT)
        self._of_transition: dict[tuple[int, int], deque[_Seen]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._open: _Open | None = None
        self._reached = True  # the last write was seen in effect; before the first, nobody has written
        self._wrote_us = since_us
        self._owed = False  # a reading has shown only that the last write is in effect: the next one is measured
        self._effects = 0
        self.effects: deque[Effect] = deque(maxlen=EFFECTS_KEPT)
        """The clocks of the last writes, oldest first."""
        self.measured = 0
        """Changes measured, ever."""
        self.every = False
        """Measure every change, as while a plan has one clock."""
        self.read_us = 0
        """When to read the clock and call ``read``; 0: not at all."""
        self.switch = published
        """From the begin of a call to the clock in effect."""
        self._given: Mapping[int, SwitchLatency] = {}
        self._lead = self._with_wait = Lead.of(published)
        self._parts: tuple[Lead, Wait] | None = None

    @property
    def enough(self) -> bool:
        """Whether ``switch`` is measured."""
        return self.measured >= ENOUGH

    @property
    def lead(self) -> Lead:
        """From the moment at which a clock is wanted: with the wait for a turn. GPUs that compute together are as fast
        as the one whose turn comes last.
        """
        alone, wait = parts = self._lead, self._waits.usual
        if parts == self._parts:  # asked at each look, and changed at some writes
            return self._with_wait
        soonest_us, latest_us = max(wait.median_us - wait.late_us, 0), wait.median_us + wait.late_us
        self._parts, self._with_wait = (
            parts,
            alone._replace(
                median_us=alone.median_us + (soonest_us + latest_us) // 2,
                deviation_us=alone.deviation_us + (latest_us - soonest_us) // 2,
                worth_us=alone.worth_us + latest_us - soonest_us,
                turn_us=alone.turn_us + latest_us - soonest_us,
            ),
        )
        return self._with_wait

    def follow(self, plan: StagePlan | None) -> None:
        """A plan is followed: what it was rehearsed under holds for each clock until it is measured here."""
        self.every = plan is not None and plan.uniform
        if plan is not None and plan.changes is not self._given:
            self._given = plan.changes
            self._estimate()

    @property
    def calls(self) -> Quantiles:
        """Of the driver's calls alone; the published median where there was none."""
        return _quantiles(self._calls_us) or Quantiles(*2 * (self._published.call_us,), 0)

    def transitions(self) -> tuple[Transition, ...]:
        """By the clocks changed between: the most frequent first."""
        ordered = sorted(self._of_transition.items(), key=lambda item: -self._counts[item[0]])
        return tuple(
            Transition(*key, self._counts[key], quantiles.p50_us, quantiles.p99_us)
            for key, changes in ordered
            if self._counts[key] and (quantiles := _quantiles_of(changes, self._published))
        )

    def described(self) -> ClockLatency:
        """What is known of this GPU: as measured, or as published for its model while too little is."""
        switch = self.switch
        return ClockLatency(
            p50_us=switch.p50_us,
            p99_us=switch.p99_us,
            call_us=self.calls.p50_us,
            shared_lock=switch.shared_lock,
            source=switch.source,
            changes=self.measured if self.enough else 0,
            transitions=self.transitions(),
        )

    def wrote(
        self,
        before_mhz: int | None,
        mhz: int | None,
        *,
        wanted_us: int,
        began_us: int,
        ended_us: int,
        tolerance_mhz: int,
    ) -> None:
        """A call has changed the clock.

        Args:
            before_mhz, mhz: the clocks asked for before and now; None: the default clocks.
            wanted_us: when the change was first wanted.
            began_us, ended_us: of the call.
            tolerance_mhz: by how much the clock read back may differ.
        """
        self._waits.add(max(began_us - wanted_us, 0))
        self._calls_us.append(max(ended_us - began_us, 0))
        self._in_effect(Effect(began_us + self.switch.p50_us, mhz))
        self._effects += 1
        self.give_up()
        settled = self._reached or began_us - self._wrote_us > self.switch.p99_us
        self._reached, self._wrote_us = False, began_us
        self._estimate_now_and_then(self._effects)
        apart = mhz is not None and (before_mhz is None or abs(mhz - before_mhz) > tolerance_mhz)
        affordable = self._owed or self._spent_us <= READ_SHARE * (began_us - self._since_us)
        self._owed = False
        if mhz is not None and apart and (self.every or affordable):
            self._open = _Open(began_us, before_mhz, mhz, tolerance_mhz, self._effects, settled)
            self.read_us = ended_us

    def read(self, clock_mhz: int, began_us: int, ended_us: int, *, held: bool = False) -> None:
        """The clock was read, between two moments, as ``read_us`` asked; ``held``: power or heat held it below the one
        that is locked."""
        change, self.read_us = self._open, 0
        self._spent_us += max(ended_us - began_us, WAKE_US)
        if change is None:
            return
        since_us = ended_us - change.began_us
        reached = abs(clock_mhz - change.mhz) <= change.tolerance_mhz
        if held:  # above the lower clock of the two the higher one is in effect, and below it either may be
            before_mhz = change.before_mhz or _DEFAULT_CLOCKS
            reached = change.mhz > before_mhz
            if clock_mhz <= min(change.mhz, before_mhz) + change.tolerance_mhz:
                self._open = None
                return
        if not reached:
            if not change.seen_us:  # later it may be the clock before that has just come into effect
                change.settled |= clock_mhz == change.before_mhz
            change.seen_us = since_us
            if since_us < GIVE_UP * self.switch.p99_us:
                self.read_us = ended_us + max(since_us // READ_STEPS, READ_MIN_US)
            else:
                self._open = None  # something else holds the clock back, which says nothing of changes
        else:
            self._open, self._reached = None, True
            # The default clocks may be the same as a locked one.
            if change.seen_us or (change.settled and change.before_mhz is not None):
                self._measured(change, since_us)
            else:  # the change before this one may not have been in effect yet
                self._owed = True

    def give_up(self) -> None:
        """The clock cannot be read now, or another was written."""
        if self._open is not None and self._open.seen_us:
            self._note(self._open, _Seen(self._open.seen_us, longer=True))
        self._open, self.read_us = None, 0

    def _measured(self, change: _Open, latency_us: int) -> None:
        self.measured += 1
        self._note(change, _Seen(latency_us))
        if change.effect == self._effects:
            self.effects.pop()
            self._in_effect(Effect(change.began_us + latency_us, change.mhz))
        self._estimate_now_and_then(self.measured)

    def _note(self, change: _Open, seen: _Seen) -> None:
        self._changes.append(seen)
        if not change.settled:  # it may have waited for the one before it, which says nothing of its clock
            return
        key = change.before_mhz or 0, change.mhz
        if key not in self._of_transition and len(self._of_transition) >= TRANSITIONS_KEPT:
            rarest = min(self._counts, key=self._counts.__getitem__)
            del self._of_transition[rarest], self._counts[rarest]
        self._of_transition.setdefault(key, deque(maxlen=KEPT_OF_TRANSITION)).append(seen)
        self._counts[key] = self._counts.get(key, 0) + (not seen.longer)

    def _in_effect(self, effect: Effect) -> None:
        """One that would come later by estimate, though it was asked for earlier, was never seen."""
        while self.effects and self.effects[-1].time_us >= effect.time_us:
            self.effects.pop()
        self.effects.append(effect)

    def _estimate_now_and_then(self, count: int) -> None:
        if count <= ENOUGH or count % ESTIMATE_EVERY == 0:
            self._estimate()

    def _estimate(self) -> None:
        changes, calls = _quantiles_of(self._changes, self._published), self.calls
        if changes is not None and self.enough:
            # A clock that reads as changed before the call returns is a setting, not yet a speed.
            p50_us = max(changes.p50_us, calls.p50_us, 1)
            self.switch = SwitchLatency(
                p50_us=p50_us,
                p99_us=max(changes.p99_us, calls.p99_us, p50_us),
                call_us=calls.p50_us,
                shared_lock=self._published.shared_lock,
                source=f"measured on this GPU: {self.measured} changes",
            )
        usual = Lead.of(self.switch)
        clocks = {mhz: usual.of_clock(latency) for mhz, latency in self._by_clock().items()}
        self._lead = usual._replace(worth_us=2 * calls.p50_us, turn_us=calls.p50_us, clocks=clocks)

    def _by_clock(self) -> dict[int, SwitchLatency]:
        """Latencies by the clock that is changed to: as they were sent with the plan, corrected by what was measured
        here, and of other clocks as measured.

        How much changes scatter is known better from many GPUs than from one.
        """
        seen: dict[int, list[_Seen]] = {}
        for (_, mhz), changes in self._of_transition.items():
            seen.setdefault(mhz, []).extend(changes)
        medians_us = {
            mhz: (quantiles.values, max(quantiles.p50_us, self.calls.p50_us))
            for mhz, changes in seen.items()
            if (quantiles := _quantiles_of(changes, self._published)) and 2 * quantiles.values > len(changes)
        }
        return {**(by_clock(self.switch, medians_us) if self.enough else {}), **corrected(self._given, medians_us)}


def _quantiles(values_us: Sequence[int]) -> Quantiles | None:
    if not values_us:
        return None
    ordered = sorted(values_us)
    count = len(ordered)
    return Quantiles(ordered[count // 2], ordered[min(count - 1, count * 99 // 100)], count)


def _quantiles_of(seen: Sequence[_Seen], published: SwitchLatency) -> Quantiles | None:
    """The quantiles of changes of which some are only known to take longer than was seen: by the product-limit estimate
    (Kaplan and Meier, 1958). One that was never reached is the published one, or what was seen if that is longer.
    """
    if not seen:
        return None
    ordered, remaining, reached_us = sorted(seen), 1.0, list[int]()
    for number, (us, longer) in enumerate(ordered):
        if not longer:
            remaining *= 1 - 1 / (len(ordered) - number)
            while len(reached_us) < len(_REMAINING) and remaining < _REMAINING[len(reached_us)]:
                reached_us.append(us)
    unseen = [max(ordered[-1].us, latency_us) for latency_us in (published.p50_us, published.p99_us)]
    p50_us, p99_us = (*reached_us, *unseen[len(reached_us) :])
    return Quantiles(p50_us, p99_us, sum(not longer for _, longer in ordered))
