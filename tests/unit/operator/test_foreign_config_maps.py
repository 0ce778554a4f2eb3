"""A ConfigMap that somebody else wrote is neither overwritten nor adopted, whatever its name is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perseus_operator.clients.kube import KubeClient
from perseus_operator.errors import KubeConflict
from perseus_operator.objects import FIELD_MANAGER, MANAGED_BY, ConfigMap, JobRef
from perseus_proto import keys

JOB = JobRef("ns", "job", "uid")
WANTED = ConfigMap("job-frontier", {"digest": "d"}, {})


class ApiServer:
    """Holds one ConfigMap, and refuses what the real one refuses."""

    def __init__(self, labels: dict[str, str] | None) -> None:
        self.held: Any = None
        if labels is not None:
            self.held = SimpleNamespace(metadata=SimpleNamespace(labels=labels, resource_version="7"), data={"a": "b"})
        self.written: list[Any] = []

    async def create_namespaced_config_map(self, namespace: str, body: Any, **_: Any) -> None:
        if self.held is not None:
            raise KubeConflict("409")
        self.written.append(body)

    async def read_namespaced_config_map(self, name: str, namespace: str, **_: Any) -> Any:
        return self.held

    async def replace_namespaced_config_map(self, name: str, namespace: str, body: Any, **_: Any) -> None:
        if body["metadata"].get("resourceVersion") != self.held.metadata.resource_version:
            raise KubeConflict("409")
        self.written.append(body)


def client(server: ApiServer) -> KubeClient:
    kube = KubeClient(SimpleNamespace())
    kube._core = server
    return kube


@pytest.mark.parametrize(
    "labels",
    [{}, {MANAGED_BY: "helm"}, {MANAGED_BY: FIELD_MANAGER}, {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: "another"}],
)
async def test_a_foreign_config_map_of_the_same_name_stays_as_it_is(labels: dict[str, str]) -> None:
    server = ApiServer(labels)
    with pytest.raises(KubeConflict, match="not the operator's"):
        await client(server).write_owned_config_map(JOB, WANTED)
    assert server.written == []


@pytest.mark.parametrize("labels", [None, {MANAGED_BY: FIELD_MANAGER, keys.LABEL_JOB: JOB.name}])
async def test_the_operator_s_own_is_made_or_replaced(labels: dict[str, str] | None) -> None:
    server = ApiServer(labels)
    await client(server).write_owned_config_map(JOB, WANTED)
    assert [body["data"] for body in server.written] == [WANTED.data]
