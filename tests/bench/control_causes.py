"""Why cells of the grid save less than is promised: what plans would save on hardware that is better in one way.

The search for plans is the same, so what it finds where latencies do not scatter, or where calls take no time, says
what scatter and calls cost. These are rehearsed savings; those of the grid are executed. What no control of the plan
for every instruction can exceed, even if it knew each latency, is proven.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.bench.control import GPUS, Cell, bound_of_plan_percent, hardware_of, plan_under, saved_percent
from tests.bench.control_grid import STORE, Row, stored_grid
from tests.bench.solver import Result, figure

from perseus_core.latency import SwitchLatency
from perseus_sim.training.hosts import Framework
from perseus_solver.rehearsal import Hardware

FILE: Final = "causes.json"


def without_scatter(latency: SwitchLatency) -> SwitchLatency:
    """Return a latency that is always its median."""
    return replace(latency, p99_us=latency.p50_us)


def without_calls(latency: SwitchLatency) -> SwitchLatency:
    """Return a latency whose calls take no time, so that no GPU waits for another."""
    return replace(latency, call_us=0)


BETTER: Final[Mapping[str, Callable[[SwitchLatency], SwitchLatency]]] = {
    "as it is": lambda latency: latency,
    "no scatter": without_scatter,
    "no calls": without_calls,
    "neither": lambda latency: without_calls(without_scatter(latency)),
}


@dataclass(frozen=True)
class Cause:
    """What plans would save in a cell.

    Attributes:
        cell: which.
        executed: what the agent saves there, per cent of the ideal saving.
        rehearsed: the same as rehearsed, by the names of `BETTER`.
        of_plan: what no control of the plan for every instruction can exceed if it knows each latency.
    """

    cell: Cell
    executed: float
    rehearsed: Mapping[str, float]
    of_plan: float


def better(hardware: Hardware, how: Callable[[SwitchLatency], SwitchLatency]) -> Hardware:
    """Return hardware all of whose latencies are better."""
    clocks = {mhz: how(latency) for mhz, latency in hardware.clocks.items()}
    return replace(hardware, latency=how(hardware.latency), clocks=clocks)


def rehearsed_percent(cell: Cell, hardware: Hardware) -> float:
    """Return what the plan for this hardware is expected to save on it, per cent of the ideal saving."""
    return saved_percent(cell, plan_under(cell, hardware).energy_j)


def short(rows: list[Row]) -> Iterator[Row]:
    """Yield the cells, once each, that save less than is promised: where a framework does least."""
    least: dict[Cell, Row] = {}
    for row in rows:
        key = replace(row.cell, framework=Framework.PYTORCH)
        if key not in least or row.saved < least[key].saved:
            least[key] = row
    yield from (row for row in least.values() if row.saved < row.cell.wanted_percent)


def causes(gpu: str, store: Path = STORE) -> Iterator[Cause]:
    """Yield why the cells of a GPU model fall short, from the grid as it was measured last."""
    for row in short(stored_grid(gpu, store)):
        known = hardware_of(row.cell)
        found = {name: rehearsed_percent(row.cell, better(known, how)) for name, how in BETTER.items()}
        yield Cause(row.cell, row.saved, found, bound_of_plan_percent(row.cell))


def measured_causes(store: Path = STORE) -> dict[str, Result]:
    """Measure why cells fall short, and store it."""
    found = [cause for gpu in GPUS for cause in causes(gpu, store)]
    (store / FILE).write_text(json.dumps([asdict(cause) for cause in found], indent=1) + "\n")
    return {
        f"control_{name.replace(' ', '_')}_percent_of_ideal_{cause.cell.suffix}": figure(
            saved, "%", "executed", cause.executed
        )
        for cause in found
        for name, saved in cause.rehearsed.items()
    }


def stored_causes(store: Path = STORE) -> list[Cause]:
    """Return why cells fall short, as it was measured last.

    Raises:
        OSError: it was not.
    """
    stored = json.loads((store / FILE).read_text())
    return [_cause_of(**of) for of in stored]


def _cause_of(cell: dict[str, Any], **measured: Any) -> Cause:
    return Cause(Cell(**{**cell, "framework": Framework(cell["framework"])}), **measured)


def table(found: list[Cause]) -> Iterator[str]:
    """Yield the table."""
    yield f"| cell | promised | executed | {' | '.join(BETTER)} | plan for every instruction |"
    yield "|---|" + "--:|" * (3 + len(BETTER))
    for cause in found:
        cell = cause.cell
        name = f"{cell.gpu.upper()} {cell.microbatches}x{cell.forward_ms:g}{'' if cell.gpus > 1 else ' own lock'}"
        saved = [cause.executed, *cause.rehearsed.values(), cause.of_plan]
        yield f"| {name} | {cell.wanted_percent:g} % | {' | '.join(f'{percent:.0f} %' for percent in saved)} |"


FIGURES: dict[str, Callable[[], dict[str, Result]]] = {"control_causes": measured_causes}
