"""One statement of several whose periods adjoin, such as a month of its days.

A merged statement is what one of the whole period would have been: hours stand one behind the other, and what is
*measured last* is what the last part has of it. So intervals are not combined: those of a job's days rest on the same
comparisons, and are no independent samples. What the parts were is kept by their digests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from perseus_operator.errors import UnusableArgument
from perseus_operator.report.statement import (
    HOUR_S,
    MAX_DAYS,
    Factor,
    Hourly,
    Member,
    Part,
    Period,
    Share,
    Statement,
    instant,
)

_DAY_S: Final = 86_400


@dataclass(frozen=True, kw_only=True)
class Source:
    """A statement as it was stored.

    Attributes:
        name: of its file, for messages.
        digest: of its data.
    """

    name: str
    digest: str
    statement: Statement


def merge(sources: Sequence[Source], replaced: Set[str] = frozenset()) -> Statement:
    """Merge statements, in any order; of a single one nothing is changed.

    Args:
        sources: at least one.
        replaced: factors that are given anew, and need not be in all parts.

    Raises:
        UnusableArgument: their periods do not adjoin, or they say different things of the same; the message names two.
    """
    if len(sources) == 1:
        return sources[0].statement
    ordered = sorted(sources, key=lambda source: source.statement.period.begin_s)
    first, last = ordered[0].statement, ordered[-1].statement
    for before, after in pairwise(ordered):
        _adjoin(before, after)
    period = Period(begin_s=first.period.begin_s, end_s=last.period.end_s)
    if period.end_s - period.begin_s > MAX_DAYS * _DAY_S:
        raise UnusableArgument(f"--from: the files together may last at most {MAX_DAYS} days")
    for what, value_of in _THE_SAME.items():
        _agree(ordered, what, value_of)
    return Statement(
        period=period,
        taken_s=max(source.statement.taken_s for source in ordered),
        scope=first.scope,
        origin=_joined(source.statement.origin for source in ordered),
        queries=first.queries,
        program=_joined(source.statement.program for source in ordered),
        members=_members(ordered),
        measured_hours=tuple(hours for source in ordered for hours in source.statement.measured_hours),
        factors=_factors(ordered, replaced),
        currency=first.currency,
        organization=first.organization,
        tokens_per_step=_tokens(ordered),
        parts=tuple(
            Part(
                begin_s=source.statement.period.begin_s,
                end_s=source.statement.period.end_s,
                digest=source.digest,
            )
            for source in ordered
        ),
    )


_THE_SAME: Final[dict[str, Callable[[Statement], Any]]] = {
    "scope": lambda statement: statement.scope,
    "currency": lambda statement: statement.currency or "none",
    "organization": lambda statement: statement.organization or "none",
}
"""What a statement has one of. Its boundary is that of its factors."""


def _adjoin(before: Source, after: Source) -> None:
    end_s, begin_s = before.statement.period.end_s, after.statement.period.begin_s
    if end_s != begin_s:
        raise UnusableArgument(
            f"--from: {before.name} ends at {instant(end_s)} and {after.name} begins at {instant(begin_s)}: periods"
            f" must adjoin, and {'a time is missing' if end_s < begin_s else 'these overlap'}"
        )
    if end_s % HOUR_S:
        raise UnusableArgument(
            f"--from: {before.name} ends at {instant(end_s)}: periods must meet at a full hour, as hours are what a"
            " report adds up"
        )
    if before.statement.queries != after.statement.queries:
        raise UnusableArgument(
            f"--from: {before.name} and {after.name} were read by different queries, by"
            f" {before.statement.program} and {after.statement.program}: their figures do not mean the same"
        )


def _agree(sources: Sequence[Source], what: str, value_of: Callable[[Statement], Any]) -> None:
    first = sources[0]
    for other in sources[1:]:
        if value_of(other.statement) != value_of(first.statement):
            raise UnusableArgument(
                f"--from: the {what} of {first.name} is {value_of(first.statement)}, and that of {other.name} is"
                f" {value_of(other.statement)}: it must be the same"
            )


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _tokens(sources: Sequence[Source]) -> dict[str, float]:
    tokens: dict[str, float] = {}
    for source in sources:
        for path, number in source.statement.tokens_per_step.items():
            if tokens.setdefault(path, number) != number:
                raise UnusableArgument(
                    f"--from: {source.name} declares {number:g} tokens for a step of {path}, and a file before it"
                    f" {tokens[path]:g}: it must be the same"
                )
    return dict(sorted(tokens.items()))


def _factors(sources: Sequence[Source], replaced: Set[str]) -> dict[str, Factor]:
    names = dict.fromkeys(name for source in sources for name in source.statement.factors if name not in replaced)
    for name in names:
        without = next((source for source in sources if name not in source.statement.factors), None)
        if without is not None:
            raise UnusableArgument(
                f"--from: {without.name} has no factor {name}, and others have: the boundary must be the same; give"
                " the factor for all of them"
            )
    return {name: _factor(name, sources) for name in names}


def _factor(name: str, sources: Sequence[Source]) -> Factor:
    factors = [source.statement.factors[name] for source in sources]
    if factors[0].value is not None and all(factor == factors[0] for factor in factors):
        return factors[0]
    hours: list[float | None] = []
    for source, factor in zip(sources, factors, strict=True):
        slots = len(source.statement.period.slots)
        hours += factor.hours if factor.value is None else [factor.value] * slots
    digests = {factor.digest for factor in factors}
    return Factor(
        source=_joined(factor.source for factor in factors),
        hours=tuple(hours),
        digest=digests.pop() if len(digests) == 1 else "",
        estimated_hours=sum(factor.estimated_hours for factor in factors),
    )


def _members(sources: Sequence[Source]) -> tuple[Member, ...]:
    """Each job and pool once; of what was edited meanwhile the latest that is known."""
    slots = [len(source.statement.period.slots) for source in sources]
    parts: dict[tuple[str, str, str], dict[int, Member]] = {}
    for number, source in enumerate(sources):
        for member in source.statement.members:
            parts.setdefault((member.kind, member.namespace, member.name), {})[number] = member
    return tuple(_member(parts[key], slots) for key in sorted(parts))


def _member(parts: dict[int, Member], slots: Sequence[int]) -> Member:
    latest, energy_class, model, saved = next(iter(parts.values())), "", "", None
    labels: dict[str, str] = {}
    for member in parts.values():
        latest, labels = member, {**labels, **member.labels}
        energy_class, model = member.energy_class or energy_class, member.model or model
        saved = _latest(saved, member.saved)
    quantities = dict.fromkeys(quantity for member in parts.values() for quantity in member.hours)

    def hours(quantity: str) -> Hourly:
        values: list[float | None] = []
        for number, length in enumerate(slots):
            part = parts[number].hours.get(quantity) if number in parts else None
            values += part if part is not None else [None] * length
        return tuple(values)

    return replace(
        latest,
        energy_class=energy_class,
        model=model,
        labels=labels,
        saved=saved,
        hours={quantity: hours(quantity) for quantity in quantities},
    )


def _latest(before: Share | None, after: Share | None) -> Share | None:
    return before if after is None else after
