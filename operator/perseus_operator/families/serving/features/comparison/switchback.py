"""What is saved, measured: now and then a replica runs at default clocks for some minutes, and its joules of a token
are compared with its own before and after.

Time is cut into blocks. A random number, which the pool's UID and the block's number alone decide, says whether one
replica is switched back in a block, and which. So nothing has to be remembered for it, and nobody who knows the load
chooses the moment. Two blocks in which a replica follows the law, and the one at default clocks between them, make a
comparison. Joules and tokens of all comparisons are added up before they are divided: a mean of quotients would count
quiet blocks by the law too much, by two points where requests are rare. The interval is a jackknife's, which leaves out
one comparison after another, with Student's quantile: drawing ten comparisons again (bootstrap) says too small a one.
Before against after is never compared.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from perseus_core.units import j_from_mj
from perseus_operator.nodes.engines import EngineWindow

BLOCK_S: Final = 180.0
SHARE: Final = 0.2
"""Of blocks, with a replica at default clocks: of one replica alone a fifth of what could be saved is spent on it."""
SETTLES_S: Final = 15.0
"""Of a block's begin, that do not count: orders are on their way, and requests run that began before."""
LEAST_COMPARISONS: Final = 10
MOST_COMPARISONS: Final = 500
_MOST_LOG: Final = math.log(100.0)
"""Of a quotient: whatever an agent says of its joules, more than a hundredfold is no figure."""


class Comparison(NamedTuple):
    """Energy and tokens of one replica: of the block at default clocks, and of both beside it, by the law."""

    default_mj: int
    default_tokens: int
    law_mj: int
    law_tokens: int


@dataclass(frozen=True)
class Saved:
    """What is saved of the energy of a token, as a share, and the ends of its 95 % interval.

    Attributes:
        share: saved.
        low: lower end.
        high: upper end.
        comparisons: that it was computed from.
        law_j: joules of a token by the law.
    """

    share: float
    low: float
    high: float
    comparisons: int
    law_j: float


@dataclass
class _Block:
    number: int
    default: bool
    energy_mj: int = 0
    tokens: int = 0
    torn: bool = False
    """A window was at other clocks than the block's, or had no energy."""


def block_at(wall_s: float) -> int:
    """Return the number of the block in which a moment is."""
    return math.floor(wall_s / BLOCK_S)


def switched_back(seed: str, block: int, replicas: Sequence[str]) -> str:
    """Return which replica runs at default clocks in a block; empty: none.

    Args:
        seed: of the pool.
        block: its number.
        replicas: UIDs of the pods, in any order.
    """
    draw = Random(f"{seed}/{block}")  # noqa: S311  # nobody gains by knowing it
    if not replicas or draw.random() >= SHARE:
        return ""
    return draw.choice(sorted(replicas))


class Switchback:
    """The comparisons of one pool."""

    def __init__(self) -> None:
        self.comparisons: deque[Comparison] = deque(maxlen=MOST_COMPARISONS)
        self.saved: Saved | None = None
        """None: too few comparisons."""
        self._blocks: dict[str, deque[_Block]] = {}
        """The latest three of each replica."""

    def window_seen(self, window: EngineWindow, tokens: int, *, default: bool, wall_s: float) -> None:
        """A replica did this, under orders to follow the law or, in this block, to run at default clocks.

        Args:
            window: of the replica.
            tokens: that its joules are for: generated, or of prompts where engines generate none.
            default: it was to run at default clocks.
            wall_s: the time.
        """
        number = block_at(wall_s)
        blocks = self._blocks.setdefault(window.pod_uid, deque(maxlen=3))
        if not blocks or blocks[-1].number != number:
            self._compare(blocks)
            blocks.append(_Block(number, default))
        block = blocks[-1]
        if wall_s - number * BLOCK_S < SETTLES_S or (not tokens and not window.steps):
            return
        misplaced = block.default and window.default_us < window.time_us
        block.torn |= block.default != default or misplaced or window.energy_mj is None
        block.energy_mj += window.energy_mj or 0
        block.tokens += tokens

    def restored(self, saved: Saved | None) -> None:
        """An earlier operator has measured this; it holds until there are as many comparisons again."""
        self.saved = saved

    def interrupted(self, pod_uid: str) -> None:
        """A replica neither follows the law nor is compared with it."""
        self._blocks.pop(pod_uid, None)

    def pods_observed(self, uids: Collection[str]) -> None:
        """These pods there are now."""
        self._blocks = {uid: blocks for uid, blocks in self._blocks.items() if uid in uids}

    def _compare(self, blocks: Sequence[_Block]) -> None:
        """Compare the three latest blocks of a replica, if the one between was at default clocks."""
        if len(blocks) < 3:
            return
        before, between, after = blocks
        usual = not before.default and between.default and not after.default
        follow = (before.number, after.number) == (between.number - 1, between.number + 1)
        if not usual or not follow or any(block.torn or not block.tokens * block.energy_mj for block in blocks):
            return
        law_mj, law_tokens = before.energy_mj + after.energy_mj, before.tokens + after.tokens
        self.comparisons.append(Comparison(between.energy_mj, between.tokens, law_mj, law_tokens))
        self.saved = saved_of(tuple(self.comparisons)) or self.saved


def saved_of(comparisons: Sequence[Comparison]) -> Saved | None:
    """Return what comparisons say together; None: they are too few."""
    count = len(comparisons)
    if count < LEAST_COMPARISONS:
        return None
    sums = Comparison(*map(sum, zip(*comparisons, strict=True)))
    level = _log_ratio(sums)
    left = [_log_ratio(Comparison(*map(operator.sub, sums, one))) for one in comparisons]
    half = _student_95(count - 1) * math.sqrt((count - 1) * statistics.pvariance(left))
    return Saved(
        share=1.0 - math.exp(level),
        low=1.0 - math.exp(min(_MOST_LOG, level + half)),
        high=1.0 - math.exp(max(-_MOST_LOG, level - half)),
        comparisons=count,
        law_j=j_from_mj(sums.law_mj) / sums.law_tokens,
    )


def _log_ratio(sums: Comparison) -> float:
    """Logarithm of the joules of a token by the law over those at default clocks."""
    ratio = sums.law_mj / sums.law_tokens / (sums.default_mj / sums.default_tokens)
    return max(-_MOST_LOG, min(_MOST_LOG, math.log(ratio)))


def _student_95(degrees: int) -> float:
    """Student's t for 95 %, two-sided, to the second order: from nine degrees on within 0.2 %."""
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
