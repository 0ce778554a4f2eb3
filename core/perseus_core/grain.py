"""How finely a plan sets clocks."""

from __future__ import annotations

from enum import IntEnum


class Grain(IntEnum):
    """How finely a plan sets clocks, from the finest to the coarsest; numbers as in a stored frontier."""

    INSTRUCTION = 0
    """Every instruction has a clock of its own."""
    SEGMENT = 1
    """One clock for each part of a stage's iteration: lead, steady state and tail."""
    STAGE = 2
    """One clock for each stage."""
    NONE = 3
    """Every instruction at its highest clock."""

    @property
    def label(self) -> str:
        """``Instruction``, ``Segment``, ``Stage`` or ``None``, as in a status."""
        return self.name.capitalize()

    @property
    def word(self) -> str:
        """The same in lower case, as in the documents of the command line."""
        return self.name.lower()
