"""The solver's entry points: ends of the frontier, deadlines, unusual problems, gaps on real measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.made_up_profiles import PIPELINES

from perseus_solver.certify import check_frontier
from perseus_solver.errors import Infeasible, InvalidProblem
from perseus_solver.frontier import Planner, solve_deadline, solve_frontier
from perseus_solver.kinds import SAME_TIME, latest_s
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Status
from perseus_solver.model.simulator import Simulator
from perseus_solver.relaxation.composed import Composed
from perseus_solver.relaxation.curve import Engine
from perseus_solver.relaxation.whole import Whole
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.usefixtures("short_search")

BLOCKING_W = {"gpt3-175b_a100-sxm": 83.64, "bloom-176b_a40": 70.38}


def synthetic(
    stages: int, kinds: tuple[str, ...] = ("forward", "backward"), constant: bool = False, clocks: int = 8
) -> str:
    """A profile whose stages differ; power falls with the clock, time rises."""
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for work, kind in enumerate(kinds, start=1):
            for clock in np.linspace(1400, 700, clocks).astype(int).tolist():
                seconds = 0.01 * (work + 0.1 * (stage % 3)) * (0.4 + 0.6 * 1400 / clock)
                watts = 90 + 310 * (clock / 1400) ** 2.4
                rows.append(f"{stage},{kind},{clock},{seconds:.9f},{watts * seconds:.9f}")
        if constant:
            rows.append(f"{stage},constant,0,0.004,0.5")
    return "\n".join(rows) + "\n"


def problem_of(name: str = "1f1b", stages: int = 3, microbatches: int = 5, **more: float) -> Problem:
    kinds = ("forward", "backward", "input_gradient", "weight_gradient")
    profile = read_profile(synthetic(stages, kinds))
    chunks = 2 if name.startswith("Interleaved") else None
    schedule = build_schedule(name, stages=stages, microbatches=microbatches, chunks=chunks)
    return build_problem(profile, schedule, blocking_power_w=80.0, **more)


def extremes(problem: Problem) -> tuple[float, float]:
    """Iteration time with everything at its fastest, and effective energy with everything at its cheapest."""
    fastest = np.array([o.time_s.argmin() for o in problem.options])[problem.option_of]
    cheapest = [float((o.energy_j - problem.blocking_power_w * o.time_s).min()) for o in problem.options]
    return float(Simulator(problem).run(fastest).iteration_time_s), sum(cheapest[k] for k in problem.option_of.tolist())


def test_the_ends_are_t_min_and_the_cheapest_plan() -> None:
    problem = problem_of()
    frontier = solve_frontier(problem, 40)
    fastest_s, cheapest_j = extremes(problem)
    assert frontier.t_min_s == fastest_s
    assert frontier.effective_energy_j[-1] == pytest.approx(cheapest_j)
    assert frontier.statuses[-1] is Status.OPTIMAL


def test_deadlines_are_met_and_more_time_never_costs_energy() -> None:
    problem = problem_of(microbatches=6)
    frontier = solve_frontier(problem, 30)
    before = np.inf
    for deadline_s in np.linspace(frontier.t_min_s, 1.1 * frontier.t_star_s, 9):
        point = solve_deadline(problem, float(deadline_s))
        assert point.iteration_time_s <= latest_s(float(deadline_s))
        assert point.energy_j <= before * (1 + 2e-3)
        before = min(before, point.energy_j)


@pytest.mark.parametrize("slowdown", [0.0, 0.01, 0.033, 0.2, 3.0])
def test_the_best_option_of_a_single_instruction_is_proven_to_be_the_best(slowdown: float) -> None:
    options = [(clock, 1400 / clock, 100 + abs(clock - 900) / 10) for clock in range(1400, 600, -50)]
    problem = Problem.from_graph({"step": options}, [], stage_of={"step": 0}, blocking_power_w=80.0, overhead_s=0.1)
    deadline_s = 1.1 * (1 + slowdown)
    point = solve_deadline(problem, deadline_s)
    assert point.energy_j == pytest.approx(min(e + 8 for _, t, e in options if t + 0.1 <= deadline_s * (1 + 1e-9)))
    assert (point.status, point.gap) == (Status.OPTIMAL, 0.0)


def test_too_short_a_deadline_is_refused_with_t_min() -> None:
    problem = problem_of()
    t_min_s = extremes(problem)[0]
    assert solve_deadline(problem, t_min_s).iteration_time_s <= latest_s(t_min_s)
    assert solve_deadline(problem, t_min_s * (1 - 0.4 * SAME_TIME)).iteration_time_s <= latest_s(t_min_s)
    with pytest.raises(Infeasible, match="T_min = ") as refusal:
        solve_deadline(problem, t_min_s * (1 - 4 * SAME_TIME))
    assert refusal.value.t_min_s == pytest.approx(t_min_s, rel=SAME_TIME)


def test_a_plan_that_ends_exactly_at_the_deadline_is_found() -> None:
    problem = problem_of(stages=2, microbatches=2)
    frontier = solve_frontier(problem, 12)
    for known in frontier:  # rounded up to ticks, such a plan seems to miss its own end
        point = solve_deadline(problem, known.iteration_time_s)
        assert point.energy_j <= known.energy_j * (1 + 1e-12)


def test_deadlines_with_a_large_gap_are_refined() -> None:
    """With many clocks nearly every deadline has a gap below a tenth of a percent. This needs that each deadline's own
    best plan is compared with the bound.
    """
    profile = read_profile(synthetic(3, clocks=40))
    problem = build_problem(profile, build_schedule("1f1b", stages=3, microbatches=6), blocking_power_w=80.0)
    assert solve_frontier(problem, 40).gap.max() < 1.5e-3


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_deadline_is_a_positive_number(deadline_s: float) -> None:
    with pytest.raises(InvalidProblem, match="deadline_s must be a positive finite number"):
        solve_deadline(problem_of(), deadline_s)


def test_points_must_be_positive_and_progress_only_grows() -> None:
    with pytest.raises(InvalidProblem, match="points must be 1 or more"):
        solve_frontier(problem_of(), 0)
    seen: list[tuple[int, int]] = []
    solve_frontier(problem_of(), 10, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]


@pytest.mark.parametrize("schedule", PIPELINES)
def test_every_schedule_is_solved_and_proven(schedule: str) -> None:
    problem = problem_of(schedule, stages=4, microbatches=8)
    planner = Planner(problem)
    frontier, proofs = planner.frontier(12), planner.proofs
    check_frontier(problem, frontier, proofs)
    assert np.median(frontier.gap) < 1e-2  # eight coarse clocks: most of it is integrality


@pytest.mark.parametrize(
    "problem",
    [
        problem_of(stages=1, microbatches=1),
        problem_of(stages=1, microbatches=4),
        problem_of(stages=4, microbatches=1),
        problem_of(delay_s=0.003),
        problem_of(overhead_s=0.5),
        build_problem(
            read_profile(synthetic(3, constant=True)),
            build_schedule("1f1b", stages=3, microbatches=4, constants=[0, 1, 2]),
            blocking_power_w=80.0,
        ),
        replace(problem_of(), edge_from=np.zeros(0, np.int32), edge_to=np.zeros(0, np.int32), edge_delay_s=np.zeros(0)),
        replace(problem_of(), blocking_power_w=0.0),
    ],
    ids=["single", "one-stage", "one-microbatch", "delays", "overhead", "constants", "no-edges", "no-blocking"],
)
def test_odd_shapes_are_solved_and_proven(problem: Problem) -> None:
    planner = Planner(problem)
    frontier, proofs = planner.frontier(10), planner.proofs
    check_frontier(problem, frontier, proofs)
    assert frontier.t_min_s == extremes(problem)[0]


def test_a_single_choice_gives_a_single_point() -> None:
    profile = read_profile("stage,instruction,frequency,time,energy\n0,forward,900,1,9\n0,backward,900,2,18\n")
    problem = build_problem(profile, build_schedule("GPipe", stages=1, microbatches=3), blocking_power_w=1.0)
    frontier = solve_frontier(problem, 10)
    assert len(frontier) == 1
    assert (frontier.t_min_s, frontier.energy_j[0], frontier.statuses[0]) == (9.0, 81.0, Status.OPTIMAL)


def test_a_cycle_is_refused() -> None:
    problem = problem_of()
    looped = replace(
        problem,
        edge_from=np.append(problem.edge_from, problem.edge_to[0]).astype(np.int32),
        edge_to=np.append(problem.edge_to, problem.edge_from[0]).astype(np.int32),
        edge_delay_s=np.append(problem.edge_delay_s, 0.0),
    )
    with pytest.raises(InvalidProblem, match="wait for each other in a cycle"):
        solve_frontier(looped, 5)


@pytest.mark.parametrize("schedule", ["1f1b", "GPipe", "ZBH1"])
def test_repeating_the_steady_state_proves_what_solving_it_all_proves(schedule: str) -> None:
    problem = problem_of(schedule, stages=3, microbatches=40)
    quick, slow = Engine(problem, short=0), Engine(problem, short=math.inf)
    assert isinstance(quick.relaxation, Composed)
    assert isinstance(slow.relaxation, Whole)
    prices = [round(watts / quick.tables.unit_w) for watts in (50.0, 300.0, 700.0, 2000.0)]
    at_s = np.floor(np.linspace(quick.fastest_ticks, quick.slowest_ticks, 200)) * quick.tables.tick_s
    exact_j = np.array([slow.relaxation.near([], one_s)[0].bound.at(one_s) for one_s in at_s.tolist()])
    energy_j = exact_j + problem.blocking_power_w * problem.stages * at_s
    for sample in quick.relaxation.at_prices(prices):
        # It touches the frontier somewhere: never above it, and not visibly below it there.
        below = (exact_j - (sample.bound.constant_j - sample.bound.price_w * at_s)) / energy_j
        assert -1e-7 <= below.min() <= 1e-4


@pytest.mark.parametrize("profile", sorted(BLOCKING_W))
def test_gaps_are_small_on_real_measurements(sosp24: Path, profile: str) -> None:
    measured = read_profile(sosp24 / "stage_profile" / f"{profile}.csv", stages=8)
    schedule = build_schedule("1f1b", stages=8, microbatches=12)
    problem = build_problem(measured, schedule, blocking_power_w=BLOCKING_W[profile])
    planner = Planner(problem)
    frontier, proofs = planner.frontier(100), planner.proofs
    assert len(frontier) <= 100
    deployed = DeployedGap.of(frontier)
    assert frontier.gap.max() <= deployed.worst <= 6e-3
    assert deployed.mean <= 3e-3
    check_frontier(problem, replace_points(frontier, [0, 37, len(frontier) - 1]), proofs)
    simulator = Simulator(problem)
    highest = np.array([int(o.frequency_mhz.argmax()) for o in problem.options])[problem.option_of]
    baseline = simulator.run(highest)
    assert frontier.t_min_s <= float(baseline.iteration_time_s)
    saving = 100 * (1 - frontier.energy_j[0] / float(baseline.energy_j))
    published = {
        (name, int(count)): float(percent)
        for name, count, percent, _ in (
            line.split(",") for line in (sosp24 / "reference" / "table6.csv").read_text().split()[1:]
        )
    }
    assert saving > published[profile, 12]


def test_the_same_problem_gets_the_same_bytes() -> None:
    problem = problem_of(microbatches=7)
    assert solve_frontier(problem, 20).to_bytes() == solve_frontier(problem, 20).to_bytes()


def replace_points(frontier, points):  # type: ignore[no-untyped-def]
    """Some points of a frontier."""
    columns = ("time_s", "energy_j", "energy_lower_bound_j", "frequencies_mhz", "clock_changes")
    picked = {name: getattr(frontier, name)[points] for name in columns}
    return replace(frontier, statuses=tuple(frontier.statuses[i] for i in points), **picked)


def test_a_long_pipeline_has_points_throughout_and_reaches_t_min() -> None:
    """The highest price that the search begins with must not be so high that all others say nothing: points between the
    ends are found, and T_min is reached.
    """
    problem = problem_of(stages=16, microbatches=160)
    frontier, engine = solve_frontier(problem, 12), Engine(problem)
    assert len(frontier) == 12
    assert frontier.gap[1:].max() < 0.02
    assert frontier.t_min_s == extremes(problem)[0]
    assert frontier.t_min_s <= engine.fastest_ticks * engine.tables.tick_s < frontier.t_min_s * (1 + 1e-7)
