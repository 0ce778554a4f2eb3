"""The agent's socket offered to a kubelet as a resource, with a double of it that restarts, refuses and goes away."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.waiting import eventually

from perseus_agent.servers.socket_resource import COUNT, ENDPOINT, SocketResource
from perseus_proto import keys
from perseus_proto.deviceplugin import deviceplugin_pb2 as messages
from perseus_proto.deviceplugin import deviceplugin_pb2_grpc as stubs

WAIT_S = 30.0


class Kubelet(stubs.RegistrationServicer):
    """The kubelet's side: at every start it empties its folder, and it calls back the plugin that registers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refusal = ""
        self.dials = True
        self.registered: queue.Queue[messages.RegisterRequest] = queue.Queue()
        self.lists: queue.Queue[dict[str, str]] = queue.Queue()
        self._server: Any = None
        self._stopped = threading.Event()

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.iterdir():
            left.unlink()
        self._stopped = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(4))
        stubs.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.folder / 'kubelet.sock'}")
        self._server.start()

    def stop(self, *, hangs: bool = False) -> None:
        """Go away; a kubelet that hangs goes on to watch the plugin, while another has its place."""
        if not hangs:
            self._stopped.set()
        self._server.stop(0).wait()

    def Register(self, request: messages.RegisterRequest, context: Any) -> messages.Empty:
        if self.refusal:
            self.registered.put(request)
            context.abort(grpc.StatusCode.UNKNOWN, self.refusal)
        if self.dials:
            threading.Thread(target=self._watch, args=(request.endpoint, self._stopped), daemon=True).start()
        self.registered.put(request)
        return messages.Empty()

    def _watch(self, endpoint: str, stopped: threading.Event) -> None:
        with grpc.insecure_channel(f"unix:{self.folder / endpoint}") as channel:
            stream = stubs.DevicePluginStub(channel).ListAndWatch(messages.Empty())
            threading.Thread(target=lambda: stopped.wait() and stream.cancel(), daemon=True).start()
            try:
                for answer in stream:
                    self.lists.put({device.ID: device.health for device in answer.devices})
            except grpc.RpcError:
                pass

    def allocate(self, *names: str) -> messages.ContainerAllocateResponse:
        with grpc.insecure_channel(f"unix:{self.folder / ENDPOINT}") as channel:
            wanted = messages.ContainerAllocateRequest(devices_ids=names)
            request = messages.AllocateRequest(container_requests=[wanted])
            [answer] = stubs.DevicePluginStub(channel).Allocate(request, timeout=WAIT_S).container_responses
        return answer


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet(tmp_path / "device-plugins")
    yield kubelet
    if kubelet._server:
        kubelet.stop()


@pytest.fixture
def offering(kubelet: Kubelet, tmp_path: Path) -> Iterator[SocketResource]:
    resource = SocketResource(kubelet.folder, tmp_path / "run" / "agent.sock")
    resource.start()
    yield resource
    resource.stop()


def test_a_container_gets_the_directory_read_only_and_the_variable(
    kubelet: Kubelet, offering: SocketResource, tmp_path: Path
) -> None:
    kubelet.start()
    request = kubelet.registered.get(timeout=WAIT_S)
    assert (request.version, request.resource_name) == ("v1beta1", keys.RESOURCE_AGENT)
    devices = kubelet.lists.get(timeout=WAIT_S)
    assert len(devices) == COUNT
    assert set(devices.values()) == {"Healthy"}
    answer = kubelet.allocate(next(iter(devices)))
    directory = str(tmp_path / "run")
    [mount] = answer.mounts
    assert (mount.host_path, mount.container_path, mount.read_only) == (directory, directory, True)
    assert dict(answer.envs) == {keys.ENV_SOCKET: f"{directory}/agent.sock"}


def test_a_container_that_wants_more_than_one_is_refused(kubelet: Kubelet, offering: SocketResource) -> None:
    kubelet.start()
    names = list(kubelet.lists.get(timeout=WAIT_S))
    with pytest.raises(grpc.RpcError) as refused:
        kubelet.allocate(*names)
    assert f"a container may request 1, not {COUNT}" in str(refused.value.details())
    assert kubelet.allocate(names[0]).mounts, "others are served"


def test_it_waits_for_a_kubelet_that_is_not_there(
    kubelet: Kubelet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resource = SocketResource(kubelet.folder, tmp_path / "run" / "agent.sock")
    resource.start()
    try:
        eventually(lambda: "there is no folder" in caplog.text, "it is said")
        kubelet.start()
        assert kubelet.registered.get(timeout=WAIT_S).endpoint == ENDPOINT
    finally:
        resource.stop()


def test_it_registers_with_each_kubelet_that_starts(kubelet: Kubelet, offering: SocketResource) -> None:
    kubelet.start()
    kubelet.lists.get(timeout=WAIT_S)
    for _ in range(2):  # at once, so that it registers while the kubelet starts again
        kubelet.stop()
        kubelet.start()
    while not kubelet.lists.empty():
        kubelet.lists.get()
    kubelet.stop()
    kubelet.start()
    assert len(kubelet.lists.get(timeout=WAIT_S)) == COUNT


def test_it_registers_with_the_successor_of_a_kubelet_that_hangs(kubelet: Kubelet, offering: SocketResource) -> None:
    kubelet.start()
    kubelet.lists.get(timeout=WAIT_S)
    kubelet.stop(hangs=True)
    kubelet.start()
    assert len(kubelet.lists.get(timeout=WAIT_S)) == COUNT


def test_a_refusal_is_said_once_and_tried_again(
    kubelet: Kubelet, offering: SocketResource, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.refusal = "the resource name is forbidden on this node"
    kubelet.start()
    for _ in range(3):
        kubelet.registered.get(timeout=WAIT_S)
    assert caplog.text.count(kubelet.refusal) == 1
    kubelet.refusal = ""
    assert len(kubelet.lists.get(timeout=WAIT_S)) == COUNT


def test_a_kubelet_that_drops_it_is_asked_again(kubelet: Kubelet, offering: SocketResource) -> None:
    kubelet.dials = False
    kubelet.start()
    kubelet.registered.get(timeout=WAIT_S)
    kubelet.dials = True
    assert len(kubelet.lists.get(timeout=WAIT_S)) == COUNT


def test_what_a_predecessor_left_is_replaced_and_nothing_stays(
    kubelet: Kubelet, offering: SocketResource, tmp_path: Path
) -> None:
    kubelet.start()
    kubelet.lists.get(timeout=WAIT_S)
    offering.stop()
    assert not (kubelet.folder / ENDPOINT).exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(kubelet.folder / ENDPOINT))
    dead.close()
    successor = SocketResource(kubelet.folder, tmp_path / "run" / "agent.sock")
    successor.start()
    try:
        assert len(kubelet.lists.get(timeout=WAIT_S)) == COUNT
    finally:
        successor.stop()
