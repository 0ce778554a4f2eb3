"""What Prometheus and the kubelet read: /metrics, /healthz and /readyz, computed from the node's present state at each
request.

Labels are bounded by what the node has: GPU UUIDs and the jobs that hold leases. The only module of the agent that
imports prometheus_client.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from perseus_agent import __version__
from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.devices.base import Controllability
from perseus_agent.node.node import Node
from perseus_proto.http_server import CachedPage, HttpServer
from perseus_proto.units import hz_from_mhz, j_from_mj, s_from_us, w_from_mw

log = logging.getLogger(__name__)

Sample = tuple[str, tuple[str, ...], float]
"""Name of the family, its labels after the node's, value."""


@dataclass(frozen=True)
class Series:
    """One family of series, as it is exposed and as the metrics page describes it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]

    def family(self) -> Any:
        """An empty family; ``add_metric(labels, value)`` fills it."""
        family, suffix = _FAMILIES[self.kind]
        return family(self.name.removesuffix(suffix), self.help, labels=self.labels)


_FAMILIES: Final[dict[str, tuple[Any, str]]] = {
    "gauge": (GaugeMetricFamily, ""),
    "counter": (CounterMetricFamily, "_total"),
    "info": (InfoMetricFamily, "_info"),
}
"""With the suffix that the library adds to the name by itself."""
_NODE: Final = ("node",)
_GPU: Final = ("node", "gpu")
# Not "job" and "namespace": Prometheus gives those to the target that it scrapes.
_JOB: Final = ("node", "job_namespace", "job_name")
QUANTILES: Final = ("0.5", "0.99")
"""Values of the label of that name."""
_RANK: Final = (*_GPU, "job_namespace", "job_name", "dp", "stage", "tp")

SERIES: Final = (
    Series("perseus_agent_build_info", "info", "Version of the agent and of the GPU driver it meets.", _NODE),
    Series("perseus_gpu_clock_hertz", "gauge", "SM clock read back.", _GPU),
    Series("perseus_gpu_locked_clock_hertz", "gauge", "SM clock locked by this agent; absent: default clocks.", _GPU),
    Series("perseus_gpu_power_watts", "gauge", "Power drawn.", _GPU),
    Series("perseus_gpu_energy_joules_total", "counter", "Energy used, from the driver's counter.", _GPU),
    Series("perseus_gpu_controllability", "gauge", "1 for the state that the GPU is in.", (*_GPU, "state")),
    Series("perseus_gpu_clock_drift", "gauge", "1 while the GPU runs, without a reason, at another clock.", _GPU),
    Series("perseus_gpu_rank_info", "gauge", "Always 1; the labels say which rank of which job drives the GPU.", _RANK),
    Series(
        "perseus_gpu_lease_info",
        "gauge",
        "Always 1; the labels say which job's lease asks for the GPU's clock, without a plan.",
        (*_GPU, "job_namespace", "job_name"),
    ),
    Series("perseus_agent_clock_switches_total", "counter", "Clock writes to the GPU.", _GPU),
    Series("perseus_agent_clock_requests_skipped_total", "counter", "Requests coalesced or without effect.", _GPU),
    Series("perseus_agent_clock_restores_total", "counter", "Times the GPU was returned to its default clocks.", _GPU),
    Series(
        "perseus_agent_clock_latency_seconds",
        "gauge",
        "From the driver's call to the new clock in effect, p50 and p99: published for the model until measured.",
        (*_GPU, "quantile"),
    ),
    Series("perseus_agent_clock_call_seconds", "gauge", "Duration of the driver's call.", (*_GPU, "quantile")),
    Series("perseus_agent_clock_latency_measured_total", "counter", "Clock changes whose latency was measured.", _GPU),
    Series(
        "perseus_agent_mark_lead_seconds",
        "gauge",
        "Longest time by which the host was ahead of the GPU in the last iteration; absent: not known.",
        _GPU,
    ),
    Series("perseus_agent_lease_remaining_seconds", "gauge", "Until the lease runs out.", _JOB),
    Series("perseus_agent_plan_age_seconds", "gauge", "Since a plan was last selected; absent: none is.", _JOB),
    Series("perseus_agent_ranks", "gauge", "Processes that drive a GPU.", _JOB),
    Series("perseus_agent_lease_expiries_total", "counter", "Leases that ran out.", _NODE),
    Series("perseus_agent_refused_peers_total", "counter", "Processes refused on the local socket.", _NODE),
    Series("perseus_agent_telemetry_dropped_events_total", "counter", "Telemetry events lost to slow readers.", _NODE),
)
"""Everything this agent exposes. At most 23 series for each GPU and 3 for each job on the node."""


class NodeCollector(Collector):
    """Reads the node at each scrape."""

    def __init__(self, node: Node, hub: TelemetryHub, node_name: str) -> None:
        self._node = node
        self._hub = hub
        self._name = node_name

    def collect(self) -> Iterable[Metric]:
        """Every series of the agent."""
        families = {series.name: series.family() for series in SERIES}
        build = {"version": __version__, "driver": self._node.driver_version}
        families["perseus_agent_build_info"].add_metric([self._name], build)
        for name, labels, value in (*self._gpus(), *self._jobs(), *self._own()):
            families[name].add_metric([self._name, *labels], value)
        return families.values()

    def _gpus(self) -> Iterator[Sample]:
        for uuid, worker in self._node.workers.items():
            governor, gpu = worker.governor, (uuid,)
            if worker.clock_mhz is not None:
                yield "perseus_gpu_clock_hertz", gpu, hz_from_mhz(worker.clock_mhz)
            if governor.applied:
                yield "perseus_gpu_locked_clock_hertz", gpu, hz_from_mhz(governor.applied)
            if worker.power_mw is not None:
                yield "perseus_gpu_power_watts", gpu, w_from_mw(worker.power_mw)
            total_mj = worker.meter.total_mj
            if total_mj is not None:
                yield "perseus_gpu_energy_joules_total", gpu, j_from_mj(total_mj)
            for value in Controllability:
                state = float(governor.controllability is value)
                yield "perseus_gpu_controllability", (uuid, value.name.lower()), state
            yield "perseus_gpu_clock_drift", gpu, float(governor.drifted or governor.foreign)
            yield "perseus_agent_clock_switches_total", gpu, governor.writes
            yield "perseus_agent_clock_requests_skipped_total", gpu, governor.skipped
            yield "perseus_agent_clock_restores_total", gpu, governor.restores
            latency, calls = governor.latency.switch, governor.latency.calls
            calls_s = s_from_us(calls.p50_us), s_from_us(calls.p99_us)
            for quantile, latency_s, call_s in zip(QUANTILES, (latency.p50_s, latency.p99_s), calls_s, strict=True):
                yield "perseus_agent_clock_latency_seconds", (uuid, quantile), latency_s
                yield "perseus_agent_clock_call_seconds", (uuid, quantile), call_s
            yield "perseus_agent_clock_latency_measured_total", gpu, governor.latency.measured
            if worker.lead_s is not None:
                yield "perseus_agent_mark_lead_seconds", gpu, worker.lead_s

    def _jobs(self) -> Iterator[Sample]:
        names: dict[str, tuple[str, str]] = {}
        for view in self._node.lease_views():
            job = names[view.job_uid] = _job_labels(view.job_name)
            yield "perseus_agent_lease_remaining_seconds", job, view.remaining_s
            if view.plan_age_s is not None:
                yield "perseus_agent_plan_age_seconds", job, view.plan_age_s
            yield "perseus_agent_ranks", job, view.ranks
            for gpu in view.gpus:
                if gpu.uuid in self._node.workers:
                    yield "perseus_gpu_lease_info", (gpu.uuid, *job), 1
        ranks = [rank for rank, _ in self._node.ranks() if rank.gpu_uuid and rank.job_uid in names]
        # A set: two processes with the same rank must not make one series twice, or Prometheus refuses the whole page.
        for rank in {(r.gpu_uuid, *names[r.job_uid], *map(str, r.rank_id)) for r in ranks}:
            yield "perseus_gpu_rank_info", rank, 1

    def _own(self) -> Iterator[Sample]:
        yield "perseus_agent_lease_expiries_total", (), self._node.leases.expiries
        yield "perseus_agent_refused_peers_total", (), self._node.refusals
        yield "perseus_agent_telemetry_dropped_events_total", (), self._hub.dropped


def _job_labels(job_name: str) -> tuple[str, str]:
    """The operator names jobs ``namespace/name``."""
    namespace, _, name = job_name.rpartition("/")
    return namespace, name


class MetricsServer(HttpServer):
    """A small HTTP server beside the gRPC one."""

    def __init__(self, address: str, node: Node, hub: TelemetryHub, ready: Callable[[], bool], node_name: str) -> None:
        """Bind ``host:port``.

        Raises:
            OSError: it is taken.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(node, hub, node_name))
        metrics = CachedPage(lambda: generate_latest(registry))
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, metrics()),
            "/healthz": lambda: _verdict(node.progressing),
            "/readyz": lambda: _verdict(ready() and node.progressing and not node.draining),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = 5

            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0])
                status, kind, body = page() if page else (404, "text/plain", b"not found\n")
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class calls it so
                log.debug(format, *args)

        super().__init__(address, Handler, "metrics")


def _verdict(good: bool) -> tuple[int, str, bytes]:
    return (200, "text/plain", b"ok\n") if good else (503, "text/plain", b"no\n")
