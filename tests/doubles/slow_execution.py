"""One plan in one sample, executed instruction by instruction in Python, to compare the compiled execution with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from perseus_solver.rehearsal.execution import Draws, Executor
from perseus_solver.rehearsal.requests import Moment, Requests, Start


@dataclass
class Stage:
    """The GPUs of a stage. Changes on their way: when, to which clock, and whether for speed and for power."""

    clock: int
    changes: list[tuple[float, int, bool, bool]]
    power: int = field(init=False)
    asked: int = field(init=False)
    last_s: float = field(init=False)
    called_s: float = -math.inf
    free_s: float = -math.inf
    begin_s: float = 0.0
    end_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        self.power, self.asked, self.last_s = self.clock, self.clock, -math.inf
        if self.changes:
            self.asked, self.last_s = self.changes[-1][1], self.changes[-1][0]

    def begin(self, elapsed_s: float) -> None:
        """Begin an iteration."""
        self.changes = [(at_s - elapsed_s, clock, speed, power) for at_s, clock, speed, power in self.changes]
        for name in ("last_s", "called_s", "free_s", "begin_s", "end_s"):
            setattr(self, name, getattr(self, name) - elapsed_s)
        self.host_s = 0.0

    def take_effect(self) -> None:
        _, clock, speed, power = self.changes.pop(0)
        self.clock, self.power = clock if speed else self.clock, clock if power else self.power

    def come(self, at_s: float, clock: int, *, speed: bool, power: bool) -> None:
        self.last_s = max(at_s, self.last_s)
        self.changes.append((self.last_s, clock, speed, power))

    def ask(self, due_s: float, clock: int, normal: list[float], draws: Draws, one: int) -> bool:
        """Ask for a clock, which differs from the one before; return whether it takes a call."""
        rises, self.asked = clock > self.asked, clock
        if self.called_s > due_s and self.changes:
            steps = 1 if len(normal) == 1 else 2
            for k in range(max(len(self.changes) - steps, 0), len(self.changes)):
                at_s, _, speed, power = self.changes[k]
                self.changes[k] = (at_s, clock, speed, power)
            return False
        latencies, waited_s, takes_s = draws.latencies, 0.0, []
        for own in normal:
            takes_s.append(latencies.p50_s[clock] * math.exp(latencies.sigma[clock] * own) + waited_s)
            waited_s += latencies.call_s * math.exp(latencies.call_sigma * own)
        self.called_s = max(due_s, self.free_s)
        self.free_s = self.called_s + waited_s
        speed_s = self.called_s + (max(takes_s) if rises else min(takes_s))
        if len(normal) == 1:
            self.come(speed_s, clock, speed=True, power=True)
            return True
        power_s = self.called_s + takes_s[one % len(normal)]
        # A rise is drawn before it is felt by all, a fall felt before all draw less.
        self.come(min(speed_s, power_s), clock, speed=not rises, power=rises)
        self.come(max(speed_s, power_s), clock, speed=rises, power=not rises)
        return True


class SlowExecution:
    """Consecutive iterations of a plan in a sample."""

    def __init__(self, executor: Executor, start: Start, plan: int, sample: int) -> None:
        self._executor, self._plan, self._sample, self._elapsed_s = executor, plan, sample, 0.0
        stages = start.clock.shape[1]
        self._stages = []
        for stage in range(stages):
            own = slice(*start.first[plan * stages + stage : plan * stages + stage + 2])
            coming = zip(start.effect_s[own].tolist(), start.target[own].tolist(), strict=True)
            self._stages.append(Stage(int(start.clock[plan, stage]), [(at, to, True, True) for at, to in coming]))

    def iterate(self, planned: list[int], requests: Requests, draws: Draws) -> dict[str, Any]:
        """Return the figures of an iteration, and when each instruction begins and ends."""
        executor, problem, tables = self._executor, self._executor.problem, self._executor.tables
        mixed_w = tables.mixed_power_w(problem.blocking_power_w)
        before: list[list[tuple[int, float]]] = [[] for _ in planned]
        for a, b, delay_s in zip(problem.edge_from, problem.edge_to, problem.edge_delay_s, strict=True):
            before[b].append((int(a), float(delay_s)))
        for stage in self._stages:
            stage.begin(self._elapsed_s)
        found = dict.fromkeys(("energy_j", "computing_s", "below_s", "above_s", "calls"), 0.0)
        begins, ends = [0.0] * len(planned), [0.0] * len(planned)
        for row in executor.simulator.order.tolist():
            gpus, table = self._stages[problem.schedule.stage[row]], int(problem.option_of[row])
            left, begin_s = float(draws.work[row, self._sample]), max([0.0, *(ends[a] + d for a, d in before[row])])
            while gpus.changes and gpus.changes[0][0] <= begin_s:
                gpus.take_effect()
            takes_s = left * tables.time_s[table, gpus.clock]
            first, end = requests.first[self._plan * len(planned) + row :][:2].tolist()
            for slot, k in enumerate(range(first, end)):
                due_s = self._due_s(gpus, requests, k, begin_s, takes_s)
                if (clock := int(requests.clock[k])) not in (gpus.asked, -1):
                    normal = draws.normal[slot, row, self._sample].tolist()
                    found["calls"] += gpus.ask(due_s, clock, normal, draws, self._sample)
            while gpus.changes and gpus.changes[0][0] <= begin_s:
                gpus.take_effect()
            at_s = begin_s
            while True:
                end_s = at_s + left * tables.time_s[table, gpus.clock]
                until_s = min(end_s, gpus.changes[0][0] if gpus.changes else math.inf)
                found["energy_j"] += (until_s - at_s) * mixed_w[table, gpus.clock, gpus.power]
                found["computing_s"] += until_s - at_s
                found["below_s"] += (until_s - at_s) * (gpus.clock < planned[row])
                found["above_s"] += (until_s - at_s) * (gpus.clock > planned[row] >= 0)
                if until_s == end_s:
                    break
                left -= (until_s - at_s) / tables.time_s[table, gpus.clock]
                at_s = until_s
                gpus.take_effect()
            begins[row], ends[row] = gpus.begin_s, gpus.end_s = begin_s, end_s
        self._elapsed_s = max(ends) + problem.overhead_s
        waiting_s = problem.stages * self._elapsed_s - found["computing_s"]
        found["energy_j"] += problem.blocking_power_w * waiting_s
        return found | {"time_s": self._elapsed_s, "begin_s": begins, "end_s": ends}

    def _due_s(self, gpus: Stage, requests: Requests, k: int, begin_s: float, takes_s: float) -> float:
        after_s = float(requests.after_s[k])
        match Moment(requests.moment[k]):
            case Moment.AFTER_BEGIN:
                return begin_s + after_s
            case Moment.IN_WAIT:
                return min(gpus.begin_s + after_s, begin_s)
            case Moment.AT:
                return after_s
            case Moment.AT_END:
                return gpus.end_s
            case Moment.LAUNCHED:
                return begin_s + min(after_s, takes_s)
            case Moment.AHEAD:
                assert requests.share is not None
                share = float(requests.share[k])
                gpus.host_s = max(gpus.host_s + after_s, begin_s + share * takes_s if share >= 0 else -math.inf)
                return gpus.host_s
