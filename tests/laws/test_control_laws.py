"""What the control of clocks promises, on a few cells of the grid of `make bench ONLY=control`."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from tests.bench.control import Cell, Measured, agent_of, deployed_plan, instruction_plan, measure, reference_of

from perseus_sim.execution.controls import HostMarks
from perseus_sim.execution.hosts import Framework

CELLS = [
    Cell("a100", Framework.PYTORCH, 8, 36, gpus=1),
    Cell("a100", Framework.MEGATRON, 8, 90, gpus=1),
    Cell("h100", Framework.DEEPSPEED, 8, 90, gpus=1),
    Cell("h200", Framework.PYTORCH, 32, 90, gpus=1),
]
PROMISED = [
    Cell(gpu, framework, microbatches, forward_ms, gpus=1)
    for gpu, framework, microbatches, forward_ms in product(("a100", "h100"), Framework, (8, 32), (12, 90))
]
"""Latency × lead of the host × number of microbatches × length of an instruction."""


@cache
def agent(cell: Cell) -> Measured:
    return measure(cell, deployed_plan(cell), agent_of(cell))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.suffix)
def test_the_agent_keeps_the_bound_and_most_of_the_saving(cell: Cell) -> None:
    found = agent(cell)
    assert found.kept >= 99
    assert not found.trips
    assert 100 * found.saving / reference_of(cell)[2] >= cell.wanted_percent


@pytest.mark.parametrize("cell", PROMISED, ids=lambda cell: cell.suffix)
def test_the_promised_slowdown_is_kept_whatever_lead_latency_and_length(cell: Cell) -> None:
    found = measure(cell, deployed_plan(cell), agent_of(cell), iterations=20)
    assert found.kept >= 99
    assert not found.trips


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.suffix)
def test_the_timetable_is_never_slower_than_the_hosts_marks(cell: Cell) -> None:
    plan = instruction_plan(cell)
    assert measure(cell, plan, agent_of(cell)).time <= measure(cell, plan, HostMarks()).time


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.suffix)
def test_an_execution_is_what_was_rehearsed(cell: Cell) -> None:
    plan, found = deployed_plan(cell), agent(cell)
    assert found.median_s == pytest.approx(plan.time_s, rel=0.003)
    assert found.energy_j == pytest.approx(plan.energy_j, rel=0.01)
