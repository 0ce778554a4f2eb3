"""When to plan pools by length anew, and the latest plan: an hour apart at least, and only where something changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from perseus_core.serving import ServingLimits
from perseus_operator.api.serving.status import PoolPlanStatus
from perseus_operator.families.serving.features.advice.arrivals import Kind
from perseus_solver.serving import Window

LEAST_S: Final = 3_600.0
"""Between two plans: each is some seconds of a core."""
_STALE_S: Final = 86_400.0
"""After which a plan is made anew, whatever changed: it was made for the day that has passed."""
_LOAD: Final = 0.1
_SHARES: Final = 0.05
"""Changes of the load, and of the shares of classes, that are enough."""


@dataclass(frozen=True)
class PlanBasis:
    """What a plan rests on.

    Attributes:
        fingerprint: of the engine.
        limits: of its requests.
        per_s: requests a second, mean of a day.
        shares: of requests, by class of lengths.
    """

    fingerprint: str
    limits: ServingLimits
    per_s: float
    shares: Mapping[str, float] = field(default_factory=dict)

    def differs(self, other: PlanBasis) -> bool:
        """Whether another plan may follow from it."""
        moved = sum(
            abs(self.shares.get(one, 0.0) - other.shares.get(one, 0.0)) for one in {*self.shares, *other.shares}
        )
        return (
            (self.fingerprint, self.limits) != (other.fingerprint, other.limits)
            or abs(self.per_s - other.per_s) > _LOAD * other.per_s
            or moved / 2 > _SHARES
        )


@dataclass(frozen=True)
class PlanWork:
    """A plan is to be made.

    Attributes:
        basis: that it will rest on.
        counts: of lengths, as of `Lengths.counts`.
        epochs: of the load, packed.
        kind: of the requests.
        windows: of the pool's own engine.
        highest_mhz: of its GPUs.
        gpus: of a replica.
        model: name of the weights.
        flags: of the engine.
        start_s: how long a replica takes to start.
    """

    basis: PlanBasis
    counts: Mapping[int, int]
    epochs: str
    kind: Kind
    windows: tuple[Window, ...]
    highest_mhz: int
    gpus: int
    model: str
    flags: tuple[tuple[str, str], ...]
    start_s: float


class Planning:
    """That of one pool."""

    def __init__(self) -> None:
        self.plan: PoolPlanStatus | None = None
        """The latest; None: nothing was computed."""
        self._basis: PlanBasis | None = None
        self._under_way = False
        self._computed_s = -math.inf

    def restored(self, plan: PoolPlanStatus, computed_s: float) -> None:
        """An earlier operator has computed this, then."""
        self.plan, self._computed_s = plan, computed_s

    def may_begin(self, wall_s: float) -> bool:
        """Whether none is under way, and the latest is an hour old. A clock that was set back holds nothing up."""
        return not self._under_way and not 0.0 <= wall_s - self._computed_s < LEAST_S

    def due(self, basis: PlanBasis, wall_s: float) -> bool:
        """Whether a plan on this basis is worth its while."""
        if not self.may_begin(wall_s):
            return False
        return self._basis is None or wall_s - self._computed_s >= _STALE_S or basis.differs(self._basis)

    def started(self, basis: PlanBasis, wall_s: float) -> None:
        """It is being computed."""
        self._basis, self._under_way, self._computed_s = basis, True, wall_s

    def planned(self, plan: PoolPlanStatus) -> None:
        """It was computed, or could not be; the plan says which."""
        self.plan, self._under_way = plan, False

    def given_up(self) -> None:
        """It was not computed."""
        self._under_way = False
