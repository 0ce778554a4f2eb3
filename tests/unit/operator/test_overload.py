"""Requests that are about to miss a limit at the highest clock are said at once, with what shows it and what helps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.doubles.engine_pool import EnginePool

from perseus_core.serving import ServingLimits, place_of
from perseus_operator.api.conditions import Reason
from perseus_operator.families.serving.features.overload.overload import ENDS_AFTER, IN_A_ROW, Overload
from perseus_operator.nodes.engines import EngineWindow

LIMITS = ServingLimits(1.0, 0.05, 0.99)
AT_DEFAULT = EngineWindow(
    pod_uid="pod", pid=1, time_us=1_000_000, default_us=1_000_000, running=8.0, steps=50, steps_us=1_000_000,
    first_tokens={place_of(0.5): 4},
)  # fmt: skip
WAITING = replace(AT_DEFAULT, waiting=20)
"""Four first tokens a second, and twenty that wait: the last for five seconds."""
SLOW = replace(AT_DEFAULT, steps=10, steps_us=900_000)
LIMITLESS = ServingLimits(None, 0.05, 0.99)


def after(*windows: EngineWindow, limits: ServingLimits | None = LIMITS, highest_mhz: int = 0) -> Overload:
    overload = Overload()
    for window in windows:
        overload.window_seen(window, limits, highest_mhz)
    return overload


@pytest.mark.parametrize(("window", "first_token"), [(WAITING, True), (SLOW, False)])
def test_some_seconds_of_it_are_an_overload_and_a_moment_is_none(window: EngineWindow, first_token: bool) -> None:
    assert not after(*[window] * (IN_A_ROW - 1)).replicas
    assert not after(*[window, AT_DEFAULT] * IN_A_ROW).replicas
    [evidence] = after(*[window] * IN_A_ROW).replicas.values()
    assert evidence.first_token is first_token
    assert evidence.wait_s == pytest.approx(5.0 if first_token else 0.0)


def test_it_ends_once_limits_were_kept_for_a_while() -> None:
    overloaded = [WAITING] * IN_A_ROW
    assert after(*overloaded, *[AT_DEFAULT] * (ENDS_AFTER - 1)).replicas
    assert not after(*overloaded, *[AT_DEFAULT] * ENDS_AFTER).replicas
    again = after(*overloaded, *[AT_DEFAULT] * (ENDS_AFTER - 1), WAITING, *[AT_DEFAULT] * (ENDS_AFTER - 1))
    assert again.replicas, "one more moment of it begins the while anew"


def test_a_clock_that_may_still_rise_is_no_overload() -> None:
    low = replace(WAITING, default_us=0, clock_mhz=1_200, mhz_us=1_200 * 1_000_000)
    assert not after(*[low] * 10).replicas
    assert not after(*[low] * 10, highest_mhz=1_500).replicas
    assert after(*[low] * 10, highest_mhz=1_200).replicas, "above, prompts get no faster, or a budget allows no more"
    assert not after(*[replace(low, changed=True)] * 10, highest_mhz=1_200).replicas
    slow = replace(low, waiting=0, steps=10, steps_us=900_000)
    assert not after(*[slow] * 10, highest_mhz=1_200).replicas, "but tokens do"


def test_a_burst_after_a_rest_is_judged_by_what_came_since() -> None:
    rest = replace(AT_DEFAULT, time_us=600_000_000, default_us=600_000_000, first_tokens={})
    burst = replace(AT_DEFAULT, waiting=1)
    assert not after(rest, *[burst] * 10).replicas


def test_what_waits_for_no_first_token_misses_none() -> None:
    assert not after(*[WAITING] * 10, limits=LIMITLESS).replicas
    assert not after(*[WAITING] * 10, limits=None).replicas


def test_a_pod_that_is_gone_is_not_overloaded() -> None:
    overload = after(*[WAITING] * 10)
    overload.pods_observed(())
    assert not overload.replicas


@pytest.mark.parametrize(
    ("pods", "help_"), [(("pod-1",), "The others have room"), (("pod-0", "pod-1", "pod-2"), "Add ")]
)
def test_the_condition_says_it_at_once_with_evidence_and_help(pods: tuple[str, ...], help_: str) -> None:
    pool = EnginePool(mode="Observe")
    pool.run(2)
    assert pool.conditions()["ObjectiveKept"].status is None, "too few requests were seen to say more"
    pool.lie = lambda window: replace(window, waiting=40) if window.pod_uid in pods else window
    pool.run(IN_A_ROW)
    said = pool.conditions()
    assert said["ObjectiveKept"].status is False
    assert said["ObjectiveKept"].reason is said["Ready"].reason is Reason.OVERLOADED
    message = said["ObjectiveKept"].message
    assert f"{len(pods)} of 3 replicas cannot keep a limit at the highest clock" in message
    assert "40 requests wait" in message
    assert help_ in message
    assert "Nothing is dropped" in message
    figures = pool.family.report(pool.decide()).pool
    assert figures is not None
    assert figures.overloaded == len(pods)  # type: ignore[attr-defined]


def test_the_advice_counts_what_waits_and_is_in_the_condition() -> None:
    pool = EnginePool(mode="Observe")
    pool.run(240)
    seconds = iter(range(1, 10_000))
    pool.lie = lambda window: replace(window, waiting=40 * next(seconds))
    pool.run(80)
    advised = pool.status()["advice"]["replicas"]
    assert advised > 3
    assert f"The load needs {advised} replicas." in pool.conditions()["ObjectiveKept"].message
