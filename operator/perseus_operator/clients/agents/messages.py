"""What agents say, in the operator's own types: leases, ranks and telemetry, converted from the wire's messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from perseus_core.iteration import IterationReport
from perseus_core.leases import LeasedGpu
from perseus_core.units import s_from_ms
from perseus_operator.clients.agents.engines import (
    EngineJoined,
    EngineLeft,
    change_of,
    energies_of,
    engine_of,
    faults_of,
    is_valid_window,
    window_of,
)
from perseus_operator.clients.agents.hardware import gpu_of
from perseus_operator.clients.agents.validation import MAX_NAME, is_valid_rank, is_valid_report
from perseus_operator.nodes.engines import MOST_ENGINES, Engine, EngineWindow
from perseus_operator.nodes.gpu import Gpu
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.nodes.named_gpus import NamedGpu
from perseus_operator.nodes.node import DeclaredSchedule, Rank
from perseus_operator.objects.values import Pod
from perseus_proto.iteration import decode_iteration
from perseus_proto.v1alpha1 import agent_pb2

_MOST_CLOCKS: Final = 4096
"""That one GPU supports."""


@dataclass(frozen=True)
class LeaseInfo:
    """What an agent holds for a job."""

    remaining_s: float
    plan_id: str
    selected: dict[int, int | None]
    clock: LeaseClock | None
    """None: the lease asks for none, or the agent is too old to lock one."""
    description: int = 0
    """Changes with what the agent says of its node; 0: it is too old to tell."""
    orders_id: str = ""
    """Of the orders for engines that it holds; empty: none."""
    engine_faults: Mapping[str, str] = field(default_factory=dict)
    """Why no engine of a pod is followed, by the UID of the pod."""
    energies_mj: Mapping[str, int] = field(default_factory=dict)
    """What all GPUs of a pod have used by their counters, by the UID of the pod; without pods where it is unknown."""


@dataclass(frozen=True)
class NodeInfo:
    """What an agent reports about its node."""

    ranks: tuple[Rank, ...]
    uncontrollable: dict[str, str]
    clocks_mhz: dict[str, tuple[int, ...]]
    """GPU UUID → supported clocks."""
    gpus: dict[str, Gpu]
    """GPU UUID → model and switch latency."""
    schedules: dict[tuple[str, int], DeclaredSchedule]
    """By the rank's pod UID and process; empty unless requested."""
    engines: tuple[Engine, ...] = ()


@dataclass(frozen=True)
class StreamOpened:
    """The stream is open: from here on no event is missed."""


@dataclass(frozen=True)
class RankJoined:
    """A rank has connected."""

    rank: Rank


@dataclass(frozen=True)
class RankLeft:
    """A rank has disconnected."""

    rank: Rank


@dataclass(frozen=True)
class GpuSlowdown:
    """A GPU reports that something slows it, or that it is lost."""

    gpu_uuid: str
    kind: str
    active: bool
    message: str


@dataclass(frozen=True)
class EventsDropped:
    """Events that were dropped since the stream began, because this reader was too slow."""

    count: int


TelemetryEvent = (
    StreamOpened
    | RankJoined
    | RankLeft
    | IterationReport
    | GpuSlowdown
    | EventsDropped
    | EngineJoined
    | EngineLeft
    | EngineWindow
)


def pod_message(pod: Pod) -> agent_pb2.Pod:
    """Convert a pod of a job for its lease."""
    containers = [agent_pb2.Container(id=identifier, name=name) for identifier, name in sorted(pod.containers)]
    return agent_pb2.Pod(uid=pod.uid, namespace=pod.namespace, name=pod.name, containers=containers)


def named_gpu_message(gpu: NamedGpu) -> agent_pb2.NamedGpu:
    """Convert what is published of a device for a lease."""
    return agent_pb2.NamedGpu(pool=gpu.pool, device=gpu.device, uuid=gpu.uuid)


def lease_of(message: agent_pb2.Lease) -> LeaseInfo:
    """Convert what an agent answers about a lease."""
    return LeaseInfo(
        remaining_s=s_from_ms(message.remaining_ms),
        plan_id=message.plan_id,
        selected={s.data_parallel_rank: None if s.no_plan else s.point for s in message.selections},
        clock=_clock_of(message.clock) if message.HasField("clock") else None,
        description=message.description,
        orders_id=message.orders_id[:MAX_NAME],
        engine_faults=faults_of(message),
        energies_mj=energies_of(message),
    )


def _clock_of(message: agent_pb2.LeaseClock) -> LeaseClock:
    gpus = [LeasedGpu(gpu.uuid, gpu.pod_uid, gpu.applied_clock_mhz, gpu.message) for gpu in message.gpus]
    return LeaseClock(message.clock_mhz, tuple(gpus))


def node_of(data: bytes) -> NodeInfo:
    """Convert a description of a node, as it came; what is impossible is left out.

    Raises:
        DecodeError: it is none.
    """
    answer = agent_pb2.NodeDescription.FromString(data)
    fine = {agent_pb2.CONTROLLABILITY_YES, agent_pb2.CONTROLLABILITY_UNSPECIFIED}
    return NodeInfo(
        ranks=tuple(filter(is_valid_rank, map(rank_of, answer.ranks))),
        uncontrollable={
            gpu.uuid: gpu.controllability_message or agent_pb2.Controllability.Name(gpu.controllability)
            for gpu in answer.gpus
            if gpu.controllability not in fine
        },
        clocks_mhz={gpu.uuid: tuple(gpu.supported_clocks_mhz[:_MOST_CLOCKS]) for gpu in answer.gpus},
        gpus={gpu.uuid: gpu_of(gpu, answer.driver_version) for gpu in answer.gpus},
        schedules={(r.pod_uid, r.pid): schedule_of(r.schedule) for r in answer.ranks if r.HasField("schedule")},
        engines=tuple(filter(None, map(engine_of, answer.engines[:MOST_ENGINES]))),
    )


def rank_of(message: agent_pb2.Rank) -> Rank:
    """Convert a rank; ``is_valid_rank`` checks it."""
    return Rank(
        pod_uid=message.pod_uid,
        gpu_uuid=message.gpu_uuid,
        dp=message.data_parallel_rank,
        stage=message.stage,
        tp=message.tensor_parallel_rank,
        pid=message.pid,
        iteration=message.iteration,
    )


def schedule_of(schedule: agent_pb2.StageSchedule) -> DeclaredSchedule:
    """Return each instruction in order."""
    joined = set(schedule.joined)
    columns = zip(schedule.kinds, schedule.microbatches, schedule.chunks, strict=False)
    return tuple((*instruction, place in joined) for place, instruction in enumerate(columns))


def is_valid(event: TelemetryEvent) -> bool:
    """Whether the values of an event are possible."""
    if isinstance(event, IterationReport):
        return is_valid_report(event)
    if isinstance(event, EngineWindow):
        return is_valid_window(event)
    if isinstance(event, GpuSlowdown):
        return len(event.gpu_uuid) <= MAX_NAME
    return is_valid_rank(event.rank) if isinstance(event, RankJoined) else True


def event_of(event: agent_pb2.TelemetryEvent) -> TelemetryEvent | None:
    """Convert an event; None: its kind is not known here, as the agent is newer, or it has more than any can have."""
    kind = event.WhichOneof("event")
    if kind in ("rank_joined", "rank_left"):
        return RankJoined(rank_of(event.rank_joined)) if kind == "rank_joined" else RankLeft(rank_of(event.rank_left))
    if kind == "window":
        return window_of(event.window)
    if kind in ("engine_joined", "engine_left"):
        return change_of(event)
    if kind == "gpu":
        return _slowdown_of(event.gpu)
    return decode_iteration(event.iteration) if kind == "iteration" else None


def _slowdown_of(event: agent_pb2.GpuEvent) -> GpuSlowdown | None:
    if event.kind not in agent_pb2.GpuEvent.Kind.values():
        return None
    name = agent_pb2.GpuEvent.Kind.Name(event.kind).removeprefix("KIND_")
    return GpuSlowdown(event.gpu_uuid, name, event.active, event.message[:MAX_NAME])
