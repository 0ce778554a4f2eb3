"""A solved frontier in all its forms: the solver's bytes, the planner's view, as stored, plan sets for agents.

The only module of the operator that looks into a ``Frontier``. Functions here work on large arrays: run them in a
thread.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_core.units import mj_from_j, mw_from_w, ppm_from_ratio, us_from_s
from perseus_operator.api.schema import dump, parse
from perseus_operator.api.stored import MAX_FRONTIER_BYTES, FrontierSpec
from perseus_operator.errors import InvalidSpec
from perseus_operator.objects.values import Json, StoredObject
from perseus_operator.solving.calibration import FrontierTimes, open_calibration, simulator_of
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.view import FrontierView
from perseus_proto.planset import PlanPoint, StageSchedule, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import Problem
from perseus_solver.model.profile import Profile
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import Schedule


@dataclass(frozen=True)
class SolvedFrontier:
    """A frontier, its view for the planner, and the request and schedule that it was solved for."""

    view: FrontierView
    request: SolveRequest
    schedule: Schedule
    frontier: Frontier
    planned_times: FrontierTimes
    data: bytes
    content: str
    """SHA-256 of ``data``."""


def open_frontier(
    data: bytes,
    request: SolveRequest,
    *,
    digest: str,
    solve_ms: int,
    restored: bool,
    profile: Profile | None = None,
) -> SolvedFrontier:
    """The frontier of these bytes, solved from this request; its profile, if it is parsed already.

    Raises:
        InvalidFrontier: not a frontier, another version, or damaged.
    """
    frontier = Frontier.from_bytes(data)
    gap = _gap(frontier, request)
    simulator, rehearsed = simulator_of(request, profile), frontier.rehearsed
    fastest_s = simulator.duration_s(simulator.choice_of(frontier.frequencies_mhz[0]))
    view = FrontierView(
        digest=digest,
        times_us=tuple(us_from_s(t) for t in frontier.time_s.tolist()),
        energies_mj=tuple(mj_from_j(e) for e in frontier.energy_j.tolist()),
        stages=frontier.stages,
        blocking_power_mw=mw_from_w(frontier.blocking_power_w),
        mean_gap_ppm=ppm_from_ratio(max(gap.mean, 0.0)),
        maximum_gap_ppm=ppm_from_ratio(max(gap.worst, 0.0)),
        solve_ms=solve_ms,
        restored=restored,
        allowance=open_calibration(request.calibration).quality.allowance if request.calibration else 0.0,
        clock_changes=tuple(frontier.clock_changes.tolist()),
        no_slowdown=request.no_slowdown if rehearsed else 0.0,
        hardware=request.hardware if rehearsed else "",
        grains=rehearsed.grains if rehearsed else (),
        medians_us=tuple(us_from_s(t) for t in rehearsed.p50_s.tolist()) if rehearsed else (),
        highest_mj=mj_from_j(float(simulator.run(all_maximum(simulator.problem)).energy_j)),
        instruction_us=us_from_s(float(np.median(fastest_s))),
        ceilings_mw=_ceilings_mw(simulator.problem),
    )
    planned_times = FrontierTimes(simulator, frontier)
    return SolvedFrontier(
        view, request, planned_times.schedule, frontier, planned_times, data, hashlib.sha256(data).hexdigest()
    )


def _gap(frontier: Frontier, request: SolveRequest) -> DeployedGap:
    """The gap over all deadlines, to a bound that mixes clocks within instructions.

    Where an iteration is one instruction, there is nothing to mix: a plan is one clock, and all clocks worth running
    are points.
    """
    alone = frontier.frequencies_mhz.shape[1] == 1 and len(frontier.time_s) < request.points
    return DeployedGap(0.0, 0.0, 0.0) if alone else DeployedGap.of(frontier)


def _ceilings_mw(problem: Problem) -> tuple[tuple[int, int], ...]:
    """For each measured clock, the most that a pipeline draws at it: every stage runs its most power-hungry
    instruction without a pause. At a clock at which an instruction was not measured, it draws what it does at the next
    higher one.
    """
    clocks = sorted({int(mhz) for options in problem.options for mhz in options.frequency_mhz if mhz})
    total_w = np.zeros(len(clocks))
    for stage in range(problem.stages):
        stage_w = np.full(len(clocks), problem.blocking_power_w)
        for table in np.unique(problem.option_of[problem.schedule.span(stage)]):
            options = problem.options[table]
            order = np.argsort(options.frequency_mhz)
            power_w = np.maximum.accumulate((options.energy_j / options.time_s)[order])
            above = np.searchsorted(options.frequency_mhz[order], clocks)
            stage_w = np.maximum(stage_w, power_w[np.minimum(above, len(power_w) - 1)])
        total_w += stage_w
    return tuple((mhz, math.ceil(1000 * watts)) for mhz, watts in zip(clocks, total_w.tolist(), strict=True))


def frontier_to_spec(solved: SolvedFrontier) -> Json | None:
    """The spec of the PerseusFrontier that stores a frontier; None: it is too large, and is solved again after a
    restart.
    """
    if len(solved.data) > MAX_FRONTIER_BYTES:
        return None
    stored = FrontierSpec(
        digest=solved.view.digest,
        solve_milliseconds=solved.view.solve_ms,
        points=len(solved.view.times_us),
        data=base64.b64encode(solved.data).decode(),
    )
    spec: Json = dump(stored)
    return spec


def stored_frontier(stored: StoredObject, digest: str) -> tuple[bytes, int] | None:
    """The bytes that a PerseusFrontier of an operator claims to be the frontier of these inputs, not verified, and how
    many milliseconds the solve took; None: it claims nothing of the kind.
    """
    try:
        spec = parse(FrontierSpec, stored.spec, "spec")
        if spec.digest != digest or not stored.ours or spec.data is None or spec.solve_milliseconds is None:
            return None
        return base64.b64decode(spec.data, validate=True), spec.solve_milliseconds
    except (InvalidSpec, ValueError):
        return None


def encode_plans(solved: SolvedFrontier, stages: Iterable[int]) -> agent_pb2.PlanSet:
    """The plans of some stages as a plan set for agents."""
    view = solved.view
    points = [PlanPoint(t, e) for t, e in zip(view.times_us, view.energies_mj, strict=True)]
    return _encoded(solved.schedule, stages, points, solved.frontier.frequencies_mhz)


def encode_uniform_plans(schedule: Schedule, stages: Iterable[int], clocks_mhz: Sequence[int]) -> agent_pb2.PlanSet:
    """A plan set with one point for each clock, at which every instruction runs: how profiles are measured."""
    points = [PlanPoint(1 + number, 0) for number in range(len(clocks_mhz))]  # what they take is not known yet
    clocks = np.asarray(clocks_mhz, dtype=np.uint16)[:, None]
    return _encoded(schedule, stages, points, np.broadcast_to(clocks, (len(points), schedule.instructions)))


def _encoded(
    schedule: Schedule, stages: Iterable[int], points: list[PlanPoint], frequencies_mhz: np.ndarray
) -> agent_pb2.PlanSet:
    wanted = sorted(stages)
    whole = schedule.kind.tolist() == [InstructionKind.STEP]  # one clock for all, whatever stage a rank says it is
    planned = [0 if whole else stage for stage in wanted]
    schedules = [StageSchedule(stage, *schedule.columns(plan)) for stage, plan in zip(wanted, planned, strict=True)]
    clocks = [_fill(frequencies_mhz[:, schedule.span(stage)]).tolist() for stage in planned]
    return encode_plan_set(schedules, points, clocks)


def _fill(clocks_mhz: np.ndarray) -> np.ndarray:
    """Give constant-time instructions, which have no clock (0), that of the instruction before; the first that of the
    last.
    """
    if clocks_mhz.all():
        return clocks_mhz
    doubled = np.concatenate([clocks_mhz, clocks_mhz], axis=1)
    last = np.maximum.accumulate(np.where(doubled > 0, np.arange(doubled.shape[1]), 0), axis=1)
    return np.take_along_axis(doubled, last, axis=1)[:, clocks_mhz.shape[1] :]
