"""``make demo``: runs the whole system on this machine, prints what happens, and ends with 0 only if all of it
happened.

What is printed comes from three sources: the PerseusJob's status as any user reads it, the counters of the simulated
GPUs (not the agent's telemetry), and the GPUs' clocks. The parts of the system are in
``perseus_sim.cluster.simulated_cluster``.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import yaml
from kubernetes import client

from perseus_agent.devices.base import EventReason
from perseus_proto import keys
from perseus_proto.units import j_from_mj, mw_from_w, s_from_ms, s_from_us, us_from_s, w_from_mw
from perseus_sim.cluster.simulated_cluster import RunningJob, SimulatedCluster
from perseus_sim.demo.report import Measurement, Report, percent
from perseus_sim.execution.hosts import Framework, Hosts
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import profile_csv
from perseus_sim.training.coordinator import PipelineIteration
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.model.deployed import DeployedGap
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

REPOSITORY = Path(__file__).resolve().parents[3]
SAMPLE = REPOSITORY / "deploy" / "samples" / "perseusjob.yaml"
CRDS = REPOSITORY / "deploy" / "crds"

_NAMESPACE = "default"
_BASELINE_ITERATIONS = 5
_PREDICTION_ITERATIONS = 5
"""After which agents know when the GPUs begin each instruction under a new plan."""
_PLANNED_ITERATIONS = 6
_STRAGGLER_ITERATIONS = 3
_REACTION_ITERATIONS = 5
"""From the first slow iteration to the new plan: the GPU's times of an iteration are read when the host ends the next
one, hosts run ahead, the detector wants two iterations, and a selection takes effect at the next boundary."""
_ON_PURPOSE = 0.02
"""A plan beside a straggler is slower by more than this share, one for no slowdown by less."""
_RECOVERED_ITERATIONS = 4
_TIMEOUT_S = 90.0
_TOLERANCE = 0.01
"""Measured against predicted, as a share of the baseline: the simulator's noise is 0.5 % of each duration, and a
pipeline waits for the slowest of many noisy instructions."""
_CALIBRATED_ITERATIONS = 4
_CALIBRATED_WITHIN = 0.005
"""Predicted against measured iteration time, once the operator has calibrated the delays between computations."""
_BETWEEN = 0.012
"""Of the fastest iteration, spent between iterations (optimizer, synchronisation of gradients); no profile contains
it."""
_MESSAGE = 0.0004
"""Of the fastest iteration, spent on every message between stages; likewise."""
_THROTTLE = 0.65
"""Clock of the throttled GPU over the highest that its power limit leaves: some twenty per cent slower."""

T = TypeVar("T")


class DemoFailed(Exception):
    """Something that should have happened did not, or not as predicted."""


@dataclass(frozen=True)
class DemoOptions:
    """What to run. ``None``: as in the sample manifest, on a made-up profile of the GPU model."""

    output: Path
    gpu_model: str = "h100"
    """A key of ``MODELS``: clocks, driver, and the profile where none is given."""
    profile: Path | None = None
    stages: int | None = None
    microbatches: int | None = None
    blocking_power_w: float | None = None


class Demo:
    """One run of the demo."""

    def __init__(self, options: DemoOptions) -> None:
        self._output = options.output
        self._manifest: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
        pipeline = self._manifest["spec"]["pipeline"]
        profile = self._manifest["spec"]["profile"]
        self._stages = pipeline["stages"] = options.stages or pipeline["stages"]
        self._microbatches = pipeline["microbatches"] = options.microbatches or pipeline["microbatches"]
        self._gpu = MODELS[options.gpu_model]
        blocking_power_w = options.blocking_power_w
        if blocking_power_w is None:
            of_sample_w = w_from_mw(profile["blockingPowerMilliwatts"])
            blocking_power_w = of_sample_w if options.profile else self._gpu.blocking_power_w
        profile["blockingPowerMilliwatts"] = mw_from_w(blocking_power_w)
        self._name: str = self._manifest["metadata"]["name"]
        self._pipelines: int = pipeline["dataParallel"]
        self._csv = options.profile.read_text() if options.profile else profile_csv(self._stages, options.gpu_model)
        self._driver = options.gpu_model
        measured = read_profile(self._csv, stages=self._stages)
        schedule = build_schedule(pipeline["schedule"].lower(), stages=self._stages, microbatches=self._microbatches)
        self._problem = build_problem(measured, schedule, blocking_power_w=blocking_power_w)
        self._simulator = Simulator(self._problem)
        self._baseline_run = self._simulator.run(all_maximum(self._problem))
        self._started_s = time.monotonic()
        self._lines: list[str] = []
        self._iterations: dict[tuple[int, int], PipelineIteration] = {}

    # --------------------------------------------------------------------------------------- the scenario

    def run(self) -> None:
        """Run the scenario.

        Raises:
            DemoFailed: something did not happen as it should.
        """
        with SimulatedCluster() as cluster:
            try:
                self._run_scenario(cluster)
            except DemoFailed:
                self._say(f"logs of every process: {cluster.folder / 'logs'}")
                raise

    def _run_scenario(self, cluster: SimulatedCluster) -> None:
        job = self._start(cluster)
        api = client.CustomObjectsApi(cluster.api)
        self._say(f"training at default clocks: {self._shape()}")
        baseline = self._measure(job, 0, _BASELINE_ITERATIONS, "training at default clocks")
        self._say(f"baseline: {baseline}")

        cluster.apply(self._config_map())
        cluster.apply(self._manifest)
        self._say(f"applied {SAMPLE.relative_to(REPOSITORY)} and its ConfigMap through the API")
        status = self._await_condition(api, "ProfileReady")
        name = self._manifest["spec"]["profile"]["configMapRef"]["name"]
        clocks = len(self._clocks())
        self._say(f"profile found: ConfigMap {name}, {self._stages} stages, {clocks} clocks")
        status = self._await_condition(api, "FrontierReady")
        frontier = self._frontier(cluster)
        gap = DeployedGap.of(frontier)
        self._say(
            f"frontier solved: {len(frontier)} points in {s_from_ms(status['frontier']['solveMilliseconds']):.2f} s, "
            f"T_min {frontier.t_min_s:.4g} s to T* {frontier.t_star_s:.4g} s, certified gap over all "
            f"deadlines {100 * gap.mean:.3f} % on average, {100 * gap.worst:.3f} % at most"
        )
        status = self._await_condition(api, "PlanApplied")
        self._say(f"plan pushed: point {status['plan']['point']}, from iteration {status['plan']['fromIteration']}")
        status = self._await(lambda: self._planned_for_measured(api), "plans for measured hardware")
        found, begins = status["hardware"], status["plan"]["fromIteration"]
        self._say(
            f"clock changes measured: {s_from_us(found['switchLatencyMedianMicroseconds']) * 1000:.0f} ms, 99 of 100 "
            f"within {s_from_us(found['switchLatencyP99Microseconds']) * 1000:.0f} ms; planned for them from iteration "
            f"{begins}, grain {status['plan']['grain']}"
        )
        planned, status = self._measure_plan(job, api, status, _PLANNED_ITERATIONS, "training under the plan")
        frontier = self._frontier(cluster)
        predicted = self._prediction(status["predicted"])
        self._compare(planned, baseline, predicted)

        calibrated = self._calibrate(job, api, planned)
        straggler = self._throttle(job, api, calibrated)
        self._release(job, api, cluster)

        report = Report(self._problem, self._simulator, frontier, baseline, planned, straggler, predicted)
        for path in report.write(self._output, self._lines, title=self._shape()):
            self._say(f"wrote {path}")

    def _start(self, cluster: SimulatedCluster) -> RunningJob:
        self._say("starting an embedded API server, the operator, and 2 nodes with an agent each")
        cluster.apply(CRDS)
        cluster.start_operator("--calibrate-after", "28")
        nodes = min(2, self._pipelines)
        per_node = self._stages * -(-self._pipelines // nodes)
        for number in range(nodes):
            cluster.add_node(
                f"node-{number}",
                per_node,
                self._gpu,
                clocks_mhz=self._clocks(),
                driver=self._driver,
            )
        fastest_s = float(self._baseline_run.iteration_time_s)
        return cluster.start_job(
            self._name,
            self._problem,
            pipelines=self._pipelines,
            hosts=Hosts(Framework.PYTORCH),
            synchronisation_us=us_from_s(_BETWEEN * fastest_s),
            delay_us=us_from_s(_MESSAGE * fastest_s),
        )

    def _throttle(self, job: RunningJob, api: client.CustomObjectsApi, calibrated: Measurement) -> Measurement:
        """A GPU of the last pipeline gets hot, and the other pipelines slow down; it cools, and they return.

        It does so once plans no longer change: of the first iterations under a new plan, in which agents hold clocks
        up, none shows how slow a pipeline is.
        """
        slow = self._pipelines - 1
        gpu = job.gpus[slow][self._stages // 2]
        clocks = self._clocks()
        reached_mhz = min(clocks[-1], self._gpu.effective_mhz(self._gpu.max_clock_mhz))
        limit = min(clocks, key=lambda clock: abs(clock - _THROTTLE * reached_mhz))
        healthy, healthy_s = job.training.iteration, s_from_us(self._latest(job, slow).span_us)
        gpu.cap(limit, EventReason.HARDWARE_THERMAL.value)
        self._say(f"a GPU of pipeline {slow} throttles to {limit} MHz (thermal)")
        first = self._await(
            lambda: self._first_slow(job, slow, healthy_s, healthy), "a slow iteration of the throttled pipeline"
        )
        status = self._await_condition(api, "StragglerDetected")
        message = self._condition(status, "StragglerDetected")["message"]
        self._say(f"straggler detected: {message}")
        status = self._await(lambda: self._slowed(api), "a new plan for the other pipelines")
        begins = status["plan"]["fromIteration"]
        self._say(
            f"new plan on the other pipeline: {self._slower(status):.1%} slower on purpose, from iteration {begins}; "
            f"the first slow iteration was {first}"
        )
        late = begins - first
        self._require(late <= _REACTION_ITERATIONS, f"the new plan came {late} iterations after the first slow one")
        under = self._measure(job, begins, _STRAGGLER_ITERATIONS, "training beside the straggler")
        self._say(f"beside the straggler: {under}")
        self._require(
            under.of_pipeline[0] < self._before(job, begins - 1, 0),
            "the other pipeline saved nothing beside the straggler",
        )
        gpu.cap(0)
        self._say("the GPU has cooled down")
        status = self._await(lambda: self._recovered(api), "the return to the first plan")
        begins = status["plan"]["fromIteration"]
        self._say(f"straggler recovered: back to point {status['plan']['point']} from iteration {begins}")
        back = self._measure(job, begins, _RECOVERED_ITERATIONS, "training after the straggler")
        self._say(f"after the straggler: {back}")
        self._require(
            abs(back.time_s / calibrated.time_s - 1) < _TOLERANCE,
            "the iteration time did not return after the straggler",
        )
        return under

    def _calibrate(self, job: RunningJob, api: client.CustomObjectsApi, planned: Measurement) -> Measurement:
        """The operator has observed enough iterations to calibrate delays that the profile lacks, and plans again."""

        def planned_again() -> dict[str, Any] | None:
            status = self._status(api)
            resolved = status.get("frontier", {}).get("digest") != uncalibrated
            applied = self._condition(status, "PlanApplied").get("status") == "True"
            return status if resolved and applied and "predicted" in status else None

        status = self._await_condition(api, "ModelExplains")
        found, uncalibrated = status["calibration"], status["frontier"]["digest"]
        self._say(
            f"calibrated on {found['iterations']} iterations: mean error on those held out {found['heldOutError']}, "
            f"without calibration {found['uncalibratedError']}"
        )
        status = self._await(planned_again, "plans in real time")
        what = "training under calibrated plans"
        measured, status = self._measure_plan(job, api, status, _CALIBRATED_ITERATIONS, what)
        predicted_s = s_from_us(status["predicted"]["iterationTimeMicroseconds"])
        error = measured.time_s / predicted_s - 1
        self._say(f"under the calibrated plan: {measured}; predicted {predicted_s:.4g} s, {error:+.2%} off")
        self._require(abs(error) <= _CALIBRATED_WITHIN, "the calibrated prediction does not come true")
        self._require(
            measured.time_s <= (1 + _TOLERANCE) * planned.time_s, "the calibrated plan is slower than the first one"
        )
        return measured

    def _release(self, job: RunningJob, api: client.CustomObjectsApi, cluster: SimulatedCluster) -> None:
        api.delete_namespaced_custom_object(keys.API_GROUP, keys.API_VERSION, _NAMESPACE, keys.PLURAL, self._name)
        gpus = [gpu for node in cluster.nodes.values() for gpu in node.gpus]
        self._await(lambda: self._job(api) is None or None, "the PerseusJob to be gone")
        self._await(lambda: all(gpu.locked_mhz == 0 for gpu in gpus) or None, "every GPU at its default clocks")
        at = job.training.iteration
        self._await(lambda: job.training.iteration > at + 1 or None, "training to go on")
        self._require(job.training.failure is None, f"training failed: {job.training.failure}")
        self._say(f"PerseusJob deleted: all {len(gpus)} GPUs at their default clocks; training goes on undisturbed")
        cluster.stop_job(job)

    # ---------------------------------------------------------------------------------- predictions

    def _prediction(self, predicted: dict[str, Any]) -> Measurement:
        energy_j = j_from_mj(predicted["energyMillijoules"]) / self._pipelines
        time_s = s_from_us(predicted["iterationTimeMicroseconds"])
        return Measurement(time_s, (energy_j,) * self._pipelines, 0)

    def _compare(self, planned: Measurement, baseline: Measurement, predicted: Measurement) -> None:
        baseline_j = float(self._baseline_run.energy_j) * self._pipelines
        predicted_saving = 1 - predicted.energy_j / baseline_j
        saved = 1 - planned.energy_j / baseline.energy_j
        slower = planned.time_s / baseline.time_s - 1
        on_purpose = predicted.time_s / float(self._baseline_run.iteration_time_s) - 1
        self._say(
            f"under the plan: {planned}, energy −{percent(saved)} (the solver predicted −{percent(predicted_saving)}), "
            f"time {slower:+.2%} ({on_purpose:+.2%} on purpose)"
        )
        off = planned.time_s / predicted.time_s - 1
        self._say(
            f"the profile predicts {predicted.time_s:.4g} s, {off:+.2%} off: it does not contain what happens between "
            "computations"
        )
        self._require(off > _CALIBRATED_WITHIN, "the simulated job has no delays that could be calibrated")
        self._require(
            abs(saved - predicted_saving) <= _TOLERANCE,
            "measured and predicted savings differ by more than 1 % of the baseline",
        )
        self._require(slower <= _TOLERANCE, "the plan slows training by more than 1 %, with what it does on purpose")

    # --------------------------------------------------------------------------------------- observing

    def _drain(self, job: RunningJob) -> None:
        while not job.training.samples.empty():
            sample = job.training.samples.get()
            self._iterations[sample.dp, sample.iteration] = sample

    def _complete(self, job: RunningJob) -> list[int]:
        """Iterations that every pipeline has ended."""
        self._drain(job)
        numbers = {iteration for _, iteration in self._iterations}
        return sorted(i for i in numbers if all((p, i) in self._iterations for p in range(self._pipelines)))

    def _latest(self, job: RunningJob, dp: int) -> PipelineIteration:
        return self._iterations[dp, self._complete(job)[-1]]

    def _measure(self, job: RunningJob, after: int, wanted: int, what: str) -> Measurement:
        """Medians over so many iterations after this one, as in the operator's status: a change may come late."""

        def enough() -> list[int] | None:
            found = [i for i in self._complete(job) if i > after]
            return found[:wanted] if len(found) >= wanted else None

        chosen = self._await(enough, f"{wanted} iterations of {what}")
        runs = [[self._iterations[p, i] for i in chosen] for p in range(self._pipelines)]
        time_s = median(max(s_from_us(run[k].time_us) for run in runs) for k in range(wanted))
        return Measurement(time_s, tuple(median(j_from_mj(i.energy_mj) for i in run) for run in runs), wanted)

    def _measure_plan(
        self, job: RunningJob, api: client.CustomObjectsApi, status: dict[str, Any], wanted: int, what: str
    ) -> tuple[Measurement, dict[str, Any]]:
        """Medians under one plan, and the status that predicts them. If another plan begins meanwhile, as when slower
        clock changes are seen, that one is measured instead: in its first iterations agents hold clocks up.
        """
        while True:
            begins = status["plan"]["fromIteration"]
            measured = self._measure(job, begins + _PREDICTION_ITERATIONS, wanted, what)
            status = self._await(lambda: found if "predicted" in (found := self._status(api)) else None, "a prediction")
            if status["plan"]["fromIteration"] == begins:
                return measured, status
            self._say(f"another plan from iteration {status['plan']['fromIteration']}: it is measured instead")

    def _before(self, job: RunningJob, iteration: int, dp: int) -> float:
        """Energy of a pipeline in the last iteration of the old plan, in which it waited.

        In the first slow one it may have waited for half of it: a GPU throttles at any moment.
        """
        self._drain(job)
        return j_from_mj(self._iterations[dp, iteration].energy_mj)

    def _first_slow(self, job: RunningJob, dp: int, healthy_s: float, since: int) -> int | None:
        later = [i for i in self._complete(job) if i >= since]
        slow = [i for i in later if s_from_us(self._iterations[dp, i].span_us) > 1.05 * healthy_s]
        return slow[0] if slow else None

    def _job(self, api: client.CustomObjectsApi) -> dict[str, Any] | None:
        try:
            found: Any = api.get_namespaced_custom_object(
                keys.API_GROUP, keys.API_VERSION, _NAMESPACE, keys.PLURAL, self._name
            )
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        return dict(found)

    def _status(self, api: client.CustomObjectsApi) -> dict[str, Any]:
        status: dict[str, Any] = (self._job(api) or {}).get("status", {})
        return status

    @staticmethod
    def _slower(status: dict[str, Any]) -> float:
        """By which share the plan in force is slower than the fastest, on purpose."""
        return float(status.get("plan", {}).get("plannedSlowdown", "0%").rstrip("%")) / 100

    @staticmethod
    def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
        return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})

    def _await_condition(self, api: client.CustomObjectsApi, kind: str) -> dict[str, Any]:
        """The status in which a condition is true."""

        def true() -> dict[str, Any] | None:
            status = self._status(api)
            found = self._condition(status, kind)
            if found.get("reason") in {"SpecInvalid", "ProfileInvalid", "SolveFailed"}:
                raise DemoFailed(f"{kind}: {found['message']}")
            return status if found.get("status") == "True" else None

        return self._await(true, f"condition {kind}")

    def _slowed(self, api: client.CustomObjectsApi) -> dict[str, Any] | None:
        status = self._status(api)
        return status if status.get("stragglers") and self._slower(status) > _ON_PURPOSE else None

    def _planned_for_measured(self, api: client.CustomObjectsApi) -> dict[str, Any] | None:
        """The status once plans are rehearsed under measured clock changes, and applied."""
        status = self._status(api)
        again = "computed again" in self._condition(status, "FrontierReady").get("message", "")
        applied = self._condition(status, "PlanApplied").get("status") == "True"
        measured = status.get("hardware", {}).get("figures") == "Measured"
        return status if measured and applied and not again else None

    def _recovered(self, api: client.CustomObjectsApi) -> dict[str, Any] | None:
        status = self._status(api)
        gone = self._condition(status, "StragglerDetected").get("status") == "False"
        return status if gone and self._slower(status) <= _ON_PURPOSE else None

    def _await(self, seen: Callable[[], T | None], what: str) -> T:
        deadline_s = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = seen()
            if found is not None:
                return found
            time.sleep(0.05)
        raise DemoFailed(f"waited {_TIMEOUT_S:g} s for {what}")

    def _require(self, true: bool, otherwise: str) -> None:
        if not true:
            raise DemoFailed(otherwise)

    # ------------------------------------------------------------------------------------------ details

    def _frontier(self, cluster: SimulatedCluster) -> Frontier:
        """The frontier as the operator has stored it."""
        where = keys.API_GROUP, keys.API_VERSION, _NAMESPACE, keys.FRONTIER_PLURAL, self._manifest["metadata"]["name"]
        stored: Any = client.CustomObjectsApi(cluster.api).get_namespaced_custom_object(*where)
        return Frontier.from_bytes(base64.b64decode(stored["spec"]["data"]))

    def _clocks(self) -> list[int]:
        return sorted({int(clock) for table in self._problem.options for clock in table.frequency_mhz if clock})

    def _config_map(self) -> dict[str, Any]:
        reference = self._manifest["spec"]["profile"]["configMapRef"]
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": reference["name"]},
            "data": {reference.get("key", keys.PROFILE_KEY): self._csv},
        }

    def _shape(self) -> str:
        return f"{self._pipelines} pipelines × {self._stages} stages × {self._microbatches} microbatches"

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._started_s:5.1f} s  {text}"
        self._lines.append(line)
        print(line, flush=True)
