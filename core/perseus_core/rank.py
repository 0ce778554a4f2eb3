"""How one training process of a job is addressed: by data-parallel rank, stage and tensor-parallel rank.

A *pipeline* is one data-parallel copy of the model; its index is ``dp``. A *stage* is a part of the model. The
processes that share the work of a stage differ in ``tp``.
"""

from __future__ import annotations

from typing import NamedTuple


class RankId(NamedTuple):
    """Address of a rank, unique within its job. All numbers count from 0.

    >>> str(RankId(dp=1, stage=2, tp=0))
    'dp 1, stage 2, tp 0'
    """

    dp: int
    stage: int
    tp: int = 0

    def __str__(self) -> str:
        return f"dp {self.dp}, stage {self.stage}, tp {self.tp}"
