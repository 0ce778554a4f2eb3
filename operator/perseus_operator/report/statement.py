"""What was measured of jobs and pools in each hour of a period, and the factors by which it becomes money and carbon
dioxide.

A statement holds measurements and factors alone, each with where it is from. Every figure of a report is computed from
it by ``figures``, so that a statement that was kept gives the report in any format and grouping, also when the
Prometheus has forgotten the period.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

HOUR_S: Final = 3600
LEAST_GAP_H: Final = 0.05
"""Three minutes: looks at each minute, at a series that is scraped each minute, miss up to two of a shorter slot."""
_SAID_IN_MINUTES_H: Final = 6.0
MAX_DAYS: Final = 366
"""Of a period: a year, which is as far as a Prometheus answers by hours (11,000 points)."""

JOB, POOL = "job", "pool"
MEASURED: Final = {
    "energyJoules": "of all GPUs, by their own counters",
    "baselineJoules": "what the same iterations take at default clocks, as measured last",
    "iterations": "whose energy was measured",
    "generatedTokens": "of requests",
    "promptTokens": "that were computed",
    "requests": "that ended",
    "gpuHours": "GPUs held, looked at each minute",
    "activeHours": "in which pods ran, looked at each minute",
}
"""Quantities of an hour, and what they are."""

SERVER, PUE, PRICE, LOCATION, MARKET = "server", "pue", "price", "locationBased", "marketBased"
FACTORS: Final = {
    SERVER: ("energy of a whole server, divided by that of its GPUs", 1.0),
    PUE: ("energy of the site, divided by that of its computers", 1.0),
    PRICE: ("price of a kWh", -1000.0),
    LOCATION: ("grams of CO2 equivalent of a kWh of the grid (GHG Protocol, Scope 2, location-based)", 0.0),
    MARKET: ("grams of CO2 equivalent of a kWh as bought (GHG Protocol, Scope 2, market-based)", 0.0),
}
"""Factors, what they are, and their least value: prices of an hour were below zero."""


@dataclass(frozen=True, kw_only=True)
class Period:
    """A time that is past.

    Attributes:
        begin_s, end_s: Unix time.
    """

    begin_s: int
    end_s: int

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Begin and end of each hour of the clock (UTC), the first and the last as far as they lie in the period."""
        cuts = range((self.begin_s // HOUR_S + 1) * HOUR_S, self.end_s, HOUR_S)
        edges = [self.begin_s, *cuts, self.end_s]
        return list(pairwise(edges))


@dataclass(frozen=True, kw_only=True)
class Share:
    """What is saved of the energy of an iteration or a token, as measured last.

    Attributes:
        mean: a ratio.
        low, high: ends of its 95 % interval; None: it has none yet.
    """

    mean: float
    low: float | None = None
    high: float | None = None


Hourly = tuple[float | None, ...]
"""A quantity in each slot of the period; None: not measured."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """A job or a pool, and what was measured of it.

    Attributes:
        kind: ``JOB`` or ``POOL``.
        namespace, name: of the object.
        energy_class, model: of which it was made, and what it trains or serves; empty: not known.
        labels: of its namespace, those that were asked for.
        hours: quantities by name, see ``MEASURED``; those that nobody measured are left out.
        saved: None: not measured.
    """

    kind: str
    namespace: str
    name: str
    energy_class: str = ""
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    hours: Mapping[str, Hourly] = field(default_factory=dict)
    saved: Share | None = None

    @property
    def path(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    def at(self, quantity: str, slot: int) -> float | None:
        """A quantity in a slot; None: not measured."""
        values = self.hours.get(quantity)
        return None if values is None else values[slot]


@dataclass(frozen=True, kw_only=True)
class Factor:
    """By what energy is multiplied, and who says so.

    Attributes:
        source: where it is from, for those who check the report.
        value: of the whole period; None: it has ``hours``.
        hours: of each slot; None where the source has none.
        digest: SHA-256 of the file that held it; empty: none did.
        estimated_hours: how many the source calls estimated.
    """

    source: str
    value: float | None = None
    hours: Hourly = ()
    digest: str = ""
    estimated_hours: int = 0

    def at(self, slot: int) -> float:
        """Its value in a slot in which energy was measured."""
        value = self.hours[slot] if self.value is None else self.value
        if value is None:
            raise ValueError(f"no value in slot {slot}")
        return value


@dataclass(frozen=True, kw_only=True)
class Part:
    """A statement of which a merged one was made.

    Attributes:
        begin_s, end_s: of its period, Unix time.
        digest: of its data.
    """

    begin_s: int
    end_s: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Statement:
    """All that a report is computed from.

    Attributes:
        period: of all quantities.
        taken_s: when they were read, Unix time.
        scope: which namespaces.
        origin: address of the Prometheus that had them.
        queries: in PromQL, by quantity.
        program: which release of this project read them.
        members: jobs and pools in which something was measured.
        measured_hours: of each slot, in which energy of any member was measured, looked at each minute; None: in none.
        factors: by name, see ``FACTORS``.
        currency: of the price, ISO 4217; empty: there is no price.
        organization: whose report it is; empty: not said.
        tokens_per_step: declared by the user, by namespace and name of a job.
        parts: of which it was merged, in order; empty: it was read at once.
    """

    period: Period
    taken_s: int
    scope: str
    origin: str
    queries: Mapping[str, str]
    program: str
    members: tuple[Member, ...]
    measured_hours: Hourly
    factors: Mapping[str, Factor] = field(default_factory=dict)
    currency: str = ""
    organization: str = ""
    tokens_per_step: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()

    def boundary(self) -> str:
        """Which energy was measured, and what was added to it by factors."""
        measured = (
            "GPU boards by their own counters: of jobs, in iterations since their baseline was measured; of pools, all "
            "GPUs of their replicas, idle or not"
        )
        steps = [text for name, text in ((SERVER, "whole servers"), (PUE, "the site")) if name in self.factors]
        return f"{measured}; estimated from that: {' and '.join(steps)}" if steps else measured

    def gap(self) -> str:
        """In how much of the period energy was measured, where that is not all of it; empty: in all."""
        period_h = (self.period.end_s - self.period.begin_s) / HOUR_S
        measured_h = math.fsum(hours or 0.0 for hours in self.measured_hours)
        slots = [slot for slot, hours in zip(self.period.slots, self.measured_hours, strict=True) if hours]
        if not slots or period_h - measured_h < LEAST_GAP_H:
            return ""
        begin_s, end_s = slots[0][0], slots[-1][1]
        between = f", all between {instant(begin_s)} and {instant(end_s)}"
        share = f"energy was measured in {measured_h:,.1f} of {period_h:,.1f} hours"
        if period_h < _SAID_IN_MINUTES_H:
            share = f"energy was measured in {60 * measured_h:.0f} of {60 * period_h:.0f} minutes"
        return share if (begin_s, end_s) == (self.period.begin_s, self.period.end_s) else share + between


def instant(unix_s: int) -> str:
    """A time as RFC 3339 has it, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


METHOD: Final = (
    "saved: of a job, the difference between what its iterations took and what the same iterations take at default "
    "clocks, measured before the first plan and again and again in between; of a pool, by switching replicas back to "
    "default clocks at random. Intervals hold the true mean with 95 % confidence (Student's t), as measured last."
)
"""Of the baseline."""
