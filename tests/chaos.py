"""Jobs under random edits and faults, and the oracle: every GPU's clock is its plan's, or the default.

What a GPU must run at is worked out here a second time, from the manifest as the user last wrote it and the frontier in
the job's ConfigMap; what it does run at, the light agents know. Everything random comes from a seed that a failing test
prints. Used by tests/integration (embedded server, bounded) and tests/e2e (real server, with faults).
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
from tests.doubles.fleet import Fleet, LightJob, Work
from tests.doubles.fleet_cluster import FleetCluster

from perseus_proto import keys
from perseus_sim.cluster.pki import Authority, write_pairs
from perseus_sim.gpus.model import profile_csv
from perseus_sim.processes import Processes
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
"""Of everything together: an operator, an API server, agents and a solver share what the machine has left."""
FLAGS = (
    # Renewed with six seconds to go: at a load of seven for each core, a renewal came 2.4 s late.
    *("--lease-ttl-s", "9", "--agent-timeout-s", "1", "--agent-poll-s", "1", "--release-timeout-s", "10"),
    *("--profile-retry-s", "0.5", "--status-interval-s", "1", "--log-format", "text"),
    # What is learnt of a run changes its plans, and the oracle knows only what the user wrote.
    *("--calibrate-after", "1000000"),
)


def target_us(objective: Mapping[str, Any], frontier: Frontier) -> float:
    """How long an iteration may take by the objective alone."""
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
    """One PerseusJob as its user sees it."""

    name: str
    nodes: list[str]
    spec: dict[str, Any] = field(default_factory=lambda: {**SPEC, "objective": {"type": "MaxThroughput"}})
    told: dict[int, float] = field(default_factory=dict)
    exists: bool = False
    training: LightJob | None = None

    def points(self, frontier: Frontier) -> dict[int, int]:
        """The point that each pipeline must run at."""
        times_us = [round(1e6 * time_s) for time_s in frontier.time_s.tolist()]
        heard = self.told if self.spec.get("straggler", {}).get("mode") != "Off" else {}
        allowed_us = max([target_us(self.spec["objective"], frontier), *(s * times_us[0] for s in heard.values())])
        return {
            pipeline: max(0, bisect_right(times_us, allowed_us / heard.get(pipeline, 1.0) + 0.5) - 1)
            for pipeline in range(PIPELINES)
        }


class World:
    """Nodes, jobs, operators; and what may happen to them."""

    def __init__(self, cluster: FleetCluster, seed: int) -> None:
        self.cluster, self.fleet = cluster, cluster.fleet
        self.dice = random.Random(seed)
        self.subjects: list[Subject] = []
        self.done: list[str] = [f"seed {seed}"]
        """What has happened, for who must understand a failure."""
        self._drawn: Counter[str] = Counter()
        """How often each kind of edit."""

    async def add(self, *names: str) -> None:
        """A job for each name, each on two nodes, of which one is its neighbour's too."""
        nodes = await self.cluster.add_nodes(len(names) + 1)
        await self.cluster.profile(PROFILE)
        for number, name in enumerate(names):
            self.subjects.append(Subject(name, nodes[number : number + PIPELINES]))
            await self.train(self.subjects[-1])
            await self.create(self.subjects[-1])

    # ------------------------------------------------------------------------------------------------- the oracle

    async def mismatch(self, subject: Subject) -> str:
        """What is not as it must be; empty: all is."""
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
        said = {c["type"]: c for c in status.get("conditions", ())}
        ready = said.get("Ready", {})
        if subject.spec.get("suspend") and status.get("observedGeneration") == generation:
            quiet = said.get("PlanApplied", {}).get("reason") in {"Suspended", "RecommendOnly"}
            return self.not_default(subject) or ("" if quiet else f"{subject.name}: not Suspended: {said}")
        if status.get("observedGeneration") != generation or ready.get("status") != "True":
            return f"{subject.name}: generation {generation}, not Ready: {ready}"
        if subject.spec.get("mode") == "Recommend":
            return self.not_default(subject)
        try:
            kept = await self.cluster.core.read_namespaced_config_map(
                f"{subject.name}-frontier", self.cluster.namespace
            )
        except ApiException as error:
            if error.status != 404:
                raise
            return f"{subject.name}: the frontier that the status names is not there"
        if kept.data["digest"] != status["frontier"]["digest"]:
            return f"{subject.name}: the ConfigMap keeps another frontier than the status names"
        return self.not_planned(subject, Frontier.from_bytes(base64.b64decode(kept.binary_data["frontier"])))

    def not_default(self, subject: Subject) -> str:
        """Which GPUs of the job are held at a clock."""
        plans = self.fleet.plans(subject.training) if subject.training else {}
        held = sorted(rank.gpu_uuid for rank, plan in plans.items() if plan is not None)
        return f"{subject.name}: not at default clocks: {held}" if held else ""

    def not_planned(self, subject: Subject, frontier: Frontier) -> str:
        """Which GPUs of the job are not where the frontier's point has them."""
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
        """Until the oracle has nothing to say, and three iterations on still has not."""
        calm = 0
        wrong = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while calm < 3:
                    await asyncio.sleep(ITERATION_S / 2 if wrong else ITERATION_S)
                    wrong = "; ".join([w for s in self.subjects if (w := await self.mismatch(s))])
                    calm = 0 if wrong else calm + 1
        except TimeoutError:
            status = [(await self.find(subject) or {}).get("status", {}) for subject in self.subjects]
            log = self.cluster.operators[-1].child.tail(40) if self.cluster.operators else ""
            pytest.fail(
                f"{what}: not settled after {PATIENCE_S:g} s: {wrong}\nhistory: {'; '.join(self.done)}\n"
                f"{json.dumps(status, indent=1)}\n{log}"
            )

    async def until(self, what: str, check: Callable[[], bool | Awaitable[bool]], every_s: float = 0.05) -> None:
        """Until it holds."""
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
        """The PerseusJob; None: there is none."""
        return (await self.cluster.jobs()).get(subject.name)

    # ------------------------------------------------------------------------------------------------- what users do

    async def create(self, subject: Subject) -> None:
        await self.cluster.apply(subject.name, subject.spec)
        subject.exists, subject.told = True, {}

    async def delete(self, subject: Subject) -> None:
        await self.cluster.delete(subject.name)
        subject.exists = False

    async def recreate(self, subject: Subject) -> None:
        """Delete, wait for the finalizer, create again."""
        await self.delete(subject)

        async def gone() -> bool:
            return await self.find(subject) is None

        await self.until(f"{subject.name} gone", gone)
        await self.create(subject)

    async def edit(self, subject: Subject, **changes: Any) -> None:
        """Set fields of the spec; None removes one. A merge patch, as by kubectl."""
        merged = {key: value for key, value in {**subject.spec, **changes}.items() if value is not None}
        if "objective" in changes:
            other = {"maxSlowdown": None, "deadline": None, "powerCapWatts": None}
            changes = {**changes, "objective": {**other, **changes["objective"]}}
        await self.cluster.patch(subject.name, {"spec": changes})
        subject.spec = merged

    async def tell(self, subject: Subject, told: dict[int, float]) -> None:
        """Set or clear the straggler annotation."""
        text = ",".join(f"{pipeline}:0:{degree}" for pipeline, degree in told.items()) or None
        await self.cluster.patch(subject.name, {"metadata": {"annotations": {keys.ANNOTATION_STRAGGLER: text}}})
        subject.told = told

    async def train(self, subject: Subject) -> None:
        subject.training = await self.cluster.start_training(subject.name, subject.nodes, WORK)

    async def untrain(self, subject: Subject) -> None:
        assert subject.training is not None
        await self.cluster.end_training(subject.training)
        subject.training = None

    def moves(self, subject: Subject, served: bool) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """Everything that a user may validly do to this job now; what waits for an operator only if one runs."""
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
        for mode in ("Automatic", "External", "Off"):
            yield f"straggler {mode}", lambda mode=mode: self.edit(subject, straggler={"mode": mode, **thresholds})
        degree = dice.choice([1.05, 1.1, 1.25])
        pipeline = dice.randrange(PIPELINES)
        yield f"told {pipeline}:{degree}", lambda: self.tell(subject, {pipeline: degree})
        yield "told none", lambda: self.tell(subject, {})
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
        """One valid edit of this job or any, of a kind that has been done least often, so that a few dozen are some of
        everything; ``served``: whether an operator runs."""
        subject = subject or self.dice.choice([subject for subject in self.subjects if subject.exists or served])
        moves = list(self.moves(subject, served))
        seldom = min(self._drawn[kind_of(what)] for what, _ in moves)
        what, act = self.dice.choice([move for move in moves if self._drawn[kind_of(move[0])] == seldom])
        self._drawn[kind_of(what)] += 1
        self.done.append(f"{subject.name} {what}")
        if not subject.exists:  # the finalizer of the one before may still be at work

            async def gone() -> bool:
                return await self.find(subject) is None

            await self.until(f"{subject.name} gone", gone)
        await act()


def kind_of(move: str) -> str:
    """A move without its numbers."""
    return "".join(filter(str.isalpha, move))


@asynccontextmanager
async def world(
    *, admin: Path, operator: Path, folder: Path, namespace: str, seed: int, secure: bool = False
) -> AsyncIterator[World]:
    """A world on an API server whose CRD is installed; the operator's login may do there what the chart grants."""
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
    """No finalizer may hold what the test leaves behind."""
    for name, job in (await made.cluster.jobs()).items():
        try:
            if job["metadata"].get("finalizers"):
                await made.cluster.patch(name, {"metadata": {"finalizers": None}})
            await made.cluster.delete(name)
        except ApiException as error:  # the operator may be as quick
            if error.status != 404:
                raise
