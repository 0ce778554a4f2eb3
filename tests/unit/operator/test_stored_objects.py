"""What operators store is theirs alone: an object that somebody else wrote is neither overwritten nor adopted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perseus_core import keys
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.errors import KubeConflict, KubeNotFound
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, ConfigMap, JobRef, Json

JOB = JobRef("ns", "job", "uid")
OURS = {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: JOB.name}


class ApiServer:
    """Holds one object of each kind, and refuses what the real one refuses."""

    def __init__(self, **labels: dict[str, str]) -> None:
        self.held: dict[str, Json] = {}
        for plural, own in labels.items():
            metadata = {"name": "job", "uid": "u", "resourceVersion": "7", "labels": own}
            self.held[plural] = {"metadata": metadata, "spec": {"digest": "before", "sweep": "s"}}
        self.rivals = 0
        """Writes by others, still to come between a read and a write."""

    async def get_namespaced_custom_object(self, *where: str, **_: Any) -> Json:
        if where[-2] not in self.held:
            raise KubeNotFound("404")
        return self.held[where[-2]]

    async def create_namespaced_custom_object(self, *where: Any, **_: Any) -> None:
        plural, body = where[-2:]
        if plural in self.held:
            raise KubeConflict("409")
        body["metadata"] |= {"uid": "new", "resourceVersion": "1"}
        self.held[plural] = body

    async def patch_namespaced_custom_object(self, *where: Any, **_: Any) -> None:
        plural, _name, body = where[-3:]
        held = self.held[plural]
        if self.rivals:
            self.rivals -= 1
            held["metadata"]["resourceVersion"] += "0"
        if any(body["metadata"][key] != held["metadata"][key] for key in ("uid", "resourceVersion")):
            raise KubeConflict("409")
        held["metadata"] |= body["metadata"]
        merged = {**held["spec"], **body["spec"]}
        held["spec"] = {key: value for key, value in merged.items() if value is not None}

    async def patch_namespaced_custom_object_status(self, *where: Any, **_: Any) -> None:
        plural, _name, body = where[-3:]
        if plural not in self.held:
            raise KubeNotFound("404")
        self.held[plural]["status"] = body["status"]


def client(server: ApiServer) -> KubeClient:
    kube = KubeClient(SimpleNamespace())
    kube._custom = server
    return kube


@pytest.mark.parametrize(
    "labels",
    [{}, {MANAGED_BY: "helm"}, {MANAGED_BY: FIELD_MANAGER}, {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: "another"}],
)
async def test_a_foreign_frontier_of_the_job_s_name_stays_as_it_is(labels: dict[str, str]) -> None:
    server = ApiServer(perseusfrontiers=labels)
    with pytest.raises(KubeConflict, match="PerseusFrontier ns/job exists and is not the operator's"):
        await client(server).write_frontier(JOB, {"digest": "d"})
    assert server.held["perseusfrontiers"]["spec"]["digest"] == "before"


async def test_a_profile_that_a_user_wrote_stays_as_it_is() -> None:
    server = ApiServer(perseusprofiles={})
    with pytest.raises(KubeConflict, match="PerseusProfile ns/job exists and is not the operator's"):
        await client(server).write_profile("ns", "job", {"csv": "x"})


@pytest.mark.parametrize("rivals", [0, 3])
async def test_the_operator_s_own_is_merged_and_belongs_to_the_job_of_today(rivals: int) -> None:
    server = ApiServer(perseusfrontiers=dict(OURS))
    server.rivals = rivals
    await client(server).write_frontier(JOB, {"digest": "d"})
    held = server.held["perseusfrontiers"]
    assert held["spec"] == {"digest": "d", "sweep": "s"}
    assert [owner["uid"] for owner in held["metadata"]["ownerReferences"]] == [JOB.uid]
    await client(server).write_frontier(JOB, {"sweep": None})
    assert held["spec"] == {"digest": "d"}


async def test_writers_that_are_always_faster_are_an_error() -> None:
    server = ApiServer(perseusfrontiers=dict(OURS))
    server.rivals = 1_000
    with pytest.raises(KubeConflict, match="changed by others 20 times in a row"):
        await client(server).write_frontier(JOB, {"digest": "d"})


async def test_what_does_not_exist_is_made() -> None:
    server = ApiServer()
    await client(server).write_frontier(JOB, {"digest": "d", "sweep": None})
    assert server.held["perseusfrontiers"]["spec"] == {"digest": "d"}
    await client(server).write_profile("ns", "job", {"csv": "x"})
    assert "ownerReferences" not in server.held["perseusprofiles"]["metadata"], "a profile outlives its job"


async def test_calibrations_of_a_profile_in_a_config_map_go_with_it() -> None:
    server = ApiServer()
    with pytest.raises(KubeNotFound):
        await client(server).write_calibrations("ns", "p", {"a": "1"}, None)
    await client(server).write_calibrations("ns", "p", {"a": "1"}, ConfigMap("p", {}, {}, "u-1"))
    held = server.held["perseusprofiles"]
    assert (held["spec"], held["status"]) == ({}, {"calibrations": {"a": "1"}})
    assert [owner["uid"] for owner in held["metadata"]["ownerReferences"]] == ["u-1"]


async def test_profiles_of_engines_are_listed_apart_from_those_of_training() -> None:
    """Those of one kind must not fill the places of the other: only so many are looked at."""
    asked: list[str] = []

    class Listing(ApiServer):
        async def list_namespaced_custom_object(self, *_: str, label_selector: str, **__: Any) -> Json:
            asked.append(label_selector)
            return {"items": [], "metadata": {}}

    server = Listing()
    await client(server).write_profile("ns", "serving-0", {"serving": {"fingerprint": "f"}})
    assert server.held["perseusprofiles"]["metadata"]["labels"]["perseus.energy/serving"] == "true"
    for of_engines in (True, False):
        assert not [each async for each in client(server).list_profiles("ns", 9, of_engines=of_engines)]
    assert asked == ["perseus.energy/serving", "!perseus.energy/serving"]
