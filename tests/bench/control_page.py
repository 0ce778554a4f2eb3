"""Write what control of clocks costs and saves on simulated GPUs: a data file with a row for each cell, and tables.

``make bench ONLY=control`` measures, ``.venv/bin/python -m tests.bench.control_page`` writes. The page has what a
reader compares; the rest of the grid is in the data file.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final

from tests.bench.control import FORWARDS_MS, GPUS, MICROBATCHES
from tests.bench.control_causes import stored_causes
from tests.bench.control_causes import table as table_of_causes
from tests.bench.control_grid import STORE, Row, before, stored_grid
from tests.bench.control_measured import table as table_of_measured

from perseus_sim.training.hosts import Framework

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "clocks-take-time.md"
DATA: Final = ROOT / "docs" / "data" / "clock-control.csv"


def record(same: Sequence[Row]) -> dict[str, str]:
    """Return the data file's row of a cell, from its rows under each framework."""
    cell, first = same[0].cell, same[0]
    worst = {what: max((getattr(row, what) for row in same), key=abs) for what in ("time_error", "energy_error")}
    fields = {
        "gpu": cell.gpu,
        "lock": "shared" if cell.gpus > 1 else "own",
        "microbatches": str(cell.microbatches),
        "forward_ms": f"{cell.forward_ms:g}",
        "promised_percent": f"{cell.wanted_percent:g}",
        "grain": first.grain,
        "changes": f"{first.agent.changes:.0f}",
        "bound_percent": f"{first.bound:.0f}",
        **{f"{what}_percent": f"{error:.2f}" for what, error in worst.items()},
    }
    for row in same:
        measured = {
            "time_p95": f"{row.agent.time_p95:.2f}",
            "kept": f"{row.agent.kept:.0f}",
            "saved": f"{row.saved:.1f}",
            "marks_time_p95": f"{row.marks.time_p95:.1f}",
            "marks_saved": f"{100 * row.marks.saving / row.ideal:.0f}",
        }
        fields |= {f"{row.cell.framework}_{name}_percent": text for name, text in measured.items()}
        fields[f"{row.cell.framework}_keeps_its_time"] = "yes" if row.keeps else "no"
    return fields


def records(rows: Sequence[Row]) -> Iterator[dict[str, str]]:
    """Yield the data file's rows."""
    for _, same in groupby(rows, key=lambda r: (r.cell.gpu, r.cell.gpus, r.cell.microbatches, r.cell.forward_ms)):
        yield record(list(same))


def stored_records() -> list[dict[str, str]]:
    """Return the rows of the data file."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def under_each(cell: Mapping[str, str], what: str) -> list[float]:
    """Return a figure of a cell under each framework, per cent."""
    return [float(cell[f"{framework}_{what}_percent"]) for framework in Framework]


def summary_table(cells: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield how many cells hold what is promised, for each GPU model, and the errors of rehearsals."""
    yield "| cells under each framework | in all | keep their time | save what is promised |"
    yield "|---|--:|--:|--:|"
    for gpu in GPUS:
        mine = [cell for cell in cells if cell["gpu"] == gpu]
        kept = sum(cell[f"{framework}_keeps_its_time"] == "yes" for cell in mine for framework in Framework)
        saved = sum(saved >= float(cell["promised_percent"]) for cell in mine for saved in under_each(cell, "saved"))
        yield f"| {gpu.upper()} | {len(mine) * len(Framework)} | {kept} | {saved} |"
    time, energy = (max(abs(float(cell[f"{what}_error_percent"])) for cell in cells) for what in ("time", "energy"))
    yield ""
    yield f"Rehearsals are within {time:.2f} % of the executed time and {energy:.2f} % of the energy."


def saved_table(cells: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the least saving over frameworks: a line for each pipeline, a column for each GPU model and lock."""
    columns = [(gpu, lock) for lock in ("shared", "own") for gpu in GPUS]
    heads = [f"{gpu.upper()}{', own lock' if lock == 'own' else ''}" for gpu, lock in columns]
    yield f"| cell | {' | '.join(heads)} |"
    yield "|---|" + "--:|" * len(heads)
    by_key = {(c["gpu"], c["lock"], int(c["microbatches"]), float(c["forward_ms"])): c for c in cells}
    for microbatches in MICROBATCHES:
        for forward_ms in FORWARDS_MS:
            texts = []
            for column in columns:
                cell = by_key[(*column, microbatches, forward_ms)]
                least = min(under_each(cell, "saved"))
                text = f"{least:.0f} %"
                texts.append(text if least >= float(cell["promised_percent"]) else f"**{text}**")
            yield f"| {microbatches}x{forward_ms:g} | {' | '.join(texts)} |"


def before_table() -> Iterator[str]:
    """Yield the table of control by the host's marks."""
    names: dict[str, dict[str, str]] = {}
    for name, result in before().items():
        framework, cell, latency = name.removeprefix("control_before_time_percent_").split("_")
        columns = names.setdefault(f"{cell}, {latency.removesuffix('ms')} ms", {})
        columns["right marks"] = f"{result['peer_value']:+.1f} %"
        columns[framework] = f"{result['value']:+.1f} %"
    heads = list(next(iter(names.values())))
    yield "| microbatches x forward, latency | " + " | ".join(heads) + " |"
    yield "|---|" + "--:|" * len(heads)
    yield from (f"| {cell} | " + " | ".join(columns.values()) + " |" for cell, columns in names.items())


def tables_of_data() -> dict[str, str]:
    """Return the tables that show the data file, by name."""
    cells = stored_records()
    return {"summary": "\n".join(summary_table(cells)), "saved": "\n".join(saved_table(cells))}


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with other tables: each stands between a comment with its name and a comment "end"."""
    for name, table in tables.items():
        before, start, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        page = f"{before}{start}\n{table}\n\n{end}{after}"
    return page


def main() -> None:
    """Write data file and tables from what was measured last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, default=STORE)
    store = parser.parse_args().input
    lines = list(records([row for gpu in GPUS for row in stored_grid(gpu, store)]))
    with DATA.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    causes = table_of_causes(stored_causes(store))
    measured = {"before": before_table(), "measured": table_of_measured(), "causes": causes}
    tables = {name: "\n".join(lines_of) for name, lines_of in measured.items()} | tables_of_data()
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
