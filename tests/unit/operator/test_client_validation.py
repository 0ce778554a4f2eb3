"""What cannot be true is not listened to, and nothing that can be true is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.operator.conftest import spec_of

from perseus_core.iteration import IterationReport
from perseus_operator.clients.agents.validation import MAX_ITERATION, MAX_TIME_US, is_valid_rank, is_valid_report
from perseus_operator.families.training.features.stragglers.detector import MAX_SLOWDOWN, StragglerDetector
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.nodes.node import Rank

REPORT = IterationReport(
    dp=0,
    stage=0,
    tp=0,
    iteration=7,
    iteration_time_us=500_000,
    compute_span_us=400_000,
    energy_mj=150_000,
    point=None,
)
RANK = Rank("pod", "GPU-1", 0, 0, 0, pid=1, iteration=7)


@given(
    st.integers(0, MAX_ITERATION - 1),
    st.integers(1_000, MAX_TIME_US),
    st.floats(0.001, 1.0),
    st.none() | st.floats(0, 2_000),
)
def test_every_iteration_of_a_real_gpu_can_be(
    iteration: int, time_us: int, share: float, power_w: float | None
) -> None:
    energy_mj = None if power_w is None else round(power_w * time_us / 1000)
    span_us = max(1, int(share * time_us))
    report = replace(
        REPORT, iteration=iteration, iteration_time_us=time_us, compute_span_us=span_us, energy_mj=energy_mj
    )
    assert is_valid_report(report)
    assert is_valid_rank(replace(RANK, iteration=iteration))


def test_what_eight_gpus_draw_together_may_be_too_much_for_one() -> None:
    together = replace(REPORT, together=tuple(range(8)), energy_mj=8 * 1_500 * 500)
    assert is_valid_report(together)
    assert not is_valid_report(replace(together, together=()))
    assert not is_valid_report(replace(together, energy_mj=8 * 10_001 * 500))


@pytest.mark.parametrize("ranks", [(0, 1, 1), tuple(range(1025))], ids=["twice", "more than any node has"])
def test_ranks_that_cannot_be_together_are_not_listened_to(ranks: tuple[int, ...]) -> None:
    assert not is_valid_report(replace(REPORT, together=ranks))


@pytest.mark.parametrize(
    "lie",
    [
        {"iteration": 2**64 - 1},
        {"iteration_time_us": 2**64 - 1},
        {"iteration_time_us": 0},
        {"compute_span_us": 0},
        {"compute_span_us": 2**64 - 1},
        {"energy_mj": 2**64 - 1},
        {"energy_mj": 20 * 500_000},
    ],
    ids=str,
)
def test_what_cannot_be_is_told_apart(lie: dict[str, Any]) -> None:
    assert is_valid_report(REPORT)
    assert not is_valid_report(replace(REPORT, **lie))


@pytest.mark.parametrize("lie", [{"iteration": 2**64 - 1}, {"gpu_uuid": "x" * 10_000}, {"pod_uid": "x" * 10_000}])
def test_so_is_a_rank(lie: dict[str, Any]) -> None:
    assert is_valid_rank(RANK)
    assert not is_valid_rank(replace(RANK, **lie))


def test_a_slowdown_has_an_end() -> None:
    detector = StragglerDetector()
    for iteration in range(5):
        spans = {0: 500_000, 1: MAX_TIME_US}
        seen = JobIteration(iteration, spans, MAX_TIME_US, None, {0: None, 1: None}, mixed=False)
        detector.observe(seen, {0: 500_000, 1: 500_000}, spec_of().straggler)
    assert detector.slowdowns == {1: MAX_SLOWDOWN}
