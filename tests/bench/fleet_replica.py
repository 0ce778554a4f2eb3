"""One replica of the operator as a process, on a wire to a process of light agents: measures itself, prints JSON.

    python -m tests.bench.fleet_replica 1x8x512,102x2x4,1897x2x2 --iteration-s 10

Real are the operator from ``Operator`` down to the stubs of its gRPC client, every message serialised and parsed, and
the solver's processes. Doubles are the channel of each agent (``tests.doubles.wire``), the Kubernetes API in memory
(``tests.doubles.memory_cluster``), and the Leases of replicas. So the CPU time and memory of this process are the
operator's without gRPC, TLS, kopf and the Kubernetes client; those are in the figures over real gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from tests.doubles.fleet_size import BLOCKING_W, MICROBATCHES, FleetSize, PlacedJob
from tests.doubles.lease_store import LeaseConnection, LeaseServer
from tests.doubles.memory_cluster import MemoryCluster
from tests.doubles.wire import Wire, WiredPool, address_of

from perseus_core import keys
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.settings import Settings
from perseus_operator.jobs.limits import Limits
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.services import Services
from perseus_operator.objects.values import ConfigMap, Pod
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.replicas.shard import SHARDS, LeaseRecord, seat_lease, shard_lease
from perseus_operator.replicas.shards import Replica
from perseus_operator.solving.pool import SolverPool
from perseus_sim.profiles import profile_csv

NAMESPACE: Final = "training"
OTHERS: Final = "others_1"
LOOKS: Final = "perseus_operator_reconcile_seconds_count"
PATIENCE_S: Final = 600.0


class Fleet:
    """A replica, its agents, and what it used."""

    def __init__(self, size: str, shards: int, lease_ttl_s: float) -> None:
        """``size``: see ``FleetSize.of``; ``shards``: that the replica holds, of 32; others hold the rest."""
        self.size = FleetSize.of(size)
        self.wire = Wire()
        self.leases = LeaseServer()
        agents = {f"agent-{node}": (f"node-{node}", address_of(node)) for node in range(self.size.nodes)}
        pods = [_pod(job, number) for job in self.size.jobs for number in range(job.nodes)]
        self.cluster = MemoryCluster(pods, agents)
        for stages in {job.stages for job in self.size.jobs}:
            profile = {keys.PROFILE_KEY: profile_csv(stages)}
            self.cluster.config_maps[f"profile-{stages}"] = ConfigMap(f"profile-{stages}", profile, {})
        self.solver = SolverPool(workers=1, timeout_s=600.0, memory_mib=4096)
        self.metrics = Metrics()
        self._size, self._settings = size, Settings(insecure=True, namespaces=NAMESPACE, lease_ttl_s=lease_ttl_s)
        self._replicas = 0
        self._looks = 0
        """Of replicas before this one."""
        self._held = range(shards)
        self._others: asyncio.Task[None] | None = None
        for shard in range(shards, SHARDS):
            self.leases.put(LeaseRecord(shard_lease(shard), OTHERS, 1))
        if shards < SHARDS:
            self._others = asyncio.create_task(self._beat_of_others())

    async def _beat_of_others(self) -> None:
        while True:
            self.leases.put(LeaseRecord(seat_lease(1), OTHERS))
            await asyncio.sleep(0.5)

    async def connect(self) -> None:
        """Start the agents' process."""
        own, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.doubles.wire_fleet", str(theirs.fileno()), self._size]
        subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        await self.wire.connect(own)

    async def start(self) -> Operator:
        """Start the next replica."""
        self._replicas += 1
        self._looks = self.looks
        self.metrics = Metrics()
        connection, identity = LeaseConnection(self.leases), f"own_{self._replicas}"
        settings = self._settings
        services = Services(
            kube=self.cluster,  # type: ignore[arg-type]  # as far as an operator of one namespace asks
            agents=WiredPool(self.wire),
            solver=self.solver,
            metrics=self.metrics,
            epochs=Epochs(connection, identity),
            limits=settings.limits,
            namespaces=settings.namespace_list,
            status_interval_s=settings.status_interval_s,
        )
        epoch = await connection.next_epoch()
        operator = Operator(settings, self.cluster, services, Replica(connection, identity, epoch))  # type: ignore[arg-type]
        self.cluster.watch = operator.observe_job
        await operator.start()
        for job in list(self.cluster.jobs.values()):
            operator.observe_job(job)
        return operator

    def apply(self) -> None:
        """Create every PerseusJob."""
        for job in self.size.jobs:
            shape = {"stages": job.stages, "dataParallel": job.pipelines, "tensorParallel": job.tensor_parallel}
            self.cluster.apply(
                NAMESPACE,
                job.name,
                job.uid,
                {
                    "pipeline": {"schedule": "1F1B", "microbatches": MICROBATCHES, **shape},
                    "profile": {
                        "configMapRef": {"name": f"profile-{job.stages}"},
                        "blockingPowerMilliwatts": round(1000 * BLOCKING_W),
                    },
                    "baselineIterations": 0,
                },
            )

    async def until_settled(self, operator: Operator) -> None:
        """Wait until every job of this replica is Ready and commanded by it."""

        async def settled() -> bool:
            runners = operator._runners.values()
            nodes = [node for runner in runners for node in runner.job.nodes.values()]
            return bool(runners) and all(node.plans.selected for node in nodes) and self.cluster.ready() >= len(runners)

        await _until(settled)

    def used(self) -> Counter[str]:
        """Seconds of CPU, and requests and bytes by cause, since the process began."""
        found = Counter({"cpu_s": time.process_time(), "at_s": time.monotonic()})
        found += Counter({f"requests {cause}": count for cause, count in self.cluster.requests.items()})
        found += Counter({f"bytes {cause}": count for cause, count in self.cluster.bytes.items()})
        wire = self.wire
        found += Counter({f"requests {method}": count for method, count in wire.requests.items()})
        found += Counter({f"messages {method}": count for method, count in wire.messages.items()})
        found += Counter({f"bytes {m}": c for m, c in (wire.sent_bytes + wire.received_bytes).items()})
        found["looks"] = self.looks
        return found

    @property
    def looks(self) -> int:
        """Reconciliations of all replicas so far."""
        return self._looks + int(self.metrics.registry.get_sample_value(LOOKS) or 0)


def _pod(job: PlacedJob, number: int) -> Pod:
    labels, name = {keys.LABEL_JOB: job.name}, f"{job.name}-{number}"
    return Pod(f"uid-{name}", NAMESPACE, name, f"node-{job.first + number}", job.name, labels)


async def _until(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await check():
            await asyncio.sleep(1.0)


def peak_rss_mib() -> float:
    """Return the most memory that this process has had, MiB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure settle, a steady while, stragglers of the first job, and a restart."""
    fleet = Fleet(options.size, options.shards, options.lease_ttl_s)
    empty_mib = peak_rss_mib()
    await fleet.connect()
    await fleet.wire.control(ask="reports")  # the fleet's process answers
    figures: dict[str, Any] = {"empty_rss_mib": empty_mib}
    begun = fleet.used()
    operator = await fleet.start()
    fleet.apply()
    await fleet.until_settled(operator)
    figures["settle"] = _between(begun, fleet.used())
    _say(f"settled in {figures['settle']['at_s']:.1f} s")
    await fleet.wire.control(ask="train", iteration_s=options.iteration_s)
    await asyncio.sleep(max(6.0, 3 * options.iteration_s))

    begun, reports = fleet.used(), await fleet.wire.control(ask="reports")
    await asyncio.sleep(options.steady_s)
    steady = figures["steady"] = _between(begun, fleet.used())
    steady["reports"] = await fleet.wire.control(ask="reports") - reports
    figures["rss_mib"] = peak_rss_mib()
    _say(f"{steady['cpu_s'] / steady['at_s']:.1%} CPU, {1e6 * steady['cpu_s'] / steady['reports']:.0f} us a report")

    if options.stragglers:
        pause_s = 3 * options.iteration_s  # in iterations in which plans change nothing is judged
        figures["reactions"] = []
        for number in range(options.stragglers):
            await asyncio.sleep(pause_s)
            figures["reactions"].append(await _straggle(fleet, number))
    if options.restart:
        await fleet.wire.control(ask="train", iteration_s=options.iteration_s)
        await operator.close()
        begun = fleet.used()
        operator = await fleet.start()
        await fleet.until_settled(operator)
        figures["restart"] = _between(begun, fleet.used())
    return figures


async def _straggle(fleet: Fleet, number: int) -> dict[str, float]:
    """Make one pipeline of the first job slow and fast again; how the slow one was answered."""
    job = fleet.size.jobs[0]
    dp = (7 * number + 3) % job.pipelines
    ask = functools.partial(fleet.wire.control, ask="straggle", name=job.name, uid=job.uid, dp=dp)
    begun_s, sent_s, first_s, last_s, iterations, waiting = await ask(factor=1.2)
    cpu_s = fleet.wire.cpu_s(begun_s, last_s)
    await ask(factor=1.0)
    answered = f"{waiting:.0f} agents wait" if waiting else f"answered in {last_s - begun_s:.2f} s, {cpu_s:.2f} s CPU"
    _say(f"straggler {number + 1}: {answered}, in iteration {iterations:.0f}")
    return {
        "sent_s": sent_s - begun_s,
        "first_s": first_s - begun_s,
        "last_s": last_s - begun_s,
        "cpu_s": cpu_s,
        "iterations": iterations,
        "waiting": waiting,
    }


def _say(text: str) -> None:
    print(f"  fleet: {text}", file=sys.stderr, flush=True)


def _between(begun: Counter[str], ended: Counter[str]) -> dict[str, float]:
    return {name: value - begun[name] for name, value in ended.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size")
    parser.add_argument("--iteration-s", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--lease-ttl-s", type=float, default=Limits().lease_ttl_s)
    parser.add_argument("--steady-s", type=float, default=60.0)
    parser.add_argument("--stragglers", type=int, default=0)
    parser.add_argument("--restart", action="store_true")
    print(json.dumps(asyncio.run(measure(parser.parse_args()))))
