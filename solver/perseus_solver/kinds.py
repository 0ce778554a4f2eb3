"""What all of the solver shares: tables of measured options, and types of arrays.

This is the lowest module of the solver: of the project it imports the vocabulary alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from perseus_core.instruction import InstructionKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]
"""Positions in another array."""
_Number = TypeVar("_Number", bound=np.generic)
_Places = npt.NDArray[np.integer[Any]]

SMALLEST, LARGEST = 1e-9, 1e9
"""Seconds and joules of one instruction; outside, the solver's integer time would lose its precision."""
SAME_TIME = 1e-9
"""Relative difference below which two times are the same. Sums of float64 differ by 10⁻¹³ with their order, and no
clock of a host resolves a billionth of an iteration. `latest_s` judges deadlines, T_min, domination and duplicates.
"""


def latest_s(deadline_s: float, share: float = 1.0) -> float:
    """Return the longest time in seconds that meets a deadline: what is the same time meets it.

    Args:
        deadline_s: seconds.
        share: how much of the tolerance may be used.
    """
    return deadline_s * (1.0 + share * SAME_TIME)


def looked_up(table: npt.NDArray[_Number], row: _Places, column: _Places) -> npt.NDArray[_Number]:
    """Return ``table[row, column]``, several times as fast for many columns: one number finds each place, not two.

    Args:
        table: number[rows, columns].
        row: int[n].
        column: int[n] or int[plans, n].
    """
    numbers: npt.NDArray[_Number] = table.ravel().take(row * table.shape[1] + column)
    return numbers


SIGMA_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation, 1 / Φ⁻¹(3/4)."""


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """The measured clocks of one kind of instruction of one stage and chunk, by descending frequency.

    Measurements are not smoothed: noise may make a lower clock faster. A constant-time instruction has exactly one
    option, with frequency 0.

    Attributes:
        stage, kind, chunk: what was measured.
        frequency_mhz: int32[options].
        time_s: float[options], seconds of the instruction at each clock.
        energy_j: float[options], joules of the instruction at each clock.
    """

    stage: int
    kind: InstructionKind
    chunk: int
    frequency_mhz: Ints
    time_s: Floats
    energy_j: Floats

    def __repr__(self) -> str:
        clocks = self.frequency_mhz
        return (
            f"Options({self.kind.label} of stage {self.stage}, chunk {self.chunk}: {len(clocks)} clocks, "
            f"{clocks[0]} to {clocks[-1]} MHz)"
        )
