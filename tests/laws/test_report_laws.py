"""Whatever ranks report (numbers that are equal, fall, shrink or are huge), what the operator keeps of them is bounded
by how many ranks there are, never by how much they have said; and nothing that they can write ends a reader.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.kept import kept

from perseus_core.evidence import Evidence
from perseus_core.iteration import IterationReport
from perseus_core.marks import ClockControl, MarkSource
from perseus_operator.clients.agents.validation import MAX_ITERATION, MAX_TIME_US, is_valid_report
from perseus_operator.families.training.features.hardware.progress import HardwareProgress
from perseus_operator.families.training.features.stragglers.detector import StragglerDetector
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.nodes.iterations import History
from perseus_operator.objects.values import JobRef
from perseus_proto.planset import MAX_INSTRUCTIONS
from perseus_solver.schedules import build_schedule

from perseus_operator.api.job import JobSpec  # isort: skip
from perseus_operator.api.schema import parse_spec  # isort: skip

PIPELINES, STAGES = 2, 2
SCHEDULE = build_schedule("1f1b", stages=STAGES, microbatches=2)
INSTRUCTIONS = 4
"""Of a stage of that schedule."""

numbers = st.sampled_from([0, 1, 2, 31, 32, 33, 1_000, 2**32 - 1, MAX_ITERATION - 1])
times_us = st.sampled_from([1, 2, 1_000, 2**32 - 1, MAX_TIME_US])
words = st.sampled_from([0, 1, 5, 2**32 - 1])
evidence = st.none() | st.builds(
    Evidence,
    marks=st.sampled_from([None, *MarkSource]),
    control=st.sampled_from([None, *ClockControl]),
    lead_us=st.none() | st.integers(-(2**31), 2**31),
    below_us=st.none() | words,
    above_us=st.none() | words,
    computing_us=words,
    clock_mhz=st.none() | words,
    limited_mhz=st.none() | words,
)
durations = st.just(()) | st.lists(words, min_size=INSTRUCTIONS, max_size=INSTRUCTIONS) | st.lists(words, max_size=9)


@st.composite
def reports(draw: st.DrawFn) -> IterationReport:
    """What a hostile process can make its agent say, or a hostile agent can say by itself."""
    return IterationReport(
        dp=draw(st.sampled_from([0, 1, 2, 2**32 - 1])),
        stage=draw(st.sampled_from([0, 1, 2, 2**32 - 1])),
        tp=draw(st.sampled_from([0, 0, 1])),
        iteration=draw(numbers),
        iteration_time_us=draw(times_us),
        compute_span_us=draw(times_us),
        energy_mj=draw(st.none() | words),
        point=draw(st.none() | words),
        durations_us=array("I", draw(durations)),
        instruction_energies_mj=array("I", draw(durations)),
        energy_iterations=draw(words),
        quiet_us=draw(words),
        quiet_mj=draw(words),
        evidence=draw(evidence),
        own_time=draw(st.booleans()),
        together=draw(st.just(()) | st.sampled_from([(0,), (0, 1), tuple(range(64))])),
    )


def spoken(way: str, count: int, instructions: int = INSTRUCTIONS) -> Iterator[IterationReport]:
    """Reports of one rank whose pipeline never becomes complete: its numbers go that way."""
    number = {
        "equal": lambda _: 7,
        "falling": lambda index: MAX_ITERATION - 1 - index,
        "rising": lambda index: index,
        "leaping": lambda index: index * 7_919 % 100_003,
    }[way]
    words_of = array("I", [1]) * instructions
    for index in range(count):
        yield IterationReport(0, 0, 0, number(index), 10, 10, 1, 0, words_of[:], words_of[:], 1)


WAYS = ["equal", "falling", "rising", "leaping"]


@pytest.mark.parametrize("way", WAYS)
def test_history_keeps_as_much_of_a_rank_that_talks_for_long(way: str) -> None:
    history = History(PIPELINES, STAGES)
    for report in spoken(way, 100):
        history.add(report)
    before = kept(history)
    for report in spoken(way, 2_500):
        history.add(report)
    assert kept(history) <= 1.2 * before + 100


def test_the_longest_schedule_keeps_no_more_than_a_mebibyte_of_a_rank() -> None:
    """2,500 reports of the most instructions with falling numbers kept 658 MB."""
    history = History(PIPELINES, STAGES)
    for report in spoken("falling", 100, MAX_INSTRUCTIONS):
        history.add(report)
    assert kept(history) <= (1 << 20) / 4 + 10_000


def test_long_reports_are_counted_in_iterations_that_a_short_one_has_opened() -> None:
    history = History(1, 2)
    long = array("I", [1]) * MAX_INSTRUCTIONS
    for iteration in range(40):
        history.add(IterationReport(0, 0, 0, iteration, 10, 10, 1, 0))
        history.add(IterationReport(0, 0, 1, iteration, 10, 10, 1, 0, long[:])) if iteration % 2 else None
        history.add(IterationReport(0, 0, 0, iteration, 10, 10, 1, 0, long[:]))
    assert kept(history) <= 10 * MAX_INSTRUCTIONS


@pytest.mark.parametrize("way", WAYS)
def test_a_sweep_keeps_as_much_of_a_rank_that_talks_for_long(way: str) -> None:
    aggregator = ProfileAggregator(SCHEDULE, JobShape(PIPELINES, STAGES, 1), 3)
    aggregator.begin(0)
    for report in spoken(way, 100):
        aggregator.observe(report, 900)
    before = kept(aggregator)
    for report in spoken(way, 2_500):
        aggregator.observe(report, 900)
    assert kept(aggregator) <= 1.2 * before + 100


def test_ranks_that_are_none_of_the_job_are_kept_nowhere() -> None:
    """A process may leave and join again as any rank, as often as it likes."""
    history = History(PIPELINES, 1)
    aggregator = ProfileAggregator(SCHEDULE, JobShape(PIPELINES, STAGES, 1), 3)
    aggregator.begin(0)
    empty = kept(history) + kept(aggregator)
    one = array("I", [1]) * INSTRUCTIONS
    for dp in range(2, 2_000):
        report = IterationReport(dp, 0, 0, 1, 10, 10, 1, 0, one, one, 1)
        history.add(report)
        aggregator.observe(report, 900)
    assert kept(history) + kept(aggregator) <= empty + 100


@settings(max_examples=60)
@given(st.lists(reports(), max_size=60))
def test_no_report_ends_a_reader_and_all_keep_a_bounded_amount(said: list[IterationReport]) -> None:
    said = [report for report in said if is_valid_report(report)]
    state, history = Training(PerseusJob(JobRef("a", "b", "u"))), History(PIPELINES, STAGES)
    spec = parse_spec(
        JobSpec,
        {
            "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": 2, "dataParallel": PIPELINES},
            "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        },
    )
    state.spec_accepted(spec)
    aggregator, detector, hardware = (
        ProfileAggregator(SCHEDULE, JobShape(PIPELINES, STAGES, 1), 3),
        StragglerDetector(),
        HardwareProgress(),
    )
    aggregator.begin(0)
    for report in said * 20:
        aggregator.observe(report, 900)
        iteration = history.add(report)
        if iteration is None:
            continue
        assert set(iteration.spans_us) == set(range(PIPELINES))
        hardware.iteration_observed(iteration)
        detector.observe(iteration, dict.fromkeys(range(PIPELINES), 1_000), spec.straggler)
    most = 64 * (PIPELINES * STAGES + 64) * 200
    assert kept((history, aggregator, detector, hardware)) <= most
