"""One job: its frontier and the point in force, prediction against measurement, clocks and power, stragglers."""

from __future__ import annotations

from typing import Final

from grafana.fleet import SAVED_RATIO, SLOWDOWN
from grafana.panels import LISTED, TO_NODE, board, curve, figure, job_variables, line, listing, most, to_node

_THIS: Final = '{job_namespace="$job_namespace", job_name="$job_name"}'


def _of(metric: str) -> str:
    return f"max({metric}{_THIS})"


def _named(metric: str, point: str) -> str:
    return f'label_replace({_of(metric)}, "point", "{point}", "", "")'


def _by_node(metric: str) -> str:
    return f"max by (node) ({metric}{_THIS})"


def job() -> str:
    """The dashboard."""
    now = [
        figure("Ready", "bool", "Whether the plan is in force.", _of("perseus_job_ready")),
        figure("Energy saved", "percentunit", "Measured against the measured baseline.", _of(SAVED_RATIO)),
        figure("Slowdown measured", "percentunit", "Against the measured baseline.", _of(SLOWDOWN)),
        figure(
            "Slowdown planned",
            "percentunit",
            "Slowdown that the plan intends, against the fastest plan.",
            _of("perseus_job_planned_slowdown_ratio") + " - 1",
        ),
        figure("Slow pipelines", "none", "Detected or declared.", _of("perseus_job_straggler_pipelines"), bad_from=1),
        figure("Certified gap", "percentunit", "Mean over all deadlines.", _of("perseus_job_gap_ratio")),
    ]
    sources = {"plan in force": "predicted", "measured": "measured", "default clocks": "baseline"}
    times = [f"max by (point) (perseus_job_frontier_seconds{_THIS})"]
    times += [_named(f"perseus_job_{source}_iteration_seconds", point) for point, source in sources.items()]
    energies = [(f"max by (point) (perseus_job_frontier_joules{_THIS})", "frontier")]
    energies += [(_named(f"perseus_job_{source}_iteration_joules", point), point) for point, source in sources.items()]
    frontier = [
        curve(
            "Time-energy frontier",
            "Each point is a plan: iteration time across, energy of one iteration up. Marked: measured now, predicted"
            " by the plan, and at default clocks.",
            key="point",
            x=(" or ".join(times), "iteration time"),
            ys=energies,
            units=("s", "joule"),
        )
    ]
    predictions = [
        line(
            f"Iteration {word}",
            unit,
            "Predicted for the plan in force, measured, and measured at default clocks before it.",
            *((_of(f"perseus_job_{source}_iteration_{suffix}"), name) for name, source in sources.items()),
        )
        for word, unit, suffix in (("time", "s", "seconds"), ("energy", "joule", "joules"))
    ]
    predictions.append(
        line(
            "Error of predicted times",
            "percentunit",
            "Measured divided by predicted time minus 1, and the calibrated model's error on held-out iterations.",
            (_of("perseus_job_prediction_error_ratio"), "measured over predicted"),
            (_of("perseus_job_calibration_error_ratio"), "error of the calibrated model"),
        )
    )
    gpus = [
        line(
            "SM clock",
            "hertz",
            "Lowest, mean and highest of the job's GPUs, read back. Clocks by stage and pipeline: dashboard GPU.",
            (f"max(perseus_node_job_clock_highest_hertz{_THIS})", "highest"),
            (
                f"sum({_by_node('perseus_node_job_clock_mean_hertz')} * {_by_node('perseus_node_job_gpus')})"
                f" / sum({_by_node('perseus_node_job_gpus')})",
                "mean",
            ),
            (f"min(perseus_node_job_clock_lowest_hertz{_THIS})", "lowest"),
        ),
        line(
            "GPU power",
            "watt",
            "Of all GPUs of the job.",
            (f"sum({_by_node('perseus_node_job_gpu_power_watts')})", "power"),
        ),
        line(
            "GPUs",
            "none",
            "Of the job; under a plan or a lease's clock; and those whose clocks cannot be set.",
            (f"sum({_by_node('perseus_node_job_gpus')})", "all"),
            (f"sum({_by_node('perseus_node_job_gpus_under_plan')})", "under plan"),
            (f"sum({_by_node('perseus_node_job_gpus_not_controllable')})", "not controllable"),
        ),
    ]
    pipelines = [
        line(
            "Lowest clock by node",
            "hertz",
            "A throttled GPU shows here: the lowest SM clock on the ten nodes where it is lowest.",
            (
                most(f"max by (node) (perseus_node_job_clock_lowest_hertz{_THIS})", "node", least=True),
                "{{node}}",
            ),
            link=TO_NODE,
        ),
        line(
            "Stragglers and planned slowdown",
            "none",
            "Slow pipelines, and the slowdown planned for the others.",
            (_of("perseus_job_straggler_pipelines"), "slow pipelines"),
            (_of("perseus_job_planned_slowdown_ratio"), "planned time / T_min"),
        ),
    ]
    slowest = f"bottomk({LISTED}, {_by_node('perseus_node_job_clock_lowest_hertz')})"
    nodes = [
        listing(
            "Nodes with the lowest clocks",
            f"The {LISTED} nodes of the job on which a GPU's clock is lowest.",
            "node",
            {
                "GPUs": ("none", f"{_by_node('perseus_node_job_gpus')} and on (node) {slowest}"),
                "power": ("watt", f"{_by_node('perseus_node_job_gpu_power_watts')} and on (node) {slowest}"),
                "lowest clock": ("hertz", f"{_by_node('perseus_node_job_clock_lowest_hertz')} and on (node) {slowest}"),
                "clocks adrift": ("none", f"max by (node) (perseus_node_gpus_adrift) and on (node) {slowest}"),
            },
            link=to_node("__value.raw"),
        )
    ]
    variables = job_variables()
    rows = [
        ("Now", now),
        ("Frontier", frontier),
        ("Prediction and measurement", predictions),
        ("GPUs", gpus),
        ("Pipelines", pipelines),
        ("Nodes", nodes),
    ]
    return board("perseus-job", "Perseus / Job", "Frontier, plan, clocks and stragglers of one job.", variables, rows)
