"""A job in the making: builders for the planner's tests, and a desk where what is said of it is written. No clock, no
I/O."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest
from tests.doubles.lease_store import LeaseConnection, LeaseServer
from tests.doubles.plugin_job import Stored, kept_frontier
from tests.doubles.plugin_pool import Cluster, pool

from perseus_core.evidence import Evidence
from perseus_core.iteration import IterationReport
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.budgets.member import Member
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.settings import Settings
from perseus_operator.controller.status_writer import StatusWriter
from perseus_operator.errors import KubeUnavailable
from perseus_operator.families.registry import FAMILIES
from perseus_operator.families.training.decide import TrainingDecision, decide
from perseus_operator.families.training.family import TrainingFamily
from perseus_operator.families.training.features.canary.state import JudgeCanary
from perseus_operator.families.training.features.comparison.state import BeginComparison, EndComparison, ResumePlan
from perseus_operator.families.training.features.frontier.inputs import ReadInputs, Solve, inputs_digest
from perseus_operator.families.training.training import Training
from perseus_operator.jobs import family as family_module
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.family import Family, Surroundings
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.jobs.limits import Limits
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pace import Pace
from perseus_operator.jobs.report import JobReport
from perseus_operator.jobs.services import Services
from perseus_operator.nodes.actions import Acquire, Push, Release, Renew, Select, next_actions
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.plans import StoredPlans
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import JobRef, Now, Pod, StoredObject
from perseus_operator.plugin import cli
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.replicas.shard import SHARDS, LeaseRecord, shard_lease, shard_of
from perseus_operator.replicas.shards import Replica
from perseus_operator.solving.view import FrontierView

Made = TypeVar("Made", bound=Decision)
LIMITS = Limits(lease_ttl_s=30.0)
EPOCH = 5


def spec_of(**changes: Any) -> JobSpec:
    """A valid spec: two pipelines of two stages."""
    raw: dict[str, Any] = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 2},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        "baselineIterations": 0,
    }
    return parse_spec(JobSpec, {**raw, **changes})


def frontier_of(spec: JobSpec, points: int = 11) -> FrontierView:
    """From 1.0 s to 1.5 s in equal steps; least energy at the ninth point."""
    return FrontierView(
        digest=inputs_digest(spec, "csv"),
        times_us=tuple(1_000_000 + 50_000 * i for i in range(points)),
        energies_mj=tuple(1_000_000 - 20_000 * i + 1_200 * i * i for i in range(points)),
        stages=2,
        blocking_power_mw=80_000,
        mean_gap_ppm=10,
        maximum_gap_ppm=20,
        solve_ms=100,
        restored=False,
        ceilings_mw=((900, 500_000), (1200, 1_000_000), (1410, 2_000_000)),
    )


def epochs_of(first: int, leases: LeaseConnection | None = None) -> Epochs:
    """The epochs of a replica that holds every shard."""
    leases = leases or LeaseConnection(LeaseServer())
    leases.server.counter = max(first, leases.server.counter)
    epochs = Epochs(leases, "own")
    for shard in range(SHARDS):
        leases.server.put(LeaseRecord(shard_lease(shard), "own", first))
        epochs.hold(shard, first)
    return epochs


def operator_of(kube: Any, **services: Any) -> Operator:
    """One that has no shard yet."""
    shared = {"metrics": Metrics(), "epochs": epochs_of(1), "monotonic_s": time.monotonic, **services}
    replica = Replica(LeaseConnection(LeaseServer()), "own_1", 1)
    return Operator(Settings(insecure=True), kube, cast(Any, SimpleNamespace(**shared)), replica)


def with_nodes(made: Made, nodes: JobNodes, now_s: float) -> Made:
    """A decision with what the nodes need for it among its actions."""
    needed = list(next_actions(nodes, made.intent, now_s=now_s)) if made.intent else []
    actions = (action for action, _ in needed if action is not None)
    wake_at_s = min([made.wake_at_s, *(wake_at_s for _, wake_at_s in needed)])
    return replace(made, actions=(*made.actions, *actions), wake_at_s=wake_at_s)


def family_of(state: Training, services: Services, around: Surroundings | None = None) -> Family:
    """The family of a job in the making."""
    nobody: Any = None
    around = around or Surroundings(state.job, services, nobody, nobody, nobody)
    spec = state.spec
    family = next(kind for kind in FAMILIES if spec is None or kind.serves(spec)).make(around)
    if isinstance(family, TrainingFamily):
        family.training = state
        for part in (family._calibrator, family._profiler, family._observer, family._inputs, family._frontier):
            part._training = state
    return family


def member_of(state: Training, now: Now, *, settled: bool = True) -> Member | None:
    """The job as a member of a budget."""
    return family_module.member_of(state.job, family_of(state, cast(Services, None)), now, settled=settled)


class Job:
    """A job state, driven like its runner drives it, with agents that obey."""

    def __init__(self, **changes: Any) -> None:
        self.now_s = 100.0
        self.wall_s = 1_900_000_000.0
        self.state = Training(PerseusJob(JobRef("ns", "job", "uid"), generation=1))
        self.state.spec_accepted(spec_of(**changes))

    @property
    def spec(self) -> JobSpec:
        assert self.state.spec is not None
        return self.state.spec

    def decide(self) -> TrainingDecision:
        """What the family decides, and what the nodes need for it."""
        made = decide(self.state, Now(self.now_s, self.wall_s), LIMITS)
        return with_nodes(made, self.state.nodes, self.now_s)

    def solve(self) -> None:
        self.state.profile_accepted("csv", None)
        self.state.inputs.read_ended(at_s=self.now_s)
        self.state.solve.frontier = frontier_of(self.spec)

    def start_pods(self) -> None:
        """One node and one pod per pipeline."""
        names = range(self.spec.pipeline.data_parallel)
        pods = [Pod(f"pod-{p}", "ns", f"t-{p}", f"node-{p}", "job", {}) for p in names]
        self.state.pods_observed(
            Selection(tuple(pods)), {f"node-{p}": f"10.0.0.{p}:1" for p in names}, wall_s=self.wall_s
        )

    def connect_ranks(self, pid: int = 1) -> None:
        for p, node in enumerate(self.nodes):
            for stage in range(self.spec.pipeline.stages):
                self.state.rank_joined(node, Rank(f"pod-{p}", f"GPU-{p}-{stage}", p, stage, 0, pid, 0))

    @property
    def nodes(self) -> list[Node]:
        return [self.state.nodes[name] for name in sorted(self.state.nodes)]

    def act(self) -> TrainingDecision:
        """Decide once and let every agent do what it is asked."""
        made = self.decide()
        if made.adopt:
            self.state.frontier_adopted()
            made = self.decide()
        self.state.guard_updated(made.guard)
        for action in made.actions:
            if isinstance(action, ReadInputs):
                self.state.inputs.read_ended(at_s=self.now_s)
                continue
            if isinstance(action, BeginComparison | ResumePlan | EndComparison):
                self.state.comparisons.decided(action, iteration=self.state.nodes.furthest_iteration)
                continue
            if isinstance(action, JudgeCanary):
                self.state.canary_judged(action.verdict)
                continue
            if not isinstance(action, Acquire | Renew | Release | Push | Select):
                continue
            node = self.state.nodes[action.node]
            if isinstance(action, Acquire):
                following = node.plans.driven
                node.lease_acquired(
                    node.pods,
                    plan_id=node.plans.plan_id,
                    following=following,
                    started_s=self.now_s,
                    ttl_s=LIMITS.lease_ttl_s,
                    resting=action.resting,
                )
            elif isinstance(action, Renew):
                node.lease_renewed(started_s=self.now_s, ttl_s=LIMITS.lease_ttl_s)
            elif isinstance(action, Release):
                node.lease_lost()
                if not node.pods:
                    self.state.nodes.forget(node)
            elif isinstance(action, Push):
                noted = node.plans.stored_beside if action.beside else node.plans.stored
                noted(StoredPlans(action.plans, action.plans, action.stages))
            else:
                node.plans.selection_sent()
                points, first = dict(action.points), action.from_iteration
                node.plans.selection_accepted(points, plan_id=node.plans.plan_id, from_iteration=first)
        return made

    def settle(self) -> TrainingDecision:
        """Act until there is nothing more to do but solves; what is wanted must be reached in a few steps."""
        for _ in range(8):
            made = self.act()
            if not [a for a in made.actions if not isinstance(a, ReadInputs | Solve)]:
                return made
        raise AssertionError(f"still acting: {made.actions}")

    def run(self) -> TrainingDecision:
        """From nothing to a plan in force."""
        self.solve()
        self.start_pods()
        self.connect_ranks()
        return self.settle()

    def train(
        self,
        iteration: int,
        slowdowns: tuple[float, ...] = (1.0, 1.0),
        *,
        energy_mj: int | Sequence[int] | None = 1000,
        evidence: Evidence | None = None,
    ) -> None:
        """Every rank reports an iteration under what its node has selected; ``energy_mj`` of each, or by pipeline."""
        assert self.state.frontier is not None
        times_us = self.state.frontier.times_us
        points = [n.plans.selected.get(p) or 0 for p, n in enumerate(self.nodes)]
        spans = [round(times_us[point] * slow) for point, slow in zip(points, slowdowns, strict=True)]
        for p, node in enumerate(self.nodes):
            own_mj = energy_mj[p] if isinstance(energy_mj, Sequence) else energy_mj
            for stage in range(self.spec.pipeline.stages):
                point = node.plans.selected.get(p)
                self.state.iteration_reported(
                    node,
                    IterationReport(p, stage, 0, iteration, max(spans), spans[p], own_mj, point, evidence=evidence),
                )

    def train_on(self, first: int, count: int, factor: float) -> int:
        """Iterations in which every pipeline takes ``factor`` times what its plan says; then the operator thinks.

        Returns:
            The iteration after them.
        """
        for iteration in range(first, first + count):
            self.train(iteration, (factor, factor))
            self.act()
        self.settle()
        return first + count


class Desk:
    """A job's reporter, and an API server that remembers all versions of the job's PerseusJob."""

    def __init__(self, *, pace: Pace | None = None, status_interval_s: float = 5.0) -> None:
        self.job = Job()
        self.versions: list[tuple[dict[str, Any], dict[str, str]]] = [({}, {})]
        self.written: list[dict[str, Any]] = []
        """Every status that was written."""
        self.posted: list[str] = []
        """The reasons of events."""
        self.said: list[tuple[str, str]] = []
        """Reasons and messages of the same."""
        self.leases = LeaseConnection(LeaseServer())
        self.answers = True
        """Whether who writes hears of it."""
        self.spawned: list[Coroutine[Any, Any, bool]] = []
        kube = SimpleNamespace(write_status=self._write_status, annotate=self._annotate, post_event=self._post)
        self.metrics = Metrics()
        services = SimpleNamespace(
            kube=kube,
            metrics=self.metrics,
            limits=LIMITS,
            status_interval_s=status_interval_s,
            figures_pace=pace or Pace(10.0),
            monotonic_s=lambda: self.job.now_s,
            epochs=epochs_of(EPOCH, self.leases),
        )
        self.services = cast(Services, services)
        self.reporter = StatusWriter(self.job.state.ref, self.services, self.spawned.append)
        self.reporter.restore({}, {}, "0")

    @property
    def status(self) -> dict[str, Any]:
        return self.versions[-1][0]

    @property
    def annotations(self) -> dict[str, str]:
        return self.versions[-1][1]

    def store(self, *, status: dict[str, Any] | None = None, annotations: dict[str, str] | None = None) -> str:
        """A write; one that changes nothing makes no version, as on a real server."""
        wanted = (self.status if status is None else status, self.annotations if annotations is None else annotations)
        if wanted != self.versions[-1]:
            self.versions.append(wanted)
        if not self.answers:
            raise KubeUnavailable("timed out")
        return str(len(self.versions) - 1)

    async def report(self, made: TrainingDecision | None = None) -> float:
        """Report a decision, or one more, and write the status; seconds until the next report is due."""
        made = made or self.job.act()
        wait_s = self.reporter.report(self.job.state.job, self.described(made), Now(self.job.now_s, self.job.wall_s))
        while self.spawned:
            await self.spawned.pop()
        return wait_s

    def described(self, made: TrainingDecision) -> JobReport:
        """What the job's family reports."""
        return family_of(self.job.state, self.services).report(made)

    async def _write_status(self, ref: JobRef, status: dict[str, Any]) -> str:
        self.written.append(status)
        return self.store(status=status)

    async def _annotate(self, ref: JobRef, annotations: dict[str, str | None]) -> str:
        merged = {k: v for k, v in {**self.annotations, **annotations}.items() if v is not None}
        return self.store(annotations=merged)

    async def _post(self, ref: JobRef, *, kind: str, reason: str, message: str) -> None:
        self.posted.append(reason)
        self.said.append((reason, message))

    def lose_shard(self, epoch: int) -> None:
        """Another replica takes the job's shard."""
        self.leases.server.put(LeaseRecord(shard_lease(shard_of(self.job.state.ref.uid)), "another", epoch))


@pytest.fixture
def job() -> Job:
    """A job without a profile, pods or agents."""
    return Job()


@pytest.fixture
def make_job() -> type[Job]:
    """To make one with changes to its spec."""
    return Job


@pytest.fixture(scope="module")
def kept() -> StoredObject:
    return kept_frontier()


@pytest.fixture
def stored(kept: StoredObject, monkeypatch: pytest.MonkeyPatch) -> Stored:
    """The job that ``kubectl perseus`` reads."""
    cluster = Stored(kept)
    monkeypatch.setattr(cli, "KubeReader", lambda *_: cluster)
    monkeypatch.setenv("COLUMNS", "80")
    return cluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster of one pool that saves, as ``kubectl perseus`` reads it."""
    site = Cluster(pool())
    monkeypatch.setattr(cli, "KubeReader", lambda *_: site)
    monkeypatch.setenv("COLUMNS", "100")
    return site
