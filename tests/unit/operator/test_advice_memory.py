"""What the advice rests on outlives an operator: loads of two weeks, and how long a start takes."""

from __future__ import annotations

import base64
import math
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.engine_pool import EnginePool

from perseus_operator.families.serving.features.advice.forecast import (
    EPOCH_S,
    MOST_EPOCHS,
    MOST_TEXT,
    LoadForecast,
    pack,
    unpack,
)
from perseus_operator.families.serving.features.advice.starts import (
    LONGEST_S,
    SHORTEST_S,
    UNMEASURED_S,
    Starts,
)
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import Pod

FIRST = 20_834 * 96
"""An epoch at which a day begins."""
DAY = 96


def load(epoch: int) -> float:
    """Requests a second: many from ten o'clock on."""
    return 5.0 if epoch % DAY < 40 else 20.0


def counted(forecast: LoadForecast, begin: int, end: int) -> float:
    """Count three times in each epoch; the last answer."""
    most = 0.0
    for epoch in range(begin, end):
        for part in range(3):
            most = forecast.most(load(epoch), EPOCH_S * epoch + 400.0 * part, UNMEASURED_S, 1.25)
    return most


loads = st.floats(0.0, 4_000.0, allow_nan=False)


@given(st.lists(st.tuples(loads, loads).map(lambda pair: (min(pair), max(pair))), min_size=1, max_size=50))
def test_a_text_says_each_load_within_its_step(epochs: list[tuple[float, float]]) -> None:
    found = unpack(pack(epochs))
    assert len(found) == len(epochs)
    for before, after in zip(epochs, found, strict=True):
        assert after[0] <= after[1]
        for one, other in zip(before, after, strict=True):
            assert other == pytest.approx(one, rel=0.031, abs=1 / 600)


@given(st.text(max_size=50) | st.binary(max_size=50).map(lambda data: base64.b64encode(data).decode()))
def test_any_text_is_epochs_or_none(text: str) -> None:
    for mean, heaviest in unpack(text):
        assert 0.0 <= mean <= heaviest < math.inf


@pytest.mark.parametrize(
    "levels",
    [b"\x01", b"\x09\x03", b"\x01\x01" * (MOST_EPOCHS + 1), b"\0" * 50_000_000],
    ids=["half an epoch", "a mean above the heaviest", "too many", "a bomb"],
)
def test_what_cannot_be_is_none(levels: bytes) -> None:
    assert unpack(base64.b64encode(zlib.compress(levels)).decode()) == ()


def test_two_weeks_fit_into_a_status() -> None:
    one = LoadForecast()
    counted(one, FIRST, FIRST + MOST_EPOCHS + 5)
    assert len(one.text) <= MOST_TEXT
    assert len(unpack(one.text)) == MOST_EPOCHS


def test_a_later_operator_expects_what_the_earlier_one_did() -> None:
    one = LoadForecast()
    counted(one, FIRST, FIRST + 3 * DAY)
    later = LoadForecast()
    later.restored(one.text, one.until_s)
    epoch = FIRST + 3 * DAY + 40
    expected = counted(one, FIRST + 3 * DAY, epoch)
    assert counted(later, FIRST + 3 * DAY, epoch) == pytest.approx(expected, rel=0.05)
    assert expected > 2.0 * load(epoch - 1), "some minutes before ten"
    assert counted(LoadForecast(), FIRST + 3 * DAY, epoch) == pytest.approx(1.25 * load(epoch - 1)), "without it"


def test_epochs_that_nobody_counted_are_as_they_were_expected_for_a_day() -> None:
    one = LoadForecast()
    counted(one, FIRST, FIRST + 3 * DAY)
    known, begun_anew = LoadForecast(), LoadForecast()
    for later, missing in ((known, 8), (begun_anew, DAY + 1)):
        later.restored(one.text, one.until_s)
        begin = FIRST + 3 * DAY + missing
        counted(later, begin, begin + 2)
    assert len(unpack(known.text)) == 3 * DAY + 8 + 1
    assert len(unpack(begun_anew.text)) == 1


def test_a_pool_goes_on_with_its_load_and_its_starts_after_a_restart() -> None:
    pool = EnginePool(mode="Observe")
    pool.run(30)
    new = replace(pool._pods[0], uid="pod-9", name="r-9", node="node-9", created=stamp(pool.wall_s))
    pool.silent = {"pod-9"}
    pool.pods(*pool._pods, new)
    pool.run(90)
    pool.silent = set()
    pool.pods(*pool._pods)
    pool.run(920)
    status = pool.status()
    assert status["advice"]["startSeconds"] == 90
    assert len(unpack(status["load"]["epochs"])) == 1
    pool.start(status)
    pool.run(5)
    again = pool.status()
    assert again["advice"]["startSeconds"] == 90
    pool.run(100)
    assert pool.status()["load"]["epochs"] == status["load"]["epochs"]
    assert pool.status()["advice"]["expectedPerMinute"] < 1.25 * pool.status()["advice"]["requestsPerMinute"], (
        "a start of a minute and a half needs less headroom than one of five"
    )


def pod(name: str, created_s: float) -> Pod:
    return Pod(name, "ns", name, "node", "pool", {}, created=stamp(created_s))


def test_a_start_is_counted_once_within_bounds_and_not_of_pods_that_were_there() -> None:
    starts, begin = Starts(), 1.9e9
    there = pod("there", begin - 500.0)
    starts.looked([there], [], begin)
    starts.looked([there], ["there"], begin + 10.0)
    assert (starts.measured_s, starts.start_s) == (None, UNMEASURED_S)
    quick, slow, long = pod("quick", begin + 1.0), pod("slow", begin + 1.0), pod("long", begin + 1.0)
    starts.looked([there, quick, slow, long], ["there", "quick"], begin + 3.0)
    assert starts.start_s == SHORTEST_S
    starts.looked([there, quick, slow, long], ["there", "quick", "slow"], begin + 121.0)
    assert starts.start_s == (SHORTEST_S + 120.0) / 2
    starts.looked([there, quick, slow, long], ["quick", "slow", "long"], begin + 90_000.0)
    assert starts.start_s == 120.0, "the median"
    assert max(starts._latest) == LONGEST_S
