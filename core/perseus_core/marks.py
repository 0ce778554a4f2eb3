"""Marks and clocks: whose time a rank's marks are in, and how an agent chose the moments of its clock changes.

Numbers are those of the wire and of the shared memory. In a status a member is written as its ``label``.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class MarkSource(IntEnum):
    """Whose time the marks of a rank are in; numbers as in ``perseus.v1alpha1.MarkSource``."""

    HOST = 1
    """The host's, when it launches, ahead of the GPU: they say nothing about the GPU."""
    SYNCHRONISED = 2
    """The host's, and it waits for the GPU before each."""
    EVENTS = 3
    """The GPU's, read from its events an iteration later."""
    GPU = 4
    """The GPU's: it writes its mark as it passes, and events give exact times later."""

    @property
    def label(self) -> str:
        """``Host``, ``Synchronised``, ``Events`` or ``Gpu``, as in a status."""
        return self.name.capitalize()

    @property
    def word(self) -> str:
        """``run-ahead``, ``synchronised``, ``events`` or ``gpu``, as users write it where they describe hardware."""
        return "run-ahead" if self is MarkSource.HOST else self.name.lower()


class ClockControl(IntEnum):
    """How an agent chose the moments of clock changes, from the best to the worst; numbers as in
    ``perseus.v1alpha1.ClockControl``. Where no plan was followed there is none.
    """

    TIMETABLE = 1
    """Ahead of the predicted begin, by the latency of the change."""
    MARKS = 2
    """When the mark came."""
    HELD = 3
    """Not at all: the plan's highest clock was held."""

    @property
    def label(self) -> str:
        """``Timetable``, ``Marks`` or ``Held``, as in a status."""
        return self.name.capitalize()


BEST_MARKS_FIRST: Final = (MarkSource.GPU, MarkSource.SYNCHRONISED, MarkSource.EVENTS, MarkSource.HOST)
"""By what can be planned with them (design note 0019)."""
