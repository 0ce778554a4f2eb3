"""The deployed gap is what a job at any deadline meets, and the points kept are those that make its worst least."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_solver.model.deployed import DeployedGap, step_gaps
from perseus_solver.model.result import Frontier, Status
from perseus_solver.search.placement import chosen, distance

WAITING_W = 160.0


def curve(seed: int, plans: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times, energies and bounds of plans that no other dominates, with least energy somewhere in between."""
    random = np.random.default_rng(seed)
    width_s = random.uniform(0.01, 0.2, plans)
    time_s = 1.0 + np.cumsum(width_s)
    effective_j = 900.0 - np.cumsum(width_s * np.sort(random.uniform(1.0, 400.0, plans))[::-1])
    energy_j = effective_j + WAITING_W * time_s
    return time_s, energy_j, energy_j - random.uniform(0.0, 2.0)


def frontier(time_s: np.ndarray, energy_j: np.ndarray, bound_j: np.ndarray) -> Frontier:
    points = len(time_s)
    return Frontier(
        time_s=time_s,
        energy_j=energy_j,
        energy_lower_bound_j=bound_j,
        statuses=(Status.WITHIN_GAP,) * points,
        frequencies_mhz=np.full((points, 2), 900, dtype=np.uint16),
        stage_offset=np.array([0, 1, 2], dtype=np.int32),
        clock_changes=np.zeros(points, dtype=np.int32),
        blocking_power_w=WAITING_W / 2,
    )


@given(st.integers(0, 2**32 - 1), st.integers(2, 20))
def test_the_deployed_gap_is_that_of_a_job_at_many_deadlines(seed: int, plans: int) -> None:
    time_s, energy_j, bound_j = curve(seed, plans)
    found = DeployedGap.of(frontier(time_s, energy_j, bound_j))
    least = int(energy_j.argmin())
    deadline_s = np.linspace(time_s[0], time_s[least], 20_001)
    runs = np.minimum(np.searchsorted(time_s, deadline_s, side="right") - 1, least)
    gap = energy_j[runs] / np.interp(deadline_s, time_s, bound_j) - 1.0
    assert gap.max() <= found.worst + 1e-12
    assert found.worst <= gap.max() + 2e-3 * (energy_j.max() / energy_j.min())
    assert found.mean == pytest.approx(float(gap.mean()), abs=1e-3)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(3, 9), st.integers(3, 9))
def test_no_other_choice_of_as_many_plans_has_a_smaller_worst_gap(seed: int, plans: int, points: int) -> None:
    time_s, energy_j, bound_j = curve(seed, plans)

    def worst(kept: np.ndarray) -> float:
        return float(step_gaps(time_s[kept], energy_j[kept], bound_j[kept], WAITING_W)[:-1].max(initial=0.0))

    kept = chosen(time_s, energy_j, bound_j, WAITING_W, points)
    least = int(energy_j.argmin())
    assert len(kept) <= points
    assert {0, least, plans - 1} <= set(kept.tolist())
    ends = {0, least, plans - 1}
    others = [i for i in range(plans) if i not in ends]
    best = min(
        worst(np.array(sorted(ends | set(more))))
        for size in range(min(max(points, 3) - len(ends), len(others)) + 1)
        for more in combinations(others, size)
    )
    # Beyond least energy, where the bound rises again, what may run until a later plan is taken as what may run before.
    assert worst(kept) <= best + 1e-3


@pytest.mark.parametrize("seed", range(4))
def test_where_a_large_gap_is_inevitable_the_points_lower_the_mean_elsewhere(seed: int) -> None:
    random = np.random.default_rng(seed)
    time_s = 1.0 + np.cumsum(random.uniform(0.01, 0.2, 300))
    bound_j = 1000.0 + 900.0 * np.exp(-2.0 * (time_s - 1.0) / time_s[-1])
    gap = np.abs(random.normal(0.0, 0.002, len(time_s)))
    gap[20:40] += 0.05
    energy_j = np.minimum.accumulate(bound_j * (1.0 + gap))
    found = np.flatnonzero(np.append(True, np.diff(energy_j) < 0))
    time_s, energy_j, bound_j = time_s[found], energy_j[found], bound_j[found]

    def deployed(kept: np.ndarray) -> DeployedGap:
        return DeployedGap.of(frontier(time_s[kept], energy_j[kept], bound_j[kept]))

    plans = np.arange(len(time_s))
    every, half = deployed(plans), deployed(np.union1d(plans[::2], plans[-1:]))
    kept = deployed(chosen(time_s, energy_j, bound_j, WAITING_W, len(plans) // 2))
    assert kept.worst == every.worst
    assert kept.mean - every.mean < 0.62 * (half.mean - every.mean)


@given(st.integers(0, 2**32 - 1), st.integers(2, 30))
def test_distance_grows_along_the_frontier_and_counts_what_a_step_loses(seed: int, plans: int) -> None:
    time_s, energy_j, _ = curve(seed, plans)
    along = distance(time_s, energy_j, WAITING_W)
    assert along[0] == 0.0
    assert (np.diff(along) >= 0).all()
    assert step_gaps(time_s, energy_j, energy_j, WAITING_W)[:-1] == pytest.approx(np.diff(along), abs=1e-9)
