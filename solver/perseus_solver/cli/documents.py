"""The JSON that the command writes: a frontier or one plan, streamed, because a large frontier has millions of entries.

Other programs read these documents, so their keys do not change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_core.grain import Grain
from perseus_core.instruction import InstructionKind
from perseus_solver.cli.files import read_file
from perseus_solver.errors import SolverError
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.point import status_of
from perseus_solver.model.problem import Problem
from perseus_solver.model.result import Frequencies, Frontier, Point

if TYPE_CHECKING:
    from perseus_solver.rehearsal import Rehearsal, RobustPlan

MAX_PLAN_BYTES = 256 << 20
"""Of a plan that is read: a million instructions take about 80 MiB."""
_MAX_MHZ = 65_535


class InvalidPlan(SolverError):
    """The file is not a plan, or not one of this schedule."""


class PlanWriter:
    """Writes the clocks of one problem's instructions. What is the same in all plans is prepared once.

    Args:
        problem: the problem.
        full: with each clock say of which instruction it is; otherwise `instructions` says it once for all plans, in
            the same order, and a plan takes a fifteenth of the bytes.
    """

    def __init__(self, problem: Problem, *, full: bool = True) -> None:
        schedule = problem.schedule
        labels = {int(kind): kind.label for kind in InstructionKind}
        self._full = full
        self._names = [
            f'{{"instruction":"{labels[kind]}","microbatch":{microbatch},"chunk":{chunk}'
            for kind, microbatch, chunk in zip(
                schedule.kind.tolist(), schedule.microbatch.tolist(), schedule.chunk.tolist(), strict=True
            )
        ]
        self._offset = problem.stage_offset.tolist()

    def instructions(self) -> str:
        """Return ``[[{…},…],…]``: the instructions of each stage in execution order, without clocks."""
        return self._stages([f"{name}}}" for name in self._names])

    def _clocks(self, frequencies_mhz: Frequencies) -> str:
        """Return the member of a plan that has its clocks: of each stage in execution order."""
        clocks = frequencies_mhz.tolist()
        if not self._full:
            return f'"frequency_mhz": {self._stages([str(clock) for clock in clocks])}'
        steps = [f'{name},"frequency_mhz":{clock}}}' for name, clock in zip(self._names, clocks, strict=True)]
        return f'"stages": {self._stages(steps)}'

    def _stages(self, cells: Sequence[str]) -> str:
        rows = (",".join(cells[a:b]) for a, b in zip(self._offset[:-1], self._offset[1:], strict=True))
        return "[" + ",".join(f"[{row}]" for row in rows) + "]"

    def point(
        self,
        point: Point,
        grain: Grain | None = None,
        expected: Mapping[str, Any] | None = None,
        *,
        straggler_part: bool | None = None,
        robust: RobustPlan | None = None,
    ) -> str:
        """Return one plan with its figures, and what is expected of it on given hardware, alone.

        ``straggler_part``: whether the plan is in that part of a frontier; None: it is not of a frontier. ``robust``:
        what the plan does under scatter, if it was made for that.
        """
        figures: dict[str, Any] = {
            "iteration_time_s": point.iteration_time_s,
            "energy_j": point.energy_j,
            "energy_lower_bound_j": point.energy_lower_bound_j,
            "gap": point.gap,
            "status": str(point.status),
            "clock_changes": point.clock_changes,
        }
        if grain is not None and expected is not None:
            figures |= {"grain": grain.word, "expected": expected}
        if robust is not None:
            times = {name: robust.time_kept_s(share) for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
            figures["expected"] = {"iteration_time_s": times, "energy_j": {"mean": robust.mean_energy_j}}
            figures |= {"deadline_s": robust.deadline_s, "kept": robust.kept}
        if straggler_part is not None:
            figures["straggler_part"] = straggler_part
        return f"{json.dumps(figures)[:-1]}, {self._clocks(point.frequencies_mhz)}}}"


def expected(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return what is expected of the one plan that was rehearsed."""
    times = {name: float(rehearsal.time_kept_s(share)[0]) for name, share in (("p50", 0.5), ("p95", 0.95))}
    return {"iteration_time_s": times, "energy_j": {"mean": float(rehearsal.mean_energy_j[0])}}


class Deployable(NamedTuple):
    """The plans of a deployable frontier.

    Attributes:
        ideal: each as it is where clocks change at once.
        rehearsal: of all of them.
        grains: of each.
    """

    ideal: Sequence[Point]
    rehearsal: Rehearsal
    grains: Sequence[Grain]

    def plan(self, index: int) -> tuple[Point, Grain, Rehearsal]:
        """Return one of them."""
        return self.ideal[index], self.grains[index], self.rehearsal.of_plan(index)

    def written(self, index: int, writer: PlanWriter, *, straggler_part: bool) -> str:
        """Return one of them as `PlanWriter.point` writes it."""
        point, grain, rehearsal = self.plan(index)
        return writer.point(point, grain, expected(rehearsal), straggler_part=straggler_part)


def plan_document(
    problem: Problem,
    point: Point,
    grain: Grain | None = None,
    rehearsal: Rehearsal | None = None,
    robust: RobustPlan | None = None,
) -> Iterator[bytes]:
    """Yield what ``perseus plan`` writes."""
    figures = None if rehearsal is None else expected(rehearsal)
    yield PlanWriter(problem).point(point, grain, figures, robust=robust).encode() + b"\n"


def deployed_plan_document(problem: Problem, point: Point) -> Iterator[bytes]:
    """Yield what ``perseus plan --hardware`` writes, of a plan that is stored in a frontier of that hardware.

    Args:
        problem: gives the names of the instructions.
        point: a plan of a frontier that was rehearsed. Its bound is that of the time that it keeps, which no plan that
            is faster at once can be below either.
    """
    expectation = point.expectation
    assert expectation is not None
    ideal_j = expectation.ideal_energy_j
    bound_j = min(point.energy_lower_bound_j, ideal_j)
    ideal = replace(
        point,
        iteration_time_s=expectation.ideal_time_s,
        energy_j=ideal_j,
        energy_lower_bound_j=bound_j,
        status=status_of(ideal_j / bound_j - 1.0),
    )
    times = {"p50": expectation.p50_s, f"p{100 * expectation.confidence:g}": point.iteration_time_s}
    figures = {"iteration_time_s": times, "energy_j": {"mean": point.energy_j}}
    yield PlanWriter(problem).point(ideal, expectation.grain, figures).encode() + b"\n"


def read_plan(path: Path, problem: Problem) -> Frequencies:
    """Read the clocks of a plan that ``perseus plan`` has written.

    Args:
        path: the file.
        problem: the problem, whose schedule must be the plan's.

    Returns:
        uint16[n], MHz.

    Raises:
        InvalidPlan: the file cannot be read, is no plan, or is one of another schedule.
    """
    data = read_file("plan", path, MAX_PLAN_BYTES, InvalidPlan)
    try:
        stages = json.loads(data)["stages"]
        steps = [
            [(step["instruction"], step["microbatch"], step["chunk"], step["frequency_mhz"]) for step in stage]
            for stage in stages
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidPlan(f"plan {path} is not what perseus plan writes: {error!r}") from None
    wanted = [problem.schedule.of_stage(stage) for stage in range(problem.stages)]
    if [[step[:3] for step in stage] for stage in steps] != wanted:
        raise InvalidPlan(f"plan {path} is of another schedule than {problem.schedule.name} as given")
    clocks = [step[3] for stage in steps for step in stage]
    if not all(type(clock) is int and 0 <= clock <= _MAX_MHZ for clock in clocks):
        raise InvalidPlan(f"plan {path}: frequency_mhz must be a whole number between 0 and {_MAX_MHZ}")
    return np.array(clocks, dtype=np.uint16)


def frontier_document(
    problem: Problem,
    frontier: Frontier,
    *,
    baseline_time_s: float,
    baseline_energy_j: float,
    solve_seconds: float,
    deployable: Deployable | None = None,
    full: bool = False,
) -> Iterator[bytes]:
    """Yield what ``perseus frontier`` writes, one plan at a time.

    Args:
        problem: the problem that was solved.
        frontier: its solution, or the plans that are worth deploying.
        baseline_time_s, baseline_energy_j: an iteration with all clocks at their maximum.
        solve_seconds: how long solving took.
        deployable: what the frontier's plans do at once and when they are rehearsed; None: they were not.
        full: write each plan as ``perseus plan`` does.
    """
    head = {
        "schedule": problem.schedule.name,
        "stages": problem.stages,
        "microbatches": problem.schedule.microbatches,
        "blocking_power_w": problem.blocking_power_w,
        "solve_seconds": solve_seconds,
        "baseline": {"iteration_time_s": baseline_time_s, "energy_j": baseline_energy_j},
        "deployed_gap": asdict(DeployedGap.of(frontier)),
    }
    writer = PlanWriter(problem, full=full)
    instructions = "" if full else f', "instructions": {writer.instructions()}'
    yield f'{json.dumps(head)[:-1]}{instructions}, "points": [\n'.encode()
    for index, point in enumerate(frontier):
        part = index > frontier.least_energy
        if deployable is None:
            plan = writer.point(point, straggler_part=part)
        else:
            plan = deployable.written(index, writer, straggler_part=part)
        yield (",\n" if index else "").encode() + plan.encode()
    yield b"\n]}\n"
