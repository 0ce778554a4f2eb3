"""What the demo leaves behind: a page with its log and figures, the same as JSON, the plan in force, and two pictures.

All of it is a function of ``results.Results``: nothing is measured, simulated or looked up here, and each figure is
made of the same values in the console, on the page, in the JSON and in the pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perseus_sim.demo.results import Estimate, Executed, Measurement, PlanRun, Results
from perseus_solver.cli.documents import deployed_plan_document
from perseus_solver.drawing import signed_percent
from perseus_solver.plots import Mark, Timeline, frontier_png, gantt_png

FILES = ("report.md", "report.json", "plan.json", "frontier.png", "pipeline.png")


def share_text(share: Estimate) -> str:
    """−0.092 ± 0.002 as ``−9.20 % ± 0.20``."""
    return f"{signed_percent(share.median, 2)} ± {100 * share.margin:.2f}"


def measured_text(measurement: Measurement) -> str:
    """Time and energy of an iteration, with their 95 % intervals."""
    time, energy = measurement.time_s, measurement.energy_j
    return (
        f"{time.median:.4g} s ± {100 * time.relative_margin:.2f} % and {energy.median:,.0f} J ± "
        f"{100 * energy.relative_margin:.2f} % an iteration (median of {len(measurement.numbers)})"
    )


def against_text(run: PlanRun, baseline: Measurement) -> str:
    """What a plan saves, and what was predicted of it."""
    energy, time = run.measured.energy_j.against(baseline.energy_j), run.measured.time_s.against(baseline.time_s)
    off = run.measured.time_s.against(Estimate(run.predicted.time_s, 0.0))
    return (
        f"energy {share_text(energy)} (predicted {signed_percent(-run.predicted.saved, 2)}), time {share_text(time)}; "
        f"predicted {run.predicted.time_s:.4g} s, {share_text(off)} off"
    )


def savings_text(results: Results) -> str:
    """What the plan in force does against default clocks: ``energy −9.20 % ± 0.20, time +0.40 % ± 0.10``."""
    return f"energy {share_text(_negative(results.saved))}, time {share_text(results.slower)}"


def write_report(results: Results, folder: Path, story: Sequence[str]) -> list[Path]:
    """Write ``FILES``; returns their paths.

    Args:
        results: what was observed.
        folder: where to; made if it is not there.
        story: what the console said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = (
        _page(results, story).encode(),
        (json.dumps(document(results), indent=2) + "\n").encode(),
        b"".join(deployed_plan_document(results.problem, results.plan)),
        _frontier(results),
        _pipeline(results),
    )
    for name, content in zip(FILES, contents, strict=True):
        (folder / name).write_bytes(content)
    return [folder / name for name in FILES]


def document(results: Results) -> dict[str, Any]:
    """Return every figure of the page."""
    plan = results.plan
    return {
        "title": results.title,
        "gpu": results.gpu,
        "times_faster_than_the_gpu": results.speed,
        "confidence": 0.95,
        "measured": {name: _measurement(measurement) for name, measurement in _measured(results).items()},
        "predicted": {
            name: {
                "iteration_time_s": run.predicted.time_s,
                "energy_j": run.predicted.energy_j,
                "saved": run.predicted.saved,
            }
            for name, run in _plans(results).items()
        },
        "plan_in_force": {
            "saved": _estimate(results.saved),
            "slower": _estimate(results.slower),
            "point": results.point,
            "points": len(results.frontier),
            "iteration_time_s": plan.iteration_time_s,
            "energy_j": plan.energy_j,
            "energy_lower_bound_j": plan.energy_lower_bound_j,
        },
        "pictured": {
            "default_clocks": _pictured(results.ran_default),
            "plan_in_force": _pictured(results.ran_plan),
        },
    }


def _plans(results: Results) -> dict[str, PlanRun]:
    return {"first_plan": results.first, "calibrated_plan": results.calibrated, "plan_in_force": results.in_force}


def _measured(results: Results) -> dict[str, Measurement]:
    plans = {name: run.measured for name, run in _plans(results).items()}
    return {"default_clocks": results.baseline, **plans, "beside_a_throttled_gpu": results.beside_straggler}


def _measurement(measurement: Measurement) -> dict[str, Any]:
    return {
        "iteration_time_s": _estimate(measurement.time_s),
        "energy_j": _estimate(measurement.energy_j),
        "iterations": len(measurement.numbers),
    }


def _estimate(estimate: Estimate) -> dict[str, float]:
    return {"median": estimate.median, "margin": estimate.margin}


def _pictured(ran: Executed) -> dict[str, Any]:
    return {"iteration": ran.iteration, "iteration_time_s": ran.time_s, "energy_j": ran.energy_j}


def _negative(share: Estimate) -> Estimate:
    return Estimate(-share.median, share.margin)


# ------------------------------------------------------------------------------------------------ pictures


def _frontier(results: Results) -> bytes:
    """The frontier of the plan in force, the plan on it, and what was measured of it and at default clocks."""
    pipelines = len(results.baseline.of_pipeline)
    return frontier_png(
        results.problem,
        results.frontier,
        baseline=_mark("measured: default clocks", results.baseline, pipelines),
        chosen=results.plan,
        name=f"in force: point {results.point}, as planned",
        measured=_mark("measured: the plan in force", results.in_force.measured, pipelines),
        saving=f"measured: {savings_text(results)}",
    )


def _mark(name: str, measurement: Measurement, pipelines: int) -> Mark:
    """Of one pipeline, as a frontier is."""
    energy = measurement.energy_j
    return Mark(
        name, measurement.time_s.median, energy.median / pipelines, measurement.time_s.margin, energy.margin / pipelines
    )


def _pipeline(results: Results) -> bytes:
    """One iteration at default clocks and one under the plan, as the GPUs of the first pipeline ran them."""
    return gantt_png(
        results.problem,
        [
            _timeline("Measured at default clocks", results.ran_default),
            _timeline("Measured under the plan in force", results.ran_plan),
        ],
    )


def _timeline(title: str, ran: Executed) -> Timeline:
    where = f"{title}, pipeline 0, iteration {ran.iteration}"
    return Timeline(where, ran.begin_s, ran.end_s, ran.power_w, ran.time_s, ran.energy_j)


# ------------------------------------------------------------------------------------------------ the page


def _page(results: Results, story: Sequence[str]) -> str:
    names = {
        "default_clocks": "measured: default clocks",
        "first_plan": "measured: the first plan",
        "calibrated_plan": "measured: the plan with calibrated times",
        "beside_a_throttled_gpu": "measured: beside a throttled GPU",
        "plan_in_force": "measured: the plan in force at the end",
    }
    measurements = _measured(results)
    rows = [_row(name, measurements[key], results.baseline) for key, name in names.items()]
    predicted = results.in_force.predicted
    rows.append(
        f"| predicted: the plan in force | {predicted.time_s:.4f} | {predicted.energy_j:,.0f} | | "
        f"{signed_percent(-predicted.saved, 2)} |"
    )
    return "\n".join(
        [
            f"# Perseus demo: {results.title}",
            "",
            f"Simulated: {results.gpu}. GPUs and hosts ran {results.speed} times as fast as that; times and energies "
            "here are those of GPUs at their own speed.",
            "Energies are of all GPUs, from the simulated GPUs' own counters. ± is the 95 % interval of a median.",
            "",
            "| | iteration time, s | energy, J | time | energy |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
            f"The plan in force (point {results.point} of {len(results.frontier)}): {savings_text(results)}.",
            "",
            "![The frontier, for one pipeline](frontier.png)",
            "",
            "![One iteration of a pipeline before and after, as its GPUs ran it](pipeline.png)",
            "",
            "The plan is in [plan.json](plan.json), all figures are in [report.json](report.json).",
            "",
            "```",
            *story,
            "```",
            "",
        ]
    )


def _row(name: str, measurement: Measurement, baseline: Measurement) -> str:
    time, energy = measurement.time_s, measurement.energy_j
    measured = f"| {name} | {time.median:.4f} ± {time.margin:.4f} | {energy.median:,.0f} ± {energy.margin:,.0f} |"
    if measurement is baseline:
        return f"{measured} | |"
    return f"{measured} {share_text(time.against(baseline.time_s))} | {share_text(energy.against(baseline.energy_j))} |"
