"""Lists as tables, for ``kubectl get``: the columns of a CRD's ``additionalPrinterColumns``, and a few of built-in
kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from perseus_sim.apiserver.catalog import Resource
from perseus_sim.apiserver.errors import Json

_NAME: Json = {"name": "Name", "type": "string", "format": "name", "description": "Name"}
_AGE: Json = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def _column(name: str, path: str, kind: str = "string") -> Json:
    return {"name": name, "type": kind, "jsonPath": path}


_BUILT_IN: dict[str, tuple[Json, ...]] = {
    "pods": (
        _column("Status", ".status.phase"),
        _AGE,
        _column("Node", ".spec.nodeName"),
        _column("IP", ".status.podIP"),
    ),
    "namespaces": (_column("Status", ".status.phase"), _AGE),
    "nodes": (_column("Status", '.status.conditions[?(@.type=="Ready")].reason'), _AGE),
    "customresourcedefinitions": (_column("Created At", ".metadata.creationTimestamp"),),
    "leases": (_column("Holder", ".spec.holderIdentity"), _AGE),
    "events": (
        _column("Last Seen", ".lastTimestamp", "date"),
        _column("Type", ".type"),
        _column("Reason", ".reason"),
        _column("Object", ".involvedObject.name"),
        _column("Message", ".message"),
    ),
}
_STEP = re.compile(
    r'\.(?P<key>[\w-]+)|\[\?\(@\.(?P<by>[\w.-]+)\s*==\s*["\'](?P<equals>[^"\']*)["\']\)\]|\[(?P<index>\d+|\*)\]'
)
_BRACKET_KEY = re.compile(r"\[['\"](?P<key>[^'\"]+)['\"]\]|\\\.")


def table(resource: Resource, objects: Iterable[Json], metadata: Json, include: str = "Metadata") -> Json:
    """A ``Table`` of objects; ``include`` is what each row carries of its object: ``None``, ``Metadata`` or
    ``Object``.
    """
    columns = resource.columns or _BUILT_IN.get(resource.plural, (_AGE,))
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [_NAME, *(_definition(column) for column in columns)],
        "rows": [_row(columns, obj, include) for obj in objects],
    }


def _definition(column: Json) -> Json:
    return {
        "name": column["name"],
        "type": column["type"],
        "format": column.get("format", ""),
        "description": column.get("description", ""),
        "priority": column.get("priority", 0),
    }


def _row(columns: Iterable[Json], obj: Json, include: str) -> Json:
    row: Json = {"cells": [obj["metadata"]["name"], *(_cell(column, obj) for column in columns)]}
    if include == "Object":
        row["object"] = obj
    elif include != "None":
        row["object"] = partial(obj)
    return row


def partial(obj: Json) -> Json:
    """The metadata alone."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}


def _cell(column: Json, obj: Json) -> Any:
    values = list(_find(obj, column["jsonPath"]))
    if not values or values[0] is None:
        return "<unknown>" if column["type"] == "date" else None
    value = values[0] if len(values) == 1 else ",".join(str(item) for item in values)
    if column["type"] == "date":
        return _age(str(value))
    if column["type"] == "string":
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def _find(obj: Any, path: str) -> Iterable[Any]:
    """The values at a JSON path of the kinds that printer columns use: keys, indexes and one equality filter."""
    values = [obj]
    for step in _STEP.finditer(_BRACKET_KEY.sub(lambda match: f".{match['key']}" if match["key"] else ".", path)):
        if step["key"] is not None:
            values = [value[step["key"]] for value in values if isinstance(value, dict) and step["key"] in value]
        elif step["by"] is not None:
            values = [
                item
                for value in values
                if isinstance(value, list)
                for item in value
                if isinstance(item, dict) and str(item.get(step["by"])) == step["equals"]
            ]
        elif step["index"] == "*":
            values = [item for value in values if isinstance(value, list) for item in value]
        else:
            index = int(step["index"])
            values = [value[index] for value in values if isinstance(value, list) and index < len(value)]
    return values


def _age(timestamp: str) -> str:
    """``90`` seconds ago as ``90s``, then ``5m``, ``3h``, ``2d``, as kubectl writes ages."""
    try:
        seconds = int((datetime.now(UTC) - datetime.fromisoformat(timestamp)).total_seconds())
    except (ValueError, TypeError):
        return "<invalid>"
    for unit, size, least in (("d", 86_400, 2), ("h", 3_600, 2), ("m", 60, 2)):
        if seconds >= size * least:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"
