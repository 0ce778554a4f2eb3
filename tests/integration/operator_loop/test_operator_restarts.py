"""Operators and agents that die, stop, come back, or are two; and a job that was taken from the operator's hands."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import kubernetes.aio.client as k8s
from tests.integration.operator_loop.fake_agent import GROUP, STAGES
from tests.integration.operator_loop.world import World

from perseus_core import keys
from perseus_sim.profiles import profile_csv


async def test_a_restarted_operator_takes_over_without_solving_again(own_world: World) -> None:
    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply()
    await own_world.train_until_applied()
    before, epoch = await own_world.job(), own_world.agents[0].epoch
    own_world.operators[0].child.popen.kill()
    own_world.operators[0].child.popen.wait()
    for agent in own_world.agents:
        agent.calls.clear()

    own_world.start()

    async def taken_over() -> bool:
        return all(agent.epoch > epoch and "renew" in agent.calls for agent in own_world.agents)

    await own_world.until("taken over", taken_over)
    await own_world.step(2)
    await own_world.until_condition("FrontierReady", "True", "Restored")
    assert own_world.operators[-1].metric("perseus_operator_solves_total") == 0
    assert own_world.operators[-1].metric("perseus_operator_frontiers_restored_total") == 1
    assert all("push" not in agent.calls for agent in own_world.agents), "the agents hold the plans already"
    after = await own_world.job()
    assert after["status"]["baseline"] == before["status"]["baseline"]
    await own_world.until_condition("Ready", "True", "Ready")


async def test_clocks_that_an_operator_before_set_are_given_back_if_they_may_not_be_set_any_more(
    own_world: World,
) -> None:
    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply(baselineIterations=0)
    await own_world.until_condition("PlanApplied", "True", "PlanInForce")
    own_world.operators[0].child.popen.kill()
    own_world.operators[0].child.popen.wait()
    assert all(agent.point is not None for agent in own_world.agents)
    await own_world.patch({"spec": {"mode": "Recommend"}})
    own_world.start()

    async def given_back() -> bool:
        return all(agent.point is None and agent.leased for agent in own_world.agents)

    await own_world.until("given back", given_back)
    await own_world.until_condition("PlanApplied", "False", "RecommendOnly")


async def test_a_frontier_stored_for_an_earlier_job_of_the_same_name_is_replaced(own_world: World) -> None:
    """Its owner has gone, so it will be collected, though it is just what this job needs."""

    async def owners() -> list[str]:
        kept = await own_world.stored(keys.FRONTIER_PLURAL, "gpt3")
        return [owner["uid"] for owner in kept["metadata"]["ownerReferences"]]

    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply()
    await own_world.until_condition("FrontierReady", "True", "Solved")
    uid = (await own_world.job())["metadata"]["uid"]
    assert await owners() == [uid]
    own_world.operators[0].child.popen.kill()
    own_world.operators[0].child.popen.wait()
    other = await own_world.core.read_namespaced_config_map("profile", own_world.namespace)
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "profile", "uid": other.metadata.uid}
    await own_world.custom.patch_namespaced_custom_object(
        *GROUP,
        own_world.namespace,
        keys.FRONTIER_PLURAL,
        "gpt3",
        {"metadata": {"ownerReferences": [owner]}},
        _content_type="application/merge-patch+json",
    )
    own_world.start()

    async def kept_anew() -> bool:
        return await owners() == [uid]

    await own_world.until("kept for this job", kept_anew)
    await own_world.until_condition("FrontierReady", "True", "Restored")


async def test_an_agent_that_dies_is_leased_again_and_gets_its_plans(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective={"type": "MinEnergy"})
    await world.train_until_applied()
    agent = world.agents[0]
    point = agent.point
    assert point
    await agent.die()
    await agent.serve()

    async def told_again() -> bool:
        return agent.leased and agent.point == point

    await world.until("leased and told again", told_again)
    assert world.agents[1].point == point


async def test_a_plan_is_not_in_force_where_a_lease_has_run_out(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective={"type": "MinEnergy"})
    await world.train_until_applied()
    await world.agents[0].die()
    await world.until_condition("Ready", "False", "AgentUnavailable")
    assert (await world.condition("PlanApplied"))[0] == "True", "its node may hold the plan until the lease ends"
    await world.until_condition("PlanApplied", "False", "AgentUnavailable")
    await world.agents[0].serve()
    await world.until_condition("PlanApplied", "True", "PlanInForce")


async def test_of_two_operators_the_newer_commands_and_the_older_keeps_still(own_world: World) -> None:
    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply(baselineIterations=0)
    await own_world.until_condition("PlanApplied", "True", "PlanInForce")
    own_world.start()
    older, newer = own_world.operators

    async def taken_over() -> bool:
        replaced = "this one serves no more jobs" in older.log
        return replaced and all(agent.epoch == newer.epoch for agent in own_world.agents)

    await own_world.until("taken over", taken_over)
    await own_world.patch({"spec": {"objective": {"type": "MinEnergy"}}})

    async def changed() -> bool:
        return all(agent.point for agent in own_world.agents)

    await own_world.until("the newer one's plan", changed)
    await own_world.until_condition("Ready", "True", "Ready")
    assert "unexpected error" not in older.log + newer.log


async def test_a_counter_of_epochs_that_was_lost_is_raised_above_what_agents_have_seen(own_world: World) -> None:
    own_world.agents[0].epoch, own_world.agents[1].epoch = 57, 60  # of operators that no counter knows any more
    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply(baselineIterations=0)
    await own_world.until_condition("PlanApplied", "True", "PlanInForce")
    assert len({agent.epoch for agent in own_world.agents}) == 1
    raised = own_world.agents[0].epoch
    assert raised > 60
    leases = k8s.CoordinationV1Api(own_world.api)
    counter = await leases.read_namespaced_lease("perseus-epoch", own_world.system)
    assert counter.spec.lease_transitions == raised
    own_world.start()
    assert own_world.operators[-1].epoch == raised + 1, "the next operator counts on from it"

    async def followed() -> bool:
        return all(agent.epoch == raised + 1 for agent in own_world.agents)

    await own_world.until("commanded by the next operator", followed)


async def test_a_stopped_operator_leaves_the_leases_to_the_next(own_world: World) -> None:
    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply(baselineIterations=0)
    await own_world.until_condition("PlanApplied", "True", "PlanInForce")
    await own_world.until_condition("Ready", "True", "Ready")
    (operator,) = own_world.operators
    assert await asyncio.to_thread(operator.child.stop) == 0
    assert all(agent.leased and "release" not in agent.calls for agent in own_world.agents)
    assert (await own_world.condition("Ready"))[0] == "True", "leaving is no news about the job"
    log = operator.log
    assert "Traceback" not in log, log


async def test_a_deletion_waits_for_no_operator(own_world: World) -> None:
    await own_world.profile({"profile.csv": profile_csv(STAGES)})
    await own_world.apply(baselineIterations=0)
    await own_world.until_condition("PlanApplied", "True", "PlanInForce")
    (operator,) = own_world.operators
    operator.child.signal(signal.SIGKILL)
    assert "finalizers" not in (await own_world.job())["metadata"]
    await own_world.custom.delete_namespaced_custom_object(*GROUP, own_world.namespace, keys.PLURAL, "gpt3")
    assert not await jobs(own_world)


async def test_a_job_that_others_hold_while_it_is_deleted_is_released_at_once(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(baselineIterations=0)
    await world.patch({"metadata": {"finalizers": ["tests.perseus.energy/hold"]}})
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    await world.custom.delete_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL, "gpt3")

    async def released() -> bool:
        return not any(agent.leased for agent in world.agents)

    try:
        await world.until("released", released)
        assert (await world.job())["metadata"]["deletionTimestamp"]
    finally:
        await world.patch({"metadata": {"finalizers": None}})


async def test_the_finalizer_of_releases_before_is_removed(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(baselineIterations=0)
    await world.patch({"metadata": {"finalizers": [keys.FINALIZER]}})

    async def removed() -> bool:
        return "finalizers" not in (await world.job())["metadata"]

    await world.until("the finalizer is removed", removed)


async def jobs(world: World) -> list[Any]:
    found = await world.custom.list_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL)
    return list(found["items"])
