"""An operator and agents that speak gRPC, in one process: a pool from nothing known to a table, through restarts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.doubles.engine_agent import EngineAgent
from tests.doubles.engine_pool import OBJECTIVE, group_of
from tests.doubles.fleet import Fleet
from tests.doubles.lease_store import LeaseConnection, LeaseServer
from tests.doubles.memory_cluster import MemoryCluster
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_core.units import mean_power_w
from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.settings import Settings
from perseus_operator.families.serving.features.comparison.switchback import BLOCK_S, switched_back
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pools.figures import PoolCounts
from perseus_operator.jobs.services import Services
from perseus_operator.objects.values import Pod
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.replicas.shards import Replica

SPEC = {"mode": "Enforce", "objective": OBJECTIVE, "clocks": {"minimumMegahertz": 1_400}}
UID = "pool-uid"
PODS = ("pod-0", "pod-1")
WALL_S = BLOCK_S * (next(block for block in range(10**7, 2 * 10**7) if not switched_back(UID, block, PODS)) + 0.5)
"""A time at which no replica is switched back for comparison."""


class World:
    """Two nodes with a pod each, and an operator that may be replaced."""

    def __init__(self, fleet: Fleet, agents: list[EngineAgent], pods: list[Pod], lease_ttl_s: float) -> None:
        self.fleet, self.agents, self.lease_ttl_s = fleet, agents, lease_ttl_s
        self.pause_s = 0.01
        """Between two windows."""
        addresses = {f"a-{agent.node}": (agent.node, f"127.0.0.1:{agent.port}") for agent in agents}
        self.cluster = MemoryCluster(pods, addresses)
        self.leases = LeaseServer()
        self.operator: Operator | None = None
        self._number = 0

    async def start(self) -> None:
        """The next operator."""
        self._number += 1
        self.metrics = Metrics()
        connection, identity = LeaseConnection(self.leases), f"own_{self._number}"
        settings = Settings(
            insecure=True, namespaces="ns", lease_ttl_s=self.lease_ttl_s, agent_timeout_s=self.lease_ttl_s / 3
        )
        services = Services(
            kube=self.cluster,  # type: ignore[arg-type]
            agents=AgentPool(None, timeout_s=settings.agent_timeout_s),
            solver=None,  # type: ignore[arg-type]
            metrics=self.metrics,
            epochs=Epochs(connection, identity),
            limits=settings.limits,
            namespaces=settings.namespace_list,
            status_interval_s=0.1,
            wall_s=lambda: WALL_S,
        )
        replica = Replica(connection, identity, await connection.next_epoch())
        self.operator = operator = Operator(settings, self.cluster, services, replica)  # type: ignore[arg-type]
        self.cluster.watch = lambda body: operator.observe_job(body, keys.POOL_KIND)
        await operator.start()
        for body in list(self.cluster.jobs.values()):
            operator.observe_job(body, keys.POOL_KIND)

    def shown(self, series: str, **more: str) -> float | None:
        """The value of a series of the pool; None: it is not exposed."""
        return self.metrics.registry.get_sample_value(series, {"job_namespace": "ns", "job_name": "pool", **more})

    def condition(self, kind: str) -> tuple[str, str]:
        status = self.cluster.jobs[UID].get("status", {})
        found = {each["type"]: each for each in status.get("conditions", ())}.get(kind, {})
        return found.get("status", ""), found.get("reason", "")

    def followers(self) -> int:
        """How many replicas follow a table."""
        held = [order for agent in self.agents for order in getattr(agent.orders.get(UID), "orders", ())]
        return sum(order.follow_table for order in held)


@asynccontextmanager
async def world(*, one_group: bool = False, lease_ttl_s: float = 15.0) -> AsyncIterator[World]:
    async with Fleet() as fleet:
        agents = [EngineAgent(f"node-{n}", fleet) for n in range(2)]
        fleet.agents.update((agent.node, agent) for agent in agents)
        for agent in agents:
            await agent.serve()
        pods = [Pod(f"pod-{n}", "ns", f"r-{n}", agent.node, "pool", {}) for n, agent in enumerate(agents)]
        if one_group:
            pods = [replace(pod, node=agent.node) for pod, agent in zip(group_of(0, 1), agents, strict=True)]
        made = World(fleet, agents, pods, lease_ttl_s)
        await made.start()
        made.cluster.apply("ns", "pool", UID, SPEC)
        serving = asyncio.create_task(_serve(made))
        try:
            yield made
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
            assert made.operator is not None
            await made.operator.close()


async def _serve(made: World) -> None:
    for number in itertools.count():
        for agent in made.agents:
            agent.window(UID, number)
        await asyncio.sleep(made.pause_s)


async def until(holds: Callable[[], Any]) -> None:
    """Wait on the event loop."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_pool_finds_its_table_and_keeps_it_through_restarts() -> None:
    async with world() as made:
        await until(lambda: made.condition("SignalsReady") == ("False", "NoSignal"))
        for number, agent in enumerate(made.agents):
            agent.start(f"pod-{number}")
        await until(lambda: made.condition("SignalsReady") == ("True", "SignalsSeen"))
        await until(lambda: made.followers() == 2)
        await until(lambda: made.condition("ClocksApplied") == ("True", "TableInForce"))
        await until(lambda: made.shown("perseus_pool_ready") == made.shown("perseus_pool_table") == 1)
        assert made.shown("perseus_pool_pods", engine="seen") == 2
        assert made.shown("perseus_pool_fits_total", verdict="Explained")
        assert made.shown("perseus_pool_generated_tokens_total")

        await made.agents[1].crash()
        await made.agents[1].serve()
        assert made.followers() == 1
        await until(lambda: made.followers() == 2)

        await until(lambda: made.cluster.profiles)
        assert made.operator is not None
        await made.operator.close()
        for agent in made.agents:
            agent.tried.clear()
        held = made.agents[0].orders[UID].epoch
        await made.start()
        await until(lambda: made.agents[0].orders[UID].epoch > held)
        await until(lambda: made.followers() == 2)
        assert set.union(*(agent.tried for agent in made.agents)) <= {0}, "no clock was tried again"

        made.operator.job_deleted(UID)
        await until(lambda: not list(made.agents[0].leases.all()))
        await until(lambda: b"perseus_pool_ready{" not in made.metrics.exposition())


async def test_the_nodes_of_one_group_are_at_one_clock_and_at_their_default_ones_without_its_leader() -> None:
    async with world(one_group=True) as made:
        leader, worker = made.agents

        def ordered() -> int:
            return leader.clock_of(UID, "pod-0", 1)

        leader.start("pod-0")
        await until(lambda: made.condition("ClocksApplied") == ("True", "TableInForce"))
        await until(lambda: 0 < worker.resting.get(UID, 0) == ordered())
        assert made.condition("Ready")[0] == "True"
        assert not leader.resting[UID], "silence is the leader's agent's to see: its lease has no clock"

        await worker.crash()
        await until(lambda: ordered() == 0)
        await worker.serve()
        await until(lambda: 0 < worker.resting.get(UID, 0) == ordered())
        assert not worker.orders, "nothing is ordered of a pod without an engine"

        leader.stop_engine("pod-0")
        await until(lambda: not worker.resting[UID])


def mean_w(counted: list[PoolCounts]) -> float:
    """Of windows whose joules are known."""
    known = [(one.energy_mj, sum(one.held_us.values())) for one in counted if one.energy_mj is not None]
    return mean_power_w(sum(energy_mj for energy_mj, _ in known), sum(time_us for _, time_us in known))


async def test_joules_of_a_group_are_those_that_all_its_agents_count(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(one_group=True, lease_ttl_s=6.0) as made:
        leader, worker = made.agents
        counted: list[PoolCounts] = []
        monkeypatch.setattr(made.metrics.pools, "count", lambda _, counts: counted.append(counts))
        worker.draws_w = 20_000.0
        made.pause_s = 0.05  # few enough windows come until the worker's lease is renewed
        leader.start("pod-0")
        await until(lambda: sum(one.energy_mj is not None for one in counted) > 60)
        leader_w = mean_w(counted) - worker.draws_w
        assert -0.2 * worker.draws_w < leader_w < 0.4 * worker.draws_w, "neither the leader's alone, nor any twice"

        worker.draws_w, made.pause_s = 0.0, 0.01
        await until(lambda: sum(one.energy_mj is None for one in counted[-60:]) == 60)
        assert all(one.generated_tokens for one in counted), "tokens count without joules"
        assert all(mean_w([one]) > 10_000 for one in counted if one.energy_mj is not None), "never half a group's"
