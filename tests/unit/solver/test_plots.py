"""Figures show what they should: colours of power, a row for each stage, common axes, valid PNG."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.drawn import boxes, drawn_figures, mark, numbers, texts

from perseus_solver import plots
from perseus_solver.cli import main
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.comparison.picture import compare_png
from perseus_solver.comparison.table import compare, single_clocks
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.usefixtures("short_search")

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
def figures() -> Iterator[list[Figure]]:
    """Figures as they were when they became PNG."""
    with drawn_figures() as drawn:
        yield drawn


def test_frontier_shows_plans_bound_baseline_and_the_chosen_plan(problem: Problem, figures: list[Figure]) -> None:
    frontier = solve_frontier(problem, points=12)
    base = Simulator(problem).run(all_maximum(problem))
    baseline = plots.Mark("all at the highest clock", float(base.iteration_time_s), float(base.energy_j))
    data = plots.frontier_png(problem, frontier, baseline=baseline, chosen=frontier[3])
    assert data.startswith(PNG)
    (axes,) = figures[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert np.array_equal(lines[f"{len(frontier)} plans"].get_xdata(), frontier.time_s)
    assert np.array_equal(lines[f"{len(frontier)} plans"].get_ydata(), frontier.energy_j)
    assert "all at the highest clock" in lines
    assert mark(axes, "this plan") == (frontier.time_s[3], frontier.energy_j[3])
    (saving,) = (text for text in texts(axes) if text.endswith("time"))
    changes = [frontier.energy_j[3] / baseline.energy_j - 1, frontier.time_s[3] / baseline.time_s - 1]
    assert numbers(saving) == pytest.approx([100 * change for change in changes], abs=0.06)


def test_pipeline_is_coloured_by_power_on_common_axes(problem: Problem, figures: list[Figure]) -> None:
    simulator = Simulator(problem)
    slow = np.full(problem.instructions, 3)
    choices = {"before": all_maximum(problem), "after": slow}
    data = plots.gantt_png(problem, [plots.Timeline.simulated(*choice, simulator) for choice in choices.items()])
    assert data.startswith(PNG)
    before, after, bar = figures[0].axes
    assert before.get_xlim() == after.get_xlim()
    assert before.get_xlim()[1] >= float(simulator.run(slow).iteration_time_s)
    drawn = [axes.collections[0] for axes in (before, after)]
    assert all(len(box.get_paths()) == problem.instructions for box in drawn)
    # darker is more power: the red of the high clocks is deeper than that of the low ones
    assert drawn[0].get_facecolor()[:, 1].mean() < drawn[1].get_facecolor()[:, 1].mean()
    assert bar.get_ylabel() == "power (W)"


def test_large_pipelines_are_drawn_without_labels(problem: Problem, figures: list[Figure]) -> None:
    rows = "".join(f"{s},{what},1000,0.1,10\n" for s in range(40) for what in ("forward", "backward"))
    profile = read_profile("stage,instruction,frequency,time,energy\n" + rows)
    large = build_problem(profile, build_schedule("1f1b", stages=40, microbatches=30), blocking_power_w=60)
    plots.gantt_png(large, [plots.Timeline.simulated("only", all_maximum(large), Simulator(large))])
    assert not figures[0].axes[0].texts
    assert len(figures[0].axes[0].get_yticks()) <= 16


def test_comparison_shows_every_method_that_has_a_plan(problem: Problem, figures: list[Figure]) -> None:
    rows = compare(problem)
    data = compare_png(problem, solve_frontier(problem, points=12), rows, single_clocks(Simulator(problem)))
    assert data.startswith(PNG)
    labels = {line.get_label() for line in figures[0].axes[0].get_lines()}
    assert {"this solver's plans", "all-maximum", "best single frequency", "EnvPipe's heuristic"} <= labels
    assert "lowtime" not in labels


def command_line(problem: Problem, folder: Path) -> list[str]:
    """Arguments that name a problem, whose profile is written to a folder."""
    rows = "".join(
        f"{t.stage},{t.kind.label},{f},{time},{energy}\n"
        for t in problem.options
        for f, time, energy in zip(t.frequency_mhz, t.time_s, t.energy_j, strict=True)
    )
    (folder / "p.csv").write_text("stage,instruction,frequency,time,energy\n" + rows)
    named = ["--profile", f"{folder}/p.csv", "--schedule", "1f1b", "--stages", "2", "--microbatches", "3"]
    return [*named, "--blocking-power", "60", "--plot", f"{folder}/plot.png"]


def test_a_comparison_comes_out_of_the_command(problem: Problem, tmp_path: Path) -> None:
    assert main.main(["compare", *command_line(problem, tmp_path)]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


HARDWARE = {
    "model": "made up", "switch_latency_s": {"p50": 0.02, "p99": 0.06}, "call_s": 0.002, "marks": "gpu", "noise": 0.01
}  # fmt: skip
"""Scatter makes every plan that is kept slower than all clocks at their maximum without it."""


@pytest.mark.parametrize("command", ["plan", "frontier"])
@pytest.mark.parametrize("on_hardware", [False, True])
def test_a_picture_states_what_the_command_and_its_json_do(
    command: str,
    on_hardware: bool,
    problem: Problem,
    figures: list[Figure],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*command_line(problem, tmp_path), "--gantt", f"{tmp_path}/g.png", "--output", f"{tmp_path}/o.json"]
    if on_hardware:
        (tmp_path / "h.json").write_text(json.dumps(HARDWARE))
        words += ["--hardware", f"{tmp_path}/h.json"]
    assert main.main([command, *words]) == 0
    said = capsys.readouterr().out
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("plot.png", "g.png"))
    (axes,), (_, planned, _) = figures[0].axes, figures[1].axes
    written = json.loads((tmp_path / "o.json").read_text())
    at_s, at_j = mark(axes, "this plan" if command == "plan" else "no slowdown")
    plan, shown = _plan_at(written, at_s, at_j)
    # The picture and the summary name the same plan, by the same figures.
    (saving,) = (text for text in texts(axes) if text.endswith("time"))
    (line,) = (line for line in said.splitlines() if line.startswith(shown))
    in_line = re.search(r"([-+][\d.]+) %\)[^(]*?J \(([-+][\d.]+) %\)", line)
    assert in_line is not None
    energy = float(in_line[2])
    assert numbers(saving)[0] == pytest.approx(energy, abs=0.06)
    assert f"{at_j:.1f} J" in line
    if command == "frontier":
        assert ("of clocks that change at once" in said) == on_hardware
    # The timetable is the plan's where clocks change at once, as its figures in the JSON are.
    title = next(text for text in texts(planned) if text.startswith("planned"))
    assert ("if clocks changed at once" in title) == on_hardware
    assert numbers(title) == pytest.approx([plan["iteration_time_s"], plan["energy_j"]], rel=1e-3, abs=0.5)
    assert boxes(planned)[1].max() == pytest.approx(plan["iteration_time_s"])
    for text in (*texts(axes), *texts(planned)):
        assert not re.search(r"[-−+][-−+]|[-−+]0(\.0+)? %", text), text


def _plan_at(written: dict[str, Any], at_s: float, at_j: float) -> tuple[dict[str, Any], str]:
    """The plan of a document that a mark is at, and how the line of the summary with its figures begins."""
    for plan in written.get("points", [written]):
        if (plan["iteration_time_s"], plan["energy_j"]) == pytest.approx((at_s, at_j)):
            return plan, "plan: "
        expected = plan.get("expected", {"iteration_time_s": {"p95": 0.0}, "energy_j": {"mean": 0.0}})
        if (expected["iteration_time_s"]["p95"], expected["energy_j"]["mean"]) == pytest.approx((at_s, at_j)):
            return plan, "grain: "
    raise AssertionError("no plan of the document is where the mark is")
