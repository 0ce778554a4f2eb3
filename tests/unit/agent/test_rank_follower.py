"""Following a rank: real shared memory, no device."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.doubles.recording_node import plan_set_of
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import Finished, RankFollower
from perseus_agent.clocks.telemetry import RankProcess
from perseus_core.instruction import InstructionKind
from perseus_core.rank import RankId
from perseus_proto.channel import ChannelReader, ChannelWriter, Faults
from perseus_proto.hello import make_schedule
from perseus_proto.planset import PlanPoint, StageSchedule, decode_plan_set, encode_plan_set

COUNT = 4
POINT_0 = [1200, 900, 900, 1200]
POINT_1 = [600, 600, 600, 600]
PLANS = decode_plan_set(plan_set_of([[POINT_0, POINT_1]]))
POINTS = [PlanPoint(1, 2), PlanPoint(3, 1)]
WHOLE = [[1200], [600]]
"""One clock for each point."""
RANK = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)


class Flight:
    """A rank and its pilot on one channel; remembers what was wanted at every ring."""

    def __init__(self, schedule: list[tuple[str, int, int]] | None = None) -> None:
        self.plans = JobPlans()
        self.plans.push(PLANS)
        self.channel = ChannelReader.create(COUNT)
        self.rank = ChannelWriter(os.dup(self.channel.memory_fd), os.dup(self.channel.event_fd), COUNT)
        self.follower = RankFollower(RANK, make_schedule(schedule or schedule_of(COUNT)), self.channel, self.plans)
        self.writes = 0
        self.now_us = 1_000
        self.finished: list[Finished] = []

    def listen(self) -> int | str | None:
        """What the worker does when the bell rings; 'silence' if it did not."""
        if not self.channel.acknowledge():
            return "silence"
        wanted = self.follower.look(self.writes)
        self.finished += self.follower.collect(self.writes)
        return wanted

    def select(self, point: int, from_iteration: int = 0) -> None:
        begun = self.follower.iteration
        self.plans.select(PLANS.plan_id, {0: point}, from_iteration, {0: begun})
        self.follower.selection_changed()

    def tick(self) -> int:
        self.now_us += 100
        return self.now_us

    def begin(self, iteration: int) -> int | str | None:
        self.rank.step_begin(iteration, self.tick())
        return self.listen()

    def run(self, index: int) -> int | str | None:
        self.rank.begin(index, self.tick())
        assert self.listen() == "silence"
        self.rank.end(index, self.tick())
        return self.listen()

    def end(self, iteration: int, faults: Faults = Faults.NONE) -> int | str | None:
        self.rank.step_end(iteration, self.tick(), faults)
        return self.listen()

    def iteration(self, iteration: int) -> list[int | str | None]:
        return [self.begin(iteration), *(self.run(index) for index in range(COUNT)), self.end(iteration)]


@pytest.fixture
def flight() -> Iterator[Flight]:
    flight = Flight()
    yield flight
    flight.channel.close()


def test_the_clock_of_an_instruction_is_wanted_when_the_one_before_has_ended(flight: Flight) -> None:
    flight.select(0)
    assert flight.iteration(0) == [1200, 900, "silence", 1200, "silence", "silence"]


def test_without_a_plan_the_default_clocks_are_wanted_and_nothing_rings_inside(flight: Flight) -> None:
    assert flight.iteration(0) == [None, *["silence"] * (COUNT + 1)]


def test_a_selection_inside_an_iteration_waits_for_its_boundary(flight: Flight) -> None:
    flight.select(0)
    assert [flight.begin(0), flight.run(0)] == [1200, 900]
    flight.select(1)
    # Another plan comes next, so the end of the last instruction rings too: the clock must not wait for the begin.
    assert [flight.run(1), flight.run(2), flight.run(3), flight.end(0)] == ["silence", 1200, 600, "silence"]
    assert flight.iteration(1) == [600, *["silence"] * (COUNT + 1)]


def test_a_selection_that_is_taken_back_rings_no_more_than_before(flight: Flight) -> None:
    flight.select(0)
    flight.iteration(0)
    assert [flight.begin(1), flight.run(0)] == [1200, 900]
    flight.select(1)
    flight.select(0)
    assert [flight.run(1), flight.run(2), flight.run(3)] == ["silence", 1200, "silence"]


def test_a_selection_between_two_iterations_counts_for_the_second(flight: Flight) -> None:
    flight.select(0)
    flight.iteration(0)
    flight.select(1, from_iteration=1)
    assert flight.follower.look(0) == 600
    assert flight.begin(1) == 600


def test_a_rank_that_asks_for_default_clocks_between_iterations_has_them_until_it_is_done(flight: Flight) -> None:
    flight.select(0)
    planned = flight.iteration(0)
    assert flight.channel.acknowledge() is False
    flight.rank.ask_default_clocks(True)
    assert flight.listen() is None
    assert flight.follower.next_look_us == 0, "nothing wakes it until the rank does"
    flight.rank.ask_default_clocks(False)
    assert flight.listen() == POINT_0[0]
    assert flight.iteration(1)[1:] == planned[1:]
    assert all(finished.plan is not None for finished in flight.finished), "the iterations before and after are planned"


def test_a_selection_for_later_waits_for_its_iteration(flight: Flight) -> None:
    flight.select(0)
    flight.select(1, from_iteration=2)
    assert flight.iteration(0) == [1200, 900, "silence", 1200, "silence", "silence"]
    assert flight.iteration(1) == [1200, 900, "silence", 1200, 600, "silence"]
    assert flight.iteration(2)[0] == 600


def test_a_repeated_instruction_means_default_clocks_until_the_next_iteration(flight: Flight) -> None:
    flight.select(0)
    assert [flight.begin(0), flight.run(0), flight.run(1), flight.run(2)] == [1200, 900, "silence", 1200]
    flight.rank.begin(0, flight.tick())
    flight.rank.end(0, flight.tick())
    assert flight.listen() is None
    assert flight.run(3) == "silence"
    assert flight.end(0, Faults.OUT_OF_ORDER) == "silence"
    assert flight.begin(1) == 1200


def test_a_rank_that_says_it_deviates_runs_at_default_clocks_at_once(flight: Flight) -> None:
    flight.select(0)
    flight.begin(0)
    flight.rank.deviate(Faults.UNKNOWN_INSTRUCTION)
    assert flight.listen() is None
    assert flight.end(0, Faults.UNKNOWN_INSTRUCTION) == "silence"
    assert flight.iteration(1)[:2] == [1200, 900]
    flight.begin(2)
    deviating, sound = flight.finished[:2]
    assert (deviating.plan, deviating.record.durations_us) == (None, ())
    assert sound.plan is not None
    assert len(sound.record.durations_us) == COUNT
    assert flight.follower.deviations == 1


def test_another_schedule_than_the_plan_s_runs_at_default_clocks() -> None:
    order = schedule_of(COUNT)
    flight = Flight([order[1], order[0], *order[2:]])
    flight.select(0)
    assert flight.iteration(0) == [None, *["silence"] * (COUNT + 1)]
    assert flight.follower.misfit
    flight.channel.close()


def test_a_plan_of_whole_iterations_is_one_clock_for_a_rank_of_any_schedule(flight: Flight) -> None:
    whole = decode_plan_set(encode_plan_set([StageSchedule(0, (InstructionKind.STEP,), (0,), (0,))], POINTS, [WHOLE]))
    flight.plans.push(whole)
    flight.plans.select(whole.plan_id, {0: 0}, 0, {0: None})
    flight.follower.selection_changed()
    assert flight.iteration(0) == [1200, *["silence"] * (COUNT + 1)], "nothing to do inside an iteration"
    assert flight.begin(1) == 1200
    flight.plans.select(whole.plan_id, {0: 1}, 0, {0: 1})
    flight.follower.selection_changed()
    ends = [flight.run(index) for index in range(COUNT)]
    assert ends == [*["silence"] * (COUNT - 1), 600], "as with any plan, the next one's clock comes at the last end"
    flight.end(1)
    assert flight.begin(2) == 600
    assert not flight.follower.misfit
    first, second = flight.finished[:2]
    assert first.plan is second.plan is not None, "known by the same object"
    assert (first.plan.plan_id, first.plan.point, first.plan.clocks_mhz) == (whole.plan_id, 0, (1200,) * COUNT)
    assert len(first.record.durations_us) == COUNT, "it says what its instructions took, as before"


def test_a_rank_met_inside_an_iteration_keeps_default_clocks_until_the_next() -> None:
    flight = Flight()
    flight.select(0)
    flight.rank.step_begin(7, flight.tick())
    flight.rank.begin(0, flight.tick())
    flight.follower = RankFollower(RANK, make_schedule(schedule_of(COUNT)), flight.channel, flight.plans)
    assert flight.listen() is None
    for index in range(COUNT):
        flight.rank.end(index, flight.tick())
        assert flight.listen() in (None, "silence")
    assert flight.end(7) == "silence"
    assert flight.begin(8) == 1200
    flight.channel.close()


def test_an_iteration_lasts_from_its_begin_to_the_next_begin(flight: Flight) -> None:
    flight.select(0)
    flight.iteration(0)
    begun_us = flight.finished
    assert begun_us == []
    first_us = 1_100
    flight.now_us += 5_000  # synchronisation
    flight.begin(1)
    [one] = flight.finished
    assert one.record.begin_us == first_us
    assert one.next_begin_us == flight.now_us
    assert one.next_begin_us - one.record.end_us == 5_100
    assert one.record.durations_us == (100,) * COUNT


def test_clock_changes_are_counted_for_the_iteration_in_which_they_are_made(flight: Flight) -> None:
    flight.select(0)
    flight.begin(0)
    flight.writes += 3
    flight.end(0)
    flight.begin(1)
    flight.writes += 5
    flight.end(1)
    flight.begin(2)
    assert [one.clock_changes for one in flight.finished] == [3, 5]


def test_iterations_not_reported_yet_are_reported_at_the_end(flight: Flight) -> None:
    flight.select(0)
    flight.iteration(0)
    [one] = flight.follower.leave(0)
    assert one.record.iteration == 0
    assert one.next_begin_us == one.record.end_us
    flight.begin(1)
    assert flight.run(0) == "silence"  # nobody listens any more


def test_nonsense_in_the_memory_is_survived(flight: Flight) -> None:
    flight.select(0)
    words = memoryview(flight.rank._map).cast("Q")
    for value in (2**64 - 1, 0, 1 << 63, 5 << 24, (9 << 32) | (1 << 24), (3 << 32) | (3 << 24) | 3, 0xFFFFFF):
        for place in range(4, len(words)):
            words[place] = value
        wanted = flight.follower.look(0)
        flight.follower.collect(0)
        assert wanted in (None, *POINT_0)
    words.release()
