"""Words that all of the solver shares: kinds of instructions, tables of measured options, types of arrays.

Imported everywhere, imports nothing of ours. What needs a second thought does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


class Kind(IntEnum):
    """What an instruction computes; numbers as on the wire (``InstructionKind``)."""

    FORWARD = 1
    BACKWARD = 2
    INPUT_GRADIENT = 3
    WEIGHT_GRADIENT = 4
    CONSTANT = 5

    @property
    def label(self) -> str:
        """The name used in CSV and JSON: the member's name in lower case."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Options:
    """All measured choices for one kind of instruction of one stage, by descending frequency.

    ``time_s[k]`` and ``energy_j[k]`` are what an instruction takes at ``frequency_mhz[k]``. Measurements are kept as
    they are: noise may make a lower clock faster. A constant-time instruction has exactly one option with frequency 0.
    """

    stage: int
    kind: Kind
    chunk: int
    frequency_mhz: Ints
    time_s: Floats
    energy_j: Floats
