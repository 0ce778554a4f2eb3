"""Replicas of which nothing is known begin at the default clocks, and save once their canary has shown enough."""

from __future__ import annotations

import itertools

import pytest
from tests.bench import closed_loop
from tests.bench.closed_loop import ClosedLoop

from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import ladder
from perseus_sim.serving.controllers import Fixed
from perseus_sim.serving.engine import Engine
from perseus_sim.serving.fleet import Asked, Controller, Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Objective, attainment
from perseus_sim.serving.rehearsal import poisson
from perseus_solver.serving import FitResult, Verdict

MACHINE = Machine("h100", "llama-3.1-70b", 4)
SETTING = Setting(MACHINE, MODELS["h100"].driver, replicas=2)
OBJECTIVE = Objective()
REQUESTS = poisson(3.0, 600.0, 150.0, seconds=300.0, seed=5)


class Watched(Controller):
    """Notes the clocks that a controller asks for."""

    def __init__(self, controller: Controller) -> None:
        self._controller, self.period_s = controller, controller.period_s
        self.asked: list[tuple[float, int]] = []

    def decide(self, now_s: float, engine: Engine) -> Asked:
        asked = self._controller.decide(now_s, engine)
        self.asked.append((now_s, asked.clock_mhz))
        return asked


def test_nothing_is_known_at_first_and_in_the_end_energy_is_saved_at_the_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closed_loop, "ladder", lambda machine: ladder(machine)[::3])  # a canary of two minutes
    loop, watched = ClosedLoop(SETTING, OBJECTIVE), list[Watched]()

    def controller(replica: int) -> Controller:
        watched.append(Watched(loop.controller(replica)))
        return watched[-1]

    done = run(SETTING, REQUESTS, controller)
    highest = run(SETTING, REQUESTS, lambda _: Fixed())
    assert loop.result is not None
    assert loop.result.verdict is Verdict.EXPLAINED
    [canary, other] = watched
    first_s = loop.tables_s[0]
    assert {mhz for now_s, mhz in other.asked if now_s < first_s} == {0}, "default clocks until there is a table"
    assert any(mhz for now_s, mhz in other.asked if now_s > first_s)
    tried = [mhz for now_s, mhz in canary.asked if now_s < loop.tables_s[-1]]
    assert tried[0] == 0
    changes = [mhz or MACHINE.clocks_mhz[-1] for mhz, before in zip(tried[1:], tried, strict=False) if mhz != before]
    assert all(after < before for before, after in itertools.pairwise(changes)), "downwards, none missed"
    assert done.joules < 0.8 * highest.joules
    assert attainment(done.served, OBJECTIVE, MACHINE).percent >= 99.0


def test_an_engine_that_is_not_explained_stays_at_its_default_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "fit", lambda windows, _: FitResult(Verdict.NOT_EXPLAINED, len(windows)))
    loop, watched = ClosedLoop(SETTING, OBJECTIVE), list[Watched]()

    def controller(replica: int) -> Controller:
        watched.append(Watched(loop.controller(replica)))
        return watched[-1]

    run(SETTING, [one for one in REQUESTS if one.arrival_s < 240.0], controller)
    assert loop.result is not None
    assert (loop.table, loop.tables_s) == (None, [])
    assert {mhz for _, mhz in watched[1].asked} == {0}


def test_a_canary_without_requests_shows_nothing_and_keeps_its_clock() -> None:
    loop = ClosedLoop(SETTING, OBJECTIVE)
    run(SETTING, (), loop.controller, tail_s=120.0)
    assert (loop.result, loop.table, loop.explored) == (None, None, False)
