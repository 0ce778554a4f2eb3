"""The policy of one GPU's clock: what may be written, when, and whether the GPU obeys.

A ``Governor`` belongs to the worker thread of its GPU, which alone calls its methods; properties are plain values that
other threads may read. The latest request wins, writes without effect are skipped, the rate of writes is bounded, the
journal lists a GPU before the GPU is locked, and a clock that another program has set is left alone. Which clock is
wanted comes from the rank's follower; the node decides which rank may want any.

    want(mhz | None) ── pump() ── turn of the node's queue ──► lock_clocks / reset_clocks    None: the default clocks
    observe(clock, reasons) ◄── the worker's read-back              drift, foreign writes
    release() ── default clocks for good, at the end of a lease
    resting_mhz ── a lease's clock, which then stands for the default clocks until it is taken back
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from perseus_agent.clocks.call_queue import CallTurns, gain_mhz
from perseus_agent.clocks.gpu_notices import GpuNotice, GpuNoticeKind
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.latency import LatencyMeter
from perseus_agent.clocks.policy_reader import PolicyReader
from perseus_agent.clocks.read_back import ReadBack, Verdict
from perseus_agent.clocks.standing import TRANSITIONS, Standing
from perseus_agent.devices.base import Controllability, Device, EventReason
from perseus_agent.errors import (
    DeviceBusy,
    DeviceError,
    DeviceFailed,
    DriverMismatch,
    InvalidClock,
    JournalError,
    NoPermission,
    NotSupported,
)
from perseus_core.latency import published_latency
from perseus_core.units import us_from_s

BUSY_RETRY_S: Final = 0.01
BUSY_RETRIES: Final = 5
RESTORE_RETRY_S: Final = 0.5
"""First pause before a failed reset is tried again; doubled up to the next constant, and never given up."""
RESTORE_RETRY_MAX_S: Final = 60.0
MAX_FAILURES: Final = 5
UNKNOWN: Final = 0
"""Stands for a clock that an earlier process of this agent locked."""

UNWATCHED: Final = "no clock keeper watches the agent: default clocks until one does"
"""Why no clock is written although the GPU would permit it."""


@dataclass(frozen=True)
class GovernorLimits:
    """Settings of a governor."""

    min_switch_interval_s: float = 0.002
    settle_s: float = 0.5


class Governor:
    """One GPU's clock."""

    def __init__(
        self,
        device: Device,
        journal: Journal,
        limits: GovernorLimits,
        notify: Callable[[GpuNotice], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        turns: CallTurns | None = None,
    ) -> None:
        """``turns``: of the node's driver calls; None: this GPU's wait for no others."""
        self._device = device
        self._uuid = device.identity.uuid
        self._supported = frozenset(device.identity.supported_clocks_mhz)
        self._journal = journal
        self._limits = limits
        self._notify = notify
        self._clock = clock
        self._turns = turns
        self._wanted_since_s: float | None = None
        self._wanted: int | None = None
        self._urgent = False
        self._releasing: str | None = None
        self._held = False  # the journal lists the GPU: a reset is due
        self._unsure = False  # what is on the device may not be what was written last
        self._next_write_s = 0.0
        self._busy = 0
        self._failures = 0
        self._restore_retry_s = RESTORE_RETRY_S
        self._read_back = ReadBack(device.identity.supported_clocks_mhz, clock())
        self.policy = PolicyReader(device)
        published, waits = published_latency(device.identity.model), turns.waits if turns else None
        self.latency = LatencyMeter(published, us_from_s(clock()), waits)
        """How long changes take."""
        self.queued = False
        """Whether a change waits for its turn."""
        self.resting_mhz: int | None = None
        """What a lease wants while no plan wants a clock; None: the default clocks."""
        self.applied: int | None = None
        """The clock that this agent has locked; None: the default clocks; UNKNOWN: locked by an earlier process."""
        self.probed = False
        """Whether ``controllability`` has been read from the device yet."""
        self.controllability = Controllability.NOT_SUPPORTED
        self.controllability_message = "not read yet"
        self.writes = 0
        """Calls that changed the device's clocks, ever."""
        self.locks = 0
        """Those of them that locked a clock."""
        self.skipped = 0
        """Requests that were replaced by a later one, or that wanted the clock that was locked already."""
        self.restores = 0
        """How often the GPU was returned to its default clocks."""
        self.standing = Standing.OURS
        self.lost = False
        self.driver_replaced = False
        """The driver is not the one that this process has opened: only a new process can continue."""

    # ------------------------------------------------------------------------------------------------ requests

    def engage(self) -> None:
        """Prepare for a rank: read from the device whether it may be driven. One that does not answer is lost, so that
        it is asked again until it does: the rank prepares only once."""
        self._releasing = None
        if self.lost or self.standing is Standing.FOREIGN:
            return
        if self._journal.watch_expired:
            self._controllable(Controllability.NO_PERMISSION, UNWATCHED)
            return
        try:
            state, message = self._device.controllability()
        except DeviceError as error:
            self.stop_using(error)
            return
        if state is Controllability.LOST:
            self.declare_lost(message)
        else:
            self._controllable(state, message)

    def check_keeper(self) -> float | None:
        """Give the GPU back if no keeper has watched for too long, and permit its use when one does. Returns when to
        ``pump``, if ever."""
        if self._journal.watch_expired and self.controllability is Controllability.YES:
            self._controllable(Controllability.NO_PERMISSION, UNWATCHED)
            return self.pump()
        if self.controllability_message == UNWATCHED and self._journal.watched:
            self.engage()
        return None

    def want(self, mhz: int | None, *, urgent: bool = False) -> float | None:
        """Request a clock, MHz; None: none, the GPU rests. Returns when to ``pump`` again (monotonic seconds), if
        ever. ``urgent``: ahead of other GPUs' changes."""
        self._urgent = urgent
        if mhz is None:
            mhz = self.resting_mhz
        if mhz is not None and mhz not in self._supported:
            self.controllability_message = f"{mhz} MHz is not a supported clock; default clocks instead"
            mhz = None
        if self._wanted != self.applied or mhz == self.applied:
            self.skipped += 1  # the request before this one never reached the device, or this one need not
        self._wanted = mhz
        return self.pump()

    def pump(self) -> float | None:
        """Write the wanted clock to the device if it is time. Returns when to call again (monotonic seconds), if
        ever."""
        if self.controllability is not Controllability.YES:
            self._wanted = None
        wanted = self._wanted
        if self.standing is Standing.FOREIGN or (wanted == self.applied and not self._unsure):
            self._wanted_since_s = None
            if self.queued:
                self._end_turn()
            self._finish_release()
            return None
        now_s = self._clock()
        if self._wanted_since_s is None:
            self._wanted_since_s = now_s
        if now_s < self._next_write_s:
            return self._next_write_s
        if self._turns is not None and wanted is not None:  # resets wait for nothing
            again_s = self._turns.ask(self._uuid, gain_mhz(self.applied, wanted), urgent=self._urgent)
            self.queued = again_s is not None
            if again_s is not None:
                return again_s
        try:
            return self._write(wanted)
        finally:
            self._end_turn()

    def _write(self, wanted: int | None) -> float | None:
        """Call the driver. Returns when to ``pump`` again, if ever."""
        began_s = self._clock()
        try:
            if wanted is None:
                self._device.reset_clocks()
            else:
                if not self._held:
                    self._hold()
                    began_s = self._clock()
                self._device.lock_clocks(wanted)
        except JournalError as error:
            # No clock is locked on a GPU that the journal does not list.
            self.controllability_message = str(error)
            return self._fall_back_to_default()
        except DeviceError as error:
            return self._fail(error)
        self._wrote(wanted, began_s)
        return None

    def _end_turn(self) -> None:
        self.queued = False
        if self._turns is not None:
            self._turns.leave(self._uuid)

    def release(self, reason: str) -> float | None:
        """Let the GPU rest, at its default clocks if it is free; a foreign setting stays. Returns as ``want`` does."""
        if self.resting_mhz is not None:
            return self.want(None)
        if self.standing is Standing.FOREIGN:
            self._leave_foreign()
        self._releasing = reason
        self._next_write_s = 0.0
        return self.want(None)

    @property
    def held(self) -> bool:
        """Whether a reset of this GPU is due."""
        return self._held

    def adopt(self) -> None:
        """Take over a lock of an earlier process of this agent; at which clock is not known."""
        self._held = True
        self.applied = self._wanted = UNKNOWN

    # ------------------------------------------------------------------------------------------------ read-back

    def observe(self, clock_mhz: int, reasons: EventReason) -> None:
        """Compare the clock read back with the requested one."""
        self.policy.read()
        if self.applied is None or self.lost:
            return
        settled_s = self._clock() - max(self._limits.settle_s, self.latency.switch.p99_s)
        verdict = self._read_back.compare(clock_mhz, reasons, settled_before_s=settled_s)
        if verdict is Verdict.AGREES:
            self._agree()
        elif verdict is Verdict.FOREIGN and self.standing is Standing.OURS:
            # It ran at the locked clock and then changed, without a write of this agent and without a reason.
            message = f"reads {clock_mhz} MHz, {self.applied} MHz was locked and reached"
            self._controllable(Controllability.FOREIGN, message)
            self._stand(Standing.FOREIGN, message)
        elif verdict is Verdict.DRIFTED and self.standing is Standing.OURS:
            self._unsure = True
            message = f"reads {clock_mhz} MHz, {self.applied} MHz is locked, and the GPU gives no reason"
            self._stand(Standing.DRIFTED, message)

    def stop_using(self, error: DeviceError) -> None:
        """Stop using the GPU after this error."""
        self.driver_replaced = self.driver_replaced or isinstance(error, DriverMismatch)
        self.declare_lost(str(error))

    def declare_lost(self, message: str) -> None:
        """The GPU does not answer, as the watchdog (another thread) or an error shows: it is not used any more."""
        if not self.lost:
            self.lost = True
            self._controllable(Controllability.LOST, message)
            self._notify(GpuNotice(GpuNoticeKind.LOST, self._uuid, True, message))

    def take_back(self, state: Controllability, message: str) -> float | None:
        """Use a lost GPU again that answers, from its default clocks on. Returns when to ``pump`` again, if ever."""
        self.lost = False
        self._busy = self._failures = 0
        self._unsure = self._held
        if self.standing is Standing.FOREIGN:  # it is still not driven, and must not seem to be
            state, message = Controllability.FOREIGN, "another program had set its clock before it was lost"
        self._controllable(state, message)
        self._notify(GpuNotice(GpuNoticeKind.LOST, self._uuid, False, "the GPU answers again"))
        return self.want(None)

    # ------------------------------------------------------------------------------------------------ inside

    def _stand(self, standing: Standing, message: str) -> None:
        kind, active = TRANSITIONS[self.standing, standing]
        self.standing = standing
        self._notify(GpuNotice(kind, self._uuid, active, message))

    def _hold(self) -> None:
        self._journal.record_lock(self._uuid)
        self._held = True
        self.controllability_message = ""  # it may say that this was refused

    def _finish_release(self) -> None:
        """Remove the GPU from the journal once it is back at its default clocks."""
        if self._releasing is None or self.applied is not None or self._unsure or self.standing is Standing.FOREIGN:
            return
        reason, self._releasing = self._releasing, None
        if self._held:
            self._held = False
            self.restores += 1
            self._remove_from_journal()
            self._notify(GpuNotice(GpuNoticeKind.CLOCKS_RESTORED, self._uuid, True, reason))

    def _remove_from_journal(self) -> None:
        try:
            self._journal.record_reset(self._uuid)
        except JournalError as error:  # then it is reset once more at the next start: harmless
            self.controllability_message = str(error)

    def _wrote(self, mhz: int | None, now_s: float) -> None:
        self.latency.wrote(
            self.applied,
            mhz,
            wanted_us=us_from_s(now_s if self._wanted_since_s is None else self._wanted_since_s),
            began_us=us_from_s(now_s),
            ended_us=us_from_s(self._clock()),
            tolerance_mhz=0 if mhz is None else self._read_back.tolerance(mhz),
        )
        self._wanted_since_s = None
        self.applied = mhz
        self.writes += 1
        self._next_write_s = now_s + self._limits.min_switch_interval_s
        self._unsure = False
        self._read_back.wrote(mhz, now_s)
        self._busy = self._failures = 0
        if mhz is not None:
            self.locks += 1
            return
        self._restore_retry_s = RESTORE_RETRY_S
        self._agree()
        self._finish_release()

    def _agree(self) -> None:
        if self.standing is Standing.DRIFTED:
            self._unsure = False
            self._stand(Standing.OURS, "the clock is the requested one again")

    def _leave_foreign(self) -> None:
        """At release: reset only if the lock in effect is this agent's after all."""
        self._stand(Standing.OURS, "no longer driven by this agent")
        self._read_back.restarted()
        ours = self.applied
        try:
            clock_mhz = self._device.sm_clock_mhz()
            self._controllable(*self._device.controllability())
        except DeviceError as error:
            self._fail(error)
            return
        if ours is not None and abs(clock_mhz - ours) > self._read_back.tolerance(ours):
            self.applied = self._wanted = None
            self._held = self._unsure = False
            self._remove_from_journal()

    def _fail(self, error: DeviceError) -> float | None:
        """Handle an error of the device; returns when to try again, if ever."""
        match error:
            case DeviceBusy() | DeviceFailed():
                self._unsure = True
                self._busy += 1
                self._failures += isinstance(error, DeviceFailed)
                if self._failures < MAX_FAILURES and self._busy <= BUSY_RETRIES:
                    return self._again(BUSY_RETRY_S)
                self.controllability_message = str(error)
                if self._failures >= MAX_FAILURES:
                    self.declare_lost(str(error))
            case NoPermission():
                self._controllable(Controllability.NO_PERMISSION, str(error))
            case NotSupported():
                self._controllable(Controllability.NOT_SUPPORTED, str(error))
            case InvalidClock():
                self.controllability_message = str(error)
            case _:
                self._unsure = self._held
                self.stop_using(error)
        return self._fall_back_to_default()

    def _fall_back_to_default(self) -> float | None:
        """After a refused write: default clocks rather than an old one. The reset is tried until it works."""
        self._wanted = None
        self._busy = 0
        if self.applied is None and not self._unsure:
            self._finish_release()
            return None
        delay_s, self._restore_retry_s = self._restore_retry_s, min(2 * self._restore_retry_s, RESTORE_RETRY_MAX_S)
        return self._again(delay_s)

    def _again(self, delay_s: float) -> float:
        self._next_write_s = self._clock() + delay_s
        return self._next_write_s

    def _controllable(self, state: Controllability, message: str) -> None:
        self.probed, self.controllability, self.controllability_message = True, state, message
