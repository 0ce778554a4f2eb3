"""What requests took lately, replica by replica: counts by time, in blocks of which the oldest are dropped.

Memory and time are bounded by the number of replicas, not by that of requests: a block counts how many times fell
between the edges that agent and operator share.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from perseus_core.serving import TIME_EDGES_US, ServingLimits
from perseus_core.units import s_from_us
from perseus_operator.nodes.engines import EngineWindow

_WINDOWS: Final = 60
"""Of a block: about a minute."""
_BLOCKS: Final = 10
_SUMS: Final = ("windows", "time_us", "default_us", "mhz_us")
_COUNTS: Final = ("first_tokens", "tokens", "held_us")
LEAST_REQUESTS: Final = 100
"""Before a share of 99 % means anything."""


def seconds_at(place: int) -> float:
    """The longest time that is counted at a place; infinite beyond the last edge.

    >>> seconds_at(0)
    0.001
    """
    return s_from_us(TIME_EDGES_US[place]) if place < len(TIME_EDGES_US) else float("inf")


def kept(times: Mapping[int, int], limit_s: float) -> int:
    """How many of the counted times keep a limit for certain."""
    return sum(count for place, count in times.items() if seconds_at(place) <= limit_s)


def quantile_s(times: Mapping[int, int], share: float) -> float | None:
    """The time that a share of the counted ones do not exceed; None: there are none."""
    left = share * sum(times.values())
    for place in sorted(times):
        left -= times[place]
        if left <= 1e-9:
            return seconds_at(place)
    return None


def beyond_chance(late: int, count: int, share: float, chance: float) -> bool:
    """Whether more of a count than a share are late, and chance alone says so less often than this.

    Chernoff's bound, which holds for a handful of requests as for a million: one late request of twenty says nothing of
    one in a hundred.

    >>> beyond_chance(1, 20, 0.01, 0.05), beyond_chance(4, 20, 0.01, 0.05)
    (False, True)
    """
    seen = late / max(1, count)
    if seen <= share:
        return False
    rest = (count - late) * math.log((1.0 - seen) / (1.0 - share)) if late < count else 0.0
    return late * math.log(seen / share) + rest > -math.log(chance)


def least_quantile_s(times: Mapping[int, int], share: float, chance: float) -> float:
    """The least that a quantile may be, as far as so few times can say; NaN: there are none."""
    count, late, least_s = sum(times.values()), 0, math.nan
    for place in sorted(times, reverse=True):
        if beyond_chance(late, count, 1.0 - share, chance):
            break
        least_s, late = seconds_at(place), late + times[place]
    return least_s


@dataclass
class Block:
    """What one replica, or several, did for a while."""

    windows: int = 0
    time_us: int = 0
    default_us: int = 0
    mhz_us: int = 0
    first_tokens: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    held_us: Counter[str] = field(default_factory=Counter)

    def add(self, window: EngineWindow) -> None:
        """A window more."""
        self.windows += 1
        self.time_us += window.time_us
        self.default_us += window.default_us
        self.mhz_us += window.mhz_us
        for count, more in (
            (self.first_tokens, window.first_tokens),
            (self.tokens, window.tokens),
            (self.held_us, window.held_us),
        ):
            count.update(more)  # type: ignore[arg-type]

    def merge(self, other: Block) -> None:
        """All that another block has, more."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTS:
            getattr(self, name).update(getattr(other, name))

    def forget(self, other: Block) -> None:
        """All that another block has, less; it was added before."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) - getattr(other, name))
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) - getattr(other, name))

    @property
    def requests(self) -> int:
        """How many ended, or got their first token where fewer did."""
        return max(self.first_tokens.total(), self.tokens.total())

    def attainment(self, limits: ServingLimits) -> tuple[float | None, float | None]:
        """Return the shares that kept the limits of first token and time per token; None: no limit, or no request."""
        pairs = (self.first_tokens, limits.first_token_s), (self.tokens, limits.per_token_s)
        first, token = (
            None if limit_s is None or not times else kept(times, limit_s) / times.total() for times, limit_s in pairs
        )
        return first, token

    def mean_mhz(self, highest_mhz: int) -> int:
        """Mean clock, the default clocks counted as the highest."""
        return round((self.mhz_us + self.default_us * highest_mhz) / max(1, self.time_us))


@dataclass
class _Recent:
    """What one replica did lately: the sum of its latest blocks, kept up as they come and go."""

    together: Block = field(default_factory=Block)
    blocks: deque[Block] = field(default_factory=deque)

    def add(self, window: EngineWindow) -> None:
        if not self.blocks or self.blocks[-1].windows >= _WINDOWS:
            self.blocks.append(Block())
        if len(self.blocks) > _BLOCKS:
            self.together.forget(self.blocks.popleft())
        self.blocks[-1].add(window)
        self.together.add(window)


class RequestTimes:
    """What all replicas did lately."""

    def __init__(self) -> None:
        self._recent: dict[str, _Recent] = {}

    def window_seen(self, pod_uid: str, window: EngineWindow) -> None:
        """A replica did this."""
        self._recent.setdefault(pod_uid, _Recent()).add(window)

    def pods_observed(self, uids: Collection[str]) -> None:
        """These pods there are now."""
        self._recent = {uid: recent for uid, recent in self._recent.items() if uid in uids}

    def of_pod(self, pod_uid: str) -> Block:
        """What one replica did lately; not to be changed."""
        return self._recent[pod_uid].together if pod_uid in self._recent else Block()

    def of_all(self) -> Block:
        """What all did together."""
        together = Block()
        for recent in self._recent.values():
            together.merge(recent.together)
        return together


def worst_share(block: Block, limits: ServingLimits) -> float | None:
    """The lesser of both shares that kept their limit; None: not known."""
    return min((share for share in block.attainment(limits) if share is not None), default=None)
