"""The laws of the GPU model, and profiles made from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core.instruction import InstructionKind
from perseus_core.latency import published_latency
from perseus_sim.gpus.model import MODELS, GpuModel
from perseus_sim.profiles import profile_csv, stage_weights
from perseus_solver.cli.main import main
from perseus_solver.frontier import solve_frontier
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

pytestmark = pytest.mark.usefixtures("short_search")

models = st.sampled_from(list(MODELS.values()))


@given(models, st.data())
def test_a_faster_clock_is_not_slower_and_draws_no_less(model: GpuModel, data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.tuples(*[st.sampled_from(model.clocks_mhz)] * 2)))
    rounding = 1 + 1e-9  # clocks beyond the power limit are found by halving
    assert model.slowdown(low) * rounding >= model.slowdown(high) >= 1.0 / rounding
    assert model.power_w(low) <= model.power_w(high) * rounding <= model.power_limit_w * rounding**2


@given(models, st.data())
def test_time_grows_no_faster_than_the_clock_falls(model: GpuModel, data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.tuples(*[st.sampled_from(model.clocks_mhz)] * 2)))
    assert model.slowdown(low) / model.slowdown(high) <= high / low + 1e-9


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_power_limit_flattens_the_highest_clocks(model: GpuModel) -> None:
    top, below = model.clocks_mhz[-1], model.clocks_mhz[-2]
    assert model.effective_mhz(top) < top
    assert model.slowdown(below) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_cheapest_clock_lies_inside_the_range(model: GpuModel) -> None:
    # Very low clocks cost more time than they save power: racing to the bottom never pays.
    energy_j = {clock: model.slowdown(clock) * model.power_w(clock) for clock in model.clocks_mhz}
    cheapest = min(energy_j, key=lambda clock: energy_j[clock])
    assert model.clocks_mhz[0] < cheapest < model.clocks_mhz[-1]
    assert energy_j[cheapest] < 0.85 * energy_j[model.clocks_mhz[-1]]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_all_times_of_a_faster_gpu_are_in_proportion(model: GpuModel) -> None:
    fast, before = model.faster(4), model.driver
    for name in ("call_p99_s", "reader_period_s", "reader_call_s", "energy_period_s", "power_period_s"):
        assert getattr(fast.driver, name) == pytest.approx(getattr(before, name) / 4)
    for latency in (fast.driver.latency, published_latency(fast.name)):
        assert latency == before.latency.faster(4)
        assert latency.p99_s == pytest.approx(before.latency.p99_s / 4)
        assert latency.sigma == pytest.approx(before.latency.sigma)
    # Who reads the name knows what is assumed of its latency; watts and clocks are those of the model.
    assert "4 times as fast" in fast.name
    assert fast.power_limit_w == model.power_limit_w
    assert fast.clocks_mhz == model.clocks_mhz
    assert model.faster(1) == model


@pytest.mark.parametrize("name", ["gpt3-175b_a100-sxm", "bloom-176b_a40"])
def test_the_model_stays_near_the_published_profiles(name: str, sosp24: object) -> None:
    model = MODELS["a100" if "a100" in name else "a40"]
    profile = read_profile(sosp24 / "stage_profile" / f"{name}.csv")  # type: ignore[operator]
    table = profile.tables[0, InstructionKind.BACKWARD, 0]
    for clock, time_s, energy_j in zip(
        table.frequency_mhz.tolist(), table.time_s.tolist(), table.energy_j.tolist(), strict=True
    ):
        assert model.slowdown(clock) == pytest.approx(time_s / float(table.time_s[0]), rel=0.03)
        assert model.power_w(clock) == pytest.approx(energy_j / time_s, rel=0.04)


def test_a_made_up_profile_is_a_valid_one_and_worth_planning() -> None:
    profile = read_profile(profile_csv(stages=4, imbalance=1.2))
    longest = profile.tables[3, InstructionKind.FORWARD, 0].time_s[0]
    assert longest / profile.tables[0, InstructionKind.FORWARD, 0].time_s[0] == pytest.approx(1.2, rel=1e-4)
    problem = build_problem(
        profile, build_schedule("1f1b", stages=4, microbatches=8), blocking_power_w=MODELS["a100"].blocking_power_w
    )
    frontier = solve_frontier(problem, points=20)
    assert frontier.energy_j.min() < 0.95 * frontier.energy_j[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "stages: must be at least 1, is 0"),
        ({"imbalance": 0.9}, "imbalance: .* must be at least 1, is 0.9"),
        ({"gpu": "tpu"}, "gpu: must be one of a100, a40, b200, h100, h200, is 'tpu'"),
        ({"forward_s": 0.0}, "forward_s: must be more than 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_csv(**arguments)  # type: ignore[arg-type]


def test_the_head_makes_the_last_stage_heavier() -> None:
    assert stage_weights(3, 1.1) == (1.0, 1.0, 1.1)
    assert stage_weights(1, 1.5) == (1.0,)


@pytest.mark.parametrize("gpu", MODELS)
@pytest.mark.parametrize("shape", [("--stages", "3", "--imbalance", "1.2"), ("--step-ms", "400")])
def test_a_sample_is_a_profile_that_the_solver_plans(
    gpu: str, shape: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", "--gpu-model", gpu, *shape]) == 0
    written = capsys.readouterr()
    steps = "--step-ms" in shape
    schedule = build_schedule("Steps" if steps else "1F1B", stages=1 if steps else 3, microbatches=1 if steps else 4)
    model = MODELS[gpu]
    assert f"--blocking-power {model.blocking_power_w:g}" in written.err
    problem = build_problem(read_profile(written.out), schedule, blocking_power_w=model.blocking_power_w)
    frontier = solve_frontier(problem, 5)
    assert frontier.energy_j.min() < frontier.energy_j[0]


@pytest.mark.parametrize(
    "wrong", [("--stages", "0"), ("--imbalance", "0.5"), ("--forward-ms", "-1"), ("--step-ms", "0")]
)
def test_a_sample_that_cannot_be_is_refused_by_name(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", *wrong]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert wrong[0].strip("-").split("-")[0] in said.err
