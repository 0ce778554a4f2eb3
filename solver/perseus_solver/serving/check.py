"""Checks a table against the definition of its models: it computes all values anew, with code of its own.

For each cell it computes what a step takes at the clock and at the next lower one, and whether the first keeps all
rules and the second breaks the rule that its certificate names. As each rule holds at every clock above one at which it
holds, nothing else is left to show.
"""

from __future__ import annotations

import math
from typing import Final

from perseus_solver.serving.model import StepModel, StepModels
from perseus_solver.serving.table import PROMPT_SHARE, PROMPTS, SAME_PROMPT, Bound, TableRequest, TableResult

_SAME: Final = 1e-9
"""Relative difference of two sums of the same numbers in another order."""
_DEFAULT: Final = 0


def check(request: TableRequest, result: TableResult) -> str | None:
    """Check a table and its certificates.

    Args:
        request: what the table was to be made for.
        result: what was made.

    Returns:
        What is wrong with the first cell that is; None: nothing.
    """
    table = result.table
    if (table.running, table.kv_share, table.ladder_mhz) != (request.running, request.kv_share, request.ladder_mhz):
        return "the table has other edges or another ladder than the request"
    if [len(row) for row in result.certificates] != [len(request.kv_share)] * len(request.running):
        return "the certificates have another shape than the table"
    for row, running in enumerate(request.running):
        for column, share in enumerate(request.kv_share):
            wrong = _Cell(request, result, row, column).wrong()
            if wrong:
                return f"running {running}, kv_share {share:g}, {table.clocks_mhz[row][column]} MHz: {wrong}"
    return _wrong_boosts(request, table.boost_mhz)


class _Cell:
    def __init__(self, request: TableRequest, result: TableResult, row: int, column: int) -> None:
        self._request = request
        self._row, self._column = row, column
        self._running = request.running[row]
        self._kv_tokens = request.kv_share[column] * request.kv_capacity
        self._clocks = result.table.clocks_mhz
        self._certificate = result.certificates[row][column]
        lowest_mhz = request.seen.lowest_mhz if request.seen else 0
        self._usable = [mhz for mhz in request.ladder_mhz if mhz >= lowest_mhz]
        self._watts = [self._watts_at(mhz) for mhz in self._usable]

    def wrong(self) -> str | None:
        certificate, clock_mhz = self._certificate, self._clocks[self._row][self._column]
        if certificate.clock_mhz != clock_mhz:
            return f"its certificate is for {certificate.clock_mhz} MHz"
        if clock_mhz != _DEFAULT and clock_mhz not in self._usable:
            return "no window was measured at so low a clock"
        return self._wrong_values() or (
            self._wrong_default() if clock_mhz == _DEFAULT else self._wrong_clock(self._usable.index(clock_mhz))
        )

    def _wrong_values(self) -> str | None:
        certificate = self._certificate
        at_mhz = certificate.clock_mhz or self._request.steps.best.highest_mhz
        claims = [(at_mhz, certificate.upper_s, certificate.watts)]
        if certificate.lower_mhz is not None:
            claims.append((certificate.lower_mhz, certificate.lower_upper_s, certificate.lower_watts))
        for mhz, upper_s, watts in claims:
            for unit, claimed, real in (("s", upper_s, self._upper_s(mhz)), ("W", watts, self._watts_at(mhz))):
                if not math.isclose(claimed, real, rel_tol=_SAME):
                    return f"at {mhz} MHz the load has {real:.6g} {unit}, not {claimed:.6g}"
        return None

    def _wrong_default(self) -> str | None:
        if self._certificate.lower_mhz is not None:
            return "default clocks have no lower clock to compare with"
        reasons = {
            Bound.NOT_SEEN: not self._seen(),
            Bound.BEYOND: not any(self._within(mhz, -_SAME) for mhz in self._usable[-1:]),
            Bound.PROMPT: self._prompt() == math.inf,
            Bound.ORDER: self._before() == math.inf,
        }
        return None if reasons.get(self._certificate.bound) else f"{self._certificate.bound.value} is not so"

    def _wrong_clock(self, place: int) -> str | None:
        clock_mhz, certificate = self._usable[place], self._certificate
        if not self._seen():
            return "no window had such a load"
        if not self._within(clock_mhz, _SAME):
            return f"a step may take {self._upper_s(clock_mhz):.6g} s, beyond the margin"
        if not self._reaches_least(place, _SAME):
            return "a higher clock costs fewer watts"
        if clock_mhz < max(self._prompt(), self._before()):
            return f"one prompt needs {self._prompt():g} MHz, a lesser load has {self._before():g} MHz"
        lower_mhz = self._usable[place - 1] if place else None
        if certificate.lower_mhz != lower_mhz:
            return f"the next lower clock is {lower_mhz} MHz, not {certificate.lower_mhz}"
        broken = {
            Bound.LOWEST: lower_mhz is None,
            Bound.LIMIT: lower_mhz is not None and not self._within(lower_mhz, -_SAME),
            Bound.POWER: lower_mhz is not None and not self._reaches_least(place - 1, -_SAME),
            Bound.PROMPT: lower_mhz is not None and lower_mhz < self._prompt(),
            Bound.ORDER: lower_mhz is not None and lower_mhz < self._before(),
        }
        return None if broken.get(certificate.bound) else f"{certificate.bound.value} allows a lower clock"

    def _seen(self) -> bool:
        """Whether windows had loads above the cell's lower edges."""
        request, seen = self._request, self._request.seen
        lower_running = request.running[self._row - 1] if self._row else 0
        lower_tokens = request.kv_share[self._column - 1] * request.kv_capacity if self._column else 0
        return seen is None or (seen.most_running > lower_running and seen.most_kv_tokens > lower_tokens)

    def _within(self, mhz: float, slack: float) -> bool:
        return self._upper_s(mhz) <= self._request.margin * self._request.limit_s * (1.0 + slack)

    def _reaches_least(self, place: int, slack: float) -> bool:
        """Whether no clock above costs fewer watts than all up to here."""
        return min(self._watts[: place + 1]) <= min(self._watts) * (1.0 + slack)

    def _prompt(self) -> float:
        """The clock that one prompt needs where boosts are late; 0 where they are not."""
        request = self._request
        if request.first_token_s is None or request.switch_s <= PROMPT_SHARE * request.first_token_s / 2:
            return 0.0
        return _needed_mhz(request, 1) or math.inf

    def _before(self) -> float:
        """The highest clock of the two cells of lesser load."""
        places = ((self._row - 1, self._column), (self._row, self._column - 1))
        return max([0.0, *(self._clocks[row][column] or math.inf for row, column in places if min(row, column) >= 0)])

    def _upper_s(self, mhz: float) -> float:
        steps: StepModels = self._request.steps
        best_s = seconds(steps.best, mhz, self._running, self._kv_tokens, 0.0)
        drawn = sorted(seconds(draw, mhz, self._running, self._kv_tokens, 0.0) for draw in steps.draws)
        return max(best_s, drawn[min(len(drawn), math.ceil(0.975 * (len(drawn) + 1))) - 1]) if drawn else best_s

    def _watts_at(self, mhz: float) -> float:
        watts, model = self._request.watts, self._request.steps.best
        voltage2 = (max(mhz, watts.floor_mhz) / watts.highest_mhz) ** 2
        resting_w = watts.idle_w + watts.clock_w * mhz / watts.highest_mhz * voltage2
        reading_w = watts.byte_w + watts.die_w * voltage2
        step_s, highest_s = (
            seconds(model, at_mhz, self._running, self._kv_tokens, 0.0) for at_mhz in (mhz, watts.highest_mhz)
        )
        reading_j = reading_w * (model.weights_s + model.kv_token_s * self._kv_tokens)
        busy_w = resting_w + (reading_j + watts.sequence_j * voltage2 * self._running) / step_s
        nobody = math.exp(-self._running * step_s / highest_s)
        return nobody * resting_w + (1.0 - nobody) * busy_w


def seconds(model: StepModel, mhz: float, running: float, kv_tokens: float, prompt_tokens: float) -> float:
    """Return a step's time, as the definition has it."""
    slower = max(1.0, model.knee_mhz / mhz)
    held_mhz = mhz if model.plateau_mhz is None else min(mhz, model.plateau_mhz)
    reading_s = model.weights_s * slower
    operations_s = model.token_s * (running + prompt_tokens) * model.highest_mhz / held_mhz
    fixed_s = model.host_s + model.sequence_s * running
    cycles_s = (model.launch_s + model.sampling_s * running) * model.highest_mhz / mhz
    return fixed_s + cycles_s + max(reading_s, operations_s) + model.kv_token_s * kv_tokens * slower


def _wrong_boosts(request: TableRequest, boosts_mhz: tuple[int, ...]) -> str | None:
    if request.first_token_s is None:  # nobody waits for a first token
        lowest = (next(iter(request.usable_mhz), _DEFAULT),)
        return None if boosts_mhz == lowest else f"boost_mhz is {boosts_mhz}, not {lowest}"
    if len(boosts_mhz) != PROMPTS:
        return f"boost_mhz has {len(boosts_mhz)} clocks, not {PROMPTS}"
    for prompts, mhz in enumerate(boosts_mhz, start=1):
        needed_mhz = _needed_mhz(request, prompts)
        if mhz != needed_mhz:
            return f"boost_mhz for {prompts} prompts is {mhz}, not {needed_mhz}"
    return None


def _needed_mhz(request: TableRequest, prompts: int) -> int:
    """The least clock at which so many prompts are in time, or get no faster."""
    assert request.first_token_s is not None
    enough = (
        mhz
        for mhz in request.usable_mhz
        if _prompts_s(request, mhz, prompts) <= PROMPT_SHARE * request.first_token_s
        or _prompts_take(request, mhz) <= 1.0 + SAME_PROMPT
    )
    return next(enough, _DEFAULT)


def _prompts_s(request: TableRequest, mhz: float, prompts: int) -> float:
    tokens = prompts * request.prompt_tokens
    models = (request.steps.best, *request.steps.draws)
    if min(model.token_s for model in models) == 0.0:
        return math.inf
    return max(seconds(model, mhz, 0, 0, 0) + seconds(model, mhz, 0, 0, tokens) for model in models)


def _prompts_take(request: TableRequest, mhz: float) -> float:
    """At most how many times as long many prompts take as at the highest clock; infinite where no model has prompts."""
    highest_mhz, longest = request.steps.best.highest_mhz, 1.0
    if mhz >= highest_mhz:
        return math.inf
    for model in (request.steps.best, *request.steps.draws):
        if model.token_s == 0.0:
            return math.inf
        tokens = PROMPTS * request.prompt_tokens
        longest = max(longest, seconds(model, mhz, 0, 0, tokens) / seconds(model, highest_mhz, 0, 0, tokens))
    return longest
