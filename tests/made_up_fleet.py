"""A made-up fleet for a month, and what a Prometheus that scraped it answers."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

HOUR_S = 3600
BEGIN_S = int(datetime(2026, 10, 1, tzinfo=UTC).timestamp())
HOURS = 31 * 24
END_S = BEGIN_S + HOURS * HOUR_S
_NAME = re.compile(r"perseus_\w+")


@dataclass
class Worker:
    """A job or a pool, and what it does in an hour, evenly: by series, from ``first`` to ``last``."""

    kind: str
    namespace: str
    name: str
    first: float
    last: float
    hourly: Mapping[str, float]
    levels: Mapping[str, float] = field(default_factory=dict)
    energy_class: str = ""
    model: str = ""

    def labels(self, series: str) -> dict[str, str]:
        labels = {"job_namespace": self.namespace, "job_name": self.name}
        return {**labels, "energy_class": self.energy_class, "model": self.model} if "info" in series else labels

    def hours(self, begin_s: float, end_s: float) -> float:
        """How long it ran between two moments."""
        first_s, last_s = (BEGIN_S + hour * HOUR_S for hour in (self.first, self.last))
        return max(0.0, min(end_s, last_s) - max(begin_s, first_s)) / HOUR_S


def fleet(jobs: int = 15, pools: int = 5) -> list[Worker]:
    """Jobs that come and go, pools that stay."""
    chance = random.Random(49)
    workers = []
    for number in range(jobs):
        first = chance.randrange(0, HOURS - 48)
        joules, saved = chance.uniform(1e7, 2e8), chance.uniform(0.03, 0.2)
        workers.append(
            Worker(
                "job",
                f"team-{'abcde'[number % 5]}",
                f"train-{number}",
                first,
                min(HOURS, first + chance.randrange(24, 300)),
                {
                    "perseus_job_energy_joules_total": joules,
                    "perseus_job_baseline_energy_joules_total": joules / (1 - saved),
                    "perseus_job_iterations_total": 1800.0,
                    "perseus_job_active": 60.0,
                    "perseus_node_job_gpus": 60.0 * 64,
                },
                {
                    "perseus_job_saved_ratio": saved,
                    "perseus_job_saved_low_ratio": saved - 0.01,
                    "perseus_job_saved_high_ratio": saved + 0.01,
                },
                energy_class=("frugal", "")[number % 2],
                model=f"gpt-{number % 3}",
            )
        )
    for number in range(pools):
        joules = chance.uniform(1e7, 5e7)
        workers.append(
            Worker(
                "pool",
                f"team-{'abcde'[number % 5]}",
                f"serve-{number}",
                0,
                HOURS,
                {
                    "perseus_pool_energy_joules_total": joules,
                    "perseus_pool_generated_tokens_total": 3e7,
                    "perseus_pool_prompt_tokens_total": 9e7,
                    "perseus_pool_requests_total": 1e5,
                    "perseus_pool_active": 60.0,
                    "perseus_node_job_gpus": 60.0 * 8,
                },
                energy_class="frugal",
                model="llama-70b",
            )
        )
    return workers


def _hours_of_any(workers: list[Worker], begin_s: float, end_s: float) -> float:
    """How long any of them ran between two moments."""
    hours, until_s = 0.0, begin_s
    for worker in sorted(workers, key=lambda one: one.first):
        hours += worker.hours(until_s, end_s)
        until_s = max(until_s, BEGIN_S + worker.last * HOUR_S)
    return hours


class MadeUpPrometheus:
    """Answers the queries of a report, as ``usage.Query``."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.asked: list[str] = []

    def __call__(self, text: str, first_s: int, last_s: int, step_s: int, /) -> list[dict[str, Any]]:
        self.asked.append(text)
        found = _NAME.search(text)
        length = re.search(r"\[(\d+)s", text)
        namespace = re.search(r'job_namespace="([^"]+)"', text)
        assert found, text
        assert length, text
        moments = range(first_s, last_s + 1, step_s)
        workers = [one for one in self.workers if not namespace or one.namespace == namespace[1]]
        if text.startswith("count_over_time("):
            seen = [(moment, _hours_of_any(workers, moment - int(length[1]) - 1, moment)) for moment in moments]
            known = [[moment, repr(hours)] for moment, hours in seen if hours]
            return [{"metric": {}, "values": known}] if known else []
        answer = []
        for worker in workers:
            # As increase does it: what grew over the window; a look each minute: minutes in it, divided by 60.
            values = [(moment, self._value(worker, found[0], moment, int(length[1]))) for moment in moments]
            known = [[moment, repr(value)] for moment, value in values if value is not None]
            if known:
                answer.append({"metric": worker.labels(found[0]), "values": known})
        return answer

    @staticmethod
    def _value(worker: Worker, series: str, moment_s: int, length_s: int) -> float | None:
        looked_at = series.endswith(("_active", "_gpus"))
        seen = worker.hours(moment_s - length_s - looked_at, moment_s)
        if series == "perseus_job_info":
            return 1.0 if seen else None
        if series in worker.levels:
            return worker.levels[series] if seen else None
        if series not in worker.hourly or not seen:
            return None
        per_hour = worker.hourly[series]
        return per_hour * seen / 60 if looked_at else per_hour * seen
