"""The seam between those who serve a PerseusJob and the kinds of work that it may be.

A family is a kind of work whose clocks are set: training by plans, or one clock for all GPUs. It takes in what is
observed of its job, decides what the agents shall hold and what else to do, says what a watt is worth, and reports its
conditions and figures. Leases, budgets, classes, shards, status and events know families by this protocol alone; a
further one is a class that implements it, and an entry in ``families.registry``.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from perseus_core.iteration import IterationReport
from perseus_core.latency import SwitchLatency
from perseus_operator.budgets.member import Member
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.job import Job
from perseus_operator.jobs.report import JobReport
from perseus_operator.jobs.services import Services
from perseus_operator.jobs.tracing import EditTrace
from perseus_operator.jobs.wake import Wake
from perseus_operator.nodes.actions import Push
from perseus_operator.nodes.engines import Engine, EngineWindow
from perseus_operator.nodes.node import Node, Rank
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Now
from perseus_operator.solving.frontier import SolvedFrontier
from perseus_proto.v1alpha1 import agent_pb2

Spawn = Callable[[Coroutine[Any, Any, bool | None], AbstractContextManager[object] | None], None]
"""Runs work as a task, as a step of the trace if one is given, and has the job looked at once it is done: at once, or
in turn if it returns False."""


@dataclass(frozen=True)
class Surroundings:
    """What a family is given for one job."""

    job: Job
    services: Services
    wake: Wake
    spawn: Spawn
    trace: EditTrace


@dataclass(frozen=True)
class Plans:
    """Plans for an agent, and how long its GPUs take to change to their clocks."""

    plan_set: agent_pb2.PlanSet
    changes: Mapping[int, SwitchLatency]


class PlanSource(Protocol):
    """What makes the plans that a family intends."""

    async def plans(self, action: Push) -> Plans:
        """Return the plans that an agent is to be sent."""
        ...

    def follows(self, digest: str) -> bool:
        """Whether plans of this digest are in force now."""
        ...


class Family(Protocol):
    """One job of this kind."""

    @property
    def plan_source(self) -> PlanSource | None:
        """What makes its plans; None: it intends none."""
        return None

    @property
    def solved(self) -> SolvedFrontier | None:
        """The frontier in force with its plans; None: there is none."""
        return None

    # --------------------------------------------------------------------------------------------------------- observe

    def spec_accepted(self, spec: Any) -> None:
        """Take in a valid ``WorkSpec``, of the type that this family serves."""
        ...

    def annotations_observed(self, annotations: Mapping[str, str]) -> None:
        """Take in the annotations of the PerseusJob."""

    def restored(self, status: Mapping[str, Any]) -> None:
        """Take in what an earlier operator has stored in the status."""

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> None:
        """Take in the pods of the job, and the addresses of all agents by node.

        Args:
            chosen: of the pods that opted in.
            agents: host:port, by node.
            wall_s: when they were observed; a job whose pods have all succeeded ended then.
        """
        ...

    def rank_joined(self, node: Node, rank: Rank) -> None:
        """Take in that a process has connected to its agent."""
        node.rank_joined(rank)

    def rank_left(self, node: Node, rank: Rank) -> None:
        """Take in that a process has gone."""
        node.rank_left(rank)

    def reported(self, node: Node, report: IterationReport) -> bool | None:
        """Take in telemetry of one process; whether the job must be looked at: at once, in turn (False), or not."""
        node.iteration_reported(report)
        return None

    def engine_joined(self, node: Node, engine: Engine) -> None:
        """Take in that an engine has connected to its agent."""
        node.engines.joined(engine)

    def engine_left(self, node: Node, engine: Engine) -> None:
        """Take in that an engine has gone."""
        node.engines.left(engine)

    def window_reported(self, node: Node, window: EngineWindow) -> bool | None:  # noqa: ARG002
        """Take in what an engine did in about a second; whether the job must be looked at, as of ``reported``."""
        return None

    @property
    def autoscalers_wanted(self) -> bool:
        """Whether it must know of HorizontalPodAutoscalers in its namespace."""
        return False

    def autoscalers_observed(self, bodies: Sequence[Any], *, complete: bool) -> bool:  # noqa: ARG002
        """Take in those that were read, as JSON, and whether these are all; whether the job must be looked at now."""
        return False

    @property
    def single_ranks_wanted(self) -> bool:
        """Whether agents shall report each process by itself, and not those of a stage together."""
        return False

    @property
    def schedules_wanted(self) -> bool:
        """Whether the processes must be asked what they execute."""
        return False

    @property
    def schedule(self) -> object:
        """What is known of what the processes execute; whatever it is, a change is urgent."""
        return None

    async def schedules_declared(self) -> None:
        """Take in that a node's processes have declared what they execute."""

    # ---------------------------------------------------------------------------------------------------------- decide

    def decide(self, now: Now) -> Decision:
        """Decide what the agents shall hold; asked twice without a change in between, it decides the same."""
        ...

    def act(self, decision: Any) -> None:
        """Start the actions that this family has decided; there are none but its own."""

    def member(self, now: Now, *, settled: bool) -> Member:
        """Say what the job draws, and what a watt is worth to it.

        Args:
            now: the time.
            settled: whether every process that runs must have been seen; before, GPUs that are not known bound nothing.
        """
        ...

    # ---------------------------------------------------------------------------------------------------------- report

    def report(self, decision: Any) -> JobReport:
        """Describe the job.

        Args:
            decision: this family's latest.
        """
        ...


def member_of(job: Job, family: Family, now: Now, *, settled: bool) -> Member | None:
    """The job as a member of a budget; None: it draws no power, since no pod of it runs.

    Args:
        job: whose member it is.
        family: of the job.
        now: the time.
        settled: whether every process that runs must have been seen.
    """
    if job.spec is None or not (job.nodes.occupied or job.let_alone):
        return None
    if job.fenced is not None:
        return Member(str(job.ref), job.spec.priority)  # what it draws is not ours to know: it keeps its share
    # Of GPUs that are let alone the agents say nothing, however long it is waited.
    member = family.member(now, settled=settled and not job.let_alone)
    return replace(member, gpus=sum(len(node.gpu_uuids) for node in job.nodes.values()), reading=job.reading)
