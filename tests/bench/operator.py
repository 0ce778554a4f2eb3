"""The operator at scale: 1,000 agents and 500 jobs, with the operator as a process, as in production.

Real are the operator, its ServiceAccount with the chart's rules, kube-apiserver and etcd (the embedded server where
they are not built), and mutual TLS to every agent. The agents are doubles (``tests.doubles.fleet``: real gRPC, leases
and plans) with eight ranks on every node; each rank reports an iteration with all its durations every ten seconds.
There is no peer, because no other such operator is known; the project sets its own targets.

A reconciliation is measured as a user sees it: from the moment at which an edited objective is sent to the API server
until the last agent of the job has got its new selection, while telemetry of all other jobs goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client
from kubernetes.config import new_client_from_config
from kubernetes.utils import create_from_dict
from tests.doubles.fleet import Fleet
from tests.doubles.fleet_cluster import FleetCluster, Operator
from tests.doubles.light_job import LightJob, Work

from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Feature, Server, embedded_server, real_server
from perseus_sim.cluster.control_plane import NoControlPlane
from perseus_sim.cluster.pki import Authority, write_pairs
from perseus_sim.processes import Processes
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

Result = dict[str, Any]
CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
ACCOUNTS, NAMESPACE = "perseus-system", "training"
STAGES, MICROBATCHES, BLOCKING_W = 8, 16, 83.64
PIPELINES = 2
SPEC: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": PIPELINES},
    "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": round(1000 * BLOCKING_W)},
    "baselineIterations": 0,  # otherwise the figures are mostly the wait for iterations at default clocks
}


@dataclass(frozen=True)
class Size:
    """Size of the system and duration of the phases."""

    agents: int = 1000
    jobs: int = 500
    tensor_parallel: int = 1
    """GPUs of a node that share a stage; with 1 a node has a whole pipeline."""
    stages: int = STAGES
    pipelines: int = PIPELINES
    """Of each job."""
    sharing: int = 1
    """How many jobs share their nodes."""
    iteration_s: float = 10.0
    steady_s: float = 60.0
    edits_per_s: float = 10.0
    patience_s: float = 900.0


@dataclass
class Figures:
    """The measurements. Requests are the operator's; None if the server has no audit log."""

    settle_s: float = 0.0
    """From the first apply until every job is Ready and every agent has its plan."""
    solves: float = 0.0
    settle_requests: int | None = None
    steady_requests_per_s: float | None = None
    steady_cpu_percent: float = 0.0
    edits_ms: list[float] = field(default_factory=list)
    """Times from an edit to the last agent of its job, sorted."""
    restart_s: float = 0.0
    """From the start of a new operator after kill -9 until it commands every agent and every job is Ready."""
    restart_solves: float = 0.0
    restart_requests: int | None = None
    rss_mib: float = 0.0
    """Largest resident memory of the two operators, without child processes."""

    def edit_ms(self, share: float) -> float:
        """Return a quantile of the edits in ms."""
        return self.edits_ms[min(len(self.edits_ms) - 1, int(len(self.edits_ms) * share))]


def work(stages: int, profile: str) -> Work:
    """Return the work that every pipeline executes."""
    schedule = build_schedule("1f1b", stages=stages, microbatches=MICROBATCHES)
    return Work.of(build_problem(read_profile(profile, stages=stages), schedule, blocking_power_w=BLOCKING_W))


class Bench:
    """One run of the benchmark."""

    def __init__(self, cluster: FleetCluster, server: Server, size: Size) -> None:
        self.cluster, self.server, self.size = cluster, server, size
        self.training: dict[str, LightJob] = {}
        self.figures = Figures()

    async def run(self) -> Figures:
        """Run all phases and return the figures."""
        size, figures = self.size, self.figures
        say(f"{size.agents} agents, {size.jobs} jobs on the {self.server.name}")
        await self.prepare()
        operator = await self.cluster.start_operator()
        audit, begun_s = self.audit_size(), time.monotonic()
        await self.cluster.all(self.cluster.apply(name, self.spec) for name in self.training)
        await self.until("every job is Ready", lambda: self.settled(operator))
        figures.settle_s = time.monotonic() - begun_s
        figures.settle_requests = self.count(audit)
        figures.solves = await self.metric(operator, "perseus_operator_solves_total")
        say(f"settled in {figures.settle_s:.1f} s: {figures.settle_requests} requests, {figures.solves:g} solves")
        await asyncio.sleep(2 * size.iteration_s)

        audit, begun_s, cpu_s = self.audit_size(), time.monotonic(), cpu(operator)
        await asyncio.sleep(size.steady_s)
        lasted_s = time.monotonic() - begun_s
        figures.steady_cpu_percent = 100 * (cpu(operator) - cpu_s) / lasted_s
        requests = self.count(audit)
        figures.steady_requests_per_s = None if requests is None else requests / lasted_s
        say(f"steady: {figures.steady_requests_per_s} requests/s, {figures.steady_cpu_percent:.0f} % of a core")

        await self.edit_all()
        say(f"edits: p50 {figures.edit_ms(0.5):.0f} ms, p99 {figures.edit_ms(0.99):.0f} ms")
        figures.rss_mib = peak_rss_mib(operator)
        await asyncio.to_thread(operator.kill)

        audit, begun_s = self.audit_size(), time.monotonic()
        operator = await self.cluster.start_operator()
        await self.until("the next operator commands every agent", lambda: self.settled(operator))
        figures.restart_s = time.monotonic() - begun_s
        figures.restart_requests = self.count(audit)
        figures.restart_solves = await self.metric(operator, "perseus_operator_solves_total")
        figures.rss_mib = max(figures.rss_mib, peak_rss_mib(operator))
        say(f"restarted in {figures.restart_s:.1f} s, {figures.restart_requests} requests; {figures.rss_mib:.0f} MiB")
        return figures

    async def prepare(self) -> None:
        """Make nodes, pods and training processes, but no PerseusJob."""
        size, cluster = self.size, self.cluster
        nodes, profile = await cluster.add_nodes(size.agents), profile_csv(size.stages)
        share = size.pipelines * (size.stages if size.tensor_parallel > 1 else 1)
        assert share * size.jobs == size.agents * size.sharing, "no node is left"
        await cluster.profile(profile)
        executed, firsts = work(size.stages, profile), [j // size.sharing * share for j in range(size.jobs)]
        jobs = await cluster.all(
            cluster.start_training(
                f"job-{j}", nodes[first : first + share], executed, tensor_parallel=size.tensor_parallel
            )
            for j, first in enumerate(firsts)
        )
        self.training = {job.name: job for job in jobs}

    @property
    def spec(self) -> dict[str, Any]:
        """Of every PerseusJob."""
        size = self.size
        shape = {"stages": size.stages, "dataParallel": size.pipelines, "tensorParallel": size.tensor_parallel}
        return {**SPEC, "pipeline": {**SPEC["pipeline"], **shape}}

    async def settled(self, operator: Operator) -> bool:
        """Return whether every agent has this operator's epoch and a plan, and every job is Ready."""
        if not all(agent.epoch == operator.epoch for agent in self.cluster.fleet.agents.values()):
            return False
        return await self.planned()

    async def planned(self) -> bool:
        """Return whether every agent has a plan, and every job is Ready."""
        if not all(all(self.cluster.fleet.plans(job).values()) for job in self.training.values()):
            return False
        ready = [is_ready(job) for job in (await self.cluster.jobs()).values()]
        return len(ready) == self.size.jobs and all(ready)

    async def edit_all(self) -> None:
        """Change the objective of every job, one after another at a constant rate."""
        jobs, pause_s = await self.cluster.jobs(), 1 / self.size.edits_per_s
        edits = []
        for name, job in self.training.items():
            edits.append(asyncio.create_task(self.edit(job, jobs[name]["metadata"]["uid"])))
            await asyncio.sleep(pause_s)
        self.figures.edits_ms = sorted(await asyncio.gather(*edits))

    async def edit(self, job: LightJob, uid: str) -> float:
        """Change a job's objective; return the milliseconds until its last agent got the new selection."""
        begun_s, agents = time.monotonic(), [self.cluster.fleet.agents[node] for node in job.ranks]
        await self.cluster.patch(job.name, {"spec": {"objective": {"type": "MinEnergy"}}})
        async with asyncio.timeout(self.size.patience_s):
            # The agents record the time themselves. Frequent checks would slow them down: they run in this process.
            while min(agent.selected_s.get(uid, 0.0) for agent in agents) < begun_s:
                await asyncio.sleep(0.25)
        return 1000 * (max(agent.selected_s[uid] for agent in agents) - begun_s)

    async def until(self, what: str, check: Callable[[], Awaitable[bool]]) -> None:
        try:
            async with asyncio.timeout(self.size.patience_s):
                while not await check():
                    await asyncio.sleep(0.25)
        except TimeoutError:
            tail = self.cluster.operators[-1].child.tail(30)
            raise TimeoutError(f"not after {self.size.patience_s:g} s: {what}\n{tail}") from None

    async def metric(self, operator: Operator, name: str) -> float:
        return await asyncio.to_thread(operator.metric, name)

    # ------------------------------------------------------------------------------------------------- requests

    def audit_size(self) -> int:
        return self.server.plane.audit_log.stat().st_size if self.server.plane else 0

    def requests(self, since: int) -> list[rbac.Request]:
        assert self.server.plane is not None
        return list(
            rbac.requests(self.server.plane.audit_log, rbac.user_name(ACCOUNTS, "perseus-operator"), since=since)
        )

    def count(self, since: int) -> int | None:
        return len(self.requests(since)) if self.server.plane else None


def is_ready(job: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in job.get("status", {}).get("conditions", ()))


def cpu(operator: Operator) -> float:
    """Return the CPU time of the process in seconds, without ended children."""
    fields = Path(f"/proc/{operator.child.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def peak_rss_mib(operator: Operator) -> float:
    status = Path(f"/proc/{operator.child.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def say(text: str) -> None:
    print(f"  operator: {text}", file=sys.stderr, flush=True)


def login(server: Server, folder: Path) -> Path:
    """Install the CRDs and return the operator's kubeconfig: its service account's where the server has RBAC."""
    with new_client_from_config(str(server.kubeconfig)) as api:
        definitions = client.ApiextensionsV1Api(api)
        for path in CRDS.glob("*.yaml"):
            definitions.create_custom_resource_definition(yaml.safe_load(path.read_text(encoding="utf-8")))
        if Feature.RBAC not in server.features:
            return server.kubeconfig
        client.CoreV1Api(api).create_namespace({"metadata": {"name": ACCOUNTS}})
        for document in rbac.operator_manifest(ACCOUNTS):
            create_from_dict(api, document, namespace=ACCOUNTS, apply=True)
    return rbac.log_in(server.kubeconfig, ACCOUNTS, "perseus-operator", folder / "operator.kubeconfig")


async def measure(server: Server, folder: Path, size: Size) -> Figures:
    """Run the benchmark on an API server without the CRD, on which it may make namespaces."""
    tls = folder / "tls"
    write_pairs(tls, Authority("perseus-bench"), ("perseus-agent", "perseus-operator"))
    kubeconfig = await asyncio.to_thread(login, server, folder)
    with Processes(folder / "logs") as processes:
        async with (
            Fleet(iteration_s=size.iteration_s, tls=tls) as fleet,
            FleetCluster(
                fleet,
                admin=server.kubeconfig,
                operator=kubeconfig,
                namespace=NAMESPACE,
                processes=processes,
                folder=folder,
                tls=tls,
            ) as cluster,
        ):
            return await Bench(cluster, server, size).run()


def operator_scale(size: Size = Size()) -> Result:
    """Return the figures, with the size in their names."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perseus-bench-")))
        try:
            server = stack.enter_context(real_server(folder / "api"))
        except NoControlPlane as missing:
            say(f"on the embedded API server, without request counts: {missing}")
            server = stack.enter_context(embedded_server(folder / "api"))
        figures = asyncio.run(measure(server, folder, size))
    jobs, both = f"{size.jobs}jobs", f"{size.agents}agents_{size.jobs}jobs"
    return {
        f"operator_reconcile_p99_ms_{jobs}": {"value": figures.edit_ms(0.99), "unit": "ms"},
        f"operator_reconcile_p50_ms_{jobs}": {"value": figures.edit_ms(0.5), "unit": "ms"},
        f"operator_rss_mib_{both}": {"value": figures.rss_mib, "unit": "MiB"},
        f"operator_settle_s_{jobs}": {"value": figures.settle_s, "unit": "s"},
        f"operator_settle_solves_{jobs}": {"value": figures.solves, "unit": "solves"},
        f"operator_settle_requests_{jobs}": {"value": figures.settle_requests, "unit": "requests"},
        f"operator_restart_s_{jobs}": {"value": figures.restart_s, "unit": "s"},
        f"operator_restart_requests_{jobs}": {"value": figures.restart_requests, "unit": "requests"},
        f"operator_steady_requests_per_s_{jobs}": {"value": figures.steady_requests_per_s, "unit": "1/s"},
        f"operator_steady_cpu_percent_{both}": {"value": figures.steady_cpu_percent, "unit": "% core"},
    }


FIGURES = {"operator": operator_scale}
