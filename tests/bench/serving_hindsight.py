"""What could be had: the law beside what hindsight finds, and beside what nothing can save more than.

On one replica and minutes of its trace, at the loads of ``tests.bench.serving``, with as many misses as the law had, or
the highest clock where that had more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.clairvoyant import least_energy
from tests.bench.hindsight import Beam, Hindsight

from perseus_core.serving import ClockTable
from perseus_sim.serving.controllers import Fixed, Law
from perseus_sim.serving.engine import Engine
from perseus_sim.serving.fleet import Asked, Controller, Run, Setting, run
from perseus_sim.serving.objective import Objective, attainment
from perseus_sim.serving.requests import Request, piece, scaled

BEGINS_S: Final = (0.0, 300.0, 600.0)
"""Of the minutes."""
PIECE_S: Final = 60.0
STEP_S: Final = 0.2
WIDTH: Final = 12
POLICIES: Final = ("highest", "fixed", "law", "hindsight", "bound")


class _Recorded:
    """A controller, and the highest clock that it asked for in each step of the search."""

    def __init__(self, controller: Controller, highest_mhz: int) -> None:
        self.period_s = controller.period_s
        self.clocks_mhz = [highest_mhz]
        self._controller, self._highest_mhz = controller, highest_mhz

    def decide(self, now_s: float, engine: Engine) -> Asked:
        """Decide as it does."""
        asked = self._controller.decide(now_s, engine)
        step, clock_mhz = int(now_s / STEP_S), asked.clock_mhz or self._highest_mhz
        while len(self.clocks_mhz) <= step:
            self.clocks_mhz.append(clock_mhz)
        self.clocks_mhz[step] = max(self.clocks_mhz[step], clock_mhz)
        return asked


@dataclass(frozen=True)
class Hindsights:
    """Energy of all minutes together, in joules, by policy."""

    joules: dict[str, float]

    def saved(self, policy: str) -> float:
        """Share of the energy at the highest clock that a policy saves."""
        return 1 - self.joules[policy] / self.joules["highest"]


class Minutes:
    """The minutes of one load.

    Args:
        setting: one replica.
        objective: its limits.
        table: of the law.
        requests: of three replicas, a third of which it gets.
    """

    def __init__(self, setting: Setting, objective: Objective, table: ClockTable, requests: Sequence[Request]) -> None:
        self._setting, self._objective, self._table = setting, objective, table
        self._requests = scaled(requests, 1 / 3, 3)

    def measure(self) -> Hindsights:
        """Serve them by every policy."""
        joules = dict.fromkeys(POLICIES, 0.0)
        for begin_s in BEGINS_S:
            for policy, taken in self._energies(tuple(piece(self._requests, begin_s, begin_s + PIECE_S))):
                joules[policy] += taken
        return Hindsights(joules)

    def _energies(self, requests: Sequence[Request]) -> Iterator[tuple[str, float]]:
        setting, objective, machine, table = self._setting, self._objective, self._setting.machine, self._table
        recorded = _Recorded(Law(table, objective, machine), machine.clocks_mhz[-1])
        law = run(setting, requests, lambda _: recorded)
        highest = run(setting, requests, lambda _: Fixed())
        missed = max(map(self._missed, (law, highest)))
        clocks = (*table.ladder_mhz, machine.clocks_mhz[-1])
        fixed = [run(setting, requests, lambda _, mhz=mhz: Fixed(mhz)) for mhz in clocks]
        tokens = sum(one.output_tokens for one in requests)
        prompts = sum(one.prompt_tokens for one in requests)
        beam = Beam(clocks, STEP_S, WIDTH, 0.2 * law.joules / prompts, 0.8 * law.joules / tokens)
        yield "highest", highest.joules
        yield "fixed", min(one.joules for one in fixed if self._missed(one) <= missed)
        yield "law", law.joules
        guides = ((clocks[-1],), recorded.clocks_mhz)
        yield "hindsight", Hindsight(machine, requests, objective, missed).search(beam, guides).joules
        yield "bound", least_energy(machine, requests, objective, missed, clocks, bin_s=STEP_S).joules

    def _missed(self, done: Run) -> int:
        kept = attainment(done.served, self._objective, self._setting.machine).percent
        return round((1 - kept / 100) * len(done.served))
