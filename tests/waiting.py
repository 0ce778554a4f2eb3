"""Waiting in tests, in one way: until something holds, with a limit that a broken program reaches and a busy machine
does not. Whoever needs a shorter wait wants a fake clock instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

PATIENCE_S = 60.0
T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    what: str = "did not come to pass",
    every_s: float = 0.01,
    patience_s: float = PATIENCE_S,
    not_yet: tuple[type[Exception], ...] = (),
) -> T:
    """What the condition gives once that is true; otherwise the test fails and says ``what``, and what was last seen.

    ``not_yet``: exceptions of the condition that mean no more than that one has to wait.
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
