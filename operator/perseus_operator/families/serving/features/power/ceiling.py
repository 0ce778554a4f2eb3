"""A pool's claim on a PowerBudget, and the ceiling of its clocks within its share.

What a watt buys is load within the limits: the tokens that all replicas can generate in a second under a ceiling. The
claim begins with the lowest ceiling that the present load needs. Engines say what their load is, and a tenant writes
engines, so this need is believed only as far as GPUs draw power: its watts are at most `MOST_OF_DRAW` of what was
measured. Above it a pool gets watts as a job does, by their worth and its priority.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_core.serving import DEFAULT_CLOCKS
from perseus_operator.api.job import Mode
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.budgets.allocation import ROUNDING_W, Claim, Share
from perseus_operator.budgets.member import held_limits_w
from perseus_operator.families.serving.features.power.demand import Demand
from perseus_operator.families.serving.features.signals.replicas import Replica
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_solver.serving import Ceiling

HEADROOM: Final = 1.25
"""Of the greatest load lately: a burst that much greater finds its clock there; a budget needs some seconds to answer a
greater one."""
MOST_OF_DRAW: Final = 1.5
"""Of the heaviest second lately. A replica under its limits draws more by about as much when its load grows by
`HEADROOM` and its clock follows; one that only says so gains no more than half of what it draws."""
_STEP: Final = 1.05


@dataclass(frozen=True)
class PoolCeiling:
    """What a pool does under a ceiling.

    Attributes:
        ceiling_mhz: above which no clock goes; `DEFAULT_CLOCKS`: there is none.
        watts: of all its GPUs, at most on average.
        speed: its load within the limits, relative to that under the highest ceiling.
    """

    ceiling_mhz: int
    watts: float
    speed: float


@dataclass(frozen=True)
class PoolCeilings:
    """The ceilings that a pool may have.

    Attributes:
        points: from what its load needs to all that it may want, at least one.
        gpus: that the pool holds.
        subject: changes with what ceilings draw and carry, not with the load.
    """

    points: tuple[PoolCeiling, ...]
    gpus: int
    subject: str

    def claim(self, job: str, priority: int) -> Claim:
        """What a job of this name and priority claims of a budget."""
        curve = tuple((each.watts, each.speed) for each in self.points)
        return Claim(job, priority, self.gpus, curve, self.subject)


def ceilings_of_pool(
    spec: PoolSpec | None, ceilings: Sequence[Ceiling], replicas: Sequence[Replica], nodes: JobNodes, demand: Demand
) -> PoolCeilings | None:
    """Return the ceilings that a pool may have.

    Args:
        spec: of the pool.
        ceilings: of one replica.
        replicas: of the pool.
        nodes: with its agents and GPUs.
        demand: of its replicas.

    Returns:
        None: its clocks are not set, or it is not known what they would do, so the power limits of its GPUs count.
    """
    limits_w, free = held_limits_w(nodes), _unsteered(nodes)
    steered = [replica.engine.gpu_uuids for replica in replicas if free.isdisjoint(replica.engine.gpu_uuids)]
    if spec is None or spec.mode is not Mode.ENFORCE or not spec.sets_clocks or not ceilings or not steered:
        return None
    most_w = [math.fsum(limits_w.get(uuid, 0.0) for uuid in uuids) for uuids in steered]
    others_w = math.fsum(limits_w.values()) - math.fsum(most_w)
    each_w = [max(each.watts, _rounded_up(demand.drawn_w(each.clock_mhz))) for each in ceilings]
    points: list[PoolCeiling] = []
    for ceiling, drawn_w in list(zip(ceilings, each_w, strict=True))[_needed(ceilings, each_w, demand) :]:
        # In whole watts, as shares are written.
        watts = float(math.ceil(others_w + math.fsum(min(drawn_w, limit_w) for limit_w in most_w) - ROUNDING_W))
        if points and watts <= points[-1].watts:
            points.pop()
        points.append(PoolCeiling(ceiling.clock_mhz, watts, ceiling.tokens_s / ceilings[-1].tokens_s))
    subject = hashlib.sha256(repr((ceilings, each_w, most_w, others_w)).encode()).hexdigest()
    return PoolCeilings(tuple(points), len(limits_w), subject)


def _rounded_up(watts: float) -> float:
    """In steps of 5 %: what is measured changes each second, and shares shall not."""
    return _STEP ** math.ceil(math.log(watts, _STEP)) if watts > 0.0 else 0.0


def _unsteered(nodes: JobNodes) -> frozenset[str]:
    """GPUs whose clocks cannot be set, or whose agent is not heard of: they may draw what they can."""
    lost = (uuid for node in nodes.values() if node.leased_pods is None for uuid in node.gpu_uuids)
    return frozenset(lost).union(*(node.uncontrollable for node in nodes.values()))


def carrying(ceilings: Sequence[Ceiling], demand: Demand) -> int | None:
    """Return the place of the lowest ceiling under which a load as of late, and `HEADROOM`, keeps its limits; None: it
    keeps them under none.
    """
    prompts = min(1 + math.ceil(HEADROOM * demand.waiting), ceilings[-1].prompts) if ceilings else 0
    enough = (
        place
        for place, each in enumerate(ceilings)
        if each.running >= HEADROOM * demand.running and each.prompts >= prompts
    )
    return next(enough, None)


def _needed(ceilings: Sequence[Ceiling], each_w: Sequence[float], demand: Demand) -> int:
    """Return the place of the lowest ceiling under which the present load keeps its limits, as far as believed."""
    place = carrying(ceilings, demand)
    claimed = len(ceilings) - 1 if place is None else place
    believed_w = MOST_OF_DRAW * demand.drawn_w()
    return max((place for place in range(claimed + 1) if each_w[place] <= believed_w), default=0)


def ceiling_within(share: Share | None, claimed: PoolCeilings | None) -> PoolCeiling | None:
    """Return what a share allows; None: no share is granted, or nothing may be done with one.

    Args:
        share: of a PowerBudget; None: no budget selects the pool.
        claimed: of the pool.

    Returns:
        The highest ceiling that fits; if none does, that of the present load, which a budget grants whatever it has.
    """
    if share is None or share.watts is None or claimed is None:
        return None
    fitting = [each for each in claimed.points if each.watts <= share.watts + ROUNDING_W]
    return fitting[-1] if fitting else claimed.points[0]


def resting_clock(granted: PoolCeiling | None, share: Share | None) -> RestingClock:
    """Return what all GPUs of the pool rest at, also when no operator renews its leases any more."""
    if granted is None or share is None or granted.ceiling_mhz == DEFAULT_CLOCKS:
        return NO_RESTING_CLOCK
    return RestingClock(granted.ceiling_mhz, share.hold_s)
