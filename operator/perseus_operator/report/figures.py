"""The rows of a report, computed from a statement: what was measured apart from what is estimated from it.

Sums are exact (``math.fsum``), so the same statement gives the same figures on every machine, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from perseus_core.units import kwh_from_j
from perseus_operator.objects.values import Json
from perseus_operator.report.statement import (
    JOB,
    LOCATION,
    MARKET,
    POOL,
    PRICE,
    PUE,
    SERVER,
    Member,
    Statement,
)

LABEL: Final = "label:"
"""Begins a grouping by a label of namespaces, such as label:team."""
GROUPS: Final = ("job", "namespace", "class", "model")
_MILLION: Final = 1e6
_G_PER_KG: Final = 1000.0
TOTAL: Final = "total"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of some jobs, or of some pools.

    Attributes:
        kind: ``JOB`` or ``POOL``.
        name: of the group; empty: what it is grouped by is not known.
        members: how many.
        measured, estimated: figures by name, unit included; what cannot be said is left out.
    """

    kind: str
    name: str
    members: int
    measured: Mapping[str, float]
    estimated: Mapping[str, float]

    def to_json(self) -> Json:
        """As the document has it."""
        return {
            "kind": self.kind,
            "row": self.name,
            "members": self.members,
            "measured": dict(self.measured),
            "estimated": dict(self.estimated),
        }


def rows(statement: Statement, by: str) -> list[Row]:
    """Sum up members, most energy first; below those of a kind their total.

    Args:
        statement: measurements and factors.
        by: one of ``GROUPS``, or ``LABEL`` and the key of a label.
    """
    result = []
    for kind in (JOB, POOL):
        groups: dict[str, list[Member]] = {}
        for member in statement.members:
            if member.kind == kind:
                groups.setdefault(_group(member, by), []).append(member)
        of_kind = [_row(statement, kind, name, members) for name, members in groups.items()]
        result += sorted(of_kind, key=lambda row: (-row.measured.get("energyKilowattHours", 0.0), row.name))
        if len(groups) > 1:
            result.append(_row(statement, kind, TOTAL, [member for group in groups.values() for member in group]))
    return result


def _group(member: Member, by: str) -> str:
    if by.startswith(LABEL):
        return member.labels.get(by.removeprefix(LABEL), "")
    return {"job": member.path, "namespace": member.namespace, "class": member.energy_class, "model": member.model}[by]


def _row(statement: Statement, kind: str, name: str, members: list[Member]) -> Row:
    return Row(
        kind=kind,
        name=name,
        members=len(members),
        measured=_measured(members, kind),
        estimated={**_saved(members), **_factored(statement, members), **_trained(statement, members)},
    )


def _measured(members: list[Member], kind: str) -> dict[str, float]:
    figures: dict[str, float | None] = {
        "energyKilowattHours": _kwh(_total(members, "energyJoules")),
        "gpuHours": _total(members, "gpuHours"),
        "activeHours": _total(members, "activeHours"),
        "activeHoursWithoutEnergy": _unmeasured(members),
    }
    if kind == JOB:
        figures |= {
            "iterations": _total(members, "iterations"),
            "joulesPerIteration": _per(members, "iterations"),
        }
    else:
        per_token_j = _per(members, "generatedTokens")
        figures |= {
            "generatedTokens": _total(members, "generatedTokens"),
            "promptTokens": _total(members, "promptTokens"),
            "requests": _total(members, "requests"),
            "kilowattHoursPerMillionGeneratedTokens": _kwh(None if per_token_j is None else _MILLION * per_token_j),
            "joulesPerRequest": _per(members, "requests"),
        }
    return _known(figures)


def _saved(members: list[Member]) -> dict[str, float]:
    took_j = _total(members, "energyJoules", beside="baselineJoules")
    baseline_j = _total(members, "baselineJoules", beside="energyJoules")
    figures: dict[str, float | None] = {}
    if took_j is not None and baseline_j:
        figures |= {"savedKilowattHours": kwh_from_j(baseline_j - took_j), "saved": 1 - took_j / baseline_j}
    if len(members) == 1 and (share := members[0].saved) is not None:  # intervals of several do not add up
        figures |= {"savedAsMeasuredLast": share.mean, "savedLow": share.low, "savedHigh": share.high}
    return _known(figures)


def _factored(statement: Statement, members: list[Member]) -> dict[str, float]:
    site = list(site_kwh(statement, members))
    tokens = _total(members, "generatedTokens", beside="energyJoules")
    figures = {}
    if site and (SERVER in statement.factors or PUE in statement.factors):
        figures["siteKilowattHours"] = math.fsum(kwh for _, kwh in site)
    for name, figure, scale in (
        (PRICE, "cost", 1.0),
        (LOCATION, "locationBasedKilograms", _G_PER_KG),
        (MARKET, "marketBasedKilograms", _G_PER_KG),
    ):
        if site and (factor := statement.factors.get(name)) is not None:
            figures[figure] = math.fsum(kwh * factor.at(slot) for slot, kwh in site) / scale
            if tokens:
                figures[f"{figure}PerMillionGeneratedTokens"] = _MILLION * figures[figure] / tokens
    return figures


def site_kwh(statement: Statement, members: Iterable[Member]) -> Iterable[tuple[int, float]]:
    """Energy of each slot and member in which some was measured, with what server and site add as far as it is said.

    Yields:
        The slot, and kWh.
    """
    overheads = [statement.factors[name] for name in (SERVER, PUE) if name in statement.factors]
    for member in members:
        for slot, energy_j in enumerate(member.hours.get("energyJoules", ())):
            if energy_j is not None:
                kwh = kwh_from_j(energy_j)
                for factor in overheads:
                    kwh *= factor.at(slot)
                yield slot, kwh


def _trained(statement: Statement, members: list[Member]) -> dict[str, float]:
    """Of jobs whose tokens of a step the user declared."""
    declared = [member for member in members if member.kind == JOB and member.path in statement.tokens_per_step]
    tokens = math.fsum(
        statement.tokens_per_step[member.path] * (_total([member], "iterations", beside="energyJoules") or 0.0)
        for member in declared
    )
    energy_j = _total(declared, "energyJoules", beside="iterations")
    if not tokens or energy_j is None:
        return {}
    return {
        "trainedTokens": tokens,
        "kilowattHoursPerMillionTrainedTokens": kwh_from_j(_MILLION * energy_j / tokens),
    }


def _unmeasured(members: list[Member]) -> float:
    return math.fsum(
        hours
        for member in members
        for slot, hours in enumerate(member.hours.get("activeHours", ()))
        if hours and member.at("energyJoules", slot) is None
    )


def _total(members: Iterable[Member], quantity: str, *, beside: str | None = None) -> float | None:
    """A sum over members and slots, those alone in which another quantity is measured, too; None: nothing is."""
    values = [
        value
        for member in members
        for slot, value in enumerate(member.hours.get(quantity, ()))
        if value is not None and (beside is None or member.at(beside, slot) is not None)
    ]
    return math.fsum(values) if values else None


def _per(members: list[Member], quantity: str) -> float | None:
    """Joules of a unit, over hours in which both were measured."""
    energy_j, units = (
        _total(members, "energyJoules", beside=quantity),
        _total(members, quantity, beside="energyJoules"),
    )
    return energy_j / units if energy_j is not None and units else None


def _kwh(joules: float | None) -> float | None:
    return None if joules is None else kwh_from_j(joules)


def _known(figures: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if value is not None}
