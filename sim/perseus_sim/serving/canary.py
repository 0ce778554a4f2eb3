"""How a table comes to the law in the simulator: windows of a canary, a fit, a table.

A canary serves the first requests that it is given, alone, at each clock for a while, from the highest downwards. What
it shows is cut into windows of a second. Nothing else of the machine is known to the fit. Where a rehearsal has no time
for that, the windows are of every load: what a canary would have shown in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from perseus_core.serving import ClockTable
from perseus_sim.serving.engine import Engine
from perseus_sim.serving.machine import Costs, Machine, Step
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.requests import Request
from perseus_solver.errors import SolverError
from perseus_solver.serving import FitResult, TableRequest, Verdict, Window, clock_table, fit

LADDER_STEP_MHZ: Final = 105
CANARY_S: Final = 240.0
"""At each clock."""
WINDOW_S: Final = 1.0
_RUNNING: Final = (1, 4, 16, 64, 256)
_CONTEXTS: Final = (250, 1_000, 4_000)
_CHUNK_TOKENS: Final = 512


class NoTable(SolverError):
    """The windows of a canary do not make a table; the message says why."""


def ladder(machine: Machine) -> tuple[int, ...]:
    """The clocks that a law may lock, ascending: every seventh below the highest."""
    clocks = machine.clocks_mhz
    return tuple(mhz for mhz in clocks[:-1] if (clocks[-1] - mhz) % LADDER_STEP_MHZ == 0)


def canary_table(
    machine: Machine, objective: Objective, requests: Sequence[Request], replicas: int, switch_s: float
) -> ClockTable:
    """Return the table for requests that so many replicas share.

    Args:
        machine: what the canary runs on.
        objective: the limits.
        requests: of all replicas, in the order of arrival.
        replicas: how many there are.
        switch_s: how long a change of the clock takes, median.

    Raises:
        NoTable: the canary's steps are not explained, or too few.
    """
    return table_of(machine, objective, fitted(machine, requests, replicas), mean_prompt_tokens(requests), switch_s)


def complete_table(machine: Machine, objective: Objective, prompt_tokens: float, switch_s: float) -> ClockTable:
    """Return the table of an engine that was seen at every load.

    Args:
        machine: the engine's.
        objective: the limits.
        prompt_tokens: of a prompt, mean.
        switch_s: how long a change of the clock takes, median.

    Raises:
        NoTable: the machine's steps are not explained.
    """
    return table_of(machine, objective, complete_fit(machine), prompt_tokens, switch_s)


def complete_fit(machine: Machine) -> FitResult:
    """Fit a model to an engine that was seen at every load."""
    highest_mhz = machine.clocks_mhz[-1]
    windows = [window for mhz in (highest_mhz, *ladder(machine)[::2]) for window in _every_load(machine, mhz)]
    return fit(windows, highest_mhz)


def mean_prompt_tokens(requests: Sequence[Request]) -> float:
    """Return the mean tokens that a prompt computes."""
    return sum(max(1, one.prompt_tokens - one.cached_tokens) for one in requests) / len(requests)


def table_of(
    machine: Machine, objective: Objective, result: FitResult, prompt_tokens: float, switch_s: float
) -> ClockTable:
    """Return the table that a fit makes.

    Args:
        machine: its clocks and its memory.
        objective: the limits.
        result: of the fit.
        prompt_tokens: of a prompt, mean.
        switch_s: how long a change of the clock takes, median.

    Raises:
        NoTable: the fit does not explain what was seen.
    """
    if result.verdict is not Verdict.EXPLAINED or result.models is None or result.watts is None:
        why = ", ".join(result.missing) or f"{result.worst}"
        raise NoTable(f"the steps of this engine make no table of clocks, {result.verdict.value}: {why}")
    request = TableRequest(
        result.models,
        result.watts,
        ladder(machine),
        objective.per_token_s,
        machine.kv_capacity,
        objective.first_token_s,
        prompt_tokens,
        switch_s,
        seen=result.seen,
    )
    return clock_table(request).table


def fitted(machine: Machine, requests: Sequence[Request], replicas: int) -> FitResult:
    """Fit a model to a canary that serves its share of the requests at each clock of the ladder in turn."""
    highest_mhz = machine.clocks_mhz[-1]
    windows: list[Window] = []
    for clock_mhz in (highest_mhz, *reversed(ladder(machine))):
        windows += _windows(machine, clock_mhz, requests[::replicas])
    return fit(windows, highest_mhz)


def _every_load(machine: Machine, clock_mhz: int) -> Iterator[Window]:
    costs = machine.costs(clock_mhz)
    for running in _RUNNING:
        for context in _CONTEXTS:
            kv_tokens = min(running * context, machine.kv_capacity)
            for prompt_tokens in (0, _CHUNK_TOKENS):
                step = Step(running, kv_tokens, prompt_tokens, prompt_tokens**2 / 2, int(prompt_tokens > 0))
                seconds = machine.seconds(costs, step)
                yield window_of_steps(clock_mhz, [(step, seconds, machine.joules(costs, step, seconds))])


class Recording(Machine):
    """The same machine, which keeps what its steps take."""

    def __init__(self, machine: Machine) -> None:
        self.__dict__.update(machine.__dict__)
        self.steps: list[tuple[Step, float, float]] = []

    def joules(self, costs: Costs, step: Step, seconds: float) -> float:  # type: ignore[override]
        joules = Machine.joules(costs, step, seconds)
        self.steps.append((step, seconds, joules))
        return joules


def _windows(machine: Machine, clock_mhz: int, requests: Sequence[Request]) -> Iterator[Window]:
    recording = Recording(machine)
    engine = Engine(recording, clock_mhz)
    for request in requests:
        if request.arrival_s >= CANARY_S:
            break
        engine.advance(request.arrival_s)
        engine.submit(request)
    engine.advance(CANARY_S)
    yield from windows_of(clock_mhz, recording.steps[:-1])  # the last did not end


def windows_of(clock_mhz: int, steps: Iterable[tuple[Step, float, float]]) -> Iterator[Window]:
    """Cut steps at one clock, with their seconds and joules, into windows; what is left at the end makes none."""
    window: list[tuple[Step, float, float]] = []
    for one in steps:
        window.append(one)
        if sum(seconds for _, seconds, _ in window) >= WINDOW_S:
            yield window_of_steps(clock_mhz, window)
            window = []


def window_of_steps(clock_mhz: int, steps: Sequence[tuple[Step, float, float]]) -> Window:
    """Return the window of steps at one clock, each with its seconds and joules."""
    plain = [seconds for step, seconds, _ in steps if not step.prompt_tokens]
    prompt = [seconds for step, seconds, _ in steps if step.prompt_tokens]
    total_s = sum(plain) + sum(prompt)
    return Window(
        clock_mhz=clock_mhz,
        seconds=total_s,
        running=sum(step.decoding for step, _, _ in steps) / len(steps),
        kv_tokens=sum(step.kv_tokens for step, _, _ in steps) / len(steps),
        steps=len(plain),
        step_s=sum(plain) / max(1, len(plain)),
        prompt_steps=len(prompt),
        prompt_step_s=sum(prompt) / max(1, len(prompt)),
        prompt_tokens=sum(step.prompt_tokens for step, _, _ in steps),
        watts=sum(joules for _, _, joules in steps) / total_s,
    )
