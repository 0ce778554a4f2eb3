"""The report for people: Markdown that reads well as it is, and can be pasted into an issue. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perseus_bench.report import (
    AcceptanceReport,
    CallTimes,
    ClockScan,
    Durations,
    PipelineRun,
    Restoration,
    SwitchTimes,
)
from perseus_core.units import fractional_ms_from_s


def render(report: AcceptanceReport) -> str:
    """The whole report.

    Args:
        report: of one run, complete or not.

    Returns:
        Markdown, with a newline at its end.
    """
    parts = [_head(report), _summary(report)]
    if report.calls:
        parts.append(_calls(report.calls))
    if report.switches:
        parts.append(_switches(report.switches))
    if report.scan:
        parts.append(_scan(report.scan))
    if report.pipeline:
        parts.append(_pipeline(report.pipeline))
    if report.restoration:
        parts.append(_restoration(report.restoration))
    if report.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def _head(report: AcceptanceReport) -> str:
    clocks = report.supported_clocks_mhz
    rows = [
        ("GPU", report.gpu_model),
        ("Driver", report.driver_version),
        ("Clocks", f"{len(clocks)}, {clocks[0]} to {clocks[-1]} MHz" if clocks else "none"),
        ("Workload", report.workload or "none: speed was not measured"),
        ("Perseus", f"{report.perseus_version}, Python {report.python_version}"),
        ("Run", f"{report.date}, {report.minutes:g} minutes"),
    ]
    rows += [(name, value) for name, value in (("UUID", report.gpu_uuid), ("Node", report.node_name)) if value]
    title = "# Acceptance report" + (" (simulated GPU)" if report.simulated else "")
    return f"{title}\n\n{_table(('', ''), rows)}"


def _summary(report: AcceptanceReport) -> str:
    lines = ["Clocks are back at their defaults." if report.clocks_returned else "**Clocks could not be returned.**"]
    if not report.complete:
        lines.append("**Not all trials were completed; see the notes.**")
    rows: list[tuple[str, str]] = []
    if latency := report.latency():
        rows.append(
            ("A clock change takes", f"{_ms(latency.p50_s)} (median), {_ms(latency.p99_s)} (99 of 100 take less)")
        )
        rows.append(("of which the driver's call", _ms(latency.call_s)))
    if report.calls:
        shared = report.calls.shared_lock
        answer = "not measured" if shared is None else "one for the node" if shared else "one for each GPU"
        rows.append(("Driver lock", answer))
    if report.scan:
        rows.append(("Top usable clock", f"{report.scan.top_usable_mhz} MHz"))
    if report.pipeline:
        rows.append(("Planned pipeline against prediction", _deviations(report.pipeline)))
    if report.restoration:
        seconds = report.restoration.restored_s
        restored = "**not restored**" if seconds is None else f"restored {seconds:.1f} s after the next agent's start"
        rows.append(("After kill -9", restored))
    return "## Summary\n\n" + " ".join(lines) + (f"\n\n{_table(('', ''), rows)}" if rows else "")


def _calls(calls: CallTimes) -> str:
    rows = [("lock, alone", *_quantiles(calls.lock)), ("reset, alone", *_quantiles(calls.reset))]
    if calls.contended_lock:
        others = f"{calls.other_gpus} other GPU{'s are' if calls.other_gpus > 1 else ' is'}"
        rows.append((f"lock, while {others} locked without pause", *_quantiles(calls.contended_lock)))
        ratio = calls.contended_lock.p50_s / calls.lock.p50_s if calls.lock.p50_s else 1.0
        verdict = "wait for each other: one lock for the node" if calls.shared_lock else "do not wait for each other"
        after = f"Calls take {ratio:.1f} times as long then: the GPUs {verdict}."
    else:
        after = "Whether the GPUs of the node share a driver lock was not measured: no other GPU was given."
    return f"## Calls of the driver\n\n{_table(('call', *_QUANTILES), rows)}\n\n{after}"


def _switches(switches: SwitchTimes) -> str:
    kinds = [
        ("all, clock as reported", switches.reported),
        ("raises", switches.raises),
        ("lowerings", switches.lowerings),
        ("all, by the speed of work items", switches.speed),
    ]
    parts = [
        "## Clock changes",
        "From the begin of the call to the new clock.",
        _table(("changes", *_QUANTILES), [(name, *_quantiles(seen)) for name, seen in kinds if seen]),
    ]
    if switches.item_time_s is not None:
        parts.append(
            f"The speed is known from equal work items of {_ms(switches.item_time_s)} each (at the highest clock used)."
        )
    if switches.unreached:
        parts.append(f"**{switches.unreached} changes never reached the new clock.**")
    clocks = sorted({each.to_mhz for each in switches.transitions}, reverse=True)
    cells = {(each.from_mhz, each.to_mhz): each.speed or each.reported for each in switches.transitions}
    rows = [(f"**{old}**", *(_cell(cells.get((old, new))) for new in clocks)) for old in clocks]
    parts.append("Median / 99th percentile in ms, from the clock at the left to the clock above (MHz):")
    parts.append(_table(("from", *(str(clock) for clock in clocks)), rows))
    return "\n\n".join(parts)


def _scan(scan: ClockScan) -> str:
    rows = [
        (
            f"{point.requested_mhz}",
            f"{point.reached_mhz}",
            "–" if point.power_w is None else f"{point.power_w:.0f}",
            "–" if point.item_time_s is None else f"{fractional_ms_from_s(point.item_time_s):.4f}",
            "–"
            if point.item_time_s is None or point.power_w is None
            else f"{1000 * point.item_time_s * point.power_w:.1f}",
            f"{100 * point.power_cap_share:.0f} %",
            ", ".join(reason.lower().replace("_", " ") for reason in point.reasons) or "–",
        )
        for point in scan.points
    ]
    head = (
        "locked, MHz", "reached, MHz", "power, W", "work item, ms", "energy of an item, mJ", "power limit", "reasons",
    )  # fmt: skip
    parts = [
        "## Clocks under load",
        f"Not locked, the GPU ran at {scan.default_mhz} MHz. "
        f"The highest clock that the power limit does not hold down is **{scan.top_usable_mhz} MHz**.",
    ]
    if scan.plateaus:
        runs = [f"{run.highest_mhz} to {run.lowest_mhz} MHz all run at {run.reached_mhz} MHz" for run in scan.plateaus]
        parts.append(f"One and the same: {'; '.join(runs)}.")
    return "\n\n".join([*parts, _table(head, rows)])


def _pipeline(run: PipelineRun) -> str:
    fast, slow = run.clocks_mhz
    rows = [
        ("time, s", f"{run.predicted_time_s:.3f}", f"{run.measured_time_s:.3f}", _percent(run.time_deviation_percent)),
        (
            "energy, J",
            "–" if run.predicted_energy_j is None else f"{run.predicted_energy_j:.1f}",
            "–" if run.measured_energy_j is None else f"{run.measured_energy_j:.1f}",
            _percent(run.energy_deviation_percent),
        ),
    ]
    parts = [
        "## A planned pipeline",
        f"{run.instructions} instructions ({run.items} work items), alternately at {fast} and {slow} MHz, each clock "
        f"asked for {_ms(run.asked_ahead_s)} ahead.",
        _table(("", "predicted", "measured", "deviation"), rows),
    ]
    if run.items_at_plan_share is not None:
        parts.append(f"{100 * run.items_at_plan_share:.1f} % of the work items ran at the speed of their own clock.")
    return "\n\n".join(parts)


def _restoration(trial: Restoration) -> str:
    lines = [f"An agent locked {trial.locked_mhz} MHz and was killed with SIGKILL."]
    lines.append(
        "The lock stayed in force."
        if trial.survived_kill
        else "The clock was not read as locked: nothing was to restore."
    )
    if trial.restored_s is not None:
        lines.append(f"The next agent returned the clock {trial.restored_s:.2f} s after its process was started.")
    elif trial.survived_kill:
        lines.append("**The next agent did not return the clock in time.**")
    lines.append("Its journal is empty." if trial.journal_empty else "**Its journal still lists the GPU.**")
    return "## Restoration after kill -9\n\n" + " ".join(lines)


_QUANTILES = ("number", "median, ms", "99 %, ms", "longest, ms")


def _quantiles(seen: Durations) -> tuple[str, str, str, str]:
    milliseconds = (fractional_ms_from_s(value) for value in (seen.p50_s, seen.p99_s, seen.max_s))
    median_ms, p99_ms, max_ms = (f"{value:.2f}" for value in milliseconds)
    return str(seen.count), median_ms, p99_ms, max_ms


def _cell(seen: Durations | None) -> str:
    return "–" if seen is None else " / ".join(f"{fractional_ms_from_s(s):.1f}" for s in (seen.p50_s, seen.p99_s))


def _deviations(run: PipelineRun) -> str:
    energy = run.energy_deviation_percent
    return f"time {_percent(run.time_deviation_percent)}" + ("" if energy is None else f", energy {_percent(energy)}")


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f} %"


def _ms(seconds: float) -> str:
    return f"{fractional_ms_from_s(seconds):.2f} ms"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned as plain text."""
    lines = [list(head), *map(list, rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(head))]
    padded = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    rule = " | ".join("-" * width for width in widths)
    return "\n".join(f"| {line} |" for line in (padded[0], rule, *padded[1:]))
