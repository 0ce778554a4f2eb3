"""The kubelet's interfaces on a simulated node: a real PodResources server on a Unix socket, and a proc tree beside it.

The agent's production code for identity and allocation runs against both unchanged. Pods are admitted with their GPUs,
processes are placed in pods; nothing is scheduled or started here.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc

from perseus_proto.podresources import podresources_pb2 as messages
from perseus_proto.podresources import podresources_pb2_grpc as stubs

GPU_RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class AdmittedPod:
    """One pod on the node."""

    uid: str
    namespace: str
    name: str
    gpu_uuids: tuple[str, ...]


class KubeletDouble(stubs.PodResourcesListerServicer):
    """One node's kubelet, as far as an agent sees it."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "kubelet.sock"
        self.proc_root = folder / "proc"
        self.proc_root.mkdir(parents=True, exist_ok=True)
        self._pods: dict[str, AdmittedPod] = {}
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def start(self) -> None:
        """Serve; also again after ``stop``, as a kubelet that was restarted."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(max_workers=1, thread_name_prefix="kubelet"))
        stubs.add_PodResourcesListerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        """Go away: an agent then gets no answer."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def List(  # noqa: N802 - the kubelet's name
        self, request: messages.ListPodResourcesRequest, context: grpc.ServicerContext
    ) -> messages.ListPodResourcesResponse:
        """Every pod and its devices."""
        del request, context
        with self._lock:
            pods = list(self._pods.values())
        return messages.ListPodResourcesResponse(
            pod_resources=[
                messages.PodResources(
                    name=pod.name,
                    namespace=pod.namespace,
                    containers=[
                        messages.ContainerResources(
                            name="trainer",
                            devices=[
                                messages.ContainerDevices(resource_name=GPU_RESOURCE, device_ids=list(pod.gpu_uuids))
                            ],
                        )
                    ],
                )
                for pod in pods
            ]
        )

    def admit(self, pod: AdmittedPod) -> None:
        """The pod now runs on this node and holds its GPUs.

        Raises:
            ValueError: another pod holds one of them.
        """
        with self._lock:
            for other in self._pods.values():
                taken = set(other.gpu_uuids) & set(pod.gpu_uuids)
                if taken and other.uid != pod.uid:
                    raise ValueError(f"{sorted(taken)} belong to pod {other.namespace}/{other.name}")
            self._pods[pod.uid] = pod

    def remove(self, uid: str) -> None:
        """The pod has left the node."""
        with self._lock:
            self._pods.pop(uid, None)

    def place(self, pids: Sequence[int], pod_uid: str) -> None:
        """Record that processes run in the pod: their control group as systemd and containerd name it.

        ``stat`` is the real one, so that a process that has ended is seen to have ended.
        """
        slice_name = f"kubepods-besteffort-pod{pod_uid.replace('-', '_')}.slice"
        container = hashlib.sha256(pod_uid.encode()).hexdigest()
        path = f"/kubepods.slice/kubepods-besteffort.slice/{slice_name}/cri-containerd-{container}.scope"
        for pid in pids:
            folder = self.proc_root / str(pid)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / "cgroup").write_text(f"0::{path}\n")
            (folder / "stat").symlink_to(f"/proc/{pid}/stat")
