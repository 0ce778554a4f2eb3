"""What a family has decided about one job, as far as it concerns those who serve the job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from perseus_operator.nodes.actions import Intent


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the agents shall hold, what else to do, and when to decide again.

    Attributes:
        intent: what all agents of the job shall hold; None: what they hold now, whatever that is.
        actions: of the family, to be started now, concurrently.
        applied: every agent holds what the job asks for.
        wake_at_s: when to decide again at the latest (monotonic), whatever the nodes need.
    """

    intent: Intent | None
    actions: tuple[Any, ...] = ()
    applied: bool = False
    wake_at_s: float = math.inf
