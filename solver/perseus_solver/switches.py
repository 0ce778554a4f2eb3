"""Changes of clock in a plan, and plans that need fewer of them.

A GPU keeps its clock until told otherwise; iterations follow each other, so the last instruction's clock meets the
first's. Constant-time instructions (frequency 0) leave the clock as it is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from perseus_solver.problem import Ints


def clock_changes(frequencies_mhz: npt.NDArray[np.uint16], stage_offset: Ints) -> Ints:
    """Changes per iteration, summed over the stages, for plans [points, n]."""
    total = np.zeros(len(frequencies_mhz), dtype=np.int32)
    for begin, end in zip(stage_offset[:-1].tolist(), stage_offset[1:].tolist(), strict=True):
        plan = frequencies_mhz[:, begin:end]
        # Whether an instruction sets a clock is the same in every plan: constant-time ones have one option only.
        plan = plan[:, (plan != 0).any(axis=0)]
        if plan.shape[1]:
            total += (plan != np.roll(plan, 1, axis=1)).sum(axis=1, dtype=np.int32)
    return total
