"""A keeper and its agent in time: whatever the agent's end, its GPUs are back within a second.

The time is the test's. Between the last word of an agent that hangs and the reset pass the silence that it is allowed
and the turns that the keeper gives it; after a death nothing passes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.recording_gpu import RecordingGpu, RecordingSet
from tests.waiting import eventually

from perseus_agent.clocks.journal import Journal
from perseus_agent.errors import DeviceBusy
from perseus_agent.keeper import keeper
from perseus_agent.keeper.keeper import OVERDUE_TICKS, TICK_S, WATCHED_S, NodeGpus, WatchedAgent, watch
from perseus_agent.keeper.ledger import UNWATCHED_S, Ledger
from perseus_agent.lifecycle import SILENT_S, Server
from perseus_agent.node.node import TIMER_INTERVAL_S
from perseus_agent.settings import Settings

PROMISE_S = 1.0
"""Every GPU is back at its default clocks so soon after any single death (promise 2)."""
WORST_S = SILENT_S + OVERDUE_TICKS * TICK_S
"""From the last word of an agent that hangs to the reset of its GPUs."""


class Time:
    """Seconds that pass only where somebody waits; stands for the module ``time`` too."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass(frozen=True)
class Process(WatchedAgent):
    """An agent that says every ``TIMER_INTERVAL_S`` that it is alive, until it hangs or dies."""

    time: Time
    hangs_s: float
    dies_s: float = float("inf")
    killed_s: list[float] = field(default_factory=list)
    kernel_s: float = 0.0
    """How long the kernel is busy for it when it is ended."""

    def ended_within(self, seconds: float | None) -> bool:
        if seconds is None:
            assert self.killed_s, "an agent that is not ended is not waited for without an end"
            self.time.now_s = max(self.time.now_s, self.killed_s[0] + self.kernel_s)
            return True
        ends_s = self.time.now_s + seconds
        if self.dies_s <= ends_s:
            self.time.now_s = max(self.time.now_s, self.dies_s)
            return True
        self.time.now_s = ends_s
        if self.killed_s:
            return ends_s >= self.killed_s[0] + self.kernel_s
        if ends_s < self.hangs_s:  # the agent's timer, at the latest moment that it may come
            self.ledger.alive_for(SILENT_S - ends_s % TIMER_INTERVAL_S)
        return False

    def kill(self) -> None:
        self.killed_s.append(self.time.now_s)


def process(time: Time, hangs_s: float, dies_s: float = float("inf")) -> Process:
    """An agent that has locked a GPU and says for the last time at ``hangs_s`` that it is alive."""
    ledger = Ledger.create(time.monotonic_ns)
    ledger.watched_for(60)
    ledger.owe("GPU-0")
    ledger.alive_for(SILENT_S)
    return Process(0, 0, ledger, time, hangs_s, dies_s)


def test_silence_and_the_keepers_patience_fit_into_the_promise() -> None:
    assert WORST_S < PROMISE_S
    assert SILENT_S >= 5 * TIMER_INTERVAL_S, "an agent that is late a few times is not ended"
    assert OVERDUE_TICKS >= 2, "a keeper that waits for a processor itself blames nobody"
    assert 2 * TICK_S < WATCHED_S < UNWATCHED_S, "a keeper that is late once counts as there"


@given(st.floats(0, 10))
def test_the_gpus_of_an_agent_that_hangs_are_given_back_within_a_second(runs_s: float) -> None:
    time = Time()
    agent = process(time, hangs_s=time.now_s + runs_s)
    watch(agent, lambda: True)
    [killed_s] = agent.killed_s
    assert agent.hangs_s < killed_s + 1e-6
    assert killed_s - max(agent.hangs_s, 1_000.0) < PROMISE_S


@given(st.floats(0, 10))
def test_an_agent_that_dies_is_noticed_at_once(runs_s: float) -> None:
    time = Time()
    agent = process(time, hangs_s=float("inf"), dies_s=time.now_s + runs_s)
    watch(agent, lambda: True)
    assert time.now_s == agent.dies_s
    assert not agent.killed_s


def test_an_agent_that_says_so_as_often_as_it_does_is_never_ended() -> None:
    time = Time()
    agent = process(time, hangs_s=float("inf"), dies_s=time.now_s + 600)
    watch(agent, lambda: True)
    assert time.now_s == agent.dies_s
    assert not agent.killed_s


def test_a_keeper_whose_driver_is_not_open_yet_is_none(tmp_path: Path) -> None:
    time = Time()
    agent = process(time, hangs_s=float("inf"), dies_s=time.now_s + 2 * WATCHED_S)
    agent.ledger.watched_for(0.0)
    watch(agent, lambda: False)
    assert not agent.ledger.watched
    agent = process(time, hangs_s=float("inf"), dies_s=time.now_s + 2 * WATCHED_S)
    watch(agent, lambda: True)
    assert agent.ledger.watched


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[Time, RecordingGpu, NodeGpus]:
    """The keeper's time, a GPU, and the keeper's view of it."""
    time, gpu = Time(), RecordingGpu("GPU-0", locked_mhz=900)
    monkeypatch.setattr(keeper, "open_device_set", lambda choice: RecordingSet([gpu]))
    gpus = NodeGpus("any")
    eventually(gpus.open, "the GPUs are open")
    monkeypatch.setattr(keeper, "time", time)
    monkeypatch.setattr(keeper, "NodeGpus", lambda choice: gpus)
    return time, gpu, gpus


def test_nothing_is_waited_for_between_a_death_and_the_reset(
    opened: tuple[Time, RecordingGpu, NodeGpus], tmp_path: Path
) -> None:
    time, gpu, _ = opened
    agent = process(time, hangs_s=float("inf"), dies_s=time.now_s)
    keeper._keep(agent, Settings(insecure=True, journal=str(tmp_path / "journal")))
    assert gpu.locked_mhz is None
    assert time.now_s == agent.dies_s


def test_gpus_do_not_wait_for_an_agent_that_is_inside_the_kernel_and_are_reset_again_after_it(
    opened: tuple[Time, RecordingGpu, NodeGpus], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An agent that waits for a disk of seconds is not ended before: seed 24 of the simulation."""
    time, gpu, _ = opened
    began_s, resets_s, reset = time.now_s, list[float](), gpu.reset_clocks

    def note() -> None:
        resets_s.append(time.now_s - began_s)
        reset()

    monkeypatch.setattr(gpu, "reset_clocks", note)
    agent = replace(process(time, hangs_s=began_s), kernel_s=20.0)
    keeper._keep(agent, Settings(insecure=True, journal=str(tmp_path / "journal")))
    first_s, last_s = resets_s
    assert first_s < PROMISE_S
    assert last_s == agent.killed_s[0] + agent.kernel_s - began_s


def test_a_driver_that_refuses_for_a_moment_is_asked_again_within_the_promise(
    opened: tuple[Time, RecordingGpu, NodeGpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    time, gpu, gpus = opened
    began_s, busy_s = time.now_s, 0.05
    reset = gpu.reset_clocks

    def refuse() -> None:
        if time.now_s < began_s + busy_s:
            raise DeviceBusy("busy")
        reset()

    monkeypatch.setattr(gpu, "reset_clocks", refuse)
    assert gpus.reset(["GPU-0"]) == ["GPU-0"]
    assert gpu.locked_mhz is None
    assert WORST_S + time.now_s - began_s < PROMISE_S


def test_an_agent_never_says_that_it_will_be_silent_for_longer(tmp_path: Path) -> None:
    """What the agent's process promises its keeper while it serves: through its own parts."""
    said_s: list[float] = []
    heard = threading.Event()

    class Heard(Ledger):
        def alive_for(self, seconds: float) -> None:
            said_s.append(seconds)
            super().alive_for(seconds)
            if len(said_s) >= 3:
                heard.set()

    ledger = Heard.create()
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    settings = Settings(
        insecure=True,
        grpc_address=f"unix:{tmp_path}/grpc",
        metrics_address="",
        socket=str(tmp_path / "agent.sock"),
        journal=str(tmp_path / "journal"),
    )
    server = Server(settings, RecordingSet([RecordingGpu("GPU-0")]), journal, ledger)
    server.start()
    assert heard.wait(60), "it says so again and again"
    serving_s = list(said_s)
    assert server.stop()
    assert max(serving_s) + OVERDUE_TICKS * TICK_S < PROMISE_S
