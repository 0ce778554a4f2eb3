"""Pools by length: what is seen of lengths, when a plan is made, what it says, and that lies stay in their own pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.engine_pool import EnginePool
from tests.doubles.stored_objects import stored_object

from perseus_core.lengths import LENGTH_PLACES, UNKNOWN, length_of, length_place
from perseus_operator.errors import SolveFailed
from perseus_operator.families.serving.features.advice.forecast import pack
from perseus_operator.families.serving.features.split.lengths import Lengths
from perseus_operator.families.serving.plan_work import plan_status, request_of
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.objects.formatting import stamp
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.serving_plan import PoolRow, ServingPlan, ServingPlanRequest

CHAT = length_place(length_of(700), length_of(90))
HOUR_S = 3_600.0


def telling(pool: EnginePool, place: int = CHAT) -> EnginePool:
    """Its engines say how long requests were."""
    pool.lie = lambda window: replace(window, lengths={place: 2})
    return pool


def loaded(pool: EnginePool) -> EnginePool:
    """A day of load was counted by an operator before."""
    until_s = 900.0 * (pool.wall_s // 900.0)
    load = {"until": stamp(until_s), "epochs": pack([(2.0, 2.5)] * 96)}
    pool.start({"load": load})
    return pool


def window(lengths: dict[int, int], pod: str = "pod-0") -> EngineWindow:
    return EngineWindow(pod_uid=pod, pid=1, time_us=1_000_000, lengths=lengths)


# --------------------------------------------------------------------------------------------------------- what is seen


def test_lengths_are_classes_once_a_hundred_requests_have_ended() -> None:
    seen = Lengths()
    seen.window_seen(window({CHAT: 60}), 0.0)
    assert not seen.known
    seen.window_seen(window({length_place(length_of(5_000), length_of(2_000)): 60}, "pod-1"), 1.0)
    classes, together = seen.classes()
    assert together
    assert [(one.name, one.share) for one in classes] == [("prompt-m-answer-s", 0.5), ("prompt-l-answer-l", 0.5)]
    assert seen.requests == 120


def test_pages_say_each_length_by_itself_so_both_are_independent() -> None:
    seen = Lengths()
    prompts = {length_place(length_of(tokens), UNKNOWN): 50 for tokens in (100, 5_000)}
    seen.window_seen(window(prompts), 0.0)
    assert not seen.known, "no answer has ended"
    seen.window_seen(window({length_place(UNKNOWN, length_of(90)): 100}), 0.0)
    classes, together = seen.classes()
    assert not together
    assert [(one.name, one.share) for one in classes] == [("prompt-s-answer-s", 0.5), ("prompt-l-answer-s", 0.5)]
    assert seen.requests == 100, "each request once"


def test_what_was_a_day_ago_counts_half() -> None:
    seen = Lengths()
    seen.window_seen(window({CHAT: 1_000}), 0.0)
    seen.window_seen(window({}), 24 * HOUR_S)
    assert seen.counts == {CHAT: 500}
    for hour in range(25, 24 * 30):
        seen.window_seen(window({}), hour * HOUR_S)
    assert not seen.counts, "and nothing stays for ever"


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.integers(0, LENGTH_PLACES - 1), st.integers(0, 10_000_000), max_size=LENGTH_PLACES))
def test_whatever_a_pod_says_of_lengths_is_counted_and_bounded(lengths: dict[int, int]) -> None:
    seen = Lengths()
    seen.window_seen(window(lengths), 0.0)
    assert len(seen.counts) <= LENGTH_PLACES
    if seen.known:
        classes, _ = seen.classes()
        assert 1 <= len(classes) <= 9
        assert sum(one.share for one in classes) == pytest.approx(1.0)


# ------------------------------------------------------------------------------------------------------ when it is made


@pytest.fixture(scope="module")
def pool() -> EnginePool:
    """One whose engine is measured, whose load and lengths are known."""
    made = loaded(telling(EnginePool()))
    made.run(1_500, until=lambda: bool(made.planned))
    return made


def test_a_plan_is_made_once_engine_load_and_lengths_are_known_and_the_status_says_it(pool: EnginePool) -> None:
    [work] = pool.planned
    assert work.counts == {CHAT: pytest.approx(pool.family.pool.lengths.counts[CHAT], rel=0.5)}
    assert work.gpus == 4
    assert 1.5 < work.basis.per_s < 2.5
    status = pool.status()
    assert status["lengths"]["classes"][0]["name"] == "prompt-m-answer-s"
    assert status["lengths"]["source"] == "Requests"
    assert status["plan"]["pools"][0]["name"] == "all"
    assert status["plan"]["why"] == (
        "One pool needs 1,000.00 kWh a day, and the best split by length, into 3 pools, needs 1,100.00 kWh: 10.00%"
        " more, so no split pays."
    )


def test_an_hour_passes_before_the_next_and_something_must_have_changed(pool: EnginePool) -> None:
    planning, (work,) = pool.family.pool.planning, pool.planned
    began_s = pool.wall_s
    assert not planning.may_begin(began_s + 0.5 * HOUR_S)
    assert not planning.due(work.basis, began_s + 2 * HOUR_S), "nothing has changed"
    assert planning.due(replace(work.basis, per_s=1.2 * work.basis.per_s), began_s + 2 * HOUR_S)
    assert not planning.due(replace(work.basis, per_s=1.05 * work.basis.per_s), began_s + 2 * HOUR_S)
    assert planning.due(replace(work.basis, shares={"prompt-l-answer-l": 1.0}), began_s + 2 * HOUR_S)
    assert planning.due(work.basis, began_s + 25 * HOUR_S), "its day has passed"


def test_a_later_operator_goes_on_with_the_plan(pool: EnginePool) -> None:
    later = EnginePool()
    later.start({"plan": pool.status()["plan"]})
    assert later.status()["plan"] == pool.status()["plan"]
    assert not later.family.pool.planning.may_begin(pool.wall_s)


# ------------------------------------------------------------------------------------------------------ a pod that lies


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.integers(0, LENGTH_PLACES - 1), st.integers(0, 10_000_000), max_size=40))
def test_lengths_of_a_lying_pod_change_its_own_pools_plan_alone(pool: EnginePool, lengths: dict[int, int]) -> None:
    before, counts = pool.status(), pool.family.pool.lengths.counts
    lie = replace(window(lengths), pod_uid="pod-of-another-pool")
    for node in pool.nodes:
        assert pool.family.window_reported(node, lie) is None
    assert pool.family.pool.lengths.counts == counts
    assert (pool.status()["lengths"], pool.status()["plan"]) == (before["lengths"], before["plan"])
    liar = EnginePool(1)
    liar.lie = lambda seen: replace(seen, lengths={CHAT: 100, **lengths})
    liar.run(2)
    assert liar.family.pool.lengths.counts, "its own pool counts what it says"


# ------------------------------------------------------------------------------------------- what is asked and answered


def test_engines_of_the_model_on_other_gpus_are_variants_and_no_others(pool: EnginePool) -> None:
    [work] = pool.planned
    serving = {
        "fingerprint": "0" * 64,
        "engine": "vllm 0.11.0",
        "model": work.model,
        "windows": "csv",
        "promptTokens": 100,
        "gpus": 8,
        "measuredAt": "2026-11-29T00:00:00Z",
    }
    profiles = [
        stored_object("serving-8", {"serving": serving}),
        stored_object(
            "serving-8-newer", {"serving": {**serving, "windows": "new", "measuredAt": "2026-11-30T00:00:00Z"}}
        ),
        stored_object("serving-4", {"serving": {**serving, "gpus": 4}}),
        stored_object("serving-other", {"serving": {**serving, "gpus": 2, "model": "another"}}),
        stored_object("serving-old", {"serving": {key: one for key, one in serving.items() if key != "gpus"}}),
        stored_object("serving-odd", {"serving": {"model": 7}}),
    ]
    asked = request_of(work, profiles)
    assert [(one.gpus, one.windows) for one in asked.variants[1:]] == [(8, "new")]
    assert ServingPlanRequest.from_bytes(asked.to_bytes()).variants == asked.variants
    assert len(asked.expected) == len(asked.upper) == 24


@pytest.mark.slow
async def test_a_worker_process_plans_what_the_pool_has_measured(pool: EnginePool) -> None:
    [work] = pool.planned
    found = await SolverPool(workers=1, timeout_s=600.0, memory_mib=4_096).plan_serving(request_of(work, []))
    assert [one.name for one in found.pools] == ["all"], "all requests have the same lengths"
    assert found.joules == found.one_pool_joules > 0.0
    assert found.pools[0].gpus == 4
    assert found.pools[0].clock_mhz in {window.clock_mhz for window in work.windows}


@pytest.mark.slow
async def test_a_worker_refuses_to_plan_for_no_requests(pool: EnginePool) -> None:
    [work] = pool.planned
    asked = replace(request_of(work, []), expected=(0.0,) * 24, upper=(0.0,) * 24)
    with pytest.raises(SolveFailed, match="no requests are forecast"):
        await SolverPool(workers=1, timeout_s=600.0, memory_mib=4_096).plan_serving(asked)


async def test_a_worker_refuses_a_pool_whose_engine_nothing_explains(pool: EnginePool) -> None:
    [work] = pool.planned
    asked = request_of(replace(work, windows=work.windows[:3]), [])
    with pytest.raises(SolveFailed, match="no model explains the engine yet"):
        await SolverPool(workers=1, timeout_s=600.0, memory_mib=4_096).plan_serving(asked)


def answer(**changes: object) -> ServingPlan:
    pools = tuple(PoolRow(name, 0.5, 4, 3, 1, 1_200, 1.8e9) for name in ("prompt-s", "prompt-ml"))
    return replace(ServingPlan(pools, 3.6e9, 4.0e9, 3.6e9, 2, 0.001, together=False), **changes)


def test_a_split_that_pays_says_what_it_saves_and_what_is_assumed() -> None:
    status = plan_status(answer(), "2026-11-30T00:00:00Z")
    assert status.why == (
        "2 pools by length need 1,000.00 kWh a day, and one needs 1,111.11 kWh: 10.00% is saved. Prompts and answers"
        " are taken as independent of each other: metrics pages do not say more."
    )
    assert (status.saved, status.gap) == ("10.00%", "0.10%")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        answer(pools=()).to_bytes(),
        answer(joules=-1.0).to_bytes(),
        answer(gap=float("nan")).to_bytes(),
        answer(together="yes").to_bytes(),
        answer(pools=(PoolRow("../x", 0.5, 4, 3, 1, 1_200, 1.0),)).to_bytes(),
        answer(pools=(PoolRow("all", 0.5, 4, 3.5, 1, 1_200, 1.0),)).to_bytes(),  # type: ignore[arg-type]
        answer(pools=(PoolRow("all", 1.5, 4, 3, 1, 1_200, 1.0),)).to_bytes(),
        answer(pools=(PoolRow("all", 0.5, 1_025, 3, 1, 1_200, 1.0),)).to_bytes(),
        answer(pools=(PoolRow("all", 0.5, 4, 2_001, 1, 1_200, 1.0),)).to_bytes(),
        answer(pools=(PoolRow("a" * 33, 0.5, 4, 3, 1, 1_200, 1.0),)).to_bytes(),
        answer(pools=2 * (PoolRow("all", 0.5, 4, 3, 1, 1_200, 1.0),)).to_bytes(),
        answer(joules=1.0, one_pool_joules=0.0).to_bytes(),
        answer(joules=4.1e9).to_bytes(),
        answer(other_pools=2.5).to_bytes(),
    ],
)
def test_an_answer_that_is_no_plan_or_that_no_status_could_hold_is_refused(data: bytes) -> None:
    assert ServingPlan.from_bytes(answer().to_bytes()) == answer()
    with pytest.raises(SolveFailed, match="no plan of a pool"):
        ServingPlan.from_bytes(data)
