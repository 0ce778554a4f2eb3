"""What a PowerBudget shares over a day and a week: its timetable, its largest step, and the namespaces it is for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.budget_site import Site

from perseus_operator.api.budget import BudgetSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.watts import next_watts, wanted_watts
from perseus_operator.errors import InvalidSpec, KubeUnavailable

MONDAY = datetime(2026, 11, 23, tzinfo=UTC)
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def at(day: int, hour: int, minute: int = 0) -> float:
    return (MONDAY + timedelta(days=day, hours=hour, minutes=minute)).timestamp()


def spec_of(*entries: tuple[str, int], **more: Any) -> Any:
    timetable = [{"at": moment, "watts": watts} for moment, watts in entries]
    return parse_spec(BudgetSpec, {"watts": 1, **({"timetable": timetable} if entries else {}), **more})


@pytest.mark.parametrize(
    ("wall_s", "watts"),
    [
        (at(0, 5, 59), 900),
        (at(0, 6), 500),
        (at(0, 21, 59), 500),
        (at(0, 22), 900),
        (at(5, 6), 800),
        (at(5, 22), 900),
        (at(6, 3), 900),
        (at(6, 7), 500),
    ],
    ids=["before the first of Monday", "day", "still day", "night", "Saturday", "its night", "Sunday's", "Sunday"],
)
def test_the_entry_that_began_last_counts(wall_s: float, watts: int) -> None:
    assert wanted_watts(spec_of(("06:00", 500), ("22:00", 900), ("Sat 06:00", 800)), wall_s) == watts


moments = st.tuples(st.sampled_from(("", *(f"{day} " for day in DAYS))), st.integers(0, 23), st.integers(0, 59))
timetables = st.dictionaries(moments, st.integers(1, 10**6), min_size=1, max_size=8)


@given(timetables, st.integers(0, 7 * 24 * 60 - 1))
def test_it_is_what_a_walk_through_the_week_before_finds(entries: dict[Any, int], minute: int) -> None:
    spec = spec_of(*((f"{day}{hour:02}:{m:02}", watts) for (day, hour, m), watts in entries.items()))
    now = MONDAY + timedelta(minutes=minute)
    for ago in range(7 * 24 * 60):
        then = now - timedelta(minutes=ago)
        for day in (f"{DAYS[then.weekday()]} ", ""):
            if (day, then.hour, then.minute) in entries:
                assert wanted_watts(spec, now.timestamp()) == entries[day, then.hour, then.minute]
                return


@given(st.floats(1, 1e6), st.integers(1, 10**6), st.integers(1, 10**4), st.floats(0, 100))
def test_no_step_is_larger_than_allowed_and_none_goes_beyond(
    before_w: float, watts: int, largest: int, elapsed_s: float
) -> None:
    spec = spec_of(watts=watts, maxStepWattsPerSecond=largest)
    after_w = next_watts(spec, before_w, 0.0, elapsed_s)
    assert abs(after_w - before_w) <= largest * elapsed_s + 1e-6
    assert min(before_w, watts) - 1e-6 <= after_w <= max(before_w, watts) + 1e-6
    assert next_watts(spec, None, 0.0, 0.0) == watts


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


async def test_over_a_day_the_shares_follow_the_timetable_in_steps(site: Site) -> None:
    for name in "ab":
        site.job(name)
    full_w = site.drawn_w("a") + site.drawn_w("b")
    high, low, step = round(full_w), round(0.85 * full_w), 5
    timetable = [{"at": "07:00", "watts": low}, {"at": "19:00", "watts": high}]
    spec = {"watts": high, "maxStepWattsPerSecond": step, "timetable": timetable}
    site.budgets.observe({"metadata": {"name": "hall", "uid": "u"}, "spec": spec})
    begin = datetime.fromtimestamp(1_900_000_000.0, UTC)
    shared: list[int] = []
    for _ in range(24 * 60):
        await site.tick(60.0)
        watts = site.written["watts"]
        assert sum(job.state.job.share.watts for job in site.jobs.values()) <= watts + 1e-6
        shared.append(watts)
        hour = (begin + timedelta(seconds=site.now_s)).hour
        if hour in (8, 12, 18):
            assert watts == low
        if hour in (20, 0, 6):
            assert watts == high
    assert set(shared) > {low, high}, "there are steps in between"
    assert max(abs(after - before) for before, after in pairwise(shared)) <= 60 * step + 1


GRAMS_PER_KWH = (
    *(81, 73, 69, 73, 76, 78, 82, 83, 83, 86, 91, 99, 103, 114, 117, 111, 108, 101, 101, 99, 100, 102, 98, 92),
    *(87, 90, 100, 107, 122, 132, 140, 148, 166, 182, 196, 202, 202, 204, 206, 212, 210, 208, 207, 200, 185, 179),
    *(178, 182),
)
"""A recorded day of a grid: carbon of Great Britain's electricity by the half hour from 14 March 2023, 01:00 UTC, as
measured. Source: National Energy System Operator, Carbon Intensity API, CC BY 4.0."""


class Day:
    """What a site does in that day: grams of carbon dioxide, joules, and iterations of its jobs."""

    def __init__(self) -> None:
        self.grams = self.joules = self.iterations = 0.0

    @property
    def grams_per_iteration(self) -> float:
        return self.grams / self.iterations


async def live_through(site: Site, watts_of: Callable[[int], int], *, step: int) -> Day:
    """Edit ``spec.watts`` each half hour, as a controller that knows the grid does, and look each minute."""
    day, before = Day(), 0
    for half_hour, grams_per_kwh in enumerate(GRAMS_PER_KWH):
        spec = {"watts": watts_of(grams_per_kwh), "maxStepWattsPerSecond": step}
        site.budgets.observe({"metadata": {"name": "hall", "uid": "u", "generation": half_hour + 1}, "spec": spec})
        for _ in range(30):
            await site.tick(60.0)
            watts = site.written["watts"]
            assert sum(job.state.job.share.watts for job in site.jobs.values()) <= watts + 1e-6
            assert not before or abs(watts - before) <= 60 * step + 1
            before = watts
            drawn_w = sum(site.drawn_w(name) for name in site.jobs)
            assert drawn_w <= watts + 1e-6
            day.joules += 60 * drawn_w
            day.grams += 60 * drawn_w / 3.6e6 * grams_per_kwh
            for job in site.jobs.values():
                (point,) = site.points(job.state.ref.name)
                day.iterations += 60e6 / job.state.frontier.expected_us[point]
    return day


async def test_over_a_recorded_day_work_moves_to_the_hours_of_little_carbon(make_job: Any) -> None:
    sites = [Site(make_job) for _ in range(2)]
    for site in sites:
        for name in "ab":
            site.job(name)
    full_w = sites[0].drawn_w("a") + sites[0].drawn_w("b")
    cleanest, dirtiest = min(GRAMS_PER_KWH), max(GRAMS_PER_KWH)

    def by_carbon(grams: int) -> int:
        return round(full_w * (1 - 0.25 * (grams - cleanest) / (dirtiest - cleanest)))

    followed = await live_through(sites[0], by_carbon, step=5)
    mean_w = round(sum(map(by_carbon, GRAMS_PER_KWH)) / len(GRAMS_PER_KWH))
    constant = await live_through(sites[1], lambda _: mean_w, step=5)
    assert followed.joules == pytest.approx(constant.joules, rel=0.02)
    assert followed.grams_per_iteration < 0.98 * constant.grams_per_iteration


async def test_a_ramp_goes_on_where_an_operator_before_has_left_it(site: Site) -> None:
    site.job("a")
    watts = round(2 * site.drawn_w("a"))
    spec = {"watts": watts, "maxStepWattsPerSecond": 10}
    site.budgets.observe({"metadata": {"name": "hall", "uid": "u"}, "spec": spec, "status": {"watts": watts - 100}})
    await site.tick()
    assert site.written["watts"] == watts - 100, "no time has passed yet"
    await site.tick()
    assert site.written["watts"] == watts - 90


async def test_namespaces_are_chosen_by_their_labels(site: Site) -> None:
    job = site.job("a")
    site.budget(round(0.9 * site.drawn_w("a")), namespaceSelector={"matchLabels": {"hall": "b"}})
    assert job.state.job.share is not None
    assert job.state.job.share.watts is None, "while the labels are not known the job waits"
    site.api.error = KubeUnavailable("gone")
    await site.tick()
    assert job.state.job.share.watts is None
    site.api.error, site.api.labels["ns"] = None, {"hall": "a"}
    await site.tick()
    assert job.state.job.share is None
    site.api.labels["ns"] = {"hall": "b"}
    await site.tick(30.0)
    assert job.state.job.share.watts is not None
    site.api.error = KubeUnavailable("gone")
    await site.tick(60.0)
    assert job.state.job.share.watts is not None, "unknown is not empty"


@pytest.mark.parametrize("moment", ["6:00", "24:00", "Mo 06:00", "Mon", "06:00 Mon", ""])
def test_a_bad_time_is_refused_with_its_rule(moment: str) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.timetable\[0\].at: must be a time in UTC such as 06:30 or Sat 06:30"):
        spec_of((moment, 5))
