"""A job draws more than its plans are said to draw: what its GPUs show decides how much of a share they take."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.budget_site import Site, condition
from tests.unit.operator.conftest import Job, frontier_of, spec_of

from perseus_operator.api.conditions import ConditionType
from perseus_operator.families.training.features.power.excess import WINDOW, Excess
from perseus_operator.families.training.features.power.plans import power_w
from perseus_operator.nodes.iterations import JobIteration

FRONTIER = frontier_of(spec_of())
PIPELINES = STAGES = 2


def iteration_of(
    number: int, factor: float | None, points: Mapping[int, int | None], *, slower: float = 1.0
) -> JobIteration:
    """One that draws so many times what its plans are said to draw; None: energy is not known."""
    planned = [FRONTIER.expected_us[point or 0] for point in points.values()]
    energy_mj = sum(FRONTIER.energies_mj[point or 0] for point in points.values())
    time_us = round(max(planned) * slower)
    drawn_mj = None if factor is None else round(factor * slower * energy_mj)
    return JobIteration(number, {}, time_us, drawn_mj, points, mixed=False)


def excess_after(*factors: float | None, points: Mapping[int, int | None] = {0: 3, 1: 3}) -> float:
    excess = Excess()
    for number, factor in enumerate(factors):
        excess.iteration_observed(iteration_of(number, factor, points), FRONTIER, 1)
    return excess.ratio


def test_more_power_counts_once_a_window_has_shown_it() -> None:
    assert excess_after(*[1.2] * (WINDOW - 1)) == 1.0
    assert excess_after(*[1.2] * WINDOW) == pytest.approx(1.2, abs=1e-3)
    assert excess_after(*[1.2] * WINDOW, points={0: 3, 1: 7}) == pytest.approx(1.2, abs=1e-3)


def test_less_power_and_noise_are_no_excess() -> None:
    assert excess_after(*[0.7] * WINDOW) == excess_after(*[1.015] * WINDOW) == 1.0


def test_what_says_nothing_of_plans_does_not_count() -> None:
    assert excess_after(*[None] * WINDOW, *[3.0] * (WINDOW - 1)) == 1.0
    assert excess_after(*[3.0] * WINDOW, points={0: None, 1: None}) == 1.0
    assert excess_after(*[3.0] * WINDOW, points={0: 3, 1: None}) == 1.0
    excess = Excess()
    for number in range(WINDOW):  # points of a frontier before, or of an agent that lies
        excess.iteration_observed(replace(iteration_of(number, 3.0, {0: 3}), points={0: 99}), FRONTIER, 1)
    assert excess.ratio == 1.0


def test_a_profile_that_knows_no_energy_is_corrected_as_well() -> None:
    """Its smallest energies are less than half a millijoule, and a frontier has whole ones."""
    nothing = replace(FRONTIER, energies_mj=(0,) * len(FRONTIER.energies_mj))
    excess = Excess()
    for number in range(WINDOW):
        excess.iteration_observed(iteration_of(number, 1.0, {0: 3, 1: 3}), nothing, 1)
    drawn_w = power_w(FRONTIER, 3, PIPELINES)
    assert power_w(nothing, 3, PIPELINES * excess.ratio) == pytest.approx(drawn_w, rel=1e-6)


def test_a_wait_at_the_plans_power_is_no_excess() -> None:
    excess = Excess()
    for number in range(WINDOW):
        excess.iteration_observed(iteration_of(number, 1.0, {0: 3, 1: 3}, slower=1.7), FRONTIER, 1)
    assert excess.ratio == 1.0


def test_it_falls_slowly_and_no_further_than_was_measured() -> None:
    down = [excess_after(*[1.3] * WINDOW, *[1.1] * windows * WINDOW) for windows in range(30)]
    assert down[1] == pytest.approx(1.29, abs=1e-3)
    assert all(after <= before for before, after in pairwise(down))
    assert 1.1 <= down[-1] <= 1.12 + 1e-3


@settings(max_examples=25, deadline=None)
@given(st.floats(1.03, 2.5), st.floats(0.75, 0.98))
def test_whatever_its_profile_says_a_job_keeps_its_share(factor: float, share: float) -> None:
    """A profile is its user's: one that says half of the power must not get twice the watts."""
    asyncio.run(_keeps_its_share(factor, share))


async def _keeps_its_share(factor: float, share: float) -> None:
    site = Site(Job)
    job = site.job("a")
    least_w = factor * min(
        1000.0 * PIPELINES * energy / time
        for energy, time in zip(FRONTIER.energies_mj, FRONTIER.expected_us, strict=True)
    )
    budget_w = round(max(share * factor * site.drawn_w("a"), least_w + 1))
    site.budget(budget_w)
    drawn: list[float] = []
    for number in range(1, 6 * WINDOW):
        (point,) = site.points("a")
        rank_mj = round(factor * FRONTIER.energies_mj[point] / STAGES)
        job.train(number, energy_mj=rank_mj)
        drawn.append(factor * site.drawn_w("a"))
        await site.tick()
    assert max(drawn[3 * WINDOW :]) <= budget_w * 1.021, "noise is what is not seen"
    changes = sum(before != after for before, after in pairwise(drawn[3 * WINDOW :]))
    assert changes <= 1, "it does not go to and fro"


async def test_the_status_says_that_more_is_drawn_than_predicted(make_job: Any) -> None:
    site = Site(make_job)
    job = site.job("a")
    site.budget(round(1.2 * site.drawn_w("a")))
    for number in range(1, 2 * WINDOW):
        (point,) = site.points("a")
        job.train(number, energy_mj=round(1.3 * FRONTIER.energies_mj[point] / STAGES))
        await site.tick()
    message = condition(job, ConditionType.PLAN_APPLIED)[2]
    assert "That is 30.00% more than predicted, as its GPUs have shown." in message
