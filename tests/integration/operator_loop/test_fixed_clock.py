"""A job with one clock for all GPUs: no profile, no plan, and no process that need be connected."""

from __future__ import annotations

from typing import Any

from tests.integration.operator_loop.fake_agent import PIPELINES, STAGES
from tests.integration.operator_loop.world import World

FIXED = {"pipeline": None, "profile": None, "straggler": None, "points": None}


def objective(mhz: int) -> dict[str, Any]:
    return {"type": "FixedClock", "clockMegahertz": mhz}


def lock(world: World, mhz: int, *pipelines: int) -> None:
    for pipeline in pipelines:
        world.agents[pipeline].locked = {rank.gpu_uuid: mhz for rank in world.agents[pipeline].ranks}


async def until_asked(world: World, *clocks: int) -> None:
    async def asked() -> bool:
        return [agent.clock_mhz for agent in world.agents] == list(clocks)

    await world.until(f"clocks {clocks} are asked for", asked)


async def test_a_clock_is_in_force_once_every_gpu_is_locked_and_follows_edits(world: World) -> None:
    await world.apply(objective=objective(1200), **FIXED)
    await until_asked(world, 1200, 1200)
    lock(world, 1200, 0)
    await world.until_condition("PlanApplied", "False", "Applying")

    async def all_known() -> bool:
        said = (await world.condition("PlanApplied"))[2]
        return said.endswith(f"of {PIPELINES * STAGES} known GPUs are locked at 1200 MHz.")

    await world.until("the GPUs of every node are known", all_known)
    assert (await world.condition("Ready"))[0] == "False"
    lock(world, 1200, 1)
    said = await world.until_condition("PlanApplied", "True", "ClockInForce")
    assert said == "4 GPUs locked at 1200 MHz. Iterations are not measured: no slowdown is promised."
    await world.until_condition("Ready", "True", "Ready")
    job = await world.job()
    assert {"frontier", "baseline", "savings", "plan"}.isdisjoint(job["status"])
    assert "perseus.energy/planned-slowdown" not in job["metadata"].get("annotations", {})
    assert {c["type"] for c in job["status"]["conditions"]} == {
        *("Accepted", "AgentsReady", "PlanApplied", "ForeignControl", "Active", "Suspended", "Finished", "Ready")
    }

    async def counted() -> bool:
        return (await world.job())["status"]["clock"] == {"megahertz": 1200, "gpus": 4, "locked": 4}

    await world.until("the GPUs are counted", counted)

    await world.patch({"spec": {"objective": {"clockMegahertz": 900}}})
    await until_asked(world, 900, 900)
    lock(world, 900, 0, 1)
    await world.until_condition("PlanApplied", "True", "ClockInForce")
    await world.patch({"spec": {"suspend": True}})
    await until_asked(world, 0, 0)
    await world.until_condition("PlanApplied", "False", "Suspended")
    assert not any({"push", "select"} & set(agent.calls) for agent in world.agents)


async def test_what_keeps_a_clock_from_being_in_force_is_named(world: World) -> None:
    world.agents[0].too_old = True
    await world.apply(objective=objective(1200), **FIXED)
    lock(world, 1200, 1)
    said = await world.until_condition("PlanApplied", "False", "AgentRefused")
    assert said == f"The agent of node {world.agents[0].node} is too old to hold a clock without a plan: upgrade it."
    world.agents[0].too_old = False
    lock(world, 1200, 0)
    await world.until_condition("PlanApplied", "True", "ClockInForce")


async def test_a_recommending_job_sets_no_clock(world: World) -> None:
    await world.apply(objective=objective(1200), mode="Recommend", **FIXED)
    await world.until_condition("PlanApplied", "False", "RecommendOnly")
    assert [agent.clock_mhz for agent in world.agents] == [0, 0]
