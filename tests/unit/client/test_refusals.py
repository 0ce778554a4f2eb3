"""What is not followed is refused in one line that names it, and training goes on: Megatron's variants, and graphs of
whole iterations."""

from __future__ import annotations

import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_client import megatron
from perseus_client.framework import Attachment, Unsupported, capturing
from perseus_client.session import Session


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
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
        ({"hybrid_context_parallel": True}, "hybrid_context_parallel"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "cuda_graph_scope full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, "cuda_graph_scope full_iteration"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]}, "cuda_graph_scope full_iteration"),
        ({"enable_cuda_graph": True, "cuda_graph_scope": "full_iteration"}, "cuda_graph_scope full_iteration"),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_scope full_iteration"),
    ],
)
def test_an_option_that_cannot_be_followed_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsupported, match=named):
        described(**config)


def test_pipelines_of_several_modules_are_named() -> None:
    with pytest.raises(Unsupported, match="several modules"):
        described(MultiModuleProcessGroupCollection())


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"overlap_p2p_comm": True, "batch_p2p_comm": False},
        {"cuda_graph_impl": "none", "cuda_graph_scope": "full_iteration"},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.attn]},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "mlp"]},
        {"enable_cuda_graph": True, "cuda_graph_scope": "full"},
    ],
)
def test_graphs_of_layers_and_overlapped_sends_are_followed(config: dict[str, Any]) -> None:
    rank, schedule = described(**config)
    assert (rank.stage, len(schedule)) == (1, 8)


def test_an_iteration_that_is_captured_ends_the_hooks_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = SimpleNamespace(capturing=False, is_initialized=lambda: True)
    cuda.is_current_stream_capturing = lambda: cuda.capturing
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    attachment = Attachment("theirs", {})
    attachment.active = True
    owner = SimpleNamespace(method="original")
    attachment.replace(owner, "method", "ours")
    assert not attachment.refuse_graph()
    assert owner.method == "ours"
    cuda.capturing = True
    assert attachment.refuse_graph()
    assert attachment.refuse_graph()
    assert owner.method == "original"
    assert type(attachment.session) is Session
    assert [record.getMessage() for record in caplog.records] == [
        "perseus_client: theirs: this rank trains without energy plans: a CUDA graph of the whole iteration is "
        "captured, whose replays run no Python"
    ]


@pytest.mark.parametrize("torch", [None, object()])
def test_without_cuda_nothing_is_captured(monkeypatch: pytest.MonkeyPatch, torch: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not capturing()
