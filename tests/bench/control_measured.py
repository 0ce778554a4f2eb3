"""Control of clocks on a measured profile: GPT-3 175B on A100s, eight stages of 24 microbatches, latency as given.

The plan without slowdown for every instruction is executed by the agent's timetable and by the host's end marks, under
hosts that never wait within a step. Every GPU has its own driver lock, and nothing scatters but the latency.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from tests.bench.solver import Result, problem_of
from tests.execution.agent_control import AgentControl
from tests.execution.controls import DefaultClocks, HostMarks, Ideal
from tests.execution.executor import Control, Executor
from tests.execution.machine import Machine
from tests.execution.pipeline import Pipeline

from perseus_core.latency import SwitchLatency
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import DriverModel
from perseus_sim.training.hosts import Framework, Hosts
from perseus_solver.frontier import Planner

PROFILE: Final = "gpt3-175b_a100-sxm"
MICROBATCHES: Final = 24
LATENCIES_MS: Final = ((5, 13), (10, 30), (30, 100))
"""Median and 99th percentile."""
CALL_S: Final = 0.0045
TAIL: Final = 2.9
"""Of calls: 99th percentile over median, as on an A800."""
WARM_UP: Final = 8
ITERATIONS: Final = 40


class Run(NamedTuple):
    """Iterations beyond default clocks, and energy saved against them, per cent."""

    time: float
    time_p95: float
    saving: float


@cache
def pipeline() -> Pipeline:
    """Return the pipeline and its plan without slowdown."""
    problem = problem_of(PROFILE, MICROBATCHES)
    planner = Planner(problem)
    plan = planner.plan(planner.t_min_s).frequencies_mhz.tolist()
    return Pipeline(problem, plan, max(plan))


def driver_of(p50_ms: float, p99_ms: float) -> DriverModel:
    """Return a driver with this latency and nothing else."""
    latency = SwitchLatency.of_seconds(p50_ms / 1e3, p99_ms / 1e3, min(CALL_S, p50_ms / 2e3), False, "given")
    return DriverModel(latency, TAIL * latency.call_s, 0.0, 0.0, 1.0, 0.0, 0.0, 0.1, 0.02)


def measure(control: Control, driver: DriverModel | None = None, hosts: Hosts | None = None) -> Run:
    """Execute the plan under a control."""
    outcome = Executor(pipeline(), Machine(driver, hosts, seed=3), control).run(ITERATIONS)
    if isinstance(control, AgentControl):
        control.close()
    default = Executor(pipeline(), Machine(), DefaultClocks()).run(1)
    time = 100 * (np.array(outcome.time_s[WARM_UP:]) / default.time_s[0] - 1)
    saving = 100 * (1 - float(np.mean(outcome.energy_j[WARM_UP:])) / default.energy_j[0])
    return Run(float(time.mean()), float(np.quantile(time, 0.95)), saving)


@cache
def runs() -> tuple[Run, dict[str, tuple[Run, Run]]]:
    """Return the ideal, and for each latency the agent and the host's marks."""
    found = {}
    for p50_ms, p99_ms in LATENCIES_MS:
        driver, hosts = driver_of(p50_ms, p99_ms), Hosts(Framework.DEEPSPEED)
        agent = measure(AgentControl("not known", MODELS["a100"].clocks_mhz), driver, hosts)
        found[f"{p50_ms}_{p99_ms}ms"] = agent, measure(HostMarks(), driver, hosts)
    return measure(Ideal()), found


def measured() -> dict[str, Result]:
    """Measure the agent on the measured profile; the peer is the host's marks."""
    results: dict[str, Result] = {}
    for latency, (agent, marks) in runs()[1].items():
        for name, value, peer in (("time", agent.time, marks.time), ("saving", agent.saving, marks.saving)):
            result = {"value": value, "unit": "%", "peer": "host's marks", "peer_value": peer, "ratio": None}
            results[f"control_measured_{name}_percent_{latency}"] = result
    return results


FIGURES: dict[str, Callable[[], dict[str, Result]]] = {"control_measured": measured}


def table() -> list[str]:
    """Return the table of the page."""
    ideal, found = runs()
    heads = ("latency, median/99 %", "agent: time (95 %)", "energy", "host's marks: time (95 %)", "energy")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for latency, pair in found.items():
        cells = [text for run in pair for text in (f"{run.time:+.2f} % ({run.time_p95:+.2f})", f"{-run.saving:+.2f} %")]
        lines.append(f"| {latency.removesuffix('ms').replace('_', '/')} ms | {' | '.join(cells)} |")
    return [*lines, "", f"At once and exact: {ideal.time:+.2f} %, {-ideal.saving:+.2f} %."]
