"""Promises about watts and joules: a PowerBudget that is kept stays kept whatever happens to operators, and energy adds
up. The world knows what its GPUs have drawn.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from tests.simulation.gpus import LIMIT_W
from tests.simulation.kinds import Fault
from tests.simulation.scheduler import NS
from tests.simulation.serving_faults import OF_SERVING
from tests.simulation.world import BUDGET, PIPELINES, STAGES, World, work

PLANNED: Final = "job-0"
"""The job that has plans."""
WINDOW: Final = 5
"""Iterations over which power is meant."""
NOISE: Final = 1.03
"""Of predicted power: instructions take a little less or more, and clocks take time."""
CALM_S: Final = 10.0
"""After what concerns jobs, nodes or the budget itself, until the budget must be kept again."""
OF_OPERATORS: Final = frozenset(
    (
        "operator killed",
        "operator stopped",
        "operators gone",
        "link cut",
        "link blinks",
        "messages lost",
        "messages doubled",
        "messages late",
        "messages held",
        "API away",
        "API fails",
        "API stale",
        "watch silent",
        "watch repeats",
        "stranger calls",
        *OF_SERVING,
    )
)
"""Faults for which a budget that is kept is not exceeded."""
SAMPLED_J: Final = 4 * 0.4 * LIMIT_W
"""What two samples of each of a job's GPUs may be off, at the begin and the end of what is measured."""
MEASURED: Final = 0.02


class Energy:
    """Looks at a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._now = world.scheduler
        self._kept = False
        """Whether the budget is in force and kept, and was so since the last event that concerns it."""
        self._calm_ns = 0
        self._unknown = False
        self._forged = False
        """Whether a rank of the planned job has forged what its power is measured by."""
        self._look()

    def begun(self, fault: Fault, *, ends: bool = False) -> None:
        """A fault begins, or ends."""
        if fault.kind not in OF_OPERATORS:
            self._kept = False
            self._calm_ns = self._now.now_ns + int(((0 if ends else fault.lasts_s) + CALM_S) * NS)
        self._forged |= fault.kind == "rank forges" and fault.place % len(self._world.training) == 0
        self._unknown |= fault.kind in ("driver hangs", "driver refuses", "GPUs lost", "GPU fails", "node vanishes")

    def _look(self) -> None:
        """Promise 12, once a second."""
        budget, mean_w = self._world.api.budgets.get(BUDGET), self._mean_w()
        if budget is None:
            self._kept = False
        elif mean_w is not None and self._now.now_ns > self._calm_ns:
            limit_w = budget["spec"]["watts"] - self._unsteered_w()
            if self._kept and not self._forged and mean_w > limit_w * NOISE:
                self._now.fail(
                    f"promise 12: {PLANNED} draws {mean_w:.0f} W of {limit_w:.0f} W in {WINDOW} iterations, and only"
                    " operators had faults"
                )
            self._kept |= mean_w <= limit_w * NOISE and says_kept(budget)
            if self._kept and not self._now.failures:
                self._look_at_resting(limit_w)
        self._now.after(1.0, self._look)

    def _look_at_resting(self, limit_w: float) -> None:
        """The clock at which the job is to rest draws no more than its share, whatever is executed at it."""
        uid = self._world.uids.get(PLANNED, "")
        for name in self._world.nodes_of[PLANNED]:
            agent = self._world.nodes[name].agent
            lease = agent.node.leases._jobs.get(uid) if agent is not None and agent.node is not None else None
            if lease is None or lease.lapsed or not lease.clock.mhz:
                continue
            most_w, lowest = _most_w(lease.clock.mhz)
            if most_w > limit_w * NOISE and not lowest:
                self._now.fail(
                    f"promise 12: {PLANNED} is to rest at {lease.clock.mhz} MHz on {name} without an operator, and may"
                    f" draw {most_w:.0f} of {limit_w:.0f} W then"
                )
                return

    def _mean_w(self) -> float | None:
        """Of the planned job, over its last iterations; None: it has not run so many, or stands still."""
        ends = list(self._world.training[PLANNED].ends.values())[-WINDOW - 1 :] if self._world.training else []
        if len(ends) <= WINDOW or self._now.now_ns - ends[-1][0] > 5 * NS:
            return None
        return (ends[-1][1] - ends[0][1]) * NS / (ends[-1][0] - ends[0][0])

    def _unsteered_w(self) -> float:
        """Of jobs with a fixed clock the limits of their GPUs count."""
        return sum(
            LIMIT_W * len(job.ranks)
            for name, job in self._world.training.items()
            if name != PLANNED and name in self._world.uids
        )

    # ------------------------------------------------------------------------------------------------ in the end

    def check_budget(self, quiet_s: float) -> None:
        """The status says of the budget what is so."""
        budget, job = self._world.api.budgets.get(BUDGET), self._world.training[PLANNED]
        mean_w = self._mean_w()
        if budget is None or not job.ranks or PLANNED not in self._world.uids or mean_w is None or self._forged:
            return
        limit_w = budget["spec"]["watts"] - self._unsteered_w()
        if says_kept(budget) and mean_w > limit_w * NOISE:
            self._now.fail(
                f"promise 12: the budget is said to be kept, and {PLANNED} draws {mean_w:.0f} of {limit_w:.0f} W"
            )

    def check_sums(self, quiet_s: float, forged: set[str]) -> None:
        """Promise 7: what the operator has measured of successive iterations is what the GPUs have drawn."""
        if self._unknown:
            return
        for replica in self._world.replicas:
            for runner in replica.operator._runners.values() if replica.operator is not None else ():
                training = getattr(runner.family, "training", None)
                history = training.history if training is not None else None
                if history is not None and runner.ref.name not in forged:
                    self._check_sum(runner.ref.name, list(history.recent))

    def _check_sum(self, name: str, measured: list[Any]) -> None:
        ends = self._world.training[name].ends
        run: list[Any] = []
        for one, following in pairwise([*measured, None]):
            if one.energy_mj is not None and one.iteration - 1 in ends and one.iteration in ends:
                run.append(one)
            if run and (following is None or following.iteration != run[-1].iteration + 1):
                self._compare(name, run, ends[run[-1].iteration][1] - ends[run[0].iteration - 1][1])
                run = []

    def _compare(self, name: str, run: list[Any], drawn_j: float) -> None:
        said_j = sum(one.energy_mj for one in run) / 1000
        if abs(said_j - drawn_j) > SAMPLED_J + MEASURED * drawn_j:
            self._now.fail(
                f"promise 7: {len(run)} iterations of {name} are said to have used {said_j:.0f} J; its GPUs drew"
                f" {drawn_j:.0f} J"
            )


def _most_w(mhz: int) -> tuple[float, bool]:
    """What the planned job draws at most at a clock, and whether no lower one was measured."""
    costs = work().costs
    watts = [
        max(joules / seconds for (of, _, at), (seconds, joules) in costs.items() if (of, at) == (stage, mhz))
        for stage in range(STAGES)
    ]
    return PIPELINES * sum(watts), mhz == min(at for _, _, at in costs)


def says_kept(budget: Any) -> bool:
    """Whether a PowerBudget's status says of this spec that it is kept."""
    status, generation = budget.get("status", {}), budget["metadata"]["generation"]
    return any(
        each["type"] == "Kept" and each["status"] == "True" and each["observedGeneration"] == generation
        for each in status.get("conditions", ())
    )
