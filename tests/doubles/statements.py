"""Statements of a made-up fleet with all factors: of October, and of each of its days."""

from __future__ import annotations

from tests.made_up_fleet import BEGIN_S, HOUR_S, MadeUpPrometheus, fleet

from perseus_operator.report import stored
from perseus_operator.report.merged import Source
from perseus_operator.report.statement import Factor, Period, Statement
from perseus_operator.report.usage import read_usage

_SITE = MadeUpPrometheus(fleet(12, 4))
DAY_S = 24 * HOUR_S


def statement_of(begin_s: int, end_s: int, namespace: str | None = None) -> Statement:
    """What is read at the end of a period that begins and ends at full hours."""
    period = Period(begin_s=begin_s, end_s=end_s)
    usage = read_usage(_SITE, period, namespace, {})
    hours = [begin // HOUR_S for begin, _ in period.slots]
    return Statement(
        period=period,
        taken_s=end_s + 60,
        scope="all namespaces" if namespace is None else f"namespace {namespace}",
        origin="http://prometheus:9090",
        queries=usage.queries,
        program="perseus-k8s 0.1.0",
        members=usage.members,
        measured_hours=usage.measured_hours,
        currency="EUR",
        organization="Example GmbH",
        tokens_per_step={"team-a/train-0": 2_097_152.0},
        factors={
            "server": Factor(source="vendor's sheet", value=1.35),
            "pue": Factor(source="site meters, 2025", value=1.2),
            "price": Factor(
                source="exchange.csv", digest="sha256:0", hours=tuple(0.08 + 0.001 * (hour % 24) for hour in hours)
            ),
            "locationBased": Factor(source="grid, 2025", value=381.0),
            "marketBased": Factor(source="supplier's label", value=20.0),
        },
    )


def source_of(day: int) -> Source:
    """A day of October, from 0, as it was stored."""
    statement = statement_of(BEGIN_S + day * DAY_S, BEGIN_S + (day + 1) * DAY_S)
    return Source(name=f"2026-10-{day + 1:02}.json", digest=stored.digest(statement), statement=statement)
