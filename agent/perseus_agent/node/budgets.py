"""How much of the agent the processes of one pod may take: sessions, handshakes, bytes and bytes a second.

What a hello costs is known from its head: the schedule that it announces takes about thirty times the bytes of its
body in memory, shared memory included. Pods that a lease names have a budget of their own, so no other pod can take it
from them. All others share a small one, in which the newcomer displaces the oldest session of the pod that holds most;
that pod's client connects again, and is no longer displaced once a lease names it. Pure: no threads, an injected clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Budget:
    """Of one kind of pods. Bytes are those of hellos, each with its session."""

    sessions: int
    sessions_of_pod: int
    handshakes: int
    handshakes_of_pod: int
    total_bytes: int
    pod_bytes: int
    pod_bytes_per_s: float
    """What a pod may have decoded in the long run; ``pod_bytes`` at once."""


LEASED: Final = Budget(128, 64, 48, 32, 4 << 20, 2 << 20, float(1 << 20))
WAITING: Final = Budget(64, 16, 16, 4, 1 << 20, 640 << 10, float(64 << 10))
"""A hello of the most instructions takes 512 KiB."""
REFUSALS: Final = 16
REFUSALS_PER_S: Final = 2.0
"""How often one process gets an answer that refuses it, at once and in the long run. Clients ask less often."""
MAX_REMEMBERED: Final = 4_096
"""Pods whose use of their bytes a second is remembered, and processes that were refused."""


class OverBudget(Exception):
    """The pod has used its share; the message says which."""


@dataclass(eq=False)
class ConnectionUse:
    """One connection's part, from its first byte to its end."""

    pod_uid: str
    displace: Callable[[], None]
    """Ends the connection."""
    bytes: int = 0
    welcomed: bool = False


class _Used(Generic[_Key]):
    """How much of something each pod or process has in use, where use is forgotten at a rate."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._used: dict[_Key, tuple[float, float]] = {}  # how much, and when that was so; the latest last

    def by(self, key: _Key, per_s: float) -> float:
        used, since_s = self._used.get(key, (0.0, 0.0))
        return max(0.0, used - (self._clock() - since_s) * per_s)

    def add(self, key: _Key, amount: float, per_s: float) -> None:
        used = self.by(key, per_s) + amount
        self._used.pop(key, None)
        self._used[key] = used, self._clock()
        if len(self._used) > MAX_REMEMBERED:
            del self._used[next(iter(self._used))]


class Refusals:
    """How often each process was refused. One that goes on gets no answer any more, since to find its pod and to write
    an answer costs the agent more than a connection costs the process. Not thread-safe: the caller holds a lock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._used = _Used[int](clock)

    def add(self, pid: int) -> None:
        """A process was refused."""
        self._used.add(pid, 1, REFUSALS_PER_S)

    def exhausted(self, pid: int) -> bool:
        """Whether a process has been refused so often that it gets no answer."""
        return self._used.by(pid, REFUSALS_PER_S) + 1 > REFUSALS


class Budgets:
    """The connections of all pods. Not thread-safe: the caller holds a lock."""

    def __init__(self, is_leased: Callable[[str], bool], clock: Callable[[], float]) -> None:
        """``is_leased`` says whether a lease names a pod."""
        self._is_leased = is_leased
        self._uses: dict[ConnectionUse, None] = {}  # in the order of their beginning
        self._used = _Used[str](clock)  # bytes, by pod

    def begin(self, pod_uid: str, displace: Callable[[], None]) -> ConnectionUse:
        """A connection whose hello is about to be read.

        Raises:
            OverBudget: too many of them are under way.
        """
        budget, others = self._rivals(pod_uid)
        under_way = [other for other in others if not other.welcomed]
        if sum(other.pod_uid == pod_uid for other in under_way) >= budget.handshakes_of_pod:
            raise OverBudget(f"a pod may send {budget.handshakes_of_pod} hellos at a time")
        if len(under_way) >= budget.handshakes:
            raise OverBudget(f"{budget.handshakes} hellos are being read")
        use = ConnectionUse(pod_uid, displace)
        self._uses[use] = None
        return use

    def reserve(self, use: ConnectionUse, size: int) -> list[ConnectionUse]:
        """Room for a hello of ``size`` bytes, before any of it is read. Returns the connections that must end for it.

        Raises:
            OverBudget: the pod would take more than its share.
        """
        budget, others = self._rivals(use.pod_uid)
        others = [other for other in others if other is not use and other.bytes]
        of_pod = [other for other in others if other.pod_uid == use.pod_uid]
        if len(of_pod) >= budget.sessions_of_pod:
            raise OverBudget(f"a pod may have {budget.sessions_of_pod} processes connected")
        if sum(other.bytes for other in of_pod) + size > budget.pod_bytes:
            raise OverBudget(f"the schedules of a pod may take {budget.pod_bytes} bytes")
        self._use(use.pod_uid, size, budget)
        displaced: list[ConnectionUse] = []
        use.bytes = size
        while len(others) >= budget.sessions or sum(other.bytes for other in others) + size > budget.total_bytes:
            held = Counter[str]()
            for other in [*others, use]:
                held[other.pod_uid] += other.bytes
            greediest, most = held.most_common(1)[0]
            if held[use.pod_uid] >= most or budget is LEASED:
                use.bytes = 0
                raise OverBudget("the agent serves too many processes")
            victim = next(other for other in others if other.pod_uid == greediest)
            others.remove(victim)
            displaced.append(victim)
        for victim in displaced:
            self.end(victim)
        return displaced

    def welcomed(self, use: ConnectionUse) -> None:
        """Its handshake is over."""
        use.welcomed = True

    def end(self, use: ConnectionUse) -> None:
        """The connection has ended; more than once is no error."""
        self._uses.pop(use, None)

    def _rivals(self, pod_uid: str) -> tuple[Budget, list[ConnectionUse]]:
        """The budget of a pod, and all connections that live on the same one."""
        leased = self._is_leased(pod_uid)
        leased_pods = {uid: self._is_leased(uid) for uid in {use.pod_uid for use in self._uses}}
        return LEASED if leased else WAITING, [use for use in self._uses if leased_pods[use.pod_uid] is leased]

    def _use(self, pod_uid: str, size: int, budget: Budget) -> None:
        if self._used.by(pod_uid, budget.pod_bytes_per_s) + size > budget.pod_bytes:
            raise OverBudget(f"a pod may send {budget.pod_bytes_per_s:.0f} bytes of hellos a second")
        self._used.add(pod_uid, size, budget.pod_bytes_per_s)
