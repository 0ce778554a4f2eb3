"""The node: joins leases, processes and GPUs. Every command of the operator and every event of the local socket ends
here.

One lock guards the tables. Nothing that may block (kubelet, devices, sockets) is done under it: the GPUs' workers only
get commands. Two threads belong to the node: the timer (leases that run out, driver calls that hang) and the binder
(which queries the kubelet).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Final

from perseus_agent.clocks.call_queue import CallTurns
from perseus_agent.clocks.gpu_worker import GpuWorker, WorkerLimits
from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.plans import Points
from perseus_agent.clocks.telemetry import RankProcess, ServingEngine, TelemetryHub, Watcher
from perseus_agent.devices.base import DeviceSet
from perseus_agent.errors import Draining, InvalidRequest, KubeletUnavailable, PeerRefused, PeerUnknown
from perseus_agent.node.lease_clocks import Kubelet, LeaseClocks
from perseus_agent.node.leases import JobLease, LeaseRequest, LeaseTable, LeaseView
from perseus_agent.node.processes import SeatServices, Session, Sessions, own_part, succeeded
from perseus_agent.serving.totals import EngineTotals
from perseus_core.serving import EngineOrders, PageAddress
from perseus_proto.hello import Hello, Reason
from perseus_proto.planset import PlanSet

log = logging.getLogger(__name__)

TIMER_INTERVAL_S: Final = 0.1
BINDER_RETRY_S: Final = 1.0
RELEASE_WAIT_S: Final = 2.0
"""How long a release waits for the GPUs before it answers; resets are tried without an end."""


class Node:
    """All state of the agent that outlives one call."""

    def __init__(
        self,
        devices: DeviceSet,
        journal: Journal,
        kubelet: Kubelet,
        hub: TelemetryHub,
        limits: WorkerLimits,
        *,
        kept: Callable[[], None] = lambda: None,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """``kept`` is called each time the leases have been looked through: about every ``TIMER_INTERVAL_S``;
        ``monotonic_s`` is the clock by which leases run out."""
        self.driver_version = devices.driver_version
        turns = CallTurns(lambda uuid: self.workers[uuid].wake())
        self.workers = {
            device.identity.uuid: GpuWorker(device, journal, limits, hub.publish, turns) for device in devices.devices
        }
        self.leases = LeaseTable(journal, monotonic_s)
        self._monotonic_s = monotonic_s
        self._journal = journal
        self._kept, self._kubelet, self._hub = kept, kubelet, hub
        self._lock = threading.RLock()
        self._lease_clocks = LeaseClocks(self.workers, self.leases, kubelet, self._lock)
        self._sessions, self.engine_totals = Sessions(), EngineTotals()
        self.refusals = 0
        """Processes that were refused or disconnected."""
        self.page_faults: Mapping[str, str] = {}
        """Why the metrics page of a pod is not read, by its UID; replaced whole."""
        self._draining, self._unbound = threading.Event(), threading.Event()
        self._kept_s = time.monotonic()
        self._clocks = {clock for device in devices.devices for clock in device.identity.supported_clocks_mhz}
        loops = {"timer": self._time, "binder": self._bind}
        self._threads = [threading.Thread(target=loop, name=name, daemon=True) for name, loop in loops.items()]

    # ------------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Start the threads, and reset the GPUs that an earlier process of the agent left locked. Absent GPUs stay in
        the journal."""
        self._kept()  # before the first lock: from then on the agent's silence must be noticed
        for worker in self.workers.values():
            worker.start()
        for uuid in self._journal.locked & self.workers.keys():
            self.workers[uuid].restore("an earlier agent had locked the GPU and did not reset it")
        for thread in self._threads:
            thread.start()

    def drain(self, timeout_s: float) -> list[str]:
        """Refuse further commands, return every GPU to its default clocks, and stop. Returns the GPUs that could not be
        reset in time; the journal lists those. One whose thread does not come to an end is not waited for."""
        with self._lock:
            self._draining.set()
            self._unbound.set()
            self.leases.clear()
        stopped = {uuid: worker.stop("the agent stops") for uuid, worker in self.workers.items()}
        wait([left for uuid, left in stopped.items() if not self.workers[uuid].stuck], timeout_s)
        self._hub.close()
        with self._lock:
            for session in self._sessions:
                session.dismiss()
        return [uuid for uuid, future in stopped.items() if not succeeded(future)]

    @property
    def progressing(self) -> bool:
        """Whether the node's threads make progress; a GPU that is known to be lost is not counted."""
        kept = time.monotonic() - self._kept_s < 50 * TIMER_INTERVAL_S
        return kept and all(worker.progressing for worker in self.workers.values())

    @property
    def stuck(self) -> str:
        """Why the process must leave unasked: a thread does not end, its GPU is the keeper's. Empty: it need not."""
        return next((worker.stuck for worker in self.workers.values() if worker.stuck), "")

    @property
    def driver_replaced(self) -> bool:
        """Whether the driver was replaced under the process: it must leave, so that a new one meets the new driver."""
        return any(worker.governor.driver_replaced for worker in self.workers.values())

    @property
    def watched(self) -> bool:
        """Whether a clock keeper watches the agent."""
        return self._journal.watched

    @property
    def draining(self) -> bool:
        """Whether the agent is stopping."""
        return self._draining.is_set()

    # -------------------------------------------------------------------------------------- the operator's commands

    def acquire(self, wanted: LeaseRequest) -> LeaseView:
        """See ``LeaseTable.acquire``. Processes of the pods become ranks, and their GPUs are locked at the lease's
        clock, as soon as the kubelet has named the GPUs."""
        self._check_clocks("clock_mhz", {wanted.clock.mhz} - {0})
        with self._lock:
            self._check_serving()
            self._expire()
            self.leases.check(wanted)
        # Without the lock: a slow disk must not keep leases from expiring.
        self._journal.record_epoch(wanted.job_uid, wanted.epoch)
        with self._lock:
            self._check_serving()
            lease, ended = self.leases.acquire(wanted)
            for other in ended:
                self._end(other, "the lease of another job names the pod")
            self._lease_clocks.leased(lease)
            for session in self._sessions.bound(lease.job_uid):
                if session.pod_uid not in lease.pods:
                    self._unbind(session, "the pod left the job's lease")
            self._unbound.set()
            return self._view(lease)

    def renew(self, job_uid: str, epoch: int, ttl_s: float) -> LeaseView:
        """See ``LeaseTable.renew``."""
        with self._lock:
            self._check_serving()
            return self._view(self.leases.renew(job_uid, epoch, ttl_s))

    def release(self, job_uid: str, epoch: int) -> list[str]:
        """End a lease. Returns the GPUs that are back at their default clocks."""
        with self._lock:
            lease = self.leases.release(job_uid, epoch)
            pending = self._end(lease, "the lease was released") if lease else {}
        wait(pending.values(), RELEASE_WAIT_S)
        return sorted(uuid for uuid, future in pending.items() if succeeded(future))

    def push(self, job_uid: str, epoch: int, plan_set: PlanSet, number: int) -> None:
        """Store a plan set: all of it, or after an error nothing."""
        self._check_clocks("plan_set.clocks_mhz", set(plan_set.clocks_mhz))
        with self._lock:
            self._check_serving()
            lease = self.leases.commanded(job_uid, epoch, number)
            self.leases.check_room(lease, plan_set)
            lease.plans.push(plan_set)

    def select(
        self, job_uid: str, epoch: int, plan_id: str, points: Points, from_iteration: int, *, number: int
    ) -> int:
        """Choose points; returns the furthest iteration begun by a rank of the job on this node."""
        with self._lock:
            self._check_serving()
            lease = self.leases.commanded(job_uid, epoch, number)
            furthest = self._sessions.furthest(job_uid)
            lease.plans.select(plan_id, points, from_iteration, furthest)
            lease.selected_s = self._monotonic_s()
            self._ordered(lease)
            return max(furthest.values(), default=0)

    def order_engines(self, job_uid: str, epoch: int, orders: EngineOrders, number: int) -> None:
        """Say at which clocks a job's engines run: in place of all orders before, or after an error nothing."""
        self._check_clocks("table.ladder_mhz", set(orders.table.ladder_mhz) if orders.table else set())
        self._check_clocks("orders.clock_mhz", {mhz for mhz in orders.clocks_mhz.values() if mhz > 0})
        with self._lock:
            self._check_serving()
            lease = self.leases.commanded(job_uid, epoch, number)
            lease.order(orders)
            self._ordered(lease)

    def watch(self, job_uid: str) -> Watcher:
        """A stream of the job's telemetry, which begins with the ranks and engines that are here."""
        with self._lock:
            self._check_serving()
            watcher = self._hub.watch(job_uid)
            for session in self._sessions.bound(job_uid):
                watcher.put(session.change(joined=True))
            return watcher

    def unwatch(self, job_uid: str, watcher: Watcher) -> None:
        """End a stream of telemetry."""
        self._hub.leave(job_uid, watcher)

    def lease_views(self) -> list[LeaseView]:
        """Every lease."""
        with self._lock:
            return [self._view(lease) for lease in self.leases.all()]

    def ranks(self) -> list[tuple[RankProcess, int]]:
        """Every rank that has sent a hello, and its iteration; one that drives no GPU has no job and no GPU."""
        with self._lock:
            return [(session.rank, session.iteration or 0) for session in self._sessions.ranks()]

    def engines(self) -> list[ServingEngine]:
        """Every engine that has sent a hello; one that drives no GPU has no job and no GPUs."""
        with self._lock:
            return [session.engine for session in self._sessions.engines()]

    def hellos(self) -> dict[RankProcess, Hello]:
        """What every rank has said in its hello, such as its schedule."""
        with self._lock:
            return {session.rank: session.hello for session in self._sessions.ranks()}

    # ------------------------------------------------------------------------------------- the local socket's events

    def admit(self, session: Session) -> None:
        """Admit a process after its hello. It becomes a rank now if a lease names its pod, or waits for a lease.

        Raises:
            PeerRefused: it may not be a rank; the caller still owns the session.
        """
        with self._lock:
            if self.draining:
                raise PeerRefused("the agent is stopping", Reason.DRAINING)
            self._sessions.add(session)
        try:
            self._try_bind(session)
        except PeerUnknown:
            self._unbound.set()  # it waits; the binder tries again
        except PeerRefused:
            with self._lock:
                self._sessions.discard(session)
            raise

    def is_leased(self, pod_uid: str) -> bool:
        """Whether a lease names the pod."""
        with self._lock:
            return self.leases.of_pod(pod_uid) is not None

    def wanted_pages(self) -> Mapping[str, PageAddress]:
        """Pages to read, by the UID of the pod: of those whose engine does not say by itself what it does."""
        with self._lock:
            return {} if self.draining else self.leases.pages(but=self._sessions.speaking())

    def count_refusal(self) -> None:
        """Count a process that was refused."""
        with self._lock:
            self.refusals += 1

    def leave(self, session: Session) -> None:
        """Remove a process that has ended or disconnected: reset its GPU and free its memory."""
        with self._lock:
            self._sessions.discard(session)
            self._unbind(session, "the process has gone")
        session.close_when_detached()  # whatever has unbound it: its lease may have ended a moment before

    # ------------------------------------------------------------------------------------------- inside, under the lock

    def _check_serving(self) -> None:
        if self.draining:
            raise Draining("the agent is stopping")

    def _check_clocks(self, name: str, clocks_mhz: set[int]) -> None:
        unknown = clocks_mhz - self._clocks
        if unknown:
            raise InvalidRequest(f"{name}: no GPU of this node supports {min(unknown)} MHz")

    def _ordered(self, lease: JobLease) -> None:
        for session in self._sessions.bound(lease.job_uid):
            session.ordered(lease)
            for seat in session.seats:
                seat.worker.selection_changed()

    def _view(self, lease: JobLease) -> LeaseView:
        ranks, clocks = len(self._sessions.ranks(lease.job_uid)), self._lease_clocks
        gpus, energies_mj = clocks.view(lease), clocks.energies_mj(lease)
        return self.leases.view(lease, ranks=ranks, gpus=gpus, energies_mj=energies_mj, faults=self.page_faults)

    def _end(self, lease: JobLease, reason: str) -> dict[str, Future[bool]]:
        pending = self._lease_clocks.ended(lease.job_uid, reason)
        for session in self._sessions.bound(lease.job_uid):
            pending |= self._unbind(session, reason)
        return pending

    def _expire(self) -> None:
        for lease in self.leases.expired():
            stays = f"{lease.clock.mhz} MHz for {lease.clock.keep_s:g} s" if lease.lapsed else "default clocks"
            log.warning("lease expired: %s", stays, extra={"job": lease.job_name, "epoch": lease.epoch})
            if lease.lapsed:
                self._ordered(lease)
            else:
                self._end(lease, "the lease ran out")

    def _unbind(self, session: Session, reason: str) -> dict[str, Future[bool]]:
        """End what a process drives. Returns by GPU whether it is back at its default clocks."""
        if not session.seats:
            return {}
        self._hub.publish(session.job_uid, session.change(joined=False))
        seats = session.stand(self.leases.of_pod(session.pod_uid))
        left = {seat.worker.uuid: seat.worker.detach(seat.follower, reason) for seat in seats}
        session.detached = tuple(left.values())
        return left

    # ---------------------------------------------------------------------------------------- inside, without the lock

    def _try_bind(self, session: Session) -> None:
        """Let a process whose pod is named by a lease drive its GPUs.

        Raises:
            PeerRefused: it may not.
            PeerUnknown: the kubelet does not answer now.
        """
        with self._lock:
            lease = self.leases.of_pod(session.pod_uid)
            pod = lease.pods[session.pod_uid] if lease else None
            named_gpus = lease.named_gpus if lease else {}
        if pod is None or session.seats or session.dismissed:
            return
        try:
            allocation = self._kubelet.allocation(pod.namespace, pod.name, named_gpus)
        except KubeletUnavailable as error:
            raise PeerUnknown(str(error)) from error
        uuids = session.choose(own_part(allocation, session.peer.process, pod), self.workers)
        with self._lock:
            lease = self.leases.of_pod(session.pod_uid)
            gone = self.draining or session.dismissed or session not in self._sessions
            if gone or session.seats or lease is None or lease.pods[session.pod_uid] != pod:
                return  # the state has changed since: the next event decides
            others = self._sessions.driving(uuids, but=session)
            for other in others:
                if not session.replaces(other):
                    taken = ", ".join(seat.worker.uuid for seat in other.seats if seat.worker.uuid in uuids)
                    raise PeerRefused(f"process {other.peer.pid} drives {taken} already", Reason.GPU_TAKEN)
            for other in others:
                self._unbind(other, "the process was replaced")
                other.dismiss()
            workers, bound = [self.workers[uuid] for uuid in uuids], self._sessions.bound(lease.job_uid)
            session.sit(lease, workers, bound, SeatServices(self._hub.publish, self.engine_totals))
            for seat in session.seats:
                seat.worker.attach(seat.follower)
            self._hub.publish(lease.job_uid, session.change(joined=True))

    def _bind(self) -> None:
        """The binder's thread: bind processes that wait for a lease or for the kubelet, and hold the clocks of
        leases."""
        while not self.draining:
            self._unbound.wait(BINDER_RETRY_S)
            self._unbound.clear()
            with self._lock:
                waiting = [session for session in self._sessions if not session.seats]
            for session in waiting:
                try:
                    self._try_bind(session)
                except PeerUnknown as error:
                    log.info("a process waits: %s", error, extra={"pod": session.pod_uid})
                except PeerRefused as error:
                    log.warning("a process is refused: %s", error, extra={"pod": session.pod_uid})
                    self.count_refusal()
                    session.dismiss()
                except Exception:
                    log.exception("binding failed", extra={"pod": session.pod_uid})
            try:
                self._lease_clocks.ask_kubelet()
            except Exception:
                log.exception("the clocks of leases are not up to date")

    def _time(self) -> None:
        """The timer: end leases that have run out, and find driver calls that hang."""
        while not self._draining.wait(TIMER_INTERVAL_S):
            try:
                with self._lock:
                    self._expire()
                for worker in self.workers.values():
                    worker.check_hang()
                self._kept()
            except Exception:
                log.exception("the timer failed")
            self._kept_s = time.monotonic()
