"""Prefill and decode on replicas of their own: each follows what is its own, and a transfer is neither's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.doubles.apart import Apart, DecodeLaw, Transfers, prefill_table, prompt_windows, run_apart

from perseus_core.serving import ClockTable
from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import complete_fit, ladder, mean_prompt_tokens
from perseus_sim.serving.controllers import Fixed, Law
from perseus_sim.serving.engine import MAX_TOKENS
from perseus_sim.serving.fleet import Setting
from perseus_sim.serving.load import Chat
from perseus_sim.serving.machine import Machine, Step
from perseus_sim.serving.objective import Objective, attainment
from perseus_sim.serving.rehearsal import poisson
from perseus_solver.serving import TableRequest, Verdict, clock_table, fit
from perseus_solver.serving.fit import RELEVANT_PROMPTS
from perseus_solver.serving.table import PROMPT_SHARE, prompt_table, prompts_s

MACHINE = Machine("h100", "llama-3.1-70b", 4)
DRIVER = MODELS["h100"].driver
SETTING = Setting(MACHINE, DRIVER, replicas=2)
PREFILL = Objective()
DECODE = Objective(first_token_s=3_600.0, undisturbed=0.0)
"""A decode pool has a limit per token alone."""
REQUESTS = poisson(3.0, 1_000.0, 200.0, seconds=90.0, seed=5)
SLOW_BYTES_PER_S = 5e8
"""So slow that some request waits for its keys and values nearly all the time."""


def decode_table(first_token_s: float | None) -> ClockTable:
    result = complete_fit(MACHINE)
    assert result.models is not None
    assert result.watts is not None
    request = TableRequest(
        result.models, result.watts, ladder(MACHINE), DECODE.per_token_s, MACHINE.kv_capacity, first_token_s,
        mean_prompt_tokens(REQUESTS), DRIVER.latency.p50_s, seen=result.seen,
    )  # fmt: skip
    return clock_table(request).table


@pytest.fixture(scope="module")
def by_law() -> tuple[Apart, list[DecodeLaw]]:
    return served(decode_table(None), heard=True)


def served(table: ClockTable, *, heard: bool) -> tuple[Apart, list[DecodeLaw]]:
    """Serve by the law; whether decode engines say what is on its way."""
    prompts = prefill_table(MACHINE, PREFILL, mean_prompt_tokens(REQUESTS), DRIVER.latency.p50_s)
    laws: list[DecodeLaw] = []

    def decodes(_: int, transfers: Transfers) -> DecodeLaw:
        laws.append(DecodeLaw(table, DECODE, MACHINE, transfers if heard else Transfers(())))
        return laws[-1]

    done = run_apart(
        SETTING, SETTING, REQUESTS, lambda _: Law(prompts, PREFILL, MACHINE), decodes, bytes_per_s=SLOW_BYTES_PER_S
    )
    return done, laws


def test_each_kind_of_replica_saves_within_its_own_limit(by_law: tuple[Apart, Sequence[DecodeLaw]]) -> None:
    done, _ = by_law
    highest = run_apart(SETTING, SETTING, REQUESTS, lambda _: Fixed(), lambda *_: Fixed(), bytes_per_s=SLOW_BYTES_PER_S)
    assert attainment(done.prefill.served, PREFILL, MACHINE).percent >= 99.0, "first tokens"
    assert attainment(done.decode.served, DECODE, MACHINE).percent >= 99.0, "times per token"
    assert done.prefill.joules < 0.75 * highest.prefill.joules
    assert done.decode.joules < 0.55 * highest.decode.joules
    assert len(done.decode.served) == sum(request.output_tokens > 1 for request in REQUESTS)


def test_waiting_for_keys_and_values_raises_no_clock(by_law: tuple[Apart, Sequence[DecodeLaw]]) -> None:
    done, laws = by_law
    assert min(law.waited_s for law in laws) > 45.0, "half of the time some request waits for a transfer"
    unheard, _ = served(decode_table(None), heard=False)
    assert done.decode == unheard.decode, "the same clocks as if nobody had said so"
    # With a limit of the first token the same samples do raise them: it is the role that makes the difference.
    boosted, _ = served(decode_table(PREFILL.first_token_s), heard=True)
    assert boosted.decode.joules > 1.05 * done.decode.joules


def test_a_prefill_replica_rests_at_its_lowest_clock_and_rises_with_what_waits() -> None:
    table = prefill_table(MACHINE, PREFILL, 1_000.0, DRIVER.latency.p50_s)
    assert table.clock_mhz(0, 0.0) == ladder(MACHINE)[0]
    assert list(table.boost_mhz) == sorted(table.boost_mhz)
    assert table.boosted_mhz(1) < table.boosted_mhz(8)
    tighter = prefill_table(MACHINE, replace(PREFILL, first_token_s=0.1), 1_000.0, DRIVER.latency.p50_s)
    assert tighter.boosted_mhz(1) > table.boosted_mhz(1)


@pytest.mark.slow
@pytest.mark.parametrize(("median", "spread"), [(300, 0.6), (1_000, 0.6), (400, 0.0), (3_000, 0.6)])
def test_prompts_of_a_steady_load_suffice_however_much_they_are_alike(median: int, spread: float) -> None:
    """An engine cuts long prompts into steps of the same size: it shows no others, whatever comes."""
    machine = Machine("h100", "llama-3.1-8b", 1)
    chat = Chat(6.0, prompt_tokens=median, spread=spread)
    clocks = (machine.clocks_mhz[-1], *ladder(machine)[::4])
    windows = [one for mhz in clocks for one in prompt_windows(machine, mhz, chat.requests(40.0, seed=mhz))]
    result = fit(windows, machine.clocks_mhz[-1], prompts=True)
    assert result.verdict is Verdict.EXPLAINED, result.missing
    assert result.models is not None
    assert result.watts is not None
    mean = mean_prompt_tokens(chat.requests(400.0, seed=1))
    request = TableRequest(
        result.models, result.watts, ladder(machine), 3_600.0, machine.kv_capacity, PREFILL.first_token_s,
        mean, DRIVER.latency.p50_s, seen=result.seen,
    )  # fmt: skip
    allowed_s = PROMPT_SHARE * PREFILL.first_token_s
    in_time = 0
    for prompts, mhz in enumerate(prompt_table(request).boost_mhz, 1):
        if prompts_s(request, mhz or machine.clocks_mhz[-1], prompts) <= allowed_s:  # elsewhere no clock is enough
            tokens, costs = int(prompts * mean), machine.costs(mhz or machine.clocks_mhz[-1])
            chunks = [min(MAX_TOKENS, tokens - begin) for begin in range(0, tokens, MAX_TOKENS)]
            taken_s = sum(machine.seconds(costs, Step(0, 0, chunk, chunk**2 / 2, 1)) for chunk in chunks)
            assert taken_s < (1.0 + RELEVANT_PROMPTS) * allowed_s
            in_time += 1
    assert in_time, "no queue is promised anything"
