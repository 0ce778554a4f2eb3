"""Laws of rehearsals: what clocks that change late do to plans, over random measurements, schedules and hardware."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.doubles.slow_execution import SlowExecution

from perseus_core.latency import SwitchLatency
from perseus_core.marks import MarkSource
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal import Hardware, Rule, rehearse
from perseus_solver.rehearsal.control import Expected, Leads, requests
from perseus_solver.rehearsal.execution import Course, Draws, Executor, Latencies
from perseus_solver.rehearsal.host import highest_clocks, host_ends
from perseus_solver.rehearsal.outcome import plans_as_asked
from perseus_solver.rehearsal.requests import Moment
from perseus_solver.schedules import build_schedule, with_constants
from perseus_solver.switching.reduction import clock_changes

LAW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
SPLIT = {"ZBH1": ("forward", "input_gradient", "weight_gradient")}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Random tables, noise included, some with constant-time instructions, delays and overhead."""
    name = draw(st.sampled_from(["1f1b", "GPipe", "Interleaved1F1B", "ZBH1"]))
    stages = draw(st.integers(2, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = ["stage,instruction,frequency,time,energy"]
    if draw(st.booleans()):
        rows.append("0,constant,0,0.1,9.0")
    for stage in range(stages):
        for kind in SPLIT.get(name, ("forward", "backward")):
            work = random.uniform(0.5, 2.0)
            for clock in range(1400, 800, -60):
                seconds = work * 1400 / clock * random.uniform(0.99, 1.01)
                watts = (90 + 300 * (clock / 1400) ** 2.5) * random.uniform(0.97, 1.03)
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * watts}")
    profile = read_profile("\n".join(rows) + "\n")
    schedule = build_schedule(name, stages=stages, microbatches=6, chunks=2 if name == "Interleaved1F1B" else None)
    return build_problem(
        profile,
        with_constants(schedule, profile.constant_stages),
        blocking_power_w=float(draw(st.sampled_from([0.0, 60.0]))),
        delay_s=float(draw(st.sampled_from([0.0, 0.1]))),
        overhead_s=float(draw(st.sampled_from([0.0, 1.0]))),
    )


def plans_of(problem: Problem) -> np.ndarray:
    """A plan of random clocks, one that alternates between far ones, and one that changes seldom."""
    random = np.random.default_rng(0)
    options = [problem.options[k] for k in problem.option_of.tolist()]
    last = np.array([len(own.frequency_mhz) - 1 for own in options])
    wild = np.rint(random.random(len(last)) * last).astype(np.intp)
    turns = np.where(np.arange(len(last)) % 2, last, 0)
    seldom = np.where(np.arange(len(last)) % 9 < 5, last // 2, 0)
    plans = [[own.frequency_mhz[c] for own, c in zip(options, plan, strict=True)] for plan in (wild, turns, seldom)]
    return np.array(plans, dtype=np.uint16)


def hardware(
    p50_s: float = 0.0,
    p99_s: float = 0.0,
    *,
    call_s: float = 0.0,
    marks: MarkSource = MarkSource.GPU,
    noise: float = 0.0,
    gpus: int = 1,
) -> Hardware:
    latency = SwitchLatency.of_seconds(p50_s, p99_s, call_s, gpus > 1, "a test")
    return Hardware("made up", latency, marks, noise=noise, gpus_per_lock=gpus)


def expected_of(executor: Executor, plans: np.ndarray, lead_s: float, worth_s: float) -> Expected:
    """What agents expect of plans that run as planned, with leads that differ from clock to clock."""
    problem, simulator, tables = executor.problem, executor.simulator, executor.tables
    begin_s, end_s = executor.times_s(simulator.duration_s(simulator.choice_of(plans)))
    sets = tables.sets_clock[problem.option_of]
    raise_s = lead_s * np.linspace(0.5, 1.5, len(tables.mhz))
    return Expected(
        begin_s=begin_s,
        end_s=end_s,
        period_s=end_s.max(axis=1) + problem.overhead_s,
        clock=np.where(sets, tables.positions(plans), -1),
        stage_offset=problem.stage_offset.astype(np.intp),
        leads=Leads(raise_s, 0.7 * raise_s, worth_s, worth_s / 2),
        margin_s=np.zeros(begin_s.shape),
    )


@LAW
@given(
    problems(),
    st.sampled_from(["timetable", "uncorrected", MarkSource.GPU, MarkSource.SYNCHRONISED, MarkSource.HOST]),
    st.floats(0.0, 1.5),
    st.sampled_from([1, 4]),
    st.integers(0, 2**32 - 1),
)
def test_an_execution_is_that_of_one_instruction_after_the_other(
    problem: Problem, control: str | MarkSource, p50_s: float, gpus: int, seed: int
) -> None:
    """To the last bit, in iterations that follow each other; energies are sums in whatever order."""
    executor, plans, random = Executor(problem), plans_of(problem), np.random.default_rng(seed)
    expected = expected_of(executor, plans, 1.2 * p50_s, p50_s / 2)
    if isinstance(control, str):
        asked, start = expected.timetable(corrected=control == "timetable"), expected.start()
    else:
        launches = replace(hardware(marks=control), launch_s=1e-3)
        asked = host_ends(problem, launches, expected.clock)
        start = highest_clocks(expected.clock, problem.stage_offset.tolist())
    clocks = len(executor.tables.mhz)
    latencies = Latencies(p50_s * random.uniform(0.5, 2.0, clocks), random.uniform(0.0, 0.7, clocks), p50_s / 3, 0.4)
    samples = 2
    course = Course.begin(start, samples, one_by_one=gpus > 1)
    slow = [[SlowExecution(executor, start, plan, s) for s in range(samples)] for plan in range(len(plans))]
    for _ in range(3):
        work = random.uniform(0.9, 1.1, (problem.instructions, samples))
        normal = random.standard_normal((asked.of_instruction, problem.instructions, samples, gpus))
        draws = Draws(work, normal, latencies)
        found = executor.iterate(expected.clock, asked, course, draws, scatter=True)
        for plan, clock in enumerate(expected.clock.tolist()):
            each = [slow[plan][s].iterate(clock, asked, draws) for s in range(samples)]
            assert found.time_s[plan].tolist() == [one["time_s"] for one in each]
            assert found.calls[plan].tolist() == [one["calls"] for one in each]
            for name in ("energy_j", "computing_s", "below_s", "above_s"):
                wanted = pytest.approx([one[name] for one in each], rel=1e-9, abs=1e-9)
                assert getattr(found, name)[plan] == wanted, name
            for name in ("begin_s", "end_s"):
                mean_s = np.mean([one[name] for one in each], axis=0)
                assert getattr(found, name)[plan] == pytest.approx(mean_s, rel=1e-12, abs=1e-12)
            scatter_s = np.std([one["begin_s"] for one in each], axis=0)
            assert found.scatter_s[plan] == pytest.approx(scatter_s, rel=1e-6, abs=1e-9)


@LAW
@given(problems(), st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.booleans())
def test_a_timetable_says_when_and_for_which_instruction_each_change_is_asked_for(
    problem: Problem, lead_s: float, worth_s: float, corrected: bool
) -> None:
    plans, executor = plans_of(problem), Executor(problem)
    expected = expected_of(executor, plans, lead_s, worth_s)
    timetable = expected.timetable(corrected=corrected)
    for plan, period_s in enumerate(expected.period_s.tolist()):
        for stage in range(problem.stages):
            low, high = problem.stage_offset[stage : stage + 2].tolist()
            asked_s, wanted = expected.changes(stage, plan, 0.0, period_s)
            if len(wanted) and wanted[0] == wanted[-1]:
                asked_s, wanted = asked_s[1:], wanted[1:]
            placed, following = [], []
            for row in range(low, high):
                begin_s = float(expected.begin_s[plan, row])
                for k in range(*timetable.first[plan * problem.instructions + row :][:2].tolist()):
                    after_s, clock = float(timetable.after_s[k]), int(timetable.clock[k])
                    moment = Moment(timetable.moment[k])
                    assert (moment is Moment.AT) != corrected
                    if moment is Moment.AFTER_BEGIN:
                        placed.append((begin_s + after_s, clock))
                        assert begin_s + after_s <= expected.end_s[plan, row] + 1e-9, "of what runs then"
                    elif moment is Moment.IN_WAIT and row > low:
                        placed.append((float(expected.begin_s[plan, row - 1]) + after_s, clock))
                        assert placed[-1][0] <= begin_s + 1e-9, "of the wait before it"
                    elif moment is Moment.IN_WAIT:
                        following.append((float(expected.begin_s[plan, high - 1]) + after_s, clock))
                    elif row == low and after_s < begin_s:
                        following.append((after_s + period_s, clock))
                    else:
                        placed.append((after_s, clock))
            placed += following
            assert [clock for _, clock in placed] == wanted.tolist()
            assert [at_s for at_s, _ in placed] == pytest.approx(asked_s.tolist())


@LAW
@given(problems(), st.sampled_from([Rule.TIMETABLE, Rule.HOST_ENDS]))
def test_clocks_that_change_at_once_are_what_the_simulator_assumes(problem: Problem, rule: Rule) -> None:
    plans = plans_of(problem)
    simulator = Simulator(problem)
    exact = simulator.run(simulator.choice_of(plans))
    found = rehearse(problem, plans, hardware(), rule=rule, samples=2)
    assert found.time_s == pytest.approx(np.repeat(exact.iteration_time_s[:, None], 2, axis=1), rel=1e-12)
    assert found.energy_j == pytest.approx(np.repeat(exact.energy_j[:, None], 2, axis=1), rel=1e-9)
    assert (found.below_s + found.above_s).max() <= 1e-9 * found.time_s.max()


@LAW
@given(problems(), st.floats(0.0, 2.0), st.floats(1.0, 4.0), st.sampled_from(list(MarkSource)), st.sampled_from([1, 4]))
def test_work_is_conserved_and_energy_lies_between_its_least_and_its_most(
    problem: Problem, p50_s: float, tail: float, marks: MarkSource, gpus: int
) -> None:
    """No instruction is faster than at its fastest clock, nor slower than at its slowest; powers likewise.

    A GPU that is faster than others of its stage waits in between.
    """
    plans = plans_of(problem)
    late = hardware(p50_s, p50_s * tail, call_s=p50_s / 3, marks=marks, gpus=gpus)
    found = rehearse(problem, plans, late, samples=4)
    times = [options.time_s for options in problem.options]
    powers = [options.energy_j / options.time_s for options in problem.options]
    fastest, slowest = (np.array([pick(t) for t in times])[problem.option_of] for pick in (np.min, np.max))
    takes_s = found.end_s - found.begin_s
    assert (takes_s >= fastest * (1 - 1e-9)).all()
    assert (takes_s <= slowest * (1 + 1e-9)).all()
    assert (found.computing_s >= fastest.sum() * (1 - 1e-9)).all()
    assert (found.computing_s <= slowest.sum() * (1 + 1e-9)).all()
    waiting_j = problem.blocking_power_w * (problem.stages * found.time_s - found.computing_s)
    computing_j = found.energy_j - waiting_j
    lowest_w = min(problem.blocking_power_w, *(p.min() for p in powers)) if gpus > 1 else min(p.min() for p in powers)
    assert (computing_j >= found.computing_s * lowest_w * (1 - 1e-9)).all()
    assert (computing_j <= found.computing_s * max(p.max() for p in powers) * (1 + 1e-9)).all()


@LAW
@given(problems(), st.floats(0.0, 3.0), st.sampled_from(list(MarkSource)))
def test_plans_of_one_clock_for_each_stage_never_notice_latency(
    problem: Problem, p50_s: float, marks: MarkSource
) -> None:
    simulator = Simulator(problem)
    per_stage = np.arange(problem.stages)[problem.schedule.stage]
    choice = np.array(
        [min(int(s), len(problem.options[k].time_s) - 1) for s, k in zip(per_stage, problem.option_of, strict=True)]
    )
    clocks = np.array([problem.options[k].frequency_mhz[c] for k, c in zip(problem.option_of, choice, strict=True)])
    exact = simulator.run(choice)
    found = rehearse(problem, clocks[None].astype(np.uint16), hardware(p50_s, 2 * p50_s, marks=marks), samples=3)
    assert found.time_s == pytest.approx(float(exact.iteration_time_s), rel=1e-12)
    assert found.energy_j == pytest.approx(float(exact.energy_j), rel=1e-9)
    assert (found.calls == 0).all()


@LAW
@given(problems(), st.floats(0.01, 3.0))
def test_a_latency_that_is_known_exactly_costs_nothing(problem: Problem, latency_s: float) -> None:
    plans = plans_of(problem)
    exact = Simulator(problem).run(Simulator(problem).choice_of(plans))
    found = rehearse(problem, plans, hardware(latency_s, latency_s), samples=2)
    assert found.time_s.max(axis=1) == pytest.approx(exact.iteration_time_s, rel=1e-9)
    assert found.energy_j.max(axis=1) == pytest.approx(exact.energy_j, rel=1e-9)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=2, max_size=12),
    st.lists(st.integers(0, 20), min_size=5, max_size=5),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_no_clock_is_too_low_where_each_latency_is_known_exactly(
    parts: list[tuple[int, int]], latencies: list[int], calls: int, turn: int
) -> None:
    """Changes come into effect in the order of their requests, as on a GPU; a slow one keeps a quick one waiting."""
    long = [(100, 0), *parts, (100, 0)]
    wanted = np.repeat([clock for _, clock in long], [length for length, _ in long])
    starts = np.append(0, np.flatnonzero(np.diff(wanted)) + 1)
    takes = np.array(latencies, dtype=float)
    leads = Leads(takes, takes, float(calls + turn), float(turn))
    at, clocks, _ = requests(starts.astype(float), wanted[starts], leads)
    assert (np.diff(at) >= 0).all()
    effect = np.maximum.accumulate(at + takes[clocks])
    for now, enough in enumerate(wanted.tolist()):
        assert clocks[max(int(effect.searchsorted(now, side="right")) - 1, 0)] >= enough, now


@LAW
@given(problems(), st.floats(0.0, 3.0))
def test_without_marks_of_the_gpu_no_instruction_is_below_its_clock(problem: Problem, p50_s: float) -> None:
    found = rehearse(problem, plans_of(problem), hardware(p50_s, 2 * p50_s, marks=MarkSource.HOST), samples=2)
    assert found.below_s.max() == 0
    assert found.calls.max() == 0


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4)), min_size=1, max_size=12),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_no_clock_is_asked_for_that_is_not_worth_its_calls(parts: list[tuple[int, int]], calls: int, turn: int) -> None:
    """A lower clock lasts, and each does until all GPUs of a lock have had their turn; nothing is too low."""
    wanted = np.repeat([clock for _, clock in parts], [length for length, _ in parts])
    starts = np.append(0, np.flatnonzero(np.diff(wanted)) + 1)
    at_once = np.zeros(5)
    leads = Leads(at_once, at_once, float(calls + turn), float(turn))
    at, clocks, _ = requests(starts.astype(float), wanted[starts], leads)
    turned = np.diff(np.sign(np.diff(clocks))) != 0
    assert (np.diff(at)[1:] >= np.where(turned, calls + turn, turn)).all()
    for now, enough in enumerate(wanted.tolist()):
        assert clocks[at.searchsorted(now, side="right") - 1] >= enough, now


@LAW
@given(
    problems(),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1.0),
    st.sampled_from([1, 8]),
    st.sampled_from([MarkSource.GPU, MarkSource.EVENTS]),
)
def test_a_plan_as_agents_ask_for_it_is_nowhere_lower_and_is_asked_for_as_it_is(
    problem: Problem, p50_s: float, call_s: float, gpus: int, marks: MarkSource
) -> None:
    real = hardware(p50_s, 2 * p50_s, call_s=call_s, marks=marks, noise=0.01, gpus=gpus)
    plans, executor = plans_of(problem), Executor(problem)
    found = rehearse(executor, plans, real, samples=2)
    asked = plans_as_asked(executor, plans, real, found)
    assert (asked >= plans).all()
    assert (clock_changes(asked, problem.stage_offset) <= clock_changes(plans, problem.stage_offset)).all()
    assert (plans_as_asked(executor, asked, real, found) == asked).all()


@LAW
@given(problems(), st.floats(0.0, 0.3), st.integers(1, 40), st.integers(1, 1000), st.integers(1, 10))
def test_more_pipelines_take_no_less_and_a_higher_confidence_takes_no_less(
    problem: Problem, p50_s: float, samples: int, pipelines: int, more: int
) -> None:
    fewer = replace(hardware(p50_s, 3 * p50_s), noise=0.01, pipelines=pipelines)
    few, many = (
        rehearse(problem, plans_of(problem), job, samples=samples)
        for job in (fewer, replace(fewer, pipelines=pipelines + more))
    )
    tolerance = 1 + 1e-12
    for confidence in (0.05, 0.5, 0.9, 0.95, 0.999):
        assert (few.time_kept_s(confidence) <= many.time_kept_s(confidence) * tolerance).all()
        assert (few.time_kept_s(confidence) <= few.time_kept_s(min(confidence + 0.04, 0.9999)) * tolerance).all()
    assert (few.mean_energy_j <= many.mean_energy_j * tolerance).all()
    assert (few.time_kept_s(0.95) >= np.quantile(few.time_s, 0.95, axis=1) / tolerance).all()


@LAW
@given(problems(), st.floats(0.01, 0.3))
def test_plans_are_compared_under_equal_luck(problem: Problem, p50_s: float) -> None:
    """A plan's figures do not depend on the plans beside it, nor do runs with the same seed differ."""
    plans = plans_of(problem)
    noisy = replace(hardware(p50_s, 3 * p50_s), noise=0.01)
    together = rehearse(problem, plans, noisy, samples=5)
    for k in range(len(plans)):
        alone = rehearse(problem, plans[k : k + 1], noisy, samples=5)
        assert alone.time_s[0] == pytest.approx(together.time_s[k], rel=1e-12)
        assert alone.energy_j[0] == pytest.approx(together.energy_j[k], rel=1e-9)
