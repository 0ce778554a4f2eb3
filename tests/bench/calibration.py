"""Calibration and straggler detection on the public traces of real training runs (SOSP'24 artifact, three workloads).

The figures are the error on held-out plans after fitting a third of the plans; what the straggler detector finds in the
original runs and in runs with one slow stage; and whether a slowdown bound holds in a run with the noise of the traces.
The peer is the replay of the graph without delays, by which the published system predicts iteration times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tests.doubles.detector_replay import DetectorReplay

from perseus_solver.calibration import Calibration, Trace, calibrate, predict_s, read_trace
from perseus_solver.calibration.noise import median_durations_s
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.frontier import solve_deadline, solve_frontier
from perseus_solver.kinds import Floats
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Choice, Simulator

DATA = Path(os.environ.get("PERSEUS_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")) / "sosp24"
TRACES = {
    "gpt3": "gpt3-1.3b_a100_pp4_mb128",
    "bert": "bert-1.3b_a100_pp4_mb32",
    "wide_resnet": "wide-resnet-1.5b_a40_pp8_mb48",
}
FACTORS = (1.05, 1.1, 1.2, 1.3, 1.4, 1.5)
JUDGED = slice(0, None, 2)
"""The even iterations of the recorded noise, for evaluation; the odd ones are for calibration."""
Result = dict[str, Any]


@cache
def trace(name: str) -> Trace:
    """Read one measured run."""
    stem = DATA / "traces" / TRACES[name]
    return read_trace(Path(f"{stem}.instructions.csv.gz"), Path(f"{stem}.iterations.csv"), "1f1b")


@cache
def calibration(name: str) -> Calibration:
    """Calibrate a run from a third of its plans."""
    return calibrate(trace(name))


def heldout() -> Result:
    """Measure the mean absolute error on held-out plans, and the times of reading and fitting."""
    figures: Result = {}
    for name in TRACES:
        begin = time.perf_counter()
        run = trace.__wrapped__(name)
        read = time.perf_counter()
        quality = calibrate(run).quality
        end = time.perf_counter()
        figures[f"calibration_heldout_mape_percent_{name}"] = _figure(
            quality.heldout_mape_percent, "%", "graph without delays", quality.replay_mape_percent
        )
        figures[f"calibration_heldout_max_percent_{name}"] = _figure(quality.heldout_max_percent, "%")
        figures[f"calibration_read_s_{name}"] = _figure(read - begin, "s")
        figures[f"calibration_fit_s_{name}"] = _figure(end - read, "s")
    return figures


def stragglers() -> Result:
    """Replay each run beside itself, as it was and with every stage slowed down from every iteration on."""
    alarms, iterations, onsets, found, worst = 0, 0, 0, 0, 0.0
    figures: Result = {}
    for name in TRACES:
        fitted = calibration(name)
        assert fitted.thresholds is not None
        assert fitted.least_slowdowns is not None
        least = max(fitted.least_slowdowns)
        replayed = DetectorReplay(trace(name), fitted.thresholds)
        alarms += replayed.false_alarms()
        iterations += replayed.iterations
        for factor in (least, *FACTORS):
            outcome = replayed.slow_down(factor)
            onsets += outcome.onsets
            found += outcome.found
            worst = max(worst, outcome.slowdown_error)
        figures[f"straggler_least_degree_{name}"] = _figure(least, "x")
    return {
        "straggler_real_trace_false_alarms": _figure(alarms, f"of {iterations}"),
        "straggler_real_trace_recall": _figure(found / onsets, f"of {onsets}"),
        "straggler_degree_error_percent": _figure(100 * worst, "%"),
        **figures,
    }


def slowdown_bound(bound: float = 0.05) -> Result:
    """Measure the share of a noisy run's iterations within a bound above the measured time at the highest clocks.

    The run has a published profile on four stages, and delays, gaps and an overhead that the planner does not know.
    Instructions and iterations have the noise of the BERT run: its odd iterations for calibration, its even ones for
    evaluation.
    """
    run = trace("bert")
    schedule = run.schedule
    profile = read_profile(DATA / "stage_profile" / "gpt3-175b_a100-sxm.csv", stages=schedule.stages)
    bare = build_problem(profile, schedule, blocking_power_w=83.64)
    simulator = Simulator(bare)
    truth = _Truth(bare, run, predict_s(calibration("bert"), run))
    base_s = float(np.median(truth.run(all_maximum(bare), JUDGED)[0]))

    frontier = solve_frontier(bare, points=40)
    plans = [simulator.choice_of(point.frequencies_mhz) for point in list(frontier)[::4]]
    recorded = [truth.run(plan, slice(1 + 2 * k, None, 2 * len(plans))) for k, plan in enumerate(plans)]
    seen = Trace(
        schedule,
        np.repeat(np.arange(len(plans), dtype=np.int32), [len(time_s) for time_s, _ in recorded]),
        np.concatenate([duration_s for _, duration_s in recorded]),
        np.concatenate([time_s for time_s, _ in recorded]),
    )
    planned_s = np.concatenate(
        [np.tile(simulator.duration_s(plan), (len(d), 1)) for plan, (_, d) in zip(plans, recorded, strict=True)]
    )
    fitted = calibrate(seen, train_fraction=None, planned_s=planned_s)
    real = build_problem(profile, schedule, blocking_power_w=83.64, calibration=fitted)
    limit_s = base_s * (1 + bound)
    held, used = {}, {}
    for name, chosen in (
        ("calibrated", solve_deadline(real, fitted.deadline_s(limit_s))),
        ("bare", solve_deadline(bare, limit_s)),
        ("relative", solve_deadline(bare, frontier.t_min_s * (1 + bound))),
    ):
        time_s, _ = truth.run(simulator.choice_of(chosen.frequencies_mhz), JUDGED)
        held[name] = 100 * float(np.mean(time_s <= limit_s))
        used[name] = 100 * (float(np.median(time_s)) / base_s - 1)
    return {
        "slowdown_bound_held_percent": _figure(held["calibrated"], "%", "graph without delays", held["bare"]),
        "slowdown_used_percent": _figure(used["calibrated"], "%", "graph without delays", used["bare"]),
        "slowdown_used_by_relative_bound_percent": _figure(used["relative"], "%"),
    }


class _Truth:
    """The simulated run: a pipeline that also spends time between computations, which the planner does not know."""

    def __init__(self, problem: Problem, run: Trace, predicted_s: Floats) -> None:
        generator = np.random.default_rng(8)
        stages = problem.stages
        stage = problem.schedule.stage
        between = generator.uniform(0.002, 0.008, size=(stages, stages))
        np.fill_diagonal(between, generator.uniform(0.0005, 0.003, size=stages))
        delay_s = between[stage[problem.edge_from], stage[problem.edge_to]]
        self._simulator = Simulator(replace(problem, edge_delay_s=delay_s, overhead_s=0.2))
        self._inside = run.duration_s / median_durations_s(run)
        self._outside = run.iteration_time_s / predicted_s

    def run(self, choice: Choice, part: slice) -> tuple[Floats, Floats]:
        """Return iteration times and instruction durations (s) with the noise of a part of the recorded iterations."""
        duration_s = self._simulator.duration_s(choice) * self._inside[part]
        end_s = self._simulator.end_s(duration_s).max(axis=-1) + self._simulator.problem.overhead_s
        return end_s * self._outside[part], duration_s


def _figure(value: float | None, unit: str, peer: str | None = None, peer_value: float | None = None) -> Result:
    ratio = peer_value / value if value and peer_value is not None else None
    return {"value": value, "unit": unit, "peer": peer, "peer_value": peer_value, "ratio": ratio}


FIGURES: dict[str, Callable[[], Result]] = {
    "calibration": heldout,
    "straggler": stragglers,
    "slowdown_bound": slowdown_bound,
}
