"""Mode Observe: what a job's savings are predicted from, and what a sweep would cost; no clock is set for either."""

from __future__ import annotations

import asyncio
import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.stored_objects import StoredObjects, stored_object

from perseus_core.evidence import Evidence
from perseus_core.gpus import TRUE_SHARES, known_gpus
from perseus_core.iteration import IterationReport
from perseus_core.marks import MarkSource
from perseus_operator.api.conditions import Condition, ConditionType, Explanation, Reason
from perseus_operator.errors import InvalidProfile
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.profile.cost import sweep_cost
from perseus_operator.families.training.features.profile.estimate import SAME, distance, estimate
from perseus_operator.families.training.features.profile.observation import ITERATIONS
from perseus_operator.families.training.features.profile.reading import Mean, Reading, StageReading
from perseus_operator.families.training.features.profile.sweep import Recipe, Sweep, finer_clocks
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.work.observer import MOST_CANDIDATES, Observer
from perseus_operator.families.training.work.profile_source import StoredProfile, shape_of
from perseus_operator.nodes.actions import Push, Select
from perseus_operator.nodes.gpu import Gpu
from perseus_operator.solving.request import SolveRequest, schedule_of
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.frontier import Planner
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.usefixtures("short_search")

CURVES = known_gpus()
A100 = "NVIDIA A100-SXM4-80GB"
CLOCKS = tuple(range(600, 1411, 15))
AHEAD = Evidence(marks=MarkSource.HOST, lead_us=40_000)
COUNT = 4
"""Microbatches of the planner's jobs."""


def observed(
    *, forward_us: float = 50_000, waiting: float = 0.3, watts: float = 350.0, mhz: int | None = 1350
) -> Reading:
    """Two stages, the second longer; ``watts`` of a whole iteration."""
    stages = []
    for weight in (1.0, 1.2):
        means = {
            ("forward", 0): Mean(COUNT, weight * forward_us, 9_000.0),
            ("backward", 0): Mean(COUNT, 2 * weight * forward_us, 18_000.0),
        }
        computing_us = sum(mean.count * mean.time_us for mean in means.values())
        time_us = computing_us * (1 + waiting)
        stages.append(StageReading(time_us, watts * time_us / 1e3, means, reached_mhz=mhz))
    return Reading(0, max(stage.time_us for stage in stages), tuple(stages))


def rows(text: str) -> dict[tuple[int, str], dict[int, tuple[float, float]]]:
    """Clock in MHz → (microseconds, millijoules), by stage and instruction."""
    found: dict[tuple[int, str], dict[int, tuple[float, float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        key = int(row["stage"]), row["instruction"]
        found.setdefault(key, {})[int(row["frequency"])] = 1e6 * float(row["time"]), 1e3 * float(row["energy"])
    return found


# ---------------------------------------------------------------------------------------------------------- estimates


@given(
    st.sampled_from(sorted(CURVES)), st.floats(0.0, 2.0), st.floats(20.0, 700.0), st.one_of(st.none(), st.just(1200))
)
def test_an_estimate_meets_what_was_observed_and_leaves_faster_clocks_out(
    gpu: str, waiting: float, watts: float, mhz: int | None
) -> None:
    curves, reading = CURVES[gpu], observed(waiting=waiting, watts=watts, mhz=mhz)
    made = estimate(reading, curves)
    found = rows(made.csv)
    at_mhz = mhz if mhz in curves.clocks_mhz else max(found[0, "forward"])
    for number, stage in enumerate(reading.stages):
        computing_mj = sum(mean.count * found[number, kind][at_mhz][1] for (kind, _), mean in stage.means.items())
        waiting_mj = made.blocking_power_w * (stage.time_us - stage.computing_us) / 1e3
        assert computing_mj + waiting_mj == pytest.approx(stage.energy_mj, rel=1e-3)
        for (kind, _), mean in stage.means.items():
            clocks = found[number, kind]
            assert max(clocks) == at_mhz, "power or heat may not allow more"
            assert clocks[at_mhz][0] == pytest.approx(mean.time_us, rel=1e-4)
            ordered = [clocks[clock] for clock in sorted(clocks, reverse=True)]
            assert all(lower[0] > higher[0] for higher, lower in pairwise(ordered))
            powers = [energy_mj / time_us for time_us, energy_mj in ordered]
            assert all(lower < 1.001 * higher for higher, lower in pairwise(powers))
    read_profile(made.csv, stages=2)


def simulated(problem: Problem) -> tuple[float, float]:
    run = Simulator(problem).run(all_maximum(problem))
    return float(run.iteration_time_s), float(run.energy_j)


@pytest.mark.parametrize(
    ("name", "watts", "curves", "microbatches"),
    [
        ("gpt3-175b_a100-sxm", 83.64, "a100", 12),
        ("gpt3-175b_a100-sxm", 83.64, "h100", 12),
        ("bloom-176b_a40", 70.38, "a100", 12),
        ("bloom-176b_a40", 70.38, "a40", 48),
    ],
)
def test_savings_on_published_profiles_lie_in_the_interval_of_their_estimate(
    name: str, watts: float, curves: str, microbatches: int, sosp24: Path
) -> None:
    text = (sosp24 / "stage_profile" / f"{name}.csv").read_text()
    schedule = build_schedule("1f1b", stages=8, microbatches=microbatches)
    true = build_problem(read_profile(text), schedule, blocking_power_w=watts)
    time_s, energy_j = simulated(true)
    measured = rows(text)
    highest = max(measured[0, "forward"])
    stages = []
    for stage in range(8):
        means = {(kind, 0): Mean(microbatches, *measured[stage, kind][highest]) for kind in ("forward", "backward")}
        own = StageReading(1e6 * time_s, 1.0, means)
        waiting_mj = watts * (own.time_us - own.computing_us) / 1e3
        stages.append(replace(own, energy_mj=own.computing_mj + waiting_mj))
    made = estimate(Reading(highest, 1e6 * time_s, tuple(stages)), CURVES[curves])
    guessed = build_problem(read_profile(made.csv), schedule, blocking_power_w=made.blocking_power_w)
    guessed_s, guessed_j = simulated(guessed)
    of_true, of_guessed = Planner(true), Planner(guessed)
    for slower in (1.0, 1.15):
        saved = 1 - of_true.plan(slower * time_s).energy_j / energy_j
        predicted = 1 - of_guessed.plan(slower * guessed_s).energy_j / guessed_j
        assert TRUE_SHARES[0] <= saved / predicted <= TRUE_SHARES[1]


def test_a_profile_is_of_a_job_if_every_instruction_takes_as_long() -> None:
    reading = observed()
    own = {(n, *key): {1350: mean.time_us} for n, s in enumerate(reading.stages) for key, mean in s.means.items()}
    assert distance(reading, own) == 0
    assert distance(reading, {key: {1350: 1.2 * at[1350], 600: 1.0} for key, at in own.items()}) == pytest.approx(1 / 6)
    one_off = own | {(1, "forward", 0): {1350: 2 * own[1, "forward", 0][1350]}}
    assert distance(reading, one_off) == pytest.approx(0.5), "the farthest counts"
    assert distance(reading, {key: at for key, at in own.items() if key[1] == "forward"}) is None
    assert distance(reading, {**own, (2, "forward", 0): {1350: 1.0}}) is None


@given(st.floats(0.0, 1.0), st.integers(1, 20), st.sampled_from([0.1, 0.5, 3.0]), st.integers(2, 30), st.booleans())
def test_no_sweep_costs_more_than_is_said(
    memory: float, iterations: int, most: float, clocks: int, finer: bool
) -> None:
    recipe = Recipe(iterations, most, 10**12)
    sweep = Sweep(CLOCKS[::-1][:clocks], "s", recipe)
    cost = sweep_cost(sweep.clocks_mhz, recipe, finer=finer, iteration_us=1e6)

    def measured(sweep: Sweep) -> Sweep:
        while not sweep.finished:
            mhz = sweep.clocks_mhz[sweep.point]
            slower = memory + (1 - memory) * CLOCKS[-1] / mhz
            sweep = sweep.add(Reading(mhz, 1e6 * slower, (StageReading(1e6 * slower, mhz, {}),), iterations=iterations))
        return sweep

    sweep = measured(sweep)
    if finer and not sweep.failed:
        seen = [reading.clock_mhz for reading in sweep.readings]
        sweep = measured(sweep.refined(finer_clocks(range(600, 1411, 5), seen, seen[-1])))
    times_us = [reading.iteration_time_us for reading in sweep.readings]
    assert len(times_us) <= cost.clocks
    assert len(times_us) * (iterations + 1) <= cost.iterations
    assert cost.duration_s is not None
    assert sum(times_us) * (iterations + 1) <= 1e6 * cost.duration_s * (1 + 1e-9)
    assert max(times_us) / 1e6 - 1 <= cost.most_slowdown + 1e-9
    assert cost.most_slowdown <= most + 1e-9
    assert memory < 1 or finer or len(times_us) == cost.clocks, "what waits for memory alone is measured at each clock"


# ----------------------------------------------------------------------------------------- what a prediction rests on


def job_of(make_job: Any, model: str = A100, **changes: Any) -> Any:
    """A job in mode Observe whose profile does not exist, with all its processes there."""
    profile = {"profileRef": {"name": "p"}, "online": {}}
    job = make_job(**{"profile": profile, "mode": "Observe", **changes})
    job.state.inputs.profile_fault = Explanation(Reason.OBSERVING, "0 of 5 iterations are observed.")
    job.state.inputs.read_started()
    job.state.inputs.read_ended(at_s=job.now_s, profile_fault=job.state.inputs.profile_fault)
    job.start_pods()
    job.connect_ranks()
    for node in job.nodes:
        uuids = [rank.gpu_uuid for rank in node.ranks.values()]
        node.gpus_described(dict.fromkeys(uuids, CLOCKS), {}, dict.fromkeys(uuids, Gpu(model, "560.1")))
    return job


def rests_on(job: Any, kube: StoredObjects) -> StoredProfile:
    observer = Observer(job.state, cast(Any, SimpleNamespace(kube=kube)))
    return asyncio.run(observer.profile(None))


def candidate(job: Any, reading: Reading, **changes: Any) -> dict[str, Any]:
    text = estimate(reading, CURVES["a100"]).csv
    fingerprint = {"gpuModel": A100, "driverVersion": "560.1", "measuredOn": shape_of(job.spec)}
    return {"csv": text, "blockingPowerMilliwatts": 80_000, **fingerprint, **changes}


def test_the_nearest_profile_with_the_same_fingerprint_goes_before_a_model(make_job: Any) -> None:
    job, kube = job_of(make_job), StoredObjects()
    with pytest.raises(InvalidProfile, match="0 of 5 iterations are observed"):
        rests_on(job, kube)
    job.state.observation.completed(observed())
    assert rests_on(job, kube).basis is PlanBasis.MODEL
    assert "fitted to published profiles" in rests_on(job, kube).basis_source
    near, nearer = observed(forward_us=54_000), observed(forward_us=51_000)
    for name, spec in {
        "another-driver": candidate(job, observed(), driverVersion="570.0"),
        "another-gpu": candidate(job, observed(), gpuModel="NVIDIA A40"),
        "another-shape": candidate(job, observed(), measuredOn="4 stages"),
        "any-shape": {key: value for key, value in candidate(job, observed()).items() if key != "measuredOn"},
        "damaged": candidate(job, observed(), csv="stage\n1\n"),
        "not-measured": {},
        "too-far": candidate(job, observed(forward_us=50_000 * (1 + 2 * SAME))),
    }.items():
        kube.profiles[name] = stored_object(name, spec)
        assert rests_on(job, kube).basis is PlanBasis.MODEL, name
    kube.profiles["near"] = stored_object("near", candidate(job, near))
    kube.profiles["nearer"] = stored_object("nearer", candidate(job, nearer))
    found = rests_on(job, kube)
    assert (found.name, found.basis) == ("nearer", PlanBasis.MATCHING)
    assert "PerseusProfile nearer" in found.basis_source


def reports(job: Any, iteration: int, microbatches: int) -> list[IterationReport]:
    """Of all ranks: instructions of 10 ms and 3 J, at default clocks."""
    n = 2 * microbatches
    return [
        IterationReport(
            *(dp, stage, 0, iteration, 10_000 * n, 10_000 * n, 3_000 * n, None),
            durations_us=[10_000] * n,
            instruction_energies_mj=[3_000] * n,
            energy_iterations=iteration + 1,
        )
        for dp in range(job.spec.pipeline.data_parallel)
        for stage in range(2)
    ]


def test_iterations_are_observed_without_a_plan_and_anew_in_another_shape(make_job: Any) -> None:
    job = job_of(make_job)
    observer = Observer(job.state, cast(Any, SimpleNamespace(kube=StoredObjects())))

    def observe(iterations: range, microbatches: int) -> None:
        pipeline = job.spec.pipeline
        request = SolveRequest("", pipeline.solver_name, 2, pipeline.solved_microbatches, None, 0, 20)
        for iteration in iterations:
            for report in reports(job, iteration, microbatches):
                observer.observe(report, lambda: schedule_of(request, None))

    observe(range(ITERATIONS), 4)
    assert job.state.observation.observed_iterations == ITERATIONS - 1, "the first does not count"
    shape = {"schedule": "1F1B", "stages": 2, "microbatches": 6, "dataParallel": 2}
    job.state.spec_accepted(job_of(make_job, pipeline=shape).spec)
    observe(range(ITERATIONS, ITERATIONS + 2), 4)
    assert job.state.observation.observed_iterations == 0
    assert "does not follow its schedule" in job.state.observation.obstacle
    observe(range(8, 10 + ITERATIONS), 6)
    reading = job.state.observation.observed
    assert reading is not None
    assert [mean.count for mean in reading.stages[0].means.values()] == [6, 6]
    assert job.state.inputs.read_at_s is None, "what it leads to is looked for at once"
    enforced = job_of(make_job, mode="Enforce")
    idle = Observer(enforced.state, cast(Any, SimpleNamespace()))
    for iteration in range(2 * ITERATIONS):
        for report in reports(enforced, iteration, 4):
            idle.observe(report, pytest.fail)
    assert enforced.state.observation.observed is None, "other modes have a profile, or measure one"


def test_a_tenant_with_many_profiles_costs_no_more_reading(make_job: Any) -> None:
    job, kube = job_of(make_job), StoredObjects()
    job.state.observation.completed(observed())
    for number in range(MOST_CANDIDATES):
        kube.profiles[f"a-{number:04d}"] = stored_object(f"a-{number:04d}", {})
    kube.profiles["b"] = stored_object("b", candidate(job, observed()))
    assert rests_on(job, kube).basis is PlanBasis.MODEL


def test_a_gpu_without_published_curves_is_named(make_job: Any) -> None:
    job = job_of(make_job, model="NVIDIA L4")
    job.state.observation.completed(observed())
    with pytest.raises(InvalidProfile, match="for NVIDIA L4 no curves are published"):
        rests_on(job, StoredObjects())


# ------------------------------------------------------------------------------------------------- what is said of it


def said(job: Any, kind: ConditionType) -> Condition:
    return next(c for c in conditions_of(job.state, job.decide()) if c.type is kind)


def predicted(job: Any, basis: PlanBasis) -> None:
    """The job has a frontier that rests on this."""
    job.solve()
    job.state.observation.basis_accepted(basis, "curves of a GPU")
    job.state.solve.frontier = replace(job.state.frontier, highest_mj=1_000_000)


def train(job: Any, iterations: range) -> None:
    for iteration in iterations:
        for dp, node in enumerate(job.nodes):
            for stage in range(2):
                job.state.iteration_reported(
                    node, IterationReport(dp, stage, 0, iteration, 10**6, 10**6, 300_000, None, evidence=AHEAD)
                )
        job.act()


def test_no_clock_is_written_and_what_would_be_saved_is_said(make_job: Any) -> None:
    job = job_of(make_job, objective={"type": "MinEnergy"}, baselineIterations=3)
    for _ in range(4):
        made = job.act()
    assert not any(isinstance(action, Push | Select) for action in made.actions)
    assert said(job, ConditionType.PROFILE_READY).reason is Reason.OBSERVING
    assert said(job, ConditionType.PLAN_APPLIED).reason is Reason.OBSERVE_ONLY
    assert said(job, ConditionType.READY).status is False
    cost = status.figures(job.state, job.decide()).sweep
    assert cost is not None
    assert cost.duration_seconds is None, "no iteration is measured yet"
    train(job, range(6))
    job.state.baseline_measured()
    predicted(job, PlanBasis.MODEL)
    train(job, range(6, 8))
    assert not any(node.plans.pushed or node.plans.selected for node in job.nodes)
    condition = said(job, ConditionType.PLAN_APPLIED)
    assert condition.message.startswith("spec.mode is Observe: no clock is written. Mode Enforce would run point")
    assert said(job, ConditionType.PROFILE_READY).reason is Reason.ESTIMATED
    assert "iterations at" in said(job, ConditionType.PROFILE_READY).message, "what a sweep would cost"
    assert said(job, ConditionType.READY).status is True
    hardware = status.figures(job.state, job.decide()).hardware
    assert hardware is not None
    assert (hardware.marks, hardware.median_lead_microseconds) == ("Host", 40_000)
    advice = status.figures(job.state, job.decide()).advised
    assert advice is not None
    assert (advice.rests_on, advice.source) == ("Model", "curves of a GPU")
    figures = advice.energy_saved_low, advice.energy_saved, advice.energy_saved_high
    low, saved, high = (float(str(figure).rstrip("%")) for figure in figures)
    assert low <= saved <= high
    assert low < high


def test_an_estimate_is_no_profile_for_a_plan(make_job: Any) -> None:
    job = job_of(make_job)
    predicted(job, PlanBasis.MODEL)
    changes = {"profile": {"profileRef": {"name": "p"}, "online": {}}, "baselineIterations": 0}
    job.state.spec_accepted(make_job(**changes, mode="Enforce").spec)
    assert job.state.frontier is None
    assert job.state.inputs.profile_digest is None
    assert job.state.inputs.read_at_s is None, "the job's own profile is looked for at once"
    own = job_of(make_job)
    predicted(own, PlanBasis.PROFILE)
    own.state.spec_accepted(make_job(**changes, mode="Enforce").spec)
    assert own.state.frontier is not None, "a profile of the job is as good for a plan"


@pytest.mark.parametrize("basis", [PlanBasis.MATCHING, PlanBasis.MODEL])
def test_nothing_is_calibrated_on_what_is_not_the_jobs_profile(make_job: Any, basis: PlanBasis) -> None:
    job = job_of(make_job)
    predicted(job, basis)
    job.state.calibration.iteration_recorded(200)
    kinds = {type(action).__name__ for action in job.decide().actions}
    assert "Calibrate" not in kinds
