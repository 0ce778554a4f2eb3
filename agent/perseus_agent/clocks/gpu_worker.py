"""One thread per GPU: everything that touches a GPU happens here, and only here.

It waits for the eventfd (the bell) of the rank that drives the GPU, or for the moment at which a mark is predicted, and
writes the clock in the same thread that was woken: a request never changes threads on its way to the device. In between
it samples energy, reads clocks and event reasons back, and finishes iteration reports. A driver call that hangs
therefore stops this GPU and no other; ``check_hang``, called by the node's watchdog, then declares it lost. Other
threads send commands by ``attach``, ``detach``, ``rest_at`` and ``stop``, which return a future (cancelled after
``stop``): always wait on it with a timeout.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from perseus_agent.clocks.backlog import Backlog
from perseus_agent.clocks.call_queue import CallTurns
from perseus_agent.clocks.clock_readings import measure_change, sampled_clock
from perseus_agent.clocks.commands import Commands
from perseus_agent.clocks.follower import Follower
from perseus_agent.clocks.governor import Governor, GovernorLimits
from perseus_agent.clocks.gpu_notices import GpuNotice, GpuNoticeKind, Slowdowns
from perseus_agent.clocks.idle import IDLE_LOSS, IdleWatch
from perseus_agent.clocks.iteration_reports import IterationReports
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.lost_gpu import LostGpu
from perseus_agent.clocks.rank_budget import LOOK_S, RankBudget
from perseus_agent.clocks.reading_pace import ReadingPace
from perseus_agent.clocks.telemetry import Event
from perseus_agent.clocks.turn_watch import BUSY_S, Stall, TurnWatch, computed_s
from perseus_agent.devices.base import Controllability, Device
from perseus_agent.errors import DeviceError, DeviceLost, DriverMismatch
from perseus_core.units import s_from_us, us_from_ns, us_from_s

log = logging.getLogger(__name__)

FD_SETSIZE: Final = 1024
"""``select``, which waits to the microsecond, takes no descriptor beyond; the agent opens these before any peer's."""


@dataclass(frozen=True)
class WorkerLimits:
    """Settings of a worker."""

    governor: GovernorLimits = field(default_factory=GovernorLimits)
    sample_interval_s: float = 0.05
    watch_interval_s: float = 0.5
    hang_timeout_s: float = 45.0
    idle_loss: float = IDLE_LOSS


class GpuWorker:
    """The thread of one GPU."""

    def __init__(
        self,
        device: Device,
        journal: Journal,
        limits: WorkerLimits,
        publish: Callable[[str, Event], None],
        turns: CallTurns | None = None,
    ) -> None:
        """``turns``: of the node's driver calls; None: this GPU's wait for no others."""
        self.device = device
        self.uuid = device.identity.uuid
        self.governor = Governor(device, journal, limits.governor, self._notify, turns=turns)
        self._lost = LostGpu(device, self.governor)
        self._reports = IterationReports(publish)
        self.meter, self.clocks = self._reports.meter, self._reports.clocks
        self.clock_mhz: int | None = None
        self.power_mw: int | None = None
        self.follower: Follower | None = None
        self._publish, self._limits = publish, limits
        self._job_uid = ""
        self._slowdowns = Slowdowns()
        self._budget, self._backlog = RankBudget(), Backlog(self._reports)
        self.idle = IdleWatch(device, limits.idle_loss)
        self._pump_s: float | None = None
        self._look_s = 0.0  # when to look at the rank although it does not ring; 0: not at all
        self._watch_s = self._due_s = time.monotonic()
        self._pace = ReadingPace(self._watch_s)
        self.stuck = ""
        """Why the agent must end: its own thread does not come to an end. Empty: it does."""
        self._commands = Commands(self.uuid)
        self._epoll = select.epoll()
        self._epoll.register(self._commands.bell, select.EPOLLIN)
        self._precise = self._epoll.fileno() < FD_SETSIZE
        self._thread = threading.Thread(target=self._run, name=f"gpu-{self.uuid[-12:]}", daemon=True)
        self.turn = TurnWatch(limits.hang_timeout_s, lambda: computed_s(self._thread))

    # ------------------------------------------------------------------------------------------- from other threads

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def attach(self, follower: Follower) -> Future[None]:
        """Let a rank drive the GPU."""

        def command() -> None:
            self._end_follower("another rank took the GPU")
            self._job_uid = follower.job_uid
            self.governor.engage()
            self.follower = follower
            self._reports.begin()
            self._epoll.register(follower.bell, select.EPOLLIN | select.EPOLLET)
            self._pace.at_once(time.monotonic(), beside_looks=follower.sample_s > 0)
            self._follow(follower)

        return self._commands.add(command)

    def detach(self, follower: Follower, reason: str) -> Future[bool]:
        """End a rank's control and return the GPU to its default clocks. The result: whether it had been held and is
        back."""

        def command() -> bool:
            held = self.governor.held
            if self.follower is follower:
                self._end_follower(reason)
            return held and not self.governor.held

        return self._commands.add(command)

    def rest_at(self, job_uid: str, mhz: int) -> Future[None]:
        """Lock a clock for as long as no rank's plan wants one: a lease's. Asked again, it is tried again."""

        def command() -> None:
            self._job_uid = job_uid
            self.governor.engage()
            self.governor.resting_mhz = mhz
            self._follow_or_rest()

        return self._commands.add(command)

    def rest_at_default(self, reason: str) -> Future[bool]:
        """Take the clock of ``rest_at`` back. The result: whether the GPU had been held and is at its default
        clocks."""

        def command() -> bool:
            held, self.governor.resting_mhz = self.governor.held, None
            if self.follower is None:
                self._pump_s = self.governor.release(reason)
                self._plan_routine()
            else:
                self._follow_or_rest()
            return held and not self.governor.held

        return self._commands.add(command)

    def selection_changed(self) -> Future[None]:
        """React to a selection for the rank that drives the GPU."""

        def command() -> None:
            if self.follower is not None:
                self.follower.selection_changed()
                self._follow(self.follower)

        return self._commands.add(command)

    def restore(self, reason: str) -> Future[bool]:
        """Return a GPU to its default clocks that an earlier process of the agent locked."""

        def command() -> bool:
            self.governor.engage()
            self.governor.adopt()
            self._pump_s = self.governor.release(reason)
            return not self.governor.held

        return self._commands.add(command)

    def stop(self, reason: str) -> Future[bool]:
        """Return the GPU to its default clocks and end the thread. The result: whether no reset is due any more."""

        def command() -> bool:
            self.governor.resting_mhz = None
            self._end_follower(reason)
            # A reset that failed for a passing reason is tried until it works or the process is stopped.
            while self._pump_s is not None and not self.governor.lost:
                time.sleep(max(0.0, self._pump_s - time.monotonic()))
                self._pump_s = self.governor.pump()
            return not self.governor.held

        return self._commands.add(command, last=True)

    def wake(self) -> None:
        """The turn of this GPU's driver call has come."""
        self._commands.ring()

    @property
    def lead_s(self) -> float | None:
        """The longest time by which the host was ahead of the GPU in the last iteration; None: not known."""
        return self._reports.lead_s

    def check_hang(self) -> None:
        """Find out whether the thread has been inside one turn for too long: a GPU whose driver does not answer is
        lost, and where the thread itself does not come to an end, the agent must."""
        stall = self.turn.stall()
        if stall is Stall.DRIVER:
            self.governor.declare_lost(f"a driver call lasts longer than {self._limits.hang_timeout_s:g} s")
        elif stall is Stall.BUSY and not self.stuck:
            self.stuck = f"{self.uuid}: its thread has computed for {BUSY_S:g} s without an end: a defect of the agent"
            log.error("%s; the agent ends, and its keeper gives the GPU back", self.stuck, extra={"gpu": self.uuid})

    @property
    def progressing(self) -> bool:
        """Whether the thread makes progress, or its GPU is known to be lost."""
        return not self.stuck and (self.governor.lost or not self.turn.overdue)

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        stopping = False
        while not stopping:
            # Edges, not levels: the bell need not be read back, and a rank that does so cannot keep this thread awake.
            rung = {descriptor for descriptor, _ in self._wait()}
            now_s = self.turn.begin()
            try:
                if self._commands.bell in rung:
                    stopping = self._obey()
                due = rung - {self._commands.bell} or 0 < self._look_s <= now_s
                if due and self.follower is not None:
                    self._follow(self.follower)
                if now_s >= self._due_s or (due and self._pace.beside_looks):
                    self._routine(now_s)
                if 0 < self.governor.latency.read_us <= us_from_s(now_s):
                    measure_change(self.device, self.governor.latency, now_s, self._look_s)
                if self._has_backlog:
                    self._work_off()
            except Exception:
                # A defect of the agent must neither leave the GPU locked nor end the thread that can unlock it.
                log.exception("turn failed: default clocks", extra={"gpu": self.uuid})
                self.governor.resting_mhz = None
                try:
                    self._end_follower("a fault in the agent")
                except Exception:  # what failed above may fail again, after the clocks and before the reports
                    log.exception("the rank's last iterations are not reported", extra={"gpu": self.uuid})
            self.turn.end()
        while self._backlog.pending:  # the clocks are back: what is left is to say how the last iterations were
            self.turn.begin()
            self._work_off()
        self._epoll.close()
        self._commands.close()

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for a ring or for what is due: to the microsecond where a clock depends on it."""
        if self._has_backlog:
            return self._epoll.poll(0)
        soon_s = min(at for at in (self._look_s, s_from_us(self.governor.latency.read_us), math.inf) if at)
        timeout_s = max(0.0, min(self._due_s, soon_s) - time.monotonic())
        if soon_s < self._due_s and self._precise:
            # The timeout of epoll itself counts milliseconds.
            rung, _, _ = select.select([self._epoll], [], [], timeout_s)
            return self._epoll.poll(0) if rung else []
        return self._epoll.poll(timeout_s)

    def _routine(self, now_s: float) -> None:
        """What is due by time: a write that had to wait, a sample, a read-back."""
        if self._pump_s is not None and self._pump_s <= now_s:
            self._pump_s = self.governor.pump()
        if self.follower is not None and self._budget.paid(now_s):
            self._epoll.modify(self.follower.bell, select.EPOLLIN | select.EPOLLET)
            self._backlog.unread()
            self._follow(self.follower)
        if now_s >= self._watch_s:
            self._watch_s = now_s + self._limits.watch_interval_s
            self._watch()
        if self._pace.takes_turn(now_s, self._look_s):
            self._sample()
        self._plan_routine()

    def _plan_routine(self) -> None:
        others_s = self._pump_s, self._budget.muted_until_s
        watch_s = max(self._watch_s, self._look_s) if self._pace.beside_looks else self._watch_s
        self._due_s = min(watch_s, self._pace.due_s(self._look_s), *(at for at in others_s if at))

    def _obey(self) -> bool:
        stopping = self._commands.run()
        if self.governor.queued:  # its turn may have come
            self._follow_or_rest()
        self._plan_routine()
        return stopping

    def _follow(self, follower: Follower) -> None:
        """React to a ring of the rank: first the clock, then whatever can wait."""
        if self._budget.muted_until_s:
            return
        governor, began_s = self.governor, time.thread_time()
        mhz = follower.look(governor.writes, us_from_ns(time.monotonic_ns()), governor.latency.lead)
        # Without the driver's calls, for which other threads do not wait.
        spent_s = time.thread_time() - began_s + LOOK_S
        governor.latency.follow(follower.plan)
        pump_s = governor.want(mhz, urgent=follower.urgent)
        if pump_s != self._pump_s:
            self._pump_s = pump_s
            self._plan_routine()
        self._look_s = s_from_us(follower.next_look_us)
        if follower.due:
            self._backlog.unread()
        self._charge(follower, spent_s)

    def _follow_or_rest(self) -> None:
        """Ask for the clock that is wanted now: the rank's, or that of the lease."""
        if self.follower is not None and not self._budget.muted_until_s:
            self._follow(self.follower)
        else:
            self._pump_s = self.governor.want(None)
            self._plan_routine()

    @property
    def _has_backlog(self) -> bool:
        """Whether there is something to do that can wait, but not for a time."""
        return self._backlog.pending and not self._budget.muted_until_s

    def _work_off(self) -> None:
        """Read records and make reports, as much as there is room for in this turn."""
        governor = self.governor
        spent_s = self._backlog.work(
            self.follower,
            governor.writes,
            began_s=self.turn.cpu_began_s,
            enforced=governor.controllability is Controllability.YES,
            effects=governor.latency.effects,
        )
        self._charge(self.follower, spent_s)

    def _charge(self, follower: Follower | None, spent_s: float) -> None:
        """Note what a rank has cost; stop following one that costs too much, at default clocks."""
        if not self._budget.spend(spent_s, time.monotonic(), mute=follower is not None) or follower is None:
            return
        where = {"gpu": self.uuid, "job": self._job_uid}
        log.warning("the rank's marks cost too much: default clocks for a while", extra=where)
        self._look_s = 0.0
        self._epoll.modify(follower.bell, 0)
        self._pump_s = self.governor.want(None)
        self._plan_routine()

    def _end_follower(self, reason: str) -> None:
        """Restore the clocks first, then report the rank's last iterations."""
        self._pump_s = self.governor.release(reason)
        follower, self.follower, self._look_s, self._budget.muted_until_s = self.follower, None, 0.0, 0.0
        self._plan_routine()
        if follower is None:
            return
        self._epoll.unregister(follower.bell)
        self._backlog.forget()
        self._reports.add(follower.leave(self.governor.writes, us_from_ns(time.monotonic_ns())))
        self._reports.hurry()
        self._backlog.unreported(counter=False)

    def _sample(self) -> None:
        limits, began_s = self._limits, time.monotonic()
        try:
            readings = self.device.energy()
        except (DeviceLost, DriverMismatch) as error:
            self.governor.stop_using(error)
            readings = None
        except DeviceError:
            readings = None
        interval_s = limits.watch_interval_s
        if self.follower is not None:
            interval_s = max(limits.sample_interval_s, self.follower.sample_s)
        self._pace.read(began_s, time.monotonic(), interval_s)
        self.meter.read(readings)
        if self.follower is not None and not self.governor.lost:
            self._reports.clocks.extend(sampled_clock(self.device))
        self._backlog.unreported(counter=readings is not None)

    def _watch(self) -> None:
        """Read back clock, power and event reasons."""
        if self.governor.lost:
            pump_s = self._lost.check()
            self._pump_s = self._pump_s if self.governor.lost else pump_s
            return
        try:
            self.clock_mhz = self.device.sm_clock_mhz()
            reasons = self.device.event_reasons()
            self.power_mw = self.device.power_mw()
        except (DeviceLost, DriverMismatch) as error:
            self.governor.stop_using(error)
            return
        except DeviceError as error:
            log.debug("read-back failed: %s", error, extra={"gpu": self.uuid})
            return
        self.governor.observe(self.clock_mhz, reasons)
        self._pump_s = self.governor.check_keeper() or self._pump_s
        for kind, active in self._slowdowns.read(reasons):
            self._notify(GpuNotice(kind, self.uuid, active, f"event reasons: {reasons.name or 'none'}"))

    def _notify(self, notice: GpuNotice) -> None:
        level = logging.INFO if notice.kind is GpuNoticeKind.CLOCKS_RESTORED else logging.WARNING
        log.log(level, "%s", notice, extra={"gpu": self.uuid, "job": self._job_uid})
        if self._job_uid:
            self._publish(self._job_uid, notice)
