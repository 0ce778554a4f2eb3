"""Energy of a PowerBudget in a day or a month: kept by pacing, whatever clocks, counters, edits and restarts do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doubles.budget_site import Site

from perseus_core.units import kwh_from_j, wh_from_j
from perseus_operator.api.budget import BudgetFigures, BudgetSpec
from perseus_operator.api.schema import dump, parse_spec
from perseus_operator.api.stored import parse_stored
from perseus_operator.budgets.allocation import Claim
from perseus_operator.budgets.budget import BudgetDecision, decide_shares, figures
from perseus_operator.budgets.draw import draw_to_status, member_from_status, meter_to_status
from perseus_operator.budgets.energy import EnergyLedger
from perseus_operator.budgets.member import Member
from perseus_operator.budgets.pacing import EnergyPacing
from perseus_operator.budgets.periods import period_at
from perseus_operator.budgets.reading import Reading
from perseus_operator.budgets.watts import DECISION_S, level_w, next_watts, watts_until
from perseus_operator.errors import InvalidSpec
from perseus_operator.objects.values import Now

HOUR_S, DAY_S = 3600.0, 24 * 3600.0
MIDNIGHT_S = datetime(2026, 11, 23, tzinfo=UTC).timestamp()
GPUS, LEAST_W, WANTED_W = 8, 400.0, 1000.0
CURVE = tuple((float(watts), math.sqrt(watts / WANTED_W)) for watts in range(int(LEAST_W), int(WANTED_W) + 1, 20))


def spec_of(kilowatt_hours: int, *, per: str = "Day", zone: str = "UTC", watts: int = 5000, **more: Any) -> BudgetSpec:
    energy = {"kilowattHours": kilowatt_hours, "per": per, "timeZone": zone}
    return parse_spec(BudgetSpec, {"watts": watts, "energy": energy, **more})


class Plant:
    """One job under a budget, second by second in virtual time: it draws what its share allows, give or take an error,
    and its counters are read when an iteration ends.
    """

    def __init__(self, spec: BudgetSpec, *, begin_s: float = MIDNIGHT_S, iteration_s: float = 40.0) -> None:
        self.spec, self.iteration_s = spec, iteration_s
        self.monotonic_s, self.wall_s = 1000.0, begin_s
        self.pacing = EnergyPacing()
        self.decision = BudgetDecision()
        self.watts: float | None = None
        self.reading = Reading()
        self.iteration_j = 0.0
        self.drawn_j = 0.0
        """Truly, since the plant began."""
        self.error, self.running, self.counters = 0.0, True, True

    @property
    def member(self) -> Member:
        return Member("ns/a", 0, Claim("ns/a", 0, GPUS, CURVE), held_w=2000.0, gpus=GPUS, reading=self.reading)

    @property
    def power_w(self) -> float:
        share_w = self.decision.allocation.shares_w.get("ns/a", 0.0) if self.running else 0.0
        return share_w * (1 + self.error)

    @property
    def shown(self) -> Any:
        assert self.pacing.figures is not None
        return self.pacing.figures

    @property
    def reason(self) -> str:
        assert self.pacing.statement is not None
        return self.pacing.statement.reason.value

    def step(self, seconds: float = 20.0) -> None:
        assert self.spec.energy is not None
        self.drawn_j += self.power_w * seconds
        self.iteration_j += self.power_w * seconds
        self.monotonic_s += seconds
        self.wall_s += seconds
        if self.running and self.counters and self.monotonic_s % self.iteration_s < seconds:
            self.reading = self.reading.plus(self.iteration_j, GPUS * max(seconds, self.iteration_s))
            self.iteration_j = 0.0
        members = [self.member] if self.running else []
        now = Now(self.monotonic_s, self.wall_s)
        self.pacing.advance(self.spec, self.spec.energy, members, self.decision, now)
        self.watts = next_watts(self.spec, self.watts, self.wall_s, seconds, self.pacing.level_w)
        shared = replace(self.spec, watts=max(1, int(self.watts)))
        self.decision = decide_shares(shared, members, self.decision)

    def run(self, seconds: float, step_s: float = 20.0) -> None:
        for _ in range(round(seconds / step_s)):
            self.step(step_s)

    def stored(self) -> BudgetFigures:
        """What the status has, as another operator reads it."""
        shown = figures(replace(self.spec, watts=max(1, int(self.watts or 1))), self.decision)
        return self._read(dump(replace(shown, energy=self.pacing.figures)))

    def _read(self, status: dict[str, Any]) -> BudgetFigures:
        stored = parse_stored(BudgetFigures, status)
        assert stored is not None
        return stored

    def restart(self, away_s: float, power_w: Callable[[float], float] | None = None) -> None:
        """Another operator goes on; meanwhile nobody measures."""
        status = self.stored()
        self.drawn_j += sum((power_w(second) if power_w else self.power_w) for second in range(int(away_s)))
        self.monotonic_s, self.wall_s = 5.0, self.wall_s + away_s
        self.pacing, self.reading, self.iteration_j = EnergyPacing(status), Reading(), 0.0


def slack_j(plant: Plant) -> float:
    """What two decisions more allow: one until the share falls, and one that is not measured yet."""
    return 2 * DECISION_S * WANTED_W * (1 + abs(plant.error))


# -------------------------------------------------------------------------------------------------------------- laws
@settings(deadline=None, max_examples=12)
@given(
    kilowatt_hours=st.integers(11, 30),
    error=st.floats(-0.2, 0.2),
    idle_h=st.sets(st.integers(0, 23), max_size=12),
    iteration_s=st.sampled_from((60.0, 120.0, 600.0)),
)
def test_a_day_uses_no_more_than_its_budget(
    kilowatt_hours: int, error: float, idle_h: set[int], iteration_s: float
) -> None:
    plant = Plant(spec_of(kilowatt_hours), iteration_s=iteration_s)
    plant.error = error
    for hour in range(24):
        plant.running = hour not in idle_h
        plant.run(HOUR_S, 60.0)
    least_j = LEAST_W * (1 + error) * DAY_S
    allowed_j = max(3.6e6 * kilowatt_hours, least_j)
    assert plant.drawn_j <= allowed_j + slack_j(plant) + iteration_s * WANTED_W


@settings(deadline=None, max_examples=5)
@given(kilowatt_hours=st.integers(11, 26), error=st.floats(-0.05, 0.05))
def test_pacing_starves_neither_the_begin_nor_the_end(kilowatt_hours: int, error: float) -> None:
    plant = Plant(spec_of(kilowatt_hours))
    plant.error = error
    mean_w = min(WANTED_W * (1 + error), 1000 * kilowatt_hours / 24)
    for _ in range(24):
        before_j = plant.drawn_j
        plant.run(HOUR_S, 60.0)
        # What shares leave, as they move in steps, is in the last hours.
        assert 0.9 * mean_w <= (plant.drawn_j - before_j) / HOUR_S <= 1.25 * mean_w
    assert plant.drawn_j == pytest.approx(mean_w * DAY_S, rel=0.02), "what may be used is used"


@given(
    st.lists(st.tuples(st.integers(0, 23), st.integers(1, 900)), max_size=5, unique_by=lambda entry: entry[0]),
    st.floats(0, 2e8),
    st.integers(0, 22),
)
def test_at_the_level_the_rest_is_used_up_at_the_end(entries: list[tuple[int, int]], left_j: float, hour: int) -> None:
    timetable = [{"at": f"{at:02}:00", "watts": watts} for at, watts in entries]
    more: dict[str, Any] = {"timetable": timetable} if entries else {}
    spec = spec_of(1, watts=500, **more)
    now_s, end_s = MIDNIGHT_S + hour * HOUR_S, MIDNIGHT_S + DAY_S
    caps = watts_until(spec, now_s, end_s)
    assert sum(seconds for _, seconds in caps) == pytest.approx(end_s - now_s)
    level = level_w(spec, left_j, now_s, end_s)
    most_j = sum(watts * seconds for watts, seconds in caps)
    used_j = sum(min(watts, level) * seconds for watts, seconds in caps)
    assert used_j == pytest.approx(min(left_j, most_j), abs=1e-3)
    assert math.isinf(level) == (left_j > most_j)


def test_hours_that_the_timetable_makes_frugal_leave_their_energy_to_the_others() -> None:
    timetable = [{"at": "00:00", "watts": 200}, {"at": "12:00", "watts": 1000}]
    assert level_w(spec_of(10, timetable=timetable), 3.6e6 * 10, MIDNIGHT_S, MIDNIGHT_S + DAY_S) == pytest.approx(
        (10_000 - 12 * 200) / 12
    )


# ----------------------------------------------------------------------------------------------------------- periods
zones = st.sampled_from(
    ("UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "America/Havana", "Australia/Lord_Howe")
)


@given(st.floats(1.0e9, 2.2e9), zones, st.sampled_from(("Day", "Month")))
def test_periods_follow_each_other_without_a_gap(wall_s: float, zone: str, per: str) -> None:
    energy = spec_of(1, per=per, zone=zone).energy
    assert energy is not None
    period = period_at(energy, wall_s)
    assert period.begin_s <= wall_s < period.end_s
    assert period_at(energy, period.end_s).begin_s == period.end_s
    assert period_at(energy, period.begin_s) == period
    local = datetime.fromtimestamp(wall_s, ZoneInfo(zone)).date()
    assert datetime.fromtimestamp(period.begin_s, ZoneInfo(zone)).date() == (
        local if per == "Day" else local.replace(day=1)
    )


@pytest.mark.parametrize(
    ("day", "per", "hours"),
    [
        (date(2026, 3, 29), "Day", 23),
        (date(2026, 10, 25), "Day", 25),
        (date(2026, 11, 1), "Day", 24),
        (date(2028, 2, 20), "Month", 29 * 24),
        (date(2026, 3, 1), "Month", 31 * 24 - 1),
        (date(2026, 12, 31), "Month", 31 * 24),
    ],
    ids=["summer time begins", "it ends", "no change", "leap February", "March", "over the year"],
)
def test_days_and_months_are_as_long_as_the_clocks_of_the_zone_say(day: date, per: str, hours: int) -> None:
    energy = spec_of(1, per=per, zone="Europe/Berlin").energy
    assert energy is not None
    noon_s = datetime(day.year, day.month, day.day, 12, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    period = period_at(energy, noon_s)
    assert period.end_s - period.begin_s == hours * HOUR_S


@pytest.mark.parametrize(("day", "hours"), [(date(2026, 3, 29), 23), (date(2026, 10, 25), 25)])
def test_a_day_of_another_length_is_paced_as_it_is(day: date, hours: int) -> None:
    begin_s = datetime(day.year, day.month, day.day, tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    plant = Plant(spec_of(15, zone="Europe/Berlin"), begin_s=begin_s)
    plant.step()
    assert plant.pacing.level_w == pytest.approx(15_000 / hours, rel=0.001)
    plant.run(hours * HOUR_S - 60)
    assert kwh_from_j(plant.drawn_j) == pytest.approx(15, rel=0.01)
    before = plant.shown.used
    plant.run(120)
    assert plant.shown.previous.begin == before.begin, "the next day has begun"
    assert plant.shown.used.measured_watt_hours < 100


# ------------------------------------------------------------------------------------ edits, clocks, absence, counters
def test_a_changed_budget_holds_from_now_on_for_what_is_left() -> None:
    plant = Plant(spec_of(20))
    plant.run(12 * HOUR_S)
    used_wh = 1e3 * kwh_from_j(plant.drawn_j)
    plant.spec = spec_of(15)
    plant.step()
    assert plant.pacing.level_w == pytest.approx((15_000 - used_wh) / 12, rel=0.01)
    plant.run(12 * HOUR_S - 60)
    assert kwh_from_j(plant.drawn_j) == pytest.approx(15, rel=0.01)


def test_another_time_zone_forgets_nothing_and_another_kind_of_period_begins_anew() -> None:
    plant = Plant(spec_of(15))
    plant.run(12 * HOUR_S)
    used_wh = plant.shown.used.measured_watt_hours
    for zone in ("Asia/Tokyo", "America/New_York", "UTC"):
        plant.spec = spec_of(15, zone=zone)
        plant.step()
        assert plant.shown.used.measured_watt_hours >= used_wh - 1 or plant.shown.previous is not None
    plant.spec = spec_of(450, per="Month")
    plant.step()
    plant.spec = spec_of(15)
    plant.step()
    assert plant.shown.used.measured_watt_hours < 100


@pytest.mark.parametrize("jump_s", [600.0, 20 * HOUR_S, 40 * DAY_S], ids=["in the day", "to the next", "far away"])
def test_a_clock_that_jumps_and_is_set_right_gives_no_second_budget(jump_s: float) -> None:
    plant = Plant(spec_of(15))
    plant.run(6 * HOUR_S)
    plant.wall_s += jump_s
    plant.run(HOUR_S)
    plant.wall_s -= jump_s
    plant.run(17 * HOUR_S - 60)
    assert kwh_from_j(plant.drawn_j) <= 15 + kwh_from_j(slack_j(plant))


@pytest.mark.parametrize("jump_s", [-600.0, -30 * HOUR_S])
def test_a_clock_that_is_set_back_forgets_nothing(jump_s: float) -> None:
    plant = Plant(spec_of(15))
    plant.run(12 * HOUR_S)
    before = plant.shown.used
    plant.wall_s += jump_s
    plant.step(DECISION_S)
    assert plant.shown.used.measured_watt_hours >= before.measured_watt_hours


def test_a_restart_loses_nothing_and_absence_counts_as_what_was_granted() -> None:
    plant = Plant(spec_of(15))
    plant.run(6 * HOUR_S)
    before = plant.shown.used
    plant.restart(away_s=0.0)
    plant.step()
    after = plant.shown.used
    assert after.measured_watt_hours >= before.measured_watt_hours
    plant.restart(away_s=3 * HOUR_S)
    plant.step()
    away = plant.shown.used
    assert away.measured_watt_hours == pytest.approx(after.measured_watt_hours, abs=2)
    assert away.assumed_watt_hours - after.assumed_watt_hours >= 0.99 * 3 * 15_000 / 24
    plant.run(15 * HOUR_S - 60)
    assert kwh_from_j(plant.drawn_j) <= 15 + kwh_from_j(slack_j(plant))


def test_once_gpus_have_gone_to_their_default_clocks_absence_counts_as_what_jobs_want() -> None:
    plant = Plant(spec_of(15, fallback={"holdSeconds": 3600}))
    plant.run(6 * HOUR_S)
    before = plant.shown.used.assumed_watt_hours
    plant.restart(away_s=4 * HOUR_S)
    plant.step()
    assumed = plant.shown.used.assumed_watt_hours - before
    assert assumed == pytest.approx(15_000 / 24 + 3 * WANTED_W, rel=0.02)


def test_of_an_absence_over_midnight_only_what_is_of_today_counts_today() -> None:
    plant = Plant(spec_of(15))
    plant.run(23 * HOUR_S)
    plant.restart(away_s=2 * HOUR_S)
    plant.step()
    assert plant.shown.used.assumed_watt_hours <= WANTED_W + 10
    assert plant.shown.previous is not None


def test_what_has_no_counter_counts_as_granted_and_is_said() -> None:
    plant = Plant(spec_of(15))
    plant.counters = False
    plant.run(12 * HOUR_S)
    assert plant.shown.used.measured_watt_hours == 0
    assert plant.shown.used.assumed_watt_hours == pytest.approx(7500, rel=0.01)
    assert plant.shown.unmeasured_jobs == 1
    assert plant.pacing.statement is not None
    assert "1 job not measured, first ns/a: counted at the watts that are granted" in plant.pacing.statement.message


def ledger_after(*readings: tuple[float, Reading]) -> EnergyLedger:
    """A ledger of one job of 8 GPUs with a share of 500 W, after readings at these seconds."""
    spec, ledger = spec_of(15), EnergyLedger()
    assert spec.energy is not None
    for at_s, reading in readings:
        member = Member("ns/a", 0, held_w=2000.0, gpus=GPUS, reading=reading)
        ledger.advance(spec, spec.energy, [member], {"ns/a": 500.0}, Now(at_s, MIDNIGHT_S + at_s))
    return ledger


def test_a_report_takes_back_what_was_assumed_for_its_time() -> None:
    open_ = ledger_after((0, Reading()), (100, Reading()))
    assert (open_.used.measured_j, open_.used.assumed_j) == (0.0, 50_000.0)
    half = ledger_after((0, Reading()), (100, Reading(20_000.0, GPUS * 50.0)))
    assert (half.used.measured_j, half.used.assumed_j) == (20_000.0, 25_000.0)
    full = ledger_after((0, Reading()), (100, Reading(40_000.0, GPUS * 100.0)))
    assert (full.used.measured_j, full.used.assumed_j) == (40_000.0, 0.0)


def test_of_a_report_only_time_of_this_period_and_of_gpus_that_are_there_counts() -> None:
    twice = ledger_after((0, Reading()), (100, Reading(80_000.0, 2 * GPUS * 100.0)))
    assert (twice.used.measured_j, twice.used.assumed_j) == (40_000.0, 0.0)
    ticks = [(DAY_S + at_s, Reading()) for at_s in (-100.0, -0.5, 0.5)]
    over = ledger_after(*ticks, (DAY_S + 50.0, Reading(60e3, GPUS * 150.0)))
    assert over.used.measured_j == pytest.approx(60e3 * 50.5 / 150)


def test_a_meter_that_begins_anew_is_read_from_zero() -> None:
    ledger = ledger_after(
        (0, Reading(1e9, 1e6)), (100, Reading(1e9 + 40_000.0, 1e6 + GPUS * 100.0)), (200, Reading(9e3, GPUS * 20.0))
    )
    assert ledger.used.measured_j == pytest.approx(49_000.0)


def test_the_replica_that_shares_reads_what_another_has_measured() -> None:
    member = Member("ns/a", 0, gpus=GPUS, reading=Reading(1234.9, 56.7))
    draw = replace(draw_to_status(member), meter=meter_to_status(member))
    read = member_from_status("ns/a", 0, {"powerBudget": {"name": "hall", "draw": dump(draw)}})
    assert read is not None
    assert (read.gpus, read.reading) == (GPUS, Reading(1234.0, 56.0))


# -------------------------------------------------------------------------------------------------- what is said of it
def test_it_is_said_before_it_binds_and_while_it_binds() -> None:
    timetable = [{"at": "00:00", "watts": 500}, {"at": "12:00", "watts": 5000}]
    plant = Plant(spec_of(15, timetable=timetable))
    plant.step()
    assert plant.reason == "EnergyScarce", "the night is frugal by itself, the afternoon will not be"
    assert plant.shown.forecast_watt_hours == pytest.approx(12 * 500 + 12 * WANTED_W, rel=0.01)
    plant.run(13 * HOUR_S)
    assert plant.reason == "EnergyPaced"
    assert plant.shown.pace_watts == pytest.approx(9000 / 12, rel=0.02)
    plant.spec = spec_of(5)
    plant.step()
    assert plant.reason == "EnergyUsedUp"
    assert not plant.decision.allocation.feasible
    assert plant.power_w == LEAST_W, "nothing is stopped"
    plant.spec = spec_of(8)
    plant.step()
    assert plant.reason == "EnergyTooSmall"
    plant.spec = spec_of(100)
    plant.step()
    assert plant.reason == "EnergyEnough"
    assert plant.power_w == WANTED_W


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


async def test_the_status_has_it_and_the_job_says_who_slows_it(site: Site) -> None:
    job = site.job("a")
    site.begin_s = datetime(2030, 3, 18, tzinfo=UTC).timestamp()
    kilowatt_hours = max(1, int(0.85 * site.drawn_w("a") * 24 / 1000))
    spec = {"watts": 1_000_000, "energy": {"kilowattHours": kilowatt_hours, "per": "Day"}}
    site.budgets.observe({"metadata": {"name": "hall", "uid": "u", "generation": 1}, "spec": spec})
    drawn_j = 0.0
    said: dict[str, Any] = {}
    for minute in range(24 * 60 - 1):
        await site.tick(60.0)
        if minute == 12 * 60:
            said = {condition["type"]: condition for condition in site.written["conditions"]}["EnergyKept"]
        energy_j = 60.0 * site.drawn_w("a")
        drawn_j += energy_j
        gpus = sum(len(node.gpu_uuids) for node in job.nodes)
        job.state.job.energy_reported(round(1000 * energy_j), round(gpus * 60e6))
    assert kwh_from_j(drawn_j) <= kilowatt_hours
    assert kwh_from_j(drawn_j) > 0.9 * kilowatt_hours
    energy = site.written["energy"]
    assert energy["used"]["begin"] == "2030-03-18T00:00:00Z"
    assert energy["end"] == "2030-03-19T00:00:00Z"
    assert energy["used"]["measuredWattHours"] == pytest.approx(wh_from_j(drawn_j), rel=0.01)
    assert (said["status"], said["reason"]) == ("True", "EnergyPaced")
    assert ("hall", "Normal", "EnergyPaced") in site.api.events
    assert job.state.job.share.budget == "hall"
    shown = site.metrics.registry.get_sample_value
    assert shown("perseus_budget_energy_limit_joules", {"budget": "hall"}) == 3.6e6 * kilowatt_hours
    assert shown("perseus_budget_energy_kept", {"budget": "hall"}) == 1.0
    writes = len(site.api.writes)
    for _ in range(30):
        await site.tick(1.0)
    assert len(site.api.writes) <= writes + 2, "not each second"
    site.budgets.observe({"metadata": {"name": "hall", "uid": "u", "generation": 2}, "spec": {"watts": 1_000_000}})
    await site.tick()
    assert "energy" not in site.written
    assert "EnergyKept" not in {condition["type"] for condition in site.written["conditions"]}
    assert shown("perseus_budget_energy_limit_joules", {"budget": "hall"}) is None


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../etc/passwd", "/UTC", "", "Europe"])
def test_a_zone_that_does_not_exist_is_refused_with_the_rule(zone: str) -> None:
    with pytest.raises(InvalidSpec, match=r"spec.energy.timeZone: must be a name of the time zone database such as"):
        spec_of(5, zone=zone)


def test_a_day_of_a_zone_that_skips_it_has_no_length() -> None:
    energy = spec_of(1, zone="Pacific/Apia").energy
    assert energy is not None
    before = period_at(energy, datetime(2011, 12, 29, 12, tzinfo=ZoneInfo("Pacific/Apia")).timestamp())
    assert before.end_s - before.begin_s == timedelta(days=1).total_seconds()
    assert period_at(energy, before.end_s).begin_s == before.end_s
