"""Readers of telemetry: bounded, the oldest dropped and counted, never a wait for the publisher."""

from __future__ import annotations

import threading
import tracemalloc

import pytest
from tests.doubles.recording_node import wait_for

from perseus_agent.clocks import telemetry
from perseus_agent.clocks.telemetry import (
    BATCH_EVENTS,
    MAX_WATCHERS,
    Event,
    RankChange,
    RankProcess,
    TelemetryHub,
)
from perseus_agent.errors import TooMuch
from perseus_core.iteration import IterationReport
from perseus_core.rank import RankId

RANK = RankProcess("job", "pod", "GPU-0", RankId(0, 0), 1)


def summary(iteration: int) -> IterationReport:
    return IterationReport(0, 0, 0, iteration, 1_000_000, 900_000, 300_000, 3, tuple(range(200)))


def iterations(hub: TelemetryHub, count: int) -> None:
    for iteration in range(count):
        hub.publish("job", summary(iteration))


def test_every_reader_gets_every_event_in_order() -> None:
    hub = TelemetryHub(100)
    readers = [hub.watch("job") for _ in range(3)]
    iterations(hub, 50)
    for reader in readers:
        taken = reader.take(0)
        assert taken is not None
        dropped, events = taken
        assert dropped == 0
        assert [event.iteration for event in events if isinstance(event, IterationReport)] == list(range(50))


def test_a_slow_reader_loses_the_oldest_and_gets_their_number() -> None:
    hub = TelemetryHub(10)
    slow, other = hub.watch("job"), hub.watch("another job")
    iterations(hub, 35)
    taken = slow.take(0)
    assert taken is not None
    dropped, events = taken
    assert dropped == 25
    assert [event.iteration for event in events if isinstance(event, IterationReport)] == list(range(25, 35))
    assert hub.dropped == 25
    assert other.take(0) == (0, [])


def test_batches_are_bounded() -> None:
    hub = TelemetryHub(10_000)
    reader = hub.watch("job")
    iterations(hub, BATCH_EVENTS + 1)
    sizes = []
    for _ in range(2):
        taken = reader.take(0)
        assert taken is not None
        sizes.append(len(taken[1]))
    assert sizes == [BATCH_EVENTS, 1]


def test_ranks_that_end_an_iteration_nearly_together_are_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "GATHER_S", 60.0)
    monkeypatch.setattr(telemetry, "BATCH_EVENTS", 8)
    hub = TelemetryHub(1_000)
    reader = hub.watch("job")
    taken: list[tuple[int, list[Event]] | None] = []
    thread = threading.Thread(target=lambda: taken.append(reader.take(60)))
    thread.start()
    iterations(hub, 8)
    thread.join(60)
    assert taken[0] is not None
    assert len(taken[0][1]) == 8


def test_a_waiting_reader_is_woken_by_an_event_and_by_the_end() -> None:
    hub = TelemetryHub(10)
    reader = hub.watch("job")
    taken: list[object] = []
    thread = threading.Thread(target=lambda: [taken.append(reader.take(60)) for _ in range(2)])
    thread.start()
    hub.publish("job", RankChange(RANK, True, 0))
    wait_for(lambda: len(taken) == 1, "the reader has woken")
    hub.close()
    thread.join(60)
    assert not thread.is_alive()
    assert taken[-1] is None


def test_readers_are_bounded_and_leave() -> None:
    hub = TelemetryHub(10)
    readers = [hub.watch(f"job-{number}") for number in range(MAX_WATCHERS)]
    with pytest.raises(TooMuch, match="at most"):
        hub.watch("one more")
    hub.leave("job-0", readers[0])
    hub.watch("one more")
    assert readers[0].take(0) is None


def test_a_day_of_iterations_takes_bounded_memory() -> None:
    hub = TelemetryHub(1_000)
    hub.watch("job")
    iterations(hub, 2_000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    iterations(hub, 20_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A thousand events of 200 durations, shared small integers: what replaces the old ones, and no more.
    assert after - before < 4 * 2**20
