"""What the API server itself knows about a few built-in kinds: initial status, required fields, CRD acceptance, event
forms.

Pure functions on one object. Other built-in kinds are stored as they are.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from perseus_sim.apiserver.catalog import Resource
from perseus_sim.apiserver.errors import Json, StatusCause

CRD = "customresourcedefinitions"
CRD_CLEANUP = "customresourcecleanup.apiextensions.k8s.io"


def prepare_created(resource: Resource, obj: Json, now: str) -> None:
    """Initial status and defaults, in place."""
    match resource.plural:
        case "pods":
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        case "namespaces":
            obj["spec"] = {"finalizers": ["kubernetes"]}
            obj["status"] = {"phase": "Active"}
        case "customresourcedefinitions":
            obj["status"] = _accepted(obj, now)
            obj["metadata"].setdefault("finalizers", []).append(CRD_CLEANUP)
    prepare_written(resource, obj)


def prepare_written(resource: Resource, obj: Json) -> None:
    """Defaults that hold on every write, in place."""
    if resource.plural == "secrets":
        obj.setdefault("type", "Opaque")
        for key, text in (obj.pop("stringData", None) or {}).items():
            obj.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
    elif resource.plural == CRD:
        names = obj.get("spec", {}).get("names", {})
        if "kind" in names:
            names.setdefault("singular", names["kind"].lower())
            names.setdefault("listKind", f"{names['kind']}List")
        obj.get("spec", {}).setdefault("conversion", {"strategy": "None"})


def broken_rules(resource: Resource, obj: Json, old: Json | None) -> list[StatusCause]:
    """Rules of built-in kinds that the object breaks."""
    match resource.plural:
        case "pods" if not obj.get("spec", {}).get("containers"):
            return [StatusCause.required("spec.containers")]
        case "configmaps":
            return _config_map(obj, old)
        case "secrets":
            return [
                StatusCause.invalid(f"data[{key}]", "<secret contents redacted>", "must be base64")
                for key, value in (obj.get("data") or {}).items()
                if not _is_base64(value)
            ]
        case "customresourcedefinitions":
            return _definition(obj)
        case "events" if obj["metadata"].get("namespace") != (
            obj.get("involvedObject", {}).get("namespace") or "default"
        ):
            return [
                StatusCause.invalid(
                    "involvedObject.namespace",
                    obj.get("involvedObject", {}).get("namespace"),
                    "does not match event.namespace",
                )
            ]
    return []


def _config_map(obj: Json, old: Json | None) -> list[StatusCause]:
    causes = [
        StatusCause.invalid(f"data[{key}]", value, "must be a string")
        for key, value in (obj.get("data") or {}).items()
        if not isinstance(value, str)
    ]
    size = sum(len(str(value)) for part in ("data", "binaryData") for value in (obj.get(part) or {}).values())
    if size > 1 << 20:
        causes.append(StatusCause("", "FieldValueTooLong", "Too long: may not be more than 1048576 bytes"))
    if old is not None and old.get("immutable"):
        causes.extend(
            StatusCause.forbidden(part, "field is immutable when `immutable` is set")
            for part in ("data", "binaryData", "immutable")
            if obj.get(part) != old.get(part)
        )
    return causes


def _is_base64(value: object) -> bool:
    try:
        base64.b64decode(str(value), validate=True)
    except binascii.Error:
        return False
    return True


def _definition(obj: Json) -> list[StatusCause]:
    spec: dict[str, Any] = obj.get("spec") or {}
    names: dict[str, Any] = spec.get("names") or {}
    causes = [
        StatusCause.required(f"spec.{key}") for key in ("group", "names", "scope", "versions") if not spec.get(key)
    ]
    causes += [StatusCause.required(f"spec.names.{key}") for key in ("plural", "kind") if not names.get(key)]
    if causes:
        return causes
    expected = f"{names['plural']}.{spec['group']}"
    if obj["metadata"]["name"] != expected:
        rule = 'must be spec.names.plural+"."+spec.group'
        causes.append(StatusCause.invalid("metadata.name", obj["metadata"]["name"], rule))
    if spec["scope"] not in ("Namespaced", "Cluster"):
        message = f'Unsupported value: "{spec["scope"]}": supported values: "Cluster", "Namespaced"'
        causes.append(StatusCause("spec.scope", "FieldValueNotSupported", message))
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        causes.append(
            StatusCause.invalid(
                "spec.versions", spec["versions"], "must have exactly one version marked as storage version"
            )
        )
    for index, version in enumerate(spec["versions"]):
        path = f"spec.versions[{index}].schema.openAPIV3Schema"
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if not schema:
            causes.append(StatusCause.required(path))
        else:
            causes.extend(_structural(schema, path))
    return causes


def _structural(schema: Json, path: str) -> list[StatusCause]:
    """A structural schema gives a type to everything."""
    causes: list[StatusCause] = []
    free = schema.get("x-kubernetes-int-or-string") or schema.get("x-kubernetes-preserve-unknown-fields")
    if not schema.get("type") and not free:
        causes.append(
            StatusCause(
                f"{path}.type", "FieldValueRequired", "Required value: must not be empty for specified object fields"
            )
        )
    for key, child in schema.get("properties", {}).items():
        causes.extend(_structural(child, f"{path}.properties[{key}]"))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            causes.extend(_structural(schema[key], f"{path}.{key}"))
    return causes


def _accepted(crd: Json, now: str) -> Json:
    """A new definition is accepted at once: there is no other that could hold its names."""
    spec: Json = crd.get("spec") or {}
    stored = [version["name"] for version in spec.get("versions", ()) if version.get("storage")]

    def condition(kind: str, reason: str, message: str) -> Json:
        return {"type": kind, "status": "True", "lastTransitionTime": now, "reason": reason, "message": message}

    return {
        "acceptedNames": dict(spec.get("names") or {}),
        "conditions": [
            condition("NamesAccepted", "NoConflicts", "no conflicts found"),
            condition("Established", "InitialNamesAccepted", "the initial names have been accepted"),
        ],
        "storedVersions": stored,
    }


# events.k8s.io/v1 ↔ v1: the same objects under other names.
_EVENT_NAMES = {
    "regarding": "involvedObject",
    "note": "message",
    "reportingController": "reportingComponent",
    "deprecatedSource": "source",
    "deprecatedFirstTimestamp": "firstTimestamp",
    "deprecatedLastTimestamp": "lastTimestamp",
    "deprecatedCount": "count",
}


def stored_form(resource: Resource, obj: Json) -> Json:
    """As it is stored: events in the form of the core group."""
    if resource.plural != "events" or not resource.group:
        return obj
    return {_EVENT_NAMES.get(key, key): value for key, value in obj.items()}


def served_form(resource: Resource, obj: Json) -> Json:
    """As this version of the resource shows it."""
    shown = {**obj, "apiVersion": resource.api_version, "kind": resource.kind}
    if resource.plural != "events" or not resource.group:
        return shown
    back = {stored: served for served, stored in _EVENT_NAMES.items()}
    return {back.get(key, key): value for key, value in shown.items()}
