"""Plans on GPUs whose clocks change late: the description of the hardware, coarser grains, what is worth deploying."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perseus_core.grain import Grain
from perseus_core.instruction import InstructionKind
from perseus_core.latency import SwitchLatency
from perseus_core.marks import MarkSource
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.errors import InvalidProblem
from perseus_solver.frontier import Planner, solve_deadline
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal import (
    Hardware,
    InvalidHardware,
    LossCause,
    Rule,
    deployable_frontier,
    explain_losses,
    hardware_from_json,
    ideal_point,
    rehearse,
)
from perseus_solver.rehearsal.clocks import ClockTables
from perseus_solver.rehearsal.control import Leads
from perseus_solver.rehearsal.execution import Executor
from perseus_solver.rehearsal.grains import group_of, grouped_plans
from perseus_solver.rehearsal.refinement import Refinement
from perseus_solver.schedules import build_schedule
from perseus_solver.switching import proven_effective_j

pytestmark = pytest.mark.usefixtures("short_search")

GIVEN_APART = {"p50": 0.02, "p99": 0.1}
GIVEN: dict[str, Any] = {
    "model": "NVIDIA H100",
    "switch_latency_s": {"p50": 0.02, "p99": 0.1},
    "call_s": 0.002,
    "marks": "gpu",
    "launch_s": 1e-5,
    "launch_queue": 1024,
    "kernels": {"forward": 300, "backward": 600},
}


def made_up(stages: int = 3, microbatches: int = 8, step: int = 40, scale: float = 0.05) -> Problem:
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for kind, work in (("forward", 1.0), ("backward", 1.9)):
            for clock in range(1400, 700, -step):
                seconds = scale * (1 + 0.1 * (stage % 2)) * work * (0.3 + 0.7 * 1400 / clock)
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * (95 + 305 * (clock / 1400) ** 2.2)}")
    profile = read_profile("\n".join(rows) + "\n")
    return build_problem(
        profile, build_schedule("1f1b", stages=stages, microbatches=microbatches), blocking_power_w=80.0
    )


@pytest.fixture(scope="module")
def problem() -> Problem:
    return made_up()


@pytest.fixture(scope="module")
def planner(problem: Problem) -> Planner:
    return Planner(problem)


@pytest.fixture(scope="module")
def solved(planner: Planner) -> Frontier:
    return planner.frontier(40)


def slow(p50_s: float, p99_s: float, marks: MarkSource = MarkSource.GPU) -> Hardware:
    return Hardware("made up", SwitchLatency.of_seconds(p50_s, p99_s, 0.002, False, "a test"), marks)


def ahead_s(hardware: Hardware) -> np.ndarray:
    """How much before its effect an agent asks for each of two clocks, in the mean of raising and lowering."""
    leads = Leads.of(hardware, [1335, 1350])
    return (leads.raise_s + leads.lower_s) / 2


def deviation_s(hardware: Hardware) -> np.ndarray:
    leads = Leads.of(hardware, [1335, 1350])
    return (leads.raise_s - leads.lower_s) / 2


def test_the_description_is_read_as_given() -> None:
    hardware = hardware_from_json(json.dumps(GIVEN))
    assert (hardware.latency.p50_s, hardware.latency.p99_s, hardware.latency.call_s) == (0.02, 0.1, 0.002)
    assert hardware.marks is MarkSource.GPU
    assert (hardware.kernels[InstructionKind.FORWARD], hardware.kernels[InstructionKind.BACKWARD]) == (300, 600)
    assert hardware.gpus_per_lock == 1
    needed = {key: GIVEN[key] for key in ("model", "switch_latency_s", "call_s", "marks")}
    assert hardware_from_json(json.dumps(needed)).launch_queue > 0
    shared = hardware_from_json(json.dumps(GIVEN | {"gpus_per_lock": 8, "noise": 0.01}))
    assert (ahead_s(shared) > ahead_s(hardware)).all()
    assert (deviation_s(shared) > deviation_s(hardware)).all()
    apart = GIVEN_APART | {"clocks": {"1335": {"p50": 0.05, "p99": 0.06}}}
    by_clock = hardware_from_json(json.dumps(GIVEN | {"switch_latency_s": apart}))
    assert ahead_s(by_clock) == pytest.approx([0.05, 0.02])
    assert deviation_s(by_clock)[0] < deviation_s(by_clock)[1] == deviation_s(hardware)[1]
    for described in (hardware, shared, by_clock):
        assert hardware_from_json(described.to_json()) == described


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model must have 1 to 256 characters"),
        ({"model": 7}, "model must be a text"),
        ({"switch_latency_s": 0.02}, "switch_latency_s must be an object"),
        ({"switch_latency_s": {"p50": 0.02}}, "switch_latency_s has no field 'p99'"),
        ({"switch_latency_s": {"p50": 0.02, "p99": 0.01}}, "p99 must be at least p50"),
        ({"switch_latency_s": {"p50": 0, "p99": 0.01}}, "p50 must be greater than zero where p99 is"),
        ({"switch_latency_s": {"p50": -1, "p99": 0.01}}, "p50 must be between 0 and 60"),
        ({"switch_latency_s": {"p50": 0.1, "p99": float("nan")}}, "p99 must be between 0 and 60"),
        ({"switch_latency_s": {"p50": 0.1, "p99": 1e400}}, "p99 must be between 0 and 60"),
        ({"switch_latency_s": {"p50": 0.1, "p99": 10**400}}, "p99 must be between 0 and 60"),
        ({"switch_latency_s": GIVEN_APART | {"clocks": []}}, "clocks must be an object of at most 255 clocks"),
        ({"switch_latency_s": GIVEN_APART | {"clocks": {"fast": {}}}}, "clocks.'fast' must be named by a clock in MHz"),
        ({"switch_latency_s": GIVEN_APART | {"clocks": {"1335": {"p50": 1}}}}, "clocks.'1335' has no field 'p99'"),
        (
            {"switch_latency_s": GIVEN_APART | {"clocks": {"1335": {"p50": 1, "p99": 0.5}}}},
            "clocks.1335.p99 must be at least p50, 1, not 0.5",
        ),
        ({"call_s": True}, "call_s must be a number"),
        ({"call_s": "2 ms"}, "call_s must be a number, not '2 ms'"),
        ({"marks": "host"}, "marks must be one of gpu, synchronised, events, run-ahead, not 'host'"),
        ({"marks": ["gpu"]}, "marks must be one of"),
        ({"launch_s": 2}, "launch_s must be between 0 and 1"),
        ({"launch_queue": 0}, "launch_queue must be a whole number between 1"),
        ({"launch_queue": 1.5}, "launch_queue must be a whole number"),
        ({"kernels": {"forward": 0}}, "kernels.forward must be a whole number between 1"),
        ({"kernels": {"sideways": 3}}, "kernels has the unknown field 'sideways'"),
        ({"gpus_per_lock": 0}, "gpus_per_lock must be a whole number between 1"),
        ({"pipelines": 0}, "pipelines must be a whole number between 1"),
        ({"pipelines": 2.5}, "pipelines must be a whole number between 1"),
        ({"noise": 0.9}, "noise must be between 0 and 0.5"),
        ({"extra": 1}, "hardware has the unknown field 'extra'"),
    ],
)
def test_a_wrong_description_is_refused_by_field_and_rule(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidHardware, match=message.replace(".", r"\.")) as refused:
        hardware_from_json(json.dumps(GIVEN | change))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", '{"model": "x"}', "[" * 100_000, " " * 100_000])
def test_what_is_no_description_is_refused(text: str) -> None:
    with pytest.raises(InvalidHardware, match="hardware"):
        hardware_from_json(text)


def test_what_is_not_measured_is_assumed_as_published() -> None:
    unknown, known = Hardware.published("made-up GPU", gpus_per_lock=8), Hardware.published("NVIDIA A100-SXM4-80GB")
    assert unknown.latency.p99_s > known.latency.p99_s
    assert (unknown.gpus_per_lock, known.gpus_per_lock) == (8, 1)


@pytest.mark.parametrize(("grain", "parts"), [(Grain.STAGE, 1), (Grain.SEGMENT, 1), (Grain.SEGMENT, 3)])
def test_grouped_plans_have_one_clock_for_each_group_and_end_in_time(
    problem: Problem, solved: Frontier, grain: Grain, parts: int
) -> None:
    group, simulator = group_of(problem, grain, parts), Simulator(problem)
    deadline_s = solved.t_min_s * np.array([1.0, 1.01, 1.05, 1.2, 1.5]) * (1 + 1e-9)
    choices = grouped_plans(problem, simulator, group, deadline_s)
    time_s, energy_j = simulator.totals(choices)
    assert (time_s <= deadline_s).all()
    for plan in choices:
        clocks = np.array([problem.options[k].frequency_mhz[c] for k, c in zip(problem.option_of, plan, strict=True)])
        assert all(len(np.unique(clocks[group == g])) == 1 for g in range(group.max() + 1))
    effective_j = energy_j - problem.blocking_power_w * problem.stages * time_s
    assert (np.diff(effective_j) <= 0).all()
    assert (effective_j >= proven_effective_j(problem, solved, time_s) * (1 - 1e-9)).all()


def test_segments_are_at_most_a_lead_a_steady_state_and_a_tail(problem: Problem) -> None:
    stages = problem.schedule.stage
    for parts in (1, 3):
        group = group_of(problem, Grain.SEGMENT, parts)
        for stage in range(problem.stages):
            own = group[stages == stage]
            assert (np.diff(own) >= 0).all()  # a segment is a run
            assert len(np.unique(own)) <= 2 * parts + 1
    assert (group_of(problem, Grain.STAGE) == stages).all()


@pytest.mark.parametrize("share", [1.0, 1.04, 1.1, 1.25])
def test_one_clock_for_each_stage_is_nearly_the_best_of_all_combinations(share: float) -> None:
    problem = made_up(stages=3, microbatches=4, step=70)
    simulator = Simulator(problem)
    deadline_s = share * float(simulator.run(all_maximum(problem)).iteration_time_s) * (1 + 1e-9)
    clocks = range(len(problem.options[0].time_s))
    every = np.array(list(itertools.product(clocks, repeat=3)))[:, problem.schedule.stage]
    time_s, energy_j = simulator.totals(every)
    effective_j = energy_j - problem.blocking_power_w * problem.stages * time_s
    best_j = effective_j[time_s <= deadline_s].min()
    found = grouped_plans(problem, simulator, group_of(problem, Grain.STAGE), np.array([deadline_s]))
    found_s, found_j = simulator.totals(found)
    own_j = float(found_j[0] - problem.blocking_power_w * problem.stages * found_s[0])
    assert best_j * (1 - 1e-9) <= own_j <= best_j + 0.01 * float(energy_j.max())


@pytest.mark.parametrize("hardware", [slow(0.005, 0.013), slow(0.03, 0.1), slow(0.03, 0.1, MarkSource.EVENTS)])
def test_a_deployable_frontier_says_what_its_plans_do(planner: Planner, problem: Problem, hardware: Hardware) -> None:
    found = deployable_frontier(planner, hardware, points=20)
    assert 3 <= len(found) <= 20
    assert found.rehearsed is not None
    assert (np.diff(found.time_s) > 0).all()
    assert (np.diff(found.effective_energy_j) < 0).all()
    assert (found.gap >= 0).all()
    assert (found.rehearsed.p50_s <= found.time_s).all()
    again = rehearse(problem, found.frequencies_mhz, hardware)
    assert again.time_kept_s(0.95) == pytest.approx(found.time_s)
    assert again.mean_energy_j == pytest.approx(found.energy_j)
    exact = Simulator(problem).run(Simulator(problem).choice_of(found.frequencies_mhz))
    assert exact.iteration_time_s == pytest.approx(found.rehearsed.ideal_time_s)
    for point in found:
        ideal = ideal_point(planner, point)
        assert ideal.gap >= 0
        assert point.expectation is not None
        assert ideal.energy_j == point.expectation.ideal_energy_j
    assert Frontier.from_bytes(found.to_bytes()).to_bytes() == found.to_bytes()


def test_without_latency_deployable_plans_are_the_solved_ones(planner: Planner, solved: Frontier) -> None:
    found = deployable_frontier(planner, slow(0.0, 0.0))
    at = found.lookup(1.1 * solved.t_min_s)
    best_j = solved.energy_j[solved.lookup(1.1 * solved.t_min_s)]
    assert found.energy_j[at] <= best_j * 1.01


def test_the_longer_changes_take_the_less_is_saved(planner: Planner, solved: Frontier) -> None:
    deadline_s = 1.02 * solved.t_min_s

    def saved_at(hardware: Hardware) -> float:
        found = deployable_frontier(planner, hardware, times_s=[deadline_s])
        kept = found.time_s <= deadline_s
        return float(found.energy_j[kept].min())

    least = [saved_at(slow(p50, 3 * p50)) for p50 in (0.002, 0.02, 0.2)]
    nothing = saved_at(slow(0.2, 0.6, MarkSource.HOST))
    assert least[0] < least[1] < least[2] <= nothing * (1 + 1e-9)


def test_where_the_host_runs_ahead_each_stage_keeps_one_clock(planner: Planner) -> None:
    found = deployable_frontier(planner, slow(0.03, 0.1, MarkSource.HOST))
    assert found.rehearsed is not None
    assert set(found.rehearsed.grains) <= {Grain.STAGE, Grain.NONE}
    assert (found.clock_changes == 0).all()
    assert len(found) > 3


def test_all_clocks_at_their_maximum_are_kept_for_the_shortest_deadline(planner: Planner, problem: Problem) -> None:
    fastest = np.array([[problem.options[k].frequency_mhz[0] for k in problem.option_of]], dtype=np.uint16)
    for hardware in (slow(0.03, 0.1), replace(slow(0.03, 0.1), gpus_per_lock=8, noise=0.002)):
        kept_s = float(rehearse(problem, fastest, hardware).time_kept_s(0.95)[0])
        found = deployable_frontier(planner, hardware, times_s=[kept_s])
        assert found.t_min_s <= kept_s


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_search_for_a_wanted_time_saves_more(
    planner: Planner, problem: Problem, solved: Frontier, gpus: int
) -> None:
    hardware, wanted_s = replace(slow(0.03, 0.1), gpus_per_lock=gpus, noise=0.003), 1.03 * solved.t_min_s
    grains = deployable_frontier(planner, hardware)
    before = grains.frequencies_mhz[grains.lookup(wanted_s)]
    found = Refinement(Executor(problem), hardware, wanted_s, 0.95).plans(before, seed=1)
    assert len(found)
    # Draws that the search has not seen; whoever is chosen among many looks a little better than it is.
    judged = rehearse(problem, np.stack([before, found[-1]]), hardware, samples=256, seed=99)
    assert judged.mean_energy_j[1] < judged.mean_energy_j[0]
    assert judged.time_kept_s(0.95)[1] <= wanted_s * 1.005
    measured = [set(options.frequency_mhz.tolist()) for options in problem.options]
    assert all(int(clock) in measured[k] for plan in found for clock, k in zip(plan, problem.option_of, strict=True))


@pytest.mark.parametrize("wanted", [1.005, 1.03])
def test_plans_are_not_late_where_changes_are_quicker_than_known(wanted: float) -> None:
    """Agents measure. With quicker calls a lower clock is worth asking for that was not: it must not be in the plan."""
    problem = made_up(scale=0.004)
    planner = Planner(problem)
    known = replace(Hardware.published("NVIDIA A100-SXM4-80GB", gpus_per_lock=8), noise=0.003)
    frontier = deployable_frontier(planner, known, times_s=[wanted * planner.t_min_s], points=30)
    for share in (0.8, 0.9):
        quicker = replace(known, latency=replace(known.latency, call_us=round(share * known.latency.call_us)))
        found = rehearse(problem, frontier.frequencies_mhz, quicker)
        assert (found.time_kept_s(0.95) < 1.003 * frontier.time_s).all()
        assert (found.mean_energy_j < 1.001 * frontier.energy_j).all()


@pytest.mark.parametrize("pipelines", [2, 8, 64])
def test_a_job_waits_for_the_slowest_of_its_pipelines(problem: Problem, solved: Frontier, pipelines: int) -> None:
    alone = replace(slow(0.005, 0.013), noise=0.005)
    job = replace(alone, pipelines=pipelines)
    plan = solved.frequencies_mhz[:1]
    seen = rehearse(problem, plan, alone, samples=pipelines * 512, seed=7).time_s.reshape(-1, pipelines).max(axis=1)
    for samples, within in ((64, 0.002), (1024, 0.0007)):
        found = rehearse(problem, plan, job, samples=samples)
        for confidence in (0.5, 0.95):
            assert found.time_kept_s(confidence)[0] == pytest.approx(np.quantile(seen, confidence), rel=within)
        assert found.mean_time_s[0] == pytest.approx(seen.mean(), rel=within)
        waited_s = found.mean_time_s[0] - found.time_s.mean()
        waiting_j = problem.blocking_power_w * problem.stages * waited_s
        assert found.mean_energy_j[0] - found.energy_j.mean() == pytest.approx(waiting_j)
        assert waited_s > 0


def test_a_plan_for_many_pipelines_keeps_its_time_in_the_job(planner: Planner, problem: Problem) -> None:
    alone = replace(slow(0.02, 0.05), noise=0.003)
    fastest = problem.frequencies_of(np.zeros((1, problem.instructions), dtype=np.intp))
    before = rehearse(problem, fastest, replace(alone, pipelines=32))
    wanted_s = 1.005 * float(before.time_kept_s(0.95)[0])
    kept = {}
    for pipelines in (1, 32):
        found = deployable_frontier(planner, replace(alone, pipelines=pipelines), times_s=[wanted_s])
        at = found.lookup(wanted_s)
        assert found.energy_j[at] < 0.97 * before.mean_energy_j[0], "and it saves"
        seen = rehearse(problem, found.frequencies_mhz[at : at + 1], alone, samples=32 * 512, seed=7).time_s
        kept[pipelines] = float(np.mean(seen.reshape(-1, 32).max(axis=1) <= wanted_s))
    assert kept[32] > 0.9
    assert kept[1] < kept[32], "what one pipeline keeps, the slowest of many does not"


WANTED = 1.0371
"""Of T_min, a time that no plan was made for."""


@pytest.fixture(scope="module")
def of_wanted(planner: Planner, solved: Frontier) -> Frontier:
    """Plans with one for `WANTED` in particular."""
    return deployable_frontier(planner, slow(0.005, 0.013), times_s=[WANTED * solved.t_min_s])


def test_times_that_are_wanted_are_nearly_used_up(of_wanted: Frontier, solved: Frontier) -> None:
    wanted_s = WANTED * solved.t_min_s
    assert of_wanted.time_s[of_wanted.lookup(wanted_s)] >= 0.98 * wanted_s


def test_few_points_are_spread_over_all_times(planner: Planner, solved: Frontier, of_wanted: Frontier) -> None:
    wanted_s, many = WANTED * solved.t_min_s, of_wanted
    few = deployable_frontier(planner, slow(0.005, 0.013), times_s=[wanted_s], points=12)
    assert len(few) == 12 < len(many)
    # Equal steps over what is saved between the fastest and the cheapest lose half a step on average.
    saved = many.energy_j[0] / many.energy_j[many.least_energy] - 1
    assert DeployedGap.of(few).mean <= DeployedGap.of(many).mean + saved / 12 / 2
    assert few.energy_j[few.lookup(wanted_s)] == many.energy_j[many.lookup(wanted_s)]


def test_where_nothing_waits_the_gap_does_not_depend_on_what_waiting_takes() -> None:
    rows = ["stage,instruction,frequency,time,energy"]
    for clock in range(1410, 1150, -30):
        seconds = 0.4 * (0.15 + 0.85 * 1410 / clock)
        rows.append(f"0,step,{clock},{seconds},{seconds * (95 + 305 * (clock / 1410) ** 2.2)}")
    profile, schedule = read_profile("\n".join(rows)), build_schedule("Steps", stages=1, microbatches=1)
    hardware = replace(slow(0.005, 0.013), noise=0.02)
    low, high = (
        DeployedGap.of(deployable_frontier(Planner(build_problem(profile, schedule, blocking_power_w=watts)), hardware))
        for watts in (0.0, 320.0)
    )
    assert high.mean == pytest.approx(low.mean, rel=0.01)
    assert high.mean < 0.04, "half a step between two clocks, and the scatter"


@pytest.mark.parametrize(("confidence", "points"), [(0.0, 10), (1.0, 10), (float("nan"), 10), (0.95, 0)])
def test_confidence_and_points_are_checked(planner: Planner, confidence: float, points: int) -> None:
    with pytest.raises(InvalidProblem, match=r"confidence|points"):
        deployable_frontier(planner, slow(0.0, 0.0), confidence=confidence, points=points)


def test_only_a_rehearsed_point_has_an_ideal(planner: Planner, solved: Frontier) -> None:
    with pytest.raises(InvalidProblem, match="rehearsed"):
        ideal_point(planner, solved[0])


def test_gpus_behind_one_lock_lose_more_than_gpus_with_their_own(problem: Problem, solved: Frontier) -> None:
    alone = slow(0.01, 0.03)
    behind = replace(alone, latency=replace(alone.latency, call_us=5_000), gpus_per_lock=8)
    one, other = (rehearse(problem, solved.frequencies_mhz[:1], hardware) for hardware in (alone, behind))
    assert other.below_share[0] + other.above_share[0] > one.below_share[0] + one.above_share[0]


def test_gpus_that_are_faster_than_the_slowest_of_their_stage_wait_for_it(problem: Problem) -> None:
    tables = ClockTables.of(problem)
    mixed_w, time_s = tables.mixed_power_w(80.0), tables.time_s
    for table, slow, fast in itertools.product(
        range(len(time_s)), range(0, len(tables.mhz), 4), range(len(tables.mhz))
    ):
        drawn = max(slow, fast)
        waited_s = time_s[table, slow] - time_s[table, drawn]
        energy_j = time_s[table, drawn] * tables.power_w[table, drawn] + 80.0 * waited_s
        assert time_s[table, slow] * mixed_w[table, slow, fast] == pytest.approx(energy_j)


def test_a_timetable_beats_the_marks_of_hosts_on_measurements(sosp24: Path) -> None:
    """GPT-3 on A100s at T_min: what the host's end marks cost in time, the timetable does not, at any latency."""
    text = (sosp24 / "stage_profile" / "gpt3-175b_a100-sxm.csv").read_bytes()
    problem = build_problem(
        read_profile(text, stages=8), build_schedule("1f1b", stages=8, microbatches=24), blocking_power_w=83.64
    )
    simulator = Simulator(problem)
    baseline = simulator.run(all_maximum(problem))
    point = solve_deadline(problem, float(baseline.iteration_time_s))
    plan, ideal_j = point.frequencies_mhz[None], 1 - point.energy_j / float(baseline.energy_j)
    assert ideal_j > 0.14
    lost_s = []
    for p50_s, p99_s in ((0.005, 0.013), (0.010, 0.030), (0.030, 0.100)):
        timetable = rehearse(problem, plan, slow(p50_s, p99_s))
        hosts = rehearse(problem, plan, slow(p50_s, p99_s, MarkSource.HOST), rule=Rule.HOST_ENDS)
        lost_s.append(float(timetable.time_kept_s(0.5)[0] / point.iteration_time_s - 1))
        assert float(hosts.time_kept_s(0.5)[0] / point.iteration_time_s - 1) > max(0.03, 10 * lost_s[-1])
        saved = 1 - float(timetable.mean_energy_j[0]) / float(baseline.energy_j)
        assert saved > 0.85 * ideal_j
    assert lost_s == sorted(lost_s)
    assert lost_s[-1] < 0.005


@pytest.mark.parametrize(
    ("hardware", "cause", "message"),
    [
        (slow(0.01, 0.03, MarkSource.HOST), LossCause.MARKS_LEAD, "marks lead by"),
        (slow(0.06, 0.2), LossCause.SLOW_CHANGES, "clock changes take 60 ms"),
        (
            replace(slow(0.005, 0.01), gpus_per_lock=24),
            LossCause.DRIVER_LOCK,
            "clock changes wait 46 ms for the node's driver lock",
        ),
        (replace(slow(0.0, 0.0), noise=0.04), LossCause.SCATTER, "instructions scatter by 4 %"),
    ],
)
def test_the_main_cause_is_named(hardware: Hardware, cause: LossCause, message: str) -> None:
    first = explain_losses(hardware, instruction_s=0.036)[0]
    assert first.cause is cause
    assert message in str(first)


def test_good_hardware_has_no_cause_and_hosts_that_run_ahead_one() -> None:
    assert explain_losses(slow(0.001, 0.002), instruction_s=0.036) == ()
    causes = explain_losses(slow(0.001, 0.002, MarkSource.HOST), instruction_s=0.036)
    assert [loss.cause for loss in causes] == [LossCause.MARKS_LEAD]
