"""One GPU as its agent describes it: its model, and how long its clock changes take.

Latencies that were measured are stored with a profile as JSON, so that later jobs on the same model start from them.
Nothing of that format is taken on trust: what cannot be true is as if it were absent.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, NamedTuple

from perseus_core.latency import MAX_LATENCY_US, SwitchLatency

MAX_CLOCKS: Final = 255
"""Clocks whose latencies are known: as many as a plan set has."""
MAX_CLOCK_MHZ: Final = 10_000
"""Highest clock that a plan set may have."""
_MOST_CHANGES: Final = 2**32
"""Of one GPU from one clock to another: agents send no larger number."""
MAX_BOARD_W: Final = 10_000.0
"""No GPU, nor a module with its CPU, draws more; agents hold energy counters to the same number."""
UNKNOWN_BOARD_W: Final = 1_500.0
"""Counts where a driver does not tell the board's limit: the highest of a GPU that is sold is 1.4 kW (B300)."""


@dataclass(frozen=True)
class Transition:
    """Changes from one clock to another; 0 MHz: the default clocks."""

    from_mhz: int
    to_mhz: int
    changes: int
    p50_us: int
    p99_us: int


class ClockMedian(NamedTuple):
    """Changes to one clock, from any other: how many were measured, and their median."""

    mhz: int
    changes: int
    p50_us: int


@dataclass(frozen=True)
class ClockLatency(SwitchLatency):
    """How long changes of clock take, and what that was measured on.

    Attributes:
        changes: how many were measured.
        transitions: by pair of clocks, the most frequent first.
    """

    changes: int = 0
    transitions: tuple[Transition, ...] = ()

    @cached_property
    def medians(self) -> tuple[ClockMedian, ...]:
        """By the clock that is changed to. Transitions come from agents and profiles: what cannot be true is left out,
        and so are changes to the default clocks, which no plan has. Computed once: a planner looks several times a
        second.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for one in self.transitions:
            named, timed = 0 < one.to_mhz <= MAX_CLOCK_MHZ, 0 < one.p50_us <= MAX_LATENCY_US
            if named and timed and 0 < one.changes < _MOST_CHANGES:
                found.setdefault(one.to_mhz, []).append((one.p50_us, one.changes))
        return tuple(ClockMedian(mhz, sum(n for _, n in of), weighted_median(of)) for mhz, of in found.items())


@dataclass(frozen=True)
class Gpu:
    """One GPU as its agent describes it.

    Attributes:
        latency: None: nothing is measured, or the agent is older.
        max_power_w: the highest power limit of the board; None: the driver does not say, or the agent is older.
    """

    model: str
    driver: str = ""
    latency: ClockLatency | None = None
    max_power_w: float | None = None


@dataclass(frozen=True)
class StoredLatency:
    """What an earlier job measured on its GPUs; it is stored with the profile."""

    model: str
    driver: str
    latency: ClockLatency


def latency_to_json(stored: StoredLatency) -> str:
    """A stored latency as JSON: model, driver and figures in microseconds."""
    latency = stored.latency
    document = {
        "model": stored.model,
        "driver": stored.driver,
        "p50Microseconds": latency.p50_us,
        "p99Microseconds": latency.p99_us,
        "callMicroseconds": latency.call_us,
        "changes": latency.changes,
        "sharedLock": latency.shared_lock,
        "transitions": [[one.from_mhz, one.to_mhz, one.changes, one.p50_us, one.p99_us] for one in latency.transitions],
    }
    return json.dumps(document, separators=(",", ":"))


def latency_from_json(text: str) -> StoredLatency | None:
    """What ``latency_to_json`` wrote; None: it is damaged or out of range, and the published figures hold."""
    try:
        raw: Any = json.loads(text)
        latency = ClockLatency(
            p50_us=int(raw["p50Microseconds"]),
            p99_us=int(raw["p99Microseconds"]),
            call_us=int(raw["callMicroseconds"]),
            changes=int(raw["changes"]),
            shared_lock=bool(raw["sharedLock"]),
            transitions=tuple(Transition(*map(int, one)) for one in raw["transitions"]),
        )
        found = StoredLatency(str(raw["model"]), str(raw["driver"]), latency)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return found if latency.is_possible else None


def weighted_median(values: Iterable[tuple[int, int]]) -> int:
    """The median of values each of which counts as often as its weight says.

    Args:
        values: value and weight; at least one, and weights are positive.
    """
    ordered = sorted(values)
    totals = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(totals, totals[-1] / 2)][0]
