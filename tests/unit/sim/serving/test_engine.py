"""The laws of a simulated engine: what it serves, in which order, in which memory, and with how much energy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_sim.serving.engine import MAX_SEQUENCES, MAX_TOKENS, Engine, Served
from perseus_sim.serving.machine import Assumptions, Machine
from perseus_sim.serving.requests import Request

_PREFILLING = -2


def machine_with(kv_capacity: int) -> Machine:
    """A machine that keeps so many tokens."""
    machine = Machine("h100", "llama-3.1-8b", 1)
    machine.__dict__["kv_capacity"] = kv_capacity  # instead of the cached value
    return machine


@st.composite
def requests(draw: st.DrawFn, most: int = 30) -> list[Request]:
    """In the order of arrival, some of them at once."""
    found, arrival_s = [], 0.0
    for _ in range(draw(st.integers(1, most))):
        arrival_s += draw(st.sampled_from((0.0, 0.003, 0.04, 0.6)))
        prompt = draw(st.integers(1, 1500))
        cached = draw(st.integers(0, prompt)) if draw(st.booleans()) else 0
        found.append(Request(arrival_s, prompt, draw(st.sampled_from((1, 2, 9, 80, 300))), cached))
    return found


CAPACITIES = st.sampled_from((300, 1000, 3000, 20_000))


def kept(engine: Engine) -> int:
    """Requests that hold memory."""
    return engine.outstanding - sum(one.admitted != _PREFILLING for one in engine.waiting)


def check(engine: Engine) -> None:
    """What holds at every moment."""
    assert engine.kv_tokens >= 0
    assert engine.kv_tokens <= engine.machine.kv_capacity or kept(engine) == 1, "only one that is alone may have more"
    assert engine.backlog >= 0
    assert engine.outstanding - len(engine.waiting) <= MAX_SEQUENCES
    if engine.step is not None:
        assert engine.step.decoding + engine.step.prompt_tokens <= MAX_TOKENS
        assert engine.load.running == engine.step.decoding
        assert engine.load.waiting + engine.load.prefilling + engine.load.running <= engine.outstanding


def serve(engine: Engine, arrivals: Sequence[Request], clocks: Sequence[int] = ()) -> None:
    """Serve all, iteration by iteration, with the next clock after each arrival."""
    for index, request in enumerate(arrivals):
        while engine.ends_s <= request.arrival_s:
            engine.advance(engine.ends_s)
            check(engine)
        engine.advance(request.arrival_s)
        if clocks:
            mhz = clocks[index % len(clocks)]
            engine.set_clocks(mhz, mhz)
        engine.submit(request)
        check(engine)
    while engine.outstanding:
        engine.advance(engine.ends_s)
        check(engine)


@given(arrivals=requests(), capacity=CAPACITIES, clocks=st.lists(st.sampled_from((600, 1095, 1980)), max_size=5))
def test_every_request_is_served_once_in_the_order_of_arrival_within_the_memory(
    arrivals: list[Request], capacity: int, clocks: list[int]
) -> None:
    engine = Engine(machine_with(capacity), 1980)
    serve(engine, arrivals, clocks)
    assert [one.request for one in engine.started] == arrivals, "prompts are computed first come, first served"
    assert sorted(map(id, engine.started)) == sorted(map(id, engine.finished))
    for one in engine.finished:
        assert one.generated == one.request.output_tokens
        assert one.request.arrival_s < one.first_token_s <= one.end_s
        assert (one.first_token_s == one.end_s) == (one.request.output_tokens == 1)
    assert (engine.kv_tokens, engine.backlog, engine.step) == (0, 0, None)


@given(arrivals=requests(), capacity=CAPACITIES)
def test_what_was_preempted_is_computed_once_more(arrivals: list[Request], capacity: int) -> None:
    engine = Engine(machine_with(capacity), 1980)
    computed = 0
    for request in arrivals:  # iterations count where they begin
        while engine.ends_s <= request.arrival_s:
            computed += engine.load.prompt_tokens
            engine.advance(engine.ends_s)
        engine.advance(request.arrival_s)
        engine.submit(request)
    while engine.outstanding:
        computed += engine.load.prompt_tokens
        engine.advance(engine.ends_s)
    needed = sum(max(1, one.prompt_tokens - one.cached_tokens) for one in arrivals)
    assert (computed > needed) == (engine.preempted > 0)
    assert computed >= needed


def test_a_request_that_is_alone_is_never_preempted() -> None:
    """However long it is: otherwise it would be computed again for every token."""
    engine = Engine(machine_with(100), 1980)
    serve(engine, [Request(0.0, 500, 50)])
    assert engine.preempted == 0
    assert engine.iterations == 50


def test_the_last_admitted_gives_its_memory_back() -> None:
    engine = Engine(machine_with(260), 1980)
    first, last = Request(0.0, 100, 100), Request(0.0, 100, 100)
    serve(engine, [first, last])
    assert engine.preempted >= 1
    assert [one.request for one in engine.finished] == [first, last]
    undisturbed = Engine(machine_with(260), 1980)
    serve(undisturbed, [first])
    kept_s, alone_s = engine.finished[0].per_token_s, undisturbed.finished[0].per_token_s
    assert kept_s == pytest.approx(alone_s, rel=0.2), "the first did not pay for it"


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    """Not its first part alone: the sequences that decode would be preempted for the rest."""
    engine = Engine(machine_with(2000), 1980)
    serve(engine, [Request(0.0, 900, 200), Request(0.5, 1500, 5)])
    assert engine.preempted == 0
    assert engine.started[1].first_token_s > engine.finished[0].end_s


@given(
    arrivals=requests(),
    mhz=st.sampled_from((600, 1095, 1590, 1980)),
    watts=st.sampled_from(("low", "middle", "high")),
    limit_w=st.sampled_from((None, 300, 400, 500)),
)
def test_energy_is_between_that_of_an_idle_replica_and_the_power_limit(
    arrivals: list[Request], mhz: int, watts: str, limit_w: int | None
) -> None:
    """Also in decode, with a limit for which its clocks must fall."""
    machine = Machine("h100", "llama-3.1-8b", 1, Assumptions(watts=watts, power_limit_w=limit_w))
    engine = Engine(machine, mhz)
    serve(engine, arrivals)
    idle_w = machine.costs(mhz if limit_w is None else machine.curves.clocks_mhz[0]).idle_w
    assert idle_w * engine.now_s * (1 - 1e-9) <= engine.joules
    idle_s = engine.now_s - engine.busy_s
    assert engine.joules <= machine.power_limit_w * engine.busy_s + machine.costs(mhz).idle_w * idle_s + 1e-6
    assert engine.busy_s <= engine.now_s * (1 + 1e-9)


@given(share=st.floats(0, 0.99), before=st.sampled_from((600, 1095, 1980)), after=st.sampled_from((600, 1095, 1980)))
def test_a_change_within_an_iteration_changes_nothing_before_it(share: float, before: int, after: int) -> None:
    """The part that is left takes what it takes at the new clock, in time and in energy."""
    machine = Machine("h100", "llama-3.1-70b", 4)

    def whole(mhz: int) -> tuple[float, float]:
        engine = Engine(machine, mhz)
        engine.submit(Request(0.0, 400, 1))
        engine.advance(engine.ends_s)
        return engine.now_s, engine.joules

    engine = Engine(machine, before)
    engine.submit(Request(0.0, 400, 1))
    engine.advance(share * engine.ends_s)
    at_s, drawn_j = engine.now_s, engine.joules
    engine.set_clocks(after, after)
    assert (engine.now_s, engine.joules) == (at_s, drawn_j)
    engine.advance(engine.ends_s)
    (before_s, before_j), (after_s, after_j) = whole(before), whole(after)
    assert engine.now_s == pytest.approx(share * before_s + (1 - share) * after_s)
    assert engine.joules == pytest.approx(share * before_j + (1 - share) * after_j)


def test_the_slowest_gpu_sets_the_pace_and_the_fastest_the_power() -> None:
    machine = Machine("h100", "llama-3.1-70b", 4)

    def served(slowest: int, fastest: int) -> tuple[float, float]:
        engine = Engine(machine, 1980)
        engine.set_clocks(slowest, fastest)
        serve(engine, [Request(0.0, 400, 20)])
        return engine.now_s, engine.joules

    (slow_s, slow_j), (mixed_s, mixed_j) = served(1095, 1095), served(1095, 1980)
    assert mixed_s == slow_s
    assert mixed_j > slow_j


@given(arrivals=requests(10))
def test_an_engine_looked_at_more_often_serves_the_same(arrivals: list[Request]) -> None:
    seldom, often = (Engine(machine_with(3000), 1980) for _ in range(2))
    serve(seldom, arrivals)
    for request in arrivals:
        for part in range(1, 4):
            often.advance(often.now_s + (request.arrival_s - often.now_s) * part / 3)
        often.submit(request)
    often.advance(seldom.now_s + 1.0)
    assert moments(often.finished) == pytest.approx(moments(seldom.finished))


def moments(finished: Sequence[Served]) -> list[float]:
    return [moment for one in finished for moment in (one.first_token_s, one.end_s)]


@given(requests(most=12), CAPACITIES, st.floats(0.0, 2.0))
def test_a_copy_goes_on_as_the_engine_does_and_changes_nothing_of_it(
    arrivals: list[Request], capacity: int, at_s: float
) -> None:
    engine = Engine(machine_with(capacity), 1000)
    for request in arrivals:
        engine.advance(request.arrival_s)
        engine.submit(request)
    engine.advance(arrivals[-1].arrival_s + at_s)
    unfinished = sorted((one.request.arrival_s, left) for one, left in engine.unfinished())
    twin, other = engine.copy(), engine.copy()
    other.set_clocks(1500, 1500)
    other.advance(1e4)
    assert sorted((one.request.arrival_s, left) for one, left in engine.unfinished()) == unfinished
    for one in (engine, twin):
        one.advance(1e4)
    assert (twin.joules, twin.iterations, twin.finished) == (engine.joules, engine.iterations, engine.finished)
