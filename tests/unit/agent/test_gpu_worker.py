"""The thread of one GPU: from a ring to the device, iteration reports, hangs, and the way back to default clocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.recording_node import wait_for
from tests.doubles.recording_trainer import schedule_of
from tests.unit.agent.conftest import CLOCKS, PLANS, RANK, Rig

from perseus_agent.clocks import governor as governor_module
from perseus_agent.clocks import gpu_worker
from perseus_agent.clocks.call_queue import CallQueue, CallTurns
from perseus_agent.clocks.gpu_notices import GpuNoticeKind
from perseus_agent.clocks.idle import IdleWatch
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.rank_budget import RankBudget
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.reading_pace import READING_LATE_S, READING_SHARE, ReadingPace
from perseus_agent.devices.base import EnergyReading, EventReason
from perseus_core.units import us_from_s
from perseus_proto.channel import Faults
from perseus_proto.hello import make_schedule

HELD_US = 600_000_000
"""A turn that does not end within the test."""


def test_every_instruction_runs_at_its_planned_clock(rig: Rig) -> None:
    for iteration in range(3):
        rig.iterate(iteration)
    assert rig.written == CLOCKS * 3 + [1200]


def test_a_rank_check_between_iterations_finds_default_clocks(rig: Rig) -> None:
    rig.iterate(0)
    rig.rank.ask_default_clocks(True)
    wait_for(lambda: rig.gpu.locked_mhz is None, "default clocks")
    rig.rank.ask_default_clocks(False)
    rig.iterate(1)
    assert rig.written == [*CLOCKS, CLOCKS[0], None, *CLOCKS, CLOCKS[0]]


def test_nothing_lies_between_a_mark_and_its_clock(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn that the rank's ring begins writes the clock, without another wait. The benchmark says how soon."""
    rung: list[bool] = []
    wait, lock_clocks, ring = rig.worker._wait, rig.gpu.lock_clocks, rig.channel.event_fd
    written_after_a_ring: list[bool] = []

    def waited() -> list[tuple[int, int]]:
        events = wait()
        rung.append(any(descriptor == ring for descriptor, _ in events))
        return events

    def written(mhz: int) -> None:
        written_after_a_ring.append(rung[-1])
        lock_clocks(mhz)

    def slept(seconds: float) -> None:
        raise AssertionError(f"the GPU's thread slept for {seconds:g} s")

    monkeypatch.setattr(rig.worker, "_wait", waited)
    wait_for(lambda: rung, "a turn")
    monkeypatch.setattr(rig.gpu, "lock_clocks", written)
    for module in (gpu_worker, governor_module):
        sleepless = SimpleNamespace(**{**vars(time), "sleep": slept})
        monkeypatch.setattr(module, "time", sleepless, raising=False)
    for iteration in range(5):
        rig.iterate(iteration)
    assert len(written_after_a_ring) == 5 * len(CLOCKS) + 1
    assert all(written_after_a_ring)
    monkeypatch.undo()


def test_the_worker_looks_when_the_follower_wants_it_without_a_ring(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = iter((900, 1200, 900, 1200))

    def look(writes: int, now_us: int, lead: Lead) -> int | None:
        assert (lead.median_us, lead.deviation_us) > (0, 0)
        clock = next(wanted, None)
        rig.follower.next_look_us = 0 if clock is None else now_us + 1_500
        return clock

    monkeypatch.setattr(rig.follower, "look", look)
    rig.rank.deviate(Faults.NONE)  # one ring, no more
    wait_for(lambda: rig.written[-5:] == [900, 1200, 900, 1200, None], "all looks")
    monkeypatch.undo()
    rig.worker.detach(rig.follower, "gone").result(60)
    assert rig.worker._look_s == 0


def test_a_gpu_that_waits_for_long_is_at_its_least_clock_until_its_rank_rings(tmp_path: Path) -> None:
    rig = Rig(tmp_path, start=False)
    rig.gpu.working, schedule = False, make_schedule(schedule_of(len(CLOCKS)))
    rig.worker.idle = idle = IdleWatch(rig.gpu, 1e6)  # no wait is too short
    follower = RankFollower(RANK, schedule, rig.channel, rig.plans, machine_clock=True, idle=idle)
    rig.worker.start()
    rig.worker.attach(follower).result(60)
    rig.rank.step_begin(0, time.monotonic_ns() // 1000)
    wait_for(lambda: rig.gpu.locked_mhz == min(rig.gpu.clocks_mhz), "the least clock")
    rig.rank.step_end(0, time.monotonic_ns() // 1000)
    rig.rank.step_begin(1, time.monotonic_ns() // 1000)
    wait_for(lambda: rig.gpu.locked_mhz == max(CLOCKS), "the plan's clock")
    assert rig.written[:3] == [max(CLOCKS), min(rig.gpu.clocks_mhz), max(CLOCKS)]
    assert rig.worker.detach(follower, "gone").result(60)
    rig.worker.stop("over").result(60)
    rig.channel.close()


def test_a_gpu_whose_turn_comes_sends_its_newest_target(tmp_path: Path) -> None:
    rigs: list[Rig] = []
    turns = CallTurns(lambda _: rigs[0].worker.wake(), CallQueue(HELD_US))
    assert turns.ask("other", 0) is None
    rigs.append(rig := Rig(tmp_path, turns=turns))
    rig.rank.step_begin(0, rig.now_us)
    wait_for(lambda: rig.worker.governor.queued, "a change that waits")
    rig.rank.begin(0, rig.now_us)
    rig.rank.end(0, rig.now_us)
    wait_for(lambda: rig.follower._index == 1, "the next instruction is followed")
    assert rig.written == []
    turns.leave("other")
    wait_for(lambda: rig.written, "a clock")
    assert rig.written == [CLOCKS[1]]
    rig.worker.stop("over").result(60)
    rig.channel.close()


def test_a_deviating_rank_leaves_the_queue(tmp_path: Path) -> None:
    turns = CallTurns(lambda _: None, CallQueue(HELD_US))
    assert turns.ask("other", 0) is None
    rig = Rig(tmp_path, turns=turns)
    rig.rank.step_begin(0, rig.now_us)
    wait_for(lambda: rig.worker.governor.queued, "a change that waits")
    rig.rank.deviate(Faults.OUT_OF_ORDER)
    wait_for(lambda: not rig.worker.governor.queued, "the default clocks, which are there already")
    assert rig.written == []
    rig.worker.stop("over").result(60)
    rig.channel.close()


def test_a_release_does_not_wait_for_a_turn(tmp_path: Path) -> None:
    turns = CallTurns(lambda _: None, CallQueue(HELD_US))
    rig = Rig(tmp_path, turns=turns)
    rig.iterate(0)
    assert turns.ask("other", 0) is None
    rig.rank.step_begin(1, rig.now_us)
    assert rig.worker.detach(rig.follower, "gone").result(60) is True
    assert rig.written[-1] is None
    rig.worker.stop("over").result(60)
    rig.channel.close()


def test_instructions_and_waiting_add_up_to_the_gpu_s_counter(rig: Rig) -> None:
    rig._pass(1)
    spent_mj = [rig.iterate(iteration, 10_000, wait_us=7_000) for iteration in range(10)]
    rig.rank.step_begin(10, rig.now_us)
    wait_for(lambda: len(rig.reports()) == 10, "all iterations are told")
    reports = rig.reports()
    assert [report.iteration_time_us for report in reports] == [47_000] * 10
    assert [report.compute_span_us for report in reports] == [40_000] * 10
    assert all(report.plan_id == PLANS.plan_id and report.point == 0 for report in reports)
    assert [report.energy_mj for report in reports[1:]] == pytest.approx(spent_mj[1:], rel=0.01)
    last = reports[-1]
    # 10 ms at 350 W and at 275 W in turn; 7 ms of waiting at the clock of the iteration to come.
    assert last.instruction_energies_mj == pytest.approx((3500, 2750, 3500, 2750), rel=0.01)
    waiting_mj = 7 * 350
    assert sum(last.instruction_energies_mj) + waiting_mj == pytest.approx(spent_mj[-1], rel=0.01)
    assert last.energy_iterations >= 9
    assert [report.clock_changes for report in reports[1:]] == [4] * 9


def test_long_waits_between_instructions_are_reported_separately(rig: Rig) -> None:
    """The clock goes on by 100 ms and the counter is read, thrice within a wait of 300 ms, at the clock to come."""
    rig._pass(1)
    for iteration in range(4):
        rig.rank.step_begin(iteration, rig.now_us)
        for index, following in enumerate((*CLOCKS[1:], CLOCKS[0])):
            rig.rank.begin(index, rig.now_us)
            rig._pass(10_000)
            rig.rank.end(index, rig.now_us)
            wait_for(lambda following=following: rig.gpu.locked_mhz == following, "the clock to come")
            for _ in range(3 if index == 1 else 0):
                rig._pass(100_000)
        rig.rank.step_end(iteration, rig.now_us)
        for _ in range(5):  # after the last instruction: not for a neighbour
            rig._pass(100_000)
    rig.rank.step_begin(4, rig.now_us)
    wait_for(lambda: len(rig.reports()) == 4, "all iterations are told")
    for report in rig.reports()[1:]:
        assert report.quiet_us in (100_000, 200_000)
        assert report.quiet_mj == pytest.approx(report.quiet_us * 350 / 1000, rel=0.01)


def test_a_counter_that_is_slow_to_answer_is_read_seldom(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 one reading takes 3 to 17 ms; the thread that takes it is the one that writes clocks."""
    taken_s: list[float] = []
    energy = rig.gpu.energy

    def slow() -> Sequence[EnergyReading] | None:
        began_s = time.monotonic()
        time.sleep(0.001)
        try:
            return energy()
        finally:
            taken_s.append(time.monotonic() - began_s)

    monkeypatch.setattr(rig.gpu, "energy", slow)
    monkeypatch.setattr(rig.worker, "_pace", ReadingPace(time.monotonic()))
    began_s = time.monotonic()
    wait_for(lambda: len(taken_s) == 4, "four readings")
    assert time.monotonic() - began_s >= 3 * min(taken_s) / READING_SHARE


def test_a_reading_of_energy_gives_way_to_a_clock_that_is_due_but_not_for_ever(tmp_path: Path) -> None:
    rig = Rig(tmp_path, start=False)
    worker, readings = rig.worker, []
    rig.gpu.energy = lambda: readings.append(1)  # type: ignore[assignment, method-assign]
    now_s = time.monotonic()
    worker._watch_s = now_s + 60
    worker._pace.read(now_s - 0.02, now_s, 0.0)
    worker._pace.at_once(now_s)
    worker._look_s = now_s + 0.01
    worker._routine(now_s)
    assert readings == []
    assert worker._due_s == worker._look_s
    worker._look_s = now_s + 0.03  # the next mark is far enough
    worker._routine(now_s)
    assert len(readings) == 1
    worker._pace.at_once(now_s)
    for late_s in (0.0, 0.5 * READING_LATE_S, 1.01 * READING_LATE_S):
        assert len(readings) == 1
        worker._look_s = now_s + late_s + 0.01  # marks follow one another too closely
        worker._routine(now_s + late_s)
    assert len(readings) == 2
    rig.channel.close()


def test_what_an_engine_s_gpu_has_to_do_by_time_waits_for_the_next_look(tmp_path: Path) -> None:
    """One turn for all of it; and no look waits for it."""
    rig = Rig(tmp_path, start=False)
    worker, readings = rig.worker, []
    rig.gpu.energy = lambda: readings.append(1)  # type: ignore[assignment, method-assign]
    rig.follower.sample_s = 0.09
    rig.follower.look = lambda *_: None  # type: ignore[assignment, method-assign]
    worker.attach(rig.follower)
    rig.follower.next_look_us = us_from_s(now_s := time.monotonic() + 60)
    worker._obey()
    worker._pace.at_once(now_s - 0.01, beside_looks=True)
    worker._watch_s = now_s - 0.02
    worker._plan_routine()
    assert worker._due_s == worker._look_s == pytest.approx(now_s)
    worker._pace.read(now_s, now_s + 0.003, 0.0)  # one that takes so long is taken by itself, and gives way to a look
    worker._pace.at_once(now_s - 0.01, beside_looks=True)
    worker._plan_routine()
    assert worker._due_s == now_s - 0.01
    rig.channel.close()


def test_a_gpu_without_a_counter_reports_time_and_no_energy(rig: Rig) -> None:
    rig.gpu.has_energy = False
    rig.rank.step_begin(0, rig.now_us)
    for index in range(len(CLOCKS)):
        rig.rank.begin(index, rig.now_us)
        rig.now_us += 1
        rig.rank.end(index, rig.now_us)
    rig.rank.step_end(0, rig.now_us)
    rig.rank.step_begin(1, rig.now_us)
    wait_for(rig.reports, "a report")
    [report] = rig.reports()
    assert report.energy_mj is None
    assert report.instruction_energies_mj == ()
    assert report.iteration_time_us >= report.compute_span_us > 0


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (EventReason.SOFTWARE_THERMAL, GpuNoticeKind.THERMAL_SLOWDOWN),
        (EventReason.HARDWARE_THERMAL, GpuNoticeKind.THERMAL_SLOWDOWN),
        (EventReason.POWER_BRAKE, GpuNoticeKind.POWER_BRAKE),
        (EventReason.HARDWARE_SLOWDOWN, GpuNoticeKind.HARDWARE_SLOWDOWN),
        (EventReason.POWER_CAP, GpuNoticeKind.POWER_CAP),
        (EventReason.BOARD_LIMIT, GpuNoticeKind.BOARD_LIMIT),
        (EventReason.RELIABILITY, GpuNoticeKind.RELIABILITY),
    ],
)
def test_event_reasons_are_reported_at_their_edges_and_not_when_they_blink(
    tmp_path: Path, reason: EventReason, kind: GpuNoticeKind
) -> None:
    rig = Rig(tmp_path, start=False)
    rig.worker._job_uid = "job"

    def watch(reasons: EventReason, times: int = 1) -> None:
        rig.gpu.reasons = reasons
        for _ in range(times):
            rig.worker._watch()

    for _ in range(5):
        watch(reason)
        watch(EventReason.NONE, 2)
    assert rig.told(kind) == []
    watch(reason, 10)
    watch(EventReason.NONE, 2)
    watch(reason, 10)
    assert rig.told(kind) == [True]
    watch(EventReason.NONE, 10)
    assert rig.told(kind) == [True, False]


def test_a_rank_that_costs_too_much_is_not_followed_until_it_has_paid(tmp_path: Path) -> None:
    rig = Rig(tmp_path, start=False)
    rig.worker._budget = RankBudget(share=0.02, burst_s=0.005)
    rig.worker.start()
    rig.worker.attach(rig.follower).result(60)
    try:
        rig.rank.step_begin(0, rig.now_us)
        wait_for(lambda: rig.gpu.locked_mhz == CLOCKS[0], "the plan is followed")
        while not rig.worker._budget.muted_until_s:
            rig.rank.ring()
        wait_for(lambda: rig.gpu.locked_mhz is None, "default clocks")
        wait_for(lambda: not rig.worker._budget.muted_until_s, "it has paid")
        for iteration in (1, 2):
            rig.rank.step_begin(iteration, rig.now_us)
        wait_for(lambda: rig.gpu.locked_mhz == CLOCKS[0], "the plan is followed again")
    finally:
        rig.worker.stop("test over").result(60)
        rig.channel.close()


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1)), max_size=50), st.floats(0.01, 0.9), st.floats(0.001, 1))
def test_a_rank_uses_its_share_its_burst_and_one_turn_at_most(
    turns: list[tuple[float, float]], share: float, burst_s: float
) -> None:
    budget, now_s, spent_s, longest_s = RankBudget(share, burst_s), 0.0, 0.0, 0.0
    for pause_s, cpu_s in turns:
        now_s += pause_s
        budget.paid(now_s)
        if budget.muted_until_s:
            continue
        assert budget.spend(cpu_s, now_s) is (budget.muted_until_s > 0)
        spent_s += cpu_s
        longest_s = max(longest_s, cpu_s)
        assert spent_s <= burst_s + share * now_s + longest_s + 1e-6
