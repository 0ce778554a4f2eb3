"""Replicas, parallelism and clocks of pools over a week: policies side by side, and the optimum in hindsight.

Each load is three weeks, of which the last counts, drawn `WEEKS` times: made up in the published shape with the lengths
of one of Azure's traces, or the hour of that trace, repeated. Minutes are taken as steady; minutes drawn from each week
are served request by request, too, by the engines of the simulator, and both are compared. ``make bench
ONLY=serving_pool`` stores the weeks; ``python -m tests.bench.serving_pool_page`` writes the page.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from tests.bench.serving import DATA
from tests.bench.serving_pools import policies
from tests.bench.serving_pools.policies import PARALLEL, ClockPolicy, Pool, PoolSchedule, Week, World, pool_load
from tests.bench.serving_pools.service import SHAPES, WEEK_MIN, Service
from tests.doubles import autoscaled_pool

from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import NoTable, complete_table
from perseus_sim.serving.controllers import DynamoLlm, Fixed, Law
from perseus_sim.serving.fleet import Controller, Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.machine_steps import MachineSteps
from perseus_sim.serving.objective import Objective, attainment
from perseus_sim.serving.requests import Request
from perseus_sim.serving.traces import read_trace
from perseus_solver.kinds import Floats
from perseus_solver.serving.planner import (
    Forecaster,
    LatencyLimits,
    PlanRequest,
    PoolLoad,
    ReplicaModel,
    RequestClass,
    Variant,
    plan,
)

Result = dict[str, Any]
STORE: Final = Path("out/serving/weeks.json")
OBJECTIVE: Final = Objective()
LIMITS: Final = LatencyLimits(
    OBJECTIVE.first_token_s, OBJECTIVE.undisturbed, OBJECTIVE.per_token_s, attainment=OBJECTIVE.attainment
)
WEEKS: Final = 3
"""Draws of each made-up load."""
SPLIT: Final = "one pool"
"""Of `policies.splits`, the one that costs least in the week before, whichever load."""
SAMPLES: Final = 6
SAMPLE_MIN: Final = 3
"""Of a week, request by request."""
POLICIES: Final = ("peak", "clocks", "replicas", "dynamollm", "ours", "ours_spare", "hindsight")
BASELINE: Final = "peak"


@dataclass(frozen=True)
class Outcome:
    """What a policy did in a week.

    Attributes:
        energy_percent: against the baseline.
        attainment_percent: of the requests.
        gpu_hours: of GPUs that serve.
        starts: of replicas.
        churn_percent: of the epochs of its pools, those in which replicas changed.
    """

    energy_percent: float
    attainment_percent: float
    gpu_hours: float
    starts: int
    churn_percent: float


class Bench:
    """One load, and every policy on it.

    Args:
        world: the service; what was fitted and computed of it is kept for the next load.
        hour: whether the trace's hour is repeated, instead of a week of the published shape.
        seed: of all that is drawn.
    """

    def __init__(self, world: World, *, hour: bool, seed: int) -> None:
        self.world, self.service = world, world.service
        self.loads = self.service.hours(3) if hour else self.service.weeks(3, seed)
        self.week = {name: load[-WEEK_MIN:] for name, load in self.loads.items()}
        self.before = {name: load[-2 * WEEK_MIN : -WEEK_MIN] for name, load in self.loads.items()}
        self.errors: dict[Pool, Forecaster] = {}
        self.gap = 0.0
        self.schedules: dict[str, dict[Pool, PoolSchedule]] = {}

    def weeks(self) -> dict[str, Week]:
        """Serve the week by each policy."""
        world, loads, pools = self.world, self.loads, policies.splits(self.service)[SPLIT]
        (whole,) = policies.splits(self.service)["one pool"]
        peak = {whole: policies.peak(world, pool_load(self.week, whole), whole, PARALLEL[-1])}
        hindsight, self.gap = policies.hindsight(world, self.week, pools, PARALLEL, ClockPolicy.LAW)
        self.schedules = {
            "peak": peak,
            "clocks": peak,
            "replicas": policies.forecast(world, loads, (whole,), PARALLEL[-1:], ClockPolicy.HIGHEST),
            "dynamollm": policies.dynamollm(world, loads),
            "ours": self._ours(watch=self.errors.__setitem__),
            "ours_spare": self._ours(spare=1),
            "hindsight": hindsight,
        }
        return {name: policies.served(world, loads, self.schedules[name], clocks_of(name)) for name in POLICIES}

    def _ours(self, **changes: Any) -> dict[Pool, PoolSchedule]:
        pools = policies.splits(self.service)[SPLIT]
        return policies.forecast(self.world, self.loads, pools, PARALLEL, ClockPolicy.LAW, **changes)

    def splits(self) -> dict[str, tuple[int, float]]:
        """Pools of each split, and kWh of the best plan of the week before, at known load."""
        found = {}
        for name, pools in policies.splits(self.service).items():
            schedules, _ = policies.hindsight(self.world, self.before, pools, PARALLEL, ClockPolicy.LAW)
            two = {one: np.concatenate([load, load]) for one, load in self.before.items()}
            done = policies.served(self.world, two, schedules, ClockPolicy.LAW)
            found[name] = len(pools), done.joules / 3.6e6
        return found

    def sampled(self, policy: str, seed: int) -> tuple[float, float, float, float]:
        """Serve some minutes request by request: joules and attainment of the engines, and of steady minutes."""
        draw, world = random.Random(seed), self.world
        joules = kept = count = steady_j = steady_late = 0.0
        for _ in range(SAMPLES):
            begin = draw.randrange(0, WEEK_MIN - SAMPLE_MIN)
            begin -= begin % 5
            for pool, schedule in self.schedules[policy].items():
                gpus, replicas = int(schedule.gpus[begin]), int(schedule.replicas[begin])
                load = pool_load(self.week, pool)[begin : begin + SAMPLE_MIN]
                requests = self._drawn(pool, load, draw)
                if not requests or not replicas:
                    continue
                machine = world.machines[gpus]
                setting = Setting(machine, MODELS["h100"].driver, replicas, seed)
                done = run(setting, requests, self._controller(policy, pool, machine), tail_s=0.0)
                joules += done.joules * 60.0 * SAMPLE_MIN / done.seconds
                kept += attainment(done.served, OBJECTIVE, machine).percent / 100.0 * len(requests)
                count += len(requests)
                fluid = world.fluid(pool, gpus, clocks_of(policy))
                minutes = fluid.serve(load, np.full(SAMPLE_MIN, replicas))
                steady_j += float(minutes.joules.sum())
                steady_late += float(minutes.late.sum() / max(1e-9, minutes.requests.sum())) * len(requests)
        return joules, 100.0 * kept / count, steady_j, 100.0 * (1.0 - steady_late / count)

    def _drawn(self, pool: Pool, load: Floats, draw: random.Random) -> list[Request]:
        together = [request for name in pool for request in self.service.requests[name]]
        found = []
        for minute, rate in enumerate(load):
            now_s, end_s = 60.0 * minute, 60.0 * (minute + 1)
            while rate > 0.0 and (now_s := now_s + draw.expovariate(float(rate))) < end_s:
                one = draw.choice(together)
                found.append(Request(now_s, one.prompt_tokens, one.output_tokens))
        return found

    def _controller(self, policy: str, pool: Pool, machine: Machine) -> Callable[[int], Controller]:
        if policy in {"peak", "replicas"}:
            return lambda _: Fixed()
        if policy == "dynamollm":
            return lambda _: DynamoLlm(machine, OBJECTIVE)
        tokens = self.service.request_class(pool).prompt_tokens
        try:
            table = complete_table(machine, OBJECTIVE, tokens, MODELS["h100"].driver.latency.p50_s)
        except NoTable:
            return lambda _: Fixed()
        return lambda _: Law(table, OBJECTIVE, machine)


def clocks_of(policy: str) -> ClockPolicy:
    """How a policy sets clocks."""
    return {"peak": ClockPolicy.HIGHEST, "replicas": ClockPolicy.HIGHEST, "dynamollm": ClockPolicy.SINGLE}.get(
        policy, ClockPolicy.LAW
    )


def benches() -> Iterator[tuple[str, Bench]]:
    """Every load, by name."""
    machines = {gpus: Machine("h100", "llama-3.1-70b", gpus) for gpus in PARALLEL}
    for trace, shape in SHAPES.items():
        requests = read_trace(DATA / f"AzureLLMInferenceTrace_{trace}.csv")
        world = World(Service.of_trace(requests, shape), LIMITS, machines)
        for seed in range(1, WEEKS + 1):
            yield f"{trace}_{seed}", Bench(world, hour=False, seed=seed)
        yield f"{trace}_hour", Bench(world, hour=True, seed=0)


def figures() -> Result:
    """Measure every load, store it, and return the figures."""
    kept: dict[str, Result] = {}
    for name, bench in benches():
        weeks = bench.weeks()
        outcomes = {policy: _outcome(week, weeks[BASELINE]) for policy, week in weeks.items()}
        error = next(iter(bench.errors.values())).error()
        kept[name] = {
            "outcomes": {policy: asdict(outcome) for policy, outcome in outcomes.items()},
            "over_hindsight_percent": 100.0 * (weeks["ours"].joules / weeks["hindsight"].joules - 1.0),
            "gap_percent": 100.0 * bench.gap,
            "forecast": asdict(error),
        }
        if name.endswith("_1"):
            kept[name]["splits"] = bench.splits()
            kept[name]["sampled"] = {one: bench.sampled(one, 1) for one in ("peak", "dynamollm", "ours")}
            kept[name]["watts"] = {one: weeks[one].watts[: WEEK_MIN // 7 * 3 : 5].tolist() for one in weeks}
            kept[name]["load"] = pool_load(bench.week, tuple(bench.week))[: WEEK_MIN // 7 * 3 : 5].tolist()
        STORE.parent.mkdir(parents=True, exist_ok=True)
        STORE.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    return {**_summary(kept), **speed(), **beside_autoscaler()}


def _outcome(week: Week, baseline: Week) -> Outcome:
    return Outcome(
        100.0 * (week.joules / baseline.joules - 1.0),
        week.attainment_percent,
        week.gpu_hours,
        week.starts,
        week.churn_percent,
    )


def _summary(kept: dict[str, Result]) -> Result:
    """Return means over the made-up weeks, and the worst of all loads."""
    weeks = [one for name, one in kept.items() if not name.endswith("_hour")]
    found: Result = {}
    for policy in POLICIES:
        for what in ("energy", "attainment"):
            values = [one["outcomes"][policy][f"{what}_percent"] for one in weeks]
            found[f"serving_week_{what}_percent_{policy}"] = figure(float(np.mean(values)), "%")
    over = [one["over_hindsight_percent"] for one in kept.values()]
    found["serving_week_over_hindsight_percent"] = figure(float(np.mean(over)), "%")
    found["serving_week_over_hindsight_percent_worst"] = figure(max(over), "%")
    churn = [one["outcomes"]["ours"]["churn_percent"] for one in weeks]
    found["serving_replica_churn_percent"] = figure(float(np.mean(churn)), "%")
    wrong = [one["forecast"]["absolute_percent"] for one in weeks]
    found["serving_forecast_error_percent"] = figure(float(np.mean(wrong)), "%")
    sampled = [values for one in weeks for values in one.get("sampled", {}).values()]
    found["serving_week_steady_error_percent"] = figure(
        max(100.0 * abs(steady / engines - 1.0) for engines, _, steady, _ in sampled), "%"
    )
    found["serving_week_steady_attainment_points"] = figure(
        max(abs(steady - engines) for _, engines, _, steady in sampled), "points"
    )
    return found


def beside_autoscaler() -> Result:
    """For what share of a day replicas differ from those without us, beside an autoscaler on running requests, and for
    what share they would if it were not read.

    The greatest share of all days and least numbers of replicas where it is read, otherwise the mean; requests take 1.3
    times as long at lowered clocks.
    """
    apart = {True: list[float](), False: list[float]()}
    for seed, least in product(range(3), (1, 2, 4)):
        load = autoscaled_pool.day(seed)
        without = autoscaled_pool.walk(load, 1.0, least=least)
        for restrained, shares in apart.items():
            with_us = autoscaled_pool.walk(load, 1.3, least=least, restrained=restrained)
            shares.append(autoscaled_pool.share_apart(with_us, without)[1])
    return {
        "serving_replica_churn_beside_hpa_percent": figure(100.0 * max(apart[True]), "%"),
        "serving_replica_churn_beside_unread_hpa_percent": figure(100.0 * float(np.mean(apart[False])), "%"),
    }


def speed() -> Result:
    """How long a day of 24 epochs, 9 pools, 3 parallelisms and 10 clocks takes, and what its gap is."""
    asked = largest()
    begun_s = time.perf_counter()
    done = plan(asked)
    took_s = time.perf_counter() - begun_s
    return {
        "serving_plan_s_24h": figure(took_s, "s"),
        "serving_plan_gap_percent": figure(100.0 * done.gap, "%"),
    }


def largest(min_up: int = 2) -> PlanRequest:
    """A day of nine pools whose loads move by the hour, made up; replicas stay up for two hours."""
    random_ = np.random.default_rng(1)
    hours, pools = np.arange(24), []
    for number in range(9):
        level = random_.uniform(2.0, 60.0)
        load = level * (0.55 + 0.45 * np.sin((hours - 8) / 24 * 2 * np.pi)) * random_.uniform(0.8, 1.2, 24)
        variants = tuple(_variant(gpus) for gpus in PARALLEL)
        pools.append(PoolLoad(f"class {number}", variants, tuple(load.tolist()), tuple((1.2 * load).tolist())))
    return PlanRequest(tuple(pools), 3600.0, min_up=min_up)


def _variant(gpus: int) -> Variant:
    machine = Machine("h100", "llama-3.1-70b", gpus)
    clocks = [mhz for mhz in machine.clocks_mhz if (machine.clocks_mhz[-1] - mhz) % 120 == 0][-10:]
    replica = ReplicaModel(gpus, MachineSteps(machine, 500.0), machine.clocks_mhz[-1], machine.kv_capacity)
    points = replica.points(RequestClass(1_000.0, 200.0, 1_100.0), LIMITS, clocks)
    return Variant(gpus, points, policies.START_S, policies.START_S * machine.costs(machine.clocks_mhz[-1]).idle_w)


def figure(value: float, unit: str) -> Result:
    """Return a figure without a peer."""
    return {"value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


def serving_pool() -> Result:
    """Measure, if Azure's traces are there."""
    return figures() if DATA.is_dir() else speed()


FIGURES: Final = {"serving_pool": serving_pool}
