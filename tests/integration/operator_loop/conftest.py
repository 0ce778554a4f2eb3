"""The world of the operator's tests: the operator as a process, between an API server and agents that answer by script.

The API server is the embedded one, as a process; the agents are real gRPC servers in this process, with training that
takes one iteration when the test says so. A test asks for ``world`` (a namespace of its own under an operator that all
share) or ``own_world`` (operators of its own, to start and kill), drives one chapter of a job's life and reads what
users read: status, events, ConfigMaps, metrics; and what the agents were told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import kubernetes
import kubernetes.aio.client as k8s
import kubernetes.aio.config as k8s_config
import numpy as np
import pytest
import yaml
from tests.waiting import PATIENCE_S

from perseus_agent.servers.grpc_service import digest_of
from perseus_core import keys
from perseus_proto.planset import PlanSet, decode_plan_set
from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_sim.cluster.api_servers import embedded_server
from perseus_sim.processes import Processes
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

REPOSITORY = Path(__file__).resolve().parents[3]
STAGES, PIPELINES = 2, 2
NUMBERS, TAKEN, OWN = itertools.count(), itertools.count(), itertools.count()
SHARED_NAMESPACES = [f"shared-{n}" for n in range(32)]
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


class FakeAgent(stubs.AgentServicer):
    """One node's agent: keeps what it is told, and refuses what the contract says it refuses."""

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
        return self._description()

    def _description(self) -> pb.NodeDescription:
        for rank in self.ranks:
            rank.iteration = max(0, self.iteration)
        uuids = [rank.gpu_uuid for rank in self.ranks] if self.model else []
        gpus = [pb.Gpu(uuid=uuid, model=self.model, clock_latency=self.latency) for uuid in uuids]
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
        assert set(plan_set.schedules) == set(range(STAGES))
        self.plan_sets[plan_set.plan_id], self.plan_id = plan_set, plan_set.plan_id
        return pb.PushPlanSetResponse(plan_id=plan_set.plan_id)

    async def SelectPlan(self, request: Any, context: Any) -> pb.SelectPlanResponse:
        self.calls.append("select")
        await self._check(request, context)
        assert request.plan_id in self.plan_sets
        (selection,) = request.selections
        assert selection.data_parallel_rank == self.pipeline
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
        if not self.plan_id:
            return 500_000
        duration_s = np.concatenate([self.durations_us(stage) for stage in range(STAGES)]) / 1e6
        return round(1e6 * float(MODEL.end_s(duration_s).max()))

    def durations_us(self, stage: int) -> list[int]:
        """What each instruction takes at the clocks of the plan in force, by the measurements of ``profile_csv``."""
        plan_set = self.plan_sets[self.plan_id]
        kinds = plan_set.schedules[stage].kinds
        clocks = plan_set.stage_clocks_mhz(stage, self.point or 0)
        return [TIMES_US[stage, kind, clock] for kind, clock in zip(kinds, clocks, strict=True)]

    def report(self, iteration: int, *, span_us: int, time_us: int) -> None:
        """Every rank tells of an iteration that has ended; the next has begun."""
        self.iteration = iteration + 1
        planned = self.point is not None and self.from_iteration <= iteration
        for rank in self.ranks:
            event = pb.TelemetryEvent(
                iteration=pb.IterationReport(
                    data_parallel_rank=self.pipeline,
                    stage=rank.stage,
                    gpu_uuid=rank.gpu_uuid,
                    iteration=iteration,
                    iteration_time_us=time_us,
                    compute_span_us=span_us,
                    energy_mj=ENERGY_MJ - (100_000 if planned else 0),
                    has_energy=True,
                    planned=planned,
                    point=self.point or 0,
                    durations_us=self.durations_us(rank.stage) if self.plan_id else [],
                    **self.followed,
                )
            )
            for reader in self.readers:
                reader.put_nowait(event)


class Operator:
    """One operator process, serving some namespaces."""

    def __init__(
        self, processes: Processes, folder: Path, kubeconfig: Path, namespaces: list[str], system: str
    ) -> None:
        number = next(NUMBERS)
        ready = folder / f"ready-{number}.json"
        command = [
            *(sys.executable, "-m", "perseus_operator", "--insecure", "--log-format", "text"),
            *("--namespaces", ",".join(namespaces), "--agent-namespace", system),
            *("--metrics-address", "127.0.0.1:0", "--ready-file", str(ready)),
            *("--agent-poll-s", "0.3", "--profile-retry-s", "0.2", "--profile-refresh-s", "1"),
            *("--lease-ttl-s", "15", "--agent-timeout-s", "5"),
            *("--status-interval-s", "0.2", "--release-timeout-s", "2"),
            *("--calibrate-after", "28"),
        ]
        self.child = processes.start(f"operator-{number}", command, environment={"KUBECONFIG": str(kubeconfig)})
        self.child.wait_until(lambda: ready.exists() and ready.read_text() != "")
        told = json.loads(ready.read_text())
        self.epoch, self._metrics = told["epoch"], told["metrics"]

    @property
    def log(self) -> str:
        return self.child.log.read_text()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's series, or of those with a label of this value."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if not label or f'="{label}"' in line)


class World:
    """One namespace with a training job on two nodes, and the operators that serve it."""

    def __init__(self, namespace: str, system: str, kubeconfig: Path) -> None:
        self.namespace, self.system, self.kubeconfig = namespace, system, kubeconfig
        self.agents = [FakeAgent(f"{namespace}-{p}", p) for p in range(PIPELINES)]
        self.slowdowns = [1.0] * PIPELINES
        self.overhead_us = 0
        """Of every iteration: what no model of the pipeline knows."""
        self.iteration = 0
        self.operators: list[Operator] = []
        self.start: Callable[[], None] = lambda: None

    async def connect(self) -> None:
        configuration = k8s.Configuration()
        await k8s_config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self.api = k8s.ApiClient(configuration)
        self.core, self.custom = k8s.CoreV1Api(self.api), k8s.CustomObjectsApi(self.api)
        for agent in self.agents:
            await agent.serve()
            await self._pod(
                self.system,
                f"agent-{agent.node}",
                agent.node,
                {keys.LABEL_COMPONENT: keys.COMPONENT_AGENT},
                ports=[{"name": "grpc", "containerPort": agent.port}],
            )
            pod = await self._pod(self.namespace, f"trainer-{agent.pipeline}", agent.node, {keys.LABEL_JOB: "gpt3"})
            for rank in agent.ranks:
                rank.pod_uid = pod.metadata.uid

    async def _pod(self, namespace: str, name: str, node: str, labels: dict[str, str], ports: Any = None) -> Any:
        body = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i", "ports": ports or []}]},
        }
        pod = await self.core.create_namespaced_pod(namespace, body)
        status = {"status": {"phase": "Running", "podIP": "127.0.0.1"}}
        await self.core.patch_namespaced_pod_status(
            name, namespace, status, _content_type="application/merge-patch+json"
        )
        return pod

    async def profile(self, data: dict[str, str]) -> None:
        await self.core.create_namespaced_config_map(self.namespace, {"metadata": {"name": "profile"}, "data": data})

    async def stored(self, plural: str, name: str) -> Any:
        """A PerseusProfile or a PerseusFrontier."""
        return await self.custom.get_namespaced_custom_object(*GROUP, self.namespace, plural, name)

    async def apply(self, name: str = "gpt3", **changes: Any) -> None:
        """Create a planned PerseusJob, or one with other fields; a field that is None is left out."""
        spec = {
            "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": 4, "dataParallel": PIPELINES},
            "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83640},
            "straggler": {"confirmIterations": 2},
            "points": 30,
            **changes,
        }
        body = {
            "apiVersion": "/".join(GROUP),
            "kind": keys.KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {field: value for field, value in spec.items() if value is not None},
        }
        await self.custom.create_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL, body)

    async def patch(self, body: dict[str, Any]) -> None:
        await self.custom.patch_namespaced_custom_object(
            *GROUP, self.namespace, keys.PLURAL, "gpt3", body, _content_type="application/merge-patch+json"
        )

    async def job(self, name: str = "gpt3") -> Any:
        return await self.custom.get_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL, name)

    async def condition(self, kind: str) -> tuple[str, str, str]:
        said = (await self.job()).get("status", {}).get("conditions", [])
        found = next((c for c in said if c["type"] == kind), {})
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    async def reasons(self) -> list[str]:
        events = await self.core.list_namespaced_event(self.namespace)
        return [event.reason for event in sorted(events.items, key=lambda e: int(e.metadata.resource_version))]

    async def step(self, iterations: int = 1) -> None:
        """All pipelines train on; the faster wait for the slowest."""
        for _ in range(iterations):
            spans = [round(a.time_us * s) for a, s in zip(self.agents, self.slowdowns, strict=True)]
            for agent, span in zip(self.agents, spans, strict=True):
                agent.report(self.iteration, span_us=span, time_us=max(spans) + self.overhead_us)
            self.iteration += 1
            await asyncio.sleep(0.03)

    async def until(self, what: str, check: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await check():
                    await asyncio.sleep(0.03)
        except TimeoutError:
            status = json.dumps((await self.job()).get("status", {}), indent=1)
            pytest.fail(f"not {what} after {timeout_s} s:\n{status}\n{self.operators[-1].child.tail(40)}")

    async def until_condition(self, kind: str, status: str, reason: str) -> str:
        async def check() -> bool:
            return (await self.condition(kind))[:2] == (status, reason)

        await self.until(f"{kind}={status}, {reason}", check)
        return (await self.condition(kind))[2]

    async def train_until_applied(self) -> None:
        """From the profile to a plan in force."""

        async def measuring() -> bool:
            return (await self.condition("PlanApplied"))[1] in {"MeasuringBaseline", "PlanInForce"}

        await self.until("measuring the baseline", measuring)
        await self.step(5)
        await self.until_condition("PlanApplied", "True", "PlanInForce")


@pytest.fixture(scope="package")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One API server for all tests; each has a namespace of its own in it."""
    with embedded_server(tmp_path_factory.mktemp("api")) as server:
        api = kubernetes.config.new_client_from_config(str(server.kubeconfig))
        for plural in ("perseusjobs", "perseusprofiles", "perseusfrontiers"):  # without PowerBudget
            crd = yaml.safe_load((REPOSITORY / f"deploy/crds/{plural}.yaml").read_text())
            kubernetes.client.ApiextensionsV1Api(api).create_custom_resource_definition(crd)
        for name in (
            "shared-system",
            *SHARED_NAMESPACES,
            *(f"own-{n}{end}" for n in range(12) for end in ("", "-system")),
        ):
            kubernetes.client.CoreV1Api(api).create_namespace({"metadata": {"name": name}})
        api.close()
        yield server.kubeconfig


@pytest.fixture(scope="package")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with Processes(tmp_path_factory.mktemp("operators")) as processes:
        yield processes


@pytest.fixture(scope="package")
def shared(processes: Processes, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Operator:
    """One operator for the tests that leave it as it is."""
    return Operator(processes, tmp_path_factory.mktemp("ready"), kubeconfig, SHARED_NAMESPACES, "shared-system")


@contextlib.asynccontextmanager
async def connected(world: World) -> AsyncIterator[World]:
    await world.connect()
    try:
        yield world
    finally:
        for agent in world.agents:
            await agent.die()
        await world.api.close()  # type: ignore[no-untyped-call]


@pytest.fixture
async def world(kubeconfig: Path, shared: Operator) -> AsyncIterator[World]:
    """A world that the shared operator serves."""
    world = World(SHARED_NAMESPACES[next(TAKEN)], "shared-system", kubeconfig)
    world.operators.append(shared)
    async with connected(world):
        yield world


@pytest.fixture
async def own_world(tmp_path: Path, processes: Processes, kubeconfig: Path) -> AsyncIterator[World]:
    """A world whose operators the test starts and ends."""
    name = f"own-{next(OWN)}"
    world = World(name, f"{name}-system", kubeconfig)
    world.start = lambda: world.operators.append(Operator(processes, tmp_path, kubeconfig, [name], f"{name}-system"))
    async with connected(world):
        world.start()
        yield world
        for operator in world.operators:
            operator.child.popen.kill()
