"""Each GPU of a node, and a job by stage and pipeline, from the series of each GPU: agents export those on demand."""

from __future__ import annotations

from typing import Final

from grafana.panels import SHOWN, board, job_variables, label_variable, line, most, note

_NODE: Final = '{node=~"$node"}'
_JOB: Final = '{job_namespace="$job_namespace", job_name="$job_name"}'
_RANKS: Final = f"max by (node, gpu, dp, stage) (perseus_gpu_rank_info{_JOB})"
_GPU: Final = "{{gpu}}"
_WORDS: Final = (
    "These panels need the series of each GPU, about 23 for one, which agents do not export by default. Set"
    " `agent.settings.gpuMetrics=true` in the values of the chart, or start agents with `--gpu-metrics`; without it"
    " they are empty. The dashboards *Fleet*, *Job* and *Node* need nothing of it."
)


def _by(label: str, metric: str) -> str:
    return f"avg by ({label}) (max by (node, gpu) ({metric}) * on (node, gpu) group_right() {_RANKS})"


def _least(label: str, metric: str) -> str:
    return most(_by(label, metric), label, least=True)


def gpu() -> str:
    """The dashboard."""
    clocks = [
        line("SM clock", "hertz", "Read back.", (f"perseus_gpu_clock_hertz{_NODE}", _GPU)),
        line(
            "SM clock locked",
            "hertz",
            "By the agent; a GPU at default clocks has no line.",
            (f"perseus_gpu_locked_clock_hertz{_NODE}", _GPU),
        ),
    ]
    energy = [
        line("Power", "watt", "As sampled.", (f"perseus_gpu_power_watts{_NODE}", _GPU)),
        line(
            "Power from the energy counter",
            "watt",
            "Rate of the GPU's own counter of joules.",
            (f"sum by (node, gpu) (rate(perseus_gpu_energy_joules_total{_NODE}[$__rate_interval]))", _GPU),
        ),
    ]
    stages = [
        line(
            f"{what} by stage",
            unit,
            f"Mean over the stage's GPUs, of the {SHOWN} stages where it is lowest.",
            (_least("stage", metric), "stage {{stage}}"),
        )
        for what, unit, metric in (
            ("SM clock", "hertz", "perseus_gpu_clock_hertz"),
            ("GPU power", "watt", "perseus_gpu_power_watts"),
        )
    ]
    pipelines = [
        line(
            "SM clock by pipeline",
            "hertz",
            f"Mean over the pipeline's GPUs, of the {SHOWN} pipelines where it is lowest. A throttled one shows here.",
            (_least("dp", "perseus_gpu_clock_hertz"), "pipeline {{dp}}"),
        )
    ]
    variables = [label_variable("node", "Node", "label_values(perseus_agent_build_info, node)"), *job_variables()]
    rows = [
        ("What this needs", [note("Series of each GPU", _WORDS)]),
        ("Clocks of the node", clocks),
        ("Power of the node", energy),
        ("Stages of the job", stages),
        ("Pipelines of the job", pipelines),
    ]
    return board("perseus-gpu", "Perseus / GPU", "Each GPU of a node, stages and pipelines of a job.", variables, rows)
