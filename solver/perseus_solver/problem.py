"""The optimisation problem as flat arrays: instructions, their measured options, and the order between them.

Built once from a profile and a schedule; read by the engine, the rounding, the simulator and the certificate checker alike.
Nothing here decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from perseus_solver.schedules import Schedule

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
        """The name used in CSV and JSON: ``forward``, ``backward``, ``input_gradient``, ``weight_gradient``, ``constant``."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Options:
    """All measured choices for one kind of instruction of one stage, by descending frequency.

    ``time_s[k]`` and ``energy_j[k]`` are what an instruction takes at ``frequency_mhz[k]``. Measurements are kept as they are: noise may
    make a lower clock faster. A constant-time instruction has exactly one option with frequency 0.
    """

    stage: int
    kind: Kind
    chunk: int
    frequency_mhz: Ints
    time_s: Floats
    energy_j: Floats


@dataclass(frozen=True, slots=True)
class Problem:
    """Choose one option for every instruction.

    Instructions are numbered stage by stage, in the order in which the stage executes them: stage s owns
    ``stage_offset[s] … stage_offset[s + 1] − 1``.

    Attributes:
        schedule: where the order came from.
        options: distinct choice tables.
        option_of: int32[n], the table of each instruction.
        edge_from, edge_to: int32[m], precedence: ``edge_to`` starts no earlier than ``edge_from`` ends plus the delay. Includes the
            edges between consecutive instructions of a stage. No cycles.
        edge_delay_s: float[m], communication delay of each edge, seconds.
        blocking_power_w: GPU power while waiting, watts.
        overhead_s: fixed time per iteration outside the graph, seconds (added to every iteration time, every stage waits in it).
    """

    schedule: Schedule
    options: tuple[Options, ...]
    option_of: Ints
    edge_from: Ints
    edge_to: Ints
    edge_delay_s: Floats
    stage_offset: Ints
    blocking_power_w: float
    overhead_s: float = 0.0

    @property
    def instructions(self) -> int:
        """Number of instructions, n."""
        return int(self.option_of.shape[0])

    @property
    def stages(self) -> int:
        """Number of pipeline stages (GPUs per pipeline and tensor rank), N."""
        return int(self.stage_offset.shape[0]) - 1
