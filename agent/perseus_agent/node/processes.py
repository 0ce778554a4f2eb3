"""Processes on the local socket, and the rule that decides which GPUs one of them may drive.

A session begins with a hello and lasts as long as its connection. It waits until a lease names its pod (the opt-in);
then the kubelet's answer decides about the GPUs: they must belong to that pod alone, and to the process's container of
it. A rank drives one, which it only chooses among these; a serving engine drives all of them, or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from perseus_agent.clocks.follower import Follower
from perseus_agent.clocks.gpu_worker import GpuWorker
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import EngineChange, Event, RankChange, RankProcess, ServingEngine
from perseus_agent.errors import PeerRefused, PeerUnknown
from perseus_agent.node.leases import JobLease, PodName
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_agent.pods.pod_resources import Allocation
from perseus_agent.serving.follower import EngineFollower
from perseus_agent.serving.instance import EngineInstance
from perseus_agent.serving.law import LawSettings
from perseus_agent.serving.totals import EngineTotals
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader
from perseus_proto.engine_channel import EngineReader
from perseus_proto.engine_hello import EngineHello
from perseus_proto.hello import Hello, Reason, Timing

MAX_SESSIONS: Final = 256
MAX_SESSIONS_OF_POD: Final = 64
"""Bounds on what the socket's peers can make the agent store; a node has 8 or 16 GPUs, and one rank drives one."""


Publish = Callable[[str, Event], None]


@dataclass(frozen=True)
class Seat:
    """What drives one GPU for a process."""

    worker: GpuWorker
    follower: Follower


@dataclass(frozen=True)
class SeatServices:
    """What a session's seats need of their node: where telemetry goes, and the sums of engines."""

    publish: Publish
    totals: EngineTotals


class Session(ABC):
    """One process that has sent a hello."""

    channel: ChannelReader | EngineReader

    def __init__(self, peer: Peer, hang_up: Callable[[], None]) -> None:
        """``hang_up`` ends the connection; the process will try again later."""
        self.peer = peer
        self.dismissed = False
        """Its connection was closed by the agent; it drives nothing any more, even if its own end is still open."""
        self.job_uid = ""
        """Of the lease for which it drives GPUs; empty: it drives none."""
        self.seats: tuple[Seat, ...] = ()
        self.detached: tuple[Future[bool], ...] = ()
        """When the workers that it had last have let go of its memory."""
        self._hang_up = hang_up

    def dismiss(self) -> None:
        """Close the connection, for good."""
        self.dismissed = True
        self._hang_up()

    @property
    def pod_uid(self) -> str:
        """The pod that the process is in, from the kernel."""
        return self.peer.process.pod_uid

    @abstractmethod
    def choose(self, allocation: Allocation | None, uuids: Container[str]) -> tuple[str, ...]:
        """The UUIDs of the GPUs that it drives, as ``choose_gpu`` finds one."""

    @abstractmethod
    def replaces(self, other: Session) -> bool:
        """Whether it is the same process as another, started again."""

    @abstractmethod
    def sit(
        self, lease: JobLease, workers: Sequence[GpuWorker], others: Sequence[Session], services: SeatServices
    ) -> None:
        """Take seats at GPUs for a lease's job, of which others have theirs already."""

    @abstractmethod
    def change(self, *, joined: bool) -> Event:
        """That it has taken its seats, or leaves them."""

    def stand(self, lease: JobLease | None) -> tuple[Seat, ...]:  # noqa: ARG002 - of ranks
        """Leave its seats, and return them. ``lease``: that names its pod now."""
        seats, self.seats, self.job_uid = self.seats, (), ""
        return seats

    def ordered(self, lease: JobLease) -> None:  # noqa: B027 - of engines
        """Its lease has other orders."""

    def close_when_detached(self) -> None:
        """Free its memory as soon as no worker uses it any more."""
        _when_done(self.detached, self.channel.close)


class TrainingSession(Session):
    """A training process."""

    def __init__(self, peer: Peer, hello: Hello, channel: ChannelReader, hang_up: Callable[[], None]) -> None:
        super().__init__(peer, hang_up)
        self.hello = hello
        self.channel: ChannelReader = channel
        self._follower: RankFollower | None = None

    @property
    def iteration(self) -> int | None:
        """The furthest that the rank has begun; None: none, or the process is no rank."""
        return None if self._follower is None else self._follower.iteration

    @property
    def rank(self) -> RankProcess:
        """As it is reported; one that drives no GPU has no job and no GPU."""
        if self._follower is not None:
            return self._follower.rank
        return RankProcess("", self.pod_uid, "", self.hello.rank, self.peer.pid)

    @property
    def key(self) -> tuple[str, RankId]:
        """Pod and rank: a later process with the same key replaces this one."""
        return self.pod_uid, self.hello.rank

    def choose(self, allocation: Allocation | None, uuids: Container[str]) -> tuple[str, ...]:
        return (choose_gpu(allocation, self.hello.gpu_hint, uuids),)

    def replaces(self, other: Session) -> bool:
        return isinstance(other, TrainingSession) and other.key == self.key

    def sit(
        self,
        lease: JobLease,
        workers: Sequence[GpuWorker],
        others: Sequence[Session],
        services: SeatServices,  # noqa: ARG002
    ) -> None:
        (worker,), dp = workers, self.hello.dp
        if not any(isinstance(other, TrainingSession) and other.hello.dp == dp for other in others):
            lease.plans.rebase(dp, lease.furthest.pop(dp, None))
        rank = RankProcess(lease.job_uid, self.pod_uid, worker.uuid, self.hello.rank, self.peer.pid)
        self._follower = RankFollower(
            rank,
            self.hello.schedule,
            self.channel,
            lease.plans,
            machine_clock=self.hello.timing is not Timing.FOREIGN,
            own_time=self.hello.own_time,
            idle=worker.idle,
        )
        self.job_uid, self.seats = lease.job_uid, (Seat(worker, self._follower),)

    def change(self, *, joined: bool) -> RankChange:
        return RankChange(self.rank, joined, self.iteration or 0)

    def stand(self, lease: JobLease | None) -> tuple[Seat, ...]:
        if lease is not None and self.iteration is not None:
            lease.left(self.hello.dp, self.iteration)
        self._follower = None
        return super().stand(lease)


class ServingSession(Session):
    """A serving engine."""

    law = LawSettings()
    by_page = False
    """What it does is read on its metrics page, as it does not say so by itself."""

    def __init__(self, peer: Peer, hello: EngineHello, channel: EngineReader, hang_up: Callable[[], None]) -> None:
        super().__init__(peer, hang_up)
        self.hello = hello
        self.channel: EngineReader = channel
        self._instance: EngineInstance | None = None

    @property
    def engine(self) -> ServingEngine:
        """As it is reported; one that drives no GPU has no job and no GPUs."""
        if self._instance is not None:
            return self._instance.engine
        return ServingEngine("", self.pod_uid, self.peer.pid, self.hello, ())

    def choose(self, allocation: Allocation | None, uuids: Container[str]) -> tuple[str, ...]:
        if allocation is not None:
            for device, why in allocation.undrivable.items():
                raise PeerRefused(f"{device} is {why.value}", Reason.GPU_SHARED)
        allocated = allocation.gpu_uuids if allocation is not None else ()
        return tuple(choose_gpu(allocation, uuid, uuids) for uuid in allocated or ("",))

    def replaces(self, other: Session) -> bool:
        # A container starts its engine again when the one before it has ended.
        return isinstance(other, ServingSession) and other.by_page and not self.by_page

    def sit(
        self,
        lease: JobLease,
        workers: Sequence[GpuWorker],
        others: Sequence[Session],  # noqa: ARG002
        services: SeatServices,
    ) -> None:
        uuids = tuple(worker.uuid for worker in workers)
        engine = ServingEngine(lease.job_uid, self.pod_uid, self.peer.pid, self.hello, uuids)
        highest_mhz = max(max(worker.device.identity.supported_clocks_mhz, default=0) for worker in workers)
        self._instance = EngineInstance(
            engine, self.channel, highest_mhz, services.publish, settings=self.law, totals=services.totals
        )
        self._instance.order(lease.orders)
        self.job_uid = lease.job_uid
        self.seats = tuple(Seat(worker, EngineFollower(self._instance, worker)) for worker in workers)

    def change(self, *, joined: bool) -> EngineChange:
        return EngineChange(self.engine, joined)

    def stand(self, lease: JobLease | None) -> tuple[Seat, ...]:
        self._instance = None
        return super().stand(lease)

    def ordered(self, lease: JobLease) -> None:
        if self._instance is not None:
            self._instance.order(lease.orders)


class Sessions:
    """The sessions of one node, guarded by its lock."""

    def __init__(self) -> None:
        self._all: dict[Session, None] = {}
        """In the order in which they came: who came first is served first."""

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._all))

    def __contains__(self, session: Session) -> bool:
        return session in self._all

    def add(self, session: Session) -> None:
        """Take in a process after its hello.

        Raises:
            PeerRefused: there are too many, of its pod or of all.
        """
        of_pod = sum(other.pod_uid == session.pod_uid for other in self._all)
        if len(self._all) >= MAX_SESSIONS or of_pod >= MAX_SESSIONS_OF_POD:
            raise PeerRefused("too many processes are connected", Reason.BUSY)
        self._all[session] = None

    def discard(self, session: Session) -> None:
        """It has gone, or is refused."""
        self._all.pop(session, None)

    def bound(self, job_uid: str) -> list[Session]:
        """Those that drive GPUs for a job."""
        return [one for one in self._all if one.seats and one.job_uid == job_uid]

    def ranks(self, job_uid: str | None = None) -> list[TrainingSession]:
        """Those of ranks; with a job, those that are ranks of it."""
        sessions = self._all if job_uid is None else self.bound(job_uid)
        return [one for one in sessions if isinstance(one, TrainingSession)]

    def engines(self) -> list[ServingSession]:
        """Those of engines."""
        return [one for one in self._all if isinstance(one, ServingSession)]

    def speaking(self) -> set[str]:
        """The UIDs of pods with a process that says by itself what it does."""
        return {one.pod_uid for one in self._all if not (isinstance(one, ServingSession) and one.by_page)}

    def furthest(self, job_uid: str) -> dict[int, int]:
        """By data-parallel rank: the furthest iteration begun by ranks of a job."""
        begun: dict[int, int] = {}
        for one in self.ranks(job_uid):
            if one.iteration is not None:
                begun[one.hello.dp] = max(begun.get(one.hello.dp, 0), one.iteration)
        return begun

    def driving(self, uuids: Container[str], *, but: Session) -> list[Session]:
        """Others than one that drive one of these GPUs."""
        return [one for one in self._all if one is not but and any(seat.worker.uuid in uuids for seat in one.seats)]


def own_part(allocation: Allocation | None, process: PodProcess, pod: PodName) -> Allocation | None:
    """What of a pod's devices is the process's container's own: all of it, where there is one container.

    Raises:
        PeerUnknown: the operator has not yet named the container.
    """
    if allocation is None or not pod.containers or process.container_id is None:
        return allocation  # also where the runtime's naming is unknown: then only the pod is known
    name = dict(pod.containers).get(process.container_id)
    if name is None:
        container = f"container {process.container_id[:12]} of pod {pod.namespace}/{pod.name}"
        raise PeerUnknown(f"the operator has not yet named {container}")
    return allocation.of_container(name)


def choose_gpu(allocation: Allocation | None, hint: str, uuids: Container[str]) -> str:
    """The UUID of the GPU that a process drives.

    Args:
        allocation: what the kubelet gave to its container; None if it knows no such pod.
        hint: the GPU that the process reported in its hello, or empty.
        uuids: of the GPUs that the driver shows on this node.

    Raises:
        PeerRefused: there is none, or none that may be driven.
    """
    if allocation is None:
        raise PeerRefused("the kubelet gave this pod no devices", Reason.NO_GPU)
    allocated = allocation.gpu_uuids
    if hint and hint not in allocated:
        if hint in allocation.undrivable:
            raise PeerRefused(f"{hint} is {allocation.undrivable[hint].value}", Reason.GPU_SHARED)
        others = "".join(f"; {device} is {why.value}" for device, why in [*allocation.undrivable.items()][:1])
        raise PeerRefused(f"{hint} is not a GPU of this container{others}", Reason.GPU_NOT_OWNED)
    if not hint and len(allocated) > 1:
        raise PeerRefused(
            f"the container holds {len(allocated)} GPUs and the hello does not say which", Reason.GPU_AMBIGUOUS
        )
    if not allocated and allocation.undrivable:
        device, why = next(iter(allocation.undrivable.items()))
        raise PeerRefused(f"{device} is {why.value}", Reason.GPU_SHARED)
    if not allocated:
        raise PeerRefused("the container holds no GPU", Reason.NO_GPU)
    chosen = hint or allocated[0]
    if chosen not in uuids:
        raise PeerRefused(f"the driver does not show {chosen} on this node", Reason.NO_GPU)
    return chosen


def _when_done(futures: tuple[Future[bool], ...], then: Callable[[], None]) -> None:
    """Call it when all are done. No future refers to itself: nobody looks for circles."""
    if not futures:
        then()
        return
    first, *others = futures
    rest = tuple(others)
    first.add_done_callback(lambda _: _when_done(rest, then))


def succeeded(future: Future[bool]) -> bool:
    """Whether a GPU's thread has done what it was asked, and well."""
    return future.done() and not future.cancelled() and future.exception() is None and future.result()
