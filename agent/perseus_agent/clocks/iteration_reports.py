"""Reports of finished iterations of one GPU: they wait for their energy, and are published.

They belong to the thread of their GPU, which adds readings and finished iterations and asks for what is ready. A report
takes the longer the more instructions there are, so it is made in parts of some milliseconds each.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from operator import add, le, sub
from statistics import median
from typing import Final

from perseus_agent.clocks.follower import Finished
from perseus_agent.clocks.latency import Effect
from perseus_agent.clocks.overlaps import Windows, apart
from perseus_agent.clocks.reckoning import ClockReading, beside_plan_us, clock_during
from perseus_agent.clocks.telemetry import Event
from perseus_agent.devices.energy import SETTLE_US, EnergyMeter, InstructionEnergies
from perseus_core.evidence import Evidence
from perseus_core.iteration import IterationReport
from perseus_core.units import s_from_us

MAX_UNFINISHED: Final = 16
UNFINISHED_S: Final = 3.0
"""Iterations that wait for their energy, and how long: longer than any counter's tick."""
UNFINISHED_INSTRUCTIONS: Final = 1 << 17
"""Of all that wait together: more do not wait, and of twice as many the oldest are lost."""
_PART: Final = 4_096
"""Moments that are looked at in one part: in 3 ms."""
CLOCKS_KEPT: Final = 1_024
"""Readings of the SM clock: of nearly a minute, at the default interval."""
_OVER: Final = object()


class IterationReports:
    """The iterations of one GPU that are over but not yet reported."""

    def __init__(self, publish: Callable[[str, Event], None]) -> None:
        self.meter = EnergyMeter()
        self.clocks: deque[ClockReading] = deque(maxlen=CLOCKS_KEPT)
        """What was read of the SM clock."""
        self.lead_s: float | None = None
        """The longest time by which the host was ahead of the GPU in the last iteration; None: not known."""
        self._publish = publish
        self._energies = InstructionEnergies()
        self._waiting: deque[tuple[float, Finished]] = deque()
        self._instructions = 0
        """Of all that wait."""
        self._report: Generator[None, None, None] | None = None

    def begin(self) -> None:
        """Another rank drives the GPU: means of energy begin anew."""
        self._energies, self.lead_s = InstructionEnergies(), None

    def add(self, finished: Iterable[Finished]) -> None:
        """Iterations of a rank are over."""
        for one in finished:
            self._waiting.append((time.monotonic(), one))
            self._instructions += len(one.record.begins_us)
        while self._instructions > 2 * UNFINISHED_INSTRUCTIONS:
            self._take()

    def hurry(self) -> None:
        """Let none of those that are there wait for its energy."""
        self._waiting = deque((-math.inf, one) for _, one in self._waiting)

    def publish_part(self, *, counter: bool, enforced: bool, effects: Sequence[Effect]) -> bool:
        """Make a part of the report of an iteration that need not wait any longer. Returns whether there is more to do.

        Args:
            counter: the GPU has an energy counter to wait for.
            enforced: plans could be followed.
            effects: of the last writes.
        """
        if self._report is None:
            if not self._ready(counter=counter):
                return False
            self._report = self._reported(self._take(), enforced, effects)
        if next(self._report, _OVER) is _OVER:
            self._report = None
        return True

    def _ready(self, *, counter: bool) -> bool:
        """Whether the oldest need not wait any longer."""
        if not self._waiting:
            return False
        since_s, one = self._waiting[0]
        return (
            not counter
            or self.meter.covers(one.next_begin_us)
            or since_s < time.monotonic() - UNFINISHED_S
            or len(self._waiting) > MAX_UNFINISHED
            or self._instructions > UNFINISHED_INSTRUCTIONS
        )

    def _take(self) -> Finished:
        _, one = self._waiting.popleft()
        self._instructions -= len(one.record.begins_us)
        return one

    def _reported(self, one: Finished, enforced: bool, effects: Sequence[Effect]) -> Generator[None, None, None]:
        record, plan = one.record, one.plan if enforced else None
        key = (plan.plan_id, plan.point) if plan else None
        windows = yield from apart((record.begins_us, record.durations_us), one.kinds)
        energy_mj = yield from self._account(one, windows, key)
        means_mj = self._energies.means_mj(key) if energy_mj is not None else ()
        yield
        quiet_us, quiet_mj = (yield from self._quiet(one)) if energy_mj is not None else (0, 0)
        yield
        below_us = above_us = 0
        if plan and one.machine_clock:
            below_us, above_us = yield from beside_plan_us(record, plan.clocks_mhz, effects)
        yield
        clock_mhz, limited = clock_during(record, one.next_begin_us, self.clocks)
        leads_us = record.leads_us if one.machine_clock else ()
        self.lead_s = s_from_us(max(leads_us)) if leads_us else None
        yield
        lead_us = round(median(leads_us)) if leads_us else None
        yield
        span_us = min(record.end_us, one.next_begin_us) - record.begin_us
        evidence = Evidence.of_iteration(
            marks=record.source if one.machine_clock else None,
            control=one.control if plan else None,
            lead_us=lead_us,
            below_us=below_us,
            above_us=above_us,
            computing_us=min(sum(windows[1]), span_us),
            clock_mhz=clock_mhz,
            power_limited=limited,
        )
        rank = one.rank.rank_id
        report = IterationReport(
            dp=rank.dp,
            stage=rank.stage,
            tp=rank.tp,
            iteration=record.iteration,
            iteration_time_us=one.next_begin_us - record.begin_us,
            compute_span_us=span_us,
            energy_mj=energy_mj,
            point=plan.point if plan else None,
            durations_us=windows[1],
            instruction_energies_mj=means_mj,
            energy_iterations=self._energies.iterations if means_mj else 0,
            quiet_us=quiet_us,
            quiet_mj=quiet_mj,
            evidence=evidence,
            own_time=one.own_time,
            gpu_uuid=one.rank.gpu_uuid,
            plan_id=plan.plan_id if plan else "",
            clock_changes=one.clock_changes,
        )
        self._publish(one.rank.job_uid, report)

    def _account(self, one: Finished, windows: Windows, key: object) -> Generator[None, None, int | None]:
        """Energy of an iteration, and of each of its instructions into the means."""
        record, (begins_us, durations_us), count = one.record, windows, len(one.record.begins_us)
        moments = [record.begin_us] * (2 * count + 1) + [one.next_begin_us]
        moments[1:-1:2], moments[2:-1:2] = begins_us, map(add, begins_us, durations_us)
        yield
        for at in range(0, len(moments), _PART):
            yield
            if not all(map(le, moments[at : at + _PART], moments[at + 1 : at + _PART + 1])):
                # impossible times
                moments = [record.begin_us, one.next_begin_us]
                break
        levels: list[float] = []
        if not self.meter.covers(one.next_begin_us):
            return None
        for at in range(0, len(moments), _PART):
            yield
            part_mj = self.meter.at(moments[at : at + _PART])
            if part_mj is None:
                return None
            levels += part_mj
        yield
        if len(moments) > 2:
            self._energies.add(key, list(map(sub, levels[2:-1:2], levels[1:-1:2])))
        return round(levels[-1] - levels[0])

    def _quiet(self, one: Finished) -> Generator[None, None, tuple[int, int]]:
        """Waits for a neighbour, as far as the counter shows them by themselves. Not what follows the last instruction:
        gradients are reduced and applied there."""
        record, idle_us, waits = one.record, one.record.begin_us, []
        for at in range(0, len(record.begins_us), _PART):
            yield
            part = slice(at, at + _PART)
            for begin_us, duration_us in zip(record.begins_us[part], record.durations_us[part], strict=True):
                if begin_us > idle_us + SETTLE_US:
                    waits.append((idle_us, begin_us))
                idle_us = max(idle_us, begin_us + duration_us)
        span_us, energy_mj = self.meter.quiet(waits, record.begin_us, one.next_begin_us)
        return round(span_us), energy_mj
