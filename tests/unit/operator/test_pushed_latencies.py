"""With their plans agents get the latencies by clock under which these were rehearsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
from tests.doubles.job_hardware import job_hardware, latency
from tests.unit.operator.conftest import family_of

from perseus_core.latency import SwitchLatency
from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.controller.node_session import NodeSession
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.nodes.actions import Push
from perseus_operator.nodes.plans import StoredPlans
from perseus_proto.planset import PlanPoint, StageSchedule, decode_changes, encode_plan_set
from perseus_proto.v1alpha1 import agent_pb2, agent_pb2_grpc

A100 = "NVIDIA A100-SXM4-80GB"
QUICK, SLOW = 900, 1410
PLANS = encode_plan_set([StageSchedule(0, (1, 2), (0, 0), (0, 0))], [PlanPoint(10, 9)], [[[QUICK, 1200]]])
OTHERS = {QUICK + 15: (50_000, 90_000), SLOW: (60_000, 90_000)}


class Pushes:
    """A session with agents that store what they are sent."""

    def __init__(self, job: Any) -> None:
        self.sent: list[Mapping[int, tuple[int, int]]] = []
        self.job, self.known = job, dict[str, Any]()
        services = SimpleNamespace(
            agents=SimpleNamespace(push=self._push),
            cache=SimpleNamespace(plan_set=self._plan_set),
            epochs=SimpleNamespace(of=lambda _: 1),
        )
        shared = cast(Any, services)
        family: Any = family_of(job.state, shared)
        family._frontier = SimpleNamespace(find=self.known.get)
        family._inputs = SimpleNamespace(request=lambda: None, parsed=None)
        family._profiler = SimpleNamespace(plan_set=lambda *_: PLANS)
        self.session = NodeSession(job.state.job, shared, family=lambda: family, wake=cast(Any, None))

    async def _plan_set(self, *_: Any) -> Any:
        return PLANS

    async def _push(self, _: str, *, changes: Mapping[int, SwitchLatency], **__: Any) -> None:
        self.sent.append({mhz: (one.p50_us, one.p99_us) for mhz, one in changes.items()})

    def solved(self, digest: str, hardware: JobHardware | None) -> None:
        self.known[digest] = SimpleNamespace(view=SimpleNamespace(hardware=hardware.to_json() if hardware else ""))

    async def push(self, digest: str) -> None:
        node = self.job.nodes[0]
        await self.session._push(node, "agent", Push(node.name, frozenset({0}), digest))


async def test_agents_are_sent_what_the_pushed_frontier_was_rehearsed_under_for_the_clocks_of_its_plans(
    job: Any,
) -> None:
    """Not what is known by now: another frontier is being solved for that."""
    job.run()
    then = job_hardware(A100, 20_000, 60_000, clocks={QUICK: (8_000, 12_000), **OTHERS})
    job.state.hardware.adopted(replace(then, clocks={QUICK: latency(80_000, 120_000)}))
    pushes = Pushes(job)
    pushes.solved("first", then)
    pushes.solved("plain", replace(then, clocks={}))
    pushes.solved("never rehearsed", None)
    job.nodes[0].plans.lease_lost()
    await pushes.push("first")
    assert pushes.sent == [{QUICK: (8_000, 12_000)}]
    job.nodes[0].plans.lease_lost()
    await pushes.push("plain")
    assert pushes.sent[1:] == [{}], "it was rehearsed as if all clocks were alike"
    for digest in ("never rehearsed", "a sweep"):
        job.nodes[0].plans.lease_lost()
        await pushes.push(digest)
    assert pushes.sent[2:] == [{QUICK: (80_000, 120_000)}] * 2, "what is known now"


async def test_the_same_plans_are_sent_again_only_with_other_latencies(job: Any) -> None:
    job.run()
    hardware = job_hardware(A100, 20_000, 60_000, clocks={QUICK: (8_000, 12_000)})
    pushes = Pushes(job)
    pushes.solved("first", hardware)
    pushes.solved("second", replace(hardware, clocks={QUICK: latency(30_000, 40_000)}))
    plans = job.nodes[0].plans
    plans.stored(StoredPlans(PLANS.plan_id, "first", frozenset({0})))
    await pushes.push("first")
    assert pushes.sent == []
    await pushes.push("second")
    assert pushes.sent == [{QUICK: (30_000, 40_000)}]
    plans.lease_acquired(PLANS.plan_id, following=True)
    plans.pushed = None  # of an earlier operator, for the same frontier
    await pushes.push("second")
    assert len(pushes.sent) == 1


async def test_what_arrives_at_an_agent_is_what_the_operator_knows() -> None:
    received: list[agent_pb2.PushPlanSetRequest] = []
    sent = {mhz: latency(*times) for mhz, times in OTHERS.items()}

    class Agent(agent_pb2_grpc.AgentServicer):
        async def PushPlanSet(self, request: Any, context: Any) -> Any:
            received.append(request)
            return agent_pb2.PushPlanSetResponse(plan_id=request.plan_set.plan_id)

    server = grpc.aio.server()
    agent_pb2_grpc.add_AgentServicer_to_server(Agent(), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pool = AgentPool(None, timeout_s=10.0)
    try:
        await pool.push(f"127.0.0.1:{port}", job_uid="u", epoch=1, plan_set=PLANS, changes=sent)
    finally:
        await pool.close()
        await server.stop(None)
    changes = decode_changes(received[0].changes)
    assert {mhz: (one.p50_us, one.p99_us) for mhz, one in changes.items()} == OTHERS
    assert received[0].plan_set == PLANS
