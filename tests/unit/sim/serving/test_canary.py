"""What a canary shows makes a table, or the reason why not."""

from __future__ import annotations

import pytest

from perseus_sim.serving.canary import NoTable, canary_table, complete_table, ladder
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.objective import Objective
from perseus_sim.serving.rehearsal import poisson

MACHINE = Machine("h100", "llama-3.1-70b", 4)
OBJECTIVE = Objective()


@pytest.mark.slow
def test_a_canary_learns_what_an_engine_that_is_known_at_every_load_says() -> None:
    requests = poisson(6.0, 1000.0, 200.0, seconds=120.0, seed=3)
    learned = canary_table(MACHINE, OBJECTIVE, requests, replicas=3, switch_s=0.03)
    known = complete_table(MACHINE, OBJECTIVE, 1000.0, 0.03)
    step = ladder(MACHINE)[1] - ladder(MACHINE)[0]
    for running in (2, 8, 16):
        assert abs(learned.clock_mhz(running, 0.02) - known.clock_mhz(running, 0.02)) <= step
    assert abs(learned.boosted_mhz(3) - known.boosted_mhz(3)) <= step


def test_too_few_requests_make_no_table() -> None:
    with pytest.raises(NoTable, match="TooFew"):
        canary_table(MACHINE, OBJECTIVE, poisson(1.0, 100.0, 5.0, seconds=2.0, seed=1), replicas=1, switch_s=0.03)


def test_a_table_rises_with_the_queue_and_the_load() -> None:
    table = complete_table(MACHINE, OBJECTIVE, 1000.0, 0.03)
    top = MACHINE.clocks_mhz[-1]
    boosts = [mhz or top for mhz in table.boost_mhz]
    assert boosts == sorted(boosts)
    floors = [table.clock_mhz(running, 0.1) or top for running in (1, 16, 64, 256)]
    assert floors == sorted(floors)
