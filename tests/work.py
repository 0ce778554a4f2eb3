"""How much work a call does, counted in lines of our own code that it runs: the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
_OURS = tuple(str(Path(__file__).parent.parent / room) for room in ("agent", "core", "proto"))


def lines_of(call: Callable[[], object]) -> int:
    """Run a call, and count the lines of agent, wire and vocabulary that it runs; each turn of a loop counts anew."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def run_through(parts: Generator[None, None, T]) -> T:
    """Do all parts of something, and return what it comes to."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            found: T = done.value
            return found
