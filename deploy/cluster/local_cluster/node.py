"""A node: its files and the command lines of containerd, kubelet and kube-proxy.

A node has its own /run, /var/lib and /var/log, so that programs find everything at the usual paths. It has its own
kubeconfig, so that the API server lets it read only its own pods.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster import images, preflight
from local_cluster.init import INSIDE
from local_cluster.machine import Machine
from local_cluster.network import Network
from perseus_sim.cluster.control_plane import kubeconfig, write_private
from perseus_sim.cluster.pki import Authority

SANDBOX_IMAGE = "localhost/pause:1"
CONTAINERD, KUBELET, PROXY = "containerd", "kubelet", "kube-proxy"


@dataclass(frozen=True)
class Node:
    """One node, with what its files are made from."""

    machine: Machine
    number: int
    assets: Path
    network: Network

    @property
    def address(self) -> str:
        return self.network.node.format(self.number)

    def write(self, *, cgroup: str, snapshotter: str) -> None:
        """Write the node's configuration files, all except those that hold keys.

        Args:
            cgroup: the kubelet's ``cgroupRoot``.
            snapshotter: containerd's snapshotter, ``overlayfs`` or ``native``.
        """
        folder = self.machine.folder
        (folder / "cni").mkdir(parents=True, exist_ok=True)
        for name, content in {
            "cni/10-pods.conflist": json.dumps(self._pod_network()),
            "containerd.toml": self._containerd(snapshotter),
            "kubelet.json": json.dumps(self._kubelet(cgroup)),
            "kube-proxy.json": json.dumps(self._proxy()),
            "resolv.conf": "",  # empty: the cluster has no way out, so only its own names can be resolved
        }.items():
            (folder / name).write_text(content, encoding="utf-8")

    def write_credentials(self, authority: Authority, server: str) -> None:
        """Write the certificates and kubeconfigs with which kubelet and kube-proxy authenticate to the API server."""
        folder, name = self.machine.folder, self.machine.name
        folder.mkdir(parents=True, exist_ok=True)
        kubelet = authority.issue(f"system:node:{name}", organization="system:nodes")
        serving = authority.issue(f"system:node:{name}", organization="system:nodes", hosts=(name, self.address))
        for file, content in {
            "kubelet.kubeconfig": kubeconfig(server, authority, kubelet),
            "kubelet.crt": serving.certificate,
            "kubelet.key": serving.key,
            "kube-proxy.kubeconfig": kubeconfig(server, authority, authority.issue("system:kube-proxy")),
            "ca.crt": authority.certificate,
        }.items():
            write_private(folder / file, content)

    def command_lines(self) -> dict[str, list[str]]:
        """Return the command lines of the node's processes, in the order in which they start."""
        return {
            CONTAINERD: [
                str(self.assets / CONTAINERD),
                f"--config={self._inside('containerd.toml')}",
            ],
            KUBELET: [
                str(self.assets / KUBELET),
                f"--config={self._inside('kubelet.json')}",
                f"--kubeconfig={self._inside('kubelet.kubeconfig')}",
                f"--hostname-override={self.machine.name}",
                f"--node-ip={self.address}",
            ],
            PROXY: [str(self.assets / PROXY), f"--config={self._inside('kube-proxy.json')}"],
        }

    def _inside(self, name: str) -> str:
        return str(INSIDE / self.machine.name / name)

    def _pod_network(self) -> dict[str, Any]:
        ranges, routes = [[{"subnet": self.network.pods.format(self.number)}]], [{"dst": self.network.everywhere}]
        addresses = {"type": "host-local", "ranges": ranges, "routes": routes, "dataDir": "/run/cni"}
        plugins = [{"type": "ptp", "ipam": addresses}, {"type": "portmap", "capabilities": {"portMappings": True}}]
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}

    def _containerd(self, snapshotter: str) -> str:
        return f"""version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "{images.SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{SANDBOX_IMAGE}"
  disable_apparmor = true
  restrict_oom_score_adj = true  # this process may lack CAP_SYS_RESOURCE
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{preflight.plugins()}"
    conf_dir = "{self._inside("cni")}"
"""

    def _kubelet(self, cgroup: str) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "containerRuntimeEndpoint": f"unix://{images.SOCKET}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": cgroup,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            # The disk belongs to the outer machine: how full it is says nothing about the cluster.
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "0%",
                "nodefs.inodesFree": "0%",
                "imagefs.available": "0%",
                "imagefs.inodesFree": "0%",
            },
            "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},  # tests kill containers often
            "imageGCHighThresholdPercent": 100,  # loaded images cannot be pulled again
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": self._inside("ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": self._inside("kubelet.crt"),
            "tlsPrivateKeyFile": self._inside("kubelet.key"),
            "clusterDNS": [self.network.dns],
            "clusterDomain": "cluster.local",
            "resolvConf": self._inside("resolv.conf"),
            "syncFrequency": "2s",  # the delay until a changed Secret arrives in a pod
            "nodeStatusReportFrequency": "10s",
            "nodeStatusUpdateFrequency": "5s",
        }

    def _proxy(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clusterCIDR": self.network.all_pods,
            "hostnameOverride": self.machine.name,
            "clientConnection": {"kubeconfig": self._inside("kube-proxy.kubeconfig")},
            # Limits of connection tracking apply to the whole kernel: do not change them.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
