"""Structural schemas of custom resources: prune unknown fields, fill in defaults, and name every broken rule as
Kubernetes does.

Pure functions over a CRD's ``openAPIV3Schema``. CEL rules are not evaluated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from perseus_sim.apiserver.errors import Json, StatusCause, shown

_ROOT_FIELDS = ("apiVersion", "kind", "metadata")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def pruned(obj: Json, schema: Json) -> tuple[Json, list[str]]:
    """The object without the fields that the schema does not know, and their paths."""
    dropped: list[str] = []
    body = {key: value for key, value in obj.items() if key not in _ROOT_FIELDS}
    kept = _prune(body, schema, "", dropped)
    return {key: obj[key] for key in _ROOT_FIELDS if key in obj} | kept, dropped


def _prune(value: Any, schema: Json, path: str, dropped: list[str]) -> Any:
    if isinstance(value, list):
        items = schema.get("items")
        if not isinstance(items, dict):
            return value
        return [_prune(item, items, f"{path}[{index}]", dropped) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    properties: Json = schema.get("properties", {})
    additional = schema.get("additionalProperties")
    passed = _ROOT_FIELDS if schema.get("x-kubernetes-embedded-resource") else ()
    result: Json = {}
    for key, item in value.items():
        where = f"{path}.{key}" if path else key
        if key in properties:
            result[key] = _prune(item, properties[key], where, dropped)
        elif isinstance(additional, dict):
            result[key] = _prune(item, additional, where, dropped)
        elif additional or key in passed or schema.get("x-kubernetes-preserve-unknown-fields"):
            result[key] = item
        else:
            dropped.append(where)
    return result


def defaulted(value: Any, schema: Json) -> Any:
    """The value with the schema's defaults where a field is absent, or null where null is not allowed."""
    if isinstance(value, list):
        items = schema.get("items")
        return [defaulted(item, items) for item in value] if isinstance(items, dict) else value
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for key, child in schema.get("properties", {}).items():
        if "default" in child and (key not in result or (result[key] is None and not child.get("nullable"))):
            result[key] = copy.deepcopy(child["default"])
        if key in result:
            result[key] = defaulted(result[key], child)
    additional = schema.get("additionalProperties")
    if isinstance(additional, dict):
        for key in result.keys() - schema.get("properties", {}).keys():
            result[key] = defaulted(result[key], additional)
    return result


def broken_rules(obj: Json, schema: Json) -> list[StatusCause]:
    """Every rule of the schema that the object breaks."""
    body = {key: value for key, value in obj.items() if key not in _ROOT_FIELDS}
    return list(
        _check(body, {**schema, "required": [k for k in schema.get("required", ()) if k not in _ROOT_FIELDS]}, "")
    )


def _check(value: Any, schema: Json, path: str) -> Iterator[StatusCause]:
    if value is None and schema.get("nullable"):
        return
    if not _has_type(value, schema):
        expected = "integer,string" if schema.get("x-kubernetes-int-or-string") else schema.get("type")
        type_name = {
            dict: "object",
            list: "array",
            str: "string",
            bool: "boolean",
            int: "integer",
            type(None): "null",
        }.get(type(value), "number")
        rule = f'{path} in body must be of type {expected}: "{type_name}"'
        yield StatusCause(path, "FieldValueTypeInvalid", f"Invalid value: {shown(value)}: {rule}")
        return
    allowed = schema.get("enum")
    if allowed is not None and value not in allowed:
        supported = ", ".join(shown(item) for item in allowed)
        message = f"Unsupported value: {shown(value)}: supported values: {supported}"
        yield StatusCause(path, "FieldValueNotSupported", message)
    if isinstance(value, str):
        yield from _check_string(value, schema, path)
    elif isinstance(value, dict):
        yield from _check_object(value, schema, path)
    elif isinstance(value, list):
        yield from _check_list(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _check_number(value, schema, path)
    yield from _check_combinations(value, schema, path)


def _has_type(value: Any, schema: Json) -> bool:
    if schema.get("x-kubernetes-int-or-string"):
        return isinstance(value, int | str) and not isinstance(value, bool)
    expected = schema.get("type")
    if not expected:
        return True
    if isinstance(value, bool):
        return bool(expected == "boolean")
    if expected == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[expected])


def _check_string(value: str, schema: Json, path: str) -> Iterator[StatusCause]:
    if len(value) < schema.get("minLength", 0):
        yield StatusCause.invalid(path, value, f"{path} in body should be at least {schema['minLength']} chars long")
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        yield StatusCause(path, "FieldValueTooLong", f"Too long: may not be more than {schema['maxLength']} bytes")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield StatusCause.invalid(path, value, f"{path} in body should match '{schema['pattern']}'")
    if schema.get("format") == "date-time" and not _is_time(value):
        yield StatusCause.invalid(path, value, f'{path} in body must be of type date-time: "{value}"')


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return "T" in text


def _check_number(value: float, schema: Json, path: str) -> Iterator[StatusCause]:
    if "minimum" in schema:
        exclusive = bool(schema.get("exclusiveMinimum"))
        if value < schema["minimum"] or (exclusive and value == schema["minimum"]):
            bound = "greater than" if exclusive else "greater than or equal to"
            yield StatusCause.invalid(path, value, f"{path} in body should be {bound} {schema['minimum']}")
    if "maximum" in schema:
        exclusive = bool(schema.get("exclusiveMaximum"))
        if value > schema["maximum"] or (exclusive and value == schema["maximum"]):
            bound = "less than" if exclusive else "less than or equal to"
            yield StatusCause.invalid(path, value, f"{path} in body should be {bound} {schema['maximum']}")
    if "multipleOf" in schema and value % schema["multipleOf"]:
        yield StatusCause.invalid(path, value, f"{path} in body should be a multiple of {schema['multipleOf']}")


def _check_object(value: Json, schema: Json, path: str) -> Iterator[StatusCause]:
    properties: Json = schema.get("properties", {})
    additional = schema.get("additionalProperties")
    for key in schema.get("required", ()):
        if key not in value:
            yield StatusCause.required(f"{path}.{key}" if path else key)
    if len(value) < schema.get("minProperties", 0):
        yield StatusCause.invalid(
            path, value, f"{path} in body should have at least {schema['minProperties']} properties"
        )
    if "maxProperties" in schema and len(value) > schema["maxProperties"]:
        message = f"Too many: {len(value)}: must have at most {schema['maxProperties']} items"
        yield StatusCause(path, "FieldValueTooMany", message)
    for key, item in value.items():
        child = properties.get(key, additional)
        if isinstance(child, dict):
            yield from _check(item, child, f"{path}.{key}" if path else key)


def _check_list(value: list[Any], schema: Json, path: str) -> Iterator[StatusCause]:
    if len(value) < schema.get("minItems", 0):
        yield StatusCause.invalid(path, value, f"{path} in body should have at least {schema['minItems']} items")
    if "maxItems" in schema and len(value) > schema["maxItems"]:
        message = f"Too many: {len(value)}: must have at most {schema['maxItems']} items"
        yield StatusCause(path, "FieldValueTooMany", message)
    if isinstance(schema.get("items"), dict):
        for index, item in enumerate(value):
            yield from _check(item, schema["items"], f"{path}[{index}]")
    kind = schema.get("x-kubernetes-list-type")
    seen: list[Any] = []
    for index, item in enumerate(value if kind in ("map", "set") else ()):
        if kind == "map":
            identity = (
                {key: item.get(key) for key in schema["x-kubernetes-list-map-keys"]} if isinstance(item, dict) else item
            )
        else:
            identity = item
        if identity in seen:
            yield StatusCause(f"{path}[{index}]", "FieldValueDuplicate", f"Duplicate value: {shown(identity)}")
        seen.append(identity)


def _check_combinations(value: Any, schema: Json, path: str) -> Iterator[StatusCause]:
    for branch in schema.get("allOf", ()):
        yield from _check(value, branch, path)

    def holds(branch: Json) -> bool:
        return next(_check(value, branch, path), None) is None

    if "anyOf" in schema and not any(holds(branch) for branch in schema["anyOf"]):
        yield StatusCause.invalid(path, value, f'"{path}" must validate at least one schema (anyOf)')
    if "oneOf" in schema and sum(holds(branch) for branch in schema["oneOf"]) != 1:
        yield StatusCause.invalid(path, value, f'"{path}" must validate one and only one schema (oneOf)')
    if "not" in schema and holds(schema["not"]):
        yield StatusCause.invalid(path, value, f'"{path}" must not validate the schema (not)')
