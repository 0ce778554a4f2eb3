"""The lower convex hull of points: its corners turn upwards, and no point lies below it."""

from __future__ import annotations

import numpy as np
import pytest

from perseus_solver.relaxation.tables import lower_hull


@pytest.mark.parametrize("points", [1, 2, 3, 60, 2000])
@pytest.mark.parametrize("scatter", [0.0, 1e-6, 1e-3, 1.0])
def test_no_point_lies_below_the_hull_and_no_corner_on_a_line(points: int, scatter: float) -> None:
    random = np.random.default_rng(points)
    time = np.cumsum(random.uniform(0.1, 1.0, points))
    energy = 1e3 / time * (1 + scatter * random.random(points))
    corners = lower_hull(time, energy)
    assert (corners[0], corners[-1]) == (0, points - 1)
    slope = np.diff(energy[corners]) / np.diff(time[corners])
    assert (np.diff(slope) > 0).all()
    assert (energy >= np.interp(time, time[corners], energy[corners]) * (1 - 1e-12)).all()


def test_points_of_a_line_have_no_corner_between_them() -> None:
    number = np.arange(500.0)
    assert lower_hull(number, 1000.0 - number).tolist() == [0, 499]
