"""The simulation by seed: how much of it a minute shows, and which defects it finds (docs/simulation.md). No peer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Final

from tests.simulation.__main__ import Workers, find_mutants
from tests.simulation.mutants import MUTANTS, NOT_IN_THE_WORLD

SEEDS: Final = 60
MOST_SEEDS: Final = 300
"""Against each mutant."""


def speed() -> dict[str, Any]:
    """Measure seeds and simulated hours a minute, on all cores, without what workers need to begin."""
    with Workers(os.cpu_count() or 1) as workers:
        list(workers.run({"seed": seed} for seed in range(2)))
        began_s = time.monotonic()
        outcomes = list(workers.run({"seed": seed} for seed in range(SEEDS)))
        minutes = (time.monotonic() - began_s) / 60
    hours = sum(outcome["simulated_s"] for outcome in outcomes) / 3600
    return {
        "simulation_seeds_per_minute": {"value": SEEDS / minutes, "unit": "1/min"},
        "simulation_hours_per_minute": {"value": hours / minutes, "unit": "h/min"},
    }


def mutants() -> dict[str, Any]:
    """Break the code on purpose, in each way of the table, and count what is found; what is not in the world counts
    as not found."""
    found = find_mutants(MOST_SEEDS, os.cpu_count() or 1)
    every = len(MUTANTS) + len(NOT_IN_THE_WORLD)
    return {"value": 100 * sum(outcome is not None for outcome in found.values()) / every, "unit": "%"}


FIGURES: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "simulation_seeds_per_minute": speed,
    "simulation_mutants_found_percent": mutants,
}
