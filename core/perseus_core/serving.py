"""The words of serving that agent, operator and solver share: what an engine says, which clock a load needs.

Standard library only: engines import it too.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final

DEFAULT_CLOCKS: Final = 0
"""As a clock in MHz: the driver's own choice, which no lock limits."""
MOST_SEQUENCES: Final = 65_536
"""No engine runs more sequences at once; a sample that says so is not believed."""
MOST_SHARES: Final = 1024
"""Requests that got their first token, or ended, between two samples: vLLM's default runs at most as many at once."""
ROLE_FLAG: Final = "disaggregation_mode"
"""Among an engine's flags: ``prefill`` or ``decode``, if it does that alone; so SGLang calls it."""
MOST_EDGES: Final = 64
"""Edges of a table in one direction."""


_PLACES_OF_OCTAVE: Final = 16
_SHORTEST_US: Final = 1_000
TIME_EDGES_US: Final = tuple(
    round(_SHORTEST_US * 2.0 ** (place / _PLACES_OF_OCTAVE)) for place in range(17 * _PLACES_OF_OCTAVE)
)
"""Upper edges between which times of requests are counted, from 1 ms to two minutes, 4.4 % apart; a longer one is
counted at the place after the last. A time is judged as its upper edge: never as kept when it was missed."""


def place_of(seconds: float) -> int:
    """Return the place in `TIME_EDGES_US` at which a time is counted; its length for a longer one.

    >>> place_of(0.001), place_of(0.00101), place_of(1e9) == len(TIME_EDGES_US)
    (0, 1, True)
    """
    return bisect_left(TIME_EDGES_US, seconds * 1e6)


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

    def under(self, ceiling_mhz: int) -> ClockTable:
        """Return the table for GPUs that rest at a ceiling instead of their default clocks: no clock is above it.

        Args:
            ceiling_mhz: at least the lowest of ``ladder_mhz``; `DEFAULT_CLOCKS`: there is none.

        >>> table = ClockTable((8, 32), (1.0,), ((900,), (1200,)), (900, 1005, 1200), (1005, 1200))
        >>> lowered = table.under(1005)
        >>> lowered.clocks_mhz, lowered.ladder_mhz, lowered.boost_mhz
        (((900,), (0,)), (900, 1005), (1005, 0))
        """
        if ceiling_mhz == DEFAULT_CLOCKS:
            return self

        def lowered(clocks_mhz: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(mhz if mhz <= ceiling_mhz else DEFAULT_CLOCKS for mhz in clocks_mhz)

        return replace(
            self,
            clocks_mhz=tuple(map(lowered, self.clocks_mhz)),
            ladder_mhz=tuple(mhz for mhz in self.ladder_mhz if mhz <= ceiling_mhz),
            boost_mhz=lowered(self.boost_mhz),
        )


class ClockReason(enum.Enum):
    """Why the clock of a replica is what it is."""

    FLOOR = "Floor"
    """The table's."""
    TRIM = "Trim"
    """The table's, raised for what was missed."""
    BOOST = "Boost"
    """A prompt waits or is partly computed."""
    HOLD = "Hold"
    """A boost just ended."""
    BEYOND_TABLE = "BeyondTable"
    """No clock but the default ones keeps the limit at this load."""
    MEMORY_FULL = "MemoryFull"
    """Keys and values are short of memory."""
    NO_SAMPLE = "NoSample"
    """The engine is silent."""
    IMPOSSIBLE_SAMPLE = "ImpossibleSample"
    """What it said cannot be true."""
    ORDERED = "Ordered"
    """The operator's, which no law chooses."""


@dataclass(frozen=True)
class ServingLimits:
    """What requests were promised.

    Attributes:
        first_token_s: from the arrival to the first token; None: no limit.
        per_token_s: mean time between the tokens of one request; None: no limit.
        attainment: share of the requests that shall keep each limit.

    Raises:
        ValueError: a value is out of range; the message names the field and the rule.
    """

    first_token_s: float | None
    per_token_s: float | None
    attainment: float = 0.99

    def __post_init__(self) -> None:
        for name in ("first_token_s", "per_token_s"):
            value = getattr(self, name)
            if value is not None and not 0.001 <= value <= 3600.0:
                raise ValueError(f"{name} must be from 0.001 to 3600")
        if not 0.0 < self.attainment < 1.0:
            raise ValueError("attainment must be above 0 and below 1")

    def of(self, *, first_token: bool, per_token: bool) -> ServingLimits | None:
        """Return those of the times that an engine has; None: there are none."""
        kept = replace(
            self,
            first_token_s=self.first_token_s if first_token else None,
            per_token_s=self.per_token_s if per_token else None,
        )
        return None if kept.first_token_s is None and kept.per_token_s is None else kept


FOLLOW_TABLE: Final = -1
"""As the clock of an order: that of the table, which follows the load."""


@dataclass(frozen=True)
class PageAddress:
    """Where a pod's engine shows its metrics.

    Attributes:
        host: an IP address of the pod.
        port: of the engine.
        path: of the page.
    """

    host: str
    port: int
    path: str = "/metrics"


@dataclass(frozen=True)
class EngineOrders:
    """At which clocks the engines in the pods of one job run.

    Attributes:
        limits: of their requests.
        table: None: no pod may follow one.
        clocks_mhz: by the UID of the pod: `FOLLOW_TABLE`, one clock in MHz to hold while the engine says what it does,
            or `DEFAULT_CLOCKS`, at which those run that are not named.
        pages: by the UID of the pod, of those whose engine does not say by itself what it does.

    Raises:
        ValueError: a pod is to follow a table, and there is none.
    """

    limits: ServingLimits
    table: ClockTable | None = None
    clocks_mhz: Mapping[str, int] = field(default_factory=dict)
    pages: Mapping[str, PageAddress] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.table is None and FOLLOW_TABLE in self.clocks_mhz.values():
            raise ValueError("clocks_mhz must not follow a table where there is none")
        if min(self.clocks_mhz.values(), default=0) < FOLLOW_TABLE:
            raise ValueError("clocks_mhz must be clocks, 0, or -1 to follow the table")

    @property
    def orders_id(self) -> str:
        """SHA-256 over all of it, in hexadecimal digits, by which an agent says what it holds."""
        written = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(written.encode()).hexdigest()
