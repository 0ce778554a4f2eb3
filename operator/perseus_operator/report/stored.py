"""A statement as the file that an auditor keeps: its data with their digest, and the figures that follow from them.

Reading such a file checks both: the digest is that of the data, and the figures, computed again, are those of the file.
The same statement gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from perseus_operator.errors import UnusableArgument
from perseus_operator.objects.values import Json
from perseus_operator.report.figures import GROUPS, LABEL, rows
from perseus_operator.report.statement import (
    FACTORS,
    JOB,
    MAX_DAYS,
    MEASURED,
    METHOD,
    POOL,
    Factor,
    Member,
    Part,
    Period,
    Share,
    Statement,
    instant,
)
from perseus_runtime.files import UnusableFile, read_file

KIND: Final = "EnergyStatement"
VERSION: Final = "report.perseus.energy/v1alpha1"
_MAX_BYTES: Final = 512 << 20
_MAX_MEMBERS: Final = 100_000
_MAX_TEXT: Final = 10_000
_DAY_S: Final = 86_400


def document(statement: Statement, by: str) -> Json:
    """Return the file's content; ``by``: how its figures are grouped."""
    data = _to_json(statement)
    return {
        "apiVersion": VERSION,
        "kind": KIND,
        "digest": digest(statement),
        "period": {"begin": instant(statement.period.begin_s), "end": instant(statement.period.end_s)},
        "boundary": statement.boundary(),
        "method": METHOD,
        "figures": {"by": by, "rows": [row.to_json() for row in rows(statement, by)]},
        "data": data,
    }


def digest(statement: Statement) -> str:
    """SHA-256 of a statement's data: of their JSON with sorted keys, without spaces, in UTF-8."""
    text = json.dumps(_to_json(statement), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write(statement: Statement, by: str) -> str:
    """Return the file's text; the hours of a quantity stand in one line."""
    return _text(document(statement, by), "\n")


def _text(value: Any, line: str) -> str:
    """JSON with a line for each field and object, but for lists of plain values; ``line`` begins a new one."""
    inner = f"{line} "
    if isinstance(value, dict) and value:
        fields = (f"{json.dumps(name, ensure_ascii=False)}: {_text(one, inner)}" for name, one in value.items())
        return f"{{{inner}{f',{inner}'.join(fields)}{line}}}"
    if isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        return f"[{inner}{f',{inner}'.join(_text(one, inner) for one in value)}{line}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def read(path: Path) -> tuple[Statement, str]:
    """Read a file, and check that its figures follow from its data.

    Returns:
        The statement, and how the file's figures are grouped.

    Raises:
        UnusableArgument: it cannot be read, is no such file, or was changed since it was written.
    """
    try:
        stored = json.loads(read_file(path, _MAX_BYTES), parse_constant=_refuse)
    except UnusableFile as error:
        raise UnusableArgument(f"--from: {error}") from error
    except (ValueError, RecursionError):
        raise UnusableArgument(f"--from: {path} is no JSON") from None
    if not isinstance(stored, dict) or (stored.get("apiVersion"), stored.get("kind")) != (VERSION, KIND):
        raise UnusableArgument(f"--from: {path} is no {KIND} of {VERSION}, as --format json writes it")
    try:
        statement = _statement(_Part(stored, "").part("data"))
        by = _Part(stored, "").part("figures").text("by")
    except _Broken as error:
        raise UnusableArgument(f"--from: {path}: {error}") from None
    if by not in GROUPS and not by.startswith(LABEL):
        raise UnusableArgument(f"--from: {path}: figures.by: must be one of {', '.join(GROUPS)} or {LABEL}KEY")
    again = document(statement, by)
    if stored.get("digest") != again["digest"] or stored.get("data") != again["data"]:
        raise UnusableArgument(
            f"--from: {path} was changed: the digest of its data is {again['digest']}, not {stored.get('digest')}"
        )
    if stored != again:
        changed = next(name for name in {**stored, **again} if stored.get(name) != again.get(name))
        raise UnusableArgument(f"--from: {path} was changed: its {changed} do not follow from its data")
    return statement, by


def _refuse(text: str) -> None:
    raise ValueError(text)


def _to_json(statement: Statement) -> Json:
    data: Json = {
        "period": {"beginSeconds": statement.period.begin_s, "endSeconds": statement.period.end_s},
        "takenSeconds": statement.taken_s,
        "scope": statement.scope,
        "origin": statement.origin,
        "program": statement.program,
        "organization": statement.organization,
        "currency": statement.currency,
        "quantities": dict(MEASURED),
        "queries": dict(statement.queries),
        "measuredHours": list(statement.measured_hours),
        "tokensPerStep": dict(statement.tokens_per_step),
        "factors": {name: _factor_json(factor) for name, factor in statement.factors.items()},
        "members": [_member_json(member) for member in statement.members],
    }
    if statement.parts:
        data["parts"] = [
            {"beginSeconds": part.begin_s, "endSeconds": part.end_s, "digest": part.digest} for part in statement.parts
        ]
    return data


def _factor_json(factor: Factor) -> Json:
    if factor.value is not None:
        return {"source": factor.source, "value": factor.value}
    return {
        "source": factor.source,
        "digest": factor.digest,
        "estimatedHours": factor.estimated_hours,
        "hours": list(factor.hours),
    }


def _member_json(member: Member) -> Json:
    saved = member.saved
    return {
        "kind": member.kind,
        "namespace": member.namespace,
        "name": member.name,
        "class": member.energy_class,
        "model": member.model,
        "labels": dict(member.labels),
        "saved": None if saved is None else {"mean": saved.mean, "low": saved.low, "high": saved.high},
        "hours": {quantity: list(values) for quantity, values in member.hours.items()},
    }


class _Broken(Exception):
    """A field breaks its rule; the message names both."""


class _Part:
    """An object of the file, read field by field."""

    def __init__(self, value: Any, path: str) -> None:
        if not isinstance(value, dict):
            raise _Broken(f"{path or 'it'}: must be an object")
        self.value: Mapping[str, Any] = value
        self._path = f"{path}." if path else ""

    def part(self, name: str) -> _Part:
        return _Part(self.value.get(name), self._path + name)

    def parts(self, name: str) -> list[_Part]:
        members = self.value.get(name)
        if not isinstance(members, list) or len(members) > _MAX_MEMBERS:
            raise _Broken(f"{self._path}{name}: must be a list of at most {_MAX_MEMBERS:,}")
        return [_Part(one, f"{self._path}{name}[{index}]") for index, one in enumerate(members)]

    def text(self, name: str) -> str:
        return str(self._value(name, _is_text, f"must be a text of at most {_MAX_TEXT:,} characters"))

    def integer(self, name: str) -> int:
        return int(self._value(name, _is_moment, "must be a whole number"))

    def number(self, name: str) -> float:
        number: float = self._value(name, _is_number, "must be a number")
        return number

    def maybe_number(self, name: str) -> float | None:
        return None if self.value.get(name) is None else self.number(name)

    def hours(self, name: str, slots: int) -> tuple[float | None, ...]:
        hours = self.value.get(name)
        if (
            not isinstance(hours, list)
            or len(hours) != slots
            or not all(one is None or _is_number(one) for one in hours)
        ):
            raise _Broken(f"{self._path}{name}: must be {slots} numbers or nulls, one for each hour of the period")
        return tuple(hours)

    def texts(self, name: str) -> dict[str, str]:
        part = self.part(name)
        return {key: part.text(key) for key in part.value}

    def _value(self, name: str, holds: Callable[[Any], bool], rule: str) -> Any:
        value = self.value.get(name)
        if not holds(value):
            raise _Broken(f"{self._path}{name}: {rule}")
        return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


def _is_moment(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 40


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e30


def _statement(data: _Part) -> Statement:
    limits = data.part("period")
    period = Period(begin_s=limits.integer("beginSeconds"), end_s=limits.integer("endSeconds"))
    if not 0 < period.end_s - period.begin_s <= MAX_DAYS * _DAY_S:
        raise _Broken(f"data.period: must end after its begin, and last at most {MAX_DAYS} days")
    slots = len(period.slots)
    tokens = data.part("tokensPerStep")
    factors = {
        name: _factor(data.part("factors").part(name), slots) for name in data.part("factors").value if name in FACTORS
    }
    members = tuple(_member(part, slots) for part in data.parts("members"))
    for name, factor in factors.items():
        if factor.value is None:
            for member in members:
                for slot, energy_j in enumerate(member.hours.get("energyJoules", ())):
                    if energy_j is not None and factor.hours[slot] is None:
                        raise _Broken(f"data.factors.{name}.hours[{slot}]: must be a number: energy was measured then")
    return Statement(
        period=period,
        taken_s=data.integer("takenSeconds"),
        scope=data.text("scope"),
        origin=data.text("origin"),
        program=data.text("program"),
        organization=data.text("organization"),
        currency=data.text("currency"),
        queries=data.texts("queries"),
        measured_hours=data.hours("measuredHours", slots),
        tokens_per_step={key: tokens.number(key) for key in tokens.value},
        factors=factors,
        members=members,
        parts=_parts(data, period) if "parts" in data.value else (),
    )


def _parts(data: _Part, period: Period) -> tuple[Part, ...]:
    parts = tuple(
        Part(begin_s=one.integer("beginSeconds"), end_s=one.integer("endSeconds"), digest=one.text("digest"))
        for one in data.parts("parts")
    )
    edges = [period.begin_s, *(part.end_s for part in parts)]
    if [part.begin_s for part in parts] != edges[:-1] or edges[-1] != period.end_s:
        raise _Broken("data.parts: must adjoin, from the begin of the period to its end")
    return parts


def _factor(part: _Part, slots: int) -> Factor:
    if "value" in part.value:
        return Factor(source=part.text("source"), value=part.number("value"))
    return Factor(
        source=part.text("source"),
        digest=part.text("digest"),
        estimated_hours=part.integer("estimatedHours"),
        hours=part.hours("hours", slots),
    )


def _member(part: _Part, slots: int) -> Member:
    kind, hours = part.text("kind"), part.part("hours")
    if kind not in (JOB, POOL):
        raise _Broken(f"data.members: kind must be {JOB} or {POOL}, not {kind[:40]!r}")
    return Member(
        kind=kind,
        namespace=part.text("namespace"),
        name=part.text("name"),
        energy_class=part.text("class"),
        model=part.text("model"),
        labels=part.texts("labels"),
        saved=None if part.value.get("saved") is None else _share(part.part("saved")),
        hours={name: hours.hours(name, slots) for name in hours.value if name in MEASURED},
    )


def _share(part: _Part) -> Share:
    return Share(mean=part.number("mean"), low=part.maybe_number("low"), high=part.maybe_number("high"))
