"""Factors that users give: a constant with its origin, a CSV by hour, or a zone of a service."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from perseus_operator.errors import UnusableArgument
from perseus_operator.report.statement import FACTORS, HOUR_S, Factor, Member, Period, instant
from perseus_runtime.files import UnusableFile, read_file

OPTIONS: Final = {
    "server": "--server",
    "pue": "--pue",
    "price": "--price",
    "locationBased": "--carbon",
    "marketBased": "--carbon-market",
}
"""Options by factor."""
ZONE: Final = "electricitymaps:"
_CONSTANT: Final = re.compile(r"(?P<value>[+-]?\d+(\.\d+)?(e[+-]?\d+)?):(?P<source>.*)", re.DOTALL | re.IGNORECASE)
_MAX_BYTES: Final = 16 << 20
_MAX_SOURCE: Final = 500


@dataclass(frozen=True, kw_only=True)
class HourlyValues:
    """A factor by hours, as a source has it.

    Attributes:
        source: where it is from.
        values: by begin of the hour, Unix time.
        digest: SHA-256 of the file; empty: there is none.
        estimated: hours that the source calls estimated.
    """

    source: str
    values: Mapping[int, float]
    digest: str = ""
    estimated: frozenset[int] = frozenset()


def constant_factor(name: str, text: str) -> Factor | None:
    """Read ``VALUE:SOURCE``; None: the text is none.

    Raises:
        UnusableArgument: it has no source, or the value breaks its rule.
    """
    match = _CONSTANT.fullmatch(text)
    if match is None:
        if re.fullmatch(r"[+-]?[\d.,]+", text):
            raise UnusableArgument(f"{OPTIONS[name]}: must say where {text} is from, such as '{text}:contract of 2026'")
        return None
    source = match["source"].strip()
    if not source or len(source) > _MAX_SOURCE or not source.isprintable():
        raise UnusableArgument(f"{OPTIONS[name]}: needs a source of up to {_MAX_SOURCE} characters after the value")
    return Factor(source=source, value=_checked(name, float(match["value"]), OPTIONS[name]))


def file_values(name: str, path: Path) -> HourlyValues:
    """Read a CSV with the columns ``hour`` and ``value``, and optionally ``source``.

    Args:
        name: of the factor.
        path: of the file; its hours begin at full hours and name their time zone.

    Raises:
        UnusableArgument: it cannot be read, or breaks a rule; the message names the line.
    """
    option = OPTIONS[name]
    try:
        content = read_file(path, _MAX_BYTES)
        text = content.decode("utf-8-sig")
    except UnusableFile as error:
        raise UnusableArgument(f"{option}: {error}") from error
    except UnicodeDecodeError as error:
        raise UnusableArgument(f"{option}: {path} is no UTF-8 text") from error
    lines = csv.DictReader(io.StringIO(text), strict=True)
    values: dict[int, float] = {}
    sources = []
    try:
        if not {"hour", "value"} <= set(lines.fieldnames or ()):
            raise UnusableArgument(f"{option}: {path} needs the columns hour and value, and may have source")
        for line in lines:
            where = f"{option}: {path}, line {lines.line_num}"
            hour_s = _hour(line["hour"] or "", where)
            if hour_s in values:
                raise UnusableArgument(f"{where}: {instant(hour_s)} stands there twice")
            values[hour_s] = _checked(name, _number(line["value"] or "", where), where)
            if (source := (line.get("source") or "").strip()) and source not in sources:
                sources.append(source)
    except csv.Error as error:
        raise UnusableArgument(f"{option}: {path}, line {lines.line_num}: {error}") from error
    said = "; ".join([path.name, *sources])[:_MAX_SOURCE]
    return HourlyValues(source=said, values=values, digest=f"sha256:{hashlib.sha256(content).hexdigest()}")


def hourly_factor(name: str, given: HourlyValues, period: Period, members: tuple[Member, ...]) -> Factor:
    """Keep of a factor by hours what the period needs.

    Raises:
        UnusableArgument: it has no value for an hour in which energy was measured.
    """
    slots = period.slots
    hours = [begin_s // HOUR_S * HOUR_S for begin_s, _ in slots]
    needed = [
        hour_s
        for slot, hour_s in enumerate(hours)
        if any(member.at("energyJoules", slot) is not None for member in members)
    ]
    missing = [hour_s for hour_s in needed if hour_s not in given.values]
    if missing:
        raise UnusableArgument(
            f"{OPTIONS[name]}: {given.source} has no value for {len(missing)} of the {len(needed)} hours in which "
            f"energy was measured; the first is {instant(missing[0])}"
        )
    return Factor(
        source=given.source,
        hours=tuple(given.values.get(hour_s) for hour_s in hours),
        digest=given.digest,
        estimated_hours=sum(hour_s in given.estimated for hour_s in needed),
    )


def _hour(text: str, where: str) -> int:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None or timedelta(minutes=moment.minute, seconds=moment.second):
        raise UnusableArgument(f"{where}: hour must be a full hour with its zone, such as 2026-10-01T00:00Z")
    return int(moment.timestamp())


def _number(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UnusableArgument(f"{where}: value must be a number, not {text[:40]!r}") from None


def _checked(name: str, value: float, where: str) -> float:
    least = FACTORS[name][1]
    if not math.isfinite(value) or not least <= value <= 1e6:
        raise UnusableArgument(f"{where}: {FACTORS[name][0]} must be from {least:g} to 1,000,000, not {value:g}")
    return value
