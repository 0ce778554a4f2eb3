"""What is known of a job's GPUs: assumed, stored or measured; and when a change of it is worth other plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.job_hardware import job_hardware

from perseus_core.clock_latency import ClockLatency, Transition
from perseus_core.evidence import Evidence
from perseus_core.grain import Grain
from perseus_core.hardware import Hardware
from perseus_core.latency import MAX_LATENCY_US, published_latency
from perseus_core.marks import ClockControl, MarkSource
from perseus_core.units import us_from_s
from perseus_operator.api.conditions import Reason
from perseus_operator.api.schema import dump, openapi_of, parse
from perseus_operator.api.status import HardwareStatus
from perseus_operator.families.training.features.frontier.inputs import Solve, inputs_digest
from perseus_operator.families.training.features.hardware.hardware import (
    CHANGE,
    JobHardware,
    LatencyBasis,
    hardware_from_status,
    hardware_to_status,
    job_latency,
    next_hardware,
    scatter,
)
from perseus_operator.families.training.features.hardware.progress import HardwareProgress
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.families.training.training import Training
from perseus_operator.jobs import document
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.gpu import Gpu, StoredLatency, latency_from_json, latency_to_json
from perseus_operator.nodes.iterations import JobIteration, Measured
from perseus_operator.nodes.latencies import ENOUGH_CHANGES
from perseus_operator.objects.values import JobRef
from perseus_operator.solving.view import FrontierView

A100 = "NVIDIA A100-SXM4-80GB"
H100 = "NVIDIA H100 80GB HBM3"


def latency(p50_us: int = 20_000, p99_us: int = 50_000, *, changes: int = 1000, **other: Any) -> ClockLatency:
    given: dict[str, Any] = {"call_us": 4_500, "shared_lock": True, **other}
    return ClockLatency(p50_us, p99_us, changes=changes, **given)


def describe(job: Any, model: str = A100, *, measured: ClockLatency | None = None, driver: str = "560.1") -> None:
    """Every agent describes the GPUs of its ranks."""
    for node in job.nodes:
        node.gpus_described({}, {}, {rank.gpu_uuid: Gpu(model, driver, measured) for rank in node.ranks.values()})


def learn(job: Any) -> JobHardware | None:
    found: JobHardware | None = job.decide().hardware
    job.state.hardware.adopted(found)
    return found


def rehearsed(job: Any) -> None:
    """A worker has rehearsed the frontier under what is in use."""
    hardware = job.state.hardware.in_use.to_json()
    digest = inputs_digest(job.spec, "csv", hardware=hardware)
    view, points = job.state.frontier, len(job.state.frontier.times_us)
    job.state.solve.frontier = replace(view, digest=digest, hardware=hardware, grains=(Grain.SEGMENT,) * points)


HARDWARE = st.builds(
    job_hardware,
    model=st.sampled_from([A100, H100]),
    p50_us=st.integers(1, 1_000_000),
    p99_us=st.integers(1_000_000, MAX_LATENCY_US // 2),
    call_us=st.integers(0, 1_000_000),
    gpus_per_lock=st.integers(1, 8),
    marks=st.sampled_from([None, *MarkSource]),
    noise=st.integers(0, 200_000).map(lambda ppm: ppm / 1e6),
    basis=st.sampled_from(LatencyBasis),
)


CLOCKS = st.dictionaries(st.integers(210, 2100), st.integers(1, 1_000_000), max_size=255)


@given(HARDWARE, CLOCKS)
def test_the_solver_reads_what_is_asked_of_it(hardware: JobHardware, medians_us: dict[int, int]) -> None:
    clocks = {mhz: hardware.latency.with_quantiles(p50_us, 2 * p50_us) for mhz, p50_us in medians_us.items()}
    asked = hardware.with_latency(hardware.latency, clocks)
    described = Hardware.from_json(asked.to_json())
    assert described.to_json() == asked.to_json()
    for mhz in (*clocks, 0):
        given, read = asked.latency_of(mhz), described.latency_of(mhz)
        assert (read.p50_us, read.p99_us, read.call_us) == (given.p50_us, given.p99_us, given.call_us)
    assert described.gpus_per_lock == hardware.gpus_per_lock
    assert described.marks is hardware.marks


@given(HARDWARE, st.floats(1 / CHANGE + 0.01, CHANGE - 0.01))
def test_small_changes_of_figures_change_nothing_that_plans_depend_on(hardware: JobHardware, factor: float) -> None:
    p50_us, latency = hardware.latency.p50_us, hardware.latency
    again = hardware.with_latency(latency.with_quantiles(p50_us * factor, latency.p99_us), hardware.clocks)
    if abs(again.latency.p50_us - p50_us * factor) * 100 > p50_us:
        return  # a microsecond is not small there
    kept = next_hardware(hardware, again)
    assert kept is not None
    assert kept.to_json() == hardware.to_json()


@given(HARDWARE)
def test_a_large_change_is_adopted_and_then_rests(hardware: JobHardware) -> None:
    slower = replace(hardware, latency=hardware.latency.faster(1 / 2))
    adopted = next_hardware(hardware, slower)
    assert adopted is not None
    assert adopted.to_json() != hardware.to_json()
    settled = next_hardware(adopted, slower)
    assert settled is not None
    assert settled.to_json() == adopted.to_json(), "rounding alone is no reason for another solve"
    assert next_hardware(adopted, None) == adopted, "what is not known for a while stays"


def test_marks_that_are_not_known_are_assumed_to_be_those_of_the_gpu() -> None:
    unknown = job_hardware(A100, 5_000, 14_000)
    learned = next_hardware(unknown, unknown.marked_by(MarkSource.GPU))
    assert learned is not None
    assert learned.marks is MarkSource.GPU
    assert learned.to_json() == unknown.to_json()
    assert next_hardware(learned, unknown) == learned, "an operator that has had no reports yet forgets nothing"
    host = next_hardware(learned, unknown.marked_by(MarkSource.HOST))
    assert host is not None
    assert host.to_json() != unknown.to_json()


def test_what_is_not_measured_is_the_published_worst_of_the_model(job: Any) -> None:
    job.run()
    assert job.decide().hardware is None, "no agent has described a GPU"
    describe(job, H100)
    found = learn(job)
    assert found is not None
    assumed = published_latency(H100)
    assert (found.latency.p50_us, found.latency.p99_us) == (us_from_s(assumed.p50_s), us_from_s(assumed.p99_s))
    assert not found.measured
    assert found.latency.source == assumed.source
    describe(job, H100, measured=latency(changes=ENOUGH_CHANGES - 1))
    assert learn(job) == found, "a few changes are no distribution"


def test_changes_of_a_sweep_count_together_though_each_gpu_has_few(job: Any) -> None:
    """Agents whose GPU has changed clocks a few times describe the published figures, and those few transitions."""
    job.run()
    gpus = len(job.state.nodes.ranks)
    few = tuple(
        Transition(1410 - 15 * n, 1395 - 15 * n, 1, 40_000 + n, 80_000) for n in range(-(-ENOUGH_CHANGES // gpus))
    )
    describe(job, H100, measured=latency(30_000, 100_000, changes=0, transitions=few))
    found = learn(job)
    assert found is not None
    assert found.basis is LatencyBasis.MEASURED
    assert found.latency.p50_us == pytest.approx(40_000, rel=0.13)
    stored = job_latency(job.state.nodes.gpus)
    assert stored is not None
    assert stored.latency.changes == gpus * len(few)
    assert latency_from_json(latency_to_json(stored)) == stored
    describe(job, A100, measured=latency(5_400, 14_000, changes=0, transitions=few[:2]))
    other = learn(job)
    assert other is not None
    assert other.basis is LatencyBasis.ASSUMED


def test_a_stored_latency_counts_for_its_own_model_until_one_is_measured(job: Any) -> None:
    job.run()
    job.state.profile_accepted("csv", None, StoredLatency(H100, "560.1", latency(90_000, 300_000)))
    describe(job, A100)
    other = learn(job)
    assert other is not None
    assert not other.measured
    describe(job, H100)
    stored = learn(job)
    assert stored is not None
    assert stored.measured
    assert "stored with the profile" in stored.latency.source
    assert stored.latency.p50_us == pytest.approx(90_000, rel=0.13)
    describe(job, H100, measured=latency(20_000, 50_000))
    own = learn(job)
    assert own is not None
    assert own.basis is LatencyBasis.MEASURED
    assert own.latency.p50_us == pytest.approx(20_000, rel=0.13)


def test_the_slowest_gpu_counts_and_of_many_not_a_single_broken_one(make_job: Any) -> None:
    shape = {"schedule": "1F1B", "stages": 2, "microbatches": 4}

    def p50_us(pipelines: int) -> int:
        job = make_job(pipeline={**shape, "dataParallel": pipelines})
        job.run()
        describe(job, measured=latency(10_000, 20_000))
        job.nodes[0].gpus["GPU-0-0"] = Gpu(A100, "560.1", latency(500_000, 900_000))
        found = learn(job)
        assert found is not None
        return found.latency.p50_us

    assert p50_us(2) > 400_000
    assert p50_us(20) < 12_000


def test_gpus_of_one_stage_on_a_node_share_its_lock_if_the_driver_has_one(make_job: Any) -> None:
    job = make_job()
    job.run()
    node = job.nodes[0]
    together = [replace(rank, dp=0, stage=0, tp=number) for number, rank in enumerate(job.state.nodes.ranks)]
    job.nodes[1].ranks = {}
    node.ranks = {rank.id: rank for rank in together}
    describe(job, measured=latency(shared_lock=True))
    found = job.decide().hardware
    assert found is not None
    assert found.gpus_per_lock == 4
    describe(job, measured=latency(shared_lock=False))
    alone = job.decide().hardware
    assert alone is not None
    assert alone.gpus_per_lock == 1


def test_plans_are_made_for_as_many_pipelines_as_the_job_has(make_job: Any) -> None:
    """Also by an operator that knows the hardware from the status: the spec says how many there are."""
    pipelines = {}
    for number in (2, 3):
        job = make_job(pipeline={"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": number})
        job.run()
        describe(job, measured=latency())
        job.state.hardware.adopted(replace(job.decide().hardware, pipelines=1))
        found = job.decide().hardware
        assert found is not None
        pipelines[number] = json.loads(found.to_json())["pipelines"]
    assert pipelines == {2: 2, 3: 3}


def test_while_ranks_are_missing_nothing_is_concluded(job: Any) -> None:
    job.run()
    describe(job)
    known = learn(job)
    job.state.rank_left(job.nodes[0], job.state.nodes.ranks[0])
    assert job.decide().hardware == known


@pytest.mark.parametrize(("changes", "p99_us"), [(4, 100_000), (74, 100_000), (75, 50_000), (128, 50_000)])
def test_the_longest_of_few_changes_is_no_tail(job: Any, changes: int, p99_us: int) -> None:
    """Four GPUs with so many changes each: none of them took as long as one in a hundred is said to take."""
    job.run()
    describe(job, H100)
    assert learn(job).latency.p99_us == 100_000
    transition = Transition(1980, 1200, changes, 30_000, 50_000)
    describe(job, H100, measured=latency(30_000, 50_000, changes=changes, transitions=(transition,)))
    found = learn(job)
    assert found.measured is (4 * changes >= 32)
    assert found.latency.p99_us == pytest.approx(p99_us, rel=0.15), "rounded, so that jobs share a frontier"


def test_a_frontier_is_solved_again_for_the_hardware_and_the_old_plan_stays_meanwhile(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    job.run()
    describe(job)
    learn(job)
    assert [type(action) for action in job.decide().actions] == [Solve]
    rehearsed(job)
    job.settle()
    before = {node.name: dict(node.plans.selected) for node in job.nodes}
    describe(job, measured=latency(60_000, 200_000))
    learn(job)
    solves = [action for action in job.decide().actions if isinstance(action, Solve)]
    assert [solve.digest for solve in solves] == [
        inputs_digest(job.spec, "csv", hardware=job.state.hardware.in_use.to_json())
    ]
    job.state.solve.started(solves[0].digest, solves[0].basis)
    made = job.settle()
    assert {node.name: dict(node.plans.selected) for node in job.nodes} == before
    assert made.applied


def test_plans_that_were_never_rehearsed_are_not_deployed_on_gpus_that_are_known(make_job: Any) -> None:
    job = make_job()
    job.solve()
    job.start_pods()
    job.connect_ranks()
    describe(job)
    learn(job)
    made = job.settle()
    assert made.waiting is not None
    assert made.waiting.reason is Reason.WAITING_FOR_FRONTIER
    assert "rehearsed for NVIDIA A100" in made.waiting.message
    assert not any(node.plans.selected for node in job.nodes)
    rehearsed(job)
    assert job.settle().applied


def test_scatter_is_the_deviation_of_durations_and_not_a_single_slow_one() -> None:
    assert scatter([[100, 200]], [[100, 200]]) == 0
    assert scatter([], [[1]]) is None
    steady = [[1000] * 99]
    once = scatter(steady, [[1000] * 98 + [9000]])
    assert once == 0
    shifted = scatter(steady, [[1010] * 99])
    assert shifted is not None
    assert 0.01 <= shifted <= 0.011


def observed(progress: HardwareProgress, durations_us: list[int], point: int | None = None) -> float | None:
    """Iterations in a row, each of ten instructions of the same duration."""
    for number, us in enumerate(durations_us):
        stages = {0: ([us] * 10,)}
        progress.iteration_observed(JobIteration(number, {0: 1}, 1, None, {0: point}, mixed=False, stages_us=stages))
    return progress.noise


def test_scatter_is_measured_at_default_clocks_by_a_bounded_number_of_neighbours() -> None:
    progress = HardwareProgress()
    assert observed(progress, [1000] * 20, point=3) is None, "plans scatter durations themselves"
    noise = observed(progress, [1000, 1010] * 500)
    assert noise is not None
    assert 0.01 <= noise <= 0.011
    assert len(progress.scatters) < 100
    progress.adopted(job_hardware(A100, 5_000, 14_000, noise=0.007))
    progress.restarted()
    assert observed(progress, []) == 0.007, "another attempt of the training is on the same GPUs"


def test_an_agent_that_has_just_started_takes_nothing_back(job: Any) -> None:
    job.run()
    describe(job, measured=latency(60_000, 200_000))
    known = learn(job)
    describe(job)
    assert learn(job) == known
    describe(job, H100)
    other = learn(job)
    assert other is not None
    assert other.basis is LatencyBasis.ASSUMED, "other GPUs"


def test_measured_latency_is_stored_for_the_model_and_read_back() -> None:
    steps = (Transition(0, 1410, 40, 18_000, 70_000),)
    gpus = [Gpu(A100, "560.1", latency(transitions=steps)), Gpu(A100, "560.1"), Gpu(H100, "560.1")]
    found = job_latency(gpus)
    assert found is not None
    assert (found.model, found.driver) == (A100, "560.1")
    assert found.latency.transitions == steps
    assert latency_from_json(latency_to_json(found)) == found
    assert job_latency([Gpu(A100, "560.1", latency(changes=3))]) is None


@pytest.mark.parametrize(
    "change", [{"p50Microseconds": 0}, {"p99Microseconds": 1}, {"changes": "many"}, {"transitions": [[1]]}]
)
def test_a_damaged_or_impossible_latency_is_none(change: dict[str, Any]) -> None:
    text = latency_to_json(StoredLatency(A100, "1", latency()))
    assert latency_from_json(text) is not None
    assert latency_from_json(json.dumps({**json.loads(text), **change})) is None
    assert latency_from_json(text[:-3]) is None
    assert latency_from_json("") is None


# ------------------------------------------------------------------------------------------------------ the status


@given(HARDWARE, st.none() | st.integers(-1000, 10**6))
def test_a_later_operator_goes_on_with_the_same_hardware(hardware: JobHardware, lead_us: int | None) -> None:
    stored = dump(hardware_to_status(hardware, lead_us))
    assert hardware_from_status(stored) == hardware
    assert parse(HardwareStatus, stored, "status.hardware")
    assert set(stored) <= set(openapi_of(HardwareStatus)["properties"])


@pytest.mark.parametrize("broken", [None, {}, {"gpu": "A100"}, [], {"gpu": 3}])
def test_a_status_that_cannot_be_read_holds_no_hardware(broken: object) -> None:
    assert hardware_from_status(broken) is None


def test_a_restarted_operator_finds_its_frontier_again(job: Any, make_job: Any) -> None:
    job.run()
    describe(job, measured=latency())
    learn(job)
    rehearsed(job)
    job.settle()
    stored = document.document([], status.figures(job.state, job.decide()), {}, generation=1, wall_s=job.wall_s)
    heir = make_job()
    restore_from_status(heir.state, stored, now_s=0.0, wall_s=0.0)
    heir.state.profile_accepted("csv", None)
    heir.state.inputs.read_ended(at_s=heir.now_s)
    assert [a.digest for a in heir.decide().actions if isinstance(a, Solve)] == [job.state.frontier.digest]


def test_the_plan_says_its_grain_why_and_what_to_expect(make_job: Any) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    job.run()
    plain = status.figures(job.state, job.decide()).plan
    assert plain is not None
    assert (plain.grain, plain.reason, plain.expected_savings) == (None, None, None)
    describe(job, measured=latency(60_000, 200_000))
    learn(job)
    rehearsed(job)
    view = job.state.frontier
    medians = tuple(round(0.99 * time_us) for time_us in view.times_us)
    job.state.solve.frontier = replace(view, medians_us=medians, highest_mj=1_250_000, instruction_us=12_000)
    made = job.settle()
    shown = status.figures(job.state, made)
    assert shown.plan is not None
    assert shown.plan.grain == "Segment"
    assert shown.plan.reason is not None
    assert shown.plan.reason.startswith("Clock changes take ")
    assert "instructions 12 ms: one clock for each part of a stage" in shown.plan.reason
    point = shown.plan.point
    assert shown.plan.expected_savings == f"{100 * (1 - view.energies_mj[point] / 1_250_000):.2f}%"
    assert shown.plan.expected_iteration_time_microseconds == medians[point]
    assert shown.plan.kept_iteration_time_microseconds == view.times_us[point]
    assert shown.predicted is not None
    assert shown.predicted.iteration_time_microseconds == medians[point], "a prediction is what is expected"


@pytest.mark.parametrize("scatter", [1.0, 1.02, 1.15])
def test_scatter_uses_up_nothing_of_the_allowed_slowdown(make_job: Any, scatter: float) -> None:
    job = make_job(objective={"type": "MaxSlowdown", "maxSlowdown": "10%"})
    job.state.baseline = Measured(1_000_000, 1000, 5)
    job.run()
    describe(job)
    learn(job)
    rehearsed(job)
    view = job.state.frontier
    kept_us = tuple(round(scatter * time_us) for time_us in view.times_us)
    job.state.solve.frontier = replace(view, times_us=kept_us, medians_us=view.times_us, allowance=scatter - 1)
    made = job.settle()
    assert set(made.wanted.values()) == {2}, "1.1 s, whatever iterations scatter"
    assert made.bound_us == pytest.approx(1_100_000 * scatter)
    job.train_on(1, 40, 1.0)  # every iteration as late as one in twenty is
    assert set(job.settle().wanted.values()) == {2}, "the guard knows that they scatter"


def test_a_lead_that_changes_is_no_reason_to_write_at_once() -> None:
    hardware = job_hardware(A100, 5_000, 14_000)
    documents = [{"hardware": dump(hardware_to_status(hardware, lead_us))} for lead_us in (1000, 2000)]
    assert document.essence(documents[0]) == document.essence(documents[1])
    changed = {"hardware": dump(hardware_to_status(replace(hardware, latency=latency(6_000, 14_000)), 1000))}
    assert document.essence(changed) != document.essence(documents[0])


def test_older_agents_leave_everything_unknown(job: Any) -> None:
    job.run()
    for iteration in range(20):
        job.train(iteration)
    assert job.state.evidence == Evidence()
    assert status.figures(job.state, job.decide()).hardware is None
    describe(job)
    shown = status.figures(job.state, job.decide()).hardware
    assert shown is not None
    assert (shown.marks, shown.median_lead_microseconds, shown.figures) == ("Unknown", None, "Assumed")


def test_marks_that_most_iterations_report_are_learned(job: Any) -> None:
    job.run()
    describe(job)
    learn(job)
    for iteration in range(15):
        job.train(iteration, evidence=Evidence(marks=MarkSource.HOST, control=ClockControl.HELD, lead_us=40_000))
    found = job.decide().hardware
    assert found is not None
    assert found.marks is MarkSource.HOST
    assert job.state.evidence.lead_us == 40_000


def test_a_frontier_stays_ready_while_it_is_solved_again_for_what_was_measured() -> None:
    """Another profile makes it unready; another hardware or calibration does not."""
    job = Training(PerseusJob(JobRef("default", "gpt3", "u-1")))
    view = FrontierView("d", (100,), (100,), 1, 0, 0, 0, 0, restored=False)
    job.solve.started("d", "basis")
    assert not job.solve.refining
    job.solve_succeeded(view, None)  # type: ignore[arg-type]
    job.solve.ended()
    assert not job.solve.refining
    job.solve.started("measured", "basis")
    assert job.solve.refining
    job.solve.ended()
    job.solve.started("edited", "another basis")
    assert not job.solve.refining
