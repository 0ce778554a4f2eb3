"""One job: its frontier and the point in force, prediction against measurement, clocks by stage, stragglers."""

from __future__ import annotations

from typing import Final

from grafana.fleet import SAVED_RATIO, SLOWDOWN
from grafana.panels import board, curve, figure, label_variable, line, listing, to_node

_THIS: Final = '{job_namespace="$job_namespace", job_name="$job_name"}'
_RANKS: Final = f"max by (node, gpu, dp, stage) (perseus_gpu_rank_info{_THIS})"


def _of(metric: str) -> str:
    return f"max({metric}{_THIS})"


def _named(metric: str, point: str) -> str:
    return f'label_replace({_of(metric)}, "point", "{point}", "", "")'


def _by(labels: str, metric: str) -> str:
    return f"avg by ({labels}) (max by (node, gpu) ({metric}) * on (node, gpu) group_right() {_RANKS})"


def _sum_by_node(metric: str) -> str:
    return f"sum by (node) (max by (node, gpu) ({metric}) and on (node, gpu) perseus_gpu_rank_info{_THIS})"


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
    stages = [
        line(
            "SM clock by stage",
            "hertz",
            "Mean over the stage's GPUs.",
            (_by("stage", "perseus_gpu_clock_hertz"), "stage {{stage}}"),
        ),
        line(
            "GPU power by stage",
            "watt",
            "Mean over the stage's GPUs.",
            (_by("stage", "perseus_gpu_power_watts"), "stage {{stage}}"),
        ),
    ]
    pipelines = [
        line(
            "SM clock by pipeline",
            "hertz",
            "A throttled pipeline shows here.",
            (_by("dp", "perseus_gpu_clock_hertz"), "pipeline {{dp}}"),
        ),
        line(
            "Stragglers and planned slowdown",
            "none",
            "Slow pipelines, and the slowdown planned for the others.",
            (_of("perseus_job_straggler_pipelines"), "slow pipelines"),
            (_of("perseus_job_planned_slowdown_ratio"), "planned time / T_min"),
        ),
    ]
    nodes = [
        listing(
            "Nodes",
            "Where the job's ranks run.",
            "node",
            {
                "GPUs": ("none", f"count by (node) (count by (node, gpu) (perseus_gpu_rank_info{_THIS}))"),
                "power": ("watt", _sum_by_node("perseus_gpu_power_watts")),
                "clocks adrift": ("none", _sum_by_node("perseus_gpu_clock_drift")),
            },
            link=to_node("__value.raw"),
        )
    ]
    variables = [
        label_variable("job_namespace", "Namespace", "label_values(perseus_job_ready, job_namespace)"),
        label_variable(
            "job_name", "PerseusJob", 'label_values(perseus_job_ready{job_namespace="$job_namespace"}, job_name)'
        ),
    ]
    rows = [
        ("Now", now),
        ("Frontier", frontier),
        ("Prediction and measurement", predictions),
        ("Stages", stages),
        ("Pipelines", pipelines),
        ("Nodes", nodes),
    ]
    return board("perseus-job", "Perseus / Job", "Frontier, plan, clocks and stragglers of one job.", variables, rows)
