"""A job's plans on this node: which clocks a rank follows in which iteration.

``JobPlans`` is written by the node (under its lock) and read by the GPUs' threads without a lock: what they read is
replaced whole, never changed.

A selection takes effect at an iteration boundary: ``from_iteration``, or the first boundary that no rank of this node
has passed yet. So no rank ever changes its plan inside an iteration, and all ranks of the node change at the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import ne
from typing import Final, NamedTuple

from perseus_agent.errors import InvalidRequest, UnknownPlan
from perseus_core.instruction import InstructionKind
from perseus_core.latency import SwitchLatency
from perseus_proto.planset import PlanSet, StageSchedule

MAX_PENDING: Final = 16
"""Longest list of selections of one pipeline whose boundaries have not come; more means a defect of the caller."""
MAX_PIPELINES: Final = 4_096
MAX_ITERATION: Final = 2**53
_COMPILED_KEPT: Final = 64
_COMPILED_INSTRUCTIONS: Final = 1 << 19
"""Plans of single stages that are kept, and their instructions together."""


@dataclass(frozen=True)
class StagePlan:
    """What one rank follows at one point: compiled once, shared by the ranks of the stage."""

    plan_id: str
    point: int
    schedule: StageSchedule
    clocks_mhz: tuple[int, ...]
    wake: bytes
    """One byte per instruction: 1 where its clock differs from that of the instruction before (the first: the last)."""
    changes: Mapping[int, SwitchLatency] = field(default_factory=dict, hash=False)
    """By clock, MHz: how long changes to it take under which the plan was rehearsed; empty: nothing was sent."""

    @cached_property
    def highest_mhz(self) -> int:
        """The highest clock of the plan."""
        return max(self.clocks_mhz)

    @cached_property
    def uniform(self) -> bool:
        """Whether all instructions have one clock."""
        return not any(self.wake)

    @cached_property
    def whole(self) -> bool:
        """Whether it is one clock for the iteration as a whole, whatever a rank executes in it."""
        return self.schedule.kinds == (InstructionKind.STEP,)

    def stretched(self, instructions: int) -> StagePlan:
        """The same, where it is whole, for a rank that executes so many instructions: its clock is that of each."""
        clocks_mhz = self.clocks_mhz * instructions
        return replace(self, clocks_mhz=clocks_mhz, wake=wake_map(clocks_mhz))


Points = Mapping[int, int | None]
"""Which point each pipeline (dp) shall run; None: no plan."""


class Selection(NamedTuple):
    """A point of a plan set, from an iteration on; None: no plan."""

    from_iteration: int
    plan_set: PlanSet
    point: int | None


@dataclass(frozen=True)
class _Snapshot:
    plan_set: PlanSet | None = None
    timelines: Mapping[int, tuple[Selection, ...]] = field(default_factory=dict)


class JobPlans:
    """The plan sets and selections of one job."""

    def __init__(self) -> None:
        self._snapshot = _Snapshot()
        self._compiled: dict[tuple[str, int, int], StagePlan] = {}

    @property
    def plan_set(self) -> PlanSet | None:
        """The plan set pushed last."""
        return self._snapshot.plan_set

    @property
    def selections(self) -> dict[int, Selection]:
        """By data-parallel rank: the selection made last, whether or not its boundary has come."""
        return {dp: timeline[-1] for dp, timeline in self._snapshot.timelines.items()}

    @property
    def memory_bytes(self) -> int:
        """What all plan sets take: the one pushed last, and those that are in force or wait for their iteration."""
        stored = self._snapshot.plan_set
        return 0 if stored is None else self.memory_bytes_with(stored)

    def memory_bytes_with(self, plan_set: PlanSet) -> int:
        """What all plan sets would take once this one was pushed."""
        timelines = self._snapshot.timelines.values()
        chosen = {choice.plan_set.plan_id: choice.plan_set for timeline in timelines for choice in timeline}
        return sum(each.memory_bytes for each in {**chosen, plan_set.plan_id: plan_set}.values())

    def push(self, plan_set: PlanSet) -> None:
        """Store a plan set beside the one in force, which stays in force until a selection names the new one.

        The same plans again replace those that are stored or selected: how long changes take may be known better.
        """
        timelines = {
            dp: tuple(
                choice._replace(plan_set=plan_set) if choice.plan_set.plan_id == plan_set.plan_id else choice
                for choice in timeline
            )
            for dp, timeline in self._snapshot.timelines.items()
        }
        self._snapshot = _Snapshot(plan_set, timelines)

    def select(self, plan_id: str, points: Points, from_iteration: int, furthest: Mapping[int, int | None]) -> None:
        """Choose points for pipelines: all of them, or after an error none.

        Args:
            plan_id: of a plan set pushed before.
            points: data-parallel rank to point; None: no plan.
            from_iteration: first iteration that shall run it.
            furthest: data-parallel rank to the furthest iteration that a rank on this node has begun; None: none has.

        Raises:
            UnknownPlan: the plan set is not stored here.
            InvalidRequest: a point or pipeline is out of range, or too many selections are pending.
        """
        plan_set = self._find(plan_id)
        if not points:
            raise InvalidRequest("selections: must not be empty")
        if not 0 <= from_iteration <= MAX_ITERATION:
            raise InvalidRequest(f"from_iteration: must be at most {MAX_ITERATION}")
        latest = max((begun for begun in furthest.values() if begun is not None), default=None)
        boundary = from_iteration if latest is None else max(from_iteration, latest + 1)
        timelines = dict(self._snapshot.timelines)
        for dp, point in points.items():
            if point is not None and not 0 <= point < len(plan_set.points):
                raise InvalidRequest(
                    f"selections.point: {point} is beyond the {len(plan_set.points)} points of the plan set"
                )
            begun = furthest.get(dp)
            pending = [choice for choice in timelines.get(dp, ()) if choice.from_iteration < boundary]
            # The one in force now and those still to come; what ended before any rank's current iteration is history.
            while len(pending) > 1 and begun is not None and pending[1].from_iteration < begun:
                del pending[0]
            if len(pending) >= MAX_PENDING:
                raise InvalidRequest(f"from_iteration: pipeline {dp} has {MAX_PENDING} selections pending already")
            timelines[dp] = (*pending, Selection(boundary, plan_set, point))
        if len(timelines) > MAX_PIPELINES:
            raise InvalidRequest(f"selections.data_parallel_rank: more than {MAX_PIPELINES} pipelines in one job")
        self._snapshot = replace(self._snapshot, timelines=timelines)

    def clear(self) -> None:
        """Forget all of them: from now on nothing is planned."""
        self._snapshot = _Snapshot()

    def rebase(self, dp: int, furthest: int | None) -> None:
        """Restart the count of a pipeline whose processes are new: the selection made last is in force from iteration
        0, since boundaries to come were numbers of the old count. None: there was no process before, so no count."""
        timeline = self._snapshot.timelines.get(dp, ())
        if timeline and furthest is not None:
            heir = timeline[-1]._replace(from_iteration=0)
            self._snapshot = replace(self._snapshot, timelines={**self._snapshot.timelines, dp: (heir,)})

    def follow(self, dp: int, stage: int, iteration: int) -> StagePlan | None:
        """What a rank follows in an iteration; None: nothing is planned, default clocks."""
        chosen = None
        for choice in self._snapshot.timelines.get(dp, ()):
            if choice.from_iteration > iteration:
                break
            chosen = choice
        if chosen is None or chosen.point is None or stage not in chosen.plan_set.schedules:
            return None
        return self._compile(chosen.plan_set, stage, chosen.point)

    def _find(self, plan_id: str) -> PlanSet:
        snapshot = self._snapshot
        followed = [choice.plan_set for timeline in snapshot.timelines.values() for choice in timeline]
        for plan_set in ([snapshot.plan_set] if snapshot.plan_set else []) + followed:
            if plan_set.plan_id == plan_id:
                return plan_set
        raise UnknownPlan(f"plan_id: {plan_id!r} is not stored here; push it first")

    def _compile(self, plan_set: PlanSet, stage: int, point: int) -> StagePlan:
        key = (plan_set.plan_id, stage, point)
        plan = self._compiled.get(key)
        if plan is None or (plan.changes is not plan_set.changes and plan.changes != plan_set.changes):
            clocks = plan_set.stage_clocks_mhz(stage, point)
            schedule, changes = plan_set.schedules[stage], plan_set.changes
            plan = StagePlan(plan_set.plan_id, point, schedule, clocks, wake_map(clocks), changes)
            kept = sum(len(each.clocks_mhz) for each in self._compiled.values())
            if len(self._compiled) >= _COMPILED_KEPT or kept + len(clocks) > _COMPILED_INSTRUCTIONS:
                self._compiled = {}  # replaced, not cleared: other threads may be reading it
            self._compiled[key] = plan
        return plan


def wake_map(clocks_mhz: Sequence[int]) -> bytes:
    """One byte per instruction: 1 where the clock differs from the instruction before it, cyclically."""
    return bytes(map(ne, clocks_mhz, (clocks_mhz[-1], *clocks_mhz[:-1])))
