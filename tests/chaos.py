"""Jobs under random edits and faults, and the oracle: every GPU's clock is its plan's, or the default.

The oracle computes the clock that a GPU must have a second time, from the user's last manifest and from the frontier in
the job's PerseusFrontier. The light agents know the clock that it has. Every random choice comes from a seed, which a
failing test prints.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import ApiException
from tests import waiting
from tests.doubles.fleet import Fleet
from tests.doubles.fleet_cluster import FleetCluster
from tests.doubles.light_job import LightJob, Work

from perseus_core import keys
from perseus_sim.cluster.pki import Authority, write_pairs
from perseus_sim.processes import Processes
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.model.result import Frontier
from perseus_solver.schedules import build_schedule

STAGES, PIPELINES, MICROBATCHES, BLOCKING_W = 2, 2, 4, 83.64
PROFILE = profile_csv(STAGES)
WORK = Work.of(
    build_problem(
        read_profile(PROFILE, stages=STAGES),
        build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES),
        blocking_power_w=BLOCKING_W,
    )
)
SPEC: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": PIPELINES},
    "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": round(1000 * BLOCKING_W)},
    "baselineIterations": 0,
    "points": 20,
}
ITERATION_S = 0.2
PATIENCE_S = 3 * waiting.PATIENCE_S
"""Longer than elsewhere: an operator, an API server, agents and a solver share one machine."""
FLAGS = (
    # A lease is renewed six seconds before its end: with a load of seven per core, a renewal was 2.4 s late.
    *("--lease-ttl-s", "9", "--agent-timeout-s", "1", "--agent-poll-s", "1", "--release-timeout-s", "10"),
    *("--profile-retry-s", "0.5", "--status-interval-s", "1", "--log-format", "text"),
    # A calibration changes plans, and the oracle knows only the user's manifest.
    *("--calibrate-after", "1000000"),
)


def target_us(objective: Mapping[str, Any], frontier: Frontier) -> float:
    """Return the iteration time that the objective asks for, without stragglers."""
    times_us = [round(1e6 * time_s) for time_s in frontier.time_s.tolist()]
    energies_mj = [round(1e3 * energy_j) for energy_j in frontier.energy_j.tolist()]
    least_us = times_us[energies_mj.index(min(energies_mj))]
    match objective["type"]:
        case "MaxThroughput":
            return times_us[0]
        case "MinEnergy":
            return least_us
        case "MaxSlowdown":
            return min(least_us, times_us[0] * (1 + float(objective["maxSlowdown"].rstrip("%")) / 100))
        case "Deadline":
            return min(least_us, objective["deadline"]["iterationTimeMicroseconds"])
        case "PowerCap":
            powers_w = [1000 * PIPELINES * e / t for e, t in zip(energies_mj, times_us, strict=True)]
            return next(
                t for t, power_w in zip(times_us, powers_w, strict=True) if power_w <= objective["powerCapWatts"]
            )
    raise AssertionError(objective)


@dataclass
class Subject:
    """One PerseusJob as its user knows it: the last manifest, the declared stragglers, and whether it exists."""

    name: str
    nodes: list[str]
    spec: dict[str, Any] = field(default_factory=lambda: {**SPEC, "objective": {"type": "MaxThroughput"}})
    declared: dict[int, float] = field(default_factory=dict)
    """Slowdown of every declared straggler, by pipeline."""
    exists: bool = False
    training: LightJob | None = None

    def points(self, frontier: Frontier) -> dict[int, int]:
        """Return the point that each pipeline must run."""
        times_us = [round(1e6 * time_s) for time_s in frontier.time_s.tolist()]
        stragglers = self.declared if self.spec.get("straggler", {}).get("mode") != "Ignore" else {}
        allowed_us = max([target_us(self.spec["objective"], frontier), *(s * times_us[0] for s in stragglers.values())])
        return {
            pipeline: max(0, bisect_right(times_us, allowed_us / stragglers.get(pipeline, 1.0) + 0.5) - 1)
            for pipeline in range(PIPELINES)
        }


class World:
    """Nodes, jobs and operators, and the edits and faults that a test applies to them."""

    def __init__(self, cluster: FleetCluster, seed: int) -> None:
        self.cluster, self.fleet = cluster, cluster.fleet
        self.dice = random.Random(seed)
        self.subjects: list[Subject] = []
        self.done: list[str] = [f"seed {seed}"]
        """Everything that was done, for the message of a failure."""
        self._drawn: Counter[str] = Counter()
        """How often each kind of edit was drawn."""

    async def add(self, *names: str) -> None:
        """Make and train a job for each name, each on two nodes, one of which it shares with the next job."""
        nodes = await self.cluster.add_nodes(len(names) + 1)
        await self.cluster.profile(PROFILE)
        for number, name in enumerate(names):
            self.subjects.append(Subject(name, nodes[number : number + PIPELINES]))
            await self.train(self.subjects[-1])
            await self.create(self.subjects[-1])

    # ------------------------------------------------------------------------------------------------- the oracle

    async def mismatch(self, subject: Subject) -> str:
        """Return what is wrong with a job; empty if nothing is."""
        if not subject.exists:
            if await self.find(subject) is not None:
                return f"{subject.name}: the PerseusJob is still there"
            return self.not_default(subject)
        if subject.training is None:
            return ""
        job = await self.find(subject)
        if job is None:
            return f"{subject.name}: the PerseusJob is not there"
        status, generation = job.get("status", {}), job["metadata"]["generation"]
        conditions = {c["type"]: c for c in status.get("conditions", ())}
        ready = conditions.get("Ready", {})
        if subject.spec.get("suspend") and status.get("observedGeneration") == generation:
            inactive = conditions.get("PlanApplied", {}).get("reason") in {"Suspended", "RecommendOnly"}
            return self.not_default(subject) or ("" if inactive else f"{subject.name}: not Suspended: {conditions}")
        if status.get("observedGeneration") != generation or ready.get("status") != "True":
            return f"{subject.name}: generation {generation}, not Ready: {ready}"
        if subject.spec.get("mode") == "Recommend":
            return self.not_default(subject)
        try:
            stored = await self.cluster.frontier(subject.name)
        except ApiException as error:
            if error.status != 404:
                raise
            return f"{subject.name}: the frontier that the status names is not there"
        if stored["spec"]["digest"] != status["frontier"]["digest"]:
            return f"{subject.name}: the PerseusFrontier holds another frontier than the status names"
        return self.not_planned(subject, Frontier.from_bytes(base64.b64decode(stored["spec"]["data"])))

    def not_default(self, subject: Subject) -> str:
        """Return which GPUs of the job are not at default clocks; empty if all are."""
        plans = self.fleet.plans(subject.training) if subject.training else {}
        held = sorted(rank.gpu_uuid for rank, plan in plans.items() if plan is not None)
        return f"{subject.name}: not at default clocks: {held}" if held else ""

    def not_planned(self, subject: Subject, frontier: Frontier) -> str:
        """Return a GPU of the job whose clocks are not those of its point; empty if there is none."""
        assert subject.training is not None
        points = subject.points(frontier)
        for rank, plan in self.fleet.plans(subject.training).items():
            first, last = frontier.stage_offset[rank.stage : rank.stage + 2].tolist()
            wanted = tuple(frontier.frequencies_mhz[points[rank.dp], first:last].tolist())
            if plan is None or plan.clocks_mhz != wanted:
                found = "default clocks" if plan is None else f"point {plan.point}"
                return f"{subject.name}: {rank.gpu_uuid} is at {found}, must be at point {points[rank.dp]}"
        return ""

    async def settle(self, what: str) -> None:
        """Wait until the oracle finds nothing wrong for three iterations."""
        correct = 0
        wrong = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while correct < 3:
                    await asyncio.sleep(ITERATION_S / 2 if wrong else ITERATION_S)
                    wrong = "; ".join([w for s in self.subjects if (w := await self.mismatch(s))])
                    correct = 0 if wrong else correct + 1
        except TimeoutError:
            status = [(await self.find(subject) or {}).get("status", {}) for subject in self.subjects]
            log = self.cluster.operators[-1].child.tail(40) if self.cluster.operators else ""
            pytest.fail(
                f"{what}: not settled after {PATIENCE_S:g} s: {wrong}\nhistory: {'; '.join(self.done)}\n"
                f"{json.dumps(status, indent=1)}\n{log}"
            )

    async def until(self, what: str, check: Callable[[], bool | Awaitable[bool]], every_s: float = 0.05) -> None:
        """Wait until a check returns true."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    found = check()
                    if found if isinstance(found, bool) else await found:
                        return
                    await asyncio.sleep(every_s)
        except TimeoutError:
            log = self.cluster.operators[-1].child.tail(40) if self.cluster.operators else ""
            pytest.fail(f"not {what} after {PATIENCE_S:g} s\nhistory: {'; '.join(self.done)}\n{log}")

    async def find(self, subject: Subject) -> dict[str, Any] | None:
        """Return the PerseusJob; None if it does not exist."""
        return (await self.cluster.jobs()).get(subject.name)

    # ------------------------------------------------------------------------------------------------- what users do

    async def create(self, subject: Subject) -> None:
        await self.cluster.apply(subject.name, subject.spec)
        subject.exists, subject.declared = True, {}

    async def delete(self, subject: Subject) -> None:
        await self.cluster.delete(subject.name)
        subject.exists = False

    async def recreate(self, subject: Subject) -> None:
        """Delete and create again, without waiting until the clocks are back."""
        await self.delete(subject)
        await self.create(subject)

    async def edit(self, subject: Subject, **changes: Any) -> None:
        """Set fields of the spec; None removes one. A merge patch, as by kubectl."""
        merged = {key: value for key, value in {**subject.spec, **changes}.items() if value is not None}
        if "objective" in changes:
            other = {"maxSlowdown": None, "deadline": None, "powerCapWatts": None}
            changes = {**changes, "objective": {**other, **changes["objective"]}}
        await self.cluster.patch(subject.name, {"spec": changes})
        subject.spec = merged

    async def declare(self, subject: Subject, declared: dict[int, float]) -> None:
        """Set or clear the straggler annotation."""
        text = ",".join(f"{pipeline}:0:{slowdown}" for pipeline, slowdown in declared.items()) or None
        await self.cluster.patch(subject.name, {"metadata": {"annotations": {keys.ANNOTATION_STRAGGLER: text}}})
        subject.declared = declared

    async def train(self, subject: Subject) -> None:
        subject.training = await self.cluster.start_training(subject.name, subject.nodes, WORK)

    async def untrain(self, subject: Subject) -> None:
        assert subject.training is not None
        await self.cluster.end_training(subject.training)
        subject.training = None

    def moves(self, subject: Subject, served: bool) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """Yield every valid edit of this job, by name.

        Args:
            subject: the job.
            served: whether an operator runs. Without one, edits that wait for it are left out.
        """
        dice = self.dice
        if not subject.exists:
            yield "create", lambda: self.create(subject)
            return
        deadline_us = round(WORK.iteration_us * dice.uniform(1.01, 1.3))
        objectives: list[dict[str, Any]] = [
            {"type": "MaxThroughput"},
            {"type": "MinEnergy"},
            {"type": "MaxSlowdown", "maxSlowdown": f"{dice.choice([0, 1, 3, 7.5, 20])}%"},
            {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": deadline_us}},
            {"type": "PowerCap", "powerCapWatts": dice.randint(1150, 1600)},
        ]
        for objective in objectives:
            yield json.dumps(objective), lambda objective=objective: self.edit(subject, objective=objective)
        other = "Enforce" if subject.spec.get("mode") == "Recommend" else "Recommend"
        yield other, lambda: self.edit(subject, mode=other)
        suspend = not subject.spec.get("suspend", False)
        yield f"suspend {suspend}", lambda: self.edit(subject, suspend=suspend)
        thresholds = {"slowdownThreshold": f"{dice.choice([6, 10, 20])}%", "confirmIterations": dice.randint(1, 5)}
        for mode in ("Automatic", "External", "Ignore"):
            yield f"straggler {mode}", lambda mode=mode: self.edit(subject, straggler={"mode": mode, **thresholds})
        slowdown = dice.choice([1.05, 1.1, 1.25])
        pipeline = dice.randrange(PIPELINES)
        yield f"declare {pipeline}:{slowdown}", lambda: self.declare(subject, {pipeline: slowdown})
        yield "declare none", lambda: self.declare(subject, {})
        points = dice.choice([10, 15, 20])
        yield f"points {points}", lambda: self.edit(subject, points=points)
        yield "delete", lambda: self.delete(subject)
        if served:
            yield "recreate", lambda: self.recreate(subject)
        if subject.training is None:
            yield "train", lambda: self.train(subject)
        else:
            yield "untrain", lambda: self.untrain(subject)

    async def move(self, subject: Subject | None = None, *, served: bool = True) -> None:
        """Make one valid edit of a kind that was drawn least often, so that a few dozen edits cover every kind.

        Args:
            subject: the job; None for any.
            served: whether an operator runs.
        """
        subject = subject or self.dice.choice([subject for subject in self.subjects if subject.exists or served])
        moves = list(self.moves(subject, served))
        fewest = min(self._drawn[kind_of(what)] for what, _ in moves)
        what, act = self.dice.choice([move for move in moves if self._drawn[kind_of(move[0])] == fewest])
        self._drawn[kind_of(what)] += 1
        self.done.append(f"{subject.name} {what}")
        await act()


def kind_of(move: str) -> str:
    """Return the name of an edit without its numbers."""
    return "".join(filter(str.isalpha, move))


@asynccontextmanager
async def world(
    *, admin: Path, operator: Path, folder: Path, namespace: str, seed: int, secure: bool = False
) -> AsyncIterator[World]:
    """Make a world on an API server that has the CRD.

    Args:
        admin: the administrator's kubeconfig.
        operator: the operator's kubeconfig, with the rights that the chart grants.
        folder: for logs and certificates.
        namespace: of the jobs; it is made here.
        seed: of every random choice.
        secure: whether operator and agents use mutual TLS.
    """
    tls = folder / "tls" if secure else None
    if tls is not None:
        write_pairs(tls, Authority("perseus-chaos"), ("perseus-agent", "perseus-operator"))
    with Processes(folder / "logs") as processes:
        async with (
            Fleet(iteration_s=ITERATION_S, tls=tls) as fleet,
            FleetCluster(
                fleet, admin=admin, operator=operator, namespace=namespace, processes=processes, folder=folder, tls=tls
            ) as cluster,
        ):
            made = World(cluster, seed)
            yield made
            await clean(made)


async def clean(made: World) -> None:
    """Delete the jobs that the test leaves."""
    for name in await made.cluster.jobs():
        try:
            await made.cluster.delete(name)
        except ApiException as error:  # the operator may have deleted it at the same time
            if error.status != 404:
                raise
