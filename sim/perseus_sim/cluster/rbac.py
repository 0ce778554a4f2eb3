"""Least privilege, measured: what a manifest grants, what a user requested, and a login as a service account.

The requests come from the audit log of ``perseus_sim.cluster.control_plane``. The operator's rights are the chart's,
from its file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

_CHART_FILES = Path(__file__).resolve().parents[3] / "charts" / "perseus" / "files"


@dataclass(frozen=True, order=True)
class Permission:
    """One verb on one resource; ``resource`` holds a subresource as ``pods/status``."""

    verb: str
    group: str
    resource: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f".{self.group}" if self.group else "")


@dataclass(frozen=True)
class Request:
    """One request to a resource, and the code of its answer."""

    permission: Permission
    path: str
    code: int


def operator_manifest(namespace: str) -> list[dict[str, Any]]:
    """The operator's service account ``perseus-operator`` with the rules that the chart gives it, in all namespaces and
    in this one, where the agents are.
    """
    name, group = "perseus-operator", "rbac.authorization.k8s.io"
    rules = _rules("operator-rules")
    account = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role, kind = {"apiGroup": group, "kind": "ClusterRole", "name": name}, f"{group}/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name, "namespace": namespace}},
        {"apiVersion": kind, "kind": "ClusterRole", "metadata": {"name": name}, "rules": rules},
        {
            "apiVersion": kind,
            "kind": "ClusterRoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [account],
        },
        *agents_manifest(namespace, namespace),
    ]


def agents_manifest(agents: str, namespace: str) -> list[dict[str, Any]]:
    """The rights that the chart gives the operator in the agents' namespace; ``namespace``: of its service account."""
    name, group = "perseus-operator", "rbac.authorization.k8s.io"
    metadata, kind = {"name": name, "namespace": agents}, f"{group}/v1"
    return [
        {"apiVersion": kind, "kind": "Role", "metadata": metadata, "rules": _rules("operator-agents-rules")},
        {
            "apiVersion": kind,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    ]


def _rules(file: str) -> Any:
    return yaml.safe_load((_CHART_FILES / f"{file}.yaml").read_text(encoding="utf-8"))


def granted(documents: Iterable[Mapping[str, Any]]) -> set[Permission]:
    """What the Roles and ClusterRoles of a manifest allow."""
    return {
        Permission(verb, group, resource)
        for document in documents
        if document["kind"] in ("Role", "ClusterRole")
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def requests(audit_log: Path, user: str, *, since: int = 0) -> Iterator[Request]:
    """Requests of a user to resources, from the API server's audit log; discovery and health are left out.

    ``since``: an earlier size of the log. An API server that has just started refuses every user until it has read its
    roles, so earlier requests may be left out.
    """
    with audit_log.open("rb") as lines:
        lines.seek(since)
        for line in lines:
            event = json.loads(line)
            about = event.get("objectRef", {})
            # Nobody's name: a token whose account was deleted, as of an operator that is being uninstalled.
            if event["user"].get("username") != user or "resource" not in about:
                continue
            resource = "/".join(filter(None, (about["resource"], about.get("subresource"))))
            permission = Permission(event["verb"], about.get("apiGroup", ""), resource)
            yield Request(permission, event["requestURI"], event.get("responseStatus", {}).get("code", 0))


def accounts(audit_log: Path, namespace: str, *, since: int = 0) -> set[str]:
    """The service accounts of a namespace that have made any request."""
    with audit_log.open("rb") as lines:
        lines.seek(since)
        users = {json.loads(line)["user"].get("username", "") for line in lines}
    return {user for user in users if user.startswith(user_name(namespace, ""))}


def user_name(namespace: str, name: str) -> str:
    """A service account as the API server calls it."""
    return f"system:serviceaccount:{namespace}:{name}"


def log_in(kubeconfig: Path, namespace: str, name: str, into: Path) -> Path:
    """A kubeconfig for the same server whose bearer is a service account, written to ``into``."""
    connect: Any = config.new_client_from_config
    with connect(str(kubeconfig)) as api:
        core: Any = client.CoreV1Api(api)
        token = core.create_namespaced_service_account_token(name, namespace, {"spec": {"expirationSeconds": 3600}})
    document = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    context = next(c["context"] for c in document["contexts"] if c["name"] == document["current-context"])
    document["users"] = [{"name": context["user"], "user": {"token": token.status.token}}]
    into.touch(mode=0o600)
    into.write_text(yaml.safe_dump(document), encoding="utf-8")
    return into
