"""The rules of kube-api-linter that a generated schema shows, over every CRD.

The linter reads Go types, of which there are none; each rule here has the name of its linter
(github.com/kubernetes-sigs/kube-api-linter, docs/linters.md, read 2026-11). Those of markers, comments and Go tags have
no counterpart. ``test_crd_manifests.py`` has the conventions that this project adds: sentences, units, few booleans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from perseus_operator.api.crd import definitions

Schema = dict[str, Any]
VERSIONS = {
    f"{name} {version['name']}": version
    for name, text in definitions().items()
    for version in yaml.safe_load(text)["spec"]["versions"]
}

ALLOWED = {("nophase", "perseusjobs v1alpha1.status.canary.phase"): "of a step of the canary, and stored since 0.1"}


def _fields(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema, bool]]:
    """Every field below a schema: its path, its own schema, and whether it is required."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}", inner, name in schema.get("required", ())
        yield from _fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from _fields(schema["items"], f"{path}[]")


def _own_fields(version: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Every field that is not of every object of Kubernetes."""
    for path, field, required in _fields(version["schema"]["openAPIV3Schema"]):
        if path not in (".apiVersion", ".kind"):
            yield path, field, required


def _name(path: str) -> str:
    return path.rpartition(".")[2]


BREAKS: dict[str, Callable[[str, Schema, bool], bool]] = {
    "arrayofstruct": lambda _, field, __: "properties" in field.get("items", {}) and not field["items"].get("required"),
    "conditions": lambda path, field, _: (
        path == ".status.conditions"
        and (field["x-kubernetes-list-type"], field["x-kubernetes-list-map-keys"]) != ("map", ["type"])
    ),
    "defaultorrequired": lambda _, field, required: required and "default" in field,
    "integers": lambda _, field, __: field.get("type") == "integer" and field.get("format") not in ("int32", "int64"),
    "maxlength": lambda _, field, __: (
        (
            field.get("type") == "string"
            and not {"maxLength", "enum"} & field.keys()
            and field.get("format") != "date-time"
        )
        or (field.get("type") == "array" and "maxItems" not in field)
    ),
    "nofloats": lambda _, field, __: field.get("type") == "number",
    "nonullable": lambda _, field, __: bool(field.get("nullable")),
    "nophase": lambda path, _, __: _name(path).lower() == "phase",
    "noreferences": lambda path, _, __: re.search(r"References?$", _name(path)) is not None,
    "notimestamp": lambda path, _, __: "timestamp" in _name(path).lower(),
    "ssatags": lambda _, field, __: field.get("type") == "array" and "x-kubernetes-list-type" not in field,
    "statusoptional": lambda path, _, required: re.fullmatch(r"\.status\.\w+", path) is not None and required,
}


@pytest.mark.parametrize("rule", BREAKS)
def test_no_field_breaks_the_rule(rule: str) -> None:
    breaks = BREAKS[rule]
    offenders = [
        f"{kind}{path}"
        for kind, version in VERSIONS.items()
        for path, field, required in _own_fields(version)
        if breaks(path, field, required) and (rule, f"{kind}{path}") not in ALLOWED
    ]
    assert offenders == []


def test_a_kind_with_a_status_has_it_as_a_subresource() -> None:
    without = [
        kind
        for kind, version in VERSIONS.items()
        if ("status" in version["schema"]["openAPIV3Schema"]["properties"])
        != ("status" in version.get("subresources", {}))
    ]
    assert without == []


def test_every_rule_finds_what_breaks_it() -> None:
    broken: dict[str, tuple[str, Schema, bool]] = {
        "arrayofstruct": (".spec.a", {"type": "array", "items": {"properties": {"b": {}}}}, False),
        "conditions": (
            ".status.conditions",
            {"x-kubernetes-list-type": "atomic", "x-kubernetes-list-map-keys": []},
            False,
        ),
        "defaultorrequired": (".spec.a", {"default": 1}, True),
        "integers": (".spec.a", {"type": "integer"}, False),
        "maxlength": (".spec.a", {"type": "string"}, False),
        "nofloats": (".spec.a", {"type": "number"}, False),
        "nonullable": (".spec.a", {"nullable": True}, False),
        "nophase": (".status.phase", {}, False),
        "noreferences": (".spec.workloadReference", {}, False),
        "notimestamp": (".status.lastTimestamp", {}, False),
        "ssatags": (".spec.a", {"type": "array"}, False),
        "statusoptional": (".status.a", {}, True),
    }
    assert [rule for rule, breaks in BREAKS.items() if not breaks(*broken[rule])] == []
