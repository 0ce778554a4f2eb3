"""The result of the demo: a page with its log and figures, and two pictures. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator
from perseus_solver.plots import frontier_png, gantt_png


def percent(ratio: float) -> str:
    """0.142 as ``14.2 %``."""
    return f"{100 * ratio:.1f} %"


@dataclass(frozen=True)
class Measurement:
    """Medians over iterations of the job, from the GPUs' counters. Energies are of all stages of a pipeline."""

    time_s: float
    of_pipeline: tuple[float, ...]
    iterations: int

    @property
    def energy_j(self) -> float:
        """Of the whole job."""
        return sum(self.of_pipeline)

    def __str__(self) -> str:
        return f"{self.time_s:.4g} s and {self.energy_j:,.0f} J an iteration (median of {self.iterations})"


@dataclass(frozen=True)
class Report:
    """Everything the page shows."""

    problem: Problem
    simulator: Simulator
    frontier: Frontier
    baseline: Measurement
    planned: Measurement
    straggler: Measurement
    predicted: Measurement

    def write(self, folder: Path, story: Sequence[str], *, title: str) -> list[Path]:
        """Write report.md, frontier.png and pipeline.png; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        run = self.simulator.run(all_maximum(self.problem))
        point = self.frontier[self.frontier.lookup(self.predicted.time_s)]
        pictures = {
            "frontier.png": frontier_png(
                self.problem,
                self.frontier,
                baseline_time_s=float(run.iteration_time_s),
                baseline_energy_j=float(run.energy_j),
                chosen=point,
            ),
            "pipeline.png": gantt_png(
                self.problem,
                [
                    ("All at the highest clock", all_maximum(self.problem)),
                    ("The plan: no slowdown", self.simulator.choice_of(point.frequencies_mhz)),
                ],
                self.simulator,
            ),
        }
        for name, png in pictures.items():
            (folder / name).write_bytes(png)
        (folder / "report.md").write_text(self._page(story, title))
        return [folder / name for name in ("report.md", *pictures)]

    def _page(self, story: Sequence[str], title: str) -> str:
        def row(name: str, found: Measurement, reference: Measurement) -> str:
            slower, more = found.time_s / reference.time_s - 1, found.energy_j / reference.energy_j - 1
            return f"| {name} | {found.time_s:.4f} | {found.energy_j:.0f} | {slower:+.2%} | {more:+.2%} |"

        return "\n".join(
            [
                f"# Perseus demo: {title}",
                "",
                "Energies are of all GPUs, from the simulated GPUs' own counters.",
                "",
                "| | iteration time, s | energy, J | time | energy |",
                "|---|---:|---:|---:|---:|",
                row("measured: default clocks", self.baseline, self.baseline),
                row("measured: the plan", self.planned, self.baseline),
                row("predicted: the plan", self.predicted, self.baseline),
                row("measured: beside a throttled GPU", self.straggler, self.baseline),
                "",
                "![The frontier](frontier.png)",
                "",
                "![The pipeline before and after](pipeline.png)",
                "",
                "```",
                *story,
                "```",
                "",
            ]
        )
