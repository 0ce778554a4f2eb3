"""Joules of what a replica did: of a group over nodes those of all its GPUs, or none.

The leader's agent says of each window what the leader's GPUs used. Of a worker, whose engine says nothing, each lease
says what its GPUs have used until then: a reading in a third of a lease's length. So a window waits until every worker
was read after its end, and between two readings a worker's power is taken as even: over a block of minutes that is
exact but for its ends. Where a worker's joules are not known the window has none, since half a group's are no figure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from perseus_core.units import mean_power_w, s_from_us, us_from_s
from perseus_operator.families.serving.features.signals.replicas import Replica
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.nodes.node import EnergyReadings, Node
from perseus_operator.objects.values import Pod

MOST_WAITING: Final = 120
"""Windows of a leader, of about a second each: as long as four leases last. One that waits longer has no joules."""
_MOST_W: Final = 640_000.0
"""Of one pod, as of an engine's window: more is no reading."""


@dataclass(frozen=True)
class Arrived:
    """A window, and how it is to be compared.

    Attributes:
        window: of any pod; its energy is that of the pod's own GPUs, later that of all GPUs of the replica.
        workers: pods whose GPUs work for it, too.
        end_s: monotonic time at its end.
        wall_s: the time then.
        default: whether the replica was to be at default clocks for comparison; None: it is not compared.
    """

    window: EngineWindow
    workers: tuple[Pod, ...]
    end_s: float
    wall_s: float
    default: bool | None


class Energies:
    """The energy of the replicas of one pool."""

    def __init__(self) -> None:
        self._readings: dict[str, deque[tuple[float, int]]] = {}
        """When a worker's GPUs were read, and what they had used, by the UID of its pod."""
        self._arrived: dict[str, deque[Arrived]] = {}

    def looked(self, replicas: Sequence[Replica], nodes: Mapping[str, Node]) -> None:
        """Agents of workers may have said what GPUs have used."""
        for replica in replicas:
            for worker in replica.workers:
                if worker.node in nodes:
                    self._read(worker.uid, nodes[worker.node].energies)

    def _read(self, uid: str, read: EnergyReadings) -> None:
        readings = self._readings.setdefault(uid, deque(maxlen=MOST_WAITING))
        if uid not in read.used_mj or (readings and readings[-1][0] == read.at_s):
            return
        if readings:
            since_s, used_mj = read.at_s - readings[-1][0], read.used_mj[uid] - readings[-1][1]
            if since_s < 0.0 or not 0.0 <= mean_power_w(used_mj, us_from_s(since_s)) <= _MOST_W:
                readings.clear()  # what was used between is not known
        readings.append((read.at_s, read.used_mj[uid]))

    def pods_observed(self, uids: Collection[str]) -> None:
        """These pods there are now."""
        self._readings = {uid: readings for uid, readings in self._readings.items() if uid in uids}
        self._arrived = {uid: arrived for uid, arrived in self._arrived.items() if uid in uids}

    def arrived(self, one: Arrived) -> None:
        """A window was reported."""
        self._arrived.setdefault(one.window.pod_uid, deque()).append(one)

    def known(self, uid: str) -> Iterator[Arrived]:
        """Yield what has arrived of a pod, in order, as soon as the joules of all GPUs are known or never will be."""
        waiting = self._arrived.get(uid, deque[Arrived]())
        while waiting:
            one = waiting[0]
            late = any(not self._is_read(worker.uid, one.end_s) for worker in one.workers)
            if late and len(waiting) <= MOST_WAITING:
                return
            waiting.popleft()
            yield replace(one, window=replace(one.window, energy_mj=None if late else self._all_mj(one)))
        self._arrived.pop(uid, None)

    def _is_read(self, worker: str, at_s: float) -> bool:
        readings = self._readings.get(worker)
        return bool(readings and readings[-1][0] >= at_s)

    def _all_mj(self, one: Arrived) -> int | None:
        """Of all GPUs; None: of some it is not known."""
        begin_s = one.end_s - s_from_us(one.window.time_us)
        parts_mj: list[float | None] = [one.window.energy_mj]
        for worker in one.workers:
            before_mj, after_mj = self._used_mj(worker.uid, begin_s), self._used_mj(worker.uid, one.end_s)
            parts_mj.append(None if before_mj is None or after_mj is None else after_mj - before_mj)
        known_mj = [part_mj for part_mj in parts_mj if part_mj is not None]
        return round(sum(known_mj)) if len(known_mj) == len(parts_mj) else None

    def _used_mj(self, worker: str, at_s: float) -> float | None:
        """What a worker's GPUs had used at a time; None: they were not read before it, or not after it."""
        before: tuple[float, int] | None = None
        for read_s, used_mj in self._readings[worker]:
            if read_s >= at_s:
                if read_s == at_s:
                    return used_mj
                if before is None:
                    return None
                share = (at_s - before[0]) / (read_s - before[0])
                return before[1] + share * (used_mj - before[1])
            before = read_s, used_mj
        return None
