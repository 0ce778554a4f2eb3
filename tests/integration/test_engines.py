"""Serving engines on a node: a real agent process, engines with the real session, GPUs that record."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.doubles.agent_calls import freed
from tests.doubles.recording_node import JOB, RecordingNode, RunningEngine, gpu_uuid, wait_for

from perseus_agent.servers.grpc_service import ERROR_METADATA
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs

FLOOR, HIGHER = 900, 1200
TABLE = messages.ClockTable(
    running=[16, 64],
    kv_share_ppm=[1_000_000],
    clocks_mhz=[FLOOR, HIGHER],
    ladder_mhz=[FLOOR, 1050, HIGHER],
    boost_mhz=[0],
)
UNDER_1050 = messages.ClockTable(
    running=[16, 64], kv_share_ppm=[1_000_000], clocks_mhz=[FLOOR, 0], ladder_mhz=[FLOOR, 1050], boost_mhz=[0]
)
"""The same under a ceiling."""
LIMITS = messages.ServingLimits(first_token_us=1_000_000, per_token_us=50_000, attainment_ppm=990_000)
BUSY = {"running": 8, "kv_share": 0.3}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingNode]:
    with RecordingNode.open(tmp_path_factory.mktemp("node"), gpus=3) as node:
        node.start_agent()
        yield node


@pytest.fixture
def stub(node: RecordingNode) -> Iterator[stubs.AgentStub]:
    with freed(node, 8) as stub:
        yield stub


def acquire(stub: Any, *pods: messages.Pod, ttl_ms: int = 60_000, **clock: int) -> messages.Lease:
    request = messages.AcquireLeaseRequest(
        job_uid=JOB, job_name=f"ns/{JOB}", epoch=time.time_ns(), ttl_ms=ttl_ms, pods=pods, **clock
    )
    lease: messages.Lease = stub.AcquireLease(request)
    return lease


def order(stub: Any, lease: messages.Lease, *pods: messages.Pod, clock_mhz: int = -1, **named: Any) -> str:
    """Have pods follow the table, or hold a clock."""
    orders = [
        messages.EngineOrder(pod_uid=pod.uid, follow_table=clock_mhz < 0, clock_mhz=max(0, clock_mhz)) for pod in pods
    ]
    fields = {"table": TABLE, "limits": LIMITS, "orders": orders, **named}
    request = messages.OrderEnginesRequest(job_uid=JOB, epoch=lease.epoch, **fields)
    answered: str = stub.OrderEngines(request).orders_id
    return answered


def follows(node: RecordingNode, stub: Any, gpus: list[int], number: int = 0) -> tuple[RunningEngine, messages.Lease]:
    """An engine on some GPUs that follows the table at its lowest clock."""
    pod = node.add_pod(number, gpus)
    lease = acquire(stub, pod)
    order(stub, lease, pod)
    engine = node.start_engine(pod)
    engine.says(**BUSY)
    wait_for(lambda: locked(node, gpus) == {FLOOR}, "the table's clock is locked on all")
    return engine, lease


def locked(node: RecordingNode, gpus: list[int]) -> set[int | None]:
    clocks = node.locked()
    return {clocks[gpu_uuid(gpu)] for gpu in gpus}


def refused(call: Any) -> tuple[grpc.StatusCode, str, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    trailing = dict(error.value.trailing_metadata())
    return error.value.code(), trailing.get(ERROR_METADATA, ""), error.value.details()


def test_all_gpus_of_an_engine_follow_its_load_together(node: RecordingNode, stub: Any) -> None:
    engine, _ = follows(node, stub, [0, 1])
    engine.says(running=40, kv_share=0.3)
    wait_for(lambda: locked(node, [0, 1]) == {HIGHER}, "more requests need a higher clock")
    engine.says(running=40, waiting=1, kv_share=0.3)
    wait_for(lambda: locked(node, [0, 1]) == {None}, "a prompt waits, so the clocks are the default ones")
    engine.says(**BUSY)
    wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "the prompt is computed")
    assert locked(node, [2]) == {None}


def test_an_engine_is_described_and_its_windows_add_up(node: RecordingNode, stub: Any) -> None:
    pod = node.add_pod(0, [0, 1])
    lease = acquire(stub, pod)
    orders_id = order(stub, lease, pod)
    stream = stub.WatchTelemetry(messages.WatchTelemetryRequest(job_uid=JOB))
    next(stream)
    engine = node.start_engine(pod)
    engine.says(**BUSY)
    events: list[messages.TelemetryEvent] = []
    windows: list[messages.EngineWindow] = []
    for batch in stream:
        events += batch.events
        windows = [event.window for event in events if event.HasField("window")]
        if any(window.clock_mhz == FLOOR and not window.changed for window in windows[1:]):
            break
    (joined,) = [event.engine_joined for event in events if event.HasField("engine_joined")]
    assert (joined.pod_uid, joined.pid) == (pod.uid, engine.process.pid)
    assert (joined.name, joined.version) == ("recording", "1.0")
    assert list(joined.gpu_uuids) == [gpu_uuid(0), gpu_uuid(1)]
    assert [(flag.name, flag.value) for flag in joined.flags] == [("dtype", "half")]
    described = stub.DescribeNode(messages.DescribeNodeRequest())
    assert list(described.engines) == [joined]
    assert [lease.orders_id for lease in described.leases] == [orders_id]
    assert [window.number for window in windows] == list(range(len(windows)))
    for window in windows:
        assert window.time_us >= 1_000_000
        assert window.default_us <= window.time_us == sum(held.time_us for held in window.held)
        assert window.running_milli <= 8_000
    held = windows[-1]
    assert (held.running_milli, held.kv_share_ppm) == (8_000, 300_000)
    assert held.generated_tokens == 8 * held.steps > 0
    assert (held.default_us, held.mhz_us, held.median_clock_mhz) == (0, FLOOR * held.time_us, FLOOR)
    assert held.has_energy
    assert held.energy_mj > 0
    assert "Floor" in {one.reason for one in held.held}
    engine.process.kill()
    left = next(event.engine_left for batch in stream for event in batch.events if event.HasField("engine_left"))
    assert left == joined


def test_a_lease_says_what_the_gpus_of_each_pod_have_used(node: RecordingNode, stub: Any) -> None:
    pods = node.add_pod(0, [0, 1]), node.add_pod(1, [2])
    renewal = messages.RenewLeaseRequest(job_uid=JOB, epoch=acquire(stub, *pods).epoch, ttl_ms=60_000)

    def used_mj() -> dict[str, int]:
        return {energy.pod_uid: energy.energy_mj for energy in stub.RenewLease(renewal).energies}

    wait_for(lambda: set(used_mj()) == {pod.uid for pod in pods}, "no process of a pod is needed")
    before_mj = used_mj()
    wait_for(lambda: all(used_mj()[uid] > before_mj[uid] for uid in before_mj), "the counters go on")


@pytest.mark.parametrize("way", ["silent", "stopped", "killed"])
def test_an_engine_that_says_no_more_has_default_clocks(node: RecordingNode, stub: Any, way: str) -> None:
    engine, _ = follows(node, stub, [0, 1])
    if way == "silent":
        engine.says(silent=True)
    elif way == "stopped":
        engine.process.send_signal(signal.SIGSTOP)
    else:
        engine.process.kill()
    wait_for(lambda: locked(node, [0, 1]) == {None}, "default clocks")


@pytest.mark.parametrize("end", ["released", "lapsed", "without the pod", "without orders"])
def test_what_the_lease_does_not_order_ends(node: RecordingNode, stub: Any, end: str) -> None:
    _, lease = follows(node, stub, [0, 1])
    if end == "released":
        answer = stub.ReleaseLease(messages.ReleaseLeaseRequest(job_uid=JOB, epoch=lease.epoch))
        assert sorted(answer.restored_gpu_uuids) == [gpu_uuid(0), gpu_uuid(1)]
    elif end == "lapsed":
        stub.RenewLease(messages.RenewLeaseRequest(job_uid=JOB, epoch=lease.epoch, ttl_ms=500))
    elif end == "without the pod":
        acquire(stub, node.add_pod(7, [2]))
    else:
        order(stub, lease)
    wait_for(lambda: locked(node, [0, 1]) == {None}, "default clocks")


def test_no_clock_is_above_a_ceiling_whatever_happens_until_it_is_withdrawn(node: RecordingNode, stub: Any) -> None:
    pod = node.add_pod(0, [0, 1])
    ceiling = {"clock_mhz": 1050, "keep_clock_ms": 60_000}
    order(stub, acquire(stub, pod, **ceiling), pod, table=UNDER_1050)
    wait_for(lambda: locked(node, [0, 1]) == {1050}, "before there is an engine GPUs are at the ceiling")
    engine = node.start_engine(pod)
    engine.says(**BUSY)
    wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "the load needs less")
    engine.says(running=8, waiting=1, kv_share=0.3)
    wait_for(lambda: locked(node, [0, 1]) == {1050}, "a boost goes to the ceiling")
    engine.says(**BUSY)
    wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "the prompt is computed")
    engine.process.send_signal(signal.SIGSTOP)
    wait_for(lambda: locked(node, [0, 1]) == {1050}, "an engine that is silent is at the ceiling")
    engine.process.send_signal(signal.SIGCONT)
    wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "it speaks again")
    lapsing = acquire(stub, pod, ttl_ms=500, **ceiling)
    order(stub, lapsing, pod, table=UNDER_1050)
    wait_for(lambda: locked(node, [0, 1]) == {1050}, "no operator renews the lease, and the ceiling stays")
    order(stub, acquire(stub, pod), pod)
    wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "an operator is back, and the budget is gone")
    engine.says(running=8, waiting=1, kv_share=0.3)
    wait_for(lambda: locked(node, [0, 1]) == {None}, "a boost goes to the default clocks")


def test_one_clock_is_held_only_while_the_engine_speaks(node: RecordingNode, stub: Any) -> None:
    pod = node.add_pod(0, [0])
    lease = acquire(stub, pod)
    engine = node.start_engine(pod)
    engine.says(running=40, waiting=3)
    order(stub, lease, pod, clock_mhz=600)
    wait_for(lambda: locked(node, [0]) == {600}, "the ordered clock, whatever waits")
    engine.says(silent=True)
    wait_for(lambda: locked(node, [0]) == {None}, "the engine is silent")
    engine.says(running=40)
    wait_for(lambda: locked(node, [0]) == {600}, "it speaks again")
    order(stub, lease, pod, clock_mhz=0)
    wait_for(lambda: locked(node, [0]) == {None}, "the default clocks are ordered")


def test_a_second_engine_of_a_container_is_refused_by_name(node: RecordingNode, stub: Any) -> None:
    follows(node, stub, [0, 1])
    node.start_engine(node.add_pod(0, [0, 1]))
    wait_for(lambda: f"drives {gpu_uuid(0)}, {gpu_uuid(1)} already" in node.log(), "the second engine is refused")
    wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "the first goes on")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": messages.ClockTable()}, "table.running: must have 1 to 64 values"),
        ({"table": {"clocks_mhz": [FLOOR]}}, "table.clocks_mhz: must have for each edge"),
        ({"table": {"ladder_mhz": [FLOOR, 901, HIGHER]}}, "table.ladder_mhz: no GPU of this node supports 901 MHz"),
        ({"table": {"boost_mhz": [1]}}, "table.boost_mhz must have 1 to 64 clocks of ladder_mhz"),
        ({"table": None}, "orders.clocks_mhz must not follow a table"),
        ({"limits": {"attainment_ppm": 0}}, "limits.attainment must be above 0"),
        ({"limits": {"per_token_us": 10}}, "limits.per_token_s must be from 0.001"),
        ({"orders": [{"pod_uid": "a"}, {"pod_uid": "a"}]}, "orders.pod_uid: must name a pod, and none twice"),
        ({"orders": [{"pod_uid": "a", "clock_mhz": 2}]}, "orders.clock_mhz: no GPU of this node supports 2 MHz"),
        ({"orders": [{"pod_uid": "a", "clock_mhz": 900, "follow_table": True}]}, "orders.clock_mhz: must be 0"),
    ],
)
def test_one_field_that_breaks_a_rule_changes_nothing(
    node: RecordingNode, stub: Any, change: dict[str, Any], message: str
) -> None:
    pod = node.add_pod(0, [0])
    lease = acquire(stub, pod)
    held = order(stub, lease, pod)
    (name, value) = next(iter(change.items()))
    kinds = {"table": messages.ClockTable, "limits": messages.ServingLimits}
    if name == "orders":
        value = [messages.EngineOrder(**one) for one in value]
    elif isinstance(value, dict):
        before = {"table": TABLE, "limits": LIMITS}[name]
        fields = {field.name: getattr(before, field.name) for field in kinds[name].DESCRIPTOR.fields}
        value = kinds[name](**{**fields, **value})
    code, error, text = refused(lambda: order(stub, lease, pod, **{name: value}))
    assert (code, error) == (grpc.StatusCode.INVALID_ARGUMENT, "InvalidRequest")
    assert message in text
    renewed = stub.RenewLease(messages.RenewLeaseRequest(job_uid=JOB, epoch=lease.epoch, ttl_ms=60_000))
    assert renewed.orders_id == held


def test_an_agent_that_is_killed_leaves_no_clock(tmp_path_factory: pytest.TempPathFactory) -> None:
    with RecordingNode.open(tmp_path_factory.mktemp("killed"), gpus=1) as node:
        node.start_agent()
        with node.stub() as stub:
            follows(node, stub, [0])
        node.kill_agent()
        wait_for(node.all_default, "the keeper gives the GPU back")
