"""How long before it is right a clock is asked for: what a GPU's switch latency demands (design note 0019)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from perseus_core.latency import SwitchLatency
from perseus_core.units import us_from_s


class Earlier(NamedTuple):
    """How much earlier a clock must be asked for than others, µs; negative: later."""

    raise_us: int
    lower_us: int


class Lead(NamedTuple):
    """How long a change takes from the moment at which it is asked for until it is in effect."""

    median_us: int
    deviation_us: int
    worth_us: int = 0
    turn_us: int = 0
    """Lower clocks, and ones between two others, that last less are left out. A turn: a call of each GPU of a lock."""
    clocks: Mapping[int, Earlier] = MappingProxyType({})
    """Of single clocks, where it is known."""

    def raise_us(self, mhz: int) -> int:
        """How long before it is needed a higher clock is asked for."""
        earlier = self.clocks.get(mhz)
        return self.median_us + self.deviation_us + (earlier.raise_us if earlier else 0)

    def lower_us(self, mhz: int) -> int:
        """How long before it is allowed a lower clock is asked for."""
        earlier = self.clocks.get(mhz)
        return self.median_us - self.deviation_us + (earlier.lower_us if earlier else 0)

    def of_clock(self, latency: SwitchLatency) -> Earlier:
        """What a clock differs by whose latency is known; all else is as here."""
        lead = Lead.of(latency)
        return Earlier(
            lead.median_us + lead.deviation_us - self.raise_us(0), lead.median_us - lead.deviation_us - self.lower_us(0)
        )

    @classmethod
    def of(cls, latency: SwitchLatency) -> Lead:
        """The lead that a switch latency demands."""
        return cls(latency.p50_us, us_from_s(latency.deviation_s), 2 * latency.call_us, latency.call_us)
