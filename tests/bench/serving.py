"""Clocks of serving replicas: the law and its rivals in one simulator, on Azure's traces.

Each cell is a trace at a load on so many replicas of Llama 3.1 70B, four H100s each. The middle of the ranges is
varied one at a time: loads, knees, watts, clock latencies, replicas. The best fixed clock is chosen in hindsight: of
those whose attainment is not below the law's, the one of least energy. ``make bench ONLY=serving`` stores the cells;
``python -m tests.bench.serving_page`` writes the page.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from tests.bench.closed_loop import ClosedLoop
from tests.bench.serving_hindsight import POLICIES, Minutes

from perseus_agent.serving.law import EngineLaw, LawSettings
from perseus_core.serving import ClockTable, EngineSample
from perseus_core.units import us_from_s
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.switching import DriverModel
from perseus_sim.serving.canary import canary_table
from perseus_sim.serving.controllers import DynamoLlm, Fixed, GreenLlm, Law, ThrottLlem, Voltana
from perseus_sim.serving.fleet import Controller, Run, Setting, run
from perseus_sim.serving.machine import Assumptions, Machine
from perseus_sim.serving.objective import Attainment, Objective, attainment
from perseus_sim.serving.requests import Request, piece, scaled, with_burst
from perseus_sim.serving.traces import read_trace

Result = dict[str, Any]
STORE: Final = Path("out/serving/cells.json")
SUMMARY: Final = STORE.with_name("summary.json")
DATA: Final = Path(__file__).resolve().parents[3] / "shared" / "data" / "serving"
OBJECTIVE: Final = Objective()
PIECE_S: Final = 900.0
"""Of a trace that each cell serves: its first fifteen minutes."""
REPLICAS: Final = {"conv": 3, "code": 12}
WHOLE: Final = {"conv": 1.5, "code": 1.25}
"""Load 1, over the trace as it is: with more, the default clocks would miss some limits."""
LOADS: Final = (0.3, 0.65, 1.0)
CAPS_W: Final = (500, 400, 300)
LATENCIES: Final = {"5 ms": (0.005, 0.014), "30 ms": (0.030, 0.100), "100 ms": (0.100, 0.300)}
"""Median and 99th percentile: an A100's, a Hopper's as assumed, and the worst that anybody says of it."""
SAMPLES: Final = 400
"""Of the bootstrap over minutes."""


@dataclass(frozen=True)
class Cell:
    """One setting."""

    trace: str
    load: float = 1.0
    replicas: int = 0
    knee_mhz: int = 1090
    watts: str = "middle"
    latency: str = "30 ms"

    @property
    def name(self) -> str:
        """Its name in figures."""
        return f"{self.trace}_{self.load:g}_{self.replicas}_{self.knee_mhz}_{self.watts}_{self.latency.split()[0]}"


@dataclass(frozen=True)
class Outcome:
    """What a policy did in a cell, in percent; energy against the default clocks, with a 95 % interval."""

    energy_percent: float
    low_percent: float
    high_percent: float
    attainment_percent: float
    late_first_token_percent: float
    slow_tokens_percent: float
    changes_per_s: float


def cells() -> Iterator[Cell]:
    """Every cell: the middle of the ranges at three loads, then one range after the other."""
    for trace, replicas in REPLICAS.items():
        middle = Cell(trace, replicas=replicas)
        yield from (replace(middle, load=load) for load in LOADS)
        yield from (replace(middle, knee_mhz=knee) for knee in (900, 1300))
        yield from (replace(middle, watts=watts) for watts in ("low", "high"))
        yield from (replace(middle, latency=latency) for latency in ("5 ms", "100 ms"))
    yield from (Cell("conv", load=count / 3, replicas=count) for count in (1, 2, 8))


@cache
def requests_of(trace: str, load: float, seed: int = 1) -> tuple[Request, ...]:
    """A piece of one of Azure's traces at a load."""
    whole = read_trace(DATA / f"AzureLLMInferenceTrace_{trace}.csv")
    return tuple(piece(scaled(whole, WHOLE[trace] * load, seed), 0.0, PIECE_S))


def driver_of(cell: Cell) -> DriverModel:
    """The driver of a cell's GPUs."""
    driver = MODELS["h100"].driver
    p50_s, p99_s = LATENCIES[cell.latency]
    return replace(driver, latency=replace(driver.latency, p50_us=us_from_s(p50_s), p99_us=us_from_s(p99_s)))


def machine_of(cell: Cell, power_limit_w: float | None = None) -> Machine:
    """The machine of a cell's replicas."""
    return Machine("h100", "llama-3.1-70b", 4, Assumptions(cell.knee_mhz, cell.watts, power_limit_w))


class _Trial:
    """Runs policies in one cell against its default clocks."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.machine = machine_of(cell)
        self._requests = requests_of(cell.trace, cell.load)
        self.highest = self._run(self.machine, lambda _: Fixed())

    def _run(self, machine: Machine, controller: Callable[[int], Controller]) -> Run:
        return run(Setting(machine, driver_of(self._cell), self._cell.replicas), self._requests, controller)

    def outcome(self, controller: Callable[[int], Controller], machine: Machine | None = None) -> Outcome:
        """Run a policy."""
        done = self._run(machine or self.machine, controller)
        kept: Attainment = attainment(done.served, OBJECTIVE, self.machine)
        low, high = _interval(done.joules_by_minute, self.highest.joules_by_minute)
        return Outcome(
            100 * (done.joules / self.highest.joules - 1),
            low,
            high,
            kept.percent,
            kept.late_first_token_percent,
            kept.slow_tokens_percent,
            done.calls_per_s / self.machine.parallel,
        )


def _interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """95 % of the relative change of energy, by drawing minutes again."""
    chance = random.Random(1)
    minutes = range(min(len(ours), len(theirs)))
    changes = []
    for _ in range(SAMPLES):
        drawn = chance.choices(minutes, k=len(minutes))
        changes.append(100 * (sum(ours[i] for i in drawn) / sum(theirs[i] for i in drawn) - 1))
    changes.sort()
    return changes[int(0.025 * SAMPLES)], changes[int(0.975 * SAMPLES) - 1]


def measure(cell: Cell) -> dict[str, Outcome]:
    """Measure every policy in a cell, by name."""
    trial = _Trial(cell)
    machine = trial.machine
    table = canary_table(
        machine, OBJECTIVE, requests_of(cell.trace, cell.load), cell.replicas, LATENCIES[cell.latency][0]
    )
    policies: dict[str, Callable[[int], Controller]] = {
        "highest": lambda _: Fixed(),
        "law": lambda _: Law(table, OBJECTIVE, machine),
        "dynamollm": lambda _: DynamoLlm(machine, OBJECTIVE),
        "throttllem": lambda _: ThrottLlem(machine, OBJECTIVE),
        "voltana": lambda _: Voltana(machine, OBJECTIVE),
        "greenllm": lambda _: GreenLlm(machine, OBJECTIVE),
    }
    outcomes = {name: trial.outcome(controller) for name, controller in policies.items()}
    for cap_w in CAPS_W:
        outcomes[f"cap_{cap_w}"] = trial.outcome(lambda _: Fixed(), machine_of(cell, cap_w))
    for clock_mhz in table.ladder_mhz[::2]:
        outcomes[f"fixed_{clock_mhz}"] = trial.outcome(lambda _, clock_mhz=clock_mhz: Fixed(clock_mhz))
    return outcomes


def best_fixed(outcomes: dict[str, Outcome]) -> Outcome:
    """The fixed clock of least energy whose attainment is not below the law's."""
    law = outcomes["law"]
    kept = [
        outcome
        for name, outcome in outcomes.items()
        if name.startswith(("fixed_", "highest")) and outcome.attainment_percent >= law.attainment_percent
    ]
    return min(kept, key=lambda outcome: outcome.energy_percent, default=outcomes["highest"])


def dominating(outcomes: dict[str, Outcome]) -> list[str]:
    """The rivals that have less energy and a higher attainment than the law."""
    law = outcomes["law"]
    return [
        name
        for name, outcome in outcomes.items()
        if name != "law"
        and outcome.energy_percent < law.energy_percent
        and outcome.attainment_percent > law.attainment_percent
    ]


def stored() -> dict[str, tuple[Cell, dict[str, Outcome]]]:
    """Read the stored cells, by name."""
    kept = json.loads(STORE.read_text(encoding="utf-8"))
    return {
        name: (Cell(**one["cell"]), {policy: Outcome(**values) for policy, values in one["outcomes"].items()})
        for name, one in kept.items()
    }


def figures() -> Result:
    """Measure every cell, store it, and return the figures."""
    results: dict[str, Result] = {}
    kept = {}
    for cell in cells():
        outcomes = measure(cell)
        kept[cell.name] = {"cell": asdict(cell), "outcomes": {name: asdict(one) for name, one in outcomes.items()}}
        STORE.parent.mkdir(parents=True, exist_ok=True)
        STORE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        if cell == Cell(cell.trace, replicas=REPLICAS[cell.trace]):
            for name, one in (*outcomes.items(), ("best_fixed", best_fixed(outcomes))):
                results[f"serving_energy_percent_{cell.trace}_{name}"] = _figure(one.energy_percent, "%")
                results[f"serving_attainment_percent_{cell.trace}_{name}"] = _figure(one.attainment_percent, "%")
    return {**results, **summary()}


def summary() -> Result:
    """Measure what is not a cell, and store it."""
    results = {**clairvoyant(), **closed_loop(), **burst(), **speed()}
    SUMMARY.write_text(json.dumps({name: figure["value"] for name, figure in results.items()}) + "\n", encoding="utf-8")
    return results


def clairvoyant() -> Result:
    """The law beside what hindsight finds and what nothing saves more than, on minutes of one replica."""
    cell = Cell("conv", replicas=1)
    machine = machine_of(cell)
    table = canary_table(machine, OBJECTIVE, requests_of("conv", 1.0), 3, LATENCIES[cell.latency][0])
    setting = Setting(machine, driver_of(cell), 1)
    results: Result = {}
    for load in LOADS:
        minutes = Minutes(setting, OBJECTIVE, table, requests_of("conv", load)).measure()
        for policy in POLICIES:
            results[f"serving_minutes_energy_percent_{load:g}_{policy}"] = _figure(-100 * minutes.saved(policy), "%")
    law, hindsight, bound = (-minutes.saved(policy) for policy in ("law", "hindsight", "bound"))
    results["serving_share_of_clairvoyant_percent"] = _figure(100 * law / hindsight, "%")
    results["serving_share_of_bound_percent"] = _figure(100 * law / bound, "%")
    return results


def closed_loop() -> Result:
    """What is saved in the first quarter of an hour of replicas of which nothing is known, and when a table comes."""
    results: Result = {}
    for trace, replicas in REPLICAS.items():
        cell = Cell(trace, replicas=replicas)
        trial = _Trial(cell)
        loop = ClosedLoop(Setting(trial.machine, driver_of(cell), replicas), OBJECTIVE)
        outcome = trial.outcome(loop.controller)
        results[f"serving_energy_percent_{trace}_closed_loop"] = _figure(outcome.energy_percent, "%")
        results[f"serving_attainment_percent_{trace}_closed_loop"] = _figure(outcome.attainment_percent, "%")
        first_s = loop.tables_s[0] if loop.tables_s else math.inf
        results[f"serving_first_table_seconds_{trace}"] = _figure(first_s, "s")
    return results


def burst() -> Result:
    """How far the attainment is below that of the default clocks where a minute has three times the requests."""
    cell = Cell("conv", load=2 / 3, replicas=3)
    machine = machine_of(cell)
    calm = requests_of(cell.trace, cell.load)
    table = canary_table(machine, OBJECTIVE, calm, cell.replicas, LATENCIES[cell.latency][0])
    requests = with_burst(calm, begin_s=300.0, length_s=60.0, factor=3.0, seed=1)
    setting = Setting(machine, driver_of(cell), cell.replicas)
    highest, law = (
        attainment(run(setting, requests, controller).served, OBJECTIVE, machine).percent
        for controller in (lambda _: Fixed(), lambda _: Law(table, OBJECTIVE, machine))
    )
    return {"serving_burst_attainment_points": _figure(law - highest, "points")}


def speed() -> Result:
    """How long a decision takes, and how much is simulated in a minute."""
    cell = Cell("conv", replicas=3)
    machine, requests = machine_of(cell), requests_of("conv", 1.0)
    table = canary_table(machine, OBJECTIVE, requests, cell.replicas, LATENCIES[cell.latency][0])
    begun_s = time.perf_counter()
    run(Setting(machine, driver_of(cell), 3), requests, lambda _: Law(table, OBJECTIVE, machine))
    took_s = time.perf_counter() - begun_s
    return {
        "serving_law_us_per_decision": _figure(_decision_us(table, machine), "us"),
        "serving_simulated_hours_per_minute": _figure(3 * PIECE_S / 3600 / (took_s / 60), "h"),
    }


def _decision_us(table: ClockTable, machine: Machine) -> float:
    """Median of a decision's time, with one sample."""
    law = EngineLaw(table, LawSettings(), machine.clocks_mhz[-1])
    times = []
    for index in range(20_000):
        sample = EngineSample(0.1 * index, index % 7 == 0, index % 3 == 0, index % 40, 0.3, 0, (0.4,), (0.6,))
        begun_s = time.perf_counter()
        law.decide(0.1 * index, [sample])
        times.append(time.perf_counter() - begun_s)
    times.sort()
    return 1e6 * times[len(times) // 2]


def _figure(value: float, unit: str) -> Result:
    return {"value": value, "unit": unit, "peer": None, "peer_value": None, "ratio": None}


def serving() -> Result:
    """Measure, if Azure's traces are there."""
    return figures() if DATA.is_dir() else {}


FIGURES = {"serving": serving}
