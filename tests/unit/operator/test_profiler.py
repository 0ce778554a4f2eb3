"""The profiler keeps what it measures: over restarts, over an API server that fails, for this job and later ones."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.doubles.stored_objects import StoredObjects, stored_object

from perseus_core.clock_latency import ClockLatency
from perseus_core.iteration import IterationReport
from perseus_operator.api.conditions import Reason
from perseus_operator.api.stored import MAX_PROFILE_BYTES
from perseus_operator.errors import InvalidProfile, KubeUnavailable
from perseus_operator.families.training.features.profile.decision import SaveSweep, StoreProfile
from perseus_operator.families.training.features.profile.drift import DRIFT_ITERATIONS, DRIFT_REST
from perseus_operator.families.training.features.profile.reading import Mean, Reading, StageReading
from perseus_operator.families.training.features.profile.sweep import Recipe, Sweep
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work import profile_source
from perseus_operator.families.training.work.profile_source import StoredProfile
from perseus_operator.families.training.work.profiler import Profiler
from perseus_operator.nodes.gpu import Gpu, StoredLatency
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.plans import StoredPlans
from perseus_operator.objects.values import Json
from perseus_operator.solving.request import SolveRequest, schedule_of
from perseus_proto.planset import decode_plan_set

ONLINE: dict[str, Any] = {"profileRef": {"name": "p"}, "online": {}}
REQUEST = SolveRequest("", "1f1b", 2, 4, None, 0, 10)
CLOCKS = (1400, 1200)


def profiler(kube: StoredObjects, make_job: Any, **changes: Any) -> tuple[Profiler, Training]:
    state: Training = make_job(**{"profile": ONLINE, **changes}).state
    services: Any = SimpleNamespace(kube=kube, monotonic_s=lambda: 100.0, namespaces=())
    return Profiler(state, services), state


def reading(clock: int) -> Reading:
    means = {("forward", 0): Mean(4, 2e7 / clock, 3e3), ("backward", 0): Mean(4, 4e7 / clock, 5e3)}
    stage = StageReading(4e8 / clock, 40e3, means)
    return Reading(clock, 4e8 / clock, (stage, stage))


def sweep(*measured: int, replaces: str = "") -> Sweep:
    return Sweep(CLOCKS, "s", Recipe(2, 1.0, 10**12), tuple(map(reading, measured)), 5_000_000, replaces)


async def test_a_restarted_operator_goes_on_with_the_sweep(make_job: Any) -> None:
    kube = StoredObjects()
    first, state = profiler(kube, make_job)
    first.begin(sweep(1400))
    await first.write(SaveSweep())
    assert state.profiling.readings_stored == 1
    second, after = profiler(kube, make_job)
    await second.restore()
    assert after.profiling.sweep == sweep(1400)
    for damage in ("damaged", base64.b64encode(b"damaged").decode(), 7, None):
        kube.frontiers[state.ref.name] = stored_object("job", {"sweep": damage})
        third, damaged = profiler(kube, make_job)
        await third.restore()
        assert damaged.profiling.sweep is None


async def test_what_is_not_known_is_not_taken_for_nothing(make_job: Any) -> None:
    kube = StoredObjects()
    kube.failing = KubeUnavailable("away")
    own, state = profiler(kube, make_job)
    with pytest.raises(KubeUnavailable):
        await own.restore()
    own.begin(sweep(1400))
    await own.write(SaveSweep())
    assert (state.profiling.readings_stored, state.profiling.writing) == (0, False)
    assert state.profiling.retry_at_s > 100.0
    kube.failing = None
    await own.write(SaveSweep())
    assert (state.profiling.readings_stored, state.profiling.failures) == (1, 0)


async def test_a_finished_sweep_becomes_a_profile_that_other_jobs_can_use(make_job: Any) -> None:
    kube = StoredObjects()
    own, state = profiler(kube, make_job)
    own.begin(sweep(*CLOCKS))
    await own.write(SaveSweep())
    await own.write(StoreProfile())
    assert state.profiling.profile_stored
    assert state.inputs.read_at_s is None, "to be read back at once"
    spec = state.spec
    assert spec is not None
    found = await profile_source.read_profile(kube, "ns", spec)  # type: ignore[arg-type]
    assert found.csv.startswith(b"stage,instruction,frequency,time,energy\n")
    assert found.power_mw is not None
    assert found.power_mw > 0
    assert await own.end_sweep("digest of it")
    assert state.profiling.sweep is None
    assert "Measured at 2 clocks in 5 s of training: all clocks are measured." in state.profiling.summary
    assert kube.frontiers[state.ref.name].spec == {}, "nothing is left to go on with"
    assert not await own.end_sweep("digest of it")
    # A later job without a figure of its own takes the one that was measured; one of another shape is refused.
    other = make_job(profile=ONLINE, pipeline={"schedule": "1F1B", "stages": 3, "microbatches": 4}).spec
    with pytest.raises(InvalidProfile, match=r"PerseusProfile p was measured on 2 stages, spec\.pipeline has 3 stages"):
        await profile_source.read_profile(kube, "ns", other)  # type: ignore[arg-type]


async def test_how_long_changes_took_is_stored_with_the_profile_for_later_jobs(make_job: Any) -> None:
    kube = StoredObjects()
    own, state = profiler(kube, make_job)
    measured = ClockLatency(21_000, 80_000, 4_500, changes=500, shared_lock=True)
    node = Node("n", None, frozenset())
    node.rank_joined(Rank("pod", "GPU-0", 0, 0, 0, 1, 0))
    node.gpus_described({}, {}, {"GPU-0": Gpu("NVIDIA H100 80GB HBM3", "560.1", measured)})
    state.nodes._nodes["n"] = node
    own.begin(sweep(*CLOCKS))
    await own.write(StoreProfile())
    assert state.profiling.profile_stored
    spec = make_job(profile=ONLINE).spec
    stored = await profile_source.read_profile(cast(Any, kube), "ns", spec)
    assert stored.latency == StoredLatency("NVIDIA H100 80GB HBM3", "560.1", measured)
    kube.profiles["p"] = stored_object("p", {**kube.profiles["p"].spec, "switchLatency": "{"})
    damaged = await profile_source.read_profile(cast(Any, kube), "ns", spec)
    assert damaged.latency is None, "the published figures hold"


async def test_a_foreign_profile_is_never_overwritten(make_job: Any) -> None:
    kube = StoredObjects()
    own, state = profiler(kube, make_job)
    own.begin(sweep(*CLOCKS))
    kube.profiles["p"] = stored_object("p", {"csv": "theirs"}, ours=False)
    await own.write(StoreProfile())
    assert kube.profiles["p"].spec == {"csv": "theirs"}
    assert not state.profiling.profile_stored
    assert state.inputs.read_at_s is None, "and what is there is looked at"
    assert await own.end_sweep("digest of theirs"), "and ends the sweep"


async def test_measurements_that_are_no_profile_are_said_to_be(make_job: Any) -> None:
    own, state = profiler(StoredObjects(), make_job)
    bad = reading(1400)
    nothing = replace(bad, stages=tuple(replace(s, means={("forward", 0): Mean(4, 1.0, 1.0)}) for s in bad.stages))
    own.begin(replace(sweep(), clocks_mhz=(1400,), readings=(nothing,)))
    await own.write(StoreProfile())
    assert state.profiling.fault is not None
    assert state.profiling.fault.reason is Reason.PROFILING_FAILED
    assert "no 'backward' rows" in state.profiling.fault.message
    state.profiling.spec_changed()
    assert state.profiling.fault is None, "an edit is another chance"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"csv": "x"}, r"spec\.profile\.blockingPowerMilliwatts: must be set, as PerseusProfile p has none"),
        ({}, r"PerseusProfile p has no spec\.csv: nothing is measured yet"),
        ({"csv": "x", "blockingPowerMilliwatts": -1}, "must be an integer from 0 to 2000000"),
        ({"csv": "x", "blockingPowerMilliwatts": 2000001}, "must be an integer from 0 to 2000000"),
        ({"csv": 7}, r"PerseusProfile p: spec\.csv: must be CSV"),
        ({"csv": "x" * (MAX_PROFILE_BYTES + 1)}, r"PerseusProfile p: spec\.csv: must be CSV of at most 1000000"),
    ],
)
async def test_what_a_profile_holds_is_checked(make_job: Any, spec: Json, why: str) -> None:
    kube: Any = StoredObjects()
    kube.profiles["p"] = stored_object("p", spec, ours=False)
    with pytest.raises(InvalidProfile, match=why):
        await profile_source.read_profile(kube, "ns", make_job(profile=ONLINE).spec)


def reports(iteration: int, point: int | None = 0) -> Iterable[IterationReport]:
    """Of all ranks: two pipelines of two stages, eight instructions each."""
    for pipeline in range(2):
        for stage in range(2):
            yield IterationReport(
                pipeline, stage, 0, iteration, 10_000, 10_000, 1000, point, [1000] * 8, [100] * 8, iteration + 1
            )


def test_only_what_ran_under_the_sweeps_clocks_is_measured_and_nothing_while_a_gpu_is_hot(make_job: Any) -> None:
    kube = StoredObjects()
    own, state = profiler(kube, make_job)
    job = make_job(profile=ONLINE)
    job.start_pods()
    job.connect_ranks()
    state.nodes._nodes.update(job.state.nodes)
    nodes = [state.nodes[name] for name in sorted(state.nodes)]
    own.begin(sweep())

    def train(iteration: int) -> None:
        for report in reports(iteration):
            own.observe(nodes[report.dp], report, lambda: schedule_of(REQUEST, None))

    train(0)
    assert state.profiling.sweep is not None
    assert state.profiling.sweep == sweep(), "agents hold something else"
    plans = decode_plan_set(own.plan_set({0, 1}, lambda: schedule_of(REQUEST, None)))
    assert [set(plans.stage_clocks_mhz(0, point)) for point in range(2)] == [{clock} for clock in CLOCKS]
    for node in nodes:
        node.plans.stored(StoredPlans("clocks", state.profiling.sweep.digest, frozenset({0, 1})))
    train(1)  # its energy alone cannot be told: the agent's mean holds one that nobody has heard of
    train(2)
    train(3)
    assert state.profiling.iterations_counted == 1
    nodes[0].gpu_events["GPU-0-0", "THERMAL_SLOWDOWN"] = "hot"
    train(4)
    nodes[0].gpu_events.clear()
    train(5)
    train(6)
    assert state.profiling.iterations_counted == 1, "neither the hot one nor those that have no good neighbour"
    train(7)
    assert [found.clock_mhz for found in state.profiling.sweep.readings] == [1400]
    assert state.profiling.iterations_counted == 0


class Paces:
    """PlannedTimes that are kept, or are not."""

    def __init__(self, pace: float) -> None:
        self._pace = pace

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        return {0: (1.0, self._pace), 1: (1.0, self._pace)}


async def test_drift_of_a_profile_of_our_own_asks_for_another_and_then_rests(make_job: Any) -> None:
    own, state = profiler(StoredObjects(), make_job)
    state.inputs.profile_digest = "old"
    iteration = JobIteration(5, {0: 1, 1: 1}, 1, None, {0: 0, 1: 0}, mixed=False)
    solved: Any = SimpleNamespace(planned_times=Paces(1.2))
    ours, theirs = StoredProfile("p", b"", "ns", ours=True), StoredProfile("p", b"", "ns")
    for _ in range(2 * DRIFT_ITERATIONS):
        own.observe_drift(iteration, solved, theirs)
    assert state.profiling.stale_profile == "", "a profile that somebody has stored is theirs"
    for _ in range(DRIFT_ITERATIONS):
        own.observe_drift(iteration, solved, ours)
    assert state.profiling.stale_profile == "old"
    assert state.profiling.stale_reason == "Stage 1 takes 20% more time than profiled. "
    own.begin(sweep(*CLOCKS, replaces="old"))
    assert not await own.end_sweep("old"), "until there is another one"
    assert await own.end_sweep("new")
    assert state.profiling.drift.rest == 2 * DRIFT_REST
    for _ in range(2 * DRIFT_REST):
        own.observe_drift(iteration, solved, ours)
    assert state.profiling.stale_profile == ""
