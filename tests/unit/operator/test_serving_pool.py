"""A ServingPool as an object of the API: what may be written, which pods are its, who serves it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.operator.conftest import LIMITS, operator_of

from perseus_core import keys
from perseus_core.serving import ServingLimits
from perseus_operator.api.conditions import Reason
from perseus_operator.api.crd import pool_crd
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.controller import operator as module
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.serving.family import ServingFamily
from perseus_operator.jobs.pace import Pace
from perseus_operator.nodes.workloads import select
from perseus_operator.objects.values import JobRef, Now, Owner, Pod
from perseus_operator.replicas.shard import SHARDS

FIRST = {"timeToFirstToken": {"limit": "1s", "attainment": "99%"}}
TOKEN = {"timePerOutputToken": {"limit": "50ms"}}
DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama"}


def pool(**spec: Any) -> PoolSpec:
    return parse_spec(PoolSpec, spec)


def pod(name: str, owner: Owner | None = None, **labels: str) -> Pod:
    return Pod(name, "ns", name, "node", "llama", labels, owner=owner)


def owner(kind: str, name: str) -> Owner:
    return Owner("apps/v1", kind, name, "u")


def test_limits_are_durations_and_one_share() -> None:
    spec = pool(objective={**FIRST, **TOKEN}, mode="Enforce")
    assert spec.limits == ServingLimits(1.0, 0.05, 0.99)
    assert spec.sets_clocks
    assert pool(objective=TOKEN).limits == ServingLimits(None, 0.05, 0.99)
    assert pool().limits is None
    assert not pool(mode="Enforce").sets_clocks, "without a limit nothing says how slow is too slow"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"objective": {"timeToFirstToken": {"limit": "50"}}}, "must be a duration such as 50ms or 1.5s"),
        ({"objective": {"timeToFirstToken": {"limit": "0ms"}}}, "limit must be from 1ms to 3600s"),
        ({"objective": {"timeToFirstToken": {"limit": "3601s"}}}, "limit must be from 1ms to 3600s"),
        ({"objective": {"timeToFirstToken": {"limit": "1s", "attainment": "100%"}}}, "a percentage from 50% to 99.99%"),
        ({"objective": {**FIRST, "timePerOutputToken": {"limit": "50ms", "attainment": "95%"}}}, "the same attainment"),
        ({"workload": {**DEPLOYMENT, "apiVersion": "batch/v1"}}, "apiVersion must be apps/v1 for a Deployment"),
        ({"workload": {**DEPLOYMENT, "kind": "Job"}}, "must be one of Deployment, StatefulSet, LeaderWorkerSet"),
        ({"workload": DEPLOYMENT, "podSelector": {"matchLabels": {"a": "b"}}}, "must not both be set"),
        ({"role": "Prefill", "objective": TOKEN}, "timePerOutputToken must not be set where role is Prefill"),
        ({"role": "Decode", "objective": FIRST}, "timeToFirstToken must not be set where role is Decode"),
        ({"objective": {"maxSlowdown": "10%", **TOKEN}}, "maxSlowdown must not be set together with timeToFirstToken"),
        ({"objective": {"maxSlowdown": "0.5%"}}, "must be a percentage from 1% to 100%"),
        ({"objective": {"maxSlowdown": "101%"}}, "must be a percentage from 1% to 100%"),
        ({"role": "Both"}, "must be one of Auto, Mixed, Prefill, Decode"),
        ({"clocks": {"minimumMegahertz": 0}}, "an integer from 1 to 10000"),
        ({"engine": {"port": 0}}, "an integer from 1 to 65535"),
        ({"engine": {"path": "metrics"}}, "a path such as /metrics"),
        ({"replicas": 3}, "unknown field"),
    ],
)
def test_a_bad_spec_is_refused_with_the_field_and_the_rule(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message.replace("(", r"\(")):
        pool(**spec)


def test_an_engine_of_one_role_has_the_limit_of_its_own_time() -> None:
    assert pool(role="Prefill", objective=FIRST).limits == ServingLimits(1.0, None, 0.99)
    assert pool(role="Decode", objective=TOKEN).limits == ServingLimits(None, 0.05, 0.99)


def test_the_crd_shows_what_matters() -> None:
    version = pool_crd()["spec"]["versions"][0]
    columns = {column["name"] for column in version["additionalPrinterColumns"]}
    assert {"Ready", "Mode", "Replicas", "Kept", "Saved"} <= columns


def test_pods_of_a_deployment_are_those_of_all_its_replica_sets() -> None:
    pods = [
        pod("old", owner("ReplicaSet", "llama-1a2b"), **{"pod-template-hash": "1a2b"}),
        pod("new", owner("ReplicaSet", "llama-3c4d"), **{"pod-template-hash": "3c4d"}),
        pod("other", owner("ReplicaSet", "llama-big-3c4d"), **{"pod-template-hash": "3c4d"}),
        pod("bare"),
        pod("made by hand", owner("ReplicaSet", "llama")),
        pod("another rollout", owner("ReplicaSet", "llama-5e6f"), **{"pod-template-hash": "7a8b"}),
        pod(
            "of others",
            replace(owner("ReplicaSet", "llama-3c4d"), api_version="x.io/v1"),
            **{"pod-template-hash": "3c4d"},
        ),
        pod("set", owner("StatefulSet", "llama")),
        pod("other set", replace(owner("StatefulSet", "llama"), api_version="apps.kruise.io/v1beta1")),
    ]
    chosen = select(pool(workload=DEPLOYMENT), pods)
    assert {each.name for each in chosen.pods} == {"old", "new"}
    assert chosen.excluded == {"belong to another workload": 7}
    of_set = select(pool(workload={**DEPLOYMENT, "kind": "StatefulSet"}), pods)
    assert {each.name for each in of_set.pods} == {"set"}
    assert len(select(pool(), pods).pods) == len(pods)
    assert not select(pool(suspend=True), pods).pods


def test_the_address_of_a_pod_is_not_that_of_its_node() -> None:
    """A page is read from where a pod says: it may be its own alone."""
    raw: dict[str, Any] = {
        "metadata": {"uid": "u", "namespace": "ns", "name": "p", "labels": {keys.LABEL_JOB: "llama"}},
        "spec": {"nodeName": "node"},
        "status": {"podIP": "10.0.0.5"},
    }
    found = pod_of(raw)
    assert found is not None
    assert found.address == "10.0.0.5"
    assert not found.power_limit
    limited = {**raw["metadata"], "annotations": {keys.ANNOTATION_POWER_LIMIT: "350" + 100 * "0"}}
    with_limit = pod_of({**raw, "metadata": limited})
    assert with_limit is not None
    assert with_limit.power_limit == "350" + 13 * "0", "as much as a message may hold"
    assert found == with_limit, "and a lease does not depend on it"
    of_node = pod_of({**raw, "spec": {"nodeName": "node", "hostNetwork": True}})
    assert of_node is not None
    assert of_node.address == ""
    assert found == of_node, "a lease does not depend on it"


def body(kind: str, uid: str, **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": "llama", "uid": uid, "generation": 1, "resourceVersion": "1"}
    return {"metadata": metadata, "spec": spec, "kind": kind}


def test_a_perseus_job_has_the_name_before_a_pool() -> None:
    jobs = KnownJobs(5)
    jobs.observe(body(keys.POOL_KIND, "p"), keys.POOL_KIND)
    assert jobs.named("ns", "llama") == "p"
    jobs.observe(body(keys.KIND, "j"))
    assert jobs.named("ns", "llama") == "j"
    assert jobs.same_name("ns", "llama") == {"j", "p"}
    jobs.forget("j")
    assert jobs.named("ns", "llama") == "p"


async def test_a_job_of_the_same_name_takes_the_pods_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {"looks_pace": Pace(100.0), "wall_s": lambda: 0.0, "limits": LIMITS}
    monkeypatch.setattr(module, "replace", lambda services, **_: services)
    operator = operator_of(SimpleNamespace(), **shared)
    operator.shards._hold(dict.fromkeys(range(SHARDS), 1))
    monkeypatch.setattr(operator.budgets, "grant_share", lambda _: None)
    raw = {
        "metadata": {
            "namespace": "ns",
            "name": "replica-1",
            "uid": "pod-1",
            "labels": {keys.LABEL_JOB: "llama"},
        },
        "spec": {"nodeName": "node", "containers": []},
        "status": {"phase": "Running"},
    }
    operator.observe_pod(raw, deleted=False)
    operator.observe_job(body(keys.POOL_KIND, "p", mode="Enforce"), keys.POOL_KIND)
    runner = operator._runners["p"]
    assert isinstance(runner.family, ServingFamily)
    assert [node.name for node in runner.job.nodes.occupied] == ["node"]
    operator.observe_job(body(keys.KIND, "j"))
    report = runner.family.report(runner.family.decide(Now(0.0, 0.0)))
    assert (report.conditions[0].status, report.conditions[0].reason) == (False, Reason.NAME_TAKEN)
    assert not runner.job.nodes.occupied
    assert [node.name for node in operator._runners["j"].job.nodes.occupied] == ["node"]
    operator.job_deleted("j")
    assert not runner.job.name_taken
    assert runner.job.nodes.occupied
    for task in [*operator._endings]:
        task.cancel()
    await runner.stop()


async def test_a_runner_of_a_pool_refuses_the_spec_of_a_job() -> None:
    services = SimpleNamespace(monotonic_s=lambda: 0.0, wall_s=lambda: 0.0, looks_pace=Pace(100.0))
    runner = JobRunner(JobRef("ns", "llama", "p", keys.POOL_KIND), cast(Any, services))
    runner.observe(body(keys.POOL_KIND, "p", pipeline={}))
    assert runner.job.spec_fault is not None
    assert "spec.pipeline: unknown field" in runner.job.spec_fault.message
    runner.observe({**body(keys.POOL_KIND, "p", mode="Observe")})
    assert isinstance(runner.job.spec, PoolSpec)
    await runner.stop()
