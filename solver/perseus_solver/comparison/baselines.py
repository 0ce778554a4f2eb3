"""Plans that other methods make from the same measurements, as choices of options.

Their times and energies come from `perseus_solver.model.simulator`, like those of this solver's plans.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind
from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import latest_s
from perseus_solver.model.problem import Problem
from perseus_solver.model.simulator import Simulator

Plan = npt.NDArray[np.intp]


def all_maximum(problem: Problem) -> Plan:
    """Return the plan with every instruction at its highest clock: what a job does without Perseus.

    Args:
        problem: the problem to plan.

    Returns:
        int[n], positions in the options.
    """
    return np.zeros(problem.instructions, dtype=np.intp)


def at_clock(problem: Problem, frequency_mhz: int) -> Plan:
    """Return the plan with every instruction at one clock.

    Args:
        problem: the problem to plan.
        frequency_mhz: a clock at which every instruction was measured.

    Returns:
        int[n], positions in the options.
    """
    place = [
        0 if t.kind is InstructionKind.CONSTANT else int(np.flatnonzero(t.frequency_mhz == frequency_mhz)[0])
        for t in problem.options
    ]
    return np.array(place, dtype=np.intp)[problem.option_of]


def common_clocks(problem: Problem) -> list[int]:
    """Return the clocks at which every instruction was measured, in MHz, descending."""
    measured = [set(t.frequency_mhz.tolist()) for t in problem.options if t.kind is not InstructionKind.CONSTANT]
    return sorted(set.intersection(*measured), reverse=True)


def best_single_clock(simulator: Simulator, deadline_s: float) -> Plan:
    """Return the plan of least energy with one clock for all instructions that meets a deadline.

    Args:
        simulator: of the problem.
        deadline_s: longest iteration time allowed, seconds.

    Returns:
        int[n], positions in the options.

    Raises:
        InvalidProblem: no clock that is common to all instructions is that fast.
    """
    problem = simulator.problem
    best: tuple[float, Plan] | None = None
    for clock in common_clocks(problem):
        plan = at_clock(problem, clock)
        run = simulator.run(plan)
        if run.iteration_time_s <= latest_s(deadline_s) and (best is None or run.energy_j < best[0]):
            best = (float(run.energy_j), plan)
    if best is None:
        raise InvalidProblem(f"no single clock common to all instructions meets {deadline_s:.6g} s")
    return best[1]


def envpipe(simulator: Simulator) -> Plan:
    """Return the plan of EnvPipe's heuristic (Choi et al., USENIX ATC 2023), without its reordering of instructions.

    The heuristic assumes that the last stage is the heaviest. The *outer envelope* of the pipeline is the last stage,
    the forwards of the first microbatch and the backwards of the last microbatch. It runs at the highest clock; all
    other instructions start at the clock of least energy. While the critical path leaves the envelope, the slowest
    clocks on it are raised by one step. The heuristic ends when the critical path is the envelope, or runs at the
    highest clocks throughout.

    Each round raises a clock, so there are at most n × options rounds, and far fewer in practice.

    Args:
        simulator: of the problem.

    Returns:
        int[n], positions in the options.

    Raises:
        InvalidProblem: the schedule has chunks or split backwards, for which the envelope is not defined.
    """
    problem = simulator.problem
    schedule = problem.schedule
    if (
        schedule.chunks > 1
        or np.isin(schedule.kind, (InstructionKind.INPUT_GRADIENT, InstructionKind.WEIGHT_GRADIENT)).any()
    ):
        raise InvalidProblem(f"EnvPipe is defined for plain forwards and backwards, not for {schedule.name}")
    forward, backward = schedule.kind == InstructionKind.FORWARD, schedule.kind == InstructionKind.BACKWARD
    envelope = (
        (schedule.stage == problem.stages - 1)
        | (forward & (schedule.microbatch == 0))
        | (backward & (schedule.microbatch == schedule.microbatches - 1))
        | (schedule.kind == InstructionKind.CONSTANT)
    )
    plan = np.where(envelope, 0, _least_energy_clock(problem))
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


def _least_energy_clock(problem: Problem) -> Plan:
    """Return the plan of the single clock of least energy, waiting not counted.

    An instruction that was not measured at that clock runs at its nearest.
    """
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
    """Return the critical path from the last instruction to end back to a first one.

    Of two predecessors that end together the one on the same stage is taken, as EnvPipe does where no wait is seen.
    """
    end, at = end_s.tolist(), int(np.argmax(end_s))
    path = [at]
    while predecessors[at]:
        at = max(predecessors[at], key=lambda edge: end[edge[0]] + edge[1])[0]
        path.append(at)
    return np.array(path, dtype=np.intp)
