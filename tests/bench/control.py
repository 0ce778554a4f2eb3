"""What control of clocks makes of a plan on simulated GPUs whose changes take time: the agent's, today's, and the best.

Each cell of the grid executes the T_min plan of a pipeline of four stages in ``perseus_sim.execution``: without
latency ("ideal"), by the agent's timetable, and by the host's end marks, as clocks were once set. Times are relative to
the mean iteration at default clocks with the same scatter; savings are shares of the ideal's. "Bound" is the share that
no control can exceed behind the driver's lock. ``python -m tests.bench.control`` prints the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Final

import numpy as np
import numpy.typing as npt
from tests.bench.solver import Result, figure

from perseus_proto.latency import SwitchLatency
from perseus_sim.execution.agent_control import AgentControl
from perseus_sim.execution.bound import least_work_j, mean_call_s
from perseus_sim.execution.controls import DefaultClocks, GpuMarks, HostMarks, Ideal
from perseus_sim.execution.executor import Control, Executor
from perseus_sim.execution.hosts import Framework, Hosts
from perseus_sim.execution.machine import Machine, Outcome
from perseus_sim.execution.pipeline import Pipeline
from perseus_sim.gpus.model import MODELS, profile_csv
from perseus_sim.gpus.switching import DriverModel
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier, Grain
from perseus_solver.rehearsal import Hardware
from perseus_solver.rehearsal.deployment import deployable_frontier
from perseus_solver.schedules import build_schedule

GPUS = ("a100", "h100", "h200", "b200")
FORWARDS_MS = (5, 12, 36, 90)
MICROBATCHES = (8, 32, 96)
STAGES = 4
SOLVED_MS: Final = 36.0
NOISE: Final = 0.003
"""Scatter of durations: the public traces have 0.2 to 0.5 %."""
WARM_UP: Final = 8
"""Iterations in which the agent learns; not counted."""
ITERATIONS = {8: 80, 32: 30, 96: 12}
TOLERANCE: Final = 0.01
SCATTER: Final = 0.002
"""By how much the mean iteration may exceed the bound: without any latency, scatter alone takes that."""
CONFIDENCE: Final = 0.99
CONFIRM: Final = 5
"""The operator's guard: so many iterations in a row that exceed the bound by so much."""


@dataclass(frozen=True)
class Cell:
    """A pipeline on GPUs."""

    gpu: str
    framework: Framework
    microbatches: int
    forward_ms: float
    gpus: int = 8
    """Of a stage, which share the driver's lock of their node; 1: every GPU has its own."""

    @property
    def suffix(self) -> str:
        """The end of its figures' names."""
        own = "" if self.gpus > 1 else "_own_lock"
        return f"{self.gpu}_{self.framework}_{self.microbatches}x{self.forward_ms:g}{own}"

    @property
    def wanted_percent(self) -> float:
        """The saving that is promised, per cent of the ideal's: by the latency, until a stage's last GPU has changed,
        in instructions."""
        latency = MODELS[self.gpu].driver.latency
        share = 1e3 * (latency.p50_s + (self.gpus - 1) * latency.call_s) / self.forward_ms
        return 95.0 if share < 0.2 else 85.0 if share < 1 else 60.0


@dataclass(frozen=True)
class Measured:
    """A control in a cell, in per cent of the mean iteration and energy at default clocks.

    Attributes:
        time, time_p95: mean and 95th percentile of the iteration times, beyond default clocks.
        kept: iterations that kept the bound.
        trips: whether the guard would have withdrawn the plan.
        saving: of energy.
        changes: of clocks in an iteration.
        late: computing time below the planned clock.
        median_s, energy_j: of an iteration.
    """

    time: float
    time_p95: float
    kept: float
    trips: bool
    saving: float
    changes: float
    late: float
    median_s: float
    energy_j: float


@cache
def problem_of(gpu: str, microbatches: int, forward_ms: float) -> Problem:
    """Return the problem of 1F1B on four stages. That of other lengths is the same in another unit of time."""
    if forward_ms != SOLVED_MS:
        problem, scale = problem_of(gpu, microbatches, SOLVED_MS), forward_ms / SOLVED_MS
        options = (
            replace(table, time_s=scale * table.time_s, energy_j=scale * table.energy_j) for table in problem.options
        )
        return replace(problem, options=tuple(options))
    profile = read_profile(profile_csv(STAGES, gpu, forward_s=forward_ms / 1e3))
    schedule = build_schedule("1f1b", stages=STAGES, microbatches=microbatches)
    return build_problem(profile, schedule, blocking_power_w=MODELS[gpu].blocking_power_w)


@cache
def solved(gpu: str, microbatches: int, forward_ms: float) -> Frontier:
    """Return the fast end of the frontier: plans for every instruction, up to 3 % slower than the fastest."""
    if forward_ms != SOLVED_MS:
        known, scale = solved(gpu, microbatches, SOLVED_MS), forward_ms / SOLVED_MS
        return replace(
            known,
            time_s=scale * known.time_s,
            energy_j=scale * known.energy_j,
            energy_lower_bound_j=scale * known.energy_lower_bound_j,
        )
    frontier = solve_frontier(problem_of(gpu, microbatches, forward_ms), points=30)
    rows = np.flatnonzero(frontier.time_s <= 1.03 * frontier.t_min_s)
    return replace(
        frontier,
        time_s=frontier.time_s[rows],
        energy_j=frontier.energy_j[rows],
        energy_lower_bound_j=frontier.energy_lower_bound_j[rows],
        statuses=tuple(frontier.statuses[row] for row in rows.tolist()),
        frequencies_mhz=frontier.frequencies_mhz[rows],
        clock_changes=frontier.clock_changes[rows],
    )


@dataclass(frozen=True)
class Plan:
    """Clocks of the instructions, and what was expected of them: median time (s), mean energy (J) of an iteration."""

    clocks_mhz: tuple[int, ...]
    grain: Grain
    time_s: float
    energy_j: float


def instruction_plan(cell: Cell) -> Plan:
    """Return the plan without slowdown that has a clock for every instruction."""
    frontier = solved(cell.gpu, cell.microbatches, cell.forward_ms)
    clocks_mhz = tuple(frontier.frequencies_mhz[0].tolist())
    return Plan(clocks_mhz, Grain.INSTRUCTION, float(frontier.time_s[0]), float(frontier.energy_j[0]))


def hardware_of(cell: Cell) -> Hardware:
    """Return what the rehearsal knows of a cell: what is published, and no more."""
    model = MODELS[cell.gpu]
    return Hardware(model.name, model.driver.latency, gpus_per_lock=cell.gpus, noise=NOISE)


def deployed_plan(cell: Cell) -> Plan:
    """Return the plan of least expected energy that keeps the bound, as rehearsed; the same for all frameworks."""
    return _deployed_plan(replace(cell, framework=Framework.PYTORCH))


@cache
def _deployed_plan(cell: Cell) -> Plan:
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    known = solved(cell.gpu, cell.microbatches, cell.forward_ms)
    found = deployable_frontier(problem, hardware_of(cell), confidence=CONFIDENCE, frontier=known)
    assert found.rehearsed is not None
    bound_s = reference_of(cell)[0]
    keeps = (found.time_s <= (1 + TOLERANCE) * bound_s) & (found.rehearsed.p50_s <= (1 + SCATTER) * bound_s)
    rows = np.flatnonzero(keeps)
    row = int(rows[found.energy_j[rows].argmin()]) if len(rows) else 0
    return Plan(
        tuple(found.frequencies_mhz[row].tolist()),
        found.rehearsed.grains[row],
        float(found.rehearsed.p50_s[row]),
        float(found.energy_j[row]),
    )


def run(cell: Cell, plan: Plan, control: Control, *, exact: bool = False, iterations: int = 0) -> Outcome:
    """Execute a plan in a cell under a control; ``exact``: without hosts and latency."""
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    pipeline = Pipeline(problem, plan.clocks_mhz, MODELS[cell.gpu].max_clock_mhz)
    driver = None if exact else MODELS[cell.gpu].driver
    hosts = None if exact else Hosts(cell.framework)
    machine = Machine(driver, hosts, 1 if exact else cell.gpus, NOISE, seed=3)
    return Executor(pipeline, machine, control).run(WARM_UP + (iterations or ITERATIONS[cell.microbatches]))


@cache
def reference(cell: Cell) -> tuple[float, float, float]:
    """Return the mean time (s) and energy (J) of an iteration at default clocks, and the ideal plan's saving (%)."""
    plan = instruction_plan(cell)
    default, ideal = (run(cell, plan, control, exact=True) for control in (DefaultClocks(), Ideal()))
    time_s, energy_j = (float(np.mean(values[WARM_UP:])) for values in (default.time_s, default.energy_j))
    return time_s, energy_j, 100 * (1 - float(np.mean(ideal.energy_j[WARM_UP:])) / energy_j)


def reference_of(cell: Cell) -> tuple[float, float, float]:
    """Return the reference of a cell, which does not depend on framework and lock."""
    return reference(replace(cell, framework=Framework.PYTORCH, gpus=1))


def measure(cell: Cell, plan: Plan, control: Control, *, iterations: int = 0) -> Measured:
    """Measure a plan under a control."""
    outcome = run(cell, plan, control, iterations=iterations)
    if isinstance(control, AgentControl):
        control.close()
    default_s, default_j, _ = reference_of(cell)
    time = np.array(outcome.time_s[WARM_UP:]) / default_s - 1
    over = time > TOLERANCE
    return Measured(
        time=100 * float(time.mean()),
        time_p95=100 * float(np.quantile(time, 0.95)),
        kept=100 * float(1 - over.mean()),
        trips=bool(longest(over) >= CONFIRM),
        saving=100 * (1 - float(np.mean(outcome.energy_j[WARM_UP:])) / default_j),
        changes=float(np.mean(outcome.changes[WARM_UP:])),
        late=100 * float(np.mean(outcome.late[WARM_UP:])),
        median_s=float(np.median(outcome.time_s[WARM_UP:])),
        energy_j=float(np.mean(outcome.energy_j[WARM_UP:])),
    )


def longest(over: npt.NDArray[np.bool_]) -> int:
    """Return the length of the longest run of true values."""
    best = length = 0
    for one in over.tolist():
        length = length + 1 if one else 0
        best = max(best, length)
    return best


def agent_of(cell: Cell) -> AgentControl:
    """Return the agent's control, which assumes what is published for the GPU."""
    return AgentControl(MODELS[cell.gpu].name, MODELS[cell.gpu].clocks_mhz)


def bound_percent(cell: Cell) -> float:
    """Return the share of the ideal saving that no control of this plan can exceed, per cent."""
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    pipeline = Pipeline(problem, instruction_plan(cell).clocks_mhz, MODELS[cell.gpu].max_clock_mhz)
    default_s, default_j, ideal = reference_of(cell)
    changes = default_s / mean_call_s(MODELS[cell.gpu].driver) / cell.gpus
    least_j = least_work_j(pipeline, changes)
    waiting_j = pipeline.problem.blocking_power_w * pipeline.ranks * default_s
    return min(100.0, 100 * 100 * (1 - (least_j + waiting_j) / default_j) / ideal)


@cache
def both(cell: Cell) -> tuple[Measured, Measured]:
    """Measure the deployed plan under the agent, and the plan for every instruction under the host's marks."""
    return measure(cell, deployed_plan(cell), agent_of(cell)), measure(cell, instruction_plan(cell), HostMarks())


def compared(value: float, peer: float) -> Result:
    """Return a result beside that of the host's marks."""
    return {**figure(value, "%", "host's marks", peer), "ratio": None}


def figures_of(cell: Cell) -> dict[str, Result]:
    """Measure a cell: the agent's control, and that of the host's marks as its peer."""
    ideal = reference_of(cell)[2]
    ours, marks = both(cell)

    return {
        f"control_time_p95_percent_{cell.suffix}": compared(ours.time_p95, marks.time_p95),
        f"control_saving_percent_of_ideal_{cell.suffix}": {
            **compared(100 * ours.saving / ideal, 100 * marks.saving / ideal),
            "ratio": ours.saving / marks.saving if marks.saving > 0 else None,
        },
        f"control_kept_percent_{cell.suffix}": compared(ours.kept, marks.kept),
        f"control_bound_percent_of_ideal_{cell.suffix}": figure(bound_percent(cell), "%"),
    }


def grid(gpu: str) -> Iterator[Cell]:
    """Yield the cells of a GPU model."""
    for gpus, framework, microbatches, forward_ms in product((8, 1), Framework, MICROBATCHES, FORWARDS_MS):
        yield Cell(gpu, framework, microbatches, forward_ms, gpus)


def measured_grid(gpu: str) -> dict[str, Result]:
    """Measure the cells of a GPU model."""
    return {name: result for cell in grid(gpu) for name, result in figures_of(cell).items()}


# ------------------------------------------------------------------------------------- as it was before

BEFORE = ((8, 36), (16, 12), (32, 36))
LATENCY_S: Final = 0.03


def constant_latency(latency_s: float) -> DriverModel | None:
    """Return a driver whose changes always take so long, of which calls take a sixth; None for no time."""
    if not latency_s:
        return None
    call_s = latency_s / 6
    latency = SwitchLatency(latency_s, latency_s, call_s, False, "constant")
    return DriverModel(latency, call_s, 0.0, 0.0, 1.0, 0.0, 0.0, 0.1, 0.02)


def before_cell(microbatches: int, forward_ms: float, control: Control, hosts: Hosts, latency_s: float) -> float:
    """Return by how many per cent the mean iteration exceeds that of the plan."""
    cell = Cell("a100", hosts.framework, microbatches, forward_ms)
    plan = instruction_plan(cell)
    pipeline = Pipeline(problem_of(cell.gpu, microbatches, forward_ms), plan.clocks_mhz, MODELS[cell.gpu].max_clock_mhz)
    planned_s = plan.time_s
    machine = Machine(constant_latency(latency_s), hosts)
    outcome = Executor(pipeline, machine, control).run(24)
    return 100 * (float(np.mean(outcome.time_s[4:])) / planned_s - 1)


def before() -> dict[str, Result]:
    """Measure what control by the host's marks costs without noise, at constant latencies; the peer is right marks."""
    results = {}
    for (microbatches, forward_ms), latency_s in product(BEFORE, (0.0, LATENCY_S)):
        right = before_cell(microbatches, forward_ms, GpuMarks(), Hosts(Framework.MEGATRON), latency_s)
        for framework in (Framework.MEGATRON, Framework.DEEPSPEED, Framework.PYTORCH):
            value = before_cell(microbatches, forward_ms, HostMarks(), Hosts(framework), latency_s)
            name = f"control_before_time_percent_{framework}_{microbatches}x{forward_ms}_{1e3 * latency_s:g}ms"
            results[name] = {"value": value, "unit": "%", "peer": "GPU's marks", "peer_value": right, "ratio": None}
    return results


def rehearsed() -> dict[str, Result]:
    """Measure how far the rehearsal of a deployed plan is from its execution, at worst over the grid."""
    cells = [cell for gpu in GPUS for cell in grid(gpu) if cell.framework is Framework.PYTORCH]
    pairs = [(deployed_plan(cell), both(cell)[0]) for cell in cells]
    time = max(abs(plan.time_s / measured.median_s - 1) for plan, measured in pairs)
    energy = max(abs(plan.energy_j / measured.energy_j - 1) for plan, measured in pairs)
    return {
        "control_rehearsed_time_error_percent": figure(100 * time, "%"),
        "control_rehearsed_energy_error_percent": figure(100 * energy, "%"),
    }


FIGURES: dict[str, Callable[[], dict[str, Result]]] = {
    "control_before": before,
    **{f"control_grid_{gpu}": lambda gpu=gpu: measured_grid(gpu) for gpu in GPUS},  # type: ignore[misc]
    "control_rehearsed": rehearsed,
}


def rows(cells: Iterator[Cell]) -> Iterator[str]:
    """Yield a table of cells, one line each."""
    yield "| cell | wanted | grain | time p95 | kept | saving | changes | host's marks: time p95 | saving | bound |"
    yield "|---|" + "--:|" * 9
    for cell in cells:
        ideal = reference_of(cell)[2]
        ours, marks = both(cell)
        reached = ours.kept >= 99 and not ours.trips and 100 * ours.saving / ideal >= cell.wanted_percent
        columns = (
            cell.suffix,
            f"{'' if reached else 'not '}{cell.wanted_percent:g} %",
            deployed_plan(cell).grain,
            f"{ours.time_p95:+.2f} %",
            f"{ours.kept:.0f} %",
            f"{100 * ours.saving / ideal:.0f} %",
            f"{ours.changes:.0f}",
            f"{marks.time_p95:+.2f} %",
            f"{100 * marks.saving / ideal:.0f} %",
            f"{bound_percent(cell):.0f} %",
        )
        yield f"| {' | '.join(columns)} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", choices=GPUS, action="append", help="instead of all")
    parser.add_argument("--framework", choices=list(Framework), help="instead of all")
    parser.add_argument("--before", action="store_true", help="only what control by the host's marks costs")
    options = parser.parse_args()
    if options.before:
        for name, result in before().items():
            print(f"{name:64} {result['value']:+6.1f} %   right marks {result['peer_value']:+5.1f} %")
        return
    for gpu in options.gpu or GPUS:
        for row in rows(cell for cell in grid(gpu) if options.framework in (None, cell.framework)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
