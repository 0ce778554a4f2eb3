"""Laws of plans with fewer clock changes, over random measurements, schedules and losses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perseus_solver.certify import check_frontier
from perseus_solver.frontier import Planner
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule
from perseus_solver.switching import reduce_clock_changes

pytestmark = pytest.mark.usefixtures("short_search")

LAW = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
SPLIT = {"ZBH1": ("forward", "input_gradient", "weight_gradient")}


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Random tables, noise included, on schedules with two and three kinds of instructions."""
    name = draw(st.sampled_from(["1f1b", "GPipe", "Interleaved1F1B", "ZBH1"]))
    stages = draw(st.integers(2, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = ["stage,instruction,frequency,time,energy"]
    for stage in range(stages):
        for kind in SPLIT.get(name, ("forward", "backward")):
            work = random.uniform(0.5, 2.0)
            for clock in range(1400, 800, -60):
                seconds = work * 1400 / clock * random.uniform(0.99, 1.01)
                watts = (90 + 300 * (clock / 1400) ** 2.5) * random.uniform(0.97, 1.03)
                rows.append(f"{stage},{kind},{clock},{seconds},{seconds * watts}")
    schedule = build_schedule(name, stages=stages, microbatches=6, chunks=2 if name == "Interleaved1F1B" else None)
    return build_problem(
        read_profile("\n".join(rows) + "\n"),
        schedule,
        blocking_power_w=float(draw(st.sampled_from([0.0, 60.0]))),
        delay_s=float(draw(st.sampled_from([0.0, 0.1]))),
        overhead_s=float(draw(st.sampled_from([0.0, 1.0]))),
    )


@LAW
@given(problems(), st.sampled_from([0.0, 0.002, 0.02]))
def test_reduced_plans_are_in_time_within_the_loss_and_certified(problem: Problem, loss: float) -> None:
    planner = Planner(problem)
    frontier, proofs = planner.frontier(15), planner.proofs
    reduced = reduce_clock_changes(problem, frontier, loss=loss)
    check_frontier(problem, reduced, proofs)
    limit_j = frontier.effective_energy_j + loss * frontier.energy_j
    for point, effective_j in zip(reduced, reduced.effective_energy_j.tolist(), strict=True):
        replaced = (point.iteration_time_s <= frontier.time_s * (1 + 1e-9)) & (
            effective_j <= limit_j + 1e-9 * np.abs(frontier.energy_j)
        )
        assert (point.clock_changes <= frontier.clock_changes[replaced]).any()
