"""The thread of one GPU when something goes wrong: ranks that leave, calls that hang, GPUs that are lost and return."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.doubles.recording_gpu import RecordingGpu
from tests.doubles.recording_node import wait_for
from tests.unit.agent.conftest import CLOCKS, Rig

from perseus_agent.clocks.governor import Governor, GovernorLimits
from perseus_agent.clocks.gpu_notices import GpuNoticeKind
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.lost_gpu import ANSWERS, LostGpu
from perseus_agent.clocks.turn_watch import BUSY_S, Stall, TurnWatch, computed_s
from perseus_agent.devices.base import Controllability, EventReason
from perseus_agent.errors import DeviceBusy, DeviceLost, DriverMismatch


def test_the_rank_leaves_and_the_gpu_goes_back(rig: Rig) -> None:
    rig.iterate(0)
    wait_for(lambda: rig.written, "a lock")
    assert rig.worker.detach(rig.follower, "gone").result(60) is True
    assert rig.written[-1] is None
    assert rig.journal.locked == frozenset()
    assert rig.told(GpuNoticeKind.CLOCKS_RESTORED) == [True]
    assert rig.worker.detach(rig.follower, "gone again").result(60) is False


def test_a_passing_fault_of_the_reset_does_not_keep_the_lock(rig: Rig) -> None:
    rig.iterate(0)
    wait_for(lambda: rig.written, "a lock")
    rig.gpu.fault = DeviceBusy("busy")
    assert rig.worker.detach(rig.follower, "gone").result(60) is False
    rig.gpu.fault = None
    wait_for(lambda: rig.written[-1] is None, "the reset is tried again")


def test_a_call_that_hangs_loses_the_gpu_and_still_gives_it_back_when_it_returns(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.iterate(0)
    wait_for(lambda: rig.written, "a lock")
    hang = threading.Event()
    monkeypatch.setattr(rig.gpu, "event_reasons", lambda: hang.wait(60) and EventReason.NONE)
    wait_for(lambda: rig.worker.check_hang() or rig.worker.governor.lost, "the watchdog")
    assert rig.told(GpuNoticeKind.LOST) == [True]
    assert rig.worker.progressing  # a lost GPU is no reason to restart the agent over and over
    left = rig.worker.detach(rig.follower, "gone")
    assert not left.done()
    before = len(rig.written)
    hang.set()
    assert left.result(60) is True
    assert rig.written[before:] == [None]


def test_a_thread_that_computes_without_an_end_is_the_agents_fault_and_not_the_drivers(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held inside a look; the kernel says how much it has computed."""
    computed_s = iter(range(1000))
    monkeypatch.setattr(rig.worker.turn, "_computed", lambda: float(next(computed_s)))
    held, going = threading.Event(), threading.Event()
    monkeypatch.setattr(rig.follower, "look", lambda *_: going.set() or (held.wait(60) and None))
    rig.rank.step_begin(0, rig.now_us)
    assert going.wait(60)
    wait_for(lambda: rig.worker.check_hang() or rig.worker.stuck, "the watchdog")
    assert "a defect of the agent" in rig.worker.stuck
    assert not rig.worker.progressing
    assert not rig.worker.governor.lost
    assert rig.told(GpuNoticeKind.LOST) == []
    held.set()


def test_a_turn_that_waits_computes_nothing_and_is_the_drivers() -> None:
    """Of a driver that works in the kernel, too: only the time of our own program counts."""
    now_s, computed_s = 0.0, 5.0
    watch = TurnWatch(45.0, lambda: computed_s, lambda: now_s)
    assert watch.stall() is None
    watch.begin()
    assert watch.stall() is None
    now_s, computed_s = 45.1, 5.0 + BUSY_S
    assert watch.stall() is Stall.DRIVER
    computed_s += 0.01
    assert watch.stall() is Stall.BUSY
    watch.end()
    assert watch.stall() is None
    watch.begin()
    assert watch.stall() is None, "another turn is judged by itself"


def test_what_a_thread_computes_is_read_from_the_kernel() -> None:
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    busy, idle = threading.Thread(target=compute), threading.Thread(target=stop.wait)
    assert computed_s(busy) == 0.0
    for thread in (busy, idle):
        thread.start()
    try:
        wait_for(lambda: computed_s(busy) > 0.05, "the kernel counts")
        assert computed_s(idle) < 0.05
    finally:
        stop.set()
        for thread in (busy, idle):
            thread.join()


def test_a_gpu_that_answers_again_is_taken_back_and_driven(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.iterate(0)
    hang = threading.Event()
    monkeypatch.setattr(rig.gpu, "event_reasons", lambda: hang.wait(60) and EventReason.NONE)
    wait_for(lambda: rig.worker.check_hang() or rig.worker.governor.lost, "the watchdog")
    before = len(rig.written)
    hang.set()
    wait_for(lambda: rig.told(GpuNoticeKind.LOST) == [True, False], "it is taken back")
    assert rig.worker.governor.controllability is Controllability.YES
    wait_for(lambda: rig.written[before:], "a write")
    assert rig.written[before] is None, "from its default clocks on"
    rig.iterate(1)
    assert set(rig.written[before + 1 :]) == set(CLOCKS)


def test_a_gpu_that_answers_but_cannot_be_driven_is_taken_back_ever_more_seldom(tmp_path: Path) -> None:
    gpu = RecordingGpu("GPU-0")
    journal, _ = Journal.open(tmp_path / "journal", "boot")
    governor = Governor(gpu, journal, GovernorLimits(0.0, 0.05), lambda _: None)
    lost = LostGpu(gpu, governor)

    def checks_until_taken_back() -> int:
        governor.declare_lost("again")
        checks = 0
        while governor.lost:
            lost.check()
            checks += 1
        return checks

    assert [checks_until_taken_back() for _ in range(4)] == [ANSWERS, 2 * ANSWERS, 4 * ANSWERS, 8 * ANSWERS]
    governor.want(900)
    assert checks_until_taken_back() == ANSWERS, "it was driven"
    governor.declare_lost("again")
    gpu.state = (Controllability.LOST, "fell off the bus")
    for _ in range(10 * ANSWERS):
        lost.check()
    assert governor.lost


def test_a_replaced_driver_is_not_met_by_this_process(tmp_path: Path) -> None:
    gpu = RecordingGpu("GPU-0")
    journal, _ = Journal.open(tmp_path / "journal", "boot")
    governor = Governor(gpu, journal, GovernorLimits(0.0, 0.05), lambda _: None)
    governor.stop_using(DriverMismatch("replaced"))
    for _ in range(3 * ANSWERS):
        LostGpu(gpu, governor).check()
    assert governor.lost


def test_a_gpu_that_is_lost_is_not_used_and_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> int:
        raise DeviceLost("fell off the bus")

    monkeypatch.setattr(rig.gpu, "sm_clock_mhz", lost)
    wait_for(lambda: rig.told(GpuNoticeKind.LOST) == [True], "the notice is sent")
    before = list(rig.written)
    for iteration in range(2):
        rig.rank.step_begin(iteration, rig.now_us)
        rig.rank.step_end(iteration, rig.now_us)
    assert [call for call in rig.written[len(before) :] if call is not None] == []


@pytest.mark.parametrize("faulty", [("look",), ("look", "leave")])
def test_a_fault_of_our_own_ends_in_default_clocks_and_a_living_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, faulty: tuple[str, ...]
) -> None:
    rig.iterate(0)
    wait_for(lambda: rig.written, "a lock")
    for method in faulty:
        monkeypatch.setattr(rig.follower, method, lambda *_: 1 / 0)
    rig.rank.step_begin(1, rig.now_us)
    wait_for(lambda: rig.written[-1] is None and not rig.journal.locked, "default clocks")
    monkeypatch.undo()
    assert rig.worker.attach(rig.follower).result(60) is None
    wait_for(lambda: rig.written[-1] is not None, "the next rank is followed")


def test_a_lock_of_an_earlier_process_is_reset(tmp_path: Path) -> None:
    rig = Rig(tmp_path, start=False)
    rig.journal.record_lock("GPU-0")
    rig.worker.start()
    assert rig.worker.restore("replayed").result(60) is True
    assert rig.written == [None]
    assert rig.journal.locked == frozenset()
    rig.worker.stop("over").result(60)
    rig.channel.close()


def test_after_the_end_commands_are_cancelled_and_nothing_is_touched(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert rig.worker.stop("over").result(60) is True
    rig.worker._thread.join(60)
    assert rig.worker.detach(rig.follower, "late").cancelled()
    assert rig.worker.attach(rig.follower).cancelled()
    rig.channel.close()
