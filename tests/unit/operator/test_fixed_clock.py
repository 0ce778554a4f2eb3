"""One clock for all GPUs: what is asked of agents, what counts as in force, what a budget and the doctor say of it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.conftest import with_nodes

from perseus_core.leases import LeasedGpu, RestingClock
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.controller.node_session import NodeSession
from perseus_operator.errors import AgentUnavailable
from perseus_operator.families.fixed_clock.family import FixedClockFamily
from perseus_operator.jobs import document
from perseus_operator.jobs.decision import Decision
from perseus_operator.jobs.family import Surroundings, member_of
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.nodes.actions import Acquire, Release, Renew
from perseus_operator.nodes.gpu import Gpu
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.nodes.node import Node
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import JobRef, Now, Pod
from perseus_operator.plugin.doctor import examine

TTL_S, BOARD_W = 15.0, 700.0
FIXED = {"objective": {"type": "FixedClock", "clockMegahertz": 900}}


class Job:
    """A job on two nodes, a pod of two GPUs on each."""

    def __init__(self, **changes: Any) -> None:
        self.now_s = 100.0
        self.state = PerseusJob(JobRef("ns", "job", "uid"), generation=1)
        nobody: Any = None
        self.family = FixedClockFamily(Surroundings(self.state, nobody, nobody, nobody, nobody))
        self.family.spec_accepted(parse_spec(JobSpec, {**FIXED, **changes}))
        pods = [Pod(f"pod-{n}", "ns", f"t-{n}", f"node-{n}", "job", {}) for n in range(2)]
        self.state.pods_observed(Selection(tuple(pods)), {f"node-{n}": f"10.0.0.{n}:1" for n in range(2)}, wall_s=0.0)

    @property
    def nodes(self) -> list[Node]:
        return [self.state.nodes[name] for name in sorted(self.state.nodes)]

    def decide(self) -> Decision:
        made = self.family.decide(Now(self.now_s, 1.9e9))
        return with_nodes(made, self.state.nodes, self.now_s)

    @property
    def waiting(self) -> Explanation | None:
        intent = self.decide().intent
        assert intent is not None
        return intent.waiting

    def acquire(self, mhz: int = 900, clock: LeaseClock | None = None) -> None:
        for node in self.nodes:
            node.lease_acquired(
                node.pods,
                plan_id="",
                following=False,
                started_s=self.now_s,
                ttl_s=TTL_S,
                resting=RestingClock(mhz),
                clock=clock,
            )

    def renew(self, *applied_mhz: int, fault: str = "") -> None:
        """Every agent says what its two GPUs are locked at, and why."""
        for n, node in enumerate(self.nodes):
            gpus = tuple(LeasedGpu(f"GPU-{n}-{k}", f"pod-{n}", mhz, fault) for k, mhz in enumerate(applied_mhz))
            node.lease_renewed(started_s=self.now_s, ttl_s=TTL_S, clock=LeaseClock(node.resting.mhz, gpus))


async def test_a_lease_that_was_asked_for_and_never_answered_is_acquired_again() -> None:
    """Seed 20179 of the simulation: an agent that was stopped grants it afterwards, when another clock is due again."""

    async def acquire(*_: Any, **__: Any) -> None:
        raise AgentUnavailable("DEADLINE_EXCEEDED")

    job = Job()
    job.acquire(900, LeaseClock(900, ()))
    assert not {action for action in job.decide().actions if isinstance(action, Acquire)}
    services: Any = SimpleNamespace(
        monotonic_s=lambda: job.now_s,
        agents=SimpleNamespace(acquire=acquire),
        limits=SimpleNamespace(lease_ttl_s=TTL_S),
        epochs=SimpleNamespace(of=lambda _: 1),
        resource_slices=False,
        metrics=Metrics(),
    )
    wake: Any = None
    session = NodeSession(job.state, services, family=lambda: job.family, wake=wake)
    await session.command(job.nodes[0], Acquire("node-0", RestingClock(0)))
    job.nodes[0].command_succeeded()  # a renewal, say
    assert [action for action in job.decide().actions if isinstance(action, Acquire)] == [
        Acquire("node-0", RestingClock(900))
    ]


def test_the_lease_asks_for_the_clock_and_nothing_else_is_sent() -> None:
    job = Job()
    assert {*job.decide().actions} == {Acquire("node-0", RestingClock(900)), Acquire("node-1", RestingClock(900))}
    job.acquire()
    job.renew(900, 900)
    made = job.decide()
    assert made.applied
    assert made.actions == ()
    assert made.wake_at_s == job.now_s + TTL_S / 3
    job.now_s += TTL_S / 3
    assert {*job.decide().actions} == {Renew("node-0"), Renew("node-1")}


def test_another_clock_is_asked_for_at_once_and_counts_only_when_locked() -> None:
    job = Job()
    job.acquire()
    job.renew(900, 900)
    job.family.spec_accepted(parse_spec(JobSpec, {"objective": {"type": "FixedClock", "clockMegahertz": 600}}))
    made = job.decide()
    assert {*made.actions} == {Acquire("node-0", RestingClock(600)), Acquire("node-1", RestingClock(600))}
    assert not made.applied
    job.acquire(600)
    job.renew(600, 900)
    assert not job.decide().applied
    job.renew(600, 600)
    assert job.decide().applied


@pytest.mark.parametrize(
    ("applied", "fault", "pause_s"), [((900, 0), "", 1.0), ((900, 0), "no permission", 5.0), ((900, 900), "", 5.0)]
)
def test_agents_are_asked_soon_only_while_a_clock_is_on_its_way(
    applied: tuple[int, ...], fault: str, pause_s: float
) -> None:
    job = Job()
    job.acquire()
    job.renew(*applied, fault=fault)
    assert job.decide().wake_at_s == pytest.approx(job.now_s + pause_s)


def test_a_pod_without_gpus_keeps_no_clock_from_being_in_force_but_a_job_without_is_none() -> None:
    job = Job()
    job.acquire()
    none, some = (LeasedGpu("", "pod-0", 0, ""),), (LeasedGpu("GPU-1-0", "pod-1", 900, ""),)
    job.nodes[0].lease_renewed(started_s=job.now_s, ttl_s=TTL_S, clock=LeaseClock(900, none))
    job.nodes[1].lease_renewed(started_s=job.now_s, ttl_s=TTL_S, clock=LeaseClock(900, some))
    assert job.decide().applied
    job.nodes[1].lease_renewed(
        started_s=job.now_s, ttl_s=TTL_S, clock=LeaseClock(900, (LeasedGpu("", "pod-1", 0, ""),))
    )
    assert not job.decide().applied
    assert job.waiting is not None
    assert job.waiting.message == "The pods of the job have no GPU."


def test_a_gpu_that_cannot_be_locked_is_named_with_its_pod_and_node() -> None:
    job = Job()
    job.acquire()
    job.renew(900, 0, fault="the driver refuses")
    waiting = job.waiting
    assert waiting is not None
    assert waiting.reason is Reason.GPU_NOT_CONTROLLABLE
    assert waiting.message == "GPU-0-0 of pod t-0 on node node-0: the driver refuses"


def test_pods_that_leave_give_their_node_back() -> None:
    job = Job()
    job.acquire()
    job.renew(900, 900)
    job.state.pods_observed(Selection(()), {f"node-{n}": f"10.0.0.{n}:1" for n in range(2)}, wall_s=0.0)
    assert {*job.decide().actions} == {Release("node-0"), Release("node-1")}


def test_a_budget_counts_the_power_limits_of_the_gpus_once_they_are_known() -> None:
    job = Job()
    now = Now(job.now_s, 1.9e9)
    before = member_of(job.state, job.family, now, settled=False)
    assert before is not None
    assert before.drawn_w is None
    job.acquire()
    job.renew(900, 900)
    for node in job.nodes:
        node.gpus_described(
            {}, {}, {uuid: Gpu("NVIDIA H100 80GB HBM3", max_power_w=BOARD_W) for uuid in node.gpu_uuids}
        )
    member = member_of(job.state, job.family, now, settled=False)
    assert member is not None
    assert member.claim is None
    assert member.drawn_w == member.held_w == 4 * BOARD_W


def test_a_budget_counts_no_less_while_an_agent_has_yet_to_ask_its_kubelet_for_gpus() -> None:
    """As after all operators were gone, and leases had run out: GPUs of a pod that is not spoken of draw power, too."""
    job = Job()
    job.acquire()
    job.renew(900, 900)
    one = job.nodes[1]
    one.lease_renewed(started_s=job.now_s, ttl_s=TTL_S, clock=LeaseClock(900, ()))
    for settled in (False, True):
        member = member_of(job.state, job.family, Now(job.now_s, 1.9e9), settled=settled)
        assert member is not None
        assert (member.drawn_w, member.held_w) == (None, math.inf)


def test_the_doctor_asks_only_what_a_job_without_a_plan_can_answer() -> None:
    job = Job()
    job.acquire()
    job.renew(900, 900)
    report = job.family.report(job.decide())
    said = document.document(report.conditions, report.figures, {}, generation=1, wall_s=1.9e9)
    metadata = {"namespace": "ns", "name": "job", "generation": 1}
    found = examine({"metadata": metadata, "spec": FIXED, "status": said})
    assert [(step["condition"], step["finding"]) for step in found["steps"]] == [
        ("Accepted", "good"),
        ("AgentsReady", "good"),
        ("PlanApplied", "good"),
    ]
    assert (
        found["verdict"] == "All its GPUs run at the clock that was asked for; without a plan savings are not measured."
    )
