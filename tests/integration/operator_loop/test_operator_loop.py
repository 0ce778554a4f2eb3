"""A job's life under the operator: profile, plan, straggler, bound, calibration, bad input, deletion."""

from __future__ import annotations

from functools import partial

import pytest
from tests.integration.operator_loop.fake_agent import ENERGY_MJ, GROUP, PIPELINES, STAGES, FakeAgent
from tests.integration.operator_loop.world import World

from perseus_core import keys
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.errors import KubeConflict
from perseus_sim.profiles import profile_csv


async def test_a_job_from_its_manifest_to_its_deletion(world: World) -> None:
    await world.apply()
    message = await world.until_condition("ProfileReady", "False", "ConfigMapNotFound")
    assert (
        message == f"spec.profile.configMapRef.name: ConfigMap profile does not exist in namespace {world.namespace}."
    )
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.train_until_applied()

    job = await world.job()
    status = job["status"]
    assert status["observedGeneration"] == job["metadata"]["generation"]
    assert [agent.point for agent in world.agents] == [0, 0], "MaxThroughput is T_min on every pipeline"
    assert status["baseline"]["energyMillijoules"] == PIPELINES * STAGES * ENERGY_MJ

    # Pipeline 1 becomes 10 % slower: the other takes the slowest plan that is no slower than that.
    world.slowdowns[1] = 1.10
    await world.step(2)
    await world.until_condition("StragglerDetected", "True", "StragglerDetected")
    times = [p.iteration_time_us for p in next(iter(world.agents[0].plan_sets.values())).points]

    async def reacted() -> bool:
        return bool(world.agents[0].point)

    await world.until("a slower plan on the other pipeline", reacted)
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    point = world.agents[0].point
    assert point is not None
    assert times[point] <= 1.101 * times[0]
    assert point == len(times) - 1 or times[point + 1] > 1.095 * times[0]
    assert world.agents[1].point == 0, "the straggler itself stays at T_min"
    assert world.agents[0].from_iteration == world.iteration + 1, "the iteration after the one that has begun"
    await world.step(3)

    async def announced() -> bool:
        annotations = (await world.job())["metadata"].get("annotations", {})
        return float(annotations.get(keys.ANNOTATION_PLANNED_SLOWDOWN, 0)) > 1.05

    await world.until("announced as planned", announced)

    # It recovers: everybody back to T_min.
    world.slowdowns[1] = 1.0
    await world.step(3)
    await world.until_condition("StragglerDetected", "False", "NoStraggler")
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    assert [agent.point for agent in world.agents] == [0, 0]
    await world.step(4)

    async def saved() -> bool:
        return bool((await world.job())["status"].get("savings", {}).get("energy") == "10.00%")

    await world.until("measured savings", saved)

    await world.custom.delete_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL, "gpt3")

    async def gone() -> bool:
        jobs = await world.custom.list_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL)
        return not jobs["items"]

    await world.until("gone", gone)

    async def released() -> bool:
        return (await world.reasons())[-1:] == ["ClocksReleased"]

    await world.until("the last event is told", released)
    assert [agent.leased for agent in world.agents] == [False, False]
    said = await world.reasons()
    for reason in ("ConfigMapNotFound", "Solved", "BaselineMeasured", "PlanChanged", "StragglerDetected"):
        assert said.count(reason) >= 1, (reason, said)
    assert said.count("Solved") == 1
    assert said[-1] == "ClocksReleased"


async def test_an_agent_is_asked_about_its_node_only_when_it_has_something_new_to_say(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply()
    await world.train_until_applied()
    old, new = world.agents

    async def renewed(times: int) -> None:
        """Wait for further renewals; who renews has been told of everything before."""
        before = [agent.calls.count("renew") for agent in world.agents]

        async def done() -> bool:
            await world.step(1)
            counts = [agent.calls.count("renew") for agent in world.agents]
            return all(count >= n + times for count, n in zip(counts, before, strict=True))

        await world.until("renewals", done)

    async def asked(agent: FakeAgent, times: int) -> bool:
        await world.step(1)
        return agent.calls.count("describe") >= times

    await renewed(2)
    before = new.calls.count("describe")
    await renewed(2)
    assert new.calls.count("describe") == before, "nothing is new"

    new.ranks[0].pid += 1  # without a word in the telemetry, as if it were lost
    await world.until("asked", partial(asked, new, before + 1))
    await renewed(2)
    assert new.calls.count("describe") == before + 1, "once"

    old.too_old = True
    before, renewals = old.calls.count("describe"), old.calls.count("renew")
    await world.until("asked again", partial(asked, old, before + 4))
    # A renewal may be under way at either end.
    assert old.calls.count("renew") <= renewals + 4 + 2, "who cannot say whether anything is new is asked each time"


async def test_bad_input_is_named_and_changes_nothing(world: World) -> None:
    await world.profile({"other.csv": "x", "profile.csv": "stage,instruction,frequency,time\n0,forward,1410,1\n"})
    await world.apply(profile={"configMapRef": {"name": "profile", "key": "absent.csv"}, "blockingPowerMilliwatts": 1})
    message = await world.until_condition("ProfileReady", "False", "KeyNotFound")
    assert "ConfigMap profile has no key absent.csv; its keys: other.csv, profile.csv" in message
    await world.patch({"spec": {"profile": {"configMapRef": {"key": "profile.csv"}}}})
    message = await world.until_condition("ProfileReady", "False", "ProfileInvalid")
    assert "energy" in message
    good = {"data": {"profile.csv": profile_csv(STAGES)}}
    await world.core.patch_namespaced_config_map(
        "profile", world.namespace, good, _content_type="application/merge-patch+json"
    )
    await world.train_until_applied()
    status = (await world.job())["status"]
    t_min_us = status["frontier"]["minimumTimeMicroseconds"]
    calls = [len(agent.calls) for agent in world.agents]

    too_short = {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1000}}
    await world.patch({"spec": {"objective": too_short}})
    message = await world.until_condition("PlanApplied", "False", "ObjectiveInfeasible")
    assert f"({t_min_us} microseconds)" in message
    assert [agent.point for agent in world.agents] == [0, 0], "the plan in force stays"
    told = [
        [c for c in agent.calls[n:] if c not in ("renew", "describe")]
        for agent, n in zip(world.agents, calls, strict=True)
    ]
    assert told == [[], []]

    await world.patch({"metadata": {"annotations": {keys.ANNOTATION_STRAGGLER: "1:0:0.5"}}})
    message = await world.until_condition("Accepted", "False", "AnnotationInvalid")
    assert "slowdown must be from 1 (back to normal) to 100, not 0.5" in message

    async def said() -> bool:
        named = {"KeyNotFound", "ProfileInvalid", "ObjectiveInfeasible", "AnnotationInvalid"}
        return named <= set(await world.reasons())

    await world.until("said as events", said)


async def test_a_running_job_is_calibrated_and_the_next_one_begins_with_it(world: World) -> None:
    world.overhead_us = 15_000
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(baselineIterations=0)
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    assert (await world.condition("ModelExplains"))[0] == "Unknown"
    before = (await world.job())["status"]["predicted"]["iterationTimeMicroseconds"]
    await world.step(31)
    message = await world.until_condition("ModelExplains", "True", "ModelExplains")
    assert "without calibration" in message

    async def planned_anew() -> bool:
        status = (await world.job())["status"]
        return bool(status.get("predicted", {}).get("iterationTimeMicroseconds", before) > before)

    await world.until("plans in real time", planned_anew)
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    await world.step(3)

    async def measured() -> bool:
        return "measured" in (await world.job())["status"]

    await world.until("measured under the new plans", measured)
    status = (await world.job())["status"]
    assert status["calibration"]["quality"] == "Explains"
    assert float(status["calibration"]["heldOutError"].rstrip("%")) < 0.1
    assert float(status["calibration"]["uncalibratedError"].rstrip("%")) > 1
    times = [status[name]["iterationTimeMicroseconds"] for name in ("predicted", "measured")]
    assert times[0] == pytest.approx(times[1], rel=0.002)
    assert world.operators[0].metric("perseus_job_model_explains", world.namespace) == 1

    kept = await world.stored(keys.PROFILE_PLURAL, "profile")
    assert (kept["spec"], list(kept["status"]["calibrations"])) == ({}, ["calibration-1f1b-2x4.json"])
    assert [(owner["kind"], owner["name"]) for owner in kept["metadata"]["ownerReferences"]] == [
        ("ConfigMap", "profile")
    ]
    profile = await world.core.read_namespaced_config_map("profile", world.namespace)
    assert list(profile.data) == ["profile.csv"], "the user's object is not touched"

    await world.apply("heir")

    async def inherited() -> bool:
        job = await world.job("heir")
        return job.get("status", {}).get("frontier", {}).get("minimumTimeMicroseconds", 0) > before

    await world.until("calibrated from the start", inherited)


async def test_a_plan_that_is_slower_than_planned_is_withdrawn(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply()
    await world.train_until_applied()
    await world.until_condition("BoundKept", "True", "BoundKept")
    world.slowdowns = [1.05] * PIPELINES  # all alike: no straggler, but not what the plan promised
    await world.step(8)
    message = await world.until_condition("BoundKept", "False", "BoundExceeded")
    assert "runs at default clocks; the plan is tried again after 60 s" in message

    async def default_clocks() -> bool:
        return all(agent.point is None and agent.leased for agent in world.agents)

    await world.until("default clocks, still leased for telemetry", default_clocks)
    await world.until_condition("Ready", "False", "BoundExceeded")

    async def said() -> bool:
        return "BoundExceeded" in await world.reasons()

    await world.until("said as an event", said)


async def test_what_is_stored_for_a_profile_never_touches_what_others_wrote(world: World) -> None:
    await world.profile({"profile.csv": "x"})
    kube = KubeClient(world.api)
    profile = await kube.read_config_map(world.namespace, "profile")
    for key, text in (("a.json", "1"), ("b.json", "2"), ("a.json", "3")):
        await kube.write_calibrations(world.namespace, "profile", {key: text}, profile)
    kept = await kube.read_profile(world.namespace, "profile")
    assert kept.status["calibrations"] == {"a.json": "3", "b.json": "2"}, "other pipelines' keys stay"
    body = {
        "apiVersion": "/".join(GROUP),
        "kind": keys.PROFILE_KIND,
        "metadata": {"name": "own"},
        "spec": {"csv": "mine"},
    }
    await world.custom.create_namespaced_custom_object(*GROUP, world.namespace, keys.PROFILE_PLURAL, body)
    with pytest.raises(KubeConflict, match="own exists and is not the operator's"):
        await kube.write_profile(world.namespace, "own", {"csv": "measured"})
    await kube.write_calibrations(world.namespace, "own", {"a.json": "1"}, None)
    kept = await kube.read_profile(world.namespace, "own")
    assert (kept.spec, kept.status) == ({"csv": "mine"}, {"calibrations": {"a.json": "1"}})


async def test_a_profile_of_its_own_kind_is_used_with_what_it_holds(world: World) -> None:
    body = {
        "apiVersion": "/".join(GROUP),
        "kind": keys.PROFILE_KIND,
        "metadata": {"name": "given"},
        "spec": {"csv": profile_csv(STAGES), "blockingPowerMilliwatts": 83640, "measuredOn": f"{STAGES} stages"},
    }
    await world.apply(profile={"profileRef": {"name": "given"}})
    message = await world.until_condition("ProfileReady", "False", "ProfileNotFound")
    assert message.startswith("spec.profile.profileRef.name: PerseusProfile given does not exist in namespace ")
    await world.custom.create_namespaced_custom_object(*GROUP, world.namespace, keys.PROFILE_PLURAL, body)
    await world.until_condition("FrontierReady", "True", "Solved")
    kept = await world.stored(keys.FRONTIER_PLURAL, "gpt3")
    assert kept["spec"]["digest"] == (await world.job())["status"]["frontier"]["digest"]
    assert kept["spec"]["points"] == (await world.job())["status"]["frontier"]["points"]


async def test_a_declared_straggler_and_a_mode_that_only_recommends(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(straggler={"mode": "External"}, baselineIterations=0)
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    await world.patch({"metadata": {"annotations": {keys.ANNOTATION_STRAGGLER: "1:0:1.2"}}})
    await world.until_condition("StragglerDetected", "True", "StragglerDeclared")

    async def reacted() -> bool:
        return bool(world.agents[0].point) and world.agents[1].point == 0

    await world.until("a slower plan on the other pipeline", reacted)

    await world.patch({"spec": {"mode": "Recommend"}})
    message = await world.until_condition("PlanApplied", "False", "RecommendOnly")
    assert "would run point 0 of" in message

    async def default_clocks() -> bool:
        return all(agent.point is None and agent.leased for agent in world.agents)

    await world.until("default clocks, still leased for telemetry", default_clocks)


async def test_ranks_are_reported_together_but_for_those_whose_instructions_are_observed(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(mode="Observe", baselineIterations=0)

    async def reading(combined: bool) -> bool:
        await world.step()
        return all(agent.readers and agent.combines is combined for agent in world.agents)

    await world.until("single ranks are read", lambda: reading(False))
    await world.patch({"spec": {"mode": "Enforce"}})
    await world.until("ranks are read together", lambda: reading(True))
    await world.until_condition("PlanApplied", "True", "PlanInForce")
    await world.patch({"spec": {"mode": "Observe"}})
    await world.until("single ranks are read again", lambda: reading(False))
