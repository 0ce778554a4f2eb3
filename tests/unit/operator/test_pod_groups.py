"""PodGroups: how a pod names one, and how its UID is read, whichever version of the API is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.kube.pods import group_of
from perseus_operator.errors import KubeForbidden, KubeNotFound
from perseus_operator.objects.values import Owner, PodGroup

OF_KUBERNETES, OF_PLUGINS = "scheduling.k8s.io", "scheduling.x-k8s.io"
LABELLED = {"metadata": {"labels": {f"{OF_PLUGINS}/pod-group": "ranks"}}}


class Served:
    """An API server with PodGroups of one version."""

    def __init__(self, *versions: str, error: Exception | None = None) -> None:
        self.versions = versions
        self.error = error
        self.asked: list[str] = []

    async def get_namespaced_custom_object(
        self, group: str, version: str, namespace: str, plural: str, name: str, **_: Any
    ) -> Any:
        assert (namespace, plural, name) == ("team", "podgroups", "ranks")
        self.asked.append(version)
        if self.error:
            raise self.error
        if f"{group}/{version}" not in self.versions:
            raise KubeNotFound("the server could not find the requested resource")
        return {"metadata": {"uid": "u-ranks"}}


async def read(served: Served, api_group: str) -> Owner:
    kube = KubeClient(SimpleNamespace())
    kube._custom = served
    return await kube.pod_group("team", PodGroup(api_group, "ranks"))


@pytest.mark.parametrize(
    ("pod", "group"),
    [
        ({}, None),
        ({"metadata": {"labels": None}, "spec": {"schedulingGroup": {}}}, None),
        (LABELLED, PodGroup(OF_PLUGINS, "ranks")),
        ({"spec": {"schedulingGroup": {"podGroupName": "ranks"}}}, PodGroup(OF_KUBERNETES, "ranks")),
        (LABELLED | {"spec": {"schedulingGroup": {"podGroupName": "own"}}}, PodGroup(OF_KUBERNETES, "own")),
    ],
)
def test_a_pod_names_its_group_by_a_field_or_a_label(pod: dict[str, Any], group: PodGroup | None) -> None:
    assert group_of(pod) == group


@pytest.mark.parametrize(
    ("api_group", "version", "asked"),
    [
        (OF_KUBERNETES, "v1beta1", ["v1beta1"]),
        (OF_KUBERNETES, "v1alpha2", ["v1beta1", "v1alpha2"]),
        (OF_PLUGINS, "v1alpha1", ["v1alpha1"]),
    ],
)
async def test_the_newest_version_that_is_served_names_the_owner(
    api_group: str, version: str, asked: list[str]
) -> None:
    served = Served(f"{api_group}/{version}")
    assert await read(served, api_group) == Owner(f"{api_group}/{version}", "PodGroup", "ranks", "u-ranks")
    assert served.asked == asked


async def test_what_is_not_served_or_may_not_be_read_is_said() -> None:
    with pytest.raises(KubeNotFound, match="could not find"):
        await read(Served(), OF_KUBERNETES)
    refusing = Served(error=KubeForbidden("may not"))
    with pytest.raises(KubeForbidden):
        await read(refusing, OF_KUBERNETES)
    assert refusing.asked == ["v1beta1"]
