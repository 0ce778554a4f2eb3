"""What the adapters share, and the torch adapter's hooks on stand-ins: no framework is needed here."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perseus_client
from perseus_client import framework, torch_pipelining
from perseus_client.framework import Attachment, Cell, Unsupported
from perseus_client.session import Session
from perseus_core.rank import RankId
from perseus_solver.schedules import build_schedule, read_schedule

Call = tuple[str, Any]


class Recorder(Session):
    """A session that writes down what is marked, as a live one would take it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.inside = False
        self.begun: tuple[str | int, int, int] | None = None

    def step_begin(self) -> None:
        self.inside = True
        self.calls.append(("step", "begin"))

    def step_end(self) -> None:
        self.inside = False
        self.calls.append(("step", "end"))

    def instruction_begin(self, kind: str | int, microbatch: int, chunk: int = 0) -> None:
        if self.inside:
            self.begun = kind, microbatch, chunk
            self.calls.append(("begin", self.begun))

    def instruction_end(self, kind: str | int | None = None, microbatch: int = 0, chunk: int = 0) -> None:
        if self.inside:
            self.calls.append(("end", self.begun if kind is None else (kind, microbatch, chunk)))

    def close(self) -> None:
        self.calls.append(("close", None))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Recorder, tuple[Any, ...]]]:
    """What was connected, and with which arguments."""
    made: list[tuple[Recorder, tuple[Any, ...]]] = []

    def connect(*arguments: Any, **options: Any) -> Session:
        made.append((Recorder(), arguments))
        return made[-1][0]

    monkeypatch.setattr(perseus_client, "connect", connect)
    return made


# ------------------------------------------------------------------------------------------------ orders


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 24))
def test_one_f_one_b_is_the_solvers(stages: int, microbatches: int) -> None:
    rows = [framework.one_f_one_b_row(stage, stages, microbatches) for stage in range(stages)]
    exported, built = (
        read_schedule(framework.csv_of(rows)),
        build_schedule("1f1b", stages=stages, microbatches=microbatches),
    )
    for stage in range(stages):
        assert exported.of_stage(stage) == built.of_stage(stage) == framework.schedule_of(rows[stage])


def test_virtual_stages_become_chunks_in_ascending_order() -> None:
    row = [Cell(5, "F", 0), Cell(2, "F", 0), Cell(5, "I", 0), Cell(2, "B", 0), Cell(5, "W", 0)]
    assert framework.schedule_of(row) == [
        ("forward", 0, 1),
        ("forward", 0, 0),
        ("input_gradient", 0, 1),
        ("backward", 0, 0),
        ("weight_gradient", 0, 1),
    ]


# ------------------------------------------------------------------------------------------------- ranks


@settings(deadline=None)
@given(st.permutations(["dp", "pp", "tp"]), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_replicas_are_numbered_whatever_the_order_of_dimensions(order: list[str], dp: int, pp: int, tp: int) -> None:
    sizes = {"dp": dp, "pp": pp, "tp": tp}
    world = [
        {order[0]: a, order[1]: b, order[2]: c}
        for a in range(sizes[order[0]])
        for b in range(sizes[order[1]])
        for c in range(sizes[order[2]])
    ]

    def group(rank: int, name: str) -> list[int]:
        own = {key: value for key, value in world[rank].items() if key != name}
        return [other for other, found in enumerate(world) if own.items() <= found.items()]

    for rank, found in enumerate(world):
        assert framework.replica_of(rank, [group(rank, "pp"), group(rank, "tp")]) == found["dp"]


def test_unevenly_spaced_ranks_are_refused_with_the_way_out() -> None:
    with pytest.raises(Unsupported, match=r"not evenly spaced: pass dp= and tp="):
        framework.replica_of(1, [[0, 1, 3]])


# -------------------------------------------------------------------------------------------- attachments


class Owner:
    """Something to hook."""

    def method(self) -> str:
        return "original"


def test_without_an_agent_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSEUS_SOCKET", raising=False)
    hooked = []
    attachment = Attachment("x", {}).prepare(lambda: hooked.append(True))
    assert not attachment.active
    assert hooked == []


def test_a_framework_that_cannot_be_followed_is_one_line_and_leaves_no_hook(caplog: pytest.LogCaptureFixture) -> None:
    owner, attachment = Owner(), Attachment("theirs", {"socket_path": "/s"})

    def hook() -> None:
        attachment.replace(owner, "method", lambda: "ours")
        framework.require_names("theirs", owner, "gone")

    attachment.prepare(hook)
    assert not attachment.active
    assert owner.method() == "original"
    assert [record.getMessage() for record in caplog.records] == [
        "perseus_client: theirs: this rank trains without energy plans: this version of theirs has no Owner.gone"
    ]
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize(("version", "fits"), [("2.9.1", False), ("2.10.0+cu130", True), ("3.0", True)])
def test_versions(version: str, fits: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    if fits:
        framework.require_version("torch", version, "2.10", "2.13")
        assert ("newer than 2.13" in caplog.text) == (version == "3.0")
    else:
        with pytest.raises(Unsupported, match=r"torch 2\.9\.1 is too old: 2\.10 or newer is needed"):
            framework.require_version("torch", version, "2.10", "2.13")


def test_detaching_restores_and_leaves_what_others_have_wrapped_since() -> None:
    plain, wrapped, before = Owner(), Owner(), Owner()
    vars(before)["method"] = instance_attribute = lambda: "instance"
    attachment = Attachment("x", {})
    for owner in (plain, wrapped, before):
        attachment.replace(owner, "method", lambda: "ours")
    theirs: Callable[[], str] = lambda: "theirs"  # noqa: E731
    vars(wrapped)["method"] = theirs
    attachment.detach()
    attachment.detach()
    assert "method" not in vars(plain)
    assert vars(before)["method"] is instance_attribute
    assert vars(wrapped)["method"] is theirs


def test_another_shape_is_another_session(sessions: list[Any]) -> None:
    attachment = Attachment("x", {})
    for shape in (4, 4, 8):
        attachment.follow(shape, lambda shape=shape: (RankId(0, 1), [("forward", k, 0) for k in range(shape)]))
        attachment.session.step_end()
    assert [len(arguments[3]) for _, arguments in sessions] == [4, 8]
    assert sessions[0][0].calls == [("step", "begin"), ("step", "end")] * 2 + [("close", None)]


def test_an_iteration_that_cannot_be_described_runs_without_a_session(sessions: list[Any]) -> None:
    attachment = Attachment("x", {})

    def describe() -> tuple[RankId, framework.Schedule]:
        raise KeyError("what changed in some version")

    attachment.follow(4, describe)
    attachment.follow(4, describe)
    assert type(attachment.session) is Session
    assert sessions == []


def test_the_adapters_import_no_framework() -> None:
    script = (
        "import sys, perseus_client.torch_pipelining, perseus_client.megatron, perseus_client.deepspeed; "
        "print({'torch', 'megatron', 'deepspeed', 'numpy'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


# ------------------------------------------------------------------------------- hooks of torch_pipelining


class FakeStage:
    """A stage that may fail."""

    def __init__(self, index: int, *, is_last: bool) -> None:
        self.stage_index, self.is_last = index, is_last
        self.fails = False

    def forward_one_chunk(self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None) -> str:
        if self.fails:
            raise ValueError("out of memory")
        return f"output {fwd_chunk_id}"

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None: ...

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None: ...


class FakeSchedule:
    """The calls that torch's runtime makes."""

    def __init__(self, functions: dict[str, Callable[..., None]] | None = None) -> None:
        self._stages = [FakeStage(0, is_last=False), FakeStage(3, is_last=True)]
        self._has_backward, self._loss_fn = True, object()
        self._comp_type_to_function_map = functions if functions is not None else {}

    def register_custom_function(self, computation_type: str, custom_function: Callable[..., None]) -> None:
        self._comp_type_to_function_map[computation_type] = custom_function

    def _maybe_compute_loss(self, stage: FakeStage, output: Any, target_mbs: Any, mb_index: int) -> None: ...

    def step(self) -> None:
        first, last = self._stages
        for stage in (first, last):
            output = stage.forward_one_chunk(0, ())
            self._maybe_compute_loss(stage, output, None, 0)
        last.backward_one_chunk(0, loss=1, full_backward=False)
        first.backward_one_chunk(0, None, True)
        last.backward_weight_one_chunk(bwd_chunk_id=0)
        for kind, function in self._comp_type_to_function_map.items():
            function(FakeAction(kind), self)


class FakeAction:
    """What the runtime hands to a custom function."""

    sub_actions: tuple[FakeAction, ...] | None = None

    def __init__(self, text: str) -> None:
        self._text = text
        if ";" in text:
            self.sub_actions = tuple(FakeAction(part) for part in text.split(";"))
        else:
            self.stage_index, self.microbatch_index = int(text[0]), int(text[-1]) if text[-1].isdigit() else None

    def __str__(self) -> str:
        return self._text


def test_the_parts_of_an_overlapped_action_are_joined() -> None:
    """Source: ``OVERLAP_F_B`` of torch's DualPipeV, whose sends follow the whole action (pytorch/pytorch pull request
    159591).
    """
    row = torch_pipelining._cells([FakeAction("0F0"), None, FakeAction("3F1;0B0"), FakeAction("0B1")])
    assert framework.schedule_of(row) == [("forward", 0, 0), ("forward", 1, 1), ("backward", 0, 0), ("backward", 1, 0)]
    assert framework.joined_of(row) == [1]
    assert framework.csv_of([row]) == "0F0,(3F1;0B0)OVERLAP_F_B,0B1\n"


def hooked(schedule: FakeSchedule) -> tuple[Attachment, list[Call]]:
    attachment, recorder = Attachment("x", {}), Recorder()
    attachment.active, attachment.session = True, recorder
    torch_pipelining._Hooks(attachment, schedule, schedule._stages)
    return attachment, recorder.calls


def test_a_last_stages_forward_lasts_until_its_loss() -> None:
    schedule = FakeSchedule()
    events: list[str] = []
    schedule._maybe_compute_loss = lambda *_: events.append("loss")  # type: ignore[method-assign]
    _, calls = hooked(schedule)
    schedule._stages[1].forward_one_chunk(0)
    schedule.step()
    marks = [mark for what, mark in calls if what == "begin"]
    assert marks == [
        ("forward", 0, 0),
        ("forward", 0, 1),
        ("input_gradient", 0, 1),
        ("backward", 0, 0),
        ("weight_gradient", 0, 1),
    ]
    assert [mark for what, mark in calls if what == "end"] == marks
    assert calls[0] == ("step", "begin")
    assert calls[-1] == ("step", "end")
    assert events == ["loss", "loss"]


def test_evaluation_is_not_marked() -> None:
    schedule = FakeSchedule()
    _, calls = hooked(schedule)
    schedule._has_backward = False
    schedule.step()
    assert calls == []


def test_an_exception_passes_unchanged_and_the_next_step_is_whole() -> None:
    schedule = FakeSchedule()
    _, calls = hooked(schedule)
    schedule.step()
    whole = list(calls)
    calls.clear()
    schedule._stages[1].fails = True
    with pytest.raises(ValueError, match="out of memory"):
        schedule.step()
    assert calls[-2:] == [("end", ("forward", 0, 1)), ("step", "end")]
    calls.clear()
    schedule._stages[1].fails = False
    schedule.step()
    assert calls == whole


def test_custom_functions_are_one_window_named_by_the_schedule() -> None:
    def calls_stages(action: FakeAction, schedule: FakeSchedule) -> None:
        schedule._stages[0].backward_one_chunk(1)
        schedule._stages[1].forward_one_chunk(1)

    def calls_none(action: FakeAction, schedule: FakeSchedule) -> None: ...

    schedule = FakeSchedule({"3F1;0B1": calls_stages})
    attachment, calls = hooked(schedule)
    schedule.register_custom_function("0W1", calls_none)
    schedule.register_custom_function("0UNSHARD", calls_none)
    for _ in range(2):
        calls.clear()
        schedule.step()
        assert calls[-7:] == [
            ("begin", ("forward", 1, 1)),
            ("begin", ("backward", 1, 0)),
            ("end", ("forward", 1, 1)),
            ("end", ("backward", 1, 0)),
            ("begin", ("weight_gradient", 1, 0)),
            ("end", ("weight_gradient", 1, 0)),
            ("step", "end"),
        ]
    attachment.detach()
    assert schedule._comp_type_to_function_map["3F1;0B1"] is calls_stages
    assert schedule._comp_type_to_function_map["0W1"] is calls_none
    assert not {"step", "_maybe_compute_loss", "register_custom_function"} & set(vars(schedule))
