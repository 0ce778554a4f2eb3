"""What a router that predicts answers wrongly does to two pools that are split by the length of answers.

Requests are drawn from a trace of Azure's and served by simulated engines with the agent's law; a wrong prediction
sends a request to the other pool. Replicas are the planner's: for what comes to each pool, which the advice of each
counts, or for a router that is never wrong, which a plan from lengths alone assumes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.bench.serving_pool import DATA, LIMITS, OBJECTIVE, figure

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

STORE: Final = Path("out/serving/router.json")
WRONG: Final = (0.0, 0.1, 0.25, 0.5)
RATE: Final = 30.0
SECONDS: Final = 240.0
HEADROOM: Final = 1.25


@dataclass(frozen=True)
class Outcome:
    """What became of the requests of a trace.

    Attributes:
        replicas: of each pool.
        kw: mean, of all pools.
        attainment_percent: of all requests.
    """

    replicas: tuple[int, ...]
    kw: float
    attainment_percent: float


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


def served(pools: Sequence[Sequence[Request]], replicas: Sequence[int], machine: Machine) -> Outcome:
    """Serve each pool's requests by its replicas."""
    driver, watts, kept, ended = MODELS["h100"].driver, 0.0, 0.0, 0
    for requests, count in zip(pools, replicas, strict=True):
        table = complete_table(machine, OBJECTIVE, mean_prompt_tokens(requests), driver.latency.p50_s)

        def law(_: int, table: Any = table) -> Law:
            return Law(table, OBJECTIVE, machine)

        done = run(Setting(machine, driver, count, 1), requests, law, tail_s=0.0)
        watts += done.joules / done.seconds
        kept += attainment(done.served, OBJECTIVE, machine).percent * len(done.served)
        ended += len(done.served)
    return Outcome(tuple(replicas), watts / 1_000.0, kept / ended)


def outcomes(trace: str) -> dict[str, Any]:
    """Outcomes of one pool, and by how often the router is wrong."""
    machine = Machine("h100", "llama-3.1-70b", 4)
    requests = arrivals(trace, 1)
    right = [replicas_for(pool, machine) for pool in routed(requests, 0.0, 2)]
    found: dict[str, Any] = {"one": asdict(served([requests], [replicas_for(requests, machine)], machine))}
    for wrong in WRONG:
        pools = routed(requests, wrong, 2)
        comes = [replicas_for(pool, machine) for pool in pools]
        found[f"{100 * wrong:.0f}"] = {
            "comes": asdict(served(pools, comes, machine)),
            "right": asdict(served(pools, right, machine)),
        }
    return found


def figures() -> dict[str, Any]:
    """Serve both traces, store what came of it, and return energies over one pool and the least attainment."""
    kept = {trace: outcomes(trace) for trace in ("conv", "code")}
    STORE.parent.mkdir(parents=True, exist_ok=True)
    STORE.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    found = {}
    for wrong in (f"{100 * share:.0f}" for share in WRONG):
        over = max(100.0 * (one[wrong]["comes"]["kw"] / one["one"]["kw"] - 1.0) for one in kept.values())
        found[f"serving_router_{wrong}_wrong_energy_percent"] = figure(over, "%")
        for replicas in ("comes", "right"):
            least = min(one[wrong][replicas]["attainment_percent"] for one in kept.values())
            found[f"serving_router_{wrong}_wrong_attainment_percent_{replicas}"] = figure(least, "%")
    return found


FIGURES: Final = {"serving_router": lambda: figures() if DATA.is_dir() else {}}
