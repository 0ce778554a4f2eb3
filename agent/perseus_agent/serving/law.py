"""The clock of a serving replica, from what its engine says and the table of its operator.

In ten lines:

1. *Default clocks* whenever the engine is silent: no sample for three periods, or one that cannot be true.
2. Default clocks while memory is short: keys and values above nine tenths, or a preemption within the last second.
3. *Boost*: the table's clock for the prompts that wait or are computed, asked ahead of every other call of the node.
4. *Hold*: the boost stays a moment after the last such sample, so that the driver's lock is left to others.
5. *Floor*: otherwise the table's least clock for the requests that run and the memory they use.
6. *Trim*: the floor is raised by an integral of misses, which counts both limits separately and obeys the worse.
7. A miss is a time beyond its limit that the default clocks would have kept; what they would have missed too is not.
8. One miss raises at once; for each request that kept its limit the trim falls by the share that is allowed to miss.
9. At its end the trim leaves the default clocks: limits are paid with energy, not the other way round.
   Where a lease has GPUs rest at a ceiling, that stands for the default clocks in all of these lines.
10. A clock is asked again only when it changes.

>>> table = ClockTable((8, 32), (1.0,), ((900,), (1005,)), (900, 1005, 1200, 1500))
>>> law = EngineLaw(table, LawSettings(), highest_mhz=1980)
>>> law.decide(0.1, [EngineSample(0.1, waiting=0, prefilling=0, running=9, kv_share=0.2)])
Choice(clock_mhz=1005, reason=<ClockReason.FLOOR: 'Floor'>)
>>> law.decide(0.2, [EngineSample(0.2, waiting=1, prefilling=0, running=9, kv_share=0.2)])
Choice(clock_mhz=0, reason=<ClockReason.BOOST: 'Boost'>)
>>> law.decide(0.6, [])
Choice(clock_mhz=0, reason=<ClockReason.NO_SAMPLE: 'NoSample'>)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from perseus_core.serving import DEFAULT_CLOCKS, ClockReason, ClockTable, EngineSample

_MEMORY_FULL: Final = 0.9
_PREEMPTED_S: Final = 1.0


class Choice(NamedTuple):
    """A clock in MHz, or `DEFAULT_CLOCKS`, and why."""

    clock_mhz: int
    reason: ClockReason

    @property
    def urgent(self) -> bool:
        """Whether its calls go ahead of others in the node's queue."""
        return self.clock_mhz == DEFAULT_CLOCKS or self.reason is ClockReason.BOOST


@dataclass(frozen=True)
class LawSettings:
    """What the law is tuned with.

    Attributes:
        period_s: how often it decides.
        attainment: share of the requests that shall keep each limit.
        hold_s: how long a boost stays after the last prompt was seen. One period: each more costs two points of energy
            and saves a quarter of the driver's calls; a node with many replicas needs more.
        target_share: of the misses that the attainment allows, how many the trim aims at. A quarter: what the default
            clocks miss as well comes on top, and whole pools shall keep their limits when single replicas do not.
        silence_s: without a sample for so long, nothing is known: three periods, and half of one for the way that the
            next takes.
        step: of the way from the table's clock to the default clocks, how much one miss raises.
    """

    period_s: float = 0.1
    attainment: float = 0.99
    hold_s: float = 0.1
    target_share: float = 0.25
    silence_s: float = 0.35
    step: float = 0.05


class _Trim:
    """An integral over requests that keeps the share of misses at a target."""

    def __init__(self, settings: LawSettings) -> None:
        allowed = (1.0 - settings.attainment) * settings.target_share
        self._up = settings.step
        self._down = settings.step * allowed / (1.0 - allowed)
        self.level = 0.0
        """From 0, the table's clock, to 1, the default clocks."""

    def count(self, shares: Sequence[float], slower: float) -> None:
        """Count requests.

        Args:
            shares: the time that each took over its limit.
            slower: at most how many times longer they took than they would have at the default clocks.
        """
        for share in shares:
            if share <= 1.0:
                self.level = max(0.0, self.level - self._down)
            elif share <= slower:
                self.level = min(1.0, self.level + self._up)


class EngineLaw:
    """Decides the clock of one replica.

    Args:
        table: the operator's, for this replica's model, engine and limits.
        settings: what it is tuned with.
        highest_mhz: see the attribute.
    """

    def __init__(self, table: ClockTable, settings: LawSettings, highest_mhz: int) -> None:
        self.table = table
        self._settings = settings
        self.highest_mhz = highest_mhz
        """At which the default clocks stand: the GPU's, or that of a lease at which it rests in their place."""
        self._first_tokens, self._tokens = _Trim(settings), _Trim(settings)
        self._sampled_s = -math.inf
        self._engine_s = -math.inf
        self._sample: EngineSample | None = None
        """The last one, if it can be true."""
        self._preempted: int | None = None
        self._boosted_s = self._preempted_s = -math.inf
        self._floor_mhz = highest_mhz
        self._boost_mhz = DEFAULT_CLOCKS

    @property
    def trim(self) -> float:
        """How far the floor is raised: from 0, not at all, to 1, to the default clocks."""
        return max(self._first_tokens.level, self._tokens.level)

    def decide(self, now_s: float, samples: Sequence[EngineSample]) -> Choice:
        """Decide.

        Args:
            now_s: of this process's monotonic clock.
            samples: what came since the last decision, in order.

        Returns:
            The clock to hold until the next decision.
        """
        for one in samples:
            self._take(now_s, one)
        if now_s - self._sampled_s > self._settings.silence_s:
            return Choice(DEFAULT_CLOCKS, ClockReason.NO_SAMPLE)
        sample = self._sample
        if sample is None:
            return Choice(DEFAULT_CLOCKS, ClockReason.IMPOSSIBLE_SAMPLE)
        if sample.kv_share > _MEMORY_FULL or now_s - self._preempted_s < _PREEMPTED_S:
            return Choice(DEFAULT_CLOCKS, ClockReason.MEMORY_FULL)
        floor = self._floor(sample)
        if now_s - self._boosted_s >= self._settings.hold_s:
            return floor
        boost_mhz = self._raised(self._boost_mhz)
        if _below(boost_mhz, floor.clock_mhz):
            return floor
        return Choice(boost_mhz, ClockReason.BOOST if self._boosted_s == now_s else ClockReason.HOLD)

    def _take(self, now_s: float, sample: EngineSample) -> None:
        self._sampled_s = now_s
        self._sample = sample if sample.possible and sample.time_s >= self._engine_s else None
        # One time that cannot be true must not make all later ones look as if time went backwards.
        self._engine_s = sample.time_s if math.isfinite(sample.time_s) else -math.inf
        if self._sample is None:
            return
        slower = self.highest_mhz / self._floor_mhz
        self._first_tokens.count(sample.first_tokens, slower)
        self._tokens.count(sample.tokens, slower)
        if self._preempted is not None and sample.preempted > self._preempted:
            self._preempted_s = now_s
        self._preempted = sample.preempted
        prompts = sample.waiting + sample.prefilling
        if prompts:
            boost_mhz = self.table.boosted_mhz(prompts)
            held = now_s - self._boosted_s < self._settings.hold_s
            self._boost_mhz = self._boost_mhz if held and _below(boost_mhz, self._boost_mhz) else boost_mhz
            self._boosted_s = now_s

    def _floor(self, sample: EngineSample) -> Choice:
        clock_mhz = self.table.clock_mhz(sample.running + sample.prefilling, sample.kv_share)
        if clock_mhz == DEFAULT_CLOCKS:
            self._floor_mhz = self.highest_mhz
            return Choice(DEFAULT_CLOCKS, ClockReason.BEYOND_TABLE)
        raised_mhz = self._raised(clock_mhz)
        self._floor_mhz = raised_mhz or self.highest_mhz
        return Choice(raised_mhz, ClockReason.TRIM if raised_mhz != clock_mhz else ClockReason.FLOOR)

    def _raised(self, clock_mhz: int) -> int:
        """Raise a clock of the ladder by the trim."""
        if clock_mhz == DEFAULT_CLOCKS:
            return clock_mhz
        ladder = self.table.ladder_mhz
        first = ladder.index(clock_mhz)
        step = first + math.ceil(self.trim * (len(ladder) - first) - 1e-9)
        return ladder[step] if step < len(ladder) else DEFAULT_CLOCKS


def _below(clock_mhz: int, other_mhz: int) -> bool:
    """Whether a clock is below another; none is above the default clocks."""
    return clock_mhz != DEFAULT_CLOCKS and (other_mhz == DEFAULT_CLOCKS or clock_mhz < other_mhz)
