"""Promise 3: no GPU is written that no pod of ours has been given, and none that another program has set and the agent
has noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from tests.simulation.gpus import FOREIGN, Gpu
from tests.simulation.node import SimulatedNode
from tests.simulation.scheduler import NS, Process
from tests.simulation.world import World

from perseus_agent.clocks.standing import Standing

LEFT_S: Final = 10.0
"""How long after its pod has gone a GPU may still be locked: leases last six seconds, and operators hear of it late."""


class Writes:
    """Looks at who writes which GPU."""

    def __init__(self, world: World, excused: Callable[[str], bool]) -> None:
        """``excused``: whether a node's driver, or its torn journal, excuses what is written there now."""
        self._now = world.scheduler
        self._excused = excused
        self._given_ns: dict[str, int] = {}
        """When each GPU was a pod's last."""
        self._noticed: dict[str, Process] = {}
        """The agent that has noticed another program's lock which is in force."""
        self.at_ns: dict[str, int] = {}
        """When each GPU was written last."""
        for node in world.nodes.values():
            for gpu in node.gpus:
                gpu.changed = partial(self._written, node)

    def look(self, node: SimulatedNode) -> None:
        """Note what is so on a node now."""
        for uuids in node.kubelet.given.values():
            for uuid in uuids:
                self._given_ns[uuid] = self._now.now_ns
        for gpu in node.gpus:
            if gpu.writer == FOREIGN and self._stands_foreign(node, gpu):
                assert node.agent is not None
                self._noticed[gpu.uuid] = node.agent.process

    def _stands_foreign(self, node: SimulatedNode, gpu: Gpu) -> bool:
        if node.agent is None or node.agent.node is None:
            return False
        return node.agent.node.workers[gpu.uuid].governor.standing is Standing.FOREIGN

    def _written(self, node: SimulatedNode, gpu: Gpu, before: str) -> None:
        self.at_ns[gpu.uuid] = self._now.now_ns
        noticed_by = self._noticed.pop(gpu.uuid, None)
        if gpu.writer not in (f"{node.name}/agent", f"{node.name}/keeper") or self._excused(node.name):
            return
        given_ns = self._given_ns.get(gpu.uuid)
        to = f"{gpu.locked_mhz} MHz" if gpu.locked_mhz else "its default clocks"
        if given_ns is None or (gpu.locked_mhz and self._now.now_ns - given_ns > LEFT_S * NS):
            self._now.fail(f"promise 3: {gpu.writer} sets {gpu.uuid} to {to}, which no pod of ours has")
        if before != FOREIGN or gpu.writer != f"{node.name}/agent":
            return
        gives_back = not gpu.locked_mhz and node.agent is not None and node.agent.process is noticed_by
        if gives_back or self._stands_foreign(node, gpu):
            self._now.fail(f"promise 3: {gpu.writer} sets {gpu.uuid} to {to} over another program's lock that it knows")
