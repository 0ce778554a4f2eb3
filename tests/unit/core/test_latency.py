"""Latencies are estimated by the clock that is changed to, where that clock was changed to often enough."""

from __future__ import annotations

import math
import random
from statistics import median, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.latency import (
    ENOUGH_OF_CLOCK,
    MAX_LATENCY_US,
    SwitchLatency,
    by_clock,
)

TYPICAL = SwitchLatency.of_seconds(0.020, 0.080, 0.004, True, "measured on this GPU")

LATENCIES = st.builds(
    lambda p50_s, tail: SwitchLatency.of_seconds(p50_s, p50_s * tail, 0.0, False, "drawn"),
    st.floats(1e-4, 1.0),
    st.floats(1.01, 50.0),
)
MEDIANS_US = st.dictionaries(
    st.integers(1, 10_000), st.tuples(st.integers(1, 1_000_000), st.integers(1, MAX_LATENCY_US)), max_size=20
)


def drawn(seed: int, *, between: float, own: float, changes: int = 120) -> tuple[dict[int, float], SwitchLatency, dict]:
    """Latencies of changes to 40 clocks: what each clock's median is, and what is measured of all and of each."""
    source = random.Random(seed)
    true_s = {mhz: 0.02 * math.exp(source.gauss(0.0, between)) for mhz in range(800, 1600, 20)}
    seen_s = {mhz: [p50_s * math.exp(source.gauss(0.0, own)) for _ in range(changes)] for mhz, p50_s in true_s.items()}
    everything = sorted(latency_s for of in seen_s.values() for latency_s in of)
    overall = SwitchLatency.of_seconds(median(everything), quantiles(everything, n=100)[98], 0.0, False, "drawn")
    return true_s, overall, {mhz: (len(of), 1e6 * median(of)) for mhz, of in seen_s.items()}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("between", "own"), [(0.4, 0.4), (0.5, 0.3), (0.2, 0.5)])
def test_the_part_of_the_clock_is_separated_from_the_scatter_of_its_changes(
    seed: int, between: float, own: float
) -> None:
    true_s, overall, measured = drawn(seed, between=between, own=own)
    found = by_clock(overall, measured)
    assert found.keys() == true_s.keys()
    for mhz, latency in found.items():
        assert latency.p50_s == pytest.approx(true_s[mhz], rel=0.2), "a median of 120 is known to about a tenth"
        assert latency.sigma == pytest.approx(own, rel=0.25)
    assert max(latency.sigma for latency in found.values()) < overall.sigma


@pytest.mark.parametrize("seed", range(5))
def test_where_the_clock_does_not_matter_the_whole_scatter_stays(seed: int) -> None:
    _, overall, measured = drawn(seed, between=0.0, own=0.5)
    for latency in by_clock(overall, measured).values():
        assert latency.p50_s == pytest.approx(overall.p50_s, rel=0.2)
        assert latency.sigma == pytest.approx(overall.sigma, rel=0.1)


@given(LATENCIES, st.sets(st.integers(1, 10_000), min_size=1, max_size=9), st.integers(ENOUGH_OF_CLOCK, 10_000))
def test_clocks_with_the_median_of_all_are_no_surer_than_all(
    overall: SwitchLatency, clocks: set[int], changes: int
) -> None:
    found = by_clock(overall, dict.fromkeys(clocks, (changes, overall.p50_us)))
    assert found.keys() == clocks
    for latency in found.values():
        assert abs(latency.p50_us - overall.p50_us) <= 1
        assert latency.p99_us >= overall.p99_us - 1, "their medians say nothing less of the next change"


@given(LATENCIES, MEDIANS_US)
def test_only_clocks_with_enough_changes_have_a_latency_of_their_own(
    overall: SwitchLatency, measured: dict[int, tuple[int, int]]
) -> None:
    found = by_clock(overall, measured)
    assert found.keys() == {mhz for mhz, (changes, _) in measured.items() if changes >= ENOUGH_OF_CLOCK}
    assert by_clock(overall, {mhz: of for mhz, of in measured.items() if mhz in found}) == found, "few say nothing"
    for mhz, latency in found.items():
        low_us, high_us = sorted((overall.p50_us, measured[mhz][1]))
        assert low_us - 1 <= latency.p50_us <= high_us + 1
        assert MAX_LATENCY_US >= latency.p99_us >= latency.p50_us > 0
        assert (latency.call_s, latency.shared_lock, latency.source) == (
            overall.call_s,
            overall.shared_lock,
            overall.source,
        )


def test_nothing_is_concluded_from_no_changes_and_of_latencies_that_do_not_scatter() -> None:
    assert by_clock(TYPICAL, {}) == {}
    assert by_clock(TYPICAL, {1410: (ENOUGH_OF_CLOCK - 1, 60_000)}) == {}
    assert by_clock(SwitchLatency.of_seconds(0.020, 0.020, 0.0, False, "drawn"), {1410: (100, 60_000)}) == {}
    assert by_clock(TYPICAL, {1410: (100, 0)}) == {}, "no change takes no time"


@given(st.integers(ENOUGH_OF_CLOCK, 1000), st.integers(1, 1000), st.floats(0.1, 10.0))
def test_the_more_changes_the_nearer_to_their_own_median(few: int, more: int, factor: float) -> None:
    measured_us = factor * TYPICAL.p50_us
    sooner, later = (by_clock(TYPICAL, {900: (changes, measured_us)})[900] for changes in (few, few + more))
    off = [abs(math.log(one.p50_us / measured_us)) for one in (sooner, later)]
    assert off[1] <= off[0] + 1 / later.p50_us, "to the microsecond"


@given(st.integers(0, MAX_LATENCY_US), st.integers(0, MAX_LATENCY_US))
def test_seconds_of_a_description_are_the_same_microseconds_again(p50_us: int, p99_us: int) -> None:
    latency = SwitchLatency(p50_us, p99_us, 0, False, "drawn")
    assert SwitchLatency.of_seconds(latency.p50_s, latency.p99_s, 0.0, False, "drawn") == latency


@given(LATENCIES, st.floats(0.0, 1e12), st.floats(0.0, 1e12))
def test_no_latency_that_is_worked_out_is_impossible(latency: SwitchLatency, p50_us: float, p99_us: float) -> None:
    assert latency.with_quantiles(p50_us, p99_us).is_possible
