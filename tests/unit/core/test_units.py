"""Conversions between the solver's floats and the wire's integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core import units

seconds = st.floats(min_value=0, max_value=1e6)


@given(seconds)
def test_time_survives_the_wire_to_half_a_microsecond(time_s: float) -> None:
    assert units.s_from_us(units.us_from_s(time_s)) == pytest.approx(time_s, abs=0.51e-6, rel=1e-12)


def test_milliseconds_for_messages_are_not_rounded() -> None:
    assert units.fractional_ms_from_s(0.0125) == 12.5


@given(st.floats(min_value=0, max_value=1e9))
def test_energy_survives_the_wire_to_half_a_millijoule(energy_j: float) -> None:
    assert units.j_from_mj(units.mj_from_j(energy_j)) == pytest.approx(energy_j, abs=0.51e-3, rel=1e-12)


@given(st.floats(min_value=0, max_value=1e6))
def test_power_survives_the_wire_to_half_a_milliwatt(power_w: float) -> None:
    assert units.w_from_mw(units.mw_from_w(power_w)) == pytest.approx(power_w, abs=0.51e-3, rel=1e-12)


@pytest.mark.parametrize(("text", "ratio"), [("3%", 0.03), ("2.5%", 0.025), ("0%", 0.0), (" 10% ", 0.1)])
def test_a_percentage_becomes_a_ratio(text: str, ratio: float) -> None:
    assert units.ratio_from_percent(text) == pytest.approx(ratio)


@pytest.mark.parametrize("text", ["3", "-1%", "three%", "", "%", "1e2%", "nan%", "3 %"])
def test_what_is_not_a_percentage_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a percentage such as 3%"):
        units.ratio_from_percent(text)


@given(st.floats(min_value=0, max_value=1e7), st.floats(min_value=1, max_value=1e9))
def test_mean_power_over_a_time_is_the_energy_again(energy_mj: float, time_us: float) -> None:
    power_w = units.mean_power_w(energy_mj, time_us)
    assert units.energy_mj(power_w, time_us) == pytest.approx(energy_mj, rel=1e-9)
    assert power_w * units.s_from_us(time_us) == pytest.approx(units.j_from_mj(energy_mj), rel=1e-9)


@given(st.integers(min_value=0, max_value=10**9))
def test_parts_per_million_and_milliseconds_are_exact_both_ways(number: int) -> None:
    assert units.ppm_from_ratio(units.ratio_from_ppm(number)) == number
    assert units.ms_from_s(units.s_from_ms(number)) == number


@given(st.integers(min_value=0, max_value=10**15))
def test_nanoseconds_are_never_in_the_future(nanoseconds: int) -> None:
    assert 0 <= nanoseconds - 1000 * units.us_from_ns(nanoseconds) < 1000
    assert units.s_from_ns(nanoseconds) == pytest.approx(units.s_from_us(nanoseconds / 1000))
