"""Documents of ServingPools as text, as ``tables`` makes it of those of PerseusJobs."""

from __future__ import annotations

from textwrap import wrap

from perseus_operator.objects.formatting import megahertz
from perseus_operator.objects.values import Json
from perseus_operator.plugin.tables import Terminal, class_notes, explained, listing_text, table


def everything_text(document: Json, where: str) -> str:
    """Format jobs, and below them pools; ``where``: the place that was searched."""
    if not document["pools"]:
        return listing_text(document, where)
    if not document["jobs"]:
        return pool_listing_text(document, where)
    return "\n".join([listing_text(document, where), "", *pool_rows(document["pools"])])


def pool_listing_text(document: Json, where: str) -> str:
    """Format all pools as a table; ``where``: the place that was searched."""
    notes = class_notes(document)
    if not document["pools"]:
        return "\n".join([f"there is no ServingPool in {where}", *notes])
    return "\n".join([*pool_rows(document["pools"]), *(["", *notes] if notes else [])])


def pool_rows(pools: list[Json]) -> list[str]:
    """Format summaries of pools."""
    head = ["NAMESPACE", "POOL", "MODE", "REPLICAS", "CLOCK", "LIMITED BY", "FIRST TOKEN", "TOKENS", "SAVED", "STATE"]
    return table(head, [_row(pool) for pool in pools])


def _row(pool: Json) -> list[str]:
    return [
        *(pool["namespace"], pool["name"], pool["mode"], _replicas(pool)),
        megahertz(pool["clockMegahertz"]) if "clockMegahertz" in pool else "",
        pool.get("limitedBy", ""),
        *(_kept(pool, field) for field in ("timeToFirstToken", "timePerOutputToken")),
        _saved(pool),
        pool["state"],
    ]


def _replicas(pool: Json) -> str:
    """How many there are, and how many are advised where that is another number."""
    advised = pool.get("advised", pool["replicas"])
    return f"{pool['replicas']}" + (f" ({advised} advised)" if advised != pool["replicas"] else "")


def _kept(pool: Json, field: str) -> str:
    """The share that kept a limit, and what is asked for; without a limit what is proposed."""
    if limit := pool["limits"].get(field):
        return f"{limit.get('kept', '-')} ({limit['attainment']} in {limit['limit']})"
    proposed = pool.get("proposedLimits", {}).get(field)
    return f"proposed {proposed}" if proposed and not pool["limits"] else ""


def _saved(pool: Json) -> str:
    savings = pool.get("savings")
    return f"{savings['energy']} ({savings['low']} to {savings['high']})" if savings else ""


def pool_explanation_text(document: Json, terminal: Terminal) -> str:
    """Format what a pool does, why, its replicas, and what to do next."""
    line = document["summary"]
    lines = [terminal.bold(f"{document['pool']}: {line['mode']}, {line['state']}"), ""]
    lines += explained(document["why"], terminal)
    if document["replicas"]:
        rows = [
            [
                one["pod"],
                megahertz(one["clockMegahertz"]) if "clockMegahertz" in one else "",
                one.get("attainment", ""),
                one.get("limitedBy", ""),
                one.get("why", ""),
            ]
            for one in document["replicas"]
        ]
        lines += ["", *table(["REPLICA", "MEAN CLOCK", "KEPT", "LIMITED BY", "THAT IS"], rows)]
        hidden = line["replicas"] - len(rows)
        lines += [f"and {hidden} more, which keep the limits better"] if hidden > 0 else []
    lines += ["", *wrap(f"Next: {document['next']['says']}", terminal.width)]
    # A command is never broken: it is to be copied.
    return "\n".join([*lines, *([f"    {document['next']['do']}"] if "do" in document["next"] else [])])
