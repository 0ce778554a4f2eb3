"""Jobs without pipeline stages, with real agents: whole iterations are marked, and a plan's clock is applied."""

from __future__ import annotations

from typing import Any

import pytest

LOOPS = ["ddp", "fsdp", "accelerate", "hugging_face", "lightning"]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_optimizer_step_is_a_step_at_the_planned_clock(harness: Any, loop: str) -> None:
    followed = harness.follow_steps("steps_worker.py", loop, ranks=2)
    assert followed["ranks"] == [(0, 0, 0), (1, 0, 0)]
    for said, executed in zip(followed["said"], followed["executed"], strict=True):
        assert len(executed) == said["optimizer_steps"]
        assert {tuple(mark[:3]) for one in executed for mark in one["instructions"]} == {("step", 0, 0)}
        assert all(len(one["instructions"]) == 1 for one in executed)
        clocks_mhz = [one["instructions"][0][3] for one in executed]
        assert clocks_mhz[0] == followed["default_mhz"]
        assert clocks_mhz[-1] == followed["planned_mhz"]
