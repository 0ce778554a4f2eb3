"""The solver beside lowtime 0.3.0 in the same run, its certified gaps, and its growth with the size of the problem.

lowtime has a time budget. Where it does not finish, its time is the budget and the ratio is a lower bound, which the
figure's peer states. Figures of scale are measured in a separate process each, so that the peak memory is theirs. All
times are CPU time, of one thread: others may use the machine, too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.made_up_profiles import problems

from perseus_solver.comparison import lowtime_peer
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.errors import SolverError
from perseus_solver.frontier import Planner, solve_frontier
from perseus_solver.kinds import latest_s
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

DATA = Path(os.environ.get("PERSEUS_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "sosp24"
PROFILES = {"gpt3-175b_a100-sxm": (83.64, 1e-3), "bloom-176b_a40": (70.38, 1e-3)}
"""Blocking power in watts, and lowtime's time grid in seconds. Its authors use a ten times finer grid on the A40, with
which it would take ten times longer.
"""
MICROBATCHES = (12, 24, 48, 96)
LOWTIME_BUDGET_S = {12: 120.0, 24: 75.0, 48: 75.0, 96: 75.0}
"""Long enough to finish with 12 microbatches, so that energies are compared along the whole frontier there. The
environment variable PERSEUS_BENCH_LOWTIME_S sets another budget."""
COMPARED = 20
FAMILIES_COUNT = int(os.environ.get("PERSEUS_BENCH_FAMILIES", "1000"))
ROUNDING = 1e-12  # difference of sums that are added in another order
Result = dict[str, Any]


def figure(value: float, unit: str, peer: str | None = None, peer_value: float | None = None) -> Result:
    """Return one result; the ratio is the peer's value divided by this one."""
    ratio = None if peer_value is None or value == 0 else peer_value / value
    return {"value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio}


def problem_of(profile: str, microbatches: int) -> Problem:
    """Return the problem of 1F1B on eight stages."""
    measured = read_profile(DATA / "stage_profile" / f"{profile}.csv", stages=8)
    schedule = build_schedule("1f1b", stages=8, microbatches=microbatches)
    return build_problem(measured, schedule, blocking_power_w=PROFILES[profile][0])


@cache
def solved(profile: str, microbatches: int) -> tuple[Frontier, float]:
    """Return the solver's frontier and the seconds that it took."""
    problem = problem_of(profile, microbatches)
    begun = time.process_time()
    frontier = solve_frontier(problem)
    return frontier, time.process_time() - begun


def against_lowtime(profile: str, microbatches: int) -> dict[str, Result]:
    """Measure speed, and compare energies at the times of lowtime's own plans."""
    problem = problem_of(profile, microbatches)
    _, ours_s = solved(profile, microbatches)
    budget_s = float(os.environ.get("PERSEUS_BENCH_LOWTIME_S", LOWTIME_BUDGET_S[microbatches]))
    begun = time.process_time()
    plans, finished = [], True
    for plan in lowtime_peer.lowtime_plans(problem, unit_time_s=PROFILES[profile][1]):
        plans.append(plan)
        if time.process_time() - begun > budget_s:
            finished = False
            break
    theirs_s = time.process_time() - begun
    peer = "lowtime 0.3.0" if finished else f"lowtime 0.3.0, stopped after {budget_s:.0f} s"
    name = f"{profile}_{microbatches}"
    results = {f"solver_speedup_vs_lowtime_{name}": figure(ours_s, "s", peer, theirs_s)}
    if plans:
        chosen = np.array([plans[i] for i in np.unique(np.linspace(0, len(plans) - 1, COMPARED).astype(int))])
        time_s, energy_j = Simulator(problem).totals(chosen)
        planner = Planner(problem)
        excess = [planner.plan(t).energy_j / e - 1.0 for t, e in zip(time_s.tolist(), energy_j.tolist(), strict=True)]
        results[f"solver_worst_energy_vs_lowtime_percent_{name}"] = figure(100 * max(excess), "%", peer)
        extra = sum(share > ROUNDING for share in excess)
        results[f"solver_times_dearer_than_lowtime_{name}"] = figure(extra, f"of {len(excess)}", peer)
    return results


def gaps(profile: str, microbatches: int) -> dict[str, Result]:
    """Measure the certified gap, and the saving without slowdown beside the published one."""
    frontier, _ = solved(profile, microbatches)
    problem = problem_of(profile, microbatches)
    name = f"{profile}_{microbatches}"
    highest = np.array([int(o.frequency_mhz.argmax()) for o in problem.options])[problem.option_of]
    baseline_j = float(Simulator(problem).run(highest).energy_j)
    rows = (line.split(",") for line in (DATA / "reference" / "table6.csv").read_text().split()[1:])
    published = next(float(r[2]) for r in rows if (r[0], int(r[1])) == (profile, microbatches))
    deployed = DeployedGap.of(frontier)
    saving = 100 * (1 - float(frontier.energy_j[0]) / baseline_j)
    return {
        f"solver_gap_median_percent_{name}": figure(100 * float(np.median(frontier.gap)), "%"),
        f"solver_gap_max_percent_{name}": figure(100 * float(frontier.gap.max()), "%"),
        f"solver_deployed_gap_mean_percent_{name}": figure(100 * deployed.mean, "%"),
        f"solver_deployed_gap_max_percent_{name}": figure(100 * deployed.worst, "%"),
        f"solver_points_{name}": figure(len(frontier), "plans"),
        f"solver_saving_at_t_min_percent_{name}": {
            **figure(saving, "%", "SOSP'24 table 6", published),
            "ratio": saving / published,
        },
    }


_SCALE = """
import json, sys, time
from pathlib import Path
from tests.bench.solver import wide
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.deployed import DeployedGap
problem = wide(int(sys.argv[1]), int(sys.argv[2]))
begun = time.process_time()
frontier = solve_frontier(problem)
seconds, gap = time.process_time() - begun, DeployedGap.of(frontier)
# Of this process alone; what getrusage says begins with the memory of the one that started it.
peak_kib = next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith("VmHWM"))
print(json.dumps({"s": seconds, "mean": gap.mean, "worst": gap.worst, "mib": peak_kib / 1024}))
"""


def wide(stages: int, microbatches: int) -> Problem:
    """Return the problem of 1F1B on any number of stages, which repeat the eight measured ones."""
    lines = (DATA / "stage_profile" / "gpt3-175b_a100-sxm.csv").read_text().split()
    measured = [line.split(",", 1) for line in lines[1:]]
    repeated = [f"{stage},{rest}" for stage in range(stages) for own, rest in measured if int(own) == stage % 8]
    profile = read_profile("\n".join([lines[0], *repeated]) + "\n")
    schedule = build_schedule("1f1b", stages=stages, microbatches=microbatches)
    return build_problem(profile, schedule, blocking_power_w=PROFILES["gpt3-175b_a100-sxm"][0])


@cache
def scaled(stages: int, microbatches: int) -> dict[str, float]:
    """Return seconds, peak memory (MiB) and gaps of one solve in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", _SCALE, str(stages), str(microbatches)], capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def largest() -> dict[str, Result]:
    """Measure 64 stages × 1,536 microbatches: 196,608 instructions."""
    found = scaled(64, 1536)
    return {
        "solver_scale_64x1536_s": figure(found["s"], "s"),
        "solver_scale_64x1536_mib": figure(found["mib"], "MiB"),
        "solver_scale_64x1536_deployed_gap_mean_percent": figure(100 * found["mean"], "%"),
        "solver_scale_64x1536_deployed_gap_max_percent": figure(100 * found["worst"], "%"),
    }


def growth() -> dict[str, Result]:
    """Measure time, memory and gaps by microbatches at 8 stages, by stages at 64 microbatches, and at 64 × 128."""
    sizes = [(8, m) for m in (12, 48, 96, 192, 768, 1536)] + [(s, 64) for s in (4, 16, 32)] + [(64, 128)]
    results = {}
    for stages, microbatches in sizes:
        found = scaled(stages, microbatches)
        name = f"solver_growth_{stages}x{microbatches}"
        results[f"{name}_s"] = figure(found["s"], "s")
        results[f"{name}_us_per_instruction"] = figure(1e6 * found["s"] / (2 * stages * microbatches), "us")
        results[f"{name}_mib"] = figure(found["mib"], "MiB")
        results[f"{name}_deployed_gap_mean_percent"] = figure(100 * found["mean"], "%")
        results[f"{name}_deployed_gap_max_percent"] = figure(100 * found["worst"], "%")
    return results


def families() -> dict[str, Result]:
    """Plan made-up profiles of all families and schedules, each along its frontier and at four deadlines."""
    failures = dearer = 0
    worst, mean, seconds = [], [], []
    for done, (_name, problem) in enumerate(problems(FAMILIES_COUNT)):
        if done % 50 == 0:  # they take an hour
            print(f"{done} of {FAMILIES_COUNT} made-up profiles", file=sys.stderr, flush=True)
        begun = time.process_time()
        try:
            planner = Planner(problem)
            frontier = planner.frontier()
            seconds.append(time.process_time() - begun)
            fastest_s = float(Simulator(problem).run(all_maximum(problem)).iteration_time_s)
            for at_s in (frontier.t_min_s, fastest_s, float(frontier.time_s[len(frontier) // 3]), frontier.t_star_s):
                known_j = frontier.energy_j[frontier.time_s <= latest_s(at_s)].min()
                dearer += planner.plan(at_s).energy_j > known_j * (1 + ROUNDING)
        except (SolverError, RuntimeError, ArithmeticError, IndexError):
            failures += 1
            continue
        gap = DeployedGap.of(frontier)
        worst.append(100 * gap.worst)
        mean.append(100 * gap.mean)
    return {
        "solver_families_failures": figure(failures, f"of {FAMILIES_COUNT}"),
        "solver_families_plans_dearer_than_known": figure(int(dearer), f"of {4 * FAMILIES_COUNT}"),
        "solver_families_deployed_gap_worst_median_percent": figure(float(np.median(worst)), "%"),
        "solver_families_deployed_gap_worst_max_percent": figure(max(worst), "%"),
        "solver_families_deployed_gap_mean_percent": figure(float(np.mean(mean)), "%"),
        "solver_families_cpu_mean_s": figure(float(np.mean(seconds)), "s"),
        "solver_families_cpu_max_s": figure(max(seconds), "s"),
    }


def plan_command() -> Result:
    """Measure `perseus plan` for one deadline, 8 × 96, from start to end of the process: the fastest of three runs.

    An additional first run compiles the modules, as an installation does.
    """
    output = Path(os.environ.get("TMPDIR", "/tmp")) / f"perseus-bench-plan-{os.getpid()}.json"
    command = [sys.executable, "-m", "perseus_solver.cli.main", "plan", "--schedule", "1f1b", "--stages", "8"]
    command += ["--profile", str(DATA / "stage_profile" / "gpt3-175b_a100-sxm.csv"), "--microbatches", "96"]
    command += ["--blocking-power", "83.64", "--max-slowdown", "3%", "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(4):
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, env=environment)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime)
    output.unlink()
    return figure(min(seconds[1:]), "s")


def _all() -> dict[str, Callable[[], Result]]:
    figures: dict[str, Callable[[], Result]] = {"solver_plan_cli_s": plan_command}
    for profile in PROFILES:
        for count in MICROBATCHES:
            name = f"{profile}_{count}"
            figures[f"solver_gap_{name}"] = lambda p=profile, c=count: gaps(p, c)  # type: ignore[misc]
            figures[f"solver_speedup_vs_lowtime_{name}"] = lambda p=profile, c=count: against_lowtime(p, c)  # type: ignore[misc]
    figures["solver_scale_64x1536"] = largest
    figures["solver_growth"] = growth
    figures["solver_families"] = families
    return figures


FIGURES: dict[str, Callable[[], Result]] = _all()
