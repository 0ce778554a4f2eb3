"""EnergyClasses with serving: when a ServingPool is made, of what, and who owns it."""

from __future__ import annotations

import pytest
from tests.doubles.class_site import (
    OWNER,
    SPEC,
    Site,
)

from perseus_operator.api.job import Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.api.workload import Reference, ServerKind
from perseus_operator.classes.pool_owners import MOST_OWNERS
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.objects.values import Json, Pod
from perseus_operator.servers.class_labels import label_pod


@pytest.fixture
async def site() -> Site:
    made = Site()
    await made.tick()
    return made


SERVING = {
    "objective": {"timePerOutputToken": {"limit": "50ms", "attainment": "99%"}},
    "mode": "Canary",
    "clocks": {"minimumMegahertz": 900},
    "engine": {"port": 9000},
}
CHAT = ("team-a", "chat")


def replica(revision: str, number: int, kind: str = "ReplicaSet", *, serves: bool = True) -> Pod:
    """A pod of the server ``chat``, labelled by the webhook, and bound to a node."""
    owner = f"chat-{revision}" if kind == "ReplicaSet" else "chat"
    reference = {"apiVersion": "apps/v1", "kind": kind, "name": owner, "uid": f"u-{revision}", "controller": True}
    metadata: Json = {"namespace": "team-a", "name": f"{owner}-{number}", "ownerReferences": [reference]}
    metadata["labels"] = {"pod-template-hash": revision} if kind == "ReplicaSet" else {"app": "chat"}
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    raw = label_pod({"metadata": metadata, "spec": {"containers": [container]}}, "frugal", lambda _: serves).pod
    raw["metadata"] |= {"uid": f"u-{owner}-{number}", "creationTimestamp": f"2026-01-01T00:{number:02}:00Z"}
    raw["spec"]["nodeName"] = "node"
    made = pod_of(raw)
    assert made is not None, "the webhook has left it out"
    return made


def serve(site: Site, *pods: Pod) -> None:
    site.pods[CHAT] = {pod.uid: pod for pod in pods}


def owners(site: Site) -> list[str]:
    return [owner["uid"] for owner in site.api.owners[CHAT]]


@pytest.mark.parametrize(
    ("kind", "made_by"), [("Deployment", "ReplicaSet"), ("StatefulSet", "StatefulSet")], ids=["Deployment", "Set"]
)
async def test_a_pool_is_made_of_a_server_once_and_goes_with_it(site: Site, kind: str, made_by: str) -> None:
    site.define(SPEC | {"serving": SERVING, "priority": 7})
    serve(site, replica("a", 0, made_by), replica("a", 1, made_by))
    await site.tick()
    assert not site.api.jobs
    energy_class, raw, owner = site.api.pools[CHAT]
    assert (energy_class, owner.kind, owner.uid) == ("frugal", made_by, "u-a")
    spec = parse_spec(PoolSpec, raw)
    assert (spec.mode, spec.priority, spec.clocks.minimum_megahertz, spec.engine.port) == (Mode.CANARY, 7, 900, 9000)
    assert spec.limits is not None
    assert spec.limits.per_token_s == 0.05
    assert spec.pods is not None
    assert spec.pods.reference == Reference(kind=ServerKind(kind), name="chat")
    assert raw["workload"]["apiVersion"] == "apps/v1"
    await site.tick()
    await site.tick()
    assert site.api.attempts == 1
    assert (site.api.statuses[-1]["jobs"], site.api.statuses[-1]["pools"]) == (0, 1)


async def test_in_a_rollout_the_pool_goes_with_the_later_replica_set_too(site: Site) -> None:
    site.define({"serving": SERVING})
    serve(site, replica("a", 0))
    await site.tick()
    serve(site, replica("a", 0), replica("b", 1))
    await site.tick()
    assert owners(site) == ["u-a", "u-b"]
    serve(site, replica("b", 1), replica("a", 2))  # rolled back
    await site.tick()
    assert owners(site) == ["u-a", "u-b"]
    assert site.api.attempts == 2


async def test_an_owner_that_could_not_be_added_is_added_later(site: Site) -> None:
    site.define({"serving": SERVING})
    serve(site, replica("a", 0))
    await site.tick()
    serve(site, replica("b", 1))
    site.api.version = "8"  # the watch is late
    await site.tick()
    await site.tick(1.0)
    assert (owners(site), site.api.attempts) == (["u-a"], 2)
    site.api.version = "7"
    await site.tick()
    assert owners(site) == ["u-a", "u-b"]


async def test_owners_are_few_however_many_there_were_and_no_write_is_repeated(site: Site) -> None:
    site.define({"serving": SERVING})
    for number in range(2 * MOST_OWNERS):
        serve(site, replica(f"r{number}", number))
        await site.tick()
    assert owners(site) == [f"u-r{number}" for number in range(MOST_OWNERS, 2 * MOST_OWNERS)]
    attempts = site.api.attempts
    serve(
        site, *(replica(f"r{number}", number) for number in range(2 * MOST_OWNERS))
    )  # a namespace that makes up owners
    for _ in range(5):
        await site.tick()
    assert site.api.attempts == attempts


async def test_a_pool_that_a_user_wrote_stays_as_it_is(site: Site) -> None:
    site.define({"serving": SERVING})
    site.api.pools[CHAT] = "", {"mode": "Recommend", "workload": {"kind": "Deployment", "name": "chat"}}, OWNER
    site.api.owners[CHAT] = []
    serve(site, replica("a", 0), replica("b", 1))
    await site.tick()
    assert site.api.attempts == 0
    assert owners(site) == []


async def test_a_job_of_the_same_name_goes_before_a_pool(site: Site) -> None:
    site.define({"serving": SERVING})
    site.api.jobs[CHAT] = "", {"mode": "Recommend"}, OWNER
    serve(site, replica("a", 0))
    await site.tick()
    assert site.api.attempts == 0


async def test_a_server_is_never_given_a_job_though_its_class_has_no_serving_any_more(site: Site) -> None:
    """A class of a fixed clock would set it on the server's GPUs."""
    site.define({"objective": {"type": "FixedClock", "clockMegahertz": 1200}})
    serve(site, replica("a", 0))
    for _ in range(3):
        await site.tick()
    assert not site.api.jobs
    assert not site.api.pools
    said = "The pod serves at default clocks: EnergyClass frugal has no spec.serving."
    assert site.api.warnings == [("Pod", "chat-a-0", said), ("ReplicaSet", "chat-a", said)]
    site.define({"serving": {}})
    await site.tick()
    assert site.api.pools, "it has again"


def test_only_a_class_with_serving_serves() -> None:
    site = Site()
    site.define()
    site.define({"serving": {}}, "serving")
    site.define({"serving": {"mode": "Fast"}}, "invalid")
    assert [site.classes.serves(name) for name in ("serving", "frugal", "invalid", "absent", "")] == [True] + 4 * [
        False
    ]
