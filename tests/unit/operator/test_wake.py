"""When a job is looked at again: at once where something is urgent, in its turn where nothing is."""

from __future__ import annotations

import asyncio
import time

import pytest

from perseus_operator.controller.pace import Pace
from perseus_operator.controller.wake import Wake


async def looks(wake: Wake, lasting_s: float, *, each_s: float = 0.0) -> list[float]:
    """Look whenever the wake says so, for some time; when that was."""
    begun_s, seen = time.monotonic(), []
    while (left_s := begun_s + lasting_s - time.monotonic()) > 0:
        await wake.wait(left_s)
        if time.monotonic() - begun_s >= lasting_s:
            break
        wake.looking()
        seen.append(time.monotonic() - begun_s)
        wake.looked(each_s)
    wake.cancel()
    return seen


async def test_many_that_are_not_urgent_are_one_look_and_one_that_is_urgent_does_not_wait_for_it() -> None:
    pace = Pace(per_s=1.0)
    pace.turn_s(time.monotonic())  # another job has the next second
    wake = Wake(pace, time.monotonic)
    looking = asyncio.create_task(looks(wake, 2.0))
    for _ in range(100):
        wake.in_turn()
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    wake.now()
    for _ in range(100):
        wake.in_turn()
    (urgent_s, *later) = await looking
    assert urgent_s == pytest.approx(0.2, abs=0.15)
    assert len(later) <= 1, "what was known by then is looked at already"


async def test_urgent_looks_at_one_job_do_not_put_off_the_turns_of_others() -> None:
    pace, now_s = Pace(per_s=10.0), time.monotonic()
    busy = Wake(pace, lambda: now_s)
    for _ in range(100):
        busy.in_turn()
        busy.now()
        busy.looking()
    assert pace.turn_s(now_s) == pytest.approx(now_s + 0.1)


async def test_a_job_that_takes_long_to_look_at_takes_a_tenth_of_the_loop() -> None:
    wake = Wake(Pace(per_s=1000.0), time.monotonic)

    async def keep_asking() -> None:
        while True:
            wake.in_turn()
            await asyncio.sleep(0.01)

    asking = asyncio.create_task(keep_asking())
    seen = await looks(wake, 1.0, each_s=0.02)
    asking.cancel()
    assert 2 <= len(seen) <= 6, seen


async def test_nobody_is_woken_after_the_runner_has_stopped() -> None:
    wake = Wake(Pace(per_s=1000.0), time.monotonic)
    wake.in_turn()
    wake.cancel()
    assert await looks(wake, 0.05) == []
