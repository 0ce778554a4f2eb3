"""The windows of the replicas of one fingerprint, and the latest fit and table that were made from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from perseus_core.serving import MOST_EDGES, ClockTable, ServingLimits
from perseus_core.units import mean_power_w, s_from_us
from perseus_operator.nodes.engines import EngineWindow
from perseus_solver.errors import InvalidProblem
from perseus_solver.serving import MARGIN, Ceiling, FitResult, Mix, Verdict, Window

KV_CAPACITY: Final = 1_000_000
"""Nominal tokens that fit into the memory: engines say shares, and a table reads shares; only the product matters."""
_OF_A_CLOCK: Final = 250
"""Windows that are kept of each: the latest. Of sixteen clocks, as many as a fit takes."""
_MOST_WINDOWS: Final = 4_000
_FIRST_SCATTER: Final = 0.05
"""Of a window's steps, before a fit explains them."""
_AGAIN_S: Final = 600.0
"""After a fit, before another is made though no clock was left: replicas may have seen greater loads."""
_AGAIN_WINDOWS: Final = 120
_LONGEST_US: Final = 10_000_000
"""Of a window that a fit takes: the engine rested for most of a longer one, and its watts are those of rest."""
_STORED_OF_A_CLOCK: Final = 50
"""Twice as many as are measured at one whose windows scatter by 5 %: a fit of them has the same cells."""
_STORE_S: Final = 3_600.0
"""Between two writes of a profile: each is some tens of kilobytes for the API server."""
_STORE_AGAIN_S: Final = 60.0
"""After one that failed."""
NO_LIMIT_S: Final = 3_600.0
"""Stands for a time without a limit: the longest that a table may be made for."""


@dataclass(frozen=True)
class FitWork:
    """What is to be fitted, and for what a table is to be made.

    Attributes:
        windows: of replicas of one fingerprint.
        highest_mhz: of their GPUs.
        ladder_mhz: the clocks that may be locked, ascending.
        limits: of the requests.
        prompt_tokens: of a prompt, mean.
        mix: of the requests.
        switch_s: how long a change of the clock takes, median.
        prompts: the engines compute prompts alone.
        margin: share of the limit of a token that a predicted step may take.
        slower: by how many times longer than at the highest clock prompts may always take; 0: limits say it alone.
    """

    windows: tuple[Window, ...]
    highest_mhz: int
    ladder_mhz: tuple[int, ...]
    limits: ServingLimits
    prompt_tokens: float
    mix: Mix
    switch_s: float
    prompts: bool = False
    margin: float = MARGIN
    slower: float = 0.0


@dataclass(frozen=True)
class StoreProfile:
    """What was measured is to be stored.

    Attributes:
        windows: to be stored.
        prompt_tokens: computed of a prompt, mean.
    """

    windows: tuple[Window, ...]
    prompt_tokens: float


class Model:
    """Windows, and what was made of them."""

    def __init__(self) -> None:
        self.result: FitResult | None = None
        """Of the latest fit; None: nothing was fitted yet."""
        self.table: ClockTable | None = None
        """None: there is none, and no clock may be set by it."""
        self.ceilings: tuple[Ceiling, ...] = ()
        """What a replica carries under each, with the table; empty: there is none."""
        self.fitting = False
        """A fit is under way."""
        self.wanted = False
        """What is known has changed since the latest fit."""
        self._windows: dict[int, deque[Window]] = {}
        self._prompt_tokens = self._prompts = self._tokens = 0
        self._running_s = self._kv_s = 0.0
        self._fitted_s = -math.inf
        self._since_fit = 0
        self.stored_as = ""
        """Name of the PerseusProfile that has it, or that it was taken from; empty: none."""
        self._stored: FitResult | None = None
        self._store_at_s = -math.inf

    @property
    def windows(self) -> tuple[Window, ...]:
        """Those that count."""
        return tuple(window for of_clock in self._windows.values() for window in of_clock)[-_MOST_WINDOWS:]

    def windows_at(self, clock_mhz: int) -> tuple[Window, ...]:
        """Those of one clock."""
        return tuple(self._windows.get(clock_mhz, ()))

    @property
    def count(self) -> int:
        """How many windows count."""
        return min(_MOST_WINDOWS, sum(map(len, self._windows.values())))

    @property
    def scatter(self) -> float:
        """By what share a window's steps differ from what is expected of them: from the model that explains them."""
        return self.result.residual if self.result is not None and self.explained else _FIRST_SCATTER

    @property
    def prompt_tokens(self) -> float:
        """Computed of a prompt, mean."""
        return max(1.0, self._prompt_tokens / max(1, self._prompts))

    @property
    def mix(self) -> Mix:
        """Of the requests so far."""
        kv_tokens = KV_CAPACITY * self._kv_s / self._running_s if self._running_s else 0.0
        return Mix(min(float(KV_CAPACITY), kv_tokens), min(1e7, self._prompt_tokens / max(1, self._tokens)))

    @property
    def windows_to_store(self) -> tuple[Window, ...]:
        """Some of each clock, of all its loads: what a table may say of a load depends on the largest that was seen."""
        kept: list[Window] = []
        for of_clock in self._windows.values():
            ordered = sorted(of_clock, key=lambda window: (window.running, window.kv_tokens))
            count = min(_STORED_OF_A_CLOCK, len(ordered))
            kept += [ordered[at * (len(ordered) - 1) // max(1, count - 1)] for at in range(count)]
        return tuple(kept[:_MOST_WINDOWS])

    def requests_seen(self, seen: EngineWindow) -> None:
        """A replica has computed prompts and tokens."""
        self._prompt_tokens += seen.prompt_tokens
        self._prompts += sum(seen.first_tokens.values())
        self._tokens += seen.generated_tokens
        self._running_s += s_from_us(seen.time_us) * seen.running
        self._kv_s += s_from_us(seen.time_us) * seen.kv_share

    def window_taken(self, window: Window) -> None:
        """A replica did this at one clock."""
        if window.clock_mhz in self._windows or len(self._windows) < MOST_EDGES:
            self._windows.setdefault(window.clock_mhz, deque(maxlen=_OF_A_CLOCK)).append(window)
            self._since_fit += 1

    def inherited(self, windows: Iterable[Window], prompt_tokens: float) -> None:
        """A profile has these windows: they are fitted as if they had been seen."""
        for window in windows:
            self.window_taken(window)
        self._prompt_tokens, self._prompts, self.wanted = round(prompt_tokens), 1, True

    def store_due(self, now_s: float) -> bool:
        """Whether there is something new to store."""
        new = self.table is not None and self.explained and self.result is not self._stored
        return new and now_s >= self._store_at_s

    def store_started(self, now_s: float) -> None:
        """What is known is being stored."""
        self._stored, self._store_at_s = self.result, now_s + _STORE_S

    def store_ended(self, name: str) -> None:
        """A profile of this name has what is known: it was stored there, or came from there."""
        self.stored_as, self._stored = name, self._stored or self.result

    def store_failed(self, now_s: float) -> None:
        """It could not be stored."""
        self._stored, self._store_at_s = None, now_s + _STORE_AGAIN_S

    def fit_requested(self) -> None:
        """A clock was left, or what a table is made for has changed."""
        self.wanted = True

    def fit_due(self, now_s: float) -> bool:
        """Whether to fit now."""
        again = self._since_fit >= _AGAIN_WINDOWS and now_s >= self._fitted_s + _AGAIN_S and self.result is not None
        return not self.fitting and self.count > 0 and (self.wanted or again)

    def fit_started(self, now_s: float) -> None:
        """A fit is under way."""
        self.fitting, self.wanted, self._fitted_s, self._since_fit = True, False, now_s, 0

    def fitted(self, result: FitResult, table: ClockTable | None, ceilings: tuple[Ceiling, ...] = ()) -> None:
        """A fit has ended; without a table no clock may be set by one, even if there was one before."""
        self.fitting, self.result, self.table, self.ceilings = False, result, table, ceilings

    def fit_failed(self) -> None:
        """A fit has ended without a result: what was known still holds."""
        self.fitting = False

    def limits_changed(self) -> None:
        """A table for other limits, or other clocks, does not hold; the windows do."""
        self.table, self.ceilings, self.wanted = None, (), True

    @property
    def lowest_mhz(self) -> int | None:
        """The lowest clock of the table; None: there is none."""
        rows = self.table.clocks_mhz if self.table is not None else ()
        return min((mhz for row in rows for mhz in row if mhz), default=None)

    @property
    def explained(self) -> bool:
        """Whether the latest fit explains the engine."""
        return self.result is not None and self.result.verdict is Verdict.EXPLAINED


def window_of(seen: EngineWindow, highest_mhz: int) -> Window | None:
    """Convert what an engine did for a fit; None: its clock changed, or it did nothing that can be."""
    if seen.changed or not seen.steps + seen.prompt_steps or seen.time_us > _LONGEST_US:
        return None
    clock_mhz = seen.clock_mhz or highest_mhz
    watts = None if not seen.energy_mj else mean_power_w(seen.energy_mj, seen.time_us)
    try:
        return Window(
            clock_mhz=clock_mhz,
            seconds=s_from_us(seen.time_us),
            running=seen.running,
            kv_tokens=seen.kv_share * KV_CAPACITY,
            steps=seen.steps,
            step_s=s_from_us(seen.steps_us) / max(1, seen.steps),
            prompt_steps=seen.prompt_steps,
            prompt_step_s=s_from_us(seen.prompt_steps_us) / max(1, seen.prompt_steps),
            prompt_tokens=seen.prompt_tokens if seen.prompt_steps else 0,
            watts=watts,
            reached_mhz=min(seen.median_clock_mhz, highest_mhz) or None,
        )
    except InvalidProblem:
        return None
