"""What is kept of PerseusJobs, and how many of a namespace are served: whatever a tenant writes, a bounded amount."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.kept import kept
from tests.unit.operator.conftest import operator_of

from perseus_core import keys
from perseus_operator.classes.pool_owners import MOST_OWNERS
from perseus_operator.controller import operator as module
from perseus_operator.controller.known_jobs import KnownJobs, used_of
from perseus_operator.replicas.shard import SHARDS
from perseus_operator.servers.handlers import _let_go

MOST = 5


def body(uid: str, namespace: str = "evil", created: int = 0, **metadata: Any) -> dict[str, Any]:
    named = {"namespace": namespace, "name": f"job-{uid}", "uid": uid, "creationTimestamp": f"2026-01-{created:06}"}
    return {"metadata": {**named, **metadata}, "spec": {"mode": "Observe"}}


def test_nothing_of_a_body_is_kept_but_what_is_used() -> None:
    """600 jobs with 250 KiB of annotations each took 370 MiB, and 240 more once they were deleted."""
    used = used_of(
        body(
            "u",
            annotations={"mine": "x" * 250_000, keys.ANNOTATION_STRAGGLER: "y" * 250_000},
            labels={f"label-{number}": "z" * 60 for number in range(10_000)} | {keys.LABEL_CLASS: "frugal"},
            managedFields=[{"manager": "m" * 100_000}],
        )
    )
    assert kept(used) < 40_000
    assert used["metadata"]["labels"] == {keys.LABEL_CLASS: "frugal"}
    small = body("u", annotations={keys.ANNOTATION_STRAGGLER: "[]"}, labels={"team": "a"}, generation=3)
    assert used_of(small) == {"kind": keys.KIND, **small}
    assert used_of({**small, "status": {"a": 1}})["status"] == {"a": 1}


def test_of_a_pools_owners_the_latest_are_kept_if_they_are_short() -> None:
    owners = [{"uid": f"u-{number}"} for number in range(1_000)]
    pool = body("u", ownerReferences=owners)
    assert used_of(pool, keys.POOL_KIND)["metadata"]["ownerReferences"] == owners[-MOST_OWNERS:]
    assert "ownerReferences" not in used_of(pool)["metadata"]
    long = body("u", ownerReferences=[{"uid": "u", "name": "n" * 100_000}])
    assert used_of(long, keys.POOL_KIND)["metadata"]["ownerReferences"] == []


def test_kopf_is_left_an_objects_identity_alone() -> None:
    raw = body("u", annotations={"mine": "x"}, managedFields=[{}], labels={"a": "b"}, finalizers=["f"])
    _let_go({"type": "MODIFIED", "object": raw})
    assert set(raw) == {"metadata"}
    assert set(raw["metadata"]) == {"namespace", "name", "uid", "creationTimestamp", "finalizers"}


@given(
    st.lists(st.tuples(st.sampled_from(["evil", "honest"]), st.integers(0, 40), st.booleans()), max_size=120),
)
def test_the_oldest_jobs_of_each_namespace_are_served(events: list[tuple[str, int, bool]]) -> None:
    jobs, alive = KnownJobs(MOST), dict[str, tuple[str, int]]()
    for namespace, number, deleted in events:
        uid = f"{namespace}-{number}"
        if deleted:
            jobs.forget(uid)
            alive.pop(uid, None)
        else:
            jobs.observe(body(uid, namespace, number))
            alive.setdefault(uid, (namespace, number))
    for namespace in ("evil", "honest"):
        own = [uid for uid, (where, _) in alive.items() if where == namespace]
        served = [uid for uid in own if jobs.serves(uid)]
        known = sorted((uid for uid in own if uid in jobs), key=lambda uid: alive[uid][1])
        assert sorted(served) == sorted(known[:MOST])
        assert len(known) <= 2 * MOST
        assert len(known) == len(own) or len(known) >= MOST or len(own) > 2 * MOST
    assert {uid for uid, _ in jobs.served()} == {uid for uid in alive if jobs.serves(uid)}
    for uid in list(jobs):
        jobs.forget(uid)
    assert not jobs._places
    assert not jobs._served


def test_a_namespace_takes_nothing_from_another() -> None:
    jobs = KnownJobs(MOST)
    for number in range(10_000):
        jobs.observe(body(f"evil-{number}", created=number))
    jobs.observe(body("honest", "honest", created=99_999))
    assert jobs.serves("honest")
    assert len(jobs) == 2 * MOST + 1


class Runner:
    def __init__(self, ref: Any, services: Any, kinds: Any) -> None:
        self.ref, self.did, self.labels = ref, list[str](), dict[str, str]()

    def start(self) -> None: ...

    def observe(self, body: Mapping[str, Any]) -> bool:
        return False

    async def release(self) -> None:
        self.did.append("release")


async def test_jobs_beyond_the_budget_are_said_and_served_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JobRunner", Runner)
    monkeypatch.setattr(module, "replace", lambda services, **_: services)
    said = list[str]()

    class Kube:
        async def post_event(self, job: Any, *, kind: str, reason: str, message: str) -> None:
            assert (kind, reason) == ("Warning", "TooManyJobs")
            assert "jobsPerNamespace" in message
            said.append(job.uid)

    operator = operator_of(Kube())
    operator._jobs = KnownJobs(MOST)
    operator.shards._hold(dict.fromkeys(range(SHARDS), 5))
    for number in reversed(range(8)):  # as a list by name may have them
        for _ in range(2):
            operator.observe_job(body(f"u-{number}", created=number))
    displaced = [f"u-{number}" for number in (7, 6, 5)]
    await asyncio.gather(*operator._endings)
    assert set(operator._runners) == {f"u-{number}" for number in range(MOST)}
    assert sorted(said) == sorted(displaced)
    operator.job_deleted("u-0")
    assert set(operator._runners) == {f"u-{number}" for number in range(1, 1 + MOST)}
    await asyncio.gather(*operator._endings)
    assert len(said) == 3


async def test_a_table_of_pods_forgets_jobs_that_have_none() -> None:
    operator = operator_of(None)

    def pod(number: int) -> dict[str, Any]:
        metadata = {"uid": f"p-{number}", "namespace": "evil", "name": "p", "labels": {keys.LABEL_JOB: f"j-{number}"}}
        return {"metadata": metadata, "spec": {"nodeName": "n"}, "status": {}}

    for number in range(1_000):
        operator.observe_pod(pod(number), deleted=False)
        operator.observe_pod(pod(number), deleted=True)
    assert operator._pods_of == {}


async def test_of_jobs_of_which_nothing_is_kept_one_event_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JobRunner", Runner)
    monkeypatch.setattr(module, "replace", lambda services, **_: services)
    said = list[tuple[str, str]]()

    class Kube:
        async def post_event(self, job: Any, *, kind: str, reason: str, message: str) -> None:
            said.append((job.uid, message))

    operator = operator_of(Kube())
    operator._jobs = KnownJobs(MOST)
    operator.shards._hold(dict.fromkeys(range(SHARDS), 5))
    for number in range(100):
        operator.observe_job(body(f"u-{number:03}", created=number))
    await asyncio.gather(*operator._endings)
    unkept = [(uid, message) for uid, message in said if uid >= f"u-{2 * MOST:03}"]
    assert [uid for uid, _ in unkept] == [f"u-{2 * MOST:03}"]
    assert f"more than {2 * MOST} PerseusJobs and ServingPools; nothing of others is kept" in unkept[0][1]
    assert "edit the job to have it served" in unkept[0][1]
    assert len(said) == MOST + 1, "and one of each that waits"
    operator.job_deleted("u-000")
    operator.observe_job(body("u-099", created=99))  # edited: there is a place for it to wait in
    assert "u-099" in operator._jobs
    operator.observe_job(body("u-100", created=100))
    await asyncio.gather(*operator._endings)
    assert said[-1][0] == "u-100", "said again, after there was room"


async def test_the_event_of_a_pod_concerns_its_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many jobs there are, and whichever of one name was the last."""
    monkeypatch.setattr(module, "JobRunner", Runner)
    monkeypatch.setattr(module, "replace", lambda services, **_: services)
    passed = list[str]()
    monkeypatch.setattr(module.Operator, "_pass_pods", lambda _, runner: passed.append(runner.ref.uid))
    operator = operator_of(None)
    operator._jobs = KnownJobs(100)
    operator.shards._hold(dict.fromkeys(range(SHARDS), 5))

    class Counted(dict[str, Any]):
        def values(self) -> Any:
            raise AssertionError("every job is looked at")

    for number in range(50):
        operator.observe_job(body(f"u-{number}"))
    later = body("u-later")
    later["metadata"]["name"] = "job-u-7"
    operator.observe_job(later)
    operator.job_deleted("u-7")
    operator._runners = Counted(operator._runners)
    passed.clear()
    for number in (3, 7):
        metadata = {
            "uid": f"p-{number}",
            "namespace": "evil",
            "name": "p",
            "labels": {keys.LABEL_JOB: f"job-u-{number}"},
        }
        operator.observe_pod({"metadata": metadata, "spec": {"nodeName": "n"}, "status": {}}, deleted=False)
    assert passed == ["u-3", "u-later"]
