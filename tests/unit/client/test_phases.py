"""``Phases``: what counts as a phase and as an iteration; and TRL's trainers and verl's workers, whose functions are
wrapped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import perseus_client
from perseus_client import trl, verl
from perseus_client.framework import Attachment
from perseus_client.session import Session
from perseus_core.keys import ENV_SOCKET
from perseus_core.rank import RankId

NAMES = ("rollout", "reward", "training")


class Recorder(Session):
    """A session that writes down what is called."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._inside = False

    def step_begin(self) -> None:
        self._inside = True
        self._calls.append("[")

    def step_end(self) -> None:
        if self._inside:
            self._calls.append("]")
        self._inside = False

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        assert (kind, microbatch) == ("step", 0)
        if self._inside:
            self._calls.append(f"{chunk}<")

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        assert kind is None
        if self._inside:
            self._calls.append(">")

    def close(self) -> None:
        self._calls.append("closed")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []

    def connect(*arguments: Any, **options: Any) -> Session:
        written.append(f"connect {RankId(*arguments[:3])} {arguments[3]} {options}")
        return Recorder(written)

    monkeypatch.setattr(perseus_client, "connect", connect)
    monkeypatch.setenv("RANK", "3")
    return written


DECLARED = f"connect {RankId(3, 0, 0)} [('step', 0, 0), ('step', 0, 1), ('step', 0, 2)] {{}}"
ITERATION = ["[", "0<", ">", "1<", ">", "2<", ">", "]"]


def test_phases_are_chunks_of_an_iteration_in_one_session(calls: list[str]) -> None:
    phase = perseus_client.Phases(*NAMES)
    assert not calls, "it connects when the first phase begins"
    for _ in range(2):
        for name in NAMES:
            with phase(name):
                calls.append(name)
    marks = ["[", "0<", "rollout", ">", "1<", "reward", ">", "2<", "training", ">", "]"]
    assert calls == [DECLARED, *marks, *marks]


def test_an_error_inside_ends_the_phase_and_passes(calls: list[str]) -> None:
    phase = perseus_client.Phases(*NAMES)
    with pytest.raises(RuntimeError, match="no memory"), phase("rollout"):
        raise RuntimeError("no memory")
    assert calls[1:] == ["[", "0<", ">"]
    for name in NAMES:
        with phase(name):
            pass
    assert calls[4:] == ["]", *ITERATION], "an iteration that was left is ended before the next"


def test_a_phase_before_the_first_one_is_no_iteration(calls: list[str]) -> None:
    phase = perseus_client.Phases(*NAMES)
    with phase("training"):
        pass
    assert calls == []


@pytest.mark.parametrize(
    ("names", "entered", "says"),
    [
        (NAMES, "rolout", "'rolout' is not among the phases rollout, reward, training"),
        ((), "rollout", "at least one: none"),
        (("rollout", "rollout"), "rollout", "different names"),
    ],
)
def test_a_wrong_name_is_one_line_in_the_log(
    calls: list[str], caplog: pytest.LogCaptureFixture, names: tuple[str, ...], entered: str, says: str
) -> None:
    phase = perseus_client.Phases(*names)
    for _ in range(2):
        with phase(entered):
            pass
    (record,) = caplog.records
    assert says in record.getMessage()
    assert calls == []


class Trainer:
    """As much of TRL's GRPOTrainer as calls what is wrapped: a generation for every few steps."""

    def __init__(self, calls: list[str], *, accumulate: int = 2, iterations: int = 1) -> None:
        self.args = SimpleNamespace(steps_per_generation=accumulate)
        self.model = SimpleNamespace(training=True)
        self.num_iterations, self._step = iterations, 0
        self.callbacks: list[Any] = []
        self._calls, self._accumulate = calls, accumulate

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callbacks.remove(callback)

    def _generate(self, prompts: list[str]) -> list[str]:
        self._calls.append("generate")
        return prompts

    def _generate_and_score_completions(self, inputs: list[str]) -> list[str]:
        completions = self._generate(inputs)
        self._calls.append("score")
        return completions

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for _ in range(self._accumulate):
                if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
                    assert self._generate_and_score_completions(["prompt"]) == ["prompt"]
                self._step += 1
            self._calls.append("optimize")
            for callback in self.callbacks:
                callback.on_step_end(None, None, None)
            self.model.training = False
            self._generate_and_score_completions(["evaluated"])
            self.model.training = True
        for callback in self.callbacks:
            callback.on_train_end(None, None, None)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.16.0"))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(TrainerCallback=object))  # type: ignore[arg-type]
    monkeypatch.setenv(ENV_SOCKET, "/agent")


EVALUATED = ["generate", "score"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("reused", [1, 2])
def test_completions_and_all_steps_with_them_are_one_iteration(calls: list[str], reused: int) -> None:
    trainer = Trainer(calls, iterations=reused)
    attachment = trl.attach(trainer)
    assert attachment.active
    trainer.train(2 * reused)
    rest = ["optimize", *EVALUATED] * (reused - 1)
    one = ["[", "0<", "generate", ">", "1<", "score", ">", "2<", *rest, "optimize", ">", "]", *EVALUATED]
    assert calls == [DECLARED, *one, *one, "closed"], "the last evaluation lies outside"
    attachment.detach()
    assert trainer.callbacks == []
    del calls[:]
    trainer.train(1)
    assert calls == ["generate", "score", "optimize", *EVALUATED]


@pytest.mark.usefixtures("installed")
def test_another_trainer_is_refused_and_left_alone(calls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    attachment = trl.attach(SimpleNamespace(model=None))
    assert isinstance(attachment, Attachment)
    assert not attachment.active
    assert "no SimpleNamespace._generate" in caplog.text
    assert calls == []


class Worker:
    """As much of verl's ActorRolloutRefWorker as is wrapped."""

    calls: list[str]

    def __init__(self, role: str) -> None:
        self.role = role

    async def update_weights(self, global_steps: int) -> None:
        self.calls.append("weights")

    def compute_log_prob(self, data: object) -> None:
        self.calls.append("log")

    def compute_ref_log_prob(self, data: object) -> None:
        self.calls.append("ref")

    def update_actor(self, data: object) -> None:
        self.calls.append("update")


Step = Callable[[Worker], None]


@pytest.fixture
def hybrid(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Worker]]:
    own = type("ActorRolloutRefWorker", (Worker,), {"calls": calls})
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace(__version__="0.9.1"))  # type: ignore[arg-type]
    engine = SimpleNamespace(ActorRolloutRefWorker=own)
    monkeypatch.setitem(sys.modules, "verl.workers.engine_workers", engine)  # type: ignore[arg-type]
    monkeypatch.setenv(ENV_SOCKET, "/agent")
    attachment = verl.attach()
    assert attachment.active
    yield own
    attachment.detach()
    del calls[:]
    own("actor_rollout").update_actor(None)
    assert calls == ["update"]


def in_turn(*names: str) -> Step:
    def step(worker: Worker) -> None:
        asyncio.run(worker.update_weights(global_steps=1))
        for name in names:
            getattr(worker, name)(None)

    return step


@pytest.mark.parametrize(
    ("step", "work"),
    [
        (in_turn("compute_log_prob", "compute_ref_log_prob", "update_actor"), ["log", "ref", "update"]),
        (in_turn("compute_ref_log_prob", "update_actor"), ["ref", "update"]),
        (in_turn("update_actor"), ["update"]),
    ],
)
def test_a_hybrid_worker_has_two_phases_whatever_is_computed(
    calls: list[str], hybrid: type[Worker], step: Step, work: list[str]
) -> None:
    worker = hybrid("actor_rollout_ref")
    for _ in range(2):
        step(worker)
    declared = f"connect {RankId(3, 0, 0)} [('step', 0, 0), ('step', 0, 1)] {{}}"
    assert calls == [declared, *["[", "0<", "weights", ">", "1<", *work, ">", "]"] * 2]


def test_an_evaluation_between_two_steps_makes_no_iteration(calls: list[str], hybrid: type[Worker]) -> None:
    worker, step = hybrid("actor_rollout_ref"), in_turn("update_actor")
    step(worker)
    asyncio.run(worker.update_weights(global_steps=1))
    step(worker)
    one = ["[", "0<", "weights", ">", "1<", "update", ">", "]"]
    assert calls[1:] == [*one, "[", "0<", "weights", ">", "]", *one], "the agent drops one without all phases"


def test_a_worker_without_an_engine_is_not_followed(calls: list[str], hybrid: type[Worker]) -> None:
    in_turn("compute_log_prob", "update_actor")(hybrid("actor"))
    assert calls == ["weights", "log", "update"]


@pytest.mark.usefixtures("hybrid")
def test_a_verl_of_other_workers_is_refused(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = SimpleNamespace(ActorRolloutRefWorker=SimpleNamespace(update_weights=None))
    monkeypatch.setitem(sys.modules, "verl.workers.engine_workers", other)  # type: ignore[arg-type]
    assert not verl.attach().active
    assert "compute_log_prob" in caplog.text
    assert calls == []
