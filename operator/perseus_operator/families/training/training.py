"""What is known of a training job: one part for each feature, and the events that concern several of them.

A part changes only by its own named methods; those below pass an event on to the parts that it concerns:

    the PerseusJob          spec_accepted, restored
    its shape               shape_reported
    pods and agents         pods_observed
    telemetry               rank_joined, rank_left, iteration_reported, baseline_measured
    the profile             profile_accepted
    the frontier            solve_succeeded, frontier_adopted
    decisions of others     guard_updated, canary_judged, plan_measured

Nothing here does I/O, reads a clock or decides what to do. Decisions do not import this module: they take their own
part and ``Facts``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from perseus_core.evidence import Evidence
from perseus_core.evidence import summarise as summarise_evidence
from perseus_core.iteration import IterationReport
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.api.pipeline import Pipeline, ScheduleName
from perseus_operator.families.training.facts import Facts
from perseus_operator.families.training.features.bound.guard import Guard, baseline_wanted
from perseus_operator.families.training.features.canary.state import Canary
from perseus_operator.families.training.features.comparison.state import Comparisons
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.frontier.calibration_progress import CalibrationProgress
from perseus_operator.families.training.features.frontier.input_progress import InputProgress
from perseus_operator.families.training.features.frontier.solve_progress import SolveProgress
from perseus_operator.families.training.features.hardware.hardware import JobHardware
from perseus_operator.families.training.features.hardware.progress import HardwareProgress
from perseus_operator.families.training.features.power.excess import Excess
from perseus_operator.families.training.features.profile.observation import Observation
from perseus_operator.families.training.features.profile.progress import ProfilingProgress
from perseus_operator.families.training.features.profile.sweep import DIGEST_PREFIX
from perseus_operator.families.training.features.stragglers.progress import StragglerProgress
from perseus_operator.families.training.shape import Misfit, ShapeProgress, completed
from perseus_operator.jobs.job import Job
from perseus_operator.nodes.gpu import StoredLatency
from perseus_operator.nodes.iterations import WINDOW, History, JobIteration, Measured, summarise
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import JobRef
from perseus_operator.solving.view import FrontierView, PlannedTimes


@dataclass
class Training:
    """One training job, as far as it is known."""

    job: Job
    shape: ShapeProgress = field(default_factory=ShapeProgress)
    history: History | None = None
    baseline: Measured | None = None
    result: Measured | None = None
    """Iterations under the latest plan in force: what a finished job reports."""
    result_of: tuple[str, int] | None = None
    """Digest of the frontier, and point, under which an earlier operator measured it; None: this one has since."""
    inputs: InputProgress = field(default_factory=InputProgress)
    solve: SolveProgress = field(default_factory=SolveProgress)
    stragglers: StragglerProgress = field(default_factory=StragglerProgress)
    calibration: CalibrationProgress = field(default_factory=CalibrationProgress)
    profiling: ProfilingProgress = field(default_factory=ProfilingProgress)
    hardware: HardwareProgress = field(default_factory=HardwareProgress)
    observation: Observation = field(default_factory=Observation)
    guard: Guard = field(default_factory=Guard)
    comparisons: Comparisons = field(default_factory=Comparisons)
    canary: Canary = field(default_factory=Canary)
    excess: Excess = field(default_factory=Excess)
    power_profiles: tuple[str, ...] | None = None
    """Under which the job is measured; None: not known yet."""

    # --------------------------------------------------------------------------------------------------- the PerseusJob

    def spec_accepted(self, stated: JobSpec) -> None:
        """A valid spec replaces the one before; measurements of another shape are discarded."""
        self.shape.stated_as(stated.pipeline)
        before, spec = self.spec, completed(stated, self.ref.name, self.shape)
        shape = (spec.pipeline.data_parallel, spec.pipeline.stages * spec.pipeline.tensor_parallel)
        if not spec.shape_known:
            self.history = None
        elif self.history is None or (self.history.pipelines, self.history.ranks_per_pipeline) != shape:
            self._restart_history(*shape)
            if before is not None:
                self.baseline, self.comparisons = None, Comparisons()
        if before is not None and (spec.objective, spec.mode) != (before.objective, before.mode):
            self.comparisons.discarded()
            self.canary = Canary()
        observes = before is not None and before.mode is Mode.OBSERVE
        if observes and spec.mode is not Mode.OBSERVE and self.observation.basis is not PlanBasis.PROFILE:
            self._forget_profile()  # good enough for a prediction, not for a plan
        if before is None or spec.profile != before.profile or observes != (spec.mode is Mode.OBSERVE):
            self.inputs.read_requested()
            self.profiling.spec_changed()
        self.job.spec_accepted(stated, spec)

    def shape_reported(self, shape: Pipeline, misfit: Misfit | None = None) -> None:
        """All training processes together report this shape.

        Args:
            shape: theirs; the spec's own if they fit it.
            misfit: why it is that of whole iterations; None: they fit it.
        """
        stated, before, was_whole = self.stated_spec, self.shape.reported, self.shape.misfit is not None
        if not self.shape.all_reported(shape, misfit) or stated is None:
            return
        switched = was_whole != (misfit is not None)
        if switched or (before is not None and replace(before, data_parallel=shape.data_parallel) != shape):
            # Another program runs under the same name: what was made for the one before does not fit.
            self._forget_profile()
        self.inputs.schedule_forgotten()
        self.spec_accepted(stated)
        if switched and self.history is not None:
            self.comparisons, self.canary = Comparisons(), Canary()
            self._restart_history(self.history.pipelines, self.history.ranks_per_pipeline)

    def restored(
        self,
        *,
        baseline: Measured | None,
        guard: Guard | None,
        hardware: JobHardware | None = None,
        shape: ShapeProgress | None = None,
        comparisons: Comparisons | None = None,
        canary: Canary | None = None,
        result: Measured | None = None,
        result_of: tuple[str, int] | None = None,
        power_profiles: tuple[str, ...] | None = None,
    ) -> None:
        """An earlier operator stored these in the status; None: it stored none."""
        self.baseline = baseline or self.baseline
        self.guard = guard or self.guard
        self.shape = shape or self.shape
        self.comparisons = comparisons or self.comparisons
        self.canary = canary or self.canary
        self.result, self.result_of = result or self.result, result_of or self.result_of
        self.power_profiles = power_profiles
        if hardware is not None:
            self.hardware.adopted(hardware)

    # ------------------------------------------------------------------------------------------------- pods and agents

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> None:
        """See ``Job.pods_observed``; iterations of an earlier attempt or run say nothing about another one."""
        finished = self.job.end.finished_at_s is not None
        again = self.job.pods_observed(chosen, agents, wall_s=wall_s)
        if finished and self.job.end.finished_at_s is None:
            self.result = self.result_of = None
        if again and self.history is not None:
            self._restart_history(self.history.pipelines, self.history.ranks_per_pipeline)

    # ------------------------------------------------------------------------------------------------------- telemetry

    def rank_joined(self, node: Node, rank: Rank) -> None:
        """A rank has connected to its agent, or is seen again after a gap in telemetry."""
        if not node.rank_joined(rank):
            return
        self.shape.outdated()
        if self.spec is not None and self.spec.pipeline.schedule is ScheduleName.FROM_RANKS:
            self.inputs.schedule_outdated()
        self.nodes.selections_outdated()
        if self.history is not None and rank.iteration < self.history.latest:
            self._restart_history(self.history.pipelines, self.history.ranks_per_pipeline)

    def _profiles_changed(self) -> bool:
        """Whether other power profiles are enforced than those measured under; then what was measured is discarded."""
        if any(len(node.rank_gpus) < len(node.ranks) for node in self.nodes.values()):
            return False  # some agent describes its GPUs in a moment
        before, self.power_profiles = self.power_profiles, self.nodes.power_profiles
        if before is None or before == self.power_profiles or self.history is None:
            return False
        self.baseline, self.comparisons = None, Comparisons()
        self._restart_history(self.history.pipelines, self.history.ranks_per_pipeline)
        return True

    def rank_left(self, node: Node, rank: Rank) -> None:
        """A rank's process has gone."""
        node.rank_left(rank)

    def iteration_reported(self, node: Node, report: IterationReport) -> JobIteration | None:
        """A rank has finished an iteration.

        Returns:
            The job's iteration if this report completed it; otherwise None.
        """
        spec, frontier = self.spec, self.frontier
        if not node.iteration_reported(report) or self.history is None or spec is None:
            return None
        placed = self.shape.placed(report)
        iteration = None if placed is None else self.history.add(placed)
        if iteration is not None and self._profiles_changed():
            return None
        if iteration is not None and iteration.unplanned and self.nodes.rest_at_default:
            self.history.ran_at_default(iteration)
        if iteration is not None and self.is_typical(iteration):
            self.hardware.iteration_observed(iteration)
        if iteration is None or frontier is None or self.sweeping:
            return iteration
        self.excess.iteration_observed(iteration, frontier, spec.pipeline.tensor_parallel)
        if not self.ranks_comparable:
            return iteration
        # At default clocks a pipeline runs like the fastest plan.
        times_us = frontier.expected_us
        planned_us = {dp: times_us[min(point or 0, len(times_us) - 1)] for dp, point in iteration.points.items()}
        self.stragglers.detector.observe(
            iteration,
            planned_us,
            spec.straggler,
            planned_times=self.solve.planned_times,
            slowed_pipelines=self.nodes.slowed_pipelines,
        )
        return iteration

    def baseline_measured(self) -> Measured | None:
        """Fix the baseline once enough iterations at default clocks are known.

        Returns:
            The new baseline, if it was fixed now; otherwise None.
        """
        wanted = self.baseline_wanted
        if self.baseline is None and self.history is not None and 0 < wanted <= len(self.history.unplanned):
            self.baseline = summarise(self.history.unplanned)
            return self.baseline
        return None

    # -------------------------------------------------------------------------------------- the profile, the frontier

    def profile_accepted(
        self,
        digest: str,
        measured_power_mw: int | None,
        latency: StoredLatency | None = None,
        *,
        gpu_model: str = "",
    ) -> None:
        """A usable profile was read, and what is stored with it: blocking power, switch latency, model of the GPUs."""
        self.inputs.profile_accepted(digest, measured_power_mw, gpu_model=gpu_model)
        self.hardware.latency_read(latency)

    def solve_succeeded(self, frontier: FrontierView, planned_times: PlannedTimes) -> None:
        """There is a new frontier. One that refines a frontier in force is adopted when agents have its plans."""
        refines = self.solve.refining
        self.solve.succeeded(frontier, planned_times)
        if not refines or not self.nodes.selected:
            self.frontier_adopted()

    def frontier_adopted(self) -> None:
        """The coming frontier is in force."""
        self.solve.adopted()
        if self.frontier is not None:
            self.nodes.plans_adopted(self.frontier.digest)

    # ------------------------------------------------------------------------------------------- decisions of others

    def guard_updated(self, guard: Guard) -> None:
        """It was judged whether measured iterations keep the bound."""
        self.guard = guard

    def plan_measured(self, measured: Measured) -> None:
        """Iterations under the plan in force were measured."""
        self.result, self.result_of = measured, None

    def canary_judged(self, canary: Canary) -> None:
        """The plan ran on one pipeline for long enough."""
        self.canary = canary

    def _forget_profile(self) -> None:
        self.solve.forgotten()
        self.calibration.forgotten()
        self.observation.basis_accepted(PlanBasis.PROFILE, "")
        self.inputs.profile_forgotten()

    def _restart_history(self, pipelines: int, ranks_per_pipeline: int) -> None:
        self.history = History(pipelines, ranks_per_pipeline)
        self.excess = Excess()
        self.observation.restarted()
        self.stragglers.restarted()
        self.hardware.restarted()
        self.comparisons.restarted()
        self.guard, self.canary = replace(self.guard, since=0, beside_straggler=-1), replace(self.canary, resume_at=0)

    # ------------------------------------------------------------------------------------------- what follows from it

    @property
    def ref(self) -> JobRef:
        """Of the PerseusJob."""
        return self.job.ref

    @property
    def spec(self) -> JobSpec | None:
        """Of the job, with what it leaves out."""
        spec = self.job.spec
        assert spec is None or isinstance(spec, JobSpec)
        return spec

    @property
    def stated_spec(self) -> JobSpec | None:
        """Of the job, as it was written."""
        stated = self.job.stated_spec
        assert stated is None or isinstance(stated, JobSpec)
        return stated

    @property
    def nodes(self) -> JobNodes:
        """Of the job."""
        return self.job.nodes

    @property
    def frontier(self) -> FrontierView | None:
        """That is in force."""
        return self.solve.frontier

    def facts(self, spec: JobSpec) -> Facts:
        """The facts that decisions take, with the job's spec."""
        return Facts(
            spec=spec,
            nodes=self.nodes,
            history=self.history,
            baseline=self.baseline,
            frontier=self.frontier,
            calibrated=bool(self.calibration.digest_in_use),
            share=self.job.share,
            excess=self.excess.ratio,
        )

    @property
    def evidence(self) -> Evidence:
        """How clocks followed plans in the latest iterations."""
        recent = list(self.history.recent)[-WINDOW:] if self.history else []
        return summarise_evidence(i.evidence for i in recent)

    @property
    def baseline_wanted(self) -> int:
        """How many iterations at default clocks make a baseline; 0: none is wanted."""
        asked = self.spec.baseline_iterations if self.spec else 0
        return baseline_wanted(asked, self.history.unplanned) if self.history else asked

    @property
    def ranks_comparable(self) -> bool:
        """Whether telemetry shows how long pipelines take by themselves: steps and phases that hold the wait for other
        ranks last equally long.
        """
        whole = self.spec is not None and self.spec.pipeline.schedule is ScheduleName.STEPS
        latest = self.history.recent[-1] if self.history and self.history.recent else None
        return not (whole or self.inputs.of_phases) or latest is None or latest.own_time

    @property
    def shape_wanted(self) -> bool:
        """Whether the training processes must be asked for the shape of the job, or whether they fit it."""
        return self.shape.is_wanted(begun=self.nodes.furthest_iteration > 0)

    @property
    def schedule_known(self) -> bool:
        """Whether it is known what the pipelines run."""
        return self.inputs.schedule_known(self.spec)

    @property
    def schedule_wanted(self) -> bool:
        """Whether the training processes must still be asked what they execute."""
        if self.shape_wanted:
            return True
        reported = self.spec is not None and self.spec.pipeline.schedule is ScheduleName.FROM_RANKS
        return reported and self.inputs.schedule_csv is None

    @property
    def sweeping(self) -> bool:
        """Whether an agent stores the clocks of a sweep: points of iterations then belong to no frontier."""
        pushed = (node.plans.pushed for node in self.nodes.values())
        return any(plans is not None and plans.digest.startswith(DIGEST_PREFIX) for plans in pushed)

    @property
    def single_ranks_wanted(self) -> bool:
        """Whether energies of single instructions are measured, which agents report for single ranks alone."""
        spec, sweep = self.spec, self.profiling.sweep
        return spec is None or spec.mode is Mode.OBSERVE or (sweep is not None and not sweep.finished)

    @property
    def blocking_power_mw(self) -> int:
        """Of one GPU while it waits: the spec's, or as measured with the profile."""
        given = self.spec.profile.blocking_power_milliwatts if self.spec else None
        return given if given is not None else self.inputs.measured_power_mw or 0

    @property
    def without_plan(self) -> Measured | None:
        """What an iteration takes at default clocks, as measured last; None: not measured."""
        return self.comparisons.reference or self.baseline

    def is_typical(self, iteration: JobIteration) -> bool:
        """Whether an iteration shows how the job runs: no start, no transition, no straggler."""
        planned = any(point is not None for point in iteration.points.values())
        since = self.nodes.plan_since if planned else 1
        usual = not iteration.mixed and not self.stragglers.detector.slowdowns and not self.sweeping
        return usual and iteration.iteration >= max(1, since)
