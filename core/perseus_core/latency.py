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
from typing import Final

_Z99: Final = 2.3263478740408408
"""The 99th percentile of a standard normal distribution."""


@dataclass(frozen=True)
class SwitchLatency:
    """The distribution of a GPU's switch latency.

    Attributes:
        p50_s, p99_s: seconds from the begin of a call to the new clock in effect; ``p99_s`` is at least ``p50_s``.
        call_s: median duration of one call, seconds. Calls of GPUs that share the driver's lock follow each other.
        shared_lock: whether the GPUs of a node share that lock.
        source: where the figures come from; "measured on this GPU" where they were.
    """

    p50_s: float
    p99_s: float
    call_s: float
    shared_lock: bool
    source: str

    @property
    def sigma(self) -> float:
        """Standard deviation of the latency's logarithm."""
        return math.log(self.p99_s / self.p50_s) / _Z99 if self.p50_s > 0 else 0.0

    @property
    def deviation_s(self) -> float:
        """Standard deviation of the latency around its median, seconds, to the side of its tail."""
        return self.p50_s * (math.exp(self.sigma) - 1)

    def faster(self, factor: float) -> SwitchLatency:
        """Return that of a GPU on which everything takes ``factor`` times less time."""
        return replace(self, p50_s=self.p50_s / factor, p99_s=self.p99_s / factor, call_s=self.call_s / factor)


ENOUGH_OF_CLOCK: Final = 8
"""Changes to a clock from which on it has a latency of its own: its median is then known to a third of a deviation."""
_LEAST_OWN: Final = 0.25
"""Share of the variance, at least, that is left to the changes of one clock: medians of few clocks may lie apart by
chance."""


def by_clock(
    latency: SwitchLatency, medians_s: Mapping[int, tuple[int, float]], own_sigma: float | None = None
) -> dict[int, SwitchLatency]:
    """Tell the latencies of changes apart by the clock that is changed to, which decides more than anything else.

    The logarithm of a latency is taken for the sum of a part of the clock's and one that differs from change to change.
    The less often a clock was changed to, the more its median is drawn to that of all, and the more it may be wrong.
    Source: arXiv 2502.20075 (Velička, Vysocký, Říha), on an A100 and a GH200: the target matters far more than the
    start.

    Args:
        latency: of changes to any clock.
        medians_s: by clock, MHz: how many changes were measured, and the median of their latencies, seconds.
        own_sigma: standard deviation of the logarithm of changes to one clock, where that was measured by itself; None:
            what the clocks leave of the variance of all.

    Returns:
        By clock, of those with `ENOUGH_OF_CLOCK` changes: the distribution of the next one's latency.
    """
    known = {mhz: of for mhz, of in medians_s.items() if of[0] >= ENOUGH_OF_CLOCK and of[1] > 0}
    if not known or latency.sigma <= 0:
        return {}
    effect = {mhz: n / (n + 1) * math.log(median_s / latency.p50_s) for mhz, (n, median_s) in known.items()}
    between = sum(n * effect[mhz] ** 2 for mhz, (n, _) in known.items()) / sum(n for n, _ in known.values())
    of_all = latency.sigma**2
    own = max(of_all - between, _LEAST_OWN * of_all) if own_sigma is None else min(own_sigma**2, of_all)
    found = {}
    for mhz, (n, _) in known.items():
        p50_s = latency.p50_s * math.exp(effect[mhz])
        found[mhz] = replace(latency, p50_s=p50_s, p99_s=p50_s * math.exp(_Z99 * math.sqrt(own * (1 + 1 / (n + 1)))))
    return found


def corrected(
    given: Mapping[int, SwitchLatency], medians_s: Mapping[int, tuple[int, float]]
) -> dict[int, SwitchLatency]:
    """Shift latencies by clock towards what was measured; they scatter as given.

    Args:
        given: by clock, MHz.
        medians_s: of changes measured, as for `by_clock`.
    """
    found = dict(given)
    for mhz in given.keys() & medians_s.keys():
        (n, median_s), of_clock = medians_s[mhz], given[mhz]
        factor = (median_s / of_clock.p50_s) ** (n / (n + ENOUGH_OF_CLOCK))
        found[mhz] = replace(of_clock, p50_s=factor * of_clock.p50_s, p99_s=factor * of_clock.p99_s)
    return found


_HOPPER: Final = "assumed: second-hand figures for Hopper say 10–100 ms (PowerWeave on arXiv 2502.20075)"
_PUBLISHED: Final = {
    "V100": SwitchLatency(0.005, 0.019, 0.0046, True, "published: 18,950 switches on a V100"),
    "A100": SwitchLatency(0.0054, 0.014, 0.0045, True, "published: eight A800-SXM-80GB"),
    "A800": SwitchLatency(0.0054, 0.014, 0.0045, True, "published: eight A800-SXM-80GB"),
    "A40": SwitchLatency(0.0054, 0.014, 0.0045, True, "assumed: as an A800, the same architecture"),
    "L20": SwitchLatency(0.0067, 0.020, 0.0045, True, "published: median on an L20; the tail is assumed"),
    "H100": SwitchLatency(0.030, 0.100, 0.0045, True, _HOPPER),
    "H200": SwitchLatency(0.030, 0.100, 0.0045, True, _HOPPER),
    "B200": SwitchLatency(0.030, 0.100, 0.0045, True, "assumed: as Hopper; nothing is published for Blackwell"),
}
_UNKNOWN: Final = SwitchLatency(0.030, 0.100, 0.0045, True, "assumed: as Hopper; nothing is published for this model")

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

    >>> published_latency("NVIDIA A100-SXM4-80GB").p50_s
    0.0054
    """
    named = model.upper()
    found = next((latency for name, latency in _PUBLISHED.items() if name in named), _UNKNOWN)
    faster = _FASTER.search(model)
    return found.faster(int(faster[1])) if faster else found
