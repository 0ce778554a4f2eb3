"""Nodes: health of agents, the clocks that they set, and their leases."""

from __future__ import annotations

from typing import Final

from grafana.panels import TO_JOB, board, figure, label_variable, line, listing

_THESE: Final = '{node=~"$node"}'
_GPU: Final = "{{node}} {{gpu}}"


def _rate(metric: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{_THESE}[$__rate_interval]))"


def node() -> str:
    """The dashboard."""
    now = [
        figure("Agents", "none", "That are scraped.", f"count(perseus_agent_build_info{_THESE})"),
        figure("GPUs", "none", "That they see.", f"count(perseus_gpu_clock_drift{_THESE})"),
        figure(
            "GPUs driven",
            "none",
            "By a training process with a plan, or at the clock that a lease asks for.",
            f"count(count by (node, gpu) (perseus_gpu_rank_info{_THESE} or perseus_gpu_lease_info{_THESE}))",
        ),
        figure("Power", "watt", "Of these GPUs.", f"sum(perseus_gpu_power_watts{_THESE})"),
        figure(
            "Clocks adrift",
            "none",
            "GPUs at another clock than set, without a reason.",
            f"sum(perseus_gpu_clock_drift{_THESE})",
            bad_from=1,
        ),
        figure(
            "Leases run out",
            "none",
            "In this time range.",
            f"sum(increase(perseus_agent_lease_expiries_total{_THESE}[$__range]))",
            bad_from=1,
        ),
    ]
    clocks = [
        line("SM clock", "hertz", "Read back.", (f"perseus_gpu_clock_hertz{_THESE}", _GPU)),
        line(
            "SM clock locked",
            "hertz",
            "By the agent; a GPU at default clocks has no line.",
            (f"perseus_gpu_locked_clock_hertz{_THESE}", _GPU),
        ),
    ]
    switches = [
        line(
            "Clock switches",
            "cps",
            "Writes to the driver, and requests saved by coalescing.",
            (_rate("perseus_agent_clock_switches_total", "node"), "{{node}} written"),
            (_rate("perseus_agent_clock_requests_skipped_total", "node"), "{{node}} skipped"),
        ),
        line(
            "GPUs returned to default clocks",
            "none",
            "Times that a GPU returned to default clocks.",
            (f"sum by (node) (perseus_agent_clock_restores_total{_THESE})", "{{node}}"),
        ),
    ]
    energy = [
        line("Power", "watt", "As sampled.", (f"perseus_gpu_power_watts{_THESE}", _GPU)),
        line(
            "Power from the energy counter",
            "watt",
            "Rate of the GPU's own counter of joules.",
            (_rate("perseus_gpu_energy_joules_total", "node, gpu"), _GPU),
        ),
    ]
    leases = [
        line(
            "Leases",
            "s",
            "Time left; renewed at a third.",
            (f"perseus_agent_lease_remaining_seconds{_THESE}", "{{node}} {{job_namespace}}/{{job_name}}"),
            link=TO_JOB,
        ),
        line(
            "Plan age",
            "s",
            "Since a plan was last selected.",
            (f"perseus_agent_plan_age_seconds{_THESE}", "{{node}} {{job_namespace}}/{{job_name}}"),
            link=TO_JOB,
        ),
        line(
            "Ranks",
            "none",
            "Processes that drive a GPU.",
            (f"perseus_agent_ranks{_THESE}", "{{node}} {{job_namespace}}/{{job_name}}"),
            link=TO_JOB,
        ),
    ]
    health = [
        line(
            "Errors",
            "none",
            "Since each agent started.",
            (f"perseus_agent_lease_expiries_total{_THESE}", "{{node}} leases run out"),
            (f"perseus_agent_refused_peers_total{_THESE}", "{{node}} processes refused"),
            (f"perseus_agent_telemetry_dropped_events_total{_THESE}", "{{node}} telemetry lost"),
        ),
        listing(
            "GPUs by controllability",
            "yes: its clocks can be set. Anything else keeps a job's plan from being in force.",
            "state",
            {"GPUs": ("none", f"sum by (state) (perseus_gpu_controllability{_THESE})")},
        ),
        listing(
            "Versions",
            "Agents by their release and driver.",
            "version",
            {"agents": ("none", f"count by (version, driver) (perseus_agent_build_info{_THESE})")},
        ),
    ]
    variables = [label_variable("node", "Node", "label_values(perseus_agent_build_info, node)", every=True)]
    rows = [
        ("Now", now),
        ("Clocks", clocks),
        ("Switches", switches),
        ("Power", energy),
        ("Leases", leases),
        ("Health", health),
    ]
    return board("perseus-node", "Perseus / Node", "Agents, clocks, leases and GPUs.", variables, rows)
