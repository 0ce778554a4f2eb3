"""A step of several phases, as reinforcement learning has them: each gets its clock, and what that saves is measured.

Rollouts wait for memory, so a lower clock hardly lengthens them; rewards are computed by the host while the GPU waits;
training computes. One clock for the whole step saves much less, which is computed here and not measured.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from itertools import product

import pytest
from tests.e2e.test_online_profiling import A100, CLOCKS_MHZ, System
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import read_schedule

PHASES = {"rollout": (0.6, 0.1, 0.6), "reward": (0.1, 0.0, 0.05), "training": (0.3, 1.0, 1.0)}
"""Seconds at the highest clock, the share of the time that follows the clock, and the share of the power over that of a
GPU that waits, made up."""
RANKS = 2
BOUND = 1.05


def seconds(phase: str, clock: int) -> float:
    time_s, share, _ = PHASES[phase]
    return time_s * (1 + share * (A100.slowdown(clock) - 1))


def joules(phase: str, clock: int) -> float:
    power_w = A100.blocking_power_w + PHASES[phase][2] * (A100.power_w(clock) - A100.blocking_power_w)
    return seconds(phase, clock) * power_w


def least_share(clocks: Iterable[tuple[int, ...]]) -> float:
    """The least energy of these choices of a clock for each phase that keep the bound, over that at the highest."""
    iterations = [(sum(map(seconds, PHASES, chosen)), sum(map(joules, PHASES, chosen))) for chosen in (*clocks,)]
    time_s, energy_j = (sum(one(phase, max(CLOCKS_MHZ)) for phase in PHASES) for one in (seconds, joules))
    return min(energy for time, energy in iterations if time <= BOUND * time_s) / energy_j


def profile_of_phases() -> str:
    """The profile CSV of such a job on an A100."""
    rows = ["stage,instruction,chunk,frequency,time,energy"]
    for chunk, phase in enumerate(PHASES):
        for clock in CLOCKS_MHZ:
            rows.append(f"0,step,{chunk},{clock},{seconds(phase, clock):.6f},{joules(phase, clock):.4f}")
    return "\n".join(rows) + "\n"


def test_each_phase_gets_its_clock_and_saves(cluster: SimulatedCluster) -> None:
    system = System(cluster)
    schedule = read_schedule(",".join(f"{chunk}S0" for chunk in range(len(PHASES))))
    problem = build_problem(read_profile(profile_of_phases()), schedule, blocking_power_w=A100.blocking_power_w)
    cluster.start_job("grpo", problem, pipelines=RANKS, speed=5.0, noise=0.002, wait_for_agent_s=30.0)
    system.apply(
        "grpo",
        profile=None,
        objective={"type": "MaxSlowdown", "maxSlowdown": "5%"},
        comparison={"everyIterations": 40, "iterations": 3},
    )
    eventually(lambda: system.in_force("grpo"), "no plan is in force", 0.1)
    shape = {"schedule": "FromRanks", "stages": 1, "dataParallel": RANKS, "tensorParallel": 1}
    assert system.status("grpo")["shape"] == shape

    measured = list(csv.DictReader(io.StringIO(system.stored(keys.PROFILE_PLURAL, "grpo")["spec"]["csv"])))
    assert {(row["instruction"], int(row["chunk"])) for row in measured} == {("step", chunk) for chunk in range(3)}
    for row in measured:
        phase = list(PHASES)[int(row["chunk"])]
        assert float(row["time"]) == pytest.approx(seconds(phase, int(row["frequency"])), rel=0.02)

    def pairs() -> int:
        return len(system.status("grpo").get("comparison", {}).get("pairs", ()))

    eventually(lambda: pairs() >= 3, "nothing was compared", 0.2, 180.0)
    savings = system.status("grpo")["savings"]
    low, high = (float(savings[edge].rstrip("%")) for edge in ("energyLow", "energyHigh"))
    by_phase, one_clock = (
        100 * (1 - least_share(clocks))
        for clocks in (product(CLOCKS_MHZ, repeat=len(PHASES)), ((clock,) * len(PHASES) for clock in CLOCKS_MHZ))
    )
    assert low - 2 <= by_phase <= high + 2, (low, by_phase, high)
    assert low > one_clock, "more than the best single clock"
    assert float(savings["slowdown"].rstrip("%")) <= 5.5
