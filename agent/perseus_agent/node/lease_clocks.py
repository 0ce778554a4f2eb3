"""Clocks that belong to a lease and not to a plan: of jobs whose training processes need not be connected.

A lease that was acquired with a clock holds every GPU that the kubelet gave to its pods at that clock, until the pod
leaves the lease or the lease ends. The kubelet is asked again and again, and its latest answer counts: a GPU that it no
longer gives to the pod is let go, so that the next pod finds it at its default clocks. Of pods of other leases it is
asked once which GPUs they have, so that their energy can be reported without a process of theirs. Belongs to the node,
which calls all but ``ask_kubelet`` under its lock; the GPUs' workers only get commands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from perseus_agent.clocks.gpu_worker import GpuWorker
from perseus_agent.devices.base import Controllability
from perseus_agent.errors import KubeletUnavailable
from perseus_agent.node.leases import JobLease, LeaseTable
from perseus_agent.pods.pod_resources import Allocation
from perseus_core.leases import LeasedGpu


class Kubelet(Protocol):
    """Which devices a pod holds."""

    def allocation(self, namespace: str, name: str, published: Mapping[str, str]) -> Allocation | None: ...


@dataclass(frozen=True)
class _Holder:
    job_uid: str
    pod_uid: str


class LeaseClocks:
    """Which GPUs rest at the clock of a lease."""

    def __init__(
        self, workers: Mapping[str, GpuWorker], leases: LeaseTable, kubelet: Kubelet, lock: threading.RLock
    ) -> None:
        """``lock``: the node's, which guards the leases and this table."""
        self._workers = workers
        self._leases = leases
        self._kubelet = kubelet
        self._lock = lock
        self._holders: dict[str, _Holder] = {}  # by GPU
        self._problems: dict[_Holder, dict[str, str]] = {}  # by GPU, or by "" where none is known
        self._given: dict[_Holder, tuple[str, ...]] = {}  # GPUs; none where one of them is not the pod's alone

    def ask_kubelet(self) -> None:
        """Ask the kubelet which GPUs the pods have, and hold those. Called without the lock, again and again: a GPU
        that could not be locked is tried again."""
        with self._lock:
            wanted = [
                (lease, pod)
                for lease in self._leases.all()
                for pod in lease.pods.values()
                if lease.clock.mhz or _Holder(lease.job_uid, pod.uid) not in self._given
            ]
        why = ""
        for lease, pod in wanted:
            allocation = None
            try:
                if not why:  # one that does not answer is waited for once, not for each pod
                    allocation = self._kubelet.allocation(pod.namespace, pod.name, lease.named_gpus)
            except KubeletUnavailable as error:
                why = str(error)
            with self._lock:
                if not self._leases.is_held(lease) or lease.pods.get(pod.uid) != pod:
                    continue  # the lease has changed since: the next turn decides
                if allocation is not None:
                    whole = () if allocation.undrivable else allocation.gpu_uuids
                    self._given[_Holder(lease.job_uid, pod.uid)] = whole
                if not lease.clock.mhz:
                    continue
                if why:
                    self._unknown(_Holder(lease.job_uid, pod.uid), why)
                else:
                    self._allocated(_Holder(lease.job_uid, pod.uid), lease.clock.mhz, allocation)

    def leased(self, lease: JobLease) -> None:
        """Let go what a lease that was acquired anew does not name any more."""
        self._forget(lease.job_uid)
        pods = lease.pods if lease.clock.mhz else {}
        self._let_go(
            lambda _, holder: holder.job_uid == lease.job_uid and holder.pod_uid not in pods,
            "the lease asks for no clock any more",
        )

    def ended(self, job_uid: str, reason: str) -> dict[str, Future[bool]]:
        """Let go everything of a lease. Returns for each GPU whether it is back at its default clocks."""
        self._forget(job_uid)
        return self._let_go(lambda _, holder: holder.job_uid == job_uid, reason)

    def _forget(self, job_uid: str) -> None:
        """The kubelet is to be asked again: which GPUs the pods have may follow from the lease's names of devices."""
        self._given = {holder: uuids for holder, uuids in self._given.items() if holder.job_uid != job_uid}

    def energies_mj(self, lease: JobLease) -> dict[str, int]:
        """What all GPUs of a pod have used by their counters, as last read, by its UID; without pods of which it is not
        known of all.
        """
        pods_mj = dict[str, int]()
        for pod_uid in lease.pods:
            uuids = self._given.get(_Holder(lease.job_uid, pod_uid), ())
            known_mj = [used_mj for used_mj in map(self._used_mj, uuids) if used_mj is not None]
            if uuids and len(known_mj) == len(uuids):
                pods_mj[pod_uid] = sum(known_mj)
        return pods_mj

    def _used_mj(self, uuid: str) -> int | None:
        """Of a GPU whose counter has stopped it is not known, either."""
        worker = self._workers.get(uuid)
        if worker is None or worker.governor.lost or not worker.meter.answers:
            return None
        return worker.meter.total_mj

    def view(self, lease: JobLease) -> tuple[LeasedGpu, ...]:
        """The GPUs of a lease; nothing before the kubelet has been asked."""
        held = [self._view(uuid, holder) for uuid, holder in self._holders.items() if holder.job_uid == lease.job_uid]
        lacking = [
            LeasedGpu(device, holder.pod_uid, 0, why)
            for holder, problems in self._problems.items()
            if holder.job_uid == lease.job_uid
            for device, why in problems.items()
        ]
        return (*held, *lacking)

    def _allocated(self, holder: _Holder, mhz: int, allocation: Allocation | None) -> None:
        """Hold what the kubelet gave to a pod, and let go what it gave before."""
        given = allocation.gpu_uuids if allocation is not None else ()
        problems = {device: why.value for device, why in (allocation.undrivable if allocation else {}).items()}
        if not given and not problems:
            problems[""] = "the kubelet does not know this pod" if allocation is None else ""
        for uuid in given:
            worker = self._workers.get(uuid)
            if worker is None:
                problems[uuid] = "the driver does not show it on this node"
            elif mhz not in worker.device.identity.supported_clocks_mhz:
                problems[uuid] = f"{mhz} MHz is not a clock that it supports"
        drivable = [uuid for uuid in given if uuid not in problems]
        self._let_go(lambda uuid, other: other == holder and uuid not in drivable, "the GPU left the lease")
        self._problems[holder] = problems
        for uuid in drivable:
            worker = self._workers[uuid]
            held = self._holders.get(uuid) == holder and worker.governor.resting_mhz == mhz
            self._holders[uuid] = holder
            if not held or (worker.follower is None and worker.governor.applied != mhz):
                worker.rest_at(holder.job_uid, mhz)

    def _unknown(self, holder: _Holder, why: str) -> None:
        """What is held stays held."""
        if holder not in self._holders.values():
            self._problems[holder] = {"": why}

    def _view(self, uuid: str, holder: _Holder) -> LeasedGpu:
        governor = self._workers[uuid].governor
        as_wanted = governor.applied == governor.resting_mhz
        hopeful = not governor.probed or governor.controllability is Controllability.YES
        why = "" if as_wanted or hopeful else governor.controllability_message
        return LeasedGpu(uuid, holder.pod_uid, governor.applied or 0, why)

    def _let_go(self, gone: Callable[[str, _Holder], bool], reason: str) -> dict[str, Future[bool]]:
        """Return the GPUs of which this is true to their default clocks, and forget what was wrong with their pods."""
        uuids = [uuid for uuid, holder in self._holders.items() if gone(uuid, holder)]
        for uuid in uuids:
            del self._holders[uuid]
        self._problems = {holder: problems for holder, problems in self._problems.items() if not gone("", holder)}
        return {uuid: self._workers[uuid].rest_at_default(reason) for uuid in uuids}
