"""Instructions that run at the same time, as an overlapped forward and backward do: what each takes is not known, what
they take together is. For reports each gets its usual share of that time, one after the other, so that sums are exact
and nothing is counted twice; its energy follows from its share.

A profile thus holds for such an instruction a mean over where it runs alone and where it overlaps, and a schedule's
model, which adds up the parts of an action, agrees with what was measured.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from operator import add, le
from typing import Final

from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.instruction import InstructionKind

WORK: Final[dict[int, float]] = {
    InstructionKind.BACKWARD: BACKWARD_RATIO,
    InstructionKind.INPUT_GRADIENT: BACKWARD_RATIO / 2,
    InstructionKind.WEIGHT_GRADIENT: BACKWARD_RATIO / 2,
}
"""Time of an instruction over that of the forward of the same layers; of others 1."""
PART: Final = 1_024
"""Instructions that are looked at in one part: in 1 ms."""
MOST_TOGETHER: Final = 64
"""Of instructions that overlap: an action has two or three. More are impossible times, which are left as they are."""

Windows = tuple[Sequence[int], Sequence[int]]
"""Begin and duration of each instruction in the schedule's order, microseconds."""


def apart(windows: Windows, kinds: Sequence[int]) -> Generator[None, None, Windows]:
    """Divide the time of instructions that overlap among them; yields between parts of the work.

    Args:
        windows: as they ran.
        kinds: of each instruction, as ``InstructionKind``.

    Returns:
        The windows, none of which overlaps the next, unless very many do; the same object if none did.
    """
    begins_us, durations_us = windows
    ends_us = list(map(add, begins_us, durations_us))
    overlap = False
    for at in range(0, len(ends_us), PART):
        yield
        overlap = overlap or not all(map(le, ends_us[at : at + PART], begins_us[at + 1 : at + PART + 1]))
    if not overlap:
        return windows
    begins, durations, first, end_us = list(begins_us), list(durations_us), 0, ends_us[0]
    for place in range(1, len(ends_us) + 1):
        if place % PART == 0:
            yield
        if place < len(ends_us) and begins_us[place] < end_us:
            end_us = max(end_us, ends_us[place])
            continue
        if 1 < place - first <= MOST_TOGETHER:
            weights = [WORK.get(kind, 1.0) for kind in kinds[first:place]] or [1.0] * (place - first)
            _divide(begins, durations, weights, first, end_us)
        if place < len(ends_us):
            first, end_us = place, ends_us[place]
    return begins, durations


def _divide(begins_us: list[int], durations_us: list[int], weights: Sequence[float], first: int, end_us: int) -> None:
    """Give instructions from ``first`` on their shares of the time from the first begin to the last end."""
    begin_us = min(begins_us[first : first + len(weights)])
    share_us = (end_us - begin_us) / sum(weights)
    reached = 0.0
    for place, weight in enumerate(weights, first):
        begins_us[place] = begin_us + round(reached * share_us)
        reached += weight
        durations_us[place] = begin_us + round(reached * share_us) - begins_us[place]
