"""What is known about one job: the memory of its ``JobRunner``, read by the planner.

Changed only by the runner, on one event loop, through the methods below: each takes in one fact. No I/O, no clock, no
decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.pipeline import ScheduleName
from perseus_operator.planning.bound_guard import Guard
from perseus_operator.planning.iterations import History, JobIteration, Measured, Report, summarise
from perseus_operator.planning.objective import FrontierView
from perseus_operator.planning.power_allocation import Share
from perseus_operator.planning.profiling.drift import Drift
from perseus_operator.planning.profiling.sweep import DIGEST_PREFIX, Sweep
from perseus_operator.planning.stragglers.annotation import Notice
from perseus_operator.planning.stragglers.detector import Detector, Promises

EVIDENCE: Final = frozenset({"THERMAL_SLOWDOWN", "POWER_BRAKE", "HARDWARE_SLOWDOWN"})
"""Kinds of GPU events that explain a slow iteration. A power cap is none: on many GPUs it is always active."""


@dataclass(frozen=True)
class JobRef:
    """Which PerseusJob."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def frontier_config_map(self) -> str:
        """Name of the ConfigMap that keeps the frontier."""
        return f"{self.name}-frontier"

    @property
    def profiling_config_map(self) -> str:
        """Name of the ConfigMap that keeps what of its profile has been measured."""
        return f"{self.name}-profiling"


@dataclass(frozen=True)
class Pod:
    """A training pod that is bound to a node and not over."""

    uid: str
    namespace: str
    name: str
    node: str
    job: str
    labels: Mapping[str, str] = field(hash=False)
    owner_uid: str = ""
    """Of the controller that made it; empty: none."""
    created: str = ""
    asks_for_gpu: bool = False
    containers: frozenset[tuple[str, str]] = frozenset()
    """Identifier and name of each, if there are several: agents let only those that hold a GPU drive it."""


@dataclass(frozen=True)
class Rank:
    """A training process that has said hello. ``iteration``: the furthest it has begun."""

    pod_uid: str
    gpu_uuid: str
    pipeline: int
    stage: int
    tensor: int
    pid: int
    iteration: int

    @property
    def place(self) -> tuple[int, int, int]:
        """Pipeline, stage, tensor rank: unique in a job."""
        return self.pipeline, self.stage, self.tensor

    @property
    def identity(self) -> tuple[str, int, tuple[int, int, int]]:
        """Changes when the process is another one."""
        return self.pod_uid, self.pid, self.place


@dataclass(frozen=True)
class Fault:
    """Why something did not work."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Verdict:
    """What is known of a calibration: whether the model explains the run, and how well. Shares, not per cents.

    ``heldout_error`` is the mean over iterations not used for fitting, ``uncalibrated_error`` that of the bare model.
    ``allowance`` is by how much nearly all iterations stay within what is planned.
    """

    digest: str
    explains: bool
    reason: str
    heldout_error: float | None
    uncalibrated_error: float
    iterations: int
    allowance: float
    stage_noise: tuple[float, ...] | None


@dataclass
class Learning:
    """How far the calibration of the job has got."""

    kept: int = 0
    """Iterations to calibrate from."""
    since: int = 0
    """Iterations added since a calibration was last begun."""
    begun: bool = False
    running: bool = False
    verdict: Verdict | None = None
    """The latest."""
    in_use: str = ""
    """Digest of the calibration to plan with; empty: none."""
    fault: Fault | None = None


@dataclass
class Profiling:
    """How far measuring the job's profile has got."""

    sweep: Sweep | None = None
    """The latest, begun by this operator or by one before."""
    counted: int = 0
    """Iterations measured at its current clock."""
    trouble: str = ""
    """Why the latest iteration could not be measured; empty: it could."""
    saved: int = 0
    """Clocks of which the measurements are kept in the cluster."""
    kept: bool = False
    """The profile is written, and to be read back."""
    busy: bool = False
    retry_at_s: float = 0.0
    failures: int = 0
    fault: Fault | None = None
    """Why no profile can be measured; until the spec's profile changes."""
    drift: Drift = field(default_factory=Drift)
    stale: str = ""
    """Digest of the profile that no longer fits; empty: none."""
    why: str = ""
    """What was seen of that, in a sentence."""
    remeasured: int = 0
    """How often that has happened."""
    remark: str = ""
    """What the last sweep came to, in a sentence."""


@dataclass
class Node:
    """One node that runs pods of the job, and how far its agent has got."""

    name: str
    address: str | None
    """host:port of the agent; None: no agent runs there."""
    pods: frozenset[Pod]
    busy: bool = False
    """A call to the agent is under way; the next is planned when it is over."""
    fault: Fault | None = None
    retry_at_s: float = 0.0
    failures: int = 0
    leased_pods: frozenset[Pod] | None = None
    renew_at_s: float = 0.0
    expires_at_s: float = 0.0
    plan_id: str = ""
    pushed: tuple[str, frozenset[int]] | None = None
    """Frontier digest and stages of the plan set that the agent holds."""
    selected: dict[int, int] = field(default_factory=dict)
    """Points of pipelines, as far as they need not be said again."""
    driven: bool = False
    """The agent may follow some plan of the job, of this operator or one before, though it must be said again."""
    from_iteration: int = 0
    ranks: dict[tuple[int, int, int], Rank] = field(default_factory=dict)
    clocks_mhz: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """GPU UUID → supported clocks."""
    told: dict[tuple[int, int, int], tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    """What ranks say that they run, where they had to be asked: (kind, microbatch, chunk) in order, by place."""
    uncontrollable: dict[str, str] = field(default_factory=dict)
    """GPU UUID → why its clocks cannot be set."""
    gpu_events: dict[tuple[str, str], str] = field(default_factory=dict)
    """Active slowdowns: (GPU UUID, kind) → the agent's message."""

    @property
    def stages(self) -> frozenset[int]:
        """Stages whose ranks run here."""
        return frozenset(stage for _, stage, _ in self.ranks)

    @property
    def pipelines(self) -> frozenset[int]:
        """Pipelines that have a rank here."""
        return frozenset(pipeline for pipeline, _, _ in self.ranks)

    def lost(self) -> None:
        """Whatever the agent held is no longer known to be there."""
        self.leased_pods = None
        self.pushed = None
        self.plan_id = ""
        self.selected = {}
        self.driven = False


@dataclass
class JobState:
    """Everything the planner may look at."""

    ref: JobRef
    generation: int = 0
    spec: JobSpec | None = None
    """The last accepted one."""
    spec_fault: Fault | None = None
    told: tuple[Notice, ...] = ()
    told_fault: Fault | None = None
    profile_digest: str | None = None
    """Of the last profile that could be read."""
    profile_fault: Fault | None = None
    profile_read_at_s: float | None = None
    reading: bool = False
    order: str | None = None
    """CSV of a schedule that has no name; None: not known, or it has a name."""
    order_fault: Fault | None = None
    frontier: FrontierView | None = None
    promises: Promises | None = None
    """What its plans promise of single instructions."""
    solving: str | None = None
    """Digest of the inputs being solved."""
    solve_fault: tuple[str, Fault] | None = None
    nodes: dict[str, Node] = field(default_factory=dict)
    attempt: str = ""
    """Which attempt of the workload the pods are; empty: not known."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Why pods that opted in are not of the job, and how many."""
    history: History | None = None
    detector: Detector = field(default_factory=Detector)
    learning: Learning = field(default_factory=Learning)
    profiling: Profiling = field(default_factory=Profiling)
    measured_power_mw: int | None = None
    """Blocking power that is kept with the profile; the spec's goes before it."""
    guard: Guard = field(default_factory=Guard)
    baseline: Measured | None = None
    share: Share | None = None
    """Of a PowerBudget; None: no budget selects the job."""
    fenced: Fault | None = None

    def accept(self, spec: JobSpec) -> None:
        """A valid spec replaces the one before; measurements of another shape are worth nothing."""
        shape = (spec.pipeline.data_parallel, spec.pipeline.stages * spec.pipeline.tensor_parallel)
        if self.history is None or (self.history.pipelines, self.history.ranks_per_pipeline) != shape:
            self._start_over(*shape)
            if self.spec is not None:
                self.baseline = None
        self.spec = spec
        self.spec_fault = None

    def place(
        self,
        pods: Iterable[Pod],
        agents: Mapping[str, str],
        *,
        attempt: str = "",
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        """Pods and agents as the cluster shows them now. Nodes without pods stay until their lease is given back.

        Another attempt of the workload begins again at iteration 0: what the one before did is no measure of it.
        """
        self.left_out = left_out or {}
        if attempt and attempt != self.attempt:
            if self.attempt and self.history is not None:
                self._start_over(self.history.pipelines, self.history.ranks_per_pipeline)
            self.attempt = attempt
        by_node: dict[str, set[Pod]] = {}
        for pod in pods:
            by_node.setdefault(pod.node, set()).add(pod)
        for name in by_node.keys() | self.nodes.keys():
            address, here = agents.get(name), frozenset(by_node.get(name, ()))
            node = self.nodes.get(name)
            if node is None:
                self.nodes[name] = Node(name, address, here)
                continue
            node.pods = here
            if address is not None and address != node.address:
                node.address = address
                node.lost()
                node.retry_at_s = 0.0
            uids = {pod.uid for pod in here}
            node.ranks = {place: rank for place, rank in node.ranks.items() if rank.pod_uid in uids}

    def joined(self, node: Node, rank: Rank) -> None:
        """A rank has said hello, or is seen again after a gap in telemetry."""
        known = node.ranks.get(rank.place)
        node.ranks[rank.place] = rank
        if known is not None and known.identity == rank.identity:
            return
        node.told.pop(rank.place, None)
        if self.spec is not None and self.spec.pipeline.schedule is ScheduleName.FROM_RANKS:
            self.order = None
        for other in self.nodes.values():
            # A new process counts its iterations from its own start: what was selected "from iteration n on" must be
            # said again.
            other.selected = {}
        if self.history is not None and rank.iteration < self.history.latest:
            self._start_over(self.history.pipelines, self.history.ranks_per_pipeline)

    def left(self, node: Node, rank: Rank) -> None:
        """A rank's process has gone."""
        known = node.ranks.get(rank.place)
        if known is not None and known.identity == rank.identity:
            del node.ranks[rank.place]

    def reported(self, node: Node, report: Report) -> JobIteration | None:
        """A rank has finished an iteration; the job's iteration if this completed it."""
        place = (report.pipeline, report.stage, report.tensor)
        rank = node.ranks.get(place)
        if rank is None or self.history is None or self.spec is None:
            return None
        if report.iteration >= rank.iteration:
            # The report says that the next iteration has begun.
            node.ranks[place] = Rank(
                rank.pod_uid, rank.gpu_uuid, rank.pipeline, rank.stage, rank.tensor, rank.pid, report.iteration + 1
            )
        iteration = self.history.add(report)
        if iteration is None or self.frontier is None or self.sweeping:
            return iteration
        # At default clocks a pipeline runs like the fastest plan.
        times_us = self.frontier.times_us
        promised_us = {p: times_us[min(point or 0, len(times_us) - 1)] for p, point in iteration.points.items()}
        self.detector.observe(
            iteration,
            promised_us,
            self.spec.straggler,
            promises=self.promises,
            stage_noise=self.learning.verdict.stage_noise if self.learning.verdict else None,
            evident=self.evident(),
        )
        return iteration

    def is_typical(self, iteration: JobIteration) -> bool:
        """Whether an iteration shows how the job runs: no start, no transition, no straggler."""
        planned = any(point is not None for point in iteration.points.values())
        since = self.plan_since if planned else 1
        usual = not iteration.mixed and not self.detector.slowdowns and not self.sweeping
        return usual and iteration.iteration >= max(1, since)

    @property
    def order_known(self) -> bool:
        """Whether it is known what the pipelines run."""
        return self.order is not None or (self.spec is not None and self.spec.pipeline.is_named)

    @property
    def sweeping(self) -> bool:
        """Whether some agent holds the clocks of a sweep: points of iterations are then none of the frontier."""
        return any(node.pushed and node.pushed[0].startswith(DIGEST_PREFIX) for node in self.nodes.values())

    @property
    def blocking_power_mw(self) -> int:
        """Of one GPU while it waits: the spec's, or as measured with the profile."""
        given = self.spec.profile.blocking_power_milliwatts if self.spec else None
        return given if given is not None else self.measured_power_mw or 0

    def evident(self) -> set[int]:
        """Pipelines of which a GPU says that something slows it."""
        slowed = {gpu for node in self.nodes.values() for gpu, kind in node.gpu_events if kind in EVIDENCE}
        return {rank.pipeline for rank in self.ranks if rank.gpu_uuid in slowed} if slowed else set()

    def measure_baseline(self) -> Measured | None:
        """Fix the baseline once enough iterations at default clocks have been seen; the new one, if so."""
        wanted = self.spec.baseline_iterations if self.spec else 0
        if self.baseline is None and self.history is not None and 0 < wanted <= len(self.history.unplanned):
            self.baseline = summarise(self.history.unplanned[:wanted])
            return self.baseline
        return None

    @property
    def ranks(self) -> list[Rank]:
        """All ranks on all nodes."""
        return [rank for node in self.nodes.values() for rank in node.ranks.values()]

    @property
    def plan_since(self) -> int:
        """First iteration that runs the points selected last."""
        return max((node.from_iteration for node in self.nodes.values() if node.ranks), default=0)

    @property
    def furthest_iteration(self) -> int:
        """The furthest iteration that any rank has begun."""
        return max((rank.iteration for rank in self.ranks), default=0)

    def _start_over(self, pipelines: int, ranks_per_pipeline: int) -> None:
        self.history = History(pipelines, ranks_per_pipeline)
        self.detector = Detector()
        self.guard = replace(self.guard, since=0)
