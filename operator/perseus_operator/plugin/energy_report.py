"""What jobs and pools took and saved over a time that is past, from the counters that a Prometheus has kept.

PerseusJobs are deleted after their TTL and the operator remembers none of them, so the site's Prometheus is what knows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from perseus_core.units import kwh_from_j
from perseus_operator.objects.values import Json

SINCE: Final = re.compile(r"[1-9][0-9]{0,3}[mhdw]")
"""A time as PromQL has it, such as 30d."""
GROUPS: Final = {
    "job": ("job_namespace", "job_name"),
    "namespace": ("job_namespace",),
    "class": ("energy_class",),
}
_ENERGY, _BASELINE = "perseus_job_energy_joules_total", "perseus_job_baseline_energy_joules_total"

Query = Callable[[str], list[Json]]
"""Sends a PromQL query; ``data.result`` of the answer."""


def energy_report(query: Query, since: str, by: str, namespace: str | None) -> Json:
    """Sum up what jobs took and saved.

    Args:
        query: of the Prometheus.
        since: how far back, see ``SINCE``.
        by: a key of ``GROUPS``.
        namespace: of the jobs; None: all.

    Returns:
        ``rows``, most saved first, and ``total``, each with ``energyKilowattHours``, ``savedKilowattHours`` and
        ``saved``, the ratio to what the same iterations take at default clocks.

    Raises:
        CannotAnswer: the Prometheus does not answer as one does.
    """
    where = f'{{job_namespace="{namespace}"}}' if namespace else ""
    # The operator's counters begin anew with each operator, which has another instance label: sum over these.
    of_jobs = "sum by (job_namespace, job_name) (increase({}{}[{}]))"
    took = _by_job(query(of_jobs.format(_ENERGY, where, since)))
    usual = _by_job(query(of_jobs.format(_BASELINE, where, since)))
    classes = _classes(query, where, since)
    groups: dict[tuple[str, ...], list[float]] = {}
    for job in took.keys() & usual.keys():
        sums = groups.setdefault(_group(by, job, classes), [0.0, 0.0, 0.0])
        for index, value in enumerate((took[job], usual[job], 1.0)):
            sums[index] += value
    rows = [{by: "/".join(group), **_figures(*sums)} for group, sums in groups.items()]
    rows.sort(key=lambda row: -row["savedKilowattHours"])
    total = [sum(column) for column in zip(*groups.values(), strict=True)] or [0.0, 0.0, 0.0]
    return {"since": since, "by": by, "rows": rows, "total": _figures(*total)}


def pool_report(query: Query, since: str, by: str, namespace: str | None) -> Json:
    """Sum up what pools took, for how much work, and what they saved of the energy of a token.

    Args:
        query: of the Prometheus.
        since: how far back, see ``SINCE``.
        by: a key of ``GROUPS``; ``job``: each pool is a row.
        namespace: of the pools; None: all.

    Returns:
        ``rows``, most energy first, and ``total``, each with ``pools``, ``energyKilowattHours``, of all GPUs of their
        replicas, idle or not, ``generatedTokens``, ``requests``, ``joulesPerThousandTokens`` and ``joulesPerRequest``,
        None without any. Where each pool is a row: ``saved``, ``savedLow`` and ``savedHigh``, the ratio as measured
        last with the ends of its 95 % interval, None unless measured.

    Raises:
        CannotAnswer: the Prometheus does not answer as one does.
    """
    where = f'{{job_namespace="{namespace}"}}' if namespace else ""
    grown = "sum by (job_namespace, job_name) (increase({}{}[{}]))"
    energy_j, tokens, requests = (_by_job(query(grown.format(name, where, since))) for name in _POOL_COUNTERS)
    latest = "avg by (job_namespace, job_name) (last_over_time({}{}[{}]))"
    saved = {
        field: _by_job(query(latest.format(name, where, since))) if by == "job" else {}
        for field, name in _POOL_SAVED.items()
    }
    classes = _classes(query, where, since)
    groups: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for pool in energy_j:
        groups.setdefault(_group(by, pool, classes), []).append(pool)

    def figures(pools: Iterable[tuple[str, str]]) -> Json:
        members = list(pools)
        return _pool_figures(len(members), *(sum(of.get(one, 0.0) for one in members)
                                             for of in (energy_j, tokens, requests)))  # fmt: skip

    rows = [
        {by: "/".join(group), **figures(pools), **({} if by != "job" else _saved_of(saved, pools[0]))}
        for group, pools in groups.items()
    ]
    rows.sort(key=lambda row: -row["energyKilowattHours"])
    return {"since": since, "by": by, "rows": rows, "total": figures(energy_j)}


_POOL_COUNTERS: Final = (
    "perseus_pool_energy_joules_total",
    "perseus_pool_generated_tokens_total",
    "perseus_pool_requests_total",
)
_POOL_SAVED: Final = {
    "saved": "perseus_pool_saved_ratio",
    "savedLow": "perseus_pool_saved_low_ratio",
    "savedHigh": "perseus_pool_saved_high_ratio",
}


def _saved_of(saved: Mapping[str, Mapping[tuple[str, str], float]], pool: tuple[str, str]) -> Json:
    return {field: values.get(pool) for field, values in saved.items()}


def _pool_figures(pools: int, energy_j: float, tokens: float, requests: float) -> Json:
    return {
        "pools": pools,
        "energyKilowattHours": kwh_from_j(energy_j),
        "generatedTokens": round(tokens),
        "requests": round(requests),
        "joulesPerThousandTokens": 1000 * energy_j / tokens if tokens > 0 else None,
        "joulesPerRequest": energy_j / requests if requests > 0 else None,
    }


def _classes(query: Query, where: str, since: str) -> dict[tuple[str, str], str]:
    """The EnergyClass of each job or pool that has one."""
    found = query(f"max by (job_namespace, job_name, energy_class) (max_over_time(perseus_job_info{where}[{since}]))")
    return {_job(series): series["metric"].get("energy_class", "") for series in found}


def _group(by: str, job: tuple[str, str], classes: Mapping[tuple[str, str], str]) -> tuple[str, ...]:
    labels = {"job_namespace": job[0], "job_name": job[1], "energy_class": classes.get(job, "")}
    return tuple(labels[label] for label in GROUPS[by])


def _job(series: Json) -> tuple[str, str]:
    return series["metric"].get("job_namespace", ""), series["metric"].get("job_name", "")


def _by_job(result: list[Json]) -> dict[tuple[str, str], float]:
    values = {_job(series): float(series["value"][1]) for series in result}
    return {job: value for job, value in values.items() if math.isfinite(value)}  # one that is not spoils no sum


def _figures(took_j: float, usual_j: float, jobs: float) -> Json:
    return {
        "jobs": round(jobs),
        "energyKilowattHours": kwh_from_j(took_j),
        "savedKilowattHours": kwh_from_j(usual_j - took_j),
        "saved": 1 - took_j / usual_j if usual_j > 0 else None,
    }
