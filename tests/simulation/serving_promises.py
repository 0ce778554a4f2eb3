"""What is promised of a serving pool: default clocks as soon as its engine says nothing, or what cannot be true; and in
the end clocks that follow the load where the user wants it, and a status that says what is so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from tests.simulation.energy import NOISE, says_kept
from tests.simulation.gpus import Gpu
from tests.simulation.scheduler import NS
from tests.simulation.serving import BUDGET_OF_POOL, KV_CAPACITY, KV_TOKENS, OWN, Engine
from tests.simulation.world import World

from perseus_core.serving import ClockReason
from perseus_operator.families.serving.pool import ServingPool

CONFIRMED_S: Final = 40.0
"""A profile is confirmed for sure, whoever serves the pool: ten windows, twice, after a restart."""
OBEYED_S: Final = 8.0
"""Within which a replica that follows its table is at its clock: prompts, and another load, are seldom longer."""
MEANT_S: Final = 20.0
"""Over which power is meant."""
STATES: Final = {
    ClockReason.BOOST: "a boost was asked",
    ClockReason.NO_SAMPLE: "an engine's silence gave default clocks",
    ClockReason.IMPOSSIBLE_SAMPLE: "an engine's lie gave default clocks",
    ClockReason.FLOOR: "a replica followed its table",
}


class ServingPromises:
    """Looks at the pool of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._now = world.scheduler
        self.reached: set[str] = set()
        """Rare states."""
        self._clocks: dict[str, list[tuple[int, int, int]]] = {}
        """By node: when, at which clock and with how many requests its engine was, lately."""
        self._disturbed_ns = 0
        """Until when windows may be lacking or begun anew, because GPUs were lost and looked after."""
        self._energy: list[tuple[int, float]] = []
        """When, and what all GPUs of the pool had drawn by then, J, lately."""

    def disturbed(self, until_ns: int) -> None:
        """A driver fails, and its GPUs are not followed without a break before this time."""
        self._disturbed_ns = max(self._disturbed_ns, until_ns)

    # ------------------------------------------------------------------------------------------------ all the time

    def why_wrong(self, gpu: Gpu, leased: Collection[str]) -> str | None:
        """Why a GPU of the pool must not be locked; empty: it may; None: it is none of the pool's.

        Args:
            gpu: that is locked.
            leased: UIDs of the pods that a lease of its node names.
        """
        engine = self._engine_on(gpu)
        if engine is None:
            return None
        if not engine.process.alive:
            return "the end of its engine"
        if engine.hangs:
            return "the silence of its engine"
        if engine.lie is not None:
            return "the lie of its engine"
        return "" if engine.pod_uid in leased else "the end of its lease"

    def look(self) -> None:
        """Note what its replicas do."""
        gpus = [node.gpus[-1] for node in self._world.serving.nodes.values()]
        drawn_j = sum(gpu.energy_j + gpu.power_w * (self._now.now_ns - gpu.energy_ns) / NS for gpu in gpus)
        self._energy.append((self._now.now_ns, drawn_j))
        del self._energy[: -int(MEANT_S / 0.1)]
        for name, engine in self._world.serving.engines.items():
            agent = engine.node.agent
            if agent is None or agent.node is None or not agent.process.alive or engine.session is None:
                continue
            instance, governor = engine.session._instance, agent.node.workers[engine.gpu.uuid].governor
            if instance is None:
                continue
            choice = instance._choice
            if choice.reason in STATES and (choice.clock_mhz or governor.writes):
                self.reached.add(STATES[choice.reason])
            seen = self._clocks.setdefault(name, [])
            seen.append((self._now.now_ns, engine.gpu.locked_mhz, engine.running))
            del seen[: -int(OBEYED_S / 0.1)]

    def _engine_on(self, gpu: Gpu) -> Engine | None:
        return next((each for each in self._world.serving.engines.values() if each.gpu is gpu), None)

    # ------------------------------------------------------------------------------------------------ in the end

    def check(self, quiet_s: float, foreign: bool) -> None:
        """What must be so after a while without faults.

        Args:
            quiet_s: how long there were none.
            foreign: whether another program has set clocks: its lock stays until leases end.
        """
        serving = self._world.serving
        if foreign:
            return
        if not serving.uid or serving.spec.get("suspend") or serving.spec["mode"] not in ("Enforce", "Canary"):
            self._check_default(quiet_s, "gone, suspended, or in a mode that sets no clocks")
            return
        engines = [engine for engine in serving.engines.values() if engine.process.alive]
        if not engines:
            self._check_default(quiet_s, "without engines")
            return
        self._check_budget()
        self._check_conditions(quiet_s, engines)
        self._check_alone(quiet_s, engines)
        if not self._now.failures:
            self._check_clocks(quiet_s, engines)

    def _check_default(self, quiet_s: float, why: str) -> None:
        for node in self._world.serving.nodes.values():
            if node.gpus[-1].locked_mhz:
                self._now.fail(f"promise 2: {node.gpus[-1].uuid} is locked {quiet_s:.0f} s after the pool was {why}")

    def _check_conditions(self, quiet_s: float, engines: list[Engine]) -> None:
        """The status says of the pool what is so."""
        job = self._world.api.jobs.get(self._world.serving.uid) or {}
        conditions = {c["type"]: c for c in job.get("status", {}).get("conditions", ())}
        models = {engine.model for engine in engines}
        self._expect(conditions, "SignalsReady", "EnginesDiffer" if len(models) > 1 else "SignalsSeen", quiet_s)
        if models == {OWN} and self._steady:
            self._expect(conditions, "ProfileReady", "ProfileFitted", quiet_s)
            canary, pool = self._world.serving.spec["mode"] == "Canary", self._pool()
            limited = pool is not None and pool.granted is not None and pool.granted.speed < 1.0
            wanted = "Canary" if canary else "LimitedByBudget" if limited else "TableInForce"
            self._expect(conditions, "ClocksApplied", wanted, quiet_s)

    @property
    def _steady(self) -> bool:
        since_ns = max(self._world.serving.changed_ns, self._disturbed_ns)
        return self._now.now_ns - since_ns > CONFIRMED_S * NS

    def _expect(self, conditions: Any, kind: str, reason: str, quiet_s: float) -> None:
        said = conditions.get(kind, {"reason": "absent", "message": ""})
        if said["reason"] != reason and not self._now.failures:
            self._now.fail(
                f"convergence: {quiet_s:.0f} s after the last fault the pool's {kind} says {said['reason']} in place of"
                f" {reason}: {said['message']}"
            )

    def _check_budget(self) -> None:
        """Promise 12: a budget that is said to be kept is."""
        budget = self._world.api.budgets.get(BUDGET_OF_POOL)
        if budget is None or not says_kept(budget):
            return
        (begin_ns, before_j), (end_ns, after_j) = self._energy[0], self._energy[-1]
        mean_w, limit_w = (after_j - before_j) * NS / (end_ns - begin_ns), budget["spec"]["watts"]
        if mean_w > limit_w * NOISE:
            self._now.fail(
                f"promise 12: the pool's budget is said to be kept, and it draws {mean_w:.0f} of {limit_w} W"
            )

    def _check_alone(self, quiet_s: float, engines: list[Engine]) -> None:
        """Of two engines that differ one follows a table at most, and in mode Canary of all one."""
        mode, models = self._world.serving.spec["mode"], {engine.model for engine in engines}
        since_ns = self._now.now_ns - int(OBEYED_S * NS)
        locked = [
            engine.gpu.uuid
            for engine in engines
            if any(mhz and at_ns > since_ns for at_ns, mhz, _ in self._clocks.get(engine.node.name, ()))
        ]
        if len(locked) > 1 and (mode == "Canary" or len(models) > 1):
            of = f"in mode {mode} with engines of {' and '.join(sorted(models))}"
            self._now.fail(f"promise 3: {' and '.join(locked)} are locked {quiet_s:.0f} s after the last fault, {of}")

    def _check_clocks(self, quiet_s: float, engines: list[Engine]) -> None:
        """Each replica is at the clock of its table, or at default clocks where the operator wants it to be."""
        pool = self._pool()
        if pool is None:
            self._now.fail(f"promise 6: no replica serves the pool {quiet_s:.0f} s after the last fault")
            return
        wall_s = (self._now.now_ns + self._now.wall_offset_ns) / NS
        for engine in engines:
            table, uid = pool.model.table, engine.pod_uid
            measured, before = (uid == pool.switched_back(at_s) for at_s in (wall_s, wall_s - OBEYED_S))
            if measured != before:  # a block of a comparison has just begun, or ended
                continue
            follows = table is not None and pool.follows(uid) and not measured
            tries = uid == pool.trials.canary and pool.trying(wall_s)
            if pool.granted is not None:  # it rests at a ceiling
                continue
            if not follows and not tries and engine.gpu.locked_mhz:
                self._now.fail(
                    f"promise 6: {engine.gpu.uuid} is locked at {engine.gpu.locked_mhz} MHz without an order"
                )
            if follows and not tries and table is not None and engine.model == OWN:
                seen = self._clocks.get(engine.node.name, [])
                load = {n: table.clock_mhz(n, n * KV_TOKENS / KV_CAPACITY) for _, _, n in seen}
                raised = self._trim(engine) > 0.0
                if not any(mhz == load[n] or (raised and (mhz == 0 or mhz > load[n])) for _, mhz, n in seen):
                    clocks = sorted({mhz for _, mhz, _ in seen})
                    self._now.fail(
                        f"promise 6: {engine.gpu.uuid} follows a table that says {sorted(load.items())}, and was at"
                        f" {clocks} MHz for {OBEYED_S:.0f} s"
                    )

    def _trim(self, engine: Engine) -> float:
        """How far the law of its agent has raised the clock since requests missed their limits."""
        instance = engine.session._instance if engine.session is not None else None
        return instance._law.trim if instance is not None and instance._law is not None else 0.0

    def _pool(self) -> ServingPool | None:
        """As the replica that serves it knows it."""
        for replica in self._world.replicas:
            runner = replica.operator._runners.get(self._world.serving.uid) if replica.operator is not None else None
            if runner is not None:
                return runner.family.pool  # type: ignore[no-any-return,attr-defined]
        return None
