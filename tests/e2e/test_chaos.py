"""Faults while users edit jobs. After each fault every GPU's clock is its plan's, or the default.

The faults: killed operators and agents, an API server that is stopped or killed, agents that are slow, cut off or send
false data, and two operators at the same time. The tests run on the real API server; where it is not built, or is a
given cluster in which tests must not make nodes, they run on the embedded one. Random choices come from PERSEUS_SEED,
which a failure prints.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import chaos
from tests.chaos import ITERATION_S, Subject
from tests.doubles.fleet_cluster import Operator
from tests.doubles.light_agent import LightAgent
from tests.replicas import Replicas

from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_sim.cluster.api_servers import Server
from perseus_sim.cluster.control_plane import NoControlPlane, find_assets

SEED = int(os.environ.get("PERSEUS_SEED", "11"))
OUTAGE_S = float(os.environ.get("PERSEUS_OUTAGE_S", "35"))
"""Longer than the timeout of any request of the operator."""
PLANS: list[dict[str, Any]] = [{"type": "MinEnergy"}, {"type": "MaxThroughput"}]
TTL_S = float(chaos.FLAGS[chaos.FLAGS.index("--lease-ttl-s") + 1])


def best_server() -> str:
    """Return the real server where the tests can start it, else the embedded one."""
    if "KUBECONFIG_E2E" in os.environ:
        return "embedded"
    try:
        find_assets()
    except NoControlPlane:
        return "embedded"
    return "real"


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.parametrize("server", [best_server()], indirect=True),
]


@pytest.fixture
async def world(server: Server, crd: Any, operator_kubeconfig: Path, tmp_path: Path) -> AsyncIterator[chaos.World]:
    """Two jobs on three nodes, one of which they share, and an operator. All plans are in force."""
    logins = {"admin": server.kubeconfig, "operator": operator_kubeconfig}
    namespace = f"chaos-{uuid.uuid4().hex[:8]}"
    async with chaos.world(**logins, folder=tmp_path, namespace=namespace, seed=SEED, secure=True) as world:
        await world.cluster.start_operator(*chaos.FLAGS)
        await world.add("ada", "bell")
        await world.settle("at the start")
        yield world
        for operator in world.cluster.operators:
            assert "unexpected error" not in operator.log, operator.log[-4000:]


def agents_of(world: chaos.World, subject: Subject) -> list[LightAgent]:
    return [world.fleet.agents[node] for node in subject.nodes]


async def disturb(world: chaos.World, *, served: bool = True) -> None:
    """Make a valid edit of one job, and change the plan of the other, whose clocks must be set all the time."""
    ada, bell = world.subjects
    await world.edit(ada, objective=next(o for o in PLANS if o != ada.spec["objective"]))
    if served or bell.exists:
        await world.move(bell, served=served)


def at_default(world: chaos.World, subject: Subject) -> bool:
    return world.not_default(subject) == ""


async def test_any_valid_edits_in_any_order(world: chaos.World) -> None:
    for _ in range(30):
        await world.move()
        if world.dice.random() < 0.5:  # otherwise the next edit comes while the operator still works on this one
            await world.settle("between edits")
    await world.settle("at the end")


async def test_operators_and_agents_killed_at_any_moment(world: chaos.World) -> None:
    dice, cluster = world.dice, world.cluster
    for _ in range(4):
        await disturb(world)
        await asyncio.sleep(dice.uniform(0, 1.5))
        if dice.random() < 0.6:
            world.done.append("operator killed")
            await asyncio.to_thread(cluster.operators[-1].kill)
            await disturb(world, served=False)
            await cluster.start_operator(*chaos.FLAGS)
        agent = dice.choice(list(world.fleet.agents.values()))
        world.done.append(f"agent {agent.node} killed")
        await agent.crash()
        await asyncio.sleep(dice.uniform(0, 1))
        await agent.serve()
        await world.settle("after kills")


async def test_a_stopped_api_server_changes_no_clock_and_nothing_is_missed(world: chaos.World, server: Server) -> None:
    if server.plane is None:
        pytest.skip("the embedded server has no processes that a test may stop")
    ada, bell = world.subjects
    await world.edit(ada, objective={"type": "MinEnergy"})
    await world.settle("MinEnergy")
    before = {subject.name: world.fleet.plans(subject.training) for subject in world.subjects if subject.training}

    def undisturbed(*names: str) -> None:
        for subject in world.subjects:
            if subject.name in names and subject.training is not None:
                assert world.fleet.plans(subject.training) == before[subject.name], subject.name

    api = server.plane.children["kube-apiserver"]
    api.signal(signal.SIGSTOP)
    try:
        until_s = time.monotonic() + OUTAGE_S
        while time.monotonic() < until_s:
            undisturbed("ada", "bell")
            await asyncio.sleep(0.1)
        # The operator reacts to a straggler without an API server.
        assert bell.training is not None
        bell.training.slowdowns[1] = 1.2
        healthy = [rank for rank in before["bell"] if rank.dp == 0]
        await world.until(
            "the healthy pipeline slowed",
            lambda: all(world.fleet.plans(bell.training)[r] not in (None, before["bell"][r]) for r in healthy),  # type: ignore[arg-type]
        )
        undisturbed("ada")
        bell.training.slowdowns.clear()
    finally:
        api.signal(signal.SIGCONT)
    await asyncio.to_thread(server.plane.await_ready, "kube-apiserver")
    await world.edit(bell, objective={"type": "MaxSlowdown", "maxSlowdown": "5%"})
    await world.settle("after the stop")

    before = {"ada": world.fleet.plans(ada.training)} if ada.training else {}
    server.plane.kill("kube-apiserver")
    for _ in range(round(3 * TTL_S / 0.1 / 2)):
        undisturbed("ada")
        await asyncio.sleep(0.1)
    server.plane.start("kube-apiserver", wait=False)
    await asyncio.to_thread(server.plane.await_ready, "kube-apiserver")
    await world.edit(ada, mode="Recommend")
    await world.delete(bell)
    await world.settle("after the kill")


async def test_agents_that_are_cut_off_or_slow_concern_their_own_jobs_alone(world: chaos.World) -> None:
    ada, bell = world.subjects
    assert ada.training is not None
    alone = world.fleet.agents[ada.nodes[0]]  # bell has no pods there

    alone.faults.partitioned = True
    await world.until("its lease ran out", lambda: not any(alone.plans(ada.training).values()))  # type: ignore[arg-type]
    await world.edit(bell, objective={"type": "MinEnergy"})
    await world.until("bell's new plan", lambda: in_force(world, bell))
    await world.until("ada's status names the node", lambda: names_unavailable(world, ada, alone.node))
    alone.faults.partitioned = False
    await world.settle("after the partition")

    alone.faults.delay_s = 5.0
    await world.until("its lease ran out", lambda: not any(alone.plans(ada.training).values()))  # type: ignore[arg-type]
    await world.edit(bell, objective={"type": "MaxThroughput"})
    await world.until("bell's new plan", lambda: in_force(world, bell))
    alone.faults.delay_s = 0.0
    await world.settle("after the slowness")

    for agent in world.fleet.agents.values():  # the operator reaches no agent any more
        agent.faults.partitioned = True
    await world.until("default clocks everywhere", lambda: all(at_default(world, s) for s in world.subjects))
    for agent in world.fleet.agents.values():
        agent.faults.partitioned = False
    await world.settle("after the great partition")


async def names_unavailable(world: chaos.World, subject: Subject, node: str) -> bool:
    job = await world.find(subject)
    assert job is not None
    agents = next(c for c in job["status"]["conditions"] if c["type"] == "AgentsReady")
    return (agents["status"], agents["reason"]) == ("False", "AgentUnavailable") and node in agents["message"]


async def in_force(world: chaos.World, subject: Subject) -> bool:
    return not await world.mismatch(subject)


# ------------------------------------------------------------------------------------------------------------ lies

HUGE = 2**64 - 1


def rubbish(dice: Any) -> Callable[[Any], Any]:
    """Return a rewriter that makes telemetry false. The wire format cannot carry NaN and negative numbers."""

    def rewrite(message: Any) -> Any:
        if not isinstance(message, pb.TelemetryBatch):
            return message
        events = list(message.events)
        for event in events:
            if not event.HasField("iteration"):
                continue
            report = event.iteration
            match dice.randrange(9):
                case 0:
                    report.iteration_time_us = report.compute_span_us = HUGE
                case 1:
                    report.iteration_time_us = report.compute_span_us = 0
                case 2:
                    report.energy_mj = HUGE
                case 3:
                    report.iteration = HUGE
                case 4:
                    report.iteration = 0
                case 5:
                    report.data_parallel_rank, report.stage, report.tensor_parallel_rank = 2**32 - 1, 10**6, 10**6
                case 6:
                    report.point, report.planned, report.plan_id = 2**32 - 1, True, "no such plan"
                case 7:
                    report.durations_us[:] = [0] * 3 if dice.random() < 0.5 else [2**32 - 1] * len(report.durations_us)
                case 8:
                    events.append(event)
        dice.shuffle(events)
        return pb.TelemetryBatch(dropped=dice.choice([0, HUGE]), events=events)

    return rewrite


def wrong_leases(dice: Any) -> Callable[[Any], Any]:
    """Return a rewriter that reports leases of other epochs and plans that the agent does not have."""

    def rewrite(message: Any) -> Any:
        if isinstance(message, pb.Lease):
            message.epoch = dice.choice([0, 1, HUGE])
            message.plan_id = dice.choice(["", "0" * 64, "not hexadecimal"])
            message.remaining_ms = dice.choice([0, 2**32 - 1])
            del message.selections[:]
            message.selections.add(data_parallel_rank=dice.choice([0, 1, 2**32 - 1]), point=dice.choice([3, 2**32 - 1]))
        if isinstance(message, pb.SelectPlanResponse):
            message.furthest_iteration = dice.choice([0, HUGE])
        if isinstance(message, pb.PushPlanSetResponse):
            message.plan_id = "something else"
        return message

    return rewrite


def wrong_nodes(dice: Any) -> Callable[[Any], Any]:
    """Return a rewriter that reports ranks twice, with wrong ids or foreign pods, and clocks that were never set."""

    def rewrite(message: Any) -> Any:
        if isinstance(message, pb.NodeDescription):
            for rank in list(message.ranks):
                match dice.randrange(4):
                    case 0:
                        message.ranks.append(rank)
                    case 1:
                        rank.stage = 2**32 - 1
                    case 2:
                        rank.pod_uid = "another pod"
                    case 3:
                        rank.iteration = HUGE
            for gpu in message.gpus:
                gpu.locked_clock_mhz = gpu.current_clock_mhz = dice.choice([0, 2**32 - 1])
                gpu.uuid = dice.choice([gpu.uuid, "", "GPU-" + "x" * 10_000])
        return message

    return rewrite


async def test_a_lying_agent_harms_its_own_job_alone(world: chaos.World) -> None:
    ada, bell = world.subjects
    liar = world.fleet.agents[ada.nodes[0]]  # bell has no pods there
    objectives: Iterator[dict[str, Any]] = itertools.cycle(PLANS)
    for lie in (rubbish, wrong_leases, wrong_nodes):
        world.done.append(lie.__name__)
        liar.faults.rewrite = lie(world.dice)
        until_s = time.monotonic() + TTL_S
        for objective in itertools.islice(objectives, 2):
            await world.edit(ada, objective=objective)
            await world.edit(bell, objective=objective)
            await world.until("bell's new plan", lambda: in_force(world, bell))
        while time.monotonic() < until_s:
            await asyncio.sleep(ITERATION_S)
            assert not await world.mismatch(bell)
        await world.until("ada's status up to date", lambda: is_seen(world, ada))
        assert await asyncio.to_thread(world.cluster.operators[0].scrape, "/healthz") == "ok"
        liar.faults.rewrite = lambda message: message
        await world.settle("after the false messages")


async def is_seen(world: chaos.World, subject: Subject) -> bool:
    job = await world.find(subject)
    return job is not None and job["status"].get("observedGeneration") == job["metadata"]["generation"]


def commanded_by(world: chaos.World, epoch: int) -> bool:
    """Return whether this operator has the leases of all jobs that train and are not suspended."""
    served = [s for s in world.subjects if s.exists and s.training and not s.spec.get("suspend")]
    leases = [agent.lease_of(s.training) for s in served if s.training for agent in agents_of(world, s)]
    assert leases, "nothing to command"
    return all(lease is not None and lease.epoch == epoch for lease in leases)


async def alone_in_command(world: chaos.World, epoch: int) -> None:
    """Wait until one operator has all leases, and check that it keeps them for a lease's time.

    In that time every operator that believes that it has a lease renews it three times.
    """
    await world.until(f"epoch {epoch} in command", lambda: commanded_by(world, epoch))
    until_s = time.monotonic() + TTL_S
    while time.monotonic() < until_s:
        assert commanded_by(world, epoch)
        await asyncio.sleep(0.05)


async def test_of_several_operators_only_the_newest_commands(world: chaos.World) -> None:
    cluster = world.cluster
    older = cluster.operators[0]
    newer = await cluster.start_operator(*chaos.FLAGS)
    assert newer.epoch > older.epoch
    for _ in range(4):
        await disturb(world)
    await world.settle("with two operators")
    await alone_in_command(world, newer.epoch)

    # An operator that was stopped while a newer one started goes on and believes that it commands the agents.
    newer.child.signal(signal.SIGSTOP)
    third = await cluster.start_operator(*chaos.FLAGS)
    await disturb(world)
    await world.settle("while one is stopped")
    newer.child.signal(signal.SIGCONT)
    for _ in range(3):
        await disturb(world)
        await world.settle("after it went on")
    await alone_in_command(world, third.epoch)
    await asyncio.to_thread(third.kill)
    await cluster.start_operator(*chaos.FLAGS)
    await disturb(world)
    await world.settle("after the last was killed")


def stop(operator: Operator) -> None:
    """As a rollout does it."""
    assert operator.child.stop() == 0


async def test_replicas_follow_each_other_and_no_gpu_leaves_its_plan(world: chaos.World) -> None:
    dice, cluster = world.dice, world.cluster
    await asyncio.to_thread(cluster.operators[0].kill)  # it serves alone, and under the host's name
    replicas = Replicas(cluster, (*chaos.FLAGS, "--peer-address", "127.0.0.1:0", "--web-address", "127.0.0.1:0"))
    await replicas.start(3)
    await world.settle("with three replicas")
    paths = [f"/api/jobs/{cluster.namespace}/{subject.name}" for subject in world.subjects]
    for name, operator in replicas.living.items():
        # Plans were in force all the time, so all is settled before a replica has read the frontiers it takes over.
        async def whole(page: Callable[[str], Any] = operator.page) -> bool:
            return all([(await asyncio.to_thread(page, path))["frontier"] for path in paths])

        await world.until(f"every job shown whole by {name}", whole)
    before, lost = (
        [world.fleet.plans(subject.training) for subject in world.subjects if subject.training],
        replicas.leases_lost,
    )
    for number in range(4):
        name = dice.choice(sorted(replicas.living))
        end = (Operator.kill, stop)[number % 2]
        world.done.append(f"{name} {end.__name__}")
        await replicas.end(name, end)
        assert [world.fleet.plans(subject.training) for subject in world.subjects if subject.training] == before
        await replicas.start()
    assert replicas.leases_lost == lost, "leases outlast a change of replicas"

    frozen = dice.choice(sorted(replicas.living))
    world.done.append(f"{frozen} stopped")
    replicas.living[frozen].child.signal(signal.SIGSTOP)
    await disturb(world)
    await world.settle("while one is stopped")
    replicas.living[frozen].child.signal(signal.SIGCONT)
    for _ in range(3):
        await disturb(world)
        await world.settle("after it went on")
    await replicas.start(0)
    await world.settle("with three replicas again")
