"""How large the answer of a worker may be, by what it was asked: what is larger answers something else, and is not
read.

A worker parses what tenants write, so it may be in their hands. The bounds are several times what any answer takes.
"""

from __future__ import annotations

from typing import Final

from perseus_operator.solving.request import SolveRequest
from perseus_solver.calibration.model import MAX_BYTES

_HEAD_BYTES: Final = 64 << 10
"""Of what does not grow with the question."""
_POINT_BYTES: Final = 256
"""Figures of a point: eight of eight bytes, and as text its status, grain and number of clock changes."""
_STAGE_BYTES: Final = 4096
"""Of a calibration: gap, noise of each kind of instruction and scatter of a stage; honest ones take about 1,000."""
_DELAY_BYTES: Final = 512
"""A delay between two stages as indented JSON; the honest ones take about 200."""


def most_frontier_bytes(request: SolveRequest) -> int:
    """The most bytes of a frontier of these inputs, which is compressed: as many as it takes without."""
    points = 2 * request.points + 64
    return _HEAD_BYTES + points * (_POINT_BYTES + 2 * _most_instructions(request)) + 16 * request.stages


def most_calibration_bytes(request: SolveRequest) -> int:
    """The most bytes of a calibration of the pipeline of these inputs."""
    # Stages of a named schedule send to their neighbours; in a custom one each may send to any.
    pairs = min(request.stages**2, _most_instructions(request) if request.schedule_csv else 8 * request.stages)
    return min(_HEAD_BYTES + _STAGE_BYTES * request.stages + _DELAY_BYTES * pairs, MAX_BYTES)


def _most_instructions(request: SolveRequest) -> int:
    """At least as many as one iteration of a pipeline has, without building the schedule."""
    if request.schedule_csv:
        listed = 2 * (request.schedule_csv.count(",") + request.schedule_csv.count("\n") + 1)
    else:
        listed = 3 * request.stages * request.microbatches * max(request.chunks or 1, 2)
    return listed + request.stages * max(request.microbatches, 1)
