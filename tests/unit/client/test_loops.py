"""``steps``: what counts as an iteration of a loop, and who this rank is."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import perseus_client
from perseus_client import loops as module
from perseus_client.session import Session
from perseus_proto.keys import ENV_SOCKET


class Recorder(Session):
    """A session that writes down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step_begin(self) -> None:
        self.calls.append("(")

    def step_end(self) -> None:
        self.calls.append(")")

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        assert (kind, microbatch, chunk) == ("step", 0, 0)
        self.calls.append("<")

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        self.calls.append(">")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any], Recorder]]:
    """Every call of ``connect``, and the session that it returned."""
    made: list[tuple[tuple[Any, ...], dict[str, Any], Recorder]] = []

    def connect(*arguments: Any, **options: Any) -> Session:
        made.append((arguments, options, Recorder()))
        return made[-1][2]

    monkeypatch.setattr(perseus_client, "connect", connect)
    monkeypatch.setattr(module, "_made", {})
    return made


def run(loop: Any, calls: list[str]) -> str:
    for item in loop:
        calls.append(str(item))
    return "".join(calls)


def test_each_item_is_an_iteration_and_epochs_are_one_session(connected: Any) -> None:
    loop = perseus_client.steps("ab", rank=3, timing="host")
    assert not connected, "it connects when training begins"
    first = next(loop)
    [(arguments, options, session)] = connected
    assert (arguments, options) == ((3, 0, 0, [("step", 0, 0)]), {"timing": "host"})
    session.calls.append(first)
    assert run(loop, session.calls) == "(<a>)(<b>)"
    assert run(perseus_client.steps("c", rank=3, timing="host"), session.calls) == "(<a>)(<b>)(<c>)"
    assert len(connected) == 1


def test_accumulated_items_are_one_iteration_and_a_rest_stays_open(connected: Any) -> None:
    loop = perseus_client.steps("abcde", accumulate=2)
    first = next(loop)
    session = connected[0][2]
    session.calls.append(first)
    assert run(loop, session.calls) == "(<ab>)(<cd>)(<e", "the next iteration closes it as abandoned"


def test_a_loop_that_is_left_leaves_its_iteration_open(connected: Any) -> None:
    for item in perseus_client.steps("ab"):
        connected[0][2].calls.append(item)
        break
    assert "".join(connected[0][2].calls) == "(<a"


def test_the_rank_is_torch_s_or_the_environment_s(connected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_of_next() -> Any:
        module._made.clear()
        list(perseus_client.steps("a"))
        return connected[-1][0][0]

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert rank_of_next() == 0
    monkeypatch.setenv("RANK", "no number")
    assert rank_of_next() == 0
    monkeypatch.setenv("RANK", "5")
    assert rank_of_next() == 5
    distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 7)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))  # type: ignore[arg-type]
    assert rank_of_next() == 7


def test_a_wrong_argument_is_logged_and_training_goes_on(connected: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert list(perseus_client.steps("ab", accumulate=0)) == ["a", "b"]
    assert not connected
    assert "accumulate must be 1 or more, is 0" in caplog.text


def test_without_an_agent_the_loop_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_SOCKET, raising=False)
    monkeypatch.setattr(module, "_made", {})
    assert list(perseus_client.steps(range(5), accumulate=3)) == [0, 1, 2, 3, 4]
