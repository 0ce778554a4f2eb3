"""What the agents of all plans ask for in an iteration, and what is on its way when the first one begins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from perseus_solver.kinds import Floats, Index, Ints


class Moment(IntEnum):
    """When a request is made. The numbers are those of ``compiled/execution.c``.

    Attributes:
        AFTER_BEGIN: so long after the instruction begins.
        IN_WAIT: so long after the instruction before it on its stage has begun, and at its own begin at the latest.
        AT: so long after the iteration begins.
        AT_END: when the instruction before it on its stage has ended.
        LAUNCHED: so long after the instruction begins, and at its end at the latest.
        AHEAD: so long after the host's request before, and not before a share of the instruction is done.
    """

    AFTER_BEGIN = 0
    IN_WAIT = 1
    AT = 2
    AT_END = 3
    LAUNCHED = 4
    AHEAD = 5


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """The requests of one iteration, by plan and instruction.

    Attributes:
        first: int[plans × n + 1], where the requests of each instruction of each plan begin.
        after_s: float[requests], seconds; see `Moment`.
        clock: int32[requests], the clock that is asked for; negative where nothing is asked for after all.
        moment: int32[requests], see `Moment`.
        share: float[requests], of the instruction that must be done, if it is not negative; None where none must be.
    """

    first: Index
    after_s: Floats
    clock: Ints
    moment: Ints
    share: Floats | None = None

    @property
    def of_instruction(self) -> int:
        """The largest number of requests of an instruction."""
        return int(np.diff(self.first).max(initial=0))

    def of_stage(self, stage_offset: npt.NDArray[np.integer]) -> int:
        """Return the largest number of requests of a stage under a plan."""
        bounds = self.first[:-1].reshape(-1, int(stage_offset[-1]))[:, stage_offset[:-1]].ravel()
        return int(np.diff(np.append(bounds, self.first[-1])).max(initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The clocks with which a run begins.

    Attributes:
        clock: int32[plans, stages], positions of the clocks in effect.
        first: int[plans × stages + 1], where the changes that are on their way to each stage begin.
        effect_s: float[changes], when each comes into effect, in order.
        target: int32[changes], to which clock.
    """

    clock: Ints
    first: Index
    effect_s: Floats
    target: Ints
