"""Converts what agents say about their hardware: GPUs and their switch latency, and how clocks followed a plan.

An older agent leaves the fields away, which protobuf makes zero. Here that becomes None: unknown is not zero.
"""

from __future__ import annotations

from statistics import median
from typing import Final

from perseus_core.marks import ClockControl, MarkSource
from perseus_core.units import w_from_mw
from perseus_operator.nodes.evidence import Evidence
from perseus_operator.nodes.gpu import MAX_BOARD_W, Gpu
from perseus_proto.latency import decode_latency
from perseus_proto.v1alpha1 import agent_pb2

_MARKS: Final = {int(marks): marks for marks in MarkSource}
_CONTROLS: Final = {int(control): control for control in ClockControl}
"""By number on the wire; one that is not here is a newer agent's."""
_MAX_NAME: Final = 256
"""Characters of a model or driver: the name becomes part of a status."""


def gpu_of(message: agent_pb2.Gpu, driver: str) -> Gpu:
    """Return a GPU's model, driver and switch latency; a latency that cannot be true is none."""
    limit_w = w_from_mw(message.max_power_mw)
    max_power_w = limit_w if 0 < limit_w <= MAX_BOARD_W else None
    latency = decode_latency(message.clock_latency) if message.HasField("clock_latency") else None
    return Gpu(message.model[:_MAX_NAME], driver[:_MAX_NAME], latency, max_power_w)


def evidence_of(report: agent_pb2.IterationReport) -> Evidence | None:
    """Return how the clocks followed the plan; None: the agent says nothing of it."""
    marks, control = _MARKS.get(report.marks), _CONTROLS.get(report.control)
    if marks is None and control is None and not report.median_clock_mhz:
        return None
    # Without control there was no planned clock, and without marks no time of an instruction to compare with.
    reckoned = control is not None and marks is not None
    computing_us = min(sum(report.durations_us), report.compute_span_us)
    if report.tensor_parallel_ranks:  # of ranks together
        computing_us = min(report.computing_us, report.compute_span_us * len(report.tensor_parallel_ranks))
    clock_mhz = report.median_clock_mhz or None
    return Evidence(
        marks=marks,
        control=control,
        lead_us=round(median(report.leads_us)) if report.leads_us else None,
        below_us=min(report.below_plan_us, computing_us) if reckoned else None,
        above_us=min(report.above_plan_us, computing_us) if reckoned else None,
        computing_us=computing_us,
        clock_mhz=clock_mhz,
        limited_mhz=clock_mhz if report.power_limited else None,
    )
