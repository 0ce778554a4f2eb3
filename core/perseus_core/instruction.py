"""What one training process executes: instructions of a pipeline's stage, or whole steps."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class InstructionKind(IntEnum):
    """What an instruction computes; numbers as in ``perseus.v1alpha1.InstructionKind``."""

    FORWARD = 1
    BACKWARD = 2
    INPUT_GRADIENT = 3
    WEIGHT_GRADIENT = 4
    CONSTANT = 5
    STEP = 6

    @property
    def label(self) -> str:
        """The name used in CSV and JSON: the member's name in lower case."""
        return self.name.lower()


class Instruction(NamedTuple):
    """One instruction of a stage's schedule."""

    kind: InstructionKind
    microbatch: int
    chunk: int
