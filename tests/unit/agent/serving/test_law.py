"""The ten lines of the law of engines, each as a law; and samples that cannot be true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.serving.law import Choice, EngineLaw, LawSettings
from perseus_core.serving import DEFAULT_CLOCKS, MOST_SEQUENCES, MOST_SHARES, ClockReason, ClockTable, EngineSample

HIGHEST = 1980
LADDER = (705, 900, 1005, 1200, 1500, 1800)
TABLE = ClockTable((8, 32), (0.5, 1.0), ((705, 900), (900, 1005)), LADDER, (900, 1200, DEFAULT_CLOCKS))
TABLES = st.builds(
    lambda floors, boosts: ClockTable((8, 32), (0.5, 1.0), (floors[:2], floors[2:]), LADDER, boosts),
    st.tuples(*[st.sampled_from((DEFAULT_CLOCKS, *LADDER))] * 4),
    st.lists(st.sampled_from((DEFAULT_CLOCKS, *LADDER)), min_size=1, max_size=4).map(tuple),
)
SETTINGS = LawSettings(step=0.1, target_share=0.5, hold_s=0.2)
QUIET = EngineSample(0.0, waiting=0, prefilling=0, running=4, kv_share=0.2)
SHARES = st.lists(st.floats(0, 5), max_size=5).map(tuple)
SAMPLES = st.builds(
    EngineSample,
    time_s=st.floats(0, 1e6),
    waiting=st.integers(0, 5),
    prefilling=st.integers(0, 3),
    running=st.integers(0, 60),
    kv_share=st.floats(0, 1),
    preempted=st.integers(0, 3),
    first_tokens=SHARES,
    tokens=SHARES,
)
ANY_FLOAT = st.floats() | st.sampled_from((-1.0, 1e300, math.nan, math.inf, -math.inf))
ANY_COUNT = st.integers(-5, 5) | st.sampled_from((-(10**30), 10**30, MOST_SEQUENCES, MOST_SEQUENCES + 1))
HOSTILE = st.builds(
    EngineSample,
    time_s=ANY_FLOAT,
    waiting=ANY_COUNT,
    prefilling=ANY_COUNT,
    running=ANY_COUNT,
    kv_share=ANY_FLOAT,
    preempted=ANY_COUNT,
    first_tokens=st.lists(ANY_FLOAT, max_size=3).map(tuple),
    tokens=st.lists(ANY_FLOAT, max_size=3).map(tuple),
)


class Clocked:
    """A law, and an engine that speaks once in a period."""

    def __init__(self, table: ClockTable = TABLE, settings: LawSettings = SETTINGS) -> None:
        self.law = EngineLaw(table, settings, HIGHEST)
        self.settings = settings
        self.now_s = 0.0

    def decide(self, *samples: EngineSample, after_s: float | None = None) -> Choice:
        """Let time pass and decide on samples of now."""
        self.now_s += self.settings.period_s if after_s is None else after_s
        return self.law.decide(self.now_s, [replace(sample, time_s=self.now_s) for sample in samples])

    def settle(self, seconds: float = 2.0) -> Choice:
        """Let a quiet engine speak until no boost is held."""
        return [self.decide(QUIET) for _ in range(round(seconds / self.settings.period_s))][-1]

    def miss(self, count: int, share: float = 1.2) -> None:
        for _ in range(count):
            self.decide(replace(QUIET, tokens=(share,)))


def rank(clock_mhz: int) -> float:
    """As a number that is higher for higher clocks."""
    return clock_mhz or math.inf


# 1. Default clocks whenever the engine is silent, or what it says cannot be true.


@given(before=st.lists(SAMPLES, max_size=5), silent_s=st.floats(0.351, 1e6))
def test_a_silent_engine_runs_at_default_clocks(before: list[EngineSample], silent_s: float) -> None:
    law = EngineLaw(TABLE, SETTINGS, HIGHEST)
    for index, sample in enumerate(before):
        law.decide(index * SETTINGS.period_s, [sample])
    last_s = (len(before) - 1) * SETTINGS.period_s
    assert law.decide(last_s + silent_s, []) == (DEFAULT_CLOCKS, ClockReason.NO_SAMPLE)


def test_three_periods_of_silence_are_not_yet_too_many() -> None:
    clocked = Clocked()
    clocked.settle()
    reasons = [clocked.decide().reason for _ in range(4)]
    assert reasons == [ClockReason.FLOOR] * 3 + [ClockReason.NO_SAMPLE]


@given(hostile=HOSTILE.filter(lambda sample: not sample.possible), before=st.lists(SAMPLES, max_size=3))
def test_a_sample_that_cannot_be_true_means_default_clocks(hostile: EngineSample, before: list[EngineSample]) -> None:
    law = EngineLaw(TABLE, SETTINGS, HIGHEST)
    law.decide(0.1, before)
    assert law.decide(0.2, [hostile]) == (DEFAULT_CLOCKS, ClockReason.IMPOSSIBLE_SAMPLE)


def test_time_that_goes_backwards_cannot_be_true() -> None:
    law = EngineLaw(TABLE, SETTINGS, HIGHEST)
    assert law.decide(0.1, [replace(QUIET, time_s=5.0)]).reason is ClockReason.FLOOR
    assert law.decide(0.2, [replace(QUIET, time_s=4.9)]).reason is ClockReason.IMPOSSIBLE_SAMPLE


@pytest.mark.parametrize("time_s", [1e300, math.nan, math.inf, -1e300])
def test_one_time_that_cannot_be_true_does_not_make_all_later_ones_so(time_s: float) -> None:
    law = EngineLaw(TABLE, SETTINGS, HIGHEST)
    law.decide(0.1, [replace(QUIET, time_s=0.1)])
    law.decide(0.2, [replace(QUIET, time_s=time_s)])
    law.decide(0.3, [replace(QUIET, time_s=0.3)])
    assert law.decide(0.4, [replace(QUIET, time_s=0.4)]).reason is ClockReason.FLOOR


@given(samples=st.lists(HOSTILE, max_size=8), table=TABLES)
def test_no_sample_makes_it_fail(samples: list[EngineSample], table: ClockTable) -> None:
    law = EngineLaw(table, SETTINGS, HIGHEST)
    for index, sample in enumerate(samples):
        choice = law.decide(index * 0.1, [sample])
        assert choice.clock_mhz in {DEFAULT_CLOCKS, *LADDER}
        assert 0.0 <= law.trim <= 1.0
    law.decide(1.0, samples)


class Unread(tuple[float, ...]):
    """Shares that must not be walked through."""

    def __iter__(self) -> Iterator[float]:
        raise AssertionError("walked through")


@pytest.mark.parametrize("field", ["first_tokens", "tokens"])
def test_too_many_shares_are_refused_without_reading_them(field: str) -> None:
    shares: Any = {field: Unread([0.0] * 1_000_000)}
    assert not replace(QUIET, **shares).possible
    assert replace(QUIET, **{field: (0.5,) * MOST_SHARES}).possible  # type: ignore[arg-type]
    assert Clocked().decide(replace(QUIET, **shares)).reason is ClockReason.IMPOSSIBLE_SAMPLE


# 2. Default clocks while memory is short.


@given(sample=SAMPLES, kv_share=st.floats(0.9, 1.0, exclude_min=True))
def test_full_memory_means_default_clocks(sample: EngineSample, kv_share: float) -> None:
    assert Clocked().decide(replace(sample, kv_share=kv_share)) == (DEFAULT_CLOCKS, ClockReason.MEMORY_FULL)


def test_a_preemption_means_default_clocks_for_a_second() -> None:
    clocked = Clocked()
    clocked.settle()
    after = replace(QUIET, preempted=1)
    reasons = [clocked.decide(after).reason for _ in range(11)]
    assert reasons == [ClockReason.MEMORY_FULL] * 10 + [ClockReason.FLOOR]


def test_preemptions_before_the_first_sample_do_not_count() -> None:
    assert Clocked().decide(replace(QUIET, preempted=7)).reason is ClockReason.FLOOR


# 3. and 4. Boost, and hold.


@given(table=TABLES, waiting=st.integers(0, 9), prefilling=st.integers(0, 3), running=st.integers(0, 60))
def test_a_prompt_is_boosted_at_the_next_decision(
    table: ClockTable, waiting: int, prefilling: int, running: int
) -> None:
    if not waiting + prefilling:
        return
    clocked = Clocked(table)
    clocked.settle()
    choice = clocked.decide(replace(QUIET, waiting=waiting, prefilling=prefilling, running=running))
    wanted, floor = table.boosted_mhz(waiting + prefilling), table.clock_mhz(running + prefilling, 0.2)
    assert rank(choice.clock_mhz) == max(rank(wanted), rank(floor))
    if rank(wanted) >= rank(floor):
        assert choice.reason is ClockReason.BOOST
        assert choice.urgent, "its calls go ahead of others"


def test_a_boost_is_held_and_its_calls_no_longer_overtake() -> None:
    clocked = Clocked()
    clocked.settle()
    clocked.decide(replace(QUIET, waiting=1))
    held = [clocked.decide(QUIET) for _ in range(3)]
    assert held == [(900, ClockReason.HOLD), (705, ClockReason.FLOOR), (705, ClockReason.FLOOR)]
    assert not held[0].urgent


def test_a_boost_does_not_fall_between_the_parts_of_a_queue() -> None:
    clocked = Clocked()
    clocked.settle()
    assert clocked.decide(replace(QUIET, waiting=2)).clock_mhz == 1200
    assert clocked.decide(replace(QUIET, waiting=1)).clock_mhz == 1200
    assert clocked.decide(replace(QUIET, waiting=3)).clock_mhz == DEFAULT_CLOCKS


# 5. The floor.


@given(table=TABLES, running=st.integers(0, 60), kv_share=st.floats(0, 0.9))
def test_otherwise_the_clock_is_the_tables(table: ClockTable, running: int, kv_share: float) -> None:
    choice = Clocked(table).decide(replace(QUIET, running=running, kv_share=kv_share))
    clock_mhz = table.clock_mhz(running, kv_share)
    assert choice == (clock_mhz, ClockReason.FLOOR if clock_mhz else ClockReason.BEYOND_TABLE)


def test_a_load_beyond_the_table_means_default_clocks() -> None:
    assert Clocked().decide(replace(QUIET, running=33)) == (DEFAULT_CLOCKS, ClockReason.BEYOND_TABLE)


# 6. to 9. The trim.


@given(outcomes=st.lists(st.tuples(st.sampled_from(("first_tokens", "tokens")), st.floats(0, 4)), max_size=60))
def test_the_trim_obeys_the_worse_of_both_limits(outcomes: list[tuple[str, float]]) -> None:
    both, alone = Clocked(), {"first_tokens": Clocked(), "tokens": Clocked()}
    for law in (both, *alone.values()):
        law.settle(0.1)
    for field, share in outcomes:
        for name, law in alone.items():
            law.law._floor_mhz = both.law._floor_mhz  # misses count against the clock that ran
            law.decide(replace(QUIET, **{field: (share,)}) if name == field else QUIET)  # type: ignore[arg-type]
        both.decide(replace(QUIET, **{field: (share,)}))  # type: ignore[arg-type]
        assert both.law.trim == max(law.law.trim for law in alone.values())
        assert 0.0 <= both.law.trim <= 1.0


def test_what_the_default_clocks_would_have_missed_too_does_not_count() -> None:
    slower = HIGHEST / 705
    late, hopeless = Clocked(), Clocked()
    for clocked, share in ((late, 0.99 * slower), (hopeless, 1.01 * slower)):
        clocked.settle()
        clocked.decide(replace(QUIET, tokens=(share,)))
    assert late.law.trim > 0
    assert hopeless.law.trim == 0


def test_misses_at_the_default_clocks_do_not_count() -> None:
    clocked = Clocked()
    for _ in range(20):
        clocked.decide(replace(QUIET, running=50, tokens=(1.1,)))
    assert clocked.law.trim == 0


def test_one_miss_raises_at_once_and_kept_limits_lower_slowly() -> None:
    clocked = Clocked()
    clocked.settle()
    choice = clocked.decide(replace(QUIET, tokens=(1.2,)))
    assert choice.reason is ClockReason.TRIM
    assert choice.clock_mhz > 705
    raised, kept = clocked.law.trim, 0
    while clocked.law.trim > 0:
        before = clocked.law.trim
        clocked.decide(replace(QUIET, tokens=(0.5,)))
        assert 0 < before - clocked.law.trim < 0.01 * raised
        kept += 1
    share = (1 - SETTINGS.attainment) * SETTINGS.target_share
    assert kept == pytest.approx((1 - share) / share, abs=1.5), "as many as may be kept for one miss"
    assert clocked.decide(QUIET) == (705, ClockReason.FLOOR)


@given(misses=st.integers(0, 30))
def test_at_its_end_the_trim_leaves_the_default_clocks(misses: int) -> None:
    """And stays there while all is late: what the default clocks miss too was neither missed nor kept."""
    clocked = Clocked()
    clocked.settle(0.1)
    clocks = [rank(clocked.decide(replace(QUIET, first_tokens=(1.001,))).clock_mhz) for _ in range(misses)]
    assert clocks == sorted(clocks)
    assert all(clock == math.inf for clock in clocks[10:])
    if misses >= 10:
        before = clocked.law.trim
        late = clocked.decide(replace(QUIET, first_tokens=(1.001,) * MOST_SHARES), QUIET)
        assert late.clock_mhz == DEFAULT_CLOCKS
        assert clocked.law.trim == before


def test_the_trim_raises_boosts_too() -> None:
    clocked = Clocked()
    clocked.settle()
    clocked.miss(3)
    choice = clocked.decide(replace(QUIET, waiting=1))
    assert rank(choice.clock_mhz) > rank(TABLE.boosted_mhz(1))


# 10. A clock is asked again only when it changes: the same load means the same choice.


@given(sample=SAMPLES.map(lambda one: replace(one, first_tokens=(), tokens=(), preempted=0)))
def test_the_same_load_means_the_same_choice(sample: EngineSample) -> None:
    clocked = Clocked()
    choices = {clocked.decide(sample).clock_mhz for _ in range(5)}
    assert len(choices) == 1


@given(samples=st.lists(SAMPLES, max_size=10))
def test_samples_that_come_together_count_as_those_that_come_apart(samples: Sequence[EngineSample]) -> None:
    """What trims depends on the clock of the decision, so the floors are those of one load."""
    together, apart = Clocked(), Clocked()
    alike = [replace(one, running=4, prefilling=0, kv_share=0.2, first_tokens=(), preempted=0) for one in samples]
    kept = [replace(one, tokens=(0.5,) * len(one.tokens)) for one in alike]
    for clocked in (together, apart):
        clocked.settle(0.1)
        clocked.miss(2)
    together.decide(*kept)
    for one in kept:
        apart.decide(one, after_s=0.0)
    assert together.law.trim == pytest.approx(apart.law.trim)


def test_a_prefill_engine_rests_at_one_clock_and_rises_with_what_waits() -> None:
    prompts_alone = ClockTable((MOST_SEQUENCES,), (0.9,), ((705,),), LADDER, (900, 1200, DEFAULT_CLOCKS))
    law, now_s, asked = EngineLaw(prompts_alone, SETTINGS, HIGHEST), 0.0, []
    for waiting, prefilling in ((0, 0), (0, 1), (1, 1), (4, 1), (0, 0)):
        now_s += 1.0
        sample = EngineSample(now_s, waiting=waiting, prefilling=prefilling, running=0, kv_share=0.3)
        asked.append(law.decide(now_s, [sample]).clock_mhz)
    assert asked == [705, 900, 1200, DEFAULT_CLOCKS, 705]


def test_what_waits_at_a_decode_engine_raises_nothing() -> None:
    tokens_alone = replace(TABLE, boost_mhz=(705,))
    for running in (4, 9, 32):
        quiet = EngineSample(1.0, waiting=0, prefilling=0, running=running, kv_share=0.6)
        transfers = replace(quiet, waiting=100)
        clocks = {EngineLaw(tokens_alone, SETTINGS, HIGHEST).decide(1.0, [one]).clock_mhz for one in (quiet, transfers)}
        assert clocks == {tokens_alone.clock_mhz(running, 0.6)}
