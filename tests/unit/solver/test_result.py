"""Frontiers as values: lookup, and the bytes in which they are stored, damaged ones included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from perseus_core.grain import Grain
from perseus_solver.model.result import Frontier, InvalidFrontier, Rehearsed, Status, status_of


def frontier(points: int = 5, n: int = 12) -> Frontier:
    """A made-up frontier: times 1, 2, …, two stages."""
    random = np.random.default_rng(0)
    time_s = np.arange(1.0, points + 1.0)
    return Frontier(
        time_s=time_s,
        energy_j=100.0 - 5.0 * time_s,
        energy_lower_bound_j=99.9 - 5.0 * time_s,
        statuses=(Status.WITHIN_GAP,) * points,
        frequencies_mhz=random.choice(np.array([0, 900, 1410, 1980], dtype=np.uint16), (points, n)),
        stage_offset=np.array([0, n // 2, n], dtype=np.int32),
        clock_changes=np.arange(points, dtype=np.int32),
        blocking_power_w=80.0,
    )


@pytest.mark.parametrize(
    ("time_s", "index"), [(0.5, 0), (1.0, 0), (1.999, 0), (2.0, 1), (4.5, 3), (5.0, 4), (99.0, 4), (float("inf"), 4)]
)
def test_lookup_gives_the_slowest_point_not_slower_and_clamps(time_s: float, index: int) -> None:
    assert frontier().lookup(time_s) == index


def test_bytes_bring_back_every_field() -> None:
    before = frontier()
    after = Frontier.from_bytes(before.to_bytes())
    for field in ("time_s", "energy_j", "energy_lower_bound_j", "frequencies_mhz", "stage_offset", "clock_changes"):
        old, new = getattr(before, field), getattr(after, field)
        assert (old == new).all(), field
        assert old.dtype == new.dtype, field
    assert after.statuses == before.statuses
    assert after.blocking_power_w == before.blocking_power_w


def rehearsed() -> Frontier:
    """The same, of plans that were rehearsed."""
    before = frontier()
    figures = np.random.default_rng(2).uniform(0.5, 1.5, (5, len(before)))
    grains = (Grain.NONE, Grain.STAGE, Grain.SEGMENT, Grain.INSTRUCTION, Grain.INSTRUCTION)
    return replace(before, rehearsed=Rehearsed(0.95, grains, *figures))


def test_bytes_bring_back_a_rehearsal() -> None:
    before = rehearsed()
    after = Frontier.from_bytes(before.to_bytes())
    assert after.to_bytes() == before.to_bytes()
    assert [point.expectation for point in after] == [point.expectation for point in before]
    assert [point.expectation.grain for point in after if point.expectation] == list(before.rehearsed.grains)  # type: ignore[union-attr]
    assert all(point.expectation is None for point in frontier())


def test_bytes_of_the_version_without_rehearsals_are_read() -> None:
    data = bytearray(frontier().to_bytes())
    assert data[7] == 2
    data[7] = 1
    after = Frontier.from_bytes(bytes(data))
    assert after.rehearsed is None
    assert (after.time_s == frontier().time_s).all()


def test_a_thousand_similar_plans_take_few_bytes() -> None:
    random = np.random.default_rng(1)
    steps = (random.random((200, 1000)) < 0.01).cumsum(axis=0) * 15
    plans = (1410 - steps).astype(np.uint16)
    base = frontier(200, 1000)
    assert len(replace(base, frequencies_mhz=plans).to_bytes()) < plans.nbytes / 20


@pytest.mark.parametrize("data", [b"", b"PRSFRNT", b"not a frontier at all", frontier().to_bytes()[1:]])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidFrontier, match="not a frontier"):
        Frontier.from_bytes(data)


def test_a_newer_version_is_named() -> None:
    data = bytearray(frontier().to_bytes())
    data[7] = 9
    with pytest.raises(InvalidFrontier, match="version 9 was written by another release"):
        Frontier.from_bytes(bytes(data))


@pytest.mark.parametrize("made", [frontier, rehearsed])
def test_damage_is_found_wherever_it_is(made: Callable[[], Frontier]) -> None:
    data = made().to_bytes()
    for cut in range(9, len(data), 7):
        with pytest.raises(InvalidFrontier, match="damaged"):
            Frontier.from_bytes(data[:cut])


def test_the_status_follows_from_the_gap() -> None:
    point = frontier()[0]
    assert point.gap == pytest.approx(95.0 / 94.9 - 1.0)
    assert [status_of(gap) for gap in (0.0, 1e-12, 1e-4, 0.01)] == [
        Status.OPTIMAL,
        Status.OPTIMAL,
        Status.WITHIN_GAP,
        Status.LIMIT_REACHED,
    ]
