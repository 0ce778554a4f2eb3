"""Whose clock a GPU runs at: the states, the only changes between them, and the notices that tell of those.

DRIFTED  ◄──►  OURS  ◄──►  FOREIGN
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from perseus_agent.clocks.gpu_notices import GpuNoticeKind


class Standing(Enum):
    """Whose clock a GPU runs at, as far as read-backs show. A GPU that is lost keeps its standing."""

    OURS = "ours"
    """The one that was written last, or nothing else was read yet."""
    DRIFTED = "drifted"
    """Another one than was written, which the GPU never reached: it is written again."""
    FOREIGN = "foreign"
    """Another one than was written and reached: of another program. It is left alone until the GPU is released."""


TRANSITIONS: Final[Mapping[tuple[Standing, Standing], tuple[GpuNoticeKind, bool]]] = MappingProxyType(
    {
        (Standing.OURS, Standing.DRIFTED): (GpuNoticeKind.DRIFT, True),
        (Standing.DRIFTED, Standing.OURS): (GpuNoticeKind.DRIFT, False),
        (Standing.OURS, Standing.FOREIGN): (GpuNoticeKind.FOREIGN_WRITE, True),
        (Standing.FOREIGN, Standing.OURS): (GpuNoticeKind.FOREIGN_WRITE, False),
    }
)
"""Every change of standing, and the notice that tells of it. None leads from drift to a foreign clock: a clock that was
never reached cannot have been changed by another program.
"""
