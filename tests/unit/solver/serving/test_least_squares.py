"""Least squares of parameters that are at least 0."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_solver.serving.least_squares import non_negative


@given(st.integers(0, 10_000), st.integers(1, 6))
def test_nothing_is_gained_by_any_small_change(seed: int, count: int) -> None:
    draw = np.random.default_rng(seed)
    design = draw.random((20, count)) * 10.0 ** draw.integers(-9, 9, count)
    aim = draw.standard_normal(20) + 0.5
    gram, moment = design.T @ design, design.T @ aim
    found = non_negative(gram[None], moment[None])[0]
    slope = (moment - gram @ found) / np.sqrt(np.diag(gram))
    assert (found >= 0.0).all()
    assert (slope <= 1e-6).all()
    assert (np.abs(slope[found > 0.0]) <= 1e-6).all()


def test_a_column_of_nothing_gets_nothing() -> None:
    gram = np.diag([4.0, 0.0])
    assert non_negative(gram[None], np.array([[2.0, 1e-12]]))[0].tolist() == pytest.approx([0.5, 0.0], abs=1e-9)
