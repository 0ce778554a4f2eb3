"""Trainers without an agent: what they take is what the solver's simulation says, for every schedule; and how they
end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.waiting import eventually

from perseus_core.rank import RankId
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.shared_gpu import GpuSpec, SharedGpu
from perseus_sim.processes import Processes
from perseus_sim.profiles import profile_csv
from perseus_sim.training.coordinator import PipelineIteration
from perseus_sim.training.job import RankSpec, TrainingJob, TrainingSpec
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

A100 = MODELS["a100"]


def problem_of(schedule: str = "1f1b", stages: int = 4, microbatches: int = 8) -> Problem:
    return build_problem(
        read_profile(profile_csv(stages=stages, imbalance=1.15)),
        build_schedule(schedule, stages=stages, microbatches=microbatches),
        blocking_power_w=A100.blocking_power_w,
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., TrainingJob]]:
    with Processes(tmp_path / "logs") as processes:

        def begin(problem: Problem, pipelines: int = 1, **simulation: object) -> TrainingJob:
            ranks = []
            for dp in range(pipelines):
                for stage in range(problem.stages):
                    spec = GpuSpec(f"GPU-{dp}-{stage}", A100.name, A100.clocks_mhz, round(A100.blocking_power_w * 1000))
                    ranks.append(RankSpec(RankId(dp, stage), SharedGpu.create(tmp_path / "gpus", spec).path))
            settings: dict[str, object] = {"speed": None, "noise": 0.0, **simulation}
            job = TrainingJob(TrainingSpec(problem, tuple(ranks), **settings), tmp_path, processes)  # type: ignore[arg-type]
            job.begin()
            return job

        yield begin


def take(job: TrainingJob, iterations: int, pipelines: int = 1) -> list[PipelineIteration]:
    return [job.samples.get(timeout=60) for _ in range(iterations * pipelines)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_an_iteration_takes_what_the_solver_simulates(schedule: str, start: Callable[..., TrainingJob]) -> None:
    if schedule.startswith("zb"):
        rows = profile_csv(stages=4, imbalance=1.15).splitlines()
        split = [row.replace("backward", half) for row in rows for half in ("input_gradient", "weight_gradient")]
        text = "\n".join([rows[0], *(row for row in rows[1:] if "forward" in row), *split[2:]])
        text = "\n".join(dict.fromkeys(text.splitlines()))
        problem = build_problem(
            read_profile(text),
            build_schedule(schedule, stages=4, microbatches=8),
            blocking_power_w=A100.blocking_power_w,
        )
    else:
        problem = problem_of(schedule)
    job = start(problem)
    samples = take(job, 3)
    job.stop()
    assert job.failure is None
    expected = Simulator(problem).run(np.zeros(problem.instructions, dtype=np.intp))
    for sample in samples:
        # Times are passed on in whole microseconds, at most one of them lost for each instruction on the way.
        assert sample.time_us / 1e6 == pytest.approx(float(expected.iteration_time_s), rel=1e-4)
        assert sample.energy_mj / 1e3 == pytest.approx(float(expected.energy_j), rel=1e-4)
        # What each stage ran, and when, is what was simulated of it.
        begin_us, end_us, energy_uj = np.array([one for stage in sample.executed for one in stage], dtype=float).T
        assert (begin_us - sample.begin_us) / 1e6 == pytest.approx(expected.start_s, abs=1e-4)
        assert (end_us - sample.begin_us) / 1e6 == pytest.approx(expected.end_s, abs=1e-4)
        waits_s = problem.stages * sample.time_us / 1e6 - (end_us - begin_us).sum() / 1e6
        waiting_j = problem.blocking_power_w * waits_s
        assert energy_uj.sum() / 1e6 + waiting_j == pytest.approx(sample.energy_mj / 1e3, rel=1e-4)


def test_trainers_take_the_delays_gaps_and_overhead_of_the_problem(start: Callable[..., TrainingJob]) -> None:
    random = np.random.default_rng(3)
    problem = problem_of()
    problem = replace(
        problem, edge_delay_s=random.uniform(0.002, 0.02, size=problem.edge_from.size).round(6), overhead_s=0.25
    )
    job = start(problem)
    samples = take(job, 2)
    job.stop()
    expected = Simulator(problem).run(np.zeros(problem.instructions, dtype=np.intp))
    for sample in samples:
        assert sample.time_us / 1e6 == pytest.approx(float(expected.iteration_time_s), rel=1e-4)
        assert (sample.time_us - sample.span_us) / 1e6 == pytest.approx(0.25, abs=1e-5)
        assert sample.energy_mj / 1e3 == pytest.approx(float(expected.energy_j), rel=1e-4)


def test_spikes_make_iterations_longer(start: Callable[..., TrainingJob]) -> None:
    problem = problem_of()
    job = start(problem, spikes=0.5)
    samples = take(job, 5)
    job.stop()
    usual_s = float(Simulator(problem).run(np.zeros(problem.instructions, dtype=np.intp)).iteration_time_s)
    for sample in samples:
        assert usual_s * 1.005 < sample.span_us / 1e6 < usual_s * 1.1


def test_noise_stays_near_its_mean_and_differs_between_ranks(start: Callable[..., TrainingJob]) -> None:
    problem = problem_of()
    job = start(problem, pipelines=2, noise=0.005)
    samples = take(job, 10, pipelines=2)
    job.stop()
    expected = Simulator(problem).run(np.zeros(problem.instructions, dtype=np.intp))
    times_s = [sample.span_us / 1e6 for sample in samples]
    assert len(set(times_s)) > 10
    assert np.mean(times_s) == pytest.approx(float(expected.iteration_time_s), rel=0.01)


def test_pipelines_wait_for_the_slowest_at_every_iteration(start: Callable[..., TrainingJob]) -> None:
    problem = problem_of()
    job = start(problem, pipelines=2)
    even = take(job, 2, pipelines=2)
    job.slow_down(1, 1.5)
    later = even
    while all(sample.span_us < 1.4 * even[0].span_us for sample in later):
        later = take(job, 1, pipelines=2)
    job.stop()
    assert {sample.span_us for sample in even} == {even[0].span_us}
    fast, slow = sorted(later, key=lambda sample: sample.dp)
    assert slow.span_us == pytest.approx(1.5 * even[0].span_us, rel=1e-3)
    assert fast.span_us == pytest.approx(even[0].span_us, rel=1e-3)
    assert fast.time_us == slow.time_us == slow.span_us
    waited_s = (slow.span_us - fast.span_us) / 1e6
    extra_j = (fast.energy_mj - even[0].energy_mj) / 1e3
    assert extra_j == pytest.approx(waited_s * problem.stages * A100.blocking_power_w, rel=1e-3)


def test_virtual_time_follows_the_wall_clock_at_the_speed_asked_for(start: Callable[..., TrainingJob]) -> None:
    job = start(problem_of(stages=2, microbatches=2), speed=4.0)

    def nothing_waits() -> bool:
        while not job.samples.empty():
            job.samples.get()
        nonlocal began_s
        began_s = time.monotonic()
        return job.samples.empty()

    began_s = 0.0
    eventually(nothing_waits)
    first = take(job, 1)[0]  # was ready after ``began_s``
    last = take(job, 4)[-1]
    took_s = time.monotonic() - began_s
    job.stop()
    assert took_s >= 0.9 * (last.begin_us - first.begin_us) / 1e6 / 4.0


def test_a_killed_rank_ends_the_job_and_no_process_stays(start: Callable[..., TrainingJob]) -> None:
    job = start(problem_of())
    take(job, 1)
    os.kill(job.children[RankId(0, 1)].pid, signal.SIGKILL)
    eventually(lambda: not job.running and not any(child.running for child in job.children.values()))
    assert job.failure is not None
    assert "has gone" in job.failure


def test_a_job_that_was_never_begun_can_be_stopped(start: Callable[..., TrainingJob], tmp_path: Path) -> None:
    problem = problem_of(stages=2, microbatches=2)
    specs = [GpuSpec(f"GPU-x-{stage}", "m", (100, 200), 80_000) for stage in range(2)]
    ranks = tuple(RankSpec(RankId(0, n), SharedGpu.create(tmp_path / "g", spec).path) for n, spec in enumerate(specs))
    with Processes(tmp_path / "l") as processes:
        job = TrainingJob(TrainingSpec(problem, ranks), tmp_path / "j", processes)
        job.stop()
        assert not any(child.running for child in job.children.values())
