"""The clock changes that a bounded loss of energy avoids.

``python -m tests.bench.switches --plot F.png`` prints the table of docs/clocks-take-time.md and draws its plot.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from tests.bench.solver import PROFILES, Result, figure, problem_of, solved

from perseus_solver.model.result import Frontier
from perseus_solver.switching import reduce_clock_changes

LOSSES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
SIZES = (12, 96)
LABELS = {"gpt3-175b_a100-sxm": "GPT-3 175B, A100", "bloom-176b_a40": "Bloom 176B, A40"}


def curve(profile: str, microbatches: int) -> dict[float, Frontier]:
    """Return the frontier with fewer clock changes for every permitted loss; 0 is the original frontier."""
    problem, frontier = problem_of(profile, microbatches), solved(profile, microbatches)[0]
    return {0.0: frontier} | {loss: reduce_clock_changes(problem, frontier, loss=loss) for loss in LOSSES}


def saved(profile: str, microbatches: int) -> Result:
    """Measure the median number of clock changes at the default loss; the peer is the original frontier."""
    problem, frontier = problem_of(profile, microbatches), solved(profile, microbatches)[0]
    before, after = (float(np.median(f.clock_changes)) for f in (frontier, reduce_clock_changes(problem, frontier)))
    return figure(after, "changes", "least energy", before)


FIGURES = {
    f"switches_median_{profile.split('-')[0]}_{microbatches}": lambda p=profile, m=microbatches: saved(p, m)
    for profile in PROFILES
    for microbatches in SIZES
}


def loss_table(curves: dict[tuple[str, int], dict[float, Frontier]]) -> str:
    """Return a table of the median (and mean) number of clock changes of a frontier's plans."""
    lines = ["| profile | microbatches | instructions | as solved | " + " | ".join(f"{100 * x:g} %" for x in LOSSES)]
    lines = [lines[0] + " |", "|---|" + "---:|" * (3 + len(LOSSES))]
    for (profile, microbatches), found in curves.items():
        cells = [f"{np.median(f.clock_changes):.0f} ({f.clock_changes.mean():.0f})" for f in found.values()]
        instructions = found[0.0].frequencies_mhz.shape[1]
        lines.append(f"| {LABELS[profile]} | {microbatches} | {instructions} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(curves: dict[tuple[str, int], dict[float, Frontier]], target: Path) -> None:
    """Plot clock changes per instruction against the permitted loss."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    chart, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for (profile, microbatches), found in curves.items():
        share = [100 * np.median(f.clock_changes) / f.frequencies_mhz.shape[1] for f in found.values()]
        axes.plot(
            [100 * x for x in found], share, marker="o", markersize=4, label=f"{LABELS[profile]}, {microbatches} mb"
        )
    axes.set(xlabel="permitted loss of energy, %", ylabel="clock changes per instruction, %", ylim=(0, 100))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    chart.savefig(target, dpi=120)


def main() -> None:
    """Print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, help="file of the plot")
    options = parser.parse_args()
    curves = {(profile, m): curve(profile, m) for profile in PROFILES for m in SIZES}
    print(loss_table(curves))
    for profile in PROFILES:
        problem, frontier = problem_of(profile, 96), solved(profile, 96)[0]
        begun_s = time.process_time()
        reduce_clock_changes(problem, frontier)
        spent_s = time.process_time() - begun_s
        print(
            f"\n{LABELS[profile]}, 96 microbatches: "
            f"{len(frontier)} plans with fewer clock changes in {spent_s:.1f} s of CPU"
        )
        first = reduce_clock_changes(problem, frontier, loss=0.01)[0]
        print(f"the fastest plan: {frontier[0].clock_changes} changes, with 1 % of loss {first.clock_changes}")
    if options.plot:
        draw(curves, options.plot)


if __name__ == "__main__":
    main()
