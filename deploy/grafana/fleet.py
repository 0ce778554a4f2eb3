"""The fleet: how much power flows, how much is saved, which jobs run as asked, and whether the operator is well."""

from __future__ import annotations

from typing import Final

from grafana.panels import TO_JOB, TO_NODE, board, figure, line, listing, to_job

_JOB: Final = "max by (job_namespace, job_name)"
_NAMED: Final = "{{job_namespace}}/{{job_name}}"


def of_job(expression: str) -> str:
    """One series for each job, whichever operator's, with its full name as the only label: a table's key."""
    named = f'label_join({_JOB} ({expression}), "perseusjob", "/", "job_namespace", "job_name")'
    return f"max by (perseusjob) ({named})"


# Recording rules: at a hundred thousand GPUs, what each viewer would add up again every 30 seconds.
POWER_W: Final = "job:perseus_power_watts:measured"
SAVED_W: Final = "job:perseus_saved_watts:baseline"
SAVED_RATIO: Final = "job:perseus_saved_ratio:baseline"
SLOWDOWN: Final = "job:perseus_slowdown_ratio:baseline"


def fleet() -> str:
    """The dashboard."""
    now = [
        figure("GPU power", "watt", "Of all GPUs that an agent sees.", "cluster:perseus_gpu_power_watts:sum"),
        figure(
            "Saved now",
            "watt",
            "Measured energy per iteration against the measured baseline at default clocks, at the present pace.",
            "cluster:perseus_saved_watts:sum",
        ),
        figure(
            "Saved in this time range",
            "joule",
            "All iterations of the dashboard's time range, against as many of the measured baseline. What changes of"
            " plans, sweeps and stragglers cost is in it; where nothing was measured nothing is counted.",
            "sum(increase(perseus_job_baseline_energy_joules_total[$__range]))"
            " - sum(increase(perseus_job_energy_joules_total[$__range]))",
        ),
        figure("Jobs", "none", "PerseusJobs that an operator serves.", f"count({_JOB} (perseus_job_ready))"),
        figure(
            "Jobs not ready",
            "none",
            "Jobs whose pods run, and whose condition Ready is not True.",
            f"sum({_JOB} (perseus_job_active) * (1 - {_JOB} (perseus_job_ready)))",
            bad_from=1,
        ),
        figure("Nodes with an agent", "none", "Agents that are scraped.", "count(perseus_agent_build_info)"),
    ]
    power = [
        line(
            "GPU power by node",
            "watt",
            "Power drawn.",
            ("node:perseus_gpu_power_watts:sum", "{{node}}"),
            stacked=True,
            link=TO_NODE,
        ),
        line(
            "Power of the jobs",
            "watt",
            "Measured, and what the same iterations would take at default clocks.",
            (f"sum({POWER_W})", "measured"),
            (f"sum({POWER_W} + {SAVED_W})", "at default clocks"),
        ),
    ]
    jobs = [
        listing(
            "Jobs",
            "What each job saves and what that costs.",
            "perseusjob",
            {
                "ready": ("bool", of_job("perseus_job_ready")),
                "energy saved": ("percentunit", of_job(SAVED_RATIO)),
                "slowdown measured": ("percentunit", of_job(SLOWDOWN)),
                "slowdown planned": ("percentunit", of_job("perseus_job_planned_slowdown_ratio - 1")),
                "slow pipelines": ("none", of_job("perseus_job_straggler_pipelines")),
                "certified gap": ("percentunit", of_job("perseus_job_gap_ratio")),
            },
            parts=("job_namespace", "job_name"),
            link=to_job("__data.fields.job_namespace", "__data.fields.job_name"),
        )
    ]
    trends = [
        line("Power saved by job", "watt", "Against the measured baseline.", (SAVED_W, _NAMED), link=TO_JOB),
        line(
            "Stragglers",
            "none",
            "Slow pipelines by job.",
            (f"{_JOB} (perseus_job_straggler_pipelines)", _NAMED),
            link=TO_JOB,
        ),
    ]
    budgets = [
        line(
            "Power budgets",
            "watt",
            "Each budget; what is granted, with jobs whose clocks are not set; and what jobs' objectives would draw.",
            ("max by (budget) (perseus_budget_watts)", "{{budget}}: budget"),
            ("max by (budget) (perseus_budget_granted_watts + perseus_budget_unsteered_watts)", "{{budget}}: granted"),
            ("max by (budget) (perseus_budget_wanted_watts + perseus_budget_unsteered_watts)", "{{budget}}: wanted"),
        ),
        line(
            "Value of one more kilowatt",
            "none",
            "Throughput that one more kilowatt would add, in GPUs at full speed.",
            ("1000 * max by (budget) (perseus_budget_gpus_per_watt)", "{{budget}}"),
        ),
    ]
    operator = [
        line(
            "Reconciliation time of one job",
            "s",
            "99th percentile, and mean.",
            (
                "histogram_quantile(0.99, sum by (le) (rate(perseus_operator_reconcile_seconds_bucket"
                "[$__rate_interval])))",
                "p99",
            ),
            (
                "sum(rate(perseus_operator_reconcile_seconds_sum[$__rate_interval]))"
                " / sum(rate(perseus_operator_reconcile_seconds_count[$__rate_interval]))",
                "mean",
            ),
        ),
        line(
            "Calls to agents",
            "reqps",
            "By result.",
            ("sum by (result) (rate(perseus_operator_agent_calls_total[$__rate_interval]))", "{{result}}"),
        ),
        line(
            "Frontiers and errors",
            "none",
            "Since the operator started.",
            ("sum by (result) (perseus_operator_solves_total)", "{{result}}"),
            ("sum(perseus_operator_frontiers_restored_total)", "restored"),
            ("sum(perseus_operator_errors_total)", "errors"),
            ("sum(perseus_operator_telemetry_dropped_total)", "telemetry lost"),
            ("sum(perseus_operator_late_selections_total)", "late selections"),
        ),
    ]
    rows = [
        *(("Now", now), ("Power", power), ("Jobs", jobs), ("Trends", trends)),
        *(("Budgets", budgets), ("Operator", operator)),
    ]
    return board("perseus-fleet", "Perseus / Fleet", "Watts, joules saved, and the jobs that save them.", [], rows)
