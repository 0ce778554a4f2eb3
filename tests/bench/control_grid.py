"""The grid of control: every cell of ``tests.bench.control`` under every framework, and control as it once was.

A row is what was measured of one cell. The rows of a GPU model are stored beside the other figures of `make bench`
(``out/control``), from which ``tests.bench.control_page`` writes the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
from tests.bench.control import (
    FORWARDS_MS,
    GPUS,
    MICROBATCHES,
    Cell,
    Measured,
    agent_of,
    bound_percent,
    deployed_plan,
    instruction_plan,
    measure,
    problem_of,
    reference_of,
)
from tests.bench.solver import Result, figure
from tests.execution.controls import GpuMarks, HostMarks
from tests.execution.executor import Control, Executor
from tests.execution.machine import Machine
from tests.execution.pipeline import Pipeline

from perseus_core.latency import SwitchLatency
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import DriverModel
from perseus_sim.training.hosts import Framework, Hosts

STORE: Final = Path("out/control")


@dataclass(frozen=True)
class Row:
    """What was measured of a cell.

    Attributes:
        cell: which.
        grain: of the deployed plan.
        ideal: saving of the plan for every instruction where changes are free and exact, per cent.
        bound: share of it that no control of any plan can exceed behind the driver's lock, per cent.
        agent: the deployed plan under the agent.
        marks: the plan for every instruction, set by the host's marks.
        time_error, energy_error: of the rehearsal from the agent's execution, per cent.
    """

    cell: Cell
    grain: str
    ideal: float
    bound: float
    agent: Measured
    marks: Measured
    time_error: float
    energy_error: float

    @property
    def keeps(self) -> bool:
        """Whether the bound is kept in 99 % of the iterations, and the guard never trips."""
        return self.agent.kept >= 99 and not self.agent.trips

    @property
    def saved(self) -> float:
        """Of the ideal saving, per cent."""
        return 100 * self.agent.saving / self.ideal

    @property
    def reached(self) -> bool:
        """Whether the cell holds what is promised."""
        return self.keeps and self.saved >= self.cell.wanted_percent

    @classmethod
    def of(cls, stored: dict[str, object]) -> Row:
        """Return a row that was stored."""
        cell, agent, marks = (dict(stored[key]) for key in ("cell", "agent", "marks"))  # type: ignore[call-overload]
        cell["framework"] = Framework(cell["framework"])
        return cls(**{**stored, "cell": Cell(**cell), "agent": Measured(**agent), "marks": Measured(**marks)})  # type: ignore[arg-type]


@cache
def row_of(cell: Cell) -> Row:
    """Measure a cell."""
    plan, agent = deployed_plan(cell), measure(cell, deployed_plan(cell), agent_of(cell))
    return Row(
        cell=cell,
        grain=str(plan.grain),
        ideal=reference_of(cell)[2],
        bound=bound_percent(cell),
        agent=agent,
        marks=measure(cell, instruction_plan(cell), HostMarks()),
        time_error=100 * (plan.time_s / agent.median_s - 1),
        energy_error=100 * (plan.energy_j / agent.energy_j - 1),
    )


def compared(value: float, peer: float) -> Result:
    """Return a result beside that of the host's marks."""
    return {**figure(value, "%", "host's marks", peer), "ratio": None}


def figures_of(row: Row) -> dict[str, Result]:
    """Return the figures of a cell: the agent's control, and that of the host's marks as its peer."""
    agent, marks, suffix = row.agent, row.marks, row.cell.suffix
    return {
        f"control_time_p95_percent_{suffix}": compared(agent.time_p95, marks.time_p95),
        f"control_saving_percent_of_ideal_{suffix}": {
            **compared(row.saved, 100 * marks.saving / row.ideal),
            "ratio": agent.saving / marks.saving if marks.saving > 0 else None,
        },
        f"control_kept_percent_{suffix}": compared(agent.kept, marks.kept),
        f"control_bound_percent_of_ideal_{suffix}": figure(row.bound, "%"),
    }


def grid(gpu: str) -> Iterator[Cell]:
    """Yield the cells of a GPU model; those that run the same plan follow each other."""
    for gpus, microbatches, forward_ms, framework in product((8, 1), MICROBATCHES, FORWARDS_MS, Framework):
        yield Cell(gpu, framework, microbatches, forward_ms, gpus)


def measured_grid(gpu: str, store: Path = STORE) -> dict[str, Result]:
    """Measure the cells of a GPU model, and store the rows."""
    rows = [row_of(cell) for cell in grid(gpu)]
    store.mkdir(parents=True, exist_ok=True)
    (store / f"{gpu}.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return {name: result for row in rows for name, result in figures_of(row).items()}


def stored_grid(gpu: str, store: Path = STORE) -> list[Row]:
    """Return the rows of a GPU model as they were measured last.

    Raises:
        OSError: they were not.
    """
    return [Row.of(stored) for stored in json.loads((store / f"{gpu}.json").read_text())]


def rehearsed() -> dict[str, Result]:
    """Measure how far the rehearsal of a deployed plan is from the agent's execution, at worst over the grid."""
    rows = [row_of(cell) for gpu in GPUS for cell in grid(gpu)]
    return {
        "control_rehearsed_time_error_percent": figure(max(abs(row.time_error) for row in rows), "%"),
        "control_rehearsed_energy_error_percent": figure(max(abs(row.energy_error) for row in rows), "%"),
    }


# ------------------------------------------------------------------------------------- as it was before

BEFORE = ((8, 36), (16, 12), (32, 36))
LATENCY_S: Final = 0.03


def constant_latency(latency_s: float) -> DriverModel | None:
    """Return a driver whose changes always take so long, of which calls take a sixth; None for no time."""
    if not latency_s:
        return None
    call_s = latency_s / 6
    latency = SwitchLatency.of_seconds(latency_s, latency_s, call_s, False, "constant")
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


FIGURES: dict[str, Callable[[], dict[str, Result]]] = {
    "control_before": before,
    **{f"control_grid_{gpu}": lambda gpu=gpu: measured_grid(gpu) for gpu in GPUS},  # type: ignore[misc]
    "control_rehearsed": rehearsed,
}
