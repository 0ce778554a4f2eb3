"""What the demo leaves behind says one thing: pictures, page, JSON, plan and console agree within rounding."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tests.drawn import boxes, drawn_figures, mark, numbers, texts

from perseus_core.grain import Grain
from perseus_sim.demo.report import document, measured_text, savings_text, share_text, write_report
from perseus_sim.demo.results import Estimate, Executed, Measurement, PlanRun, Prediction, Results
from perseus_sim.demo.time_scale import TimeScale
from perseus_solver.cli.documents import read_plan
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier, Rehearsed
from perseus_solver.model.simulator import Choice, Simulator
from perseus_solver.schedules import build_schedule

PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{s},{what},{f},{work * (1 + s) * (0.3 + 980 / f):.6f},{work * (1 + s) * (40 + f * f / 9000):.6f}\n"
    for s in range(2)
    for what, work in (("forward", 0.05), ("backward", 0.1))
    for f in range(1400, 700, -100)
)
POINT = 2
DELAYS, COSTS = 1.02, 1.03
"""How much more time and energy a real iteration takes than clocks that change at once, without delays."""


def made_problem() -> Problem:
    schedule = build_schedule("1f1b", stages=2, microbatches=3)
    return build_problem(read_profile(PROFILE), schedule, blocking_power_w=60)


def rehearsed(frontier: Frontier) -> Frontier:
    n, share = len(frontier), np.full(len(frontier), 0.01)
    of_all = Rehearsed(
        confidence=0.95, grains=(Grain.INSTRUCTION,) * n, p50_s=DELAYS * frontier.time_s,
        ideal_time_s=frontier.time_s, ideal_energy_j=frontier.energy_j, below_share=share, above_share=share,
    )  # fmt: skip
    return replace(
        frontier, time_s=1.001 * DELAYS * frontier.time_s, energy_j=COSTS * frontier.energy_j, rehearsed=of_all
    )


def executed(simulator: Simulator, choice: Choice, iteration: int) -> Executed:
    run, energy_j = simulator.run(choice), simulator.instruction_energy_j(choice)
    begin_s, end_s = DELAYS * run.start_s, DELAYS * run.end_s
    return Executed(
        iteration, begin_s, end_s, energy_j / (run.end_s - run.start_s), DELAYS * float(run.iteration_time_s),
        1.001 * COSTS * float(run.energy_j),
    )  # fmt: skip


def measurement(first: int, time_s: float, energy_j: float) -> Measurement:
    """Of two pipelines, which scatter a little."""
    scatter = 1 + 0.001 * np.sin(np.arange(12.0))
    return Measurement.of(
        range(first, first + 12), (time_s * scatter).tolist(), [(energy_j * s, 1.01 * energy_j * s) for s in scatter]
    )


@pytest.fixture(scope="module")
def results() -> Results:
    problem = made_problem()
    simulator, frontier = Simulator(problem), rehearsed(solve_frontier(problem, points=8))
    plan = frontier[POINT]
    highest = simulator.run(all_maximum(problem))
    base_s, base_j = float(highest.iteration_time_s), float(highest.energy_j)

    def run(time_s: float, energy_j: float, first: int) -> PlanRun:
        predicted = Prediction(1.001 * time_s, 2 * energy_j, 1 - energy_j / (COSTS * base_j))
        return PlanRun(predicted, measurement(first, time_s, energy_j))

    assert plan.expectation is not None
    return Results(
        title="2 pipelines × 2 stages × 3 microbatches",
        gpu="made up",
        speed=4,
        problem=problem,
        baseline=measurement(1, DELAYS * base_s, COSTS * base_j),
        first=run(plan.expectation.p50_s, 1.01 * plan.energy_j, 30),
        calibrated=run(plan.expectation.p50_s, plan.energy_j, 60),
        beside_straggler=measurement(90, 1.2 * base_s, 0.95 * base_j),
        in_force=run(plan.expectation.p50_s, 1.002 * plan.energy_j, 120),
        frontier=frontier,
        point=POINT,
        ran_default=executed(simulator, all_maximum(problem), 4),
        ran_plan=executed(simulator, simulator.choice_of(plan.frequencies_mhz), 125),
    )


@pytest.fixture(scope="module")
def written(results: Results, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Figure]]:
    folder = tmp_path_factory.mktemp("demo")
    with drawn_figures() as figures:
        paths = write_report(results, folder, [f"  1.0 s  the plan in force, {savings_text(results)}"])
    assert sorted(path.name for path in paths) == sorted(path.name for path in folder.iterdir())
    return folder, figures


def figures_of(text: str) -> list[float]:
    return [value for value in numbers(text) if value != 95]


def test_the_frontier_shows_the_plan_in_force_and_what_was_measured(
    results: Results, written: tuple[Path, list[Figure]]
) -> None:
    (axes,) = written[1][0].axes
    plan, found = results.plan, results.in_force.measured
    assert mark(axes, f"in force: point {POINT}, as planned") == (plan.iteration_time_s, plan.energy_j)
    # A frontier is of one pipeline, the job has two.
    expected = found.time_s.median, found.energy_j.median / 2
    assert mark(axes, "measured: the plan in force") == pytest.approx(expected)
    expected = results.baseline.time_s.median, results.baseline.energy_j.median / 2
    assert mark(axes, "measured: default clocks") == pytest.approx(expected)
    (line,) = (line for line in axes.get_lines() if str(line.get_label()).endswith(" plans"))
    assert np.array_equal(np.asarray(line.get_ydata()), results.frontier.energy_j[: results.frontier.least_energy + 1])


def test_a_gap_says_what_it_is_relative_to(results: Results, written: tuple[Path, list[Figure]]) -> None:
    said = texts(written[1][0].axes[0])
    (gap,) = (text for text in said if "above the bound" in text)
    assert "on this hardware" in gap
    assert "clocks that change at once" in gap
    assert numbers(gap)[0] == pytest.approx(
        100 * (results.plan.energy_j / results.plan.energy_lower_bound_j - 1), rel=0.05
    )
    assert not any("all deadlines" in text for text in said)


def test_the_pipeline_shows_what_ran(results: Results, written: tuple[Path, list[Figure]]) -> None:
    before, after, _ = written[1][1].axes
    for axes, ran in ((before, results.ran_default), (after, results.ran_plan)):
        begin_s, end_s = boxes(axes)
        assert begin_s == pytest.approx(ran.begin_s)
        assert end_s == pytest.approx(ran.end_s)
        title = next(text for text in texts(axes) if text.startswith("Measured"))
        assert f"iteration {ran.iteration}:" in title
        assert figures_of(title)[-2:] == pytest.approx([ran.time_s, ran.energy_j], rel=1e-3)
    assert boxes(before)[1] != pytest.approx(boxes(after)[1])


def test_pictures_page_json_and_console_say_the_same(results: Results, written: tuple[Path, list[Figure]]) -> None:
    folder, figures = written
    found = json.loads((folder / "report.json").read_text())
    page = (folder / "report.md").read_text()
    saved, slower = found["plan_in_force"]["saved"], found["plan_in_force"]["slower"]
    expected = [-100 * saved["median"], 100 * saved["margin"], 100 * slower["median"], 100 * slower["margin"]]
    picture = next(text for text in texts(figures[0].axes[0]) if "energy" in text and text.startswith("measured"))
    console = page.split("```")[1]
    stated = next(line for line in page.splitlines() if line.startswith("The plan in force"))
    for text in (picture, console.partition("in force,")[2], stated.partition("):")[2]):
        assert numbers(text) == pytest.approx(expected, abs=0.006), text
    # And these are what was measured.
    base, plan = found["measured"]["default_clocks"], found["measured"]["plan_in_force"]
    assert saved["median"] == pytest.approx(1 - plan["energy_j"]["median"] / base["energy_j"]["median"])
    assert slower["median"] == pytest.approx(
        plan["iteration_time_s"]["median"] / base["iteration_time_s"]["median"] - 1
    )


def test_every_figure_of_the_page_is_in_the_json(results: Results, written: tuple[Path, list[Figure]]) -> None:
    found = json.loads((written[0] / "report.json").read_text())
    assert found == json.loads(json.dumps(document(results)))
    page = (written[0] / "report.md").read_text()
    rows = {line.split("|")[1].strip(): numbers(line.partition("|")[2].partition("|")[2])
            for line in page.splitlines() if re.match(r"\| (measured|predicted)", line)}  # fmt: skip
    base = found["measured"]["default_clocks"]
    names = {
        "default_clocks": "default clocks",
        "first_plan": "the first plan",
        "calibrated_plan": "the plan with calibrated times",
        "beside_a_throttled_gpu": "beside a throttled GPU",
        "plan_in_force": "the plan in force at the end",
    }
    assert set(names) == set(found["measured"])
    for key, name in names.items():
        values, figures = rows[f"measured: {name}"], found["measured"][key]
        time, energy = figures["iteration_time_s"], figures["energy_j"]
        assert values[:2] == pytest.approx([time["median"], time["margin"]], abs=5e-5)
        assert values[2:4] == pytest.approx([energy["median"], energy["margin"]], abs=0.5)
        if key != "default_clocks":
            changes = [figures[of]["median"] / base[of]["median"] - 1 for of in ("iteration_time_s", "energy_j")]
            assert [values[4], values[6]] == pytest.approx([100 * change for change in changes], abs=0.006)
    predicted = found["predicted"]["plan_in_force"]
    values = rows["predicted: the plan in force"]
    expected = [predicted["iteration_time_s"], predicted["energy_j"], -100 * predicted["saved"]]
    assert values == pytest.approx(expected, rel=1e-3)


def test_the_plan_is_as_perseus_plan_writes_it(results: Results, written: tuple[Path, list[Figure]]) -> None:
    path = written[0] / "plan.json"
    assert np.array_equal(read_plan(path, results.problem), results.plan.frequencies_mhz)
    plan: dict[str, Any] = json.loads(path.read_text())
    simulator = Simulator(results.problem)
    run = simulator.run(simulator.choice_of(results.plan.frequencies_mhz))
    assert plan["iteration_time_s"] == pytest.approx(float(run.iteration_time_s))
    assert plan["energy_j"] == pytest.approx(float(run.energy_j))
    assert plan["gap"] >= 0
    assert plan["expected"]["iteration_time_s"]["p95"] == results.plan.iteration_time_s
    assert plan["expected"]["energy_j"]["mean"] == results.plan.energy_j
    assert plan["grain"] == "instruction"


def test_no_picture_writes_a_negative_zero(written: tuple[Path, list[Figure]]) -> None:
    for figure in written[1]:
        for text in (text for axes in figure.axes for text in texts(axes)):
            assert not re.search(r"[-−+][-−+]|[-−+]0(\.0+)? %", text), text


def test_a_saving_has_the_interval_of_what_it_is_made_of() -> None:
    plan, base = Estimate(90.0, 0.9), Estimate(100.0, 0.5)
    saving = plan.against(base)
    assert saving.median == pytest.approx(-0.1)
    assert saving.margin == pytest.approx(0.9 * (0.01**2 + 0.005**2) ** 0.5)
    assert share_text(saving) == "−10.00 % ± 1.01"
    assert saving.within(0.12)
    assert not saving.within(0.105)  # the median is, the interval is not
    assert saving.within(0.015, center=-0.1)


def test_a_measurement_says_its_intervals() -> None:
    values = [1.0 + 0.01 * k for k in range(9)]
    found = Measurement.of(range(3, 12), values, [(10 * value, 20 * value) for value in values])
    # Of nine values the second and the eighth hold the median in 96 of 100 cases, the third and seventh in 82.
    assert found.time_s == Estimate(1.04, pytest.approx(0.03))
    assert found.energy_j.median == pytest.approx(31.2)
    assert [one.median for one in found.of_pipeline] == pytest.approx([10.4, 20.8])
    assert measured_text(found) == "1.04 s ± 2.88 % and 31 J ± 2.88 % an iteration (median of 9)"
    assert Estimate.of([1.0, 2.0, 3.0]).margin == float("inf")


@given(st.integers(8, 100))
def test_an_interval_holds_the_median_in_95_of_100_cases_and_is_the_narrowest_that_does(n: int) -> None:
    def held(rank: int) -> float:
        return 1 - 2 * sum(math.comb(n, k) for k in range(rank)) / 2**n

    margin = Estimate.of([float(k) for k in range(n)]).margin
    rank = round((n - 1) / 2 - margin) + 1
    assert held(rank) >= 0.95 > held(rank + 1)


def test_fast_gpus_are_seen_in_the_time_of_the_profile() -> None:
    scale, problem = TimeScale(4), made_problem()
    fast = build_problem(read_profile(scale.profile(PROFILE)), problem.schedule, blocking_power_w=60)
    for slow, quick in zip(problem.options, fast.options, strict=True):
        assert 4 * quick.time_s == pytest.approx(slow.time_s)
        assert quick.energy_j / quick.time_s == pytest.approx(slow.energy_j / slow.time_s)
    frontier = rehearsed(solve_frontier(fast, points=4))
    seen = scale.frontier(frontier)
    assert seen.time_s == pytest.approx(4 * frontier.time_s)
    assert seen.gap == pytest.approx(frontier.gap)
    assert seen[1].expectation is not None
    assert seen[1].expectation.ideal_energy_j == pytest.approx(4 * frontier.energy_j[1] / COSTS)
    assert scale.s(250_000) == 1.0
    assert scale.j(250) == 1.0
