"""Fit of what the GPUs of an instance draw, to the windows in which it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from perseus_solver.serving.least_squares import non_negative
from perseus_solver.serving.model import StepModel, WattModel
from perseus_solver.serving.windows import Window, ran_mhz

LEAST_WATTS: Final = 30
"""Windows with watts: five for each linear parameter."""
_FLOORS: Final = 24


def fit_watts(windows: Sequence[Window], model: StepModel) -> WattModel | None:
    """Fit.

    Args:
        windows: those without watts are passed over.
        model: of their times.

    Returns:
        The model; None: fewer than `LEAST_WATTS` windows have watts.
    """
    rows = [
        (
            ran_mhz(window) / model.highest_mhz,
            window.watts,
            window.seconds,
            (window.steps + window.prompt_steps) * (model.weights_s + model.kv_token_s * window.kv_tokens),
            (window.steps + window.prompt_steps) * window.running,
            window.prompt_tokens,
        )
        for window in windows
        if window.watts is not None
    ]
    if len(rows) < LEAST_WATTS:
        return None
    clock, watts, seconds, memory_s, sequences, tokens = np.array(rows, float).T
    products = np.minimum(clock, (model.plateau_mhz or model.highest_mhz) / model.highest_mhz)
    floors = np.linspace(float(clock.min()), 1.0, _FLOORS)
    designs = []
    for floor in floors:
        voltage2 = np.maximum(clock, floor) ** 2
        terms = (seconds, seconds * clock * voltage2, memory_s, memory_s * voltage2, sequences * voltage2)
        designs.append(
            np.stack([*terms, tokens * np.maximum(products, floor) ** 2], axis=1) / (watts * seconds)[:, None]
        )
    grams = np.stack([design.T @ design for design in designs])
    moments = np.stack([design.sum(axis=0) for design in designs])
    linear = non_negative(grams, moments)
    misfits = np.einsum("pi,pi->p", linear, np.einsum("pij,pj->pi", grams, linear) - 2.0 * moments)
    at = int(np.argmin(misfits))
    idle_w, clock_w, byte_w, die_w, sequence_j, token_j = map(float, linear[at])
    return WattModel(
        highest_mhz=model.highest_mhz,
        idle_w=idle_w,
        clock_w=clock_w,
        byte_w=byte_w,
        die_w=die_w,
        sequence_j=sequence_j,
        token_j=token_j,
        floor_mhz=float(floors[at] * model.highest_mhz),
    )
