"""Figures: the frontier, the pipeline before and after, the comparison, the calibration, as PNG bytes.

This is the only module that imports matplotlib. Colours can be distinguished in print and by colour-blind readers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_solver.kinds import Floats, Kind
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Choice, Simulation, Simulator

if TYPE_CHECKING:
    from perseus_solver.calibration.model import Calibration
    from perseus_solver.calibration.trace import Trace
    from perseus_solver.comparison.table import Row
    from perseus_solver.model.result import Frontier, Point

_INK, _MUTED = "#22262a", "#7a828a"
_BLUE, _ORANGE, _GREEN, _PURPLE = "#0b62a4", "#d9600a", "#1b8a5a", "#7b4fa3"
_STYLE: Any = {
    "font.size": 9,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "savefig.dpi": 200,
}
_LABELLED_BOXES = 40
"""Microbatch numbers are drawn up to this many instructions a stage; beyond they would not be legible."""


def _figure(*, width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update(_STYLE)
    return plt.subplots(rows, 1, figsize=(width, height), sharex=True, layout="constrained")


def _png(figure: Any) -> bytes:
    import matplotlib.pyplot as plt

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return buffer.getvalue()


def frontier_png(
    problem: Problem,
    frontier: Frontier,
    *,
    baseline_time_s: float,
    baseline_energy_j: float,
    chosen: Point | None = None,
) -> bytes:
    """Draw energy against iteration time: the plans, the proven bound, the baseline, and a chosen plan.

    Args:
        problem: gives the title.
        frontier: the plans and their bounds.
        baseline_time_s, baseline_energy_j: an iteration with all clocks at their maximum.
        chosen: a plan to mark.
    """
    figure, axes = _figure(width=6.4, height=4.0)
    time_s, energy_j, bound_j = frontier.time_s, frontier.energy_j, frontier.energy_lower_bound_j
    floor = min(float(bound_j.min()), baseline_energy_j) - 0.06 * (baseline_energy_j - float(bound_j.min()))
    axes.fill_between(time_s, floor, bound_j, color=_BLUE, alpha=0.10, lw=0, label="proven impossible")
    least = frontier.least_energy
    plans: dict[str, Any] = {"color": _BLUE, "marker": "o", "ms": 2.2, "zorder": 3}
    axes.plot(time_s[: least + 1], energy_j[: least + 1], "-", lw=1.4, label=f"{least + 1} plans", **plans)
    if later := len(frontier) - least - 1:
        label = f"straggler part, {later} plans"
        axes.plot(
            time_s[least:], energy_j[least:], ":", lw=1.0, alpha=0.6, markevery=slice(1, None), label=label, **plans
        )
    axes.plot(baseline_time_s, baseline_energy_j, "s", color=_ORANGE, ms=6, label="all at the highest clock", zorder=4)

    if chosen is not None:
        axes.plot(chosen.iteration_time_s, chosen.energy_j, "D", color=_GREEN, ms=6, label="this plan", zorder=5)
    _mark_savings(axes, frontier, baseline_time_s, baseline_energy_j)
    _mark_ends(axes, frontier)
    axes.set_ylim(bottom=floor)
    axes.margins(x=0.04)
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("iteration energy (J)")
    gap = DeployedGap.of(frontier)
    axes.set_title(_name(problem))
    axes.legend(
        title=f"gap over all deadlines: mean {100 * gap.mean:.2g} %, worst {100 * gap.worst:.2g} %",
        alignment="left",
        loc="upper right",
        bbox_to_anchor=(0.94, 1.0),
    )
    return _png(figure)


def _mark_savings(axes: Any, frontier: Frontier, baseline_time_s: float, baseline_energy_j: float) -> None:
    """Mark the saving without slowdown, and the point of least energy."""
    time_s, energy_j = frontier.time_s, frontier.energy_j
    same_time = min(frontier.lookup(baseline_time_s), frontier.least_energy)
    saving = 100 * (1 - energy_j[same_time] / baseline_energy_j)
    axes.annotate(
        "",
        (float(time_s[same_time]), float(energy_j[same_time])),
        (baseline_time_s, baseline_energy_j),
        arrowprops={"arrowstyle": "->", "color": _INK, "lw": 0.9, "shrinkA": 5, "shrinkB": 3},
    )
    axes.annotate(
        f"−{saving:.1f} % energy,\nno slowdown",
        (baseline_time_s, (baseline_energy_j + float(energy_j[same_time])) / 2),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=_INK,
    )
    least = frontier.least_energy
    axes.plot(float(time_s[least]), float(energy_j[least]), "o", mfc="white", mec=_BLUE, ms=5.5, zorder=4)
    axes.annotate(
        f"least energy, −{100 * (1 - energy_j[least] / baseline_energy_j):.1f} %",
        (float(time_s[least]), float(energy_j[least])),
        xytext=(0, 16),
        textcoords="offset points",
        ha="center",
        color=_INK,
    )


def _mark_ends(axes: Any, frontier: Frontier) -> None:
    """Mark T_min and T*."""
    time_s = frontier.time_s
    for index, name, side in ((0, "$T_{min}$", 1), (len(frontier) - 1, "$T^*$", -1)):
        axes.axvline(float(time_s[index]), color=_MUTED, lw=0.6, ls=(0, (2, 3)), zorder=0)
        axes.annotate(
            f"{name} = {time_s[index]:.3f} s",
            (float(time_s[index]), 0.0),
            xycoords=("data", "axes fraction"),
            xytext=(4 * side, 4),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            color=_MUTED,
        )


def gantt_png(problem: Problem, plans: Sequence[tuple[str, Choice]], simulator: Simulator) -> bytes:
    """Draw pipelines one above the other on a common time axis, each instruction coloured by its power.

    Args:
        problem: the problem.
        plans: a title and the choice of options of each.
        simulator: of the problem.
    """
    import matplotlib as mpl

    runs = [(title, simulator.run(choice), simulator.instruction_energy_j(choice)) for title, choice in plans]
    powers = [energy_j / (run.end_s - run.start_s) for _, run, energy_j in runs]
    height = 0.9 + len(runs) * (0.55 + 0.21 * problem.stages)
    figure, panels = _figure(width=9.0, height=min(height, 16.0), rows=len(runs))
    end = max(float(run.iteration_time_s) for _, run, _ in runs)
    limits = mpl.colors.Normalize(
        min(problem.blocking_power_w, *(float(p.min()) for p in powers)), max(float(p.max()) for p in powers)
    )
    colours = mpl.colormaps["YlOrRd"]
    for axes, (title, run, _), power in zip(np.atleast_1d(panels), runs, powers, strict=True):
        _draw_instructions(axes, problem, run, colours(limits(power)), colours(limits(problem.blocking_power_w)))
        _label(axes, problem, run, limits(power))
        axes.axvline(float(run.iteration_time_s), color=_INK, lw=0.9)
        axes.set_title(f"{title}: {float(run.iteration_time_s):.4g} s, {float(run.energy_j):,.0f} J")
        axes.set_ylim(problem.stages - 0.4, -0.6)
        axes.set_yticks(range(0, problem.stages, math.ceil(problem.stages / 16)))
        axes.set_ylabel("stage")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(0, end * 1.005)
    np.atleast_1d(panels)[-1].set_xlabel("time (s)")
    bar = figure.colorbar(mpl.cm.ScalarMappable(limits, colours), ax=panels, fraction=0.025, pad=0.01)
    bar.set_label("power (W)")
    bar.outline.set_visible(False)
    bar.ax.axhline(problem.blocking_power_w, color=_INK, lw=0.9)
    bar.ax.annotate(
        "waiting",
        (0.0, problem.blocking_power_w),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=7,
    )
    return _png(figure)


def _draw_instructions(axes: Any, problem: Problem, run: Simulation, colour: Any, waiting: Any) -> None:
    """Draw each instruction as a box of its colour, on rows of the colour of a waiting GPU."""
    from matplotlib.collections import PolyCollection

    for stage in range(problem.stages):
        axes.barh(stage, float(run.iteration_time_s), height=0.86, color=waiting, lw=0)
    low, high = problem.schedule.stage - 0.43, problem.schedule.stage + 0.43
    corners = np.stack(
        [
            np.stack(corner, axis=1)
            for corner in ((run.start_s, low), (run.end_s, low), (run.end_s, high), (run.start_s, high))
        ],
        axis=1,
    )
    edge = 0.3 if problem.instructions / problem.stages <= 4 * _LABELLED_BOXES else 0.0
    axes.add_collection(
        PolyCollection(list(corners), facecolors=colour, edgecolors=_INK if edge else "none", linewidths=edge)
    )


def _label(axes: Any, problem: Problem, run: Simulation, shade: Floats) -> None:
    """Write microbatch numbers where there is room; forwards upright, everything else in italics."""
    schedule = problem.schedule
    if problem.instructions / problem.stages > _LABELLED_BOXES:
        return
    middle = (run.start_s + run.end_s) / 2
    rows = zip(
        middle.tolist(),
        schedule.stage.tolist(),
        schedule.microbatch.tolist(),
        schedule.kind.tolist(),
        shade.tolist(),
        strict=True,
    )
    for x, stage, microbatch, kind, dark in rows:
        if kind == Kind.CONSTANT:  # too short for a number
            continue
        axes.text(
            x,
            stage,
            str(microbatch),
            ha="center",
            va="center",
            fontsize=5,
            style="normal" if kind == Kind.FORWARD else "italic",
            color="white" if dark > 0.6 else _INK,
        )


def compare_png(problem: Problem, frontier: Frontier, rows: list[Row], single: tuple[Floats, Floats]) -> bytes:
    """Draw every method's plan with the frontier, against all clocks at their maximum.

    Args:
        problem: gives the title.
        frontier: this solver's plans.
        rows: the methods' plans, all clocks at their maximum first.
        single: time and energy of every plan with one clock for all instructions, float[clocks] seconds and joules.
    """
    figure, axes = _figure(width=6.4, height=4.0)
    base_s, base_j = rows[0].iteration_time_s, rows[0].energy_j
    assert base_s is not None
    assert base_j is not None
    slowest = max(row.iteration_time_s or 0 for row in rows) / base_s - 1
    limit = 100 * max(3 * slowest, 0.1)  # the range of the other methods
    for (time_s, energy_j), style, label in (
        ((frontier.time_s, frontier.energy_j), {"color": _BLUE, "marker": "o", "ls": "-"}, "this solver's plans"),
        (single, {"color": _MUTED, "marker": ".", "ls": "", "ms": 5}, "one clock for all instructions"),
    ):
        time, energy = 100 * (time_s / base_s - 1), 100 * (energy_j / base_j - 1)
        shown = time <= limit
        axes.plot(time[shown], energy[shown], **({"lw": 1.2, "ms": 2.4, "label": label} | style))
    marks = (("s", _ORANGE), ("D", _GREEN), ("^", _PURPLE), ("v", _INK))
    for row, (mark, colour) in zip(rows, marks, strict=False):
        if row.iteration_time_s is None or row.energy_j is None:
            continue
        x, y = 100 * (row.iteration_time_s / base_s - 1), 100 * (row.energy_j / base_j - 1)
        axes.plot(x, y, mark, color=colour, ms=6, label=row.name, zorder=4)
        if row.ours is not None:
            ours = 100 * (row.ours.iteration_time_s / base_s - 1), 100 * (row.ours.energy_j / base_j - 1)
            axes.plot((x, ours[0]), (y, ours[1]), ":", color=colour, lw=0.9, zorder=2)
    axes.axhline(0, color=_MUTED, lw=0.6)
    axes.axvline(0, color=_MUTED, lw=0.6)
    axes.set_xlabel("iteration time against all-maximum (%)")
    axes.set_ylabel("iteration energy against all-maximum (%)")
    axes.set_title(_name(problem))
    axes.legend(frameon=True, facecolor="white", edgecolor="none", framealpha=0.9)
    return _png(figure)


def _name(problem: Problem) -> str:
    schedule = problem.schedule
    chunks = f", {schedule.chunks} chunks" if schedule.chunks > 1 else ""
    return f"{schedule.name}, {problem.stages} stages{chunks}, {schedule.microbatches} microbatches"


def calibration_png(trace: Trace, calibration: Calibration, train_fraction: float) -> bytes:
    """Draw predicted against measured time of every iteration, and the error of each, plan by plan.

    Args:
        trace: the measured iterations.
        calibration: predicts them.
        train_fraction: as given to `calibrate`, to distinguish fitted iterations.
    """
    from perseus_solver.calibration.estimate import chosen_iterations, predict_s, replay_s

    figure, (left, right) = _side_by_side(width=9.0, height=4.0)
    measured_s = trace.iteration_time_s
    fitted = chosen_iterations(trace, train_fraction)
    every = np.ones_like(fitted)
    series: list[tuple[str, Floats, Any, str, str]] = [("graph alone", replay_s(trace), every, _ORANGE, "x")]
    if calibration.explains:
        predicted_s = predict_s(calibration, trace)
        series += [
            ("calibrated, held out", predicted_s, ~fitted, _BLUE, "o"),
            ("calibrated, fitted", predicted_s, fitted, _GREEN, "+"),
        ]
    # In the order of the legend; what comes first is drawn below the others.
    ends = [float(f(np.append(measured_s, series[0][1]))) for f in (np.min, np.max)]
    left.plot(ends, ends, "-", color=_MUTED, lw=0.8, label="measured = predicted")
    plan = np.unique(trace.plan, return_inverse=True)[1]
    for label, predicted, chosen, colour, marker in series:
        error = 100 * (predicted / measured_s - 1)
        mean = float(np.abs(error[chosen]).mean())
        style: Any = {"ls": "", "marker": marker, "color": colour, "ms": 4, "mew": 0.9, "alpha": 0.8}
        left.plot(measured_s[chosen], predicted[chosen], **style, label=f"{label} (mean error {mean:.3g} %)")
        right.plot(plan[chosen], error[chosen], **style)
    right.axhline(0, color=_MUTED, lw=0.8, zorder=0)
    left.set_title(f"{calibration.schedule}, {calibration.stages} stages, {calibration.microbatches} microbatches")
    left.set_xlabel("measured iteration time (s)")
    left.set_ylabel("predicted iteration time (s)")
    left.legend(fontsize=8)
    right.set_title(f"the model {calibration.status} this run")
    right.set_xlabel("plan, in the order run")
    right.set_ylabel("error of the prediction (%)")
    return _png(figure)


def _side_by_side(*, width: float, height: float) -> tuple[Any, Any]:
    figure, _ = _figure(width=width, height=height)
    figure.clear()
    return figure, figure.subplots(1, 2)
