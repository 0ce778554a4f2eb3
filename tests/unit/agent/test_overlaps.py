"""Instructions that overlap: each gets its usual share of their common time, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.follower import Finished
from perseus_agent.clocks.iteration_reports import IterationReports
from perseus_agent.clocks.overlaps import MOST_TOGETHER, PART, Windows, apart
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.devices.base import EnergyReading
from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.instruction import InstructionKind
from perseus_core.rank import RankId
from perseus_proto.channel import Faults
from perseus_proto.channel_layout import IterationRecord

F, B, W = InstructionKind.FORWARD, InstructionKind.BACKWARD, InstructionKind.WEIGHT_GRADIENT


def divided(windows: Windows, kinds: Sequence[int]) -> Windows:
    """Run it to its end."""
    work = apart(windows, kinds)
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: Windows = end.value
            return found


def test_a_forward_and_a_backward_share_the_time_of_their_action() -> None:
    begins, durations = divided(([0, 1000, 1001, 7000], [900, 5700, 5699, 500]), [F, F, B, W])
    assert begins == [0, 1000, 3000, 7000]
    assert durations == [900, 2000, 3700, 500]
    assert durations[2] / durations[1] == BACKWARD_RATIO


def test_windows_apart_are_left_as_they_are() -> None:
    windows = ((0, 10, 20), (10, 10, 5))
    assert divided(windows, [F, B, F]) is windows
    nothing: Windows = ((), ())
    assert divided(nothing, []) is nothing


def test_a_long_schedule_is_looked_at_in_parts() -> None:
    count = 3 * PART
    begins = [10 * place for place in range(count)]
    durations = [10] * count
    begins[PART], durations[PART - 1] = begins[PART] - 5, 15  # one pair, across two parts
    work = apart((begins, durations), [F] * count)
    assert sum(1 for _ in work) >= 5
    assert divided((begins, durations), [F] * count)[1][PART - 1] < 15


def test_very_many_at_once_are_no_action() -> None:
    """Whoever marks that wants the agent to work, and its energies are worth nothing."""
    count = MOST_TOGETHER + 1
    assert divided(([0] * count, [100] * count), [F] * count)[1] == [100] * count


window = st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from([F, B, W]))


@given(st.lists(window, max_size=30))
def test_no_time_is_lost_or_counted_twice(steps: list[Any]) -> None:
    begins, at = [], 0
    for wait, _, _ in steps:
        at += wait
        begins.append(at)
    durations = [duration for _, duration, _ in steps]
    covered = {us for begin, duration in zip(begins, durations, strict=True) for us in range(begin, begin + duration)}
    found_begins, found = divided((begins, durations), [kind for *_, kind in steps])
    assert sum(found) == len(covered)
    ends = [begin + duration for begin, duration in zip(found_begins, found, strict=True)]
    assert all(end <= begin for end, (_, begin) in zip(ends, pairwise(found_begins), strict=False))


def test_each_of_an_overlapped_pair_has_its_energy_in_a_report() -> None:
    published: list[Any] = []
    reports = IterationReports(lambda _, report: published.append(report))
    for time_us in range(0, 10_000, 100):
        reports.meter.add(EnergyReading(time_us, time_us))
    record = IterationRecord(7, 0, 8_000, (0, 1_000, 1_000), (900, 5_700, 5_700), True, Faults.NONE)
    rank = RankProcess("job", "pod", "GPU-0", RankId(0, 0, 0), 1)
    reports.add([Finished(rank, record, 8_000, None, 0, kinds=(F, F, B))])
    while reports.publish_part(counter=False, enforced=True, effects=()):
        pass
    (report,) = published
    assert list(report.durations_us) == [900, 2_000, 3_700]
    assert report.instruction_energies_mj == pytest.approx([900, 2_000, 3_700], abs=200)
