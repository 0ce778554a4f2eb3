"""Whether the interval of what a pool saves holds the truth: the operator's comparison, against a simulator that knows.

Each run is a pool under a load of its own, second by second on the simulator's machine; requests decode as fast as the
clock lets them, so replicas at default clocks have fewer at once. The comparison is the operator's own, fed with
windows as agents send them. The same load is served at default clocks all the time, and by the law all the time: what
those differ by is the truth of the run, and of both come the blocks of a replica that is switched, whose first seconds
do not count. ``make bench ONLY=interval`` runs it.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from perseus_operator.families.serving.features.comparison.switchback import (
    BLOCK_S,
    LEAST_COMPARISONS,
    SHARE,
    Comparison,
    Switchback,
    saved_of,
    switched_back,
)
from perseus_operator.nodes.engines import EngineWindow
from perseus_sim.serving.machine import Machine, Step

Result = dict[str, Any]
Floats = npt.NDArray[np.float64]
RUNS: Final = 200
"""Of each truth: chance alone moves their coverage by one and a half points."""
COUNTS: Final = (LEAST_COMPARISONS, 30)
"""Comparisons after which intervals are judged."""
WINDOW_S: Final = 15
MACHINE: Final = Machine("h100", "llama-3.1-8b", 1)
HIGHEST_MHZ: Final = MACHINE.clocks_mhz[-1]
_MOST_RUNNING: Final = 256
_ANSWER_TOKENS: Final = 150
"""Mean; the lengths are exponential."""
_CONTEXT: Final = 500
_PROMPT_TOKENS: Final = 300


@dataclass(frozen=True)
class Truth:
    """A pool.

    Attributes:
        law_mhz: the clock by the law, for as many requests at once as `LOADS` are passed.
        replicas: how many there are.
        per_second: requests of each, mean.
        spread: standard deviation of the logarithm of the load.
        correlated_s: time in which the load's deviation falls to a third; all replicas share it.
    """

    law_mhz: tuple[int, ...]
    replicas: int = 1
    per_second: float = 2.0
    spread: float = 0.2
    correlated_s: float = 300.0

    @property
    def comparisons_a_block(self) -> float:
        """Mean: a replica is switched back, and neither before nor after."""
        others = 1 - SHARE / self.replicas
        return SHARE * others**2


LOADS: Final = (8, 32)
_LOW: Final = (1005, 1110, 1305)
TRUTHS: Final = {
    "nothing": Truth((HIGHEST_MHZ,) * 3),
    "little": Truth((1770,) * 3),
    "much": Truth(_LOW),
    "much_three_replicas": Truth(_LOW, replicas=3),
    "correlated": Truth(_LOW, per_second=8.0, spread=0.7, correlated_s=3600.0),
    "correlated_three_replicas": Truth(_LOW, replicas=3, per_second=8.0, spread=0.7, correlated_s=3600.0),
    "rare": Truth(_LOW, per_second=0.1),
}


class Served:
    """Joules and tokens of each window, by run and replica, of replicas that are never switched."""

    def __init__(self, truth: Truth, blocks: int, replicas: tuple[int, int], seed: int, *, default: bool) -> None:
        seconds = round(blocks * BLOCK_S)
        self.joules, self.tokens = np.zeros((2, seconds // WINDOW_S, *replicas))
        loads, ends = (np.random.default_rng((seed, stream)) for stream in range(2))
        running = np.zeros(replicas, dtype=np.int64)
        deviation = loads.normal(0.0, truth.spread, (replicas[0], 1))
        kept, table = math.exp(-1.0 / truth.correlated_s), _table(truth, default=default)
        drift = math.sqrt(1 - kept**2) * truth.spread
        for second in range(seconds):
            deviation = kept * deviation + drift * loads.standard_normal(deviation.shape)
            rate = truth.per_second * np.exp(deviation - truth.spread**2 / 2)
            arrivals = loads.poisson(rate, replicas)
            step_s, step_j, prompt_s, prompt_j, idle_w = table[:, running]
            left_s = 1.0 - np.minimum(0.8, arrivals * prompt_s)
            steps, window = left_s / step_s, second // WINDOW_S
            self.tokens[window] += steps * running
            self.joules[window] += np.where(running, steps * step_j, left_s * idle_w) + arrivals * prompt_j
            ended = ends.binomial(running, -np.expm1(-steps / _ANSWER_TOKENS))
            running = np.minimum(_MOST_RUNNING, running - ended + arrivals)

    def token_j(self, window: int, run: int) -> float:
        """Joules of a token up to a window."""
        return float(self.joules[: window + 1, run].sum() / self.tokens[: window + 1, run].sum())


def _table(truth: Truth, *, default: bool) -> Floats:
    """Seconds and joules of a step and of a prompt, and watts when idle, by requests at once."""
    clocks = [HIGHEST_MHZ if default else truth.law_mhz[bisect.bisect(LOADS, n)] for n in range(_MOST_RUNNING + 1)]
    return np.array([_costs(mhz, running) for running, mhz in enumerate(clocks)]).T


def _costs(mhz: int, running: int) -> tuple[float, float, float, float, float]:
    costs = MACHINE.costs(mhz)
    step = Step(max(1, running), _CONTEXT * running, 0, 0.0, 0)
    mixed = step._replace(prompt_tokens=_PROMPT_TOKENS, prompt_pairs=_PROMPT_TOKENS**2 / 2, prompts=1)
    step_s, mixed_s = MACHINE.seconds(costs, step), MACHINE.seconds(costs, mixed)
    step_j = MACHINE.joules(costs, step, step_s)
    return step_s, step_j, mixed_s - step_s, MACHINE.joules(costs, mixed, mixed_s) - step_j, costs.idle_w


@dataclass(frozen=True)
class Run:
    """One pool's comparisons, and after each the truth: the share that the law has saved until then."""

    comparisons: list[Comparison]
    shares: list[float]


def runs_of(truth: Truth, comparisons: int, runs: int, seed: int = 1) -> list[Run]:
    """Simulate pools until they have so many comparisons."""
    blocks = round(1.6 * comparisons / truth.comparisons_a_block) + 10
    pods = [f"pod-{number}" for number in range(truth.replicas)]
    replicas = (runs, truth.replicas)
    law, default = (Served(truth, blocks, replicas, seed, default=default) for default in (False, True))
    done = []
    for run in range(runs):
        back = [switched_back(f"{seed}/{run}", block, pods) for block in range(blocks)]
        done.append(_compared(law, default, run, [[pod == one for pod in pods] for one in back]))
    return done


def _compared(law: Served, default: Served, run: int, back: list[list[bool]]) -> Run:
    switchback, found = Switchback(), Run([], [])
    for number in range(len(law.joules)):
        wall_s = float(number * WINDOW_S)
        chosen = back[int(wall_s // BLOCK_S)]
        for replica, at_default in enumerate(chosen):
            served = default if at_default else law
            window = EngineWindow(
                pod_uid=str(replica),
                pid=1,
                time_us=1_000_000 * WINDOW_S,
                default_us=1_000_000 * WINDOW_S if at_default else 0,
                steps=1,
                energy_mj=round(1000 * served.joules[number, run, replica]),
                generated_tokens=round(served.tokens[number, run, replica]),
            )
            switchback.window_seen(window, window.generated_tokens, default=at_default, wall_s=wall_s)
        if len(switchback.comparisons) > len(found.comparisons):
            found.comparisons[:] = switchback.comparisons
            saved = 1.0 - law.token_j(number, run) / default.token_j(number, run)
            found.shares.extend([saved] * (len(found.comparisons) - len(found.shares)))
    return found


def coverage() -> Result:
    """How many intervals of a hundred hold the truth, of each kind of pool, and the least of those; mean widths."""
    covered: dict[str, float] = {}
    widths: dict[int, list[float]] = {count: [] for count in COUNTS}
    for name, truth in TRUTHS.items():
        runs = runs_of(truth, max(COUNTS), RUNS)
        for count in COUNTS:
            judged = [
                (run.shares[count - 1], saved_of(run.comparisons[:count])) for run in runs if len(run.shares) >= count
            ]
            held = [saved.low <= share <= saved.high for share, saved in judged if saved is not None]
            widths[count] += [saved.high - saved.low for _, saved in judged if saved is not None]
            covered[f"{name}_{count}"] = 100 * sum(held) / len(held)
    return {
        "serving_interval_coverage_percent": {"value": min(covered.values()), "unit": "%"},
        **{
            f"serving_interval_coverage_percent_{name}": {"value": value, "unit": "%"}
            for name, value in covered.items()
        },
        **{
            f"serving_interval_width_points_{count}": {"value": 100 * sum(wide) / len(wide), "unit": "points"}
            for count, wide in widths.items()
        },
    }


FIGURES: Final = {"interval": coverage}
