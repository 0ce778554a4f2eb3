"""Figures show what they should: colours of power, a row for each stage, common axes, valid PNG."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

mpl.use("Agg")

from matplotlib.figure import Figure

from perseus_solver import plots
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.comparison.table import compare, single_clocks
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def problem() -> Problem:
    rows = "".join(
        f"{s},{what},{f},{work * (1 + s) * (0.3 + 980 / f):.6f},{work * (1 + s) * (40 + f * f / 9000):.6f}\n"
        for s in range(2)
        for what, work in (("forward", 0.05), ("backward", 0.1))
        for f in range(1400, 700, -100)
    )
    profile = read_profile("stage,instruction,frequency,time,energy\n" + rows)
    return build_problem(profile, build_schedule("1f1b", stages=2, microbatches=3), blocking_power_w=60)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures as they were when they became PNG."""
    captured: list[Figure] = []
    original = plots._png

    def capture(figure: Figure) -> bytes:
        captured.append(figure)
        return original(figure)

    monkeypatch.setattr(plots, "_png", capture)
    return captured


def test_frontier_shows_plans_bound_baseline_and_the_chosen_plan(problem: Problem, figures: list[Figure]) -> None:
    frontier = solve_frontier(problem, points=12)
    base = Simulator(problem).run(all_maximum(problem))
    data = plots.frontier_png(
        problem,
        frontier,
        baseline_time_s=float(base.iteration_time_s),
        baseline_energy_j=float(base.energy_j),
        chosen=frontier[3],
    )
    assert data.startswith(PNG)
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert np.array_equal(lines[f"{len(frontier)} plans"].get_xdata(), frontier.time_s)
    assert np.array_equal(lines[f"{len(frontier)} plans"].get_ydata(), frontier.energy_j)
    assert "all at the highest clock" in lines
    assert lines["this plan"].get_ydata() == [frontier.energy_j[3]]
    assert any("no slowdown" in text.get_text() for text in axes.texts)


def test_pipeline_is_coloured_by_power_on_common_axes(problem: Problem, figures: list[Figure]) -> None:
    simulator = Simulator(problem)
    slow = np.full(problem.instructions, 3)
    data = plots.gantt_png(problem, [("before", all_maximum(problem)), ("after", slow)], simulator)
    assert data.startswith(PNG)
    before, after, bar = figures[0].axes
    assert before.get_xlim() == after.get_xlim()
    assert before.get_xlim()[1] >= float(simulator.run(slow).iteration_time_s)
    boxes = [axes.collections[0] for axes in (before, after)]
    assert all(len(box.get_paths()) == problem.instructions for box in boxes)
    # darker is more power: the red of the high clocks is deeper than that of the low ones
    assert boxes[0].get_facecolor()[:, 1].mean() < boxes[1].get_facecolor()[:, 1].mean()
    assert bar.get_ylabel() == "power (W)"


def test_large_pipelines_are_drawn_without_labels(problem: Problem, figures: list[Figure]) -> None:
    rows = "".join(f"{s},{what},1000,0.1,10\n" for s in range(40) for what in ("forward", "backward"))
    profile = read_profile("stage,instruction,frequency,time,energy\n" + rows)
    large = build_problem(profile, build_schedule("1f1b", stages=40, microbatches=30), blocking_power_w=60)
    plots.gantt_png(large, [("only", all_maximum(large))], Simulator(large))
    assert not figures[0].axes[0].texts
    assert len(figures[0].axes[0].get_yticks()) <= 16


def test_comparison_shows_every_method_that_has_a_plan(problem: Problem, figures: list[Figure]) -> None:
    rows = compare(problem)
    data = plots.compare_png(problem, solve_frontier(problem, points=12), rows, single_clocks(Simulator(problem)))
    assert data.startswith(PNG)
    labels = {line.get_label() for line in figures[0].axes[0].get_lines()}
    assert {"this solver's plans", "all-maximum", "best single frequency", "EnvPipe's heuristic"} <= labels
    assert "lowtime" not in labels


def test_pictures_come_out_of_the_command(problem: Problem, tmp_path: Path) -> None:
    from perseus_solver.cli import main

    rows = "".join(
        f"{t.stage},{t.kind.label},{f},{time},{energy}\n"
        for t in problem.options
        for f, time, energy in zip(t.frequency_mhz, t.time_s, t.energy_j, strict=True)
    )
    (tmp_path / "p.csv").write_text("stage,instruction,frequency,time,energy\n" + rows)
    common = ["--profile", f"{tmp_path}/p.csv", "--schedule", "1f1b", "--stages", "2", "--microbatches", "3"]
    common += ["--blocking-power", "60", "--plot", f"{tmp_path}/plot.png"]
    for command, extra in (
        ("frontier", ["--gantt", f"{tmp_path}/gantt.png", "--output", f"{tmp_path}/f.json"]),
        ("plan", ["--gantt", f"{tmp_path}/gantt.png", "--output", f"{tmp_path}/p.json"]),
        ("compare", []),
    ):
        for png in tmp_path.glob("*.png"):
            png.unlink()
        assert main.main([command, *common, *extra]) == 0
        assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
        assert (tmp_path / "gantt.png").exists() == bool(extra)
