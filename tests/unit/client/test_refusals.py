"""Where instructions are not seen: Megatron's variants are marked by whole iterations. Training goes on."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_client import megatron
from perseus_client.framework import Attachment, capturing
from perseus_core.rank import RankId


class Scope(Enum):
    """As Megatron-Core 0.16 has it."""

    full_iteration = 1
    attn = 2


class MultiModuleProcessGroupCollection:
    """By its name alone."""


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


GROUPS = SimpleNamespace(pp=group(1, 2), tp=group(0, 1), cp=group(0, 1), dp=group(0, 1))


def described(groups: Any = GROUPS, **config: Any) -> Any:
    schedules = SimpleNamespace(
        get_model_config=lambda model: model.config, parallel_state=None, forward_step=None, backward_step=None
    )
    for name in megatron._ITERATIONS:
        setattr(schedules, name, lambda **_: None)
    hooks = megatron._Hooks(Attachment("megatron-core", {}), schedules)
    return hooks._describe(4, SimpleNamespace(config=SimpleNamespace(**config)), groups)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel"),
    ],
)
def test_where_no_instruction_is_seen_the_iteration_is_one_and_the_reason_is_named(
    config: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", "5")
    caplog.set_level("INFO")
    rank, schedule, joined = described(**config)
    assert (rank, schedule, joined) == (RankId(5, 0, 0), [("step", 0, 0)], ())
    (said,) = [record.getMessage() for record in caplog.records]
    assert "whole iterations are marked" in said
    assert named in said


def test_so_are_pipelines_of_several_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    assert described(MultiModuleProcessGroupCollection()).schedule == [("step", 0, 0)]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap_p2p_comm": True, "batch_p2p_comm": False},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]},
        {"cuda_graph_impl": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.attn]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "mlp"]},
        {"enable_cuda_graph": True, "cuda_graph_scope": "full"},
    ],
)
def test_graphs_and_overlapped_sends_are_followed(config: dict[str, Any]) -> None:
    rank, schedule, joined = described(**config)
    assert (rank.stage, len(schedule), joined) == (1, 8, [])


@pytest.mark.parametrize("torch", [None, object()])
def test_without_cuda_nothing_is_captured(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not capturing()
