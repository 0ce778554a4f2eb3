"""The agent's socket offered to a kubelet as a resource, with a double of it that restarts, refuses and goes away."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tests.doubles.plugin_registry import PluginRegistry
from tests.waiting import PATIENCE_S, eventually

from perseus_agent.servers.socket_resource import COUNT, ENDPOINT, SocketResource
from perseus_core import keys
from perseus_proto import device_plugin


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_plugin, "CHECK_S", 0.05)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[PluginRegistry]:
    kubelet = PluginRegistry(tmp_path / "device-plugins")
    yield kubelet
    kubelet.stop()


@pytest.fixture
def offering(kubelet: PluginRegistry, tmp_path: Path) -> Iterator[SocketResource]:
    resource = SocketResource(kubelet.folder, tmp_path / "run" / "agent.sock")
    resource.start()
    yield resource
    resource.stop()


def test_a_container_gets_the_directory_read_only_and_the_variable(
    kubelet: PluginRegistry, offering: SocketResource, tmp_path: Path
) -> None:
    kubelet.start()
    request = kubelet.registered.get(timeout=PATIENCE_S)
    assert (request.version, request.resource_name) == ("v1beta1", keys.RESOURCE_AGENT)
    devices = kubelet.lists.get(timeout=PATIENCE_S)
    assert len(devices) == COUNT
    assert set(devices.values()) == {"Healthy"}
    answer = kubelet.allocate(next(iter(devices)))
    directory = str(tmp_path / "run")
    [mount] = answer.mounts
    assert (mount.host_path, mount.container_path, mount.read_only) == (directory, directory, True)
    assert dict(answer.envs) == {keys.ENV_SOCKET: f"{directory}/agent.sock"}


def test_a_container_that_wants_more_than_one_is_refused(kubelet: PluginRegistry, offering: SocketResource) -> None:
    kubelet.start()
    names = list(kubelet.lists.get(timeout=PATIENCE_S))
    with pytest.raises(grpc.RpcError) as refused:
        kubelet.allocate(*names)
    assert f"a container may request 1, not {COUNT}" in str(refused.value.details())
    assert kubelet.allocate(names[0]).mounts, "others are served"


def test_it_waits_for_a_kubelet_that_is_not_there(
    kubelet: PluginRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resource = SocketResource(kubelet.folder, tmp_path / "run" / "agent.sock")
    resource.start()
    try:
        eventually(lambda: "there is no folder" in caplog.text, "it is said")
        kubelet.start()
        assert kubelet.registered.get(timeout=PATIENCE_S).endpoint == ENDPOINT
    finally:
        resource.stop()


def test_it_registers_with_each_kubelet_that_starts(kubelet: PluginRegistry, offering: SocketResource) -> None:
    kubelet.start()
    kubelet.lists.get(timeout=PATIENCE_S)
    for _ in range(2):  # at once, so that it registers while the kubelet starts again
        kubelet.stop()
        kubelet.start()
    while not kubelet.lists.empty():
        kubelet.lists.get()
    kubelet.stop()
    kubelet.start()
    assert len(kubelet.lists.get(timeout=PATIENCE_S)) == COUNT


def test_it_registers_with_the_successor_of_a_kubelet_that_hangs(
    kubelet: PluginRegistry, offering: SocketResource
) -> None:
    kubelet.start()
    kubelet.lists.get(timeout=PATIENCE_S)
    kubelet.stop(hangs=True)
    kubelet.start()
    assert len(kubelet.lists.get(timeout=PATIENCE_S)) == COUNT


def test_a_refusal_is_said_once_and_tried_again(
    kubelet: PluginRegistry, offering: SocketResource, caplog: pytest.LogCaptureFixture
) -> None:
    kubelet.refusal = "the resource name is forbidden on this node"
    kubelet.start()
    for _ in range(3):
        kubelet.registered.get(timeout=PATIENCE_S)
    assert caplog.text.count(kubelet.refusal) == 1
    kubelet.refusal = ""
    assert len(kubelet.lists.get(timeout=PATIENCE_S)) == COUNT


def test_a_kubelet_that_drops_it_is_asked_again(
    kubelet: PluginRegistry, offering: SocketResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_plugin, "UNWATCHED_S", 0.2)
    kubelet.dials = False
    kubelet.start()
    kubelet.registered.get(timeout=PATIENCE_S)
    kubelet.dials = True
    assert len(kubelet.lists.get(timeout=PATIENCE_S)) == COUNT


def test_what_a_predecessor_left_is_replaced_and_nothing_stays(
    kubelet: PluginRegistry, offering: SocketResource, tmp_path: Path
) -> None:
    kubelet.start()
    kubelet.lists.get(timeout=PATIENCE_S)
    offering.stop()
    assert not (kubelet.folder / ENDPOINT).exists()
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(kubelet.folder / ENDPOINT))
    dead.close()
    successor = SocketResource(kubelet.folder, tmp_path / "run" / "agent.sock")
    successor.start()
    try:
        assert len(kubelet.lists.get(timeout=PATIENCE_S)) == COUNT
    finally:
        successor.stop()
