"""Objectives of a running job as agents get them: a deadline that moves, a power cap, advice alone, thresholds that
change; and a guard that a restart does not make forget."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tests.integration.operator_loop.fake_agent import ENERGY_MJ, PIPELINES, STAGES
from tests.integration.operator_loop.world import World

from perseus_sim.profiles import profile_csv

ITERATIONS = 200_000
"""Of the whole run: hours at half a second each, next to which a slow machine's minutes are nothing."""


def in_time(iterations: int, each_us: float) -> str:
    """The date by which so many iterations are done."""
    return (datetime.now(UTC) + timedelta(microseconds=iterations * each_us)).isoformat(timespec="seconds")


def deadline(finish_by: str) -> dict[str, Any]:
    return {"type": "Deadline", "deadline": {"finishBy": finish_by, "iterations": ITERATIONS}}


async def running(world: World, **changes: Any) -> list[int]:
    """Start a job without a baseline; the times of its plans."""
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(baselineIterations=0, **changes)
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    return [p.iteration_time_us for p in next(iter(world.agents[0].plan_sets.values())).points]


async def until_time(world: World, what: str, low_us: float, high_us: float) -> None:
    """Until every pipeline runs a plan that takes about as long as this."""

    async def so() -> bool:
        plans = [
            (a.point, [p.iteration_time_us for p in next(iter(a.plan_sets.values())).points]) for a in world.agents
        ]
        return all(point is not None and low_us <= times[point] <= high_us for point, times in plans)

    await world.until(what, so)


async def test_a_deadline_by_date_is_recomputed_as_the_run_goes_on(world: World) -> None:
    times = await running(world)
    t_min = times[0]
    await world.patch({"spec": {"objective": deadline(in_time(ITERATIONS, 1.1 * t_min))}})
    await until_time(world, "a tenth slower", 1.05 * t_min, 1.1 * t_min)

    # Ahead of time: the iterations that are left may take longer.
    world.iteration = ITERATIONS // 10
    await world.step(3)
    await until_time(world, "slower, since it is ahead", 1.15 * t_min, 1.1 / 0.9 * t_min)

    # Behind: the same iterations in less time.
    left = ITERATIONS - world.iteration
    await world.patch({"spec": {"objective": deadline(in_time(left, 1.05 * t_min))}})
    await until_time(world, "faster, since it is behind", t_min, 1.05 * t_min)
    await world.until_condition("PlanApplied", "True", "PlanInForce")

    # Hopeless: as fast as can be, and said.
    await world.patch({"spec": {"objective": deadline(in_time(left, 0.5 * t_min))}})
    message = await world.until_condition("PlanApplied", "True", "DeadlineOutOfReach")
    assert "iterations take at least" in message
    assert "running at T_min" in message
    assert [agent.point for agent in world.agents] == [0, 0]

    async def warned() -> bool:
        return "DeadlineOutOfReach" in await world.reasons()

    await world.until("said as an event", warned)


async def test_a_power_cap_is_met_by_the_fastest_plan_that_meets_it(world: World) -> None:
    times = await running(world)
    energies = [p.energy_mj for p in next(iter(world.agents[0].plan_sets.values())).points]
    powers_w = [1000 * PIPELINES * e / t for e, t in zip(energies, times, strict=True)]
    cap_w = round((powers_w[0] + powers_w[-1]) / 2)
    await world.patch({"spec": {"objective": {"type": "PowerCap", "powerCapWatts": cap_w}}})
    wanted = next(i for i, power_w in enumerate(powers_w) if power_w <= cap_w)
    assert 0 < wanted < len(times) - 1

    async def capped() -> bool:
        return [agent.point for agent in world.agents] == [wanted, wanted]

    await world.until("the fastest plan below the cap", capped)
    await world.patch({"spec": {"objective": {"powerCapWatts": 1}}})
    message = await world.until_condition("PlanApplied", "False", "ObjectiveInfeasible")
    assert f"1 is less than the {-(-min(powers_w) // 1):.0f} W" in message
    assert await capped(), "what was in force stays"


async def test_advice_alone_changes_nothing_and_says_what_it_would_save(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(mode="Recommend", objective={"type": "MinEnergy"})
    await world.until_condition("PlanApplied", "False", "RecommendOnly")

    async def watched() -> bool:
        return all(agent.leased and agent.readers for agent in world.agents)

    await world.until("telemetry is read", watched)
    before = (await world.job())["status"]["advised"]
    assert "energySaved" not in before, "nothing has been measured that it could be held against"
    await world.step(6)

    async def measured() -> bool:
        return "energySaved" in (await world.job())["status"]["advised"]

    await world.until("held against the baseline", measured)
    status = (await world.job())["status"]
    advised, baseline = status["advised"], PIPELINES * STAGES * ENERGY_MJ
    assert status["baseline"]["energyMillijoules"] == baseline
    saved = 100 * (1 - advised["energyMillijoules"] / baseline)
    assert float(advised["energySaved"].rstrip("%")) == round(saved, 2)
    assert advised["iterationTimeMicroseconds"] == status["frontier"]["minimumEnergyTimeMicroseconds"]
    assert "savings" not in status, "nothing was saved"
    assert f"saves {advised['energySaved']}" in (await world.condition("PlanApplied"))[2]
    assert (await world.condition("Ready"))[0] == "True"
    told = [call for agent in world.agents for call in agent.calls]
    assert not {"push", "select"} & set(told)
    assert all(agent.point is None for agent in world.agents)


async def test_thresholds_for_stragglers_are_taken_up_while_the_job_runs(world: World) -> None:
    await running(world, straggler={"slowdownThreshold": "50%", "recoveryThreshold": "40%"})
    world.slowdowns[1] = 1.2
    await world.step(6)
    assert (await world.condition("StragglerDetected"))[0] == "False"
    await world.patch({"spec": {"straggler": {"slowdownThreshold": "5%", "recoveryThreshold": "2%"}}})
    generation = (await world.job())["metadata"]["generation"]

    async def seen() -> bool:
        return (await world.job())["status"]["observedGeneration"] == generation

    await world.until("the edit is seen", seen)
    await world.step(3)
    message = await world.until_condition("StragglerDetected", "True", "StragglerDetected")
    assert "Cause: " in message

    async def announced() -> bool:
        events = await world.core.list_namespaced_event(world.namespace)
        said = [e.message for e in events.items if e.reason == "PlanChanged"]
        return any("slower than T_min on purpose" in message for message in said)

    await world.until("the slowdown of the others is announced", announced)
    assert world.operators[0].metric("perseus_job_planned_slowdown_ratio", world.namespace) > 1


async def test_a_plan_that_broke_its_bound_is_not_tried_again_because_the_operator_restarts(own_world: World) -> None:
    world = own_world
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply()
    await world.train_until_applied()
    world.slowdowns = [1.05] * PIPELINES
    await world.step(8)
    message = await world.until_condition("BoundKept", "False", "BoundExceeded")

    async def default_clocks() -> bool:
        return all(agent.point is None and agent.leased for agent in world.agents)

    await world.until("default clocks", default_clocks)
    held = (await world.job())["status"]["guard"]
    assert (held["hold"], held["trips"]) == ("DefaultClocks", 1)
    epoch = world.agents[0].epoch
    world.operators[0].child.popen.kill()
    world.operators[0].child.popen.wait()
    for agent in world.agents:
        agent.calls.clear()
    world.start()

    async def taken_over() -> bool:
        return all(agent.epoch > epoch and agent.readers for agent in world.agents)

    await world.until("taken over", taken_over)
    await world.until_condition("FrontierReady", "True", "Restored")
    await world.step(3)
    assert (await world.condition("BoundKept")) == ("False", "BoundExceeded", message)
    assert all("select" not in agent.calls and agent.point is None for agent in world.agents)
    after = (await world.job())["status"]["guard"]
    assert {**after, "sinceIteration": 0} == {**held, "sinceIteration": 0}
