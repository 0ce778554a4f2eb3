"""The command line on the profile of a small pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perseus_solver.cli import main

# Three stages, the middle one heaviest; clocks with diminishing returns.
PROFILE = "stage,instruction,frequency,time,energy\n" + "".join(
    f"{stage},{what},{clock},"
    f"{work * weight * (0.3 + 0.7 * 1400 / clock):.6f},{work * weight * (40 + 260 * (clock / 1400) ** 2.2):.6f}\n"
    for stage, weight in enumerate((1.0, 1.3, 0.9))
    for what, work in (("forward", 0.05), ("backward", 0.1))
    for clock in range(1400, 700, -100)
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "profile.csv"
    file.write_text(PROFILE)
    return file


@pytest.fixture
def perseus(profile: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command on the profile; exit code, standard output, standard error."""

    def run(command: str, *extra: str, pipeline: bool = True) -> tuple[int, str, str]:
        words = [command, "--profile", str(profile), "--blocking-power", "60"]
        if pipeline:
            words += ["--schedule", "1f1b", "--stages", "3", "--microbatches", "6"]
        try:
            code = main.main([*words, *extra])
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def resimulate(point: dict[str, Any]) -> tuple[float, float]:
    """Time and energy of a written plan, from the CSV alone and with no help from the solver's problem or simulator."""
    cost = {}
    for line in PROFILE.splitlines()[1:]:
        stage, what, clock, time_s, energy_j = line.split(",")
        cost[int(stage), what, int(clock)] = float(time_s), float(energy_j)
    stages = point["stages"]
    end: dict[tuple[str, int, int], float] = {}
    at, clock_s = [0] * len(stages), [0.0] * len(stages)
    energy = busy = 0.0
    while any(at[s] < len(stages[s]) for s in range(len(stages))):
        for s in range(len(stages)):
            if at[s] == len(stages[s]):
                continue
            step = stages[s][at[s]]
            what, m = step["instruction"], step["microbatch"]
            need = None
            if what == "forward" and s > 0:
                need = ("forward", m, s - 1)
            if what == "backward" and s < len(stages) - 1:
                need = ("backward", m, s + 1)
            if need is not None and need not in end:
                continue
            time_s, energy_j = cost[s, what, step["frequency_mhz"]]
            clock_s[s] = max(clock_s[s], end[need] if need else 0.0) + time_s
            end[what, m, s] = clock_s[s]
            energy, busy = energy + energy_j, busy + time_s
            at[s] += 1
    total = max(clock_s)
    return total, energy + 60 * (len(stages) * total - busy)
