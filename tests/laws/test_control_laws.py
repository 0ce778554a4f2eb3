"""What the control of clocks promises, on a few cells of the grid of `make bench ONLY=control`."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest
from tests.bench.control import (
    STAGES,
    Cell,
    Measured,
    Plan,
    agent_of,
    deployed_plan,
    hardware_of,
    instruction_plan,
    measure,
    problem_of,
    reference_of,
)
from tests.execution.controls import HostMarks

from perseus_core.grain import Grain
from perseus_sim.training.hosts import Framework
from perseus_solver.rehearsal import rehearse

pytestmark = pytest.mark.usefixtures("short_search")

SHORT = 40
"""Iterations that show the same as the 160 of the grid; all of these must keep the bound."""
SHORT_CELLS = [
    Cell("a100", Framework.PYTORCH, 8, 36, gpus=1),
    Cell("a100", Framework.MEGATRON, 8, 90, gpus=1),
    Cell("h100", Framework.DEEPSPEED, 8, 90, gpus=1),
]
CELLS = [*SHORT_CELLS, Cell("h200", Framework.PYTORCH, 32, 90, gpus=1)]
in_cells = pytest.mark.parametrize(
    ("cell", "iterations"),
    [
        *(pytest.param(cell, SHORT, id=f"{cell.suffix}-short") for cell in SHORT_CELLS),
        *(pytest.param(cell, 0, id=cell.suffix, marks=pytest.mark.slow) for cell in CELLS),
    ],
)
PROMISED = [
    Cell(gpu, framework, microbatches, forward_ms, gpus=1)
    for gpu, framework, microbatches, forward_ms in product(("a100", "h100"), Framework, (8, 32), (12, 90))
]
"""Latency × lead of the host × number of microbatches × length of an instruction."""


@cache
def agent(cell: Cell, iterations: int) -> Measured:
    return measure(cell, deployed_plan(cell), agent_of(cell), iterations=iterations)


@in_cells
def test_the_agent_keeps_the_bound_and_most_of_the_saving(cell: Cell, iterations: int) -> None:
    found = agent(cell, iterations)
    assert found.kept >= 99
    assert not found.trips
    assert 100 * found.saving / reference_of(cell)[2] >= cell.wanted_percent


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.suffix, marks=[pytest.mark.slow] * (cell.microbatches > 8)) for cell in PROMISED],
)
def test_the_promised_slowdown_is_kept_whatever_lead_latency_and_length(cell: Cell) -> None:
    found = measure(cell, deployed_plan(cell), agent_of(cell), iterations=20)
    assert found.kept >= 99
    assert not found.trips


@in_cells
def test_the_timetable_is_never_slower_than_the_hosts_marks(cell: Cell, iterations: int) -> None:
    plan = instruction_plan(cell)
    timetable, marks = (measure(cell, plan, one, iterations=iterations) for one in (agent_of(cell), HostMarks()))
    assert timetable.time <= marks.time


@in_cells
def test_an_execution_is_what_was_rehearsed(cell: Cell, iterations: int) -> None:
    plan, found = deployed_plan(cell), agent(cell, iterations)
    assert found.median_s == pytest.approx(plan.time_s, rel=0.003)
    assert found.energy_j == pytest.approx(plan.energy_j, rel=0.01)


@pytest.mark.parametrize("iterations", [SHORT // 2, pytest.param(0, marks=pytest.mark.slow)])
def test_gpus_that_change_one_after_another_draw_what_was_rehearsed(iterations: int) -> None:
    """Each by itself: while one waits at the new clock another computes at the old one."""
    cell = Cell("h100", Framework.PYTORCH, 8, 5)
    stage, number = np.divmod(np.arange(STAGES * 16), 16)
    slow = (number >= np.array([1, 2, 1, 16])[stage]) & (number < 14)
    clocks = np.where(slow, np.array([1170, 1170, 1215, 0])[stage], 1425).astype(np.uint16)
    problem = problem_of(cell.gpu, cell.microbatches, cell.forward_ms)
    rehearsed = rehearse(problem, clocks[None], hardware_of(cell), samples=512)
    plan = Plan(tuple(clocks.tolist()), Grain.INSTRUCTION, 0.0, 0.0)
    found = measure(cell, plan, agent_of(cell), iterations=iterations)
    assert found.median_s == pytest.approx(float(rehearsed.time_kept_s(0.5)[0]), rel=0.003)
    assert found.energy_j == pytest.approx(float(rehearsed.mean_energy_j[0]), rel=0.003)
