"""How long a GPU takes to change its clock: what is known by measurement, and what is assumed until then.

The *switch latency* counts from the begin of the driver's call to the moment at which the new clock is in effect. The
*call* is a part of it, in which the driver may hold a lock that all GPUs of the node share. Both spread widely and have
long tails, so a log-normal distribution describes them, given by its median and its 99th percentile. Standard library
only: agents use it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from perseus_core.gpus import model_words
from perseus_core.units import s_from_us, us_from_s

MAX_LATENCY_US: Final = 60_000_000
"""Longest clock change, and longest call: a minute."""

_Z99: Final = 2.3263478740408408
"""The 99th percentile of a standard normal distribution."""


@dataclass(frozen=True)
class SwitchLatency:
    """The distribution of a GPU's switch latency.

    Whole microseconds travel and are stored; who calculates with other times reads seconds.

    Attributes:
        p50_us, p99_us: from the begin of a call to the new clock in effect; ``p99_us`` is at least ``p50_us``.
        call_us: median duration of one call. Calls of GPUs that share the driver's lock follow each other.
        shared_lock: whether the GPUs of a node share that lock.
        source: where the figures come from; "measured on this GPU" where they were.
    """

    p50_us: int
    p99_us: int
    call_us: int
    shared_lock: bool
    source: str = ""

    @classmethod
    def of_seconds(cls, p50_s: float, p99_s: float, call_s: float, shared_lock: bool, source: str) -> Self:
        """The distribution of these figures in seconds, to the microsecond.

        >>> SwitchLatency.of_seconds(0.0054, 0.014, 0.0045, True, "published").p50_us
        5400
        """
        return cls(us_from_s(p50_s), us_from_s(p99_s), us_from_s(call_s), shared_lock, source)

    @property
    def p50_s(self) -> float:
        """The median, seconds."""
        return s_from_us(self.p50_us)

    @property
    def p99_s(self) -> float:
        """The 99th percentile, seconds."""
        return s_from_us(self.p99_us)

    @property
    def call_s(self) -> float:
        """Median duration of one call, seconds."""
        return s_from_us(self.call_us)

    @property
    def is_possible(self) -> bool:
        """Whether a GPU's clock changes can take so long."""
        return 0 < self.p50_us <= self.p99_us <= MAX_LATENCY_US and 0 <= self.call_us <= MAX_LATENCY_US

    @property
    def sigma(self) -> float:
        """Standard deviation of the latency's logarithm."""
        return math.log(self.p99_us / self.p50_us) / _Z99 if self.p50_us > 0 else 0.0

    @property
    def deviation_s(self) -> float:
        """Standard deviation of the latency around its median, seconds, to the side of its tail."""
        return self.p50_s * (math.exp(self.sigma) - 1)

    def faster(self, factor: float) -> Self:
        """Return that of a GPU on which everything takes ``factor`` times less time."""
        p50_us, p99_us, call_us = (round(us / factor) for us in (self.p50_us, self.p99_us, self.call_us))
        return replace(self, p50_us=p50_us, p99_us=p99_us, call_us=call_us)

    def with_quantiles(self, p50_us: float, p99_us: float) -> Self:
        """Return the same with another median and 99th percentile, within their bounds."""
        within_us = min(max(1, round(p50_us)), MAX_LATENCY_US)
        return replace(self, p50_us=within_us, p99_us=min(max(within_us, round(p99_us)), MAX_LATENCY_US))


ENOUGH_OF_CLOCK: Final = 8
"""Changes to a clock from which on it has a latency of its own: its median is then known to a third of a deviation."""
_LEAST_OWN: Final = 0.25
"""Share of the variance, at least, that is left to the changes of one clock: medians of few clocks may lie apart by
chance."""


def by_clock(
    latency: SwitchLatency, medians_us: Mapping[int, tuple[int, float]], own_sigma: float | None = None
) -> dict[int, SwitchLatency]:
    """Tell the latencies of changes apart by the clock that is changed to, which decides more than anything else.

    The logarithm of a latency is taken for the sum of a part of the clock's and one that differs from change to change.
    The less often a clock was changed to, the more its median is drawn to that of all, and the more it may be wrong.
    Source: arXiv 2502.20075 (Velička, Vysocký, Říha), on an A100 and a GH200: the target matters far more than the
    start.

    Args:
        latency: of changes to any clock.
        medians_us: by clock, MHz: how many changes were measured, and the median of their latencies.
        own_sigma: standard deviation of the logarithm of changes to one clock, where that was measured by itself; None:
            what the clocks leave of the variance of all.

    Returns:
        By clock, of those with `ENOUGH_OF_CLOCK` changes: the distribution of the next one's latency.
    """
    frequent = {
        mhz: measured for mhz, measured in medians_us.items() if measured[0] >= ENOUGH_OF_CLOCK and measured[1] > 0
    }
    if not frequent or latency.sigma <= 0:
        return {}
    effect = {mhz: n / (n + 1) * math.log(median_us / latency.p50_us) for mhz, (n, median_us) in frequent.items()}
    between = sum(n * effect[mhz] ** 2 for mhz, (n, _) in frequent.items()) / sum(n for n, _ in frequent.values())
    variance = latency.sigma**2
    own_variance = max(variance - between, _LEAST_OWN * variance) if own_sigma is None else min(own_sigma**2, variance)
    latencies = {}
    for mhz, (n, _) in frequent.items():
        p50_us = latency.p50_us * math.exp(effect[mhz])
        latencies[mhz] = latency.with_quantiles(
            p50_us, p50_us * math.exp(_Z99 * math.sqrt(own_variance * (1 + 1 / (n + 1))))
        )
    return latencies


def corrected(
    given: Mapping[int, SwitchLatency], medians_us: Mapping[int, tuple[int, float]]
) -> dict[int, SwitchLatency]:
    """Shift latencies by clock towards what was measured; they scatter as given.

    Args:
        given: by clock, MHz.
        medians_us: of changes measured, as for `by_clock`.
    """
    latencies = dict(given)
    for mhz in given.keys() & medians_us.keys():
        (n, median_us), of_clock = medians_us[mhz], given[mhz]
        factor = (median_us / of_clock.p50_us) ** (n / (n + ENOUGH_OF_CLOCK))
        latencies[mhz] = of_clock.with_quantiles(factor * of_clock.p50_us, factor * of_clock.p99_us)
    return latencies


_HOPPER: Final = "assumed: second-hand figures for Hopper say 10–100 ms (PowerWeave on arXiv 2502.20075)"
_PUBLISHED: Final = {
    "V100": SwitchLatency(5_000, 19_000, 4_600, True, "published: 18,950 switches on a V100"),
    "A100": SwitchLatency(5_400, 14_000, 4_500, True, "published: eight A800-SXM-80GB"),
    "A800": SwitchLatency(5_400, 14_000, 4_500, True, "published: eight A800-SXM-80GB"),
    "A40": SwitchLatency(5_400, 14_000, 4_500, True, "assumed: as an A800, the same architecture"),
    "L20": SwitchLatency(6_700, 20_000, 4_500, True, "published: median on an L20; the tail is assumed"),
    "H100": SwitchLatency(30_000, 100_000, 4_500, True, _HOPPER),
    "H200": SwitchLatency(30_000, 100_000, 4_500, True, _HOPPER),
    "B200": SwitchLatency(30_000, 100_000, 4_500, True, "assumed: as Hopper; nothing is published for Blackwell"),
}
_UNKNOWN: Final = SwitchLatency(30_000, 100_000, 4_500, True, "assumed: as Hopper; nothing is published for this model")

_FASTER: Final = re.compile(r"\(simulated, ([1-9][0-9]{0,2}) times as fast\)$")


def faster_model(model: str, factor: int) -> str:
    """Return the name of a simulated GPU whose time runs faster than that of the model it simulates.

    >>> faster_model("NVIDIA H100 80GB HBM3 (simulated)", 4)
    'NVIDIA H100 80GB HBM3 (simulated, 4 times as fast)'
    """
    return model if factor == 1 else f"{model.removesuffix(' (simulated)')} (simulated, {factor} times as fast)"


def published_latency(model: str) -> SwitchLatency:
    """The switch latency to assume for a GPU whose own was not measured: published figures, or the worst of them.

    Args:
        model: the GPU's name as NVML gives it, or as `faster_model` does.

    >>> published_latency("NVIDIA A100-SXM4-80GB").p50_us
    5400
    >>> published_latency("NVIDIA RTX A1000").p50_us
    30000
    """
    words = model_words(model)
    published = next((latency for name, latency in _PUBLISHED.items() if name in words), _UNKNOWN)
    faster = _FASTER.search(model)
    return published.faster(int(faster[1])) if faster else published
