"""Laws of the timetable, against a GPU that is simulated in virtual time: every change takes its latency, while the
work goes on at the old clock."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.drawing import AHEAD
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.timetable import PERIOD_MIN_US, Timetable
from perseus_core.latency import SwitchLatency

LEAD = Lead(5_000, 2_000)
WATCHED = 2
"""Iterations in which the clock is looked at, after those that are known."""


@dataclass(frozen=True)
class Plan:
    """A plan of one stage."""

    clocks_mhz: tuple[int, ...]
    plan_id: str = "plan"
    point: int = 0


@dataclass(frozen=True)
class Run:
    """What the GPU did in an iteration."""

    iteration: int
    begins_us: tuple[int, ...]
    durations_us: tuple[int, ...]

    @property
    def boundaries_us(self) -> list[int]:
        spans = zip(self.begins_us, self.durations_us, strict=True)
        return [time for begin, span in spans for time in (begin, begin + span)]


def runs_of(spans_us: list[list[tuple[int, int]]], begin_us: int = 1_000_000) -> list[Run]:
    """Iterations from the waits before and durations of their instructions."""
    runs, now_us = [], begin_us
    for iteration, instructions in enumerate(spans_us):
        begins = []
        for wait_us, duration_us in instructions:
            now_us += wait_us
            begins.append(now_us)
            now_us += duration_us
        runs.append(Run(iteration, tuple(begins), tuple(duration for _, duration in instructions)))
    return runs


class Control:
    """A timetable that drives a GPU: what it has asked for, and when that is in effect."""

    def __init__(
        self, plan: Plan, runs: list[Run], known: int, lead: Lead = LEAD, latency_us: int | None = None
    ) -> None:
        self.plan, self.runs, self.lead = plan, runs, lead
        self.latency_us = lead.median_us if latency_us is None else latency_us
        self.timetable = Timetable(len(plan.clocks_mhz), lambda _: plan)
        for run in runs[:known]:
            self.timetable.add(run)
        self.asked: list[tuple[int, int | None]] = [(0, max(plan.clocks_mhz))]
        self.looks = 0

    def position(self, now_us: int) -> tuple[int, int]:
        """Iteration and boundaries passed, as a GPU's mark has them."""
        run = max((run for run in self.runs if run.begins_us[0] <= now_us), key=lambda run: run.iteration)
        return run.iteration, bisect_right(run.boundaries_us, now_us)

    def drive(self, from_us: int, until_us: int, *, sighted: bool = True) -> None:
        now_us = from_us
        while now_us < until_us:
            self.looks += 1
            if sighted:
                self.timetable.sight(*self.position(now_us), now_us)
            else:  # the host is far ahead
                self.timetable.bound(len(self.runs), 0, now_us)
            target = self.timetable.target(now_us, self.lead, self.asked[-1][1])
            if target.mhz != self.asked[-1][1]:
                self.asked.append((now_us, target.mhz))
            assert target.look_us > now_us
            now_us = target.look_us

    def in_effect(self, begin_us: int, end_us: int) -> list[int]:
        """Clocks in effect at some time of a span."""
        times = [asked_us + self.latency_us for asked_us, _ in self.asked]
        first = max(bisect_right(times, begin_us) - 1, 0)
        last = max(bisect_right(times, end_us - 1), first + 1)
        return [mhz if mhz is not None else 9_999 for _, mhz in self.asked[first:last]]


PLANS = st.lists(
    st.tuples(st.integers(0, 9_000), st.integers(1, 60_000), st.sampled_from((600, 900, 1200))), min_size=2
).filter(lambda plan: sum(wait_us + span_us for wait_us, span_us, _ in plan) - plan[0][0] >= PERIOD_MIN_US)
LATENCIES = st.integers(LEAD.median_us - LEAD.deviation_us, LEAD.median_us + LEAD.deviation_us)


def perfect(instructions: list[tuple[int, int, int]], latency_us: int, *, sighted: bool = True) -> Control:
    """A GPU whose iterations are all the same, after three that are known."""
    plan = Plan(tuple(mhz for _, _, mhz in instructions))
    runs = runs_of([[(wait, span) for wait, span, _ in instructions]] * (3 + WATCHED + 2))
    control = Control(plan, runs, 3, latency_us=latency_us)
    control.drive(runs[2].boundaries_us[-1], runs[3 + WATCHED].boundaries_us[-1], sighted=sighted)
    return control


@given(PLANS, LATENCIES, st.booleans())
def test_no_instruction_runs_below_its_plan_where_iterations_repeat(
    instructions: list[tuple[int, int, int]], latency_us: int, sighted: bool
) -> None:
    control = perfect(instructions, latency_us, sighted=sighted)
    for run in control.runs[4 : 3 + WATCHED]:
        for begin, span, mhz in zip(run.begins_us, run.durations_us, control.plan.clocks_mhz, strict=True):
            assert min(control.in_effect(begin, begin + span)) >= mhz


@given(PLANS, LATENCIES, st.booleans())
def test_a_clock_is_the_planned_one_away_from_instructions_with_another(
    instructions: list[tuple[int, int, int]], latency_us: int, sighted: bool
) -> None:
    # Without a wait between iterations, in which the higher clock is kept.
    control = perfect([(0, *instructions[0][1:]), *instructions[1:]], latency_us, sighted=sighted)
    margin_us = 2 * LEAD.deviation_us + 10
    others = [
        (begin - margin_us, begin + span + margin_us, mhz)
        for run in control.runs
        for begin, span, mhz in zip(run.begins_us, run.durations_us, control.plan.clocks_mhz, strict=True)
    ]
    for run in control.runs[4 : 3 + WATCHED]:
        for begin, span, mhz in zip(run.begins_us, run.durations_us, control.plan.clocks_mhz, strict=True):
            from_us, until_us = begin, begin + span
            for other_begin, other_end, other in others:
                if other > mhz and other_begin <= begin < other_end:
                    from_us = max(from_us, other_end)
                elif other > mhz and begin <= other_begin < until_us:
                    until_us = other_begin
            if from_us < until_us:
                assert control.in_effect(from_us, until_us) == [mhz]


def test_a_raise_is_asked_for_early_and_a_lowering_late() -> None:
    control = perfect([(0, 50_000, 900), (0, 50_000, 1200), (0, 50_000, 900)], LEAD.median_us)
    base_us = control.runs[4].begins_us[0]
    asked = [(time_us - base_us, mhz) for time_us, mhz in control.asked if base_us < time_us < base_us + 150_000]
    early_us, late_us = LEAD.median_us + LEAD.deviation_us, LEAD.deviation_us - LEAD.median_us
    assert [mhz for _, mhz in asked] == [1200, 900]
    assert [time_us for time_us, _ in asked] == pytest.approx([50_000 - early_us, 100_000 + late_us], abs=5)


def test_a_run_that_is_shorter_than_the_uncertainty_keeps_the_higher_clock() -> None:
    short_us = 2 * LEAD.deviation_us - 10
    control = perfect([(0, 50_000, 1200), (0, short_us, 900), (0, 50_000, 1200)], LEAD.median_us)
    assert [mhz for _, mhz in control.asked] == [1200]


def test_a_lower_clock_that_lasts_too_short_to_be_worth_a_call_is_not_asked_for() -> None:
    instructions = [(0, 50_000, 1200), (0, 20_000, 900)]
    plan = Plan((1200, 900))
    runs = runs_of([[(wait, span) for wait, span, _ in instructions]] * 6)
    timetable = Timetable(2, lambda _: plan)
    for run in runs[:3]:
        timetable.add(run)
    for worth_us, wanted in ((15_000, 900), (17_000, 1200)):
        now_us = runs[3].begins_us[1] - LEAD.median_us + LEAD.deviation_us
        assert timetable.target(now_us, LEAD._replace(worth_us=worth_us), 1200).mhz == wanted


@given(st.data())
def test_what_has_happened_before_never_costs_time_when_it_happens_again(data: st.DataObject) -> None:
    """Iterations differ; each is known, and so is which followed which: how long it is from one to the next belongs to
    both. The clock is never below the plan. What never followed it may begin earlier than anything known says."""
    clocks = data.draw(st.lists(st.sampled_from((600, 900, 1200)), min_size=2, max_size=12))
    spans = st.tuples(st.integers(0, 5_000), st.integers(5_000, 20_000))
    kinds = data.draw(st.lists(st.lists(spans, min_size=len(clocks), max_size=len(clocks)), min_size=2, max_size=3))
    again = [kinds[number % len(kinds)] for number in (1, 2, 3)]
    latency_us = data.draw(LATENCIES)
    runs = runs_of([*kinds, kinds[0], *again])
    control = Control(Plan(tuple(clocks)), runs, len(kinds) + 1, latency_us=latency_us)
    first = len(kinds) + 1
    control.drive(runs[first - 1].boundaries_us[-1], runs[first + 1].boundaries_us[-1])
    for begin, span, mhz in zip(
        runs[first + 1].begins_us, runs[first + 1].durations_us, control.plan.clocks_mhz, strict=True
    ):
        assert min(control.in_effect(begin, begin + span)) >= mhz


def test_an_instruction_that_may_follow_without_a_wait_has_its_clock_in_time() -> None:
    """In one of two iterations it waits 2,001 µs: its clock is asked for by the other."""
    waits = ([(0, 5_000)] * 4 + [(2_001, 5_001)], [(1, 5_000)] + [(0, 5_000)] * 4)
    runs = runs_of([waits[kind] for kind in (0, 1, 0, 0, 1, 0)])
    control = Control(Plan((600, 600, 600, 600, 900)), runs, 3, latency_us=5_002)
    control.drive(runs[2].boundaries_us[-1], runs[4].boundaries_us[-1])
    last_us = runs[4].begins_us[-1]
    assert control.in_effect(last_us, last_us + 5_000) == [900]


def test_after_an_iteration_that_ends_early_the_next_is_not_predicted_so_much_earlier() -> None:
    """One of two ends 5,337 µs before the other, and is followed by a wait of 5,000 µs: their periods are almost alike.
    From where the GPU was last seen they differ by that wait."""
    late, early = [(5_000, 20_000), (5_000, 17_366), (5_000, 5_000)], [(0, 20_000), (1, 7_107), (3_816, 16_105)]
    runs = runs_of([late, early] * 3)
    control = Control(Plan((1200, 900, 600)), runs, 3, latency_us=3_001)
    control.drive(runs[2].boundaries_us[-1], runs[4].boundaries_us[-1])
    first_us = runs[4].begins_us[0]
    assert control.in_effect(first_us, first_us + 20_000) == [1200]


def test_the_next_iteration_is_not_predicted_before_the_end_of_this_one() -> None:
    """Of the last boundary the median is 35,000 µs, of the period 25,000 µs."""
    long, short = [(0, 5_000), (0, 10_000), (0, 20_000)], [(0, 5_000), (0, 15_000), (0, 5_000)]
    runs = runs_of([long, short, short, *[long] * 4])
    control = Control(Plan((900, 600, 600)), runs, 4, latency_us=3_000)
    control.drive(runs[3].boundaries_us[-1], runs[5].boundaries_us[-1])
    first_us = runs[5].begins_us[0]
    assert min(control.in_effect(first_us, first_us + 5_000)) == 900


@given(st.sampled_from((1, 2, 4, 5)), st.integers(0, 2_000_000))
def test_a_gpu_that_does_not_go_on_keeps_the_clock_that_it_may_need(stop: int, late_us: int) -> None:
    """It is late by any time, by an instruction or a wait: then what follows has its clock. Only the instruction before
    a lower clock can end late unseen."""
    clocks = (900, 1200, 600)
    spans = [(1_000, 30_000)] * 3
    delayed = [(wait + (late_us if 2 * index == stop else 0), span) for index, (wait, span) in enumerate(spans)]
    delayed = [(wait, span + (late_us if 2 * index + 1 == stop else 0)) for index, (wait, span) in enumerate(delayed)]
    runs = runs_of([*[spans] * 4, delayed, spans])
    control = Control(Plan(clocks), runs, 3)
    control.drive(runs[2].boundaries_us[-1], runs[4].boundaries_us[-1])
    for run in runs[4:5]:
        for begin, span, mhz in zip(run.begins_us, run.durations_us, clocks, strict=True):
            assert min(control.in_effect(begin, begin + span)) >= mhz
    assert control.looks < 200


@pytest.mark.parametrize("repeated", range(6))
def test_a_boundary_that_is_marked_again_in_an_iteration_is_not_taken_for_a_step_back(repeated: int) -> None:
    """As by a graph that is replayed twice in one step: what is known of the GPU stays as it is."""
    plan = Plan((900, 1200, 600))
    runs = runs_of([[(1_000, 30_000)] * 3] * 6)
    known = []
    for marks in ([6], [6, repeated]):
        timetable = Timetable(3, lambda _: plan)
        for run in runs[:5]:
            timetable.add(run)
        end_us = runs[5].boundaries_us[-1]
        for boundary in marks:
            timetable.sight(5, boundary, end_us)
        known.append(timetable.target(end_us, Lead(2_000, 500), 600))
    assert known[0] == known[1]


def test_where_nothing_is_known_it_says_so() -> None:
    plan = Plan((900, 1200))
    timetable = Timetable(2, lambda _: plan)
    runs = runs_of([[(0, 10_000), (0, 10_000)]] * 3)
    timetable.sight(0, 1, runs[0].begins_us[0])
    assert not timetable.ready
    timetable.add(runs[0])
    assert not timetable.ready
    timetable.add(runs[1])
    assert timetable.ready


def test_before_an_unknown_plan_its_highest_clock_is_asked_for_and_before_none_the_default() -> None:
    known, unknown = Plan((600, 600, 900)), Plan((600, 1200, 600), point=1)
    for following, wanted in ((unknown, 1200), (None, None)):
        plans = [known] * 4 + [following] * 4
        timetable = Timetable(3, plans.__getitem__)
        runs = runs_of([[(0, 10_000)] * 3] * 5)
        for run in runs[:3]:
            timetable.add(run)
        assert timetable.target(runs[3].begins_us[0], LEAD, 600).mhz == 600
        assert timetable.target(runs[4].begins_us[0] - LEAD.median_us - 500, LEAD, 900).mhz == wanted


def test_an_uncertain_timetable_asks_for_the_highest_clock() -> None:
    plan = Plan((600, 900, 600, 1200, 600))
    spans = [[(0, 10_000 + 9_000 * (iteration % 2))] * 5 for iteration in range(6)]
    runs = runs_of(spans)
    control = Control(plan, runs, 4)
    control.drive(runs[3].boundaries_us[-1], runs[4].boundaries_us[-1], sighted=False)
    assert {mhz for _, mhz in control.asked[1:]} <= {1200}


@given(PLANS, st.integers(0, 60_000), st.integers(1, 100))
def test_a_sight_never_asks_for_less_than_can_come(
    instructions: list[tuple[int, int, int]], after_us: int, behind: int
) -> None:
    """Wherever the GPU is seen to be, what follows there has its clock, whatever was predicted."""
    plan = Plan(tuple(mhz for _, _, mhz in instructions))
    runs = runs_of([[(wait, span) for wait, span, _ in instructions]] * 4)
    timetable = Timetable(len(instructions), lambda _: plan)
    for run in runs[:3]:
        timetable.add(run)
    passed = behind % (2 * len(instructions))
    now_us = runs[2].boundaries_us[-1] + after_us
    timetable.sight(3, passed, now_us)
    timetable.sight(3, passed, now_us + 10_000_000)
    mhz = timetable.target(now_us + 10_000_000, LEAD, 600).mhz
    assert mhz is not None
    assert mhz >= plan.clocks_mhz[passed // 2]


@pytest.mark.parametrize("period_us", [0, 1, PERIOD_MIN_US - 1, -20_000])
def test_a_period_that_cannot_be_true_is_never_used(period_us: int) -> None:
    """Records that begin at one time once made the thread of a GPU count iterations for ever."""
    plan = Plan((900, 1200))
    timetable = Timetable(2, lambda _: plan)
    for iteration in range(8):
        begin_us = 1_000_000 + iteration * period_us
        timetable.add(Run(iteration, (begin_us, begin_us), (0, 0)))
        timetable.bound(iteration, 0, 10**12)
    assert not timetable.ready


@given(st.integers(PERIOD_MIN_US, 10_000), st.integers(0, 10**13))
def test_however_long_ago_the_last_record_is_few_iterations_are_counted(period_us: int, later_us: int) -> None:
    asked: list[int] = []
    plan = Plan((900, 1200))

    def plan_of(iteration: int) -> Plan:
        asked.append(iteration)
        return plan

    timetable = Timetable(2, plan_of)
    for iteration in range(4):
        begin_us = 1_000_000 + iteration * period_us
        timetable.add(Run(iteration, (begin_us, begin_us + 100), (100, 100)))
    asked.clear()
    timetable.bound(2**32 - 1, 0, 1_000_000 + later_us)
    assert len(asked) <= 4 * AHEAD


def test_the_lead_of_a_latency_is_its_median_and_the_deviation_to_its_tail() -> None:
    lead = Lead.of(SwitchLatency.of_seconds(0.03, 0.1, 0.004, True, "assumed"))
    assert lead.median_us == 30_000
    assert 0 < lead.deviation_us < 70_000
    assert lead.worth_us == 8_000
