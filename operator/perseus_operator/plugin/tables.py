"""The plugin's documents as text: aligned tables, a plot, and colours where the terminal has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap
from typing import Any

from perseus_core.units import j_from_mj, ratio_from_share, s_from_us
from perseus_operator.objects.formatting import counted, joules, seconds, small_percent
from perseus_operator.objects.values import Json
from perseus_operator.plugin.plot import Mark, draw

_SHOWN = 16
"""Points of a frontier in a table without ``--all``."""


@dataclass(frozen=True)
class Terminal:
    """What the terminal can show."""

    width: int = 80
    colour: bool = False
    fancy: bool = True
    """Whether it shows more than ASCII."""

    def bold(self, text: str) -> str:
        """Make a title bold."""
        return f"\x1b[1m{text}\x1b[0m" if self.colour else text

    def green(self, text: str) -> str:
        """Colour what is in force, or good."""
        return f"\x1b[32m{text}\x1b[0m" if self.colour else text

    def red(self, text: str) -> str:
        """Colour what is at fault."""
        return f"\x1b[31m{text}\x1b[0m" if self.colour else text


def frontier_text(document: Json, terminal: Terminal, *, everything: bool) -> str:
    """Format a frontier as a plot and a table; ``everything``: with every point."""
    points, here = document["points"], document["pointInForce"]
    highest = document["allAtMaximum"]
    marks = []
    if highest is not None:
        marks.append(Mark(*_coordinates(highest), "×", "x"))
    if here is not None:
        marks.append(Mark(*_coordinates(points[here]), "◆", "@"))
    legend = [
        *((f"{'×' if terminal.fancy else 'x'} all at maximum clocks",) if highest is not None else ()),
        *((f"{'◆' if terminal.fancy else '@'} point {here}, in force",) if here is not None else ("no plan in force",)),
    ]
    lines = [terminal.bold(f"{document['job']}: joules over seconds of one iteration"), ""]
    lines += draw([_coordinates(p) for p in points], marks, width=min(terminal.width, 100), fancy=terminal.fancy)
    lines += ["", "   ".join(legend), ""]
    shown = points if everything else [points[i] for i in _some(len(points), here)]
    saves = highest is not None
    grains = "grain" in points[0]
    head = ["", "POINT", "TIME", "SLOWDOWN", "ENERGY", *(["SAVES"] if saves else []), "POWER", "GAP", "CHANGES"]
    head += ["CLOCK FOR EACH"] if grains else []
    rows = [
        [
            "*" if point["point"] == here else "",
            str(point["point"]),
            seconds(point["iterationTimeMicroseconds"]),
            point["slowdown"],
            joules(point["energyMillijoules"]),
            *([point["saved"]] if saves else []),
            f"{point['powerWatts']} W",
            small_percent(ratio_from_share(point["gap"])),
            str(point["clockChanges"]),
            *([point["grain"].lower()] if grains else []),
        ]
        for point in shown
    ]
    lines += [terminal.green(line) if line.startswith("*") else line for line in table(head, rows)]
    if len(shown) < len(points):
        lines.append(f"{len(shown)} of {len(points)} points; --all shows every one")
    return "\n".join([*lines, *_note(document, terminal)])


def plan_text(document: Json, terminal: Terminal, *, everything: bool) -> str:
    """Format the clocks of a plan by stage and kind of instruction; ``everything``: every instruction in its order."""
    state = "in force" if document["inForce"] else "not in force"
    figures = f"{seconds(document['iterationTimeMicroseconds'])} and {joules(document['energyMillijoules'])}"
    figures = f"An iteration: {figures}, {document['clockChanges']} clock changes a pipeline"
    lines = [terminal.bold(f"{document['job']}: point {document['point']}, {state}"), figures, ""]
    if everything:
        head = ["STAGE", "INSTRUCTION", "MICROBATCH", "CHUNK", "MHZ"]
        rows = [
            [str(stage["stage"]), i["kind"], str(i["microbatch"]), str(i["chunk"]), str(i["megahertz"] or "any")]
            for stage in document["stages"]
            for i in stage["instructions"]
        ]
        return "\n".join([*lines, *table(head, rows)])
    head = ["STAGE", "INSTRUCTION", "COUNT", "CHANGES", "MHZ BY MICROBATCH"]
    rows = []
    for stage in document["stages"]:
        kinds: dict[str, list[int]] = {}
        for instruction in sorted(stage["instructions"], key=lambda i: (i["chunk"], i["microbatch"])):
            kinds.setdefault(instruction["kind"], []).append(instruction["megahertz"])
        for number, (kind, clocks) in enumerate(kinds.items()):
            first = [str(stage["stage"]), str(stage["clockChanges"])] if number == 0 else ["", ""]
            rows.append([first[0], kind, str(len(clocks)), first[1], _runs(clocks, fancy=terminal.fancy)])
    taken = sum(max(len(row[i]) for row in [head, *rows]) + 2 for i in range(4))
    lines += table(head, _folded(rows, max(20, terminal.width - taken)))
    for slow in document["stragglers"]:
        lines.append(f"pipeline {slow['dataParallelRank']} is {slow['slowdown']} slower and runs point {slow['point']}")
    return "\n".join(lines)


def explanation_text(document: Json, terminal: Terminal) -> str:
    """Format why a plan is in force, its time and energy, and its savings."""
    point = document["point"]
    title = "no plan is in force" if point is None else f"point {point} of {document['points']} is in force"
    since = f" since iteration {document['fromIteration']}" if "fromIteration" in document else ""
    lines = [terminal.bold(f"{document['job']}: {title}{since}"), ""]
    lines += explained(document["why"], terminal)
    rows = [
        [name, seconds(f["iterationTimeMicroseconds"]), _joules(f), _watts(f), str(f.get("iterations", ""))]
        for name, f in document["figures"].items()
    ]
    if rows:
        lines += ["", *table(["AN ITERATION", "TIME", "ENERGY", "POWER", "MEDIAN OF"], rows)]
    saves = document["saves"]
    if saves:
        rows = [[name, _sure(s, "energy"), _sure(s, "slowdown"), s["against"]] for name, s in saves.items()]
        lines += ["", *table(["SAVES", "ENERGY", "SLOWER BY", "AGAINST"], rows)]
    if "gap" in document:
        gap = small_percent(ratio_from_share(document["gap"]))
        lines += ["", f"No plan of the same speed can save more than another {gap} (certified)."]
    return "\n".join([*lines, *_note(document, terminal)])


def explained(rows: Sequence[Json], terminal: Terminal) -> list[str]:
    """Format rows of ``what`` and ``says``, which is wrapped beside it."""
    indent = max((len(row["what"]) for row in rows), default=0) + 2
    lines = []
    for row in rows:
        first, *more = wrap(row["says"], max(30, terminal.width - indent)) or [""]
        lines += [f"{row['what']:<{indent}}{first}", *(" " * indent + line for line in more)]
    return lines


def diagnosis_text(document: Json, terminal: Terminal) -> str:
    """Format why a job or pool does not save: one line for each step, what is said of it, and what to do."""
    signs = ("✓", "!", "…", "✗", "·") if terminal.fancy else ("ok", "! ", "..", "!!", "--")
    sign = dict(zip(("good", "note", "waiting", "fault", "unknown"), signs, strict=True))
    paint = {"good": terminal.green, "fault": terminal.red}
    name = document.get("job") or document["pool"]
    lines = [*wrap(f"{name}: {document['verdict']}", terminal.width), ""]
    lines[0] = terminal.bold(lines[0])
    for step in document["steps"]:
        finding = step["finding"]
        lines.append(f"{paint.get(finding, str)(sign[finding])} {step['question']}")
        if finding != "good" and "says" in step:
            lines += wrap(step["says"], terminal.width, initial_indent="    ", subsequent_indent="    ")
        if "do" in step:
            lines += wrap(f"do: {step['do']}", terminal.width, initial_indent="    ", subsequent_indent="        ")
    return "\n".join([*lines, *_note(document, terminal)])


def listing_text(document: Json, where: str) -> str:
    """Format all jobs as a table; ``where``: the place that was searched."""
    notes = class_notes(document)
    if not document["jobs"]:
        return "\n".join([f"there is no PerseusJob in {where}", *notes])
    head = ["NAMESPACE", "NAME", "MODE", "OBJECTIVE", "SAVED", "SLOWER BY", "SAVES WATTS", "PREDICTED", "STATE"]
    rows = [
        [
            *(job["namespace"], job["name"], job["mode"], job["objective"]),
            *(job.get("energy", ""), job.get("slowdown", "")),
            f"{job['savedWatts']:,}" if "savedWatts" in job else "",
            _predicted(job),
            f"{job['state']}, {job['limited']}" if "limited" in job else job["state"],
        ]
        for job in document["jobs"]
    ]
    total = f"{document['savedWatts']:,} W are saved by the {counted(document['measured'], 'job')} measured so far."
    lines = [*table(head, rows), *(["", total] if document["measured"] else [])]
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def class_notes(document: Json) -> list[str]:
    """Format what is to be said of namespaces that ask for an EnergyClass."""
    return [line for entry in document["classes"] for line in (entry["says"], f"    do: {entry['do']}")]


def _predicted(job: Json) -> str:
    if "energySavedLow" not in job:
        return str(job.get("energySaved", ""))
    low, high = job["energySavedLow"], job["energySavedHigh"]
    return f"{low if low == high else f'{low} to {high}'} ({job['restsOn']})"


def _note(document: Json, terminal: Terminal) -> list[str]:
    return ["", *wrap(f"Note: {document['note']}.", terminal.width)] if "note" in document else []


def _coordinates(figures: Json) -> tuple[float, float]:
    return s_from_us(figures["iterationTimeMicroseconds"]), j_from_mj(figures["energyMillijoules"])


def _joules(figures: Json) -> str:
    return joules(figures["energyMillijoules"]) if "energyMillijoules" in figures else "no counter"


def _watts(figures: Json) -> str:
    return f"{figures['powerWatts']} W" if "powerWatts" in figures else ""


def _some(count: int, here: int | None) -> list[int]:
    last = count - 1
    picked = {round(k * last / max(1, _SHOWN - 1)) for k in range(min(count, _SHOWN))}
    return sorted(picked | ({here} if here is not None else set()))


def _runs(clocks_mhz: Sequence[int], *, fancy: bool) -> str:
    times = "×" if fancy else "x"
    runs = [(clock, len(list(group))) for clock, group in groupby(clocks_mhz)]
    return " ".join(f"{clock or 'any'}{f'{times}{count}' if count > 1 else ''}" for clock, count in runs)


def _folded(rows: Iterable[list[str]], width: int) -> Iterable[list[str]]:
    """Wrap the last cell of every row into rows of its own."""
    for row in rows:
        first, *more = wrap(row[-1], width) or [""]
        yield [*row[:-1], first]
        for line in more:
            yield [*("" for _ in row[:-1]), line]


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Align columns, which are two spaces apart."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in lines) for i in range(len(head))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]


def _sure(saves: Mapping[str, str], what: str) -> str:
    """A measured share with its interval of 95 % confidence, where it has one that rounding leaves."""
    low, high = saves.get(f"{what}Low"), saves.get(f"{what}High")
    return f"{saves[what]} ({low} to {high})" if low and high and low != high else saves[what]
