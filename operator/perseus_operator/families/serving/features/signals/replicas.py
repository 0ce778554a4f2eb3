"""The replicas of a pool, as its nodes' agents describe them.

A replica is a pod with an engine. Only those of one fingerprint share a table: those of the fingerprint that most have,
or of the one before while it has as many. The others, and pods without an engine, run at default clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from perseus_core.serving import ROLE_FLAG
from perseus_core.units import s_from_us
from perseus_operator.api.serving.spec import Role
from perseus_operator.families.serving.features.signals.members import group_fault, groups_of
from perseus_operator.nodes.engines import Engine
from perseus_operator.nodes.gpu import Gpu
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.node import Node
from perseus_operator.objects.values import Pod
from perseus_solver.errors import InvalidProblem
from perseus_solver.serving import Fingerprint

_NOT_SAID: Final = "not said"
_REVISIONS: Final = (
    "pod-template-hash",
    "controller-revision-hash",
    "leaderworkerset.sigs.k8s.io/template-revision-hash",
)
"""Labels by which controllers say of which pod template a pod is."""
_ROLES: Final = {
    "prefill": Role.PREFILL,
    "kv_producer": Role.PREFILL,
    "decode": Role.DECODE,
    "kv_consumer": Role.DECODE,
}
UNKNOWN_SWITCH_S: Final = 0.1
"""Where an agent does not say how long a change of the clock takes: longer than on any GPU that is published."""


@dataclass(frozen=True)
class Replica:
    """A pod with an engine.

    Attributes:
        pod_uid: of the pod.
        pod: its name.
        engine: that it runs.
        fingerprint: digest of all that the time of a step depends on.
        clocks_mhz: that its GPUs support, ascending.
        switch_s: how long a change of the clock takes, median.
        workers: other pods of its group, whose engines say nothing: the leader's schedules the requests of all.
        role: what it does of each request, as its own configuration says.
    """

    pod_uid: str
    pod: str
    engine: Engine
    fingerprint: str
    clocks_mhz: tuple[int, ...]
    switch_s: float
    workers: tuple[Pod, ...] = ()
    role: Role = Role.MIXED

    @property
    def gpus(self) -> int:
        """That it runs on, those of its workers included."""
        return len(self.engine.gpu_uuids) * (1 + len(self.workers))

    @property
    def highest_mhz(self) -> int:
        """The clock that stands for the default clocks."""
        return self.clocks_mhz[-1]


@dataclass(frozen=True)
class Signals:
    """What pods of a pool say of their engines.

    Attributes:
        replicas: those that share a table, by the name of their pod.
        silent: pods without an engine, but for workers of a group, and what their agents say of it.
        unknown: pods of which the engine is not known well enough, and what is missing.
        different: pods of another fingerprint.
        fingerprint: of the replicas; empty: there are none.
        divided: pods of leaders of groups that are none of the replicas: what their own GPUs use is not a group's.
    """

    replicas: tuple[Replica, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    different: tuple[str, ...] = ()
    fingerprint: str = ""
    divided: frozenset[str] = frozenset()

    def of_pod(self, uid: str) -> Replica | None:
        """The replica of a pod; None: it is none of those that share a table."""
        return self._by_pod.get(uid)

    @cached_property
    def _by_pod(self) -> Mapping[str, Replica]:
        return {replica.pod_uid: replica for replica in self.replicas}


def signals_of(nodes: JobNodes, before: str, faults: Mapping[str, str]) -> Signals:
    """Return what the pods on all nodes say.

    Args:
        nodes: of the pool.
        before: the fingerprint that counted before; empty: none.
        faults: why a group cannot have one clock, by the UID of its leader's pod.
    """
    replicas: list[Replica] = []
    silent, unknown, leaders = dict[str, str](), dict[str, str](), set[str]()
    speaking = {uid: engine for node in nodes.values() for uid, engine in _speaking(node).items()}
    groups = groups_of(pod for node in nodes.values() for pod in node.pods)
    led = {pod.uid for others in groups.values() for pod in others}
    for node in nodes.values():
        for pod in node.pods:
            if pod.uid not in speaking:
                if pod.uid not in led:
                    silent[pod.name] = node.engines.faults.get(pod.uid, "")
                continue
            fault, workers = faults.get(pod.uid, ""), tuple[Pod, ...]()
            if pod.uid in groups:
                workers = tuple(other for other in groups[pod.uid] if other.uid not in speaking)
                fault = fault or group_fault(pod, groups[pod.uid], workers, nodes)
                if workers or fault:
                    leaders.add(pod.uid)
            candidate = fault or _replica(node, pod, speaking[pod.uid], workers)
            if isinstance(candidate, Replica):
                replicas.append(candidate)
            else:
                unknown[pod.name] = candidate
    counts = Counter(replica.fingerprint for replica in replicas)
    chosen = max(counts, key=lambda each: (counts[each], each == before, each), default="")
    alike = [one for one in replicas if one.fingerprint == chosen]
    return Signals(
        replicas=tuple(sorted(alike, key=lambda one: one.pod)),
        silent=dict(sorted(silent.items())),
        unknown=dict(sorted(unknown.items())),
        different=tuple(sorted(one.pod for one in replicas if one.fingerprint != chosen)),
        fingerprint=chosen,
        divided=frozenset(leaders - {one.pod_uid for one in alike}),
    )


def _speaking(node: Node) -> dict[str, Engine]:
    """The engine of each pod of a node, by the UID of the pod; without those whose GPUs are not described yet."""
    engines = {engine.pod_uid: engine for engine in reversed(node.engines.by_process.values())}
    return {
        pod.uid: engines[pod.uid]
        for pod in node.pods
        if pod.uid in engines and all(uuid in node.gpus for uuid in engines[pod.uid].gpu_uuids)
    }


def _replica(node: Node, pod: Pod, engine: Engine, workers: tuple[Pod, ...]) -> Replica | str:
    """The replica, or what is missing to know it."""
    gpus = [node.gpus[uuid] for uuid in engine.gpu_uuids]
    if not gpus:
        return "it has no GPU"
    shared = set.intersection(*(set(node.clocks_mhz.get(uuid, ())) for uuid in engine.gpu_uuids))
    if not shared:
        return "its GPUs support no clock"
    beside = f" and {len(workers)} pods" if workers else ""
    role = said_role(engine.flags, pod.labels)
    flags = {*engine.flags, *(_template(pod) if all(name == ROLE_FLAG for name, _ in engine.flags) else ())}
    if role is not Role.MIXED:  # its steps are others, whatever its flags say
        flags.add(("role", role.value))
    try:
        fingerprint = Fingerprint(
            model=engine.model,
            engine=engine.name,
            engine_version=engine.version,
            gpu_model=f"{len(gpus)} x {', '.join(sorted({gpu.model for gpu in gpus}))}{_under(gpus)}{beside}",
            driver_version=", ".join(sorted({gpu.driver for gpu in gpus})),
            parallelism=engine.parallelism or _NOT_SAID,
            flags=tuple(sorted(flags)),
        )
    except InvalidProblem as error:
        return str(error)
    latencies = [s_from_us(gpu.latency.p50_us) if gpu.latency else UNKNOWN_SWITCH_S for gpu in gpus]
    return Replica(pod_uid=engine.pod_uid, pod=pod.name, engine=engine, fingerprint=fingerprint.digest,
                   clocks_mhz=tuple(sorted(shared)), switch_s=max(latencies), role=role,
                   workers=workers)  # fmt: skip


def said_role(flags: Iterable[tuple[str, str]], labels: Mapping[str, str]) -> Role:
    """Return what an engine does of each request, as far as it is configured to do one part alone.

    Args:
        flags: of the engine.
        labels: of its pod, among which llm-d says it: its engines are all ``kv_both``.

    >>> said_role([("kv_transfer.kv_role", "kv_consumer")], {})
    <Role.DECODE: 'Decode'>
    """
    said = dict(flags)
    texts = said.get("kv_transfer.kv_role"), said.get(ROLE_FLAG), labels.get("llm-d.ai/role")
    return next((_ROLES[text] for text in texts if text in _ROLES), Role.MIXED)


def _under(gpus: Iterable[Gpu]) -> str:
    """The power profiles that the driver enforces: what was measured under others is measured again."""
    profiles = sorted({profile for gpu in gpus if gpu.policy is not None for profile in gpu.policy.enforced})
    return f" under {', '.join(profiles)}" if profiles else ""


def _template(pod: Pod) -> tuple[tuple[str, str], ...]:
    """What stands for the flags of an engine that does not say them: another pod template may have others."""
    return tuple(sorted((label, pod.labels[label]) for label in _REVISIONS if label in pod.labels))
