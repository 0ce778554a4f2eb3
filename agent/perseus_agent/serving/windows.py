"""What one engine did in about a second, from the end of a step to the end of a step: cut, and then measured.

A window is cut at a reading of the engine's memory, at the end of the step that it tells of. It waits until the energy
counters of all its GPUs have moved past its end, and is published then, with or without their energy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from perseus_agent.clocks.reckoning import ClockReading
from perseus_agent.clocks.telemetry import EngineSummary, ServingEngine
from perseus_agent.devices.energy import EnergyMeter
from perseus_agent.serving.samples import Samples
from perseus_agent.serving.totals import EngineTotals
from perseus_core.serving import DEFAULT_CLOCKS, MOST_SEQUENCES, ClockReason
from perseus_proto.engine_channel import EngineCounts

WINDOW_US: Final = 1_000_000
ENERGY_WAIT_US: Final = 3_000_000
"""How long a window waits for its energy: longer than any counter's tick."""
_MOST: Final = (1 << 32) - 1
"""Of a count that travels in 32 bits: whatever an engine claims."""


@dataclass
class _Open:
    """A window that is not at its end."""

    begin_us: int
    clocks_mhz: set[int]
    """That were in force; of GPUs that differ, the highest."""
    default_us: int = 0
    mhz_us: int = 0
    held_us: Counter[str] = field(default_factory=Counter)
    first_tokens: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)


@dataclass
class Cut:
    """A window that waits for what its GPUs have measured."""

    window: EngineSummary
    begin_us: int
    end_us: int
    energies_mj: dict[str, float | None] = field(default_factory=dict)
    clocks_mhz: list[int] = field(default_factory=list)

    def measure(self, uuid: str, meter: EnergyMeter, readings: Iterable[ClockReading], now_us: int) -> None:
        """Add what one of the GPUs has measured, if it is known by now."""
        if uuid in self.energies_mj or not (meter.covers(self.end_us) or now_us > self.end_us + ENERGY_WAIT_US):
            return
        levels = meter.at((self.begin_us, self.end_us))
        self.energies_mj[uuid] = None if levels is None else levels[1] - levels[0]
        clocks_mhz = [reading.mhz for reading in readings if self.begin_us <= reading.time_us < self.end_us]
        self.clocks_mhz += [median_low(clocks_mhz)] if clocks_mhz else []


class Windows:
    """The windows of one engine."""

    def __init__(self, engine: ServingEngine, counts: EngineCounts, now_us: int, totals: EngineTotals) -> None:
        """``counts``: what its memory holds now, from which the first window begins; ``totals``: of the node."""
        self._engine = engine
        self._totals = totals
        self._number = 0
        self._counts = counts
        self._open = _Open(now_us, {DEFAULT_CLOCKS})
        self._clock_mhz = DEFAULT_CLOCKS
        self._reason = ClockReason.NO_SAMPLE.value
        self._at_us = now_us

    def in_force(self, now_us: int, clock_mhz: int, reason: str) -> None:
        """From now on this clock is locked, for this reason; `DEFAULT_CLOCKS`: none is."""
        self._pass(now_us)
        self._clock_mhz, self._reason = clock_mhz, reason
        self._open.clocks_mhz.add(clock_mhz)

    def read(self, samples: Samples, now_us: int) -> Cut | None:
        """Add the latest reading, and cut the window there if a step has ended since it became long enough."""
        window, counts = self._open, samples.reading.counts
        window.first_tokens.update(dict(samples.first_tokens))
        window.tokens.update(dict(samples.tokens))
        window.lengths.update(dict(samples.lengths))
        stepped = counts.steps + counts.prompt_steps > self._counts.steps + self._counts.prompt_steps
        # The engine's clock is the machine's, unless it says a time at which this step cannot have ended.
        end_us = counts.time_us if self._at_us <= counts.time_us <= now_us else max(self._at_us, now_us)
        if not stepped or end_us - window.begin_us < WINDOW_US:
            return None
        self._pass(end_us)
        cut = Cut(self._window(window, counts, end_us), window.begin_us, end_us)
        self._number += 1
        self._counts, self._open = counts, _Open(end_us, {self._clock_mhz})
        return cut

    def begin_anew(self, counts: EngineCounts, now_us: int) -> None:
        """What the engine said cannot be true: forget what it said since the last cut."""
        self._pass(now_us)
        self._counts, self._open = counts, _Open(now_us, {self._clock_mhz})

    def _pass(self, now_us: int) -> None:
        """Count the time until now."""
        passed_us, window = max(0, now_us - self._at_us), self._open
        self._at_us = max(now_us, self._at_us)
        if self._clock_mhz == DEFAULT_CLOCKS:
            window.default_us += passed_us
        window.mhz_us += self._clock_mhz * passed_us
        window.held_us[self._reason] += passed_us
        self._totals.held(self._reason, passed_us)

    def _window(self, window: _Open, counts: EngineCounts, end_us: int) -> EngineSummary:
        before, after = self._counts, counts
        steps, prompt_steps = after.steps - before.steps, after.prompt_steps - before.prompt_steps
        running = (after.running_sum - before.running_sum) * 1000 // max(1, steps + prompt_steps)
        kv_share_ppm = (after.kv_share_ppm_sum - before.kv_share_ppm_sum) // max(1, steps + prompt_steps)
        return EngineSummary(
            engine=self._engine,
            number=self._number,
            time_us=end_us - window.begin_us,
            clock_mhz=self._clock_mhz,
            changed=len(window.clocks_mhz) > 1,
            default_us=window.default_us,
            mhz_us=window.mhz_us,
            running_milli=min(1000 * MOST_SEQUENCES, running),
            kv_share_ppm=min(1_000_000, kv_share_ppm),
            steps=min(_MOST, steps),
            steps_us=after.steps_us - before.steps_us,
            prompt_steps=min(_MOST, prompt_steps),
            prompt_steps_us=after.prompt_steps_us - before.prompt_steps_us,
            prompt_tokens=after.prompt_tokens - before.prompt_tokens,
            generated_tokens=after.generated_tokens - before.generated_tokens,
            waiting=min(_MOST, after.waiting),
            preempted=min(_MOST, after.preempted - before.preempted),
            requests=min(_MOST, after.requests - before.requests),
            first_tokens=_counted(window.first_tokens),
            tokens=_counted(window.tokens),
            lengths=_counted(window.lengths),
            held_us=dict(window.held_us),
        )


def _counted(counted: Counter[int]) -> tuple[tuple[int, int], ...]:
    return tuple((place, min(_MOST, count)) for place, count in sorted(counted.items()))
