"""A ServingPool whose replicas are simulated machines, one on each node, with agents that obey: a second is a step.

The family is the operator's own. What a replica does in a second comes from the simulator's machine at the clock that
its agent holds for it; by a table the clock is that of its load.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from tests.doubles.stored_objects import stored_object

from perseus_core import keys
from perseus_core.leases import LeasedGpu
from perseus_core.serving import DEFAULT_CLOCKS, FOLLOW_TABLE, place_of
from perseus_operator.api.conditions import Condition
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.registry import FAMILIES, kinds_of
from perseus_operator.families.serving.decide import ServingDecision
from perseus_operator.families.serving.family import ServingFamily
from perseus_operator.families.serving.features.advice.capacity import CapacityWork
from perseus_operator.families.serving.features.inheritance.inheritance import ReadProfile
from perseus_operator.families.serving.features.model.state import FitWork, StoreProfile
from perseus_operator.families.serving.features.split.planning import PlanWork
from perseus_operator.families.serving.plan_work import plan_status, request_of
from perseus_operator.families.serving.profiles import profile_name, profile_spec, stored_windows
from perseus_operator.families.serving.work import capacity_of, fit_and_table
from perseus_operator.jobs import document
from perseus_operator.jobs.family import Surroundings
from perseus_operator.jobs.job import Job
from perseus_operator.nodes.actions import Acquire, Order, next_actions
from perseus_operator.nodes.engines import Engine, EngineWindow
from perseus_operator.nodes.gpu import Gpu
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.nodes.node import Node
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.formatting import stamp
from perseus_operator.objects.values import JobRef, Json, Now, Pod
from perseus_operator.solving.serving_plan import PoolRow, ServingPlan, ServingPlanRequest
from perseus_sim.serving.machine import Machine, Step

OBJECTIVE = {"timeToFirstToken": {"limit": "500ms"}, "timePerOutputToken": {"limit": "50ms"}}
MACHINE = Machine("h100", "llama-3.1-70b", 4)
ENGINE = Engine("", 1, "vllm", "0.11.0", "llama-3.1-70b", "tp 4", (("max-num-seqs", "256"),))
UNCOUNTED = SimpleNamespace(pools=SimpleNamespace(count=lambda *_: None))
"""Metrics that hold nothing: a pool can be copied with them, but not with the operator's."""
RENEWED_S = 10
"""How often leases are renewed."""
WORKER_SHARE = 2
"""What a worker's GPUs use, of what its leader's do."""
_CHUNK_TOKENS = 512
_CONTEXT = 1_000


class EnginePool:
    """One pool.

    Args:
        replicas: how many pods there are.
        machine: of each.
        running: requests that decode at a replica in a second, by its number and the second.
        metrics: of the operator.
        profiles: specs of the PerseusProfiles of its namespace, by name.
        workers: pods without an engine in the group of each, on nodes of their own.
        spec: of the pool.
    """

    def __init__(
        self,
        replicas: int = 3,
        machine: Machine = MACHINE,
        running: Callable[[int, int], int] = lambda replica, second: 4 << ((second + replica) % 5),
        metrics: Any = UNCOUNTED,
        profiles: dict[str, Json] | None = None,
        workers: int = 0,
        **spec: Any,
    ) -> None:
        self.machine, self.running, self.metrics = machine, running, metrics
        self.engine = ENGINE
        self.second = 0
        self.slower = 1.0
        """By how much all steps take longer than the machine says."""
        self.planned: list[PlanWork] = []
        self.plans: Callable[[ServingPlanRequest], ServingPlan] = one_pool
        """What a worker answers."""
        self.strange = False
        """Steps do not follow any clock that can be explained."""
        self.measures_energy = True
        self.lie: Callable[[EngineWindow], EngineWindow] = lambda window: window
        """What engines say instead of what is so."""
        self.silent: set[str] = set()
        """Pods without an engine."""
        self.profiles = profiles if profiles is not None else {}
        """Specs of the PerseusProfiles of its namespace, by name."""
        self.orders = 0
        """How many were sent."""
        self._spec = {"mode": "Enforce", "objective": OBJECTIVE, "clocks": {"minimumMegahertz": 1_340}, **spec}
        self._pods = [Pod(f"pod-{n}", "ns", f"r-{n}", f"node-{n}", "pool", {}) for n in range(replicas)]
        if workers:
            self._pods = [pod for group in range(replicas) for pod in group_of(group, workers)]
            self.silent |= {pod.uid for pod in self._pods if "-w" in pod.uid}
        self.undrivable: set[str] = set()
        """Nodes whose agents cannot lock a clock."""
        self.uncounted: set[str] = set()
        """Nodes whose GPUs have no counter of energy."""
        self._used_mj = Counter[str]()
        self._changed = Counter[str]()
        self.start()

    def start(self, status: Json | None = None) -> None:
        """An operator takes the pool over; agents hold what they held, under names that it does not know."""
        self.job = Job(JobRef("ns", "pool", "uid", keys.POOL_KIND), generation=1)
        services: Any = SimpleNamespace(wall_s=self._wall_s, monotonic_s=self._monotonic_s, metrics=self.metrics)
        nobody: Any = None
        [kind] = kinds_of(FAMILIES, keys.POOL_KIND)
        family = kind.make(Surroundings(self.job, services, nobody, nobody, nobody))
        assert isinstance(family, ServingFamily)
        self.family = family
        if status is not None:
            self.family.restored(status)
        self.family.spec_accepted(parse_spec(PoolSpec, self._spec))
        self.pods(*self._pods)

    def _wall_s(self) -> float:
        return self.wall_s

    def _monotonic_s(self) -> float:
        return float(self.second)

    def edit(self, **spec: Any) -> None:
        """The spec changes."""
        self._spec |= spec
        self.family.spec_accepted(parse_spec(PoolSpec, self._spec))

    def pods(self, *pods: Pod) -> None:
        """These pods run now."""
        self._pods = list(pods)
        self.job.pods_observed(Selection(tuple(pods)), {pod.node: "10.0.0.1:1" for pod in pods}, wall_s=0.0)
        for node in self.nodes:
            self._describe(node)

    def _describe(self, node: Node) -> None:
        gpus = tuple(f"GPU-{node.name}-{n}" for n in range(self.machine.parallel))
        clocks = dict.fromkeys(gpus, self.machine.clocks_mhz)
        node.gpus_described(clocks, {}, {gpu: Gpu("H100", "570", max_power_w=700.0) for gpu in gpus})
        for pod in node.pods:
            if pod.uid in self.silent:
                node.engines.pods_observed({each.uid for each in node.pods} - self.silent)
            else:
                self.family.engine_joined(node, replace(self.engine, pod_uid=pod.uid, gpu_uuids=gpus))

    @property
    def nodes(self) -> list[Node]:
        return [self.job.nodes[name] for name in sorted(self.job.nodes)]

    @property
    def wall_s(self) -> float:
        return 1.9e9 + self.second

    @property
    def now(self) -> Now:
        return Now(float(self.second), self.wall_s)

    def decide(self) -> ServingDecision:
        return self.family.decide(self.now)

    def conditions(self) -> dict[str, Condition]:
        return {each.type.value: each for each in self.family.report(self.decide()).conditions}

    def status(self) -> Json:
        """As it would be stored."""
        report = self.family.report(self.decide())
        return document.document(report.conditions, report.figures, {}, generation=1, wall_s=self.wall_s)

    def clock_of(self, pod: str) -> int:
        """What the agent holds for a pod: ``FOLLOW_TABLE``, a clock, or 0."""
        node = next(node for node in self.nodes if any(each.uid == pod for each in node.pods))
        return 0 if node.engines.ordered is None else node.engines.ordered.clocks_mhz.get(pod, 0)

    @property
    def clocks(self) -> list[int]:
        return [self.clock_of(pod.uid) for pod in self._pods]

    def run(self, seconds: int, until: Callable[[], bool] = lambda: False) -> int:
        """Go on for so many seconds, or until something is so; returns how many."""
        for ran in range(seconds):
            if until():
                return ran
            self.step()
        return seconds

    def step(self) -> None:
        """A second: decide, obey, fit, serve."""
        if self.second % RENEWED_S == 0:
            self._renew()
        decision = self.decide()
        self._obey(decision)
        for action in decision.actions:
            self._act(action)
        for number, node in enumerate(node for node in self.nodes if node.engines.by_process):
            for engine in list(node.engines.by_process.values()):
                self.family.window_reported(node, self.window(number, node, engine))
        self.second += 1

    def _act(self, action: FitWork | ReadProfile | StoreProfile | CapacityWork | PlanWork) -> None:
        pool = self.family.pool
        if isinstance(action, PlanWork):
            pool.planning.started(action.basis, self.wall_s)
            self.planned.append(action)
            answer = self.plans(request_of(action, [stored_object(*one) for one in self.profiles.items()]))
            pool.planning.planned(plan_status(answer, stamp(self.wall_s)))
            return
        if isinstance(action, CapacityWork):
            pool.adviser.compute_started(self.second, fits=bool(action.windows))
            pool.adviser.computed(capacity_of(action))
            return
        if isinstance(action, FitWork):
            pool.model.fit_started(self.second)
            pool.model.fitted(*fit_and_table(action))
            return
        replica = pool.signals.replicas[0]
        name = profile_name(replica.fingerprint)
        if isinstance(action, StoreProfile):
            pool.model.store_started(self.second)
            self.profiles[name] = profile_spec(replica, action, wall_s=self.wall_s)
            pool.model.store_ended(name)
            return
        pool.inheritance.read_started()
        try:
            stored = None
            if name in self.profiles:
                found = stored_object(name, self.profiles[name])
                stored = stored_windows(found, name, replica.fingerprint, replica.highest_mhz)
            pool.profile_read(stored)
        except InvalidSpec as error:
            pool.inheritance.absent(str(error))

    def _obey(self, decision: ServingDecision) -> None:
        assert decision.intent is not None
        for _ in range(3):
            for action, _wake_s in list(next_actions(self.job.nodes, decision.intent, now_s=self.second)):
                if action is None:
                    continue
                node = self.job.nodes[action.node]
                if isinstance(action, Acquire):
                    node.lease_acquired(
                        node.pods,
                        plan_id="",
                        following=False,
                        started_s=self.second,
                        ttl_s=1e9,
                        resting=action.resting,
                        clock=self._lease_clock(node, action.resting.mhz),
                    )
                elif isinstance(action, Order):
                    self.orders += 1
                    self._changed[node.name] += 1
                    node.engines.accepted(action.orders, f"id-{self.orders}")

    def _renew(self) -> None:
        """Agents say again what they hold, and what GPUs of pods without an engine have used."""
        for node in (node for node in self.nodes if node.leased_pods is not None):
            known = {} if node.name in self.uncounted else {pod.uid: self._used_mj[pod.uid] for pod in node.pods}
            node.lease_renewed(
                started_s=self.second,
                ttl_s=1e9,
                clock=self._lease_clock(node, node.resting.mhz),
                orders_id=node.engines.orders_id,
                energies_mj=known,
            )

    def _lease_clock(self, node: Node, mhz: int) -> LeaseClock | None:
        """What the agent says of the clock that a lease asks for."""
        if not mhz:
            return None
        uids = [pod.uid for pod in sorted(node.pods, key=lambda pod: pod.uid)]
        fault = "the driver refuses" if node.name in self.undrivable else ""
        held = [LeasedGpu(gpu, uid, 0 if fault else mhz, fault) for uid in uids for gpu in sorted(node.clocks_mhz)]
        return LeaseClock(mhz, tuple(held))

    def workers_of(self, pod: str) -> list[int]:
        """At what the agents of a leader's workers hold their GPUs; 0: at the default clocks."""
        return [
            self.ceiling_of(node) for node in self.nodes if node.name.startswith(f"node-{pod.removeprefix('pod-')}-w")
        ]

    def ceiling_of(self, node: Node) -> int:
        """At which the agent lets the GPUs of a node rest; 0: at their default clocks."""
        return node.clock.mhz if node.clock is not None else DEFAULT_CLOCKS

    def window(self, number: int, node: Node, engine: Engine) -> EngineWindow:
        """What a replica does in this second."""
        table = node.engines.ordered.table if node.engines.ordered is not None else None
        changed, self._changed[node.name] = self._changed[node.name] > 0, 0
        running = self.running(number, self.second)
        held = self.clock_of(engine.pod_uid)
        if held == FOLLOW_TABLE:
            held = DEFAULT_CLOCKS if table is None else table.clock_mhz(running, kv_share(self.machine, running))
        held = held or self.ceiling_of(node)
        slowest = min(mhz or self.machine.clocks_mhz[-1] for mhz in (held, *self.workers_of(engine.pod_uid)))
        odd = 1.0 + 0.5 * math.sin(running * (held or self.machine.clocks_mhz[-1])) if self.strange else 1.0
        prompt = self.second % 3 == 0
        seen = window_of(self.machine, engine.pod_uid, running, slowest, prompt=prompt, slower=self.slower * odd)
        seen = replace(
            seen,
            clock_mhz=held,
            default_us=0 if held else seen.time_us,
            mhz_us=held * seen.time_us,
            changed=changed,
            energy_mj=seen.energy_mj if self.measures_energy else None,
        )
        for worker in self._pods:
            if worker.uid.startswith(f"{engine.pod_uid}-w"):
                self._used_mj[worker.uid] += WORKER_SHARE * (seen.energy_mj or 0) * 1_000_000 // seen.time_us
        return self.lie(seen)


def one_pool(request: ServingPlanRequest) -> ServingPlan:
    """A plan without a search, that of one pool."""
    pool = PoolRow("all", 1.0, request.variants[0].gpus, 3, 1, request.highest_mhz, 3.6e9)
    return ServingPlan((pool,), 3.6e9, 3.6e9, 3.96e9, 3, 0.0, together=True)


def group_of(number: int, workers: int) -> list[Pod]:
    """The pods of a group of a LeaderWorkerSet, each on a node of its own, the leader first."""
    names = [f"{number}", *(f"{number}-w{place}" for place in range(1, workers + 1))]
    lws = "leaderworkerset.sigs.k8s.io"
    group = {f"{lws}/name": "pool", f"{lws}/group-index": str(number)}
    pods = []
    for place, name in enumerate(names):
        labels = group | {f"{lws}/worker-index": str(place)}
        pods.append(Pod(f"pod-{name}", "ns", f"r-{name}", f"node-{name}", "pool", labels, group_size=1 + workers))
    return pods


def kv_share(machine: Machine, running: int) -> float:
    """Of the memory for keys and values, how much so many requests use."""
    return min(1.0, running * _CONTEXT / machine.kv_capacity)


def window_of(
    machine: Machine, pod_uid: str, running: int, held_mhz: int, *, prompt: bool, slower: float = 1.0
) -> EngineWindow:
    """About a second of a machine.

    Args:
        machine: the replica's.
        pod_uid: of its pod.
        running: requests that decode.
        held_mhz: its clock; 0: the default clocks.
        prompt: whether a prompt is computed, too.
        slower: by how much all steps take longer than the machine says.
    """
    kv_tokens = round(kv_share(machine, running) * machine.kv_capacity)
    costs = machine.costs(held_mhz or machine.clocks_mhz[-1])
    plain = Step(running, kv_tokens, 0, 0.0, 0)
    step_s, prompt_s = slower * machine.seconds(costs, plain), 0.0
    joules = machine.joules(costs, plain, step_s)
    if prompt:
        mixed = Step(running, kv_tokens, _CHUNK_TOKENS, _CHUNK_TOKENS**2 / 2, 1)
        prompt_s = slower * machine.seconds(costs, mixed)
    count = max(1, int(0.9 * (1.0 - prompt_s) / step_s))
    joules *= count
    if prompt:
        joules += machine.joules(costs, mixed, prompt_s)
    busy_us = math.ceil(1e6 * (count * step_s + prompt_s)) + 1
    return EngineWindow(
        pod_uid=pod_uid,
        pid=1,
        time_us=busy_us,
        clock_mhz=held_mhz,
        default_us=0 if held_mhz else busy_us,
        mhz_us=busy_us * held_mhz,
        running=running,
        kv_share=kv_tokens / machine.kv_capacity,
        steps=count,
        steps_us=round(1e6 * count * step_s),
        prompt_steps=int(prompt),
        prompt_steps_us=round(1e6 * prompt_s),
        prompt_tokens=_CHUNK_TOKENS if prompt else 0,
        generated_tokens=count * running,
        energy_mj=round(1000 * joules),
        requests=2,
        first_tokens={place_of(prompt_s + step_s): 1} if prompt else {},
        tokens={place_of(step_s * 1.02): 2},
        held_us={"Floor" if held_mhz else "Ordered": busy_us},
    )


def distinct(values: list[int]) -> list[int]:
    """Values without those that equal the one before."""
    return [value for value, _ in itertools.groupby(values)]
