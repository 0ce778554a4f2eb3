"""The proof checker accepts what follows and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perseus_solver.certify import Certificate, InvalidCertificate, check_frontier, iteration_bound, prove
from perseus_solver.frontier import Planner
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

PROFILE = read_profile(
    "stage,instruction,frequency,time,energy\n"
    "0,forward,1000,1,400\n0,forward,800,1.2,330\n0,forward,500,1.6,290\n"
    "0,backward,1000,2,800\n0,backward,800,2.4,660\n0,backward,500,3.2,600\n"
    "1,forward,1000,1.1,440\n1,forward,800,1.3,350\n1,forward,500,1.8,310\n"
    "1,backward,1000,2.1,840\n1,backward,800,2.5,690\n1,backward,500,3.4,610\n"
)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return build_problem(PROFILE, build_schedule("1f1b", stages=2, microbatches=4), blocking_power_w=80)


@pytest.fixture(scope="module")
def solved(problem: Problem) -> tuple[Frontier, tuple[Certificate, ...]]:
    planner = Planner(problem)
    return planner.frontier(20), planner.proofs


def test_the_solver_proves_its_frontier(problem: Problem, solved: tuple[Frontier, tuple[Certificate, ...]]) -> None:
    check_frontier(problem, *solved)


def test_no_flow_at_all_proves_the_sum_of_cheapest_options(problem: Problem) -> None:
    nothing = Certificate(np.zeros(len(problem.edge_from)), np.zeros(problem.instructions))
    bound = prove(problem, nothing)
    cheapest = [float((o.energy_j - 80 * o.time_s).min()) for o in problem.options]
    assert bound.price_w == 0
    assert bound.constant_j == pytest.approx(sum(cheapest[k] for k in problem.option_of.tolist()))


def test_flow_along_one_path_proves_that_path(problem: Problem) -> None:
    # 1 W through F(0,0) and B(0,0) of stage 1, entered from F(0,0) of stage 0, left by B(0,0) of stage 0.
    path, edges = [0], []
    while True:
        out = np.flatnonzero(problem.edge_from == path[-1])
        if not len(out):
            break
        edges.append(int(out[0]))
        path.append(int(problem.edge_to[out[0]]))
    edge, through = np.zeros(len(problem.edge_from)), np.zeros(problem.instructions)
    edge[edges], through[path] = 1.0, 1.0
    bound = prove(problem, Certificate(edge, through))
    by_hand = 0.0
    for i, k in enumerate(problem.option_of.tolist()):
        options = problem.options[k]
        by_hand += float((options.energy_j - 80 * options.time_s + (i in path) * options.time_s).min())
    assert bound.price_w == pytest.approx(1.0)
    assert bound.constant_j == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda edge, through: (-edge, through), "zero or more"),
        (lambda edge, through: (edge, through * np.nan), "finite"),
        (lambda edge, through: (edge[:-1], through), "do not fit"),
        (lambda edge, through: (edge * 1.01, through), "conservation"),
        (lambda edge, through: (edge, through * 2.0), "conservation"),
    ],
)
def test_an_invalid_flow_is_refused(
    problem: Problem, solved: tuple[Frontier, tuple[Certificate, ...]], spoil: object, message: str
) -> None:
    flow = next(c for c in solved[1] if c.through_w.max() > 1)
    with pytest.raises(InvalidCertificate, match=message):
        prove(problem, Certificate(*spoil(flow.edge_w, flow.through_w)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        (
            lambda f: replace(f, energy_lower_bound_j=f.energy_lower_bound_j * 1.0001),
            "exceeds the proven|below its bound",
        ),
        (lambda f: replace(f, energy_j=f.energy_j * 0.999), "takes .* J, not"),
        (lambda f: replace(f, time_s=f.time_s * 0.999), "takes .* s, not"),
        (
            lambda f: replace(f, **{k: getattr(f, k)[::-1] for k in _COLUMNS}),
            "time must rise",
        ),
    ],
)
def test_a_claim_that_does_not_follow_is_refused(
    problem: Problem, solved: tuple[Frontier, tuple[Certificate, ...]], claim: object, message: str
) -> None:
    frontier, proofs = solved
    with pytest.raises(InvalidCertificate, match=message):
        check_frontier(problem, claim(frontier), proofs)  # type: ignore[operator]


_COLUMNS = ("time_s", "energy_j", "energy_lower_bound_j", "frequencies_mhz")


def test_every_stage_waits_in_the_overhead(problem: Problem) -> None:
    nothing = [prove(problem, Certificate(np.zeros(len(problem.edge_from)), np.zeros(problem.instructions)))]
    later = replace(problem, overhead_s=2.0)
    assert iteration_bound(later, nothing, np.array([30.0])) == iteration_bound(problem, nothing, np.array([30.0]))
    assert iteration_bound(later, nothing, np.array([32.0])) - iteration_bound(
        later, nothing, np.array([30.0])
    ) == pytest.approx(2.0 * 80 * 2)
