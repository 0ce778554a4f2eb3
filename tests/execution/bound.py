"""What no control can exceed: the least energy if clocks change no more often than the driver's lock lets through.

A control that knows the future and every latency asks for each change just so early that it is in effect in time. What
remains is the lock: the calls of an iteration must fit into the iteration. Which changes to leave out is found by a
price per change: for each price the best clocks of a rank follow from one pass over its instructions, and any price
gives a lower bound of the energy (Lagrange). The result is the largest of these bounds.

Of one plan, instructions whose changes are left out run at a higher clock than planned, so that nothing is late. Of any
plan that keeps a time, a second of each instruction has a price, too: the flow of a certificate
(`perseus_solver.certify`). An instruction in which the clock changes is a mixture of its options, and takes no less
than the cheaper one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from tests.execution.pipeline import Pipeline

from perseus_sim.gpus.switching import DriverModel, Switches
from perseus_solver.certify import Bound, Certificate, deadline_bound, prove
from perseus_solver.model.problem import Problem

_DRAWS = 4_000
_HALVINGS = 40
_FLOWS = 5
"""Certificates that are tried: those that prove most where changes are free."""


def mean_call_s(driver: DriverModel) -> float:
    """Mean duration of a call, seconds."""
    switches = Switches(driver, 0)
    return sum(switches.draw(0).call_s for _ in range(_DRAWS)) / _DRAWS


def least_work_j(pipeline: Pipeline, changes: float) -> float:
    """Lower bound of an iteration's energy of computing, if no instruction runs below its planned clock.

    Args:
        pipeline: the problem and its plan.
        changes: of clocks of each rank that fit into an iteration.

    Returns:
        Joules at clocks that keep the plan's time; waiting is not included.
    """
    return sum(_best(_energies(pipeline, rank), changes) for rank in range(pipeline.ranks))


def least_energy_j(
    problem: Problem, certificates: Sequence[Certificate], iteration_time_s: float, changes: float
) -> float:
    """Lower bound of an iteration's energy under any plan and any control.

    Args:
        problem: what is planned.
        certificates: flows that prove bounds of it.
        iteration_time_s: what an iteration takes at most in the mean, seconds, overhead included.
        changes: of clocks of each rank that fit into an iteration, in the mean.

    Returns:
        Joules, waiting included.

    Raises:
        InvalidCertificate: a flow proves nothing.
    """

    def proven_j(bound: Bound) -> float:
        return float(deadline_bound(problem, [bound], np.array([iteration_time_s]))[0])

    bounds = [prove(problem, flow) for flow in certificates]
    strongest = sorted(range(len(bounds)), key=lambda k: -proven_j(bounds[k]))[:_FLOWS]
    return max(proven_j(bounds[k]) + _excess_j(problem, certificates[k].through_w, changes) for k in strongest)


def _excess_j(problem: Problem, through_w: npt.NDArray[np.float64], changes: float) -> float:
    """How much more energy, at these prices of time, all ranks take if their clocks change so often only."""
    excess = 0.0
    for first, end in pairwise(problem.stage_offset.tolist()):
        tables = [problem.options[table] for table in problem.option_of[first:end].tolist()]
        clocks = np.unique(np.concatenate([options.frequency_mhz for options in tables]))
        table = np.full((end - first, len(clocks)), np.inf)
        for row, (options, watts) in enumerate(zip(tables, through_w[first:end].tolist(), strict=True)):
            cost = options.energy_j + (watts - problem.blocking_power_w) * options.time_s
            # A time that does not depend on the clock is the same at each.
            columns = clocks.searchsorted(options.frequency_mhz) if options.frequency_mhz.any() else slice(None)
            table[row, columns] = cost - cost.min()
        excess += _best(table, changes)
    return excess


def _best(table: npt.NDArray[np.float64], changes: float) -> float:
    low, high, bound = 0.0, 1_000.0, _priced(table, 0.0)[0]
    for _ in range(_HALVINGS):
        price = (low + high) / 2
        cost, count = _priced(table, price)
        bound = max(bound, cost - price * changes)
        low, high = (price, high) if count > changes else (low, price)
    return bound


def _energies(pipeline: Pipeline, rank: int) -> npt.NDArray[np.float64]:
    """float[instructions, clocks]: joules of each instruction; infinite below its planned clock."""
    first, end = pipeline.offsets[rank], pipeline.offsets[rank + 1]
    clocks = sorted(set(pipeline.plan[first:end]))
    table = np.full((end - first, len(clocks)), np.inf)
    for row, number in enumerate(range(first, end)):
        for column, mhz in enumerate(clocks):
            if mhz >= pipeline.plan[number]:
                time_s, power_w = pipeline.curve_of[number].at(mhz)
                # Beside a longer wait: what is saved by computing faster than planned is spent waiting.
                table[row, column] = time_s * (power_w - pipeline.problem.blocking_power_w)
    return table


def _priced(table: npt.NDArray[np.float64], price: float) -> tuple[float, int]:
    """Least energy and price of the changes in between, and how many these are."""
    cost, count = table[0].copy(), np.zeros(table.shape[1], dtype=int)
    for row in table[1:]:
        place = int(cost.argmin())
        change = cost[place] + price < cost
        cost = np.where(change, cost[place] + price, cost) + row
        count = np.where(change, count[place] + 1, count)
    place = int(cost.argmin())
    return float(cost[place]), int(count[place])
