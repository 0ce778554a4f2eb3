"""Which operator may command which job on this node, and for how long: a table and a clock.

Every command names a job and an epoch, a fencing token. The highest epoch ever seen of a job outlives its lease (and
the process, by the journal), so that an operator that was replaced can never override its successor. The node calls it
under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.errors import InvalidRequest, NoLease, PodTaken, StaleEpoch, TooMuch
from perseus_proto.planset import PlanSet

MIN_TTL_S: Final = 0.5
MAX_TTL_S: Final = 600.0
MAX_JOBS: Final = 256
MAX_PODS: Final = 1_024
MAX_CONTAINERS: Final = 128
MAX_PLAN_BYTES: Final = 1 << 28
"""Bound on the unpacked plan sets of all jobs together."""
MAX_EPOCH: Final = 2**63 - 1
_MAX_NAME: Final = 512
"""Longest name accepted: namespace and name of a Kubernetes object, with their separator, are shorter."""


@dataclass(frozen=True)
class PodName:
    """A pod of a job, as the operator names it."""

    uid: str
    namespace: str
    name: str
    containers: frozenset[tuple[str, str]] = frozenset()
    """Identifier and name of each, of a pod that has several."""


@dataclass
class JobLease:
    """One job's control of its GPUs."""

    job_uid: str
    job_name: str
    epoch: int
    expires_s: float
    pods: dict[str, PodName]
    clock_mhz: int = 0
    """Of all GPUs of the pods, with or without a process; 0: no clock but that of plans."""
    plans: JobPlans = field(default_factory=JobPlans)
    selected_s: float | None = None
    furthest: dict[int, int] = field(default_factory=dict)
    """By data-parallel rank: the furthest iteration begun by ranks that have left. An entry goes when the first rank of
    that pipeline returns."""


@dataclass(frozen=True)
class LeasedGpu:
    """A GPU of a lease with a clock, as it is reported to the operator."""

    pod_uid: str
    uuid: str
    """Empty: the pod has none, or the message says why none is known."""
    applied_mhz: int
    """What this agent has locked; 0: the default clocks."""
    message: str
    """Why it is not the lease's clock; empty: it is, or is about to be."""


@dataclass(frozen=True)
class LeaseView:
    """A lease as it is reported to the operator."""

    job_uid: str
    job_name: str
    epoch: int
    remaining_s: float
    plan_id: str
    selections: Mapping[int, int]
    plan_age_s: float | None
    ranks: int
    clock_mhz: int
    gpus: tuple[LeasedGpu, ...]


class LeaseTable:
    """All leases of the node."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._jobs: dict[str, JobLease] = {}
        self.expiries = 0
        """Leases that ran out."""

    def check(self, job_uid: str, job_name: str, epoch: int, ttl_s: float, pods: Sequence[PodName]) -> None:
        """Whether ``acquire`` would accept this now, before its epoch is written to the journal.

        Raises:
            RequestError: one of its classes; nothing was changed.
        """
        for name, value in (("job_uid", job_uid), ("job_name", job_name)):
            if not 1 <= len(value) <= _MAX_NAME:
                raise InvalidRequest(f"{name}: must have 1 to {_MAX_NAME} characters")
        if not 1 <= epoch <= MAX_EPOCH:
            raise InvalidRequest(f"epoch: must be 1 to {MAX_EPOCH}")
        _check_ttl(ttl_s)
        by_uid = _check_pods(pods)
        self._fence(job_uid, epoch)
        for other in self._jobs.values():
            taken = other.pods.keys() & by_uid.keys()
            if other.job_uid != job_uid and taken:
                raise PodTaken(f"pods: {min(taken)} belongs to the lease of {other.job_name}")
        if job_uid not in self._jobs and len(self._jobs) >= MAX_JOBS:
            raise TooMuch(f"job_uid: at most {MAX_JOBS} jobs on one node")

    def acquire(
        self, job_uid: str, job_name: str, epoch: int, ttl_s: float, pods: Sequence[PodName], *, clock_mhz: int = 0
    ) -> JobLease:
        """Take control of a job, or take it over, or replace its pods or its clock. Plans in force stay in force. The
        journal must know the epoch already.

        Raises:
            RequestError: one of its classes; nothing was changed.
        """
        self.check(job_uid, job_name, epoch, ttl_s, pods)
        by_uid, lease = _check_pods(pods), self._jobs.get(job_uid)
        expires_s = self._clock() + ttl_s
        if lease is None:
            lease = self._jobs[job_uid] = JobLease(job_uid, job_name, epoch, expires_s, by_uid)
        else:
            lease.job_name, lease.epoch, lease.expires_s, lease.pods = job_name, epoch, expires_s, by_uid
        lease.clock_mhz = clock_mhz
        return lease

    def renew(self, job_uid: str, epoch: int, ttl_s: float) -> JobLease:
        """Extend a lease by ``ttl_s`` from now.

        Raises:
            RequestError: one of its classes.
        """
        _check_ttl(ttl_s)
        lease = self.held(job_uid, epoch)
        lease.expires_s = self._clock() + ttl_s
        return lease

    def release(self, job_uid: str, epoch: int) -> JobLease | None:
        """Remove a job's lease and return it; None if it held no lease.

        Raises:
            StaleEpoch: a newer operator holds it.
        """
        self._fence(job_uid, epoch)
        return self._jobs.pop(job_uid, None)

    def held(self, job_uid: str, epoch: int) -> JobLease:
        """The lease under which a command is given.

        Raises:
            StaleEpoch: a newer epoch has been seen.
            NoLease: none is held, it has run out, or it was acquired with an older epoch.
        """
        self._fence(job_uid, epoch)
        lease = self._jobs.get(job_uid)
        if lease is None or lease.expires_s <= self._clock():
            raise NoLease(f"job_uid: {job_uid!r} holds no lease on this node; acquire one first")
        if lease.epoch != epoch:
            raise NoLease(
                f"epoch: the lease of {job_uid!r} was acquired with {lease.epoch}; acquire it with {epoch} first"
            )
        return lease

    def expired(self) -> list[JobLease]:
        """Remove and return the leases that have run out."""
        now_s = self._clock()
        gone = [lease for lease in self._jobs.values() if lease.expires_s <= now_s]
        for lease in gone:
            del self._jobs[lease.job_uid]
        self.expiries += len(gone)
        return gone

    def clear(self) -> list[JobLease]:
        """Remove and return all leases, because the agent stops."""
        gone = list(self._jobs.values())
        self._jobs.clear()
        return gone

    def all(self) -> Iterable[JobLease]:
        """Every lease."""
        return self._jobs.values()

    def is_held(self, lease: JobLease) -> bool:
        """Whether a lease is still the one of its job, and has not run out."""
        return self._jobs.get(lease.job_uid) is lease and lease.expires_s > self._clock()

    def of_pod(self, pod_uid: str) -> JobLease | None:
        """The lease that names a pod: its opt-in."""
        now_s = self._clock()
        for lease in self._jobs.values():
            if pod_uid in lease.pods and lease.expires_s > now_s:
                return lease
        return None

    def remaining_s(self, lease: JobLease) -> float:
        """Seconds until a lease runs out; 0 if it has."""
        return max(0.0, lease.expires_s - self._clock())

    def view(self, lease: JobLease, *, ranks: int, gpus: tuple[LeasedGpu, ...]) -> LeaseView:
        """A lease with the number of its ranks and the GPUs at its clock, as it is reported."""
        plan_set = lease.plans.plan_set
        return LeaseView(
            job_uid=lease.job_uid,
            job_name=lease.job_name,
            epoch=lease.epoch,
            remaining_s=self.remaining_s(lease),
            plan_id=plan_set.plan_id if plan_set else "",
            selections={dp: choice.point for dp, choice in lease.plans.selections.items()},
            plan_age_s=None if lease.selected_s is None else self._clock() - lease.selected_s,
            ranks=ranks,
            clock_mhz=lease.clock_mhz,
            gpus=gpus,
        )

    def check_room(self, lease: JobLease, plan_set: PlanSet) -> None:
        """Whether there is room for a job's plan set beside those of the others.

        Raises:
            TooMuch: there is not.
        """
        stored = sum(_plan_bytes(other.plans.plan_set) for other in self._jobs.values() if other is not lease)
        if stored + _plan_bytes(plan_set) > MAX_PLAN_BYTES:
            raise TooMuch(f"plan_set: the plan sets of this node would take more than {MAX_PLAN_BYTES} bytes")

    def _fence(self, job_uid: str, epoch: int) -> None:
        seen = self._journal.epoch(job_uid)
        if epoch < seen:
            raise StaleEpoch(f"epoch: {epoch} is older than {seen}, the highest seen for {job_uid!r}", seen)


def _plan_bytes(plan_set: PlanSet | None) -> int:
    return 0 if plan_set is None else sum(len(row) for rows in plan_set.rows.values() for row in rows)


def _check_ttl(ttl_s: float) -> None:
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_ms: must be {MIN_TTL_S * 1000:.0f} to {MAX_TTL_S * 1000:.0f}")


def _check_pods(pods: Sequence[PodName]) -> dict[str, PodName]:
    if not 1 <= len(pods) <= MAX_PODS:
        raise InvalidRequest(f"pods: must name 1 to {MAX_PODS} pods")
    for pod in pods:
        if not all(1 <= len(text) <= _MAX_NAME for text in (pod.uid, pod.namespace, pod.name)):
            raise InvalidRequest(f"pods: uid, namespace and name must have 1 to {_MAX_NAME} characters each")
        if len(pod.containers) > MAX_CONTAINERS or any(len(t) > _MAX_NAME for pair in pod.containers for t in pair):
            raise InvalidRequest(
                f"pods.containers: must be at most {MAX_CONTAINERS}, with {_MAX_NAME} characters for each id and name"
            )
    by_uid = {pod.uid: pod for pod in pods}
    if len(by_uid) != len(pods):
        raise InvalidRequest("pods.uid: must not name a pod twice")
    return by_uid
