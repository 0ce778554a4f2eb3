"""When a job is looked at again: at once where something is urgent, in its turn where nothing is, at a
certain time where something is due."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from perseus_operator.jobs.pace import Pace
from perseus_operator.jobs.wake import Wake

FOREVER_S = 1e6


class Clock:
    """A time that the test sets, and the timers that were asked for: delay and what is called then."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.timers: list[tuple[float, Callable[[], object]]] = []

    def call_later(self, delay_s: float, call: Callable[[], object]) -> asyncio.TimerHandle:
        """As of the event loop, for ever."""
        self.timers.append((delay_s, call))
        loop = asyncio.get_running_loop()
        return loop.call_at(loop.time() + FOREVER_S, call)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", clock.call_later)
    return clock


async def looks(wake: Wake) -> bool:
    """Whether the runner looks now."""
    await wake.wait(0)
    looked = wake._event.is_set()
    wake.looking()
    return looked


async def test_many_that_are_not_urgent_wait_for_one_turn_and_one_that_is_urgent_does_not(clock: Clock) -> None:
    pace = Pace(per_s=1.0)
    pace.turn_s(clock.now_s)  # another job has the next second
    wake = Wake(pace, lambda: clock.now_s)
    for _ in range(100):
        wake.in_turn()
    [(delay_s, turn)] = clock.timers
    assert delay_s == pytest.approx(1.0)
    assert not await looks(wake)
    turn()
    assert await looks(wake)
    wake.in_turn()
    wake.now()
    assert await looks(wake)
    assert not await looks(wake), "what was known by then is looked at already"


async def test_urgent_looks_at_one_job_do_not_put_off_the_turns_of_others(clock: Clock) -> None:
    pace = Pace(per_s=10.0)
    busy = Wake(pace, lambda: clock.now_s)
    for _ in range(100):
        busy.in_turn()
        busy.now()
        busy.looking()
    assert pace.turn_s(clock.now_s) == pytest.approx(clock.now_s + 0.1)


async def test_what_is_due_waits_for_no_turn_and_the_earliest_counts(clock: Clock) -> None:
    pace = Pace(per_s=0.01)
    pace.turn_s(clock.now_s)  # the next turn is in a hundred seconds
    wake = Wake(pace, lambda: clock.now_s)
    wake.in_turn()
    for due_s in (clock.now_s + 10, clock.now_s + 12, clock.now_s + 9, clock.now_s - 1):
        wake.at(due_s)
    assert [delay_s for delay_s, _ in clock.timers] == pytest.approx([100.0, 10.0, 9.0, 0.0])
    assert not await looks(wake)
    wake.at(clock.now_s + 11)
    clock.timers[-1][1]()
    assert await looks(wake), "a look forgets what was due: it sees what is due next"


async def test_a_job_that_takes_long_to_look_at_takes_a_tenth_of_the_loop(clock: Clock) -> None:
    wake = Wake(Pace(per_s=1000.0), lambda: clock.now_s)
    wake.looked(0.2)
    wake.in_turn()
    assert clock.timers[-1][0] == pytest.approx(2.0)
    wake.looking()
    clock.now_s += 5
    wake.in_turn()
    assert clock.timers[-1][0] == pytest.approx(0.0)


async def test_a_runner_that_has_stopped_is_not_looked_for(clock: Clock) -> None:
    wake = Wake(Pace(per_s=1000.0), lambda: clock.now_s)
    wake.in_turn()
    wake.at(clock.now_s + 1)
    timers = wake._timer, wake._due
    wake.cancel()
    assert all(timer is not None and timer.cancelled() for timer in timers)
    assert not await looks(wake)
