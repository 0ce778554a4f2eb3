"""The JSON that the command writes: a frontier or one plan, streamed, because a large frontier has millions of entries.

Other programs read these documents, so their keys do not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from perseus_solver.kinds import Kind
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies, Frontier, Point


class PlanWriter:
    """Writes the clocks of one problem's instructions. What is the same in all plans is prepared once."""

    def __init__(self, problem: Problem) -> None:
        schedule = problem.schedule
        labels = {int(kind): kind.label for kind in Kind}
        self._heads = np.array(
            [
                f'{{"instruction":"{labels[kind]}","microbatch":{microbatch},"chunk":{chunk},"frequency_mhz":'
                for kind, microbatch, chunk in zip(
                    schedule.kind.tolist(), schedule.microbatch.tolist(), schedule.chunk.tolist(), strict=True
                )
            ],
            dtype=object,
        )
        self._offset = problem.stage_offset.tolist()

    def stages(self, frequencies_mhz: Frequencies) -> str:
        """Return ``[[{…},…],…]``: the instructions of each stage in execution order."""
        cells = [f"{head}{clock}}}" for head, clock in zip(self._heads, frequencies_mhz.tolist(), strict=True)]
        rows = (",".join(cells[a:b]) for a, b in zip(self._offset[:-1], self._offset[1:], strict=True))
        return "[" + ",".join(f"[{row}]" for row in rows) + "]"

    def point(self, point: Point) -> str:
        """Return one plan with its figures."""
        figures = {
            "iteration_time_s": point.iteration_time_s,
            "energy_j": point.energy_j,
            "energy_lower_bound_j": point.energy_lower_bound_j,
            "gap": point.gap,
            "status": str(point.status),
            "clock_changes": point.clock_changes,
        }
        return f'{json.dumps(figures)[:-1]}, "stages": {self.stages(point.frequencies_mhz)}}}'


def plan_document(problem: Problem, point: Point) -> Iterator[bytes]:
    """Yield what ``perseus plan`` writes."""
    yield PlanWriter(problem).point(point).encode() + b"\n"


def frontier_document(
    problem: Problem, frontier: Frontier, *, baseline_time_s: float, baseline_energy_j: float, solve_seconds: float
) -> Iterator[bytes]:
    """Yield what ``perseus frontier`` writes, one plan at a time.

    Args:
        problem: the problem that was solved.
        frontier: its solution.
        baseline_time_s, baseline_energy_j: an iteration with all clocks at their maximum.
        solve_seconds: how long solving took.
    """
    head = {
        "schedule": problem.schedule.name,
        "stages": problem.stages,
        "microbatches": problem.schedule.microbatches,
        "blocking_power_w": problem.blocking_power_w,
        "solve_seconds": solve_seconds,
        "baseline": {"iteration_time_s": baseline_time_s, "energy_j": baseline_energy_j},
    }
    writer = PlanWriter(problem)
    yield f'{json.dumps(head)[:-1]}, "points": [\n'.encode()
    for index, point in enumerate(frontier):
        yield (",\n" if index else "").encode() + writer.point(point).encode()
    yield b"\n]}\n"
