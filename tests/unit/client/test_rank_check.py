"""Megatron-LM's benchmark of all ranks, between iterations: a stand-in of its module, with the real hook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from perseus_client import megatron
from perseus_client.framework import Attachment


class Session:
    """Remembers whether default clocks are asked for."""

    connected = True

    def __init__(self) -> None:
        self.at_default = False

    def close(self) -> None:
        self.connected = False

    @contextlib.contextmanager
    def default_clocks(self) -> Iterator[None]:
        self.at_default = True
        try:
            yield
        finally:
            self.at_default = False


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the benchmark, which says at which clocks it ran. Its caller looks the function up in it."""
    module = ModuleType("megatron.training.gpu_sniff_test")
    module.session = Session()  # type: ignore[attr-defined]

    def run_sniff_tests(group: str, tag: str = "") -> tuple[str, str, bool]:
        if group == "broken":
            raise RuntimeError("of the benchmark")
        return group, tag, module.session.at_default

    module.run_sniff_tests = run_sniff_tests  # type: ignore[attr-defined]
    monkeypatch.setattr(megatron, "SETTLE_S", 0.0)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, "megatron.training.gpu_sniff_test", module)
    return module


def attached(session: Any) -> Attachment:
    attachment = Attachment("megatron-core", {})
    attachment.session, attachment.active = session, True
    megatron.hook_rank_check(attachment)
    return attachment


def test_it_runs_at_default_clocks_and_gets_and_gives_what_it_did(check: Any) -> None:
    original = check.run_sniff_tests
    attachment = attached(check.session)
    assert check.run_sniff_tests("dp", tag="iteration 100") == ("dp", "iteration 100", True)
    assert not check.session.at_default
    with pytest.raises(RuntimeError, match="of the benchmark"):
        check.run_sniff_tests("broken")
    assert not check.session.at_default
    check.session.connected = False
    assert check.run_sniff_tests("dp") == ("dp", "", False), "without an agent nothing is asked for"
    attachment.detach()
    assert check.run_sniff_tests is original


@pytest.mark.parametrize("absent", ["megatron.training", "megatron.training.gpu_sniff_test"])
def test_a_megatron_without_it_is_followed_all_the_same(
    absent: str, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent == "megatron.training":
        monkeypatch.delitem(sys.modules, absent)
    else:
        monkeypatch.setitem(sys.modules, absent, cast(Any, SimpleNamespace()))
    attached(check.session)
    assert check.run_sniff_tests("dp") == ("dp", "", False)
