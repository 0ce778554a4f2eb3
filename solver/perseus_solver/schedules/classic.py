"""GPipe and 1F1B orders. Each returns a Schedule; called through `build_schedule`, which has checked the counts."""

from __future__ import annotations

import numpy as np

from perseus_solver.problem import Ints, Kind
from perseus_solver.schedules.base import Schedule, assemble, run, weave


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019)."""
    order = np.concatenate([run(Kind.FORWARD, 0, microbatches), run(Kind.BACKWARD, 0, microbatches)])
    return assemble("gpipe", [order] * stages, microbatches=microbatches, position=np.arange(stages)[:, None])


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with flush (Narayanan et al., 2019): N − s forwards on stage s, then backward and forward in turn."""

    def order(stage: int) -> Ints:
        warm = min(microbatches, stages - stage)
        steady = microbatches - warm
        return np.concatenate(
            [
                run(Kind.FORWARD, 0, warm),
                weave(run(Kind.BACKWARD, 0, steady), run(Kind.FORWARD, warm, microbatches)),
                run(Kind.BACKWARD, steady, microbatches),
            ]
        )

    orders = [order(stage) for stage in range(stages)]
    return assemble("1f1b", orders, microbatches=microbatches, position=np.arange(stages)[:, None])
