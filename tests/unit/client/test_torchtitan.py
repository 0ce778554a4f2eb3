"""What torchtitan's trainer is marked by: the instructions of its stages, also where a CUDA graph replays them,
else whole steps, and never nothing.

The stand-ins have the attributes of torchtitan 0.3 and of its main branch of November 2026. The real 0.3 runs in
``tests/frameworks``.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import perseus_client
from perseus_client import torch_pipelining, torchtitan
from perseus_client.framework import Attachment
from perseus_client.session import Session
from perseus_core.keys import ENV_SOCKET
from perseus_core.rank import RankId

WARM_STEPS = 2
"""Steps of the optimizer that torchtitan runs from Python before it captures."""


class Recorder(Session):
    """A session that writes down what is called."""

    def __init__(self, marks: list[str]) -> None:
        self._marks = marks

    def step_begin(self) -> None:
        self._marks.append("[")

    def step_end(self) -> None:
        self._marks.append("]")

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        self._marks.append(f"{kind} {microbatch}.{chunk}")

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None: ...

    def close(self) -> None:
        self._marks.append("closed")


class Engine:
    """What holds the schedule and runs it: the trainer itself, or a part of it."""

    def __init__(self, *, stages: bool) -> None:
        self.parallel_dims = SimpleNamespace(pp_enabled=stages)
        self.pp_schedule = SimpleNamespace(step=lambda: None)

    def _pp_forward_backward_body(self, **_: Any) -> None:
        self.pp_schedule.step()

    def train_step(self, batches: int) -> int:
        return batches

    def close(self) -> None: ...


class Newer(Engine):
    """As on the main branch: the function of the passes is replaced by one that captures after some steps."""

    def __init__(self, *, stages: bool, graphs: bool) -> None:
        super().__init__(stages=stages)
        self.steps = 0
        body = self._pp_forward_backward_body
        self.forward_backward_body_fn: Callable[..., None] = (
            (lambda **_: body() if self.steps <= WARM_STEPS else None) if graphs else body
        )

    def train_step(self, batches: int) -> int:
        self.steps += 1
        self.forward_backward_body_fn(inputs=None)
        return batches


def apart(engine: Engine) -> Any:
    """A trainer whose engine is an object of its own."""
    return SimpleNamespace(engine=engine, train_step=engine.train_step, close=engine.close)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is marked, as sessions of every kind write it down."""
    written: list[str] = []

    def connect(*arguments: Any, **_: Any) -> Session:
        written.append(f"connect {RankId(*arguments[:3])} {arguments[3]}")
        return Recorder(written)

    class Schedule(Attachment):
        """Follows a schedule's instructions, as ``torch_pipelining`` does."""

        def __init__(self, schedule: Any) -> None:
            super().__init__("torch", {})
            self.active = True
            self.session = Recorder(written)
            step = schedule.step

            def followed() -> None:
                self.session.step_begin()
                step()
                self.session.step_end()

            self.replace(schedule, "step", followed)

    monkeypatch.setattr(perseus_client, "connect", connect)
    monkeypatch.setattr(torch_pipelining, "attach", lambda schedule, **_: Schedule(schedule))
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.3.0")
    monkeypatch.setenv(ENV_SOCKET, "/agent")
    monkeypatch.setenv("RANK", "5")
    return written


STEPS = [f"connect {RankId(5, 0, 0)} [('step', 0, 0)]", *["[", "step 0.0", "]"] * 4]


def run(trainer: Any, steps: int = 4) -> Attachment:
    attachment = torchtitan.attach(trainer)
    assert attachment.active
    for number in range(steps):
        assert trainer.train_step(number) == number
    return attachment


@pytest.mark.parametrize("of", [lambda engine: engine, apart], ids=["one object", "engine apart"])
def test_passes_of_a_pipeline_in_one_graph_are_left_to_its_replays(marks: list[str], of: Any) -> None:
    run(of(Newer(stages=True, graphs=True)))
    assert marks == ["[", "]"] * WARM_STEPS, "by the schedule; nothing is marked twice"


@pytest.mark.parametrize(
    "engine",
    [Newer(stages=False, graphs=True), Newer(stages=False, graphs=False), Engine(stages=False)],
    ids=["graphs", "no graphs", "0.3"],
)
def test_without_stages_steps_are_whole(marks: list[str], engine: Engine) -> None:
    run(engine)
    assert marks == STEPS


def test_a_schedule_that_runs_from_python_has_instructions(marks: list[str]) -> None:
    trainer = Newer(stages=True, graphs=False)
    attachment = run(trainer)
    assert marks == ["[", "]"] * 4
    assert isinstance(attachment.session, Recorder)
    trainer.close()
    assert set(marks[8:]) == {"closed"}


def test_a_schedule_that_is_no_longer_followed_leaves_whole_steps(marks: list[str]) -> None:
    trainer = Newer(stages=True, graphs=False)
    attachment = run(trainer, steps=1)
    followed = trainer.pp_schedule.step
    schedule = next(cell.cell_contents for cell in followed.__closure__ if isinstance(cell.cell_contents, Attachment))
    schedule.detach()
    del marks[:]
    for number in range(4):
        trainer.train_step(number)
    assert [mark for mark in marks if mark != "closed"] == STEPS
    attachment.detach()
    trainer.train_step(9)
    assert marks[-1] == "closed"


def test_a_schedule_that_cannot_be_followed_leaves_whole_steps(
    marks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_pipelining, "attach", lambda *_, **__: Attachment("torch", {}))
    run(Newer(stages=True, graphs=False))
    assert marks == STEPS
