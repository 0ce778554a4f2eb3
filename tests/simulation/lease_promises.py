"""Promises about leases at their agents: what was asked later is not overtaken by what was asked before (8), what rests
at a lease's clock stays there while the kubelet does not answer (4), and after a lease that leaves a clock (12).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.gpus import Gpu
from tests.simulation.node import SimulatedNode
from tests.simulation.scheduler import NS
from tests.simulation.world import World

from perseus_agent.clocks.standing import Standing

STEADY_S: Final = 2.0
"""How long a GPU has been locked under a lease that is to stay so: an order that was given before has come."""
LOWERED_S: Final = 5.0
"""Within which a GPU is at the clock that stays, after its lease has run out: the iteration under way, of up to three
seconds here, ends with its plan."""


@dataclass
class _Known:
    """A lease, as it was when it was looked at last."""

    lease: Any
    """Kept, so that no other has its identity."""
    epoch: int
    number: int
    expires_s: float
    lapsed: bool
    stays: bool
    """A clock of it is to stay when it runs out."""


class LeasePromises:
    """Looks at the leases of a world."""

    def __init__(self, world: World, excused: Callable[[str], bool]) -> None:
        """``excused``: whether a node's driver, keeper or disk excuses what a GPU of it does now."""
        self._world = world
        self._now = world.scheduler
        self._excused = excused
        self._leases: dict[tuple[int, str], _Known] = {}
        """By table and job."""
        self._expiries: dict[int, int] = {}
        self._steady: dict[str, tuple[tuple[object, ...], int]] = {}
        """Under which lease, pod and clock a GPU has been locked without a break, and since when."""
        self._above_ns: dict[str, int] = {}
        """Since when a GPU is above a clock that stays."""

    def look(self, node: SimulatedNode, of: Any) -> None:
        """At a node whose agent serves; ``of``: the agent's ``Node``."""
        table = of.leases
        expired = table.expiries > self._expiries.get(id(of), 0)
        self._expiries[id(of)] = table.expiries
        for key, known in [each for each in self._leases.items() if each[0][0] == id(of)]:
            lease = table._jobs.get(key[1])
            if lease is not known.lease:
                del self._leases[key]
            self._compare(f"the lease of {key[1]} on {node.name}", known, lease, expired=expired)
        for job_uid, lease in table._jobs.items():
            stays = bool(lease.clock.mhz and lease.clock.keep_s)
            self._leases[id(of), job_uid] = _Known(
                lease, lease.epoch, lease.number, lease.expires_s, lease.lapsed, stays
            )
        for lease, pod_uid, gpu in self._resting(node, of):
            self._look_at(node, of, gpu, lease, pod_uid)

    def _compare(self, name: str, known: _Known, lease: Any, *, expired: bool) -> None:
        """A lease with what was known of it; None: it is gone."""
        if lease is known.lease:
            if lease.epoch == known.epoch and lease.number < known.number:
                why = f"went back from request {known.number} to {lease.number}, which its caller had given up"
                self._now.fail(f"promise 8: {name} {why}")
            return
        ran_out = lease is None and expired and known.expires_s <= self._now.now_s
        if ran_out and known.stays and not known.lapsed:
            self._now.fail(f"promise 12: {name} ran out, and its clock with it")

    def _resting(self, node: SimulatedNode, of: Any) -> Iterator[tuple[Any, str, Gpu]]:
        """Leases with a clock, their pods, and the GPUs that the kubelet gave to these."""
        gpus = {gpu.uuid: gpu for gpu in node.gpus}
        for lease in of.leases._jobs.values():
            for pod in lease.pods.values() if lease.clock.mhz and lease.expires_s > self._now.now_s else ():
                for uuid in node.kubelet.given.get((pod.namespace, pod.name), ()):
                    yield lease, pod.uid, gpus[uuid]

    def _look_at(self, node: SimulatedNode, of: Any, gpu: Gpu, lease: Any, pod_uid: str) -> None:
        now_ns, governor, key = self._now.now_ns, of.workers[gpu.uuid].governor, (id(lease), pod_uid, lease.clock.mhz)
        before, since_ns = self._steady.get(gpu.uuid, (key, now_ns))
        ours = gpu.foreign_ns is None and governor.standing is Standing.OURS and not governor.lost
        steady = before == key and now_ns - since_ns > STEADY_S * NS and ours and not self._excused(node.name)
        if steady and not gpu.locked_mhz and not node.kubelet.answers:
            self._now.fail(
                f"promise 4: {gpu.uuid} was given back though its lease asks for {lease.clock.mhz} MHz and stands; the"
                " kubelet does not answer"
            )
        if steady and lease.lapsed and not 0 < gpu.locked_mhz <= lease.clock.mhz:
            above_ns = self._above_ns.setdefault(gpu.uuid, now_ns)
            if now_ns - above_ns > LOWERED_S * NS:
                self._now.fail(
                    f"promise 12: {gpu.uuid} is at {gpu.locked_mhz or 'default'} MHz {(now_ns - above_ns) / NS:.2f} s"
                    f" after its lease has run out, which leaves {lease.clock.mhz} MHz"
                )
            return
        self._above_ns.pop(gpu.uuid, None)
        self._steady[gpu.uuid] = key, since_ns if before == key and gpu.locked_mhz and ours else now_ns
