"""Engines without the plugin: a real agent, a real reader of pages, pages as recorded, and GPUs that record."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.agent_calls import freed
from tests.doubles.recording_node import JOB, RecordingNode, gpu_uuid, wait_for
from tests.integration.test_engines import BUSY, FLOOR, HIGHER, acquire, locked, order, refused

from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs
from perseus_sim.serving.exposition import EngineMetrics
from perseus_sim.serving.metrics_server import Manner, MetricsServer
from perseus_sim.serving.recorded_pages import EngineKind

pytestmark = pytest.mark.processes


class Reader:
    """The process that reads pages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-m", "perseus_reader", f"--socket={self.path}"])
        wait_for(self.path.exists, "the reader listens")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    made = Reader(tmp_path_factory.mktemp("reader") / "reader.sock")
    yield made
    made.kill()


@pytest.fixture(scope="module")
def node(reader: Reader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingNode]:
    with RecordingNode.open(tmp_path_factory.mktemp("node"), gpus=2) as node:
        node.start_agent(f"--reader-socket={reader.path}")
        yield node


@pytest.fixture
def stub(node: RecordingNode, reader: Reader) -> Iterator[stubs.AgentStub]:
    if reader.process is None or reader.process.poll() is not None:
        reader.start()
    with freed(node, 4) as stub:
        yield stub


@contextlib.contextmanager
def page(metrics: EngineMetrics, **manner: Any) -> Iterator[messages.EnginePage]:
    server = MetricsServer("127.0.0.1:0", metrics, Manner(**{"slow": False, **manner}))
    host, _, port = server.address.rpartition(":")
    try:
        yield messages.EnginePage(host=host, port=int(port), path="/metrics")
    finally:
        server.close()


def of(pod: messages.Pod, where: messages.EnginePage) -> messages.EnginePage:
    return messages.EnginePage(pod_uid=pod.uid, host=where.host, port=where.port, path=where.path)


def busy(running: int = 8, waiting: int = 0) -> EngineMetrics:
    metrics = EngineMetrics()
    metrics.set_load(waiting=waiting, running=running, kv_share=0.3)
    return metrics


def renewed(stub: Any, lease: messages.Lease) -> messages.Lease:
    found: messages.Lease = stub.RenewLease(messages.RenewLeaseRequest(job_uid=JOB, epoch=lease.epoch, ttl_ms=60_000))
    return found


def test_an_engine_without_the_plugin_follows_its_page(node: RecordingNode, stub: Any) -> None:
    metrics = busy()
    with page(metrics) as where:
        pod = node.add_pod(0, [0, 1])
        lease = acquire(stub, pod)
        order(stub, lease, pod, pages=[of(pod, where)])
        wait_for(lambda: locked(node, [0, 1]) == {FLOOR}, "the table's clock of its load")
        metrics.set_load(waiting=0, running=40, kv_share=0.3)
        wait_for(lambda: locked(node, [0, 1]) == {HIGHER}, "more requests need a higher clock")
        metrics.set_load(waiting=2, running=40, kv_share=0.3)
        wait_for(lambda: locked(node, [0, 1]) == {None}, "prompts wait")
        [engine] = stub.DescribeNode(messages.DescribeNodeRequest()).engines
        assert (engine.name, engine.version, engine.pid) == ("vllm", "unknown", 0)
        assert list(engine.gpu_uuids) == [gpu_uuid(0), gpu_uuid(1)]
        assert not renewed(stub, lease).engine_faults
    wait_for(lambda: bool(renewed(stub, lease).engine_faults), "the page has gone, and the lease says so")
    wait_for(node.all_default, "default clocks without it")


def test_a_page_that_cannot_be_read_is_said_with_the_lease(node: RecordingNode, stub: Any) -> None:
    with page(busy(), kind=EngineKind.TGI) as where:
        pod = node.add_pod(0, [0])
        lease = acquire(stub, pod)
        order(stub, lease, pod, pages=[of(pod, where)])
        wait_for(lambda: "no engine that is known" in str(renewed(stub, lease).engine_faults), "why it is not read")
        [fault] = renewed(stub, lease).engine_faults
        assert fault.pod_uid == pod.uid
        assert node.all_default()


def test_an_engine_that_speaks_takes_its_pages_place(node: RecordingNode, stub: Any) -> None:
    with page(busy(running=40)) as where:
        pod = node.add_pod(0, [0])
        lease = acquire(stub, pod)
        order(stub, lease, pod, pages=[of(pod, where)])
        wait_for(lambda: locked(node, [0]) == {HIGHER}, "the page's load")
        engine = node.start_engine(pod)
        engine.says(**BUSY)
        wait_for(lambda: locked(node, [0]) == {FLOOR}, "the engine's own load")
        engine.process.kill()
        wait_for(lambda: locked(node, [0]) == {HIGHER}, "its page is read again")


def test_without_its_reader_clocks_are_default_until_there_is_one(
    node: RecordingNode, stub: Any, reader: Reader
) -> None:
    with page(busy()) as where:
        pod = node.add_pod(0, [0])
        lease = acquire(stub, pod)
        order(stub, lease, pod, pages=[of(pod, where)])
        wait_for(lambda: locked(node, [0]) == {FLOOR}, "the page's load")
        reader.kill()
        wait_for(node.all_default, "default clocks without the reader")
        wait_for(lambda: "nothing on this node reads" in str(renewed(stub, lease).engine_faults), "the lease says so")
        reader.path.unlink()  # so that start waits for the new one
        reader.start()
        wait_for(lambda: locked(node, [0]) == {FLOOR}, "the next reader is found")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"host": "metadata.internal"}, "pages.host: must be an IP address"),
        ({"host": ""}, "pages.host: must be an IP address"),
        ({"port": 0}, "pages.port: must be 1 to 65535"),
        ({"path": "metrics"}, "pages.path: must begin with /"),
        ({"path": "/a b"}, "pages.path: must begin with /"),
        ({"pod_uid": ""}, "pages.pod_uid: must name a pod"),
    ],
)
def test_an_address_that_breaks_a_rule_changes_nothing(
    node: RecordingNode, stub: Any, change: dict[str, Any], message: str
) -> None:
    pod = node.add_pod(0, [0])
    lease = acquire(stub, pod)
    held = order(stub, lease, pod)
    where = messages.EnginePage(**{"pod_uid": pod.uid, "host": "127.0.0.1", "port": 80, "path": "/metrics", **change})
    assert message in refused(lambda: order(stub, lease, pod, pages=[where]))[2]
    assert renewed(stub, lease).orders_id == held


def test_a_reader_that_takes_no_orders_does_not_hold_up_the_agents_end(tmp_path: Path) -> None:
    """It listens and never accepts: a connection waits for it, and a second one for the first."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf, RecordingNode.open(tmp_path, gpus=1) as node:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect(str(tmp_path / "deaf.sock"))
            agent = node.start_agent(f"--reader-socket={tmp_path / 'deaf.sock'}")
            with node.stub() as stub:
                pod = node.add_pod(0, [0])
                lease = acquire(stub, pod)
                order(
                    stub, lease, pod, pages=[messages.EnginePage(pod_uid=pod.uid, host="127.0.0.1", port=1, path="/")]
                )
                wait_for(lambda: bool(renewed(stub, lease).engine_faults), "no reader answers")
            agent.terminate()
            assert agent.wait(30) == 0
