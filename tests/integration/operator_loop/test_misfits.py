"""Training processes that do not fit the pipeline of their PerseusJob have one clock for whole iterations."""

from __future__ import annotations

from typing import Any

from tests.integration.operator_loop.fake_agent import CLOCKS_MHZ, MODEL, STAGES, STEP
from tests.integration.operator_loop.world import World

from perseus_core import keys
from perseus_proto.v1alpha1 import agent_pb2 as pb
from perseus_sim.profiles import profile_csv

SWEPT_MHZ = CLOCKS_MHZ[-1::-9]
"""Few, so that a sweep is short."""


async def begin(world: World) -> None:
    """A job whose profile is given, of GPUs whose clocks are known."""
    for agent in world.agents:
        agent.model, agent.clocks_mhz = "NVIDIA A100-SXM4-80GB", sorted(SWEPT_MHZ)
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective={"type": "MinEnergy"})


def pipelines(world: World) -> None:
    """Every rank is in its place and executes the pipeline's schedule."""
    for agent in world.agents:
        for stage, rank in enumerate(agent.ranks):
            rank.data_parallel_rank, rank.stage = agent.pipeline, stage
            kinds, microbatches, chunks = MODEL.problem.schedule.columns(stage)
            agent.declared[rank.pid] = pb.StageSchedule(kinds=kinds, microbatches=microbatches, chunks=chunks)


def restart(world: World) -> None:
    """All processes are new, and count their iterations from their own start."""
    world.iteration = 0
    for agent in world.agents:
        agent.iteration, agent.declared = -1, {}
        for rank in agent.ranks:
            rank.pid += 1000


async def train_until(world: World, reason: str) -> str:
    async def applied() -> bool:
        await world.step()
        return (await world.condition("PlanApplied"))[:2] == ("True", reason)

    await world.until(f"a plan in force with reason {reason}", applied)
    return (await world.condition("PlanApplied"))[2]


async def status(world: World) -> dict[str, Any]:
    found: dict[str, Any] = (await world.job())["status"]
    return found


async def test_ranks_that_mark_whole_iterations_get_one_clock_and_the_job_says_so(world: World) -> None:
    for agent in world.agents:  # as a launcher numbers them: each is a pipeline of its own
        for number, rank in enumerate(agent.ranks):
            rank.data_parallel_rank, rank.stage = STAGES * agent.pipeline + number, 0
            agent.declared[rank.pid] = STEP
    await begin(world)
    await world.until_condition("PlanApplied", "False", "RanksMismatch")
    said = await train_until(world, "RanksMismatch")
    assert "spec.pipeline has 2 (dp) × 2 (stages) × 1 (tp). So whole iterations are planned" in said
    assert "one clock for all 4 ranks" in said
    assert len({(agent.plan_id, agent.point) for agent in world.agents}) == 1
    clock_mhz = world.agents[0].whole_mhz
    assert clock_mhz is not None
    assert clock_mhz < SWEPT_MHZ[0], "least energy is not at the highest clock"
    found = await status(world)
    shape = found["shape"]
    assert (shape["schedule"], shape["stages"], shape["tensorParallel"]) == ("Steps", 1, 4)
    assert shape["misfit"] in said
    assert "One clock for whole iterations" in (await world.condition("Ready"))[2]

    async def measured() -> bool:
        await world.step()
        return "savings" in await status(world)

    await world.until("what it saves is measured", measured)
    profile = await world.stored(keys.PROFILE_PLURAL, "gpt3-steps")
    assert "0,step," in profile["spec"]["csv"]
    assert profile["metadata"]["ownerReferences"][0]["name"] == "gpt3", "no other job is meant by it"
    assert "RanksMismatch" in await world.reasons()


async def test_ranks_that_fit_again_run_plans_of_their_pipeline(world: World) -> None:
    pipelines(world)
    for rank in world.agents[1].ranks:  # on this node the instructions of a graph are not seen
        world.agents[1].declared[rank.pid] = STEP
    await begin(world)
    said = await train_until(world, "RanksMismatch")
    assert "2 of 4 processes mark whole iterations alone" in said
    assert all(agent.whole_mhz == world.agents[0].whole_mhz for agent in world.agents)

    restart(world)
    pipelines(world)
    said = await train_until(world, "PlanInForce")
    assert "whole iterations" not in said
    found = await status(world)
    assert "shape" not in found
    assert all(agent.whole_mhz is None for agent in world.agents)
    assert (await world.condition("ProfileReady"))[0] == "True"
