"""A profile measured on a running job, through the agent alone: one clock after the other, for a few iterations each.

``Hand`` is just enough of an operator: it holds the lease on one node, pushes plans, selects points and reads
telemetry. ``measure_profile`` uses it for a sweep, as the operator's online profiling does with the same four calls.
Used by the example and by tests that need an agent commanded without an operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median

import grpc

from perseus_proto.planset import PlanPoint, StageSchedule, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2, agent_pb2_grpc
from perseus_sim.cluster import SimulatedCluster, SimulatedNode
from perseus_sim.live_job import LiveJob
from perseus_solver.schedules import Schedule

_EPOCH = 1


class Hand:
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

    def __enter__(self) -> Hand:
        return self

    def __exit__(self, *_: object) -> None:
        self._agent.ReleaseLease(agent_pb2.ReleaseLeaseRequest(job_uid=self._uid, epoch=_EPOCH))
        self._channel.close()

    def ranks(self) -> list[agent_pb2.Rank]:
        """The processes that the agent has taken as ranks."""
        return list(self._agent.DescribeNode(agent_pb2.DescribeNodeRequest()).ranks)

    def push(self, schedule: Schedule, clocks_mhz: Sequence[Sequence[Sequence[int]]]) -> None:
        """Plans for every stage: ``clocks_mhz[stage][point][instruction]``."""
        spans = [slice(a, b) for a, b in pairwise(schedule.stage_offset.tolist())]
        stages = [
            StageSchedule(
                stage,
                tuple(schedule.kind[own].tolist()),
                tuple(schedule.microbatch[own].tolist()),
                tuple(schedule.chunk[own].tolist()),
            )
            for stage, own in enumerate(spans)
        ]
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


def measure_profile(hand: Hand, schedule: Schedule, clocks_mhz: Iterable[int], *, iterations: int = 2) -> str:
    """Time and energy of every kind of instruction of every stage at every clock, as a profile CSV.

    Args:
        hand: of the job, which has one pipeline and runs meanwhile.
        schedule: what it executes.
        clocks_mhz: to be measured, one after the other.
        iterations: to be measured at each, once all ranks run it.
    """
    clocks = sorted(clocks_mhz, reverse=True)
    counts = [b - a for a, b in pairwise(schedule.stage_offset.tolist())]
    hand.push(schedule, [[[clock] * count for clock in clocks] for count in counts])
    lines = ["stage,instruction,frequency,time,energy"]
    with hand.telemetry() as arriving:
        for point, clock in enumerate(clocks):
            hand.select(point)
            found: dict[int, list[agent_pb2.IterationReport]] = defaultdict(list)
            # The first iteration of a clock may have begun at the one before.
            while len(found) < len(counts) or min(map(len, found.values())) <= iterations:
                report = next(arriving)
                if report.planned and report.point == point and report.instruction_energy_mj:
                    found[report.stage].append(report)
            for stage, reports in sorted(found.items()):
                lines += _rows(schedule, stage, clock, reports[1:])
    return "\n".join(lines) + "\n"


def _rows(
    schedule: Schedule, stage: int, clock_mhz: int, reports: Sequence[agent_pb2.IterationReport]
) -> Iterator[str]:
    times_us: dict[str, list[int]] = defaultdict(list)
    energies_mj: dict[str, list[int]] = defaultdict(list)
    for place, (kind, _, _) in enumerate(schedule.of_stage(stage)):
        times_us[kind] += [report.durations_us[place] for report in reports]
        energies_mj[kind].append(reports[-1].instruction_energy_mj[place])  # a mean over all of them already
    for kind, times in times_us.items():
        yield f"{stage},{kind},{clock_mhz},{median(times) / 1e6:.6f},{median(energies_mj[kind]) / 1e3:.4f}"
