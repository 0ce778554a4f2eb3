"""Prefill and decode on replicas of their own, with the keys and values sent from the one to the other.

A prefill replica computes a prompt and its first token. The keys and values then go to the decode replicas, where the
request arrives when they do, and where all but the last token of its prompt is in memory already. Until then decode
engines say of it that it waits, as vLLM does: with two engines or more, each of them says so, the worst case for a law
that takes what waits for a prompt to compute. Nothing comes back from decode to prefill, so the one runs after the
other.

>>> kv_transfer_s(1_000, 327_680, 50e9)
0.0115536
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from perseus_agent.serving.law import LawSettings
from perseus_core.serving import ClockTable
from perseus_sim.serving.canary import ladder, window_of_steps
from perseus_sim.serving.controllers import Law
from perseus_sim.serving.engine import Engine, Load
from perseus_sim.serving.fleet import Controller, Run, Setting, run
from perseus_sim.serving.machine import Machine, Step
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.requests import Request
from perseus_solver.serving import FitResult, TableRequest, Window, fit, prompt_table

TRANSFER_S: Final = 0.005
"""Of each, however short: until both engines have agreed on it."""
BYTES_PER_S: Final = 50e9
"""One port of 400 Gb/s. A slower one only makes requests wait for longer, at no clock's fault."""
_PROMPTS: Final = (32, 128, 256, 512)
"""Tokens of a step with prompts that a canary would have shown in the end."""
_LONGEST_S: Final = 3_600.0


@dataclass(frozen=True)
class Apart:
    """What both kinds of replicas did.

    Attributes:
        prefill: requests of one token each: what it took is the time to the first token.
        decode: the tokens after the first.
    """

    prefill: Run
    decode: Run


def kv_transfer_s(prompt_tokens: int, kv_bytes: int, bytes_per_s: float) -> float:
    """Return how long keys and values of a prompt are on their way.

    Args:
        prompt_tokens: of the prompt.
        kv_bytes: of one token.
        bytes_per_s: of the network.
    """
    return TRANSFER_S + prompt_tokens * kv_bytes / bytes_per_s


def run_apart(
    prefill: Setting,
    decode: Setting,
    requests: Sequence[Request],
    prefills: Callable[[int], Controller],
    decodes: Callable[[int, Transfers], Controller],
    *,
    bytes_per_s: float = BYTES_PER_S,
) -> Apart:
    """Serve requests.

    Args:
        prefill: what prompts are computed on.
        decode: what tokens are generated on.
        requests: in the order of arrival.
        prefills: makes the controller of a prefill replica.
        decodes: makes that of a decode replica, which may ask what is on its way.
        bytes_per_s: of the network between them.
    """
    first = run(prefill, [replace(one, output_tokens=1) for one in requests], prefills)
    coming, sent = list[Request](), list[tuple[float, float]]()
    for served, request in zip(first.served, requests, strict=True):
        if (more := request.output_tokens - 1) > 0:
            prompt_tokens = served.request.prompt_tokens + 1
            arrival_s = served.end_s + kv_transfer_s(prompt_tokens, decode.machine.model.kv_bytes, bytes_per_s)
            coming.append(Request(arrival_s, prompt_tokens, more, prompt_tokens - 1))
            sent.append((served.end_s, arrival_s))
    coming.sort(key=lambda one: one.arrival_s)
    transfers = Transfers(sent)
    return Apart(first, run(decode, coming, lambda replica: decodes(replica, transfers)))


class Transfers:
    """Keys and values on their way."""

    def __init__(self, sent: Sequence[tuple[float, float]]) -> None:
        """``sent``: when each begins and ends."""
        self._begins_s = sorted(begin_s for begin_s, _ in sent)
        self._ends_s = sorted(end_s for _, end_s in sent)

    def waiting(self, now_s: float) -> int:
        """Requests that wait for them now."""
        return bisect_right(self._begins_s, now_s) - bisect_right(self._ends_s, now_s)


class DecodeLaw(Law):
    """The law of a decode replica, whose engine counts the requests on their way among those that wait."""

    def __init__(
        self, table: ClockTable, objective: Objective, machine: Machine, transfers: Transfers,
        settings: LawSettings | None = None,
    ) -> None:  # fmt: skip
        super().__init__(table, objective, machine, settings)
        self._transfers = transfers
        self.waited_s = 0.0
        """How long some request has waited so, by what was said to the law."""

    def said(self, now_s: float, engine: Engine) -> Load:
        """What the engine says, those on their way included."""
        waiting = self._transfers.waiting(now_s)
        self.waited_s += self.period_s * (waiting > 0)
        return engine.load._replace(waiting=engine.load.waiting + waiting)


def prefill_fit(machine: Machine) -> FitResult:
    """Fit a model to an engine that computes prompts alone, which was seen with every length at every other clock."""
    highest_mhz = machine.clocks_mhz[-1]
    windows = [window for mhz in (highest_mhz, *ladder(machine)[::2]) for window in _every_length(machine, mhz)]
    return fit(windows, highest_mhz, prompts=True)


def prefill_table(machine: Machine, objective: Objective, prompt_tokens: float, switch_s: float) -> ClockTable:
    """Return the table of an engine that computes prompts alone; arguments as of `canary.complete_table`."""
    result = prefill_fit(machine)
    assert result.models is not None
    assert result.watts is not None
    request = TableRequest(
        result.models, result.watts, ladder(machine), _LONGEST_S, machine.kv_capacity, objective.first_token_s,
        prompt_tokens, switch_s, seen=result.seen,
    )  # fmt: skip
    return prompt_table(request)


def _every_length(machine: Machine, clock_mhz: int) -> Iterator[Window]:
    costs = machine.costs(clock_mhz)
    for prompt_tokens in _PROMPTS:
        for _ in range(3):
            step = Step(0, 0, prompt_tokens, prompt_tokens**2 / 2, 1)
            seconds = machine.seconds(costs, step)
            yield window_of_steps(clock_mhz, [(step, seconds, machine.joules(costs, step, seconds))])


def prompt_windows(machine: Machine, clock_mhz: int, requests: Sequence[Request]) -> Iterator[Window]:
    """Yield windows of a second of an engine that computes prompts alone, as it cuts them into steps."""
    costs, engine = machine.costs(clock_mhz), Engine(machine, machine.clocks_mhz[-1])
    engine.set_clocks(clock_mhz, clock_mhz)
    steps, since_s = list[tuple[Step, float, float]](), 0.0
    coming = deque(replace(one, output_tokens=1) for one in requests)
    while coming or engine.outstanding:
        if coming and coming[0].arrival_s < engine.ends_s:
            engine.advance(max(engine.now_s, coming[0].arrival_s))
            engine.submit(coming.popleft())
            continue
        step = engine.step
        assert step is not None
        engine.advance(engine.ends_s)
        seconds = machine.seconds(costs, step)
        steps.append((step, seconds, machine.joules(costs, step, seconds)))
        if engine.now_s - since_s > 1.0:
            yield window_of_steps(clock_mhz, steps)
            steps, since_s = [], engine.now_s
