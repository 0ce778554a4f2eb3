"""Input of the models of serving: too few windows are a verdict that says of what, bad ones name field and rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.made_up_windows import HIGHEST_MHZ, MODEL, WATTS, made_up

from perseus_solver.serving import (
    Bound,
    FitResult,
    Seen,
    StepModels,
    TableRequest,
    Verdict,
    Window,
    check,
    clock_table,
    fit,
)

WINDOW = Window(1_500, 1.0, 10.0, 10_000.0, 40, 0.02)
REQUEST = TableRequest(StepModels(MODEL), WATTS, (900, 1_095, 1_305, 1_605), 0.05, 500_000, 0.25, 1_000.0)


@pytest.mark.parametrize(
    ("windows", "missing"),
    [
        ([], "windows: 0 of 30"),
        (made_up(each=5), "windows with steps that compute no prompt: 25 of 30"),
        (made_up(clocks_mhz=(1_200, 1_980)), "clocks: 2 of 3"),
        ([replace(window, running=50.0, kv_tokens=50_000.0) for window in made_up()], "loads: the most is 1.00 times"),
        ([replace(WINDOW, steps=0, step_s=0.0, prompt_steps=9, prompt_step_s=0.1, prompt_tokens=900)] * 40, "windows"),
    ],
)
def test_too_few_windows_say_of_what(windows: list[Window], missing: str) -> None:
    result = fit(windows, HIGHEST_MHZ)
    assert result.verdict is Verdict.TOO_FEW
    assert result.missing[0].startswith(missing)
    assert result.intervals == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clock_mhz": 0}, "clock_mhz must be from 1 to 10000, not 0"),
        ({"seconds": math.inf}, "seconds must be more than 0 and at most 3,600, not inf"),
        ({"running": -1.0}, "running must be from 0 to 65,536"),
        ({"kv_tokens": math.nan}, "kv_tokens must be from 0 to 1,000,000,000, not nan"),
        ({"step_s": 0.0}, "step_s must be from 0.000001 to 60 with steps, 0 without, not 0.0"),
        ({"steps": 0, "step_s": 0.0}, "steps must be at least 1 together with prompt_steps, not 0"),
        ({"prompt_steps": 1}, "prompt_step_s must be from 0.000001 to 60 with prompt_steps"),
        ({"prompt_steps": 1, "prompt_step_s": 0.1}, "prompt_tokens must be from 1 to 1,000,000,000 with prompt_steps"),
        ({"watts": math.nan}, "watts must be more than 0 and at most 1,000,000"),
        ({"reached_mhz": -5}, "reached_mhz must be from 1 to 10000"),
    ],
)
def test_a_bad_window_names_field_and_rule(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WINDOW, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limit_s": 0.0}, "limit_s must be more than 0"),
        ({"margin": 1.5}, "margin must be more than 0 and at most 1"),
        ({"kv_capacity": 0}, "kv_capacity must be from 1"),
        ({"ladder_mhz": (1_200, 900)}, "ladder_mhz must be positive and ascending"),
        ({"ladder_mhz": (900, 2_100)}, "ladder_mhz must end at 1980 at most, not 2100"),
        ({"running": ()}, "running must have 1 to 64 values, not 0"),
        ({"kv_share": (0.5, 1.5)}, "kv_share must end at 1 at most, not 1.5"),
        ({"watts": replace(WATTS, highest_mhz=1_410)}, "watts must have the highest_mhz of steps, 1980"),
    ],
)
def test_a_bad_request_names_field_and_rule(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(REQUEST, **changes)


def test_heat_that_holds_the_clock_down_is_part_of_what_was_seen() -> None:
    windows = [
        replace(window, clock_mhz=HIGHEST_MHZ, reached_mhz=window.clock_mhz) if window.clock_mhz == 1_605 else window
        for window in made_up()
    ]
    result: FitResult = fit(windows, HIGHEST_MHZ)
    assert result.verdict is Verdict.EXPLAINED


def test_an_engine_that_says_nothing_of_its_memory_is_fitted_without() -> None:
    silent = replace(MODEL, kv_token_s=0.0)
    result = fit([replace(window, kv_tokens=0.0) for window in made_up(silent)], HIGHEST_MHZ)
    assert result.verdict is Verdict.EXPLAINED
    assert result.intervals["kv_token_s"] == (0.0, 0.0)


def test_where_nothing_was_measured_no_clock_is_given() -> None:
    result = clock_table(replace(REQUEST, seen=Seen(1_000, 40.0, 100_000.0)))
    assert check(replace(REQUEST, seen=Seen(1_000, 40.0, 100_000.0)), result) is None
    table = result.table
    assert min(mhz for row in table.clocks_mhz for mhz in row if mhz) == 1_095
    assert table.clock_mhz(41, 0.1) > 0  # the cell that holds the most that was seen
    assert table.clock_mhz(65, 0.1) == table.clock_mhz(8, 0.3) == 0
    assert result.certificates[-1][0].bound is Bound.NOT_SEEN


def test_prompts_get_the_least_clock_that_is_in_time() -> None:
    boosts = clock_table(REQUEST).table.boost_mhz
    assert list(boosts) == sorted(boosts)
    assert boosts[-1] == 1_605  # faster than that no prompt gets
    assert clock_table(replace(REQUEST, first_token_s=60.0)).table.boost_mhz[0] == 900
    free = replace(MODEL, plateau_mhz=None)
    assert clock_table(replace(REQUEST, steps=StepModels(MODEL, (free,)))).table.boost_mhz[-1] == 0
    unseen = replace(MODEL, token_s=0.0)
    assert set(clock_table(replace(REQUEST, steps=StepModels(unseen))).table.boost_mhz) == {0}


def test_a_planted_error_is_named_by_its_first_cell() -> None:
    result = clock_table(REQUEST)
    rows = [list(row) for row in result.certificates]
    rows[3][2] = replace(rows[3][2], upper_s=rows[3][2].upper_s * 1.001)
    rows[5][1] = replace(rows[5][1], watts=0.0)
    found = check(REQUEST, replace(result, certificates=tuple(map(tuple, rows))))
    assert found is not None
    assert found.startswith(f"running {REQUEST.running[3]}, kv_share {REQUEST.kv_share[2]:g}")
