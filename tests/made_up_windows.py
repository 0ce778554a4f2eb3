"""Windows of engines: made up from a model, and seen on a simulated engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from perseus_sim.serving.canary import windows_of
from perseus_sim.serving.engine import Engine
from perseus_sim.serving.machine import Costs, Machine, Step
from perseus_sim.serving.requests import Request
from perseus_solver.serving import StepModel, WattModel, Window

HIGHEST_MHZ = 1980
MODEL = StepModel(
    highest_mhz=HIGHEST_MHZ,
    host_s=3e-3,
    launch_s=1e-3,
    weights_s=12e-3,
    token_s=40e-6,
    kv_token_s=30e-9,
    sequence_s=30e-6,
    sampling_s=30e-6,
    knee_mhz=1100.0,
    plateau_mhz=1500.0,
)
WATTS = WattModel(
    highest_mhz=HIGHEST_MHZ,
    idle_w=300.0,
    clock_w=190.0,
    byte_w=350.0,
    die_w=1_100.0,
    sequence_j=0.2,
    token_j=0.2,
    floor_mhz=1_000.0,
)
CLOCKS_MHZ = (900, 1095, 1305, 1605, HIGHEST_MHZ)


def made_up(
    model: StepModel = MODEL,
    clocks_mhz: Sequence[int] = CLOCKS_MHZ,
    each: int = 40,
    noise: float = 0.01,
    outliers: float = 0.0,
    seed: int = 0,
) -> list[Window]:
    """Windows of an engine that does what a model says, with noise of so many standard deviations."""
    draw = random.Random(seed)
    windows = []
    for clock_mhz in clocks_mhz:
        for _ in range(each):
            running = draw.uniform(1, 200)
            kv_tokens = running * draw.uniform(200, 2_000)
            chunk = draw.randint(256, 2_048)

            def seen(seconds: float) -> float:
                late = draw.uniform(1.5, 4.0) if draw.random() < outliers else 1.0
                return seconds * late * draw.lognormvariate(0.0, noise)

            step_s = seen(model.step_s(clock_mhz, running, kv_tokens))
            prompt_step_s = seen(model.step_s(clock_mhz, running, kv_tokens, chunk))
            joules = 20 * WATTS.joules(model, clock_mhz, running, kv_tokens)
            joules += 3 * WATTS.joules(model, clock_mhz, running, kv_tokens, chunk)
            seconds = 20 * step_s + 3 * prompt_step_s
            windows.append(
                Window(
                    clock_mhz=clock_mhz,
                    seconds=seconds,
                    running=running,
                    kv_tokens=kv_tokens,
                    steps=20,
                    step_s=step_s,
                    prompt_steps=3,
                    prompt_step_s=prompt_step_s,
                    prompt_tokens=3 * chunk,
                    watts=joules / seconds * draw.lognormvariate(0.0, noise),
                )
            )
    return windows


class RecordedMachine(Machine):
    """A machine that keeps what each of its steps took, at a clock that does not change.

    Args:
        perturbed: what its steps take, of costs and step, where that is not a dense model's.
    """

    def __init__(self, perturbed: Callable[[Costs, Step], float] = Machine.seconds) -> None:
        super().__init__("h100", "llama-3.1-70b", 4)
        self._perturbed = perturbed
        self.recorded: list[tuple[Step, float, float]] = []

    def seconds(self, costs: Costs, step: Step) -> float:  # type: ignore[override]
        return self._perturbed(costs, step)

    def joules(self, costs: Costs, step: Step, seconds: float) -> float:  # type: ignore[override]
        joules = Machine.joules(costs, step, seconds)
        self.recorded.append((step, seconds, joules))
        return joules


def of_experts(costs: Costs, step: Step) -> float:
    """A mixture of 128 experts of which each token chooses eight: more are read, the more tokens there are."""
    read = 1.0 - (1.0 - 8 / 128) ** (step.decoding + step.prompt_tokens)
    return Machine.seconds(costs._replace(weights_s=costs.weights_s * read), step)


def speculative(costs: Costs, step: Step) -> float:
    """Two tokens of each sequence are computed in a step."""
    return Machine.seconds(costs, step._replace(prompt_tokens=step.prompt_tokens + step.decoding))


def of_engine(
    machine: RecordedMachine,
    clocks_mhz: Sequence[int],
    rates: Sequence[float] = (2.0, 6.0, 12.0),
    seconds: float = 60.0,
    seed: int = 1,
) -> list[Window]:
    """Windows of a simulated engine, for so many seconds at each clock, with each of some rates of requests in turn."""
    draw = random.Random(seed)
    windows: list[Window] = []
    for clock_mhz in clocks_mhz:
        machine.recorded = []
        engine = Engine(machine, clock_mhz)
        arrival_s = 0.0
        while arrival_s < seconds:
            arrival_s += draw.expovariate(rates[min(len(rates) - 1, int(arrival_s * len(rates) / seconds))])
            engine.advance(arrival_s)
            prompt, output = (max(1, int(draw.lognormvariate(*shape))) for shape in ((6.5, 0.9), (5.0, 0.7)))
            engine.submit(Request(arrival_s, prompt, output))
        windows += windows_of(clock_mhz, machine.recorded[:-1])  # the last did not end
    return windows


def paused(windows: Sequence[Window], share: float, seed: int = 0) -> list[Window]:
    """The same windows, a share of which hold a pause of the process."""
    draw = random.Random(seed)
    return [
        replace(window, step_s=window.step_s * draw.uniform(1.5, 4.0)) if draw.random() < share else window
        for window in windows
    ]
