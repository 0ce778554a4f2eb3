"""The four kinds of PATCH: JSON patch, JSON merge patch, strategic merge patch and apply patch, as pure functions.

Strategic merge knows the list keys of the built-in kinds by the lists' names, and a custom resource's by its schema.
Revisions and validity are checked elsewhere.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonpatch
import yaml

from perseus_sim.apiserver.errors import BadRequest, Json, Unprocessable, UnsupportedMediaType

JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"

# Lists of built-in kinds that are maps in truth, by name; a list of strings merges as a set under the key None.
_LIST_KEYS: dict[str, str | None] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "env": "name",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "conditions": "type",
    "addresses": "type",
    "taints": "key",
    "ownerReferences": "uid",
    "finalizers": None,
}


def parse(content_type: str, body: bytes) -> Any:
    """The patch document of a request.

    Raises:
        UnsupportedMediaType: no kind of patch that is known.
        BadRequest: not a document of that kind.
    """
    if content_type not in (JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH, APPLY_PATCH):
        raise UnsupportedMediaType(f"the body of the request was in an unknown format: {content_type}")
    try:
        document = yaml.safe_load(body) if content_type == APPLY_PATCH else json.loads(body)
    except (ValueError, yaml.YAMLError) as error:
        raise BadRequest(f"error decoding patch: {error}") from None
    if not isinstance(document, list if content_type == JSON_PATCH else dict):
        raise BadRequest("error decoding patch: a JSON patch is a list, any other an object")
    return document


def json_patch(obj: Json, operations: list[Any]) -> Json:
    """RFC 6902.

    Raises:
        Unprocessable: an operation cannot be applied.
    """
    try:
        patched = jsonpatch.apply_patch(obj, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, KeyError, TypeError) as error:
        raise Unprocessable(f"the server rejected our request due to an error in our request: {error}") from None
    if not isinstance(patched, dict):
        raise Unprocessable("the patch does not leave an object")
    return patched


def merge_patch(obj: Json, patch: Json) -> Json:
    """RFC 7386: objects merge, null removes, everything else replaces."""
    result = dict(obj)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            result[key] = merge_patch(before if isinstance(before, dict) else {}, value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def strategic_patch(obj: Json, patch: Json, schema: Json | None = None) -> Json:
    """Merge patch in which lists that are maps merge by their key, with the ``$patch`` directives of Kubernetes."""
    if patch.get("$patch") == "replace":
        return {key: copy.deepcopy(value) for key, value in patch.items() if key != "$patch"}
    retained = patch.get("$retainKeys")
    result = {key: value for key, value in obj.items() if retained is None or key in retained}
    for key, value in patch.items():
        if key.startswith("$deleteFromPrimitiveList/"):
            name = key.partition("/")[2]
            result[name] = [item for item in result.get(name, ()) if item not in value]
        elif key.startswith("$"):  # order and retention hints
            continue
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            result[key] = strategic_patch(before if isinstance(before, dict) else {}, value, _property(schema, key))
        elif isinstance(value, list):
            result[key] = _merge_list(result.get(key), value, key, _property(schema, key))
        else:
            result[key] = value
    return result


def _property(schema: Json | None, key: str) -> Json | None:
    if schema is None:
        return None
    part = schema.get("properties", {}).get(key)
    return part if isinstance(part, dict) else {}


def _list_keys(name: str, schema: Json | None) -> list[str | None]:
    """The keys by which the items of a list are identified; empty: the list is one value."""
    if schema is None:
        return [_LIST_KEYS[name]] if name in _LIST_KEYS else []
    kind = schema.get("x-kubernetes-list-type")
    if kind == "map":
        return list(schema.get("x-kubernetes-list-map-keys", ()))
    return [None] if kind == "set" else []


def _merge_list(before: object, patch: list[Any], name: str, schema: Json | None) -> list[Any]:
    keys = _list_keys(name, schema)
    existing = list(before) if isinstance(before, list) else []
    if not keys:
        return copy.deepcopy(patch)
    if keys == [None]:
        return existing + [item for item in patch if item not in existing]
    item_schema = None if schema is None else schema.get("items", {})
    for item in patch:
        same = [
            index
            for index, other in enumerate(existing)
            if isinstance(other, dict) and all(other.get(str(key)) == item.get(str(key)) for key in keys)
        ]
        if item.get("$patch") == "delete":
            existing = [other for index, other in enumerate(existing) if index not in same]
        elif same:
            existing[same[0]] = strategic_patch(existing[same[0]], item, item_schema)
        else:
            existing.append(strategic_patch({}, item, item_schema))
    return existing
