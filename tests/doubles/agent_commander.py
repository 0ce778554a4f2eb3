"""Just enough of an operator to command one agent: the lease on one node, plans of any clocks, telemetry.

For tests that need plans which no operator would make, or an agent without an operator. The demo and the example use
the real operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from perseus_proto.planset import PlanPoint, StageSchedule, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2, agent_pb2_grpc
from perseus_sim.cluster.live_job import LiveJob
from perseus_sim.cluster.simulated_cluster import SimulatedCluster, SimulatedNode
from perseus_solver.schedules import Schedule

_EPOCH = 1


class AgentCommander:
    """The lease of one job on one node. Use as a context: leaving it gives the GPUs back."""

    def __init__(self, cluster: SimulatedCluster, node: SimulatedNode, job: LiveJob, job_uid: str) -> None:
        ca, key, certificate = (
            (cluster.tls / name).read_bytes() for name in ("ca.crt", "perseus-operator.key", "perseus-operator.crt")
        )
        self._channel = grpc.secure_channel(
            node.grpc_address,
            grpc.ssl_channel_credentials(ca, key, certificate),
            [("grpc.ssl_target_name_override", "perseus-agent")],
        )
        self._agent = agent_pb2_grpc.AgentStub(self._channel)
        self._uid = job_uid
        self._plan_id = ""
        pods = [agent_pb2.Pod(uid=pod.uid, namespace=pod.namespace, name=pod.name) for pod in job.pods]
        self._agent.AcquireLease(
            agent_pb2.AcquireLeaseRequest(
                job_uid=job_uid, job_name=f"default/{job.name}", epoch=_EPOCH, ttl_ms=600_000, pods=pods
            )
        )

    def __enter__(self) -> AgentCommander:
        return self

    def __exit__(self, *_: object) -> None:
        self._agent.ReleaseLease(agent_pb2.ReleaseLeaseRequest(job_uid=self._uid, epoch=_EPOCH))
        self._channel.close()

    def ranks(self) -> list[agent_pb2.Rank]:
        """The processes that the agent has taken as ranks."""
        return list(self._agent.DescribeNode(agent_pb2.DescribeNodeRequest()).ranks)

    def push(self, schedule: Schedule, clocks_mhz: Sequence[Sequence[Sequence[int]]]) -> None:
        """Plans for every stage: ``clocks_mhz[stage][point][instruction]``."""
        stages = [StageSchedule(stage, *schedule.columns(stage)) for stage in range(schedule.stages)]
        points = [PlanPoint(1_000_000 + k, 1_000_000 - k) for k in range(len(clocks_mhz[0]))]
        plans = encode_plan_set(stages, points, clocks_mhz)
        self._plan_id = plans.plan_id
        self._agent.PushPlanSet(agent_pb2.PushPlanSetRequest(job_uid=self._uid, epoch=_EPOCH, plan_set=plans))

    def select(self, point: int, pipelines: int = 1) -> None:
        """Choose a point for every pipeline from the next iteration on."""
        self._agent.SelectPlan(
            agent_pb2.SelectPlanRequest(
                job_uid=self._uid,
                epoch=_EPOCH,
                plan_id=self._plan_id,
                selections=[agent_pb2.Selection(data_parallel_rank=p, point=point) for p in range(pipelines)],
            )
        )

    @contextmanager
    def telemetry(self) -> Iterator[Iterator[agent_pb2.IterationReport]]:
        """Iterations of all ranks as they end."""
        stream = self._agent.WatchTelemetry(agent_pb2.WatchTelemetryRequest(job_uid=self._uid))

        def iterations() -> Iterator[agent_pb2.IterationReport]:
            for batch in stream:
                yield from (event.iteration for event in batch.events if event.HasField("iteration"))

        try:
            yield iterations()
        finally:
            stream.cancel()
