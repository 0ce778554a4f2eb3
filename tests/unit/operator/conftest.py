"""A job in the making: builders for the planner's tests. No clock, no I/O."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_operator.api import JobSpec, parse_spec
from perseus_operator.history import Report
from perseus_operator.objective import FrontierView
from perseus_operator.planner import (
    Acquire,
    Limits,
    Now,
    Plan,
    Push,
    ReadProfile,
    Release,
    Renew,
    Select,
    inputs_digest,
    plan,
)
from perseus_operator.state import JobRef, JobState, Node, Pod, Rank

LIMITS = Limits(lease_ttl_s=30.0)


def spec_of(**changes: Any) -> JobSpec:
    """A valid spec: two pipelines of two stages."""
    raw: dict[str, Any] = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4, "dataParallel": 2},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
        "baselineIterations": 0,
    }
    return parse_spec({**raw, **changes})


def frontier_of(spec: JobSpec, points: int = 11) -> FrontierView:
    """From 1.0 s to 1.5 s in equal steps; least energy at the ninth point."""
    return FrontierView(
        digest=inputs_digest(spec, "csv"),
        times_us=tuple(1_000_000 + 50_000 * i for i in range(points)),
        energies_mj=tuple(1_000_000 - 20_000 * i + 1_200 * i * i for i in range(points)),
        stages=2,
        blocking_power_mw=80_000,
        median_gap_ppm=10,
        maximum_gap_ppm=20,
        solve_ms=100,
        restored=False,
    )


class Job:
    """A job state, driven like its runner drives it, with agents that obey."""

    def __init__(self, **changes: Any) -> None:
        self.now_s = 100.0
        self.wall_s = 1_900_000_000.0
        self.state = JobState(JobRef("ns", "job", "uid"), generation=1)
        self.state.accept(spec_of(**changes))

    @property
    def spec(self) -> JobSpec:
        assert self.state.spec is not None
        return self.state.spec

    def plan(self) -> Plan:
        return plan(self.state, Now(self.now_s, self.wall_s), LIMITS)

    def solve(self) -> None:
        self.state.profile_digest, self.state.profile_read_at_s = "csv", self.now_s
        self.state.frontier = frontier_of(self.spec)

    def start_pods(self) -> None:
        """One node and one pod per pipeline."""
        names = range(self.spec.pipeline.data_parallel)
        pods = [Pod(f"pod-{p}", "ns", f"t-{p}", f"node-{p}", "job", {}) for p in names]
        self.state.place(pods, {f"node-{p}": f"10.0.0.{p}:1" for p in names})

    def connect_ranks(self, pid: int = 1) -> None:
        for p, node in enumerate(self.nodes):
            for stage in range(self.spec.pipeline.stages):
                self.state.joined(node, Rank(f"pod-{p}", f"GPU-{p}-{stage}", p, stage, 0, pid, 0))

    @property
    def nodes(self) -> list[Node]:
        return [self.state.nodes[name] for name in sorted(self.state.nodes)]

    def act(self) -> Plan:
        """Plan once and let every agent do as it is told."""
        made = self.plan()
        self.state.guard = made.guard
        for action in made.actions:
            if isinstance(action, ReadProfile):
                self.state.profile_read_at_s = self.now_s
                continue
            if not isinstance(action, Acquire | Renew | Release | Push | Select):
                continue
            node = self.state.nodes[action.node]
            if isinstance(action, Acquire | Renew):
                node.leased_pods = node.pods
                node.renew_at_s, node.expires_at_s = self.now_s + 10, self.now_s + 30
            elif isinstance(action, Release):
                node.lost()
                if not node.pods:
                    del self.state.nodes[node.name]
            elif isinstance(action, Push):
                node.plan_id, node.selected = action.plans, {}
                node.pushed = action.plans, action.stages
            else:
                node.selected, node.driven = {**node.selected, **dict(action.points)}, True
                node.from_iteration = action.from_iteration
        return made

    def settle(self) -> Plan:
        """Act until there is nothing more to do; what is wanted must be reached in a few steps."""
        for _ in range(8):
            made = self.act()
            if not [a for a in made.actions if not isinstance(a, ReadProfile)]:
                return made
        raise AssertionError(f"still acting: {made.actions}")

    def run(self) -> Plan:
        """From nothing to a plan in force."""
        self.solve()
        self.start_pods()
        self.connect_ranks()
        return self.settle()

    def train(self, iteration: int, slowdowns: tuple[float, ...] = (1.0, 1.0), *, energy_mj: int | None = 1000) -> None:
        """Every rank reports an iteration under what its node has selected."""
        assert self.state.frontier is not None
        times_us = self.state.frontier.times_us
        spans = [round(times_us[n.selected.get(p, 0)] * slowdowns[p]) for p, n in enumerate(self.nodes)]
        for p, node in enumerate(self.nodes):
            for stage in range(self.spec.pipeline.stages):
                point = node.selected.get(p)
                self.state.reported(node, Report(p, stage, 0, iteration, max(spans), spans[p], energy_mj, point))


@pytest.fixture
def job() -> Job:
    """A job without a profile, pods or agents."""
    return Job()


@pytest.fixture
def make_job() -> type[Job]:
    """To make one with changes to its spec."""
    return Job
