"""The one clock of all GPUs of a group over nodes.

No agent hears another, so a group does not follow its load ten times a second. It holds one clock, that carries the
greatest load of the last minutes and a quarter more without a boost. The workers' GPUs have it as the clock of their
leases. The leader's have it by order, and only while the agents of all workers have confirmed it, so a clock falls for
the leader last, and in every doubt the leader is at its default clocks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

from perseus_core.leases import RestingClock
from perseus_core.serving import DEFAULT_CLOCKS
from perseus_operator.families.serving.features.groups.energy import Arrived, Energies
from perseus_operator.families.serving.features.power.ceiling import carrying
from perseus_operator.families.serving.features.power.demand import Demand
from perseus_operator.families.serving.features.signals.replicas import Replica
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.nodes.node import Node
from perseus_operator.objects.values import Now
from perseus_solver.serving import Ceiling

SILENT_S: Final = 3.0
"""Without a window for so long, a leader is taken for silent: windows are about a second long."""
_FAULTY_S: Final = 60.0
"""How long a group has its default clocks after one of its GPUs could not be locked."""
LOOK_S: Final = 1.0
"""How often it is looked for silence."""


def carrying_mhz(ceilings: Sequence[Ceiling], demand: Demand) -> int:
    """Return the least clock that carries the present load; `DEFAULT_CLOCKS`: none of them does."""
    place = carrying(ceilings, demand)
    return DEFAULT_CLOCKS if place is None else ceilings[place].clock_mhz


class Groups:
    """What is known of the groups of one pool, by the UID of the leader's pod."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        """Why a worker's agent does not hold the clock of its lease."""
        self.energies = Energies()
        self._again_s: dict[str, float] = {}
        """When it is tried again."""
        self._reported_s: dict[str, float] = {}
        self._agreed_mhz: dict[str, int] = {}

    def looked(self, replicas: Sequence[Replica], nodes: Mapping[str, Node], wall_s: float) -> None:
        """Agents of workers have said what became of the clocks of their leases, and what GPUs have used."""
        self.energies.looked(replicas, nodes)
        for uid in [uid for uid, again_s in self._again_s.items() if wall_s >= again_s]:
            del self.faults[uid], self._again_s[uid]
        for replica in replicas:
            for worker in replica.workers:
                clock = nodes[worker.node].clock if worker.node in nodes else None
                fault = next((gpu for gpu in clock.gpus if gpu.fault), None) if clock else None
                if fault is not None:
                    self._again_s[replica.pod_uid] = wall_s + _FAULTY_S
                    self.faults[replica.pod_uid] = f"{worker.name}, GPU {fault.uuid or 'unknown'}: {fault.fault}"

    def pods_observed(self, uids: Collection[str]) -> None:
        """These pods there are now."""
        self.energies.pods_observed(uids)
        self.faults = {uid: fault for uid, fault in self.faults.items() if uid in uids}
        self._again_s = {uid: again_s for uid, again_s in self._again_s.items() if uid in uids}
        self._reported_s = {uid: reported_s for uid, reported_s in self._reported_s.items() if uid in uids}
        self._agreed_mhz = {uid: mhz for uid, mhz in self._agreed_mhz.items() if uid in uids}

    def arrived(
        self,
        replica: Replica | None,
        window: EngineWindow,
        nodes: Mapping[str, Node],
        now: Now,
        *,
        default: bool | None,
    ) -> bool:
        """A pod did this; whether all GPUs of its replica were at the window's clock, if it is a group's leader.

        Args:
            replica: of the pod; None: it is none of those that share a table.
            window: of the pod.
            nodes: of the pool.
            now: the time.
            default: as of ``Arrived``.
        """
        workers = () if replica is None else replica.workers
        together = replica is None or not workers or self._together(replica, window, nodes, now.wall_s)
        seen = window if together else replace(window, default_us=0)
        self.energies.arrived(Arrived(seen, workers, now.monotonic_s, now.wall_s, default))
        return together

    def _together(self, replica: Replica, window: EngineWindow, nodes: Mapping[str, Node], wall_s: float) -> bool:
        """Whether all GPUs of a group were at its leader's clock all the time.

        A worker's agent confirms a change before or after the leader's, so the window before must agree, too.
        """
        uid, before_mhz = replica.pod_uid, self._agreed_mhz.pop(replica.pod_uid, None)
        self._reported_s[uid] = wall_s
        if window.changed or not confirmed(replica, window.clock_mhz, nodes):
            return False
        self._agreed_mhz[uid] = window.clock_mhz
        return before_mhz == window.clock_mhz

    def wanted_mhz(self, replica: Replica, mhz: int, nodes: Mapping[str, Node], wall_s: float) -> int:
        """Return the clock that a group is to have, of the one that is right for its load.

        `DEFAULT_CLOCKS`: its leader is silent, or the agent of a worker holds no lease.
        """
        reports = abs(wall_s - self._reported_s.get(replica.pod_uid, -math.inf)) <= SILENT_S
        leased = all(nodes[worker.node].leased_pods is not None for worker in replica.workers)
        return mhz if reports and leased else DEFAULT_CLOCKS


def confirmed(replica: Replica, mhz: int, nodes: Mapping[str, Node]) -> bool:
    """Whether the agents of all workers hold a clock; `DEFAULT_CLOCKS`: have been asked to hold none."""
    return all(worker.node in nodes and nodes[worker.node].at_clock(mhz) for worker in replica.workers)


def worker_clocks(
    clocks_mhz: Mapping[str, int], replicas: Sequence[Replica], resting: RestingClock
) -> dict[str, RestingClock]:
    """Return the clock of each lease that is a worker's, by node.

    Args:
        clocks_mhz: of each group, by the UID of its leader's pod.
        replicas: of the pool.
        resting: what all GPUs of the pool rest at, under a PowerBudget.
    """
    clocks: dict[str, RestingClock] = {}
    for replica in replicas:
        mhz = clocks_mhz.get(replica.pod_uid, DEFAULT_CLOCKS)
        if replica.workers and mhz != DEFAULT_CLOCKS:
            clocks |= {worker.node: RestingClock(mhz, resting.keep_s) for worker in replica.workers}
    return clocks
