"""Events of a job as messages: ranks and engines that come and go, what they did, and what happens to GPUs."""

from __future__ import annotations

from typing import Any

from perseus_agent.clocks.gpu_notices import GpuNotice
from perseus_agent.clocks.telemetry import (
    EngineChange,
    EngineSummary,
    Event,
    IterationSummary,
    RankChange,
    RankProcess,
)
from perseus_agent.servers.engine_messages import engine_message, window_message
from perseus_proto.hello import Hello
from perseus_proto.v1alpha1 import agent_pb2 as messages


def rank_message(rank: RankProcess, iteration: int, hello: Hello | None = None) -> messages.Rank:
    """A rank, as it is reported; with its schedule, if its hello is given."""
    return messages.Rank(
        pod_uid=rank.pod_uid,
        gpu_uuid=rank.gpu_uuid,
        data_parallel_rank=rank.rank_id.dp,
        stage=rank.rank_id.stage,
        tensor_parallel_rank=rank.rank_id.tp,
        iteration=iteration,
        pid=rank.pid,
        schedule=_schedule(hello) if hello is not None else None,
    )


def _schedule(hello: Hello) -> messages.StageSchedule:
    return messages.StageSchedule(
        stage=hello.stage,
        kinds=[int(instruction.kind) for instruction in hello.schedule],  # type: ignore[misc]  # numbers of the same enum
        microbatches=[instruction.microbatch for instruction in hello.schedule],
        chunks=[instruction.chunk for instruction in hello.schedule],
        joined=hello.joined,
    )


def event_message(event: Event) -> messages.TelemetryEvent:
    """An event of a job, as it is reported."""
    match event:
        case RankChange(rank, joined, iteration):
            fields: dict[str, Any] = {f"rank_{_way(joined)}": rank_message(rank, iteration)}
        case EngineChange(engine, joined):
            fields = {f"engine_{_way(joined)}": engine_message(engine)}
        case EngineSummary():
            fields = {"window": window_message(event)}
        case IterationSummary():
            fields = {"iteration": _iteration(event)}
        case GpuNotice(kind, gpu_uuid, active, text):
            kind_name = f"KIND_{kind.value}"
            fields = {"gpu": messages.GpuEvent(kind=kind_name, gpu_uuid=gpu_uuid, active=active, message=text)}
    return messages.TelemetryEvent(**fields)


def _way(joined: bool) -> str:
    return "joined" if joined else "left"


def _iteration(summary: IterationSummary) -> messages.IterationReport:
    return messages.IterationReport(
        data_parallel_rank=summary.rank.rank_id.dp,
        stage=summary.rank.rank_id.stage,
        tensor_parallel_rank=summary.rank.rank_id.tp,
        gpu_uuid=summary.rank.gpu_uuid,
        iteration=summary.iteration,
        iteration_time_us=summary.iteration_time_us,
        compute_span_us=summary.compute_span_us,
        energy_mj=summary.energy_mj or 0,
        has_energy=summary.energy_mj is not None,
        plan_id=summary.plan_id,
        point=summary.point,
        planned=bool(summary.plan_id),
        durations_us=summary.durations_us,
        clock_changes=summary.clock_changes,
        instruction_energy_mj=summary.instruction_energy_mj,
        instruction_energy_iterations=summary.instruction_energy_iterations,
        quiet_us=summary.quiet_us,
        quiet_energy_mj=summary.quiet_energy_mj,
        marks=summary.marks or 0,  # type: ignore[arg-type]  # numbers of the same enum
        control=summary.control or 0,  # type: ignore[arg-type]
        leads_us=summary.leads_us,
        below_plan_us=summary.below_plan_us,
        above_plan_us=summary.above_plan_us,
        median_clock_mhz=summary.median_clock_mhz,
        power_limited=summary.power_limited,
        own_time=summary.own_time,
        tensor_parallel_ranks=summary.tensor_parallel_ranks,
        computing_us=summary.computing_us,
    )
