"""What a pool saves is measured by switching single replicas back at random, with an interval."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from tests.doubles.engine_pool import EnginePool
from tests.unit.operator.test_serving_family import explored

from perseus_core.serving import FOLLOW_TABLE
from perseus_operator.families.serving.features.comparison.switchback import (
    BLOCK_S,
    LEAST_COMPARISONS,
    SHARE,
    Comparison,
    Switchback,
    saved_of,
    switched_back,
)
from perseus_operator.nodes.engines import EngineWindow

PODS = ["a", "b", "c"]


def test_one_replica_at_a_time_is_chosen_and_all_are_equally_often() -> None:
    chosen = Counter(switched_back("uid", block, PODS) for block in range(6_000))
    assert set(chosen) == {*PODS, ""}
    assert abs(chosen[""] / 6_000 - (1 - SHARE)) < 0.03
    assert max(chosen[pod] for pod in PODS) < 1.3 * min(chosen[pod] for pod in PODS)
    assert all(switched_back("uid", block, PODS) == switched_back("uid", block, PODS[::-1]) for block in range(50))
    assert switched_back("uid", 1, []) == ""


def drawn(draw: Random, default_mj: float, law_mj: float, spread: float) -> Comparison:
    """A comparison of which the load is random, and half of the energy is spent whatever the load is."""
    tokens = [max(100, round(draw.gauss(1_000, 1_000 * spread))) for _ in range(3)]
    return Comparison(
        round(default_mj * (500 + tokens[0] / 2)),
        tokens[0],
        round(law_mj * (1_000 + (tokens[1] + tokens[2]) / 2)),
        tokens[1] + tokens[2],
    )


@pytest.mark.parametrize("count", [LEAST_COMPARISONS, 100])
@pytest.mark.parametrize("law_mj", [70, 90, 100])
@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_the_interval_holds_what_is_true_in_most_runs(count: int, law_mj: float, spread: float) -> None:
    draw, kept = Random(count * law_mj), 0
    for _ in range(200):
        found = saved_of([drawn(draw, 100, law_mj, spread) for _ in range(count)])
        assert found is not None
        assert found.low <= found.share <= found.high
        kept += found.low <= 1 - law_mj / 100 <= found.high
    assert kept >= 182, "95 of 100 but for chance"


def test_whatever_joules_an_agent_claims_there_is_a_figure() -> None:
    for odd in (Comparison(1, 1 << 63, 1 << 63, 1), Comparison(1 << 63, 1, 1, 1 << 63)):
        found = saved_of([Comparison(100, 1, 140, 2)] * LEAST_COMPARISONS + [odd] * 3)
        assert found is not None
        assert -100 < found.low <= found.share <= found.high < 1


def window(mj: int, tokens: int, *, default: bool) -> EngineWindow:
    return EngineWindow(
        pod_uid="a",
        pid=1,
        time_us=1_000_000,
        default_us=1_000_000 if default else 0,
        steps=9,
        energy_mj=mj,
        generated_tokens=tokens,
    )


def blocks(one: Switchback, kinds: str, begin: int = 100) -> None:
    """``d``: at default clocks; ``l``: by the law; ``x``: at other clocks than the block's."""
    for number, kind in enumerate(kinds, start=begin):
        default = kind in "dx"
        for second in range(20, 60):
            at_default = kind == "d"
            seen = window(10_000 if at_default else 7_000, 100, default=at_default)
            one.window_seen(seen, seen.generated_tokens, default=default, wall_s=number * BLOCK_S + second)


def test_a_block_at_default_clocks_is_compared_with_those_beside_it() -> None:
    one = Switchback()
    blocks(one, "ldl")
    assert not one.comparisons, "the third has not ended"
    blocks(one, "l", begin=103)
    [found] = one.comparisons
    assert found == Comparison(400_000, 4_000, 560_000, 8_000)


def test_what_is_no_comparison_does_not_count() -> None:
    for kinds in ("lll", "ddl", "ldd", "lxl"):
        one = Switchback()
        blocks(one, kinds + "l")
        assert not one.comparisons, kinds
    gap = Switchback()
    blocks(gap, "l")
    blocks(gap, "dll", begin=103)
    assert not gap.comparisons
    interrupted = Switchback()
    blocks(interrupted, "ld")
    interrupted.interrupted("a")
    blocks(interrupted, "lll", begin=102)
    assert not interrupted.comparisons


def test_too_few_comparisons_say_nothing() -> None:
    assert saved_of([Comparison(10, 1, 14, 2)] * (LEAST_COMPARISONS - 1)) is None
    found = saved_of([Comparison(10, 1, 14, 2)] * LEAST_COMPARISONS)
    assert found is not None
    assert (round(found.share, 9), round(found.low, 9), round(found.high, 9)) == (0.3, 0.3, 0.3)


def test_a_pool_says_what_it_saves() -> None:
    pool = EnginePool(replicas=1, clocks={"minimumMegahertz": 1_500})
    explored(pool)
    pool.family.pool.trials.paused_until_s = float("inf")
    back = 0
    while pool.family.pool.switchback.saved is None and pool.second < 40_000:
        pool.step()
        pool.second += 19  # a window now and then is enough
        back += pool.clocks == [0]
    assert 0 < back < pool.second
    saved = pool.status()["savings"]
    assert float(saved["low"].rstrip("%")) > 0, "lower clocks take less energy of a token"
    assert saved["blocks"] == LEAST_COMPARISONS
    assert pool.clocks[0] in (0, FOLLOW_TABLE)
    pool.start(pool.status())
    pool.step()
    assert pool.status()["savings"] == saved, "it outlives a restart"
    pool.engine = replace(pool.engine, version="0.12.0")
    pool.pods(*pool._pods)
    pool.step()
    assert "savings" not in pool.status(), "but not another engine"
