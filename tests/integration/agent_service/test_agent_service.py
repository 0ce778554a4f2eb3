"""The agent's gRPC service against a real agent process: commands, refusals, telemetry, metrics."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.doubles.agent_calls import (
    PLANS,
    acquire,
    describe,
    joined,
    push,
    refused,
    select,
)
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, plan_set_of, wait_for
from tests.doubles.recording_trainer import schedule_of
from tests.waiting import PATIENCE_S

from perseus_agent.clocks.telemetry import MAX_WATCHERS
from perseus_agent.lifecycle import COMMAND_THREADS
from perseus_agent.servers.grpc_service import MAX_SELECTORS
from perseus_proto.hello import make_schedule
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs


def test_a_new_node_describes_itself(tmp_path: Path) -> None:
    with RecordingNode.open(tmp_path, gpus=3) as fresh:
        fresh.start_agent()
        with fresh.stub() as stub:
            node = describe(stub)
    assert node.node_name == "node-under-test"
    assert [gpu.uuid for gpu in node.gpus] == [gpu_uuid(number) for number in range(3)]
    gpu = node.gpus[0]
    assert list(gpu.supported_clocks_mhz) == sorted(gpu.supported_clocks_mhz)
    assert (gpu.locked_clock_mhz, gpu.has_energy_counter) == (0, True)
    assert gpu.controllability == messages.CONTROLLABILITY_UNSPECIFIED, "no rank, so the GPU has not been asked"


def test_an_agent_is_reached_by_either_family_of_addresses(tmp_path: Path, ipv6: None) -> None:
    """As a pod with an IPv6 address must be: by the operator, the kubelet's probes and Prometheus."""
    with RecordingNode.open(tmp_path, gpus=1) as node:
        node.start_agent("--grpc-address=0.0.0.0:0", "--metrics-address=0.0.0.0:0")
        for host in ("127.0.0.1", "[::1]"):
            grpc_at, metrics_at = (node.addresses[which].replace("0.0.0.0", host) for which in ("grpc", "metrics"))
            with grpc.insecure_channel(grpc_at) as channel:
                assert describe(stubs.AgentStub(channel)).node_name == "node-under-test"
            wait_for(lambda at=metrics_at: answers(f"http://{at}/healthz"), f"{metrics_at} says that all is well")


def test_commands_without_a_lease_or_with_an_old_epoch_change_nothing(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    nobody = messages.Lease(job_uid="nobody", epoch=1)
    for command in (
        lambda: push(stub, nobody),
        lambda: select(stub, nobody),
        lambda: stub.RenewLease(messages.RenewLeaseRequest(job_uid="nobody", epoch=1, ttl_ms=1000)),
    ):
        assert refused(command)[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "NoLease")
    lease = acquire(stub, [pod])
    old = messages.Lease(job_uid=JOB, epoch=lease.epoch - 1)
    for command in (
        lambda: push(stub, old),
        lambda: select(stub, old),
        lambda: acquire(stub, [pod], epoch=old.epoch),
        lambda: stub.ReleaseLease(messages.ReleaseLeaseRequest(job_uid=JOB, epoch=old.epoch)),
        lambda: stub.RenewLease(messages.RenewLeaseRequest(job_uid=JOB, epoch=old.epoch, ttl_ms=1000)),
    ):
        assert refused(command)[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "StaleEpoch")
        with pytest.raises(grpc.RpcError) as error:
            command()
        assert ("perseus-epoch", str(lease.epoch)) in error.value.trailing_metadata()
    assert [lease.epoch for lease in describe(stub).leases] == [lease.epoch]


def test_a_malformed_plan_set_is_refused_whole_and_the_one_in_force_stays(stub: Any, node: RecordingNode) -> None:
    lease = acquire(stub, [node.add_pod(0, [0])])
    push(stub, lease)
    select(stub, lease)
    broken = messages.PlanSet.FromString(PLANS.SerializeToString())
    broken.points[0].energy_mj += 1
    code, name, details = refused(lambda: push(stub, lease, broken))
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")
    assert "plan_set.plan_id" in details
    code, name, details = refused(lambda: push(stub, lease, changes=[messages.ClockChange(clock_mhz=900, p50_us=2)]))
    assert (code, name) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")
    assert details.startswith("changes[900]: p50_us must be at least 1, p99_us at least p50_us")
    foreign = plan_set_of([[[1201, 900, 900, 900]]])
    assert "no GPU of this node supports 1201 MHz" in refused(lambda: push(stub, lease, foreign))[2]
    assert refused(lambda: select(stub, lease, plan_id=broken.plan_id[::-1]))[:2] == (
        grpc.StatusCode.NOT_FOUND,
        "UnknownPlan",
    )
    assert "selections.point: 9" in refused(lambda: select(stub, lease, point=9))[2]
    [held] = describe(stub).leases
    assert (held.plan_id, [(s.data_parallel_rank, s.point) for s in held.selections]) == (PLANS.plan_id, [(0, 0)])


@pytest.mark.timeout(120)  # nothing more comes once the lease has run out
def test_a_rank_runs_its_plan_reports_it_and_follows_a_selection(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    lease = acquire(stub, [pod])
    written = len(node.calls())
    stream = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB))
    next(stream)
    # Clocks of instructions that a busy machine's calls outlast are not set.
    node.start_trainer(pod, instruction_s=0.03)
    wait_for(lambda: joined(stub) == {gpu_uuid(0)}, "the rank has joined")
    push(stub, lease)
    select(stub, lease, point=0)
    seen: dict[int, messages.IterationReport] = {}
    answer = None

    def clocks_mhz() -> set[int | None]:
        return {call.mhz for call in node.calls()[written:] if call.gpu == gpu_uuid(0)}

    for batch in stream:
        for event in batch.events:
            if event.HasField("iteration"):
                seen[event.iteration.point if event.iteration.planned else -1] = event.iteration
        # On a busy machine a thread sleeps through an instruction.
        if 0 in seen and answer is None and {1200, 900} <= clocks_mhz():
            answer = select(stub, lease, point=1)
        if 1 in seen:
            break
    stream.cancel()
    assert answer is not None
    for report in (seen[0], seen[1]):
        assert report.plan_id == PLANS.plan_id
        assert report.gpu_uuid == gpu_uuid(0)
        assert len(report.durations_us) == 4
        assert sum(report.durations_us) <= report.compute_span_us <= report.iteration_time_us
        assert report.has_energy
    assert seen[1].iteration > answer.furthest_iteration
    assert clocks_mhz() == {1200, 900, 600}
    released = stub.ReleaseLease(messages.ReleaseLeaseRequest(job_uid=JOB, epoch=lease.epoch))
    assert list(released.restored_gpu_uuids) == [gpu_uuid(0)]


def test_a_stream_of_selections_answers_each_and_ends_with_the_first_that_is_refused(
    stub: Any, node: RecordingNode
) -> None:
    lease = acquire(stub, [node.add_pod(0, [0])])
    push(stub, lease)

    def request(point: int, epoch: int = lease.epoch) -> messages.SelectPlanRequest:
        chosen = [messages.Selection(data_parallel_rank=0, point=point)]
        return messages.SelectPlanRequest(job_uid=JOB, epoch=epoch, plan_id=PLANS.plan_id, selections=chosen)

    asked = [request(1), request(0), request(1), request(0, lease.epoch - 1), request(0)]
    answers = stub.SelectPlans(iter(asked))
    assert [next(answers).furthest_iteration for _ in range(3)] == [0, 0, 0]
    assert refused(lambda: next(answers))[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "StaleEpoch")
    [held] = describe(stub).leases
    assert [s.point for s in held.selections] == [1], "nothing after it counts"


def test_streams_of_selections_leave_threads_for_commands(stub: Any) -> None:
    silent = threading.Event()

    def nothing() -> Iterator[messages.SelectPlanRequest]:
        silent.wait(PATIENCE_S)
        yield from ()

    streams = [stub.SelectPlans(nothing()) for _ in range(MAX_SELECTORS + COMMAND_THREADS + MAX_WATCHERS)]
    ended = [grpc.StatusCode.RESOURCE_EXHAUSTED] * (len(streams) - MAX_SELECTORS)
    try:
        wait_for(lambda: [s.code() for s in streams if s.done()] == ended, "the others are refused")
        assert describe(stub).node_name
    finally:
        for stream in streams:
            stream.cancel()
        silent.set()


def test_a_renewal_says_whether_there_is_anything_new_to_describe(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    lease = acquire(stub, [pod])

    def renewed() -> int:
        again = messages.RenewLeaseRequest(job_uid=JOB, epoch=lease.epoch, ttl_ms=60_000)
        return int(stub.RenewLease(again).description)

    empty = renewed()
    assert empty == renewed() != 0
    trainer = node.start_trainer(pod, instruction_s=0.003)
    wait_for(lambda: joined(stub), "the rank has joined")
    assert renewed() != empty
    push(stub, lease)
    select(stub, lease, point=1)

    def the_same_after_iterations() -> bool:
        """Clock latencies are news while they are being measured."""
        trained, [begun] = renewed(), describe(stub).ranks
        wait_for(lambda: describe(stub).ranks[0].iteration > begun.iteration + 5, "iterations go by")
        return renewed() == trained

    wait_for(the_same_after_iterations, "iterations, clocks and energy are no news")
    assert any(gpu.locked_clock_mhz for gpu in describe(stub).gpus)
    trains = renewed()
    trainer.kill()
    trainer.wait()
    wait_for(lambda: not joined(stub), "the rank has gone")
    assert renewed() != trains


def test_a_late_watcher_gets_the_ranks_that_are_present(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    acquire(stub, [pod])
    node.start_trainer(pod)
    wait_for(lambda: joined(stub), "the rank has joined")
    stream = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB))
    first = next(event for batch in stream for event in batch.events)
    assert first.rank_joined.pod_uid == pod.uid
    stream.cancel()


def test_the_schedule_of_a_rank_is_returned_on_request(stub: Any, node: RecordingNode) -> None:
    node.start_trainer(node.add_pod(0, [0]))
    wait_for(lambda: list(describe(stub).ranks), "the rank has sent its hello")
    assert not describe(stub).ranks[0].HasField("schedule"), "nobody asked"
    [rank] = stub.DescribeNode(messages.DescribeNodeRequest(with_schedules=True)).ranks
    told = list(zip(rank.schedule.kinds, rank.schedule.microbatches, rank.schedule.chunks, strict=True))
    assert told == list(make_schedule(schedule_of(4)))


def test_a_watcher_that_does_not_read_loses_the_oldest_and_gets_their_number(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    acquire(stub, [pod], job="slow reader")  # readers of other tests' job may still be leaving
    narrow = grpc.insecure_channel(node.addresses["grpc"], options=[("grpc.http2.bdp_probe", 0)])
    stream = stubs.AgentStub(narrow).WatchTelemetry(messages.WatchTelemetryRequest(job_uid="slow reader"))
    next(stream)
    # Reports of a thousand instructions fill the connection's window soon, and the ring of 64 events after it.
    node.start_trainer(pod, instructions=1000, instruction_s=0)
    address = f"http://{node.addresses['metrics']}/metrics"

    def lost() -> bool:
        time.sleep(0.2)  # a scrape costs the agent more than a report
        page = urllib.request.urlopen(address).read().decode()
        [series] = [
            line for line in page.splitlines() if line.startswith("perseus_agent_telemetry_dropped_events_total")
        ]
        return float(series.split()[-1]) > 0

    wait_for(lost, "events are dropped")
    dropped = 0
    for batch in stream:
        dropped = max(dropped, batch.dropped)
        if dropped:
            break
    stream.cancel()
    narrow.close()
    assert dropped > 0


def test_a_pod_that_leaves_the_lease_loses_its_ranks(stub: Any, node: RecordingNode) -> None:
    pods = [node.add_pod(number, [number]) for number in range(2)]
    lease = acquire(stub, pods)
    for pod in pods:
        node.start_trainer(pod, instruction_s=0.003)
    wait_for(lambda: len(joined(stub)) == 2, "both ranks have joined")
    push(stub, lease)
    select(stub, lease)
    wait_for(lambda: node.locked()[gpu_uuid(0)] and node.locked()[gpu_uuid(1)], "both GPUs are locked")
    acquire(stub, pods[:1], epoch=lease.epoch)
    wait_for(lambda: node.locked()[gpu_uuid(1)] is None, "the second is reset")
    assert joined(stub) == {gpu_uuid(0)}


def answers(url: str) -> bool:
    """Whether it is answered with success; where the machine has stalled, health is refused for a moment."""
    try:
        return bool(urllib.request.urlopen(url).status == 200)
    except urllib.error.HTTPError as error:
        if error.code != 503:
            raise
        return False


def test_metrics_and_health_are_served(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    acquire(stub, [pod])
    base = f"http://{node.addresses['metrics']}"
    page = urllib.request.urlopen(f"{base}/metrics").read().decode()
    assert gpu_uuid(0) not in page, "series of each GPU are not asked for"
    for series in (
        'perseus_node_gpus{node="node-under-test",state="yes"}',
        "perseus_node_gpu_energy_joules_total",
        "perseus_node_gpu_power_watts",
        "perseus_node_gpus_adrift",
        "perseus_agent_clock_switches_total",
        "perseus_agent_clock_restores_total",
        f'perseus_agent_lease_remaining_seconds{{job_name="{JOB}",job_namespace="ns",node="',
        "perseus_agent_lease_expiries_total",
        "perseus_agent_telemetry_dropped_events_total",
        "perseus_agent_build_info",
    ):
        assert series in page, series
    for page in ("healthz", "readyz"):
        wait_for(lambda page=page: answers(f"{base}/{page}"), f"{page} says that all is well")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{base}/else")
