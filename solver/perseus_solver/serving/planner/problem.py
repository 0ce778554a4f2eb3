"""What a plan of replicas is made for, and what it says: pools, their variants, their load, a tariff.

A pool serves requests of one kind. Its variants serve them with more or fewer GPUs a replica (tensor parallelism); in
an epoch one variant serves, since each is a Deployment of its own. A variant has operating points: what one replica
carries within its limits at a clock, and what it draws at each load up to there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Index

MOST_EPOCHS: Final = 2_016
"""A week of five minutes each."""
MOST_POOLS: Final = 64
MOST_VARIANTS: Final = 8
MOST_POINTS: Final = 64
MOST_LOADS: Final = 64
MOST_REPLICAS: Final = 2_000
JOULES_OF_A_KWH: Final = 3.6e6


def _require(kept: bool, name: str, rule: str, value: object) -> None:
    if not kept:
        raise InvalidProblem(f"{name} must be {rule}, not {value!r}")


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What one replica does at a clock.

    Attributes:
        clock_mhz: the clock.
        loads: requests a second, ascending from 0; the last is the most that it carries within its limits.
        watts: of all its GPUs at these loads, never falling; between two loads in proportion.
        carried: the most that each replica carries where there are 1, 2, … of them, never falling, the last at most
            that of ``loads``; where there are more, the last. Empty: that of ``loads``, however many there are.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    clock_mhz: int
    loads: tuple[float, ...]
    watts: tuple[float, ...]
    carried: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require(0 < self.clock_mhz <= 10_000, "clock_mhz", "from 1 to 10,000", self.clock_mhz)
        _require(2 <= len(self.loads) <= MOST_LOADS, "loads", f"2 to {MOST_LOADS} values", len(self.loads))
        ascending = self.loads[0] == 0.0 and all(low < high < math.inf for low, high in pairwise(self.loads))
        _require(ascending, "loads", "ascending from 0", self.loads)
        _require(len(self.watts) == len(self.loads), "watts", "as many as loads", len(self.watts))
        never_falls = self.watts[0] >= 0.0 and all(low <= high < math.inf for low, high in pairwise(self.watts))
        _require(never_falls, "watts", "at least 0 and never falling", self.watts)

        most = (*self.carried, self.loads[-1] * (1.0 + 1e-9))
        kept = len(self.carried) <= MOST_LOADS and most[0] >= 0.0 and all(low <= high for low, high in pairwise(most))
        _require(kept, "carried", f"at most {MOST_LOADS}, at least 0, never falling, at most loads' last", self.carried)

    @property
    def most_load(self) -> float:
        """Requests a second that one replica of many carries."""
        return self.carried[-1] if self.carried else self.loads[-1]

    def carried_by(self, replicas: int) -> float:
        """Return the requests a second that so many replicas carry together."""
        if not self.carried or replicas <= 0:
            return replicas * self.most_load
        return replicas * self.carried[min(replicas, len(self.carried)) - 1]

    def carried_by_each(self, replicas: Index) -> Floats:
        """Return `carried_by` of each of these numbers."""
        each = np.array(self.carried or (self.loads[-1],))
        carried: Floats = replicas * each[np.clip(replicas, 1, len(each)) - 1]
        return carried

    def fewest(self, load: float) -> int:
        """Return how many replicas carry a load; more than `MOST_REPLICAS`: too many, or none would do."""
        if self.most_load <= 0.0:
            return 0 if load <= 0.0 else MOST_REPLICAS + 1
        replicas = math.ceil(load / self.most_load - 1e-9)
        while replicas <= MOST_REPLICAS and self.carried_by(replicas) < load * (1.0 - 1e-9):
            replicas += 1
        return replicas


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve a pool.

    Attributes:
        gpus: of a replica.
        points: its operating points, at least one, in any order.
        start_s: how long a replica takes until it serves.
        start_j: what its GPUs draw meanwhile.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    gpus: int
    points: tuple[OperatingPoint, ...]
    start_s: float = 0.0
    start_j: float = 0.0

    def __post_init__(self) -> None:
        _require(1 <= self.gpus <= 1_024, "gpus", "from 1 to 1,024", self.gpus)
        _require(1 <= len(self.points) <= MOST_POINTS, "points", f"1 to {MOST_POINTS}", len(self.points))
        for name in ("start_s", "start_j"):
            value = getattr(self, name)
            _require(0.0 <= value < math.inf, name, "at least 0 and finite", value)

    def fewest(self, load: float) -> int:
        """Return how many replicas carry a load at the clock that carries most."""
        return min(point.fewest(load) for point in self.points)


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """A pool, what may serve it, and the load that is expected of it.

    Attributes:
        name: of the pool; every pool has its own.
        variants: at least one, each with another number of GPUs.
        expected: requests a second in each epoch: what energy is counted for.
        upper: requests a second that must be carried, never below ``expected``: the headroom.
        running: replicas of each variant that serve before the first epoch, none or of one variant; empty: none.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    name: str
    variants: tuple[Variant, ...]
    expected: tuple[float, ...]
    upper: tuple[float, ...]
    running: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where = f"pool {self.name}: "
        count = len(self.variants)
        _require(1 <= count <= MOST_VARIANTS, f"{where}variants", f"1 to {MOST_VARIANTS}", count)
        sizes = {variant.gpus for variant in self.variants}
        _require(len(sizes) == count, f"{where}variants", "of different gpus", [one.gpus for one in self.variants])
        _require(len(self.upper) == len(self.expected), f"{where}upper", "as long as expected", len(self.upper))
        for epoch, (expected, upper) in enumerate(zip(self.expected, self.upper, strict=True)):
            _require(0.0 <= expected < math.inf, f"{where}expected of epoch {epoch}", "at least 0 and finite", expected)
            _require(expected <= upper < math.inf, f"{where}upper of epoch {epoch}", "at least expected", upper)
        complete = not self.running or len(self.running) == count
        _require(complete, f"{where}running", "one for each variant", self.running)
        _require(all(0 <= n <= MOST_REPLICAS for n in self.running), f"{where}running", "from 0", self.running)
        _require(sum(n > 0 for n in self.running) <= 1, f"{where}running", "of one variant", self.running)


@dataclass(frozen=True, slots=True)
class Tariff:
    """What is to be least, in any unit: kWh by default, or money, or kg of CO₂.

    Attributes:
        per_kwh: in each epoch; empty: 1 in each, so energy.
        per_gpu_hour: of each GPU that serves or starts, whatever it draws.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    per_kwh: tuple[float, ...] = ()
    per_gpu_hour: float = 0.0

    def __post_init__(self) -> None:
        for epoch, value in enumerate(self.per_kwh):
            _require(0.0 <= value < math.inf, f"per_kwh of epoch {epoch}", "at least 0 and finite", value)
        _require(0.0 <= self.per_gpu_hour < math.inf, "per_gpu_hour", "at least 0 and finite", self.per_gpu_hour)

    def factor(self, epoch: int) -> float:
        """Return what a kWh counts in an epoch."""
        return self.per_kwh[epoch] if self.per_kwh else 1.0


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan is made for.

    Attributes:
        pools: at least one.
        epoch_s: how long an epoch lasts; no variant may take longer to start.
        tariff: what is to be least.
        gpus: that there are for all pools together; None: as many as needed. What starts in an epoch has its GPUs in
            the epoch before.
        min_up: epochs that a replica serves at least, once it has been started.
        spare: replicas of each pool that may be lost while its others still carry its upper load at their highest
            clock; a pool whose upper load is 0 needs none.

    Raises:
        InvalidProblem: a value is out of range; the message names the field and the rule.
    """

    pools: tuple[PoolLoad, ...]
    epoch_s: float
    tariff: Tariff = Tariff()
    gpus: int | None = None
    min_up: int = 1
    spare: int = 1

    def __post_init__(self) -> None:
        _require(1 <= len(self.pools) <= MOST_POOLS, "pools", f"1 to {MOST_POOLS}", len(self.pools))
        names = [pool.name for pool in self.pools]
        _require(len(set(names)) == len(names), "pools", "of different names", names)
        _require(1 <= self.epochs <= MOST_EPOCHS, "epochs", f"1 to {MOST_EPOCHS:,}", self.epochs)
        same = all(len(pool.expected) == self.epochs for pool in self.pools)
        _require(same, "pools", "of as many epochs each", [len(pool.expected) for pool in self.pools])
        _require(0.0 < self.epoch_s < math.inf, "epoch_s", "more than 0", self.epoch_s)
        slowest_s = max(variant.start_s for pool in self.pools for variant in pool.variants)
        _require(slowest_s <= self.epoch_s, "epoch_s", f"at least the longest start_s, {slowest_s:g}", self.epoch_s)
        factors = len(self.tariff.per_kwh)
        _require(factors in {0, self.epochs}, "tariff.per_kwh", f"one for each of {self.epochs} epochs", factors)
        _require(self.gpus is None or self.gpus > 0, "gpus", "at least 1", self.gpus)
        _require(1 <= self.min_up <= 64, "min_up", "from 1 to 64", self.min_up)
        _require(0 <= self.spare <= 16, "spare", "from 0 to 16", self.spare)
        for pool in self.pools:
            for variant in pool.variants:
                most = self.most_replicas(pool, variant)
                _require(most <= MOST_REPLICAS, f"pool {pool.name}: replicas", f"at most {MOST_REPLICAS:,}", most)

    @property
    def epochs(self) -> int:
        """How many epochs are planned."""
        return len(self.pools[0].expected)

    def fewest_replicas(self, variant: Variant, upper: float) -> int:
        """Return how many replicas of a variant a load that must be carried needs, the spare ones included."""
        return variant.fewest(upper) + self.spare if upper > 0.0 else 0

    def most_replicas(self, pool: PoolLoad, variant: Variant) -> int:
        """Return how many replicas of a variant are planned with at most.

        With so many, each expected load is carried at the clock that carries least, and each upper one at the highest.
        """
        load = max(pool.expected)
        slowest = max(fewest for point in variant.points if (fewest := point.fewest(load)) <= MOST_REPLICAS)
        running = max(pool.running, default=0)
        return max(slowest, running, self.fewest_replicas(variant, max(pool.upper)))


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """What serves a pool in an epoch.

    Attributes:
        gpus: of a replica: its tensor parallelism; 0: nothing serves.
        replicas: how many serve.
        starts: how many of them have to be started in the epoch before.
        clock_mhz: the least clock, of the one that costs least at the expected load; 0: nothing serves.
        joules: expected, of starts, too.
    """

    gpus: int
    replicas: int
    starts: int
    clock_mhz: int
    joules: float


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """A plan, and how far it is from the best.

    Attributes:
        choices: for each pool, by epoch.
        cost: in the tariff's unit.
        bound: no plan of the same request costs less.
        expanded: states of the search, for statistics.
    """

    choices: dict[str, tuple[PoolChoice, ...]]
    cost: float
    bound: float
    expanded: int

    @property
    def gap(self) -> float:
        """The share by which the plan may cost more than the best."""
        return max(0.0, self.cost / self.bound - 1.0) if self.bound > 0.0 else 0.0 if self.cost <= 0.0 else math.inf
