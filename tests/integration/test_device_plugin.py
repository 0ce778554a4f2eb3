"""Simulated GPUs offered to a kubelet: over the kubelet's own sockets, with a double of the kubelet's side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.plugin_registry import PluginRegistry
from tests.waiting import PATIENCE_S, eventually

from perseus_agent.devices.nvml import NvmlDevices
from perseus_agent.pods.pod_resources import PodResources
from perseus_sim.gpus.device_plugin import offer_gpus
from perseus_sim.gpus.kubelet import AdmittedPod, KubeletDouble
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.offer import make_gpus
from perseus_sim.gpus.shim_gpu import ENV_FOLDER, IN_CONTAINER, describe, open_shim

A100 = MODELS["a100"]


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[PluginRegistry]:
    kubelet = PluginRegistry(tmp_path / "device-plugins")
    kubelet.start()
    yield kubelet
    kubelet.stop()


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


@pytest.fixture
def uuids(kubelet: PluginRegistry, gpus: Path, nvml_library: Path) -> Iterator[tuple[str, ...]]:
    uuids, stop = make_gpus(gpus, "node-a", 2, A100, nvml_library).uuids, threading.Event()
    thread = threading.Thread(target=offer_gpus, args=(kubelet.folder, uuids, gpus, stop))
    thread.start()
    yield uuids
    stop.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_pod_that_is_given_gpus_finds_them_and_the_agent_drives_the_same(
    kubelet: PluginRegistry, uuids: tuple[str, ...], gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = kubelet.registered.get(timeout=PATIENCE_S)
    assert (request.version, request.resource_name) == ("v1beta1", "nvidia.com/gpu")
    assert kubelet.lists.get(timeout=PATIENCE_S) == dict.fromkeys(uuids, "Healthy")
    container = kubelet.allocate(uuids[0])
    assert dict(container.envs) == {
        "NVIDIA_VISIBLE_DEVICES": uuids[0],
        ENV_FOLDER: IN_CONTAINER,
        ENV_STATE: f"{IN_CONTAINER}/nvml-state",
    }
    [mount] = container.mounts
    assert (mount.host_path, mount.container_path, mount.read_only) == (str(gpus), IN_CONTAINER, False)

    # The names are such as the agent takes from the kubelet, and its driver knows them.
    node = KubeletDouble(tmp_path / "node")
    node.start()
    try:
        node.admit(AdmittedPod("uid", "team", "trainer", (uuids[0],)))
        resources = PodResources(str(node.socket))
        allocation = resources.allocation("team", "trainer")
        resources.close()
    finally:
        node.stop()
    assert allocation is not None
    assert allocation.gpu_uuids == (uuids[0],)
    monkeypatch.setenv(ENV_STATE, str(gpus / "nvml-state"))
    driver = NvmlDevices(privileged=lambda: True, energy_check_s=0.0)
    assert [device.identity.uuid for device in driver.devices] == list(uuids)
    assert driver.devices[0].identity.supported_clocks_mhz == A100.clocks_mhz
    driver.close()


def test_it_registers_again_with_a_kubelet_that_was_restarted(kubelet: PluginRegistry, uuids: tuple[str, ...]) -> None:
    endpoint = kubelet.registered.get(timeout=PATIENCE_S).endpoint
    kubelet.stop()
    kubelet.start()
    assert kubelet.registered.get(timeout=PATIENCE_S).endpoint == endpoint


def test_gpus_keep_their_names_and_state_over_a_restart_and_differ_between_nodes(
    gpus: Path, tmp_path: Path, nvml_library: Path
) -> None:
    first = make_gpus(gpus, "node-a", 3, A100, nvml_library)
    open_shim(gpus).set(0, locked_mhz=1200)
    assert make_gpus(gpus, "node-a", 3, A100, nvml_library) == first
    assert [values["locked_mhz"] for values in describe(gpus).values()] == [1200, 0, 0]
    fewer = make_gpus(gpus, "node-a", 2, A100, nvml_library).uuids
    assert fewer == first.uuids[:2] == tuple(describe(gpus))
    assert not set(fewer) & set(make_gpus(tmp_path / "other", "node-b", 3, A100, nvml_library).uuids)
    (gpus / "nvml-state").write_bytes(b"cut short")
    make_gpus(gpus, "node-a", 2, A100, nvml_library)
    assert [values["locked_mhz"] for values in describe(gpus).values()] == [0, 0]


def test_the_heartbeat_stops_with_the_kubelet(kubelet: PluginRegistry, tmp_path: Path) -> None:
    stop, beat = threading.Event(), tmp_path / "beat"
    thread = threading.Thread(target=offer_gpus, args=(kubelet.folder, (), tmp_path, stop, beat))
    thread.start()
    try:
        eventually(beat.exists)
        kubelet.stop()
        socket = kubelet.folder / "perseus-simulated-gpus.sock"
        socket.unlink()
        eventually(socket.exists)
        beat.unlink()
        assert not beat.exists()
    finally:
        stop.set()
        thread.join(PATIENCE_S)
