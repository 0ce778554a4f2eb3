"""The words of serving that agent, operator and solver share: what an engine says, which clock a load needs.

Standard library only: engines import it too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

DEFAULT_CLOCKS: Final = 0
"""As a clock in MHz: the driver's own choice, which no lock limits."""
MOST_SEQUENCES: Final = 65_536
"""No engine runs more sequences at once; a sample that says so is not believed."""
MOST_SHARES: Final = 1024
"""Requests that got their first token, or ended, between two samples: vLLM's default runs at most as many at once."""
MOST_EDGES: Final = 64
"""Edges of a table in one direction."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """What an engine says after a step, or a heartbeat between two steps, which repeats the load.

    Attributes:
        time_s: of the engine's monotonic clock.
        waiting: requests of which no token of the prompt was computed yet.
        prefilling: requests of which a part of the prompt was computed.
        running: requests that decode.
        kv_share: of the memory for keys and values, how much is used.
        preempted: requests that gave that memory back since the engine began.
        first_tokens: of each request that got its first token since the last sample: the time that took over its limit;
            at most `MOST_SHARES`.
        tokens: of each request that ended since the last sample: its mean time between tokens over the limit; at most
            `MOST_SHARES`.
    """

    time_s: float
    waiting: int
    prefilling: int
    running: int
    kv_share: float
    preempted: int = 0
    first_tokens: tuple[float, ...] = ()
    tokens: tuple[float, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether all of it can be true."""
        counts = (self.waiting, self.prefilling, self.running, self.preempted)
        return (
            math.isfinite(self.time_s)
            and 0.0 <= self.kv_share <= 1.0
            and min(counts) >= 0
            and self.prefilling + self.running <= MOST_SEQUENCES
            and max(len(self.first_tokens), len(self.tokens)) <= MOST_SHARES
            and all(0.0 <= share < math.inf for share in (*self.first_tokens, *self.tokens))
        )


@dataclass(frozen=True)
class ClockTable:
    """The least clock for each load, in MHz.

    Attributes:
        running: upper edges of the requests that run, ascending.
        kv_share: upper edges of the used share of the memory for keys and values, ascending.
        clocks_mhz: for each edge of ``running`` one clock for each edge of ``kv_share``; `DEFAULT_CLOCKS` where no
            clock keeps the limit.
        ladder_mhz: the clocks that may be locked, ascending; the others of a GPU are not used.
        boost_mhz: the clock for one prompt that waits or is computed, for two, …; the last also for more.

    Raises:
        ValueError: it is no table; the message names the field and the rule.

    >>> table = ClockTable((8, 32), (0.5, 1.0), ((900, 1005), (1005, 1200)), (900, 1005, 1200))
    >>> table.clock_mhz(8, 0.2), table.clock_mhz(9, 0.2), table.clock_mhz(33, 0.2)
    (900, 1005, 0)
    """

    running: tuple[int, ...]
    kv_share: tuple[float, ...]
    clocks_mhz: tuple[tuple[int, ...], ...]
    ladder_mhz: tuple[int, ...]
    boost_mhz: tuple[int, ...] = (DEFAULT_CLOCKS,)

    def __post_init__(self) -> None:
        for name, edges in (("running", self.running), ("kv_share", self.kv_share), ("ladder_mhz", self.ladder_mhz)):
            if not 0 < len(edges) <= MOST_EDGES:
                raise ValueError(f"{name} must have 1 to {MOST_EDGES} values, not {len(edges)}")
            if not all(low < high for low, high in zip((0, *edges), edges, strict=False)):
                raise ValueError(f"{name} must be positive and ascending")
        if len(self.clocks_mhz) != len(self.running) or any(len(row) != len(self.kv_share) for row in self.clocks_mhz):
            raise ValueError("clocks_mhz must have a row for each edge of running, a clock for each edge of kv_share")
        allowed = {DEFAULT_CLOCKS, *self.ladder_mhz}
        if not allowed.issuperset(mhz for row in self.clocks_mhz for mhz in row):
            raise ValueError("clocks_mhz must be clocks of ladder_mhz, or 0")
        if not 0 < len(self.boost_mhz) <= MOST_EDGES or not allowed.issuperset(self.boost_mhz):
            raise ValueError(f"boost_mhz must have 1 to {MOST_EDGES} clocks of ladder_mhz, or 0")

    def clock_mhz(self, running: int, kv_share: float) -> int:
        """Return the clock of a load; `DEFAULT_CLOCKS` for one beyond the table."""
        row, column = bisect_left(self.running, running), bisect_left(self.kv_share, kv_share)
        if row == len(self.running) or column == len(self.kv_share):
            return DEFAULT_CLOCKS
        return self.clocks_mhz[row][column]

    def boosted_mhz(self, prompts: int) -> int:
        """Return the clock for so many prompts that wait or are computed, at least one."""
        return self.boost_mhz[min(prompts, len(self.boost_mhz)) - 1]
