"""A job without a profile: operator, agents and client measure it while the job trains, as in production.

The profile must be that of the simulated GPUs, also if the operator is killed during the sweep. A later job uses the
profile of the first one.
"""

from __future__ import annotations

import csv
import io
import os
import signal
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.e2e.world import absent
from tests.waiting import eventually

from perseus_client.framework import csv_of, one_f_one_b_row
from perseus_core import keys
from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.units import ratio_from_share
from perseus_operator.families.training.features.profile.sweep import Sweep, from_json
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import profile_csv, stage_weights
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
A100 = MODELS["a100"]
STAGES, MICROBATCHES = 2, 4
FORWARD_S, IMBALANCE = 0.1, 1.25
CLOCKS_MHZ = A100.clocks_mhz[-1:39:-9]
"""The clocks of the simulated GPUs: five, down to 0.62 of the highest."""
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)


class System:
    """The cluster and its jobs."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self._custom = client.CustomObjectsApi(cluster.api)
        cluster.apply(CRDS)
        eventually(
            lambda: not absent(lambda: self._custom.list_namespaced_custom_object(*JOBS)), "the CRD is not served"
        )
        self.start_operator()
        self._node = cluster.add_node("node-0", 2 * STAGES, A100, clocks_mhz=CLOCKS_MHZ)

    def start_operator(self) -> None:
        arguments = ("--lease-ttl-s", "60", "--log-format", "text", "--status-interval-s", "0.2")
        self.cluster.start_operator(*arguments, "--profile-retry-s", "0.5")

    def kill_operator(self) -> None:
        operator = self.cluster.operator
        assert operator is not None
        os.kill(operator.pid, signal.SIGKILL)
        operator.popen.wait()

    def train_steps(self, name: str, step_s: float, ranks: int) -> None:
        """A data-parallel job: each rank runs whole iterations."""
        rows = ["stage,instruction,frequency,time,energy"]
        for clock in CLOCKS_MHZ:
            time_s = step_s * A100.slowdown(clock)
            rows.append(f"0,step,{clock},{time_s:.6f},{time_s * A100.power_w(clock):.4f}")
        measured = read_profile("\n".join(rows) + "\n")
        schedule = build_schedule("Steps", stages=1, microbatches=1)
        problem = build_problem(measured, schedule, blocking_power_w=A100.blocking_power_w)
        self.cluster.start_job(name, problem, pipelines=ranks, speed=5.0, noise=0.002, wait_for_agent_s=30.0)

    def train(self, name: str) -> None:
        measured = read_profile(profile_csv(STAGES, "a100", IMBALANCE, FORWARD_S), stages=STAGES)
        schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
        problem = build_problem(measured, schedule, blocking_power_w=A100.blocking_power_w)
        self.cluster.start_job(name, problem, pipelines=1, speed=5.0, noise=0.002, wait_for_agent_s=30.0)

    def apply(self, name: str, **changes: Any) -> None:
        spec = {
            "profile": {"profileRef": {"name": "measured"}, "online": {"iterationsPerClock": 2}},
            "points": 20,
            **changes,
        }
        spec = {field: value for field, value in spec.items() if value is not None}
        version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        self.cluster.apply({"apiVersion": version, "kind": keys.KIND, "metadata": {"name": name}, "spec": spec})

    def export_schedule(self, name: str) -> None:
        """Store the schedule that a framework exports in a ConfigMap, as a user does."""
        text = csv_of(one_f_one_b_row(stage, STAGES, MICROBATCHES) for stage in range(STAGES))
        body = {"metadata": {"name": name}, "data": {"schedule.csv": text}}
        self.cluster.core.create_namespaced_config_map("default", body)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self._custom.get_namespaced_custom_object(*JOBS, name).get("status", {})
        return found

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        return next((c for c in self.status(name).get("conditions", []) if c["type"] == kind), {})

    def in_force(self, name: str) -> bool:
        return self.condition(name, "PlanApplied").get("reason") == "PlanInForce"

    def stored(self, plural: str, name: str) -> Any:
        """Return a PerseusProfile or a PerseusFrontier; None if there is none."""
        try:
            return self._custom.get_namespaced_custom_object(*JOBS[:3], plural, name)
        except ApiException as error:
            if error.status != 404:
                raise
            return None

    def sweep(self, name: str) -> Sweep | None:
        """Return the stored sweep of a job; None if there is none."""
        stored = self.stored(keys.FRONTIER_PLURAL, name)
        data = stored and stored["spec"].get("sweep")
        return from_json(zlib.decompress(b64decode(data)).decode()) if data else None

    def events(self, name: str) -> list[str]:
        listed = self.cluster.core.list_namespaced_event("default").items
        return [event.reason for event in listed if event.involved_object.name == name]


@pytest.fixture
def system(cluster: SimulatedCluster) -> System:
    return System(cluster)


def rows(text: str) -> dict[tuple[int, str, int], tuple[float, float]]:
    """Read a profile: (stage, instruction, clock in MHz) → (time in s, energy in J)."""
    return {
        (int(row["stage"]), row["instruction"], int(row["frequency"])): (float(row["time"]), float(row["energy"]))
        for row in csv.DictReader(io.StringIO(text))
    }


def test_a_job_is_profiled_and_planned_and_the_next_one_uses_its_profile(system: System) -> None:
    system.train("first")
    system.export_schedule("exported")
    pipeline = {"scheduleRef": {"name": "exported"}, "stages": STAGES}
    system.apply("first", mode="Recommend", pipeline=pipeline)
    eventually(
        lambda: system.condition("first", "ProfileReady").get("reason") == "ProfilingNeedsEnforce",
        "no condition asks for the mode Enforce",
    )
    gpus = system.cluster.jobs[0].gpus[0]
    assert not any(gpu.history() for gpu in gpus), "no clock was set"

    system.apply("first", mode="Enforce", pipeline=pipeline)
    eventually(
        lambda: (found := system.sweep("first")) and len(found.readings) >= 2, "two readings are not stored", 0.1
    )
    system.kill_operator()
    stored = system.sweep("first")
    assert stored is not None
    system.start_operator()
    eventually(lambda: system.in_force("first"), "no plan is in force", 0.1)

    profile = system.stored(keys.PROFILE_PLURAL, "measured")["spec"]
    found = rows(profile["csv"])
    weights = stage_weights(STAGES, IMBALANCE)
    assert {clock for _, _, clock in found} == set(CLOCKS_MHZ)
    for stage, clock in {(stage, clock) for stage, _, clock in found}:
        power_w = A100.power_w(clock)
        wanted_s = {"forward": FORWARD_S * weights[stage] * A100.slowdown(clock)}
        wanted_s["backward"] = BACKWARD_RATIO * wanted_s["forward"]
        for kind, want_s in wanted_s.items():
            time_s, energy_j = found[stage, kind, clock]
            assert time_s == pytest.approx(want_s, rel=0.02)
            # The agent reads the counter at intervals, long ones on a busy machine: the energy of one kind is inexact,
            assert energy_j == pytest.approx(want_s * power_w, rel=0.25)
        # but the sum over the kinds is exact.
        energy_j = sum(found[stage, kind, clock][1] for kind in wanted_s)
        assert energy_j == pytest.approx(sum(wanted_s.values()) * power_w, rel=0.08)
    assert profile["blockingPowerMilliwatts"] == pytest.approx(1000 * A100.blocking_power_w, rel=0.35)
    # What was measured before the operator was killed was not measured again.
    for reading in stored.readings:
        for stage, own in enumerate(reading.stages):
            for (kind, _), mean in own.means.items():
                assert found[stage, kind, reading.clock_mhz][0] == pytest.approx(mean.time_us / 1e6, abs=1e-6)
    assert system.sweep("first") is None, "no sweep is left to be resumed"

    eventually(lambda: "savings" in system.status("first"), "savings are not measured")
    assert float(system.status("first")["savings"]["energy"].rstrip("%")) > 3
    assert "Profiling" in system.events("first")

    # The second job takes its shape and its schedule from its training processes.
    system.train("second")
    system.apply("second")
    eventually(lambda: system.in_force("second"), "the second job's plan is not in force")
    assert "Profiling" not in system.events("second")
    assert system.sweep("second") is None
    shape = {"schedule": "FromRanks", "stages": STAGES, "dataParallel": 1, "tensorParallel": 1}
    assert system.status("second")["shape"] == shape
    assert system.stored(keys.PROFILE_PLURAL, "measured")["spec"] == profile
    for job in system.cluster.jobs:
        assert job.training.failure is None


def test_a_job_is_observed_before_any_clock_is_written(system: System) -> None:
    system.train("first")
    system.export_schedule("exported")
    pipeline = {"scheduleRef": {"name": "exported"}, "stages": STAGES}
    objective = {"type": "MaxSlowdown", "maxSlowdown": "12%"}
    system.apply("first", mode="Observe", pipeline=pipeline, objective=objective)
    eventually(lambda: system.condition("first", "Ready").get("status") == "True", "nothing is predicted", 0.1)
    eventually(lambda: "energySaved" in system.status("first").get("advised", {}), "no baseline is measured", 0.1)
    status = system.status("first")
    advised, sweep = status["advised"], status["sweep"]
    assert advised["restsOn"] == "Model"
    assert "NVIDIA A100" in advised["source"]
    applied = system.condition("first", "PlanApplied")
    assert applied["reason"] == "ObserveOnly"
    assert "no clock is written" in applied["message"]
    assert system.condition("first", "ProfileReady")["reason"] == "Estimated"
    assert sweep["clocks"] >= 4
    assert sweep["iterations"] == 3 * sweep["clocks"]
    assert sweep["durationSeconds"] > 0
    assert status["baseline"]["energyMillijoules"] > 0
    assert "NVIDIA A100" in status["hardware"]["gpu"]
    assert system.stored(keys.PROFILE_PLURAL, "measured") is None
    gpus = system.cluster.jobs[0].gpus[0]
    assert not any(gpu.history() for gpu in gpus), "no clock was set"

    # The same job measures its profile once it may, and what it then saves lies in the predicted interval.
    system.apply("first", mode="Enforce", pipeline=pipeline, objective=objective)
    eventually(lambda: system.in_force("first"), "no plan is in force", 0.1)
    eventually(lambda: "savings" in system.status("first"), "savings are not measured")
    figures = advised["energySavedLow"], system.status("first")["savings"]["energy"], advised["energySavedHigh"]
    low, saved, high = (float(figure.rstrip("%")) for figure in figures)
    assert low - 1 <= saved <= high + 1
    assert "sweep" not in system.status("first"), "there is nothing left to measure"

    # Another job of the same fingerprint names no profile: the stored one is found.
    system.train("second")
    system.apply("second", mode="Observe", profile=None, objective=objective)
    eventually(lambda: "energySaved" in system.status("second").get("advised", {}), "nothing is predicted", 0.1)
    found = system.status("second")["advised"]
    assert (found["restsOn"], found["source"][:23]) == ("MatchingProfile", "PerseusProfile measured")
    assert not any(gpu.history() for gpu in system.cluster.jobs[1].gpus[0]), "no clock was set"
    for job in system.cluster.jobs:
        assert job.training.failure is None


def test_a_job_without_a_pipeline_is_profiled_and_keeps_its_bound(system: System) -> None:
    step_s, ranks = 0.6, 2 * STAGES
    system.train_steps("steps", step_s, ranks)
    system.apply("steps", profile=None, objective={"type": "MaxSlowdown", "maxSlowdown": "12%"})
    eventually(lambda: system.in_force("steps"), "no plan is in force", 0.1)
    assert system.status("steps")["shape"]["dataParallel"] == ranks
    found = rows(system.stored(keys.PROFILE_PLURAL, "steps")["spec"]["csv"])
    assert set(found) == {(0, "step", clock) for clock in CLOCKS_MHZ}
    for (_, _, clock), (time_s, energy_j) in found.items():
        assert time_s == pytest.approx(step_s * A100.slowdown(clock), rel=0.02)
        assert energy_j == pytest.approx(time_s * A100.power_w(clock), rel=0.08)

    eventually(lambda: "savings" in system.status("steps"), "savings are not measured")
    found = system.status("steps")["savings"]
    savings = {what: float(found[what].rstrip("%")) for what in ("energy", "slowdown")}
    # The lowest of the measured clocks that keeps the bound, and what it saves.
    clock = min(clock for clock in CLOCKS_MHZ if A100.slowdown(clock) <= 1.12)
    saved = 1 - A100.slowdown(clock) * A100.power_w(clock) / A100.power_w(max(CLOCKS_MHZ))
    assert savings["slowdown"] == pytest.approx(100 * (A100.slowdown(clock) - 1), abs=0.7)
    assert savings["energy"] == pytest.approx(100 * saved, abs=2.0)

    # Ranks wait for each other within an iteration, and say what they take without that.
    training = system.cluster.jobs[0].training
    training.slow_down(1, 1.3)
    eventually(
        lambda: "Pipeline 1 is" in system.condition("steps", "StragglerDetected").get("message", ""),
        "the slow rank is not found",
    )
    assert training.failure is None


def test_savings_are_measured_again_while_the_job_runs(system: System) -> None:
    step_s, ranks = 0.6, STAGES
    system.train_steps("steps", step_s, ranks)
    objective = {"type": "MaxSlowdown", "maxSlowdown": "12%"}
    system.apply("steps", profile=None, objective=objective, comparison={"everyIterations": 40, "iterations": 3})

    def pairs() -> int:
        return len(system.status("steps").get("comparison", {}).get("pairs", ()))

    eventually(lambda: pairs() >= 3, "nothing was compared", 0.2, 180.0)
    savings = system.status("steps")["savings"]
    assert savings["against"] == "Comparisons"
    clock = min(clock for clock in CLOCKS_MHZ if A100.slowdown(clock) <= 1.12)
    saved = 100 * (1 - A100.slowdown(clock) * A100.power_w(clock) / A100.power_w(max(CLOCKS_MHZ)))
    low, high = (float(savings[edge].rstrip("%")) for edge in ("energyLow", "energyHigh"))
    assert low <= high
    assert low - 2 <= saved <= high + 2
    assert system.in_force("steps")
    assert system.cluster.jobs[0].training.failure is None


def test_a_canary_goes_from_one_rank_to_all(system: System) -> None:
    system.train_steps("steps", 0.6, 2 * STAGES)
    objective = {"type": "MaxSlowdown", "maxSlowdown": "12%"}
    system.apply("steps", profile=None, objective=objective, mode="Canary")
    gpus = system.cluster.jobs[0].gpus
    lowest = min(clock for clock in CLOCKS_MHZ if A100.slowdown(clock) <= 1.12)

    def locked() -> list[int]:
        return [gpus[dp][0].locked_mhz for dp in sorted(gpus)]

    eventually(lambda: system.condition("steps", "PlanApplied").get("reason") == "Canary", "no canary", 0.05)
    eventually(lambda: locked() == [lowest, 0, 0, 0], "the plan is not on the first rank alone", 0.02)
    eventually(lambda: system.in_force("steps"), "the plan is not in force", 0.1)
    eventually(lambda: locked() == [lowest] * 4, "the plan is not on all ranks", 0.02)
    canary = system.status("steps")["canary"]
    saved = 1 - A100.slowdown(lowest) * A100.power_w(lowest) / A100.power_w(max(CLOCKS_MHZ))
    assert canary["phase"] == "Passed"
    # The others wait for it meanwhile, so their iterations take more energy than usual.
    assert saved - 0.02 <= ratio_from_share(canary["saved"]) <= saved + 0.06
    assert system.cluster.jobs[0].training.failure is None
