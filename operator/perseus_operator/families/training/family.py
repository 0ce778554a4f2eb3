"""Training: plans of the time-energy frontier, one clock for each instruction, that follow stragglers and a bound.

What is known is in ``Training``, what to do is decided by ``decide``; here the two meet what does the work: inputs are
read, frontiers solved, profiles measured, models calibrated. Each outcome is an event of a part of ``Training``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from perseus_core import keys
from perseus_core.hardware import Hardware
from perseus_core.iteration import IterationReport
from perseus_core.latency import SwitchLatency
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import NO_PIPELINE, Pipeline, ScheduleName
from perseus_operator.budgets.member import Member
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.decide import TrainingDecision, decide
from perseus_operator.families.training.features.bound.aim import current_target
from perseus_operator.families.training.features.canary.state import JudgeCanary
from perseus_operator.families.training.features.comparison.state import BeginComparison, EndComparison, ResumePlan
from perseus_operator.families.training.features.frontier.inputs import Calibrate, ReadInputs, Solve
from perseus_operator.families.training.features.power.member import training_member
from perseus_operator.families.training.features.profile.decision import BeginSweep, SaveSweep, StoreProfile
from perseus_operator.families.training.features.stragglers.annotation import parse_annotation
from perseus_operator.families.training.shape import Misfit, shape_of_ranks
from perseus_operator.families.training.status import status
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.status.events import baseline_event, discarded_event, plan_event
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work.calibrator import Calibrator
from perseus_operator.families.training.work.frontier_loader import FrontierLoader
from perseus_operator.families.training.work.observer import Observer
from perseus_operator.families.training.work.profiler import Profiler
from perseus_operator.families.training.work.solve_inputs import SolveInputs
from perseus_operator.jobs.family import Family, Plans, PlanSource, Surroundings
from perseus_operator.jobs.report import JobReport
from perseus_operator.nodes.actions import Push
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Now
from perseus_operator.solving.frontier import SolvedFrontier
from perseus_operator.solving.request import schedule_of


class TrainingFamily(Family):
    """One training job."""

    def __init__(self, surroundings: Surroundings) -> None:
        job, services = surroundings.job, surroundings.services
        self.training = Training(job)
        self._services = services
        self._wake = surroundings.wake
        self._spawn = surroundings.spawn
        self._trace = surroundings.trace
        self._annotation: str | None = None
        self._bound_us = math.inf
        """Of an iteration, as decided last."""
        self._calibrator = Calibrator(self.training, services)
        self._profiler = Profiler(self.training, services)
        self._observer = Observer(self.training, services)
        self._inputs = SolveInputs(self.training, services, self._calibrator, self._profiler, self._observer)
        self._frontier = FrontierLoader(self.training, services)

    @property
    def solved(self) -> SolvedFrontier | None:
        """The frontier in force with its plans; None: there is none."""
        return self._frontier.solved

    @property
    def plan_source(self) -> PlanSource:
        """See ``Family``."""
        return self

    # --------------------------------------------------------------------------------------------------------- observe

    def spec_accepted(self, spec: JobSpec) -> None:
        """See ``Family``."""
        self.training.spec_accepted(spec)

    def annotations_observed(self, annotations: Mapping[str, str]) -> None:
        """Take in the stragglers that users declare."""
        text = annotations.get(keys.ANNOTATION_STRAGGLER, "")
        if text == self._annotation:
            return
        self._annotation, stragglers = text, self.training.stragglers
        try:
            declarations = parse_annotation(text)
        except InvalidSpec as error:
            stragglers.declarations_rejected(Explanation(Reason.ANNOTATION_INVALID, str(error)))
        else:
            stragglers.declarations_observed(declarations, now_s=self._services.monotonic_s())

    def restored(self, written: Mapping[str, Any]) -> None:
        """See ``Family``."""
        now_s, wall_s = self._services.monotonic_s(), self._services.wall_s()
        restore_from_status(self.training, written, now_s=now_s, wall_s=wall_s)

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> None:
        """See ``Family``."""
        self.training.pods_observed(chosen, agents, wall_s=wall_s)

    def rank_joined(self, node: Node, rank: Rank) -> None:
        """See ``Family``."""
        self.training.rank_joined(node, rank)

    def reported(self, node: Node, report: IterationReport) -> bool | None:
        """Take in an iteration of one rank. A straggler is urgent, and so is an iteration beyond the bound."""
        training = self.training
        detector = training.stragglers.detector
        slowdowns = detector.slowdowns
        if (placed := training.shape.placed(report)) is not None:
            self._profiler.observe(node, placed, self._inputs.schedule)
            self._observer.observe(placed, self._inputs.schedule)
        iteration = training.iteration_reported(node, report)
        if iteration is None:
            # Whether processes fit a shape that the spec states is looked at when leases are renewed.
            return False if training.shape_wanted and training.shape.stated is NO_PIPELINE else None
        self._services.metrics.count_iteration(training.ref, iteration.energy_mj, training.without_plan)
        self._calibrator.record(iteration, self.solved)
        self._profiler.observe_drift(iteration, self.solved, self._inputs.profile)
        return training.stragglers.detector.slowdowns != slowdowns or iteration.time_us > self._bound_us

    @property
    def single_ranks_wanted(self) -> bool:
        """See ``Family``."""
        return self.training.single_ranks_wanted

    @property
    def schedules_wanted(self) -> bool:
        """See ``Family``."""
        return self.training.schedule_wanted

    @property
    def schedule(self) -> object:
        """See ``Family``."""
        return self.training.inputs.schedule_csv, self.training.inputs.schedule_fault

    async def schedules_declared(self) -> None:
        """See ``Family``."""
        await self._inputs.collect_schedule()

    # ---------------------------------------------------------------------------------------------------------- decide

    def decide(self, now: Now) -> TrainingDecision:
        """See ``Family``."""
        self._take_shape()
        decision = decide(self.training, now, self._services.limits)
        if decision.adopt:  # decided again, for what is reported must be of one frontier
            self._frontier.adopt()
            decision = decide(self.training, now, self._services.limits)
        self._bound_us = decision.bound_us or math.inf
        self.training.guard_updated(decision.guard)
        self.training.hardware.adopted(decision.hardware)
        return decision

    def _take_shape(self) -> None:
        """Plan for the shape that the training processes report, where the spec leaves it to them or they do not fit
        it.
        """
        training = self.training
        stated = training.shape.stated
        if stated is None or not training.shape_wanted or not self._inputs.comparable(stated):
            return
        shape = shape_of_ranks(training.job, stated)
        if isinstance(shape, Misfit):
            training.shape_reported(shape.shape, shape)
        elif isinstance(shape, Pipeline) and shape.schedule is ScheduleName.STEPS:
            training.shape_reported(shape)
        elif isinstance(shape, Pipeline):
            training.shape.comparison_started()
            self._spawn(self._inputs.compare(shape), None)

    def act(self, decision: TrainingDecision) -> None:
        """See ``Family``."""
        for action in decision.actions:
            self._STARTS[type(action)](self, action)

    def _read_inputs(self, _: ReadInputs) -> None:
        self.training.inputs.read_started()
        self._spawn(self._inputs.read(), self._trace.step("read inputs"))

    def _solve(self, action: Solve) -> None:
        self.training.solve.started(action.digest, action.basis)
        work = self._frontier.load(action.digest, self._inputs.request(), self._inputs.parsed)
        self._spawn(work, self._trace.step("solve", **{"perseus.frontier.digest": action.digest}))

    def _calibrate(self, _: Calibrate) -> None:
        self.training.calibration.run_started()
        work = self._calibrator.calibrate(self._inputs.request(), self._inputs.profile)
        self._spawn(work, self._trace.step("calibrate"))

    def _compare(self, action: BeginComparison | ResumePlan | EndComparison) -> None:
        self.training.comparisons.decided(action, iteration=self.training.nodes.furthest_iteration)
        self._wake.now()

    def _judge_canary(self, action: JudgeCanary) -> None:
        self.training.canary_judged(action.verdict)
        self._wake.now()

    def _begin_sweep(self, action: BeginSweep) -> None:
        self._profiler.begin(action.sweep)
        self._wake.now()

    def _store_measured(self, action: SaveSweep | StoreProfile) -> None:
        self.training.profiling.write_started()
        self._spawn(self._profiler.write(action), None)

    _STARTS: ClassVar[Mapping[type, Callable[[TrainingFamily, Any], None]]] = {
        ReadInputs: _read_inputs,
        Solve: _solve,
        Calibrate: _calibrate,
        BeginComparison: _compare,
        ResumePlan: _compare,
        EndComparison: _compare,
        JudgeCanary: _judge_canary,
        BeginSweep: _begin_sweep,
        SaveSweep: _store_measured,
        StoreProfile: _store_measured,
    }

    async def plans(self, action: Push) -> Plans:
        """See ``PlanSource``: of a frontier, in force or coming, or the clocks of a sweep."""
        solved = self._frontier.find(action.plans)
        if solved is not None:
            plan_set = await self._services.cache.plan_set(solved, action.stages)
        else:
            schedule = partial(schedule_of, self._inputs.request(), self._inputs.parsed)
            plan_set = await asyncio.to_thread(self._profiler.plan_set, action.stages, schedule)
        return Plans(plan_set, self._changes(solved, plan_set.clocks_mhz))

    def _changes(self, solved: SolvedFrontier | None, clocks_mhz: Iterable[int]) -> dict[int, SwitchLatency]:
        """How long changes to these clocks take under which a frontier was rehearsed; for plans that were not rehearsed
        what is known now.
        """
        hardware: Hardware | None = self.training.hardware.in_use
        if solved is not None and solved.view.hardware:
            hardware = Hardware.from_json(solved.view.hardware)
        clocks = hardware.clocks if hardware is not None else {}
        return {mhz: clocks[mhz] for mhz in clocks_mhz if mhz in clocks}

    def follows(self, digest: str) -> bool:
        """See ``PlanSource``."""
        frontier = self.training.frontier
        return frontier is not None and frontier.digest == digest

    def member(self, now: Now, *, settled: bool) -> Member:
        """See ``Family``."""
        training, spec = self.training, self.training.spec
        assert spec is not None
        target = current_target(spec, training.frontier, training.nodes.furthest_iteration, now)
        return training_member(str(training.ref), training.facts(spec), target, settled=settled)

    # ---------------------------------------------------------------------------------------------------------- report

    def report(self, decision: TrainingDecision) -> JobReport:
        """See ``Family``."""
        training = self.training
        baseline = training.baseline_measured()
        measured = status.current_measurement(training, decision)
        if measured is not None:
            training.plan_measured(measured)
        return JobReport(
            conditions=conditions_of(training, decision),
            figures=status.figures(training, decision),
            measured=measured,
            planned_slowdown=status.planned_slowdown(training, decision),
            announces=bool(decision.wanted) and (decision.applied or decision.profiling is not None),
            in_force=training.nodes.driven,
            stragglers=len(decision.slowdowns),
            quality=training.calibration.quality,
            evidence=training.evidence,
            curve=status.curve(training),
            plan=decision.wanted if decision.applied else {},
            plan_event=partial(plan_event, training, decision),
            changes=partial(discarded_event, training),
            events=[] if baseline is None else [baseline_event(baseline)],
        )
