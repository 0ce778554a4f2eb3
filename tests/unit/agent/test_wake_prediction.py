"""Looks that are foreseen: no change of clock stays unseen for long, whoever is early, late or lying."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.recording_node import plan_set_of
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks import wake_prediction as bounds
from perseus_agent.clocks.plans import JobPlans
from perseus_agent.clocks.rank_follower import RankFollower
from perseus_agent.clocks.telemetry import RankProcess
from perseus_agent.clocks.wake_prediction import WakePredictor
from perseus_proto.channel import SLOTS, ChannelReader, ChannelWriter
from perseus_proto.hello import make_schedule
from perseus_proto.planset import decode_plan_set
from perseus_proto.rank import RankId

CLOCKS = [1200, 900, 900, 1200, 900, 900]
"""So the ends of instructions 0, 2, 3 and 5 ask for another clock."""
COUNT = len(CLOCKS)
CHANGES = 4
PLANS = decode_plan_set(plan_set_of([[CLOCKS, [600] * COUNT]]))
RANK = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)
SPAN_US = 5_000
NOBODY: Iterator[int] = iter(())


class World:
    """A rank, its pilot and the worker's part, in virtual time and one step at a time. ``rush`` says how many marks the
    rank makes between two steps of the worker's turn."""

    def __init__(self, rush: Iterator[int] = NOBODY) -> None:
        self.plans = JobPlans()
        self.plans.push(PLANS)
        self.plans.select(PLANS.plan_id, {0: 0}, 0, {})
        self.channel = ChannelReader.create(COUNT)
        self.rank = ChannelWriter(os.dup(self.channel.memory_fd), os.dup(self.channel.event_fd), COUNT)
        predictor = WakePredictor(self.channel)
        self.follower = RankFollower(RANK, make_schedule(schedule_of(COUNT)), self.channel, self.plans, predictor)
        self.rush = rush
        self.now_us = 1_000_000
        self.look_us = 0
        self.wanted: int | None = None
        self.looks = 0
        self.iteration, self.stage = 0, -1  # stage: instructions that have ended; −1: the step has not begun

    # ------------------------------------------------------------------------------------------- the worker

    def turn(self) -> None:
        self.looks += 1
        self.channel.acknowledge()
        self.wanted = self.follower.look(0)
        self.follower.collect(0)
        self._interrupt()
        self.look_us = self.follower.next_look_us(self.now_us)
        self._interrupt()
        if self.follower.must_look_again():
            self.look_us = self.now_us

    def _interrupt(self) -> None:
        for _ in range(next(self.rush, 0)):
            self.mark()

    def rung(self) -> bool:
        if not self.channel.acknowledge():
            return False
        os.eventfd_write(self.channel.event_fd, 1)
        return True

    def pass_us(self, span_us: int) -> None:
        """Time goes on: the worker wakes for a ring, and when a look is due."""
        until_us = self.now_us + span_us
        while self.rung() or 0 < self.look_us <= until_us:
            self.now_us = self.now_us if self.rung() else max(self.now_us, self.look_us)
            self.turn()
            self.must_not_be_blind()
        self.now_us = max(self.now_us, until_us)

    # ------------------------------------------------------------------------------------------- the rank

    def mark(self) -> None:
        """The next thing the rank does: begin a step, run an instruction, end the step."""
        self.now_us += 1
        if self.stage < 0:
            self.rank.step_begin(self.iteration, self.now_us)
        elif self.stage < COUNT:
            self.rank.begin(self.stage, self.now_us)
            self.rank.end(self.stage, self.now_us)
        else:
            self.rank.step_end(self.iteration, self.now_us)
            self.iteration, self.stage = self.iteration + 1, -2
        self.stage += 1

    def iterate(self, times: int, span_us: Callable[[], int] = lambda: SPAN_US) -> None:
        for _ in range(times * (COUNT + 2)):
            self.pass_us(span_us() if 0 <= self.stage < COUNT else 10)
            self.mark()
            self.must_not_be_blind()

    # ------------------------------------------------------------------------------------------- the law

    def must_not_be_blind(self) -> None:
        """Where the rank needs another clock than the agent knows of, the agent will look soon, or has been rung."""
        needed = CLOCKS[self.stage % COUNT if self.stage >= 0 else 0]
        if needed != self.wanted and self.iteration + self.stage >= 0:
            assert self.rung() or 0 < self.look_us <= self.now_us + bounds.PATIENCE_MAX_US


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.channel.close()


def test_a_rank_that_keeps_its_pace_need_not_ring_inside_a_step(world: World) -> None:
    world.iterate(3)
    before, looks = world.rank.rings, world.looks
    world.iterate(10)
    assert world.rank.rings - before <= 10  # one for the begin of each step, which nothing foretells
    assert world.looks - looks <= 10 * (CHANGES + 2)


@pytest.mark.parametrize("jitter_us", [20, 100, 200])
def test_a_pace_that_varies_a_little_rings_seldom(world: World, jitter_us: int) -> None:
    noise = random.Random(5)
    world.iterate(3, lambda: SPAN_US + noise.randint(-jitter_us, jitter_us))
    before, looks = world.rank.rings, world.looks
    world.iterate(200, lambda: SPAN_US + noise.randint(-jitter_us, jitter_us))
    assert world.rank.rings - before <= 200 * (1 + 0.05 * CHANGES)
    assert world.looks - looks <= 200 * (CHANGES + 2) * bounds.WAKES_PER_MARK


def test_marks_that_come_late_now_and_then_ring_seldom(world: World) -> None:
    """One in twenty by up to three milliseconds, as on machines that do something else, too."""
    noise = random.Random(8)

    def span_us() -> int:
        late_us = noise.randint(300, 3_000) if noise.random() < 0.05 else 0
        return SPAN_US + noise.randint(-100, 100) + late_us

    world.iterate(3, span_us)
    before, looks = world.rank.rings, world.looks
    world.iterate(200, span_us)
    assert world.rank.rings - before <= 200 * (1 + 0.05 * CHANGES)
    assert world.looks - looks <= 200 * (CHANGES + 2) * bounds.WAKES_PER_MARK


def test_a_pace_without_any_order_costs_no_more_looks_than_are_afforded(world: World) -> None:
    noise = random.Random(6)
    world.iterate(200, lambda: int(noise.lognormvariate(8, 1.5)))
    looks_without_ring = world.looks - world.rank.rings
    assert looks_without_ring <= 200 * (CHANGES + 1) * bounds.WAKES_PER_MARK + bounds.LOOKS_SAVED


def test_a_rank_that_stops_is_looked_at_a_few_times_and_then_left_to_ring(world: World) -> None:
    world.iterate(5)
    world.mark()
    looks = world.looks
    world.pass_us(60_000_000)
    assert world.looks - looks <= bounds.LOOKS_SAVED + 2
    assert world.look_us == 0
    world.mark()
    assert world.rung()


def test_one_outlier_is_ignored_and_another_pace_is_followed(world: World) -> None:
    world.iterate(5)
    world.iterate(1, lambda: 2 * SPAN_US)
    before = world.rank.rings
    world.iterate(1)
    assert world.rank.rings - before <= 1
    world.iterate(2, lambda: SPAN_US // 2)
    before = world.rank.rings
    world.iterate(5, lambda: SPAN_US // 2)
    assert world.rank.rings - before <= 5


@given(
    st.lists(st.one_of(st.integers(SPAN_US - 400, SPAN_US + 400), st.integers(0, 12_000)), min_size=48, max_size=48),
    st.lists(st.sampled_from([0, 0, 0, 1, 1, 2, 9]), max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_whenever_the_rank_marks_the_agent_is_rung_or_looks_soon(spans_us: list[int], rush: list[int]) -> None:
    """Spans without order, and marks between any two steps of the worker's turn."""
    world = World()
    world.iterate(4)
    world.rush = iter(rush)
    spans = iter(spans_us)
    world.iterate(len(spans_us) // COUNT - 1, lambda: next(spans, SPAN_US))
    world.channel.close()


@pytest.mark.parametrize("marks", [1, 2, 3, 9])
def test_a_mark_between_any_two_steps_of_a_turn_is_caught(marks: int) -> None:
    """One turn of each kind is interrupted, in both places, at a steady pace: words stand in the channel."""
    for place in range(2 * (CHANGES + 2)):
        world = World()
        world.iterate(5)
        world.rush = iter([0] * place + [marks])
        world.iterate(2)
        assert next(world.rush, None) is None
        world.channel.close()


def test_a_plan_that_ends_takes_the_word_back(world: World) -> None:
    world.iterate(5)
    for _ in range(3):
        world.pass_us(SPAN_US)
        world.mark()
    assert world.look_us > 0
    world.plans.select(PLANS.plan_id, {0: 1}, 0, {0: world.follower.iteration})
    while world.stage >= 0:
        world.mark()
        world.turn()
    world.mark()
    assert world.rung(), "nothing is known of the new plan's marks"
    world.turn()
    assert (world.wanted, world.look_us) == (600, 0)


def test_a_rank_that_is_left_must_ring_the_next_agent_s_bell(world: World) -> None:
    world.iterate(5)
    world.mark()
    world.turn()
    assert world.look_us > 0
    world.follower.leave(0)
    world.channel.set_wake_map(b"\1" * COUNT)
    world.pass_us(SPAN_US)
    world.mark()
    assert world.rung()


def test_invalid_times_of_a_rank_do_no_harm(world: World) -> None:
    """Nonsense instead of times: a look is due within bounds or not at all, and nothing fails."""
    generator = random.Random(20260103)
    world.iterate(4)
    world.mark()
    world.turn()
    assert world.look_us > 0
    assert world.follower._predictor is not None
    memory, predictor = world.channel, world.follower._predictor
    begin = memory._first + world.iteration % SLOTS * memory._size
    words = [9, *range(begin + 8, begin + memory._size)]  # its step's begin, and the times of its marks
    good = memory._words[:].tolist()
    evil = [0, 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1, world.now_us + 10**9]
    looks = 0
    for _ in range(5_000):
        for word in words:
            memory._words[word] = generator.choice(evil) if generator.random() < 0.5 else good[word]
        predictor._affords, predictor._tries = bounds.LOOKS_SAVED, 0
        world.turn()
        looks += world.look_us > 0
        assert world.look_us == 0 or world.now_us <= world.look_us <= world.now_us + 2 * bounds.LONGEST_US
        world.now_us += generator.randrange(1_000)
    assert looks > 500


def test_without_predictor_every_change_rings(world: World) -> None:
    """A rank in another clock's time, or an agent of before."""
    world.follower._predictor = None
    world.iterate(5)
    before = world.rank.rings
    world.iterate(10)
    assert world.rank.rings - before == 10 * (CHANGES + 1)
