"""Waiting in tests, in one way: until something holds, with a limit that a broken program reaches and a busy machine
does not. Whoever needs a shorter wait wants a fake clock instead."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

PATIENCE_S = 60.0
T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str = "did not come to pass", every_s: float = 0.01) -> T:
    """What the condition gives once that is true; otherwise the test fails and says ``what``."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        if time.monotonic() > deadline_s:
            pytest.fail(f"{what} within {PATIENCE_S:g} s")
        time.sleep(every_s)
    return found
