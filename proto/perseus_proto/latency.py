"""How long a GPU takes to change its clock: what is known by measurement, and what is assumed until then.

The *switch latency* counts from the begin of the driver's call to the moment at which the new clock is in effect. The
*call* is a part of it, in which the driver may hold a lock that all GPUs of the node share. Both spread widely and have
long tails, so a log-normal distribution describes them, given by its median and its 99th percentile. Standard library
only: agents use it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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


def published_latency(model: str) -> SwitchLatency:
    """The switch latency to assume for a GPU whose own was not measured: published figures, or the worst of them.

    Args:
        model: the GPU's name as NVML gives it.

    >>> published_latency("NVIDIA A100-SXM4-80GB").p50_s
    0.0054
    """
    named = model.upper()
    return next((latency for name, latency in _PUBLISHED.items() if name in named), _UNKNOWN)
