"""Latencies by the clock that is changed to: what agents measure, and when it is adopted; they outlive the operator."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.job_hardware import job_hardware
from tests.doubles.job_hardware import latency as measured
from tests.unit.operator.test_hardware import A100, H100, HARDWARE, describe, latency, learn, rehearsed

from perseus_core.clock_latency import MAX_CLOCK_MHZ, MAX_CLOCKS, Transition
from perseus_core.latency import MAX_LATENCY_US
from perseus_operator.api.schema import dump, openapi_of
from perseus_operator.api.status import HardwareStatus
from perseus_operator.families.training.features.frontier.inputs import Solve
from perseus_operator.families.training.features.hardware.hardware import (
    CHANGE,
    ONE_CLOCK,
    JobHardware,
    LatencyBasis,
    hardware_from_status,
    hardware_to_status,
    next_hardware,
)
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.jobs import document
from perseus_operator.nodes.gpu import Gpu, StoredLatency
from perseus_operator.nodes.latencies import latency_by_clock, measured_latency

QUICK, SLOW = 900, 1410
SPLIT = (Transition(0, QUICK, 100, 8_000, 12_000), Transition(QUICK, SLOW, 100, 60_000, 90_000))


MICROSECONDS = st.integers(2_000, 1_000_000)
CLOCKS = st.dictionaries(
    st.integers(1, 30), st.builds(lambda a, b: measured(min(a, b), max(a, b)), MICROSECONDS, MICROSECONDS), max_size=8
)
KNOWN = st.builds(lambda hardware, clocks: hardware.with_latency(hardware.latency, clocks), HARDWARE, CLOCKS)


def adopted(in_use: JobHardware | None, found: JobHardware) -> JobHardware:
    hardware = next_hardware(in_use, found)
    assert hardware is not None
    return hardware


# --------------------------------------------------------------------------------------------------- what is measured


def test_a_clock_has_the_latency_that_its_own_changes_had(job: Any) -> None:
    job.run()
    describe(job, measured=latency(20_000, 100_000, transitions=SPLIT))
    found = learn(job)
    assert found is not None
    own = found.clocks
    assert own.keys() == {QUICK, SLOW}, "the default clocks are none that plans have"
    assert own[QUICK].p50_us == pytest.approx(8_000, rel=0.15)
    assert own[SLOW].p50_us == pytest.approx(60_000, rel=0.15)
    assert found.latency.p50_us >= 20_000 / 1.15
    given = json.loads(found.to_json())["switch_latency_s"]
    assert given["clocks"] == {str(mhz): {"p50": one.p50_us / 1e6, "p99": one.p99_us / 1e6} for mhz, one in own.items()}


def test_changes_of_all_gpus_to_a_clock_count_together(job: Any) -> None:
    job.run()
    few = Transition(0, SLOW, 1, 60_000, 60_000)
    describe(job, measured=latency(20_000, 100_000, transitions=(few,)))
    assert len(job.state.nodes.ranks) == 4
    assert learn(job).clocks == {}
    describe(job, measured=latency(20_000, 100_000, transitions=(few, replace(few, from_mhz=QUICK))))
    assert [*learn(job).clocks] == [SLOW]


def test_a_job_that_has_measured_nothing_knows_the_clocks_of_the_profile_and_guesses_none(job: Any) -> None:
    job.run()
    describe(job, H100)
    assert learn(job).clocks == {}
    job.state.profile_accepted("csv", None, StoredLatency(H100, "560.1", latency(20_000, 100_000, transitions=SPLIT)))
    assert [*learn(job).clocks] == [QUICK, SLOW]
    assert job.state.hardware.in_use.basis is LatencyBasis.STORED


def test_the_slowest_gpu_counts_for_each_clock_too(job: Any) -> None:
    """An iteration waits for it: what most GPUs need would be too little."""
    job.run()
    describe(job, measured=latency(20_000, 100_000, transitions=SPLIT))
    before = {mhz: one.p50_us for mhz, one in learn(job).clocks.items()}
    slower = tuple(replace(one, p50_us=4 * one.p50_us, p99_us=4 * one.p99_us) for one in SPLIT)
    node = job.nodes[0]
    slow = Gpu(A100, "560.1", latency(80_000, 400_000, transitions=slower))
    node.gpus_described({}, {}, {**node.gpus, "GPU-0-0": slow})
    after = {mhz: one.p50_us for mhz, one in learn(job).clocks.items()}
    assert all(after[mhz] > 2 * before[mhz] for mhz in (QUICK, SLOW))


@pytest.mark.parametrize("own", [0.2, 0.35, 0.5])
@pytest.mark.parametrize("each", [1, 2, 3, 7])
def test_after_a_sweep_changes_scatter_as_those_to_one_clock_do(own: float, each: int) -> None:
    """Not as the clocks differ, nor as one GPU's longest change says."""
    chance, clocks, of_gpus = np.random.default_rng(each), range(900, 1500, 15), []
    usual_us = {mhz: 20_000 * np.exp(chance.normal(0.0, 0.4)) for mhz in clocks}
    for _ in range(32):
        seen = {mhz: np.sort(usual_us[mhz] * np.exp(chance.normal(0.0, own, each))).astype(int) for mhz in clocks}
        swept = tuple(Transition(0, mhz, each, int(us[each // 2]), int(us[-1])) for mhz, us in seen.items())
        p50_us, p99_us = np.quantile(np.concatenate([*seen.values()]), [0.5, 0.99])
        of_gpus.append(latency(int(p50_us), int(p99_us), changes=each * len(clocks), transitions=swept))
    overall = measured_latency(A100, of_gpus)
    assert overall is not None
    found = latency_by_clock(overall, of_gpus)
    assert [*found] == [*clocks]
    for one in found.values():
        assert math.log(one.p99_us / one.p50_us) / 2.3263 == pytest.approx(own, rel=0.12)


@given(
    st.lists(
        st.lists(
            st.builds(Transition, *[st.sampled_from([0, 1, 7, 8, 900, 10_000, 10_001, 2**32 - 1, 10**400])] * 5),
            max_size=64,
        ),
        max_size=4,
    ),
    st.integers(1, MAX_LATENCY_US),
    st.integers(1, MAX_LATENCY_US),
)
def test_whatever_agents_and_profiles_say_latencies_are_possible(
    transitions: Sequence[Sequence[Transition]], one_us: int, other_us: int
) -> None:
    overall = latency(min(one_us, other_us), max(one_us, other_us))
    found = latency_by_clock(overall, [replace(overall, transitions=tuple(of_gpu)) for of_gpu in transitions])
    said = {one.to_mhz for of_gpu in transitions for one in of_gpu}
    assert [*found] == sorted(found.keys() & said)
    assert all(0 < mhz <= MAX_CLOCK_MHZ for mhz in found)
    assert all(1 <= one.p50_us <= one.p99_us <= MAX_LATENCY_US for one in found.values())


def test_no_more_clocks_are_known_than_agents_and_status_take() -> None:
    """The most frequent ones; and of those in use none is removed for another."""
    many = tuple(Transition(0, mhz, 10 + mhz, 50_000, 60_000) for mhz in range(1, MAX_CLOCKS + 11))
    found = latency_by_clock(latency(), [latency(transitions=many)])
    assert [*found] == list(range(11, MAX_CLOCKS + 11))
    hardware = replace(job_hardware(A100, 20_000, 50_000, basis=LatencyBasis.MEASURED), clocks=found)
    others = {mhz: measured(900_000, 2_000_000) for mhz in range(1, MAX_CLOCKS + 1)}
    kept = adopted(hardware, replace(hardware, latency=measured(200_000, 500_000), clocks=others))
    assert [*kept.clocks] == [*found]
    schema = openapi_of(HardwareStatus)["properties"]["clocks"]
    assert schema["maxItems"] == MAX_CLOCKS
    assert schema["items"]["properties"]["megahertz"]["maximum"] == MAX_CLOCK_MHZ


# --------------------------------------------------------------------------------------------------- what is adopted


@given(st.none() | KNOWN, KNOWN)
def test_clocks_are_added_and_never_removed_on_gpus_of_one_model(
    in_use: JobHardware | None, found: JobHardware
) -> None:
    hardware = adopted(in_use, found)
    before = {*in_use.clocks} if in_use is not None and in_use.model == hardware.model else set()
    after = {*hardware.clocks}
    assert before <= after <= before | found.clocks.keys()
    if in_use is None or in_use.model != found.model:
        assert after == found.clocks.keys(), "what other GPUs need says nothing of these"


@given(st.none() | KNOWN, KNOWN)
def test_what_was_adopted_rests_as_long_as_the_same_is_found(in_use: JobHardware | None, found: JobHardware) -> None:
    first = adopted(in_use, found)
    assert adopted(first, found).to_json() == first.to_json()


@given(st.none() | KNOWN, KNOWN)
def test_clocks_that_nothing_is_known_of_take_at_least_as_long_as_the_one_in_the_middle(
    in_use: JobHardware | None, found: JobHardware
) -> None:
    hardware = adopted(in_use, found)
    if in_use is not None and hardware.clocks == in_use.clocks:
        return  # not adopted
    for figure, others in (("p50_us", hardware.latency.p50_us), ("p99_us", hardware.latency.p99_us)):
        own = sorted(getattr(one, figure) for one in hardware.clocks.values())
        assert not own or others >= own[(len(own) - 1) // 2] / 1.2, "but for rounding"


@given(KNOWN, st.data())
def test_agents_that_know_now_these_clocks_and_now_those_cause_no_solve_for_ever(
    known: JobHardware, data: st.DataObject
) -> None:
    """As plans change and agents start again. What is adopted each time knows at least one clock more."""
    known = replace(known, basis=LatencyBasis.MEASURED)
    in_use, adoptions = None, 0
    for _ in range(25):
        found = replace(known, clocks={mhz: one for mhz, one in known.clocks.items() if data.draw(st.booleans())})
        before, in_use = in_use, adopted(in_use, found)
        adoptions += before is None or before.to_json() != in_use.to_json()
    assert adoptions <= 1 + len(known.clocks)


@given(KNOWN, st.floats(1 / CHANGE + 0.01, ONE_CLOCK - 0.01), st.data())
def test_small_changes_of_a_clock_change_nothing_that_plans_depend_on(
    known: JobHardware, factor: float, data: st.DataObject
) -> None:
    in_use = adopted(None, known)
    again = {
        mhz: one.with_quantiles(one.p50_us * factor, one.p99_us * factor)
        if data.draw(st.booleans()) and min(one.p50_us, one.p50_us * factor) > 1_000
        else one
        for mhz, one in in_use.clocks.items()
    }
    found = replace(in_use, clocks=again)
    middle = [sorted(getattr(one, figure) for one in again.values()) for figure in ("p50_us", "p99_us")]
    if again and (
        in_use.latency.p50_us < middle[0][len(again) // 2] or in_use.latency.p99_us < middle[1][len(again) // 2]
    ):
        return  # what holds for all others changes with them
    assert adopted(in_use, found).to_json() == in_use.to_json()


def test_a_clock_that_takes_longer_than_what_is_in_use_for_it_is_worth_other_plans() -> None:
    own = {SLOW: (20_000, 60_000)}
    in_use = job_hardware(A100, 20_000, 60_000, basis=LatencyBasis.MEASURED, clocks=own)
    for slow in (measured(40_000, 60_000), measured(20_000, 120_000)):
        found = adopted(in_use, replace(in_use, clocks={SLOW: slow, SLOW + 15: measured(20_000, 60_000)}))
        assert [*found.clocks] == [SLOW, SLOW + 15]
        assert found.to_json() != in_use.to_json()
    assert adopted(in_use, replace(in_use, clocks={SLOW: measured(20_000, 60_000)})).to_json() == in_use.to_json()


@pytest.mark.parametrize(("p50_us", "worth"), [(2_000, False), (20_000, False), (34_000, False), (42_000, True)])
def test_where_some_clocks_are_known_another_one_is_worth_other_plans_only_if_it_is_slow(
    p50_us: int, worth: bool
) -> None:
    """Plans change to few clocks at a time, and each new plan to others: one after another they would be solved for."""
    nothing = job_hardware(A100, 20_000, 60_000, basis=LatencyBasis.MEASURED)
    known = dict.fromkeys((SLOW, SLOW + 15, SLOW + 30), measured(20_000, 60_000))
    first = adopted(nothing, replace(nothing, clocks=known))
    assert len(first.clocks) == len(known)
    found = adopted(first, replace(first, clocks={**first.clocks, SLOW + 45: measured(p50_us, 3 * p50_us)}))
    assert (found.to_json() != first.to_json()) == worth


def test_a_guess_takes_no_clock_back(job: Any) -> None:
    job.run()
    describe(job, measured=latency(20_000, 100_000, transitions=SPLIT))
    known = learn(job)
    describe(job)
    assert learn(job) == known
    describe(job, measured=latency(20_000, 100_000))
    assert learn(job) == known


# --------------------------------------------------------------------------------------------------------- the status


@given(KNOWN)
def test_clocks_outlive_the_operator(hardware: JobHardware) -> None:
    stored = dump(hardware_to_status(hardware, None))
    found = hardware_from_status(json.loads(json.dumps(stored)))
    assert found == hardware
    assert found.to_json() == hardware.to_json()
    if not hardware.clocks:
        assert "clocks" not in stored
    older = hardware_from_status({key: value for key, value in stored.items() if key != "clocks"})
    assert older == replace(hardware, clocks={}), "what an earlier release wrote"


def test_a_restarted_operator_does_not_solve_again_for_clocks_that_it_knew(job: Any, make_job: Any) -> None:
    job.run()
    describe(job, measured=latency(20_000, 100_000, transitions=SPLIT))
    assert learn(job).clocks
    rehearsed(job)
    job.settle()
    stored = document.document([], status.figures(job.state, job.decide()), {}, generation=1, wall_s=job.wall_s)
    heir = make_job()
    restore_from_status(heir.state, stored, now_s=0.0, wall_s=0.0)
    heir.run()
    for known in (None, latency(20_000, 100_000), latency(20_000, 100_000, transitions=SPLIT)):
        describe(heir, measured=known)
        learn(heir)
        assert {a.digest for a in heir.decide().actions if isinstance(a, Solve)} == {job.state.frontier.digest}


def test_other_latencies_of_a_clock_are_written_at_once() -> None:
    hardware = job_hardware(A100, 20_000, 60_000, clocks={SLOW: (30_000, 60_000)})
    slower = replace(hardware, clocks={SLOW: measured(50_000, 60_000)})
    written = [document.essence({"hardware": dump(hardware_to_status(each, 0))}) for each in (hardware, slower)]
    assert written[0] != written[1]
