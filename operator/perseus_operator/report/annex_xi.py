"""A report as text for the technical documentation of a general-purpose AI model: Regulation (EU) 2024/1689, Annex XI,
section 1, point 2 (d) and (e), in the units of the *Model Documentation Form* of the Code of Practice (days, MWh, at
least two significant figures).

Jobs are training and pools are the use of a model, which point (e) does not ask for and which stands apart. What we do
not know is said to be missing, never left out.
"""

from __future__ import annotations

from typing import Final

from perseus_operator.objects.formatting import counted
from perseus_operator.report.figures import TOTAL, Row, rows
from perseus_operator.report.statement import FACTORS, JOB, METHOD, Statement, instant

REGULATION: Final = "Regulation (EU) 2024/1689, Annex XI, section 1, point 2"
_HOURS_A_DAY: Final = 24.0
_KWH_A_MWH: Final = 1000.0


def write(statement: Statement, by: str, digest: str) -> str:
    """Format a statement as Markdown; arguments as of ``table.write``."""
    period = statement.period
    measured = [row for row in rows(statement, by) if row.name != TOTAL and "energyKilowattHours" in row.measured]
    lines = [
        "# Computational resources, training time and energy",
        "",
        f"{REGULATION} (d) and (e). Provider: {_plain(statement.organization) or 'to be added'}.",
        "",
        f"From {instant(period.begin_s)} to {instant(period.end_s)}, {statement.scope}. What a model used before or "
        "after, and on computers that were not measured, is not in these figures.",
    ]
    for row in measured:
        lines += ["", *(_training if row.kind == JOB else _use)(statement, row, by)]
    if not measured:
        lines += ["", "No energy of jobs or pools was measured in this period."]
    lines += ["", "## How it was measured", "", f"- Boundary: {statement.boundary()}."]
    if gap := statement.gap():
        lines += [f"- {gap[0].upper()}{gap[1:]}."]
    lines += [f"- {METHOD[0].upper()}{METHOD[1:]}"]
    lines += [
        f"- Factor {name} ({FACTORS[name][0]}): {'by the hour' if factor.value is None else f'{factor.value:g}'}. "
        f"Source: {_plain(factor.source)}"
        for name, factor in statement.factors.items()
    ]
    lines += [f"- Read from {statement.origin} at {instant(statement.taken_s)} by {statement.program}."]
    return "\n".join([*lines, f"- Computed from the statement with digest {digest}."])


def _training(statement: Statement, row: Row, by: str) -> list[str]:
    gpu_days, days = (row.measured.get(name, 0.0) / _HOURS_A_DAY for name in ("gpuHours", "activeHours"))
    without = row.measured.get("activeHoursWithoutEnergy", 0.0)
    return [
        f"## Training: {by} {_plain(row.name) or 'not known'}",
        "",
        "| point | field | value | known or estimated |",
        "|---|---|---|---|",
        "| (d) | floating point operations | to be added | not known to this program |",
        f"| (d) | GPU days | {_figures(gpu_days)} | known: GPUs held, looked at each minute |",
        f"| (d) | training time, days of {counted(row.members, 'job')} added up | {_figures(days)} | known |",
        *(
            [f"| (d) | optimiser steps | {row.measured['iterations']:,.0f} | known |"]
            if "iterations" in row.measured
            else []
        ),
        *(
            [f"| (d) | tokens | {_figures(row.estimated['trainedTokens'])} | estimated: declared for each step |"]
            if "trainedTokens" in row.estimated
            else []
        ),
        *_energy(statement, row, "(e)"),
        *([f"| (e) | of these days without a measurement | {_figures(without / 24)} | known |"] if without else []),
    ]


def _use(statement: Statement, row: Row, by: str) -> list[str]:
    per_million = row.measured.get("kilowattHoursPerMillionGeneratedTokens")
    return [
        f"## Use: {by} {_plain(row.name) or 'not known'}",
        "",
        "| point | field | value | known or estimated |",
        "|---|---|---|---|",
        *_energy(statement, row, "–"),
        *(
            [f"| – | kWh of a million generated tokens | {_figures(per_million)} | known: GPUs |"]
            if per_million is not None
            else []
        ),
    ]


def _energy(statement: Statement, row: Row, point: str) -> list[str]:
    gpus_mwh = row.measured["energyKilowattHours"] / _KWH_A_MWH
    lines = [f"| {point} | energy of GPUs, MWh | {_figures(gpus_mwh)} | known: measured by their counters |"]
    if "siteKilowattHours" in row.estimated:
        site_mwh = row.estimated["siteKilowattHours"] / _KWH_A_MWH
        by_factors = " and ".join(name for name in ("server", "pue") if name in statement.factors)
        lines += [f"| {point} | energy with server and site, MWh | {_figures(site_mwh)} | estimated by {by_factors} |"]
    return lines


def _figures(value: float) -> str:
    """With three significant figures: the form asks for at least two."""
    return f"{value:#.3g}".removesuffix(".") if 0.001 <= abs(value) < 1000 or not value else f"{value:.2e}"


def _plain(text: str) -> str:
    """A name in one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
