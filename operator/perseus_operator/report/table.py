"""A report for people: a table of jobs, one of pools, and below them what the figures are of and rest on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import wrap
from typing import Final

from perseus_operator.objects.formatting import percent
from perseus_operator.report.factors import OPTIONS
from perseus_operator.report.figures import TOTAL, Row, rows
from perseus_operator.report.statement import FACTORS, JOB, LEAST_GAP_H, METHOD, POOL, PRICE, Statement, instant

_WIDTH: Final = 100
_Cell = Callable[[Row], str]


def write(statement: Statement, by: str, digest: str) -> str:
    """Format a statement.

    Args:
        statement: measurements and factors.
        by: what a row is.
        digest: of the statement.
    """
    all_rows = rows(statement, by)
    period = statement.period
    title = f"Energy from {instant(period.begin_s)} to {instant(period.end_s)}, {statement.scope}"
    if not all_rows:
        return f"{title}: nothing of jobs or pools was measured."
    tables = [_table(statement, by, kind, [row for row in all_rows if row.kind == kind]) for kind in (JOB, POOL)]
    return "\n\n".join([title, *filter(None, tables), "\n".join(_notes(statement, digest))])


def _table(statement: Statement, by: str, kind: str, rows_of_kind: list[Row]) -> str:
    if not rows_of_kind:
        return ""
    head = kind.upper() if by == "job" else by.removeprefix("label:").upper()
    columns: dict[str, _Cell] = {
        head: lambda row: row.name or "-",
        f"{kind.upper()}S": lambda row: str(row.members),
        **_measured(kind),
        **_estimated(statement),
    }
    if by == "job":
        del columns[f"{kind.upper()}S"]
        columns = {head: columns.pop(head), **columns}
    cells = {name: [cell(row) for row in rows_of_kind] for name, cell in columns.items()}
    shown = {name: column for name, column in cells.items() if any(column)}
    lines = [list(shown), *map(list, zip(*shown.values(), strict=True))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(aligned)


def _measured(kind: str) -> dict[str, _Cell]:
    common = {
        "KWH": _figure("energyKilowattHours", ",.3f"),
        "GPU HOURS": _figure("gpuHours", ",.1f"),
    }
    if kind == JOB:
        return {
            **common,
            "STEPS": _figure("iterations", ",.0f"),
            "J/STEP": _figure("joulesPerIteration", ",.4g"),
        }
    return {
        **common,
        "TOKENS": _figure("generatedTokens", ",.0f"),
        "KWH/M TOKENS": _figure("kilowattHoursPerMillionGeneratedTokens", ",.4g"),
        "REQUESTS": _figure("requests", ",.0f"),
        "J/REQUEST": _figure("joulesPerRequest", ",.4g"),
    }


def _estimated(statement: Statement) -> dict[str, _Cell]:
    return {
        "~SAVED KWH": _figure("savedKilowattHours", ",.3f"),
        "~SAVED": _saved,
        "~KWH/M TRAINED": _figure("kilowattHoursPerMillionTrainedTokens", ",.4g"),
        "~SITE KWH": _figure("siteKilowattHours", ",.3f"),
        f"~{statement.currency}": _figure("cost", ",.2f"),
        "~KG CO2 LOCATION": _figure("locationBasedKilograms", ",.2f"),
        "~KG CO2 MARKET": _figure("marketBasedKilograms", ",.2f"),
    }


def _figure(name: str, form: str) -> _Cell:
    def cell(row: Row) -> str:
        value = row.measured.get(name, row.estimated.get(name))
        return "" if value is None else format(value, form)

    return cell


def _saved(row: Row) -> str:
    share = row.estimated.get("saved", row.estimated.get("savedAsMeasuredLast"))
    if share is None:
        return ""
    low, high = row.estimated.get("savedLow"), row.estimated.get("savedHigh")
    ends = f" ({percent(low)} to {percent(high)})" if low is not None and high is not None else ""
    return percent(share) + ends


def _notes(statement: Statement, digest: str) -> list[str]:
    notes = {
        "measured": statement.boundary(),
        "~": "estimated: from what was measured, by the factors below",
        **{OPTIONS[name].removeprefix("--"): _factor(statement, name) for name in statement.factors},
    }
    if any(member.saved or "baselineJoules" in member.hours for member in statement.members):
        notes["saved"] = METHOD.removeprefix("saved: ")
    if statement.tokens_per_step:
        notes["tokens"] = "trained: steps, times the tokens of a step that were declared with --tokens-per-step"
    if gap := statement.gap():
        notes["gap"] = gap
    without = sum(
        row.measured.get("activeHoursWithoutEnergy", 0.0) for row in rows(statement, "job") if row.name != TOTAL
    )
    if without >= LEAST_GAP_H:
        notes["missing"] = f"{without:,.1f} hours in which pods ran and no energy was measured; they are in no sum"
    notes |= {"from": f"{statement.origin}, read at {instant(statement.taken_s)} by {statement.program}"}
    if statement.parts:
        notes["parts"] = f"{len(statement.parts)} reports whose periods adjoin; --format json has the digest of each"
    notes |= {"digest": f"{digest}; --format json writes the file that it is of, and --from reads it again"}
    return _hanging(notes)


def _factor(statement: Statement, name: str) -> str:
    factor = statement.factors[name]
    value = f"{factor.value:g}" if factor.value is not None else "by the hour"
    if name == PRICE:
        value += f" {statement.currency}"
    estimated = f", {factor.estimated_hours} hours of it estimated there" if factor.estimated_hours else ""
    return f"{value} ({FACTORS[name][0]}), from {factor.source}{estimated}"


def _hanging(notes: Mapping[str, str]) -> list[str]:
    width = max(map(len, notes)) + 2
    return [
        line
        for name, text in notes.items()
        for line in wrap(
            text,
            _WIDTH,
            initial_indent=name.ljust(width),
            subsequent_indent=" " * width,
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]
