"""Two replicas that both take a job for theirs, cut off from each other: at the agent the later epoch counts. Nobody
who was replaced gets the job back, by no command, by no restart, and by no silence of the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, plan_set_of, wait_for
from tests.waiting import PATIENCE_S

from perseus_operator.clients.agents.client import AgentPool
from perseus_operator.errors import AgentFenced, AgentRefused
from perseus_operator.objects.values import Pod

PLANS = plan_set_of([[[1200, 900]]])
SHORT_S = 1.0


def test_the_replica_that_was_replaced_commands_nothing_whatever_happens(tmp_path: Path) -> None:
    with RecordingNode.open(tmp_path, gpus=1) as node:
        node.start_agent()
        pod = node.add_pod(0, [0])
        pods = [Pod(pod.uid, pod.namespace, pod.name, "node", "job", {})]

        def locked_at(mhz: int) -> Callable[[], bool]:
            return lambda: node.locked()[gpu_uuid(0)] == mhz

        async def partition() -> None:
            address = node.addresses["grpc"]
            first, second = (AgentPool(None, timeout_s=PATIENCE_S) for _ in range(2))
            job: Any = {"job_uid": JOB}
            lease: Any = {**job, "job_name": "a/b", "pods": pods}

            def commands() -> list[Coroutine[Any, Any, Any]]:
                """Of the first, which does not know that it was replaced."""
                return [
                    first.acquire(address, **lease, epoch=1, ttl_s=60.0, clock_mhz=900),
                    first.renew(address, **job, epoch=1, ttl_s=60.0),
                    first.push(address, **job, epoch=1, plan_set=PLANS, changes={}),
                    first.select(address, **job, epoch=1, plan_id=PLANS.plan_id, points=[(0, 0)], from_iteration=0),
                    first.release(address, **job, epoch=1),
                ]

            async def is_fenced() -> None:
                for command in commands():
                    with pytest.raises(AgentFenced) as fenced:
                        await command
                    assert fenced.value.seen == 2

            await first.acquire(address, **lease, epoch=1, ttl_s=60.0, clock_mhz=900)
            await asyncio.to_thread(wait_for, locked_at(900), "the first commands")
            # Cut off from the API server, but not from the agent, it goes on while another takes its shard.
            await second.acquire(address, **lease, epoch=2, ttl_s=60.0, clock_mhz=1200)
            await asyncio.to_thread(wait_for, locked_at(1200), "the second commands")
            await is_fenced()
            assert locked_at(1200)()
            # The second is cut off from the agent: its lease runs out. The job is nobody's, not the first's again.
            await second.renew(address, **job, epoch=2, ttl_s=SHORT_S)
            await asyncio.to_thread(wait_for, node.all_default, "its lease has run out")
            await is_fenced()
            # Nor does the agent forget who was replaced when it dies.
            await second.acquire(address, **lease, epoch=2, ttl_s=60.0, clock_mhz=1200)
            await asyncio.to_thread(wait_for, locked_at(1200), "the second is back")
            await asyncio.to_thread(node.kill_agent)
            await asyncio.to_thread(wait_for, node.all_default, "the keeper gives the GPU back")
            await asyncio.to_thread(node.start_agent, f"--grpc-address={address}")
            await is_fenced()
            with pytest.raises(AgentRefused):
                await second.renew(address, **job, epoch=2, ttl_s=60.0)  # which is to acquire first
            assert node.all_default()
            for pool in (first, second):
                await pool.close()

        asyncio.run(partition())
