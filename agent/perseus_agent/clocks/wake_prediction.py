"""Predicts when a rank will next want another clock, so that the agent looks by itself and the rank need not ring.

A ring wakes a sleeping CPU, and the training thread pays for it. Iterations resemble each other, so the agent sets a
timer instead and publishes in the channel from when on rings are not needed (``ChannelReader.skip_rings_from``).
Nothing depends on a good prediction: a mark that comes early rings, and for one that comes late the agent looks again,
a few times, and then relies on the ring.

Only ranks whose clock is the machine's are predicted. Times in the channel are written by the rank, which is not
trusted, so they are bounded here.
"""

from __future__ import annotations

from array import array
from typing import Final

from perseus_proto.channel import ChannelReader

PATIENCE_SHARE: Final = 8
PATIENCE_MIN_US: Final = 50
PATIENCE_MAX_US: Final = 800
"""How long a mark may wait for its look, at worst: a share of the span that it ends, below a millisecond. Nearly all
are met far sooner; patience is for the few that come too early for that."""
LEAD_LATE_US: Final = 8
LEAD_EARLY_US: Final = 2
LEAD_SHARE: Final = 3
"""Looks move back and forth until one in five comes too early, by a third of the patience at most."""
AGAIN_US: Final = 60
LOOKS_AT_ONCE: Final = 12
"""After a look that came too early; twice as long after each further one, up to the patience. A mark that is later than
so many looks is left to ring."""
WAKES_PER_MARK: Final = 1.5
LOOKS_SAVED: Final = 64.0
"""A look costs the agent what a ring costs it. So often it wakes for a mark on average, its ring included, and so many
looks in a row are affordable after better times; beyond, the rank rings."""
LONGEST_US: Final = 10_000_000
"""Spans longer than this are not predicted: one ring more makes no difference then."""
_KEPT: Final = 3
"""Spans stored for each mark: their median ignores an outlier, and follows a change of pace soon."""


class WakePredictor:
    """The marks of one rank that the wake map of its plan names."""

    def __init__(self, channel: ChannelReader) -> None:
        self._channel = channel
        self._before = self._after = array("l")
        self._spans_us = array("Q")
        self._passed = (-1, -1)
        self._tries = 0
        self._lead_us = PATIENCE_MIN_US
        self._affords = 0.0
        self._from_us = 0  # what the channel holds now
        self._doubt: tuple[int, int] | None = None  # what was expected when the channel held something else before

    def follow(self, wake: bytes) -> None:
        """Use another wake map: stored spans between marks are dropped."""
        count = len(wake)
        # By the number of instructions that have ended: the mark passed last, and the one to come.
        self._before, self._after = array("l", [-1]) * (count + 1), array("l", [-1]) * (count + 1)
        for index in range(count):
            self._before[index + 1] = index if wake[(index + 1) % count] else self._before[index]
        for index in reversed(range(count)):
            self._after[index] = index if wake[(index + 1) % count] else self._after[index + 1]
        self._spans_us = array("Q", bytes(8 * _KEPT)) * count

    def look(self, iteration: int, ended: int, now_us: int) -> int:
        """Predict the next look after a look at the rank, and publish it. Returns when, µs; 0: when the rank rings.

        Args:
            iteration: that the rank was seen in.
            ended: so many of its instructions had ended then.
            now_us: now by the rank's clock, which is the machine's.
        """
        awaited, passed = self._after[ended], self._before[ended]
        passed_us = self._time_us(iteration, passed)
        if (iteration, passed) != self._passed:
            self._passed = iteration, passed
            self._tries = 0
            rung = not 0 < self._from_us <= passed_us
            self._affords = min(self._affords + WAKES_PER_MARK - rung, LOOKS_SAVED)
            self._lead_us = max(self._lead_us - LEAD_EARLY_US, 0)
            if passed >= 0:
                self._measure(iteration, passed, passed_us)
        elif self._from_us:
            self._tries += 1
            self._lead_us += LEAD_LATE_US
        span_us = self._span_us(awaited) if awaited >= 0 else 0
        given_up = self._affords < 1 or self._tries > LOOKS_AT_ONCE
        if not span_us or given_up or not now_us - LONGEST_US < passed_us <= now_us:
            return self._publish(0, 0, (iteration, ended))
        self._affords -= 1
        patience_us = min(max(span_us // PATIENCE_SHARE, PATIENCE_MIN_US), PATIENCE_MAX_US)
        self._lead_us = min(self._lead_us, patience_us // LEAD_SHARE)
        again_us = min(AGAIN_US << self._tries, patience_us)
        due_us = max(passed_us + span_us + self._lead_us, now_us + again_us)
        return self._publish(due_us - patience_us, due_us, (iteration, awaited))

    def rest(self, iteration: int, ended: int) -> int:
        """As ``look``, where no plan is followed."""
        return self._publish(0, 0, (iteration, ended))

    def must_look_again(self) -> bool:
        """Whether to look again at once: a mark beyond those expected may not have rung, because of what the channel
        held when it was made. Call it some microseconds after ``look``; see ``perseus_proto.channel``."""
        return self._doubt is not None and self._channel.passed() > self._doubt

    def _publish(self, from_us: int, due_us: int, expected: tuple[int, int]) -> int:
        self._doubt = expected if self._from_us else None
        if from_us or self._from_us:
            self._channel.skip_rings_from(from_us)
            self._from_us = from_us
        return due_us

    def _time_us(self, iteration: int, index: int) -> int:
        """When the rank passed a mark of the iteration that it is in; −1: its begin."""
        return self._channel.step_begin_us() if index < 0 else self._channel.ended_us(iteration, index)

    def _measure(self, iteration: int, passed: int, passed_us: int) -> None:
        span_us = passed_us - self._time_us(iteration, self._before[passed])
        if 0 < span_us < LONGEST_US:
            self._spans_us[_KEPT * passed + iteration % _KEPT] = span_us

    def _span_us(self, awaited: int) -> int:
        return sorted(self._spans_us[_KEPT * awaited : _KEPT * (awaited + 1)])[_KEPT // 2]
