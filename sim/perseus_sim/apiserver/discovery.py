"""What the server publishes about itself: versions, groups, resources, and the OpenAPI documents that kubectl checks
manifests with.
"""

from __future__ import annotations

from typing import Any

from perseus_sim.apiserver.catalog import Catalog, Resource
from perseus_sim.apiserver.errors import Json, NotFound

VERSION: Json = {
    "major": "1",
    "minor": "32",
    "gitVersion": "v1.32.0-perseus-sim",
    "gitCommit": "",
    "gitTreeState": "clean",
    "buildDate": "1970-01-01T00:00:00Z",
    "goVersion": "none",
    "compiler": "python",
    "platform": "any/any",
}
_QUERY = ("dryRun", "fieldManager", "fieldValidation", "force")


def document(catalog: Catalog, parts: list[str]) -> Json:  # noqa: PLR0911 - one return for each path
    """The discovery document at ``/api``, ``/apis``, ``/apis/group`` or a group and version.

    Raises:
        NotFound: nothing is served there.
    """
    match parts:
        case ["version"]:
            return VERSION
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["api", version]:
            return _resource_list("", version, catalog)
        case ["apis"]:
            groups = [_group(name, versions) for name, versions in catalog.groups().items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        case ["apis", group]:
            versions = catalog.groups().get(group)
            if versions is None:
                raise NotFound.path()
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, versions)}
        case ["apis", group, version]:
            return _resource_list(group, version, catalog)
        case ["openapi", "v2"]:
            return {"swagger": "2.0", "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]}, "paths": {}}
        case ["openapi", "v3"]:
            return _openapi_index(catalog)
        case ["openapi", "v3", "api", version]:
            return _openapi("", version, catalog)
        case ["openapi", "v3", "apis", group, version]:
            return _openapi(group, version, catalog)
    raise NotFound.path()


def _group(name: str, versions: list[str]) -> Json:
    entries = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": entries, "preferredVersion": entries[0]}


def _resource_list(group: str, version: str, catalog: Catalog) -> Json:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": catalog.api_resources(group, version),
    }


def _openapi_index(catalog: Catalog) -> Json:
    prefixes = {"api/v1"} | {f"apis/{group}/{v}" for group, versions in catalog.groups().items() for v in versions}
    return {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}"} for prefix in sorted(prefixes)}}


def _openapi(group: str, version: str, catalog: Catalog) -> Json:
    members = [resource for resource in catalog if (resource.group, resource.version) == (group, version)]
    if not members:
        raise NotFound.path()
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": VERSION["gitVersion"]},
        "paths": {_path(resource): _operations(resource) for resource in members},
        "components": {"schemas": {_schema_name(resource): _schema(resource) for resource in members}},
    }


def _path(resource: Resource) -> str:
    prefix = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    return f"{prefix}{'/namespaces/{namespace}' if resource.namespaced else ''}/{resource.plural}/{{name}}"


def _gvk(resource: Resource) -> Json:
    return {"group": resource.group, "version": resource.version, "kind": resource.kind}


def _operations(resource: Resource) -> Json:
    # kubectl reads from the PATCH operation whether the server validates fields and supports dry run.
    parameters: list[Any] = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in _QUERY]
    action = {"x-kubernetes-group-version-kind": _gvk(resource), "parameters": parameters}
    return {
        "get": {**action, "x-kubernetes-action": "get"},
        "patch": {**action, "x-kubernetes-action": "patch"},
    }


def _schema_name(resource: Resource) -> str:
    group = ".".join(reversed(resource.group.split("."))) if resource.group else "io.k8s.api.core"
    return f"{group}.{resource.version}.{resource.kind}"


def _schema(resource: Resource) -> Json:
    schema = resource.schema or {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {**schema, "x-kubernetes-group-version-kind": [_gvk(resource)]}
