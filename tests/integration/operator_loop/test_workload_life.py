"""What becomes of a job as its workload comes and goes: suspended, restarted, resized, finished, deleted."""

from __future__ import annotations

from typing import Any

import kubernetes.aio.client
from tests.integration.operator_loop.fake_agent import GROUP, PIPELINES, STAGES
from tests.integration.operator_loop.world import World

from perseus_core import keys
from perseus_sim.profiles import profile_csv

JOB = {"batch.kubernetes.io/job-name": "train"}


async def begin(world: World, **changes: Any) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(objective={"type": "MinEnergy"}, **changes)
    await world.train_until_applied()


async def make_owner(world: World, name: str) -> dict[str, Any]:
    """What stands for one making of the Job ``train``: pods of an owner that is not there would be collected."""
    template = {"spec": {"containers": [{"name": "c", "image": "i"}]}}
    body: Any = {"metadata": {"name": name}, "spec": {"template": template}}
    made = await kubernetes.aio.client.BatchV1Api(world.api).create_namespaced_job(world.namespace, body)
    return {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid, "controller": True}


async def make_pod(world: World, pipeline: int, name: str, owner: dict[str, Any] | None = None) -> None:
    """A worker of the Job ``train``, and the process in it, which begins at iteration 0."""
    agent = world.agents[pipeline]
    owners = [owner] if owner else []
    metadata = {"name": name, "labels": {keys.LABEL_JOB: "gpt3", **JOB}, "ownerReferences": owners}
    spec = {"nodeName": agent.node, "containers": [{"name": "c", "image": "i"}]}
    made = await world.core.create_namespaced_pod(world.namespace, {"metadata": metadata, "spec": spec})
    agent.iteration = -1
    for rank in agent.ranks:
        rank.pod_uid, rank.pid = made.metadata.uid, rank.pid + 1000


async def delete_pod(world: World, name: str) -> None:
    await world.core.delete_namespaced_pod(name, world.namespace, grace_period_seconds=0)


async def until_released(world: World, *pipelines: int) -> None:
    async def released() -> bool:
        return not any(world.agents[p].leased or world.agents[p].point is not None for p in pipelines)

    await world.until(f"released on {pipelines}", released)


async def until_points(world: World, expected: list[int | None], *, training: bool = False) -> None:
    async def chosen() -> bool:
        if training:
            await world.step()
        return [agent.point for agent in world.agents] == expected

    await world.until(f"points {expected}", chosen)
    await world.until_condition("PlanApplied", "True", "PlanInForce")


async def test_a_suspended_job_is_let_alone_and_resumes_where_it_was(world: World) -> None:
    await begin(world)
    points = [agent.point for agent in world.agents]
    before = (await world.job())["status"]

    await world.patch({"spec": {"suspend": True}})
    await until_released(world, 0, 1)
    said = await world.until_condition("AgentsReady", "False", "Suspended")
    assert said == "spec.suspend is true: the GPUs of the job are at their default clocks."
    await world.until_condition("PlanApplied", "False", "Suspended")
    await world.until_condition("Ready", "False", "Suspended")
    await world.step(3)  # training goes on
    calls = [len(agent.calls) for agent in world.agents]
    during = (await world.job())["status"]
    assert (during["frontier"], during["baseline"]) == (before["frontier"], before["baseline"])

    await world.patch({"spec": {"suspend": False}})
    await until_points(world, points)
    assert all(agent.from_iteration > 3 for agent in world.agents), "the processes are those that were there"
    for agent, many in zip(world.agents, calls, strict=True):
        assert agent.calls[many:][:1] == ["acquire"], "nothing was asked of an agent meanwhile"
    after = (await world.job())["status"]
    assert (after["frontier"], after["baseline"]) == (before["frontier"], before["baseline"])
    assert (await world.reasons()).count("Solved") == 1


async def test_a_restarted_workload_begins_again_and_its_past_does_not_count(world: World) -> None:
    owner = await make_owner(world, "first")
    for pipeline in range(PIPELINES):
        await delete_pod(world, f"trainer-{pipeline}")
        await make_pod(world, pipeline, f"train-a-{pipeline}", owner)
    await begin(world, workload={"reference": {"kind": "Job", "name": "train"}})
    points = [agent.point for agent in world.agents]
    await world.step(30)

    async def measured() -> int:
        return int((await world.job())["status"].get("measured", {}).get("iterations", 0))

    async def much_measured() -> bool:
        return await measured() > 6

    await world.until("measured", much_measured)
    before = (await world.job())["status"]

    # The Job is deleted and made again; pods of the old one are still there when those of the new one come.
    for agent in world.agents:
        agent.point, agent.from_iteration = None, 0
    owner = await make_owner(world, "second")
    for pipeline in range(PIPELINES):
        await make_pod(world, pipeline, f"train-b-{pipeline}", owner)

    async def new_pods_alone() -> bool:
        return [agent.pods for agent in world.agents] == [["train-b-0"], ["train-b-1"]]

    await world.until("leased for the new pods alone", new_pods_alone)
    for pipeline in range(PIPELINES):
        await delete_pod(world, f"train-a-{pipeline}")
    world.iteration = 0
    await world.step()
    await until_points(world, points)
    assert all(agent.from_iteration <= 3 for agent in world.agents), "counted from its own start"
    await world.step(4)

    async def measured_anew() -> bool:
        return 0 < await measured() <= 5

    await world.until("measured anew", measured_anew)
    after = (await world.job())["status"]
    assert (after["frontier"], after["baseline"]) == (before["frontier"], before["baseline"])
    said = await world.reasons()
    assert (said.count("Solved"), said.count("BaselineMeasured")) == (1, 1)


async def test_pipelines_leave_and_join_without_another_profile_or_frontier(world: World) -> None:
    await begin(world)
    point = world.agents[0].point
    await delete_pod(world, "trainer-1")
    await until_released(world, 1)
    said = await world.until_condition("PlanApplied", "False", "WaitingForRanks")
    assert said.startswith(f"{STAGES} of {2 * STAGES} training processes have connected.")
    assert world.agents[0].point == point, "who is there keeps the plan"

    await world.patch({"spec": {"pipeline": {"dataParallel": 1}}})
    await until_points(world, [point, None], training=True)

    await world.patch({"spec": {"pipeline": {"dataParallel": 2}}})
    await make_pod(world, 1, "trainer-1-again")
    await until_points(world, [point, point], training=True)
    assert (await world.reasons()).count("Solved") == 1


async def test_a_stage_that_is_not_in_the_pipeline_is_named(world: World) -> None:
    world.agents[1].ranks[-1].stage = STAGES + 3
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply()
    said = await world.until_condition("PlanApplied", "False", "RanksMismatch")
    expected = f"is dp 1, stage {STAGES + 3}, tp 0; spec.pipeline has 2 (dp) × {STAGES} (stages) × 1 (tp)."
    assert expected in said
    world.agents[1].ranks[-1].stage = STAGES - 1
    await world.train_until_applied()


async def end_pod(world: World, name: str) -> None:
    over = {"status": {"phase": "Succeeded"}}
    await world.core.patch_namespaced_pod_status(
        name, world.namespace, over, _content_type="application/merge-patch+json"
    )


async def test_a_job_finishes_with_what_it_saved_and_is_deleted_in_time(world: World) -> None:
    await begin(world)
    await world.until_condition("Active", "True", "Running")
    await world.until_condition("Finished", "False", "NotFinished")

    async def measured() -> bool:
        await world.step()
        return "measured" in (await world.job())["status"]

    await world.until("measured", measured)
    await end_pod(world, "trainer-0")
    await until_released(world, 0)
    await world.until_condition("Active", "True", "Running")
    await end_pod(world, "trainer-1")
    await until_released(world, 1)
    assert await world.until_condition("Finished", "True", "Finished") == "All pods of the job have succeeded."
    await world.until_condition("Active", "False", "Finished")
    await world.until_condition("Ready", "True", "Finished")
    for name in ("trainer-0", "trainer-1"):
        await delete_pod(world, name)
    await world.until_condition("Finished", "True", "Finished")
    assert "measured" in (await world.job())["status"], "what it took is what is asked for now"

    await world.patch({"spec": {"ttlSecondsAfterFinished": 0}})

    async def gone() -> bool:
        return not (await world.custom.list_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL))["items"]

    await world.until("deleted", gone)
    frontiers = await world.custom.list_namespaced_custom_object(*GROUP, world.namespace, keys.FRONTIER_PLURAL)
    assert not frontiers["items"]


async def test_pods_are_deleted_before_their_job(world: World) -> None:
    """No clock stays, and the job tells what it was."""
    await begin(world)
    for pipeline in range(PIPELINES):
        await delete_pod(world, f"trainer-{pipeline}")
    await until_released(world, 0, 1)
    await world.until_condition("AgentsReady", "False", "NoPods")
    await world.until_condition("Active", "False", "NoPods")
    status = (await world.job())["status"]
    assert {"frontier", "baseline"} <= set(status)

    await world.custom.delete_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL, "gpt3")

    async def gone() -> bool:
        return not (await world.custom.list_namespaced_custom_object(*GROUP, world.namespace, keys.PLURAL))["items"]

    await world.until("gone", gone)


async def test_pods_of_another_workload_are_left_out_and_counted(world: World) -> None:
    await world.profile({"profile.csv": profile_csv(STAGES)})
    await world.apply(workload={"reference": {"kind": "PyTorchJob", "name": "train"}})

    async def left_out() -> bool:
        # The words of a condition may come later than its status.
        expected = ": of the pods that opted in, 2 belong to another workload"
        return expected in (await world.condition("AgentsReady"))[2]

    await world.until("left out and counted", left_out)
    assert not any(agent.leased for agent in world.agents)
    await world.patch({"spec": {"workload": None}})
    await world.train_until_applied()
