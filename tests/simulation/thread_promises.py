"""Promise 10: a rank that rings without a pause takes little of its agent's processor, which all GPUs share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tests.simulation.node import SimulatedNode
from tests.simulation.scheduler import NS
from tests.simulation.world import World

SHARE: Final = 0.1
"""Of one processor that looks at the ranks of a GPU take in the long run."""
BURST_S: Final = 0.4
"""What they take at once: 0.3 s, the last look, and what is paid between two looks of this module."""


@dataclass
class _Account:
    """Of one thread."""

    worker: Any
    """Kept, so that no other has its identity."""
    busy_s: float = 0.0
    owed_s: float = 0.0
    at_ns: int = 0


class ThreadPromises:
    """Looks at the threads of GPUs."""

    def __init__(self, world: World) -> None:
        self._now = world.scheduler
        self._accounts: dict[int, _Account] = {}

    def look(self, node: SimulatedNode, of: Any) -> None:
        """At a node whose agent serves; ``of``: the agent's ``Node``."""
        for uuid, worker in of.workers.items():
            busy_s, now_ns = worker._thread.busy_s, self._now.now_ns
            if not busy_s:
                continue
            account = self._accounts.setdefault(id(worker), _Account(worker, at_ns=now_ns))
            paid_s = SHARE * (now_ns - account.at_ns) / NS
            account.owed_s = max(0.0, account.owed_s - paid_s) + busy_s - account.busy_s
            account.busy_s, account.at_ns = busy_s, now_ns
            if account.owed_s > BURST_S:
                self._now.fail(
                    f"promise 10: the rank of {uuid} has taken {account.owed_s:.2f} s of its agent's processor beyond a"
                    f" share of {SHARE:g}, on {node.name}"
                )
