"""A fleet of 100,000 GPUs as a Prometheus sees it: every series that its operator and agents would export, by their own
code and descriptions, with made-up values."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any, Final

from perseus_agent.servers.engine_metrics import ENGINE_SERIES, PAGES
from perseus_agent.servers.metrics import SERIES, STATES
from perseus_agent.servers.series import QUANTILES
from perseus_core.serving import ClockReason
from perseus_operator.api.budget import BudgetFigures, EnergyFigures, EnergyUse
from perseus_operator.api.status import Figures, FrontierStatus, StatusFigures
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pools.figures import ENGINES, TIMES, PoolCounts, PoolState, SavedShare
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.values import JobRef
from perseus_operator.solving.view import CalibrationQuality

NODES: Final = 12_500
GPUS_OF_NODE: Final = 8
JOBS: Final = 2_000
LARGEST: Final = 4_000
"""Nodes of the first job; the others share the rest."""
NAMESPACES: Final = 150
POOLS: Final = 500
"""Under the names of as many jobs, as none would be in a cluster: queries do not mind."""
SERVES: Final = 10
"""Each tenth node has engines."""
BUDGETS: Final = 60
ENERGY: Final = EnergyFigures(
    as_of="2026-11-15T00:00:00Z",
    end="2026-12-01T00:00:00Z",
    budget_watt_hours=700_000_000,
    used=EnergyUse(begin="2026-11-01T00:00:00Z", measured_watt_hours=300_000_000, assumed_watt_hours=1),
    forecast_watt_hours=690_000_000,
    pace_watts=900_000,
    unmeasured_jobs=0,
)
FRONTIER: Final = FrontierStatus(
    digest="0" * 64,
    points=100,
    minimum_time_microseconds=10_000_000,
    minimum_energy_time_microseconds=11_000_000,
    slowest_time_microseconds=12_000_000,
    mean_gap="0.1%",
    maximum_gap="0.2%",
    solve_milliseconds=1_500,
)
QUALITY: Final = CalibrationQuality("0" * 64, True, "", 0.01, 0.05, 40, 0.02)
VERSIONS: Final = ("0.1.0", "0.2.0")
REASONS: Final = [reason.value for reason in ClockReason]
_VALUES: Final = {"state": STATES, "quantile": QUANTILES, "limited_by": REASONS, "page": PAGES}


def job_of(number: int) -> JobRef:
    """One of the jobs, each with a name of its own."""
    return JobRef(f"team-{number % NAMESPACES}", f"job-{number}", f"uid-{number}")


def _serve(metrics: Metrics, pool: JobRef, chance: random.Random) -> None:
    """A pool all of whose series are there."""
    state = PoolState(
        pods=dict.fromkeys(ENGINES, chance.randrange(9)),
        clock_mhz=chance.randrange(900, 1980),
        limits_s=dict.fromkeys(TIMES, 0.5),
        attainment={time: chance.uniform(0.98, 1.0) for time in TIMES},
        attainment_wanted=0.99,
        saved=SavedShare(chance.uniform(0.1, 0.5), 0.1, 0.5, 40),
        canary_mhz=900,
        table=True,
        lowest_mhz=900,
        explained=True,
    )
    metrics.pools.set_pool(pool, state, active=True, ready=True)
    work = PoolCounts(
        requests=chance.randrange(1, 90),
        judged=dict.fromkeys(TIMES, 90),
        late=dict.fromkeys(TIMES, 1),
        prompt_tokens=chance.randrange(1, 9_000),
        generated_tokens=chance.randrange(1, 9_000),
        energy_mj=chance.randrange(1, 9_000_000),
        running_us=chance.uniform(1e6, 1e8),
        held_us={reason: chance.randrange(1, 10**7) for reason in REASONS},
    )
    metrics.pools.count(pool, work)


def operators_page(seed: int) -> bytes:
    """What an operator that serves all jobs exports."""
    metrics, chance = Metrics(), random.Random(seed)
    for number in range(JOBS):
        job, saved = job_of(number), chance.uniform(0.0, 0.3)
        baseline = Figures(iteration_time_microseconds=10_000_000, energy_millijoules=50_000_000)
        measured = Measured(10_100_000, round(50_000_000 * (1 - saved)), 50)
        figures = StatusFigures(baseline=baseline, predicted=baseline, frontier=FRONTIER)
        stragglers, ready = int(chance.random() < 0.02), chance.random() < 0.99
        metrics.set_job(
            job,
            figures,
            measured=measured,
            planned_slowdown=1.01,
            stragglers=stragglers,
            active=chance.random() < 0.95,
            ready=ready,
            quality=QUALITY,
        )
        metrics.set_frontier(job, [(10_000_000 + point, 50_000_000 - point) for point in range(100)])
        metrics.count_iteration(job, 40_000_000, Measured(10_000_000, 50_000_000, 50))
    for number in range(POOLS):
        _serve(metrics, job_of(number), chance)
    for number in range(BUDGETS):
        budget = BudgetFigures(
            jobs=30,
            granted_watts=900_000,
            wanted_watts=950_000,
            least_watts=1,
            unsteered_watts=1,
            milli_gpus_per_kilowatt=1,
            energy=ENERGY,
        )
        metrics.set_budget(f"budget-{number}", 1_000_000 + number, budget, kept=True, energy_kept=True)
    return metrics.exposition()


def agents_page(seed: int) -> bytes:
    """What all agents together export, each with one job on its node."""
    chance, lines = random.Random(seed), []
    for series in (*SERIES, *ENGINE_SERIES):
        kind = {"info": "gauge"}.get(series.kind, series.kind)
        lines.append(f"# TYPE {series.name} {kind}")
        more = next((label for label in series.labels if label in _VALUES), "")
        for number in range(0, NODES, SERVES if series in ENGINE_SERIES else 1):
            labels = f'node="node-{number:05}"'
            if "job_name" in series.labels:
                job = job_of(0 if number < LARGEST else number % JOBS)
                labels += f',job_namespace="{job.namespace}",job_name="{job.name}"'
            if series.kind == "info":
                labels += f',version="{VERSIONS[number % 2]}",driver="580"'
            for value in _VALUES.get(more, ("",)):
                own = f'{labels},{more}="{value}"' if more else labels
                lines.append(f"{series.name}{{{own}}} {chance.randrange(1, 9)}")
    return "\n".join(lines).encode() + b"\n"


@contextmanager
def served(*pages: Sequence[bytes]) -> Iterator[list[str]]:
    """Serve pages, each in several versions by turns, since values change; their addresses, host:port."""
    servers = []
    try:
        for versions in pages:

            class Handler(BaseHTTPRequestHandler):
                turns = cycle(versions)

                def do_GET(self) -> None:
                    body = next(self.turns)
                    self.send_response(200)
                    self.send_header("Content-Type", "text/plain; version=0.0.4")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_: Any) -> None:
                    """Scrapes are not logged."""

            server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.append(server)
        yield [f"127.0.0.1:{server.server_port}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
