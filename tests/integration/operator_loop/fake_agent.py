"""An agent of a node that answers by script, with training that takes one iteration when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np

from perseus_agent.servers.grpc_service import digest_of
from perseus_core import keys
from perseus_proto.planset import PlanSet, decode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

STAGES, PIPELINES = 2, 2
STAGE_SET = set(range(STAGES))
GROUP = (keys.API_GROUP, keys.API_VERSION)
ENERGY_MJ = 1_000_000
MEASURED = read_profile(profile_csv(STAGES), stages=STAGES)
MODEL = Simulator(
    build_problem(MEASURED, build_schedule("1f1b", stages=STAGES, microbatches=4), blocking_power_w=83.64)
)
TIMES_US = {
    (table.stage, int(table.kind), clock): round(1e6 * time_s)
    for table in MODEL.problem.options
    for clock, time_s in zip(table.frequency_mhz.tolist(), table.time_s.tolist(), strict=True)
}


STEP = pb.StageSchedule(kinds=[pb.INSTRUCTION_KIND_STEP], microbatches=[0], chunks=[0])
"""Of a rank that marks its iterations as a whole."""
CLOCKS_MHZ = sorted({clock for _, _, clock in TIMES_US})


class FakeAgent(stubs.AgentServicer):
    """One node's agent: keeps what it is sent, and refuses what the contract says it refuses."""

    def __init__(self, node: str, pipeline: int) -> None:
        self.node, self.pipeline = node, pipeline
        self.iteration = -1
        self.epoch = 0
        self.pods: list[str] = []
        self.plan_sets: dict[str, PlanSet] = {}
        self.plan_id = ""
        self.point: int | None = None
        self.from_iteration = 0
        self.leased = False
        self.calls: list[str] = []
        self.ranks = [
            pb.Rank(gpu_uuid=f"GPU-{node}-{s}", data_parallel_rank=pipeline, stage=s, pid=100 + s)
            for s in range(STAGES)
        ]
        self.readers: list[asyncio.Queue[pb.TelemetryEvent]] = []
        self.model = ""
        """Of its GPUs; empty: the agent does not describe them."""
        self.latency: pb.ClockLatency | None = None
        """Of their clock changes; None: the agent is older than that field."""
        self.clock_mhz = 0
        """That the lease asks for."""
        self.locked: dict[str, int] = {}
        """What its GPUs are locked at, by UUID, where a lease asks for a clock."""
        self.combines = False
        """Whether the latest reader asked for reports of the ranks of a stage together."""
        self.too_old = False
        """It knows no clocks of leases, and does not say whether its description has changed."""
        self.clocks_mhz: list[int] = []
        """That its GPUs support; empty: the agent does not say."""
        self.declared: dict[int, pb.StageSchedule] = {}
        """What ranks execute, by PID."""
        self.followed: dict[str, Any] = {}
        """How clocks follow plans, as every report says it; empty: the agent is older than those fields."""
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def serve(self) -> None:
        self._server = grpc.aio.server()
        stubs.add_AgentServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def die(self) -> None:
        """As after kill -9: connections break, and a successor remembers nothing."""
        assert self._server is not None
        await self._server.stop(None)
        self.plan_sets, self.plan_id, self.point, self.leased, self.readers = {}, "", None, False, []

    async def _check(self, request: Any, context: Any, *, leased: bool = True) -> None:
        if request.epoch < self.epoch:
            await self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, "StaleEpoch", str(self.epoch))
        if leased and not self.leased:
            await self._abort(context, grpc.StatusCode.FAILED_PRECONDITION, "NoLease")
        self.epoch = request.epoch

    async def _abort(self, context: Any, code: grpc.StatusCode, name: str, epoch: str = "") -> None:
        metadata = (("perseus-error", name), *((("perseus-epoch", epoch),) if epoch else ()))
        await context.abort(code, name, trailing_metadata=metadata)

    def _lease(self) -> pb.Lease:
        points = [] if self.point is None else [pb.Selection(data_parallel_rank=self.pipeline, point=self.point)]
        lease = pb.Lease(epoch=self.epoch, remaining_ms=1000, plan_id=self.plan_id, selections=points)
        if self.clock_mhz and not self.too_old:
            lease.clock.clock_mhz = self.clock_mhz
            for rank in self.ranks:
                applied = self.locked.get(rank.gpu_uuid, 0)
                lease.clock.gpus.add(uuid=rank.gpu_uuid, pod_uid=rank.pod_uid, applied_clock_mhz=applied)
        if not self.too_old:
            lease.description = digest_of(self._description())
        return lease

    async def DescribeNode(self, request: Any, context: Any) -> pb.NodeDescription:
        self.calls.append("describe")
        return self._description(with_schedules=request.with_schedules)

    def _description(self, *, with_schedules: bool = False) -> pb.NodeDescription:
        for rank in self.ranks:
            rank.iteration = max(0, self.iteration)
            rank.ClearField("schedule")
            if with_schedules and rank.pid in self.declared:
                rank.schedule.CopyFrom(self.declared[rank.pid])
        uuids = [rank.gpu_uuid for rank in self.ranks] if self.model else []
        gpus = [
            pb.Gpu(
                uuid=uuid,
                model=self.model,
                clock_latency=self.latency,
                supported_clocks_mhz=self.clocks_mhz,
            )
            for uuid in uuids
        ]
        return pb.NodeDescription(node_name=self.node, ranks=self.ranks, gpus=gpus, driver_version="560.1")

    async def AcquireLease(self, request: Any, context: Any) -> pb.Lease:
        self.calls.append("acquire")
        await self._check(request, context, leased=False)
        self.leased, self.pods, self.clock_mhz = True, [pod.name for pod in request.pods], request.clock_mhz
        return self._lease()

    async def RenewLease(self, request: Any, context: Any) -> pb.Lease:
        self.calls.append("renew")
        await self._check(request, context)
        return self._lease()

    async def ReleaseLease(self, request: Any, context: Any) -> pb.ReleaseLeaseResponse:
        self.calls.append("release")
        await self._check(request, context, leased=False)
        self.leased, self.point, self.plan_id, self.clock_mhz, self.locked = False, None, "", 0, {}
        return pb.ReleaseLeaseResponse(restored_gpu_uuids=[rank.gpu_uuid for rank in self.ranks])

    async def PushPlanSet(self, request: Any, context: Any) -> pb.PushPlanSetResponse:
        self.calls.append("push")
        await self._check(request, context)
        plan_set = decode_plan_set(request.plan_set)
        assert set(plan_set.schedules) == {rank.stage for rank in self.ranks}
        self.plan_sets[plan_set.plan_id], self.plan_id = plan_set, plan_set.plan_id
        return pb.PushPlanSetResponse(plan_id=plan_set.plan_id)

    async def SelectPlan(self, request: Any, context: Any) -> pb.SelectPlanResponse:
        self.calls.append("select")
        await self._check(request, context)
        assert request.plan_id in self.plan_sets
        selection, *others = request.selections
        assert [s.data_parallel_rank for s in request.selections] == sorted({r.data_parallel_rank for r in self.ranks})
        assert {other.point for other in others} <= {selection.point}, "of one pipeline, or all have one clock"
        assert selection.point < len(self.plan_sets[request.plan_id].points)
        self.point, self.from_iteration = selection.point, request.from_iteration
        return pb.SelectPlanResponse(furthest_iteration=max(0, self.iteration))

    async def WatchTelemetry(self, request: Any, context: Any) -> AsyncIterator[pb.TelemetryBatch]:
        queue: asyncio.Queue[pb.TelemetryEvent] = asyncio.Queue()
        self.readers.append(queue)
        self.combines = request.combine_ranks
        yield pb.TelemetryBatch()
        while True:
            yield pb.TelemetryBatch(events=[await queue.get()])

    @property
    def time_us(self) -> int:
        """What the plan in force makes of an iteration; at default clocks as its fastest plan."""
        if not self.plan_id or (self.whole_mhz is None and set(self.plan_sets[self.plan_id].schedules) != STAGE_SET):
            return 500_000
        if (clock := self.whole_mhz) is not None:
            duration_s = np.concatenate(
                [
                    [TIMES_US[stage, kind, clock] / 1e6 for kind in MODEL.problem.schedule.columns(stage)[0]]
                    for stage in range(STAGES)
                ]
            )
            return round(1e6 * float(MODEL.end_s(duration_s).max()))
        duration_s = np.concatenate([self.durations_us(stage) for stage in range(STAGES)]) / 1e6
        return round(1e6 * float(MODEL.end_s(duration_s).max()))

    @property
    def whole_mhz(self) -> int | None:
        """The clock of the plan in force, where it is one of whole iterations."""
        plan_set = self.plan_sets[self.plan_id]
        stage = min(plan_set.schedules)
        if plan_set.schedules[stage].kinds != tuple(STEP.kinds):
            return None
        (clock_mhz,) = plan_set.stage_clocks_mhz(stage, self.point or 0)
        return clock_mhz

    def durations_us(self, stage: int) -> list[int]:
        """What each instruction takes at the clocks of the plan in force, by the measurements of ``profile_csv``."""
        plan_set = self.plan_sets[self.plan_id]
        if self.whole_mhz is not None or stage not in plan_set.schedules:
            return []
        kinds = plan_set.schedules[stage].kinds
        clocks = plan_set.stage_clocks_mhz(stage, self.point or 0)
        return [TIMES_US[stage, kind, clock] for kind, clock in zip(kinds, clocks, strict=True)]

    def report(self, iteration: int, *, span_us: int, time_us: int) -> None:
        """Every rank tells of an iteration that has ended; the next has begun."""
        self.iteration = iteration + 1
        planned = self.point is not None and self.from_iteration <= iteration
        energy_mj = ENERGY_MJ - (100_000 if planned else 0)
        if planned and (clock_mhz := self.whole_mhz) is not None:
            energy_mj = round(ENERGY_MJ * (0.4 + 0.6 * (clock_mhz / CLOCKS_MHZ[-1]) ** 2))
        for rank in self.ranks:
            event = pb.TelemetryEvent(
                iteration=pb.IterationReport(
                    data_parallel_rank=rank.data_parallel_rank,
                    stage=rank.stage,
                    gpu_uuid=rank.gpu_uuid,
                    iteration=iteration,
                    iteration_time_us=time_us,
                    compute_span_us=span_us,
                    energy_mj=energy_mj,
                    has_energy=True,
                    planned=planned,
                    point=self.point or 0,
                    durations_us=self.durations_us(rank.stage) if self.plan_id else [],
                    **self.followed,
                )
            )
            for reader in self.readers:
                reader.put_nowait(event)
