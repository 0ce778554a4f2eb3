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
from tests.e2e.conftest import absent
from tests.waiting import eventually

from perseus_client.framework import csv_of, one_f_one_b_row
from perseus_operator.planning.profiling.sweep import Sweep, from_json
from perseus_proto import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import BACKWARD_RATIO, MODELS, profile_csv, stage_weights
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
            "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES},
            "profile": {"profileRef": {"name": "measured"}, "online": {"iterationsPerClock": 2}},
            "points": 20,
            **changes,
        }
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

    # The second job takes its schedule from its training processes.
    system.train("second")
    system.apply("second", pipeline={"schedule": "FromRanks", "stages": STAGES})
    eventually(lambda: system.in_force("second"), "the second job's plan is not in force")
    assert "Profiling" not in system.events("second")
    assert system.sweep("second") is None
    assert system.stored(keys.PROFILE_PLURAL, "measured")["spec"] == profile
    for job in system.cluster.jobs:
        assert job.training.failure is None


def test_a_job_without_a_pipeline_is_profiled_and_keeps_its_bound(system: System) -> None:
    step_s, ranks = 0.6, 2 * STAGES
    system.train_steps("steps", step_s, ranks)
    system.apply(
        "steps",
        pipeline={"schedule": "Steps", "stages": 1, "dataParallel": ranks},
        objective={"type": "MaxSlowdown", "maxSlowdown": "12%"},
    )
    eventually(lambda: system.in_force("steps"), "no plan is in force", 0.1)
    found = rows(system.stored(keys.PROFILE_PLURAL, "measured")["spec"]["csv"])
    assert set(found) == {(0, "step", clock) for clock in CLOCKS_MHZ}
    for (_, _, clock), (time_s, energy_j) in found.items():
        assert time_s == pytest.approx(step_s * A100.slowdown(clock), rel=0.02)
        assert energy_j == pytest.approx(time_s * A100.power_w(clock), rel=0.08)

    eventually(lambda: "savings" in system.status("steps"), "savings are not measured")
    savings = {what: float(share.rstrip("%")) for what, share in system.status("steps")["savings"].items()}
    # The lowest of the measured clocks that keeps the bound, and what it saves.
    clock = min(clock for clock in CLOCKS_MHZ if A100.slowdown(clock) <= 1.12)
    saved = 1 - A100.slowdown(clock) * A100.power_w(clock) / A100.power_w(max(CLOCKS_MHZ))
    assert savings["slowdown"] == pytest.approx(100 * (A100.slowdown(clock) - 1), abs=0.7)
    assert savings["energy"] == pytest.approx(100 * saved, abs=2.0)
    assert system.cluster.jobs[0].training.failure is None
