"""What a job's runner does with news: what is taken over, what is looked at, when, and what is awaited."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.unit.operator.conftest import LIMITS, Job, epochs_of, family_of, spec_of

from perseus_core import keys
from perseus_core.iteration import IterationReport
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.clients.agents.messages import LeaseInfo, NodeInfo
from perseus_operator.controller.job_runner import JobRunner
from perseus_operator.controller.node_session import NodeSession
from perseus_operator.controller.status_writer import NEVER_S
from perseus_operator.errors import AgentFenced, AgentRefused, AgentUnavailable
from perseus_operator.families.registry import Kind
from perseus_operator.jobs.family import Family, Surroundings
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pace import Pace
from perseus_operator.jobs.services import BACKOFF_S
from perseus_operator.nodes.actions import Acquire, Renew
from perseus_operator.nodes.lease_clock import LeaseClock
from perseus_operator.objects.values import JobRef, Pod
from perseus_operator.solving.slots import FairSlots


async def test_our_own_status_coming_back_is_no_change_and_everything_a_user_may_edit_is() -> None:
    services = SimpleNamespace(monotonic_s=lambda: 0.0, wall_s=lambda: 0.0, looks_pace=Pace(100.0))
    runner = JobRunner(JobRef("ns", "job", "uid"), cast(Any, services))
    spec = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
    }
    body: dict[str, Any] = {"metadata": {"resourceVersion": "1", "generation": 1}, "spec": spec}
    assert runner.observe(body)
    later = {**body, "metadata": {**body["metadata"], "resourceVersion": "2"}, "status": {"observedGeneration": 1}}
    assert not runner.observe(later)
    assert runner.observed.version == "2", "whoever writes next must not be refused for it"
    for edited in (
        {"annotations": {keys.ANNOTATION_STRAGGLER: "0:0:1.2"}},
        {"labels": {"team": "a"}},
        {"generation": 2},
    ):
        body = {**body, "metadata": {**body["metadata"], **edited}}
        assert runner.observe(body), edited
        assert not runner.observe(body), edited
    body = {**body, "spec": {**spec, "mode": "Recommend"}}
    assert runner.observe(body)
    assert runner.job.spec is not None
    assert runner.job.spec.mode is Mode.RECOMMEND


@pytest.mark.parametrize("mode", ["Recommend", "Enforce"])
async def test_a_job_that_is_taken_over_is_restored_by_the_family_of_its_spec(mode: str) -> None:
    class Recorder(Family):
        def __init__(self, around: Surroundings) -> None:
            self.job, self.found = around.job, list[Any]()

        def restored(self, status: Mapping[str, Any]) -> None:
            self.found.append(status)

        def spec_accepted(self, spec: JobSpec) -> None:
            assert self.found, "a spec may depend on what is restored"
            self.job.spec_accepted(spec, spec)

    services = SimpleNamespace(monotonic_s=lambda: 0.0, wall_s=lambda: 0.0, looks_pace=Pace(100.0), limits=LIMITS)
    kinds = [Kind(lambda spec: spec.mode is Mode.RECOMMEND, Recorder), Kind(lambda _: True, Recorder)]
    runner = JobRunner(JobRef("ns", "job", "uid"), cast(Any, services), kinds)
    status = {"observedGeneration": 1}
    metadata = {"generation": 1, "resourceVersion": "1"}
    runner.observe({"metadata": metadata, "spec": {"mode": mode}, "status": status})
    assert cast(Recorder, runner.family).found == [status]


async def test_one_job_reconciles_in_a_turn_of_the_event_loop_and_namespaces_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, of_turn = list[str](), list[int]()
    shared = {"turns": FairSlots(1), "looks_pace": Pace(100.0), "monotonic_s": lambda: 0.0, "wall_s": lambda: 0.0}
    runners = [
        JobRunner(JobRef(namespace, f"job-{number}", f"uid-{number}"), cast(Any, SimpleNamespace(**shared)))
        for number, namespace in enumerate(["evil"] * 50 + ["honest"])
    ]

    def reconcile(runner: JobRunner) -> float:
        looked.append(runner.ref.namespace)
        return 1e6

    monkeypatch.setattr(JobRunner, "_reconcile", reconcile)
    for runner in runners:
        runner.start()
    while len(looked) < len(runners):
        before = len(looked)
        await asyncio.sleep(0)
        of_turn.append(len(looked) - before)
    assert max(of_turn) == 1
    assert looked.index("honest") == 1, "after the one that had its turn already"
    for runner in runners:
        await runner.stop()


async def test_an_edit_that_is_refused_leaves_in_force_what_was_accepted() -> None:
    services = SimpleNamespace(monotonic_s=lambda: 0.0, wall_s=lambda: 0.0, looks_pace=Pace(100.0))
    runner = JobRunner(JobRef("ns", "job", "uid"), cast(Any, services))
    spec: dict[str, Any] = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
    }
    runner.observe({"metadata": {"generation": 1}, "spec": spec})
    accepted = runner.job.spec
    assert accepted is not None
    runner.observe({"metadata": {"generation": 2}, "spec": {**spec, "points": "many"}})
    assert runner.job.spec is accepted
    assert runner.job.spec_fault is not None
    assert "points" in runner.job.spec_fault.message


async def test_an_operator_that_an_agent_fences_does_nothing_more() -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise AgentFenced("FAILED_PRECONDITION: epoch: 1 is older than 2")

    services = SimpleNamespace(
        monotonic_s=lambda: 0.0,
        wall_s=lambda: 0.0,
        agents=SimpleNamespace(renew=refuse),
        limits=LIMITS,
        epochs=epochs_of(1),
        metrics=Metrics(),
    )
    job = Job()
    job.run()
    await session_of(job, services).command(job.nodes[0], Renew(job.nodes[0].name))
    assert job.state.job.fenced is not None
    assert job.state.job.fenced.reason is Reason.FENCED
    services.looks_pace = Pace(100.0)
    runner = runner_of(job, services, Asked())
    runner.family = runner._trace = runner._status = cast(Any, None)
    assert runner._reconcile() > 1000, "nothing is decided, and nothing reported"


def session_of(job: Job, services: SimpleNamespace) -> NodeSession:
    """Commands to the agents of a job; nothing else of it is needed."""
    shared, wake = cast(Any, services), cast(Any, None)
    return NodeSession(job.state.job, shared, family=lambda: family_of(job.state, shared), wake=wake)


def runner_of(job: Job, services: Any, wake: Any) -> JobRunner:
    """Serves a job in the making."""
    runner = JobRunner(job.state.ref, services)
    runner.job, runner._wake = job.state.job, wake
    around = Surroundings(runner.job, services, wake, runner._spawn, runner._trace)
    runner.family = family_of(job.state, services, around)
    return runner


class Asked:
    """A wake that notes what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def now(self) -> None:
        self.asked.append("now")

    def in_turn(self) -> None:
        self.asked.append("in turn")

    def at(self, due_s: float) -> None:
        self.asked.append(f"at {due_s:g}")

    def looked(self, duration_s: float) -> None:
        """Nothing is asked."""


def test_a_straggler_and_an_iteration_beyond_the_bound_are_looked_at_at_once_and_all_others_in_turn() -> None:
    job, wake, nothing = Job(), Asked(), SimpleNamespace(observe=lambda *_: None, observe_drift=lambda *_: None)
    job.run()
    services = cast(Any, SimpleNamespace(metrics=Metrics()))
    family: Any = family_of(job.state, services)
    family._inputs = SimpleNamespace(schedule=None, profile=None)
    family._calibrator = SimpleNamespace(record=lambda *_: None)
    family._profiler = family._observer = nothing
    family._bound_us = 1_500_000
    session = NodeSession(job.state.job, services, family=lambda: family, wake=cast(Any, wake))

    def iteration(number: int, *, time_us: int = 1_000_000, slowdown: float = 1.0) -> set[str]:
        """What all ranks report; what was asked when the last of them had."""
        for p, node in enumerate(job.nodes):
            for stage in range(job.spec.pipeline.stages):
                assert not wake.asked, "an iteration that is not complete says nothing"
                span_us = round(900_000 * (slowdown if p else 1.0))
                session._observe_report(node, IterationReport(p, stage, 0, number, time_us, span_us, 1000, 0))
        asked = set(wake.asked)
        wake.asked.clear()
        return asked

    learned = [iteration(number) for number in range(12)]
    assert learned == 12 * [{"in turn"}]
    assert "now" in iteration(12, time_us=1_600_000)
    assert iteration(13) == {"in turn"}
    reactions = [iteration(number, slowdown=1.3) for number in range(14, 18)]
    assert {"now"} in reactions
    assert job.state.stragglers.detector.slowdowns


async def test_an_agent_that_is_back_is_leased_at_once_however_long_it_was_away() -> None:
    """And one that refuses the lease itself is asked ever more seldom."""
    answers = [*[AgentUnavailable("away")] * 6, AgentRefused("no lease"), *[AgentRefused("no")] * 3]

    async def answer(*_: Any, **__: Any) -> None:
        raise answers.pop(0)

    job = Job()
    job.run()
    services = SimpleNamespace(
        monotonic_s=lambda: job.now_s,
        agents=SimpleNamespace(renew=answer, acquire=answer),
        limits=LIMITS,
        epochs=epochs_of(1),
        metrics=Metrics(),
    )
    session, node = session_of(job, services), job.nodes[0]
    node.expires_at_s = job.now_s + 1000  # so that it is not merely the lease that has run out
    pauses = []
    for action in [*[Renew(node.name)] * 7, *[Acquire(node.name)] * 3]:
        await session.command(node, action)
        pauses.append(round(node.retry_at_s - job.now_s, 3))
        job.now_s = node.retry_at_s
    assert pauses == [*BACKOFF_S, BACKOFF_S[0], *BACKOFF_S[1:4]]
    assert node.leased_pods is None


async def test_processes_are_asked_once_what_they_execute_and_replicas_share_it() -> None:
    """Thousands of ranks execute the same thousands of instructions; and each renewal would ask for all of them."""
    asked: list[bool] = []

    async def renew(*_: Any, **__: Any) -> LeaseInfo:
        return LeaseInfo(30.0, "plans", {}, None, 7)

    async def describe(address: str, *, with_schedules: bool) -> NodeInfo:
        asked.append(with_schedules)
        node = next(node for node in job.nodes if node.address == address)
        ranks, own = tuple(node.ranks.values()), [(1, 0, 0, False), (2, 0, 0, False)]
        return NodeInfo(ranks, {}, {}, {}, {rank.process[:2]: tuple(own) for rank in ranks})

    job = Job()
    job.run()
    services = SimpleNamespace(
        monotonic_s=lambda: job.now_s,
        agents=SimpleNamespace(renew=renew, describe=describe),
        limits=LIMITS,
        epochs=epochs_of(1),
        metrics=Metrics(),
    )
    session = session_of(job, services)
    for node in job.nodes:
        node.described(7)
        for rank in list(node.ranks):
            node.iteration_reported(IterationReport(*rank, 0, 10, 10, None, None))
    for _ in range(3):
        for node in job.nodes:
            await session.command(node, Renew(node.name))
    assert asked == [True] * len(job.nodes), "a renewal alone asks for nothing"
    schedules = [schedule for node in job.nodes for schedule in node.declared_schedules.values()]
    assert (len(schedules), len(set(map(id, schedules)))) == (4, 1)


ANOTHER_POD = Pod("another", "ns", "another", "node-0", "job", {})
NEXT = f"at {LIMITS.lease_ttl_s / 3:g}"


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (LeaseInfo(30.0, "plans", {}, None, 7), [NEXT]),
        (LeaseInfo(30.0, "plans", {}, None, 0), ["in turn", NEXT]),
        (LeaseInfo(30.0, "plans", {}, LeaseClock(900, ()), 7), ["now"]),
        (AgentUnavailable("away"), ["now"]),
    ],
    ids=["nothing is new", "it describes its node each time", "a clock", "no answer"],
)
async def test_after_a_renewal_the_next_one_waits_for_no_turn(answer: LeaseInfo | Exception, asked: list[str]) -> None:
    """With thousands of jobs a turn comes later than a lease runs out."""

    async def renew(*_: Any, **__: Any) -> LeaseInfo:
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def describe(*_: Any, **__: Any) -> NodeInfo:
        return NodeInfo(tuple(node.ranks.values()), {}, {}, {}, {})

    job, wake = Job(), Asked()
    job.run()
    services: Any = SimpleNamespace(
        monotonic_s=lambda: 0.0,
        agents=SimpleNamespace(renew=renew, describe=describe),
        limits=LIMITS,
        epochs=epochs_of(1),
        looks_pace=Pace(0.001),
        metrics=Metrics(),
    )
    runner, node = runner_of(job, services, wake), job.nodes[0]
    node.described(answer.description if isinstance(answer, LeaseInfo) else 7)
    runner._nodes = session_of(job, services)
    runner.next_reconcile_s = math.inf
    runner._start(Renew(node.name))
    await asyncio.gather(*runner._tasks)
    assert wake.asked == asked
    if NEXT in asked:
        assert runner.next_reconcile_s == node.renew_at_s, "and the liveness probe knows of it"


@pytest.mark.parametrize(
    ("change", "follows"),
    [
        (lambda job: job.nodes[0].pods_observed(job.nodes[0].pods | {ANOTHER_POD}), ["acquire"]),
        (lambda job: job.nodes[0].pods_observed(frozenset()), ["release"]),
        (lambda job: job.state.spec_accepted(spec_of(mode="Observe")), ["release"]),
        (lambda job: setattr(job, "now_s", job.now_s + LIMITS.lease_ttl_s), ["acquire"]),
        (lambda _: None, []),
    ],
    ids=["another pod", "no pods", "clocks are not to be set", "the lease has run out", "nothing is to change"],
)
async def test_what_waits_for_a_renewal_goes_when_it_ends_and_is_not_looked_at_before(
    change: Callable[[Job], None], follows: list[str]
) -> None:
    asked: list[str] = []
    ended = asyncio.Event()

    async def renew(*_: Any, **__: Any) -> LeaseInfo:
        await ended.wait()
        return LeaseInfo(LIMITS.lease_ttl_s, "plans", {}, None, 7)

    def answer(name: str) -> Callable[..., Any]:
        async def refuse(*_: Any, **__: Any) -> None:
            asked.append(name)
            raise AgentRefused("not now")

        return refuse

    job, wake = Job(), Asked()
    job.run()
    [node, other] = job.nodes
    agents = {name: answer(name) for name in ("acquire", "release", "push", "select")}
    services: Any = SimpleNamespace(
        monotonic_s=lambda: job.now_s,
        wall_s=lambda: job.wall_s,
        agents=SimpleNamespace(renew=renew, **agents),
        limits=LIMITS,
        epochs=epochs_of(1),
        looks_pace=Pace(0.001),
        metrics=Metrics(),
    )
    runner = runner_of(job, services, wake)
    runner._nodes = session_of(job, services)
    runner._status = cast(Any, SimpleNamespace(stored={}, report=lambda *_, **__: NEVER_S))
    node.described(7)
    other.command_started()  # nor has anything else to be done
    job.state.inputs.read_started()
    runner._start(Renew(node.name))
    await asyncio.sleep(0)  # it is sent
    change(job)
    assert runner._reconcile() > 1.0, "nothing can be done about it until then"
    await asyncio.sleep(0)
    assert (asked, wake.asked) == ([], [])
    ended.set()
    await asyncio.gather(*runner._tasks)
    assert (wake.asked.pop(0) == "now") is bool(follows), "what waits goes at once, and nothing else is looked at"
    runner._reconcile()
    await asyncio.gather(*runner._tasks)
    assert asked == follows


@pytest.mark.parametrize("meanwhile", [False, True], ids=["nothing happens", "a node's agent is lost meanwhile"])
async def test_a_status_write_is_followed_by_a_look_only_if_there_is_more_to_report(meanwhile: bool) -> None:
    stored, answers = [], asyncio.Event()

    async def write_status(_: JobRef, status: dict[str, Any]) -> str:
        stored.append(status)
        await answers.wait()
        return str(len(stored))

    async def answer(*_: Any, **__: Any) -> str:
        return "1"

    job, wake = Job(), Asked()
    job.run()
    job.state.inputs.read_started()
    services: Any = SimpleNamespace(
        kube=SimpleNamespace(write_status=write_status, annotate=answer, post_event=answer),
        monotonic_s=lambda: job.now_s,
        wall_s=lambda: job.wall_s,
        limits=LIMITS,
        looks_pace=Pace(0.001),
        figures_pace=Pace(10.0),
        status_interval_s=5.0,
        metrics=Metrics(),
    )
    runner = runner_of(job, services, wake)
    runner._reconcile()
    await asyncio.sleep(0)
    if meanwhile:
        job.nodes[0].fault = Explanation(Reason.AGENT_UNAVAILABLE, "no answer")
        runner._reconcile()
    answers.set()
    await asyncio.gather(*runner._tasks)
    assert wake.asked == (["now"] if meanwhile else [])
    assert runner._reconcile() > 1.0, "what is due next has its time"
    await asyncio.gather(*runner._tasks)
    assert len(stored) == 1 + meanwhile
