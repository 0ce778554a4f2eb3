"""``steps``: what counts as an iteration of a loop, and who this rank is."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import perseus_client
from perseus_client import loops as module
from perseus_client.launchers import LAUNCHERS
from perseus_client.session import Session
from perseus_core.keys import ENV_SOCKET


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

    for name in (name for names in LAUNCHERS for name in names):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert rank_of_next() == 0
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "5")
    assert rank_of_next() == 5
    distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 7)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))  # type: ignore[arg-type]
    assert rank_of_next() == 7


def test_a_rank_that_is_not_known_is_one_line_and_no_plan(
    connected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Source: kubeflow/mpi-operator issue 439: every process of ``mpirun`` was rank 0."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "8")
    assert list(perseus_client.steps("abc")) == ["a", "b", "c"]
    assert not connected
    assert [record.getMessage() for record in caplog.records] == [
        "perseus_client: steps: this rank trains without energy plans: its rank is not known: RANK is 0, but "
        "OMPI_COMM_WORLD_RANK is 3 of 8; pass rank= or unset one of them"
    ]


def test_a_wrong_argument_is_logged_and_training_goes_on(connected: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert list(perseus_client.steps("ab", accumulate=0)) == ["a", "b"]
    assert not connected
    assert "accumulate must be 1 or more, is 0" in caplog.text


def test_without_an_agent_the_loop_is_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_SOCKET, raising=False)
    monkeypatch.setattr(module, "_made", {})
    assert list(perseus_client.steps(range(5), accumulate=3)) == [0, 1, 2, 3, 4]


class Tensor:
    """Of a double of torch: what is registered is called when its gradient is computed."""

    def __init__(self, requires_grad: bool = True) -> None:
        self.requires_grad = requires_grad
        self.hooks: list[Any] = []

    def register_hook(self, hook: Any) -> None:
        self.hooks.append(hook)


class Model:
    """A model whose backward pass writes a letter, and then calls back what was queued when it began."""

    def __init__(self, calls: list[str], output: Any) -> None:
        self._calls, self._output = calls, output
        self._hooks: list[Any] = []
        self.queued: list[Any] = []

    def modules(self) -> list[Any]:
        return [self]

    def parameters(self) -> list[Any]:
        return []

    def register_forward_hook(self, hook: Any) -> Any:
        self._hooks.append(hook)
        return SimpleNamespace(remove=lambda: self._hooks.remove(hook))

    def train(self) -> None:
        for hook in self._hooks:
            hook(self, (), self._output)
        parts = self._output.values() if isinstance(self._output, dict) else [self._output]
        for tensor in parts:
            while tensor.requires_grad and tensor.hooks:
                tensor.hooks.pop()(None)
        self._calls.append("b")
        while self.queued:
            self.queued.pop(0)()
        self._calls.append("w")  # DistributedDataParallel waits


class SyncBatchNorm(Model):
    """By its name one whose ranks wait within the passes."""


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A double of torch; ``engine.model`` is the one that trains."""
    engine = SimpleNamespace(model=None)
    engine.queue_callback = lambda call: engine.model.queued.append(call)  # noqa: PLW0108 - the model comes later
    variable = SimpleNamespace(_execution_engine=engine)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(autograd=SimpleNamespace(Variable=variable)))  # type: ignore[arg-type]
    monkeypatch.setenv(ENV_SOCKET, "/nowhere")
    return engine


def trained(model: Any, loop: Any, session: Any) -> str:
    """Every item of a loop is a pass through the model."""
    for _ in loop:
        session().calls.append("|")
        model.train()
        session().calls += model._calls
        model._calls.clear()
    return "".join(session().calls)


@pytest.mark.parametrize("output", [Tensor(), {"loss": Tensor(), "logits": Tensor(), "kept": Tensor(False)}])
def test_with_its_model_a_step_ends_with_the_last_backward_pass_before_the_wait(
    connected: Any, torch: Any, output: Any
) -> None:
    marks: list[str] = []
    torch.model = Model(marks, output)
    loop = perseus_client.steps("abcd", model=torch.model, accumulate=2, rank=1)
    next(loop)
    connected[0][2].instruction_end = lambda *_: marks.append(">")
    torch.model.train()
    next(loop)
    torch.model.train()
    assert "".join(marks) == "bwb>w", "in the last pass, before the wait"
    assert connected[0][1] == {"own_time": True}


def test_a_model_whose_ranks_wait_within_the_passes_makes_whole_steps(
    connected: Any, torch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    marks: list[str] = []
    torch.model = SyncBatchNorm(marks, Tensor())
    said = trained(torch.model, perseus_client.steps("ab", model=torch.model), lambda: connected[0][2])
    assert said == "(<|bw>)(<|bw>)"
    assert connected[0][1] == {}
    assert "it has SyncBatchNorm" in caplog.text


def test_a_model_that_the_loop_does_not_call_is_given_up(
    connected: Any, torch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.model = Model([], Tensor())
    other = Model([], Tensor())
    list(trained(torch.model, perseus_client.steps("abcde", model=other), lambda: connected[-1][2]))
    assert [options for _, options, _ in connected] == [{"own_time": True}, {}]
    assert "no backward pass of the model was seen" in caplog.text
