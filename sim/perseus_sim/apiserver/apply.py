"""Server-side apply: merge what a manager declares, and remove what it declared before and declares no more.

Ownership is stored in ``metadata.managedFields`` as a real server does, for the managers that apply. Conflicts between
managers are not refused: the last one wins, as with ``force``.
"""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

from perseus_sim.apiserver.catalog import Resource
from perseus_sim.apiserver.errors import Json
from perseus_sim.apiserver.patches import strategic_patch

_IDENTITY = ("apiVersion", "kind")
_IDENTITY_METADATA = ("name", "namespace", "managedFields")


def applied(obj: Json, declared: Json, manager: str, resource: Resource) -> Json:
    """The object after a manager has applied its declaration."""
    entries: list[Json] = list((obj.get("metadata") or {}).get("managedFields", ()))
    mine = [entry for entry in entries if entry["manager"] == manager and entry["operation"] == "Apply"]
    others = [entry for entry in entries if entry not in mine]
    owned = _fields(_owned_part(declared))
    result = copy.deepcopy(obj)
    for entry in mine:
        _remove(result, entry["fieldsV1"], owned, [other["fieldsV1"] for other in others])
    result = strategic_patch(result, declared, resource.schema)
    unchanged = bool(mine) and mine[0]["fieldsV1"] == owned
    entry = {
        "manager": manager,
        "operation": "Apply",
        "apiVersion": resource.api_version,
        "time": mine[0]["time"] if unchanged else datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "fieldsType": "FieldsV1",
        "fieldsV1": owned,
    }
    result.setdefault("metadata", {})["managedFields"] = [*others, entry]
    return result


def _owned_part(declared: Json) -> Json:
    """A declaration without what says only which object is meant."""
    part = {key: value for key, value in declared.items() if key not in _IDENTITY}
    if "metadata" in part:
        part["metadata"] = {key: value for key, value in part["metadata"].items() if key not in _IDENTITY_METADATA}
    return part


def _fields(value: Any) -> Json:
    """FieldsV1: objects by their fields; lists are owned as a whole."""
    return {f"f:{key}": _fields(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _remove(obj: Any, before: Json, now: Json, others: list[Json]) -> None:
    """Remove, in place, the fields owned before, neither declared now nor owned by others."""
    for name, inner in before.items():
        key = name.removeprefix("f:")
        elsewhere = [fields[name] for fields in others if name in fields]
        if not isinstance(obj, dict) or key not in obj:
            continue
        if name in now or elsewhere:
            _remove(obj[key], inner, now.get(name, {}), elsewhere)
        elif inner and isinstance(obj[key], dict):
            _remove(obj[key], inner, {}, [])
            if not obj[key]:
                del obj[key]
        else:
            del obj[key]
