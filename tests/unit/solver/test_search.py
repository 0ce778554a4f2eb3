"""The choice of the next price encloses the curve, and the local search never makes a plan worse."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.relaxation.composed import Composed
from perseus_solver.relaxation.curve import Engine
from perseus_solver.relaxation.prices import Uncertainty
from perseus_solver.schedules import build_schedule
from perseus_solver.search.descent import Descent
from perseus_solver.search.pool import Pool
from perseus_solver.search.sweeps import Sweeps


def problem_of(microbatches: int) -> Problem:
    random = np.random.default_rng(11)
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(4):
        for kind, work in (("forward", 1.0), ("backward", 2.1)):
            for clock in range(1400, 700, -140):
                seconds = work * (1 + 0.1 * stage) * 1400 / clock * (1 + 0.02 * random.random())
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * (90 + 310 * (clock / 1400) ** 2.5)}")
    schedule = build_schedule("1f1b", stages=4, microbatches=microbatches)
    return build_problem(read_profile("\n".join(rows) + "\n"), schedule, blocking_power_w=80.0)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(6)


def test_a_smooth_concave_curve_lies_within_the_uncertainty() -> None:
    price = np.array([0.0, 1.0, 3.0, 7.0, 20.0])
    uncertainty = Uncertainty.between(price, np.log1p(price), 0.0, 1.0)
    truth = np.log1p(uncertainty.price_w)
    assert (uncertainty.least_j <= truth).all()
    assert (truth <= uncertainty.most_j).all()
    assert (uncertainty.rise_j() > 0).all()
    assert ((price[:-1] < uncertainty.price_w) & (uncertainty.price_w < price[1:])).all()


def test_a_price_that_proves_less_than_a_lower_one_implies_is_only_a_limit() -> None:
    price, shortest_s = np.array([0.0, 1.0, 4.0, 16.0, 64.0]), 2.0
    value = np.minimum(3.0 * price, 10.0 + shortest_s * price)  # bends at 10
    value[3:] -= 7.0  # composed flows
    uncertainty = Uncertainty.between(price, value, shortest_s, 3.0)
    assert len(uncertainty.price_w) == 3
    assert uncertainty.price_w[-1] == pytest.approx(8.0)
    assert uncertainty.makespan_s[-1] == shortest_s
    assert uncertainty.rise_j()[-1] == pytest.approx(4.0)  # from 3 to 2 seconds at four watts more


def test_a_straight_piece_is_certain_and_a_bend_is_uncertain_at_one_price() -> None:
    price = np.array([0.0, 1.0, 2.0, 4.0, 5.0, 6.0])
    value = np.minimum(3.0 * price, 6.0 + price)  # bends at 3
    uncertainty = Uncertainty.between(price, value, 1.0, 3.0)
    assert uncertainty.rise_j() == pytest.approx([0, 0, 1.0, 0, 0])
    assert uncertainty.price_w[2] == pytest.approx(3.0)
    assert uncertainty.most_j[2] == pytest.approx(9.0)


def test_few_well_chosen_prices_prove_nearly_what_steps_along_the_frontier_prove() -> None:
    """Composed flows at few prices, and exact flows from slow to fast."""
    problem = problem_of(40)
    few, many = Engine(problem, short=0), Engine(problem, short=np.inf)
    assert isinstance(few.relaxation, Composed)
    few.relaxation.most_prices = 14
    at_s = np.linspace(few.fastest_ticks, few.slowest_ticks, 40) * few.tables.tick_s
    low, high = (
        np.max([sample.bound.at(at_s) for sample in engine.relaxation.trace(lambda _share: None)], axis=0)
        for engine in (few, many)
    )
    waiting_j = problem.blocking_power_w * problem.stages * at_s
    assert ((low + waiting_j) <= (high + waiting_j) * (1 + 1e-5)).all()
    assert ((high + waiting_j) / (low + waiting_j) - 1).max() < 5e-3


def test_a_bound_at_a_makespan_is_the_highest_there(problem: Problem) -> None:
    """No flow that was found on the way proves more at a makespan than the one for it."""
    engine = Engine(problem)
    samples = engine.relaxation.trace(lambda _share: None)
    tick_s = engine.tables.tick_s
    for ticks in np.linspace(engine.fastest_ticks, engine.slowest_ticks, 9).tolist():
        near = engine.relaxation.near(samples, ticks * tick_s)
        known, best = (max(s.bound.at(np.floor(ticks) * tick_s) for s in some) for some in (samples, near))
        assert known <= best * (1 + 1e-12)
        assert best == pytest.approx(known, rel=1e-4)


class Searched:
    """The search on one problem, and for six deadlines plans that it has made good already."""

    def __init__(self, problem: Problem) -> None:
        engine = Engine(problem)
        self.sweeps = Sweeps(engine.tables, engine.graph, engine.table_of, engine.kind)
        curve = Pool(engine, engine.relaxation.trace(lambda _share: None)).curve
        self.deadline = np.floor(np.linspace(engine.fastest_ticks, engine.slowest_ticks, 6))
        self.through = curve.through[curve.around(self.deadline)[0]]
        self.search = Descent(self.sweeps)
        self.fastest = np.zeros((6, engine.graph.n), dtype=np.int16)
        self.good = self.run(self.fastest, 8, 12)

    def run(self, plans: np.ndarray, tries: int, times: int = 1) -> np.ndarray:
        for _ in range(times):
            plans = self.search.run(plans, self.deadline, self.through, tries)
        return plans


@pytest.fixture(scope="module")
def searched(problem: Problem) -> Searched:
    return Searched(problem)


def test_the_search_makes_plans_cheaper_in_time_and_is_reproducible(problem: Problem, searched: Searched) -> None:
    assert np.array_equal(Searched(problem).good, searched.good)
    makespan_ticks, energy_j = searched.sweeps.totals(searched.good)
    assert (makespan_ticks <= searched.deadline).all()
    assert (energy_j[1:] < searched.sweeps.totals(searched.fastest)[1][1:]).all()


def test_the_search_never_raises_the_energy_of_a_good_plan(searched: Searched) -> None:
    plans = searched.good
    before_j = searched.sweeps.totals(plans)[1]
    for _ in range(20):  # a few trials are seldom better than a good plan, and no worse one may replace it
        plans = searched.run(plans, 2)
        makespan_ticks, energy_j = searched.sweeps.totals(plans)
        assert (energy_j <= before_j).all()
        assert (makespan_ticks <= searched.deadline).all()
        before_j = energy_j


def test_of_many_trials_the_best_is_taken(searched: Searched) -> None:
    """The best of 64 trials in either direction lies no higher than the least of a few with two."""
    few, many = (
        np.min([searched.sweeps.totals(searched.run(searched.fastest, tries))[1] for _ in range(2)], axis=0)
        for tries in (2, 64)
    )
    assert (many[1:-1] <= few[1:-1]).all()
