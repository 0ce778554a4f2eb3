"""Least privilege on real nodes: Pod Security enforced; the audit log of a job's life beside the chart's rights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from stage import PATIENCE_S, SYSTEM, TRAINING, Stage

from perseus_sim import rbac

pytestmark = pytest.mark.timeout(900)

CHART = Path(__file__).resolve().parents[2] / "charts" / "perseus"
POD_SECURITY = "pod-security.kubernetes.io"


@pytest.fixture
def strict(api: Any, helm: Any, images: set[str], eventually: Any) -> Iterator[str]:
    """A namespace where Pod Security admits nothing but the level `restricted`."""
    core, name = client.CoreV1Api(api), "perseus-strict"
    core.create_namespace({"metadata": {"name": name, "labels": {f"{POD_SECURITY}/enforce": "restricted"}}})
    yield name
    helm("uninstall", "perseus", "--namespace", name)
    client.ApiextensionsV1Api(api).delete_custom_resource_definition("perseusjobs.perseus.energy")
    core.delete_namespace(name)
    names = lambda: {item.metadata.name for item in core.list_namespace().items}  # noqa: E731
    eventually("the namespace is gone", lambda: name not in names(), PATIENCE_S)


def test_the_operator_runs_where_only_restricted_pods_may(api: Any, helm: Any, strict: str, eventually: Any) -> None:
    helm("install", "perseus", str(CHART), "--namespace", strict, "--set", "agent.enabled=false")
    apps = client.AppsV1Api(api)

    def ready() -> bool:
        return apps.read_namespaced_deployment("perseus-operator", strict).status.ready_replicas == 1

    eventually("the operator is ready", ready, PATIENCE_S)
    said = helm("test", "perseus", "--namespace", strict, "--timeout", "180s")
    assert "Succeeded" in said, "its own test, a pod too, plans a job"


def violations(audit_log: Path, since: int) -> dict[str, str]:
    """What pods of the system violate of the level that its namespace is audited for, by the owner of the pods."""
    found = {}
    with audit_log.open("rb") as lines:
        lines.seek(since)
        for line in lines:
            event = json.loads(line)
            about = event.get("objectRef", {})
            said = event.get("annotations", {}).get(f"{POD_SECURITY}/audit-violations")
            if said and about.get("namespace") == SYSTEM:
                found[f"{about['resource']}/{about.get('name', '')}"] = said
    return found


def test_rights_are_exact_in_a_life_of_jobs(
    cluster: Any, api: Any, helm: Any, images: set[str], eventually: Any
) -> None:
    since = cluster.audit_log.stat().st_size
    stage = Stage(cluster, api, helm, eventually, audit="restricted")
    stage.set()
    try:
        role = client.RbacAuthorizationV1Api(api).read_cluster_role(f"{SYSTEM}-perseus-operator")
        operator = stage.pod("operator")
        stage.core.delete_namespaced_pod(operator.metadata.name, SYSTEM)  # the next one counts the epoch on
        eventually("another operator", lambda: stage.pod("operator").metadata.uid != operator.metadata.uid, PATIENCE_S)
        stage.returned()
    finally:
        stage.strike()
    allowed = rbac.granted([{"kind": "ClusterRole", **api.sanitize_for_serialization(role)}])
    asked = list(rbac.requests(cluster.audit_log, rbac.user_name(SYSTEM, "perseus-operator"), since=since))
    assert rbac.account(asked, allowed) == rbac.Account(frozenset(), frozenset(), frozenset())

    # The agent has no token at all: not one request comes from any other account of the system.
    with cluster.audit_log.open("rb") as lines:
        lines.seek(since)
        users = {json.loads(line)["user"]["username"] for line in lines}
    ours = {user for user in users if user.startswith(tuple(rbac.user_name(name, "") for name in (SYSTEM, TRAINING)))}
    assert ours == {rbac.user_name(SYSTEM, "perseus-operator")}

    found = violations(cluster.audit_log, since)
    assert any("perseus-agent" in name for name in found), "the agent's exceptions are seen"
    assert not any("operator" in name for name in found), found
