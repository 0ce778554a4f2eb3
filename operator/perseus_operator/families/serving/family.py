"""One ServingPool: takes in what agents say of its engines, and hands out what is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perseus_core.serving import DEFAULT_CLOCKS
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.budgets.member import Member, held_limits_w
from perseus_operator.families.serving.decide import ServingDecision, are_lowered, decide
from perseus_operator.families.serving.features.advice.capacity import CapacityWork
from perseus_operator.families.serving.features.autoscaler.reading import autoscalers_of, name_of, targets_of
from perseus_operator.families.serving.features.inheritance.inheritance import ReadProfile
from perseus_operator.families.serving.features.model.state import FitWork
from perseus_operator.families.serving.features.split.planning import PlanWork
from perseus_operator.families.serving.plan_work import run_plan
from perseus_operator.families.serving.pool import ServingPool
from perseus_operator.families.serving.profiles import read_profile, store_profile
from perseus_operator.families.serving.status.conditions import conditions_of
from perseus_operator.families.serving.status.figures import figures_of, restore_from_status
from perseus_operator.families.serving.status.series import counts_of, state_of
from perseus_operator.families.serving.work import run_capacity, run_fit
from perseus_operator.jobs.family import Family, Surroundings
from perseus_operator.jobs.report import JobReport
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.nodes.node import Node
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import Now


class ServingFamily(Family):
    """One pool."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._job = surroundings.job
        self._services = surroundings.services
        self._spawn = surroundings.spawn
        self._trace = surroundings.trace
        self.pool = ServingPool(surroundings.job)

    # --------------------------------------------------------------------------------------------------------- observe

    def spec_accepted(self, spec: PoolSpec) -> None:
        """See ``Family``."""
        self._job.spec_accepted(spec, spec)

    def restored(self, status: Mapping[str, Any]) -> None:
        """See ``Family``."""
        restore_from_status(self.pool, status, wall_s=self._services.wall_s())

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> None:
        """See ``Family``. A pool has neither attempts nor an end."""
        self._job.pods_observed(replace(chosen, attempt="", finished=False), agents, wall_s=wall_s)

    def window_reported(self, node: Node, window: EngineWindow) -> bool | None:
        """See ``Family``."""
        if window.pod_uid not in {pod.uid for pod in node.pods}:
            return None
        ceiling_mhz = node.clock.mhz if node.clock is not None else DEFAULT_CLOCKS
        now = Now(self._services.monotonic_s(), self._services.wall_s())
        changes = self.pool.window_reported(window, ceiling_mhz, now)
        for measured in self.pool.measured(window.pod_uid):
            self._services.metrics.pools.count(self._job.ref, counts_of(measured, self.pool.limits))
        return True if changes else None

    @property
    def autoscalers_wanted(self) -> bool:
        """See ``Family``."""
        spec = self.pool.spec
        return spec is not None and spec.sets_clocks and not spec.suspend

    def autoscalers_observed(self, bodies: Sequence[Any], *, complete: bool) -> bool:
        """See ``Family``."""
        pool, restraint = self.pool, self.pool.restraint
        now_s, wall_s = self._services.monotonic_s(), self._services.wall_s()
        pods = [pod for node in self._job.nodes.values() for pod in node.pods]
        autoscalers, before = autoscalers_of(bodies, targets_of(pool.spec, pods)), restraint.near
        exist = set(map(name_of, bodies)) if complete else None
        restraint.looked(autoscalers, pool.arrivals.per_s(wall_s), now_s, lowered=are_lowered(pool), exist=exist)
        return restraint.near != before

    # ---------------------------------------------------------------------------------------------------------- decide

    def decide(self, now: Now) -> ServingDecision:
        """See ``Family``."""
        self.pool.looked(now.wall_s)
        self.pool.advised(now)
        return decide(self.pool, now)

    def act(self, decision: ServingDecision) -> None:
        """See ``Family``."""
        now_s = self._services.monotonic_s()
        for action in decision.actions:
            if isinstance(action, FitWork):
                self.pool.model.fit_started(now_s)
                self._spawn(run_fit(self.pool, action, self._services), self._trace.step("fit"))
            elif isinstance(action, CapacityWork):
                self.pool.adviser.compute_started(now_s, fits=bool(action.windows))
                self._spawn(run_capacity(self.pool, action, self._services), None)
            elif isinstance(action, PlanWork):
                self.pool.planning.started(action.basis, self._services.wall_s())
                self._spawn(run_plan(self.pool, action, self._services), self._trace.step("plan"))
            elif isinstance(action, ReadProfile):
                self.pool.inheritance.read_started()
                self._spawn(read_profile(self.pool, self._services), None)
            else:
                self.pool.model.store_started(now_s)
                self._spawn(store_profile(self.pool, self.pool.signals.replicas[0], action, self._services), None)

    def member(self, now: Now, *, settled: bool) -> Member:
        """What it draws under each ceiling, once there is a table; before, less than the power limits of its GPUs."""
        assert self._job.spec is not None
        job, priority = str(self._job.ref), self._job.spec.priority
        occupied = self._job.nodes.occupied
        seen = settled or (bool(occupied) and all(node.leased_pods is not None for node in occupied))
        held_w = math.fsum(held_limits_w(self._job.nodes).values()) if seen else math.inf
        claimed = self.pool.budget_asked(now.wall_s)
        if claimed is not None and seen:
            return Member(job, priority, claimed.claim(job, priority), held_w=held_w)
        return Member(job, priority, drawn_w=held_w if seen else None, held_w=held_w)

    # ---------------------------------------------------------------------------------------------------------- report

    def report(self, decision: ServingDecision) -> JobReport:
        """See ``Family``."""
        lately = self.pool.requests.of_all()
        return JobReport(
            conditions=conditions_of(self.pool, decision, lately),
            figures=figures_of(self.pool, decision, lately),
            pool=state_of(self.pool, decision, lately),
        )
