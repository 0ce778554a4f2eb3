"""What telemetry costs one operator, and how that grows: many small jobs over real gRPC, and one job of many nodes.

``fleet_cpu_*``: light agents (``tests.doubles.fleet``) over mutual TLS, each with eight GPUs; the operator is a process
with the embedded API server. Its CPU time in a steady minute is that of reports, renewals, reconciliations and status
writes together.

``fleet_failover_*``: three replicas of the operator over such agents; one is killed again and again, and another one is
started. Measured is the time from each kill until every lease of the jobs that the victim served is another's.

``fleet_wire_*`` and ``fleet_straggler_*`` are in ``fleet_wire``.

``fleet_job_*``: one job of 16 stages by eight tensor-parallel ranks, as many pipelines as the nodes hold, in this
process and without a wire: what the planner needs for one decision, and what one rank's report costs it.
"""

from __future__ import annotations

import asyncio
import functools
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.bench import operator as scale
from tests.doubles.fleet import Fleet
from tests.doubles.fleet_cluster import FleetCluster, Operator
from tests.replicas import Replicas
from tests.unit.operator.conftest import Job

from perseus_core.iteration import IterationReport
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Pod
from perseus_sim.cluster.api_servers import Server, embedded_server
from perseus_sim.cluster.pki import Authority, write_pairs
from perseus_sim.processes import Processes

Result = dict[str, Any]
RANKS = 8
"""On each node."""
OVER_GRPC = {
    **{
        f"{nodes}nodes_{iteration_s}s": scale.Size(agents=nodes, jobs=nodes // 2, iteration_s=iteration_s)
        for nodes in (100, 400)
        for iteration_s in (1, 2, 10)
    },
    "2500nodes_2s": scale.Size(agents=2496, jobs=156, tensor_parallel=8, iteration_s=2),
    "100nodes_200jobs_10s": scale.Size(agents=100, jobs=200, stages=1, pipelines=4, sharing=8, iteration_s=10),
}
"""The agents take more of the machine than the operator does. In the first ones each node has a whole pipeline of eight
stages, of which each is reported; with 2,500 nodes one stage, whose eight tensor-parallel ranks are reported together;
in the last one eight jobs share each node, with one GPU there for each.
"""
LARGEST = "2500nodes_2s"
NODES = (64, 256, 1024, 4096)
"""Of the one job."""
STAGES, INSTRUCTIONS = 16, 64
KILLS, FAILOVER_JOBS = 50, 24
"""How often a replica is killed, and how many jobs there are then, on two nodes each."""


async def steady(server: Server, folder: Path, name: str, size: scale.Size) -> Result:
    """Return what the operator uses in a steady minute."""
    iteration_s = size.iteration_s
    tls = folder / "tls"
    write_pairs(tls, Authority("perseus-bench"), ("perseus-agent", "perseus-operator"))
    kubeconfig = await asyncio.to_thread(scale.login, server, folder)
    with Processes(folder / "logs") as processes:
        async with (
            Fleet(iteration_s=iteration_s, tls=tls) as fleet,
            FleetCluster(
                fleet,
                admin=server.kubeconfig,
                operator=kubeconfig,
                namespace=scale.NAMESPACE,
                processes=processes,
                folder=folder,
                tls=tls,
            ) as cluster,
        ):
            bench = scale.Bench(cluster, server, size)
            await bench.prepare()
            operator = await cluster.start_operator()
            await cluster.all(cluster.apply(job, bench.spec) for job in bench.training)
            await bench.until("every job is Ready", lambda: bench.settled(operator))
            await asyncio.sleep(2 * iteration_s)
            begun_s, cpu_s, before = time.monotonic(), scale.cpu(operator), _reports(bench)
            await asyncio.sleep(size.steady_s)
            lasted_s, cpu_s, reports = time.monotonic() - begun_s, scale.cpu(operator) - cpu_s, _reports(bench) - before
            scale.say(f"{name}: {reports / lasted_s:.0f} reports/s, {cpu_s / lasted_s:.1%} CPU")
            return {
                f"fleet_cpu_percent_{name}": {"value": 100 * cpu_s / lasted_s, "unit": "% core"},
                f"fleet_cpu_us_per_report_{name}": {"value": 1e6 * cpu_s / reports, "unit": "us"},
                f"fleet_rss_mib_{name}": {"value": scale.peak_rss_mib(operator), "unit": "MiB"},
            }


def _reports(bench: scale.Bench) -> int:
    """As they come over the wire: one for the tensor-parallel ranks of a stage."""
    nodes = (ranks for job in bench.training.values() for ranks in job.ranks.values())
    iterations = [job.iteration for job in bench.training.values() for _ in job.ranks]
    return sum(i * len({(rank.dp, rank.stage) for rank in ranks}) for i, ranks in zip(iterations, nodes, strict=True))


def over_grpc(name: str) -> Result:
    """Return the figures of a size, with an operator and an API server of its own."""
    with tempfile.TemporaryDirectory(prefix="perseus-bench-") as temporary:
        folder = Path(temporary)
        with embedded_server(folder / "api") as server:
            figures = asyncio.run(steady(server, folder, name, OVER_GRPC[name]))
    if name == LARGEST:
        figures["fleet_cpu_us_per_report"] = figures[f"fleet_cpu_us_per_report_{name}"]
    return figures


async def kills(server: Server, folder: Path) -> Result:
    """Return how long others need to command the jobs of a replica that was killed."""
    tls = folder / "tls"
    write_pairs(tls, Authority("perseus-bench"), ("perseus-agent", "perseus-operator"))
    kubeconfig = await asyncio.to_thread(scale.login, server, folder)
    size = scale.Size(agents=2 * FAILOVER_JOBS, jobs=FAILOVER_JOBS, iteration_s=5.0)
    with Processes(folder / "logs") as processes:
        async with (
            Fleet(iteration_s=size.iteration_s, tls=tls) as fleet,
            FleetCluster(
                fleet,
                admin=server.kubeconfig,
                operator=kubeconfig,
                namespace=scale.NAMESPACE,
                processes=processes,
                folder=folder,
                tls=tls,
            ) as cluster,
        ):
            bench = scale.Bench(cluster, server, size)
            await bench.prepare()
            replicas = Replicas(cluster, (), patience_s=size.patience_s)
            await replicas.start(3)
            await cluster.all(cluster.apply(name, scale.SPEC) for name in bench.training)
            await bench.until("every job is Ready", bench.planned)
            dice, taken_s = random.Random(7), []
            for number in range(KILLS):
                await asyncio.sleep(dice.uniform(0, 1))
                taken_s.append(await replicas.end(dice.choice(sorted(replicas.living)), Operator.kill))
                await replicas.start()
                scale.say(f"kill {number + 1}: {taken_s[-1]:.2f} s, {replicas.leases_lost} leases lost")
            return {
                "fleet_failover_s_max": {"value": max(taken_s), "unit": "s"},
                "fleet_failover_s_median": {"value": statistics.median(taken_s), "unit": "s"},
                "fleet_leases_lost": {"value": replicas.leases_lost, "unit": f"leases in {KILLS} kills"},
            }


def failover() -> Result:
    """Return the figures of replicas that are killed."""
    with tempfile.TemporaryDirectory(prefix="perseus-bench-") as name:
        folder = Path(name)
        with embedded_server(folder / "api") as server:
            return asyncio.run(kills(server, folder))


def one_job() -> Result:
    """Return what a decision and a report cost, for one job of each size."""
    figures: Result = {}
    for nodes in NODES:
        job = _running(nodes)
        decide_s = _cpu_s(lambda job=job: job.decide(), 5)
        reports = [list(_iteration(job, iteration)) for iteration in range(1, 4)]

        def observe(job: Job = job, reports: list[list[tuple[Node, IterationReport]]] = reports) -> None:
            for node, report in reports.pop(0):
                job.state.iteration_reported(node, report)

        observe_s = _cpu_s(observe, len(reports))
        figures[f"fleet_job_decision_ms_{nodes}nodes"] = {"value": 1e3 * decide_s, "unit": "ms"}
        figures[f"fleet_job_report_us_{nodes}nodes"] = {"value": 1e6 * observe_s / (RANKS * nodes), "unit": "us"}
    return figures


def _running(nodes: int) -> Job:
    """Return a job whose plan is in force on all of its nodes."""
    shape = {"stages": STAGES, "tensorParallel": RANKS, "dataParallel": nodes // STAGES}
    job = Job(pipeline={"schedule": "1F1B", "microbatches": INSTRUCTIONS // 2, **shape})
    job.solve()
    pods = [Pod(f"pod-{n}", "ns", f"t-{n}", f"node-{n}", "job", {}) for n in range(nodes)]
    agents = {f"node-{n}": f"10.0.0.{n}:1" for n in range(nodes)}
    job.state.pods_observed(Selection(tuple(pods)), agents, wall_s=0.0)
    job.act()
    for n, tp in ((n, tp) for n in range(nodes) for tp in range(RANKS)):
        rank = Rank(f"pod-{n}", f"GPU-{n}-{tp}", n // STAGES, n % STAGES, tp, 1, 0)
        job.state.rank_joined(job.state.nodes[f"node-{n}"], rank)
    while not job.act().applied:
        pass
    return job


def _iteration(job: Job, iteration: int) -> Iterator[tuple[Node, IterationReport]]:
    durations_us = array("I", [30_000] * INSTRUCTIONS)
    for n in range(len(job.state.nodes)):
        node = job.state.nodes[f"node-{n}"]
        for tp in range(RANKS):
            yield (
                node,
                IterationReport(n // STAGES, n % STAGES, tp, iteration, 1_000_000, 990_000, 500_000, 0, durations_us),
            )


def _cpu_s(work: Any, times: int) -> float:
    """Return the CPU time of one run: the least of several, since what disturbs only adds."""
    taken_s = []
    for _ in range(times):
        begun_s = time.process_time()
        work()
        taken_s.append(time.process_time() - begun_s)
    return min(taken_s)


FIGURES = {
    **{f"fleet_cpu_{name}": functools.partial(over_grpc, name) for name in OVER_GRPC},
    "fleet_failover": failover,
    "fleet_job": one_job,
}
