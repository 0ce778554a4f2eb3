"""Times and watts of simulated steps, against what others measured; and the laws of the power limit and of the knee."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_sim.serving.machine import GPUS, MODELS, WATTS, Assumptions, Machine, Step

REPOSITORY = Path(__file__).resolve().parents[4]
# ML.ENERGY v3, vLLM on H100s, steady batches: model, GPUs, sequences, ms between tokens (median), watts of a GPU.
# Contexts are not stated; assumed: 600 tokens for Llama, 1,500 for Qwen3, which reasons.
MEASURED = [
    ("llama-3.1-70b", 4, 8, 16.6, 441),
    ("llama-3.1-70b", 4, 32, 20.0, 449),
    ("llama-3.1-70b", 4, 128, 27.9, 546),
    ("llama-3.1-70b", 4, 512, 73.9, 623),
    ("llama-3.1-8b", 1, 8, 7.3, 486),
    ("llama-3.1-8b", 1, 32, 8.9, 560),
    ("llama-3.1-8b", 1, 128, 16.5, 669),
    ("llama-3.1-8b", 1, 512, 47.4, 688),
    ("qwen3-32b", 2, 8, 15.1, 425),
    ("qwen3-32b", 2, 32, 17.9, 472),
    ("qwen3-32b", 2, 128, 29.7, 537),
]
MACHINES = st.builds(
    Machine,
    st.sampled_from(GPUS),
    st.sampled_from(MODELS),
    st.sampled_from((2, 4, 8)),
    st.builds(
        Assumptions,
        knee_mhz=st.floats(700, 1500),
        watts=st.sampled_from(WATTS),
        power_limit_w=st.none() | st.floats(250, 700),
    ),
)
STEPS = st.builds(
    lambda decoding, context, prompt, prompts: Step(
        decoding, decoding * context, prompt, prompt**2 / 2, min(prompts, prompt)
    ),
    st.integers(0, 256),
    st.integers(1, 4000),
    st.integers(0, 512),
    st.integers(0, 8),
).filter(lambda step: step.decoding or step.prompt_tokens)


@pytest.mark.parametrize(("model", "gpus", "sequences", "milliseconds", "watts"), MEASURED)
def test_decode_takes_and_draws_what_ml_energy_measured(
    model: str, gpus: int, sequences: int, milliseconds: float, watts: float
) -> None:
    machine = Machine("h100", model, gpus)
    costs = machine.costs(machine.clocks_mhz[-1])
    step = Step(sequences, sequences * (1500 if model.startswith("qwen3") else 600), 0, 0.0, 0)
    seconds = machine.seconds(costs, step)
    assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.15)
    assert machine.joules(costs, step, seconds) / seconds / gpus == pytest.approx(watts, rel=0.10)


@pytest.fixture(scope="module")
def tables() -> Path:
    """Folder with NVIDIA's tables for the H200."""
    folder = Path(os.environ.get("PERSEUS_DATA", REPOSITORY.parent / "shared" / "data")) / "serving"
    if not folder.is_dir():
        pytest.skip(f"no tables at {folder}: set PERSEUS_DATA to the folder that holds serving/")
    return folder


def rows(path: Path) -> Iterator[dict[str, float]]:
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            yield {name: float(value) for name, value in row.items() if name != "gemm_dtype"}


def test_products_take_what_nvidia_measured_on_an_h200(tables: Path) -> None:
    """Twelve shapes of layers: all with 512 tokens and more, big ones (100 MB and more) also with up to 64.

    Powers of two, as others fill the GPU's blocks unevenly. Between, at 128 and 256 tokens, products take up to 28 %
    longer than the greater of bytes and operations: neither hides the other wholly.
    """
    machine = Machine("h200", "llama-3.1-70b", 4)
    costs, weights = machine.costs(machine.clocks_mhz[-1]), machine.model.weights / 4
    checked = 0
    for row in rows(tables / "h200_gemm_bf16_latency_power.csv"):
        tokens, cells = int(row["m"]), row["n"] * row["k"]
        big = 2 * cells >= 1e8
        if tokens & (tokens - 1) or not (tokens >= 512 or (big and tokens <= 64)):
            continue
        seconds = 3e-6 + max(costs.weights_s, costs.token_s * tokens) * cells / weights
        assert 1e3 * seconds == pytest.approx(row["latency_ms"], rel=0.15), row
        checked += 1
    assert checked > 70


def test_attention_takes_what_nvidia_measured_on_an_h200(tables: Path) -> None:
    """Of up to 256 sequences that decode, from 1,000 tokens and 200 MB on; of prompts, from 4,096 tokens on, eight rows
    of ten.

    More and shorter sequences take longer, up to a third with 512 tokens.
    """
    machine = Machine("h200", "llama-3.1-70b", 4)
    costs, model = machine.costs(machine.clocks_mhz[-1]), machine.model
    byte_s = costs.kv_s / (model.kv_bytes / 4)
    operation_s = costs.pair_s / (4 * model.layers * model.heads * model.head / 4)
    checked = 0
    for row in rows(tables / "h200_decode_attention_latency_power.csv"):
        context = row["isl"] + row["step"]
        read = row["batch_size"] * context * row["num_key_value_heads"] * row["head_dim"] * 4
        if context >= 1000 and row["batch_size"] <= 256 and read >= 2e8:
            assert 1e3 * (9e-6 + read * byte_s) == pytest.approx(row["latency_ms"], rel=0.15), row
            checked += 1
    assert checked > 50
    off = []
    for row in rows(tables / "h200_prefill_attention_latency_power.csv"):
        if row["isl"] >= 4096:
            operations = 2 * row["batch_size"] * row["isl"] ** 2 * row["num_heads"] * row["head_dim"]
            off.append(abs(1e3 * operations * operation_s / row["latency_ms"] - 1))
    assert len(off) > 50
    assert sorted(off)[int(0.8 * len(off))] <= 0.15


@given(machine=MACHINES, step=STEPS, data=st.data())
def test_a_lower_clock_takes_no_less_time(machine: Machine, step: Step, data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.lists(st.sampled_from(machine.clocks_mhz), min_size=2, max_size=2)))
    slow, fast = (machine.seconds(machine.costs(mhz), step) for mhz in (low, high))
    assert fast <= slow * (1 + 1e-12) <= fast * high / low * (1 + 1e-9)


@given(knee_mhz=st.floats(700, 1500), model=st.sampled_from(MODELS), data=st.data())
def test_bytes_wait_for_the_clock_below_the_knee_alone(knee_mhz: float, model: str, data: st.DataObject) -> None:
    machine = Machine("h100", model, 4, Assumptions(knee_mhz=knee_mhz))
    mhz = data.draw(st.sampled_from(machine.clocks_mhz))
    ratio = machine.costs(mhz).kv_s / machine.costs(machine.clocks_mhz[-1]).kv_s
    assert ratio == pytest.approx(max(1.0, knee_mhz / mhz))


@given(limit_w=st.floats(400, 700), watts=st.sampled_from(WATTS), data=st.data())
def test_products_draw_no_more_than_the_power_limit(limit_w: float, watts: str, data: st.DataObject) -> None:
    """And are slower for it: never because the limit is higher."""
    mhz = data.draw(st.sampled_from(Machine("h100", "llama-3.1-70b", 4).clocks_mhz))
    step = Step(0, 0, 100_000, 0.0, 0)
    taken = []
    for limit in (limit_w, 2 * limit_w):
        machine = Machine("h100", "llama-3.1-70b", 4, Assumptions(watts=watts, power_limit_w=limit))
        costs = machine.costs(mhz)
        taken.append(costs.token_s * step.prompt_tokens)
        drawn_j = costs.active_w * taken[-1] + costs.token_j * step.prompt_tokens
        assert drawn_j / taken[-1] / 4 <= limit * (1 + 1e-6)
    assert taken[0] >= taken[1]


@given(machine=MACHINES, step=STEPS, data=st.data())
def test_a_step_draws_more_than_an_idle_replica(machine: Machine, step: Step, data: st.DataObject) -> None:
    costs = machine.costs(data.draw(st.sampled_from(machine.clocks_mhz)))
    seconds = machine.seconds(costs, step)
    assert machine.joules(costs, step, seconds) > costs.idle_w * seconds
