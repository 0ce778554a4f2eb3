"""Laws of the executor: it agrees with the solver's simulator, energy adds up, hosts lead as far as they may."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.execution.agent_control import VirtualDevice
from tests.execution.bound import least_energy_j, least_work_j, mean_call_s
from tests.execution.controls import DefaultClocks, GpuMarks, HostMarks, Ideal
from tests.execution.executor import Control, Executor
from tests.execution.machine import Machine, Outcome
from tests.execution.pipeline import Pipeline

from perseus_agent.devices.base import EventReason
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import DriverLock, Switches
from perseus_sim.profiles import profile_csv
from perseus_sim.training.hosts import Framework, Hosts
from perseus_solver.certify import deadline_bound
from perseus_solver.frontier import Planner
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

A100 = MODELS["a100"]
EXACT = Machine()


@st.composite
def planned(draw: st.DrawFn) -> tuple[Problem, np.ndarray]:
    """A problem, and a random clock for each of its instructions."""
    stages = draw(st.integers(1, 4))
    profile = read_profile(profile_csv(stages, forward_s=draw(st.sampled_from((0.005, 0.036)))))
    name = draw(st.sampled_from(("1f1b", "gpipe")))
    problem = build_problem(
        profile,
        build_schedule(name, stages=stages, microbatches=draw(st.integers(stages, 8))),
        blocking_power_w=A100.blocking_power_w,
        delay_s=draw(st.sampled_from((0.0, 0.002))),
        overhead_s=draw(st.sampled_from((0.0, 0.01))),
    )
    chance = np.random.default_rng(draw(st.integers(0, 1_000)))
    choice = np.array([chance.integers(problem.options[k].time_s.size) for k in problem.option_of])
    return problem, choice


def clocks_of(problem: Problem, choice: np.ndarray) -> list[int]:
    return [int(problem.options[k].frequency_mhz[c]) for k, c in zip(problem.option_of, choice, strict=True)]


def pipeline(microbatches: int = 8, forward_s: float = 0.036, seed: int = 1) -> Pipeline:
    problem = build_problem(
        read_profile(profile_csv(4, forward_s=forward_s)),
        build_schedule("1f1b", stages=4, microbatches=microbatches),
        blocking_power_w=A100.blocking_power_w,
    )
    chance = np.random.default_rng(seed)
    choice = np.array([chance.integers(problem.options[k].time_s.size) for k in problem.option_of])
    return Pipeline(problem, clocks_of(problem, choice), A100.max_clock_mhz)


def execute(pipeline: Pipeline, machine: Machine, control: Control, iterations: int = 4) -> Outcome:
    return Executor(pipeline, machine, control).run(iterations)


@settings(max_examples=40, deadline=None)
@given(planned())
def test_without_latency_it_agrees_with_the_solvers_simulator(case: tuple[Problem, np.ndarray]) -> None:
    problem, choice = case
    expected = Simulator(problem).run(choice)
    outcome = execute(Pipeline(problem, clocks_of(problem, choice), A100.max_clock_mhz), EXACT, Ideal())
    assert outcome.time_s == pytest.approx([float(expected.iteration_time_s)] * 4, rel=1e-9)
    assert outcome.energy_j == pytest.approx([float(expected.energy_j)] * 4, rel=1e-9)
    assert max(outcome.astray) == 0


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 100),
    st.sampled_from(list(Framework)),
    st.integers(1, 3),
    st.sampled_from((HostMarks, GpuMarks)),
)
def test_energy_is_that_of_the_clocks_that_ran(
    seed: int, framework: Framework, gpus: int, control: type[Control]
) -> None:
    """Between the lowest and the highest power of any clock, for the time that was computed; the rest is waiting."""
    machine = Machine(A100.driver, Hosts(framework), gpus, noise=0.01, seed=seed)
    line = pipeline(seed=seed)
    outcome = execute(line, machine, control())
    powers = [curve.at(mhz)[1] for curve in line.curve_of[:2] for mhz in A100.clocks_mhz if mhz >= 855]
    for time_s, energy_j in zip(outcome.time_s, outcome.energy_j, strict=True):
        assert line.ranks * time_s * A100.blocking_power_w < energy_j < line.ranks * time_s * max(powers)
    assert all(0 <= late <= astray <= 1 for late, astray in zip(outcome.late, outcome.astray, strict=True))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("framework", Framework)
def test_marks_of_the_gpu_are_exact_where_changes_take_no_time(framework: Framework, gpus: int) -> None:
    line = pipeline()
    ideal = execute(line, EXACT, Ideal())
    marks = execute(line, Machine(hosts=Hosts(framework), gpus=gpus), GpuMarks())
    assert marks.time_s == pytest.approx(ideal.time_s, rel=1e-9)
    assert marks.energy_j[1:] == pytest.approx(ideal.energy_j[1:], rel=1e-9)


class Leads(Control):
    """Records host's and GPU's begins."""

    def start(self) -> None:
        self.host_s: dict[tuple[int, int], float] = {}
        self.gpu_s: dict[tuple[int, int], float] = {}
        self.ended: list[int] = [0] * self.executor.pipeline.ranks
        self.ahead = 0
        self.begun = [0] * self.executor.pipeline.ranks

    def host_begun(self, number: int, now_s: float) -> None:
        rank = self.executor.pipeline.rank_of[number]
        self.begun[rank] += 1
        self.ahead = max(self.ahead, self.begun[rank] - self.ended[rank])
        self.host_s[number, self.executor.ranks[rank].host_iteration] = now_s

    def gpu_begins(self, number: int, now_s: float) -> None:
        self.gpu_s[number, self.executor.iteration] = now_s

    def gpu_ended(self, number: int, now_s: float) -> None:
        self.ended[self.executor.pipeline.rank_of[number]] += 1


@pytest.mark.parametrize("framework", Framework)
@pytest.mark.parametrize("queue", [256, 1_024, 4_096])
def test_a_host_leads_by_the_launch_queue_at_most(framework: Framework, queue: int) -> None:
    leads = Leads()
    execute(pipeline(), Machine(hosts=Hosts(framework, queue=queue)), leads)
    assert set(leads.gpu_s) <= set(leads.host_s)
    assert all(leads.host_s[key] <= begin_s for key, begin_s in leads.gpu_s.items())
    # The one that runs, those whose kernels are all in the queue, and the one being launched.
    assert leads.ahead <= queue / 300 + 2


def test_a_host_that_waits_begins_with_its_gpu() -> None:
    hosts = Hosts(Framework.MEGATRON)
    line, leads = pipeline(), Leads()
    waits = hosts.waits(line.problem)
    execute(line, Machine(hosts=hosts), leads)
    for (number, iteration), begin_s in leads.gpu_s.items():
        if waits[number]:
            assert leads.host_s[number, iteration] == begin_s
    assert sum(waits) > line.problem.instructions // 2


def test_never_waiting_leads_further_than_waiting_at_each_step() -> None:
    line = pipeline()
    lead_s = {
        framework: float(np.mean(execute(line, Machine(hosts=Hosts(framework)), DefaultClocks(), 8).lead_s[2:]))
        for framework in Framework
    }
    assert lead_s[Framework.MEGATRON] < lead_s[Framework.DEEPSPEED] < lead_s[Framework.PYTORCH]


def test_the_same_seed_gives_the_same_run() -> None:
    machine = Machine(A100.driver, Hosts(), noise=0.01, seed=5)
    one, same = (execute(pipeline(), machine, HostMarks()) for _ in range(2))
    other = execute(pipeline(), replace(machine, seed=6), HostMarks())
    assert one == same
    assert one != other


def test_controls_are_compared_on_the_same_iterations() -> None:
    machine = Machine(noise=0.01, seed=2)
    line = pipeline()
    flat = Pipeline(line.problem, [A100.max_clock_mhz] * len(line.plan), A100.max_clock_mhz)
    assert execute(flat, machine, Ideal()) == execute(flat, machine, DefaultClocks())


@pytest.mark.parametrize("framework", Framework)
def test_marks_of_the_host_change_clocks_at_the_wrong_time(framework: Framework) -> None:
    line = pipeline()
    machine = Machine(hosts=Hosts(framework))
    right, wrong = (execute(line, machine, control) for control in (GpuMarks(), HostMarks()))
    assert max(right.astray[1:]) == 0
    assert min(wrong.astray[1:]) > 0.1


# ------------------------------------------------------------------------------------------- the power limit


class Limits(Control):
    """Sets the highest clock, and records the reasons that the agent reads for a lower one."""

    def start(self) -> None:
        self.device = VirtualDevice(self.executor, 0, 0, A100.name, A100.clocks_mhz)
        self.reasons = set[EventReason]()

    def gpu_begins(self, number: int, now_s: float) -> None:
        self.executor.set_clock(self.executor.pipeline.rank_of[number], A100.max_clock_mhz)

    def host_begun(self, number: int, now_s: float) -> None:
        self.reasons.add(self.device.event_reasons())


@pytest.mark.parametrize("limit_w", [300.0, 380.0, 450.0])
def test_a_power_limit_holds_clock_and_power_down_and_says_so(limit_w: float) -> None:
    problem = pipeline().problem
    flat = [A100.max_clock_mhz] * problem.instructions
    free, limited = (
        execute(Pipeline(problem, flat, A100.max_clock_mhz, w), Machine(hosts=Hosts()), Limits())
        for w in (1_000.0, limit_w)
    )
    line = Pipeline(problem, flat, A100.max_clock_mhz, limit_w)
    assert max(line.curve_of[0].at(mhz)[1] for mhz in A100.clocks_mhz) <= limit_w
    assert min(limited.time_s) > max(free.time_s)
    assert max(free.limited) == 0
    assert min(limited.limited) > 0.99


def test_a_clock_that_the_power_limit_does_not_reach_is_the_one_that_was_set() -> None:
    line = pipeline()
    limited = Pipeline(line.problem, line.plan, A100.max_clock_mhz, A100.power_limit_w)
    for curve in limited.curve_of[:2]:
        for mhz in A100.clocks_mhz:
            effective_mhz = curve.effective_mhz(mhz)
            assert effective_mhz <= mhz
            assert effective_mhz == pytest.approx(A100.effective_mhz(mhz), abs=15)
    # What was measured at the limit is not limited twice.
    assert execute(limited, EXACT, Ideal()).time_s == pytest.approx(execute(line, EXACT, Ideal()).time_s, rel=1e-4)


def test_the_agent_reads_why_a_clock_is_lower() -> None:
    problem = pipeline().problem
    limits = Limits()
    line = Pipeline(problem, [A100.max_clock_mhz] * problem.instructions, A100.max_clock_mhz, 300.0)
    execute(line, Machine(hosts=Hosts()), limits)
    assert limits.reasons == {EventReason.NONE, EventReason.POWER_CAP}  # idle, and computing


# ----------------------------------------------------------------------------------- drivers and their locks


@given(st.lists(st.tuples(st.floats(0, 0.1), st.floats(0, 0.02)), min_size=1, max_size=50))
def test_calls_behind_a_lock_follow_each_other(calls: list[tuple[float, float]]) -> None:
    lock, now_s, free_s = DriverLock(A100.driver), 0.0, 0.0
    for pause_s, hold_s in calls:
        now_s += pause_s
        begin_s = lock.acquire(now_s, hold_s)
        assert begin_s >= max(now_s, free_s)
        free_s = begin_s + hold_s


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_draws_have_the_published_median_and_tail(model: object) -> None:
    driver = model.driver  # type: ignore[attr-defined]
    draws = [
        switch
        for seed in range(4)
        for switch in map(Switches(driver, seed).draw, model.clocks_mhz * 40)  # type: ignore[attr-defined]
    ]
    latencies_s = [switch.latency_s for switch in draws]
    assert np.median(latencies_s) == pytest.approx(driver.latency.p50_s, rel=0.15)
    assert np.quantile(latencies_s, 0.99) == pytest.approx(driver.latency.p99_s, rel=0.3)
    assert all(0 < switch.call_s <= switch.latency_s for switch in draws)


def test_a_target_differs_from_others_alike_on_all_gpus() -> None:
    driver = replace(A100.driver, target_share=1.0, outlier_probability=0.0)
    here, there = Switches(driver, 1), Switches(driver, 2)
    assert here.draw(1_200).latency_s == there.draw(1_200).latency_s != here.draw(1_215).latency_s


# ------------------------------------------------------------------------------------------------ the bound


def test_the_bound_is_the_plans_energy_where_the_lock_lets_everything_through() -> None:
    line = pipeline()
    free_j = least_work_j(line, 1e9)
    work_j = sum(
        curve.at(mhz)[0] * (curve.at(mhz)[1] - A100.blocking_power_w)
        for curve, mhz in zip(line.curve_of, line.plan, strict=True)
    )
    assert free_j <= work_j * (1 + 1e-12)


@given(st.lists(st.floats(0, 20), min_size=2, max_size=5))
@settings(max_examples=10, deadline=None)
def test_fewer_calls_never_save_more(calls: list[float]) -> None:
    line = pipeline(4)
    bounds = [least_work_j(line, count) for count in sorted(calls)]
    assert all(more <= fewer + 1e-6 for fewer, more in pairwise(bounds))


@pytest.mark.slow
@given(planned(), st.integers(0, 1_000), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_no_plan_takes_less_than_its_changes_allow(
    case: tuple[Problem, np.ndarray], seed: int, longest_run: int
) -> None:
    problem, choice = case
    chance = np.random.default_rng(seed)
    for first, end in pairwise(problem.stage_offset.tolist()):
        at = first
        while at < end:  # the same clock for some instructions
            length = int(chance.integers(1, longest_run + 1))
            choice[at : at + length] = chance.integers(min(map(len, (o.time_s for o in problem.options))))
            at += length
    planner = Planner(problem)
    planner.frontier(20)
    outcome = Simulator(problem).run(choice)
    time_s, energy_j = float(np.asarray(outcome.iteration_time_s)), float(np.asarray(outcome.energy_j))
    clocks = np.array(clocks_of(problem, choice))
    changes = max(np.count_nonzero(np.diff(clocks[a:b])) for a, b in pairwise(problem.stage_offset.tolist()))
    bound_j = least_energy_j(problem, planner.proofs, time_s, float(changes))
    free_j = least_energy_j(problem, planner.proofs, time_s, 1e9)
    proven_j = float(deadline_bound(problem, planner.bounds, np.array([time_s]))[0])
    assert free_j == pytest.approx(proven_j)
    assert free_j <= bound_j * (1 + 1e-9)
    assert bound_j <= energy_j * (1 + 1e-9)


def test_clocks_change_no_more_often_than_the_lock_lets_through() -> None:
    for control in (GpuMarks, HostMarks):
        line = pipeline(16, 0.005)
        machine = Machine(A100.driver, Hosts(), gpus=8, seed=1)
        outcome = execute(line, machine, control(), 20)
        calls = float(np.mean(outcome.time_s)) / mean_call_s(A100.driver)
        assert 8 * float(np.mean(outcome.changes[1:])) <= 1.2 * line.ranks * calls
