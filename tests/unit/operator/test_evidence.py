"""What agents report of clocks and GPUs: taken as it is, bounded, and unknown where an older agent says nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.evidence import HELD_SHARE, Evidence, combine, summarise
from perseus_core.iteration import IterationReport
from perseus_core.marks import BEST_MARKS_FIRST, ClockControl, MarkSource
from perseus_operator.clients.agents.hardware import gpu_of
from perseus_operator.nodes.iterations import History
from perseus_proto.iteration import decode_iteration
from perseus_proto.v1alpha1 import agent_pb2 as pb

figures = st.none() | st.integers(0, 10**9)
EVIDENCE = st.builds(
    Evidence,
    marks=st.sampled_from([None, *MarkSource]),
    control=st.sampled_from([None, *ClockControl]),
    lead_us=st.none() | st.integers(-(10**6), 10**6),
    below_us=figures,
    above_us=figures,
    computing_us=st.integers(0, 10**9),
    clock_mhz=st.none() | st.integers(1, 2000),
    limited_mhz=st.none() | st.integers(1, 2000),
)


def report(**fields: Any) -> pb.IterationReport:
    return pb.IterationReport(durations_us=[1000, 3000], compute_span_us=5000, **fields)


def evidence_of(message: pb.IterationReport) -> Evidence | None:
    read = decode_iteration(message)
    assert read is not None
    return read.evidence


def test_an_older_agent_says_nothing() -> None:
    assert evidence_of(report()) is None
    assert gpu_of(pb.Gpu(model="NVIDIA A100-SXM4-80GB"), "560.1").latency is None


def test_what_is_reported_is_taken() -> None:
    found = evidence_of(
        report(
            marks=pb.MARK_SOURCE_EVENTS,
            control=pb.CLOCK_CONTROL_TIMETABLE,
            leads_us=[10, 30_000, 40_000],
            below_plan_us=400,
            above_plan_us=0,
            median_clock_mhz=1335,
            power_limited=True,
        )
    )
    assert found == Evidence(MarkSource.EVENTS, ClockControl.TIMETABLE, 30_000, 400, 0, 4000, 1335, 1335)
    assert found.below_share == 0.1
    assert found.above_share == 0.0, "measured, and none: that is known"


def test_what_is_not_known_is_not_zero() -> None:
    found = evidence_of(report(marks=pb.MARK_SOURCE_HOST))
    assert found is not None
    assert (found.lead_us, found.below_us, found.above_us, found.clock_mhz) == (None, None, None, None)
    assert found.below_share is None


def test_impossible_figures_are_bounded() -> None:
    found = evidence_of(report(marks=pb.MARK_SOURCE_GPU, control=pb.CLOCK_CONTROL_HELD, below_plan_us=10**12))
    assert found is not None
    assert found.below_share == 1.0
    newer = evidence_of(report(marks=17, control=99, median_clock_mhz=1000))
    assert newer is not None
    assert (newer.marks, newer.control) == (None, None), "a newer agent's words"


@pytest.mark.parametrize("given", [(0, 0), (10, 5), (61_000_000, 62_000_000)])
def test_a_latency_that_cannot_be_true_is_none(given: tuple[int, int]) -> None:
    message = pb.Gpu(clock_latency=pb.ClockLatency(p50_us=given[0], p99_us=given[1], changes=10))
    assert gpu_of(message, "").latency is None


def test_a_latency_has_all_its_figures() -> None:
    step = pb.ClockTransition(from_mhz=0, to_mhz=1410, changes=7, p50_us=5_000, p99_us=9_000)
    message = pb.ClockLatency(
        p50_us=5_000, p99_us=9_000, call_p50_us=4_500, changes=70, shared_lock=True, transitions=[step] * 100
    )
    found = gpu_of(pb.Gpu(model="A" * 1000, clock_latency=message), "560.1")
    assert len(found.model) == 256
    assert found.latency is not None
    assert (found.latency.p50_us, found.latency.p99_us, found.latency.call_us) == (5_000, 9_000, 4_500)
    assert found.latency.shared_lock
    assert len(found.latency.transitions) == 64


@given(st.lists(st.none() | EVIDENCE, max_size=8))
def test_of_several_ranks_the_worst_counts_whatever_their_order(ranks: list[Evidence | None]) -> None:
    found = combine(ranks)
    assert found == combine(reversed(ranks))
    known = [rank for rank in ranks if rank is not None]
    if found is None:
        assert not known
        return
    marks = [BEST_MARKS_FIRST.index(rank.marks) for rank in known if rank.marks]
    assert found.marks == (BEST_MARKS_FIRST[max(marks)] if marks else None)
    limited = [rank.limited_mhz for rank in known if rank.limited_mhz is not None]
    assert found.limited_mhz == min(limited, default=None)
    assert combine([found]) == found


@given(st.lists(st.none() | EVIDENCE, max_size=8))
def test_a_summary_says_only_what_some_iteration_said(iterations: list[Evidence | None]) -> None:
    found = summarise(iterations)
    known = [iteration for iteration in iterations if iteration is not None]
    assert found.marks in {None, *(iteration.marks for iteration in known)}
    assert (found.below_us is None) == all(iteration.below_us is None for iteration in known)
    leads = [iteration.lead_us for iteration in known if iteration.lead_us is not None]
    assert (found.lead_us is None) == (not leads)
    if leads and found.lead_us is not None:
        assert min(leads) <= found.lead_us <= max(leads)


def test_an_iteration_held_above_its_plan_proves_nothing_of_the_plan() -> None:
    """Held clocks pass while a timetable is made; where GPU times are never known they are held for good."""
    held = Evidence(marks=MarkSource.GPU, control=ClockControl.HELD, above_us=50, computing_us=100)
    assert held.is_transition
    for other in (
        replace(held, above_us=0),
        replace(held, above_us=None),
        replace(held, control=ClockControl.TIMETABLE),
        replace(held, marks=MarkSource.HOST),
    ):
        assert not other.is_transition
    history = History(pipelines=1, ranks_per_pipeline=1)
    for iteration, evidence in enumerate((held, replace(held, above_us=0))):
        found = history.add(IterationReport(0, 0, 0, iteration, 100, 90, None, 3, evidence=evidence))
        assert found is not None
        assert found.mixed == evidence.is_transition


def test_ranks_that_raise_early_and_one_that_holds_its_only_clock_are_no_transition() -> None:
    """Otherwise a straggler was not seen: of the whole pipeline, one rank is held and time is spent above the plan."""
    raises_early = Evidence(MarkSource.GPU, ClockControl.TIMETABLE, above_us=8, computing_us=100)
    one_clock = Evidence(MarkSource.GPU, ClockControl.HELD, above_us=0, computing_us=100)
    together = combine([raises_early, raises_early, one_clock])
    assert together is not None
    assert together.control is ClockControl.HELD
    assert (together.above_share or 0) > HELD_SHARE
    history = History(pipelines=1, ranks_per_pipeline=3)
    reports = [
        IterationReport(0, stage, 0, 0, 100, 90, None, 3, evidence=evidence)
        for stage, evidence in enumerate((raises_early, raises_early, one_clock))
    ]
    *_, found = [history.add(report) for report in reports]
    assert found is not None
    assert not found.mixed
