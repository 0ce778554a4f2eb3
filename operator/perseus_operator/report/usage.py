"""What a Prometheus has kept of jobs and pools, by hours: PerseusJobs are deleted after their TTL and the operator
remembers none of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from perseus_operator.objects.values import Json
from perseus_operator.report.statement import HOUR_S, JOB, POOL, Hourly, Member, Period, Share

_OF = "by (job_namespace, job_name)"
# The operator's counters begin anew with each operator, which has another instance label: sum over these.
_GROWN = f"sum {_OF} (increase({{name}}{{where}}[{{length_s}}s]))"
# One second less: releases differ in whether a look at the begin of the hour, the 61st, counts.
_LOOKED_AT = f"sum {_OF} (sum_over_time({{name}}{{where}}[{{less_s}}s:60s])) / 60"
_MEASURED = (
    "count_over_time((count(perseus_job_energy_joules_total{where}) or count(perseus_pool_energy_joules_total{where}))"
    "[{less_s}s:60s]) / 60"
)
_LATEST = f"avg {_OF} (last_over_time({{name}}{{where}}[{{length_s}}s]))"
_INFO = "max by (job_namespace, job_name, energy_class, model) (max_over_time(perseus_job_info{where}[{length_s}s]))"
_BY_HOUR: Final = {
    JOB: {
        "energyJoules": (_GROWN, "perseus_job_energy_joules_total"),
        "baselineJoules": (_GROWN, "perseus_job_baseline_energy_joules_total"),
        "iterations": (_GROWN, "perseus_job_iterations_total"),
        "activeHours": (_LOOKED_AT, "perseus_job_active"),
        "gpuHours": (_LOOKED_AT, "perseus_node_job_gpus"),
    },
    POOL: {
        "energyJoules": (_GROWN, "perseus_pool_energy_joules_total"),
        "generatedTokens": (_GROWN, "perseus_pool_generated_tokens_total"),
        "promptTokens": (_GROWN, "perseus_pool_prompt_tokens_total"),
        "requests": (_GROWN, "perseus_pool_requests_total"),
        "activeHours": (_LOOKED_AT, "perseus_pool_active"),
        "gpuHours": (_LOOKED_AT, "perseus_node_job_gpus"),
    },
}
_SHARES: Final = {"mean": "saved_ratio", "low": "saved_low_ratio", "high": "saved_high_ratio"}

Ref = tuple[str, str]
"""Namespace and name."""


class Query(Protocol):
    """Sends a PromQL query for some moments."""

    def __call__(self, text: str, first_s: int, last_s: int, step_s: int, /) -> list[Json]:
        """Return the series of the answer, each with ``metric`` and ``values``: pairs of Unix time and text.

        Raises:
            CannotAnswer: the Prometheus does not answer as one does.
        """


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was read.

    Attributes:
        members: in which something was measured.
        measured_hours: of each slot, in which energy of any was measured; None: in none.
        queries: for an hour, by kind and quantity.
    """

    members: tuple[Member, ...]
    measured_hours: Hourly
    queries: Mapping[str, str]


def read_usage(query: Query, period: Period, namespace: str | None, labels: Mapping[str, Mapping[str, str]]) -> Usage:
    """Read what was measured of jobs and pools.

    Args:
        query: of the Prometheus.
        period: of which.
        namespace: of the jobs and pools; None: all.
        labels: of namespaces, by name, those that are asked for.

    Raises:
        CannotAnswer: the Prometheus does not answer as one does.
    """
    where = f'{{job_namespace="{namespace}"}}' if namespace else ""
    infos = _infos(query, period, where)
    members, queries = [], {"measuredHours": _text(_MEASURED, "", where, HOUR_S)}
    [measured_hours] = _by_hour(query, period, _MEASURED, "", where).values() or [(None,) * len(period.slots)]
    for kind, quantities in _BY_HOUR.items():
        by_quantity = {}
        for quantity, (pattern, name) in quantities.items():
            by_quantity[quantity] = _by_hour(query, period, pattern, name, where)
            queries[f"{kind}.{quantity}"] = _text(pattern, name, where, HOUR_S)
        shares = _shares(query, period, kind, where)
        refs = {
            ref
            for quantity, by_ref in by_quantity.items()
            for ref, values in by_ref.items()
            if quantity != "gpuHours" and any(values)
        }
        for ref in sorted(refs):
            energy_class, model = infos.get(ref, ("", ""))
            members.append(
                Member(
                    kind=kind,
                    namespace=ref[0],
                    name=ref[1],
                    energy_class=energy_class,
                    model=model,
                    labels=labels.get(ref[0], {}),
                    hours={quantity: values[ref] for quantity, values in by_quantity.items() if ref in values},
                    saved=shares.get(ref),
                )
            )
    return Usage(members=tuple(members), measured_hours=measured_hours, queries=queries)


def _by_hour(query: Query, period: Period, pattern: str, name: str, where: str) -> dict[Ref, Hourly]:
    """A quantity of every job or pool in every slot."""
    slots = period.slots
    by_ref: dict[Ref, list[float | None]] = {}
    for first, last in _alike(slots):
        begin_s, end_s = slots[first]
        text = _text(pattern, name, where, end_s - begin_s)
        for series in query(text, end_s, slots[last][1], HOUR_S):
            values = by_ref.setdefault(_ref(series), [None] * len(slots))
            for moment_s, value in series["values"]:
                slot = first + round((float(moment_s) - end_s) / HOUR_S)
                if math.isfinite(float(value)) and first <= slot <= last:  # one that is not spoils no sum
                    values[slot] = float(value)
    return {ref: tuple(values) for ref, values in by_ref.items() if any(value is not None for value in values)}


def _text(pattern: str, name: str, where: str, length_s: int) -> str:
    return pattern.format(name=name, where=where, length_s=length_s, less_s=max(1, length_s - 1))


def _alike(slots: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and last of the slots that one query can ask for: whole hours in a row, and each that is shorter."""
    first = 0
    for slot in range(1, len(slots) + 1):
        begin_s, end_s = slots[first]
        if slot == len(slots) or end_s - begin_s != HOUR_S or slots[slot][1] - slots[slot][0] != HOUR_S:
            yield first, slot - 1
            first = slot


def _shares(query: Query, period: Period, kind: str, where: str) -> dict[Ref, Share]:
    length_s = period.end_s - period.begin_s
    bounds = {}
    for field, name in _SHARES.items():
        text = _LATEST.format(name=f"perseus_{kind}_{name}", where=where, length_s=length_s)
        latest = {_ref(series): _last(series) for series in query(text, period.end_s, period.end_s, HOUR_S)}
        bounds[field] = {ref: value for ref, value in latest.items() if math.isfinite(value)}
    return {
        ref: Share(mean=mean, low=bounds["low"].get(ref), high=bounds["high"].get(ref))
        for ref, mean in bounds["mean"].items()
    }


def _infos(query: Query, period: Period, where: str) -> dict[Ref, tuple[str, str]]:
    """EnergyClass and model of each; of one that was edited in the period what says more."""
    text = _INFO.format(where=where, length_s=period.end_s - period.begin_s)
    infos: dict[Ref, tuple[str, str]] = {}
    for series in query(text, period.end_s, period.end_s, HOUR_S):
        info = series["metric"].get("energy_class", ""), series["metric"].get("model", "")
        before = infos.get(_ref(series), ("", ""))
        infos[_ref(series)] = max(before, info, key=lambda one: (sum(map(bool, one)), one))
    return infos


def _ref(series: Json) -> Ref:
    return series["metric"].get("job_namespace", ""), series["metric"].get("job_name", "")


def _last(series: Json) -> float:
    return float(series["values"][-1][1])
