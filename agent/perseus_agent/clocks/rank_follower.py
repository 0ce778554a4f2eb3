"""Follows one rank through its schedule: from the position in shared memory to the clock it wants, and to finished
iterations.

Only the thread of the rank's GPU calls it (``iteration`` may be read by others). The memory is trusted for nothing but
the rank's own clocks: a rank that skips, repeats or reorders instructions, or whose schedule is not the plan's, runs
that iteration at default clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_agent.clocks.plans import JobPlans, StagePlan
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.clocks.wake_prediction import WakePredictor
from perseus_proto.channel import MAX_DURATION_US, SLOTS, ChannelReader, IterationRecord, Phase
from perseus_proto.hello import Instruction

_MARKS_KEPT: Final = 2 * SLOTS


@dataclass(frozen=True)
class Finished:
    """An iteration that is over and whose successor has begun."""

    record: IterationRecord
    next_begin_us: int
    plan: StagePlan | None
    clock_changes: int


@dataclass
class _Mark:
    """What was in force when an iteration began."""

    plan: StagePlan | None
    writes: int


class RankFollower:
    """The state of one rank that drives a GPU."""

    def __init__(
        self,
        rank: RankProcess,
        schedule: tuple[Instruction, ...],
        channel: ChannelReader,
        plans: JobPlans,
        predictor: WakePredictor | None = None,
    ) -> None:
        """``predictor``: for a rank whose clock is the machine's; without it every mark of the wake map rings."""
        self.rank = rank
        self.channel = channel
        self.iteration: int | None = None
        """The furthest iteration that the rank has begun."""
        self.misfit = False
        """The plan's schedule of this stage is not the one that the rank reported in its hello."""
        self.due = False
        """Whether a step has begun or ended since the look before: ``collect`` then."""
        self.deviations = 0
        """Iterations that did not follow the schedule."""
        self._plans = plans
        self._predictor = predictor
        self._kinds = tuple(int(instruction.kind) for instruction in schedule)
        self._microbatches = tuple(instruction.microbatch for instruction in schedule)
        self._chunks = tuple(instruction.chunk for instruction in schedule)
        self._count = len(schedule)
        self._plan: StagePlan | None = None
        self._wake = bytes(self._count)
        self._planned_iteration = -1
        self._index = -1
        self._deviant = False
        self._marks: dict[int, _Mark] = {}
        self._open: IterationRecord | None = None
        position = channel.position()
        if position.phase not in (Phase.NONE, Phase.STEP_ENDED):
            # Met inside an iteration: plans begin at boundaries, so this one stays at default clocks.
            self.iteration = self._planned_iteration = position.iteration
            self._deviant = True

    def look(self, writes: int) -> int | None:
        """The clock that the running or the next instruction wants; None: the default clocks.

        Args:
            writes: the device's clock changes so far, to tell them apart by iteration.
        """
        # Nearly every ring: the next instruction of the iteration that is followed already.
        ended = self.channel.ended(self._planned_iteration)
        if self._index <= ended + 1 < self._count and ended >= 0 and self.iteration == self._planned_iteration:
            self.due = False
            self._index = ended + 1
            return None if self._deviant or self._plan is None else self._plan.clocks_mhz[ended + 1]
        return self._look(writes)

    def _look(self, writes: int) -> int | None:
        position = self.channel.position()
        if position.phase is Phase.NONE:
            return None
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
        plan = None if self._deviant else self._plan
        return None if plan is None else plan.clocks_mhz[index]

    def selection_changed(self) -> None:
        """React to a selection. Call ``look`` afterwards: marks that the rank has passed since do not ring again."""
        if self.iteration is not None:
            self._publish(self._planned_iteration)

    def next_look_us(self, now_us: int) -> int:
        """When to look next without a ring, in microseconds of the machine's clock; 0: not at all. Call it after each
        ``look``, then ``must_look_again``."""
        predictor, iteration = self._predictor, self.iteration
        if predictor is None or iteration is None:
            return 0
        ended = self._index if iteration == self._planned_iteration else self._count
        if self._plan is None or self._deviant:
            return predictor.rest(iteration, ended)
        return predictor.look(iteration, ended, now_us)

    def must_look_again(self) -> bool:
        """Whether to look again at once: the rank may have left out a ring because of the look predicted before."""
        return self._predictor is not None and self._predictor.must_look_again()

    def collect(self, writes: int) -> list[Finished]:
        """Collect the iterations that are over, oldest first. Call it when a step begins or ends."""
        finished = []
        while (record := self.channel.drain_iteration()) is not None:
            if not record.complete:
                self.deviations += 1
            if self._open is not None:
                following = record.begin_us if record.iteration == self._open.iteration + 1 else self._open.end_us
                finished.append(self._finish(self._open, following, writes))
            self._open = record
        if self._open is not None:
            begin_us = self.channel.step_begin_us()
            position = self.channel.position()
            if position.iteration == self._open.iteration + 1 and self.channel.step_begin_us() == begin_us:
                finished.append(self._finish(self._open, begin_us, writes))
                self._open = None
        return finished

    def leave(self, writes: int) -> list[Finished]:
        """Stop the rank's rings and return the iterations not reported yet. The memory stays: the session owns it."""
        self.channel.set_wake_map(bytes(self._count))
        self.channel.skip_rings_from(0)
        finished = self.collect(writes)
        if self._open is not None:
            finished.append(self._finish(self._open, self._open.end_us, writes))
            self._open = None
        return finished

    def _take_plan(self, iteration: int) -> bool:
        """Follow what is planned for an iteration; True if the wake map changed."""
        plan = self._plan_of(iteration)
        if plan is not self._plan:
            self._plan = plan
            if self._predictor is not None:
                self._predictor.follow(bytes(self._count) if plan is None else plan.wake)
        return self._publish(iteration)

    def _plan_of(self, iteration: int) -> StagePlan | None:
        plan = self._plans.follow(self.rank.rank_id.dp, self.rank.rank_id.stage, iteration)
        return plan if plan is self._plan or (plan is not None and self._fits(plan)) else None

    def _publish(self, iteration: int) -> bool:
        """Publish the wake map of an iteration's plan, with a ring at its last instruction if another plan is next: so
        the clock changes before the next iteration begins. True if the wake map changed."""
        wake = bytes(self._count) if self._plan is None else self._plan.wake
        if self._plan_of(iteration + 1) is not self._plan:
            wake = b"\x01" + wake[1:]
        if wake == self._wake:
            return False
        self._wake = wake
        self.channel.set_wake_map(wake)
        return True

    def _fits(self, plan: StagePlan) -> bool:
        schedule = plan.schedule
        self.misfit = (schedule.kinds, schedule.microbatches, schedule.chunks) != (
            self._kinds,
            self._microbatches,
            self._chunks,
        )
        return not self.misfit

    def _deviate(self) -> None:
        self._deviant = True
        mark = self._marks.get(self._planned_iteration)
        if mark is not None:
            mark.plan = None

    def _finish(self, record: IterationRecord, next_begin_us: int, writes: int) -> Finished:
        consistent = record.end_us <= next_begin_us <= record.begin_us + MAX_DURATION_US
        mark = self._marks.pop(record.iteration, None)
        following = self._marks.get(record.iteration + 1)
        return Finished(
            record=record,
            next_begin_us=next_begin_us if consistent else record.end_us,
            plan=None if mark is None else mark.plan,
            clock_changes=0 if mark is None else (writes if following is None else following.writes) - mark.writes,
        )
