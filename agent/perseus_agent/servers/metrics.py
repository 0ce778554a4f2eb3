"""What Prometheus and the kubelet read: /metrics, /healthz and /readyz, computed from the node's present state at each
request.

Series are of the node and of each job on it: sums, counts and extremes over GPUs, whose number does not depend on the
number of GPUs (design note 0032). Series of each GPU come only with ``--gpu-metrics``. Sums of counters never fall: a
GPU that is lost keeps its part, and one that is first read late brings nothing of its past.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from itertools import chain
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from perseus_agent import __version__
from perseus_agent.clocks.gpu_worker import GpuWorker
from perseus_agent.clocks.standing import Standing
from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.devices.base import Controllability
from perseus_agent.node.leases import LeaseView
from perseus_agent.node.node import Node
from perseus_agent.servers.engine_metrics import ENGINE_SERIES, engine_samples
from perseus_agent.servers.series import QUANTILES, Sample, Series
from perseus_core.units import hz_from_mhz, j_from_mj, s_from_us, w_from_mw
from perseus_runtime.http_server import CachedPage, HttpServer

log = logging.getLogger(__name__)

_NODE: Final = ("node",)
_GPU: Final = ("node", "gpu")
# Not "job" and "namespace": Prometheus gives those to the target that it scrapes.
_JOB: Final = ("node", "job_namespace", "job_name")
UNKNOWN: Final = "unknown"
"""State of a GPU that no job has asked for yet: whether its clocks may be set has not been read."""
STATES: Final = (*(value.name.lower() for value in Controllability), UNKNOWN)
"""Values of the label ``state`` of a node's GPUs."""
_RANK: Final = (*_GPU, "job_namespace", "job_name", "dp", "stage", "tp")

SERIES: Final = (
    Series("perseus_agent_build_info", "info", "Version of the agent and of the GPU driver it meets.", _NODE),
    Series(
        "perseus_agent_keeper_watches",
        "gauge",
        "1 while a clock keeper watches the agent; without one no further GPU is locked, and after a minute none is.",
        _NODE,
    ),
    Series(
        "perseus_node_gpus",
        "gauge",
        "GPUs by whether their clocks may be set: yes, why not, or unknown while no job has asked for them.",
        (*_NODE, "state"),
    ),
    Series("perseus_node_gpus_locked", "gauge", "GPUs whose SM clock this agent has locked.", _NODE),
    Series(
        "perseus_node_gpus_locked_without_rank",
        "gauge",
        "GPUs locked although no rank drives them and no lease asks for their clock; more than a moment is a fault.",
        _NODE,
    ),
    Series("perseus_node_gpus_adrift", "gauge", "GPUs that run, without a reason, at another clock than set.", _NODE),
    Series(
        "perseus_node_gpu_power_profiles",
        "gauge",
        "GPUs whose driver enforces a workload power profile, by its name; absent: none does.",
        (*_NODE, "profile"),
    ),
    Series(
        "perseus_node_gpu_power_floor_watts",
        "gauge",
        "Power at which power smoothing keeps GPUs of the node as loads ramp down, added up; absent: none is smoothed.",
        _NODE,
    ),
    Series("perseus_node_gpu_power_watts", "gauge", "Power drawn by all GPUs that answer.", _NODE),
    Series(
        "perseus_node_gpu_energy_joules_total",
        "counter",
        "Energy used by all GPUs since the agent first read them, from the driver's counters.",
        _NODE,
    ),
    Series("perseus_agent_clock_switches_total", "counter", "Clock writes to GPUs.", _NODE),
    Series("perseus_agent_clock_requests_skipped_total", "counter", "Requests coalesced or without effect.", _NODE),
    Series("perseus_agent_clock_restores_total", "counter", "Times a GPU was returned to its default clocks.", _NODE),
    Series(
        "perseus_agent_switch_latency_seconds",
        "gauge",
        "From the driver's call to the new clock in effect, p50 and p99, of the node's slowest GPU: published for the"
        " model until measured.",
        (*_NODE, "quantile"),
    ),
    Series(
        "perseus_agent_mark_lead_seconds",
        "gauge",
        "Longest time by which a host was ahead of its GPU in the last iteration; absent: not known.",
        _NODE,
    ),
    Series("perseus_agent_idle_clock_seconds_total", "counter", "Long waits of ranks at a GPU's least clock.", _NODE),
    Series("perseus_agent_idle_late_seconds_total", "counter", "Work after them at that clock, at most.", _NODE),
    Series("perseus_agent_idle_saved_joules_total", "counter", "What GPUs drew less in them than before.", _NODE),
    Series("perseus_agent_lease_expiries_total", "counter", "Leases that ran out.", _NODE),
    Series("perseus_agent_refused_peers_total", "counter", "Processes refused on the local socket.", _NODE),
    Series("perseus_agent_telemetry_dropped_events_total", "counter", "Telemetry events lost to slow readers.", _NODE),
    Series("perseus_agent_lease_remaining_seconds", "gauge", "Until the lease runs out.", _JOB),
    Series("perseus_agent_plan_age_seconds", "gauge", "Since a plan was last selected; absent: none is.", _JOB),
    Series("perseus_agent_ranks", "gauge", "Processes that drive a GPU.", _JOB),
    Series("perseus_node_job_gpus", "gauge", "GPUs that its ranks or engines drive, or its lease asks for.", _JOB),
    Series("perseus_node_job_gpus_under_plan", "gauge", "Those of them that follow a plan or a lease's clock.", _JOB),
    Series("perseus_node_job_gpus_not_controllable", "gauge", "Those of them whose clocks cannot be set.", _JOB),
    Series("perseus_node_job_gpu_power_watts", "gauge", "Power drawn by the job's GPUs.", _JOB),
    Series("perseus_node_job_clock_lowest_hertz", "gauge", "Lowest SM clock read back of the job's GPUs.", _JOB),
    Series("perseus_node_job_clock_mean_hertz", "gauge", "Mean SM clock read back of the job's GPUs.", _JOB),
    Series("perseus_node_job_clock_highest_hertz", "gauge", "Highest SM clock read back of the job's GPUs.", _JOB),
)
"""What an agent exposes always. Their number does not depend on the number of GPUs."""

GPU_SERIES: Final = (
    Series("perseus_gpu_clock_hertz", "gauge", "SM clock read back.", _GPU),
    Series("perseus_gpu_locked_clock_hertz", "gauge", "SM clock locked by this agent; absent: default clocks.", _GPU),
    Series("perseus_gpu_power_watts", "gauge", "Power drawn.", _GPU),
    Series("perseus_gpu_energy_joules_total", "counter", "Energy used, from the driver's counter.", _GPU),
    Series(
        "perseus_gpu_controllability",
        "gauge",
        "1 for the state that the GPU is in; 0 for all: no job has asked for it yet.",
        (*_GPU, "state"),
    ),
    Series("perseus_gpu_clock_drift", "gauge", "1 while the GPU runs, without a reason, at another clock.", _GPU),
    Series("perseus_gpu_rank_info", "gauge", "Always 1; the labels say which rank of which job drives the GPU.", _RANK),
    Series(
        "perseus_gpu_lease_info",
        "gauge",
        "Always 1; the labels say which job's lease asks for the GPU's clock, without a plan.",
        (*_GPU, "job_namespace", "job_name"),
    ),
    Series("perseus_gpu_clock_switches_total", "counter", "Clock writes to the GPU.", _GPU),
    Series("perseus_gpu_clock_requests_skipped_total", "counter", "Requests coalesced or without effect.", _GPU),
    Series("perseus_gpu_clock_restores_total", "counter", "Times the GPU was returned to its default clocks.", _GPU),
    Series(
        "perseus_gpu_switch_latency_seconds",
        "gauge",
        "From the driver's call to the new clock in effect, p50 and p99: published for the model until measured.",
        (*_GPU, "quantile"),
    ),
    Series("perseus_gpu_clock_call_seconds", "gauge", "Duration of the driver's call.", (*_GPU, "quantile")),
    Series("perseus_gpu_switch_latency_measured_total", "counter", "Clock changes whose latency was measured.", _GPU),
    Series(
        "perseus_gpu_mark_lead_seconds",
        "gauge",
        "Longest time by which the host was ahead of the GPU in the last iteration; absent: not known.",
        _GPU,
    ),
)
"""What it exposes with ``--gpu-metrics`` besides."""

Job = tuple[str, str]
"""Namespace and name."""


class NodeCollector(Collector):
    """Reads the node at each scrape."""

    def __init__(self, node: Node, hub: TelemetryHub, node_name: str, *, per_gpu: bool = False) -> None:
        """``per_gpu``: expose ``GPU_SERIES``, too."""
        self._node = node
        self._hub = hub
        self._name = node_name
        self._series = (*SERIES, *ENGINE_SERIES, *(GPU_SERIES if per_gpu else ()))
        self._per_gpu = per_gpu

    def collect(self) -> Iterable[Metric]:
        """Every series of the agent."""
        families = {series.name: series.family() for series in self._series}
        build = {"version": __version__, "driver": self._node.driver_version}
        families["perseus_agent_build_info"].add_metric([self._name], build)
        for name, labels, value in self._samples():
            families[name].add_metric([self._name, *labels], value)
        return families.values()

    def _samples(self) -> Iterator[Sample]:
        # A job that was deleted and made again under its name may hold two leases for a while. They make one series,
        # since two of the same labels would spoil the page.
        views = sorted(self._node.lease_views(), key=lambda view: view.remaining_s)
        of_job: dict[Job, list[LeaseView]] = {}
        for view in views:
            of_job.setdefault(_job_labels(view.job_name), []).append(view)
        names = {view.job_uid: job for job, job_views in of_job.items() for view in job_views}
        workers = self._node.workers
        leased = {
            (gpu.uuid, job)
            for job, job_views in of_job.items()
            for view in job_views
            for gpu in view.gpus
            if gpu.uuid in workers
        }
        ranks = [rank for rank, _ in self._node.ranks() if rank.gpu_uuid and rank.job_uid in names]
        served = {
            (uuid, names[engine.job_uid])
            for engine in self._node.engines()
            if engine.job_uid in names
            for uuid in engine.gpu_uuids
            if uuid in workers
        }
        wanted = leased | served | {(rank.gpu_uuid, names[rank.job_uid]) for rank in ranks}
        gpus: dict[Job, list[GpuWorker]] = {job: [] for job in of_job}
        for uuid, job in wanted:
            gpus[job].append(workers[uuid])
        yield from self._of_node({uuid for uuid, _ in wanted})
        yield from engine_samples(self._node)
        for job, job_views in of_job.items():
            yield from _of_lease(job, job_views)
            yield from _of_job(job, gpus[job])
        if not self._per_gpu:
            return
        for worker in workers.values():
            yield from _of_gpu(worker)
        for uuid, job in leased:
            yield "perseus_gpu_lease_info", (uuid, *job), 1
        for of_rank in {(r.gpu_uuid, *names[r.job_uid], *map(str, r.rank_id)) for r in ranks}:
            yield "perseus_gpu_rank_info", of_rank, 1

    def _of_node(self, wanted: set[str]) -> Iterator[Sample]:
        """``wanted``: the GPUs that a rank drives or a lease asks for."""
        workers = [*self._node.workers.values()]
        governors = [worker.governor for worker in workers]
        states = [_state(worker) for worker in workers]
        yield "perseus_agent_keeper_watches", (), self._node.watched
        for state in STATES:
            yield "perseus_node_gpus", (state,), states.count(state)
        locked = {worker.uuid for worker in workers if worker.governor.applied is not None}
        yield "perseus_node_gpus_locked", (), len(locked)
        yield "perseus_node_gpus_locked_without_rank", (), len(locked - wanted)
        yield "perseus_node_gpus_adrift", (), sum(each.standing is not Standing.OURS for each in governors)
        policies = [policy for governor in governors if (policy := governor.policy.latest) is not None]
        for profile, gpus in sorted(Counter(chain.from_iterable(policy.enforced for policy in policies)).items()):
            yield "perseus_node_gpu_power_profiles", (profile,), gpus
        if floor_w := sum(policy.floor_w for policy in policies):
            yield "perseus_node_gpu_power_floor_watts", (), floor_w
        yield from _power("perseus_node_gpu_power_watts", (), workers)
        used_mj = sum(worker.meter.used_mj for worker in workers)
        yield "perseus_node_gpu_energy_joules_total", (), j_from_mj(used_mj)
        yield "perseus_agent_clock_switches_total", (), sum(each.writes for each in governors)
        yield "perseus_agent_clock_requests_skipped_total", (), sum(each.skipped for each in governors)
        yield "perseus_agent_clock_restores_total", (), sum(each.restores for each in governors)
        for quantile, *times_s in zip(QUANTILES, *map(_latency_s, workers), strict=True):
            if times_s:
                yield "perseus_agent_switch_latency_seconds", (quantile,), max(times_s)
        leads_s = [lead_s for worker in workers if (lead_s := worker.lead_s) is not None]
        if leads_s:
            yield "perseus_agent_mark_lead_seconds", (), max(leads_s)
        waits = [worker.idle for worker in workers]
        yield "perseus_agent_idle_clock_seconds_total", (), s_from_us(sum(each.low_us for each in waits))
        yield "perseus_agent_idle_late_seconds_total", (), s_from_us(sum(each.late_us for each in waits))
        yield "perseus_agent_idle_saved_joules_total", (), j_from_mj(sum(each.saved_mj for each in waits))
        yield "perseus_agent_lease_expiries_total", (), self._node.leases.expiries
        yield "perseus_agent_refused_peers_total", (), self._node.refusals
        yield "perseus_agent_telemetry_dropped_events_total", (), self._hub.dropped


def _of_lease(job: Job, views: list[LeaseView]) -> Iterator[Sample]:
    latest = views[-1]
    yield "perseus_agent_lease_remaining_seconds", job, latest.remaining_s
    if latest.plan_age_s is not None:
        yield "perseus_agent_plan_age_seconds", job, latest.plan_age_s
    yield "perseus_agent_ranks", job, sum(view.ranks for view in views)


def _of_job(job: Job, workers: list[GpuWorker]) -> Iterator[Sample]:
    yield "perseus_node_job_gpus", job, len(workers)
    yield "perseus_node_job_gpus_under_plan", job, sum(map(_under_plan, workers))
    refusing = sum(_state(worker) not in {Controllability.YES.name.lower(), UNKNOWN} for worker in workers)
    yield "perseus_node_job_gpus_not_controllable", job, refusing
    yield from _power("perseus_node_job_gpu_power_watts", job, workers)
    clocks_mhz = [worker.clock_mhz for worker in workers if worker.clock_mhz is not None and not worker.governor.lost]
    if clocks_mhz:
        yield "perseus_node_job_clock_lowest_hertz", job, hz_from_mhz(min(clocks_mhz))
        yield "perseus_node_job_clock_mean_hertz", job, hz_from_mhz(1) * sum(clocks_mhz) / len(clocks_mhz)
        yield "perseus_node_job_clock_highest_hertz", job, hz_from_mhz(max(clocks_mhz))


def _of_gpu(worker: GpuWorker) -> Iterator[Sample]:
    governor, gpu = worker.governor, (worker.uuid,)
    if worker.clock_mhz is not None and not governor.lost:
        yield "perseus_gpu_clock_hertz", gpu, hz_from_mhz(worker.clock_mhz)
    if governor.applied:
        yield "perseus_gpu_locked_clock_hertz", gpu, hz_from_mhz(governor.applied)
    yield from _power("perseus_gpu_power_watts", gpu, [worker])
    total_mj = worker.meter.total_mj
    if total_mj is not None:
        yield "perseus_gpu_energy_joules_total", gpu, j_from_mj(total_mj)
    state = _state(worker)
    for value in Controllability:
        yield "perseus_gpu_controllability", (*gpu, value.name.lower()), float(value.name.lower() == state)
    yield "perseus_gpu_clock_drift", gpu, float(governor.standing is not Standing.OURS)
    yield "perseus_gpu_clock_switches_total", gpu, governor.writes
    yield "perseus_gpu_clock_requests_skipped_total", gpu, governor.skipped
    yield "perseus_gpu_clock_restores_total", gpu, governor.restores
    calls = governor.latency.calls
    calls_s = s_from_us(calls.p50_us), s_from_us(calls.p99_us)
    for name, times_s in (("switch_latency", _latency_s(worker)), ("clock_call", calls_s)):
        for quantile, time_s in zip(QUANTILES, times_s, strict=True):
            yield f"perseus_gpu_{name}_seconds", (*gpu, quantile), time_s
    yield "perseus_gpu_switch_latency_measured_total", gpu, governor.latency.measured
    if (lead_s := worker.lead_s) is not None:
        yield "perseus_gpu_mark_lead_seconds", gpu, lead_s


def _power(name: str, labels: tuple[str, ...], workers: Iterable[GpuWorker]) -> Iterator[Sample]:
    """Of the GPUs that answer; nothing if none does: absent is not zero."""
    powers_mw = [worker.power_mw for worker in workers if worker.power_mw is not None and not worker.governor.lost]
    if powers_mw:
        yield name, labels, w_from_mw(sum(powers_mw))


def _state(worker: GpuWorker) -> str:
    return worker.governor.controllability.name.lower() if worker.governor.probed else UNKNOWN


def _under_plan(worker: GpuWorker) -> bool:
    follower = worker.follower
    return worker.governor.resting_mhz is not None or (follower is not None and follower.plan is not None)


def _latency_s(worker: GpuWorker) -> tuple[float, float]:
    """Of clock changes: p50 and p99."""
    switch = worker.governor.latency.switch
    return switch.p50_s, switch.p99_s


def _job_labels(job_name: str) -> tuple[str, str]:
    """The operator names jobs ``namespace/name``."""
    namespace, _, name = job_name.rpartition("/")
    return namespace, name


class MetricsServer(HttpServer):
    """A small HTTP server beside the gRPC one."""

    def __init__(
        self,
        address: str,
        node: Node,
        hub: TelemetryHub,
        ready: Callable[[], bool],
        node_name: str,
        *,
        per_gpu: bool = False,
    ) -> None:
        """Bind ``host:port``; ``per_gpu``: expose the series of each GPU, too.

        Raises:
            OSError: it is taken.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(NodeCollector(node, hub, node_name, per_gpu=per_gpu))
        metrics = CachedPage(lambda: generate_latest(registry))
        pages: dict[str, Callable[[], tuple[int, str, bytes]]] = {
            "/metrics": lambda: (200, CONTENT_TYPE_LATEST, metrics()),
            "/healthz": lambda: _verdict(node.progressing, node.stuck),
            "/readyz": lambda: _verdict(ready() and node.progressing and not node.draining, node.stuck),
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


def _verdict(good: bool, why: str) -> tuple[int, str, bytes]:
    return (200, "text/plain", b"ok\n") if good else (503, "text/plain", f"{why or 'no'}\n".encode())
