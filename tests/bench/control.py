"""What control of clocks makes of a plan on simulated GPUs whose changes take time: the agent's, today's, and the best.

Each cell of the grid executes the T_min plan of a pipeline of four stages in ``tests.execution``: without
latency ("ideal"), by the agent's timetable, and by the host's end marks, as clocks were once set. Times are relative to
the mean iteration at default clocks with the same scatter; savings are shares of the ideal's. "Bound" is the share that
no control of any plan can exceed behind the driver's lock. ``tests.bench.control_grid`` measures all cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from tests.execution.agent_control import AgentControl
from tests.execution.bound import least_energy_j, least_work_j, mean_call_s
from tests.execution.controls import DefaultClocks, Ideal
from tests.execution.executor import Control, Executor
from tests.execution.machine import Machine, Outcome
from tests.execution.pipeline import Pipeline

from perseus_core.clock_latency import ClockLatency, Transition
from perseus_core.grain import Grain
from perseus_core.latency import SwitchLatency
from perseus_core.units import us_from_s
from perseus_operator.families.training.features.hardware.hardware import JobHardware, LatencyBasis, next_hardware
from perseus_operator.nodes.latencies import latency_by_clock, measured_latency
from perseus_operator.solving.rehearsed import CONFIDENCE
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import Switches
from perseus_sim.profiles import profile_csv
from perseus_sim.training.hosts import Framework, Hosts
from perseus_solver.certify import Certificate
from perseus_solver.frontier import Planner, solve_frontier
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.rehearsal import Hardware
from perseus_solver.rehearsal.deployment import deployable_frontier
from perseus_solver.schedules import build_schedule
from perseus_solver.significance import NO_SLOWDOWN

GPUS = ("a100", "h100", "h200", "b200")
FORWARDS_MS = (5, 12, 36, 90)
MICROBATCHES = (8, 32, 96)
STAGES = 4
SOLVED_MS: Final = 36.0
NOISE: Final = 0.003
"""Scatter of durations: the public traces have 0.2 to 0.5 %."""
WARM_UP: Final = 8
"""Iterations in which the agent learns; not counted."""
ITERATIONS = {8: 160, 32: 30, 96: 12}
TOLERANCE: Final = 0.01
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
    return frontier.select(rows.tolist())


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


@cache
def swept(gpu: str) -> Mapping[int, SwitchLatency]:
    """Return what the operator knows of a GPU model's clocks after a profiling sweep: each of the eight GPUs of each
    stage has changed to each clock once.
    """
    model, profile = MODELS[gpu], read_profile(profile_csv(STAGES, gpu, forward_s=SOLVED_MS / 1e3))
    clocks = sorted({mhz for table in profile.tables.values() for mhz in table.frequency_mhz.tolist()})
    call_us, lock = model.driver.latency.call_us, model.driver.latency.shared_lock
    node = []
    for number in range(8 * STAGES):
        switches = Switches(model.driver, 1_000 + number)
        takes_us = [us_from_s(switches.draw(mhz).latency_s) for mhz in clocks]
        p50_us, p99_us = (int(np.quantile(takes_us, share, method="higher")) for share in (0.5, 0.99))
        found = tuple(Transition(0, mhz, 1, us, us) for mhz, us in zip(clocks, takes_us, strict=True))
        node.append(ClockLatency(p50_us, p99_us, call_us, lock, changes=len(clocks), transitions=found))
    measured = measured_latency(model.name, node)
    assert measured is not None
    overall = SwitchLatency(measured.p50_us, measured.p99_us, call_us, lock)
    swept = JobHardware(model.name, overall, basis=LatencyBasis.MEASURED, clocks=latency_by_clock(measured, node))
    adopted = next_hardware(None, swept)
    assert adopted is not None
    return adopted.clocks


def hardware_of(cell: Cell) -> Hardware:
    """Return what the rehearsal knows of a cell: what is published, and what a sweep shows."""
    model = MODELS[cell.gpu]
    return Hardware(model.name, model.driver.latency, gpus_per_lock=cell.gpus, noise=NOISE, clocks=swept(cell.gpu))


def deployed_plan(cell: Cell) -> Plan:
    """Return the plan that the operator would deploy at no slowdown; the same for all frameworks."""
    return _deployed_plan(replace(cell, framework=Framework.PYTORCH))


@cache
def _deployed_plan(cell: Cell) -> Plan:
    return plan_under(cell, hardware_of(cell))


def plan_under(cell: Cell, hardware: Hardware) -> Plan:
    """Return the plan that would be deployed in a cell at no slowdown if its hardware were this."""
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    bound_s = reference_of(cell)[0]
    wanted_s = (1 + NO_SLOWDOWN) * bound_s
    found = deployable_frontier(Planner(problem), hardware, confidence=CONFIDENCE, times_s=[wanted_s])
    assert found.rehearsed is not None
    rows = np.flatnonzero(found.time_s <= wanted_s)
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
    model = MODELS[cell.gpu]
    pipeline = Pipeline(problem, plan.clocks_mhz, model.max_clock_mhz, model.power_limit_w)
    driver = None if exact else model.driver
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
    """Return the agent's control, which assumes what is published for the GPU, and what is sent with the plan."""
    return AgentControl(MODELS[cell.gpu].name, MODELS[cell.gpu].clocks_mhz, changes=swept(cell.gpu))


def saved_percent(cell: Cell, energy_j: float) -> float:
    """Return what an energy saves, per cent of the ideal saving."""
    _, default_j, ideal = reference_of(cell)
    return 100 * 100 * (1 - energy_j / default_j) / ideal


def _most_changes(cell: Cell, time_s: float) -> float:
    return time_s / mean_call_s(MODELS[cell.gpu].driver) / cell.gpus


@cache
def _certificates(gpu: str, microbatches: int) -> tuple[Certificate, ...]:
    """Return flows that prove bounds of a problem; watts are the same in every unit of time."""
    planner = Planner(problem_of(gpu, microbatches, SOLVED_MS))
    planner.frontier(100)
    return planner.proofs


def bound_percent(cell: Cell) -> float:
    """Return the share of the ideal saving that no control of any plan can exceed whose iterations take in the mean
    what counts as no slower, per cent; the same for all frameworks.
    """
    return _bound_percent(replace(cell, framework=Framework.PYTORCH))


@cache
def _bound_percent(cell: Cell) -> float:
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    time_s = (1 + NO_SLOWDOWN) * reference_of(cell)[0]
    certificates = _certificates(cell.gpu, cell.microbatches)
    return saved_percent(cell, least_energy_j(problem, certificates, time_s, _most_changes(cell, time_s)))


def bound_of_plan_percent(cell: Cell) -> float:
    """Return the share of the ideal saving that no control of the plan for every instruction can exceed, per cent."""
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    pipeline = Pipeline(problem, instruction_plan(cell).clocks_mhz, MODELS[cell.gpu].max_clock_mhz)
    default_s = reference_of(cell)[0]
    waiting_j = problem.blocking_power_w * pipeline.ranks * default_s
    return min(100.0, saved_percent(cell, least_work_j(pipeline, _most_changes(cell, default_s)) + waiting_j))
