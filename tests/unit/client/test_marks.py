"""Compiled marks do what marks in Python do, to the last word of the memory, and let go of what they held."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_client import marks as choice
from perseus_client.marks import Marks, PyMarks, make_marks
from perseus_core.instruction import Instruction, InstructionKind
from perseus_core.marks import MarkSource
from perseus_proto.channel import SLOTS, ChannelReader, ChannelWriter, memory_bytes

KINDS = (InstructionKind.FORWARD, InstructionKind.BACKWARD)
SCHEDULE = tuple(
    Instruction(kind, microbatch, chunk) for microbatch in (0, 1, 300) for chunk in (0, 1) for kind in KINDS
)
COUNT = len(SCHEDULE)
HEAD_WORDS = memory_bytes(COUNT) // 8 - SLOTS * (8 + 3 * COUNT)

needs_compiled = pytest.mark.skipif(choice._marks is None, reason="marks were not compiled when this was installed")


class Rank:
    """Marks of one implementation, in memory of its own."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.reader = ChannelReader.create(COUNT)
        self.writer = ChannelWriter(os.dup(self.reader.memory_fd), os.dup(self.reader.event_fd), COUNT)
        self.answers: list[object] = []

    def do(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("open", iteration):
                self.marks.open(self.writer, iteration)
            case ("finish", faults):
                self.marks.finish(faults)
            case ("close",):
                self.marks.close()
            case ("wake", wake):
                self.reader.set_wake_map(wake)
            case ("skip_rings", from_us):
                self.reader.skip_rings_from(from_us)
            case ("source", source):
                self.writer.source = source
            case ("begin", *arguments):
                self._answer(self.marks.begin, arguments)
            case ("end", *arguments):
                self._answer(self.marks.end, arguments)

    def _answer(self, mark: Any, arguments: list[Any]) -> None:
        try:
            self.answers.append(mark(*arguments))
        except TypeError:
            self.answers.append(TypeError)

    def seen(self) -> tuple[object, ...]:
        """All that can be told apart but when it was: times count as told or not."""
        words = self.writer.words.tolist()
        head = [*words[:9], *words[10:HEAD_WORDS]]  # word 9 is a time
        records = []
        for slot in range(SLOTS):
            record = words[HEAD_WORDS + slot * (8 + 3 * COUNT) :][: 8 + 3 * COUNT]
            records.append((record[0], record[3:8], [time_us > 0 for time_us in (*record[1:3], *record[8:])]))
        return head, records, self.answers, self.writer.rings, self.marks.next, self.marks.ended

    def close(self) -> None:
        self.marks.close()
        self.reader.close()


def both() -> list[Rank]:
    compiled = make_marks(SCHEDULE, None)
    names = {(kind.name.lower(), m, c): k for k, (kind, m, c) in enumerate(SCHEDULE)}
    numbers = {(kind, m, c): k for k, (kind, m, c) in enumerate(SCHEDULE)}
    python = PyMarks({**names, **numbers}, time.monotonic_ns)
    assert type(compiled) is not PyMarks
    return [Rank(compiled), Rank(python)]


name = st.sampled_from(["forward", "backward", "sideways", *KINDS, 1, 77, None, 2.5, []])
number = st.sampled_from([0, 1, 300, 2**40, 2**70, -1, True, 1.0, "0", None])
called = st.one_of(
    st.sampled_from([(kind.name.lower(), microbatch, chunk) for kind, microbatch, chunk in SCHEDULE]),
    st.tuples(name),
    st.tuples(name, number),
    st.tuples(name, number, number),
)
steps = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 9)),
    st.just(("close",)),
    st.tuples(st.just("finish"), st.integers(0, 15)),
    st.tuples(st.just("wake"), st.binary(min_size=COUNT, max_size=COUNT)),
    st.tuples(st.just("skip_rings"), st.sampled_from([0, 1, 2**62])),
    called.map(lambda arguments: ("begin", *arguments)),
    called.map(lambda arguments: ("end", *arguments)),
    st.just(("end",)),
    st.tuples(st.just("source"), st.sampled_from(MarkSource)),
)


@needs_compiled
@given(st.lists(steps, max_size=40))
@settings(max_examples=300, deadline=None)
def test_compiled_and_python_leave_the_same_memory(sequence: list[tuple[Any, ...]]) -> None:
    compiled, python = ranks = both()
    for step in sequence:
        for rank in ranks:
            rank.do(step)
        assert compiled.seen() == python.seen(), step
    for rank in ranks:
        rank.close()


@needs_compiled
@pytest.mark.parametrize("wake", [bytes(COUNT), bytes([1] * COUNT)], ids=["quiet", "changing"])
def test_a_whole_step_is_drained_alike(wake: bytes) -> None:
    for rank in both():
        rank.do(("wake", wake))
        rank.do(("open", 0))
        before_us = time.monotonic_ns() // 1000
        for kind, microbatch, chunk in SCHEDULE:
            rank.do(("begin", kind.name.lower(), microbatch, chunk))
            rank.do(("end",))
        rank.do(("finish", 0))
        record = rank.reader.drain_iteration()
        assert record is not None
        assert record.complete
        assert before_us <= record.begins_us[0] <= record.end_us <= time.monotonic_ns() // 1000
        assert rank.answers == [0] * (2 * COUNT)
        assert rank.writer.rings == 1 + sum(wake)  # the begin of the step, and each change
        rank.close()


@needs_compiled
def test_memory_and_bell_are_let_go_of_at_the_end_of_a_step() -> None:
    rank, _ = both()
    bell = rank.writer._event_fd
    rank.do(("open", 0))
    rank.marks.close()
    del rank.writer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bell)


@needs_compiled
def test_memory_of_another_schedule_is_refused() -> None:
    rank, _ = both()
    for words in (rank.writer.words[:-1], memoryview(bytearray(8)), memoryview(bytes(memory_bytes(COUNT)))):
        with pytest.raises((ValueError, BufferError)):
            rank.marks.open(SimpleNamespace(words=words, source=1), 0)  # type: ignore[arg-type]
        assert rank.marks.begin("sideways", 0) == 0  # no step is open


def test_another_clock_is_python_s_alone() -> None:
    assert type(make_marks(SCHEDULE, lambda: 0)) is PyMarks
