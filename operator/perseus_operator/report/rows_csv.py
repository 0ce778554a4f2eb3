"""A report as CSV: a row each, units in the names of columns, measured apart from estimated."""

from __future__ import annotations

import csv
import io
from typing import Final

from perseus_operator.report.figures import rows
from perseus_operator.report.statement import FACTORS, Statement, instant

MEASURED: Final = (
    "energyKilowattHours",
    "gpuHours",
    "activeHours",
    "activeHoursWithoutEnergy",
    "iterations",
    "joulesPerIteration",
    "generatedTokens",
    "promptTokens",
    "kilowattHoursPerMillionGeneratedTokens",
    "requests",
    "joulesPerRequest",
)
ESTIMATED: Final = (
    "savedKilowattHours",
    "saved",
    "savedAsMeasuredLast",
    "savedLow",
    "savedHigh",
    "trainedTokens",
    "kilowattHoursPerMillionTrainedTokens",
    "siteKilowattHours",
    "cost",
    "locationBasedKilograms",
    "marketBasedKilograms",
    "costPerMillionGeneratedTokens",
    "locationBasedKilogramsPerMillionGeneratedTokens",
    "marketBasedKilogramsPerMillionGeneratedTokens",
)
_SPREADSHEET: Final = ("=", "+", "-", "@", "\t", "\r")
"""With which a cell begins that a spreadsheet takes for a formula; names come from tenants."""


def write(statement: Statement, by: str, digest: str) -> str:
    """Format a statement; arguments as of ``table.write``. Empty cells: not known."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    sources = [f"source_{name}" for name in FACTORS]
    measured, estimated = [f"measured_{name}" for name in MEASURED], [f"estimated_{name}" for name in ESTIMATED]
    about = ["kind", "by", "row", "members", "period_begin", "period_end"]
    lines.writerow([*about, *measured, *estimated, "currency", *sources, "boundary", "origin", "digest"])
    for row in rows(statement, by):
        lines.writerow(
            [
                *(row.kind, by, plain(row.name), row.members),
                *(instant(statement.period.begin_s), instant(statement.period.end_s)),
                *(row.measured.get(name, "") for name in MEASURED),
                *(row.estimated.get(name, "") for name in ESTIMATED),
                statement.currency,
                *(plain(statement.factors[name].source) if name in statement.factors else "" for name in FACTORS),
                *(statement.boundary(), statement.origin, digest),
            ]
        )
    return text.getvalue().rstrip("\n")


def plain(text: str) -> str:
    """A text that no spreadsheet computes."""
    return f"'{text}" if text.startswith(_SPREADSHEET) else text
