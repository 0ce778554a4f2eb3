"""Simulated GPUs as dynamic resources: over the kubelet's sockets and the API server's HTTPS, with doubles of both."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.doubles.claims import ClaimKubelet, ClaimServer
from tests.waiting import PATIENCE_S, eventually

from perseus_agent.devices.nvml import NvmlDevices
from perseus_sim.gpus import dynamic_resources
from perseus_sim.gpus.cluster_api import ApiError, ClusterApi
from perseus_sim.gpus.dynamic_resources import CDI_KIND, DRIVER, SLICES, Folders, offer_claims
from perseus_sim.gpus.model import MODELS
from perseus_sim.gpus.nvml_shim import ENV_STATE
from perseus_sim.gpus.offer import make_gpus
from perseus_sim.gpus.shim_gpu import IN_CONTAINER, ShimGpus, granted

SLICE = f"{SLICES}/node-a-{DRIVER}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ClaimServer]:
    folder = tmp_path / "account"
    folder.mkdir()
    with ClaimServer(folder) as server:
        yield server


@pytest.fixture
def gpus(tmp_path: Path, nvml_library: Path) -> ShimGpus:
    return make_gpus(tmp_path / "gpus", "node-a", 3, MODELS["a100"], nvml_library)


@pytest.fixture
def kubelet(
    tmp_path: Path, server: ClaimServer, gpus: ShimGpus, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ClaimKubelet]:
    """A kubelet for which a driver serves."""
    monkeypatch.setattr(dynamic_resources, "CHECK_S", 0.05)
    stop, kubelet = threading.Event(), ClaimKubelet(tmp_path / "kubelet")
    folders = Folders(kubelet.folder, tmp_path / "plugins" / DRIVER, tmp_path / "cdi")
    arguments = (folders, "node-a", gpus, tmp_path / "gpus", stop)
    more = {"heartbeat": tmp_path / "beat", "api": server.api}
    thread = threading.Thread(target=offer_claims, args=arguments, kwargs=more)
    thread.start()
    eventually((kubelet.folder / f"{DRIVER}.sock").exists)
    yield kubelet
    stop.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_container_finds_the_gpus_of_all_its_claims_and_no_others(
    kubelet: ClaimKubelet, server: ClaimServer, gpus: ShimGpus, tmp_path: Path
) -> None:
    info = kubelet.start(DRIVER)
    assert (info.type, info.name, list(info.supported_versions)) == ("DRAPlugin", DRIVER, ["v1.DRAPlugin"])
    one = server.allot("one", "u1", (DRIVER, "node-a", "gpu-2"))
    two = server.allot("two", "u2", (DRIVER, "node-a", "gpu-0"), ("net.example", "node-a", "nic-0"))
    prepared = kubelet.prepare(info.endpoint, one, two)
    assert set(prepared) == {"u1", "u2"}
    assert not any(answer.error for answer in prepared.values())
    devices = [device for answer in prepared.values() for device in answer.devices]
    assert {(d.pool_name, d.device_name, *d.request_names) for d in devices} == {
        ("node-a", "gpu-2", "r0"),
        ("node-a", "gpu-0", "r0"),
    }, "devices of other drivers are theirs"

    [file] = (tmp_path / "cdi").glob("*.json")
    specification = json.loads(file.read_text())
    edits = {f"{CDI_KIND}={each['name']}": each["containerEdits"]["env"] for each in specification["devices"]}
    environment = dict(
        variable.split("=", 1)
        for variables in (
            specification["containerEdits"]["env"],
            *(edits[name] for device in devices for name in device.cdi_device_ids),
        )
        for variable in variables
    )
    [mount] = specification["containerEdits"]["mounts"]
    assert (mount["hostPath"], mount["containerPath"]) == (str(tmp_path / "gpus"), IN_CONTAINER)
    assert granted(environment) == (Path(IN_CONTAINER), tuple(sorted((gpus.uuids[0], gpus.uuids[2]))))
    assert set(kubelet.unprepare(info.endpoint, one, two)) == {"u1", "u2"}


def test_the_published_names_are_those_by_which_the_agent_knows_its_gpus(
    kubelet: ClaimKubelet, server: ClaimServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: SLICE in server.objects)
    spec = server.objects[SLICE]["spec"]
    published = {device["name"]: device["attributes"]["uuid"]["string"] for device in spec["devices"]}
    assert (spec["driver"], spec["nodeName"], spec["pool"]["name"]) == (DRIVER, "node-a", "node-a")
    monkeypatch.setenv(ENV_STATE, str(tmp_path / "gpus" / "nvml-state"))
    driver = NvmlDevices(privileged=lambda: True, energy_check_s=0.0)
    assert {f"gpu-{d.identity.minor_number}": d.identity.uuid for d in driver.devices} == published
    driver.close()


def test_a_slice_that_was_deleted_or_differs_is_published_again(kubelet: ClaimKubelet, server: ClaimServer) -> None:
    eventually(lambda: SLICE in server.objects)
    was = server.objects.pop(SLICE)["spec"]
    eventually(lambda: SLICE in server.objects)
    fewer = {**was, "devices": was["devices"][:1]}
    server.objects[SLICE] = {"metadata": {"name": SLICE.rpartition("/")[2], "resourceVersion": "7"}, "spec": fewer}
    eventually(lambda: len(server.objects[SLICE]["spec"]["devices"]) == 3)
    assert server.objects[SLICE]["spec"]["pool"]["generation"] == was["pool"]["generation"] + 1
    version = server.objects[SLICE]["metadata"]["resourceVersion"]
    kubelet.start(DRIVER)
    eventually((kubelet.folder.parent / "beat").exists)
    assert server.objects[SLICE]["metadata"]["resourceVersion"] == version, "what is right is not written"


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ({"uid": "another", "device": "gpu-0"}, "claim one is another one now"),
        ({"uid": "u1", "device": ""}, "claim one is not allocated"),
        ({"uid": "u1", "device": "gpu-0", "refusal": 403}, "403"),
        ({"uid": "u1", "device": "gpu-0", "refusal": 404}, "404"),
    ],
)
def test_a_claim_that_cannot_be_prepared_says_why(
    kubelet: ClaimKubelet, server: ClaimServer, claim: dict[str, str], why: str
) -> None:
    info = kubelet.start(DRIVER)
    devices = [(DRIVER, "node-a", claim["device"])] if claim["device"] else []
    wanted = server.allot("one", claim["uid"], *devices)
    good = server.allot("good", "u2", (DRIVER, "node-a", "gpu-1"))
    wanted.uid = "u1"
    server.refusal = int(claim.get("refusal", 0))
    prepared = kubelet.prepare(info.endpoint, wanted, good)
    assert why in prepared["u1"].error
    assert not prepared["u1"].devices
    if not server.refusal:
        assert len(prepared["u2"].devices) == 1, "the others are prepared"


def test_the_heartbeat_needs_the_kubelet_and_the_slice(kubelet: ClaimKubelet, server: ClaimServer) -> None:
    beat = kubelet.folder.parent / "beat"
    eventually(lambda: SLICE in server.objects)
    kubelet.refusal = "too old"
    kubelet.start(DRIVER)
    assert not beat.exists()
    kubelet.refusal = ""
    kubelet.start(DRIVER)
    eventually(beat.exists)
    server.refusal = 500

    def stays_away() -> bool:
        beat.unlink(missing_ok=True)
        time.sleep(0.3)
        return not beat.exists()

    eventually(stays_away)
    server.refusal = 0
    eventually(beat.exists)


def test_outside_of_a_pod_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ApiError, match="this is no pod"):
        ClusterApi.of_pod()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert ClusterApi.of_pod().server == "https://[fd00::1]:443"
