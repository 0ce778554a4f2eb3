"""Laws of the models of serving: what is fitted comes true, and says so only then; tables are exact, and checked."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_up_windows import (
    CLOCKS_MHZ,
    HIGHEST_MHZ,
    MODEL,
    WATTS,
    RecordedMachine,
    made_up,
    of_engine,
    of_experts,
    paused,
    speculative,
)

from perseus_core.serving import DEFAULT_CLOCKS
from perseus_sim.serving.machine import Step
from perseus_solver.serving import (
    FitResult,
    StepModel,
    StepModels,
    TableRequest,
    TableResult,
    Verdict,
    WattModel,
    Window,
    check,
    clock_table,
    fit,
)
from perseus_solver.serving.windows import MOST_WINDOWS

LADDER_MHZ = (900, 1005, 1095, 1200, 1305, 1410, 1515, 1605, 1755, 1905)
LOADS = [(running, running * tokens) for running in (2, 20, 60, 120, 180) for tokens in (300, 1_000, 1_800)]

CLOCKS_AND_LOADS = [(clock_mhz, *load) for clock_mhz in (1_000, 1_250, 1_750) for load in LOADS]


def share(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


models = st.builds(
    StepModel,
    highest_mhz=st.just(HIGHEST_MHZ),
    host_s=share(0.0, 8e-3),
    launch_s=share(0.0, 4e-3),
    weights_s=share(1e-3, 25e-3),
    token_s=share(5e-6, 100e-6),
    kv_token_s=share(0.0, 80e-9),
    sequence_s=share(0.0, 100e-6),
    sampling_s=share(0.0, 60e-6),
    knee_mhz=share(700.0, 1_800.0),
    plateau_mhz=st.none() | share(1_000.0, 1_979.0),
)
energies = st.builds(
    WattModel,
    highest_mhz=st.just(HIGHEST_MHZ),
    idle_w=share(0.0, 800.0),
    clock_w=share(0.0, 800.0),
    byte_w=share(0.0, 1_000.0),
    die_w=share(0.0, 2_000.0),
    sequence_j=share(0.0, 0.5),
    token_j=share(0.0, 0.5),
    floor_mhz=share(600.0, 1_500.0),
)
requests = st.builds(
    TableRequest,
    steps=st.builds(StepModels, models, st.lists(models, max_size=8).map(tuple)),
    watts=energies,
    ladder_mhz=st.just(LADDER_MHZ),
    limit_s=share(0.01, 0.1),
    kv_capacity=st.integers(10_000, 2_000_000),
    first_token_s=share(0.1, 2.0),
    prompt_tokens=share(10.0, 8_000.0),
    switch_s=share(0.0, 0.3),
    running=st.just((1, 8, 32, 128, 256)),
    kv_share=st.just((0.25, 0.5, 0.9)),
)


@settings(max_examples=6)
@given(models)
def test_a_fit_finds_the_times_of_the_model_that_made_its_windows(model: StepModel) -> None:
    result = fit(made_up(model, noise=0.01, outliers=0.02), HIGHEST_MHZ)
    assert result.verdict is Verdict.EXPLAINED
    assert result.models is not None
    for clock_mhz in (960, 1_200, 1_500, 1_900):
        for running, kv_tokens in LOADS:
            real_s = model.step_s(clock_mhz, running, kv_tokens)
            assert result.models.best.step_s(clock_mhz, running, kv_tokens) == pytest.approx(real_s, rel=0.03)


def test_intervals_hold_what_they_promise() -> None:
    kept = wanted = 0
    clocks_mhz, running, kv_tokens = (np.array(values, float) for values in zip(*CLOCKS_AND_LOADS, strict=True))
    nothing = np.zeros_like(running)
    real_s = MODEL.steps_s(clocks_mhz, running, kv_tokens, nothing)
    for seed in range(16):
        result = fit(made_up(each=16, noise=0.03, seed=seed), HIGHEST_MHZ)
        assert result.models is not None
        low_s, high_s = result.models.interval_s(clocks_mhz, running, kv_tokens, nothing)
        kept += int(((low_s <= real_s) & (real_s <= high_s)).sum())
        wanted += real_s.size
        assert float(np.mean(high_s / low_s)) < 1.2
    assert kept >= 0.93 * wanted


def test_parameters_that_windows_say_something_about_are_found() -> None:
    result = fit(made_up(noise=0.005, each=80), HIGHEST_MHZ)
    for name, (low, high) in result.intervals.items():
        # Nine intervals of 95 %: one may just miss.
        assert low - (high - low) / 2 <= getattr(MODEL, name) <= high + (high - low) / 2, name
    assert result.intervals["knee_mhz"][1] - result.intervals["knee_mhz"][0] < 60.0
    assert result.watts is not None
    for clock_mhz in (960, 1_400, 1_900):
        for running, kv_tokens in LOADS:
            real_j = WATTS.joules(MODEL, clock_mhz, running, kv_tokens)
            assert result.watts.joules(MODEL, clock_mhz, running, kv_tokens) == pytest.approx(real_j, rel=0.03)


@st.composite
def finite_windows(draw: st.DrawFn) -> Window:
    steps, prompt_steps = draw(st.sampled_from(((1, 0), (10**7, 0), (20, 3), (0, 5))))
    step_s = share(1e-6, 60.0)
    return Window(
        clock_mhz=draw(st.sampled_from((1, 600, 900, 1_980, 10_000)) | st.integers(1, 10_000)),
        seconds=draw(share(1e-6, 3_600.0)),
        running=draw(share(0.0, 65_536.0)),
        kv_tokens=draw(share(0.0, 1e9)),
        steps=steps,
        step_s=draw(step_s) if steps else 0.0,
        prompt_steps=prompt_steps,
        prompt_step_s=draw(step_s) if prompt_steps else 0.0,
        prompt_tokens=draw(st.integers(1, 10**9)) if prompt_steps else 0,
        watts=draw(st.none() | share(1e-3, 1e6)),
        reached_mhz=draw(st.none() | st.integers(1, 10_000)),
    )


@settings(max_examples=25)
@given(st.lists(finite_windows(), max_size=12), st.integers(1, 12), st.integers(1, 10_000))
def test_a_fit_says_something_about_any_windows(windows: list[Window], times: int, highest_mhz: int) -> None:
    result = fit(windows * times, highest_mhz)
    assert (result.verdict is Verdict.TOO_FEW) == (result.models is None) == bool(result.missing)


def test_the_work_of_a_fit_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = made_up(each=20)
    evaluated = 0

    def counted(gram: np.ndarray, moment: np.ndarray) -> np.ndarray:
        nonlocal evaluated
        evaluated += len(gram)
        return non_negative(gram, moment)

    from perseus_solver.serving import search

    non_negative = search.non_negative
    monkeypatch.setattr(search, "non_negative", counted)
    for noise in (0.0, 0.3, 1.5):
        evaluated = 0
        fit(made_up(each=20, noise=noise), HIGHEST_MHZ)
        assert evaluated <= 10_000  # models
    with pytest.raises(ValueError, match="windows must be at most 4,000"):
        fit(windows[:1] * (MOST_WINDOWS + 1), HIGHEST_MHZ)


@cache
def seen_on_engine() -> tuple[RecordedMachine, FitResult]:
    machine = RecordedMachine()
    return machine, fit(of_engine(machine, CLOCKS_MHZ), HIGHEST_MHZ)


def test_an_engine_is_predicted_at_clocks_and_loads_that_were_held_out() -> None:
    machine, result = seen_on_engine()
    assert result.verdict is Verdict.EXPLAINED
    assert result.models is not None
    held_out = of_engine(machine, (1_005, 1_200, 1_410, 1_800), rates=(1.0, 4.0, 9.0), seed=7)
    errors = [
        result.models.best.step_s(window.clock_mhz, window.running, window.kv_tokens) / window.step_s - 1.0
        for window in held_out
        if window.steps
    ]
    assert len(errors) > 150
    assert max(map(abs, errors)) < 0.05
    assert np.mean(np.abs(errors)) < 0.015


def test_the_joules_of_an_engine_are_predicted() -> None:
    machine, result = seen_on_engine()
    assert result.watts is not None
    assert result.models is not None
    for clock_mhz in (900, 1_095, 1_410, 1_800):
        costs = machine.costs(clock_mhz)
        for running, kv_tokens in ((1, 1_000), (16, 16_000), (64, 70_000), (128, 140_000)):
            step = Step(running, kv_tokens, 0, 0.0, 0)
            real_j = RecordedMachine().joules(costs, step, machine.seconds(costs, step))
            predicted_j = result.watts.joules(result.models.best, clock_mhz, running, kv_tokens)
            assert predicted_j == pytest.approx(real_j, rel=0.07)


def test_pauses_change_nothing() -> None:
    machine, undisturbed = seen_on_engine()
    result = fit(paused(of_engine(machine, CLOCKS_MHZ), 0.02), HIGHEST_MHZ)
    assert result.verdict is Verdict.EXPLAINED
    assert result.outliers > undisturbed.outliers
    assert result.models is not None
    assert undisturbed.models is not None
    for running, kv_tokens in ((4, 4_000), (64, 70_000), (128, 140_000)):
        before_s = undisturbed.models.best.step_s(1_200, running, kv_tokens)
        assert result.models.best.step_s(1_200, running, kv_tokens) == pytest.approx(before_s, rel=0.01)


def test_an_engine_that_the_model_does_not_explain_is_called_so() -> None:
    result = fit(of_engine(RecordedMachine(of_experts), CLOCKS_MHZ), HIGHEST_MHZ)
    assert result.verdict is Verdict.NOT_EXPLAINED
    assert result.worst is not None
    assert abs(result.worst.off) > 0.05


@pytest.mark.parametrize("perturbed", [of_experts, speculative])
def test_what_is_explained_is_so_within_five_percent(perturbed: object) -> None:
    machine = RecordedMachine(perturbed)
    result = fit(of_engine(machine, CLOCKS_MHZ), HIGHEST_MHZ)
    if result.verdict is Verdict.NOT_EXPLAINED:
        return
    assert result.models is not None
    assert result.seen is not None
    for window in of_engine(machine, (1_005, 1_410, 1_800), rates=(1.0, 4.0, 9.0), seed=7):
        if window.steps and window.running <= result.seen.most_running:
            predicted_s = result.models.best.step_s(window.clock_mhz, window.running, window.kv_tokens)
            assert predicted_s == pytest.approx(window.step_s, rel=0.05)


@settings(max_examples=60)
@given(requests)
def test_a_table_is_exact_and_rises_with_the_load(request: TableRequest) -> None:
    result = clock_table(request)
    assert check(request, result) is None
    clocks = np.array(result.table.clocks_mhz)
    clocks[clocks == DEFAULT_CLOCKS] = HIGHEST_MHZ
    assert (np.diff(clocks, axis=0) >= 0).all()
    assert (np.diff(clocks, axis=1) >= 0).all()


@settings(max_examples=60)
@given(requests, st.integers(0, 4), st.integers(0, 2), st.data())
def test_the_check_finds_any_other_clock(request: TableRequest, row: int, column: int, data: st.DataObject) -> None:
    result = clock_table(request)
    table = result.table
    others = sorted({DEFAULT_CLOCKS, *LADDER_MHZ} - {table.clocks_mhz[row][column]})
    rows = [list(clocks) for clocks in table.clocks_mhz]
    rows[row][column] = data.draw(st.sampled_from(others))
    certificates = [list(cells) for cells in result.certificates]
    certificates[row][column] = replace(certificates[row][column], clock_mhz=rows[row][column])
    wrong = replace(table, clocks_mhz=tuple(map(tuple, rows)))
    found = check(request, TableResult(wrong, tuple(map(tuple, certificates))))
    assert found is not None
    assert found.startswith(
        f"running {table.running[row]}, kv_share {table.kv_share[column]:g}, {rows[row][column]} MHz"
    )
    place = data.draw(st.integers(0, len(table.boost_mhz) - 1))
    boosts = list(table.boost_mhz)
    boosts[place] = data.draw(st.sampled_from(sorted({DEFAULT_CLOCKS, *LADDER_MHZ} - {boosts[place]})))
    boosted = check(request, replace(result, table=replace(table, boost_mhz=tuple(boosts))))
    assert boosted is not None
    assert "boost_mhz" in boosted


@given(st.lists(models, min_size=1, max_size=4), share(200.0, HIGHEST_MHZ), st.integers(0, 300), share(0.0, 1e4))
def test_models_together_say_what_each_says(drawn: list[StepModel], mhz: float, running: int, tokens: float) -> None:
    """To the last bit: tables do not depend on how they are computed."""
    load = mhz, running, 1_000.0 * running, tokens
    each_s = StepModels(drawn[0], tuple(drawn[1:])).each_s(*(np.full(2, float(value)) for value in load))
    assert each_s.tolist() == [[model.step_s(*load)] * 2 for model in drawn]
