"""One thread per GPU: everything that touches a GPU happens here, and only here.

It waits for the eventfd (the bell) of the rank that drives the GPU, or for the moment at which a mark is predicted, and
writes the clock in the same thread that was woken: a request never changes threads on its way to the device. In between
it samples energy, reads clocks and event reasons back, and finishes iteration reports. A driver call that hangs
therefore stops this GPU and no other; ``check_hang``, called by the node's watchdog, then declares it lost. Other
threads send commands by ``attach``, ``detach`` and ``stop``, which return a future (cancelled after ``stop``): always
wait on it with a timeout.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeVar

from perseus_agent.clocks.governor import Governor, GovernorLimits, GpuNotice, GpuNoticeKind
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.rank_follower import Finished, RankFollower
from perseus_agent.clocks.telemetry import Event, IterationSummary
from perseus_agent.devices.base import Controllability, Device, EventReason
from perseus_agent.devices.energy import SETTLE_US, EnergyMeter, InstructionEnergies
from perseus_agent.errors import DeviceError, DeviceLost, DriverMismatch
from perseus_proto.units import s_from_us, us_from_ns

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_UNFINISHED: Final = 16
UNFINISHED_S: Final = 3.0
"""Iterations that wait for their energy, and how long: longer than any counter's tick."""
READING_SHARE: Final = 0.01
"""Of the thread's time, at most, for the energy counter: some take 17 ms to answer, and a clock may be due then."""
READINGS: Final = 8
"""Remembered: one may have waited for a processor, not for the GPU."""
READING_LATE_S: Final = 1.0
"""How long one is put off at most."""
FD_SETSIZE: Final = 1024
"""``select`` takes no descriptor beyond; the agent opens these before it has any peer."""
DEBOUNCE_ON: Final = 2
DEBOUNCE_OFF: Final = 4
"""Read-backs in a row before a reason begins or ends: hardware slowdown blinks during clock changes."""

_NOTICES: Final = {
    GpuNoticeKind.THERMAL_SLOWDOWN: EventReason.SOFTWARE_THERMAL | EventReason.HARDWARE_THERMAL,
    GpuNoticeKind.POWER_BRAKE: EventReason.POWER_BRAKE,
    GpuNoticeKind.HARDWARE_SLOWDOWN: EventReason.HARDWARE_SLOWDOWN,
    GpuNoticeKind.POWER_CAP: EventReason.POWER_CAP,
}


@dataclass(frozen=True)
class WorkerLimits:
    """Settings of a worker."""

    governor: GovernorLimits = field(default_factory=GovernorLimits)
    sample_interval_s: float = 0.05
    watch_interval_s: float = 0.5
    hang_timeout_s: float = 45.0


class GpuWorker:
    """The thread of one GPU."""

    def __init__(
        self, device: Device, journal: Journal, limits: WorkerLimits, publish: Callable[[str, Event], None]
    ) -> None:
        self.device = device
        self.uuid = device.identity.uuid
        self.governor = Governor(device, journal, limits.governor, self._notify)
        self.meter = EnergyMeter()
        self.clock_mhz: int | None = None
        self.power_mw: int | None = None
        self.follower: RankFollower | None = None
        self._publish = publish
        self._limits = limits
        self._job_uid = ""
        self._energies = InstructionEnergies()
        self._unfinished: deque[tuple[float, Finished, RankFollower]] = deque()
        self._levels = dict.fromkeys(_NOTICES, 0)
        self._active = dict.fromkeys(_NOTICES, False)
        self._pump_s: float | None = None
        self._look_s = 0.0  # when to look at the rank although it does not ring; 0: not at all
        self._sample_s = self._watch_s = self._due_s = time.monotonic()
        self._readings_s: deque[float] = deque(maxlen=READINGS)  # how long the last readings of energy took
        self._gives_way = False
        self._awake_since_s: float | None = None
        self._commands: deque[tuple[Callable[[], bool], Future[Any]]] = deque()
        self._commands_lock = threading.Lock()
        self._stopped = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._predicts = self._epoll.fileno() < FD_SETSIZE
        self._thread = threading.Thread(target=self._run, name=f"gpu-{self.uuid[-12:]}", daemon=True)

    # ------------------------------------------------------------------------------------------- from other threads

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def attach(self, follower: RankFollower) -> Future[None]:
        """Let a rank drive the GPU."""

        def command() -> None:
            self._end_follower("another rank took the GPU")
            self._job_uid = follower.rank.job_uid
            self.governor.engage()
            self.follower = follower
            self._energies = InstructionEnergies()
            self._epoll.register(follower.channel.event_fd, select.EPOLLIN | select.EPOLLET)
            self._sample_s = time.monotonic()
            self._follow(follower)

        return self._command(command)

    def detach(self, follower: RankFollower, reason: str) -> Future[bool]:
        """End a rank's control and return the GPU to its default clocks. The result: whether it had been held and is
        back."""

        def command() -> bool:
            held = self.governor.held
            if self.follower is follower:
                self._end_follower(reason)
            return held and not self.governor.held

        return self._command(command)

    def selection_changed(self) -> Future[None]:
        """React to a selection for the rank that drives the GPU."""

        def command() -> None:
            if self.follower is not None:
                self.follower.selection_changed()
                self._follow(self.follower)

        return self._command(command)

    def restore(self, reason: str) -> Future[bool]:
        """Return a GPU to its default clocks that an earlier process of the agent locked."""

        def command() -> bool:
            self.governor.engage()
            self.governor.adopt()
            self._pump_s = self.governor.release(reason)
            return not self.governor.held

        return self._command(command)

    def stop(self, reason: str) -> Future[bool]:
        """Return the GPU to its default clocks and end the thread. The result: whether no reset is due any more."""

        def command() -> bool:
            self._end_follower(reason)
            # A reset that failed for a passing reason is tried until it works or the process is stopped.
            while self._pump_s is not None and not self.governor.lost:
                time.sleep(max(0.0, self._pump_s - time.monotonic()))
                self._pump_s = self.governor.pump()
            return not self.governor.held

        return self._command(command, last=True)

    def check_hang(self) -> None:
        """Declare the GPU lost if its thread has been inside one turn for too long."""
        awake_s = self._awake_since_s
        if awake_s is not None and time.monotonic() - awake_s > self._limits.hang_timeout_s:
            self.governor.declare_lost(f"a driver call lasts longer than {self._limits.hang_timeout_s:g} s")

    @property
    def progressing(self) -> bool:
        """Whether the thread makes progress, or its GPU is known to be lost."""
        awake_s = self._awake_since_s
        return self.governor.lost or awake_s is None or time.monotonic() - awake_s <= self._limits.hang_timeout_s

    def _command(self, action: Callable[[], T], *, last: bool = False) -> Future[T]:
        future: Future[T] = Future()

        def command() -> bool:
            try:
                future.set_result(action())
            except Exception as error:
                log.exception("command failed", extra={"gpu": self.uuid})
                future.set_exception(error)
            return last

        with self._commands_lock:
            if self._stopped:
                _refuse(future)
            else:
                self._commands.append((command, future))
                os.eventfd_write(self._bell, 1)
        return future

    # ------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        stopping = False
        now_s = time.monotonic()
        while not stopping:
            # Edges, not levels: the bell need not be read back, and a rank that does so cannot keep this thread awake.
            events = self._events_until_look() if self._look_s else self._epoll.poll(max(0.0, self._due_s - now_s))
            self._awake_since_s = now_s = time.monotonic()
            try:
                for descriptor, _ in events:
                    if descriptor == self._bell:
                        stopping = self._set_clock()
                    elif self.follower is not None:
                        self._follow(self.follower)
                if 0 < self._look_s <= now_s and self.follower is not None:
                    self._follow(self.follower)
                if now_s >= self._due_s:
                    self._routine(now_s)
            except Exception:
                # A defect of the agent must neither leave the GPU locked nor end the thread that can unlock it.
                log.exception("turn failed: default clocks", extra={"gpu": self.uuid})
                self._end_follower("a fault in the agent")
            self._awake_since_s = None
        with self._commands_lock:
            self._stopped = True
            self._epoll.close()
            os.close(self._bell)
        while self._commands:  # that came after the last one
            _refuse(self._commands.popleft()[1])

    def _events_until_look(self) -> list[tuple[int, int]]:
        """Wait to the microsecond: the timeout of epoll itself counts milliseconds."""
        until_s = min(self._due_s, self._look_s)
        rung, _, _ = select.select([self._epoll], [], [], max(0.0, until_s - time.monotonic()))
        return self._epoll.poll(0) if rung else []

    def _routine(self, now_s: float) -> None:
        """What is due by time: a write that had to wait, a sample, a read-back."""
        if self._pump_s is not None and self._pump_s <= now_s:
            self._pump_s = self.governor.pump()
        if now_s >= self._watch_s:
            self._watch_s = now_s + self._limits.watch_interval_s
            self._watch()
        if now_s >= self._sample_s:
            # A reading that a clock would have to wait for is taken after it.
            before_its_end = 0 < self._look_s < now_s + max(self._readings_s, default=0.0)
            self._gives_way = before_its_end and now_s < self._sample_s + READING_LATE_S
            if not self._gives_way:
                self._sample()
        self._plan_routine()

    def _plan_routine(self) -> None:
        sample_s = max(self._sample_s, self._look_s) if self._gives_way else self._sample_s
        self._due_s = min(self._watch_s, sample_s, self._pump_s or self._watch_s)

    def _set_clock(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        stopping = False
        while self._commands and not stopping:
            stopping = self._commands.popleft()[0]()
        self._plan_routine()
        return stopping

    def _follow(self, follower: RankFollower) -> None:
        """React to a ring of the rank: first the clock, then whatever can wait."""
        governor = self.governor
        pump_s = governor.want(follower.look(governor.writes))
        if pump_s != self._pump_s:
            self._pump_s = pump_s
            self._plan_routine()
        self._look_s = s_from_us(follower.next_look_us(us_from_ns(time.monotonic_ns()))) if self._predicts else 0.0
        if follower.due:
            self._finish_later(follower, follower.collect(self.governor.writes))
        if follower.must_look_again():
            self._look_s = time.monotonic()

    def _end_follower(self, reason: str) -> None:
        """Restore the clocks first, then report the rank's last iterations."""
        self._pump_s = self.governor.release(reason)
        follower, self.follower, self._look_s = self.follower, None, 0.0
        self._plan_routine()
        if follower is None:
            return
        self._epoll.unregister(follower.channel.event_fd)
        self._finish_later(follower, follower.leave(self.governor.writes))
        while self._unfinished:
            self._report(*self._unfinished.popleft()[1:])

    def _sample(self) -> None:
        limits, began_s = self._limits, time.monotonic()
        try:
            readings = self.device.energy()
        except (DeviceLost, DriverMismatch) as error:
            self.governor.stop_using(error)
            readings = None
        except DeviceError:
            readings = None
        self._readings_s.append(time.monotonic() - began_s)
        interval_s = limits.sample_interval_s if self.follower is not None else limits.watch_interval_s
        self._sample_s = began_s + max(interval_s, min(min(self._readings_s) / READING_SHARE, READING_LATE_S))
        for reading in readings or ():
            self.meter.add(reading)
        patience_s = time.monotonic() - UNFINISHED_S
        while self._unfinished and (
            readings is None
            or self.meter.covers(self._unfinished[0][1].next_begin_us)
            or self._unfinished[0][0] < patience_s
            or len(self._unfinished) > MAX_UNFINISHED
        ):
            self._report(*self._unfinished.popleft()[1:])

    def _watch(self) -> None:
        """Read back clock, power and event reasons."""
        if self.governor.lost:
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
        for kind, bits in _NOTICES.items():
            level = self._levels[kind]
            level = max(1, level + 1) if reasons & bits else min(-1, level - 1)
            self._levels[kind] = max(-DEBOUNCE_OFF, min(DEBOUNCE_ON, level))
            active = self._active[kind]
            if level >= DEBOUNCE_ON if not active else level <= -DEBOUNCE_OFF:
                self._active[kind] = not active
                self._notify(GpuNotice(kind, self.uuid, not active, f"event reasons: {reasons.name or 'none'}"))

    def _finish_later(self, follower: RankFollower, finished: list[Finished]) -> None:
        if finished:
            now_s = time.monotonic()
            self._unfinished.extend((now_s, one, follower) for one in finished)

    def _report(self, one: Finished, follower: RankFollower) -> None:
        record, plan = one.record, one.plan
        if self.governor.controllability is not Controllability.YES:
            plan = None  # it was not enforced
        key = (plan.plan_id, plan.point) if plan else None
        energy_mj = self._account(one, key)
        means_mj = self._energies.means_mj(key) if energy_mj is not None else ()
        quiet_us, quiet_mj = self._quiet(one) if energy_mj is not None else (0, 0)
        self._publish(
            follower.rank.job_uid,
            IterationSummary(
                rank=follower.rank,
                iteration=record.iteration,
                iteration_time_us=one.next_begin_us - record.begin_us,
                compute_span_us=record.end_us - record.begin_us,
                energy_mj=energy_mj,
                plan_id=plan.plan_id if plan else "",
                point=plan.point if plan else 0,
                durations_us=record.durations_us,
                clock_changes=one.clock_changes,
                instruction_energy_mj=means_mj,
                instruction_energy_iterations=self._energies.iterations if means_mj else 0,
                quiet_us=quiet_us,
                quiet_energy_mj=quiet_mj,
            ),
        )

    def _account(self, one: Finished, key: object) -> int | None:
        """Energy of an iteration, and of each of its instructions into the means."""
        record = one.record
        moments = [record.begin_us]
        for begin_us, duration_us in zip(record.begins_us, record.durations_us, strict=True):
            moments += (begin_us, begin_us + duration_us)
        moments.append(one.next_begin_us)
        if any(later < earlier for earlier, later in pairwise(moments)):
            # the energy of instructions that overlap cannot be separated
            moments = [record.begin_us, one.next_begin_us]
        levels = self.meter.at(moments)
        if levels is None:
            return None
        if len(moments) > 2:
            spent = [levels[place + 1] - levels[place] for place in range(1, len(levels) - 1, 2)]
            self._energies.add(key, spent)
        return round(levels[-1] - levels[0])

    def _quiet(self, one: Finished) -> tuple[int, int]:
        """Waits for a neighbour, as far as the counter shows them by themselves. Not what follows the last instruction:
        gradients are reduced and applied there."""
        record, idle_us, waits = one.record, one.record.begin_us, []
        for begin_us, duration_us in zip(record.begins_us, record.durations_us, strict=True):
            if begin_us > idle_us + SETTLE_US:
                waits.append((idle_us, begin_us))
            idle_us = max(idle_us, begin_us + duration_us)
        span_us, energy_mj = self.meter.quiet(waits, record.begin_us, one.next_begin_us)
        return round(span_us), energy_mj

    def _notify(self, notice: GpuNotice) -> None:
        restored = notice.kind is GpuNoticeKind.CLOCKS_RESTORED
        log.log(
            logging.INFO if restored else logging.WARNING,
            "%s%s: %s",
            notice.kind.value,
            "" if restored else " begins" if notice.active else " ends",
            notice.message,
            extra={"gpu": self.uuid, "job": self._job_uid},
        )
        if self._job_uid:
            self._publish(self._job_uid, notice)


def _refuse(future: Future[Any]) -> None:
    """Cancel a future, also for threads that wait for it already."""
    future.cancel()
    future.set_running_or_notify_cancel()
