"""The one way in which tests wait: until a condition holds, with a limit that only a broken program reaches.

The limit is long enough for a busy machine. A test that needs a shorter wait should use a fake clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

PATIENCE_S = 180.0
T = TypeVar("T")


def pass_time(seconds: float) -> None:
    """Let the clock of the running event loop jump: what is due by then runs at the loop's next turn."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


def eventually(
    condition: Callable[[], T],
    what: str = "did not come to pass",
    every_s: float = 0.01,
    patience_s: float = PATIENCE_S,
    not_yet: tuple[type[Exception], ...] = (),
) -> T:
    """Wait until a condition returns a true value, and return that value.

    Args:
        condition: called again and again.
        what: the beginning of the failure's message; the last value or exception is its end.
        every_s: pause between two calls.
        patience_s: the test fails when this time is over.
        not_yet: exceptions of the condition that count as a false value.
    """
    deadline_s = time.monotonic() + patience_s
    last: object
    while True:
        try:
            if found := condition():
                return found
            last = found
        except not_yet as early:
            last = early
        if time.monotonic() > deadline_s:
            pytest.fail(f"{what} within {patience_s:g} s; last: {last!r}")
        time.sleep(every_s)
