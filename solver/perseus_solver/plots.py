"""Pictures of a problem's plans, as PNG bytes: the frontier, and the pipeline before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.drawing import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, figure_of, png_of, signed_percent
from perseus_solver.kinds import Floats
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Choice, Simulator

if TYPE_CHECKING:
    from perseus_solver.model.result import Frontier, Point

_LABELLED_BOXES = 40
"""Microbatch numbers are drawn up to this many instructions a stage; beyond they would not be legible."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A time and an energy of an iteration that a picture shows.

    Attributes:
        name: as the legend has it.
        time_s, energy_j: where it is.
        time_margin_s, energy_margin_j: half of their 95 % intervals where they were measured, else 0.
    """

    name: str
    time_s: float
    energy_j: float
    time_margin_s: float = 0.0
    energy_margin_j: float = 0.0


def change_text(mark: Mark, reference: Mark) -> str:
    """Return by how much one mark is above another: ``−9.2 % energy, +0.4 % time``."""
    energy, time = mark.energy_j / reference.energy_j - 1, mark.time_s / reference.time_s - 1
    return f"{signed_percent(energy)} energy, {signed_percent(time)} time"


def frontier_png(
    problem: Problem,
    frontier: Frontier,
    *,
    baseline: Mark,
    chosen: Point,
    name: str = "this plan",
    measured: Mark | None = None,
    saving: str = "",
) -> bytes:
    """Draw energy against iteration time: the plans, the proven bound, the baseline, and a chosen plan.

    Args:
        problem: gives the title.
        frontier: the plans and their bounds.
        baseline: an iteration at default clocks, or with all clocks at their maximum.
        chosen: one of the plans, or another of the same problem: it is marked, and its gap is stated.
        name: of the chosen plan.
        measured: what the chosen plan did when it ran; None: it is not known.
        saving: what is said of the chosen plan, or of how it ran; empty: `change_text`.
    """
    figure, axes = figure_of(width=6.8, height=4.4)
    time_s, energy_j, bound_j = frontier.time_s, frontier.energy_j, frontier.energy_lower_bound_j
    lowest, highest_j = float(bound_j.min()), max(baseline.energy_j, float(energy_j.max()))
    floor = min(lowest, baseline.energy_j) - 0.08 * (highest_j - lowest)
    at_once = " even if clocks changed at once" if frontier.rehearsed else ""
    axes.fill_between(time_s, floor, bound_j, color=BLUE, alpha=0.10, lw=0, label=f"proven impossible{at_once}")
    least = frontier.least_energy
    plans: dict[str, Any] = {"color": BLUE, "marker": "o", "ms": 2.2, "zorder": 3}
    axes.plot(time_s[: least + 1], energy_j[: least + 1], "-", lw=1.4, label=f"{least + 1} plans", **plans)
    if later := len(frontier) - least - 1:
        label = f"straggler part, {later} plans"
        axes.plot(
            time_s[least:], energy_j[least:], ":", lw=1.0, alpha=0.6, markevery=slice(1, None), label=label, **plans
        )
    plan = Mark(name, chosen.iteration_time_s, chosen.energy_j)
    _plot_mark(axes, baseline, "s", ORANGE)
    _plot_mark(axes, plan, "D", GREEN)
    if measured is not None:
        _plot_mark(axes, measured, "^", PURPLE)
    _mark_saving(axes, baseline, measured or plan, saving or change_text(plan, baseline))
    _mark_least_energy(axes, frontier, baseline)
    axes.set_ylim(bottom=floor, top=highest_j + 0.10 * (highest_j - floor))
    axes.margins(x=0.05)
    _mark_ends(axes, frontier)
    axes.set_xlabel("iteration time (s)")
    axes.set_ylabel("iteration energy of one pipeline (J)")
    axes.set_title(problem.schedule.title)
    axes.legend(
        title=gap_text(frontier, chosen),
        alignment="left",
        loc="upper right",
        bbox_to_anchor=(0.94, 1.0),  # left of the line at T*
        fontsize=8,
        title_fontsize=8,
    )
    return png_of(figure)


def gap_text(frontier: Frontier, chosen: Point) -> str:
    """Say how far plans are from what is proven, and of which clocks that is.

    Where they were rehearsed, what the hardware costs is in their energies and not in the bound, so only the chosen
    plan is compared: no plan of that hardware need come closer.
    """
    if frontier.rehearsed:
        above = chosen.energy_j / chosen.energy_lower_bound_j - 1
        return f"on this hardware; plan {100 * above:.2g} % above the bound\nof clocks that change at once"
    gap = DeployedGap.of(frontier)
    figures = f"mean {100 * gap.mean:.2g} %, worst {100 * gap.worst:.2g} %"
    return f"clocks change at once; gap to the bound over all\ndeadlines: {figures}"


def _plot_mark(axes: Any, mark: Mark, marker: str, colour: str) -> None:
    style: dict[str, Any] = {"color": colour, "ms": 6, "zorder": 5, "label": mark.name}
    if mark.time_margin_s or mark.energy_margin_j:
        axes.errorbar(
            mark.time_s, mark.energy_j, mark.energy_margin_j, mark.time_margin_s, fmt=marker, elinewidth=0.9, **style
        )
    else:
        axes.plot(mark.time_s, mark.energy_j, marker, **style)


def _mark_saving(axes: Any, baseline: Mark, plan: Mark, text: str) -> None:
    """Point from the baseline to a plan."""
    axes.annotate(
        "",
        (plan.time_s, plan.energy_j),
        (baseline.time_s, baseline.energy_j),
        arrowprops={"arrowstyle": "->", "color": INK, "lw": 0.9, "shrinkA": 5, "shrinkB": 5},
    )
    axes.annotate(
        text.replace(": ", ":\n", 1).replace(", ", ",\n", 1),
        ((baseline.time_s + plan.time_s) / 2, (baseline.energy_j + plan.energy_j) / 2),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=INK,
    )


def _mark_least_energy(axes: Any, frontier: Frontier, baseline: Mark) -> None:
    """Mark the point of least energy."""
    least = frontier.least_energy
    at_s, at_j = float(frontier.time_s[least]), float(frontier.energy_j[least])
    axes.plot(at_s, at_j, "o", mfc="white", mec=BLUE, ms=5.5, zorder=4)
    axes.annotate(
        f"least energy, {signed_percent(at_j / baseline.energy_j - 1)}",
        (at_s, at_j),
        xytext=(0, -7),
        textcoords="offset points",
        ha="center",
        va="top",
        color=INK,
    )


def _mark_ends(axes: Any, frontier: Frontier) -> None:
    """Mark T_min and T*."""
    time_s = frontier.time_s
    for index, name, side in ((0, "$T_{min}$", 1), (len(frontier) - 1, "$T^*$", -1)):
        axes.axvline(float(time_s[index]), color=MUTED, lw=0.6, ls=(0, (2, 3)), zorder=0)
        axes.annotate(
            f"{name} = {time_s[index]:.3f} s",
            (float(time_s[index]), 0.0),
            xycoords=("data", "axes fraction"),
            xytext=(4 * side, 4),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            color=MUTED,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One iteration of a pipeline, as it was simulated or as it ran.

    Attributes:
        title: what it is.
        start_s, end_s: float[n], of every instruction, seconds from the begin.
        power_w: float[n], its mean power.
        time_s: until the next iteration begins.
        energy_j: of all stages until then.
    """

    title: str
    start_s: Floats
    end_s: Floats
    power_w: Floats
    time_s: float
    energy_j: float

    @classmethod
    def simulated(cls, title: str, choice: Choice, simulator: Simulator) -> Timeline:
        """Return what a plan does where clocks change at once."""
        run, energy_j = simulator.run(choice), simulator.instruction_energy_j(choice)
        power_w = energy_j / (run.end_s - run.start_s)
        return cls(title, run.start_s, run.end_s, power_w, float(run.iteration_time_s), float(run.energy_j))

    @property
    def heading(self) -> str:
        """What is written above it."""
        return f"{self.title}: {self.time_s:.4g} s, {self.energy_j:,.0f} J"


def gantt_png(problem: Problem, timelines: Sequence[Timeline]) -> bytes:
    """Draw pipelines one above the other on a common time axis, each instruction coloured by its power.

    Args:
        problem: the problem.
        timelines: of it.
    """
    import matplotlib as mpl

    height = 0.9 + len(timelines) * (0.55 + 0.21 * problem.stages)
    figure, panels = figure_of(width=9.0, height=min(height, 16.0), rows=len(timelines))
    end = max(timeline.time_s for timeline in timelines)
    limits = mpl.colors.Normalize(
        min(problem.blocking_power_w, *(float(timeline.power_w.min()) for timeline in timelines)),
        max(float(timeline.power_w.max()) for timeline in timelines),
    )
    colours = mpl.colormaps["YlOrRd"]
    for axes, timeline in zip(np.atleast_1d(panels), timelines, strict=True):
        shades = limits(timeline.power_w)
        _draw_instructions(axes, problem, timeline, colours(shades), colours(limits(problem.blocking_power_w)))
        _label(axes, problem, timeline, shades)
        axes.axvline(timeline.time_s, color=INK, lw=0.9)
        axes.set_title(timeline.heading)
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
    bar.ax.axhline(problem.blocking_power_w, color=INK, lw=0.9)
    bar.ax.annotate(
        "waiting",
        (0.0, problem.blocking_power_w),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=7,
    )
    return png_of(figure)


def _draw_instructions(axes: Any, problem: Problem, run: Timeline, colour: Any, waiting: Any) -> None:
    """Draw each instruction as a box of its colour, on rows of the colour of a waiting GPU."""
    from matplotlib.collections import PolyCollection

    for stage in range(problem.stages):
        axes.barh(stage, run.time_s, height=0.86, color=waiting, lw=0)
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
        PolyCollection(list(corners), facecolors=colour, edgecolors=INK if edge else "none", linewidths=edge)
    )


def _label(axes: Any, problem: Problem, run: Timeline, shade: Floats) -> None:
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
        if kind == InstructionKind.CONSTANT:  # too short for a number
            continue
        axes.text(
            x,
            stage,
            str(microbatch),
            ha="center",
            va="center",
            fontsize=5,
            style="normal" if kind == InstructionKind.FORWARD else "italic",
            color="white" if dark > 0.6 else INK,
        )
