"""Nodes: health of agents, the clocks that they set, and their leases."""

from __future__ import annotations

from typing import Final

from grafana.panels import TO_JOB, board, figure, label_variable, line, listing, most

_THESE: Final = '{node=~"$node"}'
_OF_JOBS: Final = "node, job_namespace, job_name"
_NAMED: Final = "{{node}} {{job_namespace}}/{{job_name}}"


def _most(metric: str) -> str:
    return most(f"{metric}{_THESE}", "node")


def _fastest(counter: str) -> str:
    return most(f"sum by (node) (rate({counter}{_THESE}[$__rate_interval]))", "node")


def _of_jobs(metric: str, *, least: bool = False) -> str:
    return most(f"max by ({_OF_JOBS}) ({metric}{_THESE})", _OF_JOBS, least=least)


def node() -> str:
    """The dashboard."""
    now = [
        figure("Agents", "none", "That are scraped.", f"count(perseus_agent_build_info{_THESE})"),
        figure("GPUs", "none", "That they see.", f"sum(perseus_node_gpus{_THESE})"),
        figure(
            "GPUs driven",
            "none",
            "By a training process with a plan, or at the clock that a lease asks for.",
            f"sum(perseus_node_job_gpus{_THESE})",
        ),
        figure("Power", "watt", "Of these GPUs.", f"sum(perseus_node_gpu_power_watts{_THESE})"),
        figure(
            "Clocks adrift",
            "none",
            "GPUs at another clock than set, without a reason.",
            f"sum(perseus_node_gpus_adrift{_THESE})",
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
    gpus = f"perseus_node_job_gpus{_THESE}"
    clocks = [
        line(
            "SM clock",
            "hertz",
            "Lowest, mean and highest of the GPUs that jobs have here, read back. Each GPU: dashboard GPU.",
            (f"max(perseus_node_job_clock_highest_hertz{_THESE})", "highest"),
            (f"sum(perseus_node_job_clock_mean_hertz{_THESE} * {gpus}) / sum({gpus})", "mean"),
            (f"min(perseus_node_job_clock_lowest_hertz{_THESE})", "lowest"),
        ),
        line(
            "GPUs locked",
            "none",
            "By the agents; those locked although nothing asks for it; and those at another clock than set.",
            (f"sum(perseus_node_gpus_locked{_THESE})", "locked"),
            (f"sum(perseus_node_gpus_locked_without_rank{_THESE})", "locked without rank"),
            (f"sum(perseus_node_gpus_adrift{_THESE})", "adrift"),
        ),
    ]
    switches = [
        line(
            "Clock switches",
            "cps",
            "Writes to the driver, and requests saved by coalescing, on the ten nodes with most.",
            (_fastest("perseus_agent_clock_switches_total"), "{{node}} written"),
            (_fastest("perseus_agent_clock_requests_skipped_total"), "{{node}} skipped"),
        ),
        line(
            "GPUs returned to default clocks",
            "none",
            "Times that a GPU returned to default clocks, on the ten nodes with most.",
            (_most("perseus_agent_clock_restores_total"), "{{node}}"),
        ),
    ]
    energy = [
        line(
            "Power",
            "watt",
            "As sampled, of the ten nodes with most.",
            (_most("perseus_node_gpu_power_watts"), "{{node}}"),
        ),
        line(
            "Power from the energy counter",
            "watt",
            "Rate of the GPUs' own counters of joules, of the ten nodes with most.",
            (_fastest("perseus_node_gpu_energy_joules_total"), "{{node}}"),
        ),
    ]
    leases = [
        line(
            "Leases",
            "s",
            "Time left, of the ten that run out first; renewed at a third.",
            (_of_jobs("perseus_agent_lease_remaining_seconds", least=True), _NAMED),
            link=TO_JOB,
        ),
        line(
            "Plan age",
            "s",
            "Since a plan was last selected, of the ten oldest.",
            (_of_jobs("perseus_agent_plan_age_seconds"), _NAMED),
            link=TO_JOB,
        ),
        line(
            "Ranks",
            "none",
            "Processes that drive a GPU, on the ten nodes with most.",
            (_of_jobs("perseus_agent_ranks"), _NAMED),
            link=TO_JOB,
        ),
    ]
    health = [
        line(
            "Errors",
            "none",
            "Since each agent started, of the ten nodes with most.",
            (_most("perseus_agent_lease_expiries_total"), "{{node}} leases run out"),
            (_most("perseus_agent_refused_peers_total"), "{{node}} processes refused"),
            (_most("perseus_agent_telemetry_dropped_events_total"), "{{node}} telemetry lost"),
        ),
        listing(
            "GPUs by controllability",
            "yes: their clocks can be set; unknown: no job has asked for them yet. Anything else keeps a plan"
            " from being in force.",
            "state",
            {"GPUs": ("none", f"sum by (state) (perseus_node_gpus{_THESE}) > 0")},
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
