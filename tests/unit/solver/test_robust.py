"""Plans under scatter keep their deadline as often as asked, and cost no more than clocks at their maximum."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.solver.test_exact import pipeline

from perseus_core.hardware import Hardware
from perseus_core.instruction import InstructionKind
from perseus_core.latency import SwitchLatency
from perseus_solver.calibration.noise import Noise
from perseus_solver.errors import Infeasible, InvalidCalibration, InvalidProblem
from perseus_solver.frontier import Planner
from perseus_solver.model.simulator import Simulator
from perseus_solver.rehearsal import Executor, Scatter, plan_robustly, rehearse
from perseus_solver.rehearsal.robust import sampled_times_s

PROBLEM = pipeline(6)
PLANNER = Planner(PROBLEM)


def noise_of(stage: int, kind: InstructionKind, own: float, common: float) -> Noise:
    return Noise(stage, kind, own, own, own, common, common, common)


def drawn(scatter: Scatter, iterations: int, seed: int) -> np.ndarray:
    return scatter.draw(iterations, np.random.default_rng(seed)).T


@pytest.mark.parametrize("slowdown", [0.01, 0.05])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_a_plan_keeps_its_deadline_in_iterations_of_its_own(slowdown: float, confidence: float) -> None:
    scatter = Scatter.uniform(PROBLEM, 0.01)
    simulator = Simulator(PROBLEM)
    highest = np.zeros(PROBLEM.instructions, dtype=np.intp)
    highest_s = np.quantile(sampled_times_s(simulator, highest, drawn(scatter, 2000, seed=7)), confidence)
    deadline_s = float(highest_s) * (1 + slowdown)
    found = plan_robustly(PLANNER, deadline_s, scatter, confidence=confidence)
    assert found.kept >= confidence
    plan = simulator.choice_of(found.point.frequencies_mhz)
    again = sampled_times_s(simulator, plan, drawn(scatter, 4000, seed=99))
    assert (again <= deadline_s).mean() >= confidence - 0.02  # four standard errors
    run = simulator.run(plan)
    assert (found.point.iteration_time_s, found.point.energy_j) == (float(run.iteration_time_s), float(run.energy_j))
    # Dearer than a plan that is late half of the time, cheaper than clocks at their maximum.
    ideal = PLANNER.plan(deadline_s)
    assert ideal.energy_j <= found.point.energy_j < float(simulator.run(highest).energy_j)
    late = sampled_times_s(simulator, simulator.choice_of(ideal.frequencies_mhz), drawn(scatter, 4000, seed=99))
    assert (late <= deadline_s).mean() < confidence


def test_without_scatter_the_plan_is_the_usual_one() -> None:
    deadline_s = 1.05 * PLANNER.t_min_s
    found = plan_robustly(PLANNER, deadline_s, Scatter.uniform(PROBLEM, 0.0))
    assert found.kept == 1.0
    assert found.point.energy_j <= PLANNER.plan(deadline_s).energy_j * 1.01


def test_the_surest_plan_is_returned_where_none_is_sure_enough() -> None:
    found = plan_robustly(PLANNER, PLANNER.t_min_s, Scatter.uniform(PROBLEM, 0.05))
    assert found.kept < 0.95
    assert found.time_kept_s(0.95) > PLANNER.t_min_s
    assert found.point.iteration_time_s <= PLANNER.t_min_s * (1 + 1e-9)


def test_scatter_is_that_of_the_calibration() -> None:
    noise = [noise_of(0, InstructionKind.FORWARD, 1.0, 2.0), noise_of(1, InstructionKind.BACKWARD, 3.0, 0.0)]
    scatter = Scatter.calibrated(PROBLEM, noise)
    share = drawn(scatter, 4000, seed=0)
    stage, kind = PROBLEM.schedule.stage, PROBLEM.schedule.kind
    measured = share[:, (stage == 0) & (kind == InstructionKind.FORWARD)]
    assert np.allclose(measured.std(axis=0), np.hypot(0.01, 0.02), rtol=0.1)
    assert np.corrcoef(measured[:, 0], measured[:, 1])[0, 1] == pytest.approx(0.8, abs=0.05)  # 0.02² of 0.01² + 0.02²
    assert np.allclose(share[:, (stage == 1) & (kind == InstructionKind.BACKWARD)].std(axis=0), 0.03, rtol=0.1)
    assert np.allclose(share[:, stage == 2].std(axis=0), np.hypot(0.02, 0.01), rtol=0.1)  # not measured: the median
    assert np.allclose(share.mean(axis=0), 1.0, atol=0.003)
    with pytest.raises(InvalidCalibration, match="no scatter, because no plan ran twice"):
        Scatter.calibrated(PROBLEM, [])


def test_a_rehearsal_knows_that_instructions_of_a_group_scatter_together() -> None:
    """What they have in common adds up over an iteration; what each has by itself averages out."""
    highest = PROBLEM.frequencies_of(np.zeros((1, PROBLEM.instructions), dtype=np.intp))
    hardware = Hardware("made up", SwitchLatency(0, 0, 0, False), noise=0.3)
    kinds = {(table.stage, table.kind) for table in PROBLEM.options}

    def deviation_s(own: float, common: float) -> float:
        scatter = Scatter.calibrated(PROBLEM, [noise_of(stage, kind, own, common) for stage, kind in kinds])
        return float(rehearse(Executor(PROBLEM, scatter), highest, hardware, samples=512).time_s.std())

    alone, together = deviation_s(2.0, 0.0), deviation_s(0.0, 2.0)
    assert together > 1.5 * alone > 0
    assert deviation_s(0.0, 0.0) == pytest.approx(0.0, abs=1e-9), "measured scatter counts, not the hardware's noise"


def test_what_makes_no_sense_is_refused() -> None:
    scatter = Scatter.uniform(PROBLEM, 0.01)
    with pytest.raises(InvalidProblem, match="confidence must be between 0 and 1, not 1"):
        plan_robustly(PLANNER, 2.0, scatter, confidence=1)
    with pytest.raises(InvalidProblem, match=r"scatter must be between 0 and 0\.5, not 0\.7"):
        Scatter.uniform(PROBLEM, 0.7)
    with pytest.raises(Infeasible):
        plan_robustly(PLANNER, 0.5 * PLANNER.t_min_s, scatter)
