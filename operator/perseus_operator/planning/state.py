"""Everything that is known about one job. The planner reads it and changes nothing.

Fields are read everywhere and changed only by the named methods below, one for each event; ``Node``, ``JobEnd``,
``Comparisons``, ``Observation`` and the four ``…Progress`` do the same for their part. Nothing here does I/O, reads a
clock or decides what to do. The events:

    the PerseusJob          generation_observed, class_observed, spec_accepted, spec_rejected, restored,
                            declarations_observed, declarations_rejected
    its shape               shape_learned
    pods and agents         pods_observed, node_forgotten
    telemetry               rank_joined, rank_left, iteration_reported, baseline_measured
    the profile             profile_accepted
    the frontier            solve_started, solve_succeeded, solve_failed, solve_ended, frontier_adopted
    decisions of others     guard_updated, canary_judged, hardware_adopted, draw_published, share_granted, fenced_by,
                            epoch_raised
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from perseus_operator.api.conditions import Explanation
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.api.pipeline import NO_PIPELINE, Pipeline, ScheduleName
from perseus_operator.api.power_status import DrawStatus
from perseus_operator.objects import JobRef, Pod
from perseus_operator.planning.bound_guard import Guard, baseline_wanted
from perseus_operator.planning.calibration_progress import CalibrationProgress
from perseus_operator.planning.canary import Canary
from perseus_operator.planning.comparisons import Comparisons
from perseus_operator.planning.evidence import Evidence
from perseus_operator.planning.evidence import summarise as summarise_evidence
from perseus_operator.planning.gpu import Gpu, StoredLatency
from perseus_operator.planning.hardware import Hardware
from perseus_operator.planning.hardware_progress import HardwareProgress
from perseus_operator.planning.input_progress import InputProgress
from perseus_operator.planning.iterations import WINDOW, History, JobIteration, Measured, Report, summarise
from perseus_operator.planning.lifecycle import JobEnd
from perseus_operator.planning.node import Node, Rank
from perseus_operator.planning.node_plans import NodePlans
from perseus_operator.planning.objective import FrontierView
from perseus_operator.planning.observation import Basis, Observation
from perseus_operator.planning.power_allocation import Share
from perseus_operator.planning.profiling.progress import ProfilingProgress
from perseus_operator.planning.profiling.sweep import DIGEST_PREFIX
from perseus_operator.planning.stragglers.annotation import Declaration
from perseus_operator.planning.stragglers.declared import DeclaredStraggler
from perseus_operator.planning.stragglers.detector import PlannedTimes, StragglerDetector

SLOWING_EVENTS: Final = frozenset({"THERMAL_SLOWDOWN", "POWER_BRAKE", "HARDWARE_SLOWDOWN"})
"""Kinds of GPU events that explain a slow iteration. A power cap does not: on many GPUs it is always active."""


@dataclass
class JobState:
    """Everything the planner may look at. A ``*_fault`` is None while there is none."""

    ref: JobRef
    generation: int = 0
    stated_spec: JobSpec | None = None
    """The last accepted one."""
    spec: JobSpec | None = None
    """The same with what it leaves out: its profile, and its shape once that is known."""
    shape: Pipeline | None = None
    """As the training processes report it; None: not known, or the spec has it."""
    shape_outdated: bool = True
    """Whether processes have joined since the shape was learned."""
    spec_fault: Explanation | None = None
    declared_stragglers: tuple[DeclaredStraggler, ...] = ()
    declaration_fault: Explanation | None = None
    inputs: InputProgress = field(default_factory=InputProgress)
    frontier: FrontierView | None = None
    planned_times: PlannedTimes | None = None
    """What the frontier's plans say about single instructions."""
    coming: FrontierView | None = None
    """A refined frontier that agents are being sent; until they have it, the one in force serves."""
    coming_times: PlannedTimes | None = None
    frontier_basis: str = ""
    """Digest of what users gave for the frontier: its inputs without what was measured since."""
    solving: str | None = None
    """Digest of the inputs being solved."""
    solving_basis: str = ""
    """As ``frontier_basis``, of the inputs being solved."""
    solve_fault: tuple[str, Explanation] | None = None
    """Digest of the inputs that could not be solved, and why."""
    nodes: dict[str, Node] = field(default_factory=dict)
    selections: dict[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Points that nodes run, by name of the node; see ``NodePlans.selected``."""
    energy_class: str = ""
    """EnergyClass that the PerseusJob is labelled with; empty: none. A tenant may write that."""
    attempt: str = ""
    """Which attempt of the workload the pods belong to; empty: not known."""
    excluded_pods: Mapping[str, int] = field(default_factory=dict)
    """Why pods that opted in do not belong to the job, and how many."""
    failed_pod: Pod | None = None
    """The youngest that opted in and failed."""
    end: JobEnd = field(default_factory=JobEnd)
    history: History | None = None
    detector: StragglerDetector = field(default_factory=StragglerDetector)
    calibration: CalibrationProgress = field(default_factory=CalibrationProgress)
    profiling: ProfilingProgress = field(default_factory=ProfilingProgress)
    hardware: HardwareProgress = field(default_factory=HardwareProgress)
    observation: Observation = field(default_factory=Observation)
    guard: Guard = field(default_factory=Guard)
    comparisons: Comparisons = field(default_factory=Comparisons)
    canary: Canary = field(default_factory=Canary)
    baseline: Measured | None = None
    share: Share | None = None
    """Of a PowerBudget; None: no budget selects the job."""
    draw: DrawStatus | None = None
    """What another replica must know to share a PowerBudget with the job; None: no other one shares any."""
    fenced: Explanation | None = None
    raised_epoch: int = 0
    """Drawn for this job, because an agent had seen the operator's or a higher one; 0: none was."""

    # --------------------------------------------------------------------------------------------------- the PerseusJob

    def generation_observed(self, generation: int) -> None:
        """The PerseusJob was observed at this generation."""
        self.generation = generation

    def class_observed(self, energy_class: str) -> None:
        """The PerseusJob is labelled with this EnergyClass; empty: with none."""
        self.energy_class = energy_class

    def spec_accepted(self, spec: JobSpec) -> None:
        """A valid spec replaces the one before; measurements of another shape are discarded."""
        self.stated_spec, spec = spec, spec.completed(self.ref.name, self.shape)
        shape = (spec.pipeline.data_parallel, spec.pipeline.stages * spec.pipeline.tensor_parallel)
        if not spec.shape_known:
            self.history = None
        elif self.history is None or (self.history.pipelines, self.history.ranks_per_pipeline) != shape:
            self._restart_history(*shape)
            if self.spec is not None:
                self.baseline, self.comparisons = None, Comparisons()
        if self.spec is not None and (spec.objective, spec.mode) != (self.spec.objective, self.spec.mode):
            self.comparisons.discarded()
            self.canary = Canary()
        observes = self.spec is not None and self.spec.mode is Mode.OBSERVE
        if observes and spec.mode is not Mode.OBSERVE and self.observation.basis is not Basis.PROFILE:
            self._forget_profile()  # good enough for a prediction, not for a plan
        if self.spec is None or spec.profile != self.spec.profile or observes != (spec.mode is Mode.OBSERVE):
            self.inputs.read_requested()
            self.profiling.spec_changed()
        self.spec = spec
        self.spec_fault = None

    def spec_rejected(self, fault: Explanation) -> None:
        """The spec breaks a rule; the last accepted one stays in force."""
        self.spec_fault = fault

    def declarations_observed(self, declarations: Iterable[Declaration], *, now_s: float) -> None:
        """The annotation declares these stragglers. Editing one entry does not restart the delay of another.

        Args:
            declarations: all entries of the annotation.
            now_s: monotonic; the delay of a new entry counts from here.
        """
        known = {straggler.declaration: straggler for straggler in self.declared_stragglers}
        self.declared_stragglers = tuple(known.get(entry, DeclaredStraggler(entry, now_s)) for entry in declarations)
        self.declaration_fault = None

    def declarations_rejected(self, fault: Explanation) -> None:
        """The annotation breaks a rule; what it declared before stays in force."""
        self.declaration_fault = fault

    def shape_learned(self, shape: Pipeline) -> None:
        """All training processes together report this shape."""
        before, self.shape, self.shape_outdated = self.shape, shape, False
        if shape == before or self.stated_spec is None:
            return
        if before is not None and replace(before, data_parallel=shape.data_parallel) != shape:
            # Another program runs under the same name: what was made for the one before does not fit.
            self._forget_profile()
        self.inputs.schedule_outdated()
        self.spec_accepted(self.stated_spec)

    def restored(
        self,
        *,
        baseline: Measured | None,
        guard: Guard | None,
        hardware: Hardware | None = None,
        shape: Pipeline | None = None,
        comparisons: Comparisons | None = None,
        canary: Canary | None = None,
    ) -> None:
        """An earlier operator stored these in the status; None: it stored none."""
        self.baseline = baseline or self.baseline
        self.guard = guard or self.guard
        self.shape = shape or self.shape
        self.comparisons = comparisons or self.comparisons
        self.canary = canary or self.canary
        if hardware is not None:
            self.hardware.adopted(hardware)

    # ------------------------------------------------------------------------------------------------- pods and agents

    def pods_observed(
        self,
        pods: Iterable[Pod],
        agents: Mapping[str, str],
        *,
        attempt: str = "",
        excluded: Mapping[str, int] | None = None,
        failed: Pod | None = None,
        finished_at_s: float | None = None,
    ) -> None:
        """Pods and agents as the cluster shows them now. Nodes without pods stay until their lease is given back.

        Another attempt of the workload starts again at iteration 0: iterations of the one before say nothing about it.

        Args:
            pods: of the job.
            agents: host:port of the agent, by node.
            attempt: which attempt of the workload the pods belong to; empty: not known.
            excluded: why pods that opted in do not belong to the job, and how many.
            failed: the youngest pod of the job that failed.
            finished_at_s: see ``JobEnd``.
        """
        self.excluded_pods, self.failed_pod = excluded or {}, failed
        if attempt and attempt != self.attempt:
            if self.attempt and self.history is not None:
                self._restart_history(self.history.pipelines, self.history.ranks_per_pipeline)
            self.attempt = attempt
        by_node: dict[str, set[Pod]] = {}
        for pod in pods:
            by_node.setdefault(pod.node, set()).add(pod)
        self.end.pods_observed(running=bool(by_node), finished_at_s=finished_at_s)
        for name in by_node.keys() | self.nodes.keys():
            address, here = agents.get(name), frozenset(by_node.get(name, ()))
            node = self.nodes.get(name)
            if node is None:
                self.nodes[name] = Node(name, address, here, NodePlans(name, self.selections))
            else:
                node.pods_observed(here)
                node.address_observed(address)

    def node_forgotten(self, node: Node) -> None:
        """Nothing on the node concerns the job any more; unless another entry has replaced it."""
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            self.selections.pop(node.name, None)

    # ------------------------------------------------------------------------------------------------------- telemetry

    def rank_joined(self, node: Node, rank: Rank) -> None:
        """A rank has connected to its agent, or is seen again after a gap in telemetry."""
        if not node.rank_joined(rank):
            return
        self.shape_outdated = True
        if self.spec is not None and self.spec.pipeline.schedule is ScheduleName.FROM_RANKS:
            self.inputs.schedule_outdated()
        # A selection names an iteration, and new processes count theirs from their own start. One step for all nodes:
        # the ranks of a large job join one by one.
        self.selections.clear()
        if self.history is not None and rank.iteration < self.history.latest:
            self._restart_history(self.history.pipelines, self.history.ranks_per_pipeline)

    def rank_left(self, node: Node, rank: Rank) -> None:
        """A rank's process has gone."""
        node.rank_left(rank)

    def iteration_reported(self, node: Node, report: Report) -> JobIteration | None:
        """A rank has finished an iteration.

        Returns:
            The job's iteration if this report completed it; otherwise None.
        """
        spec = self.spec
        if not node.iteration_reported(report) or self.history is None or spec is None:
            return None
        iteration = self.history.add(report)
        if iteration is not None and iteration.unplanned and all(n.rests_at_default for n in self.nodes.values()):
            self.history.ran_at_default(iteration)
        if iteration is not None and self.is_typical(iteration):
            self.hardware.iteration_observed(iteration)
        if iteration is None or self.frontier is None or self.sweeping or not self.ranks_comparable:
            return iteration
        # At default clocks a pipeline runs like the fastest plan.
        times_us = self.frontier.expected_us
        planned_us = {dp: times_us[min(point or 0, len(times_us) - 1)] for dp, point in iteration.points.items()}
        self.detector.observe(
            iteration,
            planned_us,
            spec.straggler,
            planned_times=self.planned_times,
            slowed_pipelines=self.slowed_pipelines(),
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

    # -------------------------------------------------------------------------------------------------- the profile

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

    # --------------------------------------------------------------------------------------------------- the frontier

    @property
    def refining(self) -> bool:
        """Whether the frontier in use is being solved again only for what was measured since: it stays valid."""
        return self.solving is not None and self.frontier is not None and self.solving_basis == self.frontier_basis

    def solve_started(self, digest: str, basis: str) -> None:
        """The frontier of these inputs is being restored or solved."""
        self.solving, self.solving_basis = digest, basis

    def solve_succeeded(self, frontier: FrontierView, planned_times: PlannedTimes) -> None:
        """There is a new frontier. One that refines a frontier in force is adopted when agents have its plans."""
        self.solve_fault, self.coming, self.coming_times = None, frontier, planned_times
        if not self.refining or not any(self.selections.values()):
            self.frontier_adopted()
        self.frontier_basis = self.solving_basis

    def frontier_adopted(self) -> None:
        """The coming frontier is in force."""
        self.frontier, self.planned_times = self.coming, self.coming_times
        self.coming = self.coming_times = None
        if self.frontier is not None:
            for node in self.nodes.values():
                node.plans.adopted(self.frontier.digest)

    def solve_failed(self, digest: str, fault: Explanation) -> None:
        """These inputs have no frontier; they are not tried again."""
        self.solve_fault = digest, fault

    def solve_ended(self) -> None:
        """Nothing is being solved any more."""
        self.solving = None

    # ------------------------------------------------------------------------------------------------ everything else

    def guard_updated(self, guard: Guard) -> None:
        """The planner judged whether measured iterations keep the bound."""
        self.guard = guard

    def canary_judged(self, canary: Canary) -> None:
        """The plan ran on one pipeline for long enough."""
        self.canary = canary

    def hardware_adopted(self, hardware: Hardware | None) -> None:
        """The planner chose what plans are rehearsed under; None: the GPUs are not known yet."""
        self.hardware.adopted(hardware)

    def draw_published(self, draw: DrawStatus | None) -> None:
        """The status is to say what the job draws; None: no other replica needs to know."""
        self.draw = draw

    def share_granted(self, share: Share | None) -> None:
        """A PowerBudget grants the job this share; None: no budget selects it."""
        self.share = share

    def fenced_by(self, fault: Explanation) -> None:
        """A newer operator commands the job: this one must not."""
        self.fenced = fault

    def epoch_raised(self, epoch: int) -> None:
        """The counter of epochs was lost: the job goes on under this one."""
        self.raised_epoch = epoch

    def _forget_profile(self) -> None:
        self.frontier = self.planned_times = self.coming = self.coming_times = None
        self.observation.basis_accepted(Basis.PROFILE, "")
        self.inputs.profile_forgotten()

    def _restart_history(self, pipelines: int, ranks_per_pipeline: int) -> None:
        self.history = History(pipelines, ranks_per_pipeline)
        self.observation.restarted()
        self.detector = StragglerDetector()
        self.hardware.restarted()
        self.comparisons.restarted()
        self.guard, self.canary = replace(self.guard, since=0, beside_straggler=-1), replace(self.canary, resume_at=0)

    # ------------------------------------------------------------------------------------------- what follows from it

    @property
    def ranks(self) -> list[Rank]:
        """All ranks on all nodes."""
        return [rank for node in self.nodes.values() for rank in node.ranks.values()]

    @property
    def gpus(self) -> list[Gpu]:
        """The GPUs of the job's ranks, as far as agents have described them."""
        return [gpu for node in self.nodes.values() for gpu in node.rank_gpus]

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
        """Whether telemetry shows how long pipelines take by themselves: steps that hold the wait for other ranks last
        equally long.
        """
        whole = self.spec is not None and self.spec.pipeline.schedule is ScheduleName.STEPS
        latest = self.history.recent[-1] if self.history and self.history.recent else None
        return not whole or latest is None or latest.own_time

    @property
    def shape_wanted(self) -> bool:
        """Whether the training processes must be asked for the shape of the job."""
        stated = self.stated_spec
        return self.shape_outdated and stated is not None and stated.is_planned and stated.pipeline is NO_PIPELINE

    @property
    def schedule_known(self) -> bool:
        """Whether it is known what the pipelines run."""
        return self.inputs.schedule_csv is not None or (self.spec is not None and self.spec.pipeline.is_named)

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

    @property
    def plan_since(self) -> int:
        """First iteration that runs the points selected last."""
        return max((node.plans.from_iteration for node in self.nodes.values() if node.ranks), default=0)

    @property
    def furthest_iteration(self) -> int:
        """The furthest iteration that any rank has begun."""
        return max((node.furthest_iteration for node in self.nodes.values()), default=0)

    def is_typical(self, iteration: JobIteration) -> bool:
        """Whether an iteration shows how the job runs: no start, no transition, no straggler."""
        planned = any(point is not None for point in iteration.points.values())
        since = self.plan_since if planned else 1
        usual = not iteration.mixed and not self.detector.slowdowns and not self.sweeping
        return usual and iteration.iteration >= max(1, since)

    def slowed_pipelines(self) -> set[int]:
        """Pipelines (dp) with a GPU that reports that something slows it."""
        slowed = {gpu for node in self.nodes.values() for gpu, kind in node.gpu_events if kind in SLOWING_EVENTS}
        return {rank.dp for rank in self.ranks if rank.gpu_uuid in slowed} if slowed else set()
