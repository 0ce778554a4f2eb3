"""The picture of a comparison: plans of several methods beside the frontier."""

from __future__ import annotations

from perseus_solver.comparison.table import Row
from perseus_solver.drawing import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, figure_of, png_of
from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier


def compare_png(problem: Problem, frontier: Frontier, rows: list[Row], single: tuple[Floats, Floats]) -> bytes:
    """Draw every method's plan with the frontier, against all clocks at their maximum.

    Args:
        problem: gives the title.
        frontier: this solver's plans.
        rows: the methods' plans, all clocks at their maximum first.
        single: time and energy of every plan with one clock for all instructions, float[clocks] seconds and joules.
    """
    figure, axes = figure_of(width=6.4, height=4.0)
    base_s, base_j = rows[0].iteration_time_s, rows[0].energy_j
    assert base_s is not None
    assert base_j is not None
    slowest = max(row.iteration_time_s or 0 for row in rows) / base_s - 1
    limit = 100 * max(3 * slowest, 0.1)  # the range of the other methods
    for (time_s, energy_j), style, label in (
        ((frontier.time_s, frontier.energy_j), {"color": BLUE, "marker": "o", "ls": "-"}, "this solver's plans"),
        (single, {"color": MUTED, "marker": ".", "ls": "", "ms": 5}, "one clock for all instructions"),
    ):
        time, energy = 100 * (time_s / base_s - 1), 100 * (energy_j / base_j - 1)
        shown = time <= limit
        axes.plot(time[shown], energy[shown], **({"lw": 1.2, "ms": 2.4, "label": label} | style))
    marks = (("s", ORANGE), ("D", GREEN), ("^", PURPLE), ("v", INK))
    for row, (mark, colour) in zip(rows, marks, strict=False):
        if row.iteration_time_s is None or row.energy_j is None:
            continue
        x, y = 100 * (row.iteration_time_s / base_s - 1), 100 * (row.energy_j / base_j - 1)
        axes.plot(x, y, mark, color=colour, ms=6, label=row.name, zorder=4)
        if row.ours is not None:
            ours = 100 * (row.ours.iteration_time_s / base_s - 1), 100 * (row.ours.energy_j / base_j - 1)
            axes.plot((x, ours[0]), (y, ours[1]), ":", color=colour, lw=0.9, zorder=2)
    axes.axhline(0, color=MUTED, lw=0.6)
    axes.axvline(0, color=MUTED, lw=0.6)
    axes.set_xlabel("iteration time against all-maximum (%)")
    axes.set_ylabel("iteration energy against all-maximum (%)")
    axes.set_title(problem.schedule.title)
    axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
    return png_of(figure)
