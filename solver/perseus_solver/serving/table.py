"""The least clock for each load, with a certificate for each.

Three rules bound the clock of a cell from below, at its upper edges, and it is the least of the ladder that keeps them:

- *limit*: the upper end of the interval of a step's time is at most ``margin`` of the limit;
- *power*: it is not below the clock at which that load costs the fewest watts in the long run;
- *prompt*: where boosts come late, it is not below the clock of one prompt that waits;
- *order*: it is not below the clock of any cell of a lesser load. Without it a clock of fewest watts, which falls with
  some loads, could fall while load grows.

What a load costs in the long run is not what its steps cost. An engine with requests never rests: a slower clock makes
its batches larger, not its days longer, so power counts, and not energy of a step. It rests when no request is there,
and a slower clock leaves less of that. Requests that come independently of each other are there in a Poisson number,
whatever the times they take (M/G/infinity): with b on average, none is with probability exp(-b).

Prompts that wait get a clock of their own: the least at which as many of mean length are done within half of the limit
of the first token, so that as much may still come before them. Where limits are a share of what requests take at the
highest clock, what comes before them is in the limit already, and prompts that take no more than that share longer are
in time, too.

A step takes no longer at a higher clock, so the next lower clock, which breaks a rule, shows that the choice is the
least. Cells of loads that nobody saw, and those that no clock keeps within the limit, get the default clocks.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from perseus_core.serving import DEFAULT_CLOCKS, MOST_EDGES, MOST_SEQUENCES, ClockTable
from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats
from perseus_solver.serving.fit import Seen
from perseus_solver.serving.model import StepModels, WattModel

RUNNING: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
KV_SHARES: Final = (1 / 64, 1 / 32, 1 / 16, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.9)
"""Up to where the memory counts as full, and default clocks are due in any case. A cell's clock is that of its upper
edges, so the first are close together: a small model seldom uses an eighth of the memory, whose keys and values alone
take longer to read than a limit of a fifth more allows."""
MARGIN: Final = 0.8
"""Of the limit, for a predicted step: the rest is for prompts between the steps."""
SAME_PROMPT: Final = 0.01
"""Prompts may take so much longer at the highest boost than at the highest clock."""
PROMPT_SHARE: Final = 0.5
"""Of the limit of the first token, for the prompts that wait."""
PROMPTS: Final = 16
"""Longest queue with a clock of its own."""


class Bound(enum.Enum):
    """The rule that the next lower clock breaks."""

    LIMIT = "Limit"
    POWER = "Power"
    PROMPT = "Prompt"
    """A boost would come too late for one prompt."""
    ORDER = "Order"
    """A lesser load has this clock."""
    LOWEST = "Lowest"
    """There is no lower clock that was measured."""
    BEYOND = "Beyond"
    """No clock keeps the limit: default clocks."""
    NOT_SEEN = "NotSeen"
    """No window had such a load: default clocks."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Why a cell has its clock: what a step takes at it, and at the next lower clock, which breaks a rule.

    Attributes:
        clock_mhz: the cell's; `DEFAULT_CLOCKS` where no clock was chosen, and then the values are the highest's.
        upper_s: upper end of the interval of a step's time.
        watts: of the load in the long run.
        bound: the rule that the next lower clock breaks.
        lower_mhz: that clock; None: there is none, or the cell has no clock.
        lower_upper_s: as ``upper_s``, at it.
        lower_watts: as ``watts``, at it.
    """

    clock_mhz: int
    upper_s: float
    watts: float
    bound: Bound
    lower_mhz: int | None = None
    lower_upper_s: float = math.nan
    lower_watts: float = math.nan


@dataclass(frozen=True, slots=True)
class TableResult:
    """A table, and a certificate for each of its cells, in the same order."""

    table: ClockTable
    certificates: tuple[tuple[Certificate, ...], ...]


@dataclass(frozen=True, slots=True)
class TableRequest:
    """What a table is made for.

    Attributes:
        steps: models of time.
        watts: of energy, of the whole instance.
        ladder_mhz: the clocks that may be locked, ascending.
        limit_s: of a step. With speculative decoding: the limit of a token times the tokens that a step yields.
        kv_capacity: tokens whose keys and values fit into the memory.
        first_token_s: limit of the time to the first token; None: there is none, so that no prompt raises a clock.
        prompt_tokens: of a prompt, mean.
        switch_s: how long a change of the clock takes, median; 0: no time.
        margin: share of the limit that a predicted step may take; the rest is for prompts between the steps.
        slower: by how many times longer than at the highest clock prompts may always take; 0: limits say it alone.
        seen: loads and clocks that were measured; None: the models hold everywhere (published ones, for advice).
        running: upper edges of the running sequences.
        kv_share: upper edges of the used share of the memory.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    steps: StepModels
    watts: WattModel
    ladder_mhz: tuple[int, ...]
    limit_s: float
    kv_capacity: int
    first_token_s: float | None
    prompt_tokens: float
    switch_s: float = 0.0
    margin: float = MARGIN
    slower: float = 0.0
    seen: Seen | None = None
    running: tuple[int, ...] = RUNNING
    kv_share: tuple[float, ...] = KV_SHARES

    def __post_init__(self) -> None:
        highest_mhz = self.steps.best.highest_mhz
        for name, limit_s in (("limit_s", self.limit_s), ("first_token_s", self.first_token_s)):
            if limit_s is not None and not 0.0 < limit_s <= 3_600.0:
                raise InvalidProblem(f"{name} must be more than 0 and at most 3,600, not {limit_s!r}")
        if not 0.0 < self.prompt_tokens <= 10**7:
            raise InvalidProblem(
                f"prompt_tokens must be more than 0 and at most 10,000,000, not {self.prompt_tokens!r}"
            )
        for name, most in (("switch_s", 60.0), ("slower", 10.0)):
            if not 0.0 <= getattr(self, name) <= most:
                raise InvalidProblem(f"{name} must be from 0 to {most:g}, not {getattr(self, name)!r}")
        if not 0.0 < self.margin <= 1.0:
            raise InvalidProblem(f"margin must be more than 0 and at most 1, not {self.margin!r}")
        if not 0 < self.kv_capacity <= 10**9:
            raise InvalidProblem(f"kv_capacity must be from 1 to 1,000,000,000, not {self.kv_capacity!r}")
        if self.watts.highest_mhz != highest_mhz:
            raise InvalidProblem(f"watts must have the highest_mhz of steps, {highest_mhz}")
        self._check_edges(highest_mhz)

    def _check_edges(self, highest_mhz: int) -> None:
        for name in ("ladder_mhz", "running", "kv_share"):
            edges = getattr(self, name)
            if not 0 < len(edges) <= MOST_EDGES:
                raise InvalidProblem(f"{name} must have 1 to {MOST_EDGES} values, not {len(edges)}")
            if not all(low < high for low, high in zip((0, *edges), edges, strict=False)):
                raise InvalidProblem(f"{name} must be positive and ascending")
        if self.ladder_mhz[-1] > highest_mhz:
            raise InvalidProblem(f"ladder_mhz must end at {highest_mhz} at most, not {self.ladder_mhz[-1]}")
        if self.kv_share[-1] > 1.0:
            raise InvalidProblem(f"kv_share must end at 1 at most, not {self.kv_share[-1]:g}")

    @property
    def boosts_are_late(self) -> bool:
        """Whether a boost takes more than half of the time that prompts have."""
        return self.first_token_s is not None and self.switch_s > 0.5 * PROMPT_SHARE * self.first_token_s

    @property
    def usable_mhz(self) -> tuple[int, ...]:
        """The clocks of the ladder that are not below the lowest measured."""
        lowest_mhz = self.seen.lowest_mhz if self.seen else 0
        return tuple(mhz for mhz in self.ladder_mhz if mhz >= lowest_mhz)

    def was_seen(self, row: int, column: int) -> bool:
        """Return whether a load of the cell was measured, in each direction by itself."""
        if self.seen is None:
            return True
        running = self.running[row - 1] if row else 0
        kv_tokens = self.kv_share[column - 1] * self.kv_capacity if column else 0.0
        return running < self.seen.most_running and kv_tokens < self.seen.most_kv_tokens


def clock_table(request: TableRequest) -> TableResult:
    """Make the table: exact on the ladder, for the models that are given.

    Args:
        request: what it is made for.

    Returns:
        The table and a certificate for each of its cells.

    >>> from perseus_solver.serving import StepModel
    >>> steps = StepModel(1980, 2e-3, 1e-3, 12e-3, 50e-6, 28e-9, 60e-6, 0.0, knee_mhz=1090.0)
    >>> watts = WattModel(1980, 300.0, 190.0, 400.0, 1050.0, 0.2, 0.2, floor_mhz=1100.0)
    >>> ladder_mhz = (900, 1095, 1305, 1605)
    >>> limits = {"limit_s": 0.042, "first_token_s": 0.5, "prompt_tokens": 1_000.0}
    >>> edges = {"running": (32, 192), "kv_share": (0.2,)}
    >>> request = TableRequest(StepModels(steps), watts, ladder_mhz, kv_capacity=500_000, **limits, **edges)
    >>> table = clock_table(request).table
    >>> table.clocks_mhz, table.boost_mhz[:4]
    (((900,), (1305,)), (900, 900, 1305, 0))
    """
    clocks = np.array([*request.usable_mhz, request.steps.best.highest_mhz], float)
    loads = np.meshgrid(
        np.array(request.running, float),
        np.array(request.kv_share, float) * request.kv_capacity,
        clocks,
        indexing="ij",
    )
    upper_s = request.steps.upper_s(loads[2], loads[0], loads[1], np.zeros_like(loads[0]))
    watts = _long_run_w(request, *loads)
    boosts_mhz = _boosts_mhz(request)
    least = (*request.usable_mhz, DEFAULT_CLOCKS).index(boosts_mhz[0]) if request.boosts_are_late else 0
    chosen = np.zeros(upper_s.shape[:2], dtype=np.intp)
    rows = []
    for row in range(len(request.running)):
        cells = []
        for column in range(len(request.kv_share)):
            before = max(chosen[max(0, row - 1), column], chosen[row, max(0, column - 1)])
            place, bound = len(clocks) - 1, Bound.NOT_SEEN
            if request.was_seen(row, column):
                allowed_s = request.margin * request.limit_s
                place, bound = _least(allowed_s, upper_s[row, column], watts[row, column], least, int(before))
            chosen[row, column] = place
            cells.append(_certificate(request, place, bound, upper_s[row, column], watts[row, column]))
        rows.append(tuple(cells))
    table = ClockTable(
        request.running,
        request.kv_share,
        tuple(tuple(cell.clock_mhz for cell in cells) for cells in rows),
        request.ladder_mhz,
        boosts_mhz,
    )
    return TableResult(table, tuple(rows))


def prompt_table(request: TableRequest) -> ClockTable:
    """Make the table of an engine that computes prompts alone: the lowest clock that was measured, but for prompts.

    Args:
        request: what it is made for; the limit of a step says nothing here, and ``seen`` is of steps with prompts.

    Returns:
        The table: one clock for every load without a prompt, and one for each number of prompts that wait.
    """
    boosts_mhz = _boosts_mhz(request)
    lowest_mhz = boosts_mhz[0] if request.boosts_are_late else next(iter(request.usable_mhz), DEFAULT_CLOCKS)
    edges = (MOST_SEQUENCES,), (request.kv_share[-1],)
    return ClockTable(*edges, ((lowest_mhz,),), request.ladder_mhz, boosts_mhz)


def _least(allowed_s: float, upper_s: Floats, watts: Floats, prompt: int, before: int) -> tuple[int, Bound]:
    """Return which clock a cell of a seen load gets, the last standing for the default ones, and what bounds it."""
    count = len(upper_s) - 1
    within = np.flatnonzero(upper_s[:count] <= allowed_s)
    if not within.size:
        return count, Bound.BEYOND
    bounds = (
        (0, Bound.LOWEST),
        (int(within[0]), Bound.LIMIT),
        (int(np.argmin(watts[:count])), Bound.POWER),
        (prompt, Bound.PROMPT),
        (before, Bound.ORDER),
    )
    return max(bounds, key=lambda bound: bound[0])


def _certificate(request: TableRequest, place: int, bound: Bound, upper_s: Floats, watts: Floats) -> Certificate:
    usable_mhz = request.usable_mhz
    if place == len(usable_mhz):
        return Certificate(DEFAULT_CLOCKS, float(upper_s[-1]), float(watts[-1]), bound)
    at = Certificate(usable_mhz[place], float(upper_s[place]), float(watts[place]), bound)
    if not place:
        return at
    lower = place - 1
    return Certificate(
        at.clock_mhz, at.upper_s, at.watts, bound, usable_mhz[lower], float(upper_s[lower]), float(watts[lower])
    )


def _long_run_w(request: TableRequest, running: Floats, kv_tokens: Floats, clocks_mhz: Floats) -> Floats:
    """Return what loads draw in the long run, rests included; so many run at the highest clock, more at others."""
    best, watts, none = request.steps.best, request.watts, np.zeros_like(running)
    step_s = best.steps_s(clocks_mhz, running, kv_tokens, none)
    highest_s = best.steps_s(np.full_like(clocks_mhz, best.highest_mhz), running, kv_tokens, none)
    resting = np.exp(-running * step_s / highest_s)
    busy_w = watts.joules_of(best, clocks_mhz, running, kv_tokens, none) / step_s
    power_w: Floats = (1.0 - resting) * busy_w + resting * watts.resting_w(clocks_mhz)
    return power_w


def _boosts_mhz(request: TableRequest) -> tuple[int, ...]:
    """Return the clocks for one prompt that waits, for two, …; none is above the one at which prompts get no faster."""
    if request.first_token_s is None:
        return (next(iter(request.usable_mhz), DEFAULT_CLOCKS),)
    top_mhz = next((mhz for mhz in request.usable_mhz if _as_fast(request, mhz)), DEFAULT_CLOCKS)
    boosts = []
    for prompts in range(1, PROMPTS + 1):
        allowed_s = prompts_allowed_s(request, prompts)
        in_time = (mhz for mhz in request.usable_mhz if prompts_s(request, mhz, prompts) <= allowed_s)
        mhz = next(in_time, DEFAULT_CLOCKS) or top_mhz
        boosts.append(top_mhz if top_mhz != DEFAULT_CLOCKS and mhz > top_mhz else mhz)
    return tuple(boosts)


def prompts_allowed_s(request: TableRequest, prompts: int) -> float:
    """Return how long so many prompts may take, in seconds; for ever where no limit is theirs."""
    if request.first_token_s is None:
        return math.inf
    fastest_s = prompts_s(request, request.steps.best.highest_mhz, prompts)
    relative_s = request.slower * fastest_s if math.isfinite(fastest_s) else 0.0
    return max(PROMPT_SHARE * request.first_token_s, relative_s)


def prompts_s(request: TableRequest, clock_mhz: int, prompts: int) -> float:
    """Return how long prompts of mean length may take, in seconds, behind the step that runs when they come.

    Infinite where a model knows of no prompts.
    """
    if any(model.token_s == 0.0 for model in (request.steps.best, *request.steps.draws)):
        return math.inf
    none, behind = np.zeros(2), np.array([0.0, prompts * request.prompt_tokens])
    return float(request.steps.each_s(np.full(2, float(clock_mhz)), none, none, behind).sum(axis=1).max())


def _as_fast(request: TableRequest, clock_mhz: int) -> bool:
    """Whether every model says that many prompts take as long as at the highest clock."""
    highest_mhz = request.steps.best.highest_mhz
    models = (request.steps.best, *request.steps.draws)
    tokens = PROMPTS * request.prompt_tokens
    return clock_mhz < highest_mhz and all(
        model.token_s > 0.0
        and model.step_s(clock_mhz, 0, 0, tokens) <= (1.0 + SAME_PROMPT) * model.step_s(highest_mhz, 0, 0, tokens)
        for model in models
    )
