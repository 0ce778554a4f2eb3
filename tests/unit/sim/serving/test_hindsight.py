"""What hindsight finds was run: it lies between the bound from below and every clock that never changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from tests.bench.clairvoyant import least_energy
from tests.bench.hindsight import Beam, Hindsight

from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import ladder
from perseus_sim.serving.controllers import Fixed
from perseus_sim.serving.engine import Served
from perseus_sim.serving.fleet import Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.rehearsal import poisson
from perseus_sim.serving.requests import Request

MACHINE = Machine("h100", "llama-3.1-8b", 1)
OBJECTIVE = Objective()
TAIL_S = 3.0
CLOCKS = (*ladder(MACHINE)[::6], MACHINE.clocks_mhz[-1])
REQUESTS = poisson(3.0, 800.0, 40.0, seconds=5.0, seed=5)
BEAM = Beam(CLOCKS, step_s=0.5, width=6, prompt_j=0.02, token_j=1.0)


def _fixed(clock_mhz: int, _: int) -> Fixed:
    return Fixed(clock_mhz)


def late(served: tuple[Served, ...], objective: Objective) -> int:
    return sum(objective.first_token_share(one, MACHINE) > 1 or objective.token_share(one) > 1 for one in served)


def test_it_lies_between_the_bound_and_every_fixed_clock_that_keeps_the_limits() -> None:
    hindsight = Hindsight(MACHINE, REQUESTS, OBJECTIVE, 0).search(BEAM, tail_s=TAIL_S)
    assert hindsight.misses == 0
    fixed = [run(Setting(MACHINE, MODELS["h100"].driver, 1), REQUESTS, partial(_fixed, mhz), TAIL_S) for mhz in CLOCKS]
    kept = [one.joules for one in fixed if not late(one.served, OBJECTIVE)]
    assert kept
    assert least_energy(MACHINE, REQUESTS, OBJECTIVE, 0, CLOCKS, tail_s=TAIL_S).joules <= hindsight.joules
    assert hindsight.joules <= 1.001 * min(kept)


def test_a_tighter_limit_costs_energy_and_a_missed_request_saves_some() -> None:
    tight = replace(OBJECTIVE, per_token_s=0.018, first_token_s=0.12, undisturbed=0.0)
    strict, loose, lax = (
        Hindsight(MACHINE, REQUESTS, objective, misses).search(BEAM, tail_s=TAIL_S).joules
        for objective, misses in ((tight, 0), (tight, 3), (OBJECTIVE, 0))
    )
    assert lax < loose < strict


def test_it_is_no_worse_than_its_guides_and_a_narrow_beam_leaves_them_where_that_pays() -> None:
    narrow = replace(BEAM, width=1, prices=(0.0,))
    hindsight = Hindsight(MACHINE, REQUESTS, OBJECTIVE, 0)
    for guide in ((CLOCKS[-1],), (CLOCKS[-1], CLOCKS[-1], CLOCKS[1])):
        alone = hindsight.search(replace(narrow, clocks_mhz=guide), (guide,), TAIL_S).joules
        assert hindsight.search(narrow, (guide,), TAIL_S).joules < alone


def test_limits_that_nothing_keeps_are_said() -> None:
    impossible = replace(OBJECTIVE, first_token_s=1e-4, undisturbed=0.0)
    with pytest.raises(RuntimeError, match="keeps the limits"):
        Hindsight(MACHINE, REQUESTS, impossible, 0).search(BEAM, tail_s=TAIL_S)


def test_what_is_not_served_by_the_end_has_missed() -> None:
    long = (Request(0.0, 100, 5_000),)
    assert Hindsight(MACHINE, long, OBJECTIVE, 1).search(replace(BEAM, step_s=2.0), tail_s=TAIL_S).misses == 1
