"""The fleet: how much power flows, how much is saved, which jobs run as asked, and whether the operator is well."""

from __future__ import annotations

from typing import Final

from grafana.panels import LISTED, TO_JOB, board, extremes, figure, line, listing, most, to_job, to_node

_JOB: Final = "job_namespace, job_name"
_NAMED: Final = "{{job_namespace}}/{{job_name}}"

# Recording rules: at a hundred thousand GPUs, what each viewer would add up again every 30 seconds.
SAVED_W: Final = "job:perseus_saved_watts:baseline"
SAVED_RATIO: Final = "job:perseus_saved_ratio:baseline"
SLOWDOWN: Final = "job:perseus_slowdown_ratio:baseline"
_STRAGGLERS: Final = "job:perseus_straggler_pipelines:max"
_NOT_READY: Final = "job:perseus_active:max * (1 - job:perseus_ready:max)"
_SAVED_J_PER_S: Final = "cluster:perseus_baseline_energy_joules:rate5m - cluster:perseus_energy_joules:rate5m"


def _of_jobs(expression: str, chosen: str) -> str:
    """One series for each chosen job, with its full name as the only label: a table's key."""
    of_these = f"max by ({_JOB}) ({expression}) and on ({_JOB}) {chosen}"
    return f'max by (perseusjob) (label_join({of_these}, "perseusjob", "/", "job_namespace", "job_name"))'


def _of_nodes(expression: str, chosen: str) -> str:
    return f"max by (node) ({expression}) and on (node) {chosen}"


def _by_namespace(recorded: str) -> str:
    return most(recorded, "job_namespace")


def _by_budget(expression: str) -> str:
    return f"max by (budget) ({expression}) and on (budget) {extremes('max by (budget) (perseus_budget_watts)')}"


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
            "Saved in time range",
            "joule",
            "All iterations of the dashboard's time range, against as many of the measured baseline. What changes of"
            " plans, sweeps and stragglers cost is in it; where nothing was measured nothing is counted.",
            f"60 * sum_over_time(({_SAVED_J_PER_S})[$__range:1m])",
        ),
        figure("Jobs", "none", "PerseusJobs that an operator serves.", "sum(cluster:perseus_jobs:count)"),
        figure(
            "Jobs not ready",
            "none",
            "Jobs whose pods run, and whose condition Ready is not True.",
            'sum(cluster:perseus_jobs:count{state="not_ready"})',
            bad_from=1,
        ),
        figure(
            "Jobs with stragglers",
            "none",
            "Jobs with a slow pipeline.",
            "cluster:perseus_straggling_jobs:count",
            bad_from=1,
        ),
        figure(
            "GPUs under plan",
            "none",
            "That follow a plan, or are at the clock that a lease asks for.",
            "cluster:perseus_job_gpus_under_plan:sum",
        ),
        figure("Nodes with an agent", "none", "Agents that are scraped.", "sum(cluster:perseus_agents:count)"),
    ]
    power = [
        line(
            "Power",
            "watt",
            "Of all GPUs; of the jobs, as measured, and as the same iterations would take at default clocks.",
            ("cluster:perseus_gpu_power_watts:sum", "all GPUs"),
            ("cluster:perseus_power_watts:sum", "jobs, measured"),
            ("cluster:perseus_power_watts:sum + cluster:perseus_saved_watts:sum", "jobs, at default clocks"),
        ),
        line(
            "Power by namespace",
            "watt",
            "Measured, of the ten namespaces whose jobs draw most.",
            (_by_namespace("namespace:perseus_power_watts:sum"), "{{job_namespace}}"),
            stacked=True,
        ),
        line(
            "Power saved by namespace",
            "watt",
            "Against the measured baseline, of the ten namespaces that save most.",
            (_by_namespace("namespace:perseus_saved_watts:sum"), "{{job_namespace}}"),
        ),
    ]
    saving, troubled = f"topk({LISTED}, {SAVED_W})", f"topk({LISTED}, {_STRAGGLERS} + {_NOT_READY})"
    jobs = [
        listing(
            title,
            what,
            "perseusjob",
            {name: (unit, _of_jobs(expression, chosen)) for name, (unit, expression) in columns.items()},
            parts=("job_namespace", "job_name"),
            link=to_job("__data.fields.job_namespace", "__data.fields.job_name"),
        )
        for title, what, chosen, columns in (
            (
                "Jobs that save most",
                f"The {LISTED} jobs that save most power, and what that costs.",
                saving,
                {
                    "power saved": ("watt", SAVED_W),
                    "energy saved": ("percentunit", SAVED_RATIO),
                    "slowdown measured": ("percentunit", SLOWDOWN),
                    "slowdown planned": ("percentunit", "perseus_job_planned_slowdown_ratio - 1"),
                },
            ),
            (
                "Jobs in trouble",
                f"The {LISTED} jobs with most slow pipelines, or that train without being ready.",
                troubled,
                {
                    "not ready": ("bool", _NOT_READY),
                    "slow pipelines": ("none", _STRAGGLERS),
                    "energy saved": ("percentunit", SAVED_RATIO),
                    "certified gap": ("percentunit", "perseus_job_gap_ratio"),
                },
            ),
        )
    ]
    trends = [
        line("Jobs by state", "none", "Of all.", ("cluster:perseus_jobs:count", "{{state}}"), stacked=True),
        line(
            "Power saved by job",
            "watt",
            "Against the measured baseline, of the ten jobs that save most.",
            (most(SAVED_W, _JOB), _NAMED),
            link=TO_JOB,
        ),
        line(
            "Stragglers",
            "none",
            "Slow pipelines, and the jobs that have some.",
            ("cluster:perseus_straggler_pipelines:sum", "slow pipelines"),
            ("cluster:perseus_straggling_jobs:count", "jobs"),
        ),
    ]
    drawing = f"topk({LISTED}, perseus_node_gpu_power_watts)"
    failing = f"topk({LISTED}, perseus_node_gpus_adrift + perseus_node_gpus_locked_without_rank)"
    nodes = [
        line(
            "GPUs",
            "none",
            "Of jobs; under a plan or a lease's clock; locked now; and at another clock than set, without a reason.",
            ("cluster:perseus_job_gpus:sum", "of jobs"),
            ("cluster:perseus_job_gpus_under_plan:sum", "under plan"),
            ("cluster:perseus_gpus_locked:sum", "locked"),
            ("cluster:perseus_gpus_adrift:sum", "adrift"),
        ),
        listing(
            "Nodes that draw most",
            f"The {LISTED} nodes whose GPUs draw most power.",
            "node",
            {
                "power": ("watt", _of_nodes("perseus_node_gpu_power_watts", drawing)),
                "GPUs locked": ("none", _of_nodes("perseus_node_gpus_locked", drawing)),
            },
            link=to_node("__value.raw"),
        ),
        listing(
            "Nodes in trouble",
            f"The {LISTED} nodes with most GPUs adrift, or locked although nothing asks for it.",
            "node",
            {
                "GPUs adrift": ("none", _of_nodes("perseus_node_gpus_adrift", failing)),
                "locked without rank": ("none", _of_nodes("perseus_node_gpus_locked_without_rank", failing)),
            },
            link=to_node("__value.raw"),
        ),
    ]
    budgets = [
        line(
            "Power budgets",
            "watt",
            "The ten largest: what each allows; what is granted, with jobs whose clocks are not set; and what jobs'"
            " objectives would draw.",
            (_by_budget("perseus_budget_watts"), "{{budget}}: budget"),
            (_by_budget("perseus_budget_granted_watts + perseus_budget_unsteered_watts"), "{{budget}}: granted"),
            (_by_budget("perseus_budget_wanted_watts + perseus_budget_unsteered_watts"), "{{budget}}: wanted"),
        ),
        line(
            "Value of one more kilowatt",
            "none",
            "Throughput that one more kilowatt would add to the ten largest budgets, in GPUs at full speed.",
            (_by_budget("1000 * perseus_budget_gpus_per_watt"), "{{budget}}"),
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
        *(("Nodes", nodes), ("Budgets", budgets), ("Operator", operator)),
    ]
    return board("perseus-fleet", "Perseus / Fleet", "Watts, joules saved, and the jobs that save them.", [], rows)
