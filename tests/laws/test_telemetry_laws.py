"""What agents send together says exactly what the single reports said: through the wire, into the job's iterations."""

from __future__ import annotations

from itertools import groupby
from statistics import median
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.offenders import about_each

from perseus_agent.clocks.gpu_notices import GpuNotice, GpuNoticeKind
from perseus_agent.clocks.stage_reports import combine
from perseus_agent.clocks.telemetry import Event, RankProcess
from perseus_agent.servers.event_messages import event_message, rank_message
from perseus_core.evidence import Evidence
from perseus_core.iteration import IterationReport
from perseus_core.marks import ClockControl, MarkSource
from perseus_core.rank import RankId
from perseus_operator.clients.agents.messages import event_of, is_valid, schedule_of
from perseus_operator.nodes.iterations import History, JobIteration
from perseus_proto.hello import Hello, Timing, make_schedule
from perseus_proto.v1alpha1 import agent_pb2

PIPELINES, STAGES, SPLIT, INSTRUCTIONS = 2, 2, 4, 3
RANKS = [RankId(dp, stage, tp) for dp in range(PIPELINES) for stage in range(STAGES) for tp in range(SPLIT)]

durations_us = st.lists(st.integers(1, 10_000), min_size=INSTRUCTIONS, max_size=INSTRUCTIONS).map(tuple)


ALIKE: dict[str, st.SearchStrategy[object]] = {
    "plan_id": st.sampled_from(["", "a" * 64]),
    "point": st.integers(0, 1),
    "marks": st.sampled_from([None, *MarkSource]),
    "control": st.sampled_from(list(ClockControl)),
    "power_limited": st.booleans(),
    "own_time": st.booleans(),
    "median_clock_mhz": st.sampled_from([0, 900, 1410]),
}
"""In which the ranks of a job mostly agree."""
OWN = st.fixed_dictionaries(
    {
        "iteration_time_us": st.integers(30_000, 60_000),
        "compute_span_us": st.integers(1, 30_000),
        "energy_mj": st.none() | st.integers(0, 20_000),
        "durations_us": durations_us | st.just(()) | st.just((0, 1, 1)),
        "clock_changes": st.integers(0, 9),
        "leads_us": st.just(()) | st.lists(st.integers(-50, 5_000), min_size=3, max_size=4).map(tuple),
        "below_plan_us": st.integers(0, 40_000),
        "above_plan_us": st.sampled_from([*[0] * 12, 1_000, 1_000, 40_000]),
    }
)


def report_of(
    rank: RankId,
    *,
    plan_id: str = "",
    point: int = 0,
    marks: MarkSource | None = MarkSource.GPU,
    control: ClockControl = ClockControl.TIMETABLE,
    leads_us: tuple[int, ...] = (),
    below_plan_us: int = 0,
    above_plan_us: int = 0,
    median_clock_mhz: int = 0,
    power_limited: bool = False,
    **fields: Any,
) -> IterationReport:
    """What an agent reports of a rank that it has measured so."""
    figures = {"iteration_time_us": 10, "compute_span_us": 9, "energy_mj": 5, "durations_us": (1, 2, 3), **fields}
    evidence = Evidence.of_iteration(
        marks=marks,
        control=control,
        lead_us=round(median(leads_us)) if leads_us else None,
        below_us=below_plan_us,
        above_us=above_plan_us,
        computing_us=min(sum(figures["durations_us"]), figures["compute_span_us"]),
        clock_mhz=median_clock_mhz,
        power_limited=power_limited,
    )
    return IterationReport(
        *(rank.dp, rank.stage, rank.tp, 3),
        point=point if plan_id else None,
        evidence=evidence,
        plan_id=plan_id,
        gpu_uuid=f"GPU-{rank.dp}-{rank.stage}-{rank.tp}",
        **figures,
    )


@st.composite
def iterations(draw: st.DrawFn) -> list[IterationReport]:
    """The reports of all ranks of a job, in any order."""
    alike, found = draw(st.fixed_dictionaries(ALIKE)), []
    differing = draw(st.dictionaries(st.sampled_from(RANKS), st.sampled_from(sorted(ALIKE)), max_size=3))
    for rank in RANKS:
        other = {name: draw(ALIKE[name]) for name in [differing.get(rank)] if name}
        found.append(report_of(rank, **{**alike, **other, **draw(OWN)}))
    return draw(st.permutations(found))


def received(events: list[Event]) -> list[IterationReport]:
    """What the operator makes of a message."""
    batch = agent_pb2.TelemetryBatch(events=[event_message(event) for event in events])
    parsed = agent_pb2.TelemetryBatch.FromString(batch.SerializeToString())
    found = [event_of(event) for event in parsed.events]
    reports = [report for report in found if isinstance(report, IterationReport)]
    assert all(map(is_valid, reports))
    return reports


def told(reports: list[IterationReport]) -> list[JobIteration]:
    """The job's iterations that these reports complete."""
    history = History(PIPELINES, STAGES * SPLIT)
    found = [history.add(report) for report in reports]
    return [iteration for iteration in found if iteration is not None]


@given(iterations())
def test_one_report_for_a_stage_makes_the_iteration_that_single_ones_make(events: list[IterationReport]) -> None:
    single, together = told(received(list(events))), told(received(combine(events)))
    assert [i.iteration for i in together] == [i.iteration for i in single]
    for one, other in zip(single, together, strict=True):
        if one.mixed:  # proves nothing, whatever its points
            assert other.mixed
            continue
        assert one == other


@about_each([None, *RANKS])
def test_the_energy_of_the_job_is_known_where_that_of_every_rank_is_and_is_their_sum(unknown: RankId | None) -> None:
    """Unknown is not empty: neither on the wire, nor in a sum."""
    energies_mj = {rank: None if rank == unknown else 5 * number for number, rank in enumerate(RANKS)}
    events: list[Event] = [report_of(rank, energy_mj=energies_mj[rank]) for rank in RANKS]
    assert {report.rank_id: report.energy_mj for report in received(events)} == energies_mj
    for reports in received(events), received(combine(events)):
        (iteration,) = told(reports)
        assert iteration.energy_mj == (None if unknown else 5 * sum(range(len(RANKS))))


@given(iterations())
def test_every_rank_is_in_exactly_one_report(events: list[IterationReport]) -> None:
    reports = received(combine(events))
    assert sorted(rank for report in reports for rank in report.rank_ids) == sorted(RANKS)


def test_ranks_that_agree_are_one_report_for_each_stage_and_pipeline() -> None:
    events: list[Event] = [report_of(rank, plan_id="a" * 64, point=1, median_clock_mhz=900) for rank in RANKS]
    notice = GpuNotice(GpuNoticeKind.POWER_CAP, "GPU", active=True, message="held")
    combined = combine([*events[:3], notice, *events[3:]])
    assert [key for key, _ in groupby(map(type, combined))] == [IterationReport, GpuNotice, IterationReport]
    reports = received(combined)
    assert len(reports) == PIPELINES * STAGES
    assert {report.energy_mj for report in reports} == {SPLIT * 5}


def test_a_rank_with_a_held_clock_is_judged_by_itself() -> None:
    """One of four is above its plan until its timetable is known; of all four together that would not show."""
    held = {"plan_id": "a" * 64, "control": ClockControl.HELD, "durations_us": (5_000, 5_000, 5_000)}
    times_us = {"iteration_time_us": 20_000, "compute_span_us": 15_000}
    events: list[Event] = [
        report_of(rank, above_plan_us=1_000 if rank == RANKS[0] else 0, **held, **times_us) for rank in RANKS
    ]
    (iteration,) = told(received(combine(events)))
    assert iteration.mixed


def test_a_rank_that_reports_an_iteration_twice_is_in_two_reports() -> None:
    """It has started again; a report that named it twice could not be true."""
    events: list[Event] = [report_of(rank) for _ in range(2) for rank in RANKS[:SPLIT]]
    assert [report.rank_ids for report in received(combine(events))] == 2 * [RANKS[:SPLIT]]


@given(st.integers(1, 6).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count)))))
def test_the_operator_hears_which_instructions_are_one_action(drawn: tuple[int, set[int]]) -> None:
    count, places = drawn
    joined = tuple(sorted(place for place in places if place < count - 1))
    schedule = make_schedule([("forward", microbatch, 0) for microbatch in range(count)])
    hello = Hello(0, 1, 2, Timing.HOST, "", schedule, joined=joined)
    sent = rank_message(RankProcess("job", "pod", "GPU-0", hello.rank, 1), 0, hello).schedule
    assert schedule_of(sent) == tuple((*own, place in joined) for place, own in enumerate(schedule))
