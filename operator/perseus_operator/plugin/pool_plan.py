"""``kubectl perseus serving plan``: whether pools by length would save, from what the operator has stored of it."""

from __future__ import annotations

import json
from typing import Any

from perseus_operator.errors import CannotAnswer
from perseus_operator.objects.formatting import megahertz
from perseus_operator.objects.values import Json
from perseus_operator.plugin.tables import table

_NOT_YET = (
    "there is no plan of pools by length yet: it needs a model of the engine with its energy, a quarter of an hour of"
    " load, the lengths of 100 requests, and spec.scaling: Advise"
)


def pool_plan(pool: Json, gateway: str | None) -> tuple[Json, str]:
    """Return the plan of a ServingPool, as a document and as a table, or as manifests.

    Args:
        pool: as the API server returns it.
        gateway: the Gateway that manifests are for; None: the plan is shown.

    Raises:
        CannotAnswer: there is no plan, or for manifests none with several pools.
    """
    name = pool["metadata"]["name"]
    plan = (pool.get("status") or {}).get("plan")
    if not plan:
        raise CannotAnswer(f"{name}: {_NOT_YET}")
    if gateway is not None:
        document = _manifests(name, plan, gateway)
        return document, json.dumps(document, indent=2)
    document = {"pool": name, **plan}
    return document, "\n".join(_lines(plan))


def _manifests(name: str, plan: Json, gateway: str) -> Json:
    """As ``kubectl apply`` takes them: each class is served by the ServingPool of its own name."""
    from perseus_solver.errors import InvalidProblem
    from perseus_solver.serving.planner.manifests import manifests

    pools = plan.get("pools") or ()
    if len(pools) < 2:
        raise CannotAnswer(f"{name}: there is nothing to route by length: {plan['why']}")
    try:
        return manifests({f"{name}-{one['name']}": _share(one) for one in pools}, gateway)
    except InvalidProblem as error:
        raise CannotAnswer(str(error)) from error


def _lines(plan: Json) -> list[str]:
    pools: list[Json] = plan.get("pools") or []
    lines = []
    if pools:
        head = ["REQUESTS", "SHARE", "GPUS EACH", "REPLICAS", "LEAST CLOCK", "KWH A DAY"]
        lines += [*table(head, [_row(one) for one in pools]), ""]
    lines.append(plan["why"])
    if "gap" in plan:
        lines.append(f"The best plan needs at most {plan['gap']} less. Replicas are of the lightest and heaviest hour.")
    return [*lines, f"Computed at {plan['computedAt']}; nothing acts on it."]


def _row(one: Json) -> list[str]:
    fewest, most = one["fewestReplicas"], one["replicas"]
    return [
        one["name"],
        one["share"],
        f"{one['gpus']}",
        f"{most}" if fewest == most else f"{fewest} to {most}",
        megahertz(one["clockMegahertz"]),
        f"{one['wattHours'] / 1_000:,.2f}",
    ]


def _share(one: Json) -> float:
    share: Any = one["share"]
    return float(share.removesuffix("%"))
