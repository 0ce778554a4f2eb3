"""What Prometheus and the kubelet read: /metrics, /healthz and /readyz, from the node's present state. No state of
its own.

Labels are bounded by what the node has: GPU UUIDs and the jobs that hold leases. The only importer of
prometheus_client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from perseus_agent import __version__
from perseus_agent.devices.base import Controllability
from perseus_agent.node import Node
from perseus_agent.telemetry import TelemetryHub
from perseus_proto.units import hz_from_mhz, j_from_mj, w_from_mw

log = logging.getLogger(__name__)


class NodeCollector(Collector):
    """Reads the node at each scrape."""

    def __init__(self, node: Node, hub: TelemetryHub) -> None:
        self._node = node
        self._hub = hub

    def collect(self) -> Iterable[Metric]:
        """Every series of the agent."""
        yield InfoMetricFamily(
            "perseus_agent_build",
            "Version of the agent and of the GPU driver it meets.",
            value={"version": __version__, "driver": self._node.driver_version},
        )
        yield from self._gpus()
        yield from self._jobs()
        yield _counter("perseus_agent_lease_expiries", "Leases that ran out.", self._node.leases.expiries)
        yield _counter("perseus_agent_refused_peers", "Processes refused on the local socket.", self._node.refusals)
        yield _counter(
            "perseus_agent_telemetry_dropped_events", "Telemetry events lost to slow readers.", self._hub.dropped
        )

    def _gpus(self) -> Iterator[Metric]:
        clock = GaugeMetricFamily("perseus_gpu_clock_hertz", "SM clock read back.", labels=["gpu"])
        locked = GaugeMetricFamily(
            "perseus_gpu_locked_clock_hertz", "SM clock locked by this agent; absent: default clocks.", labels=["gpu"]
        )
        power = GaugeMetricFamily("perseus_gpu_power_watts", "Power drawn.", labels=["gpu"])
        energy = CounterMetricFamily(
            "perseus_gpu_energy_joules", "Energy used, from the GPU's own counter.", labels=["gpu"]
        )
        state = GaugeMetricFamily(
            "perseus_gpu_controllability", "1 for the state that the GPU is in.", labels=["gpu", "state"]
        )
        writes = CounterMetricFamily("perseus_agent_clock_switches", "Clock writes to the GPU.", labels=["gpu"])
        skipped = CounterMetricFamily(
            "perseus_agent_clock_requests_skipped", "Requests coalesced or without effect.", labels=["gpu"]
        )
        restores = CounterMetricFamily(
            "perseus_agent_clock_restores", "Times the GPU was given back to its default clocks.", labels=["gpu"]
        )
        drift = GaugeMetricFamily(
            "perseus_gpu_clock_drift", "1 while the GPU runs, without a reason, at another clock.", labels=["gpu"]
        )
        for uuid, worker in self._node.workers.items():
            governor = worker.governor
            if worker.clock_mhz is not None:
                clock.add_metric([uuid], hz_from_mhz(worker.clock_mhz))
            if governor.applied:
                locked.add_metric([uuid], hz_from_mhz(governor.applied))
            if worker.power_mw is not None:
                power.add_metric([uuid], w_from_mw(worker.power_mw))
            total_mj = worker.meter.total_mj
            if total_mj is not None:
                energy.add_metric([uuid], j_from_mj(total_mj))
            for value in Controllability:
                state.add_metric([uuid, value.name.lower()], float(governor.controllability is value))
            writes.add_metric([uuid], governor.writes)
            skipped.add_metric([uuid], governor.skipped)
            restores.add_metric([uuid], governor.restores)
            drift.add_metric([uuid], float(governor.drifted or governor.foreign))
        yield from (clock, locked, power, energy, state, writes, skipped, restores, drift)

    def _jobs(self) -> Iterator[Metric]:
        remaining = GaugeMetricFamily(
            "perseus_agent_lease_remaining_seconds", "Until the lease runs out.", labels=["job"]
        )
        age = GaugeMetricFamily(
            "perseus_agent_plan_age_seconds", "Since a plan was last selected; absent: none is.", labels=["job"]
        )
        ranks = GaugeMetricFamily("perseus_agent_ranks", "Processes that drive a GPU.", labels=["job"])
        for view in self._node.lease_views():
            remaining.add_metric([view.job_name], view.remaining_s)
            if view.plan_age_s is not None:
                age.add_metric([view.job_name], view.plan_age_s)
            ranks.add_metric([view.job_name], view.ranks)
        yield from (remaining, age, ranks)


class MetricsServer:
    """A small HTTP server beside the gRPC one."""

    def __init__(self, address: str, node: Node, hub: TelemetryHub, ready: Callable[[], bool]) -> None:
        """Bind ``host:port``.

        Raises:
            OSError: it is taken.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(node, hub))
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, generate_latest(registry)),
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

        host, _, port = address.rpartition(":")
        self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _verdict(good: bool) -> tuple[int, str, bytes]:
    return (200, "text/plain", b"ok\n") if good else (503, "text/plain", b"no\n")
