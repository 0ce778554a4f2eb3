"""What the ranks of a node may cost its agent, in time that the test turns: none slows the clocks of another GPU.

All threads of the agent share one interpreter: the ranks of the GPUs, the timer that ends leases and tells the keeper
that the agent is alive, and the calls of the operator.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.rank_budget import BURST_S, SHARE, RankBudget
from perseus_agent.lifecycle import SILENT_S
from perseus_agent.node.node import TIMER_INTERVAL_S

GPUS_OF_A_NODE = 8
HONEST_SHARE = 0.012
"""Of a processor: 200 instructions a second, each at another clock."""
TURN_S = 0.001


def forged(seconds: float, turn_s: float = TURN_S) -> list[tuple[float, float]]:
    """When a rank that rings without a pause was served, and for how long, each in seconds."""
    budget, now_s, turns = RankBudget(), 0.0, []
    while now_s < seconds:
        if budget.muted_until_s:
            now_s = max(now_s, budget.muted_until_s)
            assert budget.paid(now_s)
        turns.append((now_s, turn_s))
        now_s += turn_s
        budget.spend(turn_s, now_s)
    return turns


def test_ranks_that_forge_on_every_gpu_of_a_node_leave_the_agent_some_of_its_processor() -> None:
    spent_s = sum(cpu_s for _, cpu_s in forged(600))
    assert GPUS_OF_A_NODE * spent_s / 600 < 0.9


def test_a_rank_that_forges_is_not_followed_any_more_before_the_agent_counts_as_silent() -> None:
    """Though it had all of the interpreter meanwhile, and the timer had said a moment before that it is alive."""
    turns = forged(600)
    longest_s, begun_s, ended_s = 0.0, 0.0, 0.0
    for at_s, cpu_s in turns:
        if at_s > ended_s + 1e-9:
            begun_s = at_s
        ended_s = at_s + cpu_s
        longest_s = max(longest_s, ended_s - begun_s)
    assert longest_s < SILENT_S - TIMER_INTERVAL_S


def test_an_honest_rank_is_followed_for_ever() -> None:
    budget = RankBudget()
    for turn in range(100_000):
        assert not budget.spend(3 * HONEST_SHARE / 200, turn / 200)


@pytest.mark.parametrize("record_s", [0.01, 0.25])
def test_a_long_record_now_and_then_mutes_nobody(record_s: float) -> None:
    budget = RankBudget()
    for minute in range(10):
        assert not budget.spend(record_s, 60.0 * (minute + 1))


@given(st.floats(0.31, 100))
def test_a_turn_that_costs_too_much_is_paid_back_at_the_share(cpu_s: float) -> None:
    budget = RankBudget()
    assert budget.spend(cpu_s, 1_000.0)
    assert budget.muted_until_s - 1_000.0 == pytest.approx(cpu_s / SHARE)
    assert not budget.paid(budget.muted_until_s - 0.01)
    assert budget.paid(budget.muted_until_s)


def test_the_constants_say_what_the_design_says() -> None:
    assert GPUS_OF_A_NODE * SHARE < 1
    assert 5 * HONEST_SHARE < SHARE
    assert BURST_S < SILENT_S - TIMER_INTERVAL_S
