"""Long waits of a rank at the least clock: what they save and what they cost. The agent's own follower, on memory of
its own layout, in virtual time, on a simulated H100.

A rank does steps of a second under a plan of one clock and waits in between for a fifth of its time, as is published of
running jobs (19.7 %: arXiv 2604.04745). How long single waits are is not published: here they are exponential, of
several means. A GPU that waits draws what was measured idle: 138 W at 1,980 MHz, 77 W at 345 MHz
(docs/clocks-take-time.md), in between in proportion. Changes of clocks take a drawn latency.
"""

from __future__ import annotations

import os
import random
from statistics import fmean, stdev
from typing import Any, Final

from tests.doubles.recording_node import plan_set_of
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks.idle import IDLE_LOSS, IdleWatch
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.devices.base import DeviceIdentity
from perseus_core.rank import RankId
from perseus_core.units import mw_from_w, s_from_us, us_from_s
from perseus_proto.channel import ChannelReader, ChannelWriter
from perseus_proto.hello import make_schedule
from perseus_proto.planset import decode_plan_set
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import Switches

H100: Final = MODELS["h100"]
PLANNED, LEAST, HIGHEST = H100.plateau_mhz, H100.clocks_mhz[0], H100.clocks_mhz[-1]
IDLE_W: Final = {LEAST: 77.0, HIGHEST: 138.0}
IDLE_SHARE: Final = 0.197
STEP_S, TIME_S = 1.0, 3_600.0
SAMPLE_S: Final = 1.0
"""Of the driver: at most so long (nvmlUtilization_t)."""
CASES: Final = (("10_s", 10, 0), ("60_s", 60, 0), ("300_s", 300, 0), ("60_s_unmarked", 60, 10))
"""Mean length of waits, and of work without marks after each, such as an evaluation, seconds."""
SEEDS: Final = range(5)
STUDENT: Final = 2.776
"""For 95 % of five values."""
PLANS: Final = decode_plan_set(plan_set_of([[[PLANNED]]]))
Result = dict[str, Any]


def idle_w(mhz: int) -> float:
    """What it draws while it waits."""
    return IDLE_W[LEAST] + (IDLE_W[HIGHEST] - IDLE_W[LEAST]) * (mhz - LEAST) / (HIGHEST - LEAST)


class Run:
    """One rank, its GPU and its follower; device and training process at once."""

    def __init__(self, seed: int, loss: float) -> None:
        self.identity = DeviceIdentity("GPU-0", H100.name, H100.clocks_mhz)
        self.now_us, self.energy_j = 0, 0.0
        self._mhz, self._asked, self._coming = PLANNED, PLANNED, list[tuple[int, int]]()
        self._kernels_us: list[tuple[int, int]] = []
        self._working = False
        self._switches = Switches(H100.driver, seed)
        self._lead = Lead.of(H100.driver.latency)
        self.reader = ChannelReader.create(1)
        self._writer = ChannelWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd), 1)
        plans = JobPlans()
        plans.push(PLANS)
        plans.select(PLANS.plan_id, {0: 0}, 0, {})
        self.idle = IdleWatch(self, loss)  # type: ignore[arg-type]  # what it asks of a device
        rank = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)
        schedule = make_schedule(schedule_of(1))
        self._follower = RankFollower(rank, schedule, self.reader, plans, machine_clock=True, idle=self.idle)
        self._iteration = -1

    def busy(self) -> bool:
        """Whether a kernel ran in the driver's last whole sample."""
        period_us = us_from_s(SAMPLE_S)
        end_us = self.now_us // period_us * period_us
        last = self._kernels_us[-3:]
        return any(begin_us < end_us and until_us > end_us - period_us for begin_us, until_us in last)

    def power_mw(self) -> int:
        return mw_from_w(self._watts)

    @property
    def _watts(self) -> float:
        return H100.power_w(self._mhz) if self._working else idle_w(self._mhz)

    def step(self) -> None:
        """A step whose mark rings."""
        self._iteration += 1
        self._writer.step_begin(self._iteration, self.now_us)
        self._ring()
        self._writer.begin(0, self.now_us)
        self.work(STEP_S)
        self._writer.end(0, self.now_us)
        self._writer.step_end(self._iteration, self.now_us)
        self._ring()

    def work(self, span_s: float) -> None:
        """Compute what takes so long at the planned clock."""
        self._working, left_us = True, 1e6 * span_s
        began_us = self.now_us
        self._kernels_us.append((began_us, 1 << 62))
        while left_us > 0:
            slower = H100.slowdown(self._mhz) / H100.slowdown(PLANNED)
            before_us = self.now_us
            self._pass(min(self._next_us(), before_us + max(1, round(left_us * slower))))
            left_us -= (self.now_us - before_us) / slower
        self._working, self._kernels_us[-1] = False, (began_us, self.now_us)

    def wait(self, span_s: float) -> None:
        end_us = self.now_us + us_from_s(span_s)
        while self.now_us < end_us:
            self._pass(min(self._next_us(), end_us))

    def _next_us(self) -> int:
        """When the follower looks or a clock comes into effect."""
        look_us = self._follower.next_look_us or 1 << 62
        return max(min(look_us, *(at_us for at_us, _ in self._coming), 1 << 62), self.now_us + 1)

    def _pass(self, until_us: int) -> None:
        self.energy_j += self._watts * s_from_us(until_us - self.now_us)
        self.now_us = until_us
        while self._coming and self._coming[0][0] <= until_us:
            self._mhz = self._coming.pop(0)[1]
        if 0 < self._follower.next_look_us <= until_us:
            self._look()

    def _ring(self) -> None:
        if self.reader.acknowledge():
            self._look()

    def _look(self) -> None:
        mhz = self._follower.look(0, self.now_us, self._lead) or HIGHEST
        if self._follower.due:
            self._follower.collect(0)
        if mhz != self._asked:
            self._asked = mhz
            effect_us = self.now_us + us_from_s(self._switches.draw(mhz).latency_s)
            self._coming = [change for change in self._coming if change[0] < effect_us] + [(effect_us, mhz)]


def job(mean_s: float, unmarked_s: float, seed: int, loss: float) -> Run:
    """An hour of steps and waits, as many with and without the least clock."""
    chance, run = random.Random(seed), Run(seed, loss)
    period_s = mean_s / IDLE_SHARE
    for _ in range(round(TIME_S / period_s)):
        for _ in range(round((period_s - mean_s - unmarked_s) / STEP_S)):
            run.step()
        run.wait(chance.expovariate(1 / mean_s))
        if unmarked_s:
            run.work(unmarked_s)
    run.step()
    run.reader.close()
    return run


def waits() -> Result:
    """Measure energy saved and time lost, of the whole job, against the same job at the plan's clock."""
    found: Result = {}
    for name, mean_s, unmarked_s in CASES:
        pairs = [[job(mean_s, unmarked_s, seed, loss) for loss in (IDLE_LOSS, 0.0)] for seed in SEEDS]
        for what, values in (
            ("saving", [100 * (1 - low.energy_j / kept.energy_j) for low, kept in pairs]),
            ("time", [100 * (low.now_us / kept.now_us - 1) for low, kept in pairs]),
            ("late_bound", [100 * low.idle.late_us / kept.now_us for low, kept in pairs]),
            ("at_least_clock", [100 * low.idle.low_us / low.now_us for low, _ in pairs]),
        ):
            found[f"idle_{name}_{what}"] = {"value": fmean(values), "unit": "%"}
            half = STUDENT * stdev(values) / len(values) ** 0.5
            found[f"idle_{name}_{what}_half_interval"] = {"value": half, "unit": "%"}
    return found


FIGURES = {"idle_waits": waits}
