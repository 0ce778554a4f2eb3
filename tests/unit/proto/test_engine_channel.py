"""The memory of an engine: nothing is lost to a late reader, and no bytes in it raise."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.lengths import LENGTH_PLACES
from perseus_proto.engine_channel import (
    ENGINE_MEMORY_BYTES,
    PLACES,
    EngineReader,
    EngineWriter,
    counted_between,
)
from perseus_proto.frames import ChannelError
from perseus_proto.sealed_memory import create_memory


@pytest.fixture
def reader() -> Iterator[EngineReader]:
    made = EngineReader.create()
    yield made
    made.close()


def writer_of(reader: EngineReader) -> EngineWriter:
    return EngineWriter(os.dup(reader.memory_fd), os.dup(reader.event_fd))


def test_what_a_late_reader_finds_is_the_sum_of_all_steps(reader: EngineReader) -> None:
    writer = writer_of(reader)
    before = reader.read()
    assert before is not None
    writer.step(3, 1, 10, 200_000, step_us=20_000, computes_prompt=True, prompt_tokens=512, generated_tokens=10)
    writer.count_times([0, 7, 7], [PLACES - 1], [LENGTH_PLACES - 1])
    writer.step(0, 0, 12, 300_000, step_us=10_000, generated_tokens=12, preempted=2, requests=1)
    writer.step(0, 0, 11, 300_000, step_us=None, generated_tokens=12)
    after = reader.read()
    assert after is not None
    counts = after.counts
    assert (counts.waiting, counts.prefilling, counts.running, counts.kv_share_ppm) == (0, 0, 11, 300_000)
    assert (counts.steps, counts.steps_us, counts.prompt_steps, counts.prompt_steps_us) == (1, 10_000, 1, 20_000)
    assert (counts.prompt_tokens, counts.generated_tokens, counts.preempted, counts.requests) == (512, 34, 2, 1)
    assert (counts.running_sum, counts.kv_share_ppm_sum) == (22, 500_000)
    assert counts.sequence == before.counts.sequence + 3
    assert counts.time_us > 0
    assert counted_between(before.first_tokens, after.first_tokens) == [(0, 1), (7, 2)]
    assert counted_between(before.tokens, after.tokens) == [(PLACES - 1, 1)]
    assert counted_between(before.lengths, after.lengths) == [(LENGTH_PLACES - 1, 1)]


def test_a_count_that_wraps_is_still_a_difference() -> None:
    full = (0xFFFFFFFF).to_bytes(4, "little")
    assert counted_between(full, (1).to_bytes(4, "little")) == [(0, 2)]


def test_a_beat_is_seen_and_changes_nothing_else(reader: EngineReader) -> None:
    writer = writer_of(reader)
    writer.step(0, 0, 1, 0, step_us=None)
    before = reader.read()
    writer.beat()
    after = reader.read()
    assert before is not None
    assert after == before._replace(beats=before.beats + 1)


def test_the_bell_rings_when_prompts_begin_to_wait_and_not_for_each_step(reader: EngineReader) -> None:
    writer = writer_of(reader)
    writer.step(0, 0, 5, 0, step_us=None)
    assert not reader.acknowledge()
    writer.step(1, 0, 5, 0, step_us=None)
    assert reader.acknowledge()
    writer.step(0, 2, 5, 0, step_us=None)
    assert not reader.acknowledge()
    writer.step(0, 0, 5, 0, step_us=None)
    writer.step(0, 1, 5, 0, step_us=None)
    assert reader.acknowledge()


@given(st.binary(min_size=200, max_size=2_500).map(lambda some: some.ljust(ENGINE_MEMORY_BYTES, some[-1:])))
def test_any_bytes_are_a_reading_or_torn(data: bytes) -> None:
    reader = EngineReader.create()
    with mmap.mmap(reader.memory_fd, ENGINE_MEMORY_BYTES) as memory:
        memory[:] = data
    assert reader.read() is None or data[64:196] == bytes(132)
    reader.close()


@given(st.integers(0, 131), st.integers(1, 255))
def test_a_record_of_which_one_byte_is_of_another_step_is_torn(place: int, change: int) -> None:
    reader = EngineReader.create()
    writer = writer_of(reader)
    writer.step(1, 2, 3, 4, step_us=5, computes_prompt=True, prompt_tokens=6, generated_tokens=7)
    assert reader.read() is not None
    with mmap.mmap(reader.memory_fd, ENGINE_MEMORY_BYTES) as memory:
        memory[64 + place] ^= change
    assert reader.read() is None
    reader.close()


def test_memory_of_another_layout_is_refused() -> None:
    descriptors = create_memory(ENGINE_MEMORY_BYTES)
    with pytest.raises(ChannelError, match="its head is not that of this layout"):
        EngineWriter(*descriptors)
    descriptors = create_memory(8)
    with pytest.raises(ChannelError, match=f"its size must be {ENGINE_MEMORY_BYTES} bytes"):
        EngineWriter(*descriptors)
