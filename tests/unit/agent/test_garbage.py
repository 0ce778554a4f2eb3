"""Nothing that comes with a training process refers to itself: it is freed when the process goes, without a search."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.recording_node import plan_set_of, pod_uid, wait_for
from tests.unit.agent.test_agent_fuzz import Agent

from perseus_agent import garbage
from perseus_agent.node import budgets
from perseus_agent.node.leases import LeaseRequest, PodName
from perseus_proto.channel import ChannelWriter
from perseus_proto.hello import Hello, Timing, Welcome, encode_hello, make_schedule, receive_answer
from perseus_proto.planset import decode_plan_set

COUNT = 64
SCHEDULE = [("forward", number, 0) for number in range(COUNT)]
PLANS = decode_plan_set(plan_set_of([[[900] * COUNT]], schedule=SCHEDULE))
HELLO = encode_hello(Hello(0, 0, 0, Timing.GPU, "", make_schedule(SCHEDULE)))


@pytest.fixture
def searched_by_hand() -> Iterator[None]:
    garbage.begin()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.enable()


def test_what_is_new_is_searched_and_what_is_old_only_while_idle(searched_by_hand: None) -> None:
    class Circle:
        def __init__(self) -> None:
            self.own = self

    def circle() -> weakref.ref[Circle]:
        return weakref.ref(Circle())

    assert not gc.isenabled()
    first = circle()
    assert first() is not None
    garbage.collect(idle=False)
    assert first() is None
    kept = Circle()
    garbage.collect(idle=False)
    old = weakref.ref(kept)
    del kept
    garbage.collect(idle=False)
    assert old() is not None
    garbage.collect(idle=True)
    assert old() is None


def train(agent: Agent, job: str) -> None:
    """A process comes, trains under a plan, and goes; then its job does."""
    agent.node.acquire(LeaseRequest(job, "ns/job", 1, 600, [PodName(pod_uid(0), "ns", "pod")]))
    agent.node.push(job, 1, PLANS, 0)
    agent.node.select(job, 1, PLANS.plan_id, {0: 0}, 0, number=0)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(agent.socket)
        connection.sendall(HELLO)
        answer = receive_answer(connection, 60)
        assert isinstance(answer, Welcome)
        writer = ChannelWriter(answer.memory_fd, answer.event_fd, COUNT)
        for iteration in range(4):
            begin_us = 1_000_000 * (iteration + 1)
            writer.step_begin(iteration, begin_us)
            for index in range(COUNT):
                writer.begin(index, begin_us + 10_000 * index)
                writer.end(index, begin_us + 10_000 * index + 9_000)
            writer.step_end(iteration, begin_us + 10_000 * COUNT)
    wait_for(lambda: not agent.node.ranks(), "the process has gone")
    agent.node.release(job, 1)


def test_processes_that_come_and_go_leave_nothing_to_search_for(
    tmp_path: Path, searched_by_hand: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "REFUSALS", 1e9)
    agent = Agent(tmp_path)
    agent.node.release("job", 1)
    train(agent, "first")
    gc.collect()
    for number in range(5):
        train(agent, f"job-{number}")
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    own = {type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("perseus_")}
    gc.set_debug(0)
    assert own == set()
    assert agent.node.drain(60) == []
    agent.local.stop()
