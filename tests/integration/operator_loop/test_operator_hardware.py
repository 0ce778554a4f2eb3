"""Plans follow the GPUs: rehearsed for what is assumed, again for what is learned, and restored as they were."""

from __future__ import annotations

from typing import Any

import pytest
from tests.integration.operator_loop.fake_agent import STAGES
from tests.integration.operator_loop.world import World

from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_sim.profiles import profile_csv

A100 = "NVIDIA A100-SXM4-80GB"
TEN_PERCENT = {"type": "MaxSlowdown", "maxSlowdown": "10%"}


def describe(world: World, *, model: str = A100, latency: pb.ClockLatency | None = None) -> None:
    for agent in world.agents:
        agent.model, agent.latency = model, latency


async def status(world: World) -> dict[str, Any]:
    found: dict[str, Any] = (await world.job()).get("status", {})
    return found


async def planned_as(world: World, *grains: str) -> dict[str, Any]:
    """The status, once a plan of one of these grains is in force."""

    async def arrived() -> bool:
        return (await status(world)).get("plan", {}).get("grain") in grains

    await world.until(f"a plan of grain {grains}", arrived)
    return await status(world)


async def test_a_job_on_an_a100_gets_a_rehearsed_plan(world: World) -> None:
    describe(world)
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective=TEN_PERCENT)
    await world.train_until_applied()
    found = await planned_as(world, "Instruction", "Segment", "Stage")
    hardware, plan = found["hardware"], found["plan"]
    assert hardware["gpu"] == A100
    assert (hardware["figures"], hardware["marks"]) == ("Assumed", "Unknown")
    assert hardware["source"].startswith("published")
    assert plan["reason"].startswith("Clock changes are assumed to take 5.4 ms and instructions ")
    assert float(plan["expectedSavings"].rstrip("%")) > 5
    assert plan["expectedIterationTimeMicroseconds"] <= plan["keptIterationTimeMicroseconds"]

    async def in_force() -> bool:
        now = await status(world)
        return bool(now["predicted"]["iterationTimeMicroseconds"] == now["plan"]["expectedIterationTimeMicroseconds"])

    await world.until("what is expected of the plan is predicted", in_force)
    assert world.operators[-1].metric("perseus_job_switch_latency_median_seconds", world.namespace) == 0.0054


async def test_plans_become_coarser_when_hosts_are_seen_to_run_ahead(world: World) -> None:
    describe(world)
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective=TEN_PERCENT)
    await world.train_until_applied()
    before = await status(world)
    assert before["plan"]["clockChanges"] > 0
    for agent in world.agents:
        agent.followed = {
            "marks": pb.MARK_SOURCE_HOST,
            "control": pb.CLOCK_CONTROL_HELD,
            "leads_us": [40_000, 50_000],
            "median_clock_mhz": 1200,
        }
    await world.step(15)
    found = await planned_as(world, "Stage", "None")
    assert found["hardware"]["marks"] == "Host"
    assert found["hardware"]["medianLeadMicroseconds"] == 45_000
    assert found["plan"]["clockChanges"] == 0
    assert "GPU times are not known" in found["plan"]["reason"]
    assert found["frontier"]["digest"] != before["frontier"]["digest"]
    await world.until_condition("PlanApplied", "True", "PlanInForce")


async def test_changes_that_are_measured_to_take_long_lead_to_coarser_plans(own_world: World) -> None:
    describe(own_world)
    await own_world.profile({"profile.csv": profile_csv(STAGES, forward_s=0.036)})
    await own_world.apply(objective=TEN_PERCENT, baselineIterations=0)
    await planned_as(own_world, "Instruction")
    # Longer than an iteration: hardly a clock that changes is worth anything.
    slow = pb.ClockLatency(p50_us=1_200_000, p99_us=6_000_000, call_p50_us=4_500, changes=1000, shared_lock=True)
    describe(own_world, latency=slow)
    # The next renewal of the leases, after a third of their time, describes the GPUs again.
    found = await planned_as(own_world, "Segment", "Stage", "None")
    assert found["hardware"]["figures"] == "Measured"
    assert found["hardware"]["switchLatencyMedianMicroseconds"] == pytest.approx(1_200_000, rel=0.15)
    await own_world.until_condition("PlanApplied", "True", "PlanInForce")
    solves = own_world.operators[-1].metric("perseus_operator_solves_total", "solved")

    # A later operator finds this frontier: it goes on with the hardware that the status says.
    own_world.operators[0].child.popen.kill()
    own_world.operators[0].child.popen.wait()
    own_world.start()
    await own_world.until_condition("FrontierReady", "True", "Restored")
    assert own_world.operators[-1].metric("perseus_operator_solves_total") == 0
    assert solves >= 2
    again = await status(own_world)
    assert again["hardware"] == found["hardware"]
    assert again["frontier"]["digest"] == found["frontier"]["digest"]


async def test_the_guard_names_what_the_agents_report(world: World) -> None:
    describe(world)
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective=TEN_PERCENT)
    await world.train_until_applied()
    for agent in world.agents:
        agent.followed = {
            "marks": pb.MARK_SOURCE_GPU,
            "control": pb.CLOCK_CONTROL_TIMETABLE,
            "power_limited": True,
            "median_clock_mhz": 1335,
        }
    world.overhead_us = 200_000
    await world.step(8)
    message = await world.until_condition("BoundKept", "False", "BoundExceeded")
    assert "Cause: the power limit holds clocks at 1,335 MHz" in message
    guard = (await status(world))["guard"]
    assert guard["cause"] == "PowerLimit"
    assert "1,335 MHz" in guard["evidence"]

    async def told() -> bool:
        return "BoundExceeded" in await world.reasons()

    await world.until("an event", told)
