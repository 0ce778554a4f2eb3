"""Hellos, plan sets and journals that nobody meant: no crash, no clock write, and the agent goes on.

Some inputs each by default; PERSEUS_FUZZ_INPUTS=100000 runs the long loop.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.descriptors import channel_memory
from tests.doubles.recording_gpu import RecordingGpu, RecordingSet
from tests.doubles.recording_node import gpu_uuid, plan_set_of, pod_uid, wait_for
from tests.doubles.recording_trainer import schedule_of

from perseus_agent.clocks.gpu_worker import WorkerLimits
from perseus_agent.clocks.journal import Journal, JournalState, decode_journal, encode_journal
from perseus_agent.clocks.telemetry import TelemetryHub
from perseus_agent.errors import JournalError
from perseus_agent.node import budgets
from perseus_agent.node.leases import LeaseRequest, PodName
from perseus_agent.node.node import Node
from perseus_agent.pods.pod_resources import Allocation
from perseus_agent.servers import local_socket
from perseus_agent.servers.grpc_service import AgentService
from perseus_agent.servers.local_socket import LocalServer
from perseus_proto.hello import (
    ChannelError,
    Hello,
    Timing,
    decode_hello,
    encode_hello,
    make_schedule,
    receive_answer,
    send_welcome,
)
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_sim.gpus.kubelet import KubeletDouble

INPUTS = int(os.environ.get("PERSEUS_FUZZ_INPUTS", "150"))
FUZZ = settings(
    max_examples=INPUTS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=INPUTS <= 150,
    database=None,
)

HELLO = encode_hello(Hello(0, 0, 0, Timing.HOST, gpu_uuid(0), make_schedule(schedule_of(6))))
PLANS = plan_set_of([[[1200, 900, 600]] * 3, [[600, 600, 600]] * 3]).SerializeToString()
JOURNAL = encode_journal(JournalState("boot", frozenset({gpu_uuid(0)}), {"job": 3}))


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    """Something like the original: bytes replaced, cut off, appended, or nothing like it at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(original)
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    start = draw(st.integers(0, len(data)))
    match draw(st.integers(0, 3)):
        case 0:
            del data[start:]
        case 1:
            data[start:start] = draw(st.binary(max_size=16))
        case 2:
            del data[start : start + draw(st.integers(1, 8))]
        case _:
            pass
    return bytes(data)


class Agent:
    """All of the agent but its process: a job is leased and planned, so that only the rank is missing to a write."""

    def __init__(self, folder: Path) -> None:
        self.gpu = RecordingGpu(gpu_uuid(0))
        self.journal, _ = Journal.open(folder / "journal", "boot")
        self.hub = TelemetryHub(16)
        self.node = Node(RecordingSet([self.gpu]), self.journal, self, self.hub, WorkerLimits())
        self.node.start()
        self.node.acquire(LeaseRequest("job", "ns/job", 1, 600, [PodName(pod_uid(0), "ns", "pod")]))
        self.service = AgentService(self.node, "node", None)
        kubelet = KubeletDouble(folder)
        kubelet.place([os.getpid()], pod_uid(0))
        self.socket = str(folder / "agent.sock")
        self.local = LocalServer(self.socket, self.node, kubelet.proc_root)
        self.local.start()

    def allocation(self, namespace: str, name: str, published: Mapping[str, str]) -> Allocation:
        return Allocation((self.gpu.uuid,), {})

    def assert_untouched(self) -> None:
        assert self.gpu.calls == []
        wait_for(lambda: self.node.progressing, "the node's threads turn")
        assert self.journal.locked == frozenset()


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    agent = Agent(tmp_path_factory.mktemp("agent"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budgets, "REFUSALS", math.inf)  # all inputs come from one process, and each is to be read
        yield agent
    agent.assert_untouched()
    assert agent.node.drain(60) == []
    agent.local.stop()


class Refused(Exception):
    """What a context raises on abort."""


class Context:
    """As much of a gRPC context as a command uses."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert code is not grpc.StatusCode.INTERNAL, details
        raise Refused(details)


@FUZZ
@given(mutated(HELLO[12:]))
def test_any_hello_is_understood_or_refused_by_name(body: bytes) -> None:
    try:
        hello = decode_hello(body)
    except ChannelError as error:
        said = str(error)
    else:
        assert decode_hello(encode_hello(hello)[12:]) == hello
        return
    assert ": " in said


@settings(FUZZ, max_examples=max(INPUTS // 10, 50))
@given(data=mutated(HELLO))
def test_any_bytes_on_the_socket_leave_the_agent_as_it_was(agent: Agent, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(agent.socket)
        try:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            answer = receive_answer(peer, 60)
        except (ConnectionError, ChannelError):
            return
        for descriptor in (getattr(answer, "memory_fd", None), getattr(answer, "event_fd", None)):
            if descriptor is not None:
                os.close(descriptor)


def test_a_rank_that_goes_before_its_welcome_leaves_nothing_behind(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that a race brings seldom: hello, the rank goes, welcome."""
    before = channel_memory()
    outcomes: list[Exception | None] = []
    peer = socket.socket(socket.AF_UNIX)

    def late(*welcome: Any) -> None:
        peer.close()
        try:
            send_welcome(*welcome)
        except OSError as error:
            outcomes.append(error)
            raise
        outcomes.append(None)

    monkeypatch.setattr(local_socket, "send_welcome", late)
    peer.connect(agent.socket)
    peer.sendall(HELLO)
    wait_for(lambda: outcomes, "the welcome is sent")
    assert isinstance(outcomes[0], BrokenPipeError)
    wait_for(lambda: not agent.node.ranks(), "the rank is forgotten")
    wait_for(lambda: channel_memory() == before, "its memory is let go")


@FUZZ
@given(data=mutated(PLANS))
def test_any_plan_set_is_stored_whole_or_refused_whole(agent: Agent, data: bytes) -> None:
    try:
        plan_set = messages.PlanSet.FromString(data)
    except Exception:  # noqa: BLE001  # protobuf refused it: it never reaches the agent
        return
    before = [view.plan_id for view in agent.node.lease_views()]
    request = messages.PushPlanSetRequest(job_uid="job", epoch=1, plan_set=plan_set)
    try:
        answer = agent.service.PushPlanSet(request, Context())
    except Refused:
        assert [view.plan_id for view in agent.node.lease_views()] == before
    else:
        assert answer.plan_id == plan_set.plan_id


LATENCIES = messages.PushPlanSetRequest(
    changes=[messages.ClockChange(clock_mhz=mhz, p50_us=mhz, p99_us=2 * mhz) for mhz in (600, 900, 1200)]
)


@FUZZ
@given(data=mutated(LATENCIES.SerializeToString()))
def test_any_latencies_beside_a_plan_set_are_stored_whole_or_refused_whole(agent: Agent, data: bytes) -> None:
    try:
        changes = messages.PushPlanSetRequest.FromString(data).changes
    except Exception:  # noqa: BLE001  # protobuf refused it: it never reaches the agent
        return
    plans = agent.node.leases.held("job", 1).plans
    before = plans.plan_set
    request = messages.PushPlanSetRequest(
        job_uid="job", epoch=1, plan_set=messages.PlanSet.FromString(PLANS), changes=changes
    )
    said = ""
    try:
        agent.service.PushPlanSet(request, Context())
    except Refused as refusal:
        said = str(refusal)
    if plans.plan_set is before:
        assert said.startswith("changes")
        return
    assert said == ""
    assert plans.plan_set is not None
    stored = [(mhz, round(1e6 * one.p50_s), round(1e6 * one.p99_s)) for mhz, one in plans.plan_set.changes.items()]
    assert stored == [(one.clock_mhz, one.p50_us, one.p99_us) for one in changes] == sorted(stored)


COMMANDS = {
    "AcquireLease": messages.AcquireLeaseRequest(
        job_uid="fuzz", job_name="a/b", epoch=1, ttl_ms=1000, pods=[messages.Pod(uid="u", namespace="n", name="p")]
    ),
    "RenewLease": messages.RenewLeaseRequest(job_uid="fuzz", epoch=1, ttl_ms=1000),
    "ReleaseLease": messages.ReleaseLeaseRequest(job_uid="fuzz", epoch=1),
    "SelectPlan": messages.SelectPlanRequest(
        job_uid="job", epoch=1, plan_id="0" * 64, selections=[messages.Selection(data_parallel_rank=0, point=0)]
    ),
}


@FUZZ
@given(
    data=st.sampled_from(sorted(COMMANDS)).flatmap(
        lambda n: st.tuples(st.just(n), mutated(COMMANDS[n].SerializeToString()))
    )
)
def test_any_command_is_executed_or_refused_by_name(agent: Agent, data: tuple[str, bytes]) -> None:
    name, content = data
    try:
        request = type(COMMANDS[name]).FromString(content)
    except Exception:  # noqa: BLE001  # protobuf refused it
        return
    if getattr(request, "job_uid", "") == "job" and name != "SelectPlan":
        return  # the job of the other tests
    try:
        getattr(agent.service, name)(request, Context())
    except Refused as refusal:
        said = str(refusal)
    else:
        return
    assert ": " in said


@FUZZ
@given(data=mutated(JOURNAL))
def test_any_journal_is_the_one_that_was_written_or_none(data: bytes) -> None:
    try:
        state = decode_journal(data)
    except JournalError:
        return
    assert state == decode_journal(JOURNAL)


@settings(FUZZ, max_examples=max(INPUTS // 100, 20))
@given(data=mutated(JOURNAL))
def test_any_journal_on_disk_is_read_or_put_aside(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed-journal"
    path.write_bytes(data)
    journal, damage = Journal.open(path, "boot")
    assert damage is None or journal.locked == frozenset()


def test_a_damaged_journal_leads_to_no_write(tmp_path: Path) -> None:
    (tmp_path / "journal").write_bytes(JOURNAL.replace(gpu_uuid(0).encode(), gpu_uuid(1).encode()))
    journal, damage = Journal.open(tmp_path / "journal", "boot")
    assert damage is not None
    gpus = [RecordingGpu(gpu_uuid(number)) for number in range(2)]
    node = Node(RecordingSet(gpus), journal, None, TelemetryHub(1), WorkerLimits())  # type: ignore[arg-type]
    node.start()
    node.drain(60)
    assert [gpu.calls for gpu in gpus] == [[], []]
