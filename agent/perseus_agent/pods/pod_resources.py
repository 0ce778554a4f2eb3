"""Which GPUs the kubelet gave to a pod: the PodResources API, read only, behind a small cache.

The kubelet knows pods by namespace and name. While it does not answer, its last good answer is used, as long as that is
not too old; a pod that this answer does not name is then unknown, which is an error and never an empty list. A device
that cannot be driven for one pod alone (a MIG slice, a shared replica) is named with the reason.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import grpc

from perseus_agent.errors import KubeletUnavailable
from perseus_agent.pods.gpu_names import GpuNames, Undrivable
from perseus_core import keys
from perseus_proto.podresources import podresources_pb2 as messages
from perseus_proto.podresources import podresources_pb2_grpc as stubs
from perseus_runtime import direct

MIN_INTERVAL_S: Final = 0.2
"""The kubelet allows all its clients together 100 calls a second, in bursts of 10."""
STALE_AFTER_S: Final = 600.0
"""How long the last good answer is used: longer than a kubelet's restart or upgrade, in which it starts no pods."""
CALL_TIMEOUT_S: Final = 2.0
MAX_ANSWER_BYTES: Final = 16 * 2**20  # the kubelet's own limit
NOTHING_PUBLISHED: Final[Mapping[str, str]] = {}

_RESOURCE: Final = re.compile(r"nvidia\.com/(gpu(\.shared)?|mig-[\w.\-]+)")
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_ANSWER_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    direct.GRPC,
)


@dataclass(frozen=True)
class Allocation:
    """What one pod holds."""

    gpu_uuids: tuple[str, ...]
    """Whole GPUs that are this pod's alone, sorted."""
    undrivable: Mapping[str, Undrivable]
    """The other NVIDIA devices, by their name in Kubernetes."""
    containers: Mapping[str, frozenset[str]] = field(default_factory=dict, compare=False)
    """GPUs and names of devices that each container of the pod holds."""

    def of_container(self, name: str) -> Allocation:
        """What one container of the pod holds."""
        devices = self.containers.get(name, frozenset())
        undrivable = {device: why for device, why in self.undrivable.items() if device in devices}
        return Allocation(tuple(uuid for uuid in self.gpu_uuids if uuid in devices), undrivable)


class PodResources:
    """The node's kubelet. Any thread may call it; one at a time waits for the kubelet, for ``CALL_TIMEOUT_S`` at
    most."""

    def __init__(
        self,
        socket_path: str,
        *,
        names: GpuNames | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Does not connect yet.

        Args:
            socket_path: the kubelet's socket; mount its folder, as a restart makes a new socket.
            names: of the node's GPUs, by those who do not call them by their UUIDs.
            clock_s: monotonic seconds.
        """
        self._channel = grpc.insecure_channel(f"unix://{socket_path}", options=_OPTIONS)
        self._stub = stubs.PodResourcesListerStub(self._channel)
        self._names = names or GpuNames()
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._listed: Sequence[messages.PodResources] = ()
        self._allocated: dict[frozenset[tuple[str, str]], dict[tuple[str, str], Allocation]] = {}
        """Of all pods, by what is published of their devices: two leases may know different slices."""
        self._answered_s: float | None = None
        self._asked_s: float | None = None
        self._problem = "it has not been queried yet"

    def allocation(
        self, namespace: str, name: str, published: Mapping[str, str] = NOTHING_PUBLISHED
    ) -> Allocation | None:
        """What the kubelet gave to a pod; None if it knows no such pod.

        Args:
            namespace: of the pod.
            name: of the pod.
            published: UUIDs of devices by claims, by ``pool/device``, as their driver has published them.

        Raises:
            KubeletUnavailable: it does not answer, and its last good answer is too old or does not name the pod.
        """
        with self._lock:
            now_s = self._clock_s()
            if self._asked_s is None or now_s - self._asked_s >= MIN_INTERVAL_S:
                self._asked_s = now_s
                self._query(now_s)
            current = self._answered_s is not None and self._answered_s == self._asked_s
            allocation = self._allocations(published).get((namespace, name))
            if current or (
                allocation is not None and self._answered_s is not None and now_s - self._answered_s <= STALE_AFTER_S
            ):
                return allocation
        raise KubeletUnavailable(f"the devices of pod {namespace}/{name} are unknown: the kubelet: {self._problem}")

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _query(self, now_s: float) -> None:
        try:
            answer = self._stub.List(messages.ListPodResourcesRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.RpcError as error:
            self._problem = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
            return
        self._listed = answer.pod_resources
        self._allocated.clear()
        self._answered_s = now_s

    def _allocations(self, published: Mapping[str, str]) -> dict[tuple[str, str], Allocation]:
        key = frozenset(published.items())
        if key not in self._allocated:
            by_minor, by_index = self._names.by_minor, self._names.by_index
            self._allocated[key] = _allocations(self._listed, by_minor, by_index, published)
        return self._allocated[key]


def _allocations(
    pods: Iterable[messages.PodResources],
    by_minor: Mapping[str, str],
    by_index: Mapping[str, str] = NOTHING_PUBLISHED,
    published: Mapping[str, str] = NOTHING_PUBLISHED,
) -> dict[tuple[str, str], Allocation]:
    names = GpuNames(by_minor, by_index)
    held: dict[tuple[str, str], dict[str, str | Undrivable]] = {}
    owned: dict[tuple[str, str], dict[str, frozenset[str]]] = {}
    for pod in pods:
        of_pod = held.setdefault((pod.namespace, pod.name), {})
        for container in pod.containers:
            devices: dict[str, str | Undrivable] = {}
            for group in container.devices:
                if _RESOURCE.fullmatch(group.resource_name):
                    devices.update(
                        (device_id, names.of_plugin(group.resource_name, device_id)) for device_id in group.device_ids
                    )
            for claim in container.dynamic_resources:
                for device in claim.claim_resources:
                    if device.driver_name == keys.DRA_DRIVER:
                        device_id = f"{device.pool_name}/{device.device_name}"
                        devices[device_id] = names.of_dra(device.device_name, published.get(device_id))
            of_pod.update(devices)
            container_devices = frozenset(devices) | {uuid for uuid in devices.values() if isinstance(uuid, str)}
            owned.setdefault((pod.namespace, pod.name), {})[container.name] = container_devices
    # A claim may be shared between pods, and then so is its GPU; two may also hold one GPU under two names.
    holders = Counter(gpu for devices in held.values() for gpu in {*devices.values()} if isinstance(gpu, str))
    allocations = {}
    for key, devices in held.items():
        undrivable = {
            device: verdict if isinstance(verdict, Undrivable) else Undrivable.SEVERAL
            for device, verdict in devices.items()
            if isinstance(verdict, Undrivable) or holders[verdict] > 1
        }
        uuids = {uuid for device, uuid in devices.items() if device not in undrivable and isinstance(uuid, str)}
        allocations[key] = Allocation(tuple(sorted(uuids)), undrivable, owned.get(key, {}))
    return allocations
