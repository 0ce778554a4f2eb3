"""One report of all tensor-parallel ranks of a stage on this node, out of the reports of single ones.

They execute the same instructions in step, and the operator asks only for the slowest of each instruction, the energy
of all, and the farthest lead. So nothing is lost: what is made of the one report is what is made of the single ones.
Ranks that do not agree on how their clocks were controlled are reported one by one. Energies of single instructions are
left out: only sweeps ask for them, and those read single ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from perseus_agent.clocks.telemetry import Event
from perseus_core import evidence
from perseus_core.iteration import IterationReport
from perseus_core.marks import ClockControl


def combine(events: Iterable[Event]) -> list[Event]:
    """Combine what ranks of the same stage and pipeline report of the same iteration.

    Args:
        events: of one job, in the order in which they happened.

    Returns:
        The events in that order; a combined one stands in the place of its first.
    """
    together: dict[object, list[IterationReport]] = {}
    ordered: list[Event | list[IterationReport]] = []
    for event in events:
        if not isinstance(event, IterationReport) or (key := _key(event)) is None:
            ordered.append(event)
            continue
        reports = together.get(key)
        if reports is None or any(event.rank_id == other.rank_id for other in reports):  # twice: it has started again
            reports = together[key] = []
            ordered.append(reports)
        reports.append(event)
    return [_combined(event) if isinstance(event, list) else event for event in ordered]


def _key(report: IterationReport) -> object | None:
    """What ranks must agree on to be reported together; None: this one is reported by itself."""
    clocks = report.evidence
    # Whether a held clock was a transition is decided for each rank by itself.
    if clocks is None or clocks.marks is None or clocks.control is ClockControl.HELD:
        return None
    plan = report.plan_id, report.point
    control = clocks.marks, clocks.control, clocks.limited_mhz is None, clocks.clock_mhz is None, report.own_time
    return report.dp, report.stage, report.iteration, plan, control


def _combined(ranks: Sequence[IterationReport]) -> IterationReport:
    if len(ranks) == 1:
        return ranks[0]
    energies_mj = [rank.energy_mj for rank in ranks]
    return replace(
        ranks[0],
        together=tuple(sorted(rank.tp for rank in ranks)),
        iteration_time_us=max(rank.iteration_time_us for rank in ranks),
        compute_span_us=max(rank.compute_span_us for rank in ranks),
        energy_mj=None if None in energies_mj else sum(energy for energy in energies_mj if energy is not None),
        durations_us=_slowest(ranks),
        clock_changes=sum(rank.clock_changes for rank in ranks),
        instruction_energies_mj=(),
        energy_iterations=0,
        quiet_us=0,
        quiet_mj=0,
        evidence=evidence.combine(rank.evidence for rank in ranks),
    )


def _slowest(ranks: Sequence[IterationReport]) -> tuple[int, ...]:
    """Each instruction on the rank where it took longest; empty: some rank did not report its instructions."""
    lengths = {len(rank.durations_us) for rank in ranks}
    if len(lengths) > 1 or any(min(rank.durations_us, default=0) <= 0 for rank in ranks):
        return ()
    return tuple(map(max, *(rank.durations_us for rank in ranks)))
