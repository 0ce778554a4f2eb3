"""What others would do with the same measurements: plans to compare ours with, as choices of options.

Their times and energies come from `perseus_solver.model.simulator`, like ours. Called by
`perseus_solver.comparison.table` and by benchmarks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Kind
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator

Plan = npt.NDArray[np.intp]


def all_maximum(problem: Problem) -> Plan:
    """Every instruction at its highest clock: what a job does without us."""
    return np.zeros(problem.instructions, dtype=np.intp)


def at_clock(problem: Problem, frequency_mhz: int) -> Plan:
    """Every instruction at one clock."""
    place = [
        0 if t.kind is Kind.CONSTANT else int(np.flatnonzero(t.frequency_mhz == frequency_mhz)[0])
        for t in problem.options
    ]
    return np.array(place, dtype=np.intp)[problem.option_of]


def common_clocks(problem: Problem) -> list[int]:
    """Clocks at which every instruction was measured, descending."""
    measured = [set(t.frequency_mhz.tolist()) for t in problem.options if t.kind is not Kind.CONSTANT]
    return sorted(set.intersection(*measured), reverse=True)


def best_single_clock(simulator: Simulator, deadline_s: float) -> Plan:
    """The one clock for all instructions that takes the least energy and is not slower than the deadline.

    Raises:
        InvalidProblem: no clock common to all instructions is that fast.
    """
    problem = simulator.problem
    best: tuple[float, Plan] | None = None
    for clock in common_clocks(problem):
        plan = at_clock(problem, clock)
        run = simulator.run(plan)
        if run.iteration_time_s <= deadline_s and (best is None or run.energy_j < best[0]):
            best = (float(run.energy_j), plan)
    if best is None:
        raise InvalidProblem(f"no single clock common to all instructions meets {deadline_s:.6g} s")
    return best[1]


def envpipe(simulator: Simulator) -> Plan:
    """EnvPipe's heuristic (Choi et al., USENIX ATC'23), its assignment of clocks; it also reorders, which we leave out.

    It takes the last stage for the heaviest. The *outer envelope* of the pipeline, which is the last stage, the first
    microbatch's forwards and the last microbatch's backwards, runs at the highest clock; all else starts at the clock
    of least energy. While the critical path leaves the envelope, the slowest clocks on it are raised by one step. It
    ends when the critical path is the envelope, or runs at the highest clocks throughout and can be raised no further.

    Each round raises a clock, so there are at most n × options rounds, and far fewer in practice.

    Raises:
        InvalidProblem: the schedule has chunks or split backwards, for which the envelope is not defined.
    """
    problem = simulator.problem
    schedule = problem.schedule
    if schedule.chunks > 1 or np.isin(schedule.kind, (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)).any():
        raise InvalidProblem(f"EnvPipe is defined for plain forwards and backwards, not for {schedule.name}")
    forward, backward = schedule.kind == Kind.FORWARD, schedule.kind == Kind.BACKWARD
    envelope = (
        (schedule.stage == problem.stages - 1)
        | (forward & (schedule.microbatch == 0))
        | (backward & (schedule.microbatch == schedule.microbatches - 1))
        | (schedule.kind == Kind.CONSTANT)
    )
    plan = np.where(envelope, 0, _thriftiest_clock(problem))
    frequency = np.zeros((len(problem.options), max(t.frequency_mhz.size for t in problem.options)), dtype=np.int32)
    for row, table in zip(frequency, problem.options, strict=True):
        row[: table.frequency_mhz.size] = table.frequency_mhz
    predecessors = _predecessors(problem)
    while True:
        path = _critical_path(simulator.end_s(simulator.duration_s(plan)), predecessors)
        if envelope[path].all():
            return plan
        raisable = path[plan[path] > 0]
        if not raisable.size:
            return plan
        clocks = frequency[problem.option_of[raisable], plan[raisable]]
        plan[raisable[clocks == clocks.min()]] -= 1


def _thriftiest_clock(problem: Problem) -> Plan:
    """The single clock of least energy, waiting not counted; what was not measured there takes its nearest clock."""
    counts = np.bincount(problem.option_of, minlength=len(problem.options))
    clocks = sorted({f for t in problem.options for f in t.frequency_mhz.tolist()})
    nearest = [[int(np.abs(t.frequency_mhz - f).argmin()) for t in problem.options] for f in clocks]
    energy = [
        sum(count * float(t.energy_j[k]) for t, k, count in zip(problem.options, row, counts.tolist(), strict=True))
        for row in nearest
    ]
    return np.array(nearest[int(np.argmin(energy))], dtype=np.intp)[problem.option_of]


def _predecessors(problem: Problem) -> list[list[tuple[int, float]]]:
    before: list[list[tuple[int, float]]] = [[] for _ in range(problem.instructions)]
    for a, b, delay in zip(
        problem.edge_from.tolist(), problem.edge_to.tolist(), problem.edge_delay_s.tolist(), strict=True
    ):
        before[b].append((a, delay))
    return before


def _critical_path(end_s: npt.NDArray[np.float64], predecessors: list[list[tuple[int, float]]]) -> npt.NDArray[np.intp]:
    """From the last instruction to end back to a first, always to the predecessor that was waited for.

    Of two that end together the one on the same stage is taken, as EnvPipe does when no wait is seen.
    """
    end, at = end_s.tolist(), int(np.argmax(end_s))
    path = [at]
    while predecessors[at]:
        at = max(predecessors[at], key=lambda edge: end[edge[0]] + edge[1])[0]
        path.append(at)
    return np.array(path, dtype=np.intp)
