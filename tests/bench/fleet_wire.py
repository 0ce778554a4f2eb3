"""Fleets larger than a machine bears as processes, and stragglers of one job of 4,096 nodes.

Each figure is of one replica as a process of its own (``tests.bench.fleet_replica``), on a wire to light agents in
another process. CPU is that of the replica alone. ``fleet_cpu_*`` over real gRPC says what the wire leaves out.

``fleet_straggler_*``: from the moment at which all 4,096 nodes begin to report the second slow iteration, until the
last agent has its next selection. Seconds depend on what else runs on the machine; ``…_cpu_s`` does not.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.doubles.fleet_size import FleetSize

Result = dict[str, Any]
LARGEST: Final = "1x8x512,102x2x4,1897x2x2"
"""12,500 nodes, 100,000 GPUs and 2,000 jobs, one of which has 4,096 nodes."""
STRAGGLERS: Final = 50


@dataclass(frozen=True)
class Run:
    """What is measured once."""

    jobs: str
    """See ``FleetSize.of``; the smaller ones are cut from the largest, with one job of a third of the nodes."""
    iteration_s: float
    options: Sequence[str] = ()


RUNS: Final[Mapping[str, Run]] = {
    "2496nodes_156jobs_2s": Run("156x8x2", 2.0),
    "1250nodes_1s": Run("1x8x51,210x2x2", 1.0),
    "1250nodes_2s": Run("1x8x51,210x2x2", 2.0),
    "2500nodes_1s": Run("1x8x102,421x2x2", 1.0),
    "2500nodes_2s": Run("1x8x102,421x2x2", 2.0),
    "5000nodes_2s": Run("1x8x205,840x2x2", 2.0),
    "12500nodes_2s": Run(LARGEST, 2.0),
    "12500nodes_10s": Run(LARGEST, 10.0, ("--restart",)),
    "12500nodes_2s_4of32shards": Run(LARGEST, 2.0, ("--shards", "4")),
    "2000nodes_2000jobs_2s": Run("2000x1x1", 2.0),
    "100nodes_200jobs_2s": Run("200x1x4x8", 2.0),
    "100nodes_200jobs_10s": Run("200x1x4x8", 10.0),
    "100nodes_800jobs_10s": Run("800x1x1x8", 10.0),
}
"""The first is as over gRPC. At an iteration of one second no process keeps up with 12,500 nodes; four shards of 32 at
two seconds show what an eighth of the jobs costs a replica that observes all of them. In the last three eight jobs
share each node, with a GPU there for each."""
CAUSES: Final = {
    "telemetry": ("WatchTelemetry",),
    "renewals": ("RenewLease",),
    "other_calls": ("DescribeNode", "AcquireLease", "PushPlanSet", "SelectPlan", "SelectPlans"),
    "kubernetes": ("write status", "annotate", "post event", "read profile", "list pods", "list jobs"),
}


def replica(run: Run, *options: str) -> dict[str, Any]:
    """Measure a replica; what it prints."""
    command = [sys.executable, "-m", "tests.bench.fleet_replica", run.jobs, "--iteration-s", str(run.iteration_s)]
    output = subprocess.run([*command, *run.options, *options], check=True, stdout=subprocess.PIPE).stdout
    return dict(json.loads(output))


def figures_of(name: str, run: Run, measured: Mapping[str, Any]) -> Result:
    """Return the figures of a run in a steady state, of its beginning and of a restart."""
    steady, settle, jobs = measured["steady"], measured["settle"], len(FleetSize.of(run.jobs).jobs)
    found: Result = {
        f"fleet_wire_cpu_percent_{name}": {"value": 100 * steady["cpu_s"] / steady["at_s"], "unit": "% core"},
        f"fleet_wire_reports_per_s_{name}": {"value": _telemetry(steady) / steady["at_s"], "unit": "1/s"},
        f"fleet_wire_cpu_us_per_report_{name}": {"value": 1e6 * steady["cpu_s"] / _telemetry(steady), "unit": "us"},
        f"fleet_wire_rss_mib_{name}": {"value": measured["rss_mib"], "unit": "MiB"},
        f"fleet_wire_settle_cpu_s_{name}": {"value": settle["cpu_s"], "unit": "s"},
    }
    for cause, names in CAUSES.items():
        answered = sum(steady.get(f"messages {each}", 0) or steady.get(f"requests {each}", 0) for each in names)
        sent = sum(steady.get(f"bytes {each}", 0) for each in names)
        found[f"fleet_wire_{cause}_per_s_{name}"] = {"value": answered / steady["at_s"], "unit": "1/s"}
        found[f"fleet_wire_{cause}_kib_per_s_{name}"] = {"value": sent / 1024 / steady["at_s"], "unit": "KiB/s"}
    if restart := measured.get("restart"):
        found[f"fleet_wire_restart_cpu_s_{name}"] = {"value": restart["cpu_s"], "unit": "s"}
        found[f"fleet_wire_restart_looks_{name}"] = {"value": restart["looks"] / jobs, "unit": "for each job"}
    return found


def _telemetry(steady: Mapping[str, float]) -> float:
    """Messages of telemetry that the replica has read: one report in each, since a node has one stage."""
    return steady["messages WatchTelemetry"]


def on_the_wire(name: str) -> Result:
    """Return the figures of a run."""
    return figures_of(name, RUNS[name], replica(RUNS[name]))


def stragglers_of(reactions: Sequence[Mapping[str, float]]) -> Result:
    """Return how one job of 4,096 nodes was answered."""
    count = len(reactions)
    unanswered = sum(bool(reaction["waiting"]) for reaction in reactions)
    found: Result = {"fleet_straggler_unanswered": {"value": unanswered, "unit": f"of {count}"}}
    for what, key, unit in (
        ("s", "last_s", "s"),
        ("cpu_s", "cpu_s", "s of CPU"),
        ("iterations", "iterations", "iterations"),
    ):
        values = sorted(reaction[key] for reaction in reactions)
        for share in (50, 99):
            value = values[min(count - 1, count * share // 100)]
            found[f"fleet_straggler_reaction_{what}_p{share}_4096nodes"] = {"value": value, "unit": unit}
    return found


def stragglers() -> Result:
    """Return how stragglers of one job of 4,096 nodes are answered."""
    measured = replica(Run("1x8x512", 2.0), "--stragglers", str(STRAGGLERS))
    return stragglers_of(measured["reactions"])


FIGURES = {
    **{f"fleet_wire_{name}": functools.partial(on_the_wire, name) for name in RUNS},
    "fleet_straggler": stragglers,
}
