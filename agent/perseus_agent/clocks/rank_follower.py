"""Follows one rank through its schedule: from the marks in shared memory to the clock it wants, and to finished
iterations.

Whose time the marks are in decides how (design note 0019). Where the GPU's time is known, a timetable says which clock
to ask for, and the follower looks by itself (``next_look_us``) instead of being rung. Until the timetable knows the
plan, a rank that waits for its GPU is followed from mark to mark, and others keep one clock for the iteration, the
plan's highest; so do ranks whose marks say nothing about the GPU. Marks of another clock than the machine's, a
simulator's, are followed as they come.

Only the thread of the rank's GPU calls it (``iteration`` may be read by others). The memory is trusted for nothing but
the rank's own clocks: a rank that skips, repeats or reorders instructions, or whose schedule is not the plan's, runs
that iteration at default clocks. A plan of whole iterations is one clock, which a rank of any schedule follows.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from perseus_agent.clocks.follower import Finished, Follower
from perseus_agent.clocks.idle import IdleWatch
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import JobPlans, StagePlan
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.clocks.timetable import PLANS_KEPT, Timetable
from perseus_core.instruction import Instruction
from perseus_core.marks import ClockControl, MarkSource
from perseus_proto.channel import MAX_DURATION_US, SLOTS, ChannelReader, IterationRecord, Phase, Position

_MARKS_KEPT: Final = 2 * SLOTS
_AT_ONCE: Final = Lead(0, 0)
LEAVE_PARTS: Final = 4 * SLOTS + 1
LEAVE_INSTRUCTIONS: Final = 4_096
"""What is read of a rank that leaves: all its records, if they are no longer than so many instructions. Others would
keep the thread too long, and the next rank waits."""
AGAIN_US: Final = 50
"""After rings are wanted again, a look follows: store buffers have drained by then (see ``perseus_proto.channel``)."""


@dataclass
class _Mark:
    """What was in force when an iteration began."""

    plan: StagePlan | None
    writes: int
    control: ClockControl | None = None


class RankFollower(Follower):
    """The state of one rank that drives a GPU."""

    def __init__(
        self,
        rank: RankProcess,
        schedule: tuple[Instruction, ...],
        channel: ChannelReader,
        plans: JobPlans,
        *,
        machine_clock: bool = False,
        own_time: bool = False,
        idle: IdleWatch | None = None,
    ) -> None:
        """``machine_clock``: times of the rank are of the machine's clock; otherwise every mark of the wake map rings,
        and means that the GPU is there. ``own_time``: as in the rank's hello. ``idle``: of its GPU; None: long waits
        have the plan's clock, as they have where times are not of the machine's clock."""
        self.rank = rank
        self.channel = channel
        self.machine_clock = machine_clock
        self.own_time = own_time
        self.iteration: int | None = None
        """The furthest iteration that the rank has begun."""
        self.misfit = False
        """The plan's schedule of this stage is not the one that the rank reported in its hello."""
        self.sample_s, self.urgent = 0.0, False
        self.due = False
        """Whether a step has begun or ended since the look before: ``collect`` then."""
        self.deviations = 0
        """Iterations that did not follow the schedule."""
        self.next_look_us = 0
        """When to look next without a ring, in microseconds of the machine's clock; 0: not at all."""
        self._plans = plans
        self._kinds = tuple(int(instruction.kind) for instruction in schedule)
        self._microbatches = tuple(instruction.microbatch for instruction in schedule)
        self._chunks = tuple(instruction.chunk for instruction in schedule)
        self._count = len(schedule)
        self._timetable = Timetable(self._count, self._plan_in)
        self._idle = idle if machine_clock else None
        self._silent = False
        self._asked_mhz: int | None = None
        self._plan: StagePlan | None = None
        self._whole_plans: dict[StagePlan, StagePlan] = {}
        """Plans of whole iterations, and the same for the instructions of this rank."""
        self._wake = bytes(self._count)
        self._planned_iteration = -1
        self._index = -1
        self._deviant = False
        self._marks: dict[int, _Mark] = {}
        self._open: IterationRecord | None = None
        self._reading: Generator[None, None, IterationRecord | None] | None = None
        position = channel.position()
        if position.phase not in (Phase.NONE, Phase.STEP_ENDED):
            # Met inside an iteration: plans begin at boundaries, so this one stays at default clocks.
            self.iteration = self._planned_iteration = position.iteration
            self._deviant = True

    @property
    def job_uid(self) -> str:
        """Of the rank's job."""
        return self.rank.job_uid

    @property
    def bell(self) -> int:
        """The eventfd that the rank rings."""
        return self.channel.event_fd

    @property
    def plan(self) -> StagePlan | None:
        """What is followed now; None: default clocks."""
        return None if self._deviant else self._plan

    # ------------------------------------------------------------------------------------------- the clock to ask for

    def look(self, writes: int, now_us: int = 0, lead: Lead = _AT_ONCE) -> int | None:
        """The clock to ask for now; None: the default clocks. ``next_look_us`` says when to look again.

        Args:
            writes: the device's clock changes so far, to tell them apart by iteration.
            now_us: now, by the machine's clock.
            lead: how long a change takes.
        """
        # Nearly every ring: the next instruction of the iteration that is followed already.
        ended = self.channel.ended(self._planned_iteration)
        if self._index <= ended + 1 < self._count and ended >= 0 and self.iteration == self._planned_iteration:
            self.due = False
            self._index = ended + 1
        else:
            self._move(writes)
        plan, was_silent, self.next_look_us = self.plan, self._silent, 0
        if self.channel.asks_default_clocks():
            plan = None
        control, mhz = (None, None) if plan is None else self._choose(plan, now_us, lead)
        mark = self._marks.get(self.iteration or 0)
        if mark is not None and plan is not None:
            mark.control = control
        silent = self.next_look_us > 0
        if silent != was_silent:
            self._silent = silent
            self.channel.skip_rings_from(1 if silent else 0)
            if not silent:  # a mark may not have rung, because of what the channel held when it was made
                self.next_look_us = now_us + AGAIN_US
        idle = self._idle
        if idle is not None:
            if idle.low or now_us >= idle.look_us:
                mhz = idle.clock(mhz, self.channel.position(), now_us, lead)
            self.next_look_us = min(self.next_look_us or idle.look_us, idle.look_us or self.next_look_us)
        self._asked_mhz = mhz
        return mhz

    def _choose(self, plan: StagePlan, now_us: int, lead: Lead) -> tuple[ClockControl, int | None]:
        """How to find the clock of a plan, and the clock."""
        following, marked = plan.clocks_mhz[max(self._index, 0)], ClockControl.MARKS
        if not self.machine_clock:
            return marked, following
        source, timetable = self.channel.mark_source(), self._timetable
        if source is not MarkSource.SYNCHRONISED:
            marked, following = ClockControl.HELD, plan.highest_mhz
        if source is MarkSource.HOST:
            return marked, following
        if plan.uniform and self._plan_of(self._planned_iteration + 1) is plan:
            return ClockControl.TIMETABLE, plan.highest_mhz  # there is no moment to choose
        position = self.channel.gpu_position()
        if position is not None:
            timetable.sight(*position, now_us)
        elif source is MarkSource.EVENTS:
            timetable.bound(*_boundaries(self.channel.position(), self._count), now_us)
        if not timetable.ready:
            return marked, following
        target = timetable.target(now_us, lead, self._asked_mhz)
        self.next_look_us = target.look_us
        return ClockControl.TIMETABLE, target.mhz

    def _move(self, writes: int) -> None:
        """Take over where the rank is, and what is planned there."""
        position = self.channel.position()
        if position.phase is Phase.NONE:
            return
        # By the iteration too: a fast rank is inside the next one before its ring is handled.
        self.due = position.phase in (Phase.STEP_BEGUN, Phase.STEP_ENDED) or position.iteration != self.iteration
        iteration, index = position.upcoming(self._count)
        new = iteration != self._planned_iteration
        followed = self._plan
        # Until its first instruction runs, a selection may still come for it.
        unbegun = iteration != position.iteration or position.phase is Phase.STEP_BEGUN
        if (new or unbegun) and self._take_plan(iteration):
            position = self.channel.position()  # the rank may have passed an instruction that rings only now
            if position.upcoming(self._count)[0] == iteration:
                index = position.upcoming(self._count)[1]
        if new:
            self._planned_iteration, self._deviant, self._index = iteration, False, -1
        if position.iteration != self.iteration:
            self.iteration = position.iteration
            over = position.phase is Phase.STEP_ENDED  # begun and ended before its ring was handled
            self._marks[position.iteration] = _Mark(followed if over else self._plan, writes)
            while len(self._marks) > _MARKS_KEPT:
                del self._marks[next(iter(self._marks))]
        if index < self._index or (iteration == position.iteration and self.channel.deviates(iteration)):
            self._deviate()
        self._index = index

    def selection_changed(self) -> None:
        """React to a selection. Call ``look`` afterwards: marks that the rank has passed since do not ring again."""
        self._timetable.plans_changed()
        if self.iteration is not None:
            self._publish(self._planned_iteration)

    # ------------------------------------------------------------------------------------------- what is over

    def collect(self, writes: int) -> list[Finished]:
        """Collect the iterations that are over, oldest first. Call it when a step begins or ends. It ends when the rank
        has closed no more: where that is not trusted, use ``collect_part``."""
        finished, more = self.collect_part(writes)
        while more:
            part, more = self.collect_part(writes)
            finished += part
        return finished

    def collect_part(self, writes: int, now_us: int | None = None) -> tuple[list[Finished], bool]:
        """Read a part of a record, which takes milliseconds at most. Returns what is over now, and whether there may be
        another part to read.

        Args:
            writes: as for ``look``.
            now_us: now, by the machine's clock; None: not known. A record of later times says nothing.
        """
        if self._reading is None:
            self._reading = self._reading_on(now_us if self.machine_clock else None)
        try:
            next(self._reading)
            return [], True
        except StopIteration as done:
            record: IterationRecord | None = done.value
        self._reading = None
        return (self._drained(writes), False) if record is None else (self._over(record, writes), True)

    def _reading_on(self, now_us: int | None) -> Generator[None, None, IterationRecord | None]:
        """Read the next record into the timetable, and return it."""
        record = yield from self.channel.drain_parts(now_us)
        if record is not None and self.machine_clock and record.source is not MarkSource.HOST:
            yield
            yield from self._timetable.add_parts(record)
        return record

    def _over(self, record: IterationRecord, writes: int) -> list[Finished]:
        """A record was read: the one before it is finished."""
        self.deviations += not record.complete
        before, self._open = self._open, record
        if before is None:
            return []
        following = record.begin_us if record.iteration == before.iteration + 1 else before.end_us
        return [self._finish(before, following, writes)]

    def _drained(self, writes: int) -> list[Finished]:
        """All records were read: the last one is finished if it is known when the next begins."""
        # On the GPU the next one begins when its own record says so, not when the host launches it.
        if self._open is None or _late(self._open):
            return []
        begin_us = self.channel.step_begin_us()
        position = self.channel.position()
        if position.iteration != self._open.iteration + 1 or self.channel.step_begin_us() != begin_us:
            return []
        finished, self._open = [self._finish(self._open, begin_us, writes)], None
        return finished

    def leave(self, writes: int, now_us: int | None = None) -> list[Finished]:
        """Stop the rank's rings and return the iterations not reported yet, but for those that take long to read. The
        memory stays: the session owns it."""
        self.channel.set_wake_map(bytes(self._count))
        self.channel.skip_rings_from(0)
        if self._idle is not None:
            self._idle.stop(now_us or 0)
        finished: list[Finished] = []
        for _ in range(LEAVE_PARTS if self._count <= LEAVE_INSTRUCTIONS else 0):
            part, more = self.collect_part(writes, now_us)
            finished += part
            if not more:
                break
        if self._open is not None:
            finished.append(self._finish(self._open, self._open.end_us, writes))
            self._open = None
        # Both refer back to this object, and nobody looks for circles (``perseus_agent.garbage``).
        self._reading, self._timetable = None, Timetable(self._count, lambda _: None)
        return finished

    # ------------------------------------------------------------------------------------------- inside

    def _take_plan(self, iteration: int) -> bool:
        """Follow what is planned for an iteration; True if the wake map changed."""
        plan = self._plan_of(iteration)
        if plan is not self._plan:
            self._plan = plan
            self._timetable.plans_changed()
        return self._publish(iteration)

    def _plan_of(self, iteration: int) -> StagePlan | None:
        plan = self._plans.follow(self.rank.rank_id.dp, self.rank.rank_id.stage, iteration)
        if plan is not None and plan.whole and self._count > 1:
            plan = self._stretched(plan)
        return plan if plan is self._plan or (plan is not None and self._fits(plan)) else None

    def _stretched(self, plan: StagePlan) -> StagePlan:
        """Always the same object: a plan is known by it."""
        stretched = self._whole_plans.get(plan)
        if stretched is None:
            if len(self._whole_plans) >= PLANS_KEPT:
                self._whole_plans.clear()
            stretched = self._whole_plans[plan] = plan.stretched(self._count)
        return stretched

    def _plan_in(self, iteration: int) -> StagePlan | None:
        """The plan that an iteration began with, or will begin with."""
        mark = self._marks.get(iteration)
        return self._plan_of(iteration) if mark is None else mark.plan

    def _publish(self, iteration: int) -> bool:
        """Publish the wake map of an iteration's plan, if its marks are of use, with a ring at its last instruction if
        another plan is next: so the clock changes before the next iteration begins. True if the wake map changed."""
        rings = not self.machine_clock or self.channel.mark_source() is MarkSource.SYNCHRONISED
        wake = bytes(self._count) if self._plan is None or not rings else self._plan.wake
        if self._plan_of(iteration + 1) is not self._plan:
            wake = b"\x01" + wake[1:]
        if wake == self._wake:
            return False
        self._wake = wake
        self.channel.set_wake_map(wake)
        return True

    def _fits(self, plan: StagePlan) -> bool:
        schedule = plan.schedule
        self.misfit = not plan.whole and (schedule.kinds, schedule.microbatches, schedule.chunks) != (
            self._kinds,
            self._microbatches,
            self._chunks,
        )
        return not self.misfit

    def _deviate(self) -> None:
        self._deviant = True
        mark = self._marks.get(self._planned_iteration)
        if mark is not None:
            mark.plan = mark.control = None
        self._timetable.plans_changed()

    def _finish(self, record: IterationRecord, next_begin_us: int, writes: int) -> Finished:
        # A GPU may begin an iteration before it has ended the one before: no time is in two of them.
        earliest_us = record.begin_us if _late(record) else record.end_us
        consistent = earliest_us <= next_begin_us <= record.begin_us + MAX_DURATION_US
        mark = self._marks.pop(record.iteration, None)
        following = self._marks.get(record.iteration + 1)
        return Finished(
            rank=self.rank,
            record=record,
            next_begin_us=next_begin_us if consistent else record.end_us,
            plan=None if mark is None else mark.plan,
            clock_changes=0 if mark is None else (writes if following is None else following.writes) - mark.writes,
            control=None if mark is None else mark.control,
            machine_clock=self.machine_clock,
            own_time=self.own_time,
            kinds=self._kinds,
        )


def _late(record: IterationRecord) -> bool:
    """Whether its times are the GPU's and came later than the host's marks."""
    return record.source in (MarkSource.EVENTS, MarkSource.GPU)


def _boundaries(position: Position, count: int) -> tuple[int, int]:
    """The host's position in the terms of a GPU mark."""
    begun = 2 * position.index + 1
    boundary = {Phase.STEP_BEGUN: 0, Phase.BEGUN: begun, Phase.ENDED: begun + 1}.get(position.phase, 2 * count + 1)
    return position.iteration, boundary
