"""Processes on the local socket, and the rule that decides which GPU one of them may drive.

A session begins with a hello and lasts as long as its connection. It waits until a lease names its pod (the opt-in);
then the kubelet's answer decides about the GPU: it must belong to that pod alone, and to the process's container of it.
The process only chooses among these.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from perseus_agent.clocks.gpu_worker import GpuWorker
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.errors import PeerRefused, PeerUnknown
from perseus_agent.node.leases import JobLease, PodName
from perseus_agent.pods.identity import Peer, PodProcess
from perseus_agent.pods.pod_resources import Allocation
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader
from perseus_proto.hello import Hello, Reason, Timing

MAX_SESSIONS: Final = 256
MAX_SESSIONS_OF_POD: Final = 64
"""Bounds on what the socket's peers can make the agent store; a node has 8 or 16 GPUs, and one rank drives one."""


@dataclass(eq=False)
class Session:
    """One process that has sent a hello."""

    peer: Peer
    hello: Hello
    channel: ChannelReader
    hang_up: Callable[[], None]
    """Ends the connection; the process will try again later."""
    dismissed: bool = False
    """Its connection was closed by the agent; it is no rank any more, even if its own end is still open."""
    follower: RankFollower | None = None
    worker: GpuWorker | None = None
    detached: Future[bool] | None = None
    """When the worker that it had last has let go of its memory; None: it never had one."""

    def dismiss(self) -> None:
        """Close the connection, for good."""
        self.dismissed = True
        self.hang_up()

    @property
    def pod_uid(self) -> str:
        """The pod that the process is in, from the kernel."""
        return self.peer.process.pod_uid

    @property
    def iteration(self) -> int | None:
        """The furthest that a rank has begun; None: none, or the process is no rank."""
        return None if self.follower is None else self.follower.iteration

    @property
    def rank(self) -> RankProcess:
        """As it is reported; one that drives no GPU has no job and no GPU."""
        if self.follower is not None:
            return self.follower.rank
        return RankProcess("", self.pod_uid, "", self.hello.rank, self.peer.pid)

    @property
    def key(self) -> tuple[str, RankId]:
        """Pod and rank: a later process with the same key replaces this one."""
        return self.pod_uid, self.hello.rank


class Sessions:
    """The sessions of one node, guarded by its lock."""

    def __init__(self) -> None:
        self._all: set[Session] = set()

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
        self._all.add(session)

    def discard(self, session: Session) -> None:
        """It has gone, or is refused."""
        self._all.discard(session)

    def bound(self, job_uid: str) -> list[Session]:
        """Those that are ranks of a job."""
        return [one for one in self._all if one.follower is not None and one.follower.job_uid == job_uid]

    def driving(self, worker: GpuWorker, *, but: Session) -> list[Session]:
        """Others than one that drive a GPU."""
        return [one for one in self._all if one.worker is worker and one is not but]


def follower_of(session: Session, lease: JobLease, gpu_uuid: str) -> RankFollower:
    """Make a rank of a session that is to drive a GPU for a lease's job."""
    hello = session.hello
    rank = RankProcess(
        job_uid=lease.job_uid,
        pod_uid=session.pod_uid,
        gpu_uuid=gpu_uuid,
        rank_id=hello.rank,
        pid=session.peer.pid,
    )
    return RankFollower(
        rank,
        hello.schedule,
        session.channel,
        lease.plans,
        machine_clock=hello.timing is not Timing.FOREIGN,
        own_time=hello.own_time,
    )


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


def choose_gpu(allocation: Allocation | None, hint: str, known: Container[str]) -> str:
    """The UUID of the GPU that a process drives.

    Args:
        allocation: what the kubelet gave to its container; None if it knows no such pod.
        hint: the GPU that the process reported in its hello, or empty.
        known: the GPUs that the driver shows on this node.

    Raises:
        PeerRefused: there is none, or none that may be driven.
    """
    if allocation is None:
        raise PeerRefused("the kubelet gave this pod no devices", Reason.NO_GPU)
    own = allocation.gpu_uuids
    if hint and hint not in own:
        if hint in allocation.undrivable:
            raise PeerRefused(f"{hint} is {allocation.undrivable[hint].value}", Reason.GPU_SHARED)
        others = "".join(f"; {device} is {why.value}" for device, why in [*allocation.undrivable.items()][:1])
        raise PeerRefused(f"{hint} is not a GPU of this container{others}", Reason.GPU_NOT_OWNED)
    if not hint and len(own) > 1:
        raise PeerRefused(f"the container holds {len(own)} GPUs and the hello does not say which", Reason.GPU_AMBIGUOUS)
    if not own and allocation.undrivable:
        device, why = next(iter(allocation.undrivable.items()))
        raise PeerRefused(f"{device} is {why.value}", Reason.GPU_SHARED)
    if not own:
        raise PeerRefused("the container holds no GPU", Reason.NO_GPU)
    chosen = hint or own[0]
    if chosen not in known:
        raise PeerRefused(f"the driver does not show {chosen} on this node", Reason.NO_GPU)
    return chosen
