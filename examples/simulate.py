"""``make example``: training for real, on simulated GPUs; profiled and planned by the operator while it runs; measured.

An embedded API server, the operator, an agent and simulated A100s run on this machine. The training processes are real
PyTorch, exchange real tensors and learn; after each instruction they sleep for as long as the simulated GPU would still
compute at its clock. Figures are those of the simulated GPUs' own counters. Ends with 0 only if the plan was applied,
in the order of instructions, and saved energy.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, variance
from typing import Any, TypeVar

import yaml
from kubernetes import client

from perseus_core import keys
from perseus_core.gpus import BACKWARD_RATIO
from perseus_core.rank import RankId
from perseus_sim.cluster.live_job import LiveJob, start_live_job
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import stage_weights
from perseus_sim.training.live import Tables, tables_of
from perseus_solver.schedules import Schedule, build_schedule, read_schedule

HERE = Path(__file__).resolve().parent
CRDS = HERE.parent / "deploy" / "crds"
GPU = MODELS["a100"]
PIPELINE_CLOCKS_MHZ = sorted(GPU.clocks_mhz, reverse=True)[::5][:9]
STEP_CLOCKS_MHZ = sorted(GPU.clocks_mhz, reverse=True)[:20]
STAGES, MICROBATCHES, RANKS = 4, 8, 2
FORWARD_US = 20_000
STEP_US = 1_000_000
IMBALANCE = 1.2
PHASE_CLOCKS_MHZ = sorted(GPU.clocks_mhz, reverse=True)[:45:4]
PHASES = ((1_500_000, 0.1, 0.6), (300_000, 0.0, 0.05), (900_000, 1.0, 1.0))
"""Rollout, reward, training, made up: microseconds at the highest clock, the share of them that follows the clock, and
the share of the power over that of a GPU that waits."""
MEASURED_ITERATIONS = 8
STUDENT_95 = 2.145
"""Two-sided 95 % quantile of Student's distribution for twice as many measurements."""
PATIENCE_S = 240.0
STEPS = "1000000"
T = TypeVar("T")


@dataclass(frozen=True)
class Scenario:
    """What trains.

    Attributes:
        command: script and arguments.
        manifest: of the PerseusJob.
        tables: what instructions take, of each stage.
        clocks_mhz: of the simulated GPUs.
        schedule: what every rank is to run.
        exported: whether the script writes its schedule.
    """

    command: Sequence[str]
    manifest: Path
    tables: Sequence[Tables]
    clocks_mhz: Sequence[int]
    schedule: Schedule
    exported: bool = False

    @classmethod
    def of(cls, framework: str) -> Scenario:
        """The example of a framework."""
        if framework == "pipelining":
            weights = stage_weights(STAGES, IMBALANCE)
            return cls(
                command=[
                    str(HERE / "torch_pipelining" / "train.py"),
                    *("--schedule", "1F1B", "--microbatches", str(MICROBATCHES), "--steps", STEPS),
                ],
                manifest=HERE / "torch_pipelining" / "perseusjob.yaml",
                tables=[tables_of(GPU, PIPELINE_CLOCKS_MHZ, FORWARD_US, weight) for weight in weights],
                clocks_mhz=PIPELINE_CLOCKS_MHZ,
                schedule=build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES),
                exported=True,
            )
        if framework == "grpo":
            return cls(
                command=[str(HERE / "phases" / "train_grpo.py"), STEPS],
                manifest=HERE / "phases" / "perseusjob.yaml",
                tables=[_tables_of_phases()],
                clocks_mhz=PHASE_CLOCKS_MHZ,
                schedule=read_schedule(",".join(f"{phase}S0" for phase in range(len(PHASES)))),
            )
        return cls(
            command=[str(HERE / "steps" / f"train_{framework}.py"), STEPS],
            manifest=HERE / "steps" / "perseusjob.yaml",
            tables=[tables_of(GPU, STEP_CLOCKS_MHZ, STEP_US / (1 + BACKWARD_RATIO))],
            clocks_mhz=STEP_CLOCKS_MHZ,
            schedule=build_schedule("Steps", stages=1, microbatches=1),
        )


def _tables_of_phases() -> Tables:
    clocks, idle_w = sorted(PHASE_CLOCKS_MHZ), GPU.blocking_power_w
    return {
        f"step {phase}": {
            "clocks_mhz": list(clocks),
            "times_us": [time_us * (1 + follows * (GPU.slowdown(clock) - 1)) for clock in clocks],
            "powers_mw": [1000 * (idle_w + load * (GPU.power_w(clock) - idle_w)) for clock in clocks],
        }
        for phase, (time_us, follows, load) in enumerate(PHASES)
    }


class DemoFailed(Exception):
    """Something did not happen, or not as predicted."""


@dataclass(frozen=True)
class Measured:
    """What iterations take; ``error``: the standard error of the energy, as a share of it."""

    time_s: float
    energy_j: float
    error: float


class Example:
    """One run."""

    def __init__(self, python: Path, output: Path, framework: str = "pipelining") -> None:
        self._python = python
        self._output = output
        self._scenario = Scenario.of(framework)
        self._manifest: dict[str, Any] = yaml.safe_load(self._scenario.manifest.read_text())
        self._name: str = self._manifest["metadata"]["name"]
        pipeline = self._manifest["spec"]["pipeline"]
        self._stages: int = pipeline["stages"]
        self._pipelines: int = pipeline.get("dataParallel", 1)
        self._started_s = time.monotonic()

    def run(self) -> dict[str, float]:
        """Run the example and return the figures.

        Raises:
            DemoFailed: see there.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        schedule_csv = self._output / "schedule.csv"
        schedule_csv.unlink(missing_ok=True)
        export = ("--export-schedule", str(schedule_csv)) if self._scenario.exported else ()
        with SimulatedCluster() as cluster:
            cluster.apply(CRDS)
            cluster.start_operator("--status-interval-s", "0.5")
            gpus = self._stages * self._pipelines
            node = cluster.add_node("node-0", gpus, GPU, clocks_mhz=self._scenario.clocks_mhz)
            job = start_live_job(
                cluster,
                node,
                self._name,
                [*self._scenario.command, *export],
                self._scenario.tables,
                python=self._python,
                pipelines=self._pipelines,
            )
            self._say(f"{gpus} PyTorch processes train on as many simulated GPUs; the operator runs")
            try:
                return self._run_scenario(cluster, job, schedule_csv)
            finally:
                job.stop()

    def _run_scenario(self, cluster: SimulatedCluster, job: LiveJob, schedule_csv: Path) -> dict[str, float]:
        baseline = self._measure(job, 3, "at default clocks")
        schedule = self._scenario.schedule
        if self._scenario.exported:
            self._require(_same(read_schedule(schedule_csv), schedule), f"what was exported is not {schedule.name}")
            self._say(
                f"schedule exported by the training process: {schedule_csv}, {schedule.instructions} instructions"
            )

        cluster.apply(self._manifest)
        self._say(f"applied {self._scenario.manifest.name}: there is no profile, so the operator measures one")
        self._follow_profiling(cluster, job)
        profile = self._profile(cluster)
        (self._output / "profile.csv").write_text(profile)
        self._say(f"profile measured: {self._output / 'profile.csv'}, {len(profile.splitlines()) - 1} rows")
        status = self._await(lambda: self._planned(cluster, job), "a plan")
        self._say(f"plan applied: point {status['plan']['point']} of {status['frontier']['points']}")
        planned = self._measure(job, len(job.iterations(0)) + 2, "under the plan")
        self._require_order(job, schedule)

        saved = 1 - planned.energy_j / baseline.energy_j
        within = STUDENT_95 * (1 - saved) * math.hypot(planned.error, baseline.error)
        slower = planned.time_s / baseline.time_s - 1
        self._say(f"measured: energy {-saved:+.1%} ± {within:.1%} (95 % confidence), iteration time {slower:+.1%}")
        self._require(saved > 0, "the plan saved no energy")
        savings = self._await(lambda: self._planned(cluster, job).get("savings"), "savings in the PerseusJob's status")
        self._say(f"the PerseusJob's status: energy saved {savings['energy']}, slowdown {savings['slowdown']}")
        figures = {
            "baseline_time_s": baseline.time_s,
            "baseline_energy_j": baseline.energy_j,
            "planned_time_s": planned.time_s,
            "planned_energy_j": planned.energy_j,
            "energy_saved": saved,
            "energy_saved_within": within,
            "slowdown": slower,
            "planned_slowdown": float(status["plan"]["plannedSlowdown"].rstrip("%")) / 100,
        }
        (self._output / "example.json").write_text(json.dumps(figures, indent=2) + "\n")
        return figures

    def _measure(self, job: LiveJob, first: int, what: str) -> Measured:
        """The next iterations. Of times the median: this machine has other things to do."""
        enough = first + MEASURED_ITERATIONS
        chosen = self._await(
            lambda: (found := job.iterations(0))[enough:] and found[first:enough], f"iterations {what}"
        )
        energies_j = [one.energy_j for one in chosen]
        usual = Measured(
            time_s=median(one.time_s for one in chosen),
            energy_j=fmean(energies_j),
            error=math.sqrt(variance(energies_j) / len(chosen)) / fmean(energies_j),
        )
        self._say(f"{what}: {usual.time_s:.3f} s and {usual.energy_j:.0f} J an iteration")
        return usual

    def _require_order(self, job: LiveJob, schedule: Schedule) -> None:
        """Every rank executed what it exported, and under the plan its GPU ran at several clocks."""
        clocks = set()
        for stage in range(self._stages):
            for one in job.executed(RankId(0, stage))[-MEASURED_ITERATIONS:]:
                executed = [tuple(mark[:3]) for mark in one["instructions"]]
                self._require(executed == schedule.of_stage(stage), f"stage {stage} left the exported schedule")
                clocks |= {mark[3] for mark in one["instructions"]}
        if schedule.instructions > 1:
            self._require(len(clocks) > 1, "every instruction ran at the same clock")
            self._say(f"instructions ran in the exported order, at {len(clocks)} different clocks")
        else:
            self._say(f"iterations ran at {', '.join(map(str, sorted(clocks)))} MHz")

    def _follow_profiling(self, cluster: SimulatedCluster, job: LiveJob) -> None:
        """Print each clock as it is measured, until the profile is there."""
        announced = ""

        def ready() -> bool:
            nonlocal announced
            found = self._condition(self._status(cluster, job), "ProfileReady")
            message = str(found.get("message", ""))
            clock = message.partition(":")[0]
            if clock.startswith("Measuring") and clock != announced:
                announced = clock
                self._say(f"  {clock}")
            if found.get("status") == "True":
                self._say(f"  {message}")
            return found.get("status") == "True"

        self._await(ready, "a profile")
        self._require(bool(announced), "the operator measured nothing")

    def _profile(self, cluster: SimulatedCluster) -> str:
        """The profile as the operator has stored it."""
        name = self._manifest["spec"]["profile"]["profileRef"]["name"]
        where = keys.API_GROUP, keys.API_VERSION, "default", keys.PROFILE_PLURAL, name
        stored: Any = client.CustomObjectsApi(cluster.api).get_namespaced_custom_object(*where)
        return str(stored["spec"]["csv"])

    def _status(self, cluster: SimulatedCluster, job: LiveJob) -> dict[str, Any]:
        job.check()
        api = client.CustomObjectsApi(cluster.api)
        found: Any = api.get_namespaced_custom_object(
            keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL, self._name
        )
        status: dict[str, Any] = found.get("status", {})
        return status

    @staticmethod
    def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
        return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})

    def _planned(self, cluster: SimulatedCluster, job: LiveJob) -> dict[str, Any]:
        """The PerseusJob's status once its plan is applied."""
        status = self._status(cluster, job)
        return status if self._condition(status, "PlanApplied").get("status") == "True" else {}

    def _await(self, seen: Callable[[], T | None], what: str) -> T:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            found = seen()
            if found:
                return found
            time.sleep(0.1)
        raise DemoFailed(f"waited {PATIENCE_S:g} s for {what}")

    def _require(self, true: bool, otherwise: str) -> None:
        if not true:
            raise DemoFailed(otherwise)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:5.1f} s  {text}", flush=True)


def _same(one: Schedule, other: Schedule) -> bool:
    return one.stages == other.stages and all(
        one.of_stage(stage) == other.of_stage(stage) for stage in range(one.stages)
    )


def main() -> int:
    """0: everything was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="interpreter that has PyTorch and perseus_client")
    parser.add_argument(
        "--framework",
        default="pipelining",
        choices=[
            "pipelining",
            "grpo",
            *sorted(path.stem.removeprefix("train_") for path in HERE.glob("steps/train_*.py")),
        ],
        help="what trains (default: torch.distributed.pipelining)",
    )
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of profile, schedule and figures")
    arguments = parser.parse_args()
    try:
        Example(arguments.python.absolute(), arguments.output.absolute(), arguments.framework).run()
    except DemoFailed as error:
        print(f"NOT SEEN: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
