"""A typed model says once what a field is; from it come both the CRD's OpenAPI schema and the parser of raw objects.

A field is a dataclass field made by one of the constructors below; a rule on several fields is a ``Rule`` with its CEL
text for the API server and the same predicate in Python, for objects that the API server did not check (an older CRD, a
server without CEL). Parsing stops at the first problem and names the field and the rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from functools import cache
from typing import Any, Final, TypeVar

from perseus_operator.errors import InvalidSpec
from perseus_operator.objects.values import Json

T = TypeVar("T")
_KEY = "schema"
DNS_NAME: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


@dataclass(frozen=True)
class Rule:
    """A rule on one object: the CEL that the API server evaluates, and the same in Python."""

    cel: str
    message: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class FormerField:
    """How earlier releases wrote a field: its name and schema, and what makes of it what is written now. The API server
    keeps what it has stored in that way, and it is read where the field itself is absent.
    """

    name: str
    openapi: Json
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Field:
    """What one field may hold. ``parse`` raises InvalidSpec naming the path; ``openapi`` lacks the default."""

    openapi: Json
    parse: Callable[[Any, str], Any]
    required: bool
    default: Any = None
    """The default as it stands in the manifest; None: the field may be absent and is then None."""
    immutable: str = ""
    """Message of the rule that the field can be neither changed nor set nor removed later; empty: it can."""
    kept: str = ""
    """Message of the rule that the field can be changed, but neither set nor removed later; empty: it can."""
    absent: Any = None
    """What the parsed object has in place of an absent field."""
    earlier: FormerField | None = None


def _must(path: str, rule: str, value: object) -> InvalidSpec:
    shown = repr(value)
    return InvalidSpec(f"{path}: must be {rule}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")


def _field(
    openapi: Json,
    parse: Callable[[Any, str], Any],
    *,
    required: bool,
    default: Any,
    immutable: str = "",
    kept: str = "",
    absent: Any = None,
    earlier: FormerField | None = None,
) -> Any:
    if immutable:
        openapi = {**openapi, "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": immutable}]}
    metadata = {
        _KEY: Field(
            openapi, parse, required and default is None, default, immutable, immutable or kept, absent, earlier
        )
    }
    return field(metadata=metadata) if required or default is not None else field(default=absent, metadata=metadata)


def integer(
    description: str,
    *,
    minimum: int,
    maximum: int,
    default: int | None = None,
    required: bool = True,
    immutable: str = "",
) -> Any:
    """Declare an integer.

    Args:
        description: for the CRD.
        minimum: smallest value, inclusive.
        maximum: largest value, inclusive; the format is int32 unless it needs more.
        default: of an absent field.
        required: whether the field must be set if it has no default; else an absent field is None.
        immutable: message of the rule that the value cannot be changed; empty: it can.
    """

    def parse(value: Any, path: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise _must(path, f"an integer from {minimum} to {maximum}", value)
        return value

    size = "int32" if maximum < 2**31 else "int64"
    openapi = {"description": description, "type": "integer", "format": size, "minimum": minimum, "maximum": maximum}
    return _field(openapi, parse, required=required, default=default, immutable=immutable)


def text(
    description: str,
    *,
    rule: str,
    max_length: int,
    pattern: str = "",
    string_format: str = "",
    default: str | None = None,
    required: bool = True,
    immutable: str = "",
    earlier: FormerField | None = None,
    accepts: Callable[[str], bool] | None = None,
) -> Any:
    """Declare a string of 1 to ``max_length`` characters.

    Args:
        description: for the CRD.
        rule: describes pattern and format in error messages, as in "must be <rule>".
        max_length: in characters.
        pattern: regular expression that the value must match; empty: none.
        string_format: OpenAPI format; ``date-time`` is also parsed.
        default: of an absent field.
        required: whether the field must be set if it has no default.
        immutable: message of the rule that the value cannot be changed; empty: it can.
        earlier: how earlier releases wrote it; None: in the same way.
        accepts: whether a value is one that the rule means, where no pattern can say it; None: the pattern says all.
    """
    compiled = re.compile(pattern) if pattern else None

    def parse(value: Any, path: str) -> str:
        if not isinstance(value, str) or not 1 <= len(value) <= max_length or (compiled and not compiled.search(value)):
            raise _must(path, rule, value)
        if accepts is not None and not accepts(value):
            raise _must(path, rule, value)
        if string_format == "date-time":
            try:
                datetime.fromisoformat(value)
            except ValueError:
                raise _must(path, rule, value) from None
        return value

    openapi: Json = {"description": description, "type": "string", "minLength": 1, "maxLength": max_length}
    if pattern:
        openapi["pattern"] = pattern
    if string_format:
        openapi["format"] = string_format
    return _field(openapi, parse, required=required, default=default, immutable=immutable, earlier=earlier)


def choice(
    description: str, options: type[StrEnum], *, default: str | None = None, required: bool = True, immutable: str = ""
) -> Any:
    """Declare one of the values of an enumeration; parameters as of ``text``."""
    names = [option.value for option in options]

    def parse(value: Any, path: str) -> StrEnum:
        if value not in names:
            raise _must(path, f"one of {', '.join(names)}", value)
        return options(value)

    openapi = {"description": description, "type": "string", "enum": names}
    return _field(openapi, parse, required=required, default=default, immutable=immutable)


def flag(description: str, *, default: bool = False) -> Any:
    """Declare a boolean."""

    def parse(value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise _must(path, "true or false", value)
        return value

    return _field({"description": description, "type": "boolean"}, parse, required=True, default=default)


def names(description: str, *, rule: str, pattern: str, max_items: int) -> Any:
    """Declare an optional set of 1 to ``max_items`` names; ``rule`` describes a name in error messages."""
    compiled = re.compile(pattern)

    def parse(value: Any, path: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not 1 <= len(value) <= max_items or len({*map(str, value)}) < len(value):
            raise _must(path, f"a list of 1 to {max_items} different names", value)
        for number, name in enumerate(value):
            if not isinstance(name, str) or not 1 <= len(name) <= 253 or not compiled.search(name):
                raise _must(f"{path}[{number}]", rule, name)
        return tuple(value)

    openapi = {
        "description": description,
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 253, "pattern": pattern},
        "minItems": 1,
        "maxItems": max_items,
        "x-kubernetes-list-type": "set",
    }
    return _field(openapi, parse, required=False, default=None)


def labels(description: str, *, required: bool = True) -> Any:
    """Declare a map of 1 to 16 labels to values."""

    def parse(value: Any, path: str) -> Mapping[str, str]:
        items = value.items() if isinstance(value, dict) else ()
        if not 1 <= len(items) <= 16 or not all(isinstance(v, str) and len(v) <= 63 for _, v in items):
            raise _must(path, "a map of 1 to 16 labels to strings of at most 63 characters", value)
        return dict(value)

    openapi = {
        "description": description,
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 63},
        "minProperties": 1,
        "maxProperties": 16,
        "x-kubernetes-map-type": "atomic",
    }
    return _field(openapi, parse, required=required, default=None)


def nested(
    description: str,
    model: type[Any],
    *,
    required: bool = True,
    default: Json | None = None,
    immutable: str = "",
    kept: str = "",
    absent: Any = None,
) -> Any:
    """Declare an object of another model. ``default={}``: an absent object has the defaults of its fields.

    They are written out in the CRD: kube-apiserver holds a default against the object's CEL rules before it fills in
    the defaults of its fields.

    Args:
        description: for the CRD.
        model: of the object.
        required: whether the object must be set if it has no default.
        default: of an absent object.
        immutable: message of the rule that the object can be neither changed nor set nor removed; empty: it can.
        kept: message of the rule that it can be changed, but neither set nor removed; empty: it can.
        absent: what stands for an absent object once it is parsed; it is neither in the CRD nor in a dump.
    """
    default = None if default is None else dump(parse(model, default, ""))
    return _field(
        {**openapi_of(model), "description": description},
        lambda value, path: parse(model, value, path),
        required=required,
        default=default,
        immutable=immutable,
        kept=kept,
        absent=absent,
    )


def listing(description: str, model: type[Any], *, key: str, max_items: int) -> Any:
    """Declare an optional list of objects of another model, unique by ``key``: field names separated by commas."""

    def parse_items(value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > max_items:
            raise _must(path, f"a list of at most {max_items} items", value)
        return tuple(parse(model, item, f"{path}[{i}]") for i, item in enumerate(value))

    openapi = {
        "description": description,
        "type": "array",
        "items": openapi_of(model),
        "maxItems": max_items,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": key.split(","),
    }
    return _field(openapi, parse_items, required=False, default=None)


@cache
def camel(name: str) -> str:
    """``max_slowdown`` → ``maxSlowdown``, the only mapping between Python's and the API's names."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def _fields(model: type[Any]) -> list[tuple[str, Field]]:
    return [(f.name, f.metadata[_KEY]) for f in fields(model) if _KEY in f.metadata]


def _rules(model: type[Any]) -> tuple[Rule, ...]:
    rules: tuple[Rule, ...] = getattr(model, "RULES", ())
    return rules


def openapi_of(model: type[Any]) -> Json:
    """Return the structural OpenAPI v3 schema of a model, with descriptions, bounds, defaults and CEL rules."""
    properties: Json = {}
    required = []
    for name, spec in _fields(model):
        properties[camel(name)] = spec.openapi if spec.default is None else {**spec.openapi, "default": spec.default}
        if spec.earlier is not None:
            properties[camel(spec.earlier.name)] = spec.earlier.openapi
        elif spec.required:
            required.append(camel(name))
    openapi: Json = {"type": "object", "properties": properties}
    if required:
        openapi["required"] = required
    # A rule of a field does not see it come or go; that of its parent does.
    kept = [
        {"rule": f"has(self.{camel(name)}) == has(oldSelf.{camel(name)})", "message": spec.kept}
        for name, spec in _fields(model)
        if spec.kept and not spec.required and spec.default is None
    ]
    if validations := [{"rule": rule.cel, "message": rule.message} for rule in _rules(model)] + kept:
        openapi["x-kubernetes-validations"] = validations
    return openapi


def parse(model: type[T], raw: object, path: str) -> T:
    """Parse a raw object into a model.

    Args:
        model: a dataclass whose fields were made by the constructors of this module.
        raw: the object as the API server sends it.
        path: of the object, for messages.

    Raises:
        InvalidSpec: the first problem, as ``path.to.field: rule``.
    """
    if not isinstance(raw, Mapping):
        raise _must(path, "an object", raw)
    fields = {camel(name): (name, spec) for name, spec in _fields(model)}
    earlier = {camel(spec.earlier.name) for _, spec in fields.values() if spec.earlier is not None}
    for key in raw:
        if key not in fields and key not in earlier:
            raise InvalidSpec(f"{path}.{key}: unknown field; known here are {', '.join(fields)}")
    values: dict[str, Any] = {}
    for key, (name, spec) in fields.items():
        value = raw.get(key)
        if value is None and spec.earlier is not None:
            written = raw.get(camel(spec.earlier.name))
            value = None if written is None else spec.earlier.convert(written)
        if value is None:
            value = spec.default
        if value is not None:
            values[name] = spec.parse(value, f"{path}.{key}")
        elif spec.required:
            raise InvalidSpec(f"{path}.{key}: is required")
    result = model(**values)
    for rule in _rules(model):
        if not rule.holds(result):
            raise InvalidSpec(f"{path}: {rule.message}")
    return result


def parse_spec(model: type[T], raw: object) -> T:
    """Parse the spec of a custom resource.

    Args:
        model: of the spec: ``JobSpec``, ``BudgetSpec`` or ``ClassSpec``.
        raw: ``spec`` as the API server sends it; None: absent.

    Returns:
        The spec with all defaults.

    Raises:
        InvalidSpec: one line, ``spec.field: rule``.

    >>> from perseus_operator.api.job import JobSpec
    >>> parse_spec(JobSpec, {"pipeline": {"schedule": "1F1B", "stages": 4}})
    Traceback (most recent call last):
    perseus_operator.errors.InvalidSpec: spec.pipeline: microbatches must be set for a schedule by name
    """
    if raw is None:
        raise InvalidSpec("spec: is required")
    return parse(model, raw, "spec")


def dump(value: Any) -> Any:
    """Return the raw form of a typed value; fields that are absent are left out."""
    if hasattr(value, "__dataclass_fields__"):
        items = [(name, getattr(value, name), spec.absent) for name, spec in _fields(type(value))]
        return {camel(name): dump(item) for name, item, absent in items if item is not None and item is not absent}
    if isinstance(value, tuple):
        return [dump(item) for item in value]
    return str(value) if isinstance(value, StrEnum) else value
