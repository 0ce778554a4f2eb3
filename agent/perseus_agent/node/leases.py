"""Which operator may command which job on this node, and for how long: a table and a clock.

Every command names a job and an epoch, a fencing token. The highest epoch ever seen of a job outlives its lease (and
the process, by the journal), so that an operator that was replaced can never override its successor. The node calls it
under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from perseus_agent.clocks.journal import Journal
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.errors import InvalidRequest, NoLease, PodTaken, StaleEpoch, TooMuch
from perseus_core.leases import NO_RESTING_CLOCK, LeasedGpu, RestingClock
from perseus_core.serving import EngineOrders, PageAddress
from perseus_proto.planset import PlanSet

MIN_TTL_S: Final = 0.5
MAX_TTL_S: Final = 600.0
MAX_KEEP_S: Final = 7 * 24 * 3600.0
"""How long a clock may stay after its lease has run out."""
MAX_JOBS: Final = 256
MAX_PODS: Final = 1_024
MAX_CONTAINERS: Final = 128
MAX_NAMED_GPUS: Final = 128
"""Devices that one ResourceSlice may have: many more than a node has GPUs."""
MAX_PLAN_BYTES: Final = 1 << 28
"""Bound on the memory of the plan sets of all jobs together, those included that wait for their iteration: half of the
agent's limit."""
NAMESPACE_PLAN_BYTES: Final = 1 << 27
"""The same of the jobs of one namespace: sixteen stages of 3,072 instructions at 300 points take an eighth."""
MAX_FURTHEST: Final = 256
"""Pipelines that have left a node, of one job: it has far fewer GPUs, and a process chooses its pipeline itself."""
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


@dataclass(frozen=True)
class LeaseRequest:
    """What an operator asks for."""

    job_uid: str
    job_name: str
    epoch: int
    ttl_s: float
    pods: Sequence[PodName]
    clock: RestingClock = NO_RESTING_CLOCK
    named_gpus: Sequence[tuple[str, str]] = ()
    """Devices by claims: ``pool/device`` and its UUID, as the driver that named them for these pods has published."""
    number: int = 0
    """Of what the operator asks under its epoch, counted up."""


@dataclass
class JobLease:
    """One job's control of its GPUs."""

    job_uid: str
    job_name: str
    epoch: int
    expires_s: float
    pods: dict[str, PodName]
    clock: RestingClock = NO_RESTING_CLOCK
    lapsed: bool = False
    """The lease has run out: no operator commands the job, and only the clock stays, until ``expires_s``."""
    plans: JobPlans = field(default_factory=JobPlans)
    named_gpus: Mapping[str, str] = field(default_factory=dict)
    """As of the request."""
    orders: EngineOrders | None = None
    """Of its serving engines; None: they run at their default clocks."""
    orders_id: str = ""
    selected_s: float | None = None
    number: int = 0
    """The highest of what was asked under its epoch. What comes after a later request was given up by its caller."""
    furthest: dict[int, int] = field(default_factory=dict)
    """By data-parallel rank: the furthest iteration begun by ranks that have left; of the last ``MAX_FURTHEST``
    pipelines. An entry goes when the first rank of that pipeline returns."""

    @property
    def namespace(self) -> str:
        """Of the job."""
        return self.job_name.partition("/")[0]

    def order(self, orders: EngineOrders | None) -> None:
        """Replace the orders of its engines."""
        self.orders, self.orders_id = orders, orders.orders_id if orders else ""

    def left(self, dp: int, iteration: int) -> None:
        """A rank of a pipeline has left that had begun an iteration."""
        self.furthest[dp] = max(self.furthest.pop(dp, 0), iteration)
        if len(self.furthest) > MAX_FURTHEST:
            del self.furthest[next(iter(self.furthest))]


@dataclass(frozen=True)
class LeaseView:
    """A lease as it is reported to the operator."""

    job_uid: str
    job_name: str
    epoch: int
    remaining_s: float
    plan_id: str
    selections: Mapping[int, int | None]
    plan_age_s: float | None
    ranks: int
    clock_mhz: int
    gpus: tuple[LeasedGpu, ...]
    orders_id: str
    engine_faults: Mapping[str, str]
    """Why no engine of a pod is followed, by its UID."""
    energies_mj: Mapping[str, int]
    """What all GPUs of a pod have used, by its UID, where that is known of all."""


class LeaseTable:
    """All leases of the node."""

    def __init__(self, journal: Journal, clock: Callable[[], float]) -> None:
        self._journal = journal
        self._clock = clock
        self._jobs: dict[str, JobLease] = {}
        journal.keep_epochs(lambda job_uid: job_uid in self._jobs)
        self.expiries = 0
        """Leases that ran out."""

    def check(self, wanted: LeaseRequest) -> None:
        """Whether ``acquire`` would accept this now, before its epoch is written to the journal.

        Raises:
            RequestError: one of its classes; nothing was changed.
        """
        for name, value in (("job_uid", wanted.job_uid), ("job_name", wanted.job_name)):
            if not 1 <= len(value) <= _MAX_NAME:
                raise InvalidRequest(f"{name}: must have 1 to {_MAX_NAME} characters")
        if not 1 <= wanted.epoch <= MAX_EPOCH:
            raise InvalidRequest(f"epoch: must be 1 to {MAX_EPOCH}")
        _check_ttl(wanted.ttl_s)
        _check_clock(wanted.clock)
        by_uid = _check_pods(wanted.pods)
        _check_named_gpus(wanted.named_gpus)
        self._fence(wanted.job_uid, wanted.epoch)
        for other in self._others(wanted.job_uid, by_uid):
            if not other.lapsed:
                taken = min(other.pods.keys() & by_uid.keys())
                raise PodTaken(f"pods: {taken} belongs to the lease of {other.job_name}")
        if wanted.job_uid not in self._jobs and len(self._jobs) >= MAX_JOBS:
            raise TooMuch(f"job_uid: at most {MAX_JOBS} jobs on one node")

    def acquire(self, wanted: LeaseRequest) -> tuple[JobLease, list[JobLease]]:
        """Take control of a job, or take it over, or replace its pods or its clock. Plans in force stay in force. The
        journal must know the epoch already.

        Returns:
            The lease, and those of other jobs that it ends: they had lapsed and named one of its pods.

        Raises:
            RequestError: one of its classes; nothing was changed.
        """
        self.check(wanted)
        by_uid, lease = _check_pods(wanted.pods), self._jobs.get(wanted.job_uid)
        if lease is not None and lease.epoch == wanted.epoch:
            _check_number(lease, wanted.number)
        ended = self._others(wanted.job_uid, by_uid)
        for other in ended:
            del self._jobs[other.job_uid]
        expires_s = self._clock() + wanted.ttl_s
        if lease is None:
            lease = JobLease(wanted.job_uid, wanted.job_name, wanted.epoch, expires_s, by_uid)
            self._jobs[wanted.job_uid] = lease
        else:
            lease.job_name, lease.epoch, lease.expires_s, lease.pods = (
                wanted.job_name,
                wanted.epoch,
                expires_s,
                by_uid,
            )
        if wanted.clock.mhz or not wanted.clock.keep_s:
            lease.clock = wanted.clock
        elif lease.clock.mhz:
            lease.clock = RestingClock(lease.clock.mhz, wanted.clock.keep_s)
        lease.named_gpus, lease.number = dict(wanted.named_gpus), wanted.number
        lease.lapsed = False
        return lease, ended

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
        """The lease that an operator holds.

        Raises:
            StaleEpoch: a newer epoch has been seen.
            NoLease: none is held, it has run out, or it was acquired with an older epoch.
        """
        self._fence(job_uid, epoch)
        lease = self._jobs.get(job_uid)
        if lease is None or lease.lapsed or lease.expires_s <= self._clock():
            raise NoLease(f"job_uid: {job_uid!r} holds no lease on this node; acquire one first")
        if lease.epoch != epoch:
            raise NoLease(
                f"epoch: the lease of {job_uid!r} was acquired with {lease.epoch}; acquire it with {epoch} first"
            )
        return lease

    def commanded(self, job_uid: str, epoch: int, number: int) -> JobLease:
        """The lease under which a command is given.

        Raises:
            StaleEpoch: a newer epoch has been seen.
            NoLease: as of ``held``, or a later command came first.
        """
        lease = self.held(job_uid, epoch)
        _check_number(lease, number)
        lease.number = max(lease.number, number)
        return lease

    def expired(self) -> list[JobLease]:
        """End the leases that have run out, and return them. One with a clock that stays has ``lapsed`` from now on,
        and is removed when that time has run out, too."""
        now_s = self._clock()
        ended = [lease for lease in self._jobs.values() if lease.expires_s <= now_s]
        for lease in ended:
            self.expiries += not lease.lapsed
            if lease.lapsed or not lease.clock.keep_s:
                del self._jobs[lease.job_uid]
                lease.lapsed = False
            else:
                lease.lapsed, lease.expires_s = True, lease.expires_s + lease.clock.keep_s
                lease.plans.clear()
                lease.order(None)
        return ended

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

    def pages(self, *, but: Container[str]) -> dict[str, PageAddress]:
        """The metrics pages that leases name, by the UID of the pod, but of these pods."""
        now_s, pages = self._clock(), dict[str, PageAddress]()
        for lease in self._jobs.values():
            if lease.orders is not None and lease.expires_s > now_s:
                ordered = lease.orders.pages.items()
                pages |= {uid: page for uid, page in ordered if uid in lease.pods and uid not in but}
        return pages

    def view(
        self,
        lease: JobLease,
        *,
        ranks: int,
        gpus: tuple[LeasedGpu, ...],
        energies_mj: Mapping[str, int],
        faults: Mapping[str, str],
    ) -> LeaseView:
        """A lease with the number of its ranks and the GPUs at its clock, as it is reported.

        Args:
            lease: to report.
            ranks: that it has.
            gpus: at its clock.
            energies_mj: as of ``LeaseClocks.energies_mj``.
            faults: why no engine of a pod is followed, by the UID of any pod.
        """
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
            clock_mhz=lease.clock.mhz,
            gpus=gpus,
            orders_id=lease.orders_id,
            engine_faults={uid: why for uid, why in faults.items() if uid in lease.pods},
            energies_mj=energies_mj,
        )

    def _others(self, job_uid: str, pods: Mapping[str, PodName]) -> list[JobLease]:
        """Leases of other jobs that name one of these pods."""
        return [other for other in self._jobs.values() if other.job_uid != job_uid and other.pods.keys() & pods.keys()]

    def check_room(self, lease: JobLease, plan_set: PlanSet) -> None:
        """Whether there is room for a job's plan set beside those of the others.

        Raises:
            TooMuch: there is not.
        """
        wanted = lease.plans.memory_bytes_with(plan_set)
        others = [other for other in self._jobs.values() if other is not lease]
        of_namespace = sum(other.plans.memory_bytes for other in others if other.namespace == lease.namespace)
        for name, limit, stored in (
            (f"the plan sets of namespace {lease.namespace}", NAMESPACE_PLAN_BYTES, of_namespace),
            ("the plan sets of this node", MAX_PLAN_BYTES, sum(other.plans.memory_bytes for other in others)),
        ):
            if stored + wanted > limit:
                raise TooMuch(f"plan_set: {name} would take {stored + wanted} bytes, at most {limit}")

    def _fence(self, job_uid: str, epoch: int) -> None:
        seen = self._journal.epoch(job_uid)
        if epoch < seen:
            raise StaleEpoch(f"epoch: {epoch} is older than {seen}, the highest seen for {job_uid!r}", seen)


def _check_number(lease: JobLease, number: int) -> None:
    """What an older operator asks has no number, 0."""
    if number and number < lease.number:
        raise NoLease(f"number: {number} comes after {lease.number} for the lease of {lease.job_uid!r}")


def _check_ttl(ttl_s: float) -> None:
    if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise InvalidRequest(f"ttl_ms: must be {MIN_TTL_S * 1000:.0f} to {MAX_TTL_S * 1000:.0f}")


def _check_clock(clock: RestingClock) -> None:
    if not 0 <= clock.keep_s <= MAX_KEEP_S:
        raise InvalidRequest(f"keep_clock_ms: must be at most {MAX_KEEP_S * 1000:.0f}")


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


def _check_named_gpus(named: Sequence[tuple[str, str]]) -> None:
    if len(named) > MAX_NAMED_GPUS or any(not 1 <= len(text) <= _MAX_NAME for pair in named for text in pair):
        raise InvalidRequest(
            f"named_gpus: must be at most {MAX_NAMED_GPUS}, with 1 to {_MAX_NAME} characters for each name and uuid"
        )
    if len(dict(named)) != len(named):
        raise InvalidRequest("named_gpus.device: must not name a device twice")
