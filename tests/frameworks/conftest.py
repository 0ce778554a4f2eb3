"""Real training processes of real frameworks, on simulated GPUs that real agents drive.

Tests run in the project's environment; only the workers (``*_worker.py``) run where the frameworks are installed, as a
training image does: the client needs nothing of ours there. A worker says in ``<step>.<rank>.ready`` how far it is and
trains on until ``<step>.done`` appears, so that a test can meanwhile command the agent.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.agent_commander import AgentCommander

from perseus_agent.devices.nvml import NvmlDevices
from perseus_agent.errors import DeviceError
from perseus_core.rank import RankId
from perseus_sim.cluster.live_job import LiveJob, start_live_job
from perseus_sim.cluster.simulated_cluster import SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.training.live import tables_of
from perseus_solver.schedules import Schedule, build_schedule, read_schedule

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
A100 = MODELS["a100"]
CLOCKS_MHZ = (1410, 1200, 990)
INSTRUCTION_US = 4_000
PATIENCE_S = 150.0
PLANNED_ITERATIONS = 2
Mark = tuple[str, int, int]


@pytest.fixture(scope="session")
def python() -> Path:
    """The interpreter that has the frameworks."""
    found = Path(os.environ.get("PERSEUS_FRAMEWORKS_PYTHON", REPOSITORY / ".venv-frameworks" / "bin" / "python"))
    if not found.exists():
        pytest.skip(f"no training frameworks at {found}: make test-frameworks installs them")
    return found


@dataclass(frozen=True)
class Megatron:
    """A version of Megatron-Core beside the one that is installed."""

    path: Path
    """The folder of its package, for a worker's PYTHONPATH."""
    version: str


@pytest.fixture(scope="session")
def other_megatron(python: Path) -> Megatron:
    """The newest, which asks for a newer Python than ours, or the one in the folder that PERSEUS_MEGATRON names."""
    path = Path(os.environ.get("PERSEUS_MEGATRON", python.parents[1] / "newest")).absolute()
    found = next((one.version for one in distributions(name="megatron-core", path=[str(path)])), None)
    if found is None:
        pytest.skip(f"no other Megatron-Core in {path}: make frameworks installs the newest")
    return Megatron(path, found)


@pytest.fixture
def real_uuid() -> str:
    """The GPU that torch calls the first."""
    try:
        devices = NvmlDevices(privileged=lambda: False)
    except DeviceError as error:
        pytest.skip(f"no NVIDIA driver: {error}")
    uuid = devices.devices[0].identity.uuid
    devices.close()
    return uuid


@pytest.fixture(scope="session")
def run_alone(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run a worker in one process without an agent; returns what it wrote to the file it was given."""

    def run(worker: str, *arguments: str) -> Any:
        result = tmp_path_factory.mktemp("alone") / "result.json"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PERSEUS")}
        ended = subprocess.run(
            [str(python), str(HERE / worker), str(result), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE_S,  # three frameworks are read from disk
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
        return json.loads(result.read_text())

    return run


@dataclass
class Followed:
    """What became of one step of a worker (a schedule, say)."""

    schedule: Schedule
    said: list[dict[str, Any]]
    """By rank: what it wrote when it was ready, and what it found at the end."""
    ranks: list[tuple[RankId, str]]
    """As the agent knows them, with their GPUs."""
    marks: dict[int, list[list[Mark]]] = field(default_factory=dict)
    """By stage: instructions of each iteration as marked, in order, from the first that was followed."""
    clocks_mhz: dict[int, list[list[int]]] = field(default_factory=dict)
    """By stage: the clocks that they ran at."""
    plan_mhz: dict[int, list[int]] = field(default_factory=dict)
    history_mhz: dict[int, list[int]] = field(default_factory=dict)
    """By stage: what the agent wrote to the GPU while the plan was in force."""
    complete: dict[int, int] = field(default_factory=dict)
    """By stage: iterations that the agent reported with every instruction timed."""
    ranks_per_stage: int = 1
    """Where several processes share a stage, what is said to be by stage is by process."""

    def assert_marked_as_scheduled(self) -> None:
        """Every iteration of every rank was marked in the order that was exported."""
        for stage, iterations in self.marks.items():
            assert len(iterations) > PLANNED_ITERATIONS
            for marks in iterations:
                assert marks == self.schedule.of_stage(stage // self.ranks_per_stage)

    def assert_planned_clocks(self) -> None:
        """Instructions ran at the planned clocks, and the agent wrote those, in that order, and nothing else."""
        for stage in self.plan_mhz:
            exact = self._exact_iterations(stage)
            assert exact >= PLANNED_ITERATIONS, f"{exact} iterations at the planned clocks on stage {stage}"
            assert set(self.history_mhz[stage]) <= set(CLOCKS_MHZ)
            assert self._written_in_order(stage)

    def runs_at_planned_clocks(self) -> bool:
        """Whether enough of that has been seen."""
        return all(
            self._exact_iterations(stage) >= PLANNED_ITERATIONS and self._written_in_order(stage)
            for stage in self.plan_mhz
        )

    def _exact_iterations(self, stage: int) -> int:
        return sum(clocks == self.plan_mhz[stage] for clocks in self.clocks_mhz[stage])

    def _written_in_order(self, stage: int) -> bool:
        history, wanted = self.history_mhz[stage], 2 * self.plan_mhz[stage]
        return any(history[k : k + len(wanted)] == wanted for k in range(len(history)))


class Harness:
    """A cluster of one node, and a job of so many stages that runs a worker."""

    def __init__(self, cluster: SimulatedCluster, python: Path) -> None:
        self._cluster = cluster
        self._python = python
        self._nodes = 0

    def follow(
        self,
        worker: str,
        steps: Sequence[str],
        *,
        stages: int = 2,
        pipelines: int = 1,
        ranks_per_stage: int = 1,
        path: Path | None = None,
    ) -> dict[str, Followed]:
        """Run a worker's steps one after the other; under each, push a plan whose clock changes every instruction.

        ``ranks_per_stage``: processes that share a stage; those of one stage have global ranks in a row. ``path``: a
        folder of packages that go before those of the interpreter.
        """
        processes = stages * ranks_per_stage
        self._nodes += 1
        name = f"job-{self._nodes}"
        cluster = self._cluster
        node = cluster.add_node(f"node-{self._nodes}", processes * pipelines, A100, clocks_mhz=CLOCKS_MHZ)
        shared = cluster.folder / f"{name}-shared"
        shared.mkdir()
        job = start_live_job(
            cluster,
            node,
            name,
            [str(HERE / worker), str(shared), *steps],
            [tables_of(A100, CLOCKS_MHZ, INSTRUCTION_US)] * processes,
            python=self._python,
            pipelines=pipelines,
            await_agent=True,
            environment={"PYTHONPATH": str(path)} if path else None,
        )
        found: dict[str, Followed] = {}
        try:
            for step in steps:
                files = [shared / f"{step}.{rank}.ready" for rank in range(processes * pipelines)]
                wait_for(lambda files=files: all(file.exists() for file in files), job)
                with AgentCommander(cluster, node, job, f"{name}-{step}") as commander:
                    found[step] = self._command(commander, job, shared, step, stages, pipelines, ranks_per_stage)
                (shared / f"{step}.done").touch()
            wait_for(lambda: all(not child.running for child in job.children.values()), job)
            for step, followed in found.items():
                for rank, said in enumerate(followed.said):
                    said.update(json.loads((shared / f"{step}.{rank}.result").read_text()))
        finally:
            job.stop()
        return found

    def ranks(self, script: str, *arguments: str, stages: int, pipelines: int) -> dict[str, list[Any]]:
        """Run a script without a plan until the agent knows all its ranks; return their GPUs, found and expected."""
        self._nodes += 1
        name = f"job-{self._nodes}"
        node = self._cluster.add_node(f"node-{self._nodes}", stages * pipelines, A100, clocks_mhz=CLOCKS_MHZ)
        tables = [tables_of(A100, CLOCKS_MHZ, INSTRUCTION_US)] * stages
        command = [str(HERE / script), *arguments]
        job = start_live_job(self._cluster, node, name, command, tables, python=self._python, pipelines=pipelines)
        try:
            with AgentCommander(self._cluster, node, job, name) as commander:
                wait_for(lambda: sum(bool(rank.gpu_uuid) for rank in commander.ranks()) == stages * pipelines, job)
                wait_for(lambda: min(rank.iteration for rank in commander.ranks()) > 1, job)
                found = [(_rank_id(rank), rank.gpu_uuid) for rank in commander.ranks()]
        finally:
            job.stop()
        return {"found": sorted(found), "expected": [(rank, gpu.spec.uuid) for rank, gpu in sorted(job.gpus.items())]}

    def follow_steps(self, worker: str, loop: str, *, ranks: int) -> dict[str, Any]:
        """Run a worker whose ranks run whole iterations, and a plan of one clock; return what ranks said and did."""
        self._nodes += 1
        name = f"job-{self._nodes}"
        node = self._cluster.add_node(f"node-{self._nodes}", ranks, A100, clocks_mhz=CLOCKS_MHZ)
        shared = self._cluster.folder / f"{name}-shared"
        shared.mkdir()
        job = start_live_job(
            self._cluster,
            node,
            name,
            [str(HERE / worker), str(shared), loop],
            [tables_of(A100, CLOCKS_MHZ, INSTRUCTION_US)],
            python=self._python,
            pipelines=ranks,
            await_agent=True,
        )
        try:
            with AgentCommander(self._cluster, node, job, name) as commander:
                wait_for(lambda: sum(bool(rank.gpu_uuid) for rank in commander.ranks()) == ranks, job)
                found = sorted(_rank_id(rank) for rank in commander.ranks())
                commander.push(build_schedule("Steps", stages=1, microbatches=1), [[[min(CLOCKS_MHZ)]]])
                with commander.telemetry() as reports:
                    commander.select(0, ranks)
                    planned: Counter[int] = Counter()
                    while len(planned) < ranks or min(planned.values()) <= PLANNED_ITERATIONS:
                        report = next(reports)
                        job.check()
                        planned[report.data_parallel_rank] += report.planned and bool(report.durations_us)
                (shared / "done").touch()
                wait_for(lambda: all(not child.running for child in job.children.values()), job)
            job.check()
            said = [json.loads((shared / f"{loop}.{rank}.result").read_text()) for rank in range(ranks)]
            executed = [job.executed(RankId(rank, 0)) for rank in range(ranks)]
        finally:
            job.stop()
        return {
            "ranks": found,
            "said": said,
            "executed": executed,
            "default_mhz": max(CLOCKS_MHZ),
            "planned_mhz": min(CLOCKS_MHZ),
        }

    def _command(
        self,
        commander: AgentCommander,
        job: LiveJob,
        shared: Path,
        step: str,
        stages: int,
        pipelines: int,
        ranks_per_stage: int,
    ) -> Followed:
        processes = stages * ranks_per_stage
        said = [json.loads((shared / f"{step}.{rank}.ready").read_text()) for rank in range(processes * pipelines)]
        schedule = read_schedule(shared / f"{step}.csv")
        # A process that has said hello is known at once, with its GPU only after the kubelet has been asked.
        wait_for(lambda: sum(bool(rank.gpu_uuid) for rank in commander.ranks()) == processes * pipelines, job)
        ranks = sorted((_rank_id(rank), rank.gpu_uuid) for rank in commander.ranks())
        followed = Followed(schedule, said, ranks, ranks_per_stage=ranks_per_stage)
        counts = [b - a for a, b in pairwise(schedule.stage_offset.tolist())]
        # A cycle of clocks whose last differs from its first, so that every instruction begins with a change.
        for stage, count in enumerate(counts):
            plan = [CLOCKS_MHZ[k % 3] for k in range(count)]
            if plan[-1] == plan[0]:
                plan[-1] = CLOCKS_MHZ[1] if plan[-2] != CLOCKS_MHZ[1] else CLOCKS_MHZ[2]
            for process in range(stage * ranks_per_stage, (stage + 1) * ranks_per_stage):
                followed.plan_mhz[process] = plan
        commander.push(schedule, [[followed.plan_mhz[stage * ranks_per_stage]] for stage in range(stages)])
        gpus = {process: job.gpus[RankId(0, process)] for process in range(processes)}
        before = {stage: gpu.requested().number for stage, gpu in gpus.items()}
        with commander.telemetry() as reports:
            commander.select(0, 1 + max(rank.dp for rank, _ in ranks))
            deadline_s = time.monotonic() + PATIENCE_S
            while True:
                report = next(reports)
                job.check()
                if report.planned and report.durations_us:
                    # Ranks of one stage share its tensors, or are of several pipelines.
                    which = max(report.tensor_parallel_rank, report.data_parallel_rank % ranks_per_stage)
                    process = report.stage * ranks_per_stage + which
                    followed.complete[process] = followed.complete.get(process, 0) + 1
                if len(followed.complete) < processes or min(followed.complete.values()) <= PLANNED_ITERATIONS:
                    assert time.monotonic() < deadline_s, "the plan was not followed in time"
                    continue
                for stage, gpu in gpus.items():
                    executed = job.executed(RankId(0, stage))[said[stage]["first_iteration"] :]
                    followed.marks[stage] = [[tuple(m[:3]) for m in one["instructions"]] for one in executed]  # type: ignore[misc]
                    followed.clocks_mhz[stage] = [[m[3] for m in one["instructions"]] for one in executed]
                    followed.history_mhz[stage] = [change.mhz for change in gpu.history(before[stage])]
                # On a busy machine a clock comes late now and then: the tests ask for iterations without.
                if followed.runs_at_planned_clocks() or time.monotonic() > deadline_s:
                    break
        return followed


def _rank_id(rank: Any) -> RankId:
    return RankId(rank.data_parallel_rank, rank.stage, rank.tensor_parallel_rank)


def wait_for(condition: Callable[[], bool], job: LiveJob) -> None:
    """Wait; a rank that fails ends the wait with the end of its log."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        job.check()
        assert time.monotonic() < deadline_s, "\n".join(child.tail() for child in job.children.values())
        time.sleep(0.02)


@pytest.fixture(scope="session")
def harness(python: Path) -> Iterator[Harness]:
    """See ``Harness``."""
    with SimulatedCluster() as cluster:
        yield Harness(cluster, python)
