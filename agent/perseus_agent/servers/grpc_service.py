"""The gRPC service: translates messages to calls of the node and back, and errors to status codes by one table.

TLS has authenticated the caller already; here one of its certificate's names must be allowed to command this agent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NoReturn, TypeVar

import grpc

from perseus_agent import __version__
from perseus_agent.clocks.gpu_worker import GpuWorker
from perseus_agent.clocks.stage_reports import combine
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.errors import (
    AgentError,
    DeviceError,
    Draining,
    InvalidRequest,
    JournalError,
    KubeletUnavailable,
    NoLease,
    NotAuthorised,
    PeerRefused,
    PodTaken,
    SettingsError,
    StaleEpoch,
    TooMuch,
    UnknownPlan,
)
from perseus_agent.node.leases import LeaseRequest, LeaseView, PodName
from perseus_agent.node.node import Node
from perseus_agent.servers.engine_messages import decode_orders, engine_message
from perseus_agent.servers.event_messages import event_message, rank_message
from perseus_core.leases import RestingClock
from perseus_core.units import ms_from_s, s_from_ms
from perseus_proto.hello import Hello
from perseus_proto.latency import encode_latency
from perseus_proto.planset import InvalidPlanSet, decode_changes, decode_plan_set
from perseus_proto.power_policy import encode_policy
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

log = logging.getLogger(__name__)

STATUS: Final[dict[type[AgentError], grpc.StatusCode]] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotAuthorised: grpc.StatusCode.PERMISSION_DENIED,
    StaleEpoch: grpc.StatusCode.FAILED_PRECONDITION,
    NoLease: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownPlan: grpc.StatusCode.NOT_FOUND,
    PodTaken: grpc.StatusCode.ALREADY_EXISTS,
    TooMuch: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    KubeletUnavailable: grpc.StatusCode.UNAVAILABLE,
    DeviceError: grpc.StatusCode.INTERNAL,
    JournalError: grpc.StatusCode.INTERNAL,
    PeerRefused: grpc.StatusCode.INTERNAL,
    SettingsError: grpc.StatusCode.INTERNAL,
}
"""Retryable are UNAVAILABLE and RESOURCE_EXHAUSTED; FAILED_PRECONDITION means: acquire again, or leave it to the newer
operator. The last three never reach a caller unless the agent is at fault."""

ERROR_METADATA: Final = "perseus-error"
"""Trailing metadata that carries the name of the error class: two of them share FAILED_PRECONDITION."""
EPOCH_METADATA: Final = "perseus-epoch"
"""Trailing metadata of a StaleEpoch: the highest epoch seen for the job, for an operator whose counter was lost."""

STREAM_WAIT_S: Final = 1.0
MAX_SELECTORS: Final = 4
"""Streams of selections at a time: one of each replica of the operator that has a job here. Others call."""
_SAN: Final = "x509_subject_alternative_name"
M = TypeVar("M")


def status_of(error: AgentError) -> grpc.StatusCode:
    """The gRPC code of an error: its own row of the table, or its nearest ancestor's."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    return grpc.StatusCode.INTERNAL


def _command(method: Callable[..., M]) -> Callable[..., M]:
    """Authorise the caller and translate what the node raises."""

    @functools.wraps(method)
    def wrapper(self: AgentService, request: Any, context: grpc.ServicerContext) -> M:
        try:
            self.authorise(context)
            return method(self, request, context)
        except AgentError as error:
            _abort(context, error)

    return wrapper


def _abort(context: grpc.ServicerContext, error: AgentError) -> NoReturn:
    metadata = [(ERROR_METADATA, type(error).__name__)]
    if isinstance(error, StaleEpoch):
        metadata.append((EPOCH_METADATA, str(error.seen)))
    context.set_trailing_metadata(tuple(metadata))
    context.abort(status_of(error), str(error))
    raise AssertionError("abort always raises")


class AgentService(stubs.AgentServicer):
    """``perseus.v1alpha1.Agent``."""

    def __init__(self, node: Node, node_name: str, allowed_sans: frozenset[str] | None) -> None:
        """``allowed_sans`` None: no TLS, and every caller may command."""
        self._node = node
        self._node_name = node_name
        self._allowed_sans = allowed_sans
        self._selectors = threading.BoundedSemaphore(MAX_SELECTORS)

    def authorise(self, context: grpc.ServicerContext) -> None:
        """Whether the caller's certificate carries an allowed name.

        Raises:
            NotAuthorised: it does not.
        """
        if self._allowed_sans is None:
            return
        names = {name.decode(errors="replace") for name in context.auth_context().get(_SAN, ())}
        if not names & self._allowed_sans:
            raise NotAuthorised(f"certificate: none of its names {sorted(names)} may command this agent")

    @_command
    def DescribeNode(self, request: messages.DescribeNodeRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        description = self._describe(self._node.hellos() if request.with_schedules else {})
        description.leases.extend(_lease(view) for view in self._node.lease_views())
        return description

    def _describe(self, hellos: Mapping[RankProcess, Hello]) -> messages.NodeDescription:
        node = self._node
        return messages.NodeDescription(
            node_name=self._node_name,
            agent_version=__version__,
            driver_version=node.driver_version,
            gpus=[_gpu(worker) for worker in node.workers.values()],
            ranks=[rank_message(rank, iteration, hellos.get(rank)) for rank, iteration in node.ranks()],
            engines=[engine_message(engine) for engine in node.engines()],
        )

    @_command
    def AcquireLease(self, request: messages.AcquireLeaseRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        pods = [
            PodName(pod.uid, pod.namespace, pod.name, frozenset((each.id, each.name) for each in pod.containers))
            for pod in request.pods
        ]
        ttl_s, clock = s_from_ms(request.ttl_ms), RestingClock(request.clock_mhz, s_from_ms(request.keep_clock_ms))
        named_gpus = [(f"{gpu.pool}/{gpu.device}", gpu.uuid) for gpu in request.named_gpus]
        name, number = request.job_name, request.number
        wanted = LeaseRequest(request.job_uid, name, request.epoch, ttl_s, pods, clock, named_gpus, number)
        return self._leased(self._node.acquire(wanted))

    @_command
    def RenewLease(self, request: messages.RenewLeaseRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        return self._leased(self._node.renew(request.job_uid, request.epoch, s_from_ms(request.ttl_ms)))

    def _leased(self, view: LeaseView) -> messages.Lease:
        lease = _lease(view)
        lease.description = digest_of(self._describe({}))
        return lease

    @_command
    def ReleaseLease(self, request: messages.ReleaseLeaseRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        restored = self._node.release(request.job_uid, request.epoch)
        return messages.ReleaseLeaseResponse(restored_gpu_uuids=restored)

    @_command
    def PushPlanSet(self, request: messages.PushPlanSetRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        try:
            plan_set = replace(decode_plan_set(request.plan_set), changes=decode_changes(request.changes))
        except InvalidPlanSet as error:
            raise InvalidRequest(str(error)) from None
        self._node.push(request.job_uid, request.epoch, plan_set, request.number)
        return messages.PushPlanSetResponse(plan_id=plan_set.plan_id)

    @_command
    def SelectPlan(self, request: messages.SelectPlanRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        return self._select(request)

    def SelectPlans(  # noqa: N802
        self, requests: Iterator[messages.SelectPlanRequest], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Select for one request after another; each is checked as if it were a call of its own."""
        try:
            self.authorise(context)
            with self._selecting():
                for request in requests:
                    yield self._select(request)
        except AgentError as error:
            _abort(context, error)

    @contextlib.contextmanager
    def _selecting(self) -> Iterator[None]:
        """Count a stream of selections, which holds a thread for as long as it is open."""
        if not self._selectors.acquire(blocking=False):
            raise TooMuch(f"at most {MAX_SELECTORS} streams of selections at a time")
        try:
            yield
        finally:
            self._selectors.release()

    def _select(self, request: messages.SelectPlanRequest) -> messages.SelectPlanResponse:
        points = {each.data_parallel_rank: None if each.no_plan else each.point for each in request.selections}
        if len(points) != len(request.selections):
            raise InvalidRequest("selections.data_parallel_rank: must not name a pipeline twice")
        furthest = self._node.select(
            request.job_uid, request.epoch, request.plan_id, points, request.from_iteration, number=request.number
        )
        return messages.SelectPlanResponse(furthest_iteration=furthest)

    @_command
    def OrderEngines(self, request: messages.OrderEnginesRequest, context: grpc.ServicerContext) -> Any:  # noqa: ARG002, N802
        orders = decode_orders(request)
        self._node.order_engines(request.job_uid, request.epoch, orders, request.number)
        return messages.OrderEnginesResponse(orders_id=orders.orders_id)

    def WatchTelemetry(  # noqa: N802
        self, request: messages.WatchTelemetryRequest, context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """Send a batch as soon as there are events, and an empty one now and then so that a dead reader is noticed."""
        try:
            self.authorise(context)
            watcher = self._node.watch(request.job_uid)
        except AgentError as error:
            _abort(context, error)
        try:
            # The first answer shows that the stream is open: every event from now on will be sent.
            yield messages.TelemetryBatch()
            while context.is_active() and (taken := watcher.take(STREAM_WAIT_S)) is not None:
                dropped, events = taken
                sent = combine(events) if request.combine_ranks else events
                yield messages.TelemetryBatch(dropped=dropped, events=[event_message(event) for event in sent])
        finally:
            self._node.unwatch(request.job_uid, watcher)


def digest_of(description: messages.NodeDescription) -> int:
    """A number that changes with what is described, but for figures that change all the time; it spoils the message."""
    for gpu in description.gpus:
        gpu.current_clock_mhz = gpu.locked_clock_mhz = gpu.energy_mj = 0
        latency = gpu.clock_latency
        del latency.transitions[:]
        latency.changes = latency.changes.bit_length()
        for name in ("p50_us", "p99_us", "call_p50_us", "call_p99_us"):
            setattr(latency, name, round(10 * math.log1p(getattr(latency, name))))
    for rank in description.ranks:
        rank.iteration = 0
    described = description.SerializeToString(deterministic=True)
    return int.from_bytes(hashlib.blake2b(described, digest_size=8).digest()) or 1


def _lease(view: LeaseView) -> messages.Lease:
    return messages.Lease(
        job_uid=view.job_uid,
        epoch=view.epoch,
        remaining_ms=ms_from_s(view.remaining_s),
        plan_id=view.plan_id,
        selections=[
            messages.Selection(data_parallel_rank=dp, point=point, no_plan=point is None)
            for dp, point in sorted(view.selections.items())
        ],
        clock=_lease_clock(view) if view.clock_mhz else None,
        orders_id=view.orders_id,
        engine_faults=[
            messages.EngineFault(pod_uid=uid, message=why) for uid, why in sorted(view.engine_faults.items())
        ],
        energies=[messages.PodEnergy(pod_uid=uid, energy_mj=mj) for uid, mj in sorted(view.energies_mj.items())],
    )


def _lease_clock(view: LeaseView) -> messages.LeaseClock:
    gpus = [
        messages.LeasedGpu(pod_uid=gpu.pod_uid, uuid=gpu.uuid, applied_clock_mhz=gpu.applied_mhz, message=gpu.fault)
        for gpu in view.gpus
    ]
    return messages.LeaseClock(clock_mhz=view.clock_mhz, gpus=gpus)


def _gpu(worker: GpuWorker) -> messages.Gpu:
    identity, governor, energy_mj = worker.device.identity, worker.governor, worker.meter.total_mj
    return messages.Gpu(
        uuid=identity.uuid,
        model=identity.model,
        supported_clocks_mhz=identity.supported_clocks_mhz,
        current_clock_mhz=worker.clock_mhz or 0,
        locked_clock_mhz=governor.applied or 0,
        controllability=f"CONTROLLABILITY_{governor.controllability.value if governor.probed else 'UNSPECIFIED'}",
        controllability_message=governor.controllability_message,
        energy_mj=energy_mj or 0,
        has_energy_counter=energy_mj is not None,
        clock_latency=encode_latency(governor.latency.described(), call_p99_us=governor.latency.calls.p99_us),
        max_power_mw=identity.max_power_mw or 0,
        power_policy=None if governor.policy.latest is None else encode_policy(governor.policy.latest),
    )
