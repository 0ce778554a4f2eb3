"""A cluster in one process: nodes, operators, jobs and their users, all of which one seed orders."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from tests.simulation import machine
from tests.simulation.answers import answer
from tests.simulation.api import ApiConnection, ApiFaults, ApiServer
from tests.simulation.gpus import Gpu
from tests.simulation.loop import SimulatedLoop
from tests.simulation.network import Network, SimulatedPool
from tests.simulation.node import SimulatedNode
from tests.simulation.page import Rights, view
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.serving import Serving
from tests.simulation.training import Rank, TrainingJob, Work

from perseus_core import keys
from perseus_core.instruction import Instruction, InstructionKind
from perseus_core.marks import MarkSource
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.operator import Operator
from perseus_operator.controller.settings import Settings
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.services import Services
from perseus_operator.objects.values import ConfigMap, Pod
from perseus_operator.replicas.epochs import Epochs
from perseus_operator.replicas.shards import Replica
from perseus_operator.solving.pool import SolverPool
from perseus_operator.solving.process import Outcome, Task, Verdict
from perseus_operator.solving.slots import FairSlots
from perseus_sim.profiles import profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

NAMESPACE: Final = "team-a"
BLOCKING_W: Final = 83.64
MICROBATCHES: Final = 3
STAGES: Final = 2
PIPELINES: Final = 2
FORWARD_S: Final = 0.12
POINTS: Final = 8
BASELINE: Final = 3
"""Iterations at default clocks, by which bound and savings are measured."""
BUDGET: Final = "site"
PLANNED_W: Final = (2_400.0, 2_850.0)
"""Of the jobs together, what they need and what they like: the planned one 777 to 1,226 W, the other one, whose clock
is fixed, is taken for the limits of its GPUs, 1,600 W."""
NODES: Final = 8
TRAINS: Final = ((0, 1, 2, 3), (3, 4, 5, 6))
"""The nodes of each training job, with a GPU of each: pipeline by pipeline, stage by stage. One node has everything."""
SERVES: Final = (3, 7)
"""The nodes that have an engine."""
FREE: Final = 3
"""The node with a GPU that nobody has handed over."""
LATE: Final = 0.2
"""Of the ways in which workers of the solver service fail, the share that is late; all others answer at once."""
LEASE_TTL_S: Final = 6.0
RESTART_S: Final = (0.5, 3.0)


def _gpus(number: int) -> int:
    """How many a node has: of each training job, nobody's, and last an engine's."""
    return sum(number in nodes for nodes in TRAINS) + (number == FREE) + (number in SERVES)


@lru_cache(maxsize=1)
def _csv() -> str:
    return profile_csv(STAGES, forward_s=FORWARD_S)


@lru_cache(maxsize=1)
def work() -> Work:
    """What a pipeline executes."""
    schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
    problem = build_problem(read_profile(_csv(), stages=STAGES), schedule, blocking_power_w=BLOCKING_W)
    stages = [
        [Instruction(InstructionKind[k.upper()], m, c) for k, m, c in schedule.of_stage(stage)]
        for stage in range(STAGES)
    ]
    costs = {
        (table.stage, int(table.kind), clock): (time_s, energy_j)
        for table in problem.options
        for clock, time_s, energy_j in zip(
            table.frequency_mhz.tolist(), table.time_s.tolist(), table.energy_j.tolist(), strict=True
        )
    }
    return Work(stages, costs)


class Solvers:
    """The solver's workers: the same functions, in this process; their time is what the seed says."""

    def __init__(self, scheduler: Scheduler, lie: Callable[[], float | None] = lambda: None) -> None:
        """``lie``: how what they answer is changed; None: they are honest."""
        self.slots = FairSlots(2)
        self._scheduler = scheduler
        self._lie = lie

    async def run(self, task: Task, request: bytes, most_bytes: int) -> Verdict:
        draw = self._scheduler.random
        await asyncio.sleep(draw.uniform(0.2, 1.5))
        verdict, way = answer(self._scheduler, task, request), self._lie()
        if way is None or verdict.outcome is not Outcome.ANSWERED:
            return verdict
        if way < LATE:
            await asyncio.sleep(draw.uniform(5.0, 20.0))
            return verdict
        return replace(verdict, answer=lie(verdict.answer, way, most_bytes, draw))


def lie(answer: bytes, way: float, most_bytes: int, draw: random.Random) -> bytes:
    """What a worker of another tenant may answer in place of this: nothing, a part, another one, or anything."""
    match int(way * 5):
        case 1:
            return answer[: draw.randrange(len(answer))]
        case 2:
            place = draw.randrange(len(answer))
            return answer[:place] + bytes([answer[place] ^ 1 << draw.randrange(8)]) + answer[place + 1 :]
        case 3:
            return draw.randbytes(min(most_bytes, 100_000))
        case _:
            return b'{"a": ' * min(most_bytes // 6, 10_000)


@dataclass
class Replicated:
    """One replica of the operator: a place in which one process after another runs."""

    name: str
    process: Process
    api: ApiFaults = field(default_factory=ApiFaults)
    connection: ApiConnection | None = None
    operator: Operator | None = None
    loop: SimulatedLoop | None = None
    past: list[Any] = field(default_factory=list)
    """What killed processes have left in memory: it must not be collected, which would run their clean-up."""


class World:
    """See the module."""

    def __init__(self, seed: int, folder: Path, *, replicas: int = 2) -> None:
        self.scheduler = Scheduler(seed)
        machine.use(self.scheduler)
        machine.sync[:] = [self._sync]
        self.nodes = {
            f"node-{number}": SimulatedNode(f"node-{number}", self.scheduler, folder / f"node-{number}", _gpus(number))
            for number in range(NODES)
        }
        named = list(self.nodes)
        self.nodes_of = {f"job-{job}": [named[number] for number in numbers] for job, numbers in enumerate(TRAINS)}
        """The nodes of each training job."""
        agents = {f"agent-{name}": (name, f"{name}:9500") for name in self.nodes}
        self.api = ApiServer(self.scheduler, agents)
        self.api.config_maps["profile"] = ConfigMap("profile", {keys.PROFILE_KEY: _csv()}, {})
        self.network = Network(self.scheduler, self.nodes)
        self.settings = Settings(insecure=True, lease_ttl_s=LEASE_TTL_S, agent_timeout_s=1.5)
        self.replicas = [Replicated(f"operator-{n}", Process(f"operator-{n}")) for n in range(replicas)]
        self.training: dict[str, TrainingJob] = {}
        self.on_gpu: dict[str, Rank] = {}
        """The process that was last started on each GPU."""
        self.specs: dict[str, Any] = {}
        self.uids: dict[str, str] = {}
        self.misedited: dict[str, tuple[str, JobRunner | None]] = {}
        """Jobs whose spec is none: the field that is wrong, and what served it then by the spec before, if any."""
        servers = {named[number]: self.nodes[named[number]] for number in SERVES}
        self.serving = Serving(self.scheduler, self.api, servers)
        self._pods: dict[str, Pod] = {}
        self._number = 0
        self.rights = Rights()
        """Of a viewer of the operator's page."""
        self.solvers_lie: float | None = None
        """The workers of the solver service answer what cannot be, in a way that this value says."""
        self._marks = [self.scheduler.random.choice(list(MarkSource)) for _ in TRAINS]

    def _sync(self) -> OSError | None:
        process = self.scheduler.current
        node = self.nodes.get(process.name.partition("/")[0]) if process else None
        if node is None or process is None:
            return None
        process.calls += 1  # the kernel finishes what it has begun
        takes_s = self.scheduler.random.uniform(0.0005, 0.004) + node.disk.slow_s
        self.scheduler.after(takes_s, lambda: self.scheduler.leave(process, 1))
        self.scheduler.pause(takes_s)
        return machine.full_disk() if node.disk.full else None

    # ------------------------------------------------------------------------------------------------ life

    def start(self) -> None:
        """Start everything."""
        for node in self.nodes.values():
            node.start()
        for replica in self.replicas:
            self.start_operator(replica)
        for number in range(len(TRAINS)):
            self.create_job(f"job-{number}", number)
        for name in self.serving.nodes:
            self.serving.start_pod(name)
        self.serving.apply()

    def start_operator(self, replica: Replicated) -> None:
        """Start a replica's next process."""
        if replica.connection is not None:
            replica.past.append((replica.loop, replica.operator, replica.connection))
            self.api.connections.remove(replica.connection)
        process = replica.process = Process(replica.name)
        loop = replica.loop = SimulatedLoop(self.scheduler, process)
        replica.operator = None
        connection = replica.connection = ApiConnection(self.api, process, replica.api)
        connection.loop = loop
        loop.call_soon(lambda: loop.create_task(self._run_operator(replica, process, connection)))

    async def _run_operator(self, replica: Replicated, process: Process, connection: ApiConnection) -> None:
        """As ``Process.start`` of the operator's ``__main__``, with this cluster's clients."""
        from perseus_operator.errors import KubeError

        self._number += 1
        identity = f"{replica.name}_{self._number}"
        while True:
            try:
                epoch = await connection.next_epoch()
                break
            except KubeError:
                await asyncio.sleep(1.0)  # Kubernetes starts it again
        service = Solvers(self.scheduler, lambda: self.solvers_lie)
        solver = SolverPool(workers=1, timeout_s=60.0, memory_mib=4096, service=service)
        solver._restorers = Solvers(self.scheduler)  # type: ignore[assignment]  # processes of the operator's pod
        services = Services(
            kube=connection,  # type: ignore[arg-type]  # as far as an operator of one namespace asks
            agents=SimulatedPool(self.network, process, timeout_s=self.settings.agent_timeout_s),
            solver=solver,
            metrics=Metrics(),
            epochs=Epochs(connection, identity),
            limits=self.settings.limits,
            namespaces=self.settings.namespace_list,
            status_interval_s=self.settings.status_interval_s,
        )
        member = Replica(connection, identity, epoch)
        operator = Operator(self.settings, connection, services, member)  # type: ignore[arg-type]
        connection.operator = operator
        connection.relist()
        await operator.start()
        replica.operator = operator
        rights = lambda: view(self.scheduler, replica.name, NAMESPACE, replica.api, self.rights)  # noqa: E731
        self.scheduler.spawn(process, "page", rights)
        self.scheduler.note(f"{replica.name} serves with epoch {epoch}")

    def kill_operator(self, replica: Replicated) -> None:
        """SIGKILL, and the kubelet starts it again."""
        if replica.process.alive:
            self.scheduler.kill(replica.process)
            self.scheduler.after(self.scheduler.random.uniform(*RESTART_S), lambda: self.start_again(replica))

    def start_again(self, replica: Replicated) -> None:
        """Start a replica that has been killed, unless somebody has."""
        if not replica.process.alive:
            self.start_operator(replica)

    # ------------------------------------------------------------------------------------------------ users

    def create_job(self, name: str, number: int) -> None:
        """A user starts pods, and creates a PerseusJob for them."""
        self._number += 1
        self.start_training(name, number)
        spec: dict[str, Any] = {
            "pipeline": {
                "schedule": "1F1B",
                "stages": STAGES,
                "microbatches": MICROBATCHES,
                "dataParallel": PIPELINES,
            },
            "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": round(1000 * BLOCKING_W)},
            "objective": {"type": "MaxSlowdown", "maxSlowdown": "5%"},
            "baselineIterations": BASELINE,
            "points": POINTS,
        }
        if number % 2:
            spec = {"objective": {"type": "FixedClock", "clockMegahertz": 1110}}
        self.specs[name] = spec
        self.apply_job(name)

    def apply_job(self, name: str) -> None:
        """A user creates the PerseusJob, again with the spec that it had."""
        self._number += 1
        self.misedited.pop(name, None)
        self.uids[name] = f"uid-{name}-{self._number}"
        self.api.apply(NAMESPACE, name, self.uids[name], json.loads(json.dumps(self.specs[name])))

    def edit_job(self, name: str, changes: Mapping[str, Any]) -> None:
        """A user edits the spec."""
        self.specs[name] = {**self.specs[name], **changes}
        self.misedited.pop(name, None)
        if name in self.uids:
            self.api.apply(NAMESPACE, name, self.uids[name], json.loads(json.dumps(self.specs[name])))

    def delete_job(self, name: str) -> None:
        """A user deletes the PerseusJob; training goes on."""
        self.misedited.pop(name, None)
        if name in self.uids:
            self.api.delete(self.uids.pop(name))

    def runner_of(self, name: str) -> JobRunner | None:
        """What serves a PerseusJob; None: no replica does."""
        for replica in self.replicas:
            runner = replica.operator._runners.get(self.uids.get(name, "")) if replica.operator is not None else None
            if runner is not None and replica.process.alive:
                return runner
        return None

    def misedit_job(self, name: str, mistake: Mapping[str, Any]) -> None:
        """A user writes a spec that is none."""
        if name in self.uids:
            runner = self.runner_of(name)
            accepted = runner is not None and runner.job.spec is not None
            self.misedited[name] = next(iter(mistake)), runner if accepted else None
            self.api.apply(NAMESPACE, name, self.uids[name], json.loads(json.dumps({**self.specs[name], **mistake})))

    def start_training(self, name: str, number: int) -> None:
        """Start the job's pods: on each of its nodes one, with a GPU."""
        if name in self.training:
            self.training[name].end()
        job = self.training[name] = TrainingJob(NAMESPACE, name, work(), self.scheduler, self._marks[number])
        places = []
        for node in map(self.nodes.__getitem__, self.nodes_of[name]):
            self._number += 1
            pod = Pod(f"pod-{self._number}", NAMESPACE, f"{name}-{node.name}", node.name, name, {keys.LABEL_JOB: name})
            self._pods[pod.name] = pod
            gpu = self.gpu_of(name, node)
            node.kubelet.given[NAMESPACE, pod.name] = (gpu.uuid,)
            places.append((node, gpu, pod.uid))
        self._pods_changed()
        job.start(places, PIPELINES)
        self.on_gpu.update((rank.gpu.uuid, rank) for rank in job.ranks)

    def end_training(self, name: str) -> None:
        """The job's pods are deleted."""
        self.training[name].end()
        for node in self.nodes_of[name]:
            pod = f"{name}-{node}"
            self._pods.pop(pod, None)
            self.nodes[node].kubelet.given.pop((NAMESPACE, pod), None)
        self._pods_changed()

    def gpu_of(self, name: str, node: SimulatedNode) -> Gpu:
        """That a training job has on one of its nodes."""
        return node.gpus[[job for job, nodes in self.nodes_of.items() if node.name in nodes].index(name)]

    def has_pods(self, name: str) -> bool:
        """Whether pods of a training job exist."""
        return any(pod.job == name for pod in self._pods.values())

    def _pods_changed(self) -> None:
        engines = [pod for pod in self.api.pods if pod.namespace != NAMESPACE]
        self.api.put_pods([*self._pods.values(), *engines])
