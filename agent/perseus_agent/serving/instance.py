"""One serving engine and the one clock of all its GPUs: what its memory says, what is ordered, what follows.

The thread of each GPU asks (``look``), and the first that asks when a period is over, or when the engine has rung,
reads the memory and decides. The others get the same choice, so all GPUs of an instance move together.

    EngineReader ──Samples──► EngineSample ──► EngineLaw, or the ordered clock ──► Choice ──► each GPU's follower
                     └──────► Windows, with the clocks in force and the GPUs' energy ──► telemetry
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from perseus_agent.clocks.reckoning import ClockReading
from perseus_agent.clocks.telemetry import Event, ServingEngine
from perseus_agent.devices.energy import EnergyMeter
from perseus_agent.serving.boosts import BoostMeter, is_above
from perseus_agent.serving.law import Choice, EngineLaw, LawSettings
from perseus_agent.serving.samples import Samples
from perseus_agent.serving.totals import EngineTotals
from perseus_agent.serving.windows import Cut, Windows
from perseus_core.serving import DEFAULT_CLOCKS, FOLLOW_TABLE, ClockReason, EngineOrders, EngineSample, ServingLimits
from perseus_core.units import s_from_us, us_from_ns, us_from_s
from perseus_proto.engine_channel import NOTHING_YET, EngineReader

_MOST_CUTS: Final = 8
"""Windows that wait for their energy: the oldest of more goes without it."""
_UNORDERED: Final = EngineOrders(ServingLimits(None, None))
_PROMPTS: Final = (ClockReason.BOOST, ClockReason.HOLD)
_FOR_LOAD: Final = (ClockReason.BOOST, ClockReason.BEYOND_TABLE)
"""Prompts wait, or so many requests run that the table has no clock for them."""


class EngineInstance:
    """What the GPUs of one engine share. Any of their threads may call it."""

    def __init__(
        self,
        engine: ServingEngine,
        reader: EngineReader,
        highest_mhz: int,
        publish: Callable[[str, Event], None],
        now_us: int | None = None,
        *,
        settings: LawSettings | None = None,
        totals: EngineTotals | None = None,
    ) -> None:
        """
        Args:
            engine: who it is, and its GPUs.
            reader: of its memory.
            highest_mhz: the GPUs' highest clock.
            publish: takes its windows, with its job's UID.
            now_us: now, by the machine's clock; None: read it.
            settings: of the law, whose attainment is that of the orders.
            totals: of the node; None: its own.
        """
        self.engine = engine
        self.bell = reader.event_fd
        """Readable when the engine has rung."""
        self.next_us = 0
        """When to look next."""
        self._lock = threading.Lock()
        self._reader = reader
        self._highest_mhz = highest_mhz
        self._publish = publish
        first = reader.read() or NOTHING_YET
        began_us = us_from_ns(time.monotonic_ns()) if now_us is None else now_us
        self._samples = Samples(reader, first)
        self._totals = totals or EngineTotals()
        self._windows = Windows(engine, first.counts, began_us, self._totals)
        self._boost = BoostMeter()
        self._decided_us = began_us
        self._cuts: list[Cut] = []
        self._orders = _UNORDERED
        self._clock_mhz = DEFAULT_CLOCKS
        self._law: EngineLaw | None = None
        self._settings = settings or LawSettings()
        self._sampled_s = -math.inf
        self._believed = True
        self._choice = Choice(DEFAULT_CLOCKS, ClockReason.NO_SAMPLE)
        self._applied_mhz = dict.fromkeys(engine.gpu_uuids, DEFAULT_CLOCKS)

    def order(self, orders: EngineOrders | None) -> None:
        """Follow other orders from the next look on, which is due; None: there are none, so default clocks."""
        with self._lock:
            before, self._orders = self._orders, orders or _UNORDERED
            self._clock_mhz = self._orders.clocks_mhz.get(self.engine.pod_uid, DEFAULT_CLOCKS)
            table, limits = self._orders.table, self._orders.limits
            if table is None:
                self._law = None
            elif self._law is not None and limits == before.limits:
                self._law.table = table  # what was missed so far still counts
            else:
                settings = replace(self._settings, attainment=limits.attainment)
                self._law = EngineLaw(table, settings, self._highest_mhz)
            self.next_us = 0

    def look(
        self, uuid: str, applied_mhz: int, now_us: int, effective_us: int = 0, *, resting_mhz: int = DEFAULT_CLOCKS
    ) -> Choice:
        """Return the clock to ask for now.

        Args:
            uuid: of the GPU that asks.
            applied_mhz: that is locked on it; `DEFAULT_CLOCKS`: none is.
            now_us: now, by the machine's clock.
            effective_us: from when on the locked clock is in effect, measured or estimated; 0: it was never changed.
            resting_mhz: of its lease, at which it runs in place of the default clocks; `DEFAULT_CLOCKS`: there is none.
        """
        with self._lock:
            self._applied_mhz[uuid] = applied_mhz
            boosted_us = self._boost.seen(uuid, applied_mhz, effective_us)
            if boosted_us is not None:
                self._totals.boosted(boosted_us)
            if self._law is not None:
                self._law.highest_mhz = resting_mhz or self._highest_mhz
            if now_us >= self.next_us or self._reader.acknowledge():
                before, self._choice = self._choice, self._decide(now_us)
                self.next_us = self._next_us(now_us)
                if self._choice.clock_mhz != before.clock_mhz:  # it is about to be; the next look sees whether it is
                    self._applied_mhz = dict.fromkeys(self._applied_mhz, self._choice.clock_mhz or resting_mhz)
                    self._time_boost(before, resting_mhz, now_us)
                self._decided_us = now_us
            self._in_force(now_us)
            return self._choice

    def measure(self, uuid: str, meter: EnergyMeter, readings: Iterable[ClockReading], now_us: int) -> None:
        """Add what a GPU has measured to the windows that wait for it; called on that GPU's thread."""
        with self._lock:
            for cut in self._cuts:
                cut.measure(uuid, meter, readings, now_us)
            while self._cuts and len(self._cuts[0].energies_mj) == len(self.engine.gpu_uuids):
                self._publish_cut(self._cuts.pop(0))

    def _next_us(self, now_us: int) -> int:
        """When to decide again: after a period, so that a boost lasts that long and no longer; without prompts at the
        next of the moments that all engines of the node share. What all threads run one after the other is still in the
        processor's caches, and takes half the time.
        """
        period_us = us_from_s(self._settings.period_s)
        return now_us + period_us - (0 if self._choice.reason in _PROMPTS else now_us % period_us)

    def _time_boost(self, before: Choice, resting_mhz: int, now_us: int) -> None:
        """Time the change to the clock that was just chosen, if it is raised for what the engine has to do."""
        self._boost.replaced()
        if self._choice.reason in _FOR_LOAD and is_above(self._choice.clock_mhz, before.clock_mhz):
            # What the engine said earlier was seen at the look before, whatever time it claims.
            since_us = max(self._decided_us, min(self._samples.reading.counts.time_us, now_us))
            self._boost.began(self.engine.gpu_uuids, self._choice.clock_mhz or resting_mhz, since_us)

    def _in_force(self, now_us: int) -> None:
        """Note the clock that is locked now: where the GPUs differ, the highest."""
        clocks_mhz = self._applied_mhz.values()
        applied_mhz = DEFAULT_CLOCKS if DEFAULT_CLOCKS in clocks_mhz else max(clocks_mhz)
        self._windows.in_force(now_us, applied_mhz, self._choice.reason.value)

    def _decide(self, now_us: int) -> Choice:
        now_s, sample = s_from_us(now_us), self._samples.take(self._orders.limits)
        self._note(now_s, now_us, sample)
        if self._clock_mhz == FOLLOW_TABLE and self._law is not None:
            return self._law.decide(now_s, [] if sample is None else [sample])
        if self._clock_mhz == DEFAULT_CLOCKS:
            return Choice(DEFAULT_CLOCKS, ClockReason.ORDERED)
        if now_s - self._sampled_s > self._settings.silence_s:
            return Choice(DEFAULT_CLOCKS, ClockReason.NO_SAMPLE)
        if not self._believed:
            return Choice(DEFAULT_CLOCKS, ClockReason.IMPOSSIBLE_SAMPLE)
        return Choice(self._clock_mhz, ClockReason.ORDERED)

    def _note(self, now_s: float, now_us: int, sample: EngineSample | None) -> None:
        """Take in what the engine said."""
        if sample is None:
            return
        self._sampled_s, self._believed = now_s, sample.possible
        self._totals.sampled(possible=sample.possible)
        counts = self._samples.reading.counts
        if not self._believed:
            self._windows.begin_anew(counts, now_us)
            return
        cut = self._windows.read(self._samples, now_us)
        if cut is not None:
            self._cuts.append(cut)
            if len(self._cuts) > _MOST_CUTS:
                self._publish_cut(self._cuts.pop(0))

    def _publish_cut(self, cut: Cut) -> None:
        energies_mj = [cut.energies_mj.get(uuid) for uuid in self.engine.gpu_uuids]
        measured = [energy for energy in energies_mj if energy is not None]
        window = replace(
            cut.window,
            energy_mj=round(sum(measured)) if len(measured) == len(energies_mj) else None,
            median_clock_mhz=min(cut.clocks_mhz, default=0),
        )
        self._publish(self.engine.job_uid, window)
