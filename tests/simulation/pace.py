"""Promises about time and savings: training goes on, a bound that is exceeded takes the plan away, and what is said to
be saved is what the GPUs show.
"""

from __future__ import annotations

from statistics import fmean, median
from typing import Any, Final

from tests.simulation.energy import PLANNED
from tests.simulation.kinds import Fault
from tests.simulation.scheduler import NS
from tests.simulation.serving_faults import OF_SERVING
from tests.simulation.world import World

STANDS_S: Final = 5.0
"""Of an iteration, which takes 2.3 s at the clocks of least energy."""
NOISE: Final = 1.02
"""Beyond the bound: 1 % is taken for noise, and iterations vary."""
CONFIRMED: Final = 16
"""Iterations in a row beyond the bound after which the plan must be gone: the guard judges five, or windows of up to
twice as many, counts none of those in which a plan began, and agents need two to follow."""
OF_CLOCKS: Final = frozenset(("driver slow", "stranger calls", *OF_SERVING))
"""Faults beside which a bound is kept."""
MEASURED: Final = 0.01
"""By how much a saving that is said may differ from that of the same iterations, by the world's own counters."""
LEAST: Final = 3
"""Iterations of a saving that is looked at: fewer may be of a plan that has gone since the status was written."""


class Pace:
    """Looks at a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._now = world.scheduler
        self._seen = -1
        self._beyond = 0
        """Iterations in a row that exceeded the bound, while only faults of clocks were there."""
        self._iterations: dict[int, tuple[int, float]] = {}
        """Nanoseconds and joules of each that no start of the training was in."""
        self._at_default: list[tuple[int, float]] = []
        """Of those during which no GPU of the job was locked."""
        self._unsure = False
        """Whether a rank of the job has forged what its iterations are measured by, or another program has set clocks,
        at which a baseline may have been measured."""

    def begun(self, fault: Fault) -> None:
        """A fault begins, or ends."""
        forged = fault.kind == "rank forges" and fault.place % len(self._world.training) == 0
        self._unsure |= forged or fault.kind == "foreign lock"
        if fault.kind not in OF_CLOCKS:
            self._beyond = 0

    def look(self) -> None:
        """Promises 1 and 5."""
        for name, job in self._world.training.items():
            ends = job.ends.get(job.iteration - 1)
            alive = job.ranks and all(rank.process.alive for rank in job.ranks)
            since_ns = max([rank.started_ns for rank in job.ranks] + ([ends[0]] if ends else []), default=0)
            if alive and self._now.now_ns - since_ns > STANDS_S * NS:
                self._now.fail(f"promise 1: an iteration of {name} takes longer than {STANDS_S:.0f} s")
                return
        planned = self._world.training.get(PLANNED)
        if planned is not None and planned.iteration - 1 != self._seen:
            self._seen = planned.iteration - 1
            self._look_at_iteration(planned)

    def _look_at_iteration(self, planned: Any) -> None:
        before, end = planned.ends.get(self._seen - 1), planned.ends.get(self._seen)
        if before is None or end is None:
            return
        if any(rank.started_ns > before[0] for rank in planned.ranks):
            return
        time_ns, energy_j = self._iterations[self._seen] = end[0] - before[0], end[1] - before[1]
        if all(not rank.gpu.locked_mhz and rank.gpu.since_ns < before[0] - NS // 2 for rank in planned.ranks):
            self._at_default.append((time_ns, energy_j))
        bound_ns = self._bound_ns()
        self._beyond = self._beyond + 1 if bound_ns is not None and time_ns > bound_ns * NOISE else 0
        if self._beyond > CONFIRMED:
            self._now.fail(
                f"promise 5: {self._beyond} iterations of {PLANNED} took longer than {bound_ns / NS:.3f} s, the last"
                f" {time_ns / NS:.3f} s, and its plan is in force"
            )

    def _bound_ns(self) -> float | None:
        """What an iteration may take; None: there is no bound, or it is said to be exceeded."""
        job = self._world.api.jobs.get(self._world.uids.get(PLANNED, ""))
        runner = self._world.runner_of(PLANNED)
        if job is None or runner is None or not self._at_default or self._unsure or PLANNED in self._world.misedited:
            return None
        kept = [c for c in job.get("status", {}).get("conditions", ()) if c["type"] == "BoundKept"]
        share = self._world.api.budgets
        stragglers = runner.family.training.stragglers.detector.slowdowns  # type: ignore[attr-defined]
        if not kept or kept[0]["reason"] != "BoundKept" or share or stragglers:
            return None
        allowed = float(self._world.specs[PLANNED]["objective"]["maxSlowdown"].rstrip("%")) / 100
        return (1 + allowed) * fmean(time_ns for time_ns, _ in self._at_default)

    def check_savings(self) -> None:
        """Promise 11: what is said to be saved is what the iterations differ by that it was measured from."""
        job, runner = self._world.api.jobs.get(self._world.uids.get(PLANNED, "")), self._world.runner_of(PLANNED)
        status = (job or {}).get("status", {})
        savings, measured = status.get("savings"), status.get("measured")
        if not savings or not measured or runner is None or self._unsure or not self._at_default:
            return
        training = runner.family.training  # type: ignore[attr-defined]
        recent = [] if training.history is None else [one for one in training.history.recent if not one.mixed]
        planned = [
            self._iterations[one.iteration]
            for one in recent
            if one.points == recent[-1].points and one.iteration in self._iterations
        ]
        count = measured["iterations"]
        if count < LEAST:
            return
        # The status is older than what is known, and the plan may have begun again: any that follow each other count.
        true = [self._saved(planned[first : first + count]) for first in range(len(planned) - count + 1)]
        said = tuple(float(savings[which].rstrip("%")) / 100 for which in ("energy", "slowdown"))
        if true and not any(all(abs(a - b) <= MEASURED for a, b in zip(said, each, strict=True)) for each in true):
            energy, slowdown = true[-1]
            self._now.fail(
                f"promise 11: of {PLANNED} {count} iterations are said to have saved {savings['energy']} and to be"
                f" {savings['slowdown']} slower, and saved {100 * energy:.2f}% and were {100 * slowdown:.2f}% slower"
            )

    def _saved(self, planned: list[tuple[int, float]]) -> tuple[float, float]:
        """Shares of energy and time, of medians, as the status is."""
        time, energy = (
            median(one[place] for one in planned) / median(one[place] for one in self._at_default) for place in (0, 1)
        )
        return 1 - energy, time - 1
