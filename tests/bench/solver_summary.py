"""What `make bench` says about the solver, in two tables and a picture: the first part of docs/benchmarks.md."""

from __future__ import annotations

import io
import re
from typing import Any

Result = dict[str, Any]

PICTURE = "images/benchmarks-solver.png"
NAMES = {"gpt3-175b_a100-sxm": "GPT-3 175B, A100", "bloom-176b_a40": "Bloom 176B, A40"}
CELL = re.compile(r"solver_deployed_gap_mean_percent_(?P<profile>.+)_(?P<microbatches>\d+)$")
SIZE = re.compile(r"solver_(?:growth|scale)_(?P<stages>\d+)x(?P<microbatches>\d+)_s$")

TEXT = """## Solver in short

The *deployed gap* is that of the plan that runs, over all deadlines from T_min to least energy, against a
[proven lower bound](design/0005-frontier-by-min-cost-flow.md). Seconds are CPU time of the whole frontier, on one
thread. lowtime is the solver of the SOSP'24 paper's artifact; where it was stopped, its time is a lower bound.

![Deployed gaps, and seconds by size](images/benchmarks-solver.png)

Eight stages, 1F1B, profiles of the SOSP'24 paper:

| profile | microbatches | seconds | lowtime | points | gap, mean | gap, worst | saved at T_min \
| SOSP'24, table 6 | dearer than lowtime |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
{cells}

Growth, with GPT-3's eight stages repeated:

| stages × microbatches | instructions | seconds | µs an instruction | memory | gap, mean | gap, worst |
|---|--:|--:|--:|--:|--:|--:|
{sizes}

{families}

Machine: {machine}.

"""
FAMILIES = """{profiles:,.0f} made-up profiles of eight families under all schedules, each planned along its frontier
and for four deadlines: {failures:.0f} failed, and {dearer:.0f} plans were dearer than a known one. The deployed gap was
{mean:.2f} % on average; its worst was {median:.2f} % for the median profile and {worst:.1f} % for the worst one. CPU
time of a frontier: {cpu:.2f} s on average, {most:.1f} s at most."""


def in_short(figures: dict[str, Result], machine: str) -> str:
    """Return the first part of the page; nothing if the solver was not measured."""
    cells = [_cell(figures, found["profile"], found["microbatches"]) for found in _matches(CELL, figures)]
    sizes = [_size(figures, found) for found in _sizes(figures)]
    if not cells or not sizes:
        return ""
    return TEXT.format(cells="\n".join(cells), sizes="\n".join(sizes), families=_families(figures), machine=machine)


def _matches(pattern: re.Pattern[str], figures: dict[str, Result]) -> list[re.Match[str]]:
    return [found for name in figures if (found := pattern.match(name))]


def _sizes(figures: dict[str, Result]) -> list[re.Match[str]]:
    return sorted(_matches(SIZE, figures), key=lambda found: (int(found["stages"]), int(found["microbatches"])))


def _cell(figures: dict[str, Result], profile: str, microbatches: str) -> str:
    def value(name: str, field: str = "value") -> Any:
        return figures[f"solver_{name}_{profile}_{microbatches}"][field]

    speed = "speedup_vs_lowtime"
    stopped = "> " if "stopped" in value(speed, "peer") else ""
    return (
        f"| {NAMES[profile]} | {microbatches} | {value(speed):.1f} | {stopped}{value(speed, 'peer_value'):.0f} s "
        f"| {value('points')} | {value('deployed_gap_mean_percent'):.3f} % | {value('deployed_gap_max_percent'):.3f} % "
        f"| {value('saving_at_t_min_percent'):.1f} % | {value('saving_at_t_min_percent', 'peer_value'):.1f} % "
        f"| {value('times_dearer_than_lowtime')} {value('times_dearer_than_lowtime', 'unit')} |"
    )


def _size(figures: dict[str, Result], found: re.Match[str]) -> str:
    stem, instructions = found[0].removesuffix("_s"), 2 * int(found["stages"]) * int(found["microbatches"])
    seconds = figures[found[0]]["value"]
    return (
        f"| {found['stages']} × {int(found['microbatches']):,} | {instructions:,} | {seconds:.1f} "
        f"| {1e6 * seconds / instructions:,.0f} | {figures[f'{stem}_mib']['value']:,.0f} MiB "
        f"| {figures[f'{stem}_deployed_gap_mean_percent']['value']:.2f} % "
        f"| {figures[f'{stem}_deployed_gap_max_percent']['value']:.2f} % |"
    )


def _families(figures: dict[str, Result]) -> str:
    def value(name: str) -> float:
        return float(figures[f"solver_families_{name}"]["value"])

    if "solver_families_failures" not in figures:
        return ""
    return FAMILIES.format(
        profiles=float(figures["solver_families_failures"]["unit"].removeprefix("of ")),
        failures=value("failures"),
        dearer=value("plans_dearer_than_known"),
        mean=value("deployed_gap_mean_percent"),
        median=value("deployed_gap_worst_median_percent"),
        worst=value("deployed_gap_worst_max_percent"),
        cpu=value("cpu_mean_s"),
        most=value("cpu_max_s"),
    )


def picture(figures: dict[str, Result]) -> bytes:
    """Return a PNG: deployed gaps by microbatches, and seconds by instructions; nothing without the figures."""
    cells, sizes = _matches(CELL, figures), _sizes(figures)
    if not cells or not sizes:
        return b""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    drawing, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for (profile, label), colour in zip(NAMES.items(), ("#0b62a4", "#d9600a"), strict=True):
        counts = [found["microbatches"] for found in cells if found["profile"] == profile]
        for kind, line in (("mean", "-o"), ("max", ":s")):
            gaps = [figures[f"solver_deployed_gap_{kind}_percent_{profile}_{count}"]["value"] for count in counts]
            left.plot(counts, gaps, line, color=colour, ms=4, label=f"{label}, {'worst' if kind == 'max' else kind}")
    left.set(xlabel="microbatches", ylabel="deployed gap (%)", ylim=(0, None))
    for stages, colour in (("8", "#0b62a4"), ("64", "#1b8a5a")):
        found = [one for one in sizes if one["stages"] == stages]
        counts_of = [2 * int(one["stages"]) * int(one["microbatches"]) for one in found]
        right.loglog(
            counts_of, [figures[one[0]]["value"] for one in found], "-o", color=colour, ms=4, label=f"{stages} stages"
        )
    right.set(xlabel="instructions", ylabel="CPU seconds, whole frontier")
    for axes, place in ((left, "lower center"), (right, "upper left")):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7, loc=place, ncols=2, columnspacing=1.0, handlelength=1.8)
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=160, metadata={"Software": None})
    plt.close(drawing)
    return buffer.getvalue()
