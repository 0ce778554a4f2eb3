"""A later version of the API, tried with a dummy one: docs/design/0027 says how versions change, this test does it.

No webhook converts: versions have the same fields, so each object is valid in both, and no read or deletion waits for
an operator.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from kubernetes import client
from tests.e2e.world import SPEC, absent
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.api_servers import Feature
from perseus_sim.cluster.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
NAME: Final = f"{keys.PLURAL}.{keys.API_GROUP}"
OLD, NEW = keys.API_VERSION, "v1beta1"
WARNING = "perseus.energy/v1alpha1 PerseusJob is deprecated; use v1beta1"


class Api:
    """PerseusJobs of the namespace ``default`` through either version, and their definition."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.custom = client.CustomObjectsApi(cluster.api)
        self.definitions = client.ApiextensionsV1Api(cluster.api)
        self.one_version: dict[str, Any] = yaml.safe_load((CRDS / f"{keys.PLURAL}.yaml").read_text(encoding="utf-8"))

    def serve(self, *served: str, stored: str) -> None:
        """Define the versions that are served, and the one in which objects are stored."""
        [only] = self.one_version["spec"]["versions"]
        versions = [{**only, "name": name, "served": name in served, "storage": name == stored} for name in (OLD, NEW)]
        if NEW in served:
            versions[0] |= {"deprecated": True, "deprecationWarning": WARNING}
        spec = {**self.one_version["spec"], "versions": versions}
        self.cluster.apply({**self.one_version, "spec": spec})

    def stored_versions(self) -> list[str]:
        return list(self.definitions.read_custom_resource_definition(NAME).status.stored_versions)

    def place(self, version: str) -> tuple[str, str, str, str]:
        return keys.API_GROUP, version, "default", keys.PLURAL

    def create(self, version: str, name: str) -> None:
        body = {"apiVersion": f"{keys.API_GROUP}/{version}", "kind": keys.KIND, "metadata": {"name": name}}
        self.custom.create_namespaced_custom_object(*self.place(version), {**body, "spec": SPEC})

    def read(self, version: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.custom.get_namespaced_custom_object(*self.place(version), name)
        return found

    def edit(self, version: str, name: str, spec: dict[str, Any]) -> int:
        """Change a spec; the generation that this makes."""
        kind = "application/merge-patch+json"
        changed = self.custom.patch_namespaced_custom_object(
            *self.place(version), name, {"spec": spec}, _content_type=kind
        )
        return int(changed["metadata"]["generation"])

    def migrate(self, version: str) -> None:
        """Write every object anew, in the version that the definition stores now; then forget the others."""
        for item in self.custom.list_cluster_custom_object(keys.API_GROUP, version, keys.PLURAL)["items"]:
            name = item["metadata"]["name"]
            self.custom.replace_namespaced_custom_object(*self.place(version), name, item)
        status = {"status": {"storedVersions": [version]}}
        kind = "application/merge-patch+json"
        self.definitions.patch_custom_resource_definition_status(NAME, status, _content_type=kind)

    def reported(self, version: str, name: str, generation: int = 1) -> bool:
        return bool(self.read(version, name).get("status", {}).get("observedGeneration", 0) >= generation)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two versions of an object say the same; who wrote a field is recorded by version."""
    told = [{**each, "apiVersion": "", "metadata": {**each["metadata"], "managedFields": []}} for each in (one, other)]
    return told[0] == told[1]


def test_a_later_version_comes_is_stored_goes_back_and_needs_no_operator(cluster: SimulatedCluster) -> None:
    if Feature.CEL not in cluster.server.features:
        pytest.skip(f"the {cluster.server.name} serves one version of a kind")
    api = Api(cluster)
    cluster.apply(CRDS)
    eventually(lambda: not absent(lambda: api.read(OLD, "none")) or True, "PerseusJob is not served", every_s=0.1)
    operator = cluster.start_operator("--status-interval-s", "0.2", "--log-format", "text")
    eventually(lambda: api.stored_versions() == [OLD], "the definition is not established", every_s=0.1)
    api.create(OLD, "before")
    eventually(lambda: api.reported(OLD, "before"), "no status", every_s=0.1)

    # It comes: served beside the old one, which is still stored. The operator knows only the old one.
    api.serve(OLD, NEW, stored=OLD)
    eventually(lambda: not absent(lambda: api.read(NEW, "before")), "the version is not served", every_s=0.1)
    api.create(NEW, "later")
    eventually(lambda: api.reported(OLD, "later"), "the operator does not see it", every_s=0.1)
    for name in ("before", "later"):
        assert same(api.read(OLD, name), api.read(NEW, name))
    *_, headers = api.custom.get_namespaced_custom_object_with_http_info(*api.place(OLD), "before")
    assert WARNING in headers["Warning"]
    *_, headers = api.custom.get_namespaced_custom_object_with_http_info(*api.place(NEW), "before")
    assert "Warning" not in headers

    # It is stored, and goes back: what was edited in either version arrives, whichever is stored.
    for stored, edited in ((NEW, OLD), (OLD, NEW)):
        api.serve(OLD, NEW, stored=stored)
        eventually(lambda v=stored: v in api.stored_versions(), "the version is not stored", every_s=0.1)
        api.migrate(stored)
        assert api.stored_versions() == [stored]
        generation = api.edit(edited, "before", {"points": 30 if stored == NEW else 40})
        eventually(lambda g=generation: api.reported(OLD, "before", g), "the edit does not arrive", every_s=0.1)
        assert same(api.read(OLD, "before"), api.read(NEW, "before"))
        assert operator.running

    # No operator, and all of it is deleted, through either version.
    os.kill(operator.pid, signal.SIGKILL)
    operator.popen.wait()
    api.custom.delete_namespaced_custom_object(*api.place(NEW), "before")
    api.custom.delete_namespaced_custom_object(*api.place(OLD), "later")
    for name in ("before", "later"):
        assert absent(lambda n=name: api.read(NEW, n))
