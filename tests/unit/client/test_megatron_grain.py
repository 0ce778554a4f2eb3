"""What Megatron's iterations are marked by: overlapped actions, and graphs of whole iterations through their replays.

The stand-in calls the hooked functions by their names in their modules, with the arguments of Megatron-Core 0.16. The
real ones run in ``tests/frameworks``.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_client import megatron
from perseus_client.framework import Attachment, RankWork
from perseus_core.rank import RankId

MICROBATCHES = 3


class Tensor:
    """As much of one as carries a tag."""

    requires_grad = True


class Recorder(Attachment):
    """Follows without an agent, and keeps what is marked."""

    def __init__(self) -> None:
        super().__init__("megatron-core", {})
        self.active = True
        self.described: list[RankWork] = []
        self.marks: list[str] = []
        self.session = SimpleNamespace(  # type: ignore[assignment]
            step_begin=lambda: self.marks.append("["),
            step_end=lambda: self.marks.append("]"),
            instruction_begin=lambda kind, microbatch, chunk: self.marks.append(f"{kind[0]}{microbatch}.{chunk}<"),
            instruction_end=self._end,
            capture_begin=lambda: self.marks.append("captured"),
            capture_end=lambda: self.marks.append("."),
        )

    def _end(self, kind: str = "", microbatch: Any = "", chunk: Any = "") -> None:
        self.marks.append(f"{kind[:1]}{microbatch}.{chunk}>" if kind else ">")

    def connect(self, rank: Any, schedule: Any, joined: Any = ()) -> None:
        self.described.append(RankWork(rank, schedule, joined))


class Megatron:
    """One stage, one chunk, and the overlap of its microbatches."""

    def __init__(self, **config: Any) -> None:
        self.combined = SimpleNamespace(combined_forward_backward_step=self._step)
        self.schedules = SimpleNamespace(
            forward_step=None,
            backward_step=None,
            parallel_state=None,
            get_schedule_table=lambda microbatches, *_: [(k, 0) for k in range(microbatches)],
            get_model_config=lambda _: SimpleNamespace(**config),
        )
        for name in megatron._ITERATIONS:
            setattr(self.schedules, name, self._iteration)

    def run(self, **kwargs: Any) -> None:
        self.schedules.forward_backward_no_pipelining(**kwargs)

    def _step(  # as Megatron's
        self, forward_step_func: Any, data_iterator: Any, f_model: Any, num_microbatches: Any, input_tensor: Any,
        forward_data_store: Any, b_model: Any, b_input_tensor: Any, b_output_tensor: Any, b_output_tensor_grad: Any,
        config: Any, f_model_chunk_id: Any = None, current_microbatch: Any = None,
    ) -> tuple[Any, int, Any]:  # fmt: skip
        return (Tensor() if f_model is not None else None), 1, None

    def _iteration(self, **_: Any) -> None:
        output, model = None, object()
        for k in range(MICROBATCHES + 1):
            ahead, behind = (model if k < MICROBATCHES else None), (model if k else None)
            output, _tokens, _gradient = self.combined.combined_forward_backward_step(
                None, None, ahead, MICROBATCHES, None, [], behind, None, [output], None, None,
                **({"current_microbatch": k} if ahead else {}),
            )  # fmt: skip


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


GROUPS = SimpleNamespace(pp=group(0, 1), tp=group(0, 1), cp=group(0, 1), dp=group(2, 4))
ARGUMENTS = {"num_microbatches": MICROBATCHES, "model": object(), "pg_collection": GROUPS}


@pytest.fixture
def attach() -> Iterator[Callable[[Megatron], Recorder]]:
    attached = []

    def hook(stand_in: Megatron) -> Recorder:
        recorder = Recorder()
        hooks = megatron._Hooks(recorder, stand_in.schedules)
        hooks.hook_combined(stand_in.combined)
        attached.append(recorder)
        return recorder

    yield hook
    for recorder in attached:
        recorder.session = megatron.Attachment("", {}).session
        recorder.detach()


def test_a_forward_and_a_backward_that_overlap_are_one_action(attach: Callable[[Megatron], Recorder]) -> None:
    stand_in = Megatron(overlap_moe_expert_parallel_comm=True)
    recorder = attach(stand_in)
    stand_in.run(**ARGUMENTS, forward_only=True)
    assert recorder.marks == []
    stand_in.run(**ARGUMENTS)
    (described,) = recorder.described
    assert described.rank == RankId(2, 0, 0)
    order = [f"{kind[0]}{microbatch}" for kind, microbatch, _ in described.schedule]
    assert order == ["f0", "f1", "b0", "f2", "b1", "b2"]
    assert described.joined == [1, 3]
    marked = "f0.0< f0.0> f1.0< b0.0< f1.0> b0.0> f2.0< b1.0< f2.0> b1.0> b2.0< b2.0>"
    assert recorder.marks == ["[", *marked.split(), "]"]


def test_an_iteration_that_is_captured_marks_its_instructions_into_the_graph(
    attach: Callable[[Megatron], Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an evaluation marks nothing. What the replays mark is in ``test_graphs``."""
    stand_in = Megatron(overlap_moe_expert_parallel_comm=True, cuda_graph_impl="full_iteration")
    recorder = attach(stand_in)
    stand_in.run(**ARGUMENTS)
    eager = recorder.marks[1:-1]
    del recorder.marks[:]
    monkeypatch.setattr(megatron, "capturing", lambda: True)
    stand_in.run(**ARGUMENTS, forward_only=True)
    assert not recorder.marks
    stand_in.run(**ARGUMENTS)
    assert recorder.marks == ["captured", *eager, "."]
    assert len(recorder.described) == 1


def test_detached_nothing_is_marked_and_all_is_as_before(attach: Callable[[Megatron], Recorder]) -> None:
    stand_in = Megatron()
    original = stand_in.combined.combined_forward_backward_step
    recorder = attach(stand_in)
    recorder.session = Attachment("", {}).session
    recorder.detach()
    assert stand_in.combined.combined_forward_backward_step == original
    stand_in.run(**ARGUMENTS)
    assert recorder.marks == []


def _setting(text: str) -> Any:
    return [name.strip(" '[]") for name in text.split(",")] if text.startswith("[") else text


def test_of_nvidias_recipes_for_training_every_one_has_a_grain(recipes: Path) -> None:
    """By the function that decides in training; docs/frameworks/megatron.md gives these counts."""
    grains: Counter[tuple[str, str]] = Counter()
    with (recipes / "megatron-bridge-perf-recipes.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if "_pretrain_" not in row["recipe"]:
                continue
            config = SimpleNamespace(**{name: _setting(row[name]) for name in ("cuda_graph_impl", "cuda_graph_scope")})
            pipeline = "without stages" if row["pipeline"] in ("", "None", "1") else "stages"
            in_graph = "full_iteration" in (config.cuda_graph_impl, config.cuda_graph_scope, *config.cuda_graph_scope)
            marked = "in a graph" if in_graph and config.cuda_graph_impl != "none" else "by Python"
            grains[pipeline, "whole" if megatron.whole_because(config, None) else marked] += 1
    assert grains == {
        ("stages", "by Python"): 154,
        ("stages", "in a graph"): 21,
        ("without stages", "by Python"): 188,
        ("without stages", "in a graph"): 38,
    }
