"""Long waits of a GPU: when its least clock is asked for, when no more, and what that may cost. Virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.recording_gpu import CLOCKS_MHZ, RecordingGpu

from perseus_agent.clocks.idle import IDLE_LOSS, MARK_LOOK_US, SAMPLE_US, WAIT_LOOK_US, IdleWatch
from perseus_agent.clocks.lead import Lead
from perseus_agent.errors import DeviceBusy
from perseus_proto.channel import Phase, Position

LEAD = Lead(15_000, 5_000)
PLANNED, LEAST = 1200, CLOCKS_MHZ[0]
LATE_US = MARK_LOOK_US + LEAD.raise_us(PLANNED)
ENOUGH_US = round(LATE_US / IDLE_LOSS)
"""The first wait that is long enough."""


class Wait:
    """A GPU, and looks at it when they are due. The clock that is asked for is in effect at once."""

    def __init__(self, gpu: RecordingGpu | None = None, loss: float = IDLE_LOSS) -> None:
        self.gpu = gpu or RecordingGpu("GPU-0", working=False)
        self.idle = IdleWatch(self.gpu, loss)
        self.now_us, self.marks = 1_000_000, 0
        self.planned: int | None = PLANNED
        self.look()

    def look(self) -> int | None:
        mark = Position(self.marks, 0, Phase.STEP_ENDED)
        self.gpu.locked_mhz = self.idle.clock(self.planned, mark, self.now_us, LEAD)
        return self.gpu.locked_mhz

    def until(self, span_us: int) -> set[int | None]:
        """Let time pass. Returns the clocks that were asked for."""
        end_us, asked = self.now_us + span_us, {self.gpu.locked_mhz}
        while 0 < self.idle.look_us <= end_us:
            self.now_us = max(self.now_us, self.idle.look_us)
            asked.add(self.look())
        self.now_us = end_us
        return asked

    def mark(self) -> int | None:
        """The rank goes on, and rings."""
        self.marks += 1
        return self.look()


def test_a_long_wait_is_at_the_least_clock_and_the_next_mark_ends_it() -> None:
    wait = Wait()
    assert wait.until(ENOUGH_US - 1) == {PLANNED}
    assert wait.until(WAIT_LOOK_US + 1) == {PLANNED, LEAST}
    assert wait.until(60_000_000) == {LEAST}
    assert wait.mark() == PLANNED
    assert wait.idle.low_us >= 60_000_000
    assert wait.idle.late_us == LATE_US


def test_marks_and_kernels_keep_the_planned_clock() -> None:
    wait = Wait()
    for _ in range(100):
        assert wait.until(ENOUGH_US - 1) == {PLANNED}
        assert wait.mark() == PLANNED
    wait.gpu.working = True
    assert wait.until(10 * ENOUGH_US) == {PLANNED}


def test_work_that_begins_without_a_mark_ends_it_and_makes_the_next_wait_longer() -> None:
    wait = Wait()
    wait.until(2 * ENOUGH_US)
    assert wait.gpu.locked_mhz == LEAST
    wait.gpu.working = True
    wait.until(SAMPLE_US)
    assert wait.gpu.locked_mhz == PLANNED
    noticed_us = wait.idle.late_us
    assert noticed_us >= SAMPLE_US
    wait.gpu.working = False
    assert wait.until(round(noticed_us / IDLE_LOSS) - SAMPLE_US) == {PLANNED}
    assert LEAST in wait.until(SAMPLE_US + 2 * WAIT_LOOK_US)


def test_a_mark_that_does_not_ring_is_seen_soon() -> None:
    wait = Wait()
    wait.until(2 * ENOUGH_US)
    wait.marks += 1
    wait.until(MARK_LOOK_US)
    assert wait.gpu.locked_mhz == PLANNED


def test_default_clocks_stay_default_clocks() -> None:
    """Of a rank without a plan, and of one that asks for them: a baseline must not hold what the plan saves."""
    wait = Wait()
    wait.until(2 * ENOUGH_US)
    wait.planned = None
    assert wait.look() is None
    assert wait.until(10 * ENOUGH_US) == {None}


@pytest.mark.parametrize(
    "wait",
    [
        Wait(RecordingGpu("GPU-0", working=None)),
        Wait(RecordingGpu("GPU-0", working=False, fault=DeviceBusy("busy"))),
        Wait(loss=0),
    ],
    ids=["the driver does not say", "the driver refuses", "the share is 0"],
)
def test_without_the_driver_s_word_or_a_share_the_plan_s_clock_stays(wait: Wait) -> None:
    assert wait.until(10 * ENOUGH_US) == {PLANNED}


def test_a_gpu_that_draws_no_less_is_left_at_the_plan_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Wait()
    monkeypatch.setattr(wait.gpu, "power_mw", lambda: 90_000)
    assert LEAST in wait.until(2 * ENOUGH_US)
    assert wait.gpu.locked_mhz == PLANNED
    wait.mark()
    assert wait.until(10 * ENOUGH_US) == {PLANNED}
    assert wait.idle.saved_mj == 0


def test_what_is_saved_is_what_the_gpu_draws_less() -> None:
    wait = Wait()
    wait.until(ENOUGH_US + WAIT_LOOK_US)
    before_us = wait.now_us
    wait.until(100_000_000)
    wait.mark()
    less_mw = 250 * (PLANNED - LEAST)  # of a RecordingGpu
    assert wait.idle.saved_mj == less_mw * wait.idle.low_us // 1_000_000
    assert wait.idle.low_us >= wait.now_us - before_us


@given(st.lists(st.integers(0, 40 * ENOUGH_US), max_size=20), st.sampled_from([0.001, 0.01, 0.1]))
def test_the_work_after_waits_is_late_by_the_share_at_most(waits_us: Sequence[int], loss: float) -> None:
    wait = Wait(loss=loss)
    for span_us in waits_us:
        wait.until(span_us)
        wait.mark()
    assert wait.idle.late_us <= loss * sum(waits_us)
    assert wait.idle.low_us <= sum(waits_us)


def test_a_rank_that_leaves_ends_its_wait() -> None:
    wait = Wait()
    wait.until(2 * ENOUGH_US)
    wait.idle.stop(wait.now_us)
    assert (wait.idle.low, wait.idle.look_us) == (False, 0)
    assert wait.look() == PLANNED  # of the next rank
    assert wait.until(ENOUGH_US - 1) == {PLANNED}
