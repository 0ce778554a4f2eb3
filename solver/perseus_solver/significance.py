"""Tell a change from noise: how much measurements scatter, and over how many of them a change shows.

A step whose time depends on its data (sequences of different lengths, experts with different loads) says little alone,
and many such steps say much. The median of k measurements scatters by √(π/2k) of what one does. So a change is looked
for in the latest few measurements, and, where noise would hide it there, in the latest 2, 4, 8 … times as many: large
changes show soon, small ones later, and what stays below the noise of the longest window is not claimed at all.

Times are compared by their logarithms: noise of load is a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

SIGMAS: Final = 4.0
"""Standard deviations of noise below a change that counts. With two iterations that must agree, that is less than one
false alarm in 10⁸ iterations of a stage if the noise is normal.
"""
LONGEST: Final = 64
"""The longest window: a change shows a tenth as soon as with one measurement, and is still worth to know then."""
NO_SLOWDOWN: Final = 0.005
"""A time that is kept on real GPUs counts as no slower than the fastest up to this share: half of what the operator's
bound guard tolerates, since iterations differ by as much anyway. Without it a clock that may rise a millisecond late
would save nothing.
"""
_QUANTILES: Final = ((0.5, 1), (0.9, 32))
"""Quantiles of the residuals, and from how many on they count: most of them, and the tail that load often has. Of
fewer, the tail is what single outliers make it."""
_MOST: Final = 100.0
"""Largest standard deviation of a logarithm. No load comes near; times that do were made up, and factors of a few such
deviations are still numbers."""
_CAUTION: Final = 1.645
"""Standard deviations by which a quantile of few residuals may lie too low: in one of twenty cases it does."""
_NORMAL: Final = NormalDist()


@dataclass(frozen=True, slots=True)
class Window:
    """The latest measurements in which a change is looked for.

    Attributes:
        size: how many.
        margin: how far noise may move what they show, as a logarithm: `SIGMAS` standard deviations.
    """

    size: int
    margin: float


def windows(sigma: float, change: float, *, confirm: int, reference: float = math.inf) -> tuple[Window, ...]:
    """Return the windows in which to look for a change, the shortest first.

    Args:
        sigma: standard deviation of the logarithm of one measurement; infinite: not known, so there is no window.
        change: the smallest change that matters, as a logarithm; windows do not grow beyond the one that shows it.
        confirm: measurements that must agree in any case.
        reference: how many measurements the value has that they are compared with; infinite: it is exact.

    Returns:
        First that of ``confirm`` measurements, each of which must show the change; then ones that double, up to
        `LONGEST`, whose median must.
    """
    if not math.isfinite(sigma):
        return ()
    series = [Window(confirm, SIGMAS * sigma * math.sqrt(1 + math.pi / 2 / reference))]
    while series[-1].margin > change and 2 * series[-1].size <= LONGEST:
        size = 2 * series[-1].size
        series.append(Window(size, SIGMAS * sigma * math.sqrt(math.pi / 2 * (1 / size + 1 / reference))))
    return tuple(series)


def sigma_of(residuals: Sequence[float]) -> float:
    """Return a standard deviation that is seldom too small, however few residuals it is estimated from.

    Two quantiles are compared with those of a normal distribution, each taken as low as it may lie by chance (Wilson's
    bound), and the larger result counts. So single outliers do not, and a tail of every tenth does.

    Args:
        residuals: absolute differences from what was expected.

    Returns:
        The deviation; infinite without residuals, and beyond `_MOST`.
    """
    ordered, n = sorted(residuals), len(residuals)
    if not n:
        return math.inf
    sigma = 0.0
    for quantile in (quantile for quantile, fewest in _QUANTILES if n >= fewest):
        value = ordered[max(0, math.ceil(quantile * n) - 1)]
        sigma = max(sigma, value / _NORMAL.inv_cdf((1 + _lowest(quantile, n)) / 2))
    return sigma if sigma <= _MOST else math.inf


def _lowest(quantile: float, n: int) -> float:
    """Return which quantile a measured one may really be: Wilson's lower bound."""
    z2 = _CAUTION**2 / n
    spread = _CAUTION * math.sqrt(quantile * (1 - quantile) / n + z2 / (4 * n))
    return (quantile + z2 / 2 - spread) / (1 + z2)
