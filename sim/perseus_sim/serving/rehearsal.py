"""What policies for clocks would do to a trace of requests: each serves it once, on the same simulated replicas."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from perseus_sim.serving.canary import complete_table, ladder, mean_prompt_tokens
from perseus_sim.serving.controllers import DynamoLlm, Fixed, GreenLlm, Law, ThrottLlem, Voltana
from perseus_sim.serving.fleet import DEFAULT_CLOCKS, Controller, Run, Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Attainment, Objective, attainment
from perseus_sim.serving.requests import Request

HIGHEST: Final = "highest clock"
FIXED: Final = "best fixed clock"
LAW: Final = "law"
RIVALS: Final[Mapping[str, Callable[[Machine, Objective], Controller]]] = {
    "DynamoLLM, clocks": DynamoLlm,
    "throttLL'eM": ThrottLlem,
    "VoltanaLLM": Voltana,
    "GreenLLM": GreenLlm,
}
"""As `perseus_sim.serving.controllers` models them: by their publications' rules for clocks alone."""


@dataclass(frozen=True)
class Outcome:
    """What one policy did.

    Attributes:
        policy: its name.
        energy_percent: against the highest clock; negative: less.
        attainment: how requests kept the objective.
        watts_per_gpu: mean.
        calls_per_s: of a node's driver.
        clock_mhz: of the best fixed clock; `DEFAULT_CLOCKS` for every other policy.
    """

    policy: str
    energy_percent: float
    attainment: Attainment
    watts_per_gpu: float
    calls_per_s: float
    clock_mhz: int = DEFAULT_CLOCKS


@dataclass(frozen=True)
class ServingBench:
    """Replicas, requests and limits on which policies are compared."""

    setting: Setting
    requests: Sequence[Request]
    objective: Objective

    def served(self, controller: Callable[[int], Controller]) -> Run:
        """Serve the requests with a controller for each replica."""
        return run(self.setting, self.requests, controller)

    def outcome(self, policy: str, policy_run: Run, highest: Run, clock_mhz: int = DEFAULT_CLOCKS) -> Outcome:
        """Describe a run beside that at the highest clock."""
        setting = self.setting
        gpus = setting.replicas * setting.machine.parallel
        return Outcome(
            policy=policy,
            energy_percent=100 * (policy_run.joules / highest.joules - 1),
            attainment=attainment(policy_run.served, self.objective, setting.machine),
            watts_per_gpu=policy_run.joules / policy_run.seconds / gpus,
            calls_per_s=policy_run.calls_per_s,
            clock_mhz=clock_mhz,
        )

    def law(self) -> Callable[[int], Controller]:
        """The law, with the table of an engine that was seen at every load."""
        machine, objective = self.setting.machine, self.objective
        table = complete_table(machine, objective, mean_prompt_tokens(self.requests), self.setting.driver.latency.p50_s)
        return lambda _: Law(table, objective, machine)


def compare(bench: ServingBench, progress: Callable[[int, int], object] = lambda _done, _total: None) -> list[Outcome]:
    """Let each policy serve the requests: the highest clock, the best fixed one, the law, its rivals.

    The best fixed clock is known in hindsight only: the one of least energy of those that keep the objective no less
    often than the law, down to the first that does not.

    Args:
        bench: replicas, requests and limits.
        progress: called with the policies done, and how many there are.
    """
    machine, objective = bench.setting.machine, bench.objective
    clocks_mhz = ladder(machine)
    total = 2 + len(RIVALS) + len(clocks_mhz)
    progress(0, total)
    base = bench.served(lambda _: Fixed())
    progress(1, total)
    law = bench.outcome(LAW, bench.served(bench.law()), base)
    rivals = []
    for done, (name, rival) in enumerate(RIVALS.items(), start=2):
        progress(done, total)
        rivals.append(bench.outcome(name, bench.served(partial(_rival, rival, machine, objective)), base))
    best = highest = bench.outcome(HIGHEST, base, base)
    for done, mhz in enumerate(reversed(clocks_mhz), start=2 + len(RIVALS)):
        progress(done, total)
        fixed = bench.outcome(FIXED, bench.served(partial(_fixed, mhz)), base, mhz)
        if fixed.attainment.percent < law.attainment.percent:
            break
        best = min(best, fixed, key=lambda one: one.energy_percent)
    progress(total, total)
    return [highest, replace(best, policy=FIXED), law, *rivals]


def _rival(
    rival: Callable[[Machine, Objective], Controller], machine: Machine, objective: Objective, _: int
) -> Controller:
    return rival(machine, objective)


def _fixed(clock_mhz: int, _: int) -> Controller:
    return Fixed(clock_mhz)


def poisson(
    requests_per_s: float, prompt_tokens: float, output_tokens: float, seconds: float, seed: int
) -> tuple[Request, ...]:
    """Draw requests that come independently of each other, with exponentially distributed lengths.

    Args:
        requests_per_s: mean rate.
        prompt_tokens: mean, at least 1.
        output_tokens: mean, at least 1.
        seconds: how long they come.
        seed: of all that is drawn.

    Returns:
        In the order of arrival; at least one.
    """
    draw = random.Random(seed)

    def tokens(mean: float) -> int:
        return 1 + math.floor(draw.expovariate(1 / (mean - 1))) if mean > 1 else 1

    requests, arrival_s = [], 0.0
    while arrival_s < seconds:
        requests.append(Request(arrival_s, tokens(prompt_tokens), tokens(output_tokens)))
        arrival_s += draw.expovariate(requests_per_s)
    return tuple(requests)
