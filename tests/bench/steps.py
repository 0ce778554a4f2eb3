"""Jobs without a pipeline: what ranks save that would only wait for slower ones, and whether load looks like slowness.
In virtual time, on simulated A100s: the planner and its detector, as the operator runs them.

How GPUs of one model differ is published for five clusters: performance varies by 8 % on average and by 22 % at most
(arXiv 2208.11035, SC'22). Ranks are drawn from a normal distribution that has this range between the whiskers of its
box plot, 5.4 standard deviations. The baseline is every rank at its highest clock.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean
from typing import Any

from tests.doubles.steps_job import Load, StepsJob

WHISKERS = 5.4
NODE = 0.04, 0.06
"""How the GPUs of one node differ: 4 % in power, 6 % in speed (arXiv 2511.09861, MI300X)."""
SEEDS = range(5)
STEPS, SETTLED = 150, 100
SLOW_FROM = 100
Result = dict[str, Any]


def gpus(ranks: int, variation: float, seed: int) -> list[float]:
    """How many times as long as the usual GPU each takes."""
    chance = random.Random(seed)
    return [math.exp(chance.gauss(0.0, variation / WHISKERS)) for _ in range(ranks)]


def saving(ranks: int, variation: float, noise: float, seed: int) -> tuple[float, float]:
    """Shares of energy saved and of time lost, against the highest clocks, once plans have settled."""
    slower = gpus(ranks, variation, seed)
    job = StepsJob(ranks, Load(own=noise), slow=lambda step, rank: slower[rank], seed=seed)
    highest = StepsJob(ranks, Load(own=noise), slow=lambda step, rank: slower[rank], seed=seed, mode="Recommend")
    for one in (job, highest):
        one.run()
        one.step(STEPS)
    energy_j, time_s = (
        [sum(getattr(step, field) for step in one.steps[SETTLED:]) for one in (job, highest)]
        for field in ("energy_j", "time_s")
    )
    return 1 - energy_j[0] / energy_j[1], time_s[0] / time_s[1] - 1


def spread() -> Result:
    """Measure what is saved at no slowdown, by ranks and by how their GPUs vary."""
    found: Result = {}
    for ranks, variations in ((8, (*NODE, 0.08, 0.22)), (64, (0.08, 0.22))):
        for variation in variations:
            runs = [saving(ranks, variation, 0.002, seed) for seed in SEEDS]
            name = f"steps_spread_{100 * variation:.0f}_percent_{ranks}_ranks"
            found[f"{name}_saving"] = {"value": 100 * fmean(saved for saved, _ in runs), "unit": "%"}
            found[f"{name}_time"] = {"value": 100 * fmean(lost for _, lost in runs), "unit": "%"}
    return found


def load() -> Result:
    """Measure false alarms of ranks whose steps vary by 30 %, and how soon one that takes twice as long is found."""
    alarms, reactions, steps = 0, [], 0
    for seed in SEEDS:
        job = StepsJob(64, Load(common=0.3, own=0.3), seed=seed)
        job.run()
        job.step(STEPS)
        steps += STEPS
        alarms += sum(len(after.stragglers.keys() - before.stragglers.keys()) for before, after in pairwise(job.steps))
        slow = StepsJob(
            64,
            Load(common=0.3, own=0.3),
            slow=lambda step, rank: 2.0 if rank == 1 and step >= SLOW_FROM else 1.0,
            seed=seed,
        )
        slow.run()
        slow.step(STEPS)
        found = [number for number, step in enumerate(slow.steps) if 1 in step.stragglers]
        reactions.append(found[0] - SLOW_FROM + 1 if found else STEPS)
    return {
        "steps_load_false_alarms_64_ranks": {"value": alarms, "unit": f"in {steps} steps"},
        "steps_load_reaction_iterations": {"value": max(reactions), "unit": "worst"},
    }


FIGURES = {"steps_spread": spread, "steps_load": load}
