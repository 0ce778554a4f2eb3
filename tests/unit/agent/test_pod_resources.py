"""The kubelet's PodResources, asked by real gRPC over a Unix socket: who holds which GPU, and what outages mean."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.waiting import eventually

from perseus_agent.devices.base import DeviceIdentity
from perseus_agent.errors import KubeletUnavailable, PeerRefused
from perseus_agent.node.processes import choose_gpu
from perseus_agent.pods.gpu_names import GpuNames, Undrivable
from perseus_agent.pods.pod_resources import MIN_INTERVAL_S, STALE_AFTER_S, Allocation, PodResources
from perseus_operator.nodes.named_gpus import named_gpus
from perseus_operator.objects.values import Pod
from perseus_proto.podresources import podresources_pb2 as messages
from perseus_proto.podresources import podresources_pb2_grpc as stubs

GPU = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(4)]
MIG = "MIG-00000000-1111-2222-3333-444444444444"


class Kubelet(stubs.PodResourcesListerServicer):
    """Answers with ``pods``, or fails with ``error``."""

    def __init__(self) -> None:
        self.pods: list[messages.PodResources] = []
        self.error: grpc.StatusCode | None = None
        self.calls = 0

    def List(self, request: Any, context: Any) -> messages.ListPodResourcesResponse:
        self.calls += 1
        if self.error is not None:
            context.abort(self.error, "not now")
        return messages.ListPodResourcesResponse(pod_resources=self.pods)


def names_of(*index_and_minor: tuple[int | None, int | None]) -> GpuNames:
    """Of a node whose GPUs have these NVML indices and minor numbers."""
    return GpuNames.of_node(
        DeviceIdentity(GPU[number], "model", (), minor_number=minor, nvml_index=index)
        for number, (index, minor) in enumerate(index_and_minor)
    )


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def start(kubelet: Kubelet, path: Path) -> grpc.Server:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    stubs.add_PodResourcesListerServicer_to_server(kubelet, server)
    server.add_insecure_port(f"unix://{path}")
    server.start()
    return server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


@pytest.fixture
def kubelet(path: Path) -> Iterator[Kubelet]:
    kubelet = Kubelet()
    server = start(kubelet, path)
    yield kubelet
    server.stop(0).wait()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def resources(path: Path, clock: Clock) -> Iterator[PodResources]:
    resources = PodResources(str(path), names=names_of((0, 0), (1, 1)), clock_s=clock)
    yield resources
    resources.close()


def pod(
    name: str,
    *containers: dict[str, list[str]],
    namespace: str = "training",
    claims: list[tuple[str, str]] | None = None,
) -> messages.PodResources:
    """A pod whose containers hold ``{resource: device IDs}``, and DRA devices ``(driver, device)``."""
    made = [
        messages.ContainerResources(
            name=f"c{number}",
            devices=[messages.ContainerDevices(resource_name=name, device_ids=ids) for name, ids in container.items()],
        )
        for number, container in enumerate(containers)
    ]
    if claims:
        made.append(
            messages.ContainerResources(
                name="dra",
                dynamic_resources=[
                    messages.DynamicResource(
                        claim_name="claim",
                        claim_namespace=namespace,
                        claim_resources=[
                            messages.ClaimResource(driver_name=driver, pool_name="node-1", device_name=device)
                            for driver, device in claims
                        ],
                    )
                ],
            )
        )
    return messages.PodResources(name=name, namespace=namespace, containers=made)


def test_a_pod_holds_the_gpus_of_all_its_containers_and_nothing_else(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.pods = [
        pod("a", {"nvidia.com/gpu": [GPU[2], GPU[1]], "rdma/hca": ["mlx5_0"]}, {"nvidia.com/gpu": [GPU[1]]}),
        pod("b", {"nvidia.com/gpu": [GPU[0]]}),
        pod("a", {"nvidia.com/gpu": [GPU[3]]}, namespace="other"),
        pod("idle", {"cpu": ["1"]}),
    ]
    assert resources.allocation("training", "a") == Allocation((GPU[1], GPU[2]), {})
    assert resources.allocation("training", "b") == Allocation((GPU[0],), {})
    assert resources.allocation("training", "idle") == Allocation((), {})
    assert resources.allocation("training", "nobody") is None


def test_each_container_holds_what_it_was_given(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.pods = [
        pod(
            "a",
            {"nvidia.com/gpu": [GPU[2], MIG]},
            {"nvidia.com/gpu": [GPU[3]]},
            {},
            claims=[("gpu.nvidia.com", "gpu-1")],
        )
    ]
    found = resources.allocation("training", "a")
    assert found is not None
    assert found.of_container("c0") == Allocation((GPU[2],), {MIG: Undrivable.MIG})
    assert found.of_container("c1") == Allocation((GPU[3],), {})
    assert found.of_container("dra") == Allocation((GPU[1],), {})
    assert found.of_container("c2") == found.of_container("no such") == Allocation((), {})


@pytest.mark.parametrize(
    ("resource", "device", "reason"),
    [
        ("nvidia.com/gpu", f"{GPU[0]}::3", Undrivable.SHARED),
        ("nvidia.com/gpu.shared", f"{GPU[0]}::0", Undrivable.SHARED),
        ("nvidia.com/gpu.shared", GPU[0], Undrivable.SHARED),
        ("nvidia.com/gpu", MIG, Undrivable.MIG),
        ("nvidia.com/mig-1g.10gb", MIG, Undrivable.MIG),
        ("nvidia.com/mig-1g.10gb", f"{MIG}::1", Undrivable.MIG),
        ("nvidia.com/gpu", "nvidia7", Undrivable.UNRESOLVED),
        ("nvidia.com/gpu", "0", Undrivable.UNRESOLVED),
        ("nvidia.com/gpu", "nvidia0/gi1", Undrivable.MIG),
        ("nvidia.com/gpu", "nvidia0/vgpu1", Undrivable.SHARED),
        ("nvidia.com/gpu", f"{GPU[0]}-3", Undrivable.UNRESOLVED),  # HAMi's
        ("nvidia.com/gpu", "MIG-GPU-4b3fe9d8/1/0", Undrivable.MIG),
    ],
)
def test_what_is_not_a_whole_gpu_of_the_pods_own_is_named_with_its_reason(
    kubelet: Kubelet, resources: PodResources, resource: str, device: str, reason: Undrivable
) -> None:
    kubelet.pods = [pod("a", {resource: [device]}, {"nvidia.com/gpu": [GPU[1]]})]
    found = resources.allocation("training", "a")
    assert found == Allocation((GPU[1],), {device: reason})


def test_a_gpu_passed_through_to_a_virtual_machine_is_not_driven(kubelet: Kubelet, resources: PodResources) -> None:
    """Source: NVIDIA/kubevirt-gpu-device-plugin names a resource by the board, a device by its group of the IOMMU."""
    kubelet.pods = [pod("a", {"nvidia.com/GH100_H100_PCIE": ["34"]}, {"nvidia.com/gpu": [GPU[1]]})]
    assert resources.allocation("training", "a") == Allocation((GPU[1],), {})


def test_a_gpu_of_two_pods_is_neithers(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.pods = [pod("a", {"nvidia.com/gpu": [GPU[0], GPU[1]]}), pod("b", {"nvidia.com/gpu": [GPU[0]]})]
    assert resources.allocation("training", "a") == Allocation((GPU[1],), {GPU[0]: Undrivable.SEVERAL})
    assert resources.allocation("training", "b") == Allocation((), {GPU[0]: Undrivable.SEVERAL})


def test_devices_of_dynamic_resource_allocation(kubelet: Kubelet, resources: PodResources) -> None:
    nvidia = "gpu.nvidia.com"
    kubelet.pods = [
        pod("whole", claims=[(nvidia, "gpu-1"), ("nic.example.com", "nic-0")]),
        pod("unknown", claims=[(nvidia, "gpu-7")]),
        pod("part", claims=[(nvidia, "gpu-0-mig-1g5gb-19-4")]),
        pod("shared-1", claims=[(nvidia, "gpu-0")]),
        pod("shared-2", claims=[(nvidia, "gpu-0")]),
    ]
    assert resources.allocation("training", "whole") == Allocation((GPU[1],), {})
    for name, device, reason in (
        ("unknown", "node-1/gpu-7", Undrivable.UNRESOLVED),
        ("part", "node-1/gpu-0-mig-1g5gb-19-4", Undrivable.MIG),
        ("shared-1", "node-1/gpu-0", Undrivable.SEVERAL),
    ):
        assert resources.allocation("training", name) == Allocation((), {device: reason})


def test_gke_names_gpus_by_their_minor_numbers(path: Path, kubelet: Kubelet, clock: Clock) -> None:
    """Source: NVIDIA/gpu-monitoring-tools issue 160, NVIDIA/dcgm-exporter issue 342."""
    resources = PodResources(str(path), names=names_of((0, 1), (1, 0)), clock_s=clock)
    kubelet.pods = [pod("a", {"nvidia.com/gpu": ["nvidia0"]})]
    assert resources.allocation("training", "a") == Allocation((GPU[1],), {})
    resources.close()


def test_a_number_that_means_two_gpus_is_nobodys(path: Path, kubelet: Kubelet, clock: Clock) -> None:
    """NVIDIA's DRA driver named GPUs by NVML's index before 25.8, and names them by minor number since.

    Source: kubernetes-sigs/dra-driver-nvidia-gpu issue 427; google/gvisor issue 9389, where the two differ.
    """
    resources = PodResources(str(path), names=names_of((0, 3), (1, 1), (2, 0)), clock_s=clock)
    names = ("gpu-0", "gpu-1", "gpu-2", "gpu-3", "gpu-4")
    kubelet.pods = [pod(name, claims=[("gpu.nvidia.com", name)]) for name in names]
    found = [resources.allocation("training", name) for name in names]
    ambiguous = [Allocation((), {f"node-1/{name}": Undrivable.AMBIGUOUS}) for name in names]
    unknown = Allocation((), {"node-1/gpu-4": Undrivable.UNRESOLVED})
    assert found == [ambiguous[0], Allocation((GPU[1],), {}), ambiguous[2], ambiguous[3], unknown]
    with pytest.raises(PeerRefused, match=r"node-1/gpu-0 is one GPU to versions .* before 25\.8"):
        choose_gpu(found[0], "", GPU)
    with pytest.raises(PeerRefused, match="not a GPU of this container"):
        choose_gpu(found[0], GPU[0], GPU)  # what a process says of itself decides nothing
    resources.close()


def test_a_published_uuid_decides_between_the_two_gpus_that_a_name_can_mean(
    path: Path, kubelet: Kubelet, clock: Clock
) -> None:
    resources = PodResources(str(path), names=names_of((0, 3), (1, 1), (2, 0)), clock_s=clock)
    kubelet.pods = [pod(name, claims=[("gpu.nvidia.com", name)]) for name in ("gpu-0", "gpu-1", "gpu-2", "gpu-4")]

    def found(name: str, number: int, pool: str = "node-1") -> Allocation | None:
        return resources.allocation("training", name, {f"{pool}/{name}": GPU[number]})

    assert found("gpu-0", 0) == Allocation((GPU[0],), {}), "named by a driver that counts by index"
    assert found("gpu-0", 2) == Allocation((GPU[2],), {}), "or by minor number"
    assert found("gpu-2", 2) == Allocation((GPU[2],), {}), "though no GPU has that minor number"
    for name, number in (("gpu-0", 1), ("gpu-1", 0), ("gpu-2", 0), ("gpu-0", 3)):
        contradicted = Allocation((), {f"node-1/{name}": Undrivable.CONTRADICTED})
        assert found(name, number) == contradicted, "a UUID that the name cannot mean is not believed"
    assert found("gpu-4", 0) == Allocation((), {"node-1/gpu-4": Undrivable.UNRESOLVED})
    assert found("gpu-0", 0, pool="another") == Allocation((), {"node-1/gpu-0": Undrivable.AMBIGUOUS})
    assert resources.allocation("training", "gpu-0") == Allocation((), {"node-1/gpu-0": Undrivable.AMBIGUOUS})
    resources.close()


def test_what_is_published_shows_that_two_pods_share_a_gpu(path: Path, kubelet: Kubelet, clock: Clock) -> None:
    """One by a claim, whose name alone would not say so, and one by the device plugin."""
    resources = PodResources(str(path), names=names_of((0, 1), (1, 0)), clock_s=clock)
    kubelet.pods = [pod("a", {"nvidia.com/gpu": [GPU[1]]}), pod("b", claims=[("gpu.nvidia.com", "gpu-0")])]
    published = {"node-1/gpu-0": GPU[1]}
    assert resources.allocation("training", "a", published) == Allocation((), {GPU[1]: Undrivable.SEVERAL})
    assert resources.allocation("training", "b", published) == Allocation((), {"node-1/gpu-0": Undrivable.SEVERAL})
    resources.close()


def test_a_kubelet_that_restarts_costs_a_new_lease_its_gpu_and_never_means_another(path: Path, clock: Clock) -> None:
    """A driver publishes its slice again then, so it is younger than the pods: what they hold may be of a version
    before. A lease that stands keeps what came with it."""

    def sent(written: str) -> dict[str, str]:
        """With a lease that is acquired, of a pod as old as the first slice and a minute."""
        device = {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}, "uuid": {"string": GPU[0]}}}
        metadata = {"name": "s", "managedFields": [{"time": written}]}
        pool = {"name": "node-1", "generation": 1}
        slices = [{"metadata": metadata, "spec": {"driver": "gpu.nvidia.com", "pool": pool, "devices": [device]}}]
        held = Pod("u", "training", "a", "node-1", "job", {}, created="2026-01-01T00:01:00Z", claims_devices=True)
        return {f"{gpu.pool}/{gpu.device}": gpu.uuid for gpu in named_gpus(slices, [held])}

    kubelet, stands = Kubelet(), sent("2026-01-01T00:00:00Z")
    kubelet.pods = [pod("a", claims=[("gpu.nvidia.com", "gpu-0")])]
    resources = PodResources(str(path), names=names_of((0, 3), (1, 1), (2, 0)), clock_s=clock)
    server = start(kubelet, path)
    driven, nobodys = Allocation((GPU[0],), {}), Allocation((), {"node-1/gpu-0": Undrivable.AMBIGUOUS})
    assert resources.allocation("training", "a", stands) == driven
    server.stop(0).wait()
    clock.now_s += MIN_INTERVAL_S
    assert resources.allocation("training", "a", stands) == driven, "by the last answer"
    anew = sent("2026-01-01T00:02:00Z")
    assert resources.allocation("training", "a", anew) == nobodys
    clock.now_s += STALE_AFTER_S
    with pytest.raises(KubeletUnavailable):
        resources.allocation("training", "a", stands)
    server = start(kubelet, path)

    def again() -> Allocation | None:
        clock.now_s += MIN_INTERVAL_S
        with contextlib.suppress(KubeletUnavailable):
            return resources.allocation("training", "a", stands)
        return None

    eventually(lambda: again() == driven)
    assert resources.allocation("training", "a", anew) == nobodys
    kubelet.pods = [pod("b", claims=[("gpu.nvidia.com", "gpu-0")])]  # the device went to another pod meanwhile
    clock.now_s += MIN_INTERVAL_S
    assert resources.allocation("training", "a", stands) is None
    resources.close()
    server.stop(0).wait()


def test_a_gpu_under_two_names_is_shared(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.pods = [pod("a", {"nvidia.com/gpu": [GPU[0]]}), pod("b", claims=[("gpu.nvidia.com", "gpu-0")])]
    assert resources.allocation("training", "a") == Allocation((), {GPU[0]: Undrivable.SEVERAL})
    assert resources.allocation("training", "b") == Allocation((), {"node-1/gpu-0": Undrivable.SEVERAL})


def test_many_questions_are_one_call(kubelet: Kubelet, resources: PodResources, clock: Clock) -> None:
    kubelet.pods = [pod("a", {"nvidia.com/gpu": [GPU[0]]})]
    askers = [threading.Thread(target=resources.allocation, args=("training", "a")) for _ in range(20)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert resources.allocation("training", "nobody") is None
    assert kubelet.calls == 1
    clock.now_s += MIN_INTERVAL_S
    kubelet.pods.append(pod("late", {"nvidia.com/gpu": [GPU[1]]}))
    assert resources.allocation("training", "late") == Allocation((GPU[1],), {})
    assert kubelet.calls == 2


def test_in_an_outage_the_last_good_answer_stands_then_nothing_is_known(
    kubelet: Kubelet, resources: PodResources, clock: Clock
) -> None:
    kubelet.pods = [pod("a", {"nvidia.com/gpu": [GPU[0]]})]
    known = resources.allocation("training", "a")
    kubelet.pods = []
    kubelet.error = grpc.StatusCode.RESOURCE_EXHAUSTED
    clock.now_s += MIN_INTERVAL_S
    assert resources.allocation("training", "a") == known
    with pytest.raises(KubeletUnavailable, match="training/new are unknown: the kubelet: RESOURCE_EXHAUSTED: not now"):
        resources.allocation("training", "new")  # not: it has none
    clock.now_s += STALE_AFTER_S
    with pytest.raises(KubeletUnavailable):
        resources.allocation("training", "a")
    kubelet.error = None
    clock.now_s += MIN_INTERVAL_S
    assert resources.allocation("training", "a") is None  # now it is known that it is gone


def test_a_failing_kubelet_is_not_asked_more_often(kubelet: Kubelet, resources: PodResources) -> None:
    kubelet.error = grpc.StatusCode.INTERNAL
    for _ in range(20):
        with pytest.raises(KubeletUnavailable, match="INTERNAL"):
            resources.allocation("training", "a")
    assert kubelet.calls == 1


def test_a_kubelet_that_was_never_there_makes_all_pods_unknown(resources: PodResources) -> None:
    with pytest.raises(KubeletUnavailable, match="UNAVAILABLE"):
        resources.allocation("training", "a")


def test_a_kubelet_that_restarts_is_found_again(path: Path, resources: PodResources, clock: Clock) -> None:
    first, second = Kubelet(), Kubelet()
    server = start(first, path)
    first.pods = [pod("a", {"nvidia.com/gpu": [GPU[0]]})]
    assert resources.allocation("training", "a") is not None
    server.stop(0).wait()
    path.unlink(missing_ok=True)
    server = start(second, path)
    second.pods = [pod("b", {"nvidia.com/gpu": [GPU[0]]})]
    try:

        def found() -> Allocation | None:
            clock.now_s += MIN_INTERVAL_S
            with contextlib.suppress(KubeletUnavailable):
                return resources.allocation("training", "b")
            return None

        # gRPC's own back-off runs on the real clock.
        assert eventually(found, "the new kubelet was not found", every_s=0.05) == Allocation((GPU[0],), {})
    finally:
        server.stop(0).wait()


def test_fields_that_are_not_declared_here_are_skipped(kubelet: Kubelet, resources: PodResources) -> None:
    """cpu_ids, memory and topology of a real answer: fields 4 and 5 of a pod, 3 and 4 of a container, 3 of devices."""
    answer = messages.ListPodResourcesResponse(pod_resources=[pod("a", {"nvidia.com/gpu": [GPU[0]]})])
    raw = answer.pod_resources[0].SerializeToString() + bytes([0x22, 2, 1, 2, 0x2A, 0])
    kubelet.pods = [messages.PodResources.FromString(raw)]
    assert resources.allocation("training", "a") == Allocation((GPU[0],), {})
