"""Label and field selectors of list and watch requests, parsed once into predicates over objects."""

from __future__ import annotations

import re
from collections.abc import Callable

from perseus_sim.apiserver.catalog import Resource
from perseus_sim.apiserver.errors import BadRequest, Json

Predicate = Callable[[Json], bool]

_SET = re.compile(r"\s*(?P<key>[\w./-]+)\s+(?P<op>in|notin)\s*\((?P<values>[^)]*)\)\s*")
_EQUAL = re.compile(r"\s*(?P<key>[\w./-]+)\s*(?P<op>==|=|!=)\s*(?P<value>[\w.:/-]*)\s*")
_EXISTS = re.compile(r"\s*(?P<not>!?)\s*(?P<key>[\w./-]+)\s*")

_FIELDS = {
    "pods": {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase"},
    "events": {"type", "reason", "reportingComponent", "source"},
    "nodes": {"spec.unschedulable"},
    "namespaces": {"status.phase"},
    "secrets": {"type"},
}
_INVOLVED = re.compile(r"(involvedObject|regarding)\.(kind|namespace|name|uid|apiVersion|resourceVersion|fieldPath)")


def label_selector(text: str) -> Predicate:
    """``app=a,tier in (x,y),!gone`` as a predicate.

    Raises:
        BadRequest: not a selector.
    """
    tests: list[Callable[[dict[str, str]], bool]] = []
    for part in _split(text):
        if match := _SET.fullmatch(part):
            values = {value.strip() for value in match["values"].split(",")}
            tests.append(_one_of(match["key"], values, negated=match["op"] == "notin"))
        elif match := _EQUAL.fullmatch(part):
            tests.append(_one_of(match["key"], {match["value"]}, negated=match["op"] == "!="))
        elif match := _EXISTS.fullmatch(part):
            tests.append(_exists(match["key"], negated=bool(match["not"])))
        else:
            raise BadRequest(f"unable to parse requirement: {part!r} is not a label selector")
    return lambda obj: _all(tests, obj["metadata"].get("labels") or {})


def field_selector(text: str, resource: Resource) -> Predicate:
    """``metadata.name=x,status.phase!=Running`` as a predicate.

    Raises:
        BadRequest: not a selector, or a field that this resource cannot be selected by.
    """
    allowed = {"metadata.name", "metadata.namespace", *_FIELDS.get(resource.plural, ()), *resource.selectable_fields}
    tests: list[Predicate] = []
    for part in _split(text):
        match = _EQUAL.fullmatch(part)
        if match is None:
            raise BadRequest(f"invalid field selector: {part!r}")
        path = match["key"]
        if path not in allowed and not (resource.plural == "events" and _INVOLVED.fullmatch(path)):
            raise BadRequest(f"field label not supported: {path}")
        tests.append(_field(path.replace("regarding.", "involvedObject."), match["value"], negated=match["op"] == "!="))
    return lambda obj: all(test(obj) for test in tests)


def _all(tests: list[Callable[[dict[str, str]], bool]], labels: dict[str, str]) -> bool:
    return all(test(labels) for test in tests)


def _split(text: str) -> list[str]:
    """At the commas that are not inside parentheses."""
    return [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]


def _one_of(key: str, values: set[str], *, negated: bool) -> Callable[[dict[str, str]], bool]:
    # As in Kubernetes, "not equal" also holds where the label is absent.
    return lambda labels: (labels.get(key) in values) != negated


def _exists(key: str, *, negated: bool) -> Callable[[dict[str, str]], bool]:
    return lambda labels: (key in labels) != negated


def _field(path: str, value: str, *, negated: bool) -> Predicate:
    def test(obj: Json) -> bool:
        part: object = obj
        for name in path.split("."):
            part = part.get(name) if isinstance(part, dict) else None
        text = "" if part is None else str(part).lower() if isinstance(part, bool) else str(part)
        return (text == value) != negated

    return test
