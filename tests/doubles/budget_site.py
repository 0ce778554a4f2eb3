"""Jobs under a PowerBudget, and what is written to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.conftest import member_of

from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.budgets.power_budgets import PowerBudgets
from perseus_operator.families.training.features.power.plans import power_w, replicas_of
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.objects.values import JobRef, Now, Owner

GRACE_S = 30.0


class Api:
    """What is written to PowerBudgets, and what is there at the start."""

    def __init__(self) -> None:
        self.stored: list[dict[str, Any]] = []
        self.writes: list[dict[str, Any]] = []
        self.events: list[tuple[str, str, str]] = []
        self.error: Exception | None = None
        self.labels: dict[str, dict[str, str]] = {"ns": {}}

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        if self.error is not None:
            raise self.error
        return self.labels[name]

    async def power_budgets(self) -> list[dict[str, Any]]:
        return self.stored

    async def post_cluster_event(self, about: Owner, *, kind: str, reason: str, message: str) -> None:
        self.events.append((about.name, kind, reason))

    async def write_budget_status(self, name: str, uid: str, status: dict[str, Any]) -> str:
        if self.error is not None:
            raise self.error
        self.writes.append(status)
        return str(10 * len(self.writes))


class Site:
    """Some jobs under some budgets, driven like the operator drives them."""

    def __init__(self, make_job: Any) -> None:
        self.make_job = make_job
        self.api = Api()
        self.jobs: dict[str, Any] = {}
        self.runners: list[Any] = []
        self.metrics = Metrics()
        self.budgets = PowerBudgets(self.api, lambda: self.runners, self.metrics, grace_s=GRACE_S)
        self.now_s = 0.0
        self.begin_s = 1_900_000_000.0
        """Seconds since 1970, when ``now_s`` was 0."""

    def job(self, name: str, *, labels: Mapping[str, str] | None = None, running: bool = True, **changes: Any) -> Any:
        job = self.make_job(**changes)
        job.state.job.ref = JobRef("ns", name, f"uid-{name}")
        self.see(name, job, labels)
        if running:
            job.run()
        return job

    def see(
        self, name: str, job: Any, labels: Mapping[str, str] | None = None, *, taken_over_s: float = -math.inf
    ) -> None:
        self.jobs[name] = job
        runner = SimpleNamespace(ref=job.state.ref, labels=labels or {}, taken_over_s=taken_over_s)
        runner.member = partial(member_of, job.state)
        runner.grant = job.state.job.share_granted
        runner.publish_draw = job.state.job.draw_published
        self.runners.append(runner)
        self.budgets.grant_share(runner)

    def budget(self, watts: int, name: str = "hall", uid: str = "u", **selector: Any) -> None:
        spec = {"watts": watts, **({"selector": selector} if selector else {})}
        self.budgets.observe({"metadata": {"name": name, "uid": uid, "generation": 3}, "spec": spec})

    async def tick(self, seconds: float = 1.0, *, leads: bool = True) -> None:
        self.now_s += seconds
        await self.budgets.tick(Now(self.now_s, self.begin_s + self.now_s), leads=leads)
        for job in self.jobs.values():
            if job.state.frontier is not None and job.state.nodes:
                job.settle()

    def points(self, name: str) -> set[int]:
        return {point for node in self.jobs[name].nodes for point in node.plans.selected.values()}

    def drawn_w(self, name: str) -> float:
        state: Training = self.jobs[name].state
        assert state.frontier is not None
        assert state.spec is not None
        (point,) = self.points(name)
        return power_w(state.frontier, point, replicas_of(state.spec))

    @property
    def written(self) -> dict[str, Any]:
        return self.api.writes[-1]

    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = {c["type"]: c for c in self.written["conditions"]}["Kept"]
        return found


@pytest.fixture
def site(make_job: Any) -> Site:
    return Site(make_job)


def condition(job: Any, kind: ConditionType) -> tuple[bool | None, Reason, str]:
    found = next(c for c in conditions_of(job.state, job.decide()) if c.type is kind)
    return found.status, found.reason, found.message
