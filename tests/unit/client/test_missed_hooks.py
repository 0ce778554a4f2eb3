"""Attached, and yet nothing is seen: one warning that says what to do, and none where all is well."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_client import megatron
from perseus_client.framework import Attachment
from perseus_client.marks import make_marks
from perseus_client.session import EMPTY_STEPS, LiveSession, Session
from perseus_core.instruction import Instruction
from perseus_proto.hello import make_schedule

SCHEDULE: tuple[Instruction, ...] = make_schedule([("forward", 0, 0), ("backward", 0, 0)])


class Writer:
    """An agent's memory that keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def session(writer: Writer | None) -> LiveSession:
    connector: Any = SimpleNamespace(writer=writer, start=lambda: None, stop=lambda: None)
    return LiveSession(connector, make_marks(SCHEDULE, lambda: 0))


def train(live: Session, iterations: int, *kinds: str) -> None:
    for _ in range(iterations):
        with live.step():
            for kind in kinds:
                with live.instruction(kind, 0):
                    pass


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_iterations_without_an_instruction_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    live = session(Writer())
    train(live, EMPTY_STEPS - 1)
    assert warnings(caplog) == []
    train(live, 10)
    (said,) = warnings(caplog)
    assert f"{EMPTY_STEPS} iterations without a single instruction" in said
    assert "attach before training begins" in said


def test_what_is_seen_or_cannot_be_seen_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(EMPTY_STEPS):
        live = session(Writer())
        train(live, EMPTY_STEPS - 1)
        train(live, 2, "forward", "backward")
        train(live, EMPTY_STEPS - 1)
    train(session(None), 10)  # no agent: nothing is looked at
    abandoned = session(Writer())
    for _ in range(10):
        abandoned.step_begin()  # exceptions inside steps
    foreign = session(Writer())
    train(foreign, 10, "input_gradient")  # another schedule than it said: the agent tells that
    assert warnings(caplog) == []


def stand_in(steps: int) -> Any:
    """As much of Megatron's module as is hooked: an iteration calls the steps by their names in the module."""
    schedules = SimpleNamespace(get_schedule_table=None)

    def iteration(**_: Any) -> None:
        for k in range(steps):
            schedules.forward_step(current_microbatch=k)
            schedules.backward_step(None, None)

    schedules.forward_step = lambda **_: None
    schedules.backward_step = lambda *_: None
    for name in megatron._ITERATIONS:
        setattr(schedules, name, iteration)
    return schedules


@pytest.mark.parametrize("late", [True, False])
def test_megatron_attached_too_late_is_one_warning(late: bool, caplog: pytest.LogCaptureFixture) -> None:
    schedules, attachment = stand_in(4), Attachment("megatron-core", {})
    attachment.active = True
    name = megatron._ITERATIONS[1]
    asked_for = getattr(schedules, name)  # by training code, before attach()
    megatron._Hooks(attachment, schedules)
    run = asked_for if late else getattr(schedules, name)
    for _ in range(3):
        with contextlib.suppress(AttributeError):  # the stand-in has no model to describe
            run(num_microbatches=4, model=None)
    said = [line for line in warnings(caplog) if "attached too late" in line]
    assert len(said) == late
    if late:
        assert "perseus_client.megatron.attach() before pretrain()" in said[0]


def test_megatron_says_nothing_of_evaluation_nor_after_detach(caplog: pytest.LogCaptureFixture) -> None:
    schedules, attachment = stand_in(4), Attachment("megatron-core", {})
    attachment.active = True
    late = getattr(schedules, megatron._ITERATIONS[0])
    hooks = megatron._Hooks(attachment, schedules)
    for k in range(4):
        schedules.forward_step(current_microbatch=k)
    assert warnings(caplog) == []
    kept = schedules.backward_step
    attachment.detach()
    kept(None, None)
    late()
    assert warnings(caplog) == []
    assert not hooks._seen
