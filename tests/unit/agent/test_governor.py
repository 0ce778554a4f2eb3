"""The clock policy of one GPU, with a clock that the test turns."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.doubles.recording_gpu import RecordingGpu

from perseus_agent.clocks.governor import BUSY_RETRIES, MAX_FAILURES, Governor, GovernorLimits
from perseus_agent.clocks.gpu_notices import GpuNotice, GpuNoticeKind
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.lost_gpu import ANSWERS, LostGpu
from perseus_agent.clocks.read_back import STRIKES
from perseus_agent.clocks.standing import TRANSITIONS, Standing
from perseus_agent.devices.base import Controllability, EventReason
from perseus_agent.errors import (
    DeviceBusy,
    DeviceError,
    DeviceFailed,
    DeviceLost,
    InvalidClock,
    JournalError,
    NoPermission,
    NotSupported,
)

GPU = "GPU-0"


class Bench:
    """A governor, its GPU, its journal, its notices, and time."""

    def __init__(self, folder: Path, interval_s: float = 0.0, settle_s: float = 0.5) -> None:
        self.now_s = 100.0
        self.gpu = RecordingGpu(GPU)
        self.journal, _ = Journal.open(folder / "journal", "boot")
        self.notices: list[GpuNotice] = []
        limits = GovernorLimits(interval_s, settle_s)
        self.governor = Governor(self.gpu, self.journal, limits, self.notices.append, lambda: self.now_s)
        self.governor.engage()

    @property
    def written(self) -> list[int | None]:
        return [call.mhz for call in self.gpu.calls]

    def observe(self, mhz: int, reasons: EventReason = EventReason.NONE, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += 1
            self.governor.observe(mhz, reasons)

    def told(self, kind: GpuNoticeKind) -> list[bool]:
        return [notice.active for notice in self.notices if notice.kind is kind]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_clock_is_written_once_and_no_ops_are_skipped(bench: Bench) -> None:
    for _ in range(3):
        assert bench.governor.want(1200) is None
    assert bench.written == [1200]
    assert bench.governor.skipped == 2


def test_the_journal_knows_a_lock_before_the_gpu_does(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(bench.gpu, "lock_clocks", lambda mhz: seen.append(bench.journal.locked))
    bench.governor.want(1200)
    assert seen == [{GPU}]


def test_without_a_journal_no_clock_is_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uuid: str) -> None:
        raise JournalError("disk full")

    monkeypatch.setattr(bench.journal, "record_lock", refuse)
    bench.governor.want(1200)
    assert bench.written == []
    assert bench.governor.controllability_message == "disk full"


def test_requests_faster_than_the_bound_coalesce_to_the_latest(tmp_path: Path) -> None:
    bench = Bench(tmp_path, interval_s=0.010)
    bench.governor.want(1200)
    due_s = [bench.governor.want(clock) for clock in (900, 1005, 600)]
    assert bench.written == [1200]
    assert due_s == [pytest.approx(100.010)] * 3
    bench.now_s = 100.010
    assert bench.governor.pump() is None
    assert bench.written == [1200, 600]
    assert bench.governor.skipped == 2  # 900 and 1005 never reached the device


def test_the_bound_holds_over_any_sequence_of_requests(tmp_path: Path) -> None:
    bench = Bench(tmp_path, interval_s=0.010)
    times = []
    for step in range(1000):
        bench.now_s += 0.0007
        before = bench.governor.writes
        bench.governor.want((600, 900, 1200)[step % 3])
        times += [bench.now_s] * (bench.governor.writes - before)
    assert len(times) > 50
    assert min(b - a for a, b in itertools.pairwise(times)) >= 0.010


def test_release_restores_at_once_whatever_the_bound(tmp_path: Path) -> None:
    bench = Bench(tmp_path, interval_s=10.0)
    bench.governor.want(1200)
    assert bench.governor.release("done") is None
    assert bench.written == [1200, None]
    assert bench.journal.locked == frozenset()
    assert bench.told(GpuNoticeKind.CLOCKS_RESTORED) == [True]


def test_release_of_a_gpu_never_locked_writes_nothing(bench: Bench) -> None:
    bench.governor.release("done")
    assert bench.written == []
    assert bench.notices == []


def test_release_after_default_clocks_strikes_the_journal_without_another_write(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.governor.want(None)
    assert bench.journal.locked == {GPU}  # an iteration without a plan does not end the hold
    bench.governor.release("done")
    assert bench.written == [1200, None]
    assert bench.journal.locked == frozenset()


def test_a_gpu_locked_by_an_earlier_process_is_reset_once(bench: Bench) -> None:
    bench.journal.record_lock(GPU)
    bench.governor.adopt()
    bench.governor.release("replayed")
    assert bench.written == [None]
    assert bench.journal.locked == frozenset()


@pytest.mark.parametrize(
    "state", [s for s in Controllability if s not in (Controllability.YES, Controllability.FOREIGN)]
)
def test_a_gpu_that_may_not_be_driven_is_never_written(tmp_path: Path, state: Controllability) -> None:
    bench = Bench(tmp_path)
    bench.gpu.state = (state, "because")
    bench.governor.engage()
    bench.governor.want(1200)
    bench.governor.release("done")
    assert bench.written == []
    assert bench.journal.locked == frozenset()
    assert bench.governor.controllability is state


@pytest.mark.parametrize("error", [DeviceBusy("refused"), DeviceFailed("refused"), DeviceLost("refused"), None])
def test_a_gpu_that_does_not_answer_a_rank_is_asked_again_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: DeviceError | None
) -> None:
    """Seeds 29 and 38 of the simulation: it was never driven, its job was Ready. NVML's devices raise nothing here but
    say LOST."""

    def refuse() -> tuple[Controllability, str]:
        if error is not None:
            raise error
        return Controllability.LOST, "refused"

    with monkeypatch.context() as refusing:
        refusing.setattr(RecordingGpu, "controllability", lambda _: refuse())
        bench = Bench(tmp_path)
        bench.governor.want(1200)
        assert bench.governor.controllability is Controllability.LOST
        assert bench.governor.controllability_message == "refused"
    lost = LostGpu(bench.gpu, bench.governor)
    for _ in range(ANSWERS):
        lost.check()
    bench.governor.want(1200)
    assert bench.written == [1200]
    assert bench.told(GpuNoticeKind.LOST) == [True, False]


def test_an_unsupported_clock_means_default_clocks(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.governor.want(1201)
    assert bench.written == [1200, None]
    assert "1201 MHz" in bench.governor.controllability_message


@pytest.mark.parametrize(
    ("fault", "state"),
    [
        (NoPermission("no"), Controllability.NO_PERMISSION),
        (NotSupported("no"), Controllability.NOT_SUPPORTED),
        (InvalidClock("no"), Controllability.YES),
    ],
)
def test_a_refused_first_lock_owes_nothing_once_released(
    bench: Bench, fault: Exception, state: Controllability
) -> None:
    bench.gpu.fault = fault
    assert bench.governor.want(1200) is None
    assert bench.governor.controllability is state
    bench.governor.release("done")
    assert bench.journal.locked == frozenset()
    assert bench.written == []


def test_a_busy_device_is_tried_again_a_bounded_number_of_times(bench: Bench) -> None:
    bench.gpu.fault = DeviceBusy("busy")
    due_s = bench.governor.want(1200)
    attempts = 0
    while due_s is not None and attempts < 100 and bench.governor._wanted == 1200:
        bench.now_s, attempts = due_s, attempts + 1
        due_s = bench.governor.pump()
    assert attempts == BUSY_RETRIES
    bench.gpu.fault = None
    assert due_s is not None  # the lock may have been installed after all: the default clocks are still owed
    bench.now_s = due_s
    assert bench.governor.pump() is None
    assert bench.written == [None]


def test_a_device_that_keeps_failing_is_fenced(bench: Bench) -> None:
    bench.gpu.fault = DeviceFailed("999")
    due_s = bench.governor.want(1200)
    for _ in range(MAX_FAILURES):
        bench.now_s = due_s or bench.now_s
        due_s = bench.governor.pump()
    assert bench.governor.lost
    assert bench.told(GpuNoticeKind.LOST) == [True]


def test_a_lost_gpu_is_never_locked_again_but_its_reset_is_tried_until_it_works(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.gpu.fault = DeviceLost("fell off")
    due_s = bench.governor.want(900)
    assert bench.governor.lost
    assert bench.journal.locked == {GPU}
    waits = []
    for _ in range(12):
        assert due_s is not None
        waits.append(due_s - bench.now_s)
        bench.now_s = due_s
        due_s = bench.governor.pump()
    assert waits == sorted(waits)
    assert max(waits) <= 60.0
    bench.gpu.fault = None
    bench.governor.release("done")
    assert bench.written == [1200, None]
    assert bench.journal.locked == frozenset()
    bench.governor.want(900)
    assert bench.written == [1200, None]


@pytest.mark.parametrize("fault", [DeviceBusy("busy"), DeviceFailed("999"), DeviceLost("fell off")])
def test_a_reset_that_fails_once_is_tried_again_within_a_second(bench: Bench, fault: Exception) -> None:
    bench.governor.want(1200)
    released_s = bench.now_s
    bench.gpu.fault = fault
    due_s = bench.governor.release("done")
    bench.gpu.fault = None
    assert due_s is not None
    bench.now_s = due_s
    assert bench.governor.pump() is None
    assert bench.written == [1200, None]
    assert bench.now_s - released_s < 1.0


def test_a_failed_reset_is_never_given_up(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.gpu.fault = DeviceBusy("busy")
    due_s = bench.governor.release("done")
    for _ in range(50):
        assert due_s is not None
        bench.now_s = due_s
        due_s = bench.governor.pump()
    bench.gpu.fault = None
    assert due_s is not None
    bench.now_s = due_s
    bench.governor.pump()
    assert bench.written == [1200, None]
    assert bench.journal.locked == frozenset()
    assert bench.told(GpuNoticeKind.CLOCKS_RESTORED) == [True]


def test_a_clock_that_was_never_reached_is_drift_and_lifts_when_it_is(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1000, times=STRIKES)
    assert bench.told(GpuNoticeKind.DRIFT) == [True]
    assert bench.governor.standing is Standing.DRIFTED
    bench.observe(1000, times=5)
    bench.observe(1200)
    assert bench.told(GpuNoticeKind.DRIFT) == [True, False]


def test_after_drift_the_same_clock_is_written_again(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1000, times=STRIKES)
    bench.governor.want(1200)
    bench.governor.want(1200)
    assert bench.written == [1200, 1200]


def test_a_slow_transition_is_not_drift(tmp_path: Path) -> None:
    bench = Bench(tmp_path, settle_s=0.5)
    for _ in range(20):
        bench.governor.want(1200)
        bench.now_s += 0.1
        bench.governor.observe(600, EventReason.NONE)  # still the clock of a moment ago
        bench.governor.want(600)
        bench.now_s += 0.1
        bench.governor.observe(1200, EventReason.NONE)
    assert bench.notices == []


@pytest.mark.parametrize("reason", [reason for reason in EventReason if reason])
def test_a_reason_of_the_gpu_explains_a_lower_clock(bench: Bench, reason: EventReason) -> None:
    bench.governor.want(1200)
    bench.observe(1200)
    bench.observe(900, reason, times=10)
    assert bench.notices == []


@pytest.mark.parametrize("reason", list(EventReason))
@pytest.mark.parametrize("reached", [True, False])
def test_no_reason_of_the_gpu_explains_a_clock_above_the_lock(bench: Bench, reason: EventReason, reached: bool) -> None:
    """A GPU that is held back is slower than its lock, never faster: the lock is not there."""
    bench.governor.want(900)
    if reached:
        bench.observe(900)
    bench.observe(1200, reason, times=STRIKES)
    assert bench.told(GpuNoticeKind.FOREIGN_WRITE if reached else GpuNoticeKind.DRIFT) == [True]


def test_one_step_beside_the_clock_is_no_disagreement(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1185, times=10)
    bench.observe(1215, times=10)
    assert bench.notices == []


def test_a_foreign_write_is_left_alone_and_not_undone_at_the_end(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1200)
    bench.gpu.reads_mhz = 705
    bench.observe(705, times=STRIKES)
    assert bench.told(GpuNoticeKind.FOREIGN_WRITE) == [True]
    assert bench.governor.controllability is Controllability.FOREIGN
    bench.governor.want(900)
    bench.governor.want(None)
    bench.governor.release("done")
    assert bench.written == [1200]
    assert bench.journal.locked == frozenset()
    assert bench.told(GpuNoticeKind.FOREIGN_WRITE) == [True, False]


def test_a_foreign_write_that_is_gone_at_the_end_leaves_our_lock_to_us(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1200)
    bench.observe(705, times=STRIKES)
    bench.gpu.reads_mhz = 1200
    bench.governor.release("done")
    assert bench.written == [1200, None]


def test_a_clock_that_wanders_is_not_called_foreign(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1200)
    for clock in (900, 945, 915, 960, 930, 975):
        bench.observe(clock)
    assert bench.told(GpuNoticeKind.FOREIGN_WRITE) == []
    bench.governor.release("done")
    assert bench.written == [1200, None]


def test_the_next_rank_may_drive_a_gpu_again_after_a_foreign_write(bench: Bench) -> None:
    bench.governor.want(1200)
    bench.observe(1200)
    bench.gpu.reads_mhz = 705
    bench.observe(705, times=STRIKES)
    bench.governor.release("done")
    bench.governor.engage()
    bench.governor.want(900)
    assert bench.written == [1200, 900]


def test_a_standing_changes_as_the_table_says_and_each_change_is_told_once(bench: Bench) -> None:
    """A long walk through all that can happen to a GPU takes every way of the table, and no other."""
    governor, dice = bench.governor, random.Random(1)
    kinds = {kind for kind, _ in TRANSITIONS.values()}
    seen = set()

    def read(mhz: int) -> None:
        bench.gpu.reads_mhz = mhz
        bench.observe(mhz)

    events: list[Callable[[], object]] = [
        lambda: governor.want(dice.choice((600, 900, 1200, None))),
        lambda: read(governor.applied or 1410),
        lambda: [read(705) for _ in range(STRIKES)],
        lambda: governor.release("done"),
        governor.engage,
        lambda: governor.declare_lost("no answer"),
        lambda: governor.take_back(Controllability.YES, ""),
    ]
    for _ in range(800):
        before, told = governor.standing, len(bench.notices)
        dice.choices(events, weights=(4, 4, 2, 1, 1, 1, 2))[0]()
        changes = [(notice.kind, notice.active) for notice in bench.notices[told:] if notice.kind in kinds]
        assert changes == ([TRANSITIONS[before, governor.standing]] if governor.standing is not before else [])
        seen.update(changes)
    assert seen == set(TRANSITIONS.values())


def test_a_gpu_that_was_foreign_and_lost_does_not_seem_to_be_driven_when_it_answers_again(bench: Bench) -> None:
    """Seed 105 of the simulation: its job was Ready, and the GPU at its default clocks."""
    bench.governor.want(1200)
    bench.observe(1200)
    bench.observe(1305, times=STRIKES)
    bench.governor.declare_lost("no answer")
    bench.governor.take_back(Controllability.YES, "")
    assert bench.governor.standing is Standing.FOREIGN
    assert bench.governor.controllability is Controllability.FOREIGN
    assert bench.governor.controllability_message


def test_a_foreign_clock_that_cannot_be_read_at_the_release_is_told_of_no_longer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy() -> int:
        raise DeviceBusy("in use")

    bench.governor.want(1200)
    bench.observe(1200)
    bench.observe(705, times=STRIKES)
    monkeypatch.setattr(bench.gpu, "sm_clock_mhz", busy)
    bench.governor.release("done")
    assert bench.told(GpuNoticeKind.FOREIGN_WRITE) == [True, False]
