"""What a router that predicts answers wrongly does to two pools that are split by the length of answers.

``python -m tests.bench.serving_router`` prints the table of docs/serving-replicas.md. Requests are drawn from a trace
of Azure's and served by simulated engines with the agent's law; a wrong prediction sends a request to the other pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tests.bench.serving_pool import DATA, LIMITS, OBJECTIVE

from perseus_core.lengths import length_of
from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import complete_table, ladder, mean_prompt_tokens
from perseus_sim.serving.controllers import Law
from perseus_sim.serving.fleet import Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.machine_steps import MachineSteps
from perseus_sim.serving.objective import attainment
from perseus_sim.serving.requests import Request
from perseus_sim.serving.traces import read_trace
from perseus_solver.serving.planner import PlanRequest, PoolLoad, ReplicaModel, RequestClass, Variant, plan
from perseus_solver.serving.planner.split import OUTPUT_ENDS, level_of

WRONG: Final = (0.0, 0.1, 0.25, 0.5)
RATE: Final = 30.0
SECONDS: Final = 60.0
HEADROOM: Final = 1.25


def arrivals(trace: str, seed: int) -> list[Request]:
    """Requests of a trace, drawn and in another order, that come independently of each other."""
    draw, known = random.Random(seed), read_trace(DATA / f"AzureLLMInferenceTrace_{trace}.csv")
    requests, at_s = list[Request](), draw.expovariate(RATE)
    while at_s < SECONDS:
        requests.append(replace(draw.choice(known), arrival_s=at_s))
        at_s += draw.expovariate(RATE)
    return requests


def routed(requests: Sequence[Request], wrong: float, seed: int) -> list[list[Request]]:
    """Requests of the pool of short answers, and of the other, as a router sends them that is wrong so often."""
    draw = random.Random(seed)
    pools: list[list[Request]] = [[], []]
    for one in requests:
        long = level_of(length_of(one.output_tokens), OUTPUT_ENDS) > 0
        pools[long != (draw.random() < wrong)].append(one)
    return pools


def replicas_for(requests: Sequence[Request], machine: Machine) -> int:
    """How many the planner wants for what comes."""
    seen = RequestClass.seen([one.prompt_tokens for one in requests], [one.output_tokens for one in requests])
    highest_mhz = machine.clocks_mhz[-1]
    steps = MachineSteps(machine, 0.5 * seen.prompt_tokens * (1.0 + seen.prompt_scv))
    model = ReplicaModel(machine.parallel, steps, highest_mhz, machine.kv_capacity)
    points = model.points(seen, LIMITS, (*ladder(machine)[::5], highest_mhz), (highest_mhz,))
    load = len(requests) / SECONDS
    pool = PoolLoad("pool", (Variant(machine.parallel, points),), (load,), (HEADROOM * load,))
    return plan(PlanRequest((pool,), 3_600.0, spare=0)).choices["pool"][0].replicas


def served(pools: Sequence[Sequence[Request]], replicas: Sequence[int], machine: Machine) -> tuple[float, float]:
    """Mean kW of all pools, and the per cent of all requests that kept the objective."""
    driver, watts, kept, ended = next(iter(MODELS.values())).driver, 0.0, 0.0, 0
    for requests, count in zip(pools, replicas, strict=True):
        table = complete_table(machine, OBJECTIVE, mean_prompt_tokens(requests), driver.latency.p50_s)
        done = run(Setting(machine, driver, count, 1), requests, lambda _, table=table: Law(table, OBJECTIVE, machine))  # type: ignore[misc]
        watts += done.joules / done.seconds
        kept += attainment(done.served, OBJECTIVE, machine).percent * len(done.served)
        ended += len(done.served)
    return watts / 1_000.0, kept / ended


def main() -> None:
    """Print the table."""
    machine = Machine("h100", "llama-3.1-70b", 4)
    known, right = "replicas for what comes", "replicas for a router that is right"
    print(f"| trace | wrong | {known} | power | attainment | {right} | power | attainment |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for trace in ("conv", "code"):
        requests = arrivals(trace, 1)
        count = replicas_for(requests, machine)
        kw, percent = served([requests], [count], machine)
        print(f"| `{trace}` | one pool | {count} | {kw:.2f} kW | {percent:.2f} % | | | |", flush=True)
        planned = [replicas_for(pool, machine) for pool in routed(requests, 0.0, 2)]
        for wrong in WRONG:
            pools = routed(requests, wrong, 2)
            row = [f"`{trace}`", f"{100 * wrong:.0f} %"]
            seen = [replicas_for(pool, machine) for pool in pools]
            for counts in (seen, planned):
                kw, percent = served(pools, counts, machine)
                row += [" + ".join(map(str, counts)), f"{kw:.2f} kW", f"{percent:.2f} %"]
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
