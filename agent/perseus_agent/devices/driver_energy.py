"""The energy of one GPU behind a driver: by its samples of power where they are dense, else by its counter.

Samples are cheap to read and the counter is not, and either may be wrong. So both are judged at the start and compared
now and then.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from perseus_agent.devices.base import EnergyReading
from perseus_agent.devices.sampled_energy import Sample, SampledEnergy, usable
from perseus_agent.errors import DeviceError
from perseus_core.units import s_from_us, us_from_ns

log = logging.getLogger(__name__)

SAMPLES_EVERY_US: Final = 200_000
"""How often samples of power are read: the driver stores more than two seconds of them."""
COMPARE_EVERY_US: Final = 60_000_000
"""How often they are compared with the counter, which takes long to read; and how long they may stay away."""
MAX_DEVIATION: Final = 0.1
"""Of energy by samples from the counter's: up to 0.022 in such a time on an H100 (docs/clocks-take-time.md)."""
MAX_POWER_W: Final = 10_000
"""No GPU, nor a module with its CPU, draws more: an energy counter that shows more counts something else."""


class Driver(Protocol):
    """What the driver says of one GPU; a failing call raises a ``DeviceError``."""

    def now_us(self) -> int: ...
    def raw_energy_mj(self) -> int | None: ...
    def power_samples(self) -> list[Sample]: ...


class _Comparison(NamedTuple):
    """Samples and counter at one moment."""

    time_us: int
    sampled_mj: int
    restarts: int
    counter_mj: int | None = None


class DriverEnergy:
    """Reads it."""

    def __init__(self, uuid: str, driver: Driver) -> None:
        """Nothing is trusted until it was judged."""
        self._uuid = uuid
        self._driver = driver
        self._counter_trusted = False
        self._base_mj = 0
        self._sampled: SampledEnergy | None = None
        self._sampled_us = 0
        self._returned_us = 0
        self._compared: _Comparison | None = None

    @property
    def by_samples(self) -> bool:
        """Whether it is read by samples of power."""
        return self._sampled is not None

    def read(self) -> Sequence[EnergyReading] | None:
        """The readings since the last call; None: this GPU has no energy that can be trusted."""
        if self._sampled is not None:
            return self._by_samples(self._sampled)
        if not self._counter_trusted:
            return None
        before_us = self._driver.now_us()
        value_mj = self._driver.raw_energy_mj()
        if value_mj is None:
            return None
        if value_mj < self._base_mj:  # the driver was reloaded
            self._base_mj = 0
        return [EnergyReading((before_us + self._driver.now_us()) // 2, value_mj - self._base_mj)]

    def judge(self, before_mj: int | None, elapsed_s: float) -> None:
        """Trust the counter only if it has moved since ``before_mj``, forwards, and not faster than a GPU can draw. Use
        samples of power instead where they are dense."""
        with contextlib.suppress(DeviceError):  # one of the two may fail
            if usable(self._driver.power_samples(), us_from_ns(time.time_ns())):
                self._sampled, self._returned_us = SampledEnergy(), self._driver.now_us()
        after_mj = self._driver.raw_energy_mj()
        if before_mj is None or after_mj is None:
            return
        # A counter steps about ten times a second: two steps more than the time allows may show.
        self._counter_trusted = 0 < after_mj - before_mj <= MAX_POWER_W * 1000 * (elapsed_s + 0.25)
        if not self._counter_trusted:
            log.error("%s: energy counter not used: it went from %d to %d mJ", self._uuid, before_mj, after_mj)

    def _by_samples(self, sampled: SampledEnergy) -> Sequence[EnergyReading]:
        now_us = self._driver.now_us()
        if now_us - self._sampled_us < SAMPLES_EVERY_US:
            return ()
        self._sampled_us = now_us
        samples = self._driver.power_samples()
        readings = sampled.take(samples, self._driver.now_us() - us_from_ns(time.time_ns()))
        if readings:
            self._returned_us = now_us
        if self._counter_trusted:
            with contextlib.suppress(DeviceError):  # what was read is returned all the same
                if readings:
                    self._compare(_Comparison(*readings[-1], sampled.restarts))
                elif now_us - self._returned_us > COMPARE_EVERY_US:  # another driver, or one that stores none when idle
                    self._leave_samples(f"none for {s_from_us(COMPARE_EVERY_US):g} s", self._driver.raw_energy_mj())
        return readings

    def _compare(self, now: _Comparison) -> None:
        """Compare samples with the counter now and then; if they differ, use the counter from now on."""
        before = self._compared
        if before is not None and now.time_us - before.time_us < COMPARE_EVERY_US:
            return
        counter_mj = self._driver.raw_energy_mj()
        self._compared = now = now._replace(counter_mj=counter_mj)
        if counter_mj is None or before is None or before.counter_mj is None or before.restarts != now.restarts:
            return
        counted_mj = counter_mj - before.counter_mj
        deviation = (now.sampled_mj - before.sampled_mj) / max(1, counted_mj) - 1
        if counted_mj >= 0 and abs(deviation) > MAX_DEVIATION:
            self._leave_samples(f"{100 * deviation:+.0f}% of the counter", counter_mj)

    def _leave_samples(self, why: str, counter_mj: int | None) -> None:
        if counter_mj is not None:
            log.error("%s: samples of power no longer used: %s", self._uuid, why)
            self._sampled = None
            self._base_mj = counter_mj  # restarts below what was returned: the energy in between is not known
