"""Events of a job as messages: ranks and engines that come and go, what they did, and what happens to GPUs."""

from __future__ import annotations

from typing import Any

from perseus_agent.clocks.gpu_notices import GpuNotice
from perseus_agent.clocks.telemetry import (
    EngineChange,
    EngineSummary,
    Event,
    RankChange,
    RankProcess,
)
from perseus_agent.servers.engine_messages import engine_message, window_message
from perseus_core.iteration import IterationReport
from perseus_proto.hello import Hello
from perseus_proto.iteration import encode_iteration
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
        case IterationReport():
            fields = {"iteration": encode_iteration(event)}
        case GpuNotice(kind, gpu_uuid, active, text):
            kind_name = f"KIND_{kind.value}"
            fields = {"gpu": messages.GpuEvent(kind=kind_name, gpu_uuid=gpu_uuid, active=active, message=text)}
    return messages.TelemetryEvent(**fields)


def _way(joined: bool) -> str:
    return "joined" if joined else "left"
