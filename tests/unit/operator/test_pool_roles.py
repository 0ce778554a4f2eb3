"""Pools whose engines do one part of each request: what they say themselves counts, and each keeps its own time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.doubles.engine_pool import MACHINE, EnginePool

from perseus_core.serving import FOLLOW_TABLE, ServingLimits, place_of
from perseus_operator.api.conditions import Reason
from perseus_operator.api.serving.spec import Role
from perseus_operator.families.serving.features.signals.replicas import said_role
from perseus_operator.nodes.engines import EngineWindow
from perseus_sim.serving.machine import Step

PRODUCER = (("kv_transfer.kv_connector", "P2pNcclConnector"), ("kv_transfer.kv_role", "kv_producer"))
CONSUMER = (("kv_transfer.kv_connector", "P2pNcclConnector"), ("kv_transfer.kv_role", "kv_consumer"))
BOTH = (("kv_transfer.kv_connector", "NixlConnector"), ("kv_transfer.kv_role", "kv_both"))
TOKEN = {"timePerOutputToken": {"limit": "50ms"}}
LENGTHS = (128, 256, 512, 448, 192)


@pytest.mark.parametrize(
    ("flags", "labels", "role"),
    [
        (PRODUCER, {}, Role.PREFILL),
        (CONSUMER, {}, Role.DECODE),
        (BOTH, {}, Role.MIXED),
        (BOTH, {"llm-d.ai/role": "decode"}, Role.DECODE),
        ((), {"llm-d.ai/role": "prefill-decode"}, Role.MIXED),
        ((("disaggregation_mode", "prefill"),), {}, Role.PREFILL),
        ((("disaggregation_mode", "null"),), {}, Role.MIXED),
        (PRODUCER, {"llm-d.ai/role": "decode"}, Role.PREFILL),
    ],
)
def test_the_role_is_what_the_configuration_says(
    flags: tuple[tuple[str, str], ...], labels: dict[str, str], role: Role
) -> None:
    assert said_role(flags, labels) is role


def prompts_alone(window: EngineWindow, second: list[int]) -> EngineWindow:
    """The same second of an engine that computes prompts alone, one after the other."""
    second[0] += 1
    tokens = LENGTHS[second[0] % len(LENGTHS)]
    clock_mhz = window.clock_mhz or MACHINE.clocks_mhz[-1]
    step = Step(0, 0, tokens, tokens**2 / 2, 1)
    step_s = MACHINE.seconds(MACHINE.costs(clock_mhz), step)
    count = int(0.5 / step_s)
    joules = count * MACHINE.joules(MACHINE.costs(clock_mhz), step, step_s)
    return replace(
        window, time_us=round(1e6 * count * step_s) + 1, running=0.0, kv_share=0.1, steps=0, steps_us=0,
        prompt_steps=count, prompt_steps_us=round(1e6 * count * step_s), prompt_tokens=count * tokens,
        generated_tokens=count, energy_mj=round(1000 * joules), requests=count,
        first_tokens={place_of(2 * step_s): count}, tokens={},
    )  # fmt: skip


def test_an_engine_that_says_it_prefills_follows_what_waits_within_its_own_limit() -> None:
    pool, second = EnginePool(), [0]
    pool.engine = replace(pool.engine, flags=PRODUCER)
    pool.lie = lambda window: prompts_alone(window, second)
    pool.start()
    pool.run(1_500, until=lambda: pool.second > 60 and not pool.decide().trying)
    pool.run(30)
    assert pool.family.pool.limits == ServingLimits(0.5, None, 0.99), "its time per token is another's"
    said = pool.conditions()
    assert said["ProfileReady"].reason is Reason.PROFILE_FITTED, said["ProfileReady"].message
    assert pool.clocks == [FOLLOW_TABLE] * 3
    status = pool.status()
    assert status["engine"]["role"] == "Prefill"
    table = pool.family.pool.model.table
    assert table is not None
    assert table.clock_mhz(0, 0.1) == status["engine"]["lowestMegahertz"], "at rest"
    assert table.boosted_mhz(16) == 0 or table.boosted_mhz(16) > table.boosted_mhz(1)
    pool.run(120)
    assert pool.status()["advice"]["replicas"] >= 1, "and how many the load needs"


def test_an_engine_that_says_it_decodes_keeps_its_time_per_token_alone() -> None:
    pool = EnginePool()
    pool.engine = replace(pool.engine, flags=CONSUMER)
    pool.start()
    pool.run(1_500, until=lambda: pool.second > 60 and not pool.decide().trying)
    assert pool.family.pool.limits == ServingLimits(None, 0.05, 0.99)
    table = pool.family.pool.model.table
    assert table is not None
    assert table.boost_mhz == (min(mhz for row in table.clocks_mhz for mhz in row if mhz),), "no prompt raises it"


def test_what_the_pool_says_goes_before_what_its_engines_say() -> None:
    pool = EnginePool(replicas=1, role="Mixed")
    pool.engine = replace(pool.engine, flags=CONSUMER)
    pool.start()
    pool.run(3)
    assert pool.family.pool.limits == ServingLimits(0.5, 0.05, 0.99)


def test_without_a_limit_of_its_own_time_an_engine_runs_at_default_clocks() -> None:
    pool = EnginePool(replicas=1, objective=TOKEN)
    pool.engine = replace(pool.engine, flags=PRODUCER)
    pool.start()
    pool.run(30)
    assert pool.clocks == [0]
    said = pool.conditions()["ClocksApplied"]
    assert said.reason is Reason.NO_LIMITS
    assert "Prefill" in said.message


def test_engines_of_two_roles_in_one_pool_share_no_table() -> None:
    pool = EnginePool(replicas=3)
    pool.engine = replace(pool.engine, flags=BOTH)
    pods = [
        replace(pod, labels={"llm-d.ai/role": "prefill" if n == 2 else "decode"}) for n, pod in enumerate(pool._pods)
    ]
    pool.start()
    pool.pods(*pods)
    pool.run(3)
    said = pool.conditions()["SignalsReady"]
    assert said.reason is Reason.ENGINES_DIFFER
    assert "r-2" in said.message
    assert pool.family.pool.role is Role.DECODE
