"""Hundreds of nodes in one process: light agents, each a real gRPC ``Agent`` on its own port.

Real, and the agent's own code: leases, epochs and their expiry (``LeaseTable``), plan sets and selections by iteration
(``JobPlans``), error codes, TLS. Simulated: the journal is in memory, a GPU's clock is that of the plan in force,
processes are made up, and all ranks of a job train in step. There is no physics and no socket for trainers;
``perseus_sim.cluster`` has those.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tests.doubles.light_agent import TIMER_INTERVAL_S, LightAgent
from tests.doubles.light_job import LightJob, LightRank, Reports, durations_us, rank_of

from perseus_agent.clocks.plans import StagePlan
from perseus_proto.planset import PlanPoint
from perseus_proto.v1alpha1 import agent_pb2 as pb


class Fleet:
    """The agents and the jobs that run on their nodes. Use as a context, on the event loop that it shall run on."""

    def __init__(
        self, *, iteration_s: float | None = None, tls: Path | None = None, keeper_s: float = TIMER_INTERVAL_S
    ) -> None:
        """``iteration_s``: wall time of an iteration; None: only when ``step`` is called. ``tls``: a folder with
        ca.crt, perseus-agent.crt and .key; None: without TLS. ``keeper_s``: how often agents look for leases that have
        run out.
        """
        self.credentials = None if tls is None else _server_credentials(tls)
        self.agents: dict[str, LightAgent] = {}
        self.points: dict[str, tuple[PlanPoint, ...]] = {}
        """What the plan sets promise that any agent was given."""
        self._jobs: list[LightJob] = []
        self._jobs_on: dict[str, list[LightJob]] = {}
        self._iteration_s, self._keeper_s = iteration_s, keeper_s
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Fleet:
        self._tasks.append(asyncio.create_task(self._keep()))
        if self._iteration_s is not None:
            self._tasks.append(asyncio.create_task(self._train(self._iteration_s)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(agent.stop() for agent in self.agents.values()))

    async def add(self, names: Iterable[str]) -> list[LightAgent]:
        """New nodes, their agents serving."""
        added = self.place(names)
        for agent in added:
            await agent.serve()
        return added

    def place(self, names: Iterable[str]) -> list[LightAgent]:
        """New nodes, whose agents serve nothing by themselves."""
        added = [LightAgent(name, self) for name in names]
        self.agents.update((agent.node, agent) for agent in added)
        return added

    def start(self, job: LightJob) -> None:
        """The job's processes say hello."""
        self._jobs.append(job)
        for node in job.ranks:
            self._jobs_on.setdefault(node, []).append(job)

    def end(self, job: LightJob) -> None:
        """The job's processes have gone."""
        for node, ranks in job.ranks.items():
            agent = self.agents[node]
            lease = agent.lease_of(job)
            uids = {(pod.namespace, pod.name): uid for uid, pod in lease.pods.items()} if lease else {}
            left = [rank_of(rank, uids.get((rank.namespace, rank.pod), ""), job.iteration) for rank in ranks]
            agent.end(job, [pb.TelemetryEvent(rank_left=rank) for rank in left])
            self._jobs_on[node].remove(job)
        self._jobs.remove(job)

    def jobs_on(self, node: str) -> Sequence[LightJob]:
        """The jobs with ranks on a node."""
        return self._jobs_on.get(node, ())

    def ranks(self, node: str) -> list[LightRank]:
        """All ranks on a node."""
        return [rank for job in self.jobs_on(node) for rank in job.ranks[node]]

    def plans(self, job: LightJob) -> dict[LightRank, StagePlan | None]:
        """What each rank of a job follows now; None: default clocks."""
        return {rank: plan for node in job.ranks for rank, plan in self.agents[node].plans(job).items()}

    def step(self, job: LightJob) -> None:
        """All ranks of the job finish an iteration and report it."""
        plans = {node: self.agents[node].plans(job) for node in job.ranks}
        spans: dict[int, int] = {}
        for ranks in plans.values():
            for rank, plan in ranks.items():
                planned_us = self._point(plan).iteration_time_us if plan else job.work.iteration_us
                span_us = round(planned_us * job.slowdowns.get(rank.dp, 1.0))
                spans[rank.dp] = max(span_us, spans.get(rank.dp, 0))
        time_us = max(spans.values())
        made: dict[object, Reports] = {}
        reports = []
        for node, ranks in plans.items():
            said = tuple((r.stage, r.tp, plan and (plan.plan_id, plan.point), spans[r.dp]) for r, plan in ranks.items())
            if said not in made:
                made[said] = Reports.of([self._report(job, r, plan, spans[r.dp], time_us) for r, plan in ranks.items()])
            reports.append((self.agents[node], tuple(ranks), made[said]))
        job.stepped_s = time.monotonic()
        for agent, at, said_by in reports:
            agent.report(job, at, said_by)
        job.iteration += 1

    def _report(self, job: LightJob, rank: LightRank, plan: StagePlan | None, span_us: int, time_us: int) -> Any:
        """What a rank reports, without who it is and of which iteration."""
        return pb.TelemetryEvent(
            iteration=pb.IterationReport(
                stage=rank.stage,
                tensor_parallel_rank=rank.tp,
                iteration_time_us=time_us,
                compute_span_us=span_us,
                energy_mj=(self._point(plan).energy_mj if plan else job.work.iteration_mj) // job.stages,
                has_energy=True,
                plan_id=plan.plan_id if plan else "",
                point=plan.point if plan else 0,
                planned=plan is not None,
                durations_us=durations_us(job.work, rank, plan),
            )
        )

    def _point(self, plan: StagePlan) -> PlanPoint:
        return self.points[plan.plan_id][plan.point]

    async def _keep(self) -> None:
        while True:
            for agent in self.agents.values():
                agent.expire()
            await asyncio.sleep(self._keeper_s)

    async def _train(self, iteration_s: float) -> None:
        """Each job's iterations, spread evenly over the time of one: real jobs have no common beat."""
        begun_s, done = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(0.02)
            now = (time.monotonic() - begun_s) / iteration_s
            for number, job in enumerate(list(self._jobs)):
                phase = number / max(1, len(self._jobs))
                if int(now + phase) > int(done + phase):
                    self.step(job)
            done = now


def _server_credentials(tls: Path) -> Any:
    with contextlib.suppress(FileNotFoundError):
        pair = (tls / "perseus-agent.key").read_bytes(), (tls / "perseus-agent.crt").read_bytes()
        return grpc.ssl_server_credentials([pair], (tls / "ca.crt").read_bytes(), require_client_auth=True)
    raise FileNotFoundError(f"{tls}: must hold ca.crt, perseus-agent.crt and perseus-agent.key")
