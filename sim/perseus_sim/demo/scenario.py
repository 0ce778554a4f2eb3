"""``make demo``: runs the whole system on this machine, prints what happens, and ends with 0 only if all of it
happened.

What is printed comes from three sources: the PerseusJob's status as any user reads it, the counters of the simulated
GPUs (not the agent's telemetry), and the GPUs' clocks (``observer``). The parts of the system are in
``perseus_sim.cluster.simulated_cluster``. Simulated GPUs, their drivers and hosts are ``SPEED`` times as fast as what
they simulate (``time_scale``); nothing else is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from perseus_agent.devices.base import EventReason
from perseus_core import keys
from perseus_core.units import mw_from_w, s_from_ms, us_from_s, w_from_mw
from perseus_sim.cluster.simulated_cluster import RunningJob, SimulatedCluster
from perseus_sim.demo.observer import DemoFailed, Observer, condition
from perseus_sim.demo.report import against_text, measured_text, savings_text, share_text, write_report
from perseus_sim.demo.results import Estimate, Measurement, PlanRun, Results
from perseus_sim.demo.time_scale import TimeScale
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import profile_csv
from perseus_sim.training.hosts import Framework, Hosts
from perseus_solver.cli.files import read_file
from perseus_solver.comparison.baselines import all_maximum
from perseus_solver.errors import InvalidProfile
from perseus_solver.model.problem import Problem, build_problem
from perseus_solver.model.profile import MAX_BYTES, read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.model.simulator import Simulator
from perseus_solver.schedules import build_schedule

REPOSITORY = Path(__file__).resolve().parents[3]
SAMPLE = REPOSITORY / "deploy" / "samples" / "perseusjob.yaml"
CRDS = REPOSITORY / "deploy" / "crds"
SPEED: Final = 4
"""An instruction of 36 ms takes 9 ms then, and a clock change of 30 ms takes 7.5: still many times what agents on two
cores are late by."""

_ON_PURPOSE: Final = 0.02
"""A plan beside a straggler is slower by more than this share, one for no slowdown by less."""
_TOLERANCE: Final = 0.01
"""Measured against predicted, as a share of the iteration at default clocks."""
_CALIBRATED_WITHIN: Final = 0.005
"""Predicted against measured iteration time, once the operator has calibrated the delays between computations."""
_CALIBRATED: Final = 0.002
"""A frontier whose fastest plan takes longer than the profile says by more than this share knows of delays."""
_BETWEEN: Final = 0.012
"""Of the fastest iteration, spent between iterations (optimizer, synchronisation of gradients); no profile contains
it."""
_MESSAGE: Final = 0.0004
"""Of the fastest iteration, spent on every message between stages; likewise."""
_THROTTLE: Final = 0.65
"""Clock of the throttled GPU over the highest that its power limit leaves: some twenty per cent slower."""
_FIRST: Final = 3
"""The first iterations say nothing: processes connect to their agents."""
_SLOW: Final = 1.05
"""A pipeline that takes so many times as long as before is slow."""


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
        self._blocking_power_w = blocking_power_w
        self._name: str = self._manifest["metadata"]["name"]
        self._pipelines: int = pipeline["dataParallel"]
        self._csv = _text_of(options.profile) if options.profile else profile_csv(self._stages, options.gpu_model)
        self._driver = options.gpu_model
        self._scale = TimeScale(SPEED)
        self._problem = self._problem_of(self._csv)
        self._simulated = self._problem_of(self._scale.profile(self._csv))
        self._fastest_s = float(Simulator(self._problem).run(all_maximum(self._problem)).iteration_time_s)
        self._started_s = time.monotonic()
        self._lines: list[str] = []

    def _problem_of(self, csv: str) -> Problem:
        pipeline = self._manifest["spec"]["pipeline"]
        schedule = build_schedule(pipeline["schedule"].lower(), stages=self._stages, microbatches=self._microbatches)
        measured = read_profile(csv, stages=self._stages)
        return build_problem(measured, schedule, blocking_power_w=self._blocking_power_w)

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
        see = Observer(cluster.api, self._name, job, self._pipelines, self._scale)
        baseline = self._baseline(see)
        first = self._plan(see, cluster, baseline)
        calibrated = self._calibrate(see, baseline, first)
        straggler = self._throttle(see, job)
        in_force, point, frontier = self._recover(see, job, calibrated)
        results = Results(
            title=self._shape(),
            gpu=self._gpu.name.removesuffix(" (simulated)"),
            speed=SPEED,
            problem=self._problem,
            baseline=baseline,
            first=first,
            calibrated=calibrated,
            beside_straggler=straggler,
            in_force=in_force,
            frontier=frontier,
            point=point,
            ran_default=see.executed(baseline),
            ran_plan=see.executed(in_force.measured),
        )
        self._say(f"the plan in force, {savings_text(results)}")
        self._check(results)
        self._release(see, job, cluster)
        for path in write_report(results, self._output, self._lines):
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
                speed=SPEED,
            )
        hosts = Hosts(Framework.PYTORCH)
        return cluster.start_job(
            self._name,
            self._simulated,
            pipelines=self._pipelines,
            hosts=replace(hosts, launch_s=hosts.launch_s / SPEED),
            synchronisation_us=us_from_s(_BETWEEN * self._fastest_s / SPEED),
            delay_us=us_from_s(_MESSAGE * self._fastest_s / SPEED),
        )

    def _baseline(self, see: Observer) -> Measurement:
        self._say(f"training at default clocks: {self._shape()}")
        self._say(
            f"GPUs and hosts are simulated {SPEED} times as fast as real ones: what is said of time and energy is that "
            f"of {self._gpu.name.removesuffix(' (simulated)')} at its own speed, {SPEED} times what passes here"
        )
        baseline = see.measure(_FIRST, "training at default clocks")
        assert baseline is not None
        self._say(f"baseline: {measured_text(baseline)}")
        off = baseline.time_s.against(Estimate(self._fastest_s, 0.0))
        self._say(
            f"the profile predicts {self._fastest_s:.4g} s, {share_text(off)} off: it does not contain what happens "
            "between computations"
        )
        self._require(off.low > _CALIBRATED_WITHIN, "the simulated job has no delays that could be calibrated")
        return baseline

    def _plan(self, see: Observer, cluster: SimulatedCluster, baseline: Measurement) -> PlanRun:
        """A PerseusJob is applied: a plan is made of its profile, for clock changes as published for the GPU model."""
        cluster.apply(self._config_map())
        cluster.apply(self._manifest)
        self._say(f"applied {SAMPLE.relative_to(REPOSITORY)} and its ConfigMap through the API")
        see.wait_condition("ProfileReady")
        name = self._manifest["spec"]["profile"]["configMapRef"]["name"]
        clocks = len(self._clocks())
        self._say(f"profile found: ConfigMap {name}, {self._stages} stages, {clocks} clocks")
        status = see.wait_condition("FrontierReady")
        solve_s = s_from_ms(status["frontier"]["solveMilliseconds"])
        self._say(f"frontier solved in {solve_s:.2f} s: {status['frontier']['points']} points")
        status = see.wait(see.applied, "a plan in force")
        self._say(f"plan pushed: point {status['plan']['point']}, from iteration {status['plan']['fromIteration']}")
        return self._measure(see, status, "the first plan", baseline)[0]

    def _calibrate(self, see: Observer, baseline: Measurement, first: PlanRun) -> PlanRun:
        """The operator measures clock changes and calibrates the delays that the profile lacks; it plans for both."""

        def measured() -> dict[str, Any] | None:
            hardware: dict[str, Any] = see.status().get("hardware", {})
            return hardware if hardware.get("figures") == "Measured" else None

        def learned() -> dict[str, Any] | None:
            status = see.planned()
            return status if status and self._knows_delays(see.frontier(status)) else None

        hardware = see.wait(measured, "clock changes to be measured")
        median_s, p99_s = (self._scale.s(hardware[f"switchLatency{which}Microseconds"]) for which in ("Median", "P99"))
        self._say(f"clock changes measured: {1000 * median_s:.0f} ms, 99 of 100 within {1000 * p99_s:.0f} ms")
        calibration = see.wait_condition("ModelExplains")["calibration"]
        self._say(
            f"calibrated on {calibration['iterations']} iterations: mean error on those held out "
            f"{calibration['heldOutError']}, without calibration {calibration['uncalibratedError']}"
        )
        status = see.wait(learned, "a plan for what was learned")
        plan = status["plan"]
        self._say(
            f"planned for both: point {plan['point']} of {status['frontier']['points']}, grain {plan['grain']}, from "
            f"iteration {plan['fromIteration']}"
        )
        run, status = self._measure(see, status, "the calibrated plan", baseline)
        off = run.measured.time_s.against(Estimate(run.predicted.time_s, 0.0))
        self._require(
            off.within(_CALIBRATED_WITHIN), f"the calibrated prediction does not come true: {share_text(off)} off"
        )
        more = run.measured.time_s.against(first.measured.time_s)
        self._require(more.low <= _TOLERANCE, "the calibrated plan is slower than the first one")
        return run

    def _knows_delays(self, frontier: Frontier | None) -> bool:
        """Whether a frontier holds more than the profile: the fastest plan takes longer than the profile says."""
        rehearsed = None if frontier is None else frontier.rehearsed
        return rehearsed is not None and float(rehearsed.ideal_time_s[0]) > (1 + _CALIBRATED) * self._fastest_s

    def _throttle(self, see: Observer, job: RunningJob) -> Measurement:
        """A GPU of the last pipeline gets hot, and the other pipelines slow down.

        It does so once plans no longer change: of the first iterations under a new plan, in which agents hold clocks
        up, none shows how slow a pipeline is.
        """
        slow, clocks = self._pipelines - 1, self._clocks()
        reached_mhz = min(clocks[-1], self._gpu.effective_mhz(self._gpu.max_clock_mhz))
        limit = min(clocks, key=lambda clock: abs(clock - _THROTTLE * reached_mhz))
        since = see.complete()[-1]
        healthy_s = [see.span_s(pipeline, since) for pipeline in range(self._pipelines)]

        def first_slow(pipeline: int) -> int | None:
            later = (i for i in see.complete() if i > since and see.span_s(pipeline, i) > _SLOW * healthy_s[pipeline])
            return next(later, None)

        def slowed() -> dict[str, Any] | None:
            status = see.planned()
            stragglers = status and status.get("stragglers")
            return status if status and stragglers and _slower(status) > _ON_PURPOSE else None

        job.gpus[slow][self._stages // 2].cap(limit, EventReason.HARDWARE_THERMAL.value)
        self._say(f"a GPU of pipeline {slow} throttles to {limit} MHz (thermal)")
        first = see.wait(lambda: first_slow(slow), "a slow iteration of the throttled pipeline")
        status = see.wait_condition("StragglerDetected")
        self._say(f"straggler detected: {condition(status, 'StragglerDetected')['message']}")
        status = see.wait(slowed, "a new plan for the other pipelines")
        adapted = see.wait(lambda: first_slow(0), "an iteration of pipeline 0 that is slow on purpose")
        self._say(
            f"new plan on the other pipeline: {_slower(status):.1%} slower on purpose; it runs it in iteration "
            f"{adapted}, the first slow one was {first}"
        )
        self._require(adapted > first, "the other pipeline slowed down before the throttled one")
        under, status = see.measure_plan(status, "training beside the straggler", self._say)
        # Of the first slow iteration it may have waited for a part only: a GPU throttles at any moment.
        waited = range(min(first + 1, adapted - 1), adapted)
        waited_j = min(see.energy_j(0, waited))
        self._say(
            f"beside the straggler: {measured_text(under)}; pipeline 0 takes {under.of_pipeline[0].median:,.0f} J, and "
            f"{waited_j:,.0f} J while it waited"
        )
        self._require(under.of_pipeline[0].high < waited_j, "the other pipeline saved nothing beside the straggler")
        return under

    def _recover(self, see: Observer, job: RunningJob, calibrated: PlanRun) -> tuple[PlanRun, int, Frontier]:
        """The GPU cools down, and all pipelines return to the plan. Returns it, and where on which frontier it is."""

        def recovered() -> dict[str, Any] | None:
            status = see.planned()
            gone = status and condition(status, "StragglerDetected").get("status") == "False"
            return status if status and gone and _slower(status) <= _ON_PURPOSE else None

        job.gpus[self._pipelines - 1][self._stages // 2].cap(0)
        self._say("the GPU has cooled down")
        status = see.wait(recovered, "the return to the first plan")
        plan = status["plan"]
        self._say(f"straggler recovered: back to point {plan['point']} from iteration {plan['fromIteration']}")
        measured, status, frontier = see.measure_plan_of_frontier(status, "training after the straggler", self._say)
        self._say(f"after the straggler: {measured_text(measured)}")
        again = measured.time_s.against(calibrated.measured.time_s)
        self._require(again.within(_TOLERANCE), "the iteration time did not return after the straggler")
        return PlanRun(see.prediction(status), measured), status["plan"]["point"], frontier

    def _check(self, results: Results) -> None:
        """Check the plan that stays against default clocks, and what was predicted of it."""
        self._require(results.saved.low > 0, "the plan saves no energy")
        off = Estimate(results.saved.median - results.in_force.predicted.saved, results.saved.margin)
        self._require(
            off.within(_TOLERANCE), f"measured and predicted savings differ by {share_text(off)} of the baseline"
        )
        self._require(
            results.slower.high <= _TOLERANCE, f"the plan slows training by more than 1 %: {share_text(results.slower)}"
        )

    def _release(self, see: Observer, job: RunningJob, cluster: SimulatedCluster) -> None:
        see.delete()
        gpus = [gpu for node in cluster.nodes.values() for gpu in node.gpus]
        see.wait(lambda: see.read() is None or None, "the PerseusJob to be gone")
        see.wait(lambda: all(gpu.locked_mhz == 0 for gpu in gpus) or None, "every GPU at its default clocks")
        at = job.training.iteration
        see.wait(lambda: job.training.iteration > at + 1 or None, "training to go on")
        self._require(job.training.failure is None, f"training failed: {job.training.failure}")
        self._say(f"PerseusJob deleted: all {len(gpus)} GPUs at their default clocks; training goes on undisturbed")
        cluster.stop_job(job)

    def _measure(
        self, see: Observer, status: dict[str, Any], what: str, baseline: Measurement
    ) -> tuple[PlanRun, dict[str, Any]]:
        """Measure a plan and say what it saves."""
        measured, status = see.measure_plan(status, f"training under {what}", self._say)
        run = PlanRun(see.prediction(status), measured)
        self._say(f"under {what}: {measured_text(measured)}, {against_text(run, baseline)}")
        return run, status

    def _require(self, true: bool, otherwise: str) -> None:
        if not true:
            raise DemoFailed(otherwise)

    # ------------------------------------------------------------------------------------------ details

    def _clocks(self) -> list[int]:
        return sorted({int(clock) for table in self._problem.options for clock in table.frequency_mhz if clock})

    def _config_map(self) -> dict[str, Any]:
        reference = self._manifest["spec"]["profile"]["configMapRef"]
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": reference["name"]},
            "data": {reference.get("key", keys.PROFILE_KEY): self._scale.profile(self._csv)},
        }

    def _shape(self) -> str:
        return f"{self._pipelines} pipelines × {self._stages} stages × {self._microbatches} microbatches"

    def _say(self, text: str) -> None:
        line = f"{time.monotonic() - self._started_s:5.1f} s  {text}"
        self._lines.append(line)
        print(line, flush=True)


def _text_of(profile: Path) -> str:
    data = read_file("profile", profile, MAX_BYTES, InvalidProfile)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidProfile(f"profile {profile} is not UTF-8 text (byte {error.start})") from None


def _slower(status: dict[str, Any]) -> float:
    """Return by which share the plan in force is slower than the fastest, on purpose."""
    return float(status.get("plan", {}).get("plannedSlowdown", "0%").rstrip("%")) / 100
