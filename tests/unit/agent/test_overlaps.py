"""Instructions that overlap: each gets its usual share of their common time, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.overlaps import PART, Windows, apart
from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.instruction import InstructionKind

F, B, W = InstructionKind.FORWARD, InstructionKind.BACKWARD, InstructionKind.WEIGHT_GRADIENT


def divided(windows: Windows, kinds: Sequence[int]) -> Windows:
    """Run it to its end."""
    work = apart(windows, kinds)
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: Windows = end.value
            return found


def test_a_forward_and_a_backward_share_the_time_of_their_action() -> None:
    begins, durations = divided(([0, 1000, 1001, 7000], [900, 5700, 5699, 500]), [F, F, B, W])
    assert begins == [0, 1000, 3000, 7000]
    assert durations == [900, 2000, 3700, 500]
    assert durations[2] / durations[1] == BACKWARD_RATIO


def test_windows_apart_are_left_as_they_are() -> None:
    windows = ((0, 10, 20), (10, 10, 5))
    assert divided(windows, [F, B, F]) is windows
    nothing: Windows = ((), ())
    assert divided(nothing, []) is nothing


def test_a_long_schedule_is_looked_at_in_parts() -> None:
    count = 3 * PART
    begins = [10 * place for place in range(count)]
    durations = [10] * count
    begins[PART], durations[PART - 1] = begins[PART] - 5, 15  # one pair, across two parts
    work = apart((begins, durations), [F] * count)
    assert sum(1 for _ in work) >= 5
    assert divided((begins, durations), [F] * count)[1][PART - 1] < 15


window = st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from([F, B, W]))


@given(st.lists(window, max_size=30))
def test_no_time_is_lost_or_counted_twice(steps: list[Any]) -> None:
    begins, at = [], 0
    for wait, _, _ in steps:
        at += wait
        begins.append(at)
    durations = [duration for _, duration, _ in steps]
    covered = {us for begin, duration in zip(begins, durations, strict=True) for us in range(begin, begin + duration)}
    found_begins, found = divided((begins, durations), [kind for *_, kind in steps])
    assert sum(found) == len(covered)
    ends = [begin + duration for begin, duration in zip(found_begins, found, strict=True)]
    assert all(end <= begin for end, (_, begin) in zip(ends, pairwise(found_begins), strict=False))
