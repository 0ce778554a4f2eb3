"""What requests take at default clocks, at the pool's own replicas: what ``maxSlowdown`` is relative to.

Only replicas count that are at default clocks by order: all of them until there is a table, then those that follow none
and those that are switched back at random. One that the table gives the default clocks has more load than the others,
and would make the baseline slower than it is. A baseline is of the load of its own requests: as each thousand is
counted a new one takes its place where it differs, so that it follows the load, some blocks behind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from perseus_core.serving import ServingLimits
from perseus_operator.families.serving.features.objective.requests import quantile_s
from perseus_operator.nodes.engines import EngineWindow

REQUESTS: Final = 1_000
"""Of which ten are beyond the 99th percentile."""
ATTAINMENT: Final = 0.99
SHARE: Final = 0.95
"""Of a limit that is relative to a baseline, up to which clocks are tried and tables go. Prompts between the steps,
for which more is left of other limits, are in the baseline already."""
_SAME: Final = 0.05
"""Two baselines that differ by less are one: times are counted between edges 4.4 % apart."""
_LONGEST_S: Final = 3_600.0


@dataclass(frozen=True)
class BaselineTimes:
    """Times that 99 % of the requests kept at default clocks, in seconds; None: no request had such a time."""

    first_token_s: float | None
    per_token_s: float | None

    def differs(self, other: BaselineTimes) -> bool:
        """Whether another baseline is another for limits, too."""
        pairs = (self.first_token_s, other.first_token_s), (self.per_token_s, other.per_token_s)
        return any((one is None) is not (two is None) or (one and two and abs(two / one - 1.0) > _SAME)
                   for one, two in pairs)  # fmt: skip


class Baseline:
    """That of one fingerprint."""

    def __init__(self) -> None:
        self.times: BaselineTimes | None = None
        """None: too few requests."""
        self._first_tokens, self._tokens = Counter[int](), Counter[int]()

    def window_seen(self, window: EngineWindow) -> None:
        """A replica that is at default clocks by order did this."""
        if window.default_us < window.time_us:
            return
        self._first_tokens.update(window.first_tokens)
        self._tokens.update(window.tokens)
        if self.counted < REQUESTS:
            return
        times = BaselineTimes(_p99_s(self._first_tokens), _p99_s(self._tokens))
        if self.times is None or self.times.differs(times):
            self.times = times
        self._first_tokens.clear()
        self._tokens.clear()

    def restored(self, times: BaselineTimes | None) -> None:
        """An earlier operator has measured this; it holds until there are as many requests again."""
        self.times = times

    @property
    def counted(self) -> int:
        """Requests of the next baseline."""
        return max(self._first_tokens.total(), self._tokens.total())

    def limits(self, slowdown: float, *, first_token: bool, per_token: bool) -> ServingLimits | None:
        """Return what requests may take; None: it is not known yet.

        Args:
            slowdown: as a share of the baseline.
            first_token: whether the time to the first token is limited.
            per_token: whether that of a token is.
        """
        times = self.times
        if times is None:
            return None
        first_s = _slowed(times.first_token_s, slowdown) if first_token else None
        token_s = _slowed(times.per_token_s, slowdown) if per_token else None
        return None if first_s is None and token_s is None else ServingLimits(first_s, token_s, ATTAINMENT)


def _p99_s(times: Counter[int]) -> float | None:
    found_s = quantile_s(times, ATTAINMENT)
    return None if found_s is None or found_s > _LONGEST_S else found_s


def _slowed(time_s: float | None, slowdown: float) -> float | None:
    return None if time_s is None else min(_LONGEST_S, time_s * (1.0 + slowdown))
