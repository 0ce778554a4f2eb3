"""The clock of a job under a PowerBudget while no plan wants one, and when no operator runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_operator.budgets.allocation import Share
from perseus_operator.families.training.features.power.resting_clock import resting_clock
from perseus_operator.nodes.actions import Acquire
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.solving.frontier import open_frontier
from perseus_operator.solving.request import SolveRequest, problem_of
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv
from perseus_solver.model.simulator import Simulator

HOLD_S = 600


def share(watts: float | None) -> Share:
    return Share("hall", watts, hold_s=HOLD_S)


@pytest.mark.parametrize(
    ("watts", "mhz"),
    [(10_000.0, 1410), (4_000.0, 1410), (3_999.0, 1200), (1_000.0, 900), (1.0, 900)],
    ids=["plenty", "exactly", "less", "little", "too little"],
)
def test_it_is_the_highest_at_which_the_share_cannot_be_exceeded(job: Any, watts: float, mhz: int) -> None:
    job.solve()
    assert resting_clock(share(watts), job.state.frontier, 2) == RestingClock(mhz, HOLD_S)


def test_without_a_budget_gpus_rest_at_their_default_clocks(job: Any) -> None:
    job.run()
    assert {node.resting for node in job.nodes} == {NO_RESTING_CLOCK}


def test_what_an_earlier_operator_asked_for_stays_until_share_and_frontier_are_known(job: Any) -> None:
    job.state.job.share_granted(share(None))
    job.start_pods()
    acquired = [action for action in job.act().actions if isinstance(action, Acquire)]
    assert [action.resting for action in acquired] == [RestingClock(0, HOLD_S)] * 2
    job.solve()
    job.connect_ranks()
    job.state.job.share_granted(share(1_200.0))
    assert job.settle().applied
    assert {node.resting for node in job.nodes} == {RestingClock(900, HOLD_S)}


def test_a_share_that_moves_moves_the_clock_and_leaves_the_plan(job: Any) -> None:
    job.state.job.share_granted(share(1_500.0))
    job.run()
    job.state.job.share_granted(share(2_500.0))
    asked = job.act().actions
    assert [type(action) for action in asked] == [Acquire, Acquire]
    assert {node.resting for node in job.nodes} == {RestingClock(1200, HOLD_S)}
    job.state.job.share_granted(None)
    job.settle()
    assert {node.resting for node in job.nodes} == {NO_RESTING_CLOCK}


def test_the_baseline_is_measured_at_default_clocks(make_job: Any) -> None:
    job = make_job(baselineIterations=2)
    job.state.job.share_granted(share(10_000.0))
    job.run()
    assert {node.resting for node in job.nodes} == {NO_RESTING_CLOCK}


def test_iterations_at_the_resting_clock_are_no_baseline(make_job: Any) -> None:
    job = make_job(baselineIterations=2)
    job.solve()
    job.start_pods()
    job.connect_ranks()
    job.act()
    [first, *_] = job.nodes
    first.lease_renewed(started_s=job.now_s, ttl_s=30.0, clock=LeaseClock(900, ()))
    job.train(1)
    assert job.state.history.unplanned == []
    first.lease_renewed(started_s=job.now_s, ttl_s=30.0, clock=None)
    job.train(2)
    assert [iteration.iteration for iteration in job.state.history.unplanned] == [2]


def test_no_plan_of_one_clock_draws_more_than_its_ceiling() -> None:
    request = SolveRequest(profile_csv(4, "a100", 1.3, 0.05), "1f1b", 4, 6, None, 80_000, 8)
    solved = open_frontier(solve_in_process(request), request, digest="d", solve_ms=1, restored=False)
    ceilings = dict(solved.view.ceilings_mw)
    assert list(ceilings.values()) == sorted(ceilings.values())
    problem = problem_of(request)
    simulator = Simulator(problem)
    for mhz, ceiling_mw in ceilings.items():
        ran = simulator.run(simulator.choice_of(np.full(problem.instructions, mhz)))
        mean_w = float(ran.energy_j / ran.iteration_time_s)
        assert mean_w <= ceiling_mw / 1000 <= 2 * mean_w
