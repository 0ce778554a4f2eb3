"""Which jobs one replica serves: those of its shards, from the moment at which it has them until another one does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.conftest import LIMITS, Job, epochs_of, operator_of

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.controller import operator as module
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.operator import Operator
from perseus_operator.errors import AgentUnavailable
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pace import Pace
from perseus_operator.nodes.workloads import Selection
from perseus_operator.replicas.shard import SHARDS, shard_of


class Runner:
    """What a JobRunner is asked to do."""

    def __init__(self, ref: Any, services: Any, kinds: Any) -> None:
        self.ref, self.did = ref, list[str]()
        self.labels: Mapping[str, str] = {}

    def start(self) -> None:
        self.did.append("start")

    def observe(self, body: Mapping[str, Any]) -> bool:
        self.did.append(f"observe {body['metadata']['resourceVersion']}")
        return False

    async def transfer(self) -> None:
        self.did.append("transfer")

    async def release(self) -> None:
        self.did.append("release")


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Operator:
    monkeypatch.setattr(module, "JobRunner", Runner)
    monkeypatch.setattr(module, "replace", lambda services, **_: services)
    return operator_of(None)


def body(uid: str, version: int = 1) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": f"job-{uid}", "uid": uid, "resourceVersion": str(version)}}


def split(uids: list[str]) -> tuple[frozenset[int], frozenset[int]]:
    """Two shards with a job each, and all others."""
    first = frozenset({shard_of(uids[0])})
    return first, frozenset(range(SHARDS)) - first


async def test_jobs_are_begun_with_their_shards_as_they_were_observed_last(operator: Operator) -> None:
    uids = [f"uid-{number}" for number in range(20)]
    mine, others = split(uids)
    for uid in uids:
        operator.observe_job(body(uid, 1))
        operator.observe_job(body(uid, 2))
    assert operator._runners == {}, "it holds no shard"
    operator.shards._hold(dict.fromkeys(mine, 5))
    assert set(operator._runners) == {uid for uid in uids if shard_of(uid) in mine}
    runner: Any = operator._runners[uids[0]]
    assert runner.did == ["start", "observe 2"]
    operator.observe_job(body(uids[0], 3))
    assert runner.did[-1] == "observe 3"
    operator.shards._hold(dict.fromkeys(others, 5))
    assert set(operator._runners) == set(uids)


async def test_a_lost_shard_s_jobs_are_handed_over_and_not_released(operator: Operator) -> None:
    uids = [f"uid-{number}" for number in range(20)]
    _, others = split(uids)
    operator.shards._hold(dict.fromkeys(range(SHARDS), 5))
    for uid in uids:
        operator.observe_job(body(uid))
    before: dict[str, Any] = dict(operator._runners)
    operator.shards._drop(others)
    await asyncio.gather(*operator._endings)
    for uid, runner in before.items():
        handed = shard_of(uid) in others
        assert (runner.did[-1] == "transfer", uid in operator._runners) == (handed, not handed)
    assert {str(job) for job in operator._other_jobs()} == {f"ns/job-{uid}" for uid in uids if shard_of(uid) in others}


async def test_only_who_serves_a_job_releases_it_when_it_is_deleted(operator: Operator) -> None:
    uids = [f"uid-{number}" for number in range(20)]
    mine, _ = split(uids)
    operator.shards._hold(dict.fromkeys(mine, 5))
    for uid in uids:
        operator.observe_job(body(uid))
    served: dict[str, Any] = dict(operator._runners)
    for uid in uids:
        operator.job_deleted(uid)
    await asyncio.gather(*operator._endings)
    assert all(runner.did[-1] == "release" for runner in served.values())
    assert len(operator._jobs) == 0
    operator.shards._hold(dict.fromkeys(range(SHARDS), 6))
    assert operator._runners == {}, "nobody begins what does not exist"


async def test_a_job_that_is_handed_over_leaves_no_lease_where_it_has_no_pods() -> None:
    """Who serves it next learns of nodes by their pods (seed 138 of the simulation)."""
    released = list[tuple[str, int]]()

    async def release(address: str, *, job_uid: str, epoch: int) -> int:
        released.append((address, epoch))
        if address == "10.0.0.1:1":
            raise AgentUnavailable("no answer")
        return 1

    job = Job(pipeline={"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 3})
    job.run()
    gone: Any = {node.name: node.address for node in job.nodes}
    job.state.pods_observed(Selection(tuple(job.nodes[0].pods)), gone, wall_s=job.wall_s)
    services: Any = SimpleNamespace(
        agents=SimpleNamespace(release=release),
        epochs=epochs_of(7),
        limits=LIMITS,
        looks_pace=Pace(100.0),
        metrics=Metrics(),
        monotonic_s=lambda: 0.0,
    )
    runner = JobRunner(job.state.ref, services)
    runner.job = job.state.job
    await runner.transfer()
    assert sorted(released) == [("10.0.0.1:1", 7), ("10.0.0.2:1", 7)], "each once, whether it answers or not"
    released.clear()
    job.state.job.fenced_by(Explanation(Reason.FENCED, "a newer operator commands this job"))
    await runner.transfer()
    assert released == []
