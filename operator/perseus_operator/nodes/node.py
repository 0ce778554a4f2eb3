"""One node that runs pods of a job: the lease that its agent holds, and the ranks and GPUs that it describes.

The plans that the agent stores are in ``NodePlans``. Fields are read everywhere and changed only here, by one named
method for each event:

    pods and agent       pods_observed, address_observed
    a command            command_started, command_ended, command_succeeded, command_failed, answered
    the lease            lease_requested, lease_acquired, lease_renewed, lease_lost, renewal_requested, renewal_started,
                         renewal_ended
    ranks                rank_joined, rank_left, iteration_reported, schedules_declared
    engines              those of ``NodeEngines``
    GPUs                 gpus_described, gpu_slowed, gpu_recovered
    both                 described, description_outdated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from perseus_core.instruction import InstructionKind
from perseus_core.iteration import IterationReport
from perseus_core.leases import NO_RESTING_CLOCK, RestingClock
from perseus_core.rank import RankId
from perseus_operator.api.conditions import Explanation
from perseus_operator.nodes.engines import NodeEngines
from perseus_operator.nodes.gpu import Gpu, PowerSmoothing, smoothing_of
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.nodes.plans import NodePlans
from perseus_operator.objects.values import Pod

MOST_RANKS: Final = 1_024
"""Ranks of one node, and active slowdowns of its GPUs: many more than a node has GPUs. Agents say what they like."""
CLOCK_INTERVAL_S: Final = 1.0
"""How soon a lease is renewed whose GPUs are on their way to its clock."""
DeclaredSchedule = tuple[tuple[int, int, int, bool], ...]
"""What one training process says that it executes: (kind, microbatch, chunk, whether joined) in order. A joined one
runs in one action with the next, which sends both results at its end."""


def is_whole_step(schedule: DeclaredSchedule) -> bool:
    """Whether a process marks its iterations as a whole; one with several phases runs a custom schedule."""
    return [kind for kind, *_ in schedule] == [InstructionKind.STEP]


@dataclass
class Rank:
    """A training process that is connected to its node's agent. Only its node changes it, and only how far it is."""

    pod_uid: str
    gpu_uuid: str
    dp: int
    stage: int
    tp: int
    pid: int
    iteration: int
    """The furthest iteration that the process has begun."""

    @cached_property
    def id(self) -> RankId:
        """The rank's address in the job."""
        return RankId(self.dp, self.stage, self.tp)

    @property
    def process(self) -> tuple[str, int, RankId]:
        """Identifies the process: another process with the same rank id differs."""
        return self.pod_uid, self.pid, self.id


@dataclass(frozen=True)
class EnergyReadings:
    """What the GPUs of pods have used by their counters.

    Attributes:
        at_s: when they were asked, monotonic seconds.
        used_mj: of all GPUs of a pod, by its UID; a pod of which that is not known of all is left out.
    """

    at_s: float = 0.0
    used_mj: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Node:
    """A node and what is known of its agent. Times are monotonic seconds."""

    name: str
    address: str | None
    """host:port of the agent; None: no agent runs on the node."""
    pods: frozenset[Pod]
    plans: NodePlans = field(default_factory=NodePlans)
    """What the agent stores and follows."""
    engines: NodeEngines = field(default_factory=NodeEngines)
    """Those of a pool, and the orders for them."""
    busy: bool = False
    """A command to the agent is under way; the next one is planned when it has ended."""
    renewing: bool = False
    """So is a renewal, which holds up no plan and no selection: those of a large job take a second."""
    lease_stands: bool = False
    """The command under way leaves the lease as it is, which is renewed meanwhile: a plan may be lost on its way."""
    fault: Explanation | None = None
    """Why the latest command failed; None: it succeeded."""
    retry_at_s: float = 0.0
    failures: int = 0
    """Commands that failed since one succeeded."""
    leased_pods: frozenset[Pod] | None = None
    """Pods that the lease names; None: no lease is held."""
    resting: RestingClock = NO_RESTING_CLOCK
    """Clock that the lease asks for."""
    lease_asked: bool = False
    """Another was asked for, and whether it was granted is not known: neither ``leased_pods`` nor ``resting`` is."""
    clock: LeaseClock | None = None
    """What the agent says of that clock; None: it is too old to lock one, or none is asked for."""
    energies: EnergyReadings = EnergyReadings()  # it is frozen
    """What pods have used, by the latest lease."""
    renew_at_s: float = 0.0
    expires_at_s: float = 0.0
    description: int = 0
    """What the agent called its description of the node when it was asked last; 0: it is to be asked again."""
    ranks: dict[RankId, Rank] = field(default_factory=dict)
    clocks_mhz: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Supported clocks by GPU UUID."""
    gpus: dict[str, Gpu] = field(default_factory=dict)
    """Model and switch latency by GPU UUID, of the job's ranks."""
    power_profiles: frozenset[str] = frozenset()
    """Workload power profiles that the driver enforces on some of them."""
    power_smoothing: PowerSmoothing = PowerSmoothing()  # noqa: RUF009  # it is frozen
    """What power smoothing keeps them at."""
    declared_schedules: dict[RankId, DeclaredSchedule] = field(default_factory=dict)
    """What ranks say that they execute, where the agent was asked for it."""
    uncontrollable: dict[str, str] = field(default_factory=dict)
    """GPU UUID → why its clocks cannot be set."""
    gpu_events: dict[tuple[str, str], str] = field(default_factory=dict)
    """Active slowdowns: (GPU UUID, kind) → the agent's message."""
    _found: tuple[frozenset[int], frozenset[int]] | None = None
    _rank_gpus: list[Gpu] | None = None
    _furthest: int | None = None
    _reporting: dict[RankId, tuple[tuple[int, ...], list[Rank]]] = field(default_factory=dict)
    """By the first rank of the latest report: which tensor-parallel ranks it was of, and those. The next is alike."""

    @property
    def rests_at_default(self) -> bool:
        """Whether GPUs run at their default clocks while no plan wants another."""
        return not self.resting.mhz and not (self.clock and self.clock.mhz)

    @property
    def furthest_iteration(self) -> int:
        """The furthest iteration that a rank here has begun; 0 without ranks."""
        if self._furthest is None:
            self._furthest = max((rank.iteration for rank in self.ranks.values()), default=0)
        return self._furthest

    @property
    def stages(self) -> frozenset[int]:
        """Stages whose ranks run on the node."""
        return self._places()[0]

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """GPUs of the job here: those of its ranks and engines, and those of a lease with a clock."""
        leased = {gpu.uuid for gpu in self.clock.gpus if gpu.uuid} if self.clock else set()
        serving = {uuid for engine in self.engines.by_process.values() for uuid in engine.gpu_uuids}
        return frozenset(rank.gpu_uuid for rank in self.ranks.values()) | leased | serving

    @property
    def pipelines(self) -> frozenset[int]:
        """Pipelines (dp) that have a rank on the node."""
        return self._places()[1]

    def _places(self) -> tuple[frozenset[int], frozenset[int]]:
        """Stages and pipelines of the ranks; kept until the ranks change, since a job may have thousands of nodes."""
        if self._found is None:
            self._found = frozenset(r.stage for r in self.ranks), frozenset(r.dp for r in self.ranks)
        return self._found

    @property
    def rank_gpus(self) -> Sequence[Gpu]:
        """Those of the ranks, as far as the agent has described them."""
        if self._rank_gpus is None:
            self._rank_gpus = [self.gpus[r.gpu_uuid] for r in self.ranks.values() if r.gpu_uuid in self.gpus]
        return self._rank_gpus

    def pods_observed(self, pods: frozenset[Pod]) -> None:
        """The node runs these pods of the job now; ranks of other pods have gone."""
        self.pods = pods
        uids = {pod.uid for pod in pods}
        self.ranks = {rank_id: rank for rank_id, rank in self.ranks.items() if rank.pod_uid in uids}
        self.engines.pods_observed(uids)
        self._ranks_changed()

    def address_observed(self, address: str | None) -> None:
        """An agent at another address is another process, which holds nothing for the job. None changes nothing: the
        agent may be restarting, and its lease still counts.
        """
        if address is None or address == self.address:
            return
        self.address = address
        self.lease_lost()
        self.retry_at_s = 0.0

    def command_started(self, *, lease_stands: bool = False) -> None:
        """A command is on its way to the agent."""
        self.busy, self.lease_stands = True, lease_stands

    def command_ended(self) -> None:
        """The command has an outcome."""
        self.busy = self.lease_stands = False

    def command_succeeded(self) -> None:
        """The agent did what it was asked."""
        self.fault, self.failures, self.retry_at_s = None, 0, 0.0

    def command_failed(self, fault: Explanation, *, retry_at_s: float) -> None:
        """The agent did not do it; no command is planned before ``retry_at_s``."""
        self.fault, self.retry_at_s = fault, retry_at_s
        self.failures += 1

    def answered(self) -> None:
        """The agent answers, though it refuses: how long it was away is no reason to wait longer."""
        self.failures = 0

    def lease_requested(self) -> None:
        """From now on the agent may hold what is asked for, even if its answer never comes."""
        self.lease_asked = True

    def lease_acquired(
        self,
        pods: frozenset[Pod],
        *,
        plan_id: str,
        following: bool,
        started_s: float,
        ttl_s: float,
        resting: RestingClock = NO_RESTING_CLOCK,
        clock: LeaseClock | None = None,
        orders_id: str = "",
        engine_faults: Mapping[str, str] | None = None,
        energies_mj: Mapping[str, int] | None = None,
    ) -> None:
        """The agent granted the lease.

        Args:
            pods: that the lease names.
            plan_id: of the plan set that the agent stores for the job; empty: none.
            following: whether the agent already follows a selection.
            started_s: when the request was sent: the agent cannot have begun to count earlier.
            ttl_s: how long the lease lasts.
            resting: the clock that it asks for.
            clock, orders_id, engine_faults, energies_mj: as of ``lease_renewed``.
        """
        self.leased_pods, self.resting, self.lease_asked = pods, resting, False
        self.plans.lease_acquired(plan_id, following=following)
        self.lease_renewed(
            started_s=started_s,
            ttl_s=ttl_s,
            clock=clock,
            orders_id=orders_id,
            engine_faults=engine_faults,
            energies_mj=energies_mj,
        )

    def described(self, description: int) -> None:
        """Ranks and GPUs are what the agent calls by this number."""
        self.description = description

    def description_outdated(self) -> None:
        """What is known of ranks and GPUs is no longer what was described, or was not described."""
        self.description = 0

    def is_described(self, description: int) -> bool:
        """Whether the agent still says of its node what it said when it was asked last."""
        return description != 0 and description == self.description

    def lease_renewed(
        self,
        *,
        started_s: float,
        ttl_s: float,
        clock: LeaseClock | None = None,
        orders_id: str = "",
        engine_faults: Mapping[str, str] | None = None,
        energies_mj: Mapping[str, int] | None = None,
    ) -> None:
        """The lease lasts for ``ttl_s`` from ``started_s``; it is renewed after a third of it, or sooner to hear of its
        clock.

        Args:
            started_s: when the request was sent.
            ttl_s: how long the lease lasts.
            clock: what the agent says of the clock that the lease asks for.
            orders_id: how it calls the orders for engines that it holds; empty: it holds none.
            engine_faults: why it follows no engine of a pod, by the UID of the pod.
            energies_mj: what all GPUs of a pod have used by their counters, by the UID of the pod.
        """
        self.clock = clock
        self.energies = EnergyReadings(started_s, energies_mj or {})
        self.engines.lease_granted(orders_id, engine_faults or {})
        faulty = clock is not None and clock.faulty
        driven = self.plans.driven or self.engines.driven
        coming = not driven and not faulty and not self.at_clock(self.resting.mhz)
        pause_s = min(CLOCK_INTERVAL_S, ttl_s / 3) if coming else ttl_s / 3
        self.renew_at_s, self.expires_at_s = started_s + pause_s, started_s + ttl_s

    def at_clock(self, mhz: int) -> bool:
        """Whether the lease asks for this clock, and all GPUs of every pod of the job here are locked at it."""
        if self.leased_pods is None or self.resting.mhz != mhz:
            return False
        return mhz == 0 or (self.clock is not None and self.clock.holds(mhz, {pod.uid for pod in self.pods}))

    def lease_lost(self) -> None:
        """The lease is over, given back or not: what the agent holds is no longer known."""
        self.leased_pods = self.clock = None
        self.energies = EnergyReadings()
        self.plans.lease_lost()
        self.engines.lease_lost()

    def renewal_started(self) -> None:
        """A renewal is on its way to the agent."""
        self.renewing = True

    def renewal_ended(self) -> None:
        """The renewal has an outcome."""
        self.renewing = False

    def renewal_requested(self) -> None:
        """Renew now: a renewal also asks for the ranks, of which some may have been missed."""
        self.renew_at_s = 0.0

    def rank_joined(self, rank: Rank) -> bool:
        """A process has connected, or is seen again; whether it is another process than the one known so far."""
        before = self.ranks.get(rank.id)
        if before is None and len(self.ranks) >= MOST_RANKS:
            return False
        self.ranks[rank.id] = rank
        self._ranks_changed()
        if before is not None and before.process == rank.process:
            return False
        self.declared_schedules.pop(rank.id, None)
        return True

    def rank_left(self, rank: Rank) -> None:
        """A process has gone; unless another one has taken its rank id already."""
        current = self.ranks.get(rank.id)
        if current is not None and current.process == rank.process:
            del self.ranks[rank.id]
            self._ranks_changed()

    def _ranks_changed(self) -> None:
        self._found = self._furthest = self._rank_gpus = None
        self._reporting.clear()

    def iteration_reported(self, report: IterationReport) -> bool:
        """Ranks have finished an iteration, and begun the next one; False: they are not all known, nothing changes."""
        group = self._reporting.get(report.rank_id)
        if group is None or group[0] != report.together:
            if not all(rank_id in self.ranks for rank_id in report.rank_ids):
                return False
            group = report.together, [self.ranks[rank_id] for rank_id in report.rank_ids]
            self._reporting[report.rank_id] = group
        begun = report.iteration + 1
        for rank in group[1]:
            rank.iteration = max(rank.iteration, begun)
        if self._furthest is not None and self._furthest < begun:
            self._furthest = begun
        return True

    def gpus_described(
        self,
        clocks_mhz: Mapping[str, tuple[int, ...]],
        uncontrollable: Mapping[str, str],
        gpus: Mapping[str, Gpu] | None = None,
    ) -> None:
        """The agent described the GPUs of the job's ranks."""
        self.clocks_mhz, self.uncontrollable, self.gpus = dict(clocks_mhz), dict(uncontrollable), dict(gpus or {})
        self._rank_gpus = None
        policies = [gpu.policy for gpu in self.gpus.values() if gpu.policy is not None]
        self.power_smoothing = smoothing_of(policies)
        self.power_profiles = frozenset(profile for policy in policies for profile in policy.enforced)

    def schedules_declared(self, schedules: Mapping[RankId, DeclaredSchedule]) -> None:
        """The ranks said what they execute."""
        self.declared_schedules = dict(schedules)

    @property
    def asked_for_schedules(self) -> bool:
        """Whether the agent has been asked what each rank executes, which stays as long as its process."""
        return self.ranks.keys() <= self.declared_schedules.keys()

    def gpu_slowed(self, gpu_uuid: str, kind: str, message: str) -> None:
        """A GPU reports that something slows it."""
        if (gpu_uuid, kind) in self.gpu_events or len(self.gpu_events) < MOST_RANKS:
            self.gpu_events[gpu_uuid, kind] = message

    def gpu_recovered(self, gpu_uuid: str, kind: str) -> None:
        """What slowed a GPU has ended."""
        self.gpu_events.pop((gpu_uuid, kind), None)
