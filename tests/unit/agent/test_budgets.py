"""No pod takes the agent from another: whatever sizes and numbers of hellos they send, in whatever order."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.node.budgets import (
    LEASED,
    MAX_REMEMBERED,
    REFUSALS,
    REFUSALS_PER_S,
    WAITING,
    Budgets,
    ConnectionUse,
    OverBudget,
    Refusals,
)
from perseus_agent.servers.quiet_log import Quiet
from perseus_proto.hello import MAX_BODY_BYTES


class Agent:
    def __init__(self, leased: set[str] | None = None) -> None:
        self.leased = leased or set()
        self.now_s = 0.0
        self.ended: list[ConnectionUse] = []
        self.budgets = Budgets(lambda pod: pod in self.leased, lambda: self.now_s)
        self.live: list[ConnectionUse] = []

    def connect(self, pod: str, size: int = 16_384) -> ConnectionUse | None:
        try:
            use = self.budgets.begin(pod, lambda: None)
        except OverBudget:
            return None
        try:
            for gone in self.budgets.reserve(use, size):
                self.live.remove(gone)
        except OverBudget:
            self.budgets.end(use)
            return None
        self.budgets.welcomed(use)
        self.live.append(use)
        return use

    def held(self, leased: bool) -> list[ConnectionUse]:
        return [use for use in self.live if (use.pod_uid in self.leased) is leased]


connections = st.lists(
    st.tuples(st.integers(0, 70).map("pod-{}".format), st.integers(1, MAX_BODY_BYTES), st.floats(0, 100)), max_size=150
)


@given(connections)
def test_the_bounds_hold_whatever_is_sent(sent: list[tuple[str, int, float]]) -> None:
    agent = Agent({"pod-0", "pod-1", "pod-2"})
    for pod, size, pause_s in sent:
        agent.now_s += pause_s
        agent.connect(pod, size)
        for leased, budget in ((True, LEASED), (False, WAITING)):
            held = agent.held(leased)
            assert len(held) <= budget.sessions
            assert sum(use.bytes for use in held) <= budget.total_bytes
            for uid in {use.pod_uid for use in held}:
                own = [use for use in held if use.pod_uid == uid]
                assert len(own) <= budget.sessions_of_pod
                assert sum(use.bytes for use in own) <= budget.pod_bytes


@given(connections)
def test_a_leased_pod_is_served_whatever_others_do(sent: list[tuple[str, int, float]]) -> None:
    agent = Agent({"honest"})
    agent.connect("honest")
    for pod, size, pause_s in sent:
        agent.now_s += pause_s
        agent.connect(pod, size)
    assert agent.held(leased=True)
    assert agent.connect("honest") is not None


def test_hellos_that_are_never_finished_stop_neither_leased_nor_other_pods() -> None:
    agent = Agent({"honest"})
    for _ in range(200):
        try:
            agent.budgets.begin("evil", lambda: None)
        except OverBudget:
            continue
    assert agent.connect("honest") is not None
    assert agent.connect("early") is not None


def test_the_pod_that_holds_most_makes_room_for_a_newcomer() -> None:
    agent = Agent()
    for pod in ("evil-a", "evil-b"):
        for _ in range(4):
            assert agent.connect(pod, 128 << 10)
    assert agent.connect("early", 24 << 10) is not None
    assert len([use for use in agent.live if use.pod_uid == "early"]) == 1


def test_a_pod_decodes_a_bounded_number_of_bytes_a_second() -> None:
    agent, decoded, seconds = Agent(), 0, 60
    for _ in range(10 * seconds):
        agent.now_s += 0.1
        use = agent.connect("evil", MAX_BODY_BYTES)
        if use is not None:
            decoded += use.bytes
            agent.live.remove(use)
            agent.budgets.end(use)
    assert decoded <= WAITING.pod_bytes + seconds * WAITING.pod_bytes_per_s


def test_messages_that_peers_cause_are_bounded_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    quiet = Quiet(logging.getLogger("peers"), 5, 10.0, lambda: now_s)
    for _ in range(1_000):
        quiet.warning("refused")
    assert len(caplog.records) == 5
    now_s = 11.0
    quiet.warning("refused")
    assert "995 messages" in caplog.text


@given(st.lists(st.floats(0, 2), max_size=100))
def test_a_process_is_answered_as_often_as_it_may_be_refused(pauses_s: list[float]) -> None:
    now_s, answered_s = 0.0, []
    refusals = Refusals(lambda: now_s)
    for pause_s in pauses_s:
        now_s += pause_s
        if not refusals.exhausted(1):
            refusals.add(1)
            answered_s.append(now_s)
        assert len(answered_s) <= REFUSALS + REFUSALS_PER_S * now_s + 1e-6
        assert not refusals.exhausted(2), "another process pays nothing for it"
    now_s += 1 / REFUSALS_PER_S
    assert not refusals.exhausted(1)


def test_processes_that_were_refused_are_forgotten_oldest_first() -> None:
    refusals = Refusals(lambda: 0.0)
    for pid in range(1, MAX_REMEMBERED + 2):
        for _ in range(REFUSALS):
            refusals.add(pid)
    assert not refusals.exhausted(1)
    assert refusals.exhausted(2)
    assert refusals.exhausted(MAX_REMEMBERED + 1)
