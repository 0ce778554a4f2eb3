"""Steps of a simulated machine as the planner of replicas takes them, and how far a boost goes there."""

from __future__ import annotations

from typing import Final

import numpy as np

from perseus_sim.serving.machine import Machine
from perseus_solver.kinds import Floats

BOOST_MHZ: Final = 1500
"""Above, the power limit holds prompts back on an H100, so the law's tables boost no further."""
BOOST_DELAY_S: Final = 0.08
"""Half a period of the law, and an H100's latency: until then a prompt is computed at the floor."""


class MachineSteps:
    """Steps of a simulated machine, for `ReplicaModel`.

    Args:
        machine: the machine.
        before: tokens of a prompt before the one that is computed, mean.
    """

    def __init__(self, machine: Machine, before: float) -> None:
        self._machine, self._before = machine, before

    def seconds(self, clock_mhz: float, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return seconds of steps; arguments as of `StepModel.steps_s`."""
        costs, tokens = self._machine.costs(round(clock_mhz)), running + prompt_tokens
        time_s: Floats = (
            costs.step_s
            + costs.reduce_s * tokens
            + np.maximum(costs.weights_s, costs.token_s * tokens)
            + costs.kv_s * kv_tokens
            + costs.pair_s * self._before * prompt_tokens
            + costs.sample_s * (running + (prompt_tokens > 0.0))
        )
        return time_s

    def joules(self, clock_mhz: float, running: Floats, kv_tokens: Floats, prompt_tokens: Floats) -> Floats:
        """Return joules of steps."""
        costs = self._machine.costs(round(clock_mhz))
        energy_j: Floats = (
            costs.active_w * self.seconds(clock_mhz, running, kv_tokens, prompt_tokens)
            + costs.sample_j * (running + (prompt_tokens > 0.0))
            + costs.weights_j
            + costs.kv_j * kv_tokens
            + costs.decode_j * running
            + costs.token_j * prompt_tokens
            + costs.pair_j * self._before * prompt_tokens
        )
        return energy_j

    def resting_w(self, clock_mhz: float) -> float:
        """Return watts without a step."""
        return self._machine.costs(round(clock_mhz)).idle_w
