"""The Prometheus series of ServingPools, a part of the operator's.

A pool has the labels of a PerseusJob: agents hold its leases under them, and no pool is served that has the name of
one. Series are per pool, never per replica; every label has few values, whatever an agent says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import Counter, Gauge

from perseus_core.units import hz_from_mhz, j_from_mj, s_from_us
from perseus_operator.jobs.pools.figures import ENGINES, OTHER, REASONS, TIMES, PoolCounts, PoolState
from perseus_operator.objects.values import JobRef

_POOL: Final = ("job_namespace", "job_name")
Labels = tuple[str, str]
"""Namespace and name of a pool."""
Series = tuple[str, str]
"""Name of a family, and the value of its further label; empty: it has none."""


@dataclass(frozen=True)
class _Family:
    kind: type[Gauge] | type[Counter]
    text: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    """Of the label: counters begin with each of them at 0."""


_FAMILIES: Final = {
    "active": _Family(Gauge, "1 if pods of the pool run, 0 if not."),
    "ready": _Family(Gauge, "1 if the pool's condition Ready is True, 0 if not."),
    "pods": _Family(
        Gauge,
        "Pods by what is known of their engine: seen, silent, unknown, or different from that of most.",
        "engine",
        ENGINES,
    ),
    "clock_hertz": _Family(Gauge, "Mean clock of the replicas lately, the default clocks counted as the highest."),
    "limit_seconds": _Family(Gauge, "Limit of a request's time, or of the time between its tokens.", "time", TIMES),
    "attainment_ratio": _Family(
        Gauge, "Share of the latest requests that kept the limit; absent: too few were seen.", "time", TIMES
    ),
    "attainment_wanted_ratio": _Family(Gauge, "Share of the requests that shall keep each limit."),
    "saved_ratio": _Family(
        Gauge, "Energy of a token that is saved, measured by switching back; absent: not known yet, negative: lost."
    ),
    "saved_low_ratio": _Family(Gauge, "Lower end of its 95 % interval."),
    "saved_high_ratio": _Family(Gauge, "Upper end of its 95 % interval."),
    "comparisons": _Family(Gauge, "Blocks of some minutes at default clocks that were compared for it."),
    "advised_replicas": _Family(
        Gauge,
        "Replicas that the load needs at their highest clock; absent: nothing is advised, and none is to be moved.",
    ),
    "overloaded_replicas": _Family(
        Gauge, "Replicas at which a limit is about to be missed at the highest clock: more of it does not help."
    ),
    "canary_clock_hertz": _Family(Gauge, "Clock that is tried at one replica; absent: none is."),
    "table": _Family(Gauge, "1 if a table of clocks was made for the engine, 0 if not."),
    "table_lowest_clock_hertz": _Family(Gauge, "Lowest clock of the table; absent: there is no table."),
    "model_explains": _Family(Gauge, "1 if the model explains the engine, 0 if it does not; absent: too little seen."),
    "requests_total": _Family(Counter, "Requests that ended."),
    "judged_requests_total": _Family(Counter, "Requests whose time has a limit.", "time", TIMES),
    "late_requests_total": _Family(
        Counter, "Those of them that missed the limit, as far as counting between edges can tell.", "time", TIMES
    ),
    "prompt_tokens_total": _Family(Counter, "Tokens of prompts that were computed; cached ones are not."),
    "generated_tokens_total": _Family(Counter, "Tokens that were generated."),
    "energy_joules_total": _Family(Counter, "Energy of the GPUs of all replicas; absent: not measured."),
    "running_request_seconds_total": _Family(Counter, "Time that requests decoded; its rate is how many did."),
    "replica_seconds_total": _Family(
        Counter,
        "Time of the replicas by what held their clock; its rate is how many replicas it held.",
        "limited_by",
        REASONS,
    ),
    "fits_total": _Family(Counter, "Fits of the model, by what came of them.", "verdict", ()),
}
_UNSURE: Final = "energy_joules_total"
"""A counter that begins with its first value: 0 would say that nothing is drawn."""


class PoolMetrics:
    """The series of all pools of one operator."""

    def __init__(self, new: Callable[..., Any]) -> None:
        """``new`` makes a family of a kind, name, text and labels."""
        self._families = {
            name: new(one.kind, f"perseus_pool_{name}", one.text, (*_POOL, one.label) if one.label else _POOL)
            for name, one in _FAMILIES.items()
        }
        self._series: dict[Labels, dict[Series, Any]] = {}
        """Of each pool, those that are exposed."""
        self._values: dict[Labels, dict[Series, float | None]] = {}
        """Of its gauges, as they were set last."""

    def set_pool(self, ref: JobRef, state: PoolState, *, active: bool, ready: bool) -> None:
        """Set the gauges of one pool. A value that is not known removes its series: absent is not zero."""
        pool = _labels(ref)
        values = dict(_gauges(state, active=active, ready=ready))
        before = self._values.get(pool, {})
        for series, value in values.items():
            if series not in before or value != before[series]:
                if value is None:
                    self._remove(pool, series)
                else:
                    self._of(pool, series).set(value)
        self._values[pool] = values

    def count(self, ref: JobRef, counts: PoolCounts) -> None:
        """Count what a replica did."""
        pool = _labels(ref)
        for series, more in _counters(counts):
            if more:
                self._of(pool, series).inc(more)

    def count_fit(self, ref: JobRef, verdict: str) -> None:
        """Count a fit that has ended."""
        self._of(_labels(ref), ("fits_total", verdict)).inc()

    def forget_pool(self, ref: JobRef) -> None:
        """Remove all series of a pool."""
        pool = _labels(ref)
        for series in list(self._series.get(pool, ())):
            self._remove(pool, series)
        self._series.pop(pool, None)
        self._values.pop(pool, None)

    def _begin(self, pool: Labels) -> None:
        """A counter that appears with its first event has never risen, and its rate would miss that event."""
        self._series[pool] = {}
        for name, family in _FAMILIES.items():
            if family.kind is Counter and name != _UNSURE:
                for value in family.values:
                    self._of(pool, (name, value))

    def _of(self, pool: Labels, series: Series) -> Any:
        if pool not in self._series:
            self._begin(pool)
        exposed = self._series[pool]
        if series not in exposed:
            name, value = series
            exposed[series] = self._families[name].labels(*_further(pool, value))
        return exposed[series]

    def _remove(self, pool: Labels, series: Series) -> None:
        name, value = series
        self._families[name].remove(*_further(pool, value))
        self._series.get(pool, {}).pop(series, None)


def _labels(ref: JobRef) -> Labels:
    return ref.namespace, ref.name


def _further(pool: Labels, value: str) -> tuple[str, ...]:
    return (*pool, value) if value else pool


def _gauges(state: PoolState, *, active: bool, ready: bool) -> Iterator[tuple[Series, float | None]]:
    yield ("active", ""), float(active)
    yield ("ready", ""), float(ready)
    for engine in ENGINES:
        yield ("pods", engine), float(state.pods.get(engine, 0))
    for time in TIMES:
        yield ("limit_seconds", time), state.limits_s.get(time)
        yield ("attainment_ratio", time), state.attainment.get(time)
    yield ("attainment_wanted_ratio", ""), state.attainment_wanted
    saved = state.saved
    yield ("saved_ratio", ""), saved.share if saved else None
    yield ("saved_low_ratio", ""), saved.low if saved else None
    yield ("saved_high_ratio", ""), saved.high if saved else None
    yield ("comparisons", ""), float(saved.comparisons) if saved else None
    yield ("clock_hertz", ""), _hz(state.clock_mhz)
    yield ("advised_replicas", ""), state.advised
    yield ("overloaded_replicas", ""), float(state.overloaded)
    yield ("canary_clock_hertz", ""), _hz(state.canary_mhz)
    yield ("table", ""), float(state.table)
    yield ("table_lowest_clock_hertz", ""), _hz(state.lowest_mhz)
    yield ("model_explains", ""), None if state.explained is None else float(state.explained)


def _counters(counts: PoolCounts) -> Iterator[tuple[Series, float]]:
    yield ("requests_total", ""), counts.requests
    for time in TIMES:
        yield ("judged_requests_total", time), counts.judged.get(time, 0)
        yield ("late_requests_total", time), counts.late.get(time, 0)
    yield ("prompt_tokens_total", ""), counts.prompt_tokens
    yield ("generated_tokens_total", ""), counts.generated_tokens
    yield ("energy_joules_total", ""), j_from_mj(counts.energy_mj or 0)
    yield ("running_request_seconds_total", ""), s_from_us(1) * counts.running_us
    for reason, held_us in counts.held_us.items():
        yield ("replica_seconds_total", reason if reason in REASONS else OTHER), s_from_us(held_us)


def _hz(clock_mhz: int | None) -> float | None:
    return None if clock_mhz is None else hz_from_mhz(clock_mhz)
