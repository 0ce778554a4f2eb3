"""The promises of docs/promises.md as functions over the world, looked at all the time; and what must be so in the end.

What a fault excuses is said here: a driver that hangs cannot be made to reset, and of two deaths at a time the second
may be the keeper's. Everything else is a broken promise.
"""

from __future__ import annotations

from typing import Any, Final

from tests.doubles.kept import kept
from tests.simulation.energy import Energy
from tests.simulation.gpus import Gpu
from tests.simulation.kinds import Fault
from tests.simulation.lease_promises import LeasePromises
from tests.simulation.node import SimulatedNode
from tests.simulation.pace import Pace
from tests.simulation.scheduler import NS
from tests.simulation.serving_faults import OF_SERVING
from tests.simulation.serving_promises import ServingPromises
from tests.simulation.thread_promises import ThreadPromises
from tests.simulation.world import World
from tests.simulation.writes import Writes

from perseus_agent.clocks.standing import Standing

LOOK_S: Final = 0.1
GIVEN_BACK_S: Final = 1.25
"""Promise 2, a second, and how long a look and a call may take."""
UNKEPT_S: Final = 4.0
"""After two deaths: until the next agent has read its journal."""
FOREIGN_S: Final = 4.0
"""Until a foreign lock is noticed: three looks in a row, and what settles before."""
DRIVER: Final = {"driver hangs": 25.0, "GPUs lost": 25.0}
"""How long after such a fault a GPU may still be locked: calls return late, a lost GPU is watched."""
REFUSING: Final = {"driver refuses": 1.5, "GPU fails": 1.5}
"""The same, beyond another time as long as the fault: resets are tried at pauses that double."""
MOST_KEPT: Final = 8_000
"""Values of the iterations of a job: 32 that lack one of four ranks, and 64 that are judged, are 6,000."""
OF_THE_API: Final = frozenset(
    ("API away", "API fails", "API stale", "watch silent", "watch repeats", "kubelet away", "clock set", "link blinks")
)
LEASES_STAY: Final = OF_THE_API | OF_SERVING - {"pool scaled", "pool deleted", "pool suspended"}
"""Faults beside which no lease runs out: a link that is back after a second is no reason either. What no pod needs any
more may run out where a replica takes over that has not seen the pod."""


class Promises:
    """Looks at a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._now = world.scheduler
        self._wrong_ns: dict[str, tuple[int, float]] = {}
        """Since when a GPU has been locked without a reason, and for how many seconds it may be."""
        self._excused_ns: dict[str, int] = {}
        """Until when a node's driver excuses it."""
        self._unkept_ns: dict[str, int] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self._torn: set[str] = set()
        self._active: list[Fault] = []
        self._not_only_api_ns = self._now.now_ns
        self._expiries: dict[int, int] = {}
        self._fresh_ns: dict[str, int] = {}
        """Since when an agent has served without a break."""
        self._foreign = False
        self._forged: set[str] = set()
        self.energy = Energy(world)
        self.pace = Pace(world)
        self.serving = ServingPromises(world)
        world.network.answered = self._accepted
        self.writes = Writes(world, lambda node: node in self._torn or self._now.now_ns < self._excused_ns.get(node, 0))
        self.leases = LeasePromises(world, self._excuses_clocks)
        self.threads = ThreadPromises(world)
        self._look()

    # ------------------------------------------------------------------------------------------------ faults

    def begun(self, fault: Fault) -> None:
        """A fault begins."""
        self._active.append(fault)
        self._excuse(fault)
        self.energy.begun(fault)
        self.pace.begun(fault)
        self._foreign |= fault.kind == "foreign lock"
        if fault.kind == "rank forges":  # its job has what it has written
            self._forged.add(f"job-{fault.place % len(self._world.training)}")
        if fault.kind in ("keeper killed", "node out of memory"):  # of two deaths the second
            node = self._world.nodes[self._node_of(fault)]
            self._unkept_ns[node.name] = self._now.now_ns
            for gpu in node.gpus:
                self._wrong_ns.pop(gpu.uuid, None)
        if fault.kind == "journal torn":
            self._torn.add(self._node_of(fault))

    def ended(self, fault: Fault) -> None:
        """It ends."""
        self._active.remove(fault)
        self._excuse(fault)
        self.energy.begun(fault, ends=True)
        self.pace.begun(fault)

    def _excuse(self, fault: Fault) -> None:
        if fault.kind in DRIVER or fault.kind in REFUSING:
            after_s = DRIVER[fault.kind] if fault.kind in DRIVER else fault.lasts_s + REFUSING[fault.kind]
            until_ns = self._now.now_ns + int((fault.lasts_s + after_s) * NS)
            node = self._node_of(fault)
            self._excused_ns[node] = max(self._excused_ns.get(node, 0), until_ns)
            self.serving.disturbed(until_ns)
        if fault.kind not in LEASES_STAY:
            self._not_only_api_ns = self._now.now_ns + int(20 * NS)

    def _excuses_clocks(self, node: str) -> bool:
        """Whether GPUs of a node may be at default clocks though a lease asks for another: by its driver, or because no
        keeper watches them."""
        unkept = self._now.now_ns - self._unkept_ns.get(node, 0) < int(UNKEPT_S * NS)
        return unkept or self._now.now_ns < self._excused_ns.get(node, 0)

    def _node_of(self, fault: Fault) -> str:
        return list(self._world.nodes)[fault.place % len(self._world.nodes)]

    # ------------------------------------------------------------------------------------------------ all the time

    def _look(self) -> None:
        for node in self._world.nodes.values():
            self.writes.look(node)
            self._look_at(node)
        self.serving.look()
        self.pace.look()
        self._now.after(LOOK_S, self._look)

    def _look_at(self, node: SimulatedNode) -> None:
        now_ns, agent = self._now.now_ns, node.agent
        serves = agent is not None and agent.process.alive and not agent.process.stopped and agent.service is not None
        if not serves:
            self._fresh_ns[node.name] = now_ns
        if agent is not None and agent.process.alive:  # a keeper whose agent has died has only to give back, and ends
            keeper = node.keeper
            if keeper is None or not keeper.alive or node._watching.get(keeper) is not agent:
                self._unkept_ns[node.name] = now_ns
        leases = self._leases_on(node)
        for gpu in node.gpus:
            if gpu.locked_mhz and gpu.foreign_ns is None:
                self._look_at_locked(node, gpu, leases)
            else:
                self._wrong_ns.pop(gpu.uuid, None)
            if gpu.foreign_ns is not None and serves:
                self._look_at_foreign(node, gpu)
        if serves and agent is not None and agent.node is not None:
            self._look_at_leases(node, agent.node)
            self.leases.look(node, agent.node)
            self.threads.look(node, agent.node)

    def _leases_on(self, node: SimulatedNode) -> list[Any]:
        """That have not run out."""
        if node.agent is None or node.agent.node is None:
            return []
        return [lease for lease in node.agent.node.leases._jobs.values() if lease.expires_s > self._now.now_s]

    def _look_at_locked(self, node: SimulatedNode, gpu: Gpu, leases: list[Any]) -> None:
        why = self._why_wrong(node, gpu, leases)
        if not why:
            self._wrong_ns.pop(gpu.uuid, None)
            return
        now_ns = self._now.now_ns
        unkept = now_ns - self._unkept_ns.get(node.name, 0) < int(UNKEPT_S * NS)
        since_ns, within_s = self._wrong_ns.setdefault(gpu.uuid, (now_ns, UNKEPT_S if unkept else GIVEN_BACK_S))
        if now_ns < self._excused_ns.get(node.name, 0):
            return
        if now_ns - since_ns > int(within_s * NS):
            self._now.fail(
                f"promise 2: {gpu.uuid} is locked at {gpu.locked_mhz} MHz {(now_ns - since_ns) / NS:.2f} s after {why}"
            )

    def _why_wrong(self, node: SimulatedNode, gpu: Gpu, leases: list[Any]) -> str:
        """Why a GPU must not be locked; empty: it may."""
        agent = node.agent
        if agent is None or not agent.process.alive:
            return "the agent's end"
        if agent.process.stopped:
            return "the agent's silence"
        if agent.node is None:
            return "the agent's start"
        for lease in leases:
            if lease.clock.mhz and any(
                gpu.uuid in node.kubelet.given.get((pod.namespace, pod.name), ()) for pod in lease.pods.values()
            ):
                return ""
        serving = self.serving.why_wrong(gpu, {uid for lease in leases for uid in lease.pods})
        if serving is not None:
            return serving
        rank = self._world.on_gpu.get(gpu.uuid)
        if rank is not None and rank.process.alive and any(rank.pod_uid in lease.pods for lease in leases):
            return ""
        return "the end of its lease or of its training process"

    def _look_at_foreign(self, node: SimulatedNode, gpu: Gpu) -> None:
        """Promises 3 and 6: a foreign lock above ours is noticed."""
        now_ns, agent = self._now.now_ns, node.agent
        assert agent is not None
        assert gpu.foreign_ns is not None
        since_ns = max(gpu.foreign_ns, self._fresh_ns.get(node.name, 0) if gpu.writer == "foreign" else now_ns)
        if agent.node is None or now_ns - since_ns < int(FOREIGN_S * NS):
            return
        if now_ns < self._excused_ns.get(node.name, 0) or gpu.writer != "foreign":
            return
        governor = agent.node.workers[gpu.uuid].governor
        ours = governor.applied
        steady = gpu.steady_before_foreign and governor.writes == gpu.writes_before_foreign
        if ours and steady and gpu.locked_mhz > ours + 100 and governor.standing is not Standing.FOREIGN:
            self._now.fail(
                f"promise 6: {gpu.uuid} runs at {gpu.locked_mhz} MHz, which another program has set, for"
                f" {(now_ns - since_ns) / NS:.1f} s; the agent says {governor.standing.name} at {ours} MHz"
            )

    def _look_at_leases(self, node: SimulatedNode, of: Any) -> None:
        """Promise 4: no lease runs out while the API server alone is away."""
        before = self._expiries.get(id(of), 0)
        self._expiries[id(of)] = of.leases.expiries
        if of.leases.expiries > before and self._now.now_ns > self._not_only_api_ns:
            self._now.fail(
                f"promise 4: a lease ran out on {node.name} beside faults of the API server, or of a link for a second"
            )

    # ------------------------------------------------------------------------------------------------ events

    def _accepted(self, operator: str, node: SimulatedNode, method: str, request: Any) -> None:
        """Promise 8: epochs of a job only rise at an agent, and what it sees is remembered."""
        if method == "DescribeNode" or node.name in self._torn:
            return
        key = node.name, request.job_uid
        if request.epoch < self._epochs.get(key, 0):
            self._now.fail(
                f"promise 8: {node.name} obeyed {method} of {operator} under epoch {request.epoch} after"
                f" {self._epochs[key]}"
            )
        self._epochs[key] = max(request.epoch, self._epochs.get(key, 0))

    # ------------------------------------------------------------------------------------------------ in the end

    def check_end(self, quiet_s: float) -> None:
        """What must be so after a while without faults: what was asked for is in force, and nothing moves."""
        checks = self._check_memory, self._check_jobs, self._check_rest, self._check_steady
        for check in (*checks, self._check_serving, self.energy.check_budget, self._check_energy):
            if not self._now.failures:
                check(quiet_s)

    def _check_memory(self, quiet_s: float) -> None:
        """Promise 10: what a rank writes makes nobody keep more and more."""
        for replica in self._world.replicas:
            for runner in replica.operator._runners.values() if replica.operator is not None else ():
                training = getattr(runner.family, "training", None)
                values = kept(training.history) if training is not None else 0
                if values > MOST_KEPT:
                    self._now.fail(
                        f"promise 10: {replica.name} keeps {values} values of the iterations of {runner.ref}"
                    )

    def _check_serving(self, quiet_s: float) -> None:
        self.serving.check(quiet_s, self._foreign)

    def _check_energy(self, quiet_s: float) -> None:
        self.energy.check_sums(quiet_s, self._forged)
        if not self._now.failures:
            self.pace.check_savings()

    def _check_misedited(self, name: str, conditions: Any, quiet_s: float) -> None:
        """Promise 9: a spec that is none is refused by the name of its field, and leaves in force the one before."""
        field, runner = self._world.misedited[name]
        accepted = conditions.get("Accepted", {"status": "absent", "message": ""})
        if accepted["status"] != "False" or field not in accepted["message"]:
            self._now.fail(
                f"promise 9: {quiet_s:.0f} s after the last fault {name}'s {field} is wrong, and Accepted is"
                f" {accepted['status']}: {accepted['message']}"
            )
        same = runner is not None and self._world.runner_of(name) is runner
        if same and self._may_lock(name) and not self._foreign:
            self._check_locked(name, "promise 9", "was accepted before it was edited wrongly")

    def _check_jobs(self, quiet_s: float) -> None:
        for name, uid in self._world.uids.items():
            job, training = self._world.api.jobs.get(uid), self._world.training[name]
            if job is None or name in self._forged:
                continue
            conditions = {c["type"]: c for c in job.get("status", {}).get("conditions", ())}
            if name in self._world.misedited:
                self._check_misedited(name, conditions, quiet_s)
                continue
            ready = conditions.get("Ready", {"status": "absent", "reason": "", "message": ""})
            why = self._why_no_clock(name)
            said = conditions.values() if self._world.specs[name].get("mode") else [ready]
            if why and why not in {each["reason"] for each in said}:
                self._now.fail(
                    f"convergence: {name} says {ready['reason']}: {ready['message']} {quiet_s:.0f} s after the last"
                    f" fault; it is {why}"
                )
                return
            if why or not training.ranks or not self._may_lock(name):
                continue
            if ready["reason"] == "GpuNotControllable" and self._foreign:
                return  # it says so, and leaves what another program has set until the lease ends
            if ready["status"] != "True":
                self._now.fail(
                    f"convergence: {name} is not Ready {quiet_s:.0f} s after the last fault:"
                    f" {ready['reason']}: {ready['message']}"
                )
                return
            self._check_locked(name, "promise 6", "is Ready")

    def _check_locked(self, name: str, promise: str, because: str) -> None:
        wanted = self._world.specs[name].get("objective", {}).get("clockMegahertz")
        for rank in self._world.training[name].ranks:
            if not rank.gpu.locked_mhz or (wanted and rank.gpu.locked_mhz != wanted):
                self._now.fail(
                    f"{promise}: {name} {because}, and {rank.gpu.uuid} is at"
                    f" {rank.gpu.locked_mhz or 'default'} MHz{f' instead of {wanted}' if wanted else ''}"
                )
                return

    def _why_no_clock(self, name: str) -> str:
        """The reason that is true of a job whose clocks must not be set; empty: there is none."""
        spec = self._world.specs[name]
        if spec.get("mode", "Enforce") != "Enforce":
            return "" if spec.get("suspend") or not self._world.has_pods(name) else "RecommendOnly"
        if spec.get("suspend"):
            return "Suspended"
        return "" if self._world.has_pods(name) else "NoPods"

    def _may_lock(self, name: str) -> bool:
        spec = self._world.specs[name]
        return not spec.get("suspend") and spec.get("mode", "Enforce") == "Enforce"

    def _check_rest(self, quiet_s: float) -> None:
        for name, job in self._world.training.items():
            if name in self._world.uids and job.ranks and self._may_lock(name):
                continue
            for node in self._world.nodes_of[name]:
                gpu = self._world.gpu_of(name, self._world.nodes[node])
                if gpu.locked_mhz and gpu.foreign_ns is None:
                    why = "was gone, suspended, or in a mode that sets no clocks"
                    self._now.fail(f"promise 2: {gpu.uuid} is locked {quiet_s:.0f} s after {name} {why}")

    def _check_steady(self, quiet_s: float) -> None:
        for number, name in enumerate(self._world.training):
            if not number % 2:
                continue
            for rank in self._world.training[name].ranks if not self._foreign else ():
                if self._now.now_ns - self.writes.at_ns.get(rank.gpu.uuid, 0) < 10 * NS:
                    self._now.fail(f"convergence: {rank.gpu.uuid} of {name} is still written {quiet_s:.0f} s later")
