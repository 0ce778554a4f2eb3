"""What ranks did in an iteration, as a message: the agent writes it, the operator reads it.

An older agent leaves fields away, which protobuf makes zero. Here that becomes None: unknown is not zero. Lists are
bounded here before anything is done with them; whether the figures are possible is for the operator to say.
"""

from __future__ import annotations

from array import array
from statistics import median
from typing import Final

from perseus_core.evidence import Evidence
from perseus_core.iteration import IterationReport
from perseus_core.marks import ClockControl, MarkSource
from perseus_proto.planset import MAX_INSTRUCTIONS
from perseus_proto.v1alpha1 import agent_pb2

MAX_TOGETHER: Final = 1024
"""Ranks that one report describes: many more than a node has GPUs."""
_MAX_NAME: Final = 512
_MARKS: Final = {int(marks): marks for marks in MarkSource}
_CONTROLS: Final = {int(control): control for control in ClockControl}
"""By number on the wire; one that is not here is a newer agent's."""


def encode_iteration(report: IterationReport) -> agent_pb2.IterationReport:
    """Return the message of a report."""
    evidence = report.evidence or Evidence()
    return agent_pb2.IterationReport(
        data_parallel_rank=report.dp,
        stage=report.stage,
        tensor_parallel_rank=report.tp,
        gpu_uuid=report.gpu_uuid,
        iteration=report.iteration,
        iteration_time_us=report.iteration_time_us,
        compute_span_us=report.compute_span_us,
        energy_mj=report.energy_mj or 0,
        has_energy=report.energy_mj is not None,
        plan_id=report.plan_id,
        point=report.point or 0,
        planned=report.point is not None,
        durations_us=report.durations_us,
        clock_changes=report.clock_changes,
        instruction_energy_mj=report.instruction_energies_mj,
        instruction_energy_iterations=report.energy_iterations,
        quiet_us=report.quiet_us,
        quiet_energy_mj=report.quiet_mj,
        marks=evidence.marks or 0,  # type: ignore[arg-type]  # numbers of the same enum
        control=evidence.control or 0,  # type: ignore[arg-type]
        leads_us=() if evidence.lead_us is None else (evidence.lead_us,),
        below_plan_us=evidence.below_us or 0,
        above_plan_us=evidence.above_us or 0,
        median_clock_mhz=evidence.clock_mhz or 0,
        power_limited=evidence.limited_mhz is not None,
        own_time=report.own_time,
        tensor_parallel_ranks=report.together,
        computing_us=evidence.computing_us if report.together else 0,
    )


def decode_iteration(message: agent_pb2.IterationReport) -> IterationReport | None:
    """Return the report of a message; None: it has more instructions than any schedule can have."""
    lists = message.durations_us, message.instruction_energy_mj, message.leads_us
    if max(map(len, lists)) > MAX_INSTRUCTIONS:  # before anything is done with each of them
        return None
    return IterationReport(
        dp=message.data_parallel_rank,
        stage=message.stage,
        tp=message.tensor_parallel_rank,
        iteration=message.iteration,
        iteration_time_us=message.iteration_time_us,
        compute_span_us=message.compute_span_us,
        energy_mj=message.energy_mj if message.has_energy else None,
        point=message.point if message.planned else None,
        durations_us=array("I", message.durations_us),
        instruction_energies_mj=array("I", message.instruction_energy_mj),
        energy_iterations=message.instruction_energy_iterations,
        quiet_us=message.quiet_us,
        quiet_mj=message.quiet_energy_mj,
        evidence=_evidence(message),
        own_time=message.own_time,
        together=tuple(message.tensor_parallel_ranks[: MAX_TOGETHER + 1]),
        gpu_uuid=message.gpu_uuid[:_MAX_NAME],
        plan_id=message.plan_id[:_MAX_NAME],
        clock_changes=message.clock_changes,
    )


def _evidence(message: agent_pb2.IterationReport) -> Evidence | None:
    """How the clocks followed the plan. Agents of the last release send the lead of each instruction."""
    computing_us, ranks = sum(message.durations_us), 1
    if message.tensor_parallel_ranks:
        computing_us, ranks = message.computing_us, len(message.tensor_parallel_ranks)
    return Evidence.of_iteration(
        marks=_MARKS.get(message.marks),
        control=_CONTROLS.get(message.control),
        lead_us=round(median(message.leads_us)) if message.leads_us else None,
        below_us=message.below_plan_us,
        above_us=message.above_plan_us,
        computing_us=min(computing_us, message.compute_span_us * ranks),
        clock_mhz=message.median_clock_mhz,
        power_limited=message.power_limited,
    )
