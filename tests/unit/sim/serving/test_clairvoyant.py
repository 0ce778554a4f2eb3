"""No controller saves more than the bound, and the bound is no emptier than it must be."""

from __future__ import annotations

import pytest
from tests.bench.clairvoyant import least_energy

from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.canary import complete_table, ladder
from perseus_sim.serving.controllers import Fixed, Law
from perseus_sim.serving.fleet import Setting, run
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.rehearsal import poisson
from perseus_sim.serving.requests import Request

MACHINE = Machine("h100", "llama-3.1-8b", 1)
OBJECTIVE = Objective()
SETTING = Setting(MACHINE, MODELS["h100"].driver, 1)
REQUESTS = poisson(3.0, 800.0, 60.0, seconds=12.0, seed=5)
CLOCKS = (*ladder(MACHINE)[::3], MACHINE.clocks_mhz[-1])


def misses(served: tuple[object, ...]) -> int:
    return sum(
        OBJECTIVE.first_token_share(one, MACHINE) > 1 or OBJECTIVE.token_share(one) > 1  # type: ignore[arg-type]
        for one in served
    )


@pytest.mark.parametrize("policy", ["highest", "fixed", "law"])
def test_no_controller_takes_less_energy_than_the_bound(policy: str) -> None:
    table = complete_table(MACHINE, OBJECTIVE, 800.0, 0.03)
    done = run(
        SETTING,
        REQUESTS,
        lambda _: {
            "highest": Fixed(),
            "fixed": Fixed(CLOCKS[0]),
            "law": Law(table, OBJECTIVE, MACHINE),
        }[policy],
        tail_s=5.0,
    )
    clocks = sorted({*ladder(MACHINE), MACHINE.clocks_mhz[-1]})
    bound = least_energy(MACHINE, REQUESTS, OBJECTIVE, misses(done.served), clocks, tail_s=5.0)
    assert bound.joules * done.seconds / bound.seconds <= done.joules


def test_more_clocks_and_more_misses_never_raise_the_bound() -> None:
    few = least_energy(MACHINE, REQUESTS, OBJECTIVE, 0, CLOCKS[1:], tail_s=5.0).joules
    assert least_energy(MACHINE, REQUESTS, OBJECTIVE, 0, CLOCKS, tail_s=5.0).joules <= few * (1 + 1e-9)
    assert least_energy(MACHINE, REQUESTS, OBJECTIVE, 5, CLOCKS[1:], tail_s=5.0).joules <= few * (1 + 1e-9)


def test_one_request_costs_what_its_steps_cost_at_the_only_clock() -> None:
    alone = (Request(0.0, 512, 40),)
    done = run(SETTING, alone, lambda _: Fixed(CLOCKS[0]), tail_s=5.0)
    bound = least_energy(MACHINE, alone, OBJECTIVE, 0, CLOCKS[:1], tail_s=5.0)
    assert bound.joules == pytest.approx(done.joules, rel=0.15)


def test_what_cannot_be_served_in_time_is_said() -> None:
    burst = tuple(Request(0.0, 20_000, 1) for _ in range(20))
    with pytest.raises(RuntimeError, match="cannot be served"):
        least_energy(MACHINE, burst, OBJECTIVE, 0, CLOCKS[:1], tail_s=1.0)
